"""Abstract values of the program reader: the inputs and the loops that each value depends on."""

import operator
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_ITEMS = 1024  # work items in one expression
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
# A work item is a product of elements of all inputs, or an element if the kernel has one input. Its
# identity is the set of (input, loop that selects the element).
WorkItem = frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class TechniqueUse:
    """A technique in a program."""

    technique: str  # one of TECHNIQUES
    line: int  # source line of the evidence
    words: str  # the evidence, for the model and for people


class Loop(NamedTuple):
    """A loop of the program. A loop that is reached by several paths counts as several loops."""

    name: str  # name of the loop variable
    trip_count: int | None  # number of iterations; None if it is not constant
    line: int


class Value(NamedTuple):
    """The abstract value of an expression: a number, an index, or a pointer."""

    pointees: frozenset["Location"] = EMPTY  # locations that it points to
    loops: frozenset[int] = EMPTY  # loops that it varies with
    origins: frozenset[str] = EMPTY  # inputs that it depends on
    items: tuple[WorkItem, ...] = ()  # work items that are not yet added to a sum
    is_computed: bool = False  # whether it is more than a copied number
    reads: frozenset["Location"] = EMPTY  # variables that it was read from
    constant: int | None = None


@dataclass(slots=True, eq=False)
class Location:
    """A variable, an array, a piece of memory or a function."""

    name: str
    kind: str = "local"  # or "input", "output", "function"
    is_array: bool = False  # whether its name evaluates to its address
    depth: int = 0  # number of subscripts down to a number
    num_elements: int | None = 1  # None if it is not constant
    branch: tuple[int, ...] = ()  # the branch of each `if` around its declaration
    content: Value = field(default_factory=Value)
    reset_loops: frozenset[int] = EMPTY  # loops around its last assignment
    vector_use: TechniqueUse | None = None  # recorded at each read if it holds vectors


class WorkSite(NamedTuple):
    """A line of the program that adds a work item to a sum, or stores it."""

    loop_nest: tuple[int, ...]  # enclosing loops, outermost first
    branch: tuple[int, ...]  # the branch of each enclosing `if`
    place: Location  # the sum
    index_loops: frozenset[int]  # loops that select the element of the sum
    reset_loops: frozenset[int]  # loops that reset the sum, if it is local
    item: WorkItem
    line: int


def join_values(*values: Value) -> Value:
    """Returns the join (least upper bound) of the values."""
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
    """Returns the result of an operator on two constants, or None if it is unknown."""
    if left is None or right is None or sign not in _OPERATORS:
        return None
    try:
        number = int(_OPERATORS[sign](left, right))
    except (ZeroDivisionError, ValueError):
        # Python raises ValueError for a negative shift.
        return None
    return number if abs(number) < MAX_CONSTANT else None
