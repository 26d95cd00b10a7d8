"""Keeps groups on their way to the trainer, as far ahead of it as the ledger allows.

`GroupSource.open` follows every publication and submits the groups of later steps; `take` waits for those of the next step.
With staleness 0 nothing is submitted before `take`, and the groups of a step are those of a run that samples and trains in
turns.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from torchtune_ext.buffer import Ledger
from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading.grader import GradingWatch
from torchtune_ext.groups import Group, group_json, group_of
from torchtune_ext.rollout import WAKE_S, GroupStream, Watcher
from torchtune_ext.run.errors import Failure, Mistake, text_of
from torchtune_ext.sampling.calls import mixed_seed
from torchtune_ext.sampling.engine import SamplingConfig
from torchtune_ext.tasks.order import Fault, ProblemStream
from torchtune_ext.tasks.task import Problem

log = logging.getLogger(__name__)

REPLAYED = "replayed"  # in the state of a run that samples nothing but replays another one: whose id


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """The node `rollouts:` of a recipe that samples."""

    deadline_s: float = 1800.0  # seconds without a completion or grade after which a wait is given up

    def __post_init__(self) -> None:
        if not self.deadline_s > 0:
            raise Mistake(f"rollouts.deadline_s={self.deadline_s} must be a number of seconds greater than 0")


def prompt_fault(tokenizer: ChatTokenizer, max_model_len: int, max_tokens: int) -> Fault:
    """Returns a function that says why the engine cannot sample for a problem, or "" where it can.

    Args:
        max_model_len: tokens of a prompt and a completion together (`engine.max_model_len`).
        max_tokens: tokens of a completion (`sampling.max_tokens`).
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
    """Returns the seed of sampling of a step of the run, counted from 1, or of one of its refills."""
    return mixed_seed(seed, step, refill)


