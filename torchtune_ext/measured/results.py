"""What the benchmark service says of a program, and how it is set up."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field

import torchtune_ext
from torchtune_ext.run.errors import RunFailure
from torchtune_ext.settings.records import Seconds, config_record

# Beside the OUTCOMES of check.py: the program is right, but the machine was disturbed, so that no speed is known.
NOISY = "noisy"
Optimization = Literal["-O0", "-O1", "-O2", "-O3"]


class BenchError(RunFailure):
    """The service itself failed, and nothing is known about the program."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The speed of one program at the kernel's timed size."""

    seconds: float  # of a call: the median of the medians of the blocks
    # Half of the 95% interval of that, as a share; below 6 blocks: half of what lies between the extremes.
    relative_ci: float
    calls: int
    gflops: float  # operations of a call / seconds, in 10^9
    speedup: float  # how many times faster than the reference beside it; median over the blocks
    speedup_ci: float  # the same of that
    roofline_fraction: float  # what the roofline of these cores allows / seconds
    # Share of the blocks that count beside which somebody else was at work; 0 unless the machine never came to rest.
    disturbed_fraction: float
    is_narrow: bool  # both intervals are within NARROW
    is_noisy: bool  # it never came to rest, and the reference felt it as well: nothing is known about the program


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one program. It can be pickled."""

    kernel: str  # the name of the kernel that it was written for
    outcome: str  # one of check.OUTCOMES, or NOISY
    stage: str  # the stage that decided: one of check.STAGES, or "time"
    note: str = ""  # for people: the compiler's message, the failing size, how noisy it was; "" if it is ok
    timing: Timing | None = None  # its speed, if it was timed and the outcome is "ok"
    seconds: Mapping[str, float] = field(default_factory=dict)  # of each stage that ran; of a cached one: when it ran
    fingerprint: str = ""  # of the machine and the optimization level: speeds of two are not compared
    is_cached: bool = False  # an equal text was measured before, or was under way at the same time
    techniques: tuple[str, ...] = ()  # that it uses, sorted, if they were looked for and it came so far


@config_record("bench")
class BenchConfig:
    """The keys of `bench:`, an argument of tasks whose programs are timed."""

    workers: int | None = Field(
        default=None, ge=1, description="processes that check programs; null: one per core not timed on"
    )
    cores: list[int] | None = Field(
        default=None, description="cores to time on, e.g. [2, 3]; null: those that no engine may use"
    )
    threads: int = Field(default=1, ge=1, description="threads, and cores, of a timed program")
    compiler: str | None = Field(default=None, description="gcc, clang, or a path; null: the one found first")
    optimization: Optimization = Field(default="-O3", description="compiler flag of candidate and naive program")
    budget_s: Seconds = Field(default=10.0, description="seconds for one timing")
    namespaces: bool | None = Field(default=None, description="isolate programs by bubblewrap; null: where it works")
    address: str | None = Field(
        default=None, description='Ray cluster that times, HOST:PORT or "auto"; null: this machine'
    )


def code_version() -> str:
    """Returns the version of torchtune_ext here, with a digest of all that measures: results of another are not compared."""
    digest = hashlib.sha256()
    folder = Path(torchtune_ext.__file__).parent / "measured"
    for path in sorted(path for ending in ("*.py", "*.c") for path in folder.rglob(ending)):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return f"{torchtune_ext.__version__} ({digest.hexdigest()[:12]})"
