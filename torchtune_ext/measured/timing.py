"""Times a verified program so that the figure repeats.

A block is some calls of the candidate, then some of the reference (the kernel's own naive program) on the same cores.
The probe (probe.py) looks at the machine before and after. Blocks go on until the 95% intervals of the median time and
of the median ratio to the reference are narrow, or the budget is used.
"""

import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from statistics import median

import numpy as np

from torchtune_ext.measured.check import Checker
from torchtune_ext.measured.child import Call, Child, ChildFailed, lay_out
from torchtune_ext.measured.compiler import LIBRARY
from torchtune_ext.measured.machine import kept_off, stolen_ticks
from torchtune_ext.measured.probe import OWN_CPU_S, Look, Probe, Quiet
from torchtune_ext.measured.results import Timing
from torchtune_ext.measured.sandbox import SandboxError
from torchtune_ext.measured.verify import described, draw_inputs, expect, mismatch

NARROW = 0.02  # the 95% intervals of the medians end this far from them, as a share, or nearer
# A time of the reference above its quiet level by more than this share speaks of a neighbor, too.
REFERENCE_DISTURBED = 0.05
WAITED = 0.02  # share of a block for which its processes wanted to run and could not
# CPU seconds that a program may use while the reference and the probe run. One whose threads sleep uses none.
RESTLESS_S = 1e-4
BLOCK_CALLS, BLOCK_S = 12, 0.06  # calls of a block at most, and seconds after which it ends (but for LEAST_CALLS)
FIRST_CALLS, LEAST_CALLS = 2, 3  # calls that are not counted, and the least calls of a block
MOST_LATE_CALLS = FIRST_CALLS + LEAST_CALLS  # of a program whose every call takes as long as it may
MIN_BLOCKS = 6  # of a timing; from fewer ratios no interval of their median reaches 95%
BELIEVED = 1.05  # times as fast as the roofline allows; above, a figure is no speed


