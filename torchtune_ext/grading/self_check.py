"""Opens the graders of a run's tasks, and tries them on reference answers before the run starts."""

from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cloudpickle

from torchtune_ext.grading.agents import AgentConfig, AgentPool
from torchtune_ext.grading.environments import EnvironmentPool, EnvironmentTask
from torchtune_ext.grading.grader import DIED_PREFIX, Grader, GraderConfig, TaskWorkers, failure_cause, gather_results
from torchtune_ext.grading.outcomes import Outcome, Ungraded
from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.output import format_labels, print_text
from torchtune_ext.run.worker_process import error_line
from torchtune_ext.tasks.grade_functions import describe_function
from torchtune_ext.tasks.problem_stream import TransientReason
from torchtune_ext.tasks.task import (
    AgentTask,
    EpisodeTask,
    Message,
    Problem,
    Score,
    SelfGradingTask,
    Task,
    require_part,
    solution_messages,
)

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
    agent: AgentConfig | None = None,
) -> list[Any]:
    """Starts the graders of these tasks, in order. Errors of the graders are raised unchanged.

    Args:
        tasks: the tasks of the run; None is skipped.
        config: settings of the grading processes. A `SelfGradingTask` has its own settings.
        during_training: True if texts are graded while this process trains.
        folder: run directory, for `LOG_FILE_NAME`. None: graders print to this process's output.
    """
    graders: list[Any] = []  # `Grader`, `EnvironmentPool`, `AgentPool` or the grader of a `SelfGradingTask`
    output = None if folder is None else Path(folder) / LOG_FILE_NAME
    # If a later task raises, the graders of the earlier tasks are closed.
    with ExitStack() as opened:
        for task in filter(None, tasks):
            if isinstance(task, SelfGradingTask):
                grader = task.open_grader(graders, during_training)
            elif isinstance(task, AgentTask):
                grader = AgentPool(task, agent or AgentConfig(), config.workers, output)
            elif isinstance(task, EpisodeTask):
                grader = EnvironmentPool(task, config.workers, config.timeout_s, output)
            else:
                grader = Grader(task, config.workers, config.timeout_s, output)
            graders.append(grader)
            opened.callback(grader.close)
        opened.pop_all()
    return graders


def check_grading(
    tasks: Sequence[Task | None],
    config: GraderConfig,
    samples: int = 2,
    parts: Collection[str] = (),
) -> None:
    """Checks that the tasks of a run can be graded.

    Args:
        tasks: the training task, then the held-out task, if any; None is skipped.
        samples: texts per problem of the first task if it grades whole groups (`grade_group`).
            Other tasks get one text, as in a greedy evaluation.
        parts: reward parts that the training task must return (`advantage.parts`).

    Raises:
        UsageError: a task cannot be graded, or the training task lacks a part.
    """
    checked: list[Any] = []
    for i, (task, key) in enumerate(zip(tasks, ("task", "evaluation.task"), strict=False)):
        if isinstance(task, SelfGradingTask):
            task.check_grading(key, tasks[:i])
        elif isinstance(task, AgentTask):
            continue  # its reward needs a policy
        elif isinstance(task, EpisodeTask):
            if type(task) not in checked:
                checked.append(type(task))
                _check_environment(task, config, key)
        elif task is not None:
            # Held-out problems mostly have the grader of the training problems: the same class, and
            # the same function if one is named. Each grader is tried once.
            attributes = getattr(task, "__dict__", {})
            texts = samples if hasattr(task, "grade_group") and i == 0 else 1
            grader_key = (type(task), attributes.get("grade"), attributes.get("grade_group"), texts)
            if grader_key not in checked:
                checked.append(grader_key)
                _check_grader(task, config, key, texts, parts if i == 0 else ())


def find_answer_errors(grader: Any, problems: Sequence[Problem]) -> list[str]:
    """Checks that problems can be graded.

    A problem must be picklable. With a grader of this package and a task with
    `checks_reference_answers`, the reference answer must also get more than a wrong text.

    Returns:
        For each problem, the reason why it cannot be graded, or "".
    """
    # A `SelfGradingTask` sends problems in its own way.
    if not isinstance(grader, TaskWorkers):
        return [""] * len(problems)
    checks_answers = grader.is_builtin and getattr(grader.task, "checks_reference_answers", False)
    if not checks_answers or not isinstance(grader, Grader):
        return [_pickling_error(problem) for problem in problems]
    # On a busy machine, graders may time out: a transient error is tried again, alone.
    first_errors = _grade_reference_answers(grader, problems)
    return [
        _grade_reference_answers(grader, [problem])[0] if isinstance(error, TransientReason) else error
        for problem, error in zip(problems, first_errors, strict=True)
    ]


