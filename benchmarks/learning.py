"""How far GRPO carries the tiny model: one warm-up, then GRPO with several seeds. Prints a table; about ten minutes a seed.

python benchmarks/learning.py --out runs/learning --seeds 0 1 2
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path


def tune(*args: str) -> float:
    """Runs a recipe and returns its seconds, start-up included."""
    begin = time.monotonic()
    env = {"GOMP_SPINCOUNT": "10000", **os.environ}  # as scripts/quickstart.sh
    subprocess.run([sys.executable, "-m", "torchtune_ext", "run", *args], check=True, env=env)
    return time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--grpo", nargs="*", default=[], help="key=value for the GRPO runs")
    args = parser.parse_args()
    warm = args.out / "warmup"
    seconds = tune("warmup_sft", "--config", "warmup/tiny", f"output_dir={warm}")
    print(f"warm-up: {seconds:.0f} s")
    rows = []
    for seed in args.seeds:
        run = args.out / f"grpo_{seed}"
        seconds = tune(
            *("grpo_full", "--config", "grpo/tiny", f"seed={seed}", f"output_dir={run}", f"model_dir={warm}/model"),
            *args.grpo,
        )
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        first, last = lines[0], lines[-1]
        half = (last["eval/high"] - last["eval/low"]) / 2
        cells = [str(seed)]
        for way in ("sampled", "greedy"):
            before, after = first[f"eval/accuracy_{way}"], last[f"eval/accuracy_{way}"]
            cells += [f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}"]
        worst = max(line.get("mismatch/mean_abs", 0.0) for line in lines)
        rows.append([*cells, f"{half:.3f}", f"{worst:.1e}", f"{seconds:.0f}"])
    head = [
        "seed",
        "sampled before",
        "after",
        "rise",
        "greedy before",
        "after",
        "rise",
        "± 95%",
        "worst mismatch",
        "seconds",
    ]
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
