"""On-policy distillation against GRPO: held-out accuracy, seconds and KL to the teacher.

    python benchmarks/distill.py --out runs/distill [--seeds 0 1 2]
    python benchmarks/distill.py --out runs/distill_smollm2 --warm runs/smollm2/warmup/model --config grpo/smollm2 --seeds 0 \
        --steps 30 --every 10 --prompts 16

From one warm-up, GRPO trains a teacher, whose curve is the GRPO curve; then `preset=distill` trains the warm-up model on the
teacher's log-probs of its samples, without a reward. Seconds cover the steps with the teacher's scoring, without evaluation
and engine start-up. They exclude the cost of training the teacher. Each seed has its own warm-up unless `--warm` names one.
Completed runs are read, so a later call continues the comparison.
"""

import argparse
from pathlib import Path
from statistics import fmean

from learning import tune
from objectives_report import interval

from torchtune_ext.telemetry.metrics import read_metrics

ARMS = ("grpo", "distill")


def curve(run: Path) -> dict[int, tuple[float, float, float]]:
    """Return step -> (held-out accuracy, seconds so far, KL to the teacher)."""
    points, seconds, kl = {}, 0.0, float("nan")
    for line in read_metrics(run / "metrics.jsonl"):
        if line["step"]:
            seconds += line["time/step"] - line.get("time/eval", 0.0)
            kl = line.get("loss/kl_teacher", kl)
        if "eval/reward_sampled" in line:
            points[line["step"]] = (line["eval/reward_sampled"], seconds, kl)
    return points


def learn(seed: int, args: argparse.Namespace) -> dict[str, dict[int, tuple[float, float, float]]]:
    """Return the curves of one seed."""
    warm = args.warm
    if warm is None:
        folder = args.out / f"warmup_{seed}"
        tune(folder, args.threads, "warmup_sft", "--config", "warmup/tiny_arithmetic", f"seed={seed}")
        warm = folder / "model"
    words = ["--config", args.config, f"model_dir={warm}", f"seed={seed}", f"evaluation.every={args.every}"]
    words += ["checkpoints.every=1000000", f"prompts_per_step={args.prompts}", *args.options]
    taught = args.out / f"grpo_{seed}"
    tune(taught, args.threads, "grpo_full", *words, f"max_steps={args.teacher_steps or args.steps}")
    teacher = max((taught / "checkpoints").glob("step_*"))
    run = args.out / f"distill_{seed}"
    settings = [f"max_steps={args.steps}", "preset=distill", f"teacher.model_dir={teacher}"]
    tune(run, args.threads, "grpo_full", *words, *settings)
    return {"grpo": curve(taught), "distill": curve(run)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--warm", type=Path, help="initial model (default: made by warmup/tiny_arithmetic)")
    parser.add_argument("--config", default="grpo/tiny_arithmetic")
    parser.add_argument("--steps", type=int, default=80, help="of the student")
    parser.add_argument(
        "--teacher-steps", type=int, help="number of GRPO steps that train the teacher (default: --steps)"
    )
    parser.add_argument("--every", type=int, default=10, help="steps between two evaluations")
    parser.add_argument("--prompts", type=int, default=32, help="problems of a step")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS")
    parser.add_argument("--options", nargs="*", default=[], metavar="KEY=VALUE", help="for both arms")
    args = parser.parse_args()
    curves = [learn(seed, args) for seed in args.seeds]
    print(
        "| step | "
        + " | ".join(f"{arm}: accuracy | {arm}: s" for arm in ARMS)
        + " | difference | KL to teacher, nats |"
    )
    print("|" + "---|" * (2 * len(ARMS) + 3))
    for step in curves[0]["distill"]:
        points = {arm: [each[arm][step] for each in curves] for arm in ARMS}
        cells = [str(step)]
        for arm in ARMS:
            cells += [spread([accuracy for accuracy, *_ in points[arm]]), f"{fmean(p[1] for p in points[arm]):.0f}"]
        cells.append(spread([ours[0] - grpo[0] for grpo, ours in zip(*points.values(), strict=True)]))
        cells.append(f"{fmean(p[2] for p in points['distill']):.3f}")
        print("| " + " | ".join(cells) + " |", flush=True)


def spread(values: list[float]) -> str:
    """Format the mean with Student's 95% interval over seeds."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    mean, half = interval(values)
    return f"{mean:.3f} ± {half:.3f}"


if __name__ == "__main__":
    main()
