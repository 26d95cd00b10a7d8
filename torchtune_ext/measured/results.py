"""Results and settings of the benchmark service."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field

import torchtune_ext
from torchtune_ext.run.errors import RunFailure
from torchtune_ext.settings.sections import Seconds, config_section

# An outcome in addition to OUTCOMES of check.py: the program is correct, but the machine was
# disturbed, so its speed is unknown.
NOISY = "noisy"
Optimization = Literal["-O0", "-O1", "-O2", "-O3"]


class BenchError(RunFailure):
    """The service itself failed; the result of the program is unknown."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The speed of one program at the kernel's timed size."""

    seconds: float  # per call: the median of the block medians
    # Half the width of the 95% interval, relative to the median; below 6 blocks: half the range.
    relative_ci: float
    calls: int
    gflops: float  # operations per call / seconds / 1e9
    speedup: float  # reference time / program time in the same block; median over the blocks
    speedup_ci: float  # like relative_ci, for the speedup
    roofline_fraction: float  # roofline time of these cores / seconds
    # Share of the counted blocks with other active processes; 0 if enough blocks were calm.
    disturbed_fraction: float
    is_narrow: bool  # both intervals are within MAX_RELATIVE_CI
    is_noisy: bool  # most blocks were disturbed, the reference too: the speed is unknown


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one program. It can be pickled."""

    kernel: str  # name of the kernel
    outcome: str  # one of check.OUTCOMES, or NOISY
    stage: str  # the last stage that ran: one of check.STAGES, or "time"
    note: str = ""  # for people: the compiler's message, the failing size, the noise; "" if ok
    timing: Timing | None = None  # set if the program was timed and the outcome is "ok"
    seconds: Mapping[str, float] = field(default_factory=dict)  # per stage; a cached result keeps the first run's
    fingerprint: str = ""  # machine and optimization level; speeds of different ones are not comparable
    is_cached: bool = False  # an equal text was measured before, or was in flight
    techniques: tuple[str, ...] = ()  # techniques of the program, sorted; () before that check


@config_section("bench")
class BenchConfig:
    """The keys of `bench:`, an argument of tasks whose programs are timed."""

    workers: int | None = Field(
        default=None, ge=1, description="processes that check programs; null: one per core that is not timed"
    )
    cores: list[int] | None = Field(
        default=None, description="cores to time on, e.g. [2, 3]; null: cores that no engine may use, else the last"
    )
    threads: int = Field(default=1, ge=1, description="threads, and cores, of a timed program")
    compiler: str | None = Field(default=None, description="gcc, clang, or a path; null: the first one on PATH")
    optimization: Optimization = Field(default="-O3", description="compiler flag of candidates and the naive program")
    budget_s: Seconds = Field(default=10.0, description="seconds per timing")
    namespaces: bool | None = Field(default=None, description="isolate programs by bubblewrap; null: where it works")
    address: str | None = Field(
        default=None, description='Ray cluster that times, HOST:PORT or "auto"; null: this machine'
    )


def code_version() -> str:
    """Returns the version with a digest of the measuring code: equal for comparable results."""
    digest = hashlib.sha256()
    folder = Path(torchtune_ext.__file__).parent / "measured"
    for path in sorted(path for ending in ("*.py", "*.c") for path in folder.rglob(ending)):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return f"{torchtune_ext.__version__} ({digest.hexdigest()[:12]})"
