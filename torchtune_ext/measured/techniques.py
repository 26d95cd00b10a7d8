"""Finds the optimization techniques that a program uses, by what it does and not by its names.

The program is read as it would run (reader.py), which gives the places where work is added to a sum, each with the
loops around it and the numbers that each loop chooses. The kernel's own naive program is read in the same way, for
comparison. What the compiler does by itself, such as vectors at -O3, does not count.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

from torchtune_ext.measured.dataflow import TechniqueUse, WorkSite
from torchtune_ext.measured.kernel import Kernel
from torchtune_ext.measured.reader import ProgramReader
from torchtune_ext.run.errors import UsageError

TECHNIQUES = {
    "loop_order": "loops in another order than that of the definition",
    "blocking": "several steps of a dimension at a time: blocks (tiles), unrolled loops, several sums in local variables",
    "vectorization": "vector types, intrinsics, or #pragma omp simd",
    "threads": "threads: #pragma omp parallel",
    "packing": "copies of panels of an input",
}
"""The techniques, and how a model is told of them."""

# Sums in registers, of which no processor has more numbers: 32 registers of 8 doubles (AVX-512). A larger array of sums is
# a block in a cache.
MAX_REGISTER_NUMBERS = 256
MAX_UNROLLED_STEPS = 16  # an inner loop of so many steps at most, a constant, is written out by every compiler


def find_techniques(preprocessed: str, kernel: Kernel, openmp: bool = True) -> list[TechniqueUse]:
    """Finds the techniques of a program, each once, in the order of TECHNIQUES.

    Args:
        preprocessed: the program after `gcc -E`, whose marks give the lines; or as it was written, if it has no macros.
        kernel: what it computes.
        openmp: whether it is compiled with OpenMP. Otherwise its pragmas do nothing.

    Raises:
        Unreadable: the program is nested too deeply, or takes too many steps to read.
        ValueError: the naive program of the kernel cannot serve for comparison.
    """
    program = ProgramReader(preprocessed, kernel, openmp)
    dimensions, items = _naive_dimensions(kernel)
    used = list(program.uses)
    if program.sites:
        used += program.recursions
    for sites in _group_sites(program.sites):
        # The naive program does one step in a body. Twice its work there are several steps written out.
        if len(sites) >= 2 * items:
            used.append(TechniqueUse("blocking", _first_line(sites), f"{len(sites) // items} steps in one body"))
        used += _nest_uses(dimensions, program, sites)
    first = {use.technique: use for use in sorted(used, key=lambda use: use.line, reverse=True)}
    return [first[name] for name in TECHNIQUES if name in first]


def violations(used: Iterable[TechniqueUse], permitted: Collection[str]) -> list[str]:
    """Says in a line each what a program uses that it may not, by line of the source; [] if nothing."""
    return [
        f"line {use.line}: not permitted here: {TECHNIQUES[use.technique]} ({use.words})"
        for use in sorted(used, key=lambda use: use.line)
        if use.technique not in permitted
    ]


# Dimensions ----------------------------------------------------------------------------------------------------------


def _naive_dimensions(kernel: Kernel) -> tuple[list[frozenset[str]], int]:
    """The dimensions of the naive program from its outermost loop, and how much work its largest statement does."""
    program = ProgramReader(kernel.naive, kernel)
    groups = _group_sites(program.sites)
    if not groups:
        raise UsageError(f"the naive program of {kernel.name} adds up no work that can be recognized")
    sites = max(groups, key=len)
    dimensions = [_dimension_of(program, sites[0], loop) for loop in sites[0].loop_nest]
    if len(set(dimensions)) < len(dimensions):
        raise UsageError(f"the naive program of {kernel.name} has loops that cannot be told apart by what they choose")
    return dimensions, len(sites)


def _group_sites(sites: Iterable[WorkSite]) -> list[list[WorkSite]]:
    """The sites of each run of one loop body: the same loops, and the same way at each `if`."""
    groups = defaultdict(list)
    for site in sites:
        groups[site.loop_nest, site.branch].append(site)
    return list(groups.values())


def _first_line(sites: list[WorkSite]) -> int:
    return min(site.line for site in sites)


def _dimension_of(program: ProgramReader, site: WorkSite, loop: int) -> frozenset[str]:
    """What a loop chooses: numbers of which inputs, and where the result goes ("=")."""
    inputs = frozenset(name for name, each in site.item if each == loop)
    is_output = loop in site.index_loops or (loop in site.reset_loops and loop in program.output_loops)
    return inputs | {"="} if is_output else inputs


# Techniques ----------------------------------------------------------------------------------------------------------


def _nest_uses(known: list[frozenset[str]], program: ProgramReader, sites: list[WorkSite]) -> Iterator[TechniqueUse]:
    # A loop of C = A B that chooses rows of A and of C is the loop over i, however it is written.
    nest = sites[0].loop_nest
    for site in {(each.place, each.item): each for each in sites}.values():
        order: list[int] = []  # the dimensions that the loops walk
        for loop in nest:
            chosen = _dimension_of(program, site, loop)
            if chosen not in known:
                continue
            dimension = known.index(chosen)
            if dimension in order:
                words = f"the loop over {program.loops[loop].name} walks inside a step of another"
                yield TechniqueUse("blocking", program.loops[loop].line, words)
                if _is_unrolled(program, site, loop):
                    continue
            order.append(dimension)
        # A block has its inner loops where the work is: they, the last of each dimension, make the order.
        last = [dimension for at, dimension in enumerate(order) if dimension not in order[at + 1 :]]
        if last != sorted(last):
            names = ", ".join(program.loops[loop].name for loop in nest)
            yield TechniqueUse("loop_order", program.loops[nest[0]].line, f"the loops are nested {names}")


def _is_unrolled(program: ProgramReader, site: WorkSite, loop: int) -> bool:
    """Tells whether a loop inside a step of another has no order: a few constant steps, or steps over sums in registers."""
    trip, place = program.loops[loop].trip_count, site.place
    is_in_registers = (
        place.kind == "local" and place.num_elements is not None and place.num_elements <= MAX_REGISTER_NUMBERS
    )
    return (is_in_registers and loop in site.index_loops) or (trip is not None and trip <= MAX_UNROLLED_STEPS)
