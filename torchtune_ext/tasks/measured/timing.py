"""How fast a verified program is, such that the figure repeats.

Calls come in blocks: the candidate's, and right after it one of the reference (the kernel's own naive program), on the same
cores, one process at a time. Before and after stands the fixed kernel. A block is excused, and made again, if the fixed
kernel, the host (steal) *and* the reference say that the machine was disturbed. What only the candidate suffers from is its
own doing. Blocks go on until the 95% interval of the median is narrow enough, or the budget is used.

Every timed call has inputs of its own and is checked. So an answer that is kept, or is right only where it is verified,
gains nothing. What is faster than the machine can be is not believed.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from torchtune_ext.tasks.measured.arena import arena_size, lay_out
from torchtune_ext.tasks.measured.check import Checker
from torchtune_ext.tasks.measured.child import Child, ChildFailed
from torchtune_ext.tasks.measured.fixed import Fixed
from torchtune_ext.tasks.measured.kernel import Kernel, Size
from torchtune_ext.tasks.measured.machine import alone_on, stolen_ticks
from torchtune_ext.tasks.measured.verify import compare, draw_inputs, explained

NARROW = 0.02  # the 95% interval of the median ends this far from it, as a share, or nearer
DISTURBED = 0.05  # a time above its quiet level by more than this share speaks of a neighbor
WILD = 0.2  # share by which the fixed kernel may vary at the start
CALM_TRIES = 10  # series of 20 calls of the fixed kernel, one of which has to be calm
BLOCK_CALLS, BLOCK_S = 12, 0.25  # calls of a block at most, and seconds after which it ends (but 3 calls it has)
BELIEVED = 1.05  # times the measured peak; above, a figure is no speed
LOCK_S = 600.0  # seconds to wait for another timing on the same cores


class Wild(RuntimeError):
    """The machine varies too much to time anything."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The speed of one program at the kernel's timed size."""

    seconds: float  # median of a call
    low: float  # the 95% interval of the median: from here
    high: float  # to here
    calls: int
    gflops: float  # operations of a call / seconds, in 10^9
    ratio: float  # how many times faster than the reference beside it; median over the blocks
    ratio_spread: float  # half of the 95% interval of that, as a share
    peak_share: float  # of the measured peak of these cores
    excused: int  # blocks that were made again
    is_narrow: bool  # the interval is within NARROW

    @property
    def spread(self) -> float:
        """Half of the interval, as a share of the median."""
        return (self.high - self.low) / 2 / self.seconds