class GroupSource:
    """Submits problems and hands out finished groups, in the order and at the age that a ledger allows.

    Args:
        ledger: what may be submitted, and what is taken. Its `depth` says how many steps ahead.
        stream: samples and grades; None on a rank that does not.
        problems: where the problems come from. A group that is submitted again keeps its problem.
        samples: completions of each prompt.
        sampling: how they are drawn; its seed is replaced by that of the group's step.
        seed: of the run.
        deadline_s: seconds that `take` waits without any completion or grade before it gives up (`rollouts.deadline_s`).
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
        # Number -> where its problem stands in the run, of all groups that are not taken: a group that is submitted again, or
        # by a resumed run, keeps its problem.
        self._cursors: dict[int, int] = {}
        self.finished: dict[int, Group] = {}
        self._dropped_tokens = 0
        self._step = 0  # whose groups were taken last, counted from 1
        self._graded = GradingWatch()
        self._error: Exception | None = None  # of groups of later steps; the next `take` raises it

    def open(self, version: int) -> None:
        """Notes that the engine has the weights of this version, and submits what may be sampled ahead with them.

        A group that has become too old is ended, or forgotten, and submitted again. Without a stream nothing happens.
        """
        if self._stream is None:
            return
        self._forget_late(version)
        if self.ledger.depth:
            # An error of later steps' groups waits for `take`, so that the step just trained is still evaluated and saved.
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
            count: how many groups; for a step those of a batch of the ledger.
            watch: as in `GroupStream.next`.
            watcher: gets every completion and reward of the groups that the step would have without asynchrony, also those
                that have come before.
            refill: 0: the groups of the next step. From 1: further ones for the step whose groups were taken last, sampled at
                once and beside the ledger, for the `refill`-th time.

        Returns:
            The groups, without advantages, in the order of their problems, and what is to be logged of them.

        Raises:
            TimeoutError: nothing came for `deadline_s` seconds. The message names groups that are missing.
            RuntimeError: the groups of this step may not be submitted yet, since `open` was not called after a publication.
            GradingFailed: for several steps the grader has failed on every text.
            What `GroupStream.submit` and `GroupStream.next` raise.
        """
        if self._error is not None:
            raise self._error
        if refill:
            with self._stream.watched(watcher, {}):
                groups, values = self._take_beside(count, watch, refill), {}
        else:
            with self._stream.watched(watcher, self.finished, self.ledger.taken + self.ledger.batch):
                groups, values = self._take_batch(watch)
        self._graded.look(
            self._step, [(group.problem.id, sample.outcome) for group in groups for sample in group.samples]
        )
        return groups, values | self._stream.grader.metrics(refill > 0)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs, in JSON's types: nothing, if there is nothing between submission and training."""
        if not self._cursors:
            return {}
        # What has been graded since the last look need not be sampled again.
        with self._kept():
            self._collect(within_s=0.0)
        return {
            "ledger": self.ledger.state_dict(),
            "cursors": sorted([number, cursor] for number, cursor in self._cursors.items()),
            # As text, since making JSON of it twice would hold up the engine's thread.
            "finished": [[number, group_json(group)] for number, group in sorted(self.finished.items())],
            "drawn": self._drawn(),
            "dropped_tokens": self._dropped_tokens,
        }

    def load_state_dict(self, state: dict[str, Any], step: int, version: int) -> None:
        """Goes on after step `step` of an earlier run, from what `state_dict` returned then, with weights of `version`.

        A finished group is sampled again where the settings of sampling or its problem have changed since.

        Raises:
            ValueError: `prompts_per_step` has changed while groups were on their way, or until then the run was a replay.
        """
        if REPLAYED in state:
            raise Mistake(
                f"this checkpoint is of a replay of run {state[REPLAYED]}, which has asked no problems of its own: set replay "
                "as it was, or begin a new run in another output_dir (model_dir may be a checkpoint that is a whole model)"
            )
        if self._stream is None:
            return
        if not state:
            self.ledger.start_at(step)
            self.ledger.advance(version)
            return
        self.ledger.load_state_dict(state["ledger"])
        self._cursors = dict(map(tuple, state["cursors"]))
        self._dropped_tokens = state["dropped_tokens"]
        changed = []
        for number, text in state["finished"]:
            group = group_of(json.loads(text))
            problem = self._problems.again(self._cursors[number], group.problem)
            if state["drawn"] == self._drawn() and problem is not None:
                # The problem comes from the task, since JSON may have changed its answer.
                self.finished[number] = replace(group, problem=problem)
            else:
                self.ledger.lose(number)
                changed.append(number)
        if changed:
            log.warning(
                "the settings of sampling or the problems have changed since the checkpoint: %d finished groups are sampled "
                "again",
                len(changed),
            )
        self._forget_late(version)

    def _drawn(self) -> dict[str, Any]:
        """What decides how a group is sampled, in JSON's types."""
        drawn = {"seed": self._seed, "samples": self._samples, "sampling": asdict(self._sampling)}
        return json.loads(json.dumps(drawn))

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Inside, an error is kept, and the next `take` raises it."""
        try:
            yield
        except Exception as error:
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
            self._stream.require_signs(begun, self._deadline_s, missing, self._named)
            self._collect(WAKE_S, watch, missing)
        groups = [self.finished.pop(number) for number in ages]
        for number in ages:
            del self._cursors[number]
        self._step = self.ledger.taken // self.ledger.batch
        return groups, self._metrics(list(ages.values())) if self.ledger.staleness else {}

    def _take_beside(self, count: int, watch: Callable[[str], AbstractContextManager], refill: int) -> list[Group]:
        sampling = replace(self._sampling, seed=step_seed(self._seed, self._step, refill))
        # Their numbers are free: a refill has staleness 0, where nothing else is on its way.
        for place, problem in enumerate(self._problems.take(count)):
            self._stream.submit(place, problem, self._samples, sampling, place)
        groups, begun = {}, time.monotonic()
        while len(groups) < count:
            missing = [place for place in range(count) if place not in groups]
            self._stream.require_signs(begun, self._deadline_s, missing, self._named)
            if pair := self._stream.next(watch, WAKE_S):
                groups[pair[0]] = pair[1]
        return [groups[place] for place in range(count)]

    def _forget_late(self, version: int) -> None:
        # While the version grows by one with every step, no group is ever too old. A run that goes on with a smaller staleness
        # may meet some.
        for number in self.ledger.advance(version):
            finished = self.finished.pop(number, None)
            if finished:
                tokens = _tokens([finished])
            else:
                tokens = self._stream.cancel(number)
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
                # A task that adapts may ask otherwise by now, and that may be a bad problem: another one takes its place.
                problems[number] = self._problems.draw(1)[0] if problem is None else (cursor, problem)
        self._cursors |= {number: cursor for number, (cursor, _) in problems.items()}
        for number in numbers:
            problem = problems[number][1]
            # The seed follows from the number, so a group that is submitted again is sampled with the same one.
            step, place = divmod(number, self.ledger.batch)
            sampling = replace(self._sampling, seed=step_seed(self._seed, step + 1))
            try:
                self._stream.submit(number, problem, self._samples, sampling, place)
            except ValueError as error:
                raise Mistake(f"problem {problem.id!r} of step {step + 1}: {error}") from error

    def _collect(
        self,
        within_s: float,
        watch: Callable[[str], AbstractContextManager] = nullcontext,
        missing: Sequence[int] | None = None,
    ) -> None:
        """Takes what is finished from the stream; waits for the first one for `within_s` seconds."""
        # All that is there is taken, so that the ledger chooses the oldest.
        while pair := self._stream.next(watch, within_s, missing):
            number, group = pair
            self.finished[number] = group
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


def _tokens(groups: Sequence[Group]) -> int:
    return sum(len(sample.completion.sampled) for group in groups for sample in group.samples)
