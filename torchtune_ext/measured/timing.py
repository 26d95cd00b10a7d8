"""Time a verified program reproducibly.

A block consists of calls of the candidate, then calls of the reference (the kernel's naive program)
on the same cores. The probe (probe.py) samples the machine before and after. Blocks repeat until
the 95% intervals of the median time and of the median ratio are narrow, or the budget is used up.
"""

import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from statistics import median

import numpy as np

from torchtune_ext.measured.check import Checker
from torchtune_ext.measured.child import CallResult, Child, ChildFailed, lay_out
from torchtune_ext.measured.compiler import LIBRARY_FILE
from torchtune_ext.measured.machine import avoid_cores, stolen_ticks
from torchtune_ext.measured.probe import TRUSTED_CPU_S, Probe, ProbeSample, QuietBaseline
from torchtune_ext.measured.results import Timing
from torchtune_ext.measured.sandbox import SandboxError
from torchtune_ext.measured.verify import compute_expected, draw_inputs, find_wrong_output, size_text
from torchtune_ext.run.processes import Closing

MAX_RELATIVE_CI = 0.02  # relative half-width of the 95% intervals for a narrow timing
# A reference time above its quiet level by more than this share also means a disturbance.
REFERENCE_TOLERANCE = 0.05
MAX_WAIT_FRACTION = 0.02  # share of a block during which a runnable process waited for a core
# CPU seconds that a program may use while the others run; sleeping threads use none.
MAX_UNREQUESTED_CPU_S = 1e-4
MAX_BLOCK_CALLS, BLOCK_S = 12, 0.06  # maximum calls and seconds of a block, after MIN_BLOCK_CALLS
WARMUP_CALLS, MIN_BLOCK_CALLS = 2, 3  # uncounted calls, and minimum calls of a block
MAX_OVERRUN_CALLS = WARMUP_CALLS + MIN_BLOCK_CALLS  # calls past the budget of the slowest allowed program
MIN_BLOCKS = 6  # per timing; with fewer ratios, no interval of their median reaches 95%
ROOFLINE_MARGIN = 1.05  # a time below the roofline time / ROOFLINE_MARGIN is rejected


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Returns a distribution-free 95% confidence interval of the median.

    It lies between two order statistics (David and Nagaraja 2003, section 7.1). With fewer than 6
    samples, no interval reaches 95%, so it spans all samples. The samples must be independent;
    calls of one block are not.
    """
    # The number of samples below the median is binomial, with probability 1/2 for each.
    ordered, n = sorted(samples), len(samples)
    ways = outside = 1  # binomial coefficient C(n, k), and the sum of C(n, 0) to C(n, k)
    for k in range(n // 2):
        # Both are integers: from 1030 samples on, they overflow a float.
        if 2 * outside / 2**n > 1 - 0.95:
            return ordered[max(0, k - 1)], ordered[n - max(1, k)]
        ways = ways * (n - k) // (k + 1)
        outside += ways
    return ordered[0], ordered[-1]


@dataclass(frozen=True, slots=True)
class _Block:
    """Calls of the candidate, followed by calls of the reference."""

    calls: Sequence[float]  # seconds per call of the candidate
    reference_s: float  # median seconds per call of the reference
    is_disturbed: bool  # by other processes, according to the probe, the scheduler or the steal time
    is_reference_disturbed: bool

    @property
    def seconds(self) -> float:
        return median(self.calls)

    @property
    def ratio(self) -> float:
        """Speedup of the candidate over the reference."""
        return self.reference_s / self.seconds


def _relative_ci(samples: Sequence[float]) -> float:
    """Returns half the width of the median's 95% interval, relative to the median."""
    low, high = median_interval(samples)
    return (high - low) / 2 / median(samples)


def _is_narrow(blocks: Sequence[_Block]) -> bool:
    samples = [block.seconds for block in blocks], [block.ratio for block in blocks]
    return len(blocks) >= MIN_BLOCKS and max(map(_relative_ci, samples)) <= MAX_RELATIVE_CI


