"""The order of a run's problems, a pure function of the seed and a cursor."""

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeGuard

from torchtune_ext.run.errors import Mistake, text_of
from torchtune_ext.tasks.task import AdaptiveTask, Graded, Problem, Task

log = logging.getLogger(__name__)

SHUFFLE_LIMIT = 1 << 20  # longer tasks are generated, so their problems are independent and need no shuffling
GIVE_UP = 1000  # bad problems in a row that end the run
MOST_TRIED = 1000  # held-out problems whose answers are tried
NAMED = 5  # bad problems that one message names with their reasons

Fault = Callable[[Problem], str]
"""Says why a problem cannot be used, or "" where it can."""


Trial = Callable[[Sequence[Problem]], list[str]]
"""Grades the right answers of problems, and says for each why it cannot be used, or ""."""


class Passing(str):
    """A reason that another try may not find, such as a deadline missed on a busy machine."""


def no_fault(problem: Problem) -> str:
    return ""


def problem_index(cursor: int, length: int, seed: int) -> int:
    """Returns the index of the `cursor`-th problem of a run. No problem repeats within an epoch."""
    epoch, position = divmod(cursor, length)
    if length > SHUFFLE_LIMIT:
        return position
    return _permutation(length, seed, epoch)[position]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """What a task gave for an index."""

    index: int | None  # None: unknown
    problem: Problem | None  # None: the task raised, or gave something else
    reason: str = ""  # why it cannot be used; "": it can

    def __str__(self) -> str:
        place = "" if self.index is None else f"index {self.index}"
        name = place if self.problem is None else f"{self.problem.id!r} ({place})" if place else repr(self.problem.id)
        return f"{name}: {self.reason}"


def adapts(task: Task) -> TypeGuard[AdaptiveTask]:
    """Tells whether a task chooses its next problems by the results of earlier ones."""
    return hasattr(task, "observe")


