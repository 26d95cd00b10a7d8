"""What the benchmark service says of a program, and how it is set up."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torchtune_ext
from torchtune_ext.run.errors import Failure, Mistake, require_seconds

# Beside the OUTCOMES of check.py: the program is right, but the machine was disturbed, so that no speed is known.
NOISY = "noisy"
# The types that a value of each setting below may have, and what to write. "or null" stands where None is one of them.
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "workers": (Integral, "a whole number, or null for one on each core"),
    "cores": (list, "a list of whole numbers, as [2, 3], or null to have them chosen"),
    "threads": (Integral, "a whole number, as 1"),
    "compiler": (str, "a name or a path, as gcc, or null for the one that is found"),
    "budget_s": (Real, "a number of seconds, as 10.0"),
    "namespaces": (bool, "true, false, or null for wherever they work"),
    "address": (str, "auto or HOST:PORT, or null for this machine"),
}


class BenchError(Failure):
    """The service itself failed, and nothing is known about the program."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The speed of one program at the kernel's timed size."""

    seconds: float  # of a call: the median of the medians of the blocks
    # Half of the 95% interval of that, as a share; below 6 blocks: half of what lies between the extremes.
    spread: float
    calls: int
    gflops: float  # operations of a call / seconds, in 10^9
    ratio: float  # how many times faster than the reference beside it; median over the blocks
    ratio_spread: float  # the same of that
    peak_share: float  # what the roofline of these cores allows / seconds
    # Share of the blocks that count beside which somebody else was at work; 0 unless the machine never came to rest.
    disturbed: float
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
    fingerprint: str = ""  # of the machine that measured: speeds of two machines are not compared
    is_cached: bool = False  # an equal text was measured before, or was under way at the same time
    techniques: tuple[str, ...] = ()  # that it uses, sorted, if they were looked for and it came so far


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """The settings `bench:` of a task. Raises ValueError for a value that cannot be."""

    workers: int | None = None  # processes that check; None: one for each core that is not timed on
    cores: list[int] | None = None  # cores to time on; None: those that no engine may use, or the last ones
    threads: int = 1  # threads that a program may use, and cores that it is timed on
    compiler: str | None = None  # "gcc" or "clang", or a path; None: as found
    budget_s: float = 10.0  # seconds for one timing
    namespaces: bool | None = None  # whether bubblewrap is used; None: wherever it works
    address: str | None = None  # of a Ray cluster, or "auto": the machines that measure; None: this machine

    def __post_init__(self) -> None:
        for name, (kind, words) in _KINDS.items():
            value = getattr(self, name)
            if not (_is_a(value, kind) or (value is None and "or null" in words)):
                raise Mistake(f"bench.{name}={value!r} must be {words}")
        if self.workers is not None and self.workers < 1:
            raise Mistake(f"bench.workers={self.workers} must be at least 1, or null for one on each core")
        if self.threads < 1:
            raise Mistake(f"bench.threads={self.threads} must be at least 1")
        require_seconds("bench.budget_s", self.budget_s)


def _is_a(value: Any, kind: type | tuple[type, ...]) -> bool:
    if kind is list:
        return isinstance(value, list | tuple) and all(_is_a(each, Integral) for each in value)
    # Python counts True as a number.
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def version() -> str:
    """Returns the version of torchtune_ext here, with a digest of all that measures: results of another are not compared."""
    digest = hashlib.sha256()
    folder = Path(torchtune_ext.__file__).parent / "measured"
    for path in sorted(path for ending in ("*.py", "*.c") for path in folder.rglob(ending)):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return f"{torchtune_ext.__version__} ({digest.hexdigest()[:12]})"
