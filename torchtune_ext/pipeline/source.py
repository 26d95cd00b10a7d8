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
from torchtune_ext.grading.grader import GradingWatch, is_failure
from torchtune_ext.pipeline.buffer import Ledger
from torchtune_ext.pipeline.groups import Group, group_json, group_of
from torchtune_ext.pipeline.rollout import WAKE_S, GroupStream, Watcher
from torchtune_ext.run.errors import Failure, Mistake, text_of
from torchtune_ext.sampling.calls import mixed_seed
from torchtune_ext.sampling.engine import SamplingConfig
from torchtune_ext.settings.records import Seconds, config_record
from torchtune_ext.tasks.order import Fault, ProblemStream
from torchtune_ext.tasks.task import Problem

log = logging.getLogger(__name__)

REPLAYED = "replayed"  # a key in the state of a run that replays another one instead of sampling: the id of that one


@config_record("rollouts")
class RolloutConfig:
    """The keys of `rollouts:`."""

    deadline_s: Seconds = Field(
        default=1800.0, description="seconds without a completion or grade after which the run fails"
    )


def prompt_fault(tokenizer: ChatTokenizer, max_model_len: int, max_tokens: int) -> Fault:
    """Returns a function that says why the engine cannot sample for a problem, or "" if it can.

    Args:
        max_model_len: the most tokens of a prompt with a completion (`engine.max_model_len`).
        max_tokens: the most tokens of a completion (`sampling.max_tokens`).
    """

    def fault(problem: Problem) -> str:
        try:
            tokens = len(tokenizer.prompt_ids(problem.messages, problem.tools))
        except Exception as error:  # noqa: BLE001 (the template's code, on messages that the user's task made)
            return f"its messages are no prompt: {text_of(error)}"
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


def step_seed(seed: int, step: int, refill: int = 0) -> int:
    """Returns the sampling seed of a step, counted from 1, or of one of its refills."""
    return mixed_seed(seed, step, refill)