class ProblemStream:
    """Hands out the problems of a task, which may adapt (`AdaptiveTask`), in the order of `seed`."""

    # A bad problem is a broken row of the data, or one with a fault, such as a prompt that is too long. It is named,
    # counted and passed over, so that one row does not end a run.
    def __init__(self, task: Task, seed: int, fault: Fault = no_fault):
        self.cursor = 0  # the next place of the order; a resumed run sets it
        # Indices of bad problems, in the order in which the run met them. The run does not ask for them again, unless
        # the task adapts: then an index may hold another problem by now, and may stand here several times.
        self.skipped: list[int] = []
        self._task, self._seed = task, seed
        self._adaptive = task if adapts(task) else None
        self._adapts = self._adaptive is not None
        self._fault = fault
        self._trial: Trial | None = None
        self._tried: dict[str, str] = {}  # what the trial said, by the id of a problem
        self._passing: set[int] = set()  # indices in `skipped` that a resumed run tries again
        # A generated puzzle takes milliseconds, so a thread makes the next problems while the run trains.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="problems")
        self._ahead: Future[dict[int, _Candidate]] | None = None  # candidates for the next places

    def try_answers(self, trial: Trial) -> None:
        """Has each problem tried before it is handed out for the first time."""
        self._trial = trial

    def take(self, count: int) -> list[Problem]:
        """Returns the next `count` problems. Raises what `draw` raises."""
        return [problem for _, problem in self.draw(count)]

    def draw(self, count: int) -> list[tuple[int, Problem]]:
        """Returns the next `count` usable problems with their places. Raises ValueError if there are none."""
        problems, bad = [], []
        place, in_a_row, known = self.cursor, 0, set(self.skipped)
        # The loop below would never end.
        if not self._adapts and len(known) >= len(self._task):
            raise Mistake(
                f"all {len(self._task)} problems of the task are passed over, as the checkpoint says; set task as it was, or "
                "begin a new run in another output_dir"
            )
        if self._ahead is not None:
            ahead = self._ahead.result()
        else:
            ahead = {} if self._adapts else self._make(range(place, place + count), frozenset(known))
        while len(problems) < count:
            index = self._index(place)
            if self._adapts or index not in known:
                # Places may be missing in `ahead`, for instance after bad problems. `fault` measures the prompt with
                # the tokenizer. The run uses that too, so this is not done ahead in the other thread.
                candidate = ahead.get(place) or self._try({place: self._ask(index, place)})[place]
                candidate = _checked(candidate, self._fault)
                in_a_row = in_a_row + 1 if candidate.reason else 0
                if candidate.reason:
                    bad.append(candidate)
                    known.add(index)
                    # A task that adapts may yet ask something else, so only a long row of bad problems ends it.
                    everything = not self._adapts and len(known) >= len(self._task)
                    if everything or in_a_row >= GIVE_UP:
                        what = f"all {len(self._task)} problems" if everything else f"{in_a_row} problems in a row"
                        raise Mistake(_none_left(what, candidate))
                else:
                    problems.append((place, candidate.problem))
            place += 1
        # Set at the end, so that a call that raises has passed over nothing.
        self.cursor, self.skipped = place, self.skipped + [candidate.index for candidate in bad]
        self._passing |= {candidate.index for candidate in bad if isinstance(candidate.reason, Passing)}
        if bad:
            log.warning("%s", _named("skipped", bad))
        # The problems of a task that adapts depend on what becomes of these, so they cannot be made ahead.
        if not self._adapts:
            self._ahead = self._thread.submit(self._make, range(place, place + count), frozenset(self.skipped))
        return problems

    def first(self, count: int) -> list[Problem]:
        """Returns the first `count` usable problems by index, or fewer, without moving the cursor.

        Raises ValueError if there are none.
        """
        return _usable(self._task, self._fault, count, len(self._task))[0]

    def at(self, place: int) -> Problem | None:
        """Returns the problem at a place of the order, or None if it cannot be used."""
        index = self._index(place)
        if index in self.skipped and not self._adapts:
            return None
        # The other thread ends first, since a task may draw from Python's own generator.
        if self._ahead is not None:
            self._ahead.exception()
        candidate = _checked(self._ask(index, place), self._fault)
        return None if candidate.reason else candidate.problem

    def again(self, place: int, stored: Problem) -> Problem | None:
        """Returns the problem at a place of the order, or None if it is no longer the `stored` one."""
        # A task that adapts may ask something else there by now, so it cannot be compared.
        if self._adapts:
            return stored
        problem = self.at(place)
        return problem if problem is not None and problem.id == stored.id else None

    def observe(self, step: int, groups: Sequence[Graded], folder: Path) -> dict[str, float]:
        """Shows a task that adapts the groups of a step. Returns its metrics, and the number of skipped problems."""
        values = {"problems/skipped": float(len(self.skipped))} if self.skipped else {}
        return values | (self._adaptive.observe(step, groups, folder) if self._adaptive is not None else {})

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs besides the cursor, JSON-able."""
        # The key "learned" tells a task that has learned nothing yet from one that does not adapt.
        state: dict[str, Any] = {"learned": self._adaptive.state_dict()} if self._adaptive is not None else {}
        skipped = [index for index in self.skipped if index not in self._passing]
        return state | ({"skipped": skipped} if skipped else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a `state_dict`. Raises ValueError if the task is another one, or has other settings."""
        if ("learned" in state) != self._adapts:
            had, now = ("adapts", "does not") if "learned" in state else ("does not adapt", "does")
            raise Mistake(
                f"task: the one of the checkpoint {had} to what became of its problems, and that of this run {now}; set task "
                "as it was, or begin a new run in another output_dir"
            )
        # The task may have other problems now, and fewer.
        self.skipped = [index for index in state.get("skipped", []) if index < len(self._task)]
        if self._adaptive is not None:
            self._adaptive.load_state_dict(state["learned"])

    def _index(self, place: int) -> int:
        return problem_index(place, len(self._task), self._seed)

    def _make(self, places: range, skipped: frozenset[int]) -> dict[int, _Candidate]:
        indices = {place: self._index(place) for place in places}
        return self._try({place: self._ask(index, place) for place, index in indices.items() if index not in skipped})

    def _try(self, candidates: dict[int, _Candidate]) -> dict[int, _Candidate]:
        """Grades the right answers of problems that were not tried before, and gives each candidate its reason."""
        # By id, because a task that adapts may hold another problem at an index by now.
        good = [each.problem for each in candidates.values() if each.problem is not None and not each.reason]
        if self._trial is not None and (new := [problem for problem in good if problem.id not in self._tried]):
            self._tried |= {problem.id: reason for problem, reason in zip(new, self._trial(new), strict=True)}
        return {
            place: _checked(candidate, lambda problem: self._tried.get(problem.id, ""))
            for place, candidate in candidates.items()
        }

    def _ask(self, index: int, place: int) -> _Candidate:
        adaptive = self._adaptive
        return _candidate(index, lambda: self._task[index] if adaptive is None else adaptive.ask(index, place))


