"""Size and difficulty of puzzles: `Size` holds the user's ranges, `Dims` one puzzle's numbers."""

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import yaml

from torchtune_ext.run.errors import UsageError

KINDS = ("direct", "or", "iff", "same_room", "together", "beside", "moved", "carried")
LIMITS = {"suspects": (2, 10), "weapons": (2, 8), "rooms": (2, 17), "times": (1, 12), "motives": (0, 10)}
LIMITS |= {"bonus": (0, 20), "players": (1, 6)}

Range = int | tuple[int, int]


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the puzzles to draw. Each number is an int or an inclusive range (low, high)."""

    suspects: Range = 2  # 2 to 10
    weapons: Range = 2  # 2 to 8
    rooms: Range = 2  # 2 to 17
    times: Range = 1  # 1 to 12; 1: the puzzle does not mention time
    # 0 to 10, at most the number of suspects. With as many motives as suspects, each suspect has a
    # different motive. 0 and 1: the puzzle has no motives.
    motives: Range = 0
    # Largest number of bonus questions; a question is dropped if a clue states its answer.
    bonus: Range = 0
    clues: tuple[str, ...] = KINDS  # kinds of clues; must include "direct"; fewer kinds are easier
    # True: the clues determine every position, as in the public puzzles; False: only the answers.
    whole_world: bool = False
    players: Range | None = None  # 1 to 6; sets all other numbers, as in the public puzzles

    def __post_init__(self) -> None:
        for name in LIMITS:
            if name != "players" or self.players is not None:
                _check_range(name, getattr(self, name))
        for name, kind, how in (
            ("whole_world", bool, "true or false"),
            ("clues", tuple, "a list such as [direct, or]"),
        ):
            if not isinstance(getattr(self, name), kind):
                raise UsageError(f"size: {name}={getattr(self, name)!r}: invalid. Fix: write {how}")
        if "direct" not in self.clues or not all(kind in KINDS for kind in self.clues):
            raise UsageError(
                f"size: clues={list(self.clues)}: unknown. Fix: choose from {', '.join(KINDS)}, and always "
                "include 'direct', which makes every puzzle solvable"
            )

    def draw(self, rng: random.Random) -> "Dims":
        """Draws the numbers of one puzzle."""
        if self.players is not None:
            return _draw_as_public(rng, _pick(rng, self.players))
        ranges = self.suspects, self.weapons, self.rooms, self.times, self.motives, self.bonus
        suspects, weapons, rooms, times, motives, bonus = (_pick(rng, value) for value in ranges)
        return Dims(suspects, weapons, rooms, times, min(motives, suspects), bonus)


@dataclass(frozen=True, slots=True)
class Dims:
    """The numbers of one puzzle."""

    suspects: int
    weapons: int
    rooms: int
    times: int  # 1: the puzzle does not mention time
    # With as many motives as suspects, each suspect has a different motive. Otherwise suspects may
    # share a motive, and unused motives are dropped.
    motives: int
    # Largest number of bonus questions; None: as many as make a total of eight questions.
    bonus: int | None


def parse_size(value: Size | str | Mapping) -> Size:
    """Parses a name ("small") or a mapping to a `Size`.

    Args:
        value: a `Size`, a name, or a mapping. The mapping may be YAML text, such as
            "{suspects: 2, rooms: [2, 3]}".

    Raises:
        UsageError: the value is something else, or out of range.
    """
    if isinstance(value, Size):
        return value
    # YAML reads the names "2" and "3" as numbers.
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str):
        if value in NAMED_SIZES:
            return NAMED_SIZES[value]
        # Invalid YAML stays a string, which is rejected below.
        with suppress(yaml.YAMLError):
            value = yaml.safe_load(value)
    if not isinstance(value, Mapping):
        raise UsageError(f"size={value!r}: {HOW_TO}")
    value = dict(value)
    base = value.pop("like", None)
    if base is not None and str(base) not in NAMED_SIZES:
        raise UsageError(f"size: like={base!r}: unknown. Fix: choose from {', '.join(NAMED_SIZES)}")
    names = [field.name for field in fields(Size)]
    if unknown := [name for name in value if name not in names]:
        raise UsageError(f"size: unknown key {unknown[0]!r}; the keys are {', '.join(names)} and like")
    like = Size() if base is None else NAMED_SIZES[str(base)]
    return replace(like, **{name: _plain(name, item) for name, item in value.items()})


def _plain(name: str, item: object) -> object:
    # YAML has lists but not tuples. A single kind of clue may be written without a list.
    if isinstance(item, str):
        return (item,) if name == "clues" else item
    return tuple(item) if isinstance(item, Sequence) else item


def _check_range(name: str, value: object) -> None:
    least, most = LIMITS[name]
    ends: tuple[Any, ...] = value if isinstance(value, tuple) else (value, value)
    # A bool is an int in Python.
    whole = len(ends) == 2 and all(isinstance(end, int) and not isinstance(end, bool) for end in ends)
    if not whole or not least <= ends[0] <= ends[1] <= most:
        raise UsageError(
            f"size: {name}={value!r}: expected a number from {least} to {most}, or [low, high] in this range"
        )


def _pick(rng: random.Random, value: Range) -> int:
    return value if isinstance(value, int) else rng.randint(*value)


def _draw_as_public(rng: random.Random, players: int) -> Dims:
    # The formulas of the public generator.
    weapons = max(2, min(players + rng.randint(-1, 5), int(2.125 * players), 8))
    suspects = min(weapons + rng.randint(0, weapons - 1), int(2.5 * players), 10)
    rooms = min(suspects + rng.randint(0, suspects - 2), 3 * players, 17)
    times = rng.randint(1, 2 * players)
    motives = suspects if rng.random() < 0.5 else rng.randint(1, suspects)
    return Dims(suspects, weapons, rooms, times, motives, None)


NAMED_SIZES = {
    "2": Size(2, 2, 2, 2, 2, bonus=2),
    "3": Size(3, 3, 3, 3, 3, bonus=2),
    "small": Size(2, 2, (2, 3), 1, (0, 2)),
    "public": Size(players=(1, 6), whole_world=True),
}
HOW_TO = f"write a name ({', '.join(NAMED_SIZES)}) or numbers such as {{suspects: 2, rooms: [2, 3]}}"
