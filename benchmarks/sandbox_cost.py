"""Does the sandbox change the time that is measured?

    python benchmarks/sandbox_cost.py [--rounds 100] [--calls 5] [--core 1]

The same library (the naive program of a kernel, and a function that does nothing) is called by processes of three kinds: with
limits and a clean environment only, locked in, and locked in inside of namespaces, with a cgroup each where the machine allows
it. They take turns, in an order that is drawn for each round, and each turn has a new process, so that neither a neighbor nor
where a process happens to lie in memory is taken for the sandbox. A turn is the median of some calls. The clock is the
harness's, as in every measurement. The table has the median of the turns, its difference to the process without a sandbox, and
p of the two-sided Mann-Whitney test between the two: the probability of ranks that differ so much, or more, if the sandbox made
no difference. Exit status 1 where any p is below 0.01 / number of comparisons (Bonferroni) and the difference is a slowdown.
"""

import argparse
import math
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import NormalDist, median

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np  # noqa: E402

from torchtune_ext.measured.check import Checker  # noqa: E402
from torchtune_ext.measured.child import Child, arena_size, lay_out  # noqa: E402
from torchtune_ext.measured.kernel import Kernel  # noqa: E402
from torchtune_ext.measured.kernels import Dgemm, Gemv, Reduction, Stencil  # noqa: E402
from torchtune_ext.measured.machine import choose_cores, fingerprint  # noqa: E402
from torchtune_ext.measured.sandbox import SandboxError  # noqa: E402
from torchtune_ext.measured.verify import draw_inputs  # noqa: E402

LEVEL = 0.01
KINDS = {
    "no sandbox": {"sandbox": "none"},
    "locked in": {"namespaces": False},
    "locked in, namespaces": {"namespaces": True},
}


class Nothing(Reduction):
    """A sum of one number: what a call costs beside the function."""

    def __init__(self) -> None:
        super().__init__(1)


PROGRAMS = {
    "nothing": Nothing(),
    "dgemm, 128": Dgemm(128),
    "gemv, 768": Gemv(768),
    "reduction, 2,000,003": Reduction(),
    "stencil, 640": Stencil(640),
}


def u_statistic(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """Returns U, and its mean and variance if both came from one source.

    U is the number of pairs in which the first is larger; ties count half. The variance is
    n m / 12 (N + 1 - sum(t^3 - t) / (N (N - 1))), where t are the sizes of the ties (Lehmann 1975, section 1.3).
    """
    n, m = len(first), len(second)
    sizes, ranks, total = Counter([*first, *second]), {}, 0
    for value, count in sorted(sizes.items()):
        ranks[value] = total + (count + 1) / 2
        total += count
    ties = sum(count**3 - count for count in sizes.values())
    u = sum(ranks[value] for value in first) - n * (n + 1) / 2
    return u, n * m / 2, n * m / 12 * (total + 1 - ties / (total * (total - 1)))


def mann_whitney(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns p of the two-sided test by the normal approximation, with the correction for continuity."""
    u, mean, variance = u_statistic(first, second)
    if variance == 0:
        return 1.0
    return min(1.0, 2 * NormalDist().cdf(-max(0.0, abs(u - mean) - 0.5) / math.sqrt(variance)))


def turn(checker: Checker, library: Path, inputs: dict, core: int, calls: int, rng: np.random.Generator) -> float:
    """Returns the median of the seconds of some calls in one new process, after one that is not counted."""
    kernel = checker.kernel
    arena_bytes = arena_size(kernel, kernel.timed)
    with Child(checker.sandbox, library, kernel, arena_bytes, [core], 1, checker.limits, 5.0) as child:
        child.place(lay_out(kernel, kernel.timed, child.arena_bytes, False, rng))
        return median([child.call(kernel.timed, inputs, 20.0).seconds for _ in range(calls + 1)][1:])


def measure(kernel: Kernel, core: int, rounds: int, calls: int) -> dict[str, list[float]]:
    """Returns the seconds of each turn, for each kind of process that can be started here."""
    rng, programs = np.random.default_rng(0), {}
    with ExitStack() as stack:
        for name, arguments in KINDS.items():
            try:
                checker = stack.enter_context(Checker(kernel, cores=[core], **arguments))
            except SandboxError as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            programs[name] = checker, checker.compile_own(kernel)
        # Drawing and waiting happen on the other cores, if there are any.
        os.sched_setaffinity(0, os.sched_getaffinity(0) - {core} or {core})
        inputs = draw_inputs(kernel, kernel.timed, "biased", rng)
        seconds: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(rounds):
            for name in random.sample(list(programs), len(programs)):
                seconds[name].append(turn(*programs[name], inputs, core, calls, rng))
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="turns of each kind of process")
    parser.add_argument("--calls", type=int, default=5, help="calls of a turn")
    parser.add_argument("--core", type=int, help="the core they run on; without it, one that no engine uses")
    args = parser.parse_args()
    core = choose_cores(None if args.core is None else [args.core], 1)[0]
    usable = os.sched_getaffinity(0)
    print(f"{fingerprint()}; core {core}; {args.rounds} turns of {args.calls} calls")
    print("| program | process | ms | difference | p |\n|---|---|---|---|---|")
    found = []
    for name, kernel in PROGRAMS.items():
        os.sched_setaffinity(0, usable)
        seconds = measure(kernel, core, args.rounds, args.calls)
        base = seconds["no sandbox"]
        for kind, own in seconds.items():
            p = mann_whitney(own, base) if kind != "no sandbox" else math.nan
            difference = median(own) / median(base) - 1
            cells = ("", "") if math.isnan(p) else (f"{difference:+.2%}", f"{p:.2g}")
            print(f"| {name} | {kind} | {1e3 * median(own):.4f} | {cells[0]} | {cells[1]} |", flush=True)
            if not math.isnan(p):
                found.append((p, difference))
    return int(any(p < LEVEL / len(found) and difference > 0 for p, difference in found))


if __name__ == "__main__":
    sys.exit(main())
