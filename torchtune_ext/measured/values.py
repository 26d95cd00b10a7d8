"""What is known of the numbers of a program while it is read: where they come from, and with which loops they change."""

import operator
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_ITEMS = 1024  # pieces of work in one expression
MAX_CONSTANT = 1 << 40
_FOLDED = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
    "<<": lambda a, b: a << min(b, 64),
    ">>": operator.rshift,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "&&": lambda a, b: a != 0 and b != 0,
    "||": lambda a, b: a != 0 or b != 0,
}
NOTHING: frozenset = frozenset()
# One piece of the work, a product of numbers of all inputs (one number, if there is one input): the inputs, each with a loop
# that chooses its number.
Item = frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Use:
    """A technique that a program uses."""

    technique: str  # one of TECHNIQUES
    line: int  # of the source, where it is first seen
    words: str  # what was seen, for the model and for people


class Loop(NamedTuple):
    """A loop of the program, each time that it is reached on another way a loop of its own."""

    name: str  # of the variable that it counts with
    trip: int | None  # how often it runs, where that is a constant
    line: int


class Value(NamedTuple):
    """What an expression can be: a number, an index, a pointer."""

    places: frozenset["Place"] = NOTHING  # that it points to
    loops: frozenset[int] = NOTHING  # that it changes with
    origins: frozenset[str] = NOTHING  # the inputs whose numbers are in it
    items: tuple[Item, ...] = ()  # the work that is in it and not added up yet
    is_computed: bool = False  # more than a copy of a number
    reads: frozenset["Place"] = NOTHING  # the variables of the program that it was read from
    constant: int | None = None


@dataclass(slots=True, eq=False)
class Place:
    """A variable, an array, a piece of memory or a function."""

    name: str
    kind: str = "local"  # or "input", "output", "function"
    is_array: bool = False  # its name is its address
    depth: int = 0  # how many subscripts lead to a number
    numbers: int | None = 1  # how many it holds, None if that is not a constant
    branch: tuple[int, ...] = ()  # the way of each `if` around its declaration
    content: Value = field(default_factory=Value)
    reset: frozenset[int] = NOTHING  # the loops around the place where it was set last
    vector: Use | None = None  # what reading it uses, if it holds vectors


class Site(NamedTuple):
    """A place of the program where a piece of the work is added to a sum or stored."""

    nest: tuple[int, ...]  # the loops around it, from the outermost
    branch: tuple[int, ...]  # the way of each `if` around it
    place: Place  # that it is added to
    index_loops: frozenset[int]  # those that choose where in it
    reset_loops: frozenset[int]  # of a local place, those that begin it anew
    item: Item
    line: int


def join(*values: Value) -> Value:
    """Returns what is true of any of these."""
    if len(values) < 2:
        return values[0] if values else Value()
    constants = {value.constant for value in values}
    return Value(
        NOTHING.union(*[value.places for value in values]),
        NOTHING.union(*[value.loops for value in values]),
        NOTHING.union(*[value.origins for value in values]),
        tuple(item for value in values for item in value.items)[:MAX_ITEMS],
        any(value.is_computed for value in values),
        NOTHING.union(*[value.reads for value in values]),
        constants.pop() if len(constants) == 1 else None,
    )


def folded(sign: str, left: int | None, right: int | None) -> int | None:
    """Returns the result of an operator on two constants, None if it is not known."""
    if left is None or right is None or sign not in _FOLDED:
        return None
    try:
        number = int(_FOLDED[sign](left, right))
    except (ZeroDivisionError, ValueError):
        # The second is a shift by less than nothing.
        return None
    return number if abs(number) < MAX_CONSTANT else None
