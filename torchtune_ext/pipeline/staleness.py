"""Decides which groups may be sampled ahead of the trainer, and which finished ones it trains on next.

While the trainer works on one step, the engine can sample for later ones. The *age* of a group is the number of
versions that the policy has gained from its submission to its training. `staleness` bounds the age, and `depth` says
how many steps ahead groups are submitted.

`Ledger` knows only numbers; its caller holds the groups. Groups are numbered 0, 1, 2, ... in the order of their
problems. A group that is submitted again keeps its number, and so its problem and its seed.

Submission follows AReaL (arXiv 2505.24298, Eq. 3), and training the windowed FIFO of MiniMax (arXiv 2605.26494, Sec.
6.2.4). In the end every group is trained on once, long samples like short ones.
"""

from collections.abc import Iterable
from heapq import nsmallest
from itertools import chain
from typing import TypedDict

from torchtune_ext.run.errors import UsageError

# A finished group may pass an unfinished one if its number is less than a window above, and if no group that is passed
# becomes too old. The window is this many tenths of the most groups that are between submission and training.
PASSING_WINDOW_TENTHS = 3


def resolve_prefetch_steps(staleness: int, prefetch_steps: int | None) -> int:
    """Returns how many steps ahead of the trainer groups are submitted. `depth` None: 1, or 0 if `staleness` is 0."""
    # One step ahead brings most of the gain, and more steps make every group older: AReaL on 8 GPUs reaches with one
    # step 92% of the throughput of 16. tinker-cookbook (PR 822) separates the two settings, too.
    return min(1, staleness) if prefetch_steps is None else prefetch_steps


class SchedulerState(TypedDict):
    """What a checkpoint has of a ledger, as JSON."""

    prompts_per_step: int
    version: int
    step: int
    next: int
    again: list[int]  # numbers of groups
    finished: list[list[int]]  # pairs of number and version
    dropped: int


