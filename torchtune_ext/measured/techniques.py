"""Finds the techniques of optimization that a program uses, in what it does and not in what it says of itself.

The program is read as it would run (reader.py): macros are expanded, helpers are read where they are called, names mean
nothing, and what nobody calls is not there. What remains is a list of places where a piece of the work is added to a sum, each
with the loops around it and which number each loop chooses. A loop of C = A B that chooses rows of A and of C is the loop over
i, however it is written. The kernel's own naive program is read in the same way, and is what others are compared with.

What the compiler does by itself, such as vectors at -O3, is none of the program's techniques.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torchtune_ext.measured.kernel import Kernel
from torchtune_ext.measured.reader import read
from torchtune_ext.measured.records import Facts, Site
from torchtune_ext.run.errors import Mistake

TECHNIQUES = {
    "loop_order": "loops in another order than that of the definition",
    "blocking": "blocks (tiles): two loops for one dimension",
    "unrolling": "unrolled loops: several steps written out in one",
    "register_accumulation": "several sums at a time in local variables",
    "vectorization": "vector types, intrinsics, or #pragma omp simd",
    "threads": "threads: #pragma omp parallel",
    "packing": "copies of panels of an input",
}
"""The techniques, and how a model is told of them."""

# Sums in registers, of which no processor has more numbers: 32 registers of 8 doubles (AVX-512). A larger array of sums is
# a block in a cache.
REGISTER_NUMBERS = 256
REGISTER_STEPS = 16  # an inner loop of so many steps at most, a constant, is written out by every compiler


@dataclass(frozen=True, slots=True)
class Use:
    """A technique that a program uses."""

    technique: str  # one of TECHNIQUES
    line: int  # of the source, where it is first seen
    words: str  # what was seen, for the model and for people


def uses(preprocessed: str, kernel: Kernel, openmp: bool = True) -> list[Use]:
    """Finds the techniques of a program, each once, in the order of TECHNIQUES.

    Args:
        preprocessed: the program after `gcc -E`, whose marks give the lines; or as it was written, if it has no macros.
        kernel: what it computes.
        openmp: whether it is compiled with OpenMP. Without, its pragmas are nothing but words.

    Raises:
        Unreadable: it is nested too deeply, or takes too many steps to read. The text is made for that.
        ValueError: the naive program of the kernel is such that nothing can be compared with it.
    """
    return _uses(read(preprocessed, kernel, openmp), _definition(kernel))


def techniques(preprocessed: str, kernel: Kernel, openmp: bool = True) -> frozenset[str]:
    """Returns the techniques of a program. Raises as `uses` does."""
    return frozenset(use.technique for use in uses(preprocessed, kernel, openmp))


def violations(found: Iterable[Use], permitted: Collection[str]) -> list[str]:
    """Says in a line each what a program uses that it may not, by line of the source; [] if nothing."""
    return [
        f"line {use.line}: not permitted here: {TECHNIQUES[use.technique]} ({use.words})"
        for use in sorted(found, key=lambda use: use.line)
        if use.technique not in permitted
    ]


# Dimensions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Definition:
    """The naive program of a kernel: its dimensions from the outermost loop, and how much work one statement does."""

    signatures: tuple[frozenset[str], ...]
    is_strided: tuple[bool, ...]
    items: int  # in its largest statement


def _definition(kernel: Kernel) -> _Definition:
    facts = read(kernel.naive, kernel)
    groups = _groups(facts.sites)
    if not groups:
        raise Mistake(f"the naive program of {kernel.name} adds up no work that can be recognized")
    nest, sites = max(((key[0], sites) for key, sites in groups.items()), key=lambda pair: len(pair[1]))
    signatures = tuple(_signature(facts, sites[0], loop) for loop in nest)
    return _Definition(signatures, tuple(loop in sites[0].item.strided for loop in nest), len(sites))


def _groups(sites: Sequence[Site]) -> dict[tuple, list[Site]]:
    """The sites of each run of one loop body: the same loops, and the same way at each `if`."""
    groups = defaultdict(list)
    for site in sites:
        groups[site.nest, site.branch].append(site)
    return groups


def _signature(facts: Facts, site: Site, loop: int) -> frozenset[str]:
    """What a loop chooses: numbers of which inputs, and where the result goes ("=")."""
    chosen = {name for name, loops in site.item.loops if loop in loops}
    if loop in site.index_loops or (loop in site.reset_loops and loop in facts.stored):
        chosen.add("=")
    return frozenset(chosen)


def _dimension(definition: _Definition, facts: Facts, site: Site, loop: int) -> int | None:
    """Which of the naive program's loops this one corresponds to, None if it cannot be told."""
    signature, known = _signature(facts, site, loop), definition.signatures
    candidates = [at for at, each in enumerate(known) if each == signature]
    if len(candidates) > 1:
        is_strided = loop in site.item.strided
        candidates = [at for at in candidates if definition.is_strided[at] == is_strided]
    return candidates[0] if len(candidates) == 1 and signature else None


