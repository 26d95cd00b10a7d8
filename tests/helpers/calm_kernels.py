"""Kernels for tests of the benchmark service: small, also timed on a busy machine, and with machine faults on demand.

The processes of the service unpickle these kernels. Unpickling makes the processes patient: they do not reject a noisy
machine, they skip no block, and they do not wait for other engines.
"""

import math
import os
import signal
import time
from pathlib import Path

from torchtune_ext.measured import bench, probe, timing
from torchtune_ext.measured.kernels import Dgemm, Reduction

SUM = "void reduction(int n, const double *x, double *total) {{ {} }}"
HONEST = SUM.format("double s = 0; for (int i = 0; i < n; i++) s += x[i]; *total = s;")


def fenced(source: str) -> str:
    return f"Here it is:\n\n```c\n{source}\n```\nIt is fast."


def instance(kind: type, *arguments):
    probe.MAX_VARIATION = 1e9
    probe.Probe.is_disturbed = lambda self, *looks: False
    timing.MAX_WAIT_FRACTION, timing.stolen_ticks = math.inf, lambda cores: 0
    bench.wait_until_idle = lambda *arguments: 0.0
    return kind(*arguments)


class CalmDgemm(Dgemm):
    def __init__(self, size: int = 48) -> None:
        super().__init__(size)
        self.size = size

    def __reduce__(self):
        return instance, (type(self), self.size)


class CalmReduction(Reduction):
    def __init__(self, size: int = 20_011) -> None:
        super().__init__(size)
        self.size = size

    def __reduce__(self):
        return instance, (type(self), self.size)


class Faulty(CalmReduction):
    """A kernel that injects a fault during verification. Files in `folder` name the fault: "check-kill" once, "check-kill-always".

    The first word is the stage. The second is the fault: "kill" (of the verifying process), "hang", "full" (an OSError),
    "bug" (an error in the kernel), "orphan" (the child processes are killed).
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __reduce__(self):
        return instance, (type(self), self.folder)

    def reference(self, size, inputs):
        # No fault while the checker or the timer of this kernel is created.
        checkers = {"check": list(bench.CHECKERS.values())}
        checkers["time"] = [timer.checker for timer in bench.TIMERS.values()]
        stage = next((each for each, kept in checkers.items() if self in [one.kernel for one in kept]), "making")
        for file in self.folder.glob(f"{stage}-*"):
            _, what, *always = file.name.split("-")
            if not always:
                file.unlink(missing_ok=True)
            getattr(self, what)()
        return super().reference(size, inputs)

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self):
        time.sleep(600)

    def full(self):
        raise OSError(28, "No space left on device")

    def bug(self):
        raise ZeroDivisionError("a bug of the kernel")

    def orphan(self):
        for process in Path("/proc").iterdir():
            try:
                fields = (process / "stat").read_bytes().rpartition(b") ")[2].split()
            except (OSError, IndexError):
                continue
            if process.name.isdigit() and int(fields[1]) == os.getpid():
                os.kill(int(process.name), signal.SIGKILL)
        time.sleep(0.1)
