"""Throughput of an otherwise undisturbed CPU engine, by its number of threads.

    python benchmarks/engine_threads.py [--models models/SmolLM2-135M-Instruct] [--threads 1 2] [--repeats 5]

Each model, random or from `--models`, runs in one engine per number of threads, and the engines take turns: 32 prompts x 8
completions of 32 tokens, 60 tokens a prompt, bfloat16. The first turn warms up. The default for `engine.threads: null` follows
from this table (`PARALLEL` in sampling/engine_args.py).
"""

import argparse
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

import step

from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.sampling.engine import Engine, EngineConfig, SamplingConfig

SHAPES = [
    replace(step.SMALL, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=mlp, vocab_size=vocabulary)
    for hidden, layers, mlp, vocabulary in (
        (256, 3, 688, 4096),
        (384, 5, 1024, 4096),
        (512, 5, 1216, 4096),
        (512, 8, 1408, 16384),
    )
]
PROMPTS = [[5 + (7 * i + j) % 900 for j in range(60)] for i in range(32)]


def tokens_s(engine: Engine, seed: int) -> float:
    began = time.monotonic()
    groups = engine.sample(PROMPTS, 8, SamplingConfig(max_tokens=32, seed=seed))
    return sum(len(completion.tokens) for group in groups for completion in group) / (time.monotonic() - began)


def measure(model: Path, threads: list[int], repeats: int) -> None:
    """Print the rows of a model."""
    size = sum(tensor.numel() for _, tensor in HFModel(model).tensors())
    with ExitStack() as stack:
        engines = {}
        for number in threads:
            run_dir = stack.enter_context(tempfile.TemporaryDirectory())
            config = EngineConfig(max_model_len=512, dtype="bfloat16", kv_cache_bytes=256 << 20, threads=number)
            engines[number] = stack.enter_context(Engine(str(model), config, run_dir))
            engines[number].start()
            engines[number].wait_ready()
        turns = [{number: tokens_s(engine, turn) for number, engine in engines.items()} for turn in range(repeats + 1)][
            1:
        ]
    for number in threads:
        speeds = [turn[number] for turn in turns]
        ratio = median(speeds) / median(turn[threads[0]] for turn in turns)
        spread = f"{median(speeds):,.0f} ({min(speeds):,.0f}-{max(speeds):,.0f})"
        print(f"| {size / 1e6:.1f}M | {number} | {spread} | {ratio:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", type=Path, default=[])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as in a run (cli/plugin.py)
    print("| parameters | threads | tokens/s | times the first |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        random = [step.make_model(Path(folder) / str(i), shape) for i, shape in enumerate(SHAPES)]
        for model in [*random, *args.models]:
            measure(model, args.threads, args.repeats)


if __name__ == "__main__":
    main()
