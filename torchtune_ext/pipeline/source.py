"""Samples groups for the trainer, as far ahead of it as the ledger allows.

After every publication `GroupSource.open` submits groups of later steps, and `take` waits for those of the next step.
With staleness 0 nothing is submitted before `take`: sampling and training take turns.
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from pydantic import Field

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading.grader import GradingMonitor, is_failure
from torchtune_ext.pipeline.groups import Group, group_from_record, group_to_json
from torchtune_ext.pipeline.rollout import SIGNAL_POLL_S, GroupStream, ProgressSink
from torchtune_ext.pipeline.staleness import StalenessScheduler
from torchtune_ext.run.errors import RunFailure, UsageError, describe_error
from torchtune_ext.sampling.backend import derive_seed
from torchtune_ext.sampling.engine import SamplingConfig
from torchtune_ext.settings.records import Seconds, config_record
from torchtune_ext.tasks.problem_stream import ProblemCheck, ProblemStream
from torchtune_ext.tasks.task import Problem

log = logging.getLogger(__name__)

REPLAYED_RUN_KEY = (
    "replayed"  # a key in the state of a run that replays another one instead of sampling: the id of that one
)


@config_record("rollouts")
class RolloutConfig:
    """The keys of `rollouts:`."""

    deadline_s: Seconds = Field(
        default=1800.0, description="seconds without a completion or grade after which the run fails"
    )


def make_prompt_check(tokenizer: ChatTokenizer, max_model_len: int, max_tokens: int) -> ProblemCheck:
    """Returns a function that says why the engine cannot sample for a problem, or "" if it can.

    Args:
        max_model_len: the most tokens of a prompt with a completion (`engine.max_model_len`).
        max_tokens: the most tokens of a completion (`sampling.max_tokens`).
    """

    def fault(problem: Problem) -> str:
        try:
            tokens = len(tokenizer.prompt_ids(problem.messages, problem.tools))
        except Exception as error:  # noqa: BLE001 (the template's code, on messages that the user's task made)
            return f"its messages are no prompt: {describe_error(error)}"
        if not tokens:
            return "its prompt is empty"
        if tokens + max_tokens <= max_model_len:
            return ""
        left = max_model_len - max_tokens
        return (
            f"its prompt has {tokens} tokens, and beside sampling.max_tokens={max_tokens} engine.max_model_len="
            f"{max_model_len} leaves {left}"
        )

    return fault


def sampling_seed(seed: int, step: int, refill_round: int = 0) -> int:
    """Returns the sampling seed of a step, counted from 1, or of one of its refills."""
    return derive_seed(seed, step, refill_round)


class RolloutSource:
    """Submits problems and returns finished groups, in the order and at the age that a ledger allows.

    Args:
        ledger: decides what may be submitted, and which groups `take` returns.
        stream: samples and grades; None on a rank that does not.
        problems: the source of the problems.
        samples: completions of each prompt.
        sampling: how they are sampled; the seed of the group's step replaces its seed.
        seed: the seed of the run.
        deadline_s: seconds without a completion or a grade after which `take` gives up (`rollouts.deadline_s`).
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
        # Number -> position of its problem in the run, for all groups that are not taken. With it a group keeps its
        # problem when it is submitted again, also by a resumed run.
        self._cursors: dict[int, int] = {}
        self._dropped_tokens = 0
        self._step = 0  # the step whose groups were taken last, counted from 1
        self._grading_monitor = GradingMonitor()
        self._error: Exception | None = None  # an error in groups of later steps, which the next `take` raises

    @property
    def _active_stream(self) -> GroupStream:
        assert self._stream is not None  # whatever takes groups has one
        return self._stream

    def prefetch(self, version: int) -> None:
        """Notes that the engine has the weights of this version, and submits what may be sampled ahead with them.

        Groups that are too old now are submitted again. Without a stream nothing happens.
        """
        if self._stream is None:
            return
        self._resubmit_stale(version)
        if self.scheduler.prefetch_steps:
            # An error in groups of later steps waits for `take`, so that the last step is still evaluated and saved.
            with self._defer_error():
                self._submit()

    def take(
        self,
        count: int,
        timer: Callable[[str], AbstractContextManager] = nullcontext,
        progress: ProgressSink | None = None,
        refill_round: int = 0,
    ) -> tuple[list[Group], dict[str, float]]:
        """Waits for groups to train on.

        Args:
            count: how many groups; the ledger's batch for a step.
            watch: as in `GroupStream.next`.
            watcher: sees the samples of the groups that the step would have without asynchrony, also earlier ones.
            refill: 0 takes the groups of the next step. k > 0 samples further ones, beside the ledger, for the step
                that was taken last, for the k-th time.

        Returns:
            The groups, without advantages, in the order of their problems, and their metrics.

        Raises:
            TimeoutError: nothing came for `deadline_s` seconds. The message names missing groups.
            RuntimeError: `open` was not called after a publication, so groups of this step may not be submitted.
            GradingFailed: the grader has failed on every text of several steps.
            What `GroupStream.submit` and `GroupStream.next` raise.
        """
        if self._error is not None:
            raise self._error
        if refill_round:
            with self._active_stream.report_progress(progress):
                groups, values = self._sample_refill(count, timer, refill_round), {}
        else:
            with self._active_stream.report_progress(progress, self.scheduler.num_taken + self.scheduler.batch_size):
                groups, values = self._take_batch(timer)
        samples = [(group.problem.id, sample.outcome) for group in groups for sample in group.samples]
        self._grading_monitor.check_step(
            self._step, [(problem, outcome) for problem, outcome in samples if outcome is not None]
        )
        return groups, values | self._active_stream.grader.metrics(refill_round > 0)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs, JSON-able; {} if no group is between submission and training."""
        if not self._cursors:
            return {}
        # A group that was finished since the last look need not be sampled again.
        with self._defer_error():
            self._collect(timeout_s=0.0)
        return {
            "ledger": self.scheduler.state_dict(),
            "cursors": sorted([number, cursor] for number, cursor in self._cursors.items()),
            # Groups stay text: as records they would be formatted a second time, which holds up the engine's thread.
            "finished": [
                [number, group_to_json(group)] for number, group in sorted(self._active_stream.finished.items())
            ],
            "drawn": self._sampling_fingerprint(),
            "dropped_tokens": self._dropped_tokens,
        }

    def load_state_dict(self, state: dict[str, Any], step: int, version: int) -> None:
        """Resumes after step `step` from what `state_dict` returned then, with weights of `version`.

        Raises:
            ValueError: `prompts_per_step` has changed while groups were in progress, or the earlier run was a replay.
        """
        if REPLAYED_RUN_KEY in state:
            raise UsageError(
                f"this checkpoint is of a replay of run {state[REPLAYED_RUN_KEY]}, which has asked no problems of its own: set replay "
                "as it was, or begin a new run in another output_dir (model_dir may be a checkpoint that is a whole model)"
            )
        if self._stream is None:
            return
        # Nothing was between submission and training, as is always so with staleness 0.
        if not state:
            self.scheduler.start_at(step)
            self.scheduler.on_publish(version)
            return
        self.scheduler.load_state_dict(state["ledger"])
        self._cursors = dict(map(tuple, state["cursors"]))
        self._dropped_tokens = state["dropped_tokens"]
        changed = []
        # A finished group stays as it is, unless the sampling settings or its problem have changed since. One that no
        # grader could grade is sampled again: the user may have mended the grader.
        for number, text in state["finished"]:
            group = group_from_record(json.loads(text))
            problem = self._problems.restored_problem(self._cursors[number], group.problem)
            failed = all(is_failure(sample.outcome) for sample in group.samples)
            if state["drawn"] == self._sampling_fingerprint() and problem is not None and not failed:
                # The task's own problem replaces the stored one, whose answer JSON may have changed.
                self._stream.finished[number] = replace(group, problem=problem)
            else:
                self.scheduler.requeue(number)
                changed.append(number)
        if changed:
            log.warning(
                "the settings of sampling or the problems have changed since the checkpoint, or the grader had failed: %d "
                "finished groups are sampled again",
                len(changed),
            )
        self._resubmit_stale(version)

    def _sampling_fingerprint(self) -> dict[str, Any]:
        """Returns the settings that decide how a group is sampled."""
        # These are compared with those of a checkpoint, where JSON has turned tuples into lists.
        return json.loads(
            json.dumps({"seed": self._seed, "samples": self._num_samples, "sampling": asdict(self._sampling)})
        )

    @contextmanager
    def _defer_error(self) -> Iterator[None]:
        """Keeps an error of the block until the next `take` raises it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (it is raised again)
            self._error = error

    def _take_batch(self, timer: Callable[[str], AbstractContextManager]) -> tuple[list[Group], dict[str, float]]:
        # With staleness 0 nothing was submitted before.
        self._submit()
        self._collect(timeout_s=0.0)
        begun = time.monotonic()
        while (ages := self.scheduler.next_batch()) is None:
            missing = self.scheduler.awaited_groups()
            if unsent := [number for number in missing if number not in self.scheduler.running]:
                raise RunFailure(
                    f"version {self.scheduler.version}: {len(unsent)} groups of the next step may not be sampled before a newer "
                    "version is published; call open(version) after each publication, and publish once a step"
                )
            self._active_stream.check_deadline(begun, self._deadline_s, missing, self._describe_group)
            self._collect(SIGNAL_POLL_S, timer, frozenset(missing))
        groups = [self._active_stream.pop(number) for number in ages]
        for number in ages:
            del self._cursors[number]
        self._step = self.scheduler.num_taken // self.scheduler.batch_size
        # A run that is resumed with depth 0 may find groups that were sampled ahead.
        return groups, self._metrics(list(ages.values())) if self.scheduler.prefetch_steps or any(ages.values()) else {}

    def _sample_refill(
        self, count: int, timer: Callable[[str], AbstractContextManager], refill_round: int
    ) -> list[Group]:
        sampling = replace(self._sampling, seed=sampling_seed(self._seed, self._step, refill_round))
        # Their numbers are free: a refill has staleness 0, where nothing else is on its way.
        for index, problem in enumerate(self._problems.next_problems(count)):
            self._submit_one(index, problem, sampling, index, self._step)
        begun = time.monotonic()
        while missing := [place for place in range(count) if place not in self._active_stream.finished]:
            self._active_stream.check_deadline(begun, self._deadline_s, missing, self._describe_group)
            self._active_stream.wait_next(timer, SIGNAL_POLL_S)
        return [self._active_stream.pop(place) for place in range(count)]

    def _resubmit_stale(self, version: int) -> None:
        # While the version grows by one with every step, no group is ever too old. A resumed run with a smaller
        # staleness may meet some.
        for number in self.scheduler.on_publish(version):
            tokens = self._active_stream.cancel(number)
            self._dropped_tokens += tokens
            log.warning(
                "group %d is too old for version %d and is sampled again; %d tokens are lost", number, version, tokens
            )

    def _submit(self) -> None:
        numbers = self.scheduler.schedule()
        new = [number for number in numbers if number not in self._cursors]
        problems = dict(zip(new, self._problems.next_with_positions(len(new)) if new else [], strict=True))
        for number in numbers:
            if number not in problems:
                cursor = self._cursors[number]
                problem = self._problems.problem_at(cursor)
                # An adaptive task may by now ask another problem at this position. If that one is unusable, the group
                # gets the next problem of the stream.
                problems[number] = self._problems.next_with_positions(1)[0] if problem is None else (cursor, problem)
        self._cursors |= {number: cursor for number, (cursor, _) in problems.items()}
        for number in numbers:
            problem = problems[number][1]
            # The seed follows from the number, so a group that is submitted again has the same seed.
            step, seed_index = divmod(number, self.scheduler.batch_size)
            sampling = replace(self._sampling, seed=sampling_seed(self._seed, step + 1))
            self._submit_one(number, problem, sampling, seed_index, step + 1)

    def _submit_one(self, number: int, problem: Problem, sampling: SamplingConfig, seed_index: int, step: int) -> None:
        try:
            self._active_stream.submit(number, problem, self._num_samples, sampling, seed_index)
        except ValueError as error:
            raise UsageError(f"problem {problem.id!r} of step {step}: {error}") from error

    def _collect(
        self,
        timeout_s: float,
        timer: Callable[[str], AbstractContextManager] = nullcontext,
        awaited: Collection[int] | None = None,
    ) -> None:
        """Tells the ledger of all groups that are finished; waits up to `within_s` seconds for the first one."""
        # All of them, because the ledger prefers the oldest.
        while (number := self._active_stream.wait_next(timer, timeout_s, awaited)) is not None:
            self.scheduler.mark_finished(number)
            timeout_s = 0.0

    def _describe_group(self, number: int) -> str:
        return f"group {number} (version {self.scheduler.running.get(number, self.scheduler.version)})"

    def _metrics(self, ages: Sequence[int]) -> dict[str, float]:
        shares = {f"async/age_{age}": ages.count(age) / len(ages) for age in range(self.scheduler.staleness + 1)}
        return shares | {
            "async/age_mean": fmean(ages),
            "async/age_max": float(max(ages)),
            "async/buffer": float(len(self.scheduler.finished)),
            "async/running": float(len(self.scheduler.running)),
            "async/dropped": float(self.scheduler.num_dropped),
            "async/dropped_tokens": float(self._dropped_tokens),
        }