class StalenessScheduler:
    """Follows groups from submission to training. It has no clock, thread or I/O: the same calls give the same answers.

    A group is to be submitted, or in `running`, or in `finished`, or taken.

    Args:
        prompts_per_step: groups that one step trains on.
        max_steps: steps of the whole run.
        staleness: the greatest age of a group, in versions.
        depth: how many steps ahead groups are submitted, at most `staleness`; None: 1, or 0 if `staleness` is 0.

    Raises:
        ValueError: `staleness` or `depth` is not a whole number from 0 on, or `depth` is above `staleness`.
    """

    def __init__(self, prompts_per_step: int, max_steps: int, staleness: int = 0, prefetch_steps: int | None = None):
        _require_count("staleness", staleness)
        prefetch_steps = resolve_prefetch_steps(staleness, prefetch_steps)
        _require_count("prefetch_steps", prefetch_steps)
        if prefetch_steps > staleness:
            raise UsageError(
                f"prefetch_steps={prefetch_steps} is above staleness={staleness}: groups sampled so far ahead would be too old to train on; "
                f"set prefetch_steps to at most {staleness}, or staleness to at least {prefetch_steps}"
            )
        self.batch_size, self.total = prompts_per_step, prompts_per_step * max_steps
        self.staleness, self.prefetch_steps = staleness, prefetch_steps
        self.window = max(1, (prefetch_steps + 1) * self.batch_size * PASSING_WINDOW_TENTHS // 10)

        self.version = 0  # how many times the policy has been published
        self.published_step = 0  # how many steps had been trained then
        self.next_number = 0  # the lowest number that was never submitted
        self.to_resubmit: set[int] = set()  # lower numbers that have to be submitted again
        self.running: dict[int, int] = {}  # number -> version at which it was submitted
        self.finished: dict[int, int] = {}  # the same for finished groups that are not taken yet
        self.num_dropped = 0  # groups that became too old, in the whole run

    @property
    def num_taken(self) -> int:
        """Returns how many groups have been taken."""
        return self.next_number - len(self.to_resubmit) - len(self.running) - len(self.finished)

    def start_at(self, step: int) -> None:
        """Begins after step `step`, with no group in progress."""
        self.version = self.published_step = step
        self.next_number = step * self.batch_size

    def on_publish(self, version: int) -> list[int]:
        """Notes that the policy has been published for the `version`-th time. Call it after `load_state_dict`, too.

        Returns:
            The numbers of the groups, running or finished, that are too old now, lowest first. The caller ends or
            forgets them, and `submit` returns them again.

        Raises:
            ValueError: the version is older than the last one.
        """
        if version < self.version:
            raise UsageError(
                f"version={version} is older than version={self.version}, which the ledger has seen: resume trainer and "
                "ledger from the same checkpoint"
            )
        if version > self.version:
            self.version, self.published_step = version, self.num_taken // self.batch_size
        submitted = self.running | self.finished
        late = sorted(number for number, at in submitted.items() if version - at > self.staleness)
        for number in late:
            self.running.pop(number, None)
            self.finished.pop(number, None)
        self.to_resubmit.update(late)
        self.num_dropped += len(late)
        return late

    def schedule(self) -> list[int]:
        """Returns the numbers of all groups that may be submitted now, lowest first, and counts them as running."""
        # AReaL's rule with `depth` in place of the staleness: the N-th group may go if floor((N - 1) / B) <= i + depth,
        # that is, if N <= (i + depth + 1) B. Here i counts the steps that were trained when the policy was last
        # published. That is the version, unless the caller's versions have jumped. Then the version would let in more
        # groups than can be trained in time.
        end = min(self.total, (self.published_step + self.prefetch_steps + 1) * self.batch_size)
        numbers = [*sorted(number for number in self.to_resubmit if number < end), *range(self.next_number, end)]
        self.running.update(dict.fromkeys(numbers, self.version))
        self.next_number = max(self.next_number, end)
        self.to_resubmit.difference_update(numbers)
        return numbers

    def mark_finished(self, number: int) -> None:
        """Notes that a running group is finished: sampled and graded."""
        self.finished[number] = self.running.pop(number)

    def requeue(self, number: int) -> None:
        """Notes that a running or finished group was lost and has to be submitted again."""
        if self.running.pop(number, None) is None:
            del self.finished[number]
        self.to_resubmit.add(number)

    def next_batch(self) -> dict[int, int] | None:
        """Takes the batch of the next step.

        Returns:
            Number -> age of the groups to train on, lowest number first, or None while there is no batch. There is one
            at the latest when the groups of `waits_for` are finished.
        """
        assert self.num_taken < self.total, f"all {self.total} groups of the run have been taken"
        if len(self.finished) < self.batch_size:
            return None
        oldest = min(chain(self.running, self.to_resubmit, [self.next_number]))
        batch = nsmallest(self.batch_size, (number for number in self.finished if number < oldest + self.window))
        if len(batch) < self.batch_size:
            return None
        # A batch is chosen only when it is complete. Setting groups aside as they finish would fill no batch earlier.
        # And when the choice is late, more of the old groups are finished, so that fewer are passed.
        #
        # The oldest groups may always go: what is too late behind them is too late behind any others.
        if oldest < batch[-1] and not self._meets_deadlines(sorted(set(self._outstanding()).difference(batch))):
            return None
        ages = {number: self.version - self.finished.pop(number) for number in batch}
        assert max(ages.values()) <= self.staleness, "advance() has to be called after load_state_dict()"
        return ages

    def awaited_groups(self) -> list[int]:
        """Returns the unfinished groups among the oldest ones that would make a batch, lowest number first."""
        new = range(self.next_number, min(self.total, self.next_number + self.batch_size))
        oldest = nsmallest(self.batch_size, chain(self._outstanding(), new))
        return [number for number in oldest if number not in self.finished]

    def _outstanding(self) -> Iterable[int]:
        return chain(self.to_resubmit, self.running, self.finished)

    def _meets_deadlines(self, left: list[int]) -> bool:
        """Tells whether no group is trained too late if `left`, lowest number first, stay for the next steps."""
        # A group that was submitted at version v is due at step v + staleness, and a step trains B groups. If any order
        # trains all of them in time, the order in which they are due does, too (earliest deadline first). Versions only
        # grow, so that is the order of numbers, in which the group at place k is trained at step version + 1 + k // B.
        # This must not be after v + staleness.
        #
        # Groups of later submissions change nothing. They stand behind, and one that is submitted at version w has a
        # place k < (depth + 1) B if step w is still to come, and k < depth B if it has been taken. Either way its step
        # is at most w + depth, which is not after w + staleness.
        #
        # A group that was submitted again is due later than its number says, so for it the test is on the safe side.
        submitted = self.running | self.finished
        return all(
            self.version + 1 + place // self.batch_size <= submitted.get(number, self.version) + self.staleness
            for place, number in enumerate(left)
        )

    def state_dict(self) -> SchedulerState:
        """Returns what a resumed run needs, JSON-able."""
        # The engine of a resumed run knows nothing of the groups that are running, so they are submitted again.
        return {
            "prompts_per_step": self.batch_size,
            "version": self.version,
            "step": self.published_step,
            "next": self.next_number,
            "again": sorted([*self.to_resubmit, *self.running]),
            "finished": sorted([number, version] for number, version in self.finished.items()),
            "dropped": self.num_dropped,
        }

    def load_state_dict(self, state: SchedulerState) -> None:
        """Resumes from what `state_dict` of an earlier run returned. The caller still has the groups in `finished`.

        Raises:
            ValueError: the earlier run had another number of groups a step.
        """
        # With another number of groups a step, numbers would mean other steps and seeds. `staleness`, `depth` and
        # `max_steps` may have changed: `advance` drops what is too old for the new bound.
        if state["prompts_per_step"] != self.batch_size:
            raise UsageError(
                f"prompts_per_step={self.batch_size}, but the checkpoint was written with {state['prompts_per_step']}: set "
                f"prompts_per_step={state['prompts_per_step']}, or start a new run"
            )
        self.version, self.published_step, self.next_number = state["version"], state["step"], state["next"]
        self.to_resubmit, self.running = set(state["again"]), {}
        self.finished = {number: version for number, version in state["finished"]}
        self.num_dropped = state["dropped"]


def _require_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"{name}={value!r} must be a whole number, 0 or more")
