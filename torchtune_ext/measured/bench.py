"""The service that measures programs. `submit` returns a future for each text.

Each text is an asyncio task in a thread. Checks run in parallel in killable processes. Timings run
one at a time in a separate process. A program that was measured before, or is in flight, is not
measured again.

A fault of the program is its result. A fault of the machine (a killed process, a failed sandbox, an
exceeded internal deadline) is retried `MAX_RETRIES` times; then the future raises BenchError. A
disturbed timing is repeated once, while no check runs.
"""

import asyncio
import atexit
import logging
import os
import pickle
import threading
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Hashable
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import cloudpickle

from torchtune_ext.measured.check import KILLED_PREFIX, Checker, Deadlines, extract_code
from torchtune_ext.measured.child import START_TIMEOUT_S, ChildFailed
from torchtune_ext.measured.compiler import Compiler
from torchtune_ext.measured.kernel import Kernel, prototype
from torchtune_ext.measured.machine import (
    LOCK_TIMEOUT_S,
    choose_cores,
    lock_cores,
    machine_fingerprint,
    usable_cores,
    wait_until_idle,
)
from torchtune_ext.measured.probe import UnstableMachine
from torchtune_ext.measured.results import NOISY, BenchConfig, BenchError, Result
from torchtune_ext.measured.sandbox import PROBE_TIMEOUT_S, Sandbox, SandboxError
from torchtune_ext.measured.timing import MAX_OVERRUN_CALLS, MIN_BLOCK_CALLS, ProgramTimer
from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.processes import CRASH_KINDS, Closing, ProcessPool, closed_on_error

__all__ = ["Bench", "BenchConfig", "BenchError", "Result"]

log = logging.getLogger(__name__)

