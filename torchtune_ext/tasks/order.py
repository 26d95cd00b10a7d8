"""Orders the problems of a run. The order is a pure function of the seed and a cursor.

A problem that cannot be used (a row of the data is broken, a prompt is too long) is bad. It is named, counted and passed over,
and the next one of the order takes its place, so that one row does not end a run.
"""

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from torchtune_ext.run.errors import Mistake, text_of
from torchtune_ext.tasks.task import Graded, Problem, Task

log = logging.getLogger(__name__)

SHUFFLE_LIMIT = 1 << 20  # longer tasks are generated, so their problems are independent and need no shuffling
GIVE_UP = 1000  # bad problems in a row, after which a task is said to have no other ones
NAMED = 5  # bad problems that one message names with their reasons

Fault = Callable[[Problem], str]
"""Says why a problem cannot be used, or "" where it can."""


def no_fault(problem: Problem) -> str:
    return ""


def problem_index(cursor: int, length: int, seed: int) -> int:
    """Returns the index of the `cursor`-th problem of a run.

    Every epoch is a new permutation, so that no problem repeats within an epoch.
    """
    epoch, position = divmod(cursor, length)
    if length > SHUFFLE_LIMIT:
        return position
    return _permutation(length, seed, epoch)[position]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A problem that a task gave, and why it cannot be used, if so."""

    index: int
    problem: Problem | None  # None: the task gave none
    reason: str = ""  # why it cannot be used; "": it can

    def __str__(self) -> str:
        name = f"index {self.index}" if self.problem is None else f"{self.problem.id!r} (index {self.index})"
        return f"{name}: {self.reason}"


class ProblemStream:
    """Hands out the problems of a run.

    A thread makes the next problems in advance, because a generated puzzle takes milliseconds. Those of a task that adapts
    (`AdaptiveTask`) are made when they are asked for, since they depend on what became of earlier ones.

    Args:
        task: what is asked.
        seed: of the order.
        fault: says which problems cannot be used, besides those that the task does not give.
    """

    def __init__(self, task: Task, seed: int, fault: Fault = no_fault):
        self.cursor = 0  # places of the order that were passed since the run began; a resumed run sets it
        # Indices of bad problems, in the order in which the run met them. It does not ask for one of them again, unless the
        # task adapts: then the problem may be another one by now, and the index may stand here several times.
        self.skipped: list[int] = []
        self._task, self._seed, self._adapts = task, seed, hasattr(task, "observe")
        self._fault = fault
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="problems")
        self._ahead: Future[dict[int, _Candidate]] | None = None  # candidates for the next places

    def take(self, count: int) -> list[Problem]:
        """Returns the next `count` problems. Raises what `draw` raises."""
        return [problem for _, problem in self.draw(count)]

    def draw(self, count: int) -> list[tuple[int, Problem]]:
        """Returns the next `count` problems that can be used, each with its place in the order.

        Raises:
            ValueError: no problem of the task can be used.
        """
        ahead, problems, bad = self._ahead.result() if self._ahead else {}, [], []
        place, in_a_row, known = self.cursor, 0, set(self.skipped)
        if not self._adapts and len(known) >= len(self._task):
            raise Mistake(
                f"all {len(self._task)} problems of the task are passed over, as the checkpoint says; set task as it was, or "
                "begin a new run in another output_dir"
            )
        while len(problems) < count:
            index = self._index(place)
            if self._adapts or index not in known:
                # A prompt is measured in this thread, since others use the tokenizer as well.
                candidate = _checked(ahead.get(place) or self._ask(index, place), self._fault)
                in_a_row = in_a_row + 1 if candidate.reason else 0
                if candidate.reason:
                    bad.append(candidate)
                    known.add(index)
                    everything = not self._adapts and len(known) >= len(self._task)
                    if everything or in_a_row >= GIVE_UP:
                        what = f"all {len(self._task)} problems" if everything else f"{in_a_row} problems in a row"
                        raise Mistake(_none_left(what, candidate))
                else:
                    problems.append((place, candidate.problem))
            place += 1
        # Only now, so that a run that ends with an error above has passed over nothing.
        self.cursor, self.skipped = place, self.skipped + [candidate.index for candidate in bad]
        if bad:
            log.warning("%s", _named("skipped", bad))
        if not self._adapts:
            self._ahead = self._thread.submit(self._make, range(place, place + count), frozenset(self.skipped))
        return problems

    def first(self, count: int) -> list[Problem]:
        """Returns the first problems of the task that can be used, at most `count`, in the order of their indices. The
        run will still meet them, as if they had not been asked for.

        Raises:
            ValueError: none can be used.
        """
        return _usable(self._task, self._fault, count, len(self._task))[0]

    def at(self, place: int) -> Problem | None:
        """Returns the problem at this place of the order again, or None if it cannot be used. A task that adapts gives what it
        asks there now."""
        index = self._index(place)
        if index in self.skipped and not self._adapts:
            return None
        candidate = _checked(self._ask(index, place), self._fault)
        return None if candidate.reason else candidate.problem

    def again(self, place: int, stored: Problem) -> Problem | None:
        """Returns the problem at this place of the order, of which one was stored, or None if the task has changed since. One
        of a task that adapts is believed: what it asked then may differ from what it asks now."""
        if self._adapts:
            return stored
        problem = self.at(place)
        return problem if problem is not None and problem.id == stored.id else None

    def observe(self, step: int, groups: Sequence[Graded], folder: Path) -> dict[str, float]:
        """Tells a task that adapts what became of the groups of a step. Returns what is to be logged of it, and how many
        problems were passed over."""
        values = {"problems/skipped": float(len(self.skipped))} if self.skipped else {}
        return values | (self._task.observe(step, groups, folder) if self._adapts else {})

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs besides the cursor, JSON-able: what the task has learned from observations, if it
        adapts, and which problems are passed over, if there are any."""
        # In a dictionary of its own, so that a task that has learned nothing yet can be told from one that never does.
        state = {"learned": self._task.state_dict()} if self._adapts else {}
        return state | ({"skipped": list(self.skipped)} if self.skipped else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned. Raises ValueError if the task is another one, or has other settings."""
        if ("learned" in state) != self._adapts:
            had, now = ("adapts", "does not") if "learned" in state else ("does not adapt", "does")
            raise Mistake(
                f"task: the one of the checkpoint {had} to what became of its problems, and that of this run {now}; set task "
                "as it was, or begin a new run in another output_dir"
            )
        # The task may have other problems now, and fewer.
        self.skipped = [index for index in state.get("skipped", []) if index < len(self._task)]
        if self._adapts:
            self._task.load_state_dict(state["learned"])

    def _index(self, place: int) -> int:
        return problem_index(place, len(self._task), self._seed)

    def _make(self, places: range, skipped: frozenset[int]) -> dict[int, _Candidate]:
        indices = {place: self._index(place) for place in places}
        return {place: self._ask(index, place) for place, index in indices.items() if index not in skipped}

    def _ask(self, index: int, place: int) -> _Candidate:
        return _candidate(index, lambda: self._task.ask(index, place) if self._adapts else self._task[index])


class Usable:
    """The problems of a task that can be used, by index. They are asked for once, when they are first needed.

    Args:
        task, fault: as in `ProblemStream`.
        among: how many problems, from the first, are looked at; None: all.
    """

    def __init__(self, task: Task | None, fault: Fault = no_fault, among: int | None = None):
        self._task, self._fault, self._among = task, fault, among

    @cached_property
    def problems(self) -> list[Problem]:
        """The problems. Raises ValueError if there are none."""
        among = self._number
        problems, bad = _usable(self._task, self._fault, among, among)
        if bad:
            log.warning("%s", _named(f"left out of the {among:,} of {type(self._task).__name__}", bad))
        return problems

    def require(self) -> None:
        """Asks for the problems now. Raises ValueError as `problems`. Without a task nothing happens."""
        if self._task is not None:
            _ = self.problems

    @property
    def skipped(self) -> int:
        """How many of the problems cannot be used."""
        return self._number - len(self.problems)

    @property
    def _number(self) -> int:
        return len(self._task) if self._among is None else self._among


def _usable(task: Task, fault: Fault, count: int, among: int) -> tuple[list[Problem], list[_Candidate]]:
    """Returns the first `count` problems that can be used of the first `among` ones of a task, and the bad ones before them."""
    problems, bad = [], []
    for index in range(among):
        if len(problems) == count:
            break
        candidate = _checked(_candidate(index, lambda index=index: task[index]), fault)
        if not candidate.reason:
            problems.append(candidate.problem)
            continue
        bad.append(candidate)
        if not problems and len(bad) >= GIVE_UP:
            break
    if not problems and bad:
        what = f"all {among} problems" if len(bad) == among else f"the first {len(bad)} problems"
        raise Mistake(_none_left(what, bad[-1]))
    return problems, bad


def _candidate(index: int, ask: Callable[[], Any]) -> _Candidate:
    """Asks a task for a problem. Any error of its code makes the problem a bad one."""
    try:
        problem = ask()
    except Exception as error:  # noqa: BLE001 (the user's code; the error is named)
        return _Candidate(index, None, text_of(error))
    if not isinstance(problem, Problem):
        return _Candidate(index, None, f"the task gave {type(problem).__name__}, not a Problem")
    return _Candidate(index, problem)


def _checked(candidate: _Candidate, fault: Fault) -> _Candidate:
    """Returns the candidate, with the reason why it cannot be used, if there is one."""
    return candidate if candidate.reason else replace(candidate, reason=fault(candidate.problem))


def _named(what: str, bad: Sequence[_Candidate]) -> str:
    count = "1 problem is" if len(bad) == 1 else f"{len(bad)} problems are"
    more = [repr(each.index if each.problem is None else each.problem.id) for each in bad[NAMED:]]
    rest = f"; and {', '.join(more)}" if more else ""
    return f"{count} {what}: {'; '.join(map(str, bad[:NAMED]))}{rest}"


def _none_left(what: str, last: _Candidate) -> str:
    return f"{what} of the task cannot be used; the last one is {last}"


@lru_cache(maxsize=2)
def _permutation(length: int, seed: int, epoch: int) -> list[int]:
    indices = list(range(length))
    random.Random(f"{seed}/{epoch}").shuffle(indices)
    return indices
