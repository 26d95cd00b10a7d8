"""Opens the graders of a run's tasks, and tries them on reference answers before the run starts."""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cloudpickle

from torchtune_ext.grading.environments import Conversations, Environments
from torchtune_ext.grading.grader import DIED_PREFIX, Grader, GraderConfig, failure_cause, gather_results
from torchtune_ext.grading.outcomes import Outcome, Ungraded
from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.output import format_labels, print_text
from torchtune_ext.run.worker_process import error_line
from torchtune_ext.tasks.grade_functions import describe_function
from torchtune_ext.tasks.problem_stream import TransientReason
from torchtune_ext.tasks.task import ConversationTask, Message, Problem, Score, SelfGradingTask, Task, solution_messages

LOG_FILE_NAME = "grader.log"
NUM_TRIED_PROBLEMS = 4  # problems whose solutions are graded before a run starts
MAX_SEARCHED_PROBLEMS = 32  # first problems of a task that are searched for `NUM_TRIED_PROBLEMS`
WRONG_ANSWER = "<think>\n</think>\n\n\\boxed{271828183}"  # a text that is wrong for every problem
PLACEHOLDER_ANSWER = "1"  # the text to grade for a problem without a solution


def open_graders(
    tasks: Sequence[Task | None],
    config: GraderConfig,
    during_training: bool = False,
    folder: str | Path | None = None,
) -> list[Grader]:
    """Starts the graders of these tasks, in order. Errors of the graders are raised unchanged.

    Args:
        tasks: the tasks of the run; None is skipped.
        config: settings of the grading processes. A `SelfGradingTask` has its own settings.
        during_training: True if texts are graded while this process trains.
        folder: run directory, in which graders print to `LOG_FILE_NAME`. None: they print to the
            output of this process.
    """
    graders: list[Grader] = []
    output = None if folder is None else Path(folder) / LOG_FILE_NAME
    # If a later task raises, the graders of the earlier tasks are closed.
    with ExitStack() as opened:
        for task in filter(None, tasks):
            if isinstance(task, SelfGradingTask):
                grader = task.open_grader(graders, during_training)
            elif isinstance(task, ConversationTask):
                grader = Environments(task, config.workers, config.timeout_s, output)
            else:
                grader = Grader(task, config.workers, config.timeout_s, output)
            graders.append(grader)
            opened.callback(grader.close)
        opened.pop_all()
    return graders


def check_grading(
    tasks: Sequence[Task | None],
    config: GraderConfig,
    keys: Sequence[str] = ("task", "evaluation.task"),
    samples: int = 2,
) -> None:
    """Checks that the tasks of a run can be graded.

    Args:
        tasks: the training task, then held-out tasks; None is skipped.
        config: settings of the grading processes.
        keys: the config key of each task, for messages.
        samples: texts per problem of the first task, if it compares texts. Other tasks get one
            text, as in a greedy evaluation.

    Raises:
        UsageError: a task cannot be graded.
    """
    checked: list[Any] = []
    for i, (task, key) in enumerate(zip(tasks, keys, strict=False)):
        if isinstance(task, SelfGradingTask):
            task.check_grading(key, tasks[:i])
        elif isinstance(task, ConversationTask):
            if type(task) not in checked:
                checked.append(type(task))
                _check_environment(task, config, key)
        elif task is not None:
            # Held-out problems mostly have the grader of the training problems: the same class, and
            # the same function if one is named. Each grader is tried once.
            own, texts = getattr(task, "__dict__", {}), samples if hasattr(task, "grade_group") and i == 0 else 1
            grader = (type(task), own.get("grade"), own.get("grade_group"), texts)
            if grader not in checked:
                checked.append(grader)
                _check_grader(task, config, key, texts)