class GroupSource:
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
        ledger: Ledger,
        stream: GroupStream | None,
        problems: ProblemStream,
        samples: int,
        sampling: SamplingConfig,
        seed: int,
        deadline_s: float,
    ):
        self.ledger = ledger
        self._stream, self._problems, self._samples = stream, problems, samples
        self._sampling, self._seed, self._deadline_s = sampling, seed, deadline_s
        # Number -> position of its problem in the run, for all groups that are not taken. With it a group keeps its
        # problem when it is submitted again, also by a resumed run.
        self._cursors: dict[int, int] = {}
        self._dropped_tokens = 0
        self._step = 0  # the step whose groups were taken last, counted from 1
        self._graded = GradingWatch()
        self._error: Exception | None = None  # an error in groups of later steps, which the next `take` raises

    @property
    def _open_stream(self) -> GroupStream:
        assert self._stream is not None  # whatever takes groups has one
        return self._stream

    def open(self, version: int) -> None:
        """Notes that the engine has the weights of this version, and submits what may be sampled ahead with them.

        Groups that are too old now are submitted again. Without a stream nothing happens.
        """
        if self._stream is None:
            return
        self._forget_late(version)
        if self.ledger.depth:
            # An error in groups of later steps waits for `take`, so that the last step is still evaluated and saved.
            with self._kept():
                self._submit()

    def take(
        self,
        count: int,
        watch: Callable[[str], AbstractContextManager] = nullcontext,
        watcher: Watcher | None = None,
        refill: int = 0,
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
        if refill:
            with self._open_stream.watched(watcher):
                groups, values = self._take_beside(count, watch, refill), {}
        else:
            with self._open_stream.watched(watcher, self.ledger.taken + self.ledger.batch):
                groups, values = self._take_batch(watch)
        samples = [(group.problem.id, sample.outcome) for group in groups for sample in group.samples]
        self._graded.look(self._step, [(problem, outcome) for problem, outcome in samples if outcome is not None])
        return groups, values | self._open_stream.grader.metrics(refill > 0)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs, JSON-able; {} if no group is between submission and training."""
        if not self._cursors:
            return {}
        # A group that was finished since the last look need not be sampled again.
        with self._kept():
            self._collect(within_s=0.0)
        return {
            "ledger": self.ledger.state_dict(),
            "cursors": sorted([number, cursor] for number, cursor in self._cursors.items()),
            # Groups stay text: as records they would be formatted a second time, which holds up the engine's thread.
            "finished": [[number, group_json(group)] for number, group in sorted(self._open_stream.finished.items())],
            "drawn": self._drawn(),
            "dropped_tokens": self._dropped_tokens,
        }

    def load_state_dict(self, state: dict[str, Any], step: int, version: int) -> None:
        """Resumes after step `step` from what `state_dict` returned then, with weights of `version`.

        Raises:
            ValueError: `prompts_per_step` has changed while groups were in progress, or the earlier run was a replay.
        """
        if REPLAYED in state:
            raise Mistake(
                f"this checkpoint is of a replay of run {state[REPLAYED]}, which has asked no problems of its own: set replay "
                "as it was, or begin a new run in another output_dir (model_dir may be a checkpoint that is a whole model)"
            )
        if self._stream is None:
            return
        # Nothing was between submission and training, as is always so with staleness 0.
        if not state:
            self.ledger.start_at(step)
            self.ledger.advance(version)
            return
        self.ledger.load_state_dict(state["ledger"])
        self._cursors = dict(map(tuple, state["cursors"]))
        self._dropped_tokens = state["dropped_tokens"]
        changed = []
        # A finished group stays as it is, unless the sampling settings or its problem have changed since. One that no
        # grader could grade is sampled again: the user may have mended the grader.
        for number, text in state["finished"]:
            group = group_of(json.loads(text))
            problem = self._problems.again(self._cursors[number], group.problem)
            failed = all(is_failure(sample.outcome) for sample in group.samples)
            if state["drawn"] == self._drawn() and problem is not None and not failed:
                # The task's own problem replaces the stored one, whose answer JSON may have changed.
                self._stream.finished[number] = replace(group, problem=problem)
            else:
                self.ledger.lose(number)
                changed.append(number)
        if changed:
            log.warning(
                "the settings of sampling or the problems have changed since the checkpoint, or the grader had failed: %d "
                "finished groups are sampled again",
                len(changed),
            )
        self._forget_late(version)

    def _drawn(self) -> dict[str, Any]:
        """Returns the settings that decide how a group is sampled."""
        drawn = {"seed": self._seed, "samples": self._samples, "sampling": asdict(self._sampling)}
        # These are compared with those of a checkpoint, where JSON has turned tuples into lists.
        return json.loads(json.dumps(drawn))

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Keeps an error of the block until the next `take` raises it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (it is raised again)
            self._error = error

    def _take_batch(self, watch: Callable[[str], AbstractContextManager]) -> tuple[list[Group], dict[str, float]]:
        # With staleness 0 nothing was submitted before.
        self._submit()
        self._collect(within_s=0.0)
        begun = time.monotonic()
        while (ages := self.ledger.take()) is None:
            missing = self.ledger.waits_for()
            if unsent := [number for number in missing if number not in self.ledger.running]:
                raise Failure(
                    f"version {self.ledger.version}: {len(unsent)} groups of the next step may not be sampled before a newer "
                    "version is published; call open(version) after each publication, and publish once a step"
                )
            self._open_stream.require_signs(begun, self._deadline_s, missing, self._named)
            self._collect(WAKE_S, watch, frozenset(missing))
        groups = [self._open_stream.take(number) for number in ages]
        for number in ages:
            del self._cursors[number]
        self._step = self.ledger.taken // self.ledger.batch
        # A run that is resumed with depth 0 may find groups that were sampled ahead.
        return groups, self._metrics(list(ages.values())) if self.ledger.depth or any(ages.values()) else {}

    def _take_beside(self, count: int, watch: Callable[[str], AbstractContextManager], refill: int) -> list[Group]:
        sampling = replace(self._sampling, seed=step_seed(self._seed, self._step, refill))
        # Their numbers are free: a refill has staleness 0, where nothing else is on its way.
        for place, problem in enumerate(self._problems.take(count)):
            self._submit_one(place, problem, sampling, place, self._step)
        begun = time.monotonic()
        while missing := [place for place in range(count) if place not in self._open_stream.finished]:
            self._open_stream.require_signs(begun, self._deadline_s, missing, self._named)
            self._open_stream.next(watch, WAKE_S)
        return [self._open_stream.take(place) for place in range(count)]

    def _forget_late(self, version: int) -> None:
        # While the version grows by one with every step, no group is ever too old. A resumed run with a smaller
        # staleness may meet some.
        for number in self.ledger.advance(version):
            tokens = self._open_stream.cancel(number)
            self._dropped_tokens += tokens
            log.warning(
                "group %d is too old for version %d and is sampled again; %d tokens are lost", number, version, tokens
            )

    def _submit(self) -> None:
        numbers = self.ledger.submit()
        new = [number for number in numbers if number not in self._cursors]
        problems = dict(zip(new, self._problems.draw(len(new)) if new else [], strict=True))
        for number in numbers:
            if number not in problems:
                cursor = self._cursors[number]
                problem = self._problems.at(cursor)
                # An adaptive task may by now ask another problem at this position. If that one is unusable, the group
                # gets the next problem of the stream.
                problems[number] = self._problems.draw(1)[0] if problem is None else (cursor, problem)
        self._cursors |= {number: cursor for number, (cursor, _) in problems.items()}
        for number in numbers:
            problem = problems[number][1]
            # The seed follows from the number, so a group that is submitted again has the same seed.
            step, place = divmod(number, self.ledger.batch)
            sampling = replace(self._sampling, seed=step_seed(self._seed, step + 1))
            self._submit_one(number, problem, sampling, place, step + 1)

    def _submit_one(self, number: int, problem: Problem, sampling: SamplingConfig, place: int, step: int) -> None:
        try:
            self._open_stream.submit(number, problem, self._samples, sampling, place)
        except ValueError as error:
            raise Mistake(f"problem {problem.id!r} of step {step}: {error}") from error

    def _collect(
        self,
        within_s: float,
        watch: Callable[[str], AbstractContextManager] = nullcontext,
        missing: Collection[int] | None = None,
    ) -> None:
        """Tells the ledger of all groups that are finished; waits up to `within_s` seconds for the first one."""
        # All of them, because the ledger prefers the oldest.
        while (number := self._open_stream.next(watch, within_s, missing)) is not None:
            self.ledger.finish(number)
            within_s = 0.0

    def _named(self, number: int) -> str:
        return f"group {number} (version {self.ledger.running.get(number, self.ledger.version)})"

    def _metrics(self, ages: Sequence[int]) -> dict[str, float]:
        shares = {f"async/age_{age}": ages.count(age) / len(ages) for age in range(self.ledger.staleness + 1)}
        return shares | {
            "async/age_mean": fmean(ages),
            "async/age_max": float(max(ages)),
            "async/buffer": float(len(self.ledger.finished)),
            "async/running": float(len(self.ledger.running)),
            "async/dropped": float(self.ledger.dropped),
            "async/dropped_tokens": float(self._dropped_tokens),
        }
