"""The coordinator: texts come in, and their results come out as soon as each is there.

Checks run in parallel, in processes that can be killed. Timings run one after the other, in a process of their own
(`Schedule` decides what is next). A program that was measured before, or is under way, is not measured again (cache.py).

What a program does wrong is its result, and is never tried again. What the machine does wrong (a process that was killed, a
sandbox that failed, a deadline of ours that passed) is tried again `RETRIES` times. Then the future raises BenchError. A timing
that was disturbed is made once more, when no check runs beside it.
"""

import hashlib
import json
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Self

import cloudpickle

from torchtune_ext.measured.bench_processes import VARIABLES, Failed, check_program, time_program
from torchtune_ext.measured.cache import Cache
from torchtune_ext.measured.check import Checker, Deadlines, extract
from torchtune_ext.measured.child import START_S
from torchtune_ext.measured.compiler import Compiler
from torchtune_ext.measured.kernel import Kernel, prototype
from torchtune_ext.measured.machine import choose_cores, fingerprint, usable_cores
from torchtune_ext.measured.results import NOISY, BenchConfig, BenchError, Result, pickled, version
from torchtune_ext.measured.sandbox import PROBE_S, Limits, Sandbox
from torchtune_ext.measured.timing import LEAST_CALLS, LOCK_S, MOST_LATE_CALLS
from torchtune_ext.run.processes import Processes

__all__ = ["Bench", "BenchConfig", "BenchError", "Result"]

log = logging.getLogger(__name__)

RETRIES = 2  # further attempts after the machine has failed
OWN_S = 30.0  # seconds of our own work on a program at most: inputs, references, comparisons, starts of processes
CLOSE_S = 3.0  # seconds that processes get to end by themselves
PATIENCE = 64  # about ten seconds of two cores
CHECK, TIME = "check", "time"


@dataclass(eq=False, slots=True)
class Job:
    """One program, and all who wait for its result."""

    key: str
    kernel_name: str
    kernel_key: str
    kernel: bytes
    text: str
    permitted: tuple[str, ...] | None
    futures: list[Future]
    library: bytes = b""
    techniques: tuple[str, ...] = ()
    seed: int = 0
    attempts: int = 0
    has_begun: bool = False
    is_timed_again: bool = False  # its timing was disturbed, and is made once more
    seconds: Counter[str] = field(default_factory=Counter)

    def begin(self) -> bool:
        """Marks it as begun: from now on it cannot be canceled. Returns False if everybody has canceled it before."""
        if not self.has_begun:
            self.futures = [future for future in self.futures if future.set_running_or_notify_cancel()]
            self.has_begun = bool(self.futures)
        return self.has_begun


class Schedule:
    """Decides which job is checked or timed next: those that wait, and those that run. It starts nothing itself.

    Checks run in parallel, timings one after the other. A timing is *alone* if no check runs beside it: each one where both
    need the same cores, and one that is made again because it was disturbed. For checks may disturb a timing on other cores,
    too: they share caches and memory, and two cores of a virtual machine are often one. Checks go first, since they are short
    and most programs end there, and a timing that has to be alone begins when all that were begun have ended. It waits for at
    most `PATIENCE` checks that begin after it could have begun.

    Args:
        workers: how many checks run at a time.
        is_shared: whether checks run on the cores that are timed on.
    """

    def __init__(self, workers: int, is_shared: bool) -> None:
        self.workers, self.is_shared = workers, is_shared
        self.checks: deque[Job] = deque()
        self.timings: deque[Job] = deque()
        self.again: deque[Job] = deque()  # timings that were disturbed
        self.checking: set[Job] = set()
        self.timing: Job | None = None
        self._is_alone = False  # whether that timing is alone
        self._passed = 0  # checks that have begun while a timing waited to be alone

    def next(self) -> tuple[str, Job] | None:
        """Returns what begins now, and counts it as running; None: nothing. Ask until it is None."""
        wants_quiet = bool(self.again or (self.is_shared and self.timings))
        is_its_turn = wants_quiet and self._passed >= PATIENCE
        is_timing_alone = self.timing is not None and self._is_alone
        if self.checks and len(self.checking) < self.workers and not is_timing_alone and not is_its_turn:
            job = self.checks.popleft()
            self.checking.add(job)
            self._passed += wants_quiet
            return CHECK, job
        is_quiet = not self.checking and (not self.checks or is_its_turn)
        for queue, alone in ((self.timings, self.is_shared), (self.again, True)):
            if self.timing is None and queue and (is_quiet or not alone):
                self.timing, self._is_alone = queue.popleft(), alone
                self._passed = 0 if alone else self._passed
                return TIME, self.timing
        return None

    def ended(self, stage: str, job: Job) -> None:
        """What runs of this job has ended, well or not."""
        if stage == CHECK:
            self.checking.remove(job)
        else:
            self.timing = None


