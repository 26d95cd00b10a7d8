"""`precision:` as a user sets it: real runs of both recipes, a real vLLM that holds the trainer's FP8 blocks."""

import re
import shutil

import pytest
from safetensors.torch import load_file, save_file

from helpers import recipe_runs as runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BFLOAT16 = ("dtype=bfloat16", "engine.dtype=bfloat16", "max_mismatch=auto", "evaluation.task=null")
WIDTHS = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 384}  # keys and values: 64 features
IN_FP8 = 2 * (256 * 256 + 3 * 256 * 384)  # o_proj and the MLP of two layers
ADAPTER = (
    "model.lora_attn_modules=[q_proj,v_proj,output_proj]",
    "model.apply_lora_to_mlp=True",
    "model.lora_rank=4",
    "model.lora_alpha=8",
)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder in which `unified`, a run of two steps in FP8, has ended well."""
    folder = runs.make_workspace(tmp_path_factory.mktemp("fp8"), **WIDTHS)
    runs.run(folder, "grpo_full", "output_dir=unified", "max_steps=2", "precision=fp8_unified", *BFLOAT16)
    return folder


def receipt(folder, name):
    return (folder / name / "fp8.txt").read_text()


def parameters(folder):
    return sum(tensor.numel() for tensor in load_file(folder / "model" / "model.safetensors").values())


def test_unified_trains_and_samples_in_the_same_blocks(workspace):
    lines, text = runs.metrics(workspace / "unified")[1:], receipt(workspace, "unified")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(0 < line["mismatch/mean_abs"] < 0.2 and line["optim/grad_norm"] > 0 for line in lines)
    numbers = parameters(workspace)
    assert all(line["publish/bytes"] == 2 * (numbers - IN_FP8) + IN_FP8 + 4 * IN_FP8 // 128**2 for line in lines)
    assert "8 of 15 linear layers" in text and "2 x o_proj        256 x 256    FP8" in text
    assert re.search(r"2 x k_proj +64 x 256 +bfloat16: 64 out-features: vLLM fuses it", text)
    assert re.search(r"2 x q_proj +256 x 256 +bfloat16: vLLM fuses it with k_proj, which is not in FP8", text)
    assert "GEMMs: reference for fprop, dgrad, wgrad of" in text and "sent after each step" in text


@pytest.mark.rest  # in `make test`: tests/unit/training/test_publish.py
def test_mismatch_gate_passes_update_engine_dtype_cannot_hold(workspace):
    """A file from the hub lies on the grid of bfloat16, and so small an update leaves nearly all of its weights there: the engine
    shows next to nothing of it, and nothing is wrong but the mixture of dtypes, which is said."""
    shutil.copytree(workspace / "model", workspace / "grid")
    file = workspace / "grid" / "model.safetensors"
    save_file({name: w.bfloat16().float() for name, w in load_file(file).items()}, file, metadata={"format": "pt"})
    mixture = ("dtype=float32", "engine.dtype=bfloat16", "optimizer.lr=1e-5", "max_steps=3")
    output = runs.run(workspace, "grpo_full", "output_dir=mixed", "model_dir=grid", *mixture, *BFLOAT16[2:])
    assert "trainer in float32, engine in bfloat16: the engine rounds off" in output
    assert re.search(r"rounding: +[0-9.e-]+ nats in bfloat16; max_mismatch [0-9.]+", output)
    assert (
        output.count("publish/changed_share 0.1") == 1 and "Fix: set engine.dtype=float32, or dtype=bfloat16" in output
    )
    lines = runs.metrics(workspace / "mixed")[1:]
    assert all(0 < line["publish/changed_share"] < 0.2 for line in lines)
    assert [line["step"] for line in lines] == [1, 2, 3], "the gate has let all canaries pass"


@pytest.mark.rest
def test_run_resumes_with_other_precision_and_ranks(workspace):
    """Masters are float32 in each: what was trained in bfloat16 with FP8 in the engine goes on in FP8."""
    args = ("output_dir=resumed", *BFLOAT16)
    runs.run(workspace, "grpo_full", "max_steps=1", "precision=fp8_rollout", *args)
    assert "trainer: no weight in FP8" in receipt(workspace, "resumed")
    runs.run(
        workspace, "grpo_full", "max_steps=2", "precision=fp8_unified", "resume_from_checkpoint=True", *args, ranks=2
    )
    assert "reference for fprop" in (text := receipt(workspace, "resumed")) and "publishing version 1:" in text
    lines = runs.metrics(workspace / "resumed")
    assert [line["step"] for line in lines] == [0, 1, 2] and 0 < lines[-1]["mismatch/mean_abs"] < 0.2


@pytest.mark.rest
def test_fp8_in_the_engine_alone_on_two_ranks(workspace):
    args = ("output_dir=rollout", "precision={flow: fp8_rollout, skip: [down_proj]}", "max_steps=2", *BFLOAT16)
    runs.run(workspace, "grpo_full", *args, ranks=2)
    text = receipt(workspace, "rollout")
    assert "6 of 15 linear layers" in text and "down_proj" in text and "named in precision.skip" in text
    assert "trainer: no weight in FP8, all in bfloat16" in text and "reference for" not in text
    converted = IN_FP8 - 2 * 256 * 384
    want = 2 * (parameters(workspace) - converted) + converted + 4 * converted // 128**2
    assert all(line["publish/bytes"] == want for line in runs.metrics(workspace / "rollout")[1:])


@pytest.mark.rest
@pytest.mark.parametrize(
    ("name", "flow", "publish", "settings"),
    [
        ("adapter", "fp8_unified", "adapter", ()),
        ("merged", "fp8_rollout", "merged", ()),
        (
            "qlora",
            "fp8_rollout",
            "adapter",
            ("model.quantize_base=True", "model.lora_attn_modules=[q_proj,output_proj]"),
        ),
    ],
    ids=["adapter", "merged", "qlora"],
)
def test_adapters_over_a_base_in_fp8(workspace, name, flow, publish, settings):
    args = (
        f"precision={flow}",
        f"adapters.publish={publish}",
        f"output_dir={name}",
        "max_steps=2",
        *BFLOAT16,
        *ADAPTER,
        *settings,
    )
    runs.run(workspace, "grpo_lora", *args)
    assert "8 of 15 linear layers" in receipt(workspace, name)
    assert ("sent once, adapters after each step" in receipt(workspace, name)) == (publish == "adapter")
    lines = runs.metrics(workspace / name)[1:]
    assert all(0 < line["mismatch/mean_abs"] < 0.2 for line in lines)
    whole = 2 * (parameters(workspace) - IN_FP8) + IN_FP8
    assert all((line["publish/bytes"] > whole) == (publish == "merged") for line in lines)
