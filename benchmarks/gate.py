"""Mismatch gate: the test that detects each fault, the delay in weight syncs and tokens, and false alarms.

    python benchmarks/gate.py --out runs/gate [--cells 'bf16 full' ...] [--rates 1e-5] [--steps 100]
    python benchmarks/gate.py --out runs/gate_smollm2 --config grpo/smollm2 --cells 'bf16 full' --rates 1e-5 --steps 20

A cell is a precision of trainer and engine and a set of trained weights. In each cell, one run takes healthy steps. Then faults
are injected one by one between an update and its weight sync, detected or not within PATIENCE steps, removed, and followed by a
healthy step. An engine with another RoPE base is wrong from its start and has its own run, and so has an engine that reports
raw log-probs, which then samples in ways that it does not report.
Further healthy runs have the other learning rates. Completed cells and rates are read, not repeated.
"effect" is the applied fraction of an update or an adapter.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from torchtune_ext.cli.plugin import parse
from torchtune_ext.recipes.grpo import Config, GRPORecipe
from torchtune_ext.sampling.vllm_backend import ProcessBackend
from torchtune_ext.settings.config import load_config
from torchtune_ext.training.mismatch import MismatchError
from torchtune_ext.training.publish import Publisher
from torchtune_ext.training.recipe_runner import run_recipe

PATIENCE = 20  # steps after which a fault counts as not found
SAMPLERS = {
    "temperature 0.9": {"temperature": 0.9},
    "temperature 0.95": {"temperature": 0.95},
    "temperature 1.1": {"temperature": 1.1},
    "top-p 0.95": {"top_p": 0.95},
    "top-p 0.99": {"top_p": 0.99},
    "top-k 20": {"top_k": 20},
}
# Sampling settings of an engine that reports log-probs without temperature, top-p and top-k.
RAW_SAMPLERS = {
    "temperature 0.7, raw": {"temperature": 0.7},
    "temperature 0.9, raw": {"temperature": 0.9},
    "temperature 1.3, raw": {"temperature": 1.3},
    "top-p 0.8, raw": {"top_p": 0.8},
    "top-p 0.95, raw": {"top_p": 0.95},
    "top-k 20, raw": {"top_k": 20},
}
SKIPPED = (
    "skipped weight sync",
    "skipped weight sync, new version label",
    "skipped weight sync, checks bypassed",
)
TENSORS = ("one tensor random", "one tensor zeroed", "one tensor old", "all tensors old, checks bypassed")
RAW = "logprobs_mode: raw_logprobs"
ROPE = "hf_overrides: {rope_parameters: {rope_type: default, rope_theta: 5000.0}}"
ADAPTERS = ["adapters.publish=adapter", "model.lora_attn_modules=[q_proj,v_proj]", "model.lora_rank=8"]
MERGED = ["adapters.publish=merged", *ADAPTERS[1:]]
PRECISIONS = {
    "fp32": ["precision=bf16", "dtype=float32", "engine.dtype=float32"],
    "bf16": ["precision=bf16", "dtype=bfloat16", "engine.dtype=bfloat16"],
    "fp32, engine bf16": ["precision=bf16", "dtype=float32", "engine.dtype=bfloat16"],
    "bf16, engine fp32": ["precision=bf16", "dtype=bfloat16", "engine.dtype=float32"],
    "fp8_rollout": ["precision=fp8_rollout", "dtype=bfloat16", "engine.dtype=bfloat16"],
    "fp8_unified": ["precision=fp8_unified", "dtype=bfloat16", "engine.dtype=bfloat16"],
}
CELLS = {f"{name} full": options for name, options in PRECISIONS.items()}
CELLS |= {f"{name} lora": options + ADAPTERS for name, options in list(PRECISIONS.items())[:4]}
CELLS["fp8_rollout lora merged"] = PRECISIONS["fp8_rollout"] + MERGED


# -- inside a run -----------------------------------------------------------------------------------------------------------


def plant_faults(fault: Path) -> None:
    """Make the trainer's side of the engine inject the fault that the file names."""
    generate, load, wrong_tensors = ProcessBackend.generate, ProcessBackend.load, Publisher._find_checksum_error

    async def sample(self, call):
        call.sampling = replace(call.sampling, **(SAMPLERS | RAW_SAMPLERS).get(fault.read_text(), {}))
        return await generate(self, call)

    async def lose(self, buffers, version):
        if fault.read_text() == SKIPPED[0]:
            return 0.0, 0.0
        return await load(self, [] if fault.read_text() in SKIPPED[1:] else buffers, version)

    def believe(self, answer):
        return None if fault.read_text().endswith("checks bypassed") else wrong_tensors(self, answer)

    ProcessBackend.generate, ProcessBackend.load, Publisher._find_checksum_error = sample, lose, believe


def drive(recipe: GRPORecipe, fault: Path, healthy: int, faults: list[str], out: Path) -> None:
    """Take the healthy steps, then inject the faults. Write one line per result to `out`."""
    update, present, tokens = recipe.update, ["none"], [0]

    def update_then_break(updates):
        tokens[0] += sum(len(row.labels_L) for rows in updates for row in rows)
        values = update(updates)
        fault.write_text(present[0])
        return values

    recipe.update = update_then_break
    for present[0] in ["none", *faults]:
        fault.write_text("none")
        gate = recipe.mismatch_gate
        gate._recent, gate._evidence, tokens[0] = None, {}, 0
        begun = recipe.step
        recipe.cfg.max_steps = begun + (PATIENCE if present[0] != "none" else healthy)
        try:
            recipe.train()
            message = ""
        except MismatchError as error:
            message = str(error)
        # A step that fails before its first update has no weight sync.
        weight_syncs = recipe.engine.version - begun
        line = {"fault": present[0], "weight_syncs": weight_syncs, "tokens": tokens[0], "message": message}
        line |= {"limit": gate.limit}
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        recipe.step += 1  # `train` begins with a weight sync, which needs a new version


