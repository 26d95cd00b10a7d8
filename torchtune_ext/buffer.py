"""Decides which groups may be sampled ahead of the trainer, and which finished ones it trains on next.

While the trainer works on one step, the engine can sample for later ones. Their groups are then trained by a policy that
is some versions newer than the one that began to sample them: that is the *age* of a group. Two settings, apart from each
other: `staleness` bounds the age, `depth` says how many steps ahead groups are submitted. A greater depth makes every group
older and gains little: AReaL on 8 GPUs reaches at 1 step 92% of the throughput of 16. (tinker-cookbook PR #822 set the two
apart.)

`Ledger` knows only numbers; its caller holds the groups. Groups are numbered 0, 1, 2, ... in the order of their
problems. Number `n` would be place `n % B` of step `n // B` in a run without asynchrony, with `B` groups a step; a group
that is submitted again keeps its number and so its problem and its seed.

Which groups are submitted. AReaL (arXiv 2505.24298, Eq. 3) submits the N-th group at version i if
floor((N - 1) / B) <= i + staleness. The same rule holds here with `depth` instead of `staleness`, and never beyond the
groups that the run needs.

Which groups are trained. That rule bounds the age only if groups are trained in the order of their numbers, which waits for
every long sample. Taking whatever is finished would train on short samples first. Between the two stands the windowed FIFO
(MiniMax, arXiv 2605.26494, Sec. 6.2.4): a finished group may pass an unfinished one if it is less than a *window* of
numbers younger, and if nothing that is passed becomes too old (`Ledger._in_time`). So the groups that have been trained
always are the first ones, but for less than a window, and in the end each of them was trained once: the lengths that are
trained on are those that were sampled. Where groups are submitted as soon as they may be, passing needs a bound above the
depth: at `staleness == depth` every group is due at just the step that its number names, but for those of the beginning.

A batch is chosen at once, when all `B` groups of it can be had. To set groups aside one by one, as they finish, would not
fill a batch earlier, since a group that may be taken stays so while older ones finish. But choosing late finds
more old groups finished and takes the oldest, so that fewer are passed.
"""

from collections.abc import Iterable
from heapq import nsmallest
from itertools import chain

from torchtune_ext.run.errors import Mistake

WINDOW_TENTHS = 3  # tenths of the most groups between submission and training that the window spans