def _grade_reference_answers(grader: Grader, problems: Sequence[Problem]) -> list[str]:
    submitted = []
    for problem in problems:
        texts = WRONG_ANSWER, _solution(grader.task, problem)
        submitted.append([grader.submit(problem, text) for text in texts if isinstance(text, str)])
    outcomes = iter(gather_results([future for futures in submitted for future in futures]))
    return [_describe_answer_error([next(outcomes)[0] for _ in futures]) for futures in submitted]


def _pickling_error(problem: Problem) -> str:
    try:
        cloudpickle.dumps(problem)
    except Exception as error:  # noqa: BLE001 (pickling runs the code of classes)
        return f"it cannot be pickled: {error_line(error)}"
    return ""


def _describe_answer_error(outcomes: Sequence[Outcome]) -> str:
    """Returns the error in the outcomes of a wrong text and, if given, of the reference answer."""
    for outcome in outcomes:
        if outcome.kind in ("infra_failed", "timed_out"):
            cause = failure_cause(outcome)
            kind = TransientReason if outcome.kind == "timed_out" or cause.startswith(DIED_PREFIX) else str
            return kind(f"its answer cannot be graded: {cause}")
    wrong_reward, *reference_rewards = [outcome.reward for outcome in outcomes if isinstance(outcome, Score)]
    if not reference_rewards:
        return "its grader gives a wrong text the reward 1 or more" if wrong_reward >= 1.0 else ""
    if (reward := reference_rewards[0]) > wrong_reward:
        return ""
    return f"its reference answer gets the reward {reward:g}, a wrong text {wrong_reward:g}"


def _check_grader(task: Task, config: GraderConfig, key: str, texts: int = 1, parts: Collection[str] = ()) -> None:
    """Grades the solutions of the first problems.

    Raises:
        UsageError: grading fails, times out, lacks a part, or gives the reward 0 to every solution.
    """
    problems = first_problems(task, key)
    if not problems:
        return
    solutions = [_solution(task, problem) for problem in problems]
    name, has_solutions = type(task).__name__, all(text is not None for text in solutions)
    text_name = "the solution" if has_solutions else f"the text {PLACEHOLDER_ANSWER!r}"
    try:
        # The output is discarded: in the run, the grader prints the same into a file that is kept.
        with TemporaryDirectory() as folder, Grader(task, 1, config.timeout_s, Path(folder) / LOG_FILE_NAME) as grader:
            outcomes = []
            for problem, text in zip(problems, solutions, strict=True):
                # A task that compares texts gets a group of the run's size.
                first = text if has_solutions and isinstance(text, str) else PLACEHOLDER_ANSWER
                outcomes.append(grader.submit(problem, first, *[PLACEHOLDER_ANSWER] * (texts - 1)).result()[0])
                if outcomes[-1].kind == "timed_out":
                    raise UsageError(
                        f"{key}: {name} took more than grader.timeout_s={config.timeout_s:g} to grade {text_name} of problem "
                        f"{problem.id!r}. Fix: raise grader.timeout_s, or find the call in `grade` that hangs"
                    )
            rewards = [outcome.reward for outcome in outcomes if isinstance(outcome, Score)]
            if not rewards:
                raise UsageError(
                    f"{key}: {name} cannot grade {text_name} of problem {problems[0].id!r}: {outcomes[0].cause}; none of the "
                    f"first {len(problems)} problems can be graded. Fix: repair its `grade`"
                )
            # An untrained model soon samples an empty text.
            empty_outcome = grader.submit(problems[0], *[""] * texts).result()[0]
            for score in (outcome for outcome in (*outcomes, empty_outcome) if isinstance(outcome, Score)):
                for part in parts:
                    require_part(score, part)
            if isinstance(empty_outcome, Ungraded):
                text = f"{name} fails on an empty text, which would count as ungraded: {empty_outcome.cause}"
                print_text(format_labels([("grader", text)]))
            # A user's function may require more than the answer alone, so its reward 0 is only a
            # warning.
            # `worked_solutions`: the dataset has texts that solve its problems, not only answers.
            has_worked_solutions = getattr(task, "worked_solutions", None) is not None
            is_plain_function = "grade" in getattr(task, "__dict__", {}) and not has_worked_solutions
            # A task may give only negative rewards. But if every solution gets 0 and another text
            # at least as much, the grader is wrong. One text cannot check a `grade_group`.
            if has_solutions and not any(rewards) and not grader.grades_groups:
                others = [grader.submit(problem, PLACEHOLDER_ANSWER).result()[0] for problem in problems]
                best = max((other.reward for other in others if isinstance(other, Score)), default=0.0)
                if max(rewards) <= best:
                    if is_plain_function:
                        name = describe_function(task.grade)
                        text = (
                            f"{name} gives the reward 0 to the reference answers of the first {len(problems)} problems, "
                            f"and {best:g} to the placeholder {PLACEHOLDER_ANSWER!r}: does it reward a right answer?"
                        )
                        print_text(format_labels([("grader", text)]))
                        return
                    raise UsageError(
                        f"{key}: {name} gives the reward {rewards[0]:g} to the solution of problem {problems[0].id!r}; "
                        f"expected more than {best:g}, the reward of the placeholder {PLACEHOLDER_ANSWER!r}. Fix: correct "
                        "`grade` or `solution` (docs/how_to/dataset.md)"
                    )
    except RuntimeError as error:
        raise UsageError(f"{key}: the grader of {name} failed: {error}") from error