class ProgramTimer(Closing):
    """Times programs of one kernel, one at a time, and avoids the timed cores if possible.

    The caller must hold `machine.lock_cores` of its cores during the constructor and during a
    timing. Set OPENBLAS_NUM_THREADS=1 before numpy is imported: its idle threads spin on the cores.

    Args:
        checker: compiles and sandboxes programs, on the timed cores. `close` closes it.
        budget_s: seconds per program, including the reference and the checks.

    Raises:
        UnstableMachine: the fixed kernel varies by more than 20%.
        SandboxError: the reference or the fixed kernel failed.
    """

    def __init__(self, checker: Checker, budget_s: float = 10.0) -> None:
        self.checker, self.kernel, self.budget_s = checker, checker.kernel, budget_s
        self.rng = np.random.default_rng()
        self._reference_baseline = QuietBaseline()  # times of the reference
        with ExitStack() as stack:
            stack.enter_context(checker)
            stack.enter_context(avoid_cores(checker.cores))
            try:
                self.probe = stack.enter_context(closing(Probe(checker)))
                library = checker.compile_naive(self.kernel, checker.optimization)
                self._reference = stack.enter_context(checker.start_child(self.kernel, library, TRUSTED_CPU_S))
                for _ in range(4):
                    self._reference_baseline.add(median(call.seconds for call in self._run_calls(self._reference)))
                self._reference_baseline.end_chunk()
            except ChildFailed as failed:
                # So far, only the reference and the fixed kernel have run.
                raise SandboxError(f"the reference or the fixed kernel ended: {failed}") from failed
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Ends the processes of the reference and the probe, and closes the checker."""
        self._stack.close()

    def time_library(self, library: bytes) -> Timing:
        """Times the library of a program that `Checker.check_with_library` accepted.

        Raises:
            ChildFailed: a call fails, its result is wrong, or it is faster than the roofline.
            SandboxError: the reference or the fixed kernel failed. The speed of the program is
                unknown, and this timer is unusable.
        """
        # The CPU limit leaves room for calls past the budget, so a slow program fails by the
        # deadline of one call and not by this limit.
        cpu_s = (self.budget_s + MAX_OVERRUN_CALLS * self.checker.deadlines.verify_s) * self.checker.threads
        folder = self.checker.sandbox.new_folder()
        try:
            (folder / LIBRARY_FILE).write_bytes(library)
            (folder / LIBRARY_FILE).chmod(0o755)
            with self.checker.start_child(self.kernel, folder / LIBRARY_FILE, cpu_s) as child:
                return self._time_blocks(child)
        except ChildFailed as failed:
            if self._reference.has_ended() or self.probe.child.has_ended():
                # A cause that also ended one of the two is not the program's fault.
                raise SandboxError(
                    f"the reference or the fixed kernel ended while a program was timed: {failed}"
                ) from failed
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _time_blocks(self, child: Child) -> Timing:
        give_up_at = time.monotonic() + self.budget_s
        self._run_calls(child, WARMUP_CALLS)  # the first calls map memory and start threads
        blocks: list[_Block] = []
        look = self.probe.take_sample()
        while True:
            block, look = self._run_block(child, look)
            blocks.append(block)
            is_late = time.monotonic() > give_up_at
            # Within the budget, further blocks replace disturbed ones. If few are calm at its end,
            # by chance or by the program, all count and the timing is marked as disturbed.
            calm = [block for block in blocks if not block.is_disturbed]
            if is_late or _is_narrow(calm):
                is_enough = len(calm) >= MIN_BLOCKS or 2 * len(calm) >= len(blocks)
                return self._summarize(calm if is_enough else blocks)

    def _run_block(self, child: Child, before: ProbeSample) -> tuple[_Block, ProbeSample]:
        stolen = stolen_ticks(self.checker.cores)
        candidate_calls = self._run_calls(child)
        try:
            reference_calls = self._run_calls(self._reference)
        except ChildFailed as failed:
            raise SandboxError(f"the naive program of {self.kernel.name} has failed: {failed}") from failed
        after = self.probe.take_sample()
        # Active threads of the program could slow the reference, or disturb every block.
        if (restless_s := child.unrequested_cpu_s()) > MAX_UNREQUESTED_CPU_S:
            raise ChildFailed(
                "runtime_error", f"its threads worked for {1e3 * restless_s:.3g} ms while others were timed"
            )
        reference_s = median(call.seconds for call in reference_calls)
        self._reference_baseline.add(reference_s)
        waited = [
            sum(call.waited_s for call in calls) / sum(call.seconds for call in calls)
            for calls in (candidate_calls, reference_calls)
        ]
        is_disturbed = (
            max(waited) > MAX_WAIT_FRACTION
            or self.probe.is_disturbed(before, after)
            or stolen_ticks(self.checker.cores) > stolen
        )
        # The candidate cannot influence the reference, so only another process can disturb it.
        is_reference_disturbed = waited[1] > MAX_WAIT_FRACTION or self._reference_baseline.is_above(
            reference_s, REFERENCE_TOLERANCE
        )
        seconds = [call.seconds for call in candidate_calls]
        return _Block(seconds, reference_s, is_disturbed, is_reference_disturbed), after

    def _summarize(self, blocks: Sequence[_Block]) -> Timing:
        block_seconds, ratios = [block.seconds for block in blocks], [block.ratio for block in blocks]
        seconds = median(block_seconds)
        gflops = self.kernel.operations(self.kernel.timed) / seconds / 1e9
        if seconds * ROOFLINE_MARGIN < self.probe.roofline_s(self.kernel):
            # Another process may have slowed the measurement of the peak, so it is repeated.
            self.probe.measure_peak()
        roofline_s = self.probe.roofline_s(self.kernel)
        if seconds * ROOFLINE_MARGIN < roofline_s:
            raise ChildFailed(
                "runtime_error",
                f"{1e3 * seconds:.3g} ms per call; at {self.probe.peak_gflops:.4g} GFLOPS and {self.probe.peak_gbytes_s:.3g} "
                f"GB/s these cores need {1e3 * roofline_s:.3g} ms at least: rejected as faster than the roofline",
            )
        return Timing(
            seconds,
            # With one block, the interval comes from its calls.
            _relative_ci(block_seconds if len(block_seconds) > 1 else blocks[0].calls),
            sum(len(block.calls) for block in blocks),
            gflops,
            median(ratios),
            _relative_ci(ratios),
            roofline_s / seconds,
            disturbed_fraction=sum(block.is_disturbed for block in blocks) / len(blocks),
            is_narrow=_is_narrow(blocks),
            # A disturbed timing is marked. It is unknown only if the reference was disturbed, too.
            is_noisy=2 * sum(block.is_disturbed and block.is_reference_disturbed for block in blocks) > len(blocks),
        )

    def _run_calls(self, child: Child, max_calls: int = MAX_BLOCK_CALLS) -> list[CallResult]:
        kernel, size, seconds = self.kernel, self.kernel.timed, 0.0
        calls: list[CallResult] = []
        child.map_arrays(lay_out(kernel, size, child.arena_bytes, bool(self.rng.integers(2)), self.rng))
        # Every timed call has new inputs and is checked. So a cached answer, or a program that is
        # correct only during verification, gains nothing.
        while len(calls) < max_calls and (seconds < BLOCK_S or len(calls) < min(MIN_BLOCK_CALLS, max_calls)):
            inputs = draw_inputs(kernel, size, "biased", self.rng)
            call = child.call(size, inputs, self.checker.deadlines.verify_s)
            if wrong := find_wrong_output(kernel, compute_expected(kernel, size, inputs), call.outputs):
                raise ChildFailed("wrong_result", f"in a timed call: {wrong} ({size_text(size)}, biased inputs)")
            calls.append(call)
            seconds += call.seconds
        return calls
