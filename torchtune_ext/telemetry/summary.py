"""What the groups of a step say in numbers, and how long its phases took."""

import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch

from torchtune_ext.evaluation import accuracy
from torchtune_ext.groups import Group
from torchtune_ext.sampling.records import EngineStats


class Stopwatch:
    """Seconds by phase: `with watch("sample"): ...`.

    Args:
        told: a context manager of the phase's name that is open during the phase, for instance `Ranks.phase`.
    """

    def __init__(self, told: Callable[[str], AbstractContextManager] = nullcontext) -> None:
        self._told = told
        self.seconds: dict[str, float] = defaultdict(float)
        self._begin = time.monotonic()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            with self._told(phase):
                yield
        finally:
            self.seconds[phase] += time.monotonic() - begin

    def metrics(self) -> dict[str, float]:
        values = {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        return values | {"time/step": time.monotonic() - self._begin}


def evaluation_metrics(sampled: Sequence[Group], greedy: Sequence[Group]) -> dict[str, float]:
    """Accuracy on held-out problems: sampled at the training temperature (interval, pass@n of n samples) and greedy."""
    most = max(len(group.samples) for group in sampled)
    drawn, best = accuracy(sampled, (1, most)), accuracy(greedy)
    several = {"eval/pass_at_" + str(most): drawn.pass_at[most]} if most > 1 and most in drawn.pass_at else {}
    return several | {
        "eval/accuracy_sampled": drawn.mean,
        "eval/low": drawn.low,
        "eval/high": drawn.high,
        "eval/solved_sampled": drawn.pass_at[1],
        "eval/accuracy_greedy": best.mean,
        "eval/solved_greedy": best.pass_at[1],
    }


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards with their parts, and lengths, over all samples of the groups (graded ones for the rewards)."""
    samples = [s for g in groups for s in g.samples]
    scores = [s.score for s in samples if s.score is not None]
    lengths = np.array([len(s.completion.tokens) for s in samples])
    values = {
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "length/truncated": sum(s.completion.finish_reason == "length" for s in samples) / len(samples),
        "length/tokens": float(lengths.sum()),
    }
    if scores:
        rewards = np.array([score.reward for score in scores])
        values |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
        for name in scores[0].parts:
            values[f"reward/{name}"] = float(np.mean([score.parts[name] for score in scores if name in score.parts]))
    return values


def engine_metrics(stats: EngineStats) -> dict[str, float]:
    return {
        "engine/prefix_hit_rate": stats.prefix_hit_rate,
        "engine/preemptions": float(stats.preemptions),
        "engine/kv_max": stats.max_kv_usage,
        "engine/concurrency": float(stats.concurrency),
        "engine/restarts": float(stats.restarts),
    }


def memory_metrics() -> dict[str, float]:
    """Peak memory of this process since its start, GiB."""
    values = {"memory/rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)}
    if torch.cuda.is_available():
        values["memory/gpu_gib"] = torch.cuda.max_memory_allocated() / (1 << 30)
    return values
