"""A task whose texts are programs, graded by what the benchmark service measures.

The service has processes, deadlines and a queue of its own, so it needs no process of `Grader`.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from dataclasses import asdict, fields
from threading import Lock
from typing import Any

from torchtune_ext.grading.outcomes import Outcome, Ungraded, check_outcome
from torchtune_ext.measured.bench import Bench
from torchtune_ext.measured.check import OUTCOMES, Checker
from torchtune_ext.measured.compiler import Compiler
from torchtune_ext.measured.kernel import Kernel
from torchtune_ext.measured.machine import avoid_cores, choose_cores
from torchtune_ext.measured.ray_bench import RayBench
from torchtune_ext.measured.results import NOISY, BenchConfig, BenchError, Result
from torchtune_ext.measured.sandbox import SandboxError
from torchtune_ext.run.errors import UsageError
from torchtune_ext.tasks.task import Problem, Score


def open_bench(config: BenchConfig) -> Bench | RayBench:
    """Starts the service on this machine, or, if `config.address` is given, on the machines of a Ray cluster.

    Raises:
        ValueError, SandboxError, BenchError: as `Bench` and `RayBench` say.
    """
    return (Bench if config.address is None else RayBench)(**asdict(config))


def check_bench(config: BenchConfig, kernels: Sequence[Kernel]) -> None:
    """Finds in a second what else would fail once the engine has started, or at the first sample.

    It checks the compiler, the cores, the lock-in of programs, and that each kernel's own program compiles and runs.

    Raises:
        ValueError: what `choose_cores` and `Checker` say.
    """
    # The machines of a Ray cluster check themselves.
    if config.address is None:
        choose_cores(config.cores, config.threads)
        compiler = Compiler.find(config.compiler)
        for kernel in kernels:
            try:
                Checker(kernel, compiler, config.optimization, config.threads, namespaces=config.namespaces).close()
            except (SandboxError, ValueError) as error:
                size = " ".join(f"{name}={value}" for name, value in kernel.timed.items())
                raise UsageError(f"{kernel.name} with {size} cannot be measured here: {error}") from error


def measured_score(result: Result, reward: float) -> Score:
    """Returns the score of a program: its note says to people what the machine said, its parts are numbers.

    Args:
        result: what became of the program. It is not NOISY: that is no grade.
        reward: what that is worth.

    Returns:
        A score with the parts `outcome_*`, 1 for its outcome and 0 for the others, and, if its speed is known, `gflops`,
        `speedup` (times the naive program), `peak_share`, `spread` and `speedup_spread` (half of the 95% intervals of the time
        and of the speed-up, as shares). Its facts are the machine and the techniques.
    """
    parts = {f"outcome_{name}": float(result.outcome == name) for name in OUTCOMES}
    if (timing := result.timing) is not None:
        speeds = {"gflops": timing.gflops, "speedup": timing.speedup, "peak_share": timing.roofline_fraction}
        parts |= speeds | {"spread": timing.relative_ci, "speedup_spread": timing.speedup_ci}
    return Score(reward, parts, result.note, {"machine": result.fingerprint, "techniques": ",".join(result.techniques)})


class MeasuredTask:
    """A task whose texts are programs in C.

    A subclass has no `grade`. It has `kernel`, `permitted` and `score`.

    Args:
        bench: settings of the service, fields of `BenchConfig`. Raises ValueError for one that there is not.
    """

    kernels: Sequence[Kernel]  # all that its problems ask for

    def __init__(self, bench: Mapping[str, Any] | None = None) -> None:
        if not isinstance(bench or {}, Mapping):
            known = ", ".join(field.name for field in fields(BenchConfig))
            raise UsageError(f"bench={bench!r} must be a mapping with some of the keys {known}")
        self.bench = BenchConfig(**(bench or {}))

    @property
    def name(self) -> str:
        """The words that follow the class in the header of a run."""
        return f"compiled with {self.bench.optimization}"

    def kernel(self, problem: Problem) -> Kernel:
        """Returns what the programs of a problem should compute, one of `kernels`."""
        raise NotImplementedError

    def permitted(self, problem: Problem) -> Collection[str] | None:
        """Returns the techniques that a program may use, as in `Bench.submit`."""
        raise NotImplementedError

    def score(self, problem: Problem, result: Result) -> Score:
        """Returns what a program is worth whose outcome is not NOISY."""
        raise NotImplementedError

    def check_grading(self, key: str, earlier_tasks: Sequence[Any]) -> None:
        """Finds out whether programs can be measured here.

        The settings are those of the first measured task of the run, whose service all others share.

        Raises:
            ValueError: other settings than that task's; what `rehearse_bench` says, also of what cannot be locked in.
        """
        first = next((task for task in earlier_tasks if isinstance(task, MeasuredTask)), self)
        if self.bench not in (first.bench, BenchConfig()):
            raise UsageError(
                f"{key}.bench is not that of the first task, whose service measures for both; leave it out"
            )
        self.bench = first.bench
        try:
            check_bench(self.bench, self.kernels)
        except UsageError as error:
            # `rehearse_bench` does not know under which key its settings stand.
            raise UsageError(f"{key}.bench: {str(error).removeprefix('bench.')}") from error

    def open_grader(self, open_graders: Sequence[Any], during_training: bool) -> "BenchGrader":
        """Starts the service, or shares that of another task of the run.

        Args:
            opened: the graders of the tasks before.
            beside_training: programs are measured while this process trains, which keeps off the cores that are timed on.

        Raises:
            What `open_bench` raises.
        """
        # Only the first grader keeps this process off the cores.
        if shared := next((grader for grader in open_graders if isinstance(grader, BenchGrader)), None):
            return BenchGrader(self, shared.bench)
        return BenchGrader(self, open_bench(self.bench), during_training)


class BenchGrader:
    """Has the interface of `Grader`, for a task whose texts are programs.

    Args:
        task: says what to measure and what it is worth.
        bench: the service, which is closed with this object. Several graders may share it.
        beside_training: as in `MeasuredTask.open_grader`.
    """

    grades_groups = False

    def __init__(self, task: MeasuredTask, bench: Bench | RayBench, during_training: bool = False) -> None:
        self._task, self.bench = task, bench
        self._lock = Lock()
        self._counts: Counter[str] = Counter()  # of what came since the last call of `metrics`
        self._last_counts = self._counts  # what that call returned
        self._core_exclusion = ExitStack()
        cores = getattr(bench, "timed_cores", ())  # those of a Ray cluster are not this process's
        if during_training and cores:
            self._core_exclusion.enter_context(avoid_cores(cores))

    def submit(self, problem: Problem, text: str) -> "Future[list[Outcome]]":
        """Hands in a text and returns at once."""
        outcome: Future[list[Outcome]] = Future()
        result_future = self.bench.submit(self._task.kernel(problem), text, permitted=self._task.permitted(problem))
        result_future.add_done_callback(lambda done: self._finish(problem, done, outcome))
        return outcome

    def metrics(self, refill: bool = False) -> dict[str, float]:
        """Returns the seconds of work on programs, and the shares of them that were noisy and that were cached.

        They cover the time since the last call and, in a refill, also what that call covered.
        """
        with self._lock:
            counts = self._last_counts = self._last_counts + self._counts if refill else self._counts
            self._counts = Counter()
        programs = max(1, counts["programs"])
        return {
            "time/bench": float(counts["seconds"]),
            "bench/noisy": counts["noisy"] / programs,
            "bench/cache_hits": counts["cached"] / programs,
        }

    def close(self) -> None:
        """Ends the service. A second call does nothing."""
        self._core_exclusion.close()
        self.bench.close()

    def _finish(self, problem: Problem, result_future: "Future[Result]", outcome: "Future[list[Outcome]]") -> None:
        # This runs in a thread of the service. The caller may have cancelled meanwhile.
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            outcome.set_result([self._to_outcome(problem, result_future.result())])
        except (BenchError, CancelledError) as error:
            outcome.set_result([Ungraded("infra_failed", str(error) or "cancelled")])
        except Exception as error:  # noqa: BLE001 (the task's own code; who waits gets it)
            outcome.set_exception(error)

    def _to_outcome(self, problem: Problem, result: Result) -> Outcome:
        with self._lock:
            self._counts.update(programs=1, noisy=result.outcome == NOISY, cached=result.is_cached)
            if not result.is_cached:
                # A Counter adds any numbers, though its annotation knows only whole ones.
                self._counts["seconds"] += sum(value for name, value in result.seconds.items() if name != "wait")  # pyright: ignore[reportArgumentType]
        # The machine is at fault and not the program, so there is no score and the sample stays out of the baseline.
        if result.outcome == NOISY:
            return Ungraded(NOISY, result.note)
        return check_outcome(self._task.score(problem, result), self._task.score)