def interval_of_median(samples: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Returns an interval that holds the median with at least this probability, whatever the distribution.

    It lies between two order statistics (David and Nagaraja 2003, section 7.1). With fewer than 6 samples no interval
    reaches 95%, and it spans all of them. The samples must be independent, which the calls of one block are not.
    """
    # Each sample lies below the median with probability 1/2, so the number of those below is binomial.
    ordered, n = sorted(samples), len(samples)
    ways = outside = 1  # of n coins: that k show heads, and that at most k do
    for k in range(n // 2):
        # Both are whole numbers: from 1030 samples on they no longer fit a float.
        if 2 * outside / 2**n > 1 - level:
            return ordered[max(0, k - 1)], ordered[n - max(1, k)]
        ways = ways * (n - k) // (k + 1)
        outside += ways
    return ordered[0], ordered[-1]


@dataclass(frozen=True, slots=True)
class _Block:
    """Some calls of the candidate, and of the reference beside it."""

    calls: Sequence[float]  # seconds
    reference_s: float  # the median
    is_disturbed: bool  # somebody else was at work, as the probe or the host says
    is_reference_disturbed: bool

    @property
    def seconds(self) -> float:
        return median(self.calls)

    @property
    def ratio(self) -> float:
        """How many times faster than the reference the candidate was."""
        return self.reference_s / self.seconds


def _spread(samples: Sequence[float]) -> float:
    """Half the width of the median's 95% interval, as a share of the median."""
    low, high = interval_of_median(samples)
    return (high - low) / 2 / median(samples)


def _is_narrow(blocks: Sequence[_Block]) -> bool:
    if len(blocks) < MIN_BLOCKS:
        return False
    return max(_spread([block.seconds for block in blocks]), _spread([block.ratio for block in blocks])) <= NARROW


class Timer:
    """Times programs of one kernel, one at a time, and keeps this process's threads off the timed cores if it can.

    Whoever makes a timer, or times with it, holds its cores by `machine.alone_on`.

    Set OPENBLAS_NUM_THREADS=1 before numpy is imported: idle threads of OpenBLAS would spin on a timed core.

    Args:
        checker: compiles and locks in programs. Its `cores` are the timed ones. It is closed with the timer.
        budget_s: seconds for one program, reference and checks included.

    Raises:
        Wild: the fixed kernel varies by more than 20%.
        SandboxError: a process of ours failed.
    """

    def __init__(self, checker: Checker, budget_s: float = 10.0) -> None:
        self.checker, self.kernel, self.budget_s = checker, checker.kernel, budget_s
        self.rng = np.random.default_rng()
        self._quiet = Quiet()  # the reference's
        with ExitStack() as stack:
            stack.enter_context(checker)
            stack.enter_context(kept_off(checker.cores))
            try:
                self.probe = stack.enter_context(closing(Probe(checker)))
                library = checker.compile_own(self.kernel, checker.optimization)
                self._reference = stack.enter_context(checker.child(self.kernel, library, OWN_CPU_S))
                for _ in range(4):
                    self._quiet.add(median(call.seconds for call in self._calls(self._reference)))
                self._quiet.settle()
            except ChildFailed as failed:
                # So far only our own programs have run.
                raise SandboxError(f"a process of ours ended: {failed}") from failed
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Ends the processes of the reference and the probe, and closes the checker."""
        self._stack.close()

    def __enter__(self) -> "Timer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def time(self, library: bytes) -> Timing:
        """Times the library of a program that `Checker.checked` has found right.

        Raises:
            ChildFailed: a call fails, its result is wrong, or it is faster than the machine can be.
            SandboxError: a process of ours failed. Nothing is known about the program, and this timer cannot go on.
        """
        # The CPU limit leaves room for the calls that the budget does not stop, so a slow program fails by the deadline
        # of one call and not by this limit.
        cpu_s = (self.budget_s + MOST_LATE_CALLS * self.checker.deadlines.verify_s) * self.checker.threads
        folder = self.checker.sandbox.new_folder()
        try:
            (folder / LIBRARY).write_bytes(library)
            (folder / LIBRARY).chmod(0o755)
            with self.checker.child(self.kernel, folder / LIBRARY, cpu_s) as child:
                return self._time(child)
        except ChildFailed as failed:
            if self._reference.has_ended() or self.probe.child.has_ended():
                # Whatever also ended a process of ours is not the program's fault.
                raise SandboxError(f"processes of ours ended while a program was timed: {failed}") from failed
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _time(self, child: Child) -> Timing:
        give_up_at = time.monotonic() + self.budget_s
        self._calls(child, FIRST_CALLS)  # they map memory and start threads
        blocks: list[_Block] = []
        look = self.probe.look()
        while True:
            block, look = self._block(child, look)
            blocks.append(block)
            is_late = time.monotonic() > give_up_at
            # While there is time, more blocks replace the disturbed ones. If few blocks were calm at the end, that is
            # chance or the program's choice, so all count and the figure is marked as disturbed.
            calm = [block for block in blocks if not block.is_disturbed]
            if is_late or _is_narrow(calm):
                is_enough = len(calm) >= MIN_BLOCKS or 2 * len(calm) >= len(blocks)
                return self._timing(calm if is_enough else blocks)

    def _block(self, child: Child, before: Look) -> tuple[_Block, Look]:
        stolen = stolen_ticks(self.checker.cores)
        own = self._calls(child)
        try:
            beside = self._calls(self._reference)
        except ChildFailed as failed:
            raise SandboxError(f"the naive program of {self.kernel.name} has failed: {failed}") from failed
        after = self.probe.look()
        # A program whose threads work now could slow down the reference, or make every block look disturbed.
        if (restless_s := child.restless_s()) > RESTLESS_S:
            raise ChildFailed(
                "runtime_error", f"its threads worked for {1e3 * restless_s:.3g} ms while others were timed"
            )
        reference_s = median(call.seconds for call in beside)
        self._quiet.add(reference_s)
        waited = [sum(call.waited_s for call in calls) / sum(call.seconds for call in calls) for calls in (own, beside)]
        is_disturbed = (
            max(waited) > WAITED or self.probe.is_disturbed(before, after) or stolen_ticks(self.checker.cores) > stolen
        )
        # The candidate has no hand in the reference, so only a neighbor can disturb that.
        is_reference_disturbed = waited[1] > WAITED or self._quiet.is_above(reference_s, REFERENCE_DISTURBED)
        return _Block([call.seconds for call in own], reference_s, is_disturbed, is_reference_disturbed), after

    def _timing(self, kept: Sequence[_Block]) -> Timing:
        own, ratios = [block.seconds for block in kept], [block.ratio for block in kept]
        seconds = median(own)
        gflops = self.kernel.operations(self.kernel.timed) / seconds / 1e9
        if seconds * BELIEVED < self.probe.roofline_s(self.kernel):
            # A neighbor may have slowed the measurement of the peak, so measure again before refusing.
            self.probe.measure_peak()
        roofline_s = self.probe.roofline_s(self.kernel)
        if seconds * BELIEVED < roofline_s:
            raise ChildFailed(
                "runtime_error",
                f"{1e3 * seconds:.3g} ms, and at {self.probe.peak_gflops:.4g} GFLOPS and {self.probe.peak_gbytes_s:.3g} GB/s "
                f"these cores need {1e3 * roofline_s:.3g} ms at least: not believed",
            )
        return Timing(
            seconds,
            # The interval of one block is that of its calls.
            _spread(own if len(own) > 1 else kept[0].calls),
            sum(len(block.calls) for block in kept),
            gflops,
            median(ratios),
            _spread(ratios),
            roofline_s / seconds,
            disturbed=sum(block.is_disturbed for block in kept) / len(kept),
            is_narrow=_is_narrow(kept),
            # A disturbed figure stands with its remark. It is unknown only if the reference was disturbed as well.
            is_noisy=2 * sum(block.is_disturbed and block.is_reference_disturbed for block in kept) > len(kept),
        )

    def _calls(self, child: Child, most: int = BLOCK_CALLS) -> list[Call]:
        kernel, size, seconds = self.kernel, self.kernel.timed, 0.0
        calls: list[Call] = []
        child.place(lay_out(kernel, size, child.arena_bytes, bool(self.rng.integers(2)), self.rng))
        # Every timed call has new inputs and is checked, so a cached answer, or a program that is right only while it
        # is verified, gains nothing.
        while len(calls) < most and (seconds < BLOCK_S or len(calls) < min(LEAST_CALLS, most)):
            inputs = draw_inputs(kernel, size, "biased", self.rng)
            call = child.call(size, inputs, self.checker.deadlines.verify_s)
            if wrong := mismatch(kernel, expect(kernel, size, inputs), call.outputs):
                raise ChildFailed("wrong_result", f"in a timed call: {wrong} ({described(size)}, biased inputs)")
            calls.append(call)
            seconds += call.seconds
        return calls
