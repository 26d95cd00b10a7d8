"""Throughput of several engines against one, and the fraction of prompt tokens that are computed twice.

    python benchmarks/pool.py [--engines 1 2 4] [--passes 3]
    python benchmarks/pool.py --devices 0,1,2,3 --model models/Qwen2.5-7B-Instruct --engines 1 2 4

On a CPU, n engines and a single engine get the same n cores and the same total KV cache, so each of the n engines has a part
of it. Numbers of engines above the cores of this process are skipped with a message. The single engine computes on one of its
cores, with its client on another. The random model is tiny, so that the engine dominates and not the arithmetic, or larger
(`--size 60M`). Prompts are new in each pass, and both variants alternate, since other processes may use the machine.

On GPUs (`--devices`) n engines of one GPU each are compared with one tensor-parallel engine on n GPUs, each GPU with the memory
fraction of `--memory`.

"prefix tokens recomputed": the fraction of the shareable prompt tokens of a group (full blocks of the KV cache) that was
computed again, by the same engine or by another one, from vLLM's counts per request. The target is 0: all samples of a group
go to one engine. It is above 0 if a prompt is evicted from a full cache, or if an engine crashed.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, PretrainedConfig, Qwen2Config, Qwen2ForCausalLM

from torchtune_ext.sampling.engine import Engine, EngineConfig, SamplingConfig
from torchtune_ext.sampling.types import Completion

SAMPLES, PROMPT_TOKENS, MAX_TOKENS, VOCABULARY, BLOCK = 16, 320, 128, 4096, 32
# Width, inner width, layers, heads, heads of keys and values.
SIZES = {"3M": (256, 688, 4, 4, 2), "60M": (768, 2048, 8, 12, 4)}
CACHE_TOKENS = 32768  # of all engines together
# Fraction of the vocabulary that ends a completion, so that lengths vary: mean 72, at most 128 tokens.
STOP_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over all prompts."""

    tokens_per_s: float
    computed_twice: float  # fraction of the shareable prompt tokens


def computed_twice(groups: Sequence[Sequence[Completion]], prompt_tokens: int, block: int) -> float:
    """Return the fraction of prompt tokens that were computed although an earlier sample had computed them.

    vLLM caches full blocks, and computes at least the last token of each prompt. So of a prompt of P tokens
    `(P - 1) // block * block` can be shared: the first sample computes them, and all others may reuse them.

    Args:
        groups: the completions of each prompt.
        prompt_tokens: P, the same for every prompt.
        block: tokens per block of the KV cache.
    """
    shared = (prompt_tokens - 1) // block * block
    computed = sum(shared - min(one.cached_prompt_tokens, shared) for group in groups for one in group)
    return (computed - len(groups) * shared) / (sum(len(group) for group in groups) * shared)


def save_model(path: Path, size: str) -> None:
    torch.manual_seed(0)
    width, inner, layers, heads, kv_heads = SIZES[size]
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(path)


def run_pass(engine: Engine, prompts: int, number: int, vocabulary: int, block: int) -> Pass:
    """Sample all groups of one pass, with new prompts."""
    rng = np.random.default_rng(number)
    drawn = rng.integers(0, vocabulary, (prompts, PROMPT_TOKENS)).tolist()
    stop = tuple(np.random.default_rng(0).choice(vocabulary, int(STOP_SHARE * vocabulary), replace=False).tolist())
    sampling = SamplingConfig(max_tokens=MAX_TOKENS, seed=number, stop_token_ids=stop)
    started = time.monotonic()
    groups = engine.sample(drawn, SAMPLES, sampling)
    seconds = time.monotonic() - started
    tokens = sum(len(one.tokens) for group in groups for one in group)
    return Pass(tokens / seconds, computed_twice(groups, PROMPT_TOKENS, block))


def cpu_config(count: int, model: PretrainedConfig) -> EngineConfig:
    """Return the config of `count` CPU engines; the total KV cache does not depend on the count."""
    head = model.hidden_size // model.num_attention_heads
    token_bytes = 2 * model.num_hidden_layers * model.num_key_value_heads * head * 2  # keys and values, bfloat16
    cache = CACHE_TOKENS * token_bytes // count
    return EngineConfig(max_model_len=1024, kv_cache_bytes=cache, block_size=BLOCK, count=count)


