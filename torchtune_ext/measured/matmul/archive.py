"""The fastest program of each cell: of one problem on one machine, one set of techniques, and one band of speed.

Quality-diversity search keeps many kinds of good solutions, since the way to the best one may lead over another kind. The
paper (arXiv 2602.12049) names the idea and describes no archive; cells and rules are a design from it.

A measured speed is an interval. The elite of a cell is replaced only by a program whose interval lies above its own, so
noise replaces nothing.
"""

import json
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtune_ext.run.errors import Mistake
from torchtune_ext.run.files import write_atomic

FILE = "archive.jsonl"  # in the folder of a run
FORMAT = 1
# What reading a damaged file can raise: numbers may be too large, brackets nested too deeply, words in the place of numbers.
_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """Programs that are compared with each other."""

    machine: str  # its fingerprint: speeds of two machines are not compared
    kernel: str
    size: tuple[tuple[str, int], ...]  # the timed one, ("m", 256) and so on
    techniques: tuple[str, ...]  # sorted
    band: int  # floor(log2(speed / that of the naive program)): 0 is from as fast to twice as fast


@dataclass(frozen=True, slots=True)
class Entry:
    """A program that is right, with its measured speed.

    Raises:
        ValueError: a number is not one that a measurement can give.
    """

    machine: str
    kernel: str
    size: tuple[tuple[str, int], ...]
    techniques: tuple[str, ...]
    source: str
    ratio: float  # how many times faster than the naive program beside it
    spread: float  # half of the 95% interval of that, as a share
    gflops: float
    found: int  # when: the step of the run, or any number that grows

    def __post_init__(self) -> None:
        for name in ("ratio", "gflops"):
            if not 0 < getattr(self, name) < math.inf:
                raise Mistake(f"{name}={getattr(self, name)} must be a number above 0")
        if not 0 <= self.spread < 1:
            raise Mistake(f"spread={self.spread} is half of an interval as a share of the ratio: from 0 to below 1")
        # Whatever they were given as, so that equal entries are equal.
        object.__setattr__(self, "size", tuple((name, int(number)) for name, number in dict(self.size).items()))
        object.__setattr__(self, "techniques", tuple(sorted(set(self.techniques))))

    @property
    def cell(self) -> Cell:
        return Cell(self.machine, self.kernel, self.size, self.techniques, math.floor(math.log2(self.ratio)))

    @property
    def low(self) -> float:
        """The lower end of the interval of the ratio."""
        return self.ratio * (1 - self.spread)

    @property
    def high(self) -> float:
        return self.ratio * (1 + self.spread)


class Archive:
    """The elites of all cells."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._elites: dict[Cell, Entry] = {}
        for entry in entries:
            self.add(entry)

    def __len__(self) -> int:
        """The number of cells that hold a program."""
        return len(self._elites)

    def add(self, entry: Entry) -> bool:
        """Adds a program, if its cell is empty or the elite there surely slower. Returns whether it is now the elite."""
        elite = self._elites.get(entry.cell)
        if elite is not None and entry.low <= elite.high:
            return False
        self._elites[entry.cell] = entry
        return True

    def cells(self) -> dict[Cell, Entry]:
        """Returns the elite of each cell, in the order of the cells."""
        return dict(sorted(self._elites.items()))

    def machines(self) -> list[str]:
        """Returns the fingerprints of the machines that anything was measured on."""
        return sorted({cell.machine for cell in self._elites})

    def best(self, count: int, machine: str, kernel: str | None = None) -> list[Entry]:
        """Returns the fastest elites, each source once, by the lower ends of their intervals.

        A maximum over noisy measurements is too good: measure these speeds again before you report them.

        Args:
            count: how many at most.
            machine: its fingerprint. Speeds of several machines cannot be compared.
            kernel: of this one only; None: of all.
        """
        chosen = [
            entry for cell, entry in self.cells().items() if machine == cell.machine and kernel in (None, cell.kernel)
        ]
        by_source: dict[tuple[str, tuple, str], Entry] = {}
        for entry in sorted(chosen, key=lambda entry: (-entry.low, entry.found)):
            by_source.setdefault((entry.kernel, entry.size, entry.source), entry)
        return list(by_source.values())[:count]

    def neighbor_elite(self, cell: Cell, rng: random.Random, permitted: frozenset[str] | None = None) -> Entry | None:
        """Draws the elite of a neighboring cell: one technique more or less, or the next band with the same techniques.

        Args:
            cell: it may be empty. Only cells of its problem and machine are its neighbors.
            rng: draws among the neighbors, in the order of the cells.
            permitted: the techniques that the elite may use; None: all.

        Returns:
            None if no neighboring cell holds such a program.
        """
        own = set(cell.techniques)
        neighbors = []
        for other, entry in self.cells().items():
            if (other.machine, other.kernel, other.size) != (cell.machine, cell.kernel, cell.size):
                continue
            if permitted is not None and not permitted >= set(other.techniques):
                continue
            apart = len(own ^ set(other.techniques))
            if apart == 1 or (apart == 0 and abs(other.band - cell.band) == 1):
                neighbors.append(entry)
        return rng.choice(neighbors) if neighbors else None

    # One file --------------------------------------------------------------------------------------------------------

    def dumps(self) -> str:
        """Makes the text of the file: a header, then an entry a line. The same archive gives the same text."""
        header = json.dumps({"format": FORMAT, "entries": len(self)})
        return "\n".join([header, *(json.dumps(asdict(entry)) for entry in self.cells().values()), ""])

    @classmethod
    def loads(cls, text: str | bytes, name: str = "the archive") -> "Archive":
        """Reads what `dumps` made.

        Raises:
            ValueError: it is damaged, cut off, or of another format.
        """
        try:
            header, *records = map(json.loads, text.splitlines())
            if not isinstance(header, dict) or header.get("format") != FORMAT:
                raise Mistake(f"not of format {FORMAT}: read it with the version that wrote it")
            if len(records) != header["entries"]:
                raise Mistake(f"{len(records)} entries of {header['entries']}")
            return cls(_entry(record) for record in records)
        except _DAMAGE as error:
            raise Mistake(f"{name}: damaged or cut off ({error}); delete it to begin anew") from error

    def save(self, path: Path) -> None:
        """Writes the file at once: a reader sees the old one or the new one, also when this process is killed.

        Raises:
            OSError: it cannot be written. The old one is untouched.
        """
        write_atomic(path, self.dumps().encode())

    @classmethod
    def load(cls, path: Path) -> "Archive":
        """Reads the file.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is damaged, or of another format.
        """
        return cls.loads(path.read_bytes(), str(path))


def techniques_in_words(techniques: Iterable[str]) -> str:
    """Makes "blocking, loop order" of ("blocking", "loop_order")."""
    return ", ".join(techniques).replace("_", " ") or "none"


def size_in_words(size: Iterable[tuple[str, int]]) -> str:
    """Makes "m=256 n=256" of (("m", 256), ("n", 256))."""
    return " ".join(f"{name}={number}" for name, number in size)


def _entry(record: Mapping) -> Entry:
    texts = [record["machine"], record["kernel"], record["source"], *record["techniques"]]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a number where a text should be")
    return Entry(**{**record, "size": {str(name): number for name, number in record["size"]}})
