"""Orders the problems of a run. The order is a pure function of the seed and a cursor."""

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from torchtune_ext.run.errors import UsageError, describe_error
from torchtune_ext.tasks.task import AdaptiveTask, GradedGroup, Problem, Task

log = logging.getLogger(__name__)

# Longer tasks are generated: their problems are independent, so they are not shuffled.
SHUFFLE_LIMIT = 1 << 20
MAX_BAD_IN_A_ROW = 1000  # consecutive unusable problems that end the run
MAX_ANSWERS_CHECKED = 1000  # held-out problems whose reference answers are graded
MAX_BAD_NAMED = 5  # unusable problems that one message lists with their reasons

ProblemCheck = Callable[[Problem], str]  # returns why a problem cannot be used, or ""
# Grades the reference answers of problems. Returns for each why it cannot be used, or "".
AnswerCheck = Callable[[Sequence[Problem]], list[str]]


class TransientReason(str):
    """A reason that may not recur at another attempt, such as a timeout on a busy machine."""


def accept_problem(problem: Problem) -> str:
    return ""


def problem_index(cursor: int, length: int, seed: int) -> int:
    """Returns the index of the `cursor`-th problem of a run. No problem repeats within an epoch."""
    epoch, position = divmod(cursor, length)
    return position if length > SHUFFLE_LIMIT else _permutation(length, seed, epoch)[position]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """The problem that a task returned for an index, or the reason why it cannot be used."""

    index: int | None  # None: unknown
    problem: Problem | None  # None: the task raised, or returned another type
    reason: str = ""  # why it cannot be used; "": usable

    def __str__(self) -> str:
        at = "" if self.index is None else f"index {self.index}"
        name = at if self.problem is None else f"{self.problem.id!r} ({at})" if at else repr(self.problem.id)
        return f"{name}: {self.reason}"


def is_adaptive(task: Task) -> TypeGuard[AdaptiveTask]:
    """Returns whether a task selects its next problems by the results of earlier problems."""
    return hasattr(task, "observe")


