"""Adaptive limit of in-flight requests against the best fixed limit: throughput and preemptions.

    python benchmarks/throttle.py [--passes 3] [--sizes 8 32 64 128 192]

12 prompts x 16 samples on KV caches that are too small for all of them at once, with a tiny random model, so that the
engine dominates and not the arithmetic. Every line is the mean of several passes, each over new prompts; "adaptive" is
shown for its first pass, in which it still adapts, and for later passes. Fractions are relative to the best fixed size
without preemptions. On a shared machine, throughput per second of the engine's CPU time is more stable than throughput
per second.
"""

import argparse
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchtune_ext.sampling.engine import Engine, EngineConfig, SamplingConfig
from torchtune_ext.sampling.throttle import ConcurrencyController

PROMPTS, SAMPLES, PROMPT_TOKENS, VOCABULARY = 12, 16, 300, 4096
LAYERS, KV_HEADS, HEAD = 4, 2, 64
BYTES_PER_TOKEN = 2 * LAYERS * KV_HEADS * HEAD * 2  # keys and values, bfloat16


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the tables."""

    title: str
    cache_tokens: int  # size of the KV cache
    max_tokens: int  # per completion
    stop_share: float  # fraction of the vocabulary that ends a completion; 0: all have max_tokens


CASES = (
    Case("16384 KV tokens, 128 new tokens", 16384, 128, 0.0),
    Case("8192 KV tokens, 128 new tokens", 8192, 128, 0.0),
    Case("16384 KV tokens, up to 600 new tokens, 100 in the mean", 16384, 600, 0.01),
)


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over all prompts."""

    tokens_per_s: float  # of wall time
    tokens_per_cpu_s: float  # of the engine process's CPU time
    preemptions: int
    limit: int  # requests in flight allowed at its end


def save_model(path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(path)


def run_pass(engine: Engine, prompts: list[list[int]], sampling: SamplingConfig) -> Pass:
    before, started, cpu_started = engine.stats(), time.monotonic(), engine_cpu_s()
    engine.sample(prompts, SAMPLES, sampling)
    seconds, cpu_seconds, after = time.monotonic() - started, engine_cpu_s() - cpu_started, engine.stats()
    tokens, preemptions = after.tokens - before.tokens, after.preemptions - before.preemptions
    return Pass(tokens / seconds, tokens / cpu_seconds, preemptions, after.concurrency)


def limit_concurrency(engine: Engine, fixed: int | None) -> None:
    """Fix the limit of in-flight requests; None restarts the adaptive limit."""
    for lane in engine._pool.replicas:
        lane.throttle.controller = ConcurrencyController(lane.throttle.controller.ceiling)
        lane.throttle.fixed = fixed


def engine_cpu_s() -> float:
    """Return the CPU time of the engine process, the busiest child process, in seconds."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return max(one.user + one.system for one in times)


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def show(name: str, passes: list[Pass], best: list[Pass]) -> None:
    wall, cpu = mean(one.tokens_per_s for one in passes), mean(one.tokens_per_cpu_s for one in passes)
    share = wall / mean(one.tokens_per_s for one in best)
    cpu_share = cpu / mean(one.tokens_per_cpu_s for one in best)
    spread = np.std([one.tokens_per_s for one in passes])
    preemptions = " ".join(str(one.preemptions) for one in passes)
    print(
        f"  {name:23s} {wall:6.0f} +- {spread:3.0f} tok/s {share:5.2f} | {cpu:6.0f} tok/CPU-s {cpu_share:5.2f} | "
        f"limit {passes[-1].limit:4d} | preemptions {preemptions}",
        flush=True,
    )


def run_case(case: Case, model: str, run_dir: str, sizes: list[int], num_passes: int) -> None:
    config = EngineConfig(max_model_len=1024, kv_cache_bytes=case.cache_tokens * BYTES_PER_TOKEN)
    count = int(case.stop_share * VOCABULARY)
    stop = tuple(np.random.default_rng(0).choice(VOCABULARY, count, replace=False).tolist())
    with Engine(model, config, run_dir) as engine:
        engine.start()
        engine.wait_ready()
        engine.sample([[1, 2, 3]], 4, SamplingConfig(max_tokens=8))

        def passes(count: int) -> list[Pass]:
            result = []
            for number in range(count):
                # New prompts in every pass, as in training; the same prompts for every size.
                fresh = np.random.default_rng(number).integers(0, VOCABULARY, (PROMPTS, PROMPT_TOKENS)).tolist()
                sampling = SamplingConfig(max_tokens=case.max_tokens, seed=number, stop_token_ids=stop)
                result.append(run_pass(engine, fresh, sampling))
            return result

        fixed, adaptive = {size: [] for size in sizes}, []
        for _ in range(2):  # two rounds, so that a busy moment of the machine does not affect only one size
            for size in sizes:
                limit_concurrency(engine, size)
                fixed[size] += passes(num_passes)
            limit_concurrency(engine, None)
            adaptive.append(passes(num_passes + 1))
        without = {size: group for size, group in fixed.items() if not any(one.preemptions for one in group)}
        best = max((without or fixed).values(), key=lambda group: mean(one.tokens_per_s for one in group))
        print(f"\n{case.title}")
        for size, group in fixed.items():
            show(f"fixed {size}", group, best)
        show("adaptive, first pass", [group[0] for group in adaptive], best)
        show("adaptive, later passes", [one for group in adaptive for one in group[1:]], best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=3, help="passes over the prompts for each size, twice")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 32, 64, 128, 192])
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))), help="which cases, by number")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder) / "model")
        for number in args.cases:
            run_case(CASES[number], str(Path(folder) / "model"), folder, args.sizes, args.passes)


if __name__ == "__main__":
    main()
