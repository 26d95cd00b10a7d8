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
from typing import Any, Self

import cloudpickle

from torchtune_ext.measured.check import KILLED, Checker, Deadlines, extract
from torchtune_ext.measured.child import START_S, ChildFailed
from torchtune_ext.measured.compiler import Compiler
from torchtune_ext.measured.kernel import Kernel, prototype
from torchtune_ext.measured.machine import LOCK_S, alone_on, choose_cores, fingerprint, usable_cores, wait_until_idle
from torchtune_ext.measured.probe import Wild
from torchtune_ext.measured.results import NOISY, BenchConfig, BenchError, Result
from torchtune_ext.measured.sandbox import PROBE_S, Sandbox, SandboxError
from torchtune_ext.measured.timing import LEAST_CALLS, MOST_LATE_CALLS, Timer
from torchtune_ext.run.errors import Mistake
from torchtune_ext.run.processes import DEATHS, Processes

__all__ = ["Bench", "BenchConfig", "BenchError", "Result"]

log = logging.getLogger(__name__)

RETRIES = 2  # further attempts after the machine has failed
OWN_S = 30.0  # seconds of our own work on a program at most: inputs, references, comparisons, starts of processes
CLOSE_S = 3.0  # seconds for processes to end by themselves
END_S = 40.0  # seconds for a service to end in good order
CHECK, TIME = "check", "time"
MAX_RESULTS = 16_384  # results that are kept for equal programs
TURN_S = 0.03  # seconds between two timings, since others who wait for the cores look at them every 0.02 s
# numpy's own threads in the processes would run on the cores that are timed on.
VARIABLES: dict[str, str] = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Service:
    """A thread with an asyncio loop, in which each text is a task. Any thread may use it.

    A subclass opens and closes in `_serve`, which sets `_started`, and measures in `_measure`. It calls this constructor last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards `_ended`, so that no text is accepted after the end
        self._ended: BenchError | None = None  # the reason why no text is accepted any more
        self._pid = os.getpid()
        self._started: Future[None] = Future()
        # Made here, where an error of it (too many open files) has somebody who hears of it.
        self._loop = asyncio.new_event_loop()
        # The kernel kills a process when the thread that has started it ends. So this thread lives as long as the object.
        self._thread = threading.Thread(target=self._run, name="bench", daemon=True)
        self._thread.start()
        try:
            self._started.result()
        except BaseException:
            self.close()
            raise

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
            sent = cloudpickle.dumps(kernel)
        except Exception as error:
            # Pickling runs the user's code, which may raise any error.
            raise Mistake(
                f"kernel {type(kernel).__name__} cannot be sent to another process: {type(error).__name__}: {error}. "
                "Keep open files, locks and functions out of its attributes"
            ) from error
        allowed = None if permitted is None else tuple(sorted(permitted))
        with self._lock:
            if self._ended is not None:
                raise self._ended
            return asyncio.run_coroutine_threadsafe(self._answer(kernel, sent, text, allowed), self._loop)

    def close(self) -> None:
        """Ends all processes and removes all folders. Futures that are not done raise BenchError.

        A second call does nothing, nor does one in a process that was forked.
        """
        if os.getpid() != self._pid:
            return
        self._end(BenchError(f"the {type(self).__name__} is closed"))
        with suppress(RuntimeError):
            # The loop is closed if the service has failed before.
            if self._serving is not None:
                self._loop.call_soon_threadsafe(self._serving.cancel)
        # A callback of a future, which runs in the thread, may call this. A thread cannot join itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=END_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _serve(self) -> None:
        raise NotImplementedError

    async def _measure(self, kernel: Kernel, sent: bytes, text: str, permitted: tuple[str, ...] | None) -> Result:
        """Measures one text; `sent` is the kernel, pickled."""
        raise NotImplementedError

    def _end(self, reason: BenchError) -> None:
        """Records why no text is accepted any more. Only the first reason counts."""
        with self._lock:
            self._ended = self._ended or reason

    def _run(self) -> None:
        # `close` cancels it.
        with suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        self._serving = asyncio.current_task()
        try:
            await self._serve()
        except BenchError as error:
            self._end(error)
        except Exception as error:
            # Everybody who waits for a result has to get the error, whatever it is.
            log.exception("bench: the thread failed")
            self._end(BenchError(f"the thread that serves the bench has failed: {error!r}"))
        finally:
            # In `_answer`, the canceled tasks raise `_ended`.
            tasks = asyncio.all_tasks() - {self._serving}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not self._started.done():
                self._started.set_exception(self._ended)

    async def _answer(self, *what: Any) -> Result:
        try:
            return await self._measure(*what)
        except (asyncio.CancelledError, BenchError):
            if self._ended is not None:
                raise self._ended from None
            raise


class Turns:
    """Says when a check or a timing begins: checks run in parallel, timings one after the other, each kind in order.

    A timing that is *alone* waits until the earlier checks have ended, and later checks wait for it.

    Args:
        workers: how many checks run at a time.
    """

    def __init__(self, workers: int) -> None:
        self.running: Counter[str] = Counter()  # turns that last, by their stage
        self._workers, self._free, self._order = workers, asyncio.Semaphore(workers), asyncio.Lock()
        self._timer = asyncio.Lock()

    @asynccontextmanager
    async def take(self, stage: str, is_alone: bool = False) -> AsyncIterator[None]:
        """Waits for a turn, which lasts as long as the block."""
        async with AsyncExitStack() as stack:
            if stage == TIME:
                await stack.enter_async_context(self._timer)
            # A timing that is alone takes the place of every check, also of those on other cores. These share caches and
            # memory with the timed core, and two cores of a virtual machine are often one.
            async with self._order:
                for _ in range(1 if stage == CHECK else self._workers if is_alone else 0):
                    await stack.enter_async_context(self._free)
            self.running[stage] += 1
            stack.callback(self.running.subtract, [stage])
            yield


class Bench(Service):
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
        self._fingerprint = f"{fingerprint()}, {config.optimization}"
        # The programs that are under way, and those whose result another attempt would repeat.
        self._known: dict[Hashable, asyncio.Task[Result]] = {}
        self._is_shared = bool(set(checked) & set(timed))  # checks and timings run on the same cores
        workers = config.workers or len(checked)
        self._turns = Turns(workers)
        settings = {name: getattr(config, name) for name in ("optimization", "threads", "namespaces")}
        make = partial(Checker, compiler=toolchain, deadlines=d, **settings)
        self._targets = {
            CHECK: (partial(check_program, make, checked), workers, "checking"),
            TIME: (partial(time_program, make, checked, timed, config.budget_s), 1, "timing"),
        }
        check_s = d.screen_s + d.compile_s + START_S + d.load_s + 2 * d.verify_s + OWN_S
        # The first program of a kernel waits for its checker, which probes the machine and checks the kernel's own program.
        self._timeouts = {CHECK: 4 * PROBE_S + 2 * check_s}
        # The timing waits for its cores, for engines, and for engines once more after the timer was made. When the budget
        # ends, a last block may begin, which has calls of the reference as well.
        calls = MOST_LATE_CALLS + LEAST_CALLS
        timed_s = 3 * LOCK_S + START_S + d.load_s + config.budget_s + calls * d.verify_s + OWN_S
        self._timeouts[TIME] = self._timeouts[CHECK] + timed_s
        self._pools: dict[str, Processes] = {}
        super().__init__()

    async def _serve(self) -> None:
        try:
            for stage, (target, count, name) in self._targets.items():
                self._pools[stage] = Processes(cloudpickle.dumps(target), count, name, "setting", variables=VARIABLES)
            self._started.set_result(None)
            await self._loop.create_future()  # until it is closed
        finally:
            for pool in self._pools.values():
                pool.close(self._ended or BenchError("the Bench could not start"), CLOSE_S)

    async def _measure(self, kernel: Kernel, sent: bytes, text: str, permitted: tuple[str, ...] | None) -> Result:
        # Everything that a result depends on.
        key = kernel_key(kernel), prototype(kernel), kernel.naive, tuple(kernel.forbidden), extract(text), permitted
        # Others may wait for the same program, so one who gives up must not cancel its task. Hence the shields.
        if (task := self._known.get(key)) is not None:
            return replace(await asyncio.shield(task), is_cached=True)
        task = self._known[key] = asyncio.create_task(self._work(kernel, sent, text, permitted))
        task.add_done_callback(partial(self._done, key))
        return await asyncio.shield(task)

    def _done(self, key: Hashable, task: "asyncio.Task[Result]") -> None:
        """Forgets a program of which another attempt may end otherwise, and the oldest one if there are too many."""
        if task.cancelled() or task.exception() is not None or not would_repeat(task.result()):
            self._known.pop(key, None)
        elif len(self._known) > MAX_RESULTS:
            del self._known[next(iter(self._known))]

    async def _work(self, kernel: Kernel, sent: bytes, text: str, permitted: Any) -> Result:
        """Has a program checked, and timed if it is right."""
        seconds: Counter[str] = Counter()
        its = kernel_key(kernel), sent
        async with self._turns.take(CHECK):
            checked, library = await self._attempted(CHECK, kernel.name, *its, text, permitted)
        result = checked
        seconds.update(checked.seconds)
        # A timing that was disturbed is made once more.
        for is_alone in (self._is_shared, True) if checked.outcome == "ok" else ():
            async with self._turns.take(TIME, is_alone):
                result = await self._attempted(TIME, kernel.name, *its, kernel.name, library)
            seconds.update(result.seconds)
            if result.outcome != NOISY:
                break
        found = {"techniques": checked.techniques, "fingerprint": self._fingerprint}
        return replace(result, seconds=dict(seconds), **found)

    async def _attempted(self, stage: str, kernel: str, *what: Any) -> Any:
        """Calls one of the processes, and again if the machine fails.

        Raises:
            BenchError: it has failed too often.
        """

        def otherwise(kind: str, cause: str) -> Failed:
            # An error that a kernel or our own code raises would come again. If a process dies or hangs, it is the machine.
            return Failed(f"the {stage} process died: {cause}" if kind in DEATHS else cause, is_final=kind == "raised")

        attempt = 0
        while True:
            attempt += 1
            try:
                call = self._pools[stage].submit(what, self._timeouts[stage], otherwise)
                answer = await asyncio.wrap_future(call)
            except Exception as error:
                raise BenchError(f"the processes of the Bench have ended: {error}") from error
            if not isinstance(answer, Failed):
                return answer
            attempts = f" (attempt {attempt})" if attempt > 1 else ""
            if answer.is_final or attempt > RETRIES:
                raise BenchError(f"the {stage} of a program for {kernel} failed{attempts}: {answer.cause}")
            log.warning("bench: the %s of a program is repeated%s: %s", stage, attempts, answer.cause)


def would_repeat(result: Result) -> bool:
    """Tells whether another attempt would end in the same way."""
    # The other results say something about the machine at that moment.
    is_passing = result.outcome in ("timeout", NOISY) or result.note.startswith(KILLED)
    return not is_passing and not (result.timing is not None and result.timing.disturbed)


def kernel_key(kernel: Kernel) -> str:
    """Returns a name that tells kernels and their timed sizes apart."""
    kind = type(kernel)
    return f"{kind.__module__}.{kind.__qualname__} {kernel.name} {dict(kernel.timed)}"


# What the processes do ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failed:
    """The machine failed, and nothing is known about the program."""

    cause: str
    is_final: bool  # another attempt would not help


class Kept(dict[str, Any]):
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


CHECKERS, TIMERS = Kept(), Kept()


def check_program(
    make: Callable[..., Checker],
    cores: tuple[int, ...],
    key: str,
    kernel: bytes,
    text: str,
    permitted: tuple[str, ...] | None = None,
) -> tuple[Result, bytes] | Failed:
    """Checks the program in a text on these cores. Returns its library, too, compressed.

    Args:
        key: tells kernels apart.
        kernel: pickled.
        permitted: as in `Bench.submit`.
    """
    try:
        os.sched_setaffinity(0, cores)
        if key not in CHECKERS:
            CHECKERS[key] = make(pickle.loads(kernel), cores=cores)
        result, library = CHECKERS[key].checked(text, permitted=permitted)
        return result, zlib.compress(library, 1)
    except (SandboxError, OSError) as error:
        CHECKERS.drop(key)
        return _failed(error)


def time_program(
    make: Callable[..., Checker],
    check_cores: tuple[int, ...],
    cores: tuple[int, ...],
    budget_s: float,
    key: str,
    kernel: bytes,
    name: str,
    library: bytes,
) -> Result | Failed:
    """Times a library that `check_program` has found right, of the kernel with this name, on `cores`.

    The seconds of the result are "wait", until the cores were idle, free, and their peak known, and "time".
    """
    start, begun_at, outcome, note, timing = time.monotonic(), None, "ok", "", None
    if not TIMERS:
        # The process that started this one may keep off the timed cores (`kept_off`), and this one has inherited that.
        os.sched_setaffinity(0, {*check_cores, *cores})
    # Between two timings, others who wait for these cores get a turn.
    time.sleep(TURN_S)
    try:
        with alone_on(cores, LOCK_S):
            wait_until_idle(cores, LOCK_S)
            if key not in TIMERS:
                TIMERS[key] = Timer(make(pickle.loads(kernel), cores=cores), budget_s)
                # An engine may have begun to compute while the timer was made.
                wait_until_idle(cores, LOCK_S)
            begun_at = time.monotonic()
            timing = TIMERS[key].time(zlib.decompress(library))
    except Wild as error:
        outcome, note = NOISY, str(error)
    except ChildFailed as failed:
        outcome, note = failed.outcome, str(failed)
    except (SandboxError, OSError) as error:
        TIMERS.drop(key)
        return _failed(error)
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


def _failed(error: Exception) -> Failed:
    # Whoever has waited in vain for another timing, or for an engine, does not wait that long once more.
    return Failed(f"{type(error).__name__}: {error}", isinstance(error, TimeoutError))
