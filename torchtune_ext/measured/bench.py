"""The service that measures programs: texts come in, and each result comes out as soon as it is there.

Each text is a task of an asyncio loop in a thread. Checks run in parallel, in processes that can be killed, and timings one
after the other, in a process of their own. A program that was measured before, or is under way, is not measured again.

What a program does wrong is its result. What the machine does wrong (a process was killed, a sandbox failed, a deadline of ours
passed) is tried again `RETRIES` times, and then the future raises BenchError. A timing that was disturbed is made once more,
while no check runs beside it.
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

MAX_RETRIES = 2  # further attempts after the machine has failed
OVERHEAD_S = 30.0  # seconds of our own work on a program at most: inputs, references, comparisons, starts of processes
CLOSE_TIMEOUT_S = 3.0  # seconds for processes to end by themselves
SHUTDOWN_TIMEOUT_S = 40.0  # seconds for a service to end in good order
CHECK_STAGE, TIME_STAGE = "check", "time"
MAX_RESULTS = 16_384  # results that are kept for equal programs
TIMING_GAP_S = 0.03  # seconds between two timings, since others who wait for the cores look at them every 0.02 s
# numpy's own threads in the processes would run on the cores that are timed on.
SINGLE_THREAD_ENV: dict[str, str] = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class BenchService(Closing):
    """A thread with an asyncio loop, in which each text is a task. Any thread may use it.

    A subclass opens and closes in `_serve`, which sets `_started`, and measures in `_measure`. It calls this constructor last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards `_ended`, so that no text is accepted after the end
        self._close_reason: BenchError | None = None  # the reason why no text is accepted any more
        self._pid = os.getpid()
        self._started: Future[None] = Future()
        # Made here, where an error of it (too many open files) has somebody who hears of it.
        self._loop = asyncio.new_event_loop()
        # The kernel kills a process when the thread that has started it ends. So this thread lives as long as the object.
        self._thread = threading.Thread(target=self._run, name="bench", daemon=True)
        self._thread.start()
        with closed_on_error(self):
            self._started.result()

    def submit(self, kernel: Kernel, text: str, permitted: Collection[str] | None = None) -> "Future[Result]":
        """Hands in a model's answer and returns at once. A program whose future is canceled is measured all the same.

        The future raises BenchError if the service fails, and says how.

        Args:
            permitted: the techniques (`techniques.TECHNIQUES`) that the program may use. A program with others is forbidden,
                and the result of a right one names those that it has. None: nobody looks for them.

        Raises:
            BenchError: this object is closed, has failed, or belongs to the process that this one was forked from.
            ValueError: the kernel cannot be pickled.
        """
        if os.getpid() != self._pid:
            # A fork has no thread that would answer, and its copy of the lock may be held for ever.
            raise BenchError(f"this Bench was made by process {self._pid}, before a fork: make one in each process")
        try:
            kernel_bytes = cloudpickle.dumps(kernel)
        except Exception as error:
            # Pickling runs the user's code, which may raise any error.
            raise UsageError(
                f"kernel {type(kernel).__name__} cannot be sent to another process: {type(error).__name__}: {error}. "
                "Keep open files, locks and functions out of its attributes"
            ) from error
        allowed = None if permitted is None else tuple(sorted(permitted))
        with self._lock:
            if self._close_reason is not None:
                raise self._close_reason
            return asyncio.run_coroutine_threadsafe(
                self._measure_or_fail(kernel, kernel_bytes, text, allowed), self._loop
            )

    def close(self) -> None:
        """Ends all processes and removes all folders. Futures that are not done raise BenchError.

        A second call does nothing, nor does one in a process that was forked.
        """
        if os.getpid() != self._pid:
            return
        self._stop_accepting(BenchError(f"the {type(self).__name__} is closed"))
        with suppress(RuntimeError):
            # The loop is closed if the service has failed before.
            if self._serve_task is not None:
                self._loop.call_soon_threadsafe(self._serve_task.cancel)
        # A callback of a future, which runs in the thread, may call this. A thread cannot join itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=SHUTDOWN_TIMEOUT_S)

    async def _serve(self) -> None:
        raise NotImplementedError

    async def _measure(
        self, kernel: Kernel, kernel_bytes: bytes, text: str, permitted: tuple[str, ...] | None
    ) -> Result:
        """Measures one text; `sent` is the kernel, pickled."""
        raise NotImplementedError

    def _stop_accepting(self, reason: BenchError) -> None:
        """Records why no text is accepted any more. Only the first reason counts."""
        with self._lock:
            self._close_reason = self._close_reason or reason

    def _run(self) -> None:
        # `close` cancels it.
        with suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve_until_closed())

    async def _serve_until_closed(self) -> None:
        self._serve_task = asyncio.current_task()
        try:
            await self._serve()
        except BenchError as error:
            self._stop_accepting(error)
        except Exception as error:
            # Everybody who waits for a result has to get the error, whatever it is.
            log.exception("bench: the thread failed")
            self._stop_accepting(BenchError(f"the thread that serves the bench has failed: {error!r}"))
        finally:
            # In `_answer`, the canceled tasks raise `_ended`.
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
    """Says when a check or a timing begins: checks run in parallel, timings one after the other, each kind in order.

    A timing that is *alone* waits until the earlier checks have ended, and later checks wait for it.

    Args:
        workers: how many checks run at a time.
    """

    def __init__(self, workers: int) -> None:
        self.running: Counter[str] = Counter()  # turns that last, by their stage
        self._workers, self._worker_slots, self._fifo_lock = workers, asyncio.Semaphore(workers), asyncio.Lock()
        self._timing_lock = asyncio.Lock()

    @asynccontextmanager
    async def acquire(self, stage: str, is_alone: bool = False) -> AsyncIterator[None]:
        """Waits for a turn, which lasts as long as the block."""
        async with AsyncExitStack() as stack:
            if stage == TIME_STAGE:
                await stack.enter_async_context(self._timing_lock)
            # A timing that is alone takes the place of every check, also of those on other cores. These share caches and
            # memory with the timed core, and two cores of a virtual machine are often one.
            async with self._fifo_lock:
                for _ in range(1 if stage == CHECK_STAGE else self._workers if is_alone else 0):
                    await stack.enter_async_context(self._worker_slots)
            self.running[stage] += 1
            stack.callback(self.running.subtract, [stage])
            yield


