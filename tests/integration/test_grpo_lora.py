"""The LoRA recipe as a user runs it: a real vLLM, real torchtune, real processes."""

import json
import subprocess
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from helpers import recipe_runs as runs
from helpers.learners import prompt_groups, single_process_learner
from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.policy import from_config
from torchtune_ext.policy.builder import build_on_meta, build_policy
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.policy.lora import adapted_modules
from torchtune_ext.policy.streaming import streamed_logprobs
from torchtune_ext.sampling import prestart
from torchtune_ext.sampling.engine import Engine, EngineConfig, SamplingConfig
from torchtune_ext.sampling.replica import EngineReplica
from torchtune_ext.training.mismatch import MismatchError, MismatchGate
from torchtune_ext.training.precision import Precision, PrecisionConfig
from torchtune_ext.training.publish import Publisher
from torchtune_ext.training.trained_weights import AdapterConfig, select_trained_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def workspace(lora_workspace):
    return lora_workspace


def run(folder, *args, **kwargs):
    return runs.run(folder, "grpo_lora", *args, config="lora.yaml", **kwargs)


def adapter(folder, name, step=3):
    return load_file(folder / name / "checkpoints" / f"step_{step:06d}" / "adapter_model.safetensors")


def test_grpo_lora_trains_adapters_and_engine_applies_them(workspace):
    lines = runs.metrics(workspace / "reference")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(line["mismatch/mean_abs"] < 1e-5 and line["canary/mean_abs"] < 1e-5 for line in lines[1:])
    assert all(line["canary/adapter_applied"] == pytest.approx(1.0, abs=1e-2) for line in lines[1:])
    tensors = adapter(workspace, "reference")
    assert len(tensors) == 2 * 7 * 2 and any(t.abs().max() > 0 for n, t in tensors.items() if "lora_B" in n)
    assert lines[1]["publish/bytes"] == sum(t.nbytes for t in tensors.values())
    step = workspace / "reference" / "checkpoints" / "step_000003"
    assert sorted(p.name for p in step.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
        "manifest.json",
        "recipe.json",
        "state",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    whole = (workspace / "model" / "model.safetensors").stat().st_size
    assert sum(p.stat().st_size for p in step.rglob("*")) < whole, "a checkpoint holds frozen weights"


@pytest.mark.parametrize("options", [[], ["model.use_dora=True"]], ids=["lora", "dora"])
def test_grpo_lora_merged_sync_trains_identically(workspace, served, options):
    name = f"merged{len(options)}"
    run(workspace, f"output_dir={name}", "adapters.publish=merged", "adapters.save_merged=True", *options, served)
    lines = runs.metrics(workspace / name)
    assert all(line["canary/mean_abs"] < 1e-5 and line["canary/adapter_applied"] > 0.99 for line in lines[1:])
    folder = workspace / name / "checkpoints" / "step_000003" / "merged"
    saved, before = (
        load_file(folder / "model-00001-of-00001.safetensors"),
        load_file(workspace / "model/model.safetensors"),
    )
    assert saved.keys() == before.keys()
    assert torch.equal(saved["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    if not options:
        # the same samples, and so the same adapter but for the rounding of merged weights
        assert lines[1]["reward/mean"] == runs.metrics(workspace / "reference")[1]["reward/mean"]
        scaled = adapter(workspace, name)
        stem = "model.layers.0.mlp.down_proj"
        want = before[f"{stem}.weight"].double() + 2.0 * (
            scaled[f"base_model.model.{stem}.lora_B.weight"].double()
            @ scaled[f"base_model.model.{stem}.lora_A.weight"].double()
        )
        assert (saved[f"{stem}.weight"].double() - want).abs().max() < 1e-6


@pytest.mark.rest
def test_killed_and_resumed_equals_uninterrupted(workspace, lora_served):
    args = ("output_dir=killed", "resume_from_checkpoint=True", lora_served)
    command = runs.command("grpo_lora", *args, config="lora.yaml")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=workspace, env=runs.environment(), start_new_session=True, **quiet)
    runs.wait_for_steps(workspace / "killed", 3, process)
    process.kill()
    process.wait(10)
    run(workspace, *args)
    assert runs.metrics(workspace / "killed") == runs.metrics(workspace / "reference")
    want, result = adapter(workspace, "reference"), adapter(workspace, "killed")
    assert all(torch.equal(want[n], result[n]) for n in want)
    output = run(workspace, *args, "model.lora_rank=8", ok=False)
    assert "belongs to another model" in output and "rank=4" in output and "rank=8" in output, output[-2000:]


@pytest.mark.rest
def test_grpo_lora_two_ranks_equal_one_rank(workspace, lora_served):
    run(workspace, "output_dir=ranks", lora_served, ranks=2)
    one, two = runs.metrics(workspace / "reference"), runs.metrics(workspace / "ranks")
    for a, b in zip(one, two, strict=True):
        assert a.get("reward/mean") == b.get("reward/mean")
        for name in ("loss/total", "optim/grad_norm"):
            if name in a:
                assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-4), (a["step"], name)


def test_grpo_lora_reference_is_model_without_adapter(workspace, lora_served):
    run(workspace, "output_dir=kl", "loss.kl_coef=0.1", "updates_per_step=1", "max_steps=2", lora_served)
    lines = runs.metrics(workspace / "kl")
    assert lines[1]["loss/kl_ref"] == pytest.approx(0.0, abs=1e-9) and lines[2]["loss/kl_ref"] > 1e-7


def test_dropout_is_off_wherever_the_policy_is_compared(workspace, lora_served):
    run(workspace, "output_dir=dropout", "model.lora_dropout=0.3", "updates_per_step=1", "max_steps=2", lora_served)
    lines = runs.metrics(workspace / "dropout")
    assert all(line["mismatch/mean_abs"] < 1e-5 and line["canary/mean_abs"] < 1e-5 for line in lines[1:])
    # The update itself has dropout, so it sees another policy than the proximal one, which is asked without. In the first step
    # all adapters are still zero, and dropout with them.
    assert lines[1]["loss/approx_kl"] < 1e-9 < lines[2]["loss/approx_kl"]


@pytest.mark.parametrize("way", ["adapter", pytest.param("merged", marks=pytest.mark.rest)])
def test_qlora_samples_with_the_weights_that_nf4_left(tmp_path, way):
    """A larger model: NF4 cuts weights into blocks of 64 values, 256 to a group."""
    runs.make_workspace(tmp_path, hidden_size=128, intermediate_size=256)
    config = runs.CONFIG.replace(
        'model_dir: "${model_dir}"}\ntokenizer',
        'model_dir: "${model_dir}", lora_attn_modules: [q_proj, output_proj], apply_lora_to_mlp: true, lora_rank: 4, '
        "quantize_base: true}\ntokenizer",
    )
    (tmp_path / "lora.yaml").write_text(config)
    run(tmp_path, f"output_dir={way}", f"adapters.publish={way}", "max_steps=2")
    lines = runs.metrics(tmp_path / way)
    assert all(line["mismatch/mean_abs"] < 1e-5 and line["canary/adapter_applied"] > 0.99 for line in lines[1:])
    assert json.loads((tmp_path / way / "checkpoints/step_000002/adapter_config.json").read_text())["r"] == 4


def test_canary_detects_engine_without_published_adapter(workspace, tmp_path, monkeypatch):
    """With a young adapter: what the engine then samples from differs by less than `max_mismatch`."""
    source = HFModel(workspace / "model")
    arguments = {"lora_attn_modules": ["q_proj", "v_proj"], "lora_rank": 4}
    make = partial(from_config, str(source.path), **arguments)
    policy = build_policy(make, source, torch.device("cpu"), torch.float32)
    meta = build_on_meta(make)
    trained, limit = select_trained_weights(meta, source, arguments, AdapterConfig()), 0.05
    with torch.no_grad():
        for module in adapted_modules(policy.model).values():
            module.lora_b.weight.normal_(std=1e-3)
    fault = tmp_path / "fault"
    fault.write_text("")
    monkeypatch.setenv("FAULT", str(fault))
    monkeypatch.setattr(prestart, "CLIENT_MODULE", "helpers.faulty_client")
    config = EngineConfig(dtype="float32", max_model_len=128, kv_cache_bytes=1 << 24)
    with Engine(str(source.path), trained.configure_engine(config), str(tmp_path)) as engine:
        engine.start()
        engine.wait_ready(240)
        sampling, learner = SamplingConfig(max_tokens=12), single_process_learner(policy, PolicyLoss())
        prompts = prompt_groups([[1, 2, 3, 4], [5, 6, 7]])
        precision = Precision(PrecisionConfig(), meta, source, "float32", config, torch.device("cpu"), trained.spec)
        agreement = MismatchGate(limit)
        scored = partial(streamed_logprobs, make_model=make, device=torch.device("cpu"), temperature=1.0)
        publisher = Publisher(engine, learner, trained, precision, source, agreement, scored, prompts, sampling)
        first = publisher.publish(0)
        assert first["canary/adapter_applied"] == pytest.approx(1.0, abs=1e-2) and "canary/update_applied" not in first

        def update():
            with torch.no_grad():
                for module in adapted_modules(policy.model).values():
                    module.lora_b.weight.mul_(1.2).add_(1e-4)

        update()
        assert publisher.publish(1)["canary/update_applied"] == pytest.approx(1.0, abs=1e-2)

        async def lie(self):
            return [publisher._published_checksums["adapter"]]

        # version N - 1 in the place of N, under its label, in an engine that lies about what it holds
        update()
        fault.write_text("the last adapter stays")
        with monkeypatch.context() as patch:
            patch.setattr(EngineReplica, "checksums", lie)
            with pytest.raises(
                MismatchError, match="weights: the engine has the new weights but samples with the old ones"
            ):
                publisher.publish(2)
        fault.write_text("the adapter is forgotten")
        with pytest.raises(MismatchError, match="the engine has the adapter but samples without it"):
            publisher.publish(3)
