"""The coordinator: texts come in, and their results come out as soon as each is there.

Checks run in parallel, in processes that can be killed. Timings run one after the other.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Self

from torchtune_ext.tasks.measured.check import Deadlines
from torchtune_ext.tasks.measured.kernel import Kernel
from torchtune_ext.tasks.measured.results import BenchConfig, BenchError, Result
from torchtune_ext.tasks.measured.sandbox import Limits

__all__ = ["Bench", "BenchConfig", "BenchError", "Result"]


class Bench:
    """Measures programs on this machine. Any thread may use it.

    Args:
        workers: processes that check; None: one for each core that is not timed on.
        cores: the cores to time on; None: those that no engine may use, or the last ones.
        threads: how many threads a program may use; OpenMP is compiled in from 2 on.
        optimization: "-O0" to "-O3".
        compiler: "gcc" or "clang", or a path; None: as found.
        budget_s: seconds for one timing.
        namespaces: whether bubblewrap is used; None: wherever it works.
        cache: a file that keeps results for later runs; None: they are kept as long as this object lives.
        deadlines: seconds that each stage of a check may take.
        limits: what a program may use.

    Raises:
        ValueError: a setting is out of range, there is no compiler or no tree-sitter, or a core does not exist.
        SandboxError: this machine cannot lock programs in.
    """

    def __init__(
        self,
        workers: int | None = None,
        cores: Sequence[int] | None = None,
        threads: int = 1,
        optimization: str = "-O3",
        compiler: str | None = None,
        budget_s: float = 10.0,
        namespaces: bool | None = None,
        cache: str | Path | None = None,
        deadlines: Deadlines | None = None,
        limits: Limits | None = None,
    ) -> None:
        raise NotImplementedError

    def submit(self, kernel: Kernel, text: str) -> "Future[Result]":
        """Hands in a model's answer and returns at once. Its future can be canceled until its check begins.

        The future raises BenchError if the service fails, and says how.

        Raises:
            BenchError: this object is closed, or has failed.
            ValueError: the kernel cannot be pickled.
        """
        raise NotImplementedError

    def stats(self) -> dict[str, float]:
        """Returns counters for metrics, all of them numbers that may be added over machines.

        Now: "queued_checks", "queued_timings", "checking", "timing". Since the start: "done", "cached", "retried", "noisy",
        "failed", and "seconds_STAGE" for each stage (check.STAGES, "time", and "wait": until the cores were idle and free).
        """
        raise NotImplementedError

    def close(self) -> None:
        """Ends all processes and removes all folders. Futures that are not done raise BenchError. A second
        call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