def answer_faults(grader: Grader, problems: Sequence[Problem]) -> list[str]:
    """Checks that problems can be graded.

    A problem must be picklable. With a grader of this package and a task with `tries_answers`, the
    reference answer must also get a higher reward than a wrong text.

    Returns:
        For each problem, the reason why it cannot be graded, or "".
    """
    # A `SelfGradingTask` sends problems in its own way.
    if not isinstance(grader, Grader):
        return [""] * len(problems)
    if not grader.is_shipped or not getattr(grader.task, "tries_answers", False):
        return [_pickling_fault(problem) for problem in problems]
    # On a busy machine, graders may time out. So a problem with a transient fault is tried again,
    # alone.
    first = _answer_faults(grader, problems)
    return [
        _answer_faults(grader, [problem])[0] if isinstance(fault, TransientReason) else fault
        for problem, fault in zip(problems, first, strict=True)
    ]


def _answer_faults(grader: Grader, problems: Sequence[Problem]) -> list[str]:
    submitted = []
    for problem in problems:
        texts = WRONG_ANSWER, _solution(grader.task, problem)
        submitted.append([grader.submit(problem, text) for text in texts if isinstance(text, str)])
    outcomes = iter(gather_results([future for each in submitted for future in each]))
    return [_answer_fault([next(outcomes)[0] for _ in each]) for each in submitted]


def _pickling_fault(problem: Problem) -> str:
    try:
        cloudpickle.dumps(problem)
    except Exception as error:  # noqa: BLE001 (pickling runs the code of classes)
        return f"it cannot be sent to a grading process: {error_line(error)}"
    return ""


def _answer_fault(outcomes: Sequence[Outcome]) -> str:
    """Returns the fault in the outcomes of a wrong text and of the reference answer, or "".

    The reference answer may be missing.
    """
    for outcome in outcomes:
        if outcome.kind in ("infra_failed", "timed_out"):
            cause = failure_cause(outcome)
            kind = TransientReason if outcome.kind == "timed_out" or cause.startswith(DIED_PREFIX) else str
            return kind(f"its answer cannot be graded: {cause}")
    wrong, *right = [outcome.reward for outcome in outcomes if isinstance(outcome, Score)]
    if not right:
        return "its grader gives a wrong text the reward 1 or more" if wrong >= 1.0 else ""
    return "" if right[0] > wrong else f"its reference answer gets the reward {right[0]:g}, and a wrong text {wrong:g}"


def _check_grader(task: Task, config: GraderConfig, key: str, texts: int = 1) -> None:
    """Grades the solutions of the first problems.

    Raises:
        UsageError: grading fails, times out, or gives the reward 0 to every solution.
    """
    problems = _first_problems(task, key)
    if not problems:
        return
    solutions = [_solution(task, problem) for problem in problems]
    name, has_solutions = type(task).__name__, all(text is not None for text in solutions)
    what = "its own solution" if has_solutions else f"the text {PLACEHOLDER_ANSWER!r}"
    try:
        # The output is discarded: in the run, the grader prints the same into a file that is kept.
        with TemporaryDirectory() as folder, Grader(task, 1, config.timeout_s, Path(folder) / LOG_FILE_NAME) as grader:
            outcomes = []
            for problem, text in zip(problems, solutions, strict=True):
                # A task that compares texts gets a group of the run's size.
                group = [text if has_solutions and isinstance(text, str) else PLACEHOLDER_ANSWER] + [
                    PLACEHOLDER_ANSWER
                ] * (texts - 1)
                outcomes.append(grader.submit(problem, *group).result()[0])
                if outcomes[-1].kind == "timed_out":
                    raise UsageError(
                        f"{key}: {name} took more than grader.timeout_s={config.timeout_s:g} to grade {what} of problem "
                        f"{problem.id!r}. Fix: raise grader.timeout_s, or find the call in `grade` that hangs"
                    )
            rewards = [outcome.reward for outcome in outcomes if isinstance(outcome, Score)]
            if not rewards:
                raise UsageError(
                    f"{key}: {name} cannot grade {what} of problem {problems[0].id!r}: {outcomes[0].cause}; none of the first "
                    f"{len(problems)} problems can be graded. Fix: repair its `grade`"
                )
            # An untrained model soon samples an empty text.
            empty_outcome = grader.submit(problems[0], *[""] * texts).result()[0]
            if isinstance(empty_outcome, Ungraded):
                text = f"{name} fails on an empty text, which would count as ungraded: {empty_outcome.cause}"
                print_text(format_labels([("grader", text)]))
            # A user's function may require more than the answer alone, so its reward 0 is only a
            # warning.
            is_plain_function = "grade" in getattr(task, "__dict__", {}) and getattr(task, "worked", None) is None
            # A task may give only negative rewards. But if every solution gets 0 and another text
            # gets at least as much, the grader is wrong. A grader that compares texts cannot be
            # checked with a single text.
            if has_solutions and not any(rewards) and not grader.grades_groups:
                others = [grader.submit(problem, PLACEHOLDER_ANSWER).result()[0] for problem in problems]
                best = max((other.reward for other in others if isinstance(other, Score)), default=0.0)
                if max(rewards) <= best:
                    if is_plain_function:
                        name = describe_function(task.grade)
                        text = f"{name} gives the answers of the first {len(problems)} problems the reward 0, and"
                        text += f" {PLACEHOLDER_ANSWER!r} {best:g}: does it reward a right answer?"
                        print_text(format_labels([("grader", text)]))
                        return
                    raise UsageError(
                        f"{key}: {name} gives its own solution of problem {problems[0].id!r} the reward {rewards[0]:g}, and "
                        f"{PLACEHOLDER_ANSWER!r} at least as much: `grade` and `solution` disagree. Fix: repair one "
                        "(docs/custom_reward.md)"
                    )
    except RuntimeError as error:
        raise UsageError(f"{key}: the grader of {name} failed: {error}") from error


