"""Find the optimization techniques of a program from its behavior, not from its names.

An abstract interpretation (reader.py) yields the work sites: places where work is added to a sum,
each with its loop nest and the elements that each loop selects. The kernel's naive program is read
in the same way, for comparison. Optimizations by the compiler (vectorization at -O3) do not count.
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
"""Technique -> its description in prompts."""

# The largest register file (AVX-512) has 32 registers of 8 doubles; more sums are a cache block.
MAX_REGISTER_NUMBERS = 256
MAX_UNROLLED_STEPS = 16  # every compiler unrolls an inner loop of at most this many constant steps


def find_techniques(preprocessed: str, kernel: Kernel, openmp: bool = True) -> list[TechniqueUse]:
    """Finds the techniques of a program, each once, in the order of TECHNIQUES.

    Args:
        preprocessed: the output of `gcc -E` with line markers, or the source if it has no macros.
        openmp: whether OpenMP is enabled. Otherwise its pragmas have no effect.

    Raises:
        UnreadableProgram: the program is nested too deeply, or takes too many steps to read.
        UsageError: the naive program of the kernel is unsuitable for comparison.
    """
    program = ProgramReader(preprocessed, kernel, openmp)
    dimensions, items = _naive_dimensions(kernel)
    used = list(program.uses)
    if program.sites:
        used += program.recursions
    for sites in _group_sites(program.sites):
        # The naive program does one step per loop body. Twice that work means an unrolled loop.
        if len(sites) >= 2 * items:
            used.append(TechniqueUse("blocking", _first_line(sites), f"{len(sites) // items} steps in one body"))
        used += _nest_uses(dimensions, program, sites)
    first = {use.technique: use for use in sorted(used, key=lambda use: use.line, reverse=True)}
    return [first[name] for name in TECHNIQUES if name in first]


def violations(used: Iterable[TechniqueUse], permitted: Collection[str]) -> list[str]:
    """Returns one message per technique that is not permitted, ordered by source line."""
    return [
        f"line {use.line}: not permitted here: {TECHNIQUES[use.technique]} ({use.words})"
        for use in sorted(used, key=lambda use: use.line)
        if use.technique not in permitted
    ]


def _naive_dimensions(kernel: Kernel) -> tuple[list[frozenset[str]], int]:
    """Returns the dimensions of the naive program, outermost first, and its sites per loop body."""
    program = ProgramReader(kernel.naive, kernel)
    groups = _group_sites(program.sites)
    if not groups:
        raise UsageError(f"{kernel.name}.naive: no sum over products of the inputs found")
    sites = max(groups, key=len)
    dimensions = [_dimension_of(program, sites[0], loop) for loop in sites[0].loop_nest]
    if len(set(dimensions)) < len(dimensions):
        raise UsageError(f"{kernel.name}.naive: two loops select the same elements; expected one loop per dimension")
    return dimensions, len(sites)


def _group_sites(sites: Iterable[WorkSite]) -> list[list[WorkSite]]:
    """Groups the sites by loop body: the same loop nest, and the same branch at each `if`."""
    groups = defaultdict(list)
    for site in sites:
        groups[site.loop_nest, site.branch].append(site)
    return list(groups.values())


def _first_line(sites: list[WorkSite]) -> int:
    return min(site.line for site in sites)


def _dimension_of(program: ProgramReader, site: WorkSite, loop: int) -> frozenset[str]:
    """Returns what a loop selects: elements of inputs (by name), and of the output ("=")."""
    inputs = frozenset(name for name, each in site.item if each == loop)
    is_output = loop in site.index_loops or (loop in site.reset_loops and loop in program.output_loops)
    return inputs | {"="} if is_output else inputs


def _nest_uses(known: list[frozenset[str]], program: ProgramReader, sites: list[WorkSite]) -> Iterator[TechniqueUse]:
    # A loop of C = A B that selects rows of A and of C is the loop over i, however it is written.
    nest = sites[0].loop_nest
    for site in {(each.place, each.item): each for each in sites}.values():
        order: list[int] = []  # the dimensions of the loops
        for loop in nest:
            chosen = _dimension_of(program, site, loop)
            if chosen not in known:
                continue
            dimension = known.index(chosen)
            if dimension in order:
                words = f"the loop over {program.loops[loop].name} runs inside a step of another loop"
                yield TechniqueUse("blocking", program.loops[loop].line, words)
                if _is_unrolled(program, site, loop):
                    continue
            order.append(dimension)
        # The inner loops of a block do the work, so the last loop of a dimension counts.
        last = [dimension for at, dimension in enumerate(order) if dimension not in order[at + 1 :]]
        if last != sorted(last):
            names = ", ".join(program.loops[loop].name for loop in nest)
            yield TechniqueUse("loop_order", program.loops[nest[0]].line, f"the loops are nested {names}")


def _is_unrolled(program: ProgramReader, site: WorkSite, loop: int) -> bool:
    """Returns whether the order of a blocked loop is irrelevant: few steps or sums in registers."""
    trip, place = program.loops[loop].trip_count, site.place
    number = place.num_elements
    is_in_registers = place.kind == "local" and number is not None and number <= MAX_REGISTER_NUMBERS
    return (is_in_registers and loop in site.index_loops) or (trip is not None and trip <= MAX_UNROLLED_STEPS)
