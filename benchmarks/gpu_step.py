"""Latency and memory of an update of a real model's size on one GPU, next to counted FLOPs and planned memory.

    python benchmarks/gpu_step.py [--models Qwen2.5-0.5B Qwen2.5-3B] [--modes compile checkpointing] [--shapes short ...]

Models have the published widths and random weights: time and memory do not depend on what weights are. An update is forward
and backward of GRPO's loss on one packed row of at most 16,384 tokens, as the learner makes it, then the clipped step of fused
AdamW, in bfloat16 with float32 masters. Seconds are medians of `--repeats` updates after three. The rate uses the operations
that gpu_compile.py counts in forward and backward; recomputation by checkpointing is not counted. "share of matmul" is the
fraction of the rate of an 8192^3 product in the same process. "planned" is the estimate of a dry run, without its allowances.

A model that does not fit with AdamW is measured without an update: `--no-update`.
"""

import argparse
import gc
import json
import math
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from unittest import mock

import torch
from gpu_compile import SHAPES, meta_model, operations_of, rows_of, table

from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.pipeline.packing import Row
from torchtune_ext.policy import from_config
from torchtune_ext.policy.builder import build_policy
from torchtune_ext.policy.hub import hub_model_config
from torchtune_ext.policy.memory import ModelSizes, trainer_memory
from torchtune_ext.training.distributed import Ranks
from torchtune_ext.training.learner import Learner

CUDA, GIB = torch.device("cuda"), 2**30
MODES = ("eager", "compile", "checkpointing", "compile+checkpointing")


def clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def random_weights(model, source, new=()) -> None:
    """Initialize random weights in place of reading a checkpoint."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(std=0.02)


def matmul_rate() -> float:
    """Return the operations per second of a product of 8192^3 in bfloat16."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    for _ in range(5):
        a @ b
    started = clock()
    for _ in range(20):
        a @ b
    return 20 * 2 * 8192**3 / (clock() - started)


def learner_of(name: str, mode: str, update: bool) -> Learner:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hub_model_config(name)))
        with mock.patch("torchtune_ext.policy.builder.load_weights", random_weights):
            policy = build_policy(
                partial(from_config, folder),
                SimpleNamespace(require_tied=lambda model: None),
                CUDA,
                torch.bfloat16,
                activation_checkpointing="checkpointing" in mode,
                compile_layers="compile" in mode,
            )
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=1e-6, fused=True) if update else None
    return Learner(policy, PolicyLoss(), Ranks(0, 1, CUDA), optimizer=optimizer, max_grad_norm=1.0)


def one_update(learner: Learner, row: Row) -> tuple[float, float]:
    """Return the seconds of forward and backward, and of the update."""
    started = clock()
    _, metrics = learner.forward_backward([row])
    computed = clock()
    if learner.optimizer:
        learner.step(metrics, str)
    else:
        learner.policy.model.zero_grad(set_to_none=True)
    return computed - started, clock() - computed


def kernels(learner: Learner, row: Row) -> list[tuple]:
    """Return the GPU time by kernel, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        one_update(learner, row)
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    return [
        (e.key[:90], e.count, f"{e.self_device_time_total / 1e3:.1f}", f"{e.self_device_time_total / total:.0%}")
        for e in events[:12]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["Qwen2.5-0.5B", "Qwen2.5-3B"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["eager", "compile"])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-update", action="store_true", help="forward and backward only")
    parser.add_argument("--kernels", action="store_true", help="also profile the GPU time by kernel")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no case after this time")
    args = parser.parse_args()
    end, rate = time.monotonic() + 60 * args.minutes, matmul_rate()
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}; a matmul of 8192^3: {rate / 1e12:.0f} TFLOP/s")
    head = "model", "mode", "row", "tokens", "forward and backward, s", "tokens/s", "TFLOP/s", "share of matmul"
    head += "update, s", "first, s", "peak GiB", "planned GiB"
    cells, profiles = [], []
    for name in args.models:
        meta, operations = meta_model(name), {}
        for mode in args.modes:
            learner = None
            gc.collect()
            torch.cuda.empty_cache()
            for shape in args.shapes:
                if time.monotonic() > end:
                    break
                learner = learner or learner_of(name, mode, not args.no_update)
                row = rows_of(*SHAPES[shape])[0]
                tokens, checkpointing = row.tokens_T.numel(), "checkpointing" in mode
                torch.cuda.reset_peak_memory_stats()
                started = clock()
                one_update(learner, row)
                first = clock() - started
                times = [one_update(learner, row) for _ in range(2 + args.repeats)][2:]
                seconds, updates = (median(column) for column in zip(*times, strict=True))
                spread = f"{min(t for t, _ in times):.3f}-{max(t for t, _ in times):.3f}"
                if shape not in operations:
                    operations[shape], _ = operations_of(meta, row)
                speed = operations[shape] / seconds
                planned = trainer_memory(
                    ModelSizes(meta, torch.bfloat16), tokens, 1, checkpointing, 0.0 if args.no_update else 8.0
                )
                cells.append((
                    name, mode, shape, f"{tokens:,}", f"{seconds:.3f} ({spread})", f"{tokens / seconds:,.0f}",
                    f"{speed / 1e12:.0f}", f"{speed / rate:.0%}", f"{updates:.3f}", f"{first:.0f}",
                    f"{torch.cuda.max_memory_allocated() / GIB:.1f}", f"{sum(planned.values()) / GIB:.1f}",
                ))  # fmt: skip
                print(*cells[-1], sep=" | ", flush=True)
                if args.kernels and shape == args.shapes[0]:
                    profiles.append((f"Kernels of an update: {name}, {mode}, {shape}", kernels(learner, row)))
            del learner
    table("An update on one row", head, *cells)
    for title, rows in profiles:
        table(title, ("kernel", "times", "ms", "share of all"), *rows)


if __name__ == "__main__":
    main()