class ProblemStream:
    """Yields the problems of a task in the order of `seed`. The task may be an `AdaptiveTask`.

    Args:
        task: the task.
        seed: seed of the order.
        check: returns why a problem cannot be used, or "".
    """

    # A problem is unusable if its row is broken, or if a check fails, such as for a prompt that is
    # too long. It is logged, counted and skipped, so that one row does not end a run.
    def __init__(self, task: Task, seed: int, check: ProblemCheck = accept_problem):
        self.cursor = 0  # the next position of the order; a resumed run sets it
        # Indices of unusable problems, in the order in which the run found them, which it skips.
        # With an adaptive task, an index may later hold another problem, and may be listed twice.
        self.skipped_indices: list[int] = []
        self._task, self._seed = task, seed
        self._adaptive = task if is_adaptive(task) else None
        self._is_adaptive = self._adaptive is not None
        self._check = check
        self._answer_check: AnswerCheck | None = None
        # Result of the answer check, by the id of a problem.
        self._answer_reasons: dict[str, str] = {}
        # Indices in `skipped_indices` that a resumed run tries again.
        self._transient: set[int] = set()
        # Generating a puzzle takes milliseconds, so a thread prefetches while the run trains.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="problems")
        # Candidates for the next positions.
        self._prefetched: Future[dict[int, _Candidate]] | None = None

    def check_answers(self, check: AnswerCheck) -> None:
        """Sets the check that runs on each problem before its first use."""
        self._answer_check = check

    def next_problems(self, count: int) -> list[Problem]:
        """Returns the next `count` problems. Raises the errors of `next_with_positions`."""
        return [problem for _, problem in self.next_with_positions(count)]

    def next_with_positions(self, count: int) -> list[tuple[int, Problem]]:
        """Returns the next `count` usable problems as (position, problem).

        Raises:
            UsageError: all problems, or `MAX_BAD_IN_A_ROW` consecutive problems, are unusable.
        """
        problems, bad = [], []
        position, in_a_row, known = self.cursor, 0, set(self.skipped_indices)
        # The loop below would never end.
        if not self._is_adaptive and len(known) >= len(self._task):
            raise UsageError(
                f"task: the checkpoint marks all {len(self._task)} problems of the task as unusable. "
                "Fix: restore the earlier `task:`, or start a new run in another output_dir"
            )
        if self._is_adaptive:
            prefetched = {}
        elif self._prefetched:
            prefetched = self._prefetched.result()
        else:
            prefetched = self._make_candidates(range(position, position + count), frozenset(known))
        while len(problems) < count:
            index = self._index(position)
            if self._is_adaptive or index not in known:
                # Positions may be missing in `prefetched`, such as after unusable problems. The
                # check measures the prompt with the tokenizer, which the run also uses, so the
                # prefetch thread does not run it.
                candidate = (
                    prefetched.get(position) or self._check_answers({position: self._ask(index, position)})[position]
                )
                candidate = _apply_check(candidate, self._check)
                in_a_row = in_a_row + 1 if candidate.reason else 0
                if candidate.reason:
                    bad.append(candidate)
                    known.add(index)
                    # An adaptive task may return usable problems later: only a long series ends it.
                    all_unusable = not self._is_adaptive and len(known) >= len(self._task)
                    if all_unusable or in_a_row >= MAX_BAD_IN_A_ROW:
                        what = f"all {len(self._task)} problems" if all_unusable else f"{in_a_row} consecutive problems"
                        _raise_none_usable(what, candidate)
                else:
                    problems.append((position, candidate.problem))
            position += 1
        # The state changes only here, so a call that raises skips no problem.
        self.cursor, self.skipped_indices = position, self.skipped_indices + [candidate.index for candidate in bad]
        self._transient |= {candidate.index for candidate in bad if isinstance(candidate.reason, TransientReason)}
        if bad:
            log.warning("%s", _bad_problems_message("skipped", bad))
        # The next problems of an adaptive task depend on the results, so none are prefetched.
        if not self._is_adaptive:
            self._prefetched = self._thread.submit(
                self._make_candidates, range(position, position + count), frozenset(self.skipped_indices)
            )
        return problems

    def first_problems(self, count: int) -> list[Problem]:
        """Returns up to `count` usable problems by index, without moving the cursor.

        Raises:
            UsageError: no problem is usable.
        """
        return _find_usable(self._task, self._check, count, len(self._task))[0]

    def problem_at(self, position: int) -> Problem | None:
        """Returns the problem at a position of the order, or None if it cannot be used."""
        index = self._index(position)
        if index in self.skipped_indices and not self._is_adaptive:
            return None
        # The prefetch thread must finish first: a task may use Python's global generator.
        if self._prefetched is not None:
            self._prefetched.exception()
        candidate = _apply_check(self._ask(index, position), self._check)
        return None if candidate.reason else candidate.problem

    def restored_problem(self, position: int, stored: Problem) -> Problem | None:
        """Returns the problem at a position of the order, or None if it differs from `stored`."""
        # An adaptive task may have replaced the problem there, so it cannot be compared.
        if self._is_adaptive:
            return stored
        problem = self.problem_at(position)
        return problem if problem is not None and problem.id == stored.id else None

    def observe(self, step: int, groups: Sequence[GradedGroup], folder: Path) -> dict[str, float]:
        """Passes the groups of a step to an adaptive task.

        Returns:
            The metrics of the task, and the number of skipped problems.
        """
        values = {"problems/skipped": float(len(self.skipped_indices))} if self.skipped_indices else {}
        return values | (self._adaptive.observe(step, groups, folder) if self._adaptive is not None else {})

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of a resumed run except the cursor, JSON-serializable."""
        # The key "learned" distinguishes an adaptive task without observations from a fixed task.
        state: dict[str, Any] = {"learned": self._adaptive.state_dict()} if self._adaptive is not None else {}
        skipped = [index for index in self.skipped_indices if index not in self._transient]
        return state | ({"skipped": skipped} if skipped else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`.

        Raises:
            UsageError: the task is another one, or has different settings.
        """
        if ("learned" in state) != self._is_adaptive:
            had, now = ("adapts", "does not") if "learned" in state else ("does not adapt", "does")
            raise UsageError(
                f"task: the checkpoint's task {had} to the results of its problems, and the task of this run {now}. "
                "Fix: restore the earlier `task:`, or start a new run in another output_dir"
            )
        # The task may now have other or fewer problems.
        self.skipped_indices = [index for index in state.get("skipped", []) if index < len(self._task)]
        if self._adaptive is not None:
            self._adaptive.load_state_dict(state["learned"])

    def _index(self, position: int) -> int:
        return problem_index(position, len(self._task), self._seed)

    def _make_candidates(self, positions: range, skipped: frozenset[int]) -> dict[int, _Candidate]:
        indices = [(self._index(position), position) for position in positions]
        return self._check_answers(
            {position: self._ask(index, position) for index, position in indices if index not in skipped}
        )

    def _check_answers(self, candidates: dict[int, _Candidate]) -> dict[int, _Candidate]:
        """Grades the reference answers of new problems, and sets the reason of each candidate."""
        # Kept by id, because an adaptive task may have replaced the problem at an index.
        good = [
            candidate.problem
            for candidate in candidates.values()
            if candidate.problem is not None and not candidate.reason
        ]
        if self._answer_check is not None and (
            new := [problem for problem in good if problem.id not in self._answer_reasons]
        ):
            self._answer_reasons |= {
                problem.id: reason for problem, reason in zip(new, self._answer_check(new), strict=True)
            }
        return {
            position: _apply_check(candidate, lambda problem: self._answer_reasons.get(problem.id, ""))
            for position, candidate in candidates.items()
        }

    def _ask(self, index: int, position: int) -> _Candidate:
        adaptive = self._adaptive
        return _make_candidate(index, lambda: self._task[index] if adaptive is None else adaptive.ask(index, position))