class Ledger:
    """Follows groups from submission to training. It has no clock, thread or I/O: the same calls give the same answers.

    A group is either to be submitted, or in `running`, or in `finished`, or it has been taken. What is dropped or lost is to
    be submitted again under the same number.
    """

    def __init__(self, prompts_per_step: int, max_steps: int, staleness: int = 0, depth: int | None = None):
        """Args: prompts_per_step: groups that one step trains; max_steps: of the whole run; staleness: greatest age of a
        group, in versions; depth: steps ahead of the trainer for which groups are submitted, at most `staleness`. With None
        it is 1, or 0 where `staleness` is 0.

        Raises:
            ValueError: a setting is not a whole number, or is too small, or `depth` is above `staleness`.
        """
        _at_least(1, "prompts_per_step", prompts_per_step)
        _at_least(0, "max_steps", max_steps)
        _at_least(0, "staleness", staleness)
        if depth is None:
            depth = min(1, staleness)
        _at_least(0, "depth", depth)
        if depth > staleness:
            raise Mistake(
                f"depth={depth} is above staleness={staleness}: groups sampled so far ahead would be too old to train on; "
                f"set depth to at most {staleness}, or staleness to at least {depth}"
            )
        self.batch, self.total = prompts_per_step, prompts_per_step * max_steps
        self.staleness, self.depth = staleness, depth
        self.window = max(1, (depth + 1) * self.batch * WINDOW_TENTHS // 10)

        self.version = 0  # how many times the policy has been published
        self.step = 0  # how many steps had been trained then
        self.next = 0  # the lowest number that was never submitted
        self.again: set[int] = set()  # lower ones that have to be submitted again
        self.running: dict[int, int] = {}  # number -> version at which it was submitted
        self.finished: dict[int, int] = {}  # the same of those that are not trained on yet
        self.dropped = 0  # groups that became too old, in the whole run

    @property
    def taken(self) -> int:
        """Returns how many groups have been taken."""
        return self.next - len(self.again) - len(self.running) - len(self.finished)

    def start_at(self, step: int) -> None:
        """Begins after step `step`, with nothing on its way."""
        self.version = self.step = step
        self.next = step * self.batch

    def advance(self, version: int) -> list[int]:
        """Notes that the policy has been published for the `version`-th time. Call it after `load_state_dict`, too.

        Returns:
            The numbers of the groups that are too old now, lowest first, running or finished. The caller ends or forgets
            them; they are submitted again. In a run whose version grows by one with every step there are none.

        Raises:
            ValueError: the version is older than the last one.
        """
        if version < self.version:
            raise Mistake(
                f"version={version} is older than version={self.version}, which the ledger has seen: resume trainer and "
                "ledger from the same checkpoint"
            )
        if version > self.version:
            self.version, self.step = version, self.taken // self.batch
        submitted = self.running | self.finished
        late = sorted(number for number, at in submitted.items() if version - at > self.staleness)
        for number in late:
            self.running.pop(number, None)
            self.finished.pop(number, None)
        self.again.update(late)
        self.dropped += len(late)
        return late

    def submit(self) -> list[int]:
        """Returns the numbers of all groups that may be submitted now, lowest first; they count as running from here on.

        AReaL's rule with `depth`: the N-th group may go if floor((N - 1) / B) <= i + depth, that is, if
        N <= (i + depth + 1) B. A group that is submitted again does not count twice. `i` counts the steps that were trained
        when the policy was last published. That is the version, unless the caller's count of versions has jumped, where
        the version would let in more groups than can be trained in time.
        """
        end = min(self.total, (self.step + self.depth + 1) * self.batch)
        numbers = [*sorted(number for number in self.again if number < end), *range(self.next, end)]
        self.running.update(dict.fromkeys(numbers, self.version))
        self.next = max(self.next, end)
        self.again.difference_update(numbers)
        return numbers

    def finish(self, number: int) -> None:
        """Notes that a running group is finished: sampled and graded."""
        self.finished[number] = self.running.pop(number)

    def lose(self, number: int) -> None:
        """Notes that a group, running or finished, is not to be had any more: it is submitted again."""
        if self.running.pop(number, None) is None:
            del self.finished[number]
        self.again.add(number)

    def take(self) -> dict[int, int] | None:
        """Takes the batch of the next step.

        Returns:
            Number -> age of the groups to train on, lowest number first, or None while groups have to be waited for.
            When those of `waits_for` are finished, there is a batch.
        """
        assert self.taken < self.total, f"all {self.total} groups of the run have been taken"
        if len(self.finished) < self.batch:
            return None
        oldest = min(chain(self.running, self.again, [self.next]))
        batch = nsmallest(self.batch, (number for number in self.finished if number < oldest + self.window))
        if len(batch) < self.batch:
            return None
        # The oldest groups may always go. What would be too late behind them is so behind any others.
        if oldest < batch[-1] and not self._in_time(sorted(set(self._outstanding()).difference(batch))):
            return None
        ages = {number: self.version - self.finished.pop(number) for number in batch}
        assert max(ages.values()) <= self.staleness, "advance() has to be called after load_state_dict()"
        return ages

    def waits_for(self) -> list[int]:
        """Returns the unfinished ones among the oldest groups that would make a batch, lowest number first."""
        oldest = nsmallest(self.batch, chain(self._outstanding(), range(self.next, self.total)))
        return [number for number in oldest if number not in self.finished]

    def _outstanding(self) -> Iterable[int]:
        return chain(self.again, self.running, self.finished)

    def _in_time(self, left: list[int]) -> bool:
        """Tells whether no group is trained too late if these are left for the next steps.

        A group that was submitted at version v is due at step v + staleness, and a step trains B groups. If any order
        trains all of them in time, so does the order in which they are due (earliest deadline first: where two groups stand
        the other way round, exchanging them makes neither late). Versions only grow, so that is the order of numbers, in
        which the group at place k is trained at step version + 1 + k // B. This must not be after v + staleness: without
        that, some group will be too late, and with it the order of numbers trains all in time. `take` asks about the oldest
        finished groups. These are due first, so if they leave something too late behind them, so does every other batch.

        Groups of later submissions change nothing. They stand behind, and one that is submitted at version w has a place
        k < (depth + 1) B if step w is still to come, and k < depth B if it has been taken. Either way its step is
        w + depth at most, which is not after w + staleness.

        A group that was submitted again is due later than its number says. Then the order of numbers is one good order
        among others, and the condition is on the safe side.

        Args:
            left: numbers of the groups that are submitted, or to be submitted again, and not in the batch, lowest first.
        """
        submitted = self.running | self.finished
        return all(
            self.version + 1 + place // self.batch <= submitted.get(number, self.version) + self.staleness
            for place, number in enumerate(left)
        )

    def state_dict(self) -> dict[str, int | list]:
        """Returns what a resumed run needs, in JSON's types. What is running will be submitted again."""
        return {
            "prompts_per_step": self.batch,
            "version": self.version,
            "step": self.step,
            "next": self.next,
            "again": sorted([*self.again, *self.running]),
            "finished": sorted([number, version] for number, version in self.finished.items()),
            "dropped": self.dropped,
        }

    def load_state_dict(self, state: dict[str, int | list]) -> None:
        """Goes on from what `state_dict` of an earlier run has returned. The caller still has the groups in `finished`.
        `staleness`, `depth` and `max_steps` may have changed: `advance` drops what is too old for the new bound.

        Raises:
            ValueError: the earlier run had another number of groups a step, so numbers would mean other problems.
        """
        if state["prompts_per_step"] != self.batch:
            raise Mistake(
                f"prompts_per_step={self.batch}, but the checkpoint was written with {state['prompts_per_step']}: set "
                f"prompts_per_step={state['prompts_per_step']}, or start a new run"
            )
        self.version, self.step, self.next = state["version"], state["step"], state["next"]
        self.again, self.running = set(state["again"]), {}
        self.finished = {number: version for number, version in state["finished"]}
        self.dropped = state["dropped"]


def _at_least(least: int, name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise Mistake(f"{name}={value!r} must be a whole number, {least} or more")
