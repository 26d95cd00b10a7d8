"""Opens the graders of a run's tasks, and tries them and the right answers before anything expensive starts."""

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
NUM_TRIED_PROBLEMS = 4  # problems whose solutions are graded before a run begins
MAX_SEARCHED_PROBLEMS = 32  # first problems of a task among which these are
WRONG_ANSWER = "<think>\n</think>\n\n\\boxed{271828183}"  # a text that answers no problem right
PLACEHOLDER_ANSWER = "1"  # the text that is graded if there is no solution


def open_graders(
    tasks: Sequence[Task | None],
    config: GraderConfig,
    beside_training: bool = False,
    folder: str | Path | None = None,
) -> list[Grader]:
    """Starts the graders of these tasks, in their order, without those that are None. Raises what the graders raise.

    Args:
        config: settings of the grading processes. A task with a grader of its own has its own settings.
        beside_training: texts are graded while this process trains.
        folder: the folder of the run; graders print into the file `OUTPUT` there. None: they print where we do.
    """
    graders: list[Grader] = []
    output = None if folder is None else Path(folder) / LOG_FILE_NAME
    # Processes that were started for the tasks before an error would outlive the run.
    with ExitStack() as opened:
        for task in filter(None, tasks):
            if isinstance(task, SelfGradingTask):
                grader = task.open_grader(graders, beside_training)
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
    """Raises ValueError if one of these tasks cannot be graded.

    Args:
        keys: the nodes of the tasks, for messages.
        samples: texts of a problem of the first task, if it compares them. The others get one, as a greedy sample is.
    """
    tried: list[Any] = []
    for i, (task, key) in enumerate(zip(tasks, keys, strict=False)):
        if isinstance(task, SelfGradingTask):
            task.check_grading(key, tasks[:i])
        elif isinstance(task, ConversationTask):
            if type(task) not in tried:
                tried.append(type(task))
                _check_environment(task, config, key)
        elif task is not None:
            # Held-out problems mostly have the grader of the training problems: the same class, and the same function
            # if one is named. A grader is tried once.
            own, texts = getattr(task, "__dict__", {}), samples if hasattr(task, "grade_group") and i == 0 else 1
            grader = (type(task), own.get("grade"), own.get("grade_group"), texts)
            if grader not in tried:
                tried.append(grader)
                _check_grader(task, config, key, texts)


def answer_faults(grader: Grader, problems: Sequence[Problem]) -> list[str]:
    """Says for each problem why it cannot be graded, or "".

    The problem has to be picklable. With a grader of this package, if the task has `tries_answers`, the right answer
    also has to get a higher reward than a wrong text.
    """
    # A task that grades by itself sends what it likes.
    if not isinstance(grader, Grader):
        return [""] * len(problems)
    if not grader.is_shipped or not getattr(grader.task, "tries_answers", False):
        return [_pickling_fault(problem) for problem in problems]
    # A busy machine makes graders late, so a problem that may have suffered from it is tried again, alone.
    first = _answer_faults(grader, problems)
    return [
        _answer_faults(grader, [problem])[0] if isinstance(fault, TransientReason) else fault
        for problem, fault in zip(problems, first, strict=True)
    ]


def _answer_faults(grader: Grader, problems: Sequence[Problem]) -> list[str]:
    asked = []
    for problem in problems:
        texts = WRONG_ANSWER, _solution(grader.task, problem)
        asked.append([grader.submit(problem, text) for text in texts if isinstance(text, str)])
    outcomes = iter(gather_results([future for each in asked for future in each]))
    return [_answer_fault([next(outcomes)[0] for _ in each]) for each in asked]


def _pickling_fault(problem: Problem) -> str:
    try:
        cloudpickle.dumps(problem)
    except Exception as error:  # noqa: BLE001 (pickling runs the code of classes)
        return f"it cannot be sent to a grading process: {error_line(error)}"
    return ""


def _answer_fault(outcomes: Sequence[Outcome]) -> str:
    """Says what is wrong with the outcomes of a wrong text and of the right one, which may be missing."""
    for outcome in outcomes:
        if outcome.kind in ("infra_failed", "timed_out"):
            cause = failure_cause(outcome)
            kind = TransientReason if outcome.kind == "timed_out" or cause.startswith(DIED_PREFIX) else str
            return kind(f"its answer cannot be graded: {cause}")
    wrong, *right = [outcome.reward for outcome in outcomes if isinstance(outcome, Score)]
    if not right:
        return "its grader pays for a wrong text" if wrong >= 1.0 else ""
    return "" if right[0] > wrong else f"its right answer gets the reward {right[0]:g}, and a wrong one {wrong:g}"


