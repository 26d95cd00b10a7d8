"""Detect disturbances by other processes, and measure the roofline of the machine.

A fixed kernel runs in a separate process while every candidate sleeps, and cannot be influenced.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from torchtune_ext.measured.check import Checker
from torchtune_ext.measured.child import CallResult, Child, ChildFailed, arena_size, lay_out
from torchtune_ext.measured.kernel import Arrays, Kernel, Parameter, Size
from torchtune_ext.measured.sandbox import SandboxError
from torchtune_ext.run.errors import RunFailure
from torchtune_ext.run.processes import Closing, closed_on_error

# A sample above the quiet level by more than these shares means a disturbance. On an idle small
# virtual machine, 90% of the samples were within 4% (registers) and 20% (memory). With a
# memory-streaming neighbor, 90% of the memory samples were above 50%.
REGISTERS_TOLERANCE, MEMORY_TOLERANCE = 0.1, 0.25
MAX_VARIATION = 0.2  # allowed relative variation of the fixed kernel at the start
CALM_TRIES = 10  # series of 20 samples; one of them must be calm
SAMPLE_CALLS = 5  # calls of each part per sample
# Warm-up calls refill the caches and wake up the vector units of the CPU.
REGISTERS_WARMUP_CALLS, MEMORY_WARMUP_CALLS = 1, 4
CHUNK_SAMPLES, HISTORY_S = 20, 3600.0  # samples per chunk, and seconds until a chunk expires
TRUSTED_CPU_S = 1e9  # CPU limit of the package's own programs, which run for days
INDEPENDENT_SUMS = 10  # independent FMA chains, enough for two units with a latency of four or five cycles
# The memory part reads 8 MB: it detects neighbors that use the shared cache or the memory.
MEMORY_NUMBERS = 1 << 20
REGISTERS_SIZE: Size = {"rounds": 400_000, "n": 0}  # about half a millisecond
MEMORY_SIZE: Size = {"rounds": 0, "n": MEMORY_NUMBERS}  # about a fifth of a millisecond
EMPTY_SIZE: Size = {"rounds": 0, "n": 0}


class UnstableMachine(RunFailure):
    """The timings of the machine vary too much."""


@dataclass(slots=True)
class QuietBaseline:
    """The undisturbed time of fixed work: the lower quartile of the last hour's quietest chunk."""

    # The quietest chunk of an hour counts: a neighbor of half an hour is not the baseline.

    chunk: list[float] = field(default_factory=list)
    history: list[tuple[float, float]] = field(default_factory=list)  # (end of a chunk, its lower quartile)

    def add(self, seconds: float, now: float | None = None) -> None:
        self.chunk.append(seconds)
        if len(self.chunk) == CHUNK_SAMPLES:
            self.end_chunk(now)

    def end_chunk(self, now: float | None = None) -> None:
        """Ends the chunk, even a short one, so that a later neighbor cannot affect it."""
        now = time.monotonic() if now is None else now
        if self.chunk:
            self.history = [each for each in self.history if each[0] > now - HISTORY_S] + [
                (now, _lower_quartile(self.chunk))
            ]
            self.chunk = []

    @property
    def level(self) -> float:
        return min((level for _, level in self.history), default=None) or _lower_quartile(self.chunk)

    def is_above(self, seconds: float, share: float) -> bool:
        return seconds > (1 + share) * self.level


def _lower_quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


@dataclass(frozen=True, slots=True)
class ProbeSample:
    """Seconds per call of each part of the fixed kernel."""

    registers: tuple[float, ...]
    memory: tuple[float, ...]


