"""What is known of the numbers of a program while it is read: where they come from, and with which loops they change."""

from dataclasses import dataclass, field

import tree_sitter

NOTHING: frozenset = frozenset()


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop of the program, each time that it is reached on another way a loop of its own."""

    name: str  # of the variable that it counts with
    trip: int | None  # how often it runs, where that is a constant
    line: int


@dataclass(frozen=True, slots=True)
class Item:
    """One piece of the work: a product of numbers of all inputs (one number, if there is one input)."""

    loops: tuple[tuple[str, frozenset[int]], ...]  # for each input, the loops that choose the number
    strided: frozenset[int]  # of them, those that step by more than a constant


@dataclass(frozen=True, slots=True)
class Value:
    """What an expression can be: a number, an index, a pointer."""

    places: frozenset["Place"] = NOTHING  # that it points to
    loops: frozenset[int] = NOTHING  # that it changes with
    strided: frozenset[int] = NOTHING  # of them, those whose steps are multiplied by a variable
    origins: frozenset[str] = NOTHING  # the inputs whose numbers are in it
    items: tuple[Item, ...] = ()  # the work that is in it and not added up yet
    is_computed: bool = False  # more than a copy of a number
    reads: frozenset["Place"] = NOTHING  # the variables of the program that it was read from
    constant: int | None = None
    rank: int = 0  # of a pointer: how many subscripts lead to a number
    functions: frozenset[str] = NOTHING  # of the program, that it points to


@dataclass(slots=True, eq=False)
class Place:
    """A variable, an array or a piece of memory."""

    name: str
    kind: str  # "input", "output" or "local"
    rank: int = 0  # how many subscripts lead to a number
    is_array: bool = False  # its name is its address
    numbers: int | None = 1  # how many it holds, None if that is not a constant
    branch: tuple[tuple[int, int], ...] = ()  # which way each `if` around its declaration goes
    content: Value = field(default_factory=Value)
    reset: frozenset[int] = NOTHING  # the loops around the place where it was set last


@dataclass(frozen=True, slots=True)
class Site:
    """A place of the program where a piece of the work is added to a sum or stored."""

    nest: tuple[int, ...]  # the loops around it, from the outermost
    branch: tuple[tuple[int, int], ...]  # which way each `if` around it goes
    place: Place  # that it is added to
    index_loops: frozenset[int]  # those that choose where in it
    reset_loops: frozenset[int]  # of a local place, those that begin it anew
    item: Item
    line: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A technique that is visible in one spot, without the nest of loops."""

    technique: str
    line: int
    words: str


@dataclass(slots=True)
class Facts:
    """What was found in a program."""

    loops: list[Loop] = field(default_factory=list)  # a loop is known by its index here
    sites: list[Site] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    stored: set[int] = field(default_factory=set)  # loops that choose where an output is stored
    recursions: list[tuple[str, int]] = field(default_factory=list)  # function, line


class Unreadable(ValueError):
    """The program is nested too deeply, or takes too many steps to read."""


def join(*values: Value) -> Value:
    """Returns what is true of any of these."""
    if len(values) == 1:
        return values[0]
    constants = {value.constant for value in values}
    return Value(
        NOTHING.union(*(value.places for value in values)),
        NOTHING.union(*(value.loops for value in values)),
        NOTHING.union(*(value.strided for value in values)),
        NOTHING.union(*(value.origins for value in values)),
        tuple(item for value in values for item in value.items)[:MAX_ITEMS],
        any(value.is_computed for value in values),
        NOTHING.union(*(value.reads for value in values)),
        constants.pop() if len(constants) == 1 else None,
        max((value.rank for value in values), default=0),
        NOTHING.union(*(value.functions for value in values)),
    )


MAX_ITEMS = 1024  # pieces of work in one expression


def text_of(node: tree_sitter.Node | None) -> str:
    """Returns the text of a node, "" for none."""
    return "" if node is None else node.text.decode("utf-8", "replace")


def first_of(node: tree_sitter.Node | None) -> tree_sitter.Node | None:
    """Returns the first named child of a node that says something."""
    return None if node is None else next((each for each in node.named_children if each.type != "comment"), None)
