"""Tasks whose completions are programs, graded by the benchmark service.

The service has its own processes, deadlines and queue, so it does not use the process of `Grader`.
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
from torchtune_ext.tasks.grade_functions import describe_function
from torchtune_ext.tasks.task import Problem, Score


def open_bench(config: BenchConfig) -> Bench | RayBench:
    """Starts the service on this machine, or on a Ray cluster if `config.address` is set.

    Raises:
        UsageError, SandboxError, BenchError: as in `Bench` and `RayBench`.
    """
    return (Bench if config.address is None else RayBench)(**asdict(config))


def check_bench(config: BenchConfig, kernels: Sequence[Kernel]) -> None:
    """Checks in a second what would otherwise fail after the engine start or at the first sample.

    It checks the compiler, the cores and the sandbox, and runs each kernel's naive program.

    Raises:
        UsageError: a check of `choose_cores`, `Compiler.find` or `Checker` fails.
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
    """Returns the score of a program, with numeric parts and a note for people.

    Args:
        result: the result of the program. A NOISY result has no score.

    Returns:
        A score with the parts `outcome_*` (1 for the outcome, else 0). If the speed is known, it
        also has `gflops`, `speedup` (relative to the naive program), `peak_share`, `spread` and
        `speedup_spread` (half-widths of the 95% intervals of the time and the speed-up, relative).
        The facts are the machine and the techniques.
    """
    parts = {f"outcome_{name}": float(result.outcome == name) for name in OUTCOMES}
    if (timing := result.timing) is not None:
        speeds = {"gflops": timing.gflops, "speedup": timing.speedup, "peak_share": timing.roofline_fraction}
        parts |= speeds | {"spread": timing.relative_ci, "speedup_spread": timing.speedup_ci}
    return Score(reward, parts, result.note, {"machine": result.fingerprint, "techniques": ",".join(result.techniques)})


class MeasuredTask:
    """A task whose completions are C programs.

    A subclass implements `kernel`, `permitted` and `score` in place of `grade`.

    Args:
        bench: settings of the service, fields of `BenchConfig`.

    Raises:
        UsageError: `bench` is not a mapping, or has an unknown key or an invalid value.
    """

    kernels: Sequence[Kernel]  # all kernels of the problems

    def __init__(self, bench: Mapping[str, Any] | None = None) -> None:
        if not isinstance(bench or {}, Mapping):
            known = ", ".join(field.name for field in fields(BenchConfig))
            raise UsageError(f"bench={bench!r} must be a mapping with some of the keys {known}")
        self.bench = BenchConfig(**(bench or {}))

    @property
    def name(self) -> str:
        """The text after the class name in the run header."""
        return f"compiled with {self.bench.optimization}"

    def kernel(self, problem: Problem) -> Kernel:
        """Returns the kernel of a problem, one of `kernels`."""
        raise NotImplementedError

    def permitted(self, problem: Problem) -> Collection[str] | None:
        """Returns the permitted techniques of a problem, as in `Bench.submit`."""
        raise NotImplementedError

    def score(self, problem: Problem, result: Result) -> Score:
        """Returns the score of a program. The outcome is not NOISY."""
        raise NotImplementedError

    def check_grading(self, key: str, earlier_tasks: Sequence[Any]) -> None:
        """Checks that programs can be measured on this machine.

        All measured tasks of a run share the service and the settings of the first one.

        Args:
            key: config key of this task.
            earlier_tasks: the tasks of the run before this one.

        Raises:
            UsageError: the settings differ from the first task's, or `check_bench` fails.
        """
        first = next((task for task in earlier_tasks if isinstance(task, MeasuredTask)), self)
        if self.bench not in (first.bench, BenchConfig()):
            raise UsageError(
                f"{key}.bench is not that of the first task, whose service measures both tasks. Fix: remove this key"
            )
        self.bench = first.bench
        try:
            check_bench(self.bench, self.kernels)
        except UsageError as error:
            # `check_bench` does not know the config key of its settings.
            raise UsageError(f"{key}.bench: {str(error).removeprefix('bench.')}") from error

    def open_grader(self, open_graders: Sequence[Any], during_training: bool) -> "BenchGrader":
        """Starts the service, or shares the service of an earlier task.

        Args:
            during_training: whether programs are measured while this process trains. If so, this
                process avoids the timed cores.

        Raises:
            UsageError, SandboxError, BenchError: as in `open_bench`.
        """
        # Only the first grader pins this process to the other cores.
        if shared := next((grader for grader in open_graders if isinstance(grader, BenchGrader)), None):
            return BenchGrader(self, shared.bench)
        return BenchGrader(self, open_bench(self.bench), during_training)


class BenchGrader:
    """Implements the interface of `Grader` for a task whose completions are programs.

    Args:
        task: provides the kernel, the permitted techniques and the score of each program.
        bench: the service, which `close` closes. Several graders may share it.
        during_training: as in `MeasuredTask.open_grader`.
    """

    grades_groups = False

    def __init__(self, task: MeasuredTask, bench: Bench | RayBench, during_training: bool = False) -> None:
        self._task, self.bench = task, bench
        self._lock = Lock()
        self._counts: Counter[str] = Counter()  # since the last call of `metrics`
        self._last_counts = self._counts  # the counts that `metrics` returned last
        self._core_exclusion = ExitStack()
        cores = getattr(bench, "timed_cores", ())  # a RayBench times on other machines
        if during_training and cores:
            self._core_exclusion.enter_context(avoid_cores(cores))

    def submit(self, problem: Problem, text: str) -> "Future[list[Outcome]]":
        """Submits a text and returns at once."""
        outcome: Future[list[Outcome]] = Future()
        result_future = self.bench.submit(self._task.kernel(problem), text, permitted=self._task.permitted(problem))
        result_future.add_done_callback(lambda done: self._finish(problem, done, outcome))
        return outcome

    def metrics(self, refill: bool = False) -> dict[str, float]:
        """Returns the seconds spent on programs, and the shares of noisy and of cached results.

        The values cover the time since the last call and, in a refill, that call's interval.
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
        """Closes the service. A second call does nothing."""
        self._core_exclusion.close()
        self.bench.close()

    def _finish(self, problem: Problem, result_future: "Future[Result]", outcome: "Future[list[Outcome]]") -> None:
        # This runs in a thread of the service. The caller may have canceled the future.
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            outcome.set_result([self._to_outcome(problem, result_future.result())])
        except (BenchError, CancelledError) as error:
            outcome.set_result([Ungraded("infra_failed", str(error) or "cancelled")])
        except StopIteration as error:
            # The rollouts await the future, and asyncio refuses this error, so they would wait forever.
            outcome.set_exception(RuntimeError(f"{describe_function(self._task.score)} raised StopIteration({error})"))
        except Exception as error:  # noqa: BLE001 (user code of the task; the future propagates it)
            outcome.set_exception(error)

    def _to_outcome(self, problem: Problem, result: Result) -> Outcome:
        with self._lock:
            self._counts.update(programs=1, noisy=result.outcome == NOISY, cached=result.is_cached)
            if not result.is_cached:
                # A Counter adds any numbers, but its annotation accepts only integers.
                self._counts["seconds"] += sum(value for name, value in result.seconds.items() if name != "wait")  # pyright: ignore[reportArgumentType]
        # The machine is at fault, not the program: the sample stays out of the baseline.
        if result.outcome == NOISY:
            return Ungraded(NOISY, result.note)
        return check_outcome(self._task.score(problem, result), self._task.score)
