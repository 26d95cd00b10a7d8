"""Schedules asynchronous training: which groups to submit now, and which to train on next.

In asynchronous training the engine samples groups of later steps while the trainer works. The
staleness of a group is the number of policy versions between its submission and its training. The
key `staleness` bounds it, and `prefetch_steps` is the number of steps for which groups are
submitted in advance.

`StalenessScheduler` handles only group numbers; its caller holds the groups. Groups are numbered 0,
1, 2, ... in the order of their problems. A group that is submitted again keeps its number, problem
and seed.

Submission follows AReaL (arXiv 2505.24298, Eq. 3). Batch selection follows the windowed FIFO of
MiniMax (arXiv 2605.26494, Sec. 6.2.4). Every group belongs to exactly one step, so long samples are
not underrepresented.
"""

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from heapq import nsmallest
from itertools import chain
from typing import Any, TypedDict

from torchtune_ext.run.errors import UsageError

# A finished group may overtake an unfinished group if its number is less than a window higher, and
# if no overtaken group becomes too stale. The window is this fraction of the maximum number of
# groups in flight. An exact fraction, because a float would round some windows down.
OVERTAKING_WINDOW_FRACTION = Fraction(3, 10)


def resolve_prefetch_steps(staleness: int, prefetch_steps: int | None) -> int:
    """Returns `prefetch_steps`, or its default if it is None: 1, or 0 if `staleness` is 0."""
    # Prefetching more steps increases the staleness of every group, and one step brings most of the
    # gain: AReaL on 8 GPUs reaches 92% of the throughput of prefetching 16 steps by prefetching one
    # step. tinker-cookbook (PR 822) separates the two settings, too.
    return min(1, staleness) if prefetch_steps is None else prefetch_steps


class SchedulerState(TypedDict):
    """The state of a scheduler in a checkpoint, as JSON."""

    prompts_per_step: int
    version: int
    next_number: int
    to_resubmit: list[int]  # numbers of groups
    finished: list[list[int]]  # pairs of number and version
    num_dropped: int


# Names that checkpoints of version 0.1 have for keys of `SchedulerState`.
_OLD_STATE_KEYS = {"next": "next_number", "again": "to_resubmit", "dropped": "num_dropped"}