# Techniques ----------------------------------------------------------------------------------------------------------


def _uses(facts: Facts, definition: _Definition) -> list[Use]:
    found = [Use(mark.technique, mark.line, mark.words) for mark in facts.marks]
    if facts.sites:
        found += [
            Use("blocking", line, f"{name}() calls itself for a part of its work") for name, line in facts.recursions
        ]
    for (nest, _), sites in _groups(facts.sites).items():
        found += _of_nest(definition, facts, nest, sites)
    first: dict[str, Use] = {}
    for use in sorted(found, key=lambda use: use.line):
        first.setdefault(use.technique, use)
    return [first[name] for name in TECHNIQUES if name in first]


def _of_nest(definition: _Definition, facts: Facts, nest: tuple[int, ...], sites: list[Site]) -> list[Use]:
    """The techniques of one nest of loops: all but those that a word gives away."""
    found, line = [], min(site.line for site in sites)
    if len(sites) >= 2 * definition.items:
        found.append(Use("unrolling", line, f"{len(sites) // definition.items} steps in one body"))
    for site in {(each.place, each.item): each for each in sites}.values():
        dimensions = [(loop, _dimension(definition, facts, site, loop)) for loop in nest]
        known = [(loop, dimension) for loop, dimension in dimensions if dimension is not None]
        kinds = _kinds(facts, site, known)
        for loop, kind in kinds.items():
            if kind:
                name = facts.loops[loop].name
                found.append(Use(kind, facts.loops[loop].line, f"the loop over {name} walks inside a step of another"))
        order = [dimension for loop, dimension in known if loop not in kinds or kinds[loop] == "blocking"]
        # A block has its inner loops where the work is: they, the last of each dimension, make the order.
        last = [dimension for at, dimension in enumerate(order) if dimension not in order[at + 1 :]]
        if last != sorted(last):
            names = ", ".join(facts.loops[loop].name for loop in nest)
            found.append(Use("loop_order", facts.loops[nest[0]].line, f"the loops are nested {names}"))
    if _sums(facts, sites) > 1:
        found.append(Use("register_accumulation", line, "more than one sum at a time is kept in local variables"))
    return found


def _kinds(facts: Facts, site: Site, known: list[tuple[int, int]]) -> dict[int, str]:
    """What each loop is that is the second of its dimension: a block, sums in registers (named elsewhere: ""), or steps."""
    kinds: dict[int, str] = {}
    seen: dict[int, int] = {}
    for at, (loop, dimension) in enumerate(known):
        if dimension in seen:
            trip = facts.loops[loop].trip
            is_short = trip is not None and trip <= REGISTER_STEPS
            if _is_in_registers(site) and loop in site.index_loops:
                kinds[loop] = ""
            elif is_short and seen[dimension] == at - 1:
                kinds[loop] = "unrolling"
            else:
                kinds[loop] = "blocking"
        seen[dimension] = at
    return kinds


def _is_in_registers(site: Site) -> bool:
    place = site.place
    return place.kind == "local" and place.numbers is not None and place.numbers <= REGISTER_NUMBERS


def _sums(facts: Facts, sites: list[Site]) -> int:
    """How many local sums a body adds to, that outlast it."""
    places: Counter = Counter()
    for site in sites:
        # A sum outlasts the body if some loop around it chooses numbers but not another sum.
        chosen = frozenset[int]().union(*(loops for _, loops in site.item.loops)) & set(site.nest)
        if _is_in_registers(site) and chosen - site.index_loops - site.reset_loops:
            steps = [facts.loops[loop].trip for loop in site.index_loops if loop in site.nest]
            # How often a loop over `count` rows runs is not known, but it stays within the array.
            written = site.place.numbers if None in steps else math.prod(steps)
            # Several sites of one array are several sums of it; of one variable they are one.
            places[site.place] = max(places[site.place] + site.place.is_array, written)
    return sum(places.values())