def test_of(message: str) -> str:
    """Return the gate test that wrote a message."""
    for text, test in (
        ("reports version", "version"),
        ("times as likely as the engine reports", "likelihood"),
        ("samples as before|samples with the old|samples without", "effect"),
        (": weights: ", "checksum"),
        ("truncated or renormalized \\(", "identity"),
        (
            "distribution has this effect, and rounding does not. Likely cause: temperature",
            "sharpness, says temperature",
        ),
        ("distribution has this effect, and rounding does not. Likely cause: top-p", "sharpness, says top-p"),
        ("Likely cause: temperature", "scale, says temperature"),
        ("Likely cause: top-p", "scale, says top-p"),
        ("Likely cause: precision", "scale, says precision"),
        ("Likely cause: model", "scale, says model"),
    ):
        if re.search(text, message):
            return test
    return message and f"? {message}"


@parse
def recipe_main(cfg) -> None:
    """Run one cell, configured by environment variables that `gate.py` sets."""
    fault, healthy = Path(os.environ["GATE_FAULT"]), int(os.environ["GATE_HEALTHY"])
    plant_faults(fault)
    faults = [each for each in os.environ["GATE_FAULTS"].split(";") if each]
    work = partial(drive, fault=fault, healthy=healthy, faults=faults, out=Path(os.environ["GATE_OUT"]))
    run_recipe(partial(GRPORecipe, load_config(Config, cfg)), work)


# -- all runs ---------------------------------------------------------------------------------------------------------------


def run(
    out: Path, config: str, options: list[str], rate: str, healthy: int, faults: list[str], engine: str = ""
) -> list[dict]:
    """Return the lines of one run; start it if it is missing. `engine`: additional `engine.extra_args`."""
    results = out / "found.jsonl"
    if not (results.exists() and len(results.read_text().splitlines()) == 1 + len(faults)):
        out.mkdir(parents=True, exist_ok=True)
        results.unlink(missing_ok=True)
        (out / "fault").write_text("none")
        variables = {"FAULT": out / "fault", "HEALTHY": healthy, "FAULTS": ";".join(faults), "OUT": results}
        environ = os.environ | {f"GATE_{name}": str(value) for name, value in variables.items()}
        environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
        )
        command = [sys.executable, "-m", "torchtune_ext", "run", __file__, "--config", config, f"output_dir={out}/run"]
        command += [
            *options,
            f"optimizer.lr={rate}",
            "schedule={}",
            "evaluation.task=null",
            "checkpoints.every=1000000",
        ]
        command += [
            "updates_per_step=1",
            "max_steps=1000000",
            f"engine.extra_args={{worker_extension_cls: gate_loader.Loader{', ' * bool(engine)}{engine}}}",
        ]
        with (out / "log").open("w") as log:
            subprocess.run(command, check=True, env=environ, stdout=log, stderr=subprocess.STDOUT)
    return [json.loads(line) for line in results.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", default="grpo/tiny_fp8", help="config whose model exists already")
    parser.add_argument("--options", nargs="*", default=[], metavar="KEY=VALUE", help="for every run")
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=CELLS, metavar="CELL")
    parser.add_argument(
        "--rates", nargs="+", default=["1e-5", "1e-6", "1e-4"], help="the first one also gets the faults"
    )
    parser.add_argument("--steps", type=int, default=100, help="in good health")
    args = parser.parse_args()
    faults = [*SAMPLERS, *SKIPPED, *TENSORS]
    rows, alarms = {name: [] for name in ["wrong RoPE base", *faults, *RAW_SAMPLERS]}, []
    for cell in args.cells:
        for number, rate in enumerate(args.rates):
            planted = [] if number else faults
            out = (args.out / f"{cell}, lr {rate}".replace(" ", "_")).absolute()
            health, *lines = run(out, args.config, CELLS[cell] + args.options, rate, args.steps, planted)
            if not number:
                rope = run(Path(f"{out}, rope"), args.config, CELLS[cell] + args.options, rate, 1, [], ROPE)
                lines.append(rope[0] | {"fault": "wrong RoPE base"})
                raw = Path(f"{out}, raw")
                lines += run(raw, args.config, CELLS[cell] + args.options, rate, 1, list(RAW_SAMPLERS), RAW)[1:]
            steps = f"{args.steps} steps, {health['tokens']} tokens"
            alarms.append((cell, rate, steps, f"{health['limit']:.2g}", test_of(health["message"]) or "none"))
            for line in lines:
                how = f"{line['weight_syncs']} ({line['tokens']})"
                rows[line["fault"]].append(
                    f"{test_of(line['message'])}: {how}" if line["message"] else f"not found: {how}"
                )
    print("| fault | " + " | ".join(args.cells) + " |\n|" + "---|" * (1 + len(args.cells)))
    for name, cells in rows.items():
        print(f"| {name} | " + " | ".join(cells) + " |")
    print("\n| healthy run | lr | tested | limit, nats | alarms |\n|---|---|---|---|---|")
    for row in alarms:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    sys.exit(recipe_main() if "--config" in sys.argv and "GATE_OUT" in os.environ else main())