def _check_grader(task: Task, config: GraderConfig, key: str, texts: int = 1) -> None:
    """Grades the first problems' solutions. Raises ValueError if that fails, is too slow, or gives no reward."""
    problems = _first_problems(task, key)
    if not problems:
        return
    solutions = [_solution(task, problem) for problem in problems]
    name, worked = type(task).__name__, all(text is not None for text in solutions)
    what = "its own solution" if worked else f"the text {PLACEHOLDER_ANSWER!r}"
    try:
        # In the run the grader will print the same again, into a file that is kept.
        with TemporaryDirectory() as folder, Grader(task, 1, config.timeout_s, Path(folder) / LOG_FILE_NAME) as grader:
            outcomes = []
            for problem, text in zip(problems, solutions, strict=True):
                # A task that compares gets a group of its usual size.
                group = [text if worked and isinstance(text, str) else PLACEHOLDER_ANSWER] + [PLACEHOLDER_ANSWER] * (
                    texts - 1
                )
                outcomes.append(grader.submit(problem, *group).result()[0])
                if outcomes[-1].kind == "timed_out":
                    raise UsageError(
                        f"{key}: {name} took more than grader.timeout_s={config.timeout_s:g} to grade {what} of problem "
                        f"{problem.id!r}; raise grader.timeout_s, or look for what hangs in `grade`"
                    )
            rewards = [outcome.reward for outcome in outcomes if isinstance(outcome, Score)]
            if not rewards:
                raise UsageError(
                    f"{key}: {name} cannot grade {what} of problem {problems[0].id!r}: {outcomes[0].cause}; none of the first "
                    f"{len(problems)} problems can be graded"
                )
            # An untrained model will soon sample an empty text.
            silent = grader.submit(problems[0], *[""] * texts).result()[0]
            if isinstance(silent, Ungraded):
                text = f"{name} fails on an empty text, which would count as ungraded: {silent.cause}"
                print_text(format_labels([("grader", text)]))
            # A user's own function may want more than a bare answer, so then the reward 0 is only worth a line.
            is_plain_function = "grade" in getattr(task, "__dict__", {}) and getattr(task, "worked", None) is None
            # A task may pay less than 0 for everything, but something is wrong if a solution gets just 0, and another
            # text no less. A grader that compares says nothing about a single text.
            if worked and not any(rewards) and not grader.grades_groups:
                others = [grader.submit(problem, PLACEHOLDER_ANSWER).result()[0] for problem in problems]
                best = max((other.reward for other in others if isinstance(other, Score)), default=0.0)
                if max(rewards) <= best:
                    if is_plain_function:
                        text = f"{describe_function(task.grade)} gives the answers of the first {len(problems)} problems the reward 0"
                        print_text(
                            format_labels(
                                [
                                    (
                                        "grader",
                                        f"{text}, and {PLACEHOLDER_ANSWER!r} {best:g}: does it pay for a right one?",
                                    )
                                ]
                            )
                        )
                        return
                    raise UsageError(
                        f"{key}: {name} gives its own solution of problem {problems[0].id!r} the reward {rewards[0]:g}, and "
                        f"{PLACEHOLDER_ANSWER!r} no less: `grade` and `solution` do not fit each other (docs/custom_reward.md)"
                    )
    except RuntimeError as error:
        raise UsageError(f"{key}: {name} cannot be graded: {error}") from error


def _check_environment(task: Conversations, config: GraderConfig, key: str) -> None:
    """Plays the first problem's solution, or one turn if it has none. Raises ValueError as `_rehearse`."""
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
                    f"{message['content']!r:.60}: {turn.cause}; repair its `step`, or raise grader.timeout_s="
                    f"{config.timeout_s:g} (docs/environments.md)"
                )
            rewards.append(turn.reward)
            if turn.done:
                break
        if turns and not any(rewards):
            raise UsageError(
                f"{key}: the environment of {name} gives its own solution of problem {problem.id!r} the reward 0: "
                "`environment` and `solution` do not fit each other (docs/environments.md)"
            )


def _first_problems(task: Task, key: str) -> list[Problem]:
    """Returns the first problems that can be made and sent. Raises ValueError if those that can be made cannot be sent."""
    problems, unsent = [], ""
    for index in range(min(MAX_SEARCHED_PROBLEMS, len(task))):
        # A problem that cannot be made or sent is left to the run, which deals with it when it comes to it.
        with suppress(Exception):
            problem = task[index]
            if fault := _pickling_fault(problem):
                unsent = f"problem {problem.id!r}: {fault}"
            else:
                problems.append(problem)
        if len(problems) == NUM_TRIED_PROBLEMS:
            break
    if unsent and not problems:
        raise UsageError(f"{key}: none of its first problems can be graded; the last one is {unsent}")
    return problems


def _solution(task: Task, problem: Problem) -> str | Sequence[Message] | None:
    """Returns the solution of a problem, or None."""
    try:
        text = task.solution(problem)
    except Exception:  # noqa: BLE001 (the code of the task)
        # GRPO needs no solutions, so one that fails is as good as none.
        return None
    return text if isinstance(text, str) or isinstance(task, ConversationTask) else None
