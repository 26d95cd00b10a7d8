"""GRPO on a pretrained model, against equal minutes of SFT, shuffled rewards and other settings.

    python benchmarks/pretrained.py --out runs/pretrained [--arms grpo supervised ...] [--steps 12] [--config gemma3]

SmolLM2-135M-Instruct (`make pretrained`) on the puzzles of `grpo/smollm2`, from one warm-up (`warmup/smollm2`), or another
model by its configs. A run takes about six minutes on two cores, and is then evaluate_model on 512 held-out problems with
eight samples each. Completed runs are read, not repeated, so a later call continues.

    grpo         `grpo/smollm2`, in bfloat16 where the processor computes in it; the arms below add settings to it
    supervised   equally many minutes of further `warmup_sft`, on new examples
    shuffled     `advantage.rewards=shuffled`: the rewards of each group are permuted at random
    rank R LR    LoRA on all linear layers with alpha 32

An arm and its reference are compared by problem: the mean over problems of the difference in solved fraction, each averaged
over seeds, with the 95% interval over problems. The interval does not include the variance over seeds: the table shows the
range of the seeds.
"""

import argparse
import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean

import numpy as np
from omegaconf import OmegaConf

from torchtune_ext.measured.machine import machine_fingerprint
from torchtune_ext.pipeline.rollout_store import read_rollouts, rollout_paths
from torchtune_ext.telemetry.metrics import read_metrics

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
LORA = (
    "model.lora_attn_modules=[q_proj,k_proj,v_proj,output_proj] model.apply_lora_to_mlp=True adapters.save_merged=True "
    "model.lora_rank="
)
ARMS = {  # seeds, recipe and settings
    "grpo": (3, "grpo_full", ""),
    "supervised": (3, "warmup_sft", ""),
    "shuffled": (3, "grpo_full", "advantage.rewards=shuffled"),
    "lora": (2, "grpo_lora", f"{LORA}16 optimizer.lr=2e-4"),
    "atr_grpo": (2, "grpo_full", "preset=atr_grpo"),
    "staleness 0": (2, "grpo_async", "staleness=0 preset=decoupled_ppo"),
    "staleness 1": (2, "grpo_async", "staleness=1 preset=decoupled_ppo"),
    "fp8_rollout": (2, "grpo_full", "precision=fp8_rollout"),
    "fp8_unified": (2, "grpo_full", "precision=fp8_unified"),
    "gdpo": (3, "grpo_full", "preset=gdpo advantage.parts.solved=1.0 advantage.parts.credit=1.0"),
    "maxrl": (3, "grpo_full", "preset=maxrl"),
    "self_distill": (3, "grpo_full", "preset=self_distill teacher.prompt=pretrained.with_solution"),
}
# Learning rates of 5, 10 and 20 times the rate of full finetuning.
for rank, rate in itertools.product((1, 4, 16, 64), ("1e-4", "2e-4", "4e-4")):
    ARMS[f"rank {rank} {rate}"] = (2, "grpo_lora", f"{LORA}{rank} model.lora_alpha=32 optimizer.lr={rate}")
AGAINST = {name: ["grpo"] for name in ARMS} | {
    "grpo": ["warm-up", "supervised", "shuffled"],
    "staleness 1": ["staleness 0"],
}
AGAINST |= {name: ["warm-up"] for name in ARMS if name in ("supervised", "shuffled", "lora") or name.startswith("rank")}
EXAMPLES = 36  # supervised ones in the minutes of a step of GRPO
SAMPLES = 8


def with_solution(group, sample):
    """Return the messages of the teacher of `self_distill`: the question and its answer."""
    (message,) = group.problem.messages
    return [{**message, "content": f"{message['content']}\n\nA correct solution: {group.problem.answer}"}]


def tune(folder: Path, *args: str) -> float:
    """Run a recipe into `folder`, unless it is complete there. Return its minutes, start-up included."""
    seconds = folder / "seconds"
    if not seconds.exists():
        begin = time.monotonic()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{folder}.log", "w") as log:
            command = [sys.executable, "-m", "torchtune_ext", "run", *args, f"output_dir={folder}"]
            env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}  # for `with_solution`
            subprocess.run(command, check=True, env=env, stdout=log, stderr=subprocess.STDOUT)
        seconds.write_text(f"{time.monotonic() - begin:.0f}\n")
    return float(seconds.read_text()) / 60


def evaluate_model(args: argparse.Namespace, folder: Path, model: Path) -> dict:
    """Evaluation on held-out problems: the solved fraction by problem, and means of other figures."""
    trained = OmegaConf.load(CONFIGS / "grpo" / f"{args.config}.yaml")
    cfg = {name: trained[name] for name in ("seed", "tokenizer", "engine", "sampling")}
    cfg |= {"task": {**trained.evaluation.task, "generators": trained.task.generators, "count": args.problems}}
    cfg |= {"samples_per_problem": SAMPLES, "pass_at": [1, SAMPLES], "model_dir": str(model), "output_dir": ""}
    config = args.out / "eval.yaml"
    config.write_text(OmegaConf.to_yaml(OmegaConf.create(cfg)))
    tune(folder, "evaluate", "--config", str(config), f"model_dir={model}")
    groups = read_rollouts(rollout_paths(folder)[0])
    samples = [sample for group in groups for sample in group.samples if sample.score is not None]
    by_problem = {
        g.problem.id: fmean(s.score.parts["solved"] for s in g.samples if s.score is not None) for g in groups
    }
    return {
        "solved": by_problem,
        "pass@8": fmean(float(share > 0) for share in by_problem.values()),
        "credit": fmean(sample.score.parts["credit"] for sample in samples),
        "format": fmean(bool(re.fullmatch(r"-?\d+\.?", sample.text.strip())) for sample in samples),
        "length": fmean(len(sample.completion.tokens) for sample in samples),
    }