def _check_environment(task: Conversations, config: GraderConfig, key: str) -> None:
    """Plays the solution of the first problem, or one turn if it has no solution.

    Raises:
        UsageError: the environment fails, or gives the reward 0 to its own solution.
    """
    problem, name = next(iter(_first_problems(task, key)), None), type(task).__name__
    if problem is None:
        return
    solution = _solution(task, problem)
    turns = [message for message in solution_messages(solution or ()) if message["role"] == "assistant"]
    rewards = []
    with (
        TemporaryDirectory() as folder,
        Environments(task, 1, config.timeout_s, Path(folder) / LOG_FILE_NAME) as grader,
    ):
        slot = grader.acquire_slot()
        for i, message in enumerate(turns or [{"role": "assistant", "content": PLACEHOLDER_ANSWER}]):
            turn = grader.step(slot, message, (problem, 0) if i == 0 else None).result()
            if isinstance(turn, Ungraded):
                raise UsageError(
                    f"{key}: the environment of {name} fails at turn {i + 1} of problem {problem.id!r}, "
                    f"{message['content']!r:.60}: {turn.cause}. Fix: repair its `step`, or raise grader.timeout_s="
                    f"{config.timeout_s:g} (docs/environments.md)"
                )
            rewards.append(turn.reward)
            if turn.done:
                break
        if turns and not any(rewards):
            raise UsageError(
                f"{key}: the environment of {name} gives its own solution of problem {problem.id!r} the reward 0: "
                "`environment` and `solution` disagree. Fix: repair one (docs/environments.md)"
            )


def _first_problems(task: Task, key: str) -> list[Problem]:
    """Returns the first problems that can be created and pickled.

    Raises:
        UsageError: problems can be created, but none can be pickled.
    """
    problems, last_error = [], ""
    for index in range(min(MAX_SEARCHED_PROBLEMS, len(task))):
        # A problem that cannot be created or pickled is skipped here; the run reports and skips it,
        # too.
        with suppress(Exception):
            problem = task[index]
            if fault := _pickling_fault(problem):
                last_error = f"problem {problem.id!r}: {fault}"
            else:
                problems.append(problem)
        if len(problems) == NUM_TRIED_PROBLEMS:
            break
    if last_error and not problems:
        raise UsageError(f"{key}: none of its first problems can be graded; the last error: {last_error}")
    return problems


def _solution(task: Task, problem: Problem) -> str | Sequence[Message] | None:
    """Returns the solution of a problem, or None if it has no usable one."""
    try:
        text = task.solution(problem)
    except Exception:  # noqa: BLE001 (the code of the task)
        # GRPO does not need solutions, so an error is treated as a missing solution.
        return None
    return text if isinstance(text, str) or isinstance(task, ConversationTask) else None