def interval_of_median(samples: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Returns an interval that holds the median with at least this probability, whatever the distribution.

    It lies between two order statistics (David and Nagaraja 2003, section 7.1): k of n samples lie below the median with the
    probabilities of a fair coin. With fewer than 6 samples no interval reaches 95%; then it is all of them.
    """
    ordered, n = sorted(samples), len(samples)
    outside = 0.0
    for k in range(n // 2):
        outside += 2 * math.comb(n, k) * 0.5**n
        if outside > 1 - level:
            return ordered[max(0, k - 1)], ordered[n - max(1, k)]
    return ordered[0], ordered[-1]


@dataclass(slots=True)
class Quiet:
    """The times of a fixed piece of work while nobody disturbs: the lower quartile of what was seen lately."""

    seen: list[float] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        self.seen = [*self.seen[-199:], seconds]

    @property
    def level(self) -> float:
        return sorted(self.seen)[len(self.seen) // 4]

    def is_disturbed(self, seconds: float) -> bool:
        return seconds > (1 + DISTURBED) * self.level


class Timer:
    """Times programs of one kernel on its own cores, one at a time.

    Args:
        checker: compiles and locks in; its `cores` are those that are timed on.
        budget_s: seconds for one program, reference and checks included.

    Raises:
        Wild: the fixed kernel varies by more than `WILD`.
    """

    def __init__(self, checker: Checker, budget_s: float = 10.0) -> None:
        if not budget_s > 0:
            raise ValueError(f"budget_s={budget_s} must be more than 0 seconds")
        self.checker, self.kernel, self.budget_s = checker, checker.kernel, budget_s
        self.rng = np.random.default_rng()
        self._reference, self._fixed = Quiet(), Quiet()
        self._reference_child = self._fixed_child = None
        self._fixed_kernel = Fixed()
        try:
            with alone_on(checker.cores, LOCK_S):
                self._fixed_child = self._own(self._fixed_kernel)
                self._reference_child = self._own(self.kernel)
                self._calibrate()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the processes of the reference and the fixed kernel."""
        for child in (self._reference_child, self._fixed_child):
            if child is not None:
                child.close()

    def __enter__(self) -> "Timer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def time(self, library: Path) -> Timing:
        """Times a program that `Checker.checked` has found right.

        Raises:
            ChildFailed: a call fails or its result is wrong, or it is faster than the machine can be.
        """
        with alone_on(self.checker.cores, LOCK_S), self._child(self.kernel, library) as child:
            give_up_at = time.monotonic() + self.budget_s
            self._block(child, self.kernel, 2)  # the first calls map memory and start threads
            own: list[float] = []
            ratios: list[float] = []
            excused = 0
            before = self._probe()
            while True:
                stolen = stolen_ticks(self.checker.cores)
                calls = self._block(child, self.kernel)
                beside = median(self._block(self._reference_child, self.kernel))
                after = self._probe()
                is_late = time.monotonic() > give_up_at
                was_disturbed = (
                    self._fixed.is_disturbed(max(before, after)) or stolen_ticks(self.checker.cores) > stolen
                ) and self._reference.is_disturbed(beside)
                before = after
                self._reference.add(beside)
                if was_disturbed and not (is_late and not own):
                    excused += 1
                else:
                    own += calls
                    ratios.append(beside / median(calls))
                low, high = interval_of_median(own) if own else (0.0, math.inf)
                is_narrow = len(own) >= 6 and (high - low) / 2 <= NARROW * median(own) and len(ratios) >= 3
                if is_narrow or (is_late and own):
                    return self._timing(own, ratios, excused, is_narrow)

    def _timing(self, own: list[float], ratios: list[float], excused: int, is_narrow: bool) -> Timing:
        seconds, (low, high) = median(own), interval_of_median(own)
        gflops = self.kernel.operations(self.kernel.timed) / seconds / 1e9
        share = gflops / self.peak_gflops
        if share > BELIEVED:
            raise ChildFailed(
                "runtime_error",
                f"{gflops:.4g} GFLOPS, and these cores can do {self.peak_gflops:.4g}: not believed",
            )
        ratio, (least, most) = median(ratios), interval_of_median(ratios)
        return Timing(
            seconds, low, high, len(own), gflops, ratio, (most - least) / 2 / ratio, share, excused, is_narrow
        )

    def _own(self, kernel: Kernel) -> Child:
        """The process of a program of ours."""
        library = self.checker.compile_own(kernel)
        return self._child(kernel, library)

    def _child(self, kernel: Kernel, library: Path) -> Child:
        checker = self.checker
        arena_bytes = arena_size(kernel, kernel.timed)
        return Child(
            checker.sandbox,
            library,
            kernel,
            arena_bytes,
            checker.cores,
            checker.threads,
            checker.limits,
            checker.deadlines.load_s,
        )

    def _block(self, child: Child, kernel: Kernel, most: int = BLOCK_CALLS) -> list[float]:
        """Returns the seconds of some calls, each with inputs of its own, and each checked."""
        size, seconds = kernel.timed, []
        child.place(lay_out(kernel, size, child.arena_bytes, bool(self.rng.integers(2)), self.rng))
        while len(seconds) < most and (sum(seconds) < BLOCK_S or len(seconds) < min(3, most)):
            inputs = draw_inputs(kernel, size, "biased", self.rng)
            call = child.call(size, inputs, self.checker.deadlines.verify_s)
            found = compare(kernel, size, inputs, call.outputs)
            if not found.ok:
                raise ChildFailed("wrong_result", f"in a timed call: {explained(found, size, 'biased')}")
            seconds.append(call.seconds)
        return seconds

    def _probe(self) -> float:
        """Times the fixed kernel once, and remembers it."""
        seconds = self._fixed_call(Fixed.timed)
        self._fixed.add(seconds)
        return seconds

    def _fixed_call(self, size: Size) -> float:
        self._fixed_child.place(lay_out(self._fixed_kernel, size, self._fixed_child.arena_bytes, False, self.rng))
        inputs = {"x": np.ones(size["n"])}
        call = self._fixed_child.call(size, inputs, self.checker.deadlines.verify_s)
        self._width = float(call.outputs["y"][1])
        return call.seconds

    def _calibrate(self) -> None:
        """Finds the quiet levels and the peak. Raises Wild."""
        self._fixed_call(Fixed.timed)
        # A burst of somebody else's work is waited for. What does not end is a machine on which nothing can be timed.
        for _ in range(CALM_TRIES):
            low, high = np.quantile([self._probe() for _ in range(20)], [0.1, 0.9])
            if high <= (1 + WILD) * low:
                break
        else:
            raise Wild(
                f"the same work took from {1e3 * low:.3g} to {1e3 * high:.3g} ms here: this machine varies by "
                f"{high / low - 1:.0%}, at most {WILD:.0%} can be timed on. Stop what else runs on cores "
                f"{self.checker.cores}, or choose others"
            )
        size = {"rounds": 8 * Fixed.timed["rounds"], "n": 1}
        best = min(self._fixed_call(size) for _ in range(10))
        # One thread computes it; others have as much to themselves at best.
        self.peak_gflops = self._fixed_kernel.operations(size) * self._width / best / 1e9 * self.checker.threads
        for _ in range(4):
            self._reference.add(median(self._block(self._reference_child, self.kernel)))