def run(args: argparse.Namespace, arm: str, seed: int, warm: Path) -> dict:
    """Return one run of an arm and its evaluation; run it if it is missing."""
    _, recipe, settings = ARMS[arm]
    folder = args.out / f"{arm} {seed}".replace(" ", "_")
    if recipe == "warmup_sft":
        number = args.steps * EXAMPLES
        words = [
            "--config",
            f"warmup/{args.config}",
            f"model_dir={warm}",
            f"num_problems={number}",
            f"task.seed={100 + seed}",
        ]
        minutes, model = tune(folder, recipe, *words, f"seed={seed}"), folder / "model"
        lines = []
    else:
        words = [
            "--config",
            f"grpo/{args.config}",
            f"model_dir={warm}",
            f"max_steps={args.steps}",
            f"seed={seed}",
            *settings.split(),
        ]
        words += ["evaluation.task=null", "checkpoints.every=1000000"]
        minutes = tune(folder, recipe, *words)
        model = max((folder / "checkpoints").glob("step_*"))
        model = model / "merged" if (model / "merged").exists() else model
        lines = [line for line in read_metrics(folder / "metrics.jsonl") if "mismatch/mean_abs" in line]
    result = evaluate_model(args, Path(f"{folder}_eval"), model) | {"minutes": minutes}
    if lines:
        result["mismatch"] = fmean(line["mismatch/mean_abs"] for line in lines)
        result["entropy"] = lines[-1].get("loss/entropy", float("nan"))
    return result


def row(name: str, runs: list[dict]) -> list[str]:
    strict = [fmean(each["solved"].values()) for each in runs]
    means = {
        key: fmean(each[key] for each in runs) for key in ("pass@8", "credit", "format", "length") if key in runs[0]
    }
    cells = [name, str(len(runs)), f"{fmean(strict):.1%}", f"{min(strict):.1%} to {max(strict):.1%}"]
    cells += [f"{means['pass@8']:.1%}", f"{means['credit']:.3f}", f"{means['format']:.1%}", f"{means['length']:.1f}"]
    for key, text in (("entropy", "{:.2f}"), ("mismatch", "{:.1e}"), ("minutes", "{:.1f}")):
        cells.append(text.format(fmean(each[key] for each in runs)) if key in runs[0] else "")
    return cells


def difference(first: list[dict], second: list[dict]) -> str:
    """Format the difference in percentage points, with the interval over problems."""
    problems = first[0]["solved"].keys() & second[0]["solved"].keys()
    d = np.array(
        [fmean(r["solved"][p] for r in first) - fmean(r["solved"][p] for r in second) for p in sorted(problems)]
    )
    half = 1.96 * d.std(ddof=1) / len(d) ** 0.5
    remark = "" if abs(d.mean()) > half else ", not significant"
    return f"{100 * d.mean():+.1f} [{100 * (d.mean() - half):.1f}, {100 * (d.mean() + half):.1f}]{remark}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS, metavar="ARM")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--problems", type=int, default=512)
    parser.add_argument("--config", default="smollm2", help="name of the configs below warmup/ and grpo/")
    args = parser.parse_args()
    args.out = args.out.absolute()
    warm_minutes = tune(args.out / "warmup", "warmup_sft", "--config", f"warmup/{args.config}")
    warm = args.out / "warmup" / "model"
    base = Path(OmegaConf.load(CONFIGS / "warmup" / f"{args.config}.yaml").model_dir).absolute()
    results = {"as downloaded": [evaluate_model(args, args.out / "base_eval", base)]}
    results["warm-up"] = [evaluate_model(args, args.out / "warmup_eval", warm) | {"minutes": warm_minutes}]
    for arm in args.arms:
        results[arm] = [run(args, arm, seed, warm) for seed in range(ARMS[arm][0])]
    print(f"{machine_fingerprint()}; {args.problems} held-out problems\n")
    print(
        "| arm | seeds | solved | range over seeds | pass@8 | credit | number | tokens | entropy | mismatch | minutes |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name, runs in results.items():
        print(f"| {' | '.join(row(name, runs))} |")
    print("\n| arm | compared with | difference in points, 95% interval over problems |\n|---|---|---|")
    for arm in args.arms:
        for other in AGAINST[arm]:
            if other in results:
                print(f"| {arm} | {other} | {difference(results[arm], results[other])} |")


if __name__ == "__main__":
    sys.exit(main())
