"""A handful of programs for dgemm: a task that warms a small model up on them in seconds, and timings of them that are recorded.

The folder of a run gets a copy of this file, so that the recipes find it.
"""

import hashlib
from collections import Counter
from concurrent.futures import Future

from torchtune_ext.measured import grading
from torchtune_ext.measured.check import extract_code
from torchtune_ext.measured.kernels import Dgemm
from torchtune_ext.measured.matmul import stages
from torchtune_ext.measured.matmul.archive import ArchiveEntry
from torchtune_ext.measured.matmul.programs import ProgramFamily
from torchtune_ext.measured.matmul.prompts import messages
from torchtune_ext.measured.matmul.task import Matmul, problem_id
from torchtune_ext.measured.results import Result
from torchtune_ext.measured.techniques import TECHNIQUES
from torchtune_ext.measured.timing import Timing
from torchtune_ext.tasks.task import Problem

MACHINE = "Recorded CPU, 2 cores"
SIZES = [32, 48]
# Right ones without threads, which need the fewest tokens; each permitted by another stage than the one before.
CHOSEN = {"none": 123, "loop_order": 91, "unrolling": 190, "sum": 207, "pointers": 330, "blocks": 308}
PROGRAMS = [ProgramFamily(broken=0.0)[index] for index in CHOSEN.values()]


class Few:
    """Any of the programs as the answer to any long prompt, with and without a program to improve."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Problem:
        kernel, stage = Dgemm(SIZES[index % 2]), list(stages.STAGES)[index // 2 % len(stages.STAGES)]
        program, shown = PROGRAMS[index % len(PROGRAMS)], PROGRAMS[index * 7 // 12 % len(PROGRAMS)]
        elite = ArchiveEntry(MACHINE, kernel.name, kernel.timed, shown.techniques, shown.source, 1.9, 0.1, 1.0, 1)
        # A program is found anew in each prompt with one, so the answer does not hang on what is shown.
        prompt = messages(kernel, stage, elite if index // 12 % 2 else None)
        return Problem(f"{problem_id(kernel)}/{stage}/{index}", prompt, f"```c\n{program.source}```")

    def solution(self, problem: Problem) -> str:
        return problem.answer


class Recorded:
    """Has the interface of `Bench`. What becomes of a program is drawn from its text, its problem and what is permitted.

    Where everything is permitted nothing is right. One program in ten is noisy.
    """

    def submit(self, kernel, text, permitted=None) -> "Future[Result]":
        words = [problem_id(kernel), extract_code(text), sorted(permitted)]
        drawn = hashlib.sha256(repr(words).encode()).digest()
        outcome, stage, timing, used = "ok", "time", None, ()
        if words[1] is None:
            outcome, stage = "format", "extract"
        elif set(permitted) == set(TECHNIQUES):
            outcome, stage = "wrong_result", "verify"
        elif drawn[0] < 26:
            outcome = "noisy"
        else:
            used = tuple(sorted(name for name, byte in zip(TECHNIQUES, drawn[1:], strict=False) if byte < 64))
            used = tuple(name for name in used if name in permitted)
            ratio = 2.0 ** (drawn[10] / 64)
            timing = Timing(1e-4 / ratio, 0.1, 30, ratio, ratio, 0.1, ratio / 64, 0.0, True, False)
        future: Future[Result] = Future()
        note = "others disturb the machine" if outcome == "noisy" else ""
        seconds = {"time": 0.01}
        future.set_result(Result(kernel.name, outcome, stage, note, timing, seconds, MACHINE, techniques=used))
        return future

    def close(self) -> None:
        pass


class RecordedMatmul(Matmul):
    """The task with recorded timings, and windows so short that stages change every few steps."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        grading.open_bench = lambda config: Recorded()
        stages.WINDOW_VISITS, stages.PATIENCE_VISITS = 2, 4
        stages.MAX_SETTLED_RISE, stages.MAX_SETTLED_GAIN = 2.0, 100.0


def outcomes(groups) -> Counter:
    """Counts what became of the samples of groups; "noisy" are those that were not graded."""
    counts: Counter[str] = Counter()
    for group in groups:
        for sample in group.samples:
            parts = {} if sample.score is None else sample.score.parts
            counts.update(
                [name.removeprefix("outcome_") for name, value in parts.items() if value and "outcome_" in name]
            )
            counts["noisy"] += sample.score is None
    return counts
