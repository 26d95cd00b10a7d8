"""The task of the chaos runs: a user task that records its calls in a journal.

From the journal, `chaos.py` derives the phase of a run. Each line is appended in one write: seconds of the monotonic
clock, process id, event.
"""

import hashlib
import os
import time

from torchtune_ext.tasks.task import Problem, Score


def note(event: str) -> None:
    """Append a line to the journal. Only rank 0 writes, since the other ranks follow it."""
    if os.environ.get("RANK", "0") != "0":
        return
    journal = os.open(os.environ["CHAOS_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(journal, f"{time.monotonic():.4f} {os.getpid()} {event}\n".encode())
    finally:
        os.close(journal)


class Letters:
    """The reward is a hash of the text, so every group has reward variance. Grading a text takes `seconds`."""

    def __init__(self, count: int = 64, name: str = "problem", seconds: float = 0.03):
        self.count, self.name, self.seconds = count, name, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < self.count:
            raise IndexError(index)
        note(self.name)
        text = f"Write about {index}. " + "Go on. " * (index % 5)
        return Problem(f"letters-{index}", ({"role": "user", "content": text},), index)

    def grade(self, problem: Problem, text: str) -> Score:
        note("grade")
        time.sleep(self.seconds)
        value = hashlib.sha256(f"{problem.answer}/{text}".encode()).digest()[0] / 255
        return Score(value, {"hash": value})