class StalenessScheduler:
    """Tracks groups from submission to training.

    The scheduler is deterministic: it has no clock, thread or I/O. A group is waiting for
    submission, in `running`, in `finished`, or taken.

    Args:
        prompts_per_step: groups that one step trains on.
        max_steps: steps of the whole run.
        staleness: maximum staleness of a group, in policy versions.
        prefetch_steps: number of steps for which groups are submitted in advance, at most
            `staleness`; None for 1, or 0 if `staleness` is 0.

    Raises:
        UsageError: `staleness` or `prefetch_steps` is not a whole number of at least 0, or
            `prefetch_steps` exceeds `staleness`.
    """

    def __init__(self, prompts_per_step: int, max_steps: int, staleness: int = 0, prefetch_steps: int | None = None):
        _require_count("staleness", staleness)
        prefetch_steps = resolve_prefetch_steps(staleness, prefetch_steps)
        _require_count("prefetch_steps", prefetch_steps)
        if prefetch_steps > staleness:
            raise UsageError(
                f"prefetch_steps={prefetch_steps}: these groups would be too stale to train on; expected at most "
                f"staleness={staleness}. Fix: set prefetch_steps={staleness} or staleness={prefetch_steps}"
            )
        self.batch_size, self.total = prompts_per_step, prompts_per_step * max_steps
        self.staleness, self.prefetch_steps = staleness, prefetch_steps
        max_in_flight = (prefetch_steps + 1) * self.batch_size
        self.window = max(1, math.floor(max_in_flight * OVERTAKING_WINDOW_FRACTION))

        self.version = 0  # the version that was published last
        self.next_number = 0  # the lowest number that was never submitted
        self.to_resubmit: set[int] = set()  # lower numbers that must be submitted again
        self.running: dict[int, int] = {}  # number -> version at which it was submitted
        self.finished: dict[int, int] = {}  # the same, for finished groups that are not taken yet
        self.num_dropped = 0  # stale groups dropped in the whole run

    @property
    def num_taken(self) -> int:
        """The number of groups that have been taken."""
        return self.next_number - len(self.to_resubmit) - len(self.running) - len(self.finished)

    @property
    def step(self) -> int:
        """The step (from 1) whose groups were taken last; 0: none."""
        return self.num_taken // self.batch_size

    def start_at(self, step: int) -> None:
        """Starts after step `step`, without groups in progress."""
        self.version = step
        self.next_number = step * self.batch_size

    def on_publish(self, version: int) -> list[int]:
        """Records that `version` of the policy was published. Call it after `load_state_dict`, too.

        Returns:
            The numbers of running or finished groups that are too stale now, lowest first. The caller
            cancels or drops them, and `schedule` returns them again.

        Raises:
            UsageError: the version is older than the last one.
        """
        if version < self.version:
            raise UsageError(
                f"version={version}: expected at least the published version={self.version}. Fix: resume trainer and "
                "scheduler from the same checkpoint"
            )
        self.version = version
        submitted = self.running | self.finished
        stale = sorted(number for number, start in submitted.items() if version - start > self.staleness)
        for number in stale:
            self.running.pop(number, None)
            self.finished.pop(number, None)
        self.to_resubmit.update(stale)
        self.num_dropped += len(stale)
        return stale

    def schedule(self) -> list[int]:
        """Marks all groups that may be submitted as running. Returns their numbers, ascending."""
        # This is AReaL's rule with d = `prefetch_steps` in place of the staleness: the N-th group
        # may be submitted if floor((N - 1) / B) <= i + d, that is, if N <= (i + d + 1) B. Here i is
        # the version. If the caller's versions have jumped, the version would admit more groups
        # than can be trained in time, so i is at most the number of steps that were taken.
        end = min(self.total, (min(self.version, self.step) + self.prefetch_steps + 1) * self.batch_size)
        numbers = [*sorted(number for number in self.to_resubmit if number < end), *range(self.next_number, end)]
        self.running.update(dict.fromkeys(numbers, self.version))
        self.next_number = max(self.next_number, end)
        self.to_resubmit.difference_update(numbers)
        return numbers

    def mark_finished(self, number: int) -> None:
        """Records that a running group is sampled and graded."""
        self.finished[number] = self.running.pop(number)

    def requeue(self, number: int) -> None:
        """Drops a running or finished group, which must be submitted again."""
        if self.running.pop(number, None) is None:
            del self.finished[number]
        self.to_resubmit.add(number)

    def next_batch(self) -> dict[int, int] | None:
        """Takes the batch of the next step.

        Returns:
            Number -> staleness of the groups to train on, lowest number first, or None while no
            batch is complete. A batch is complete at the latest when all of `awaited_groups` are finished.
        """
        assert self.num_taken < self.total, f"all {self.total} groups of the run have been taken"
        if len(self.finished) < self.batch_size:
            return None
        oldest = min(chain(self.running, self.to_resubmit, [self.next_number]))
        batch = nsmallest(self.batch_size, (number for number in self.finished if number < oldest + self.window))
        if len(batch) < self.batch_size:
            return None
        # A batch is chosen only when it is complete. Reserving groups as they finish would complete
        # no batch earlier. At a later choice more of the oldest groups are finished, so fewer are
        # overtaken.
        #
        # Taking the oldest groups is always safe: if another group then misses its deadline, it
        # misses it with every other choice, too.
        if oldest < batch[-1] and not self._meets_deadlines(sorted(set(self._outstanding()).difference(batch))):
            return None
        staleness_by_group = {number: self.version - self.finished.pop(number) for number in batch}
        assert max(staleness_by_group.values()) <= self.staleness, "call on_publish() after load_state_dict()"
        return staleness_by_group

    def awaited_groups(self) -> list[int]:
        """Returns the unfinished groups among the `batch_size` oldest, lowest number first."""
        new = range(self.next_number, min(self.total, self.next_number + self.batch_size))
        oldest = nsmallest(self.batch_size, chain(self._outstanding(), new))
        return [number for number in oldest if number not in self.finished]

    def _outstanding(self) -> Iterable[int]:
        return chain(self.to_resubmit, self.running, self.finished)

    def _meets_deadlines(self, numbers: list[int]) -> bool:
        """Whether the next steps can train these groups, lowest number first, in time."""
        # A group that was submitted at version v is due at step v + staleness, and a step trains B
        # groups. If any order trains all of them in time, the order in which they are due does, too
        # (earliest deadline first). Versions only grow, so that is the order of numbers, in which
        # the group at index k is trained at step version + 1 + k // B. This must not be after step
        # v + staleness.
        #
        # Groups of later submissions change nothing. They follow in this order, and a group that is
        # submitted at version w has an index k < (d + 1) B (d = `prefetch_steps`) if step w is
        # still to come, and k < d B if step w has been taken. In both cases its step is at most
        # w + d, which is not after w + staleness.
        #
        # A group that was submitted again is due later than its number implies, so the test is
        # conservative for it.
        submitted = self.running | self.finished
        return all(
            self.version + 1 + k // self.batch_size <= submitted.get(number, self.version) + self.staleness
            for k, number in enumerate(numbers)
        )

    def state_dict(self) -> SchedulerState:
        """Returns the state that a resumed run needs, as JSON types."""
        # The engine of a resumed run has no requests, so running groups are submitted again.
        return {
            "prompts_per_step": self.batch_size,
            "version": self.version,
            "next_number": self.next_number,
            "to_resubmit": sorted([*self.to_resubmit, *self.running]),
            "finished": sorted([number, version] for number, version in self.finished.items()),
            "num_dropped": self.num_dropped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`. The caller must hold the groups in `finished`.

        Raises:
            UsageError: the earlier run had another number of groups per step.
        """
        # With another number of groups per step, a number would map to another step and seed.
        # `staleness`, `prefetch_steps` and `max_steps` may change: `on_publish` drops groups that
        # exceed a new bound.
        if state["prompts_per_step"] != self.batch_size:
            raise UsageError(
                f"prompts_per_step={self.batch_size}: the checkpoint was written with another number of groups per step; "
                f"expected {state['prompts_per_step']}. Fix: set prompts_per_step={state['prompts_per_step']}, or start a "
                "new run"
            )
        state = {_OLD_STATE_KEYS.get(key, key): value for key, value in state.items()}
        self.version, self.next_number = state["version"], state["next_number"]
        self.num_dropped = state["num_dropped"]
        self.to_resubmit, self.running = set(state["to_resubmit"]), {}
        self.finished = {number: version for number, version in state["finished"]}


def _require_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"{name}={value!r}: expected a whole number of at least 0")
