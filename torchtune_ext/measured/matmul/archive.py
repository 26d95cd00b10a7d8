"""The archive of the fastest program per cell: machine, problem, set of techniques, speed band.

Quality-diversity search keeps many kinds of good solutions, since the path to the best one may lead
through another kind. The paper (arXiv 2602.12049) names the idea but does not describe an archive,
so cells and rules are our own design.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

ARCHIVE_FILE = "archive.jsonl"  # in the folder of a run


@dataclass(frozen=True, slots=True)
class ArchiveEntry:
    """A correct program with its measured speed."""

    machine: str  # fingerprint; speeds of different machines are not comparable
    kernel: str
    size: tuple[tuple[str, int], ...]  # timed size, e.g. (("m", 256), ...)
    techniques: tuple[str, ...]  # sorted
    source: str
    ratio: float  # speedup over the naive program, timed in the same blocks
    spread: float  # relative half-width of the ratio's 95% interval
    gflops: float
    found: int  # step of the run, or any increasing number

    def __post_init__(self) -> None:
        # JSON yields lists, and callers any order. The canonical form makes equal entries equal.
        object.__setattr__(self, "size", tuple((name, int(number)) for name, number in dict(self.size).items()))
        object.__setattr__(self, "techniques", tuple(sorted(set(self.techniques))))

    @property
    def cell(self) -> tuple[Any, ...]:
        """The key of the cell. Its last item, the speed band, is 0 for ratios in [1, 2)."""
        return self.machine, self.kernel, self.size, self.techniques, math.floor(math.log2(self.ratio))

    @property
    def speedup_low(self) -> float:
        """The lower end of the ratio's 95% interval."""
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
        """Adds a program if its cell is empty or has a significantly slower elite.

        Returns:
            Whether the program was added.
        """
        # The intervals must not overlap, so noise never replaces an elite.
        elite = self._elites.get(entry.cell)
        if elite is not None and entry.speedup_low <= elite.speedup_high:
            return False
        self._elites[entry.cell] = entry
        return True

    def dumps(self) -> str:
        """Returns the text of the file, one entry per line. Equal archives yield equal texts."""
        return "".join(json.dumps(asdict(entry)) + "\n" for entry in self)

    @classmethod
    def loads(cls, text: str) -> "Archive":
        """Parses the output of `dumps`."""
        return cls(ArchiveEntry(**json.loads(line)) for line in text.splitlines())
