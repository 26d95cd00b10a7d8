"""Tasks for grading processes, which import this module: one whose texts script their grading, and numbered problems."""

import os
import re
import signal
import sys
import time
from pathlib import Path

from torchtune_ext.grading import Grader
from torchtune_ext.tasks.task import Problem, Score

PROBLEM = Problem("p", ({"role": "user", "content": "?"},), answer=None)
PROBLEMS = 100  # of NumberedTask


def same(problem, text):
    """A reward function of a user."""
    return float(text == problem.answer)


class NumberedTask:
    """Problem i has the id i and the prompt i. The reward is the length of the text; some texts fail in grading or take long."""

    def __len__(self):
        return PROBLEMS

    def __getitem__(self, index):
        return Problem(str(index), ({"role": "user", "content": str(index)},), index)

    def grade(self, problem, text):
        if text == "broken":
            raise ValueError("a broken text")
        time.sleep(60.0 if text == "long" else 0.0)
        return Score(float(len(text)), {})


class Scripted:
    """Executes the verb at the start of a text."""

    def grade(self, problem: Problem, text: str) -> Score:
        verb, _, rest = text.partition(" ")
        return getattr(self, verb)(problem, rest)

    def reward(self, problem, rest):
        return Score(float(rest), {"accuracy": float(rest)})

    def nothing_to_grade(self, problem, rest):
        return Score(-1.0, {"failed": 1.0})

    def answer(self, problem, rest):
        return Score(float(problem.answer), {})

    def noted(self, problem, rest):
        return Score(1.0, {}, "x" * int(rest))

    def none(self, problem, rest):
        return None

    def part(self, problem, rest):
        return Score(1.0, {"speed": float(rest)})

    def raises(self, problem, rest):
        raise ValueError(rest)

    def sys_exit(self, problem, rest):
        sys.exit(5)

    def os_exit(self, problem, rest):
        os._exit(int(rest))

    def segfault(self, problem, rest):
        os.kill(os.getpid(), signal.SIGSEGV)

    def sleeps(self, problem, rest):
        time.sleep(float(rest))
        return Score(1.0, {})

    def waits(self, problem, rest):
        """Wait until a file of that name exists."""
        while not Path(rest).exists():
            time.sleep(0.01)
        return Score(1.0, {})

    def answers(self, problem, rest):
        """Create the first file at the start, wait for the second, and create the third at the end."""
        begun, go_on, over = rest.split()
        Path(begun).touch()
        self.waits(problem, go_on)
        Path(over).touch()
        return Score(1.0, {})

    def interrupts(self, problem, rest):
        """Send SIGINT to the caller, as Ctrl-C does, and continue."""
        os.kill(os.getppid(), signal.SIGINT)
        return self.waits(problem, rest)

    def backtracks(self, problem, rest):
        return Score(float(bool(re.match(r"(a+)+$", "a" * 60 + "b"))), {})  # holds the interpreter lock for years

    def forks(self, problem, rest):
        os.fork()
        return Score(3.0, {})

    def pid(self, problem, rest):
        return Score(float(os.getpid()), {})

    def imported(self, problem, rest):
        return Score(float(rest in sys.modules), {})


class Sized(Scripted):
    """A scripted task with nine problems."""

    def __len__(self):
        return 9

    def __getitem__(self, index):
        return PROBLEM


def graded(texts: list[str], workers: int = 1, timeout_s: float = 10.0):
    with Grader(Scripted(), workers, timeout_s) as grader:
        return grader.grade([(PROBLEM, text) for text in texts])