class Bench:
    """Measures programs on this machine. Any thread may use it.

    Make it when the engine of a run has started, so that it can choose cores that the engine does not use.

    Args:
        deadlines: seconds that each stage of a check may take.
        limits: what a program may use.
        settings: those of `BenchConfig`; its `address` and `resource` are for `RayBench`.

    Raises:
        ValueError: a setting is out of range, there is no compiler, or a core does not exist.
        TypeError: there is no such setting.
        SandboxError: this machine cannot lock programs in.
    """

    def __init__(self, deadlines: Deadlines | None = None, limits: Limits | None = None, **settings: Any) -> None:
        config = BenchConfig(**settings)
        usable = usable_cores()
        timed = tuple(choose_cores(config.cores, config.threads))
        checked = tuple(sorted(usable - set(timed)) or sorted(usable))
        toolchain = Compiler.find(config.compiler)
        # A machine that cannot lock programs in fails here, and not at each program.
        Sandbox(toolchain.path, config.namespaces, floor=config.sandbox == "floor").close()
        self.timed_cores = timed  # a trainer keeps off them with `machine.kept_off`
        self._deadlines, limits = deadlines or Deadlines(), limits or Limits()
        self._budget_s, self._fingerprint = config.budget_s, fingerprint()
        # What a result depends on, besides the kernel and the program.
        settings = asdict(replace(config, workers=None, cores=None, compiler=None, cache=None))
        limited = [asdict(self._deadlines), asdict(limits)]
        self._conditions = [version(), toolchain.version, self._fingerprint, timed, settings, limited]
        self._cache = Cache(config.cache)
        self._lock = threading.Lock()  # guards all that follows
        self._ended: BenchError | None = None  # the reason why nothing is accepted any more
        workers = config.workers or len(checked)
        self._schedule = Schedule(workers, is_shared=bool(set(checked) & set(timed)))
        self._under_way: dict[str, Job] = {}
        self._counts: Counter[str] = Counter()
        self._pid = os.getpid()
        self._pools: dict[str, Processes] = {}
        try:
            make = partial(
                Checker,
                compiler=toolchain,
                optimization=config.optimization,
                threads=config.threads,
                namespaces=config.namespaces,
                sandbox=config.sandbox,
                deadlines=deadlines,
                limits=limits,
            )
            targets = (
                partial(check_program, make, checked),
                partial(time_program, make, checked, timed, config.budget_s),
            )
            for stage, name, target, count in zip(
                (CHECK, TIME), ("checking", "timing"), targets, (workers, 1), strict=True
            ):
                self._pools[stage] = Processes(cloudpickle.dumps(target), count, name, "setting", variables=VARIABLES)
        except BaseException:
            self.close()
            raise

    def submit(
        self,
        kernel: Kernel,
        text: str,
        group: str | int | None = None,
        permitted: Collection[str] | None = None,
    ) -> "Future[Result]":
        """Hands in a model's answer and returns at once. Its future can be canceled until its check begins.

        The future raises BenchError if the service fails, and says how.

        Args:
            group: is for `RayBench`: here all texts are measured on one machine.
            permitted: the techniques (`techniques.TECHNIQUES`) that the program may use: one with others is forbidden, and
                the result names those of a program that is right. None: they are not looked for.

        Raises:
            BenchError: this object is closed, has failed, or belongs to the process that this one was forked from.
            ValueError: the kernel cannot be pickled.
        """
        if os.getpid() != self._pid:
            # The threads that would answer are not in this process, and its copy of the lock may be held for ever.
            raise BenchError(f"this Bench was made by process {self._pid}, before a fork: make one in each process")
        sent = pickled(kernel)
        future: Future[Result] = Future()
        allowed = None if permitted is None else tuple(sorted(permitted))
        key = self._key(kernel, text, allowed)
        with self._lock:
            if self._ended is not None:
                raise self._ended
            known = self._cache.get(key)
            job = self._under_way.get(key)
            if known is not None or job is not None:
                self._counts["cached"] += 1
            if known is None and job is not None:
                job.futures.append(future)
                if job.has_begun:
                    future.set_running_or_notify_cancel()
            elif known is None:
                job = self._under_way[key] = Job(key, kernel.name, kernel_key(kernel), sent, text, allowed, [future])
                self._schedule.checks.append(job)
        if known is not None:
            future.set_result(known)
        else:
            self._advance()
        return future

    def stats(self) -> dict[str, float]:
        """Returns counters for metrics, all of them numbers that may be added over machines.

        Now: "queued_checks", "queued_timings", "checking", "timing". Since the start: "done", "cached", "retried", "noisy",
        "failed", and "seconds_STAGE" for each stage (check.STAGES, "time", and "wait": until the cores were idle and free).
        """
        with self._lock:
            schedule = self._schedule
            return {
                "queued_checks": float(len(schedule.checks)),
                "queued_timings": float(len(schedule.timings) + len(schedule.again)),
                "checking": float(len(schedule.checking)),
                "timing": float(schedule.timing is not None),
                **{name: float(self._counts[name]) for name in ("done", "cached", "retried", "noisy", "failed")},
                **{name: seconds for name, seconds in self._counts.items() if name.startswith("seconds_")},
            }

    def close(self) -> None:
        """Ends all processes and removes all folders. Futures that are not done raise BenchError.

        Programs that are being worked on are given up after `CLOSE_S` seconds. In a process that was forked it does nothing.
        """
        if os.getpid() != self._pid:
            return
        self._give_up(BenchError("the Bench is closed"))
        for pool in self._pools.values():
            pool.close(self._ended, CLOSE_S)
        with self._lock:
            self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _key(self, kernel: Kernel, text: str, permitted: Sequence[str] | None) -> str:
        """What a result depends on."""
        words = [kernel_key(kernel), prototype(kernel), kernel.naive, list(kernel.forbidden), extract(text), permitted]
        return hashlib.sha256(json.dumps([*self._conditions, *words]).encode()).hexdigest()

    def _advance(self) -> None:
        """Begins all that may begin now."""
        while True:
            with self._lock:
                if self._ended is not None:
                    return
                begun = self._schedule.next()
                if begun is None:
                    return
                stage, job = begun
                if not job.begin():
                    # Nobody waits for it any more.
                    self._schedule.ended(stage, job)
                    del self._under_way[job.key]
                    continue
            try:
                self._hand_over(stage, job)
            except Exception as error:  # noqa: BLE001 (whatever it is, everybody who waits has to get it)
                self._give_up(BenchError(f"the processes of the Bench have ended: {error}"))

    def _hand_over(self, stage: str, job: Job) -> None:
        d = self._deadlines
        check_s = d.screen_s + d.compile_s + START_S + d.load_s + 2 * d.verify_s + OWN_S
        # A kernel's checker probes the machine and checks the kernel's own program first.
        timeout_s, what = 4 * PROBE_S + 2 * check_s, (job.text, job.permitted)
        if stage == TIME:
            # Others may time on the cores, or an engine compute there, before the timer is made and again behind it. When the
            # budget ends, a last block may begin, with calls of the reference as well.
            calls = MOST_LATE_CALLS + LEAST_CALLS
            timeout_s += 5 * LOCK_S + START_S + d.load_s + self._budget_s + calls * d.verify_s + OWN_S
            what = job.kernel_name, job.library

        def otherwise(kind: str, cause: str) -> Failed:
            # An error that a kernel or our own code raises would come again. Processes do not end, or hang, by themselves.
            return Failed(f"the {stage} process died: {cause}" if kind == "died" else cause, is_final=kind == "raised")

        answer = self._pools[stage].submit((job.kernel_key, job.kernel, *what), timeout_s, otherwise)
        answer.add_done_callback(lambda future: self._ends(stage, job, future))

    def _ends(self, stage: str, job: Job, future: Future) -> None:
        """Deals with what a process says, in the thread that serves it."""
        try:
            answer = future.result()
            deal_with = self._deal_with_failure if isinstance(answer, Failed) else self._take
            deal_with(stage, job, answer)
        except Exception as error:  # noqa: BLE001 (whatever it is, everybody who waits has to get it)
            self._give_up(BenchError(f"the processes of the Bench have ended: {error}"))
        self._advance()

    def _deal_with_failure(self, stage: str, job: Job, failed: Failed) -> None:
        job.attempts += 1
        is_final = failed.is_final or job.attempts > RETRIES
        attempts = f" (attempt {job.attempts})" if job.attempts > 1 else ""
        with self._lock:
            self._schedule.ended(stage, job)
            self._counts["failed" if is_final else "retried"] += 1
            if not is_final:
                # It has waited already.
                (self._schedule.checks if stage == CHECK else self._schedule.timings).appendleft(job)
        if is_final:
            error = BenchError(f"the {stage} of a program for {job.kernel_name} failed{attempts}: {failed.cause}")
            self._finish(job, lambda future: future.set_exception(error))
        else:
            log.warning("bench: the %s of a program is repeated%s: %s", stage, attempts, failed.cause)

    def _take(self, stage: str, job: Job, answer: tuple[Result, bytes] | Result) -> None:
        """Takes the answer of a stage on a program."""
        result, library = answer if stage == CHECK else (answer, b"")
        is_right = stage == CHECK and result.outcome == "ok"
        is_disturbed = stage == TIME and result.outcome == NOISY and not job.is_timed_again
        job.seconds.update(result.seconds)
        with self._lock:
            self._schedule.ended(stage, job)
            self._counts.update({f"seconds_{name}": value for name, value in result.seconds.items()})
            if is_right:
                job.library, job.techniques, job.seed = library, result.techniques, result.seed
                self._schedule.timings.append(job)
            elif is_disturbed:
                job.is_timed_again = True
                self._schedule.again.append(job)
            else:
                result = replace(
                    result,
                    seconds=dict(job.seconds),
                    fingerprint=self._fingerprint,
                    techniques=job.techniques,
                    seed=job.seed or result.seed,
                )
                self._cache.put(job.key, result)
                self._counts["done"] += 1
                self._counts["noisy"] += result.outcome == NOISY
        if not is_right and not is_disturbed:
            first = job.futures[0]
            self._finish(job, lambda future: future.set_result(replace(result, is_cached=future is not first)))

    def _finish(self, job: Job, end: Callable[[Future], None]) -> None:
        """Ends all futures of a job. Their callbacks may submit more, so this does not hold the lock."""
        with self._lock:
            if self._under_way.pop(job.key, None) is None:
                return
        for future in job.futures:
            end(future)

    def _give_up(self, error: BenchError) -> None:
        """Accepts nothing more, and gives the reason to all who wait. Only the first reason counts."""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = error
            jobs = list(self._under_way.values())
        for job in jobs:
            if job.has_begun or job.begin():
                self._finish(job, lambda future: future.set_exception(error))


def kernel_key(kernel: Kernel) -> str:
    """Returns a name that tells kernels, and their timed sizes, apart."""
    kind = type(kernel)
    return f"{kind.__module__}.{kind.__qualname__} {kernel.name} {dict(kernel.timed)}"