class Bench(BenchService):
    """Measures programs on this machine.

    Make it when the engine of a run has started, so that it can choose cores that the engine does not use.

    Args:
        deadlines: seconds that each stage of a check may take.
        settings: those of `BenchConfig`, of which `address` is for `RayBench` only.

    Raises:
        ValueError: a setting is unknown or out of range, there is no compiler, or a core does not exist.
        SandboxError: this machine cannot lock programs in.
    """

    def __init__(self, deadlines: Deadlines | None = None, **settings: Any) -> None:
        config = BenchConfig(**settings)
        usable = usable_cores()
        timed = tuple(choose_cores(config.cores, config.threads))
        checked = tuple(sorted(usable - set(timed)) or sorted(usable))
        toolchain = Compiler.find(config.compiler)
        # A machine that cannot lock programs in fails here, and not at each program.
        Sandbox(toolchain.path, config.namespaces).close()
        self.timed_cores = timed  # a trainer keeps off them with `machine.kept_off`
        d = deadlines or Deadlines()
        self._fingerprint = f"{machine_fingerprint()}, {config.optimization}"
        # The programs that are under way, and those whose result another attempt would repeat.
        self._cache: dict[Hashable, asyncio.Task[Result]] = {}
        self._shares_cores = bool(set(checked) & set(timed))  # checks and timings run on the same cores
        workers = config.workers or len(checked)
        self._scheduler = StageScheduler(workers)
        settings = {name: getattr(config, name) for name in ("optimization", "threads", "namespaces")}
        make = partial(Checker, compiler=toolchain, deadlines=d, **settings)
        self._targets = {
            CHECK_STAGE: (partial(check_program, make, checked), workers, "checking"),
            TIME_STAGE: (partial(time_program, make, checked, timed, config.budget_s), 1, "timing"),
        }
        check_s = d.screen_s + d.compile_s + START_TIMEOUT_S + d.load_s + 2 * d.verify_s + OVERHEAD_S
        # The first program of a kernel waits for its checker, which probes the machine and checks the kernel's own program.
        self._timeouts = {CHECK_STAGE: 4 * PROBE_TIMEOUT_S + 2 * check_s}
        # The timing waits for its cores, for engines, and for engines once more after the timer was made. When the budget
        # ends, a last block may begin, which has calls of the reference as well.
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
            await self._loop.create_future()  # until it is closed
        finally:
            for pool in self._pools.values():
                pool.close(self._close_reason or BenchError("the Bench could not start"), CLOSE_TIMEOUT_S)

    async def _measure(
        self, kernel: Kernel, kernel_bytes: bytes, text: str, permitted: tuple[str, ...] | None
    ) -> Result:
        # Everything that a result depends on.
        key = (
            kernel_key(kernel),
            prototype(kernel),
            kernel.naive,
            tuple(kernel.forbidden),
            extract_code(text),
            permitted,
        )
        # Others may wait for the same program, so one who gives up must not cancel its task. Hence the shields.
        if (task := self._cache.get(key)) is not None:
            return replace(await asyncio.shield(task), is_cached=True)
        task = self._cache[key] = asyncio.create_task(self._check_and_time(kernel, kernel_bytes, text, permitted))
        task.add_done_callback(partial(self._evict, key))
        return await asyncio.shield(task)

    def _evict(self, key: Hashable, task: "asyncio.Task[Result]") -> None:
        """Forgets a program of which another attempt may end otherwise, and the oldest one if there are too many."""
        if task.cancelled() or task.exception() is not None or not is_deterministic(task.result()):
            self._cache.pop(key, None)
        elif len(self._cache) > MAX_RESULTS:
            del self._cache[next(iter(self._cache))]

    async def _check_and_time(self, kernel: Kernel, kernel_bytes: bytes, text: str, permitted: Any) -> Result:
        """Has a program checked, and timed if it is right."""
        seconds: Counter[str] = Counter()
        kernel_args = kernel_key(kernel), kernel_bytes
        async with self._scheduler.acquire(CHECK_STAGE):
            checked, library = await self._call_with_retries(CHECK_STAGE, kernel.name, *kernel_args, text, permitted)
        result = checked
        seconds.update(checked.seconds)
        # A timing that was disturbed is made once more.
        for is_alone in (self._shares_cores, True) if checked.outcome == "ok" else ():
            async with self._scheduler.acquire(TIME_STAGE, is_alone):
                result = await self._call_with_retries(TIME_STAGE, kernel.name, *kernel_args, kernel.name, library)
            seconds.update(result.seconds)
            if result.outcome != NOISY:
                break
        found = {"techniques": checked.techniques, "fingerprint": self._fingerprint}
        return replace(result, seconds=dict(seconds), **found)

    async def _call_with_retries(self, stage: str, kernel: str, *what: Any) -> Any:
        """Calls one of the processes, and again if the machine fails.

        Raises:
            BenchError: it has failed too often.
        """

        def as_failure(kind: str, cause: str) -> MachineFailure:
            # An error that a kernel or our own code raises would come again. If a process dies or hangs, it is the machine.
            return MachineFailure(
                f"the {stage} process died: {cause}" if kind in CRASH_KINDS else cause, is_final=kind == "raised"
            )

        for attempt in count(1):
            try:
                answer = await asyncio.wrap_future(self._pools[stage].submit(what, self._timeouts[stage], as_failure))
            except Exception as error:
                raise BenchError(f"the processes of the Bench have ended: {error}") from error
            if not isinstance(answer, MachineFailure):
                return answer
            attempts = f" (attempt {attempt})" if attempt > 1 else ""
            if answer.is_final or attempt > MAX_RETRIES:
                raise BenchError(f"the {stage} of a program for {kernel} failed{attempts}: {answer.cause}")
            log.warning("bench: the %s of a program is repeated%s: %s", stage, attempts, answer.cause)