class Probe(Closing):
    """Samples the speed of a checker's cores.

    Raises:
        UnstableMachine: the fixed kernel varies by more than `MAX_VARIATION`.
        SandboxError: the process of the fixed kernel failed.
    """

    def __init__(self, checker: Checker) -> None:
        self.checker, self.kernel = checker, ProbeKernel()
        self.rng = np.random.default_rng()
        self.registers, self.memory = QuietBaseline(), QuietBaseline()
        self._best_memory_s = math.inf
        arena_bytes = arena_size(self.kernel, REGISTERS_SIZE)
        # The roofline is a property of the machine: every checker compiles this kernel with -O3.
        self.child: Child = checker.start_child(self.kernel, checker.compile_naive(self.kernel), TRUSTED_CPU_S)
        with closed_on_error(self):
            self.child.map_arrays(lay_out(self.kernel, REGISTERS_SIZE, arena_bytes, False, self.rng))
            self._require_calm()
            self._empty_s = min(self._call(EMPTY_SIZE).seconds for _ in range(20))
            self.peak_gflops = self._measure_peak_gflops()

    def close(self) -> None:
        """Ends the process of the fixed kernel."""
        self.child.close()

    def measure_peak(self) -> None:
        """Measures `peak_gflops` again."""
        # A neighbor can only slow a measurement down, so the maximum counts.
        self.peak_gflops = max(self.peak_gflops, self._measure_peak_gflops())

    def take_sample(self) -> ProbeSample:
        """Times the fixed kernel, and adds the sample to the baselines."""
        sample = ProbeSample(
            self._sample_seconds(REGISTERS_SIZE, REGISTERS_WARMUP_CALLS),
            self._sample_seconds(MEMORY_SIZE, MEMORY_WARMUP_CALLS),
        )
        self.registers.add(median(sample.registers))
        self.memory.add(median(sample.memory))
        self._best_memory_s = min(self._best_memory_s, *sample.memory)
        return sample

    @property
    def peak_gbytes_s(self) -> float:
        """The peak bandwidth at which the timed cores read the fixed kernel's 8 MB, in GB/s."""
        # The time of an empty call is subtracted here but not from a program's time. So the
        # roofline is optimistic, and a program cannot seem too fast.
        seconds = max(self._best_memory_s - self._empty_s, self._best_memory_s / 4)
        return 8e-9 * MEMORY_NUMBERS / seconds * self.checker.threads

    def roofline_s(self, kernel: Kernel) -> float:
        """Returns a lower bound of the seconds per call (Williams et al. 2009, "Roofline")."""
        # Every program must do the operations, and read or write each element at least once.
        size = kernel.timed
        nbytes = 8 * sum(math.prod(shape) for shape in kernel.shapes(size).values())
        return 1e-9 * max(kernel.operations(size) / self.peak_gflops, nbytes / self.peak_gbytes_s)

    def is_disturbed(self, *samples: ProbeSample) -> bool:
        """Returns whether other processes disturbed these samples."""
        registers = median(seconds for sample in samples for seconds in sample.registers)
        memory = median(seconds for look in samples for seconds in look.memory)
        return self.registers.is_above(registers, REGISTERS_TOLERANCE) or self.memory.is_above(memory, MEMORY_TOLERANCE)

    def _sample_seconds(self, size: Size, warmup_calls: int) -> tuple[float, ...]:
        return tuple(self._call(size).seconds for _ in range(warmup_calls + SAMPLE_CALLS))[warmup_calls:]

    def _call(self, size: Size) -> CallResult:
        try:
            return self.child.call(size, {}, self.checker.deadlines.verify_s)
        except ChildFailed as failed:
            raise SandboxError(f"the fixed kernel failed: {failed}") from failed

    def _require_calm(self) -> None:
        # A burst of other work may end soon, so one calm series is enough. Without a calm series,
        # timing is impossible on this machine.
        self.take_sample()
        low = high = 0.0
        for _ in range(CALM_TRIES):
            samples = [self.take_sample() for _ in range(20)]
            low, high = np.quantile(
                [median(sample.registers) + median(sample.memory) for sample in samples], [0.1, 0.9]
            )
            if high <= (1 + MAX_VARIATION) * low:
                return
        raise UnstableMachine(
            f"the same work took from {1e3 * low:.3g} to {1e3 * high:.3g} ms here: this machine varies by "
            f"{high / low - 1:.0%}, expected at most {MAX_VARIATION:.0%}. Fix: stop other processes on cores "
            f"{self.checker.cores}, or choose other cores"
        )

    def _measure_peak_gflops(self) -> float:
        size = {**REGISTERS_SIZE, "rounds": 4 * REGISTERS_SIZE["rounds"]}
        calls = [self._call(size) for _ in range(10)]
        best, width = min(call.seconds for call in calls), float(calls[0].outputs["y"][1])
        # One thread was measured. Every further thread is at most as fast.
        return self.kernel.operations(size) * width / best / 1e9 * self.checker.threads


class ProbeKernel:
    """The fixed kernel: `rounds` FMAs in registers, then the sum of n numbers in memory."""

    # The register part slows down when another process shares the core or its SMT sibling, or the
    # host throttles it; the memory part, when another fills the shared cache or the memory bus.
    name = "fixed"
    question = ""
    size_names = ("rounds", "n")
    parameters = (Parameter("y", is_output=True),)
    forbidden = ()
    timed: Size = REGISTERS_SIZE
    naive = """\
#define CHAINS @CHAINS@
#define NUMBERS @NUMBERS@
#if defined(__AVX512F__)
#define WIDTH 8
#elif defined(__AVX__)
#define WIDTH 4
#else
#define WIDTH 2
#endif
typedef double lanes __attribute__((vector_size(8 * WIDTH)));
static double memory[NUMBERS] __attribute__((aligned(64)));

void fixed(int rounds, int n, double *y) {
    static int filled;
    lanes sums[CHAINS], factor, term;
    for (int j = 0; j < WIDTH; j++)
        factor[j] = 0.999999, term[j] = 1e-6;
    for (int i = 0; i < CHAINS; i++)
        sums[i] = term * (double)(i + 1);
    for (int r = 0; r < rounds; r++)
        for (int i = 0; i < CHAINS; i++)
            sums[i] = sums[i] * factor + term;
    for (; filled < NUMBERS; filled++)  /* an unwritten page would map to the shared zero page */
        memory[filled] = 1;
    lanes read[4] = {{0}};
    for (int j = 0; j + 4 * WIDTH <= n; j += 4 * WIDTH)
        for (int i = 0; i < 4; i++)
            read[i] += *(const lanes *)(memory + j + i * WIDTH);
    double total = 0;
    for (int i = 0; i < CHAINS; i++)
        for (int l = 0; l < WIDTH; l++)
            total += sums[i][l] * 1e-300;
    for (int i = 0; i < 4; i++)
        for (int l = 0; l < WIDTH; l++)
            total += read[i][l];
    y[0] = total;
    y[1] = WIDTH;
}
""".replace("@CHAINS@", str(INDEPENDENT_SUMS)).replace("@NUMBERS@", str(MEMORY_NUMBERS))

    def operations(self, size: Size) -> int:
        """Counts a vector as one number: multiply by y[1]. The memory part is not counted."""
        return 2 * INDEPENDENT_SUMS * size["rounds"]

    def shapes(self, size: Size) -> Mapping[str, tuple[int, ...]]:
        return {"y": (2,)}

    def reference(self, size: Size, inputs: Arrays) -> dict[str, np.ndarray]:
        raise NotImplementedError("the fixed kernel is part of this package and is not verified")

    bound = reference