class Usable:
    """The usable ones of the first `among` problems of a task (None: of all), made when they are first needed.

    Without a task only `require` may be called.
    """

    def __init__(self, task: Task | None, fault: Fault = no_fault, among: int | None = None):
        self._task, self._fault, self._among = task, fault, among

    @cached_property
    def problems(self) -> list[Problem]:
        """The problems that can be used. Raises ValueError if there are none."""
        assert self._task is not None
        among = self._number
        problems, bad = _usable(self._task, self._fault, among, among)
        if bad:
            log.warning("%s", _named(f"left out of the {among:,} of {type(self._task).__name__}", bad))
        return problems

    def try_answers(self, trial: Trial) -> None:
        """Leaves out the problems among the first `MOST_TRIED` whose answers cannot be graded."""
        problems = self.problems[:MOST_TRIED]
        reasons = {id(each): reason for each, reason in zip(problems, trial(problems), strict=True) if reason}
        if bad := [_Candidate(None, each, reasons[id(each)]) for each in problems if id(each) in reasons]:
            log.warning("%s", _named(f"left out of the {self._number:,} of {type(self._task).__name__}", bad))
            if len(bad) == len(self.problems):
                raise Mistake(_none_left(f"all {len(bad)} problems", bad[-1]))
            self.problems = [each for each in self.problems if id(each) not in reasons]

    def require(self) -> None:
        """Makes the problems now. Raises ValueError if there are none. Without a task it does nothing."""
        if self._task is not None:
            _ = self.problems

    @property
    def skipped(self) -> int:
        """The number of problems that cannot be used."""
        return self._number - len(self.problems)

    @property
    def _number(self) -> int:
        if self._among is not None:
            return self._among
        assert self._task is not None
        return len(self._task)


def _usable(task: Task, fault: Fault, count: int, among: int) -> tuple[list[Problem], list[_Candidate]]:
    """Returns the first `count` usable problems among the first `among`, and the bad ones before them."""
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
    # Any error of the task's code makes the problem a bad one.
    try:
        problem = ask()
    except Exception as error:  # noqa: BLE001 (the user's code; the error is named)
        return _Candidate(index, None, text_of(error))
    if not isinstance(problem, Problem):
        return _Candidate(index, None, f"the task gave {type(problem).__name__}, not a Problem")
    return _Candidate(index, problem)


def _checked(candidate: _Candidate, fault: Fault) -> _Candidate:
    if candidate.reason or candidate.problem is None:
        return candidate
    return replace(candidate, reason=fault(candidate.problem))


def _named(what: str, bad: Sequence[_Candidate]) -> str:
    count = "1 problem is" if len(bad) == 1 else f"{len(bad)} problems are"
    more = [repr(each.index if each.problem is None else each.problem.id) for each in bad[NAMED:]]
    rest = f"; and {', '.join(more)}" if more else ""
    return f"{count} {what}: {'; '.join(map(str, bad[:NAMED]))}{rest}"


def _none_left(what: str, last: _Candidate) -> str:
    return f"{what} of the task cannot be used; the last one is {last}"


# Two epochs, because the problems that are made ahead may cross into the next one.
@lru_cache(maxsize=2)
def _permutation(length: int, seed: int, epoch: int) -> list[int]:
    # A text as the seed keeps neighboring seeds and epochs unrelated, and is the same in every process.
    indices = list(range(length))
    random.Random(f"{seed}/{epoch}").shuffle(indices)
    return indices
