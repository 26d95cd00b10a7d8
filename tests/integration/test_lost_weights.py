"""Weights that do not arrive stop a run within one publication, though in bfloat16 a small update hides below rounding.

Each recipe runs once, in bfloat16 at a learning rate of 1e-5. Fault after fault is planted between an update and its
publication, healed, and followed by a sound publication, which has to pass.
"""

import pytest

from helpers import recipe_runs as runs

pytest.importorskip("vllm")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# in the trainer: publications that do not reach the engine, and the work of the copied recipe
DRIVE = """
from pathlib import Path

from torchtune_ext.sampling.vllm_backend import ProcessBackend
from torchtune_ext.training.mismatch import MismatchError

FAULT = Path("fault")
FAULT.write_text("none")
load = ProcessBackend.load


async def lose(self, buffers, version):
    if FAULT.read_text() == "lost":
        return 0.0, 0.0
    return await load(self, [] if FAULT.read_text() == "lost under its label" else buffers, version)


ProcessBackend.load = lose


def drive(recipe):
    update = recipe.update

    def update_then_break(updates):
        values = update(updates)
        FAULT.write_text(kind)
        return values

    recipe.update = update_then_break
    for kind in ("none", "lost", "lost under its label", "one tensor old", "all tensors old"):
        FAULT.write_text("none")
        begun, recipe.cfg.max_steps = recipe.step, recipe.step + 2
        try:
            recipe.train()
            outcome = "ended well"
        except MismatchError as error:
            outcome = str(error).replace("\\n", " ")
        print(f"FAULT {kind} | {recipe.step - begun} | {outcome}", flush=True)
        recipe.step += 1
"""

# in the engine's process: tensors of the publication before
LOADER = """
from pathlib import Path

from torchtune_ext.sampling import worker

honest, last = worker.iter_views, {}


def iter_views(memory, manifest):
    fault = Path("fault").read_text()
    for name, tensor in honest(memory, manifest):
        old, last[name] = last.get(name), tensor.clone()
        one = "layers.1.self_attn.v_proj" in name and name.endswith(("lora_B.weight", "v_proj.weight"))
        yield name, old if fault == "all tensors old" or one and fault == "one tensor old" else tensor


worker.iter_views = iter_views


class Loader(worker.WeightLoader):
    pass
"""

WAYS = {
    "full": ("grpo_full", []),
    "adapter": ("grpo_lora", ["adapters.publish=adapter"]),
    "merged": ("grpo_lora", ["adapters.publish=merged"]),
}


@pytest.mark.parametrize("way", ["full", *(pytest.param(way, marks=pytest.mark.rest) for way in ("adapter", "merged"))])
def test_weights_that_do_not_arrive_stop_the_run(repo_root, tmp_path, way):
    recipe, options = WAYS[way]
    runs.make_workspace(tmp_path)
    (tmp_path / "drive.py").write_text(DRIVE)
    (tmp_path / "loader.py").write_text(LOADER)
    source = (repo_root / "recipes" / "grpo.py").read_text()
    driven = source.replace("Recipe, settings))\n\n\nif", "Recipe, settings), __import__('drive').drive)\n\n\nif")
    assert driven != source
    (tmp_path / "driven.py").write_text(driven)
    if recipe == "grpo_lora":
        options = [
            *options,
            "model.lora_attn_modules=[q_proj,v_proj]",
            "model.lora_rank=4",
        ]
    options += [
        "dtype=bfloat16",
        "engine.dtype=bfloat16",
        "max_mismatch=0.05",
        "optimizer.lr=1e-5",
        "evaluation.task=null",
    ]
    options += [
        "engine.extra_args={worker_extension_cls: loader.Loader}",
        "updates_per_step=1",
        "checkpoints.every=100",
    ]
    options += ["prompts_per_step=2", "task.count=8", "max_steps=20"]  # more than all rounds of `drive` together
    output = runs.run(tmp_path, "driven.py", "output_dir=run", *options)
    lines = [line.removeprefix("FAULT ").split(" | ") for line in output.splitlines() if line.startswith("FAULT ")]
    outcomes = {fault: (int(publications), outcome) for fault, publications, outcome in lines}
    assert outcomes.pop("none") == (2, "ended well")
    assert list(outcomes) == ["lost", "lost under its label", "one tensor old", "all tensors old"]
    unseen = {f: (n, text) for f, (n, text) in outcomes.items() if n != 1 or "weights: " not in text or "dtype" in text}
    assert not unseen
    assert "reports version" in outcomes["lost"][1]
    assert "v_proj" in outcomes["one tensor old"][1] and " 1 of the " in outcomes["one tensor old"][1]