def is_deterministic(result: Result) -> bool:
    """Tells whether another attempt would end in the same way."""
    # The other results say something about the machine at that moment.
    is_passing = result.outcome in ("timeout", NOISY) or result.note.startswith(KILLED_PREFIX)
    return not is_passing and not (result.timing is not None and result.timing.disturbed_fraction)


def kernel_key(kernel: Kernel) -> str:
    """Returns a name that tells kernels and their timed sizes apart."""
    kind = type(kernel)
    return f"{kind.__module__}.{kind.__qualname__} {kernel.name} {dict(kernel.timed)}"


# What the processes do ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MachineFailure:
    """The machine failed, and nothing is known about the program."""

    cause: str
    is_final: bool  # another attempt would not help


class ResourceCache(dict[str, Any]):
    """What a process keeps for each kernel from one call to the next. It is closed when it is dropped, and at the end."""

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
    """Checks the program in a text on these cores. Returns its library, too, compressed.

    Args:
        key: tells kernels apart.
        kernel: pickled.
        permitted: as in `Bench.submit`.
    """
    try:
        os.sched_setaffinity(0, cores)
        if key not in CHECKERS:
            CHECKERS[key] = make_checker(pickle.loads(kernel), cores=cores)
        result, library = CHECKERS[key].checked(text, permitted=permitted)
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
    """Times a library that `check_program` has found right, of the kernel with this name, on `cores`.

    The seconds of the result are "wait", until the cores were idle, free, and their peak known, and "time".
    """
    start, begun_at, outcome, note, timing = time.monotonic(), None, "ok", "", None
    if not TIMERS:
        # The process that started this one may keep off the timed cores (`kept_off`), and this one has inherited that.
        os.sched_setaffinity(0, {*check_cores, *cores})
    # Between two timings, others who wait for these cores get a turn.
    time.sleep(TIMING_GAP_S)
    try:
        with lock_cores(cores, LOCK_TIMEOUT_S):
            wait_until_idle(cores, LOCK_TIMEOUT_S)
            if key not in TIMERS:
                TIMERS[key] = ProgramTimer(make_checker(pickle.loads(kernel), cores=cores), budget_s)
                # An engine may have begun to compute while the timer was made.
                wait_until_idle(cores, LOCK_TIMEOUT_S)
            begun_at = time.monotonic()
            timing = TIMERS[key].time(zlib.decompress(library))
    except UnstableMachine as error:
        outcome, note = NOISY, str(error)
    except ChildFailed as failed:
        outcome, note = failed.outcome, str(failed)
    except (SandboxError, OSError) as error:
        TIMERS.drop(key)
        return _machine_failure(error)
    if timing is not None and timing.is_noisy:
        note = (
            f"others disturb the machine: after {budget_s:g} s nothing is known of its speed "
            f"(what was timed has an interval of ±{timing.spread:.1%})"
        )
        outcome, timing = NOISY, None
    now = time.monotonic()
    # On a machine that varies too much, the timing never begins.
    begun_at = begun_at or now
    return Result(name, outcome, "time", note, timing, {"wait": begun_at - start, "time": now - begun_at})


def _machine_failure(error: Exception) -> MachineFailure:
    # Whoever has waited in vain for another timing, or for an engine, does not wait that long once more.
    return MachineFailure(f"{type(error).__name__}: {error}", isinstance(error, TimeoutError))