class UsableProblems:
    """The usable problems among the first `limit` problems of a task, created on first use.

    Args:
        task: the task; None: only `load` may be called.
        check: returns why a problem cannot be used, or "".
        limit: number of problems to examine; None: all.
    """

    def __init__(self, task: Task | None, check: ProblemCheck = accept_problem, limit: int | None = None):
        self._task, self._check, self._limit = task, check, limit

    @cached_property
    def problems(self) -> list[Problem]:
        """The usable problems. Raises UsageError if no problem is usable."""
        assert self._task is not None
        problems, bad = _find_usable(self._task, self._check, self._num_candidates, self._num_candidates)
        self._warn_excluded(bad)
        return problems

    def check_answers(self, check: AnswerCheck) -> None:
        """Removes ungradable problems among the first `MAX_ANSWERS_CHECKED` problems."""
        problems = self.problems[:MAX_ANSWERS_CHECKED]
        reasons = {id(each): reason for each, reason in zip(problems, check(problems), strict=True) if reason}
        if bad := [_Candidate(None, problem, reasons[id(problem)]) for problem in problems if id(problem) in reasons]:
            self._warn_excluded(bad)
            if len(bad) == len(self.problems):
                _raise_none_usable(f"all {len(bad)} problems", bad[-1])
            self.problems = [problem for problem in self.problems if id(problem) not in reasons]

    def _warn_excluded(self, bad: Sequence[_Candidate]) -> None:
        if bad:
            what = f"excluded from the {self._num_candidates:,} problems of {type(self._task).__name__}"
            log.warning("%s", _bad_problems_message(what, bad))

    def load(self) -> None:
        """Creates the problems now; without a task, does nothing.

        Raises:
            UsageError: no problem is usable.
        """
        if self._task is not None:
            _ = self.problems

    @property
    def num_skipped(self) -> int:
        """The number of unusable problems."""
        return self._num_candidates - len(self.problems)

    @property
    def _num_candidates(self) -> int:
        if self._limit is not None:
            return self._limit
        assert self._task is not None
        return len(self._task)


def _find_usable(task: Task, check: ProblemCheck, count: int, limit: int) -> tuple[list[Problem], list[_Candidate]]:
    """Returns up to `count` usable problems of the first `limit`, and the unusable ones found."""
    problems, bad = [], []
    for index in range(limit):
        if len(problems) == count:
            break
        candidate = _apply_check(_make_candidate(index, lambda index=index: task[index]), check)
        if not candidate.reason:
            problems.append(candidate.problem)
            continue
        bad.append(candidate)
        if not problems and len(bad) >= MAX_BAD_IN_A_ROW:
            break
    if not problems and bad:
        _raise_none_usable(f"all {limit} problems" if len(bad) == limit else f"the first {len(bad)} problems", bad[-1])
    return problems, bad


def _make_candidate(index: int, ask: Callable[[], Any]) -> _Candidate:
    # Any error of the task's code makes the problem unusable.
    try:
        problem = ask()
    except Exception as error:  # noqa: BLE001 (the user's code; the error is named)
        return _Candidate(index, None, describe_error(error))
    if not isinstance(problem, Problem):
        return _Candidate(index, None, f"the task returned {type(problem).__name__}, not a Problem")
    return _Candidate(index, problem)


def _apply_check(candidate: _Candidate, check: ProblemCheck) -> _Candidate:
    if candidate.reason or candidate.problem is None:
        return candidate
    return replace(candidate, reason=check(candidate.problem))


def _bad_problems_message(what: str, bad: Sequence[_Candidate]) -> str:
    count = "1 problem is" if len(bad) == 1 else f"{len(bad)} problems are"
    more = [
        repr(candidate.index if candidate.problem is None else candidate.problem.id)
        for candidate in bad[MAX_BAD_NAMED:]
    ]
    rest = f"; and {', '.join(more)}" if more else ""
    return f"{count} {what}: {'; '.join(map(str, bad[:MAX_BAD_NAMED]))}{rest}"


def _raise_none_usable(what: str, last: _Candidate) -> NoReturn:
    raise UsageError(f"{what} of the task are unusable; the last one is {last}")


# The cache holds two epochs, because prefetched problems may belong to the next epoch.
@lru_cache(maxsize=2)
def _permutation(length: int, seed: int, epoch: int) -> list[int]:
    # With a string seed, neighboring epochs are independent, and equal in every process.
    indices = list(range(length))
    random.Random(f"{seed}/{epoch}").shuffle(indices)
    return indices
