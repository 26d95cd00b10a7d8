"""Full training, LoRA, DoRA (float32 and bfloat16) and QLoRA of the tiny model: accuracy, parameters, memory, bytes, seconds.

    python benchmarks/lora.py --out runs/lora [--seeds 0 1 2] [--variants full lora 'dora bf16' ...] [--grpo key=value ...]

One warm-up, then GRPO on the same puzzles. The first seed runs every variant, the others LoRA alone. About six minutes a run on
two cores; completed runs are read, not repeated. `benchmarks/publish.py` measures weight sync at 100M parameters.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from safetensors import safe_open

from torchtune_ext.telemetry.metrics import read_metrics

SMALL = "model.lora_attn_modules=[q_proj,output_proj]"  # NF4 needs weights of 16,384 values: not k and v of this model
DORA = ("grpo_lora", "grpo/tiny_lora", "adapters.publish=merged", "model.use_dora=True")
VARIANTS = {
    # With the objective of grpo/tiny_lora, so that the table compares what is trained.
    "full": ("grpo_full", "grpo/tiny", "preset=clip_higher", "loss.entropy_coef=0.03", "aggregation=token"),
    "lora": ("grpo_lora", "grpo/tiny_lora"),
    "lora merged": ("grpo_lora", "grpo/tiny_lora", "adapters.publish=merged"),
    "dora": DORA,
    "dora bf16": (*DORA, "dtype=bfloat16"),  # the engine stays in float32: a merged model requires it
    "qlora": ("grpo_lora", "grpo/tiny_lora", "model.quantize_base=True", SMALL),
}


def tune(*args: str) -> float:
    """Run a recipe and return its seconds, start-up included."""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-m", "torchtune_ext", "run", *args], check=True)
    return time.monotonic() - begin


def parameters(folder: Path) -> int:
    """Return the number of values in the safetensors files of a folder."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as f:
            for name in f.keys():
                count = 1
                for size in f.get_slice(name).get_shape():
                    count *= size
                total += count
    return total


def row(variant: str, seed: int, run: Path, whole: int) -> list[str]:
    """Return the row of a run in the table."""
    lines = read_metrics(run / "metrics.jsonl")
    first, last, steps = lines[0], lines[-1], lines[1:]
    cells = [variant, str(seed)]
    for way in ("sampled", "greedy"):
        before, after = first[f"eval/reward_{way}"], last[f"eval/reward_{way}"]
        cells += [f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}"]
    trained = parameters(run / "checkpoints" / f"step_{last['step']:06d}")
    cells += [f"{trained:,}", f"{trained / whole:.1%}", f"{8 * trained / 2**20:.2f}"]
    published = [line["publish/bytes"] for line in steps]
    seconds = [sum(line[f"time/publish/{part}"] for part in ("gather", "copy", "pause")) for line in steps]
    cells += [f"{median(published) / 1e6:.2f}", f"{1e3 * median(seconds):.0f}"]
    cells += [f"{median(line['time/step'] for line in steps):.2f}"]
    return [*cells, f"{max(line['mismatch/mean_abs'] for line in steps):.1e}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/lora"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--grpo", nargs="*", default=[], help="key=value for every GRPO run")
    args = parser.parse_args()
    warm = args.out / "warmup"
    if not (warm / "model").is_dir():
        tune("warmup_sft", "--config", "warmup/tiny", f"output_dir={warm}")
    rows = []
    for seed in args.seeds:
        for variant in args.variants if seed == args.seeds[0] else ["lora"]:
            run = args.out / f"{variant.replace(' ', '_')}_{seed}"
            if not (run / "done").is_file():
                recipe, config, *options = VARIANTS[variant]
                settings = (f"seed={seed}", f"output_dir={run}", f"model_dir={warm}/model", *options, *args.grpo)
                tune(recipe, "--config", config, *settings)
                (run / "done").touch()
            rows.append(row(variant, seed, run, parameters(warm / "model")))
    head = [
        "variant",
        "seed",
        *(f"{way}: {what}" for way in ("sampled", "greedy") for what in ("before", "after", "gain")),
    ]
    head += [
        "trained parameters",
        "share",
        "AdamW, MiB",
        "published, MB/step",
        "weight sync, ms",
        "s/step",
        "worst mismatch",
    ]
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for cells in rows:
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
