"""What is known of the numbers of a program while it is read: their origin, and the loops that they change with."""

import operator
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_ITEMS = 1024  # pieces of work in one expression
MAX_CONSTANT = 1 << 40
_OPERATORS = {
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
EMPTY: frozenset = frozenset()
# A piece of the work is a product of numbers of all inputs, or a number if there is only one input. It is known by its inputs,
# each with a loop that chooses the number.
WorkItem = frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class TechniqueUse:
    """A technique that a program uses."""

    technique: str  # one of TECHNIQUES
    line: int  # the line of the source where it is seen
    words: str  # what is seen there, for the model and for people


class Loop(NamedTuple):
    """A loop of the program. A loop that is reached on several ways is several loops."""

    name: str  # the name of its variable
    trip_count: int | None  # the number of its steps, None if that is not a constant
    line: int


class Value(NamedTuple):
    """What an expression can be: a number, an index, a pointer."""

    pointees: frozenset["Location"] = EMPTY  # the places that it points to
    loops: frozenset[int] = EMPTY  # the loops that it changes with
    origins: frozenset[str] = EMPTY  # the inputs whose numbers are in it
    items: tuple[WorkItem, ...] = ()  # the work that is in it and is not added up yet
    is_computed: bool = False  # it is more than a copy of a number
    reads: frozenset["Location"] = EMPTY  # the variables that it was read from
    constant: int | None = None


@dataclass(slots=True, eq=False)
class Location:
    """A variable, an array, a piece of memory or a function."""

    name: str
    kind: str = "local"  # or "input", "output", "function"
    is_array: bool = False  # its name is its address
    depth: int = 0  # the number of subscripts that lead to a number
    num_elements: int | None = 1  # the count of its numbers, None if that is not a constant
    branch: tuple[int, ...] = ()  # the way of each `if` around its declaration
    content: Value = field(default_factory=Value)
    reset_loops: frozenset[int] = EMPTY  # the loops around the statement that has set it last
    vector_use: TechniqueUse | None = None  # the technique of whoever reads it, if it holds vectors


class WorkSite(NamedTuple):
    """A line of the program that adds a piece of the work to a sum, or stores it."""

    loop_nest: tuple[int, ...]  # the loops around it, from the outermost
    branch: tuple[int, ...]  # the way of each `if` around it
    place: Location  # the sum
    index_loops: frozenset[int]  # the loops that choose a number of it
    reset_loops: frozenset[int]  # the loops that set it anew, if it is local
    item: WorkItem
    line: int


def join_values(*values: Value) -> Value:
    """Returns a value that is any of these."""
    if len(values) < 2:
        return values[0] if values else Value()
    constants = {value.constant for value in values}
    return Value(
        EMPTY.union(*[value.pointees for value in values]),
        EMPTY.union(*[value.loops for value in values]),
        EMPTY.union(*[value.origins for value in values]),
        tuple(item for value in values for item in value.items)[:MAX_ITEMS],
        any(value.is_computed for value in values),
        EMPTY.union(*[value.reads for value in values]),
        constants.pop() if len(constants) == 1 else None,
    )


def fold_constants(sign: str, left: int | None, right: int | None) -> int | None:
    """Returns the result of an operator on two constants, or None if it is not known."""
    if left is None or right is None or sign not in _OPERATORS:
        return None
    try:
        number = int(_OPERATORS[sign](left, right))
    except (ZeroDivisionError, ValueError):
        # Python raises ValueError for a negative shift.
        return None
    return number if abs(number) < MAX_CONSTANT else None