def gpu_config(devices: list[str], parallel: int, memory: float) -> EngineConfig:
    """Return the config of engines on GPUs, by the number of GPUs per engine."""
    names = ",".join(devices)
    return EngineConfig(max_model_len=1024, devices=names, tensor_parallel_size=parallel, gpu_memory_utilization=memory)


def measure(model: str, config: EngineConfig, folder: str, args: argparse.Namespace, first: int) -> list[Pass]:
    """Start engines, run some passes, and stop them. The first pass, in which the throttle adapts, is not counted."""
    vocabulary, passes = AutoConfig.from_pretrained(model).vocab_size, []
    with Engine(model, config, folder) as engine:
        engine.start()
        engine.wait_ready()
        engine.sample([[1, 2, 3]], 4, SamplingConfig(max_tokens=8))
        for number in range(first, first + args.passes + 1):
            # vLLM's default block on a GPU has 16 tokens.
            passes.append(run_pass(engine, args.prompts, number, vocabulary, config.block_size or 16))
    return passes[1:]


def show(name: str, passes: list[Pass], beside: list[Pass]) -> None:
    rates, base = [one.tokens_per_s for one in passes], np.median([one.tokens_per_s for one in beside])
    print(
        f"| {name} | {np.median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f}) | {np.median(rates) / base:.2f} | "
        f"{max(one.computed_twice for one in passes):.2%} |",
        flush=True,
    )


def compare(number: int, configs: dict[str, EngineConfig], args: argparse.Namespace, model: str, folder: str) -> None:
    """Measure configs in alternation, and print each relative to the first one."""
    results: dict[str, list[Pass]] = {name: [] for name in configs}
    for turn in range(args.turns):
        for name, config in configs.items():
            results[name] += measure(model, config, folder, args, 1000 * turn)
    first = next(iter(results.values()))
    for name, passes in results.items():
        show(f"{number} | {name}", passes, first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--prompts", type=int, default=24, help="of a pass")
    parser.add_argument("--passes", type=int, default=3, help="over all prompts, in each turn")
    parser.add_argument("--turns", type=int, default=2, help="number of times that each is started")
    parser.add_argument("--devices", help="GPUs, as in CUDA_VISIBLE_DEVICES; without: cores of a CPU")
    parser.add_argument("--model", help="folder of a model in Hugging Face format; without: a random one")
    parser.add_argument("--size", choices=SIZES, default="3M", help="approximate parameters of the random model")
    parser.add_argument("--memory", type=float, default=0.9, help="engine.gpu_memory_utilization")
    args = parser.parse_args()
    cores, gpus = sorted(os.sched_getaffinity(0)), args.devices.split(",") if args.devices else []
    there, what = (gpus, "GPUs") if gpus else (cores, "cores")
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(Path(folder) / "model")
        if not args.model:
            save_model(Path(model), args.size)
        shape = AutoConfig.from_pretrained(model)
        print(f"{args.prompts} prompts of {PROMPT_TOKENS} tokens x {SAMPLES} samples of at most {MAX_TOKENS}")
        print(f"\n| {what} | engines | tokens/s, median (range) | speedup | prefix tokens recomputed, worst pass |")
        print("|---|---|---|---|---|", flush=True)
        for number in args.engines:
            if number > len(there):
                print(f"| {number} | skipped: this machine has {len(there)} {what} | | | |", flush=True)
                continue
            if gpus:
                configs = {f"one over {number}": gpu_config(gpus[:number], number, args.memory)}
                if number > 1:
                    configs[f"{number} of one GPU"] = gpu_config(gpus[:number], 1, args.memory)
            else:
                # Engines take their share of the cores that this process may use.
                os.sched_setaffinity(0, cores[:number])
                configs = {"one": cpu_config(1, shape)}
                if number > 1:
                    configs[f"{number}, each with 1/{number} of its cache"] = cpu_config(number, shape)
            compare(number, configs, args, model, folder)


if __name__ == "__main__":
    main()
