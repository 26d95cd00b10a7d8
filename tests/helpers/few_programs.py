"""Six dgemm programs: a task for a warm-up of a small model in seconds, and recorded timings.

Tests copy this file into the folder of a run, so that the recipes find it.
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
# Correct single-threaded programs with the fewest tokens; consecutive programs are permitted by different stages.
CHOSEN = {"none": 123, "loop_order": 91, "unrolling": 190, "sum": 207, "pointers": 330, "blocks": 308}
PROGRAMS = [ProgramFamily(broken=0.0)[index] for index in CHOSEN.values()]


class Few:
    """Problems with one of the programs as the answer, with and without a program to improve in the prompt."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Problem:
        kernel, stage = Dgemm(SIZES[index % 2]), list(stages.STAGES)[index // 2 % len(stages.STAGES)]
        program, shown = PROGRAMS[index % len(PROGRAMS)], PROGRAMS[index * 7 // 12 % len(PROGRAMS)]
        elite = ArchiveEntry(MACHINE, kernel.name, kernel.timed, shown.techniques, shown.source, 1.9, 0.1, 1.0, 1)
        # The answer does not depend on the shown program.
        prompt = messages(kernel, stage, elite if index // 12 % 2 else None)
        return Problem(f"{problem_id(kernel)}/{stage}/{index}", prompt, f"```c\n{program.source}```")

    def solution(self, problem: Problem) -> str:
        return problem.answer


class Recorded:
    """Fake `Bench`. The outcome of a program is derived from a hash of its text, its problem and the permitted techniques.

    If all techniques are permitted, every program is wrong. One program in ten is noisy.
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
    """The task with recorded timings, and with short windows, so that stages change every few steps."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        grading.open_bench = lambda config: Recorded()
        stages.WINDOW_VISITS, stages.PATIENCE_VISITS = 2, 4
        stages.MAX_SETTLED_RISE, stages.MAX_SETTLED_GAIN = 2.0, 100.0


def outcomes(groups) -> Counter:
    """Count the outcomes of the samples of groups; "noisy" samples have no grade."""
    counts: Counter[str] = Counter()
    for group in groups:
        for sample in group.samples:
            parts = {} if sample.score is None else sample.score.parts
            counts.update(
                [name.removeprefix("outcome_") for name, value in parts.items() if value and "outcome_" in name]
            )
            counts["noisy"] += sample.score is None
    return counts
