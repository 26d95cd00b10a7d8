"""Throughput of grading mathematical answers, and the cost of a hanging grader.

    python benchmarks/grading.py [--workers 2] [--count 2000]

Uses the grading processes and `MathGrader` of a run, without a model. Half of the answers are right. "ms each" is the time of
one process for one text. A hang is a grader that sleeps: it blocks one process until its deadline, and the replacement process
imports the grader again. On a shared machine, compare the lines with each other.
"""

import argparse
import random
import time
from collections.abc import Callable

from torchtune_ext.grading import Grader, Ungraded
from torchtune_ext.tasks.answers import MathGrader
from torchtune_ext.tasks.task import Problem, Score

HANG = "sleep"
DEADLINES_S = (1.0, 5.0, 10.0)


class Answers:
    """Problems with given answers."""

    def __init__(self) -> None:
        self.grader = MathGrader()

    def grade(self, problem: Problem, text: str) -> Score:
        if text == HANG:
            time.sleep(3600)
        return self.grader(problem.answer, text)


def integer(rng: random.Random) -> str:
    return str(rng.randint(-9999, 9999))


def decimal(rng: random.Random) -> str:
    return f"{rng.randint(0, 999)}.{rng.randint(1, 9)}{rng.randint(1, 9)}"


def fraction(rng: random.Random) -> str:
    return f"\\frac{{{rng.randint(1, 99)}}}{{{rng.randint(2, 99)}}}"


def number_set(rng: random.Random) -> str:
    return f"\\{{{', '.join(str(rng.randint(0, 99)) for _ in range(4))}\\}}"


def expression(rng: random.Random) -> str:
    return f"x^{rng.randint(2, 9)} + {rng.randint(2, 9)}\\sqrt{{{rng.randint(2, 99)}}}"


def boxed(answer: str) -> str:
    return f"So it is $\\boxed{{{answer}}}$."


def long_text(answer: str) -> str:
    """Return 20,000 characters of reasoning before the box."""
    return "Let $x = 3$, then $x + 4 = 7$, and so on.\n" * 480 + boxed(answer)


def without_a_box(answer: str) -> str:
    """Return a text without a box: the grader searches its last 2,000 characters."""
    return "Let x = 3, then x + 4 = 7, and so on.\n" * 100 + f"In the end {answer}"


KINDS: tuple[tuple[str, Callable, Callable, float], ...] = (  # name, answers, texts, share of --count
    ("integers", integer, boxed, 1.0),
    ("decimals", decimal, boxed, 1.0),
    ("LaTeX fractions", fraction, boxed, 0.5),
    ("sets of four", number_set, boxed, 0.1),
    ("expressions", expression, boxed, 0.1),
    ("integers after 20,000 characters", integer, long_text, 0.5),
    ("integers without a box", integer, without_a_box, 0.1),
)


def items(make: Callable, write: Callable, count: int) -> list[tuple[Problem, str]]:
    rng = random.Random(0)
    result = []
    for number in range(count):
        gold, other = make(rng), make(rng)
        problem = Problem(f"answer-{number}", ({"role": "user", "content": "?"},), gold)
        result.append((problem, write(gold if number % 2 == 0 else other)))
    return result


def measure_speed(workers: int, count: int) -> None:
    print(f"{'answers':34s} {'texts':>6s} {'per second':>11s} {'ms each':>8s} {'right':>6s}")
    for name, make, write, share in KINDS:
        batch = items(make, write, max(2, int(count * share)))
        with Grader(Answers(), workers=workers, timeout_s=60.0) as grader:
            grader.grade(batch[: 4 * workers])  # the processes are ready, and sympy's tables are filled
            begin = time.monotonic()
            outcomes = grader.grade(batch)
            seconds = time.monotonic() - begin
        if any(isinstance(outcome, Ungraded) for outcome in outcomes):
            raise RuntimeError(f"{name}: some texts were not graded, see the log")
        right = sum(outcome.reward for outcome in outcomes) / len(outcomes)
        each = 1000 * workers * seconds / len(batch)
        print(f"{name:34s} {len(batch):6d} {len(batch) / seconds:11.0f} {each:8.2f} {right:6.2f}", flush=True)


def measure_hangs(workers: int) -> None:
    """Compare a batch of fractions with one hang in its middle with the same batch without a hang."""
    print(f"\n{'one hang among 1,000 fractions':34s} {'seconds':>8s} {'more':>6s} {'timed out':>10s}")
    for deadline_s in DEADLINES_S:
        batch = items(fraction, boxed, 1000)
        with Grader(Answers(), workers=workers, timeout_s=deadline_s) as grader:
            grader.grade(batch[: 4 * workers])
            without = 0.0
            for name in ("without", f"with, deadline {deadline_s:g} s"):
                begin = time.monotonic()
                outcomes = grader.grade(batch)
                seconds = time.monotonic() - begin
                lost = sum(outcome.kind == "timed_out" for outcome in outcomes)
                print(f"{name:34s} {seconds:8.2f} {seconds - (without or seconds):6.2f} {lost:10d}", flush=True)
                without = seconds
                batch[500] = batch[500][0], HANG
            begin = time.monotonic()
            grader.grade(batch[:1] * workers)
            print(f"{'  the next call, all processes back':34s} {time.monotonic() - begin:8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="grading processes")
    parser.add_argument("--count", type=int, default=2000, help="texts of the quickest kinds; others get a share")
    args = parser.parse_args()
    measure_speed(args.workers, args.count)
    measure_hangs(args.workers)


if __name__ == "__main__":
    main()
