"""The metrics of a step: rollouts, evaluation, engine, memory, and seconds by phase."""

import logging
import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from torchtune_ext.grading.environments import FINISH_REASONS
from torchtune_ext.pipeline.evaluation import compute_accuracy
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.run.errors import UsageError
from torchtune_ext.sampling.types import EngineStats

log = logging.getLogger(__name__)


class Timer:
    """Measures seconds by phase: `with timer("train"): ...`.

    A nested phase has both names: "train/backward". Phases without a slash add up to the step.
    """

    def __init__(self) -> None:
        self._phase = ""
        self.seconds: dict[str, float] = defaultdict(float)  # since the last lap, by phase
        self._lap_start = time.monotonic()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        outer, begin = self._phase, time.monotonic()
        self._phase = f"{outer}/{name}" if outer else name
        try:
            # `record_function` adds the name to the traces of torch's profiler.
            with torch.profiler.record_function(self._phase):
                yield
                # Kernels run asynchronously. Synchronizing attributes their seconds to the phase
                # that launched them. If CUDA is not in use, synchronizing would initialize it.
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()
        finally:
            self.seconds[self._phase] += time.monotonic() - begin
            self._phase = outer

    def lap(self) -> dict[str, float]:
        """Returns `time/...` of all phases since the last lap, and the lap's `time/step`."""
        # One clock reading ends this lap and begins the next, so that the laps have no gap.
        now = time.monotonic()
        values = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        values["time/step"] = now - self._lap_start
        self.seconds.clear()
        self._lap_start = now
        return values


def timing_metrics(values: Mapping[str, float], seconds: Mapping[str, float], iterations: int = 1) -> dict[str, float]:
    """Returns the seconds of a step, and the throughput of generation and training (tokens/s).

    The trained tokens are the tokens in packed rows, where a shared prompt counts once. They count
    once per iteration.

    Args:
        values: the metrics of the step; without token counts the result has no throughput.
        seconds: the return value of `Timer.lap` for the same step.
        iterations: how often the step was trained on its rows.
    """
    metrics, is_async = dict(seconds), "async/staleness_mean" in values
    # In asynchronous training the engine generates during the whole step, so its tokens are divided
    # by `time/step`. The step waits only for unfinished groups: the sum of two details.
    if is_async:
        waits = (seconds.get(f"time/sample/{part}", 0.0) for part in ("generate", "grade"))
        metrics["time/wait_for_rollouts"] = sum(waits)
    for name, tokens, times, phase in (
        ("sampled", "length/tokens", 1, "time/step" if is_async else "time/sample/generate"),
        ("trained", "pack/tokens", iterations, "time/train"),
    ):
        if tokens in values and seconds.get(phase):
            metrics[f"speed/{name}_tokens_s"] = values[tokens] * times / seconds[phase]
    return metrics


def evaluation_metrics(
    sampled: Sequence[Group], greedy: Sequence[Group], skipped: int = 0, first: bool = True
) -> dict[str, float]:
    """Returns the metrics of an evaluation on held-out problems.

    Args:
        sampled: groups sampled at the training temperature.
        greedy: groups of the same problems at temperature 0.
        skipped: number of skipped held-out problems.
        first: whether this is the run's first evaluation.

    Returns:
        The metrics; {} if no sample was graded in a later evaluation.

    Raises:
        UsageError: no sample was graded in the first evaluation.
    """
    max_samples = max(len(group.samples) for group in sampled)
    try:
        drawn, best = compute_accuracy(sampled, (1, max_samples)), compute_accuracy(greedy)
    except UsageError as error:
        # A grader that worked before may recover until the next evaluation.
        if first:
            raise
        log.warning("evaluation: skipped in this step: %s", error)
        return {}
    values = {
        "eval/reward_sampled": drawn.mean,
        "eval/low": drawn.low,
        "eval/high": drawn.high,
        "eval/solved_sampled": drawn.pass_at[1],
        "eval/reward_greedy": best.mean,
        "eval/solved_greedy": best.pass_at[1],
    }
    # pass@n is missing if a problem has fewer than n graded samples.
    if max_samples > 1 and max_samples in drawn.pass_at:
        values[f"eval/pass_at_{max_samples}"] = drawn.pass_at[max_samples]
    return values | ({"eval/skipped": float(skipped)} if skipped else {})


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Returns the lengths of all samples, and the rewards and reward parts of graded samples."""
    samples = [s for g in groups for s in g.samples]
    scores = [s.score for s in samples if s.score is not None]
    lengths = np.array([len(s.completion.sampled_indices) for s in samples])
    values = {
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "length/truncated": sum(s.completion.finish_reason == "length" for s in samples) / len(samples),
        "length/tokens": float(lengths.sum()),
    }
    # Only an episode may be without a token: of an agent that requested no response.
    if any(s.completion.turns or not len(s.completion.tokens) for s in samples):
        turns, endings = [len(s.completion.turns) for s in samples], [s.completion.finish_reason for s in samples]
        # Tokens that were not sampled come from the environment and from the chat template.
        values["episode/turns"] = float(np.mean(turns))
        values["episode/forks"] = float(np.mean([s.completion.num_forks for s in samples]))
        values["episode/no_response"] = float(turns.count(0))
        values["episode/read_tokens"] = float(np.mean([len(s.completion.tokens) for s in samples]) - lengths.mean())
        values |= {f"episode/{ending}": endings.count(ending) / len(endings) for ending in FINISH_REASONS}
    if scores:
        rewards = np.array([score.reward for score in scores])
        values |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
        # Only some samples have certain parts, such as the speed of a program that runs. The mean
        # is over these samples. A text that hung the grader has only the part "timed_out", and
        # counts as 0 in the parts that all others have.
        parts = [score.parts for score in scores]
        graded = [set(score.parts) for score in scores if score.kind != "timed_out"]
        shared = {"timed_out"} | (set.intersection(*graded) if graded else set())
        for name in dict.fromkeys(name for each in parts for name in each):
            part_values = [each.get(name, 0.0) for each in parts if name in each or name in shared]
            values[f"reward/{name}"] = float(np.mean(part_values))
    return values


def engine_metrics(stats: EngineStats) -> dict[str, float]:
    """Returns the engine's counters since the run began."""
    return {
        "engine/prefix_hit_rate": stats.prefix_hit_rate,
        "engine/preemptions": float(stats.preemptions),
        "engine/kv_max": stats.max_kv_usage,
        "engine/concurrency": float(stats.concurrency),
        "engines/healthy": float(stats.serving),
        "engines/restarts": float(stats.restarts),
        "engines/retired": float(stats.retired),
    }


def memory_metrics() -> dict[str, float]:
    """Returns the peak memory of this process since its start, in GiB."""
    # On Linux the unit of `ru_maxrss` is KiB.
    values = {"memory/rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)}
    if torch.cuda.is_available():
        values["memory/gpu_gib"] = torch.cuda.max_memory_allocated() / (1 << 30)
    return values
