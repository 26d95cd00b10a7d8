"""The fastest program of each cell: of one problem on one machine, one set of techniques, and one band of speed.

Quality-diversity search keeps many kinds of good solutions, since the way to the best one may lead through another
kind. The paper (arXiv 2602.12049) names the idea but describes no archive, so cells and rules are our own design.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

ARCHIVE_FILE = "archive.jsonl"  # in the folder of a run


@dataclass(frozen=True, slots=True)
class ArchiveEntry:
    """A program that is right, with its measured speed."""

    machine: str  # its fingerprint: speeds of two machines are not compared
    kernel: str
    size: tuple[tuple[str, int], ...]  # the timed one, ("m", 256) and so on
    techniques: tuple[str, ...]  # sorted
    source: str
    ratio: float  # how many times faster than the naive program beside it
    spread: float  # half of the 95% interval of that, as a share
    gflops: float
    found: int  # when: the step of the run, or any number that grows

    def __post_init__(self) -> None:
        # JSON gives lists, and callers give techniques in any order. One form makes equal entries equal.
        object.__setattr__(self, "size", tuple((name, int(number)) for name, number in dict(self.size).items()))
        object.__setattr__(self, "techniques", tuple(sorted(set(self.techniques))))

    @property
    def cell(self) -> tuple[Any, ...]:
        """The key of its cell. The last part, the band, is 0 from the naive speed to twice that."""
        return self.machine, self.kernel, self.size, self.techniques, math.floor(math.log2(self.ratio))

    @property
    def speedup_low(self) -> float:
        """The lower end of the interval of the ratio."""
        return self.ratio * (1 - self.spread)

    @property
    def speedup_high(self) -> float:
        return self.ratio * (1 + self.spread)


class Archive:
    """The elites of all cells."""

    def __init__(self, entries: Iterable[ArchiveEntry] = ()) -> None:
        self._elites: dict[tuple[Any, ...], ArchiveEntry] = {}
        for entry in entries:
            self.add(entry)

    def __len__(self) -> int:
        """The number of cells that hold a program."""
        return len(self._elites)

    def __iter__(self) -> Iterator[ArchiveEntry]:
        """Yields the elites, in the order of their cells."""
        return (entry for _, entry in sorted(self._elites.items()))

    def add(self, entry: ArchiveEntry) -> bool:
        """Adds a program if its cell is empty or the elite there is surely slower. Returns whether it was added."""
        # Only a program whose interval lies above the elite's replaces it, so noise replaces nothing.
        elite = self._elites.get(entry.cell)
        if elite is not None and entry.speedup_low <= elite.speedup_high:
            return False
        self._elites[entry.cell] = entry
        return True

    def dumps(self) -> str:
        """Makes the text of the file, an entry a line. The same archive gives the same text."""
        return "".join(json.dumps(asdict(entry)) + "\n" for entry in self)

    @classmethod
    def loads(cls, text: str) -> "Archive":
        """Reads what `dumps` made."""
        return cls(ArchiveEntry(**json.loads(line)) for line in text.splitlines())