def _check_environment(task: EnvironmentTask, config: GraderConfig, key: str) -> None:
    """Plays the solution of the first problem, or one turn if it has no solution.

    Raises:
        UsageError: the environment fails, or gives the reward 0 to the solution.
    """
    problem, name = next(iter(first_problems(task, key)), None), type(task).__name__
    if problem is None:
        return
    solution = _solution(task, problem)
    turns = [message for message in solution_messages(solution or ()) if message["role"] == "assistant"]
    rewards = []
    with (
        TemporaryDirectory() as folder,
        EnvironmentPool(task, 1, config.timeout_s, Path(folder) / LOG_FILE_NAME) as pool,
    ):
        for i, message in enumerate(turns or [{"role": "assistant", "content": PLACEHOLDER_ANSWER}]):
            reply = pool.step(0, message, (problem, 0) if i == 0 else None).result()
            if isinstance(reply, Ungraded):
                raise UsageError(
                    f"{key}: the environment of {name} fails at turn {i + 1} of problem {problem.id!r}, "
                    f"{message['content']!r:.60}: {reply.cause}. Fix: repair its `step`, or raise grader.timeout_s="
                    f"{config.timeout_s:g} (docs/how_to/environments.md)"
                )
            rewards.append(reply.reward)
            if reply.done:
                break
        if turns and not any(rewards):
            raise UsageError(
                f"{key}: the environment of {name} gives the reward 0 to the solution of problem {problem.id!r}; "
                "expected another reward. Fix: correct `environment` or `solution` (docs/how_to/environments.md)"
            )


def first_problems(task: Task, key: str) -> list[Problem]:
    """Returns the first problems that can be created and pickled.

    Raises:
        UsageError: problems can be created, but none can be pickled.
    """
    problems, last_error = [], ""
    for index in range(min(MAX_SEARCHED_PROBLEMS, len(task))):
        # A problem that cannot be created or pickled is skipped here, as in the run.
        with suppress(Exception):
            problem = task[index]
            if error := _pickling_error(problem):
                last_error = f"problem {problem.id!r}: {error}"
            else:
                problems.append(problem)
        if len(problems) == NUM_TRIED_PROBLEMS:
            break
    if last_error and not problems:
        raise UsageError(
            f"{key}: none of its first problems can be graded: {last_error}. Fix: keep functions, locks and open files out "
            "of its problems"
        )
    return problems


def _solution(task: Task, problem: Problem) -> str | Sequence[Message] | None:
    """Returns the solution of a problem, or None if it has no usable one."""
    try:
        text = task.solution(problem)
    except Exception:  # noqa: BLE001 (the code of the task)
        # GRPO does not need solutions, so an error is treated as a missing solution.
        return None
    return text if isinstance(text, str) or isinstance(task, EpisodeTask) else None
