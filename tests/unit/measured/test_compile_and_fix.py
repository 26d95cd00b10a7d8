"""Compile and fix: what a turn reads of its program, from the real compiler, and what it earns."""

import pytest

pytest.importorskip("tree_sitter_c")

from torchtune_ext.measured.check import Checker
from torchtune_ext.measured.kernels import Reduction
from torchtune_ext.measured.matmul import CompileAndFix
from torchtune_ext.measured.matmul.compile_and_fix import MAX_FEEDBACK_CHARS
from torchtune_ext.measured.sandbox import SandboxError
from torchtune_ext.run.errors import UsageError
from torchtune_ext.tasks.task import EpisodeTask

SUM = "void reduction(int n, const double *x, double *total) {{ {} }}"
RIGHT = SUM.format("double s = 0; for (int i = 0; i < n; i++) s += x[i]; *total = s;")


@pytest.fixture(scope="module")
def task():
    try:
        Checker(Reduction()).close()
    except (ValueError, SandboxError) as error:
        pytest.skip(str(error))
    return CompileAndFix({"reduction": [64, 100]}, max_turns=3)


def reply(program, fence="```c\n{}\n```"):
    return {"role": "assistant", "content": fence.format(program)}


def test_repair_environment_feeds_back_compiler_and_test_output(task):
    workshop = task.environment(task[0], seed=0)
    for program, outcome, words, compiled in (
        (RIGHT.replace("s = 0;", "s = 0"), "compile_error", "error: expected", 0.0),
        (RIGHT.replace("+=", "-="), "wrong_result", "(n = ", 1.0),
        (RIGHT.replace("double s", "system(0); double s"), "forbidden", "system", 0.0),
    ):
        turn = workshop.step(reply(program))
        assert (turn.done, turn.reward, turn.parts) == (False, 0.0, {"accuracy": 0.0, "compiled": compiled})
        (message,) = turn.messages
        assert message["role"] == "user" and message["content"].endswith("Write the whole program again.")
        assert message["content"].startswith(f"{outcome}: ") and words in message["content"], message
        assert len(message["content"]) < MAX_FEEDBACK_CHARS + 100
    assert "no closed block" in workshop.step(reply(RIGHT, "{}")).messages[0]["content"]
    turn = workshop.step(reply(RIGHT))
    assert (turn.done, turn.reward, turn.parts) == (True, 1.0, {"accuracy": 1.0, "compiled": 1.0})


def test_repair_task_problems_and_solutions(task):
    assert isinstance(task, EpisodeTask) and [task[i].id for i in range(2)] == ["reduction-64", "reduction-100"]
    with pytest.raises(IndexError):
        task[2]
    short = CompileAndFix({"reduction": 64}, prompt="short")
    assert (
        short[0].messages[0]["content"] == "reduction 64 all" and "Write a function" in task[0].messages[0]["content"]
    )
    assert task.environment(task[1], 0).step(task.solution(task[1])[0]).reward == 1.0


@pytest.mark.parametrize(
    "words, message",
    [
        ({"kernels": {"sum": 3}}, "task.kernels"),
        ({"prompt": "brief"}, "prompt='brief': unknown. Fix: choose one of long, short"),
        ({"compiler": "no-such-cc"}, "no-such-cc"),
    ],
)
def test_arguments(words, message):
    with pytest.raises(UsageError, match=message):
        CompileAndFix(**words)