MAX_RETRIES = 2  # further attempts after a machine failure
OVERHEAD_S = 30.0  # seconds per program at most for inputs, references, comparisons, process starts
CLOSE_TIMEOUT_S = 3.0  # seconds for processes to end by themselves
SHUTDOWN_TIMEOUT_S = 40.0  # seconds for a graceful shutdown of the service
CHECK_STAGE, TIME_STAGE = "check", "time"
MAX_RESULTS = 16_384  # cached results
TIMING_GAP_S = 0.03  # seconds between two timings; other processes poll the core locks every 0.02 s
# numpy's own threads in the worker processes would run on the timed cores.
SINGLE_THREAD_ENV: dict[str, str] = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class BenchService(Closing):
    """A thread with an asyncio loop that runs one task per text. The methods are thread-safe.

    A subclass opens and closes its resources in `_serve`, which sets `_started`, and measures in
    `_measure`. It calls this constructor last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards `_close_reason`, so that no text is accepted after the end
        self._close_reason: BenchError | None = None  # set once the service stops accepting texts
        self._pid = os.getpid()
        self._started: Future[None] = Future()
        # Created here, so that its error (too many open files) reaches the caller.
        self._loop = asyncio.new_event_loop()
        # The kernel kills a child when the thread that started it ends; this one runs to `close`.
        self._thread = threading.Thread(target=self._run, name="bench", daemon=True)
        self._thread.start()
        with closed_on_error(self):
            self._started.result()

    def submit(self, kernel: Kernel, text: str, permitted: Collection[str] | None = None) -> "Future[Result]":
        """Submits a model's answer and returns at once.

        Canceling the future does not stop the measurement. The future raises BenchError if the
        service fails.

        Args:
            permitted: techniques (`techniques.TECHNIQUES`) that the program may use. Other
                techniques are forbidden, and the result lists the techniques of a correct program.
                None disables the check.

        Raises:
            BenchError: this object is closed, has failed, or belongs to the parent of this fork.
            UsageError: the kernel cannot be pickled.
        """
        if os.getpid() != self._pid:
            # A fork lacks the serving thread, and its copy of the lock may stay locked forever.
            raise BenchError(
                f"this Bench was created by process {self._pid}, before a fork. Fix: create one in each process"
            )
        try:
            kernel_bytes = cloudpickle.dumps(kernel)
        except Exception as error:
            # Pickling runs the user's code, which may raise any error.
            raise UsageError(
                f"kernel {type(kernel).__name__} cannot be pickled: {type(error).__name__}: {error}. "
                "Fix: keep open files, locks and functions out of its attributes"
            ) from error
        allowed = None if permitted is None else tuple(sorted(permitted))
        with self._lock:
            if self._close_reason is not None:
                raise self._close_reason
            return asyncio.run_coroutine_threadsafe(
                self._measure_or_fail(kernel, kernel_bytes, text, allowed), self._loop
            )

    def close(self) -> None:
        """Ends all processes and removes all folders. Pending futures raise BenchError.

        A second call, or a call in a forked process, does nothing.
        """
        if os.getpid() != self._pid:
            return
        self._stop_accepting(BenchError(f"the {type(self).__name__} is closed"))
        with suppress(RuntimeError):
            # The loop is already closed if the service has failed.
            if self._serve_task is not None:
                self._loop.call_soon_threadsafe(self._serve_task.cancel)
        # A future's callback, which runs in the thread, may call this. A thread cannot join itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=SHUTDOWN_TIMEOUT_S)

    async def _serve(self) -> None:
        raise NotImplementedError

    async def _measure(
        self, kernel: Kernel, kernel_bytes: bytes, text: str, permitted: tuple[str, ...] | None
    ) -> Result:
        """Measures one text. `kernel_bytes` is the pickled kernel."""
        raise NotImplementedError

    def _stop_accepting(self, reason: BenchError) -> None:
        """Stops accepting texts. Only the first reason is kept."""
        with self._lock:
            self._close_reason = self._close_reason or reason

    def _run(self) -> None:
        # `close` cancels the serving task.
        with suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve_until_closed())

    async def _serve_until_closed(self) -> None:
        self._serve_task = asyncio.current_task()
        try:
            await self._serve()
        except BenchError as error:
            self._stop_accepting(error)
        except Exception as error:
            # Every pending future must receive the error, whatever it is.
            log.exception("bench: the thread failed")
            self._stop_accepting(BenchError(f"the thread of the Bench failed: {error!r}"))
        finally:
            # In `_measure_or_fail`, the canceled tasks raise `_close_reason`.
            tasks = asyncio.all_tasks() - {self._serve_task}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not self._started.done():
                self._started.set_exception(self._close_reason)

    async def _measure_or_fail(self, *args: Any) -> Result:
        try:
            return await self._measure(*args)
        except (asyncio.CancelledError, BenchError):
            if self._close_reason is not None:
                raise self._close_reason from None
            raise


class StageScheduler:
    """Schedules checks in parallel and timings one at a time, each kind in FIFO order.

    An exclusive timing (`is_alone`) waits for the earlier checks, and later checks wait for it.

    Args:
        workers: number of concurrent checks.
    """

    def __init__(self, workers: int) -> None:
        self.running: Counter[str] = Counter()  # active turns by stage
        self._workers, self._worker_slots, self._fifo_lock = workers, asyncio.Semaphore(workers), asyncio.Lock()
        self._timing_lock = asyncio.Lock()

    @asynccontextmanager
    async def acquire(self, stage: str, is_alone: bool = False) -> AsyncIterator[None]:
        """Waits for a turn and holds it during the block."""
        async with AsyncExitStack() as stack:
            if stage == TIME_STAGE:
                await stack.enter_async_context(self._timing_lock)
            # An exclusive timing takes the slots of all checks, even on other cores: they share
            # caches and memory, and two cores of a virtual machine are often one physical core.
            async with self._fifo_lock:
                for _ in range(1 if stage == CHECK_STAGE else self._workers if is_alone else 0):
                    await stack.enter_async_context(self._worker_slots)
            self.running[stage] += 1
            stack.callback(self.running.subtract, [stage])
            yield


class Bench(BenchService):
    """Measures programs on this machine.

    Create it after the engine of a run, so that it can choose cores that the engine does not use.

    Args:
        settings: fields of `BenchConfig`. `address` is for `RayBench` only.

    Raises:
        UsageError: a setting is invalid, the compiler is missing, or a core does not exist.
        SandboxError: this machine lacks a required sandbox layer.
    """

    def __init__(self, deadlines: Deadlines | None = None, **settings: Any) -> None:
        config = BenchConfig(**settings)
        usable = usable_cores()
        timed = tuple(choose_cores(config.cores, config.threads))
        checked = tuple(sorted(usable - set(timed)) or sorted(usable))
        toolchain = Compiler.find(config.compiler)
        # A machine without a working sandbox fails here and not at each program.
        Sandbox(toolchain.path, config.namespaces).close()
        self.timed_cores = timed  # a trainer avoids them with `machine.avoid_cores`
        d = deadlines or Deadlines()
        self._fingerprint = f"{machine_fingerprint()}, {config.optimization}"
        # Programs in flight, and programs with a deterministic result.
        self._cache: dict[Hashable, asyncio.Task[Result]] = {}
        self._shares_cores = bool(set(checked) & set(timed))  # whether checks and timings use the same cores
        workers = config.workers or len(checked)
        self._scheduler = StageScheduler(workers)
        settings = {name: getattr(config, name) for name in ("optimization", "threads", "namespaces")}
        make = partial(Checker, compiler=toolchain, deadlines=d, **settings)
        self._targets = {
            CHECK_STAGE: (partial(check_program, make, checked), workers, "checking"),
            TIME_STAGE: (partial(time_program, make, checked, timed, config.budget_s), 1, "timing"),
        }
        check_s = d.screen_s + d.compile_s + START_TIMEOUT_S + d.load_s + 2 * d.verify_s + OVERHEAD_S
        # A kernel's first program waits for its checker, which probes the machine and checks it.
        self._timeouts = {CHECK_STAGE: 4 * PROBE_TIMEOUT_S + 2 * check_s}
        # A timing waits for its cores, for engines, and for engines again after the timer was
        # created. At the end of the budget, a last block may begin, with calls of the reference.
        calls = MAX_OVERRUN_CALLS + MIN_BLOCK_CALLS
        timed_s = 3 * LOCK_TIMEOUT_S + START_TIMEOUT_S + d.load_s + config.budget_s + calls * d.verify_s + OVERHEAD_S
        self._timeouts[TIME_STAGE] = self._timeouts[CHECK_STAGE] + timed_s
        self._pools: dict[str, ProcessPool] = {}
        super().__init__()

    async def _serve(self) -> None:
        try:
            for stage, (target, number, name) in self._targets.items():
                self._pools[stage] = ProcessPool(
                    cloudpickle.dumps(target), number, name, "setting", variables=SINGLE_THREAD_ENV
                )
            self._started.set_result(None)
            await self._loop.create_future()  # until `close`
        finally:
            for pool in self._pools.values():
                pool.close(self._close_reason or BenchError("the Bench could not start"), CLOSE_TIMEOUT_S)

    async def _measure(
        self, kernel: Kernel, kernel_bytes: bytes, text: str, permitted: tuple[str, ...] | None
    ) -> Result:
        # The key holds everything that a result depends on.
        kernel_parts = kernel_key(kernel), prototype(kernel), kernel.naive, tuple(kernel.forbidden)
        key = *kernel_parts, extract_code(text), permitted
        # Several callers may wait for the same program. The shields keep one canceled caller from
        # canceling the shared task.
        if (task := self._cache.get(key)) is not None:
            return replace(await asyncio.shield(task), is_cached=True)
        task = self._cache[key] = asyncio.create_task(self._check_and_time(kernel, kernel_bytes, text, permitted))
        task.add_done_callback(partial(self._evict, key))
        return await asyncio.shield(task)

    def _evict(self, key: Hashable, task: "asyncio.Task[Result]") -> None:
        """Evicts a program with a nondeterministic result, or the oldest one of a full cache."""
        if task.cancelled() or task.exception() is not None or not is_deterministic(task.result()):
            self._cache.pop(key, None)
        elif len(self._cache) > MAX_RESULTS:
            del self._cache[next(iter(self._cache))]

    async def _check_and_time(self, kernel: Kernel, kernel_bytes: bytes, text: str, permitted: Any) -> Result:
        """Checks a program, and times it if it is correct."""
        seconds: Counter[str] = Counter()
        kernel_args = kernel_key(kernel), kernel_bytes
        async with self._scheduler.acquire(CHECK_STAGE):
            checked, library = await self._call_with_retries(CHECK_STAGE, kernel.name, *kernel_args, text, permitted)
        result = checked
        seconds.update(checked.seconds)
        # A disturbed timing is repeated once, exclusively.
        for is_alone in (self._shares_cores, True) if checked.outcome == "ok" else ():
            async with self._scheduler.acquire(TIME_STAGE, is_alone):
                result = await self._call_with_retries(TIME_STAGE, kernel.name, *kernel_args, kernel.name, library)
            seconds.update(result.seconds)
            if result.outcome != NOISY:
                break
        found = {"techniques": checked.techniques, "fingerprint": self._fingerprint}
        return replace(result, seconds=dict(seconds), **found)

    async def _call_with_retries(self, stage: str, kernel: str, *what: Any) -> Any:
        """Calls a worker process, and retries after a machine failure.

        Raises:
            BenchError: the machine failed `MAX_RETRIES + 1` times, or the failure is final.
        """

        def as_failure(kind: str, cause: str) -> MachineFailure:
            # An error raised by code would recur. A crash or a hang is the machine's fault.
            return MachineFailure(
                f"the {stage} process died: {cause}" if kind in CRASH_KINDS else cause, is_final=kind == "raised"
            )

        for attempt in count(1):
            try:
                answer = await asyncio.wrap_future(self._pools[stage].submit(what, self._timeouts[stage], as_failure))
            except Exception as error:
                raise BenchError(f"the worker processes of the Bench have exited: {error}") from error
            if not isinstance(answer, MachineFailure):
                return answer
            attempts = f" (attempt {attempt})" if attempt > 1 else ""
            if answer.is_final or attempt > MAX_RETRIES:
                raise BenchError(f"the {stage} of a program for {kernel} failed{attempts}: {answer.cause}")
            log.warning("bench: the %s of a program is repeated%s: %s", stage, attempts, answer.cause)


def is_deterministic(result: Result) -> bool:
    """Returns whether another attempt would give the same result."""
    # The other results depend on the state of the machine at that moment.
    is_passing = result.outcome in ("timeout", NOISY) or result.note.startswith(KILLED_PREFIX)
    return not is_passing and not (result.timing is not None and result.timing.disturbed_fraction)


def kernel_key(kernel: Kernel) -> str:
    """Returns a name that is unique per kernel and timed size."""
    kind = type(kernel)
    return f"{kind.__module__}.{kind.__qualname__} {kernel.name} {dict(kernel.timed)}"


# Worker processes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MachineFailure:
    """The machine failed; the result of the program is unknown."""

    cause: str
    is_final: bool  # a retry would not help


class ResourceCache(dict[str, Any]):
    """Per-kernel resources of a process, kept between calls and closed on `drop` and at exit."""

    def __init__(self) -> None:
        super().__init__()
        atexit.register(self.close)

    def drop(self, key: str) -> None:
        if key in self:
            self.pop(key).close()

    def close(self) -> None:
        for key in list(self):
            self.drop(key)


CHECKERS, TIMERS = ResourceCache(), ResourceCache()


def check_program(
    make_checker: Callable[..., Checker],
    cores: tuple[int, ...],
    key: str,
    kernel: bytes,
    text: str,
    permitted: tuple[str, ...] | None = None,
) -> tuple[Result, bytes] | MachineFailure:
    """Checks the program in a model's answer.

    Args:
        make_checker: creates the checker of a kernel.
        cores: cores to run on.
        key: unique name of the kernel.
        kernel: the pickled kernel.
        text: the model's answer.
        permitted: as in `Bench.submit`.

    Returns:
        The result, and the compressed library; or the failure of the machine.
    """
    try:
        os.sched_setaffinity(0, cores)
        if key not in CHECKERS:
            CHECKERS[key] = make_checker(pickle.loads(kernel), cores=cores)
        result, library = CHECKERS[key].check_with_library(text, permitted=permitted)
        return result, zlib.compress(library, 1)
    except (SandboxError, OSError) as error:
        CHECKERS.drop(key)
        return _machine_failure(error)


def time_program(
    make_checker: Callable[..., Checker],
    check_cores: tuple[int, ...],
    cores: tuple[int, ...],
    budget_s: float,
    key: str,
    kernel: bytes,
    name: str,
    library: bytes,
) -> Result | MachineFailure:
    """Times a library that `check_program` accepted, on `cores`.

    The seconds of the result are "wait" (until the cores are free and idle, and their peak is
    known) and "time".
    """
    start, begun_at, outcome, note, timing = time.monotonic(), None, "ok", "", None
    if not TIMERS:
        # This process may have inherited the affinity of a parent that avoids the timed cores.
        os.sched_setaffinity(0, {*check_cores, *cores})
    # Between two timings, other processes that wait for these cores get a turn.
    time.sleep(TIMING_GAP_S)
    try:
        with lock_cores(cores, LOCK_TIMEOUT_S):
            wait_until_idle(cores, LOCK_TIMEOUT_S)
            if key not in TIMERS:
                TIMERS[key] = ProgramTimer(make_checker(pickle.loads(kernel), cores=cores), budget_s)
                # An engine may have become busy while the timer was created.
                wait_until_idle(cores, LOCK_TIMEOUT_S)
            begun_at = time.monotonic()
            timing = TIMERS[key].time_library(zlib.decompress(library))
    except UnstableMachine as error:
        outcome, note = NOISY, str(error)
    except ChildFailed as failed:
        outcome, note = failed.outcome, str(failed)
    except (SandboxError, OSError) as error:
        TIMERS.drop(key)
        return _machine_failure(error)
    if timing is not None and timing.is_noisy:
        note = (
            f"the machine is disturbed by other processes: the speed is unknown after {budget_s:g} s "
            f"(95% interval ±{timing.relative_ci:.1%})"
        )
        outcome, timing = NOISY, None
    now = time.monotonic()
    # On an unstable machine, the timing never begins.
    begun_at = begun_at or now
    return Result(name, outcome, "time", note, timing, {"wait": begun_at - start, "time": now - begun_at})


def _machine_failure(error: Exception) -> MachineFailure:
    # A timeout of a core lock or of a busy engine is final: a retry would wait as long again.
    return MachineFailure(f"{type(error).__name__}: {error}", isinstance(error, TimeoutError))
