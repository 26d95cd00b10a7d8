"""Provides the groups of each step, which the engine may sample in advance (asynchronous training).

After every weight sync, `RolloutSource.on_publish` submits groups of later steps, as far as the
staleness scheduler allows. `take` waits for the groups of the next step. With `staleness: 0`,
`take` submits them itself: sampling and training alternate. `refill` samples additional groups for
the step that was taken last.
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any, Protocol

from pydantic import Field

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading.grader import GradingMonitor, is_failure
from torchtune_ext.pipeline.groups import Group, group_from_record, group_to_json
from torchtune_ext.pipeline.rollout import SIGNAL_POLL_S, GroupStream, ProgressSink
from torchtune_ext.pipeline.staleness import StalenessScheduler
from torchtune_ext.run.errors import RunFailure, UsageError, describe_error
from torchtune_ext.sampling.backend import derive_seed
from torchtune_ext.sampling.engine import SamplingConfig
from torchtune_ext.settings.sections import Seconds, config_section
from torchtune_ext.tasks.problem_stream import ProblemCheck, ProblemStream
from torchtune_ext.tasks.task import Problem

log = logging.getLogger(__name__)

# Names that checkpoints of version 0.1 have for keys of `RolloutSource.state_dict`.
_OLD_STATE_KEYS = {"ledger": "scheduler", "cursors": "problem_positions", "drawn": "sampling"}
REPLAYED_RUN_KEY = "replayed"  # in the state of a run that replays stored rollouts: the id of the replayed run


@config_section("rollouts")
class RolloutConfig:
    """The keys of `rollouts:`."""

    deadline_s: Seconds = Field(
        default=1800.0, description="timeout: the run fails after this many seconds without a completion or grade"
    )


def make_prompt_check(tokenizer: ChatTokenizer, max_model_len: int, max_tokens: int) -> ProblemCheck:
    """Returns a function that returns why a problem is unusable, or "" if it is usable.

    Args:
        tokenizer: renders the messages of a problem.
        max_model_len: maximum tokens of prompt plus completion (`engine.max_model_len`).
        max_tokens: maximum tokens of a completion (`sampling.max_tokens`).
    """

    def reason(problem: Problem) -> str:
        try:
            tokens = len(tokenizer.prompt_ids(problem.messages, problem.tools))
        except Exception as error:  # noqa: BLE001 (the template's code, on messages that the user's task made)
            return f"its messages cannot be rendered: {describe_error(error)}"
        if not tokens:
            return "its prompt is empty"
        if tokens + max_tokens <= max_model_len:
            return ""
        left = max_model_len - max_tokens
        return (
            f"its prompt has {tokens} tokens; engine.max_model_len={max_model_len} minus sampling.max_tokens={max_tokens} "
            f"leaves {left}"
        )

    return reason


def sampling_seed(seed: int, step: int, refill_round: int = 0) -> int:
    """Returns the sampling seed of a step (from 1) and its refill round (0: the first round)."""
    return derive_seed(seed, step, refill_round)


class GroupSource(Protocol):
    """Provides the groups of each step: a `RolloutSource`, or a `ReplaySource` in a replay."""

    def on_publish(self, version: int) -> None: ...

    def take(
        self,
        count: int,
        timer: Callable[[str], AbstractContextManager] = ...,
        progress: ProgressSink | None = ...,
    ) -> tuple[list[Group], dict[str, float]]: ...

    def refill(
        self,
        count: int,
        refill_round: int,
        timer: Callable[[str], AbstractContextManager] = ...,
        progress: ProgressSink | None = ...,
    ) -> tuple[list[Group], dict[str, float]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], step: int) -> None: ...

    def close(self) -> None: ...


class RolloutSource:
    """Submits problems and returns finished groups, in the order that the scheduler decides.

    Args:
        scheduler: selects the groups to submit, and the groups that `take` returns.
        stream: samples and grades groups; None on ranks other than 0.
        problems: the training problems.
        num_samples: completions per prompt.
        sampling: sampling parameters; a seed derived from the group's step replaces their seed.
        seed: seed of the run.
        deadline_s: `take` fails after this many seconds without a completion or grade
            (`rollouts.deadline_s`).
    """

    def __init__(
        self,
        scheduler: StalenessScheduler,
        stream: GroupStream | None,
        problems: ProblemStream,
        num_samples: int,
        sampling: SamplingConfig,
        seed: int,
        deadline_s: float,
    ):
        self.scheduler = scheduler
        self._stream, self._problems, self._num_samples = stream, problems, num_samples
        self._sampling, self._seed, self._deadline_s = sampling, seed, deadline_s
        # Group number -> position of its problem in the run, for all groups that are not taken. A
        # group that is submitted again, also by a resumed run, keeps its problem.
        self._problem_positions: dict[int, int] = {}
        self._dropped_tokens = 0
        self._grading_monitor = GradingMonitor()
        self._error: Exception | None = None  # an error in prefetched groups; the next `take` raises it

    def _require_stream(self) -> GroupStream:
        assert self._stream is not None  # only rank 0 takes groups
        return self._stream

    def on_publish(self, version: int) -> None:
        """Records that the engine has the weights of `version`, and submits groups of later steps.

        Groups that are too stale now are submitted again. Without a stream this method does
        nothing.
        """
        if self._stream is None:
            return
        self._resubmit_stale(version)
        if self.scheduler.prefetch_steps:
            # `take` raises errors of prefetched groups, so that the current step is still evaluated
            # and saved.
            with self._defer_error():
                self._submit()

    def take(
        self,
        count: int,
        timer: Callable[[str], AbstractContextManager] = nullcontext,
        progress: ProgressSink | None = None,
    ) -> tuple[list[Group], dict[str, float]]:
        """Waits for the groups of the next step.

        Args:
            count: number of groups, the scheduler's batch size.
            timer: as in `GroupStream.wait_next`.
            progress: reports the samples of all groups up to the last group of the next batch,
                including samples that have already arrived.

        Returns:
            The groups without advantages, in the order of their problems, and their metrics.

        Raises:
            DeadlineExceeded: no completion or grade arrived for `deadline_s` seconds. The message
                names the missing groups.
            RunFailure: `on_publish` was not called after a weight sync, so the groups of this step
                cannot be submitted yet.
            GradingFailed: the grader has failed on every text of several steps.
            Exception: any error of `GroupStream.submit` or `GroupStream.wait_next`.
        """
        if self._error is not None:
            raise self._error
        stream = self._require_stream()
        with stream.report_progress(progress, self.scheduler.num_taken + self.scheduler.batch_size):
            groups, metrics = self._take_batch(timer)
        self._check_grading(groups)
        return groups, metrics | stream.grading_metrics(False)

    def refill(
        self,
        count: int,
        refill_round: int,
        timer: Callable[[str], AbstractContextManager] = nullcontext,
        progress: ProgressSink | None = None,
    ) -> tuple[list[Group], dict[str, float]]:
        """Samples `count` more groups for the step that was taken last, without the scheduler.

        Args:
            refill_round: the number of this refill in its step, from 1. Other arguments, results
                and errors are as in `take`.
        """
        if self._error is not None:
            raise self._error
        with self._require_stream().report_progress(progress):
            groups = self._sample_refill(count, timer, refill_round)
        self._check_grading(groups)
        return groups, self._require_stream().grading_metrics(True)

    def _check_grading(self, groups: Sequence[Group]) -> None:
        samples = [(group.problem.id, sample.outcome) for group in groups for sample in group.samples]
        self._grading_monitor.check_step(
            self.scheduler.step, [(problem, outcome) for problem, outcome in samples if outcome is not None]
        )

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a resumed run as JSON types; {} without submitted groups."""
        if not self._problem_positions:
            return {}
        # Collect groups that have finished since the last `take`, so that they are not sampled
        # again.
        with self._defer_error():
            self._collect(timeout_s=0.0)
        return {
            "scheduler": self.scheduler.state_dict(),
            "problem_positions": sorted([number, position] for number, position in self._problem_positions.items()),
            # Groups are stored as JSON strings. Serializing them again as part of the checkpoint
            # would hold the interpreter lock, which the engine's thread needs.
            "finished": [
                [number, group_to_json(group)] for number, group in sorted(self._require_stream().finished.items())
            ],
            "sampling": self._sampling_fingerprint(),
            "dropped_tokens": self._dropped_tokens,
        }

    def load_state_dict(self, state: dict[str, Any], step: int, version: int | None = None) -> None:
        """Resumes after step `step` from the result of `state_dict`.

        Args:
            state: the result of `state_dict`.
            step: the last step that has ended, which is also the version of the policy.
            version: unused; copies of earlier recipes pass it.

        Raises:
            UsageError: `prompts_per_step` has changed while groups were in progress, or the
                checkpoint is from a replay.
        """
        if REPLAYED_RUN_KEY in state:
            raise UsageError(
                f"this checkpoint is from a replay of run {state[REPLAYED_RUN_KEY]} and has no position in the task. Fix: set "
                "replay to that run, or start a new run in another output_dir. To use this checkpoint's weights, set "
                "model_dir to its folder if it has full weights"
            )
        if self._stream is None:
            return
        # No groups were in progress. This is always the case with staleness 0.
        if not state:
            self.scheduler.start_at(step)
            return
        state = {_OLD_STATE_KEYS.get(key, key): value for key, value in state.items()}
        self.scheduler.load_state_dict(state["scheduler"])
        self._problem_positions = dict(map(tuple, state["problem_positions"]))
        self._dropped_tokens = state["dropped_tokens"]
        num_resampled = 0
        # A finished group is kept unless the sampling settings or its problem have changed. A group
        # whose samples all failed in grading is sampled again, because the user may have fixed the
        # grader.
        for number, text in state["finished"]:
            group = group_from_record(json.loads(text))
            problem = self._problems.restored_problem(self._problem_positions[number], group.problem)
            has_failed = all(is_failure(sample.outcome) for sample in group.samples)
            if state["sampling"] == self._sampling_fingerprint() and problem is not None and not has_failed:
                # The task's own problem replaces the stored problem, because JSON may have changed
                # its answer.
                self._stream.finished[number] = replace(group, problem=problem)
            else:
                self.scheduler.requeue(number)
                num_resampled += 1
        if num_resampled:
            log.warning(
                "resume: the sampling settings or the problems have changed since the checkpoint, or grading had failed: %d "
                "finished groups are sampled again",
                num_resampled,
            )
        self._resubmit_stale(step)

    def _sampling_fingerprint(self) -> dict[str, Any]:
        """Returns the settings that determine how a group is sampled."""
        # The JSON round trip turns tuples into lists, as in the checkpoint that this is compared
        # with.
        return json.loads(
            json.dumps({"seed": self._seed, "samples": self._num_samples, "sampling": asdict(self._sampling)})
        )

    @contextmanager
    def _defer_error(self) -> Iterator[None]:
        """Stores an error of the block. The next `take` raises it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (it is raised again)
            self._error = error

    def _take_batch(self, timer: Callable[[str], AbstractContextManager]) -> tuple[list[Group], dict[str, float]]:
        # With staleness 0, `on_publish` submits no groups, so submit them here.
        self._submit()
        self._collect(timeout_s=0.0)
        wait_started = time.monotonic()
        while (staleness_by_group := self.scheduler.next_batch()) is None:
            missing = self.scheduler.awaited_groups()
            if unsubmitted := [number for number in missing if number not in self.scheduler.running]:
                raise RunFailure(
                    f"version={self.scheduler.version}: {len(unsubmitted)} groups of the next step cannot be sampled "
                    "before a newer version is published. Fix: call source.on_publish(version) after each weight sync, "
                    "and publish once per step"
                )
            self._require_stream().check_deadline(wait_started, self._deadline_s, missing, self._describe_group)
            self._collect(SIGNAL_POLL_S, timer, frozenset(missing))
        groups = [self._require_stream().pop(number) for number in staleness_by_group]
        for number in staleness_by_group:
            del self._problem_positions[number]
        # A run that is resumed with `prefetch_steps: 0` may have prefetched groups from before the
        # resume.
        if not self.scheduler.prefetch_steps and not any(staleness_by_group.values()):
            return groups, {}
        return groups, self._metrics(list(staleness_by_group.values()))

    def _sample_refill(
        self, count: int, timer: Callable[[str], AbstractContextManager], refill_round: int
    ) -> list[Group]:
        sampling = replace(self._sampling, seed=sampling_seed(self._seed, self.scheduler.step, refill_round))
        # A refill requires staleness 0, so no other groups are in the stream and their numbers can
        # be reused.
        for index, problem in enumerate(self._problems.next_problems(count)):
            self._submit_one(index, problem, sampling, index, self.scheduler.step)
        wait_started = time.monotonic()
        while missing := [index for index in range(count) if index not in self._require_stream().finished]:
            self._require_stream().check_deadline(wait_started, self._deadline_s, missing, self._describe_group)
            self._require_stream().wait_next(timer, SIGNAL_POLL_S)
        return [self._require_stream().pop(index) for index in range(count)]

    def _resubmit_stale(self, version: int) -> None:
        # While the version grows by one per step, no group becomes too stale. A resumed run with a
        # smaller staleness may have groups that are too stale.
        for number in self.scheduler.on_publish(version):
            tokens = self._require_stream().cancel(number)
            self._dropped_tokens += tokens
            log.warning(
                "rollouts: group %d is too stale for version %d and is sampled again; %d tokens are dropped",
                number,
                version,
                tokens,
            )

    def _submit(self) -> None:
        numbers = self.scheduler.schedule()
        new_numbers = [number for number in numbers if number not in self._problem_positions]
        new_problems = self._problems.next_with_positions(len(new_numbers)) if new_numbers else []
        problems = dict(zip(new_numbers, new_problems, strict=True))
        for number in numbers:
            if number not in problems:
                position = self._problem_positions[number]
                problem = self._problems.problem_at(position)
                # An adaptive task may have replaced the problem at this position. If the new
                # problem is unusable, the group gets the next problem of the stream.
                problems[number] = self._problems.next_with_positions(1)[0] if problem is None else (position, problem)
        self._problem_positions |= {number: position for number, (position, _) in problems.items()}
        for number in numbers:
            problem = problems[number][1]
            # The seed is derived from the group number, so a group that is submitted again has the
            # same seed.
            step, seed_index = divmod(number, self.scheduler.batch_size)
            sampling = replace(self._sampling, seed=sampling_seed(self._seed, step + 1))
            self._submit_one(number, problem, sampling, seed_index, step + 1)

    def _submit_one(self, number: int, problem: Problem, sampling: SamplingConfig, seed_index: int, step: int) -> None:
        try:
            self._require_stream().submit(number, problem, self._num_samples, sampling, seed_index)
        except ValueError as error:
            raise UsageError(f"problem {problem.id!r} of step {step}: {error}") from error

    def _collect(
        self,
        timeout_s: float,
        timer: Callable[[str], AbstractContextManager] = nullcontext,
        awaited: Collection[int] | None = None,
    ) -> None:
        """Marks all finished groups in the scheduler; waits up to `timeout_s` s for the first."""
        # Collect all finished groups, because the scheduler prefers the oldest.
        while (number := self._require_stream().wait_next(timer, timeout_s, awaited)) is not None:
            self.scheduler.mark_finished(number)
            timeout_s = 0.0

    def _describe_group(self, number: int) -> str:
        return f"group {number} (version {self.scheduler.running.get(number, self.scheduler.version)})"

    def _metrics(self, staleness: Sequence[int]) -> dict[str, float]:
        metrics = {
            f"async/staleness_{versions}": staleness.count(versions) / len(staleness)
            for versions in range(self.scheduler.staleness + 1)
        }
        return metrics | {
            "async/staleness_mean": fmean(staleness),
            "async/staleness_max": float(max(staleness)),
            "async/buffer": float(len(self.scheduler.finished)),
            "async/running": float(len(self.scheduler.running)),
            "async/dropped": float(self.scheduler.num_dropped),
            "async/dropped_tokens": float(self._dropped_tokens),
        }
