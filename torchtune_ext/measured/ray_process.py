"""The process that is Ray's driver for `RayBench`.

Ray takes over the signals of its driver, and ends the whole process when its cluster is lost. A trainer shall have neither,
so the driver is this process.

    python -P -m torchtune_ext.measured.ray_process FD PARENT

The first message is (address, resource, pickled keywords of each machine's Bench, the trainer's sys.path). After that the
trainer says ("submit", number, group, payload), ("cancel", number) or ("close",). It hears ("refused", why) or ("ready",)
once, and then, as it happens, ("result", number, pickled Result), ("failed", number, why), ("stats", counters) and ("log",
level, logger, message).
"""

import asyncio
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from torchtune_ext.measured import ray_host
from torchtune_ext.measured.dispatch import Dispatch
from torchtune_ext.measured.ray_connect import Refused, connect, member_command, short
from torchtune_ext.measured.version import version
from torchtune_ext.run.parent import die_with_parent

LOOK_S = 1.0  # seconds between two looks at the cluster, and at each of its machines
SILENT_S = 60.0  # seconds without an answer after which a machine, or the whole cluster, counts as lost
PLACE_S = 30.0  # seconds for Ray to start an actor
START_S = 90.0  # seconds for the actor to be ready, with the compiler and the sandbox of its machine
CLOSE_S = 10.0  # seconds for the actors to end their processes
REST_S = (1.0, 5.0, 20.0, 60.0)  # seconds before an actor is started again: longer each time that it ends soon
MAX_TRIES = 5  # how often a text may be lost with its machine, or fail there
NOW = ("queued_checks", "queued_timings", "checking", "timing")  # counters of this moment; the others only grow


@dataclass(slots=True)
class Life:
    """One life of the actor of a machine."""

    title: str  # the machine, for people
    actor: Any
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""  # it was lost

    def lose(self, why: str) -> None:
        self.why = self.why or why
        self.lost.set()


class Driver:
    """Keeps an actor on each machine that carries the resource, and gives texts to them."""

    def __init__(self, ray: Any, connection: Connection, resource: str, settings: bytes, path: Sequence[str]) -> None:
        self._ray, self._connection, self._resource = ray, connection, resource
        self._start_with = (settings, list(path))
        # By value: a machine with another version of torchtune_ext must be able to say so.
        ray.cloudpickle.register_pickle_by_value(ray_host)
        self._host_class = ray.remote(ray_host.Host)
        self._dispatch = Dispatch()
        self._payloads: dict[int, bytes] = {}  # texts that are not done
        self._calls: dict[int, Any] = {}  # Ray's handle of the answer for each text that is at work
        self._tries: Counter[int] = Counter()
        self._keepers: dict[str, asyncio.Task] = {}  # one for each machine, by Ray's name of it
        self._lives: dict[str, Life] = {}  # of machines that are ready
        self._reasons: dict[str, str] = {}  # why a machine cannot be used
        self._stats: dict[str, Mapping[str, float]] = {}  # by machine
        self._past: Counter[str] = Counter(moved=0)  # counters of lives that have ended
        self._tasks: set[asyncio.Task] = set()  # the loop itself keeps tasks weakly
        self._is_ready = False
        self._failure: BaseException | None = None
        self._ended = asyncio.Event()
        self._answered_at = time.monotonic()

    async def run(self) -> None:
        """Works until the trainer says "close" or is gone.

        Raises:
            Refused: at the start, no machine can be used; later, the cluster is lost.
        """
        threading.Thread(target=self._listen, args=[asyncio.get_running_loop()], daemon=True).start()
        try:
            while not self._ended.is_set():
                await self._look()
                await _set_within(self._ended, LOOK_S)
            if self._failure is not None:
                raise self._failure
        finally:
            await self._close()

    # The trainer.

    def _say(self, *message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:
            # The trainer has ended.
            self._ended.set()

    def _log(self, level: int, text: str) -> None:
        self._say("log", level, "torchtune_ext.measured.ray_process", f"bench: {text}")

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs in a thread: hears the trainer."""
        try:
            while True:
                loop.call_soon_threadsafe(self._hear, self._connection.recv())
        except (EOFError, OSError):
            loop.call_soon_threadsafe(self._ended.set)

    def _hear(self, message: tuple) -> None:
        match message:
            case ("submit", number, group, payload):
                self._payloads[number] = payload
                self._dispatch.add(number, group)
                self._give()
            case ("cancel", number):
                call = self._forget(number)
                if self._dispatch.cancel(number) is not None and call is not None:
                    # Its Bench is told, too, in case that it has not begun.
                    self._ray.cancel(call)
                self._give()
            case ("close",):
                self._ended.set()

    # The machines.

    async def _look(self) -> None:
        """Finds machines that have come or gone, and tells the trainer how it goes."""
        try:
            nodes = await asyncio.wait_for(asyncio.to_thread(self._ray.nodes), SILENT_S)
        except Exception as error:  # noqa: BLE001 (Ray has many)
            if time.monotonic() > self._answered_at + SILENT_S:
                raise Refused(f"the Ray cluster is lost: {short(error)}") from error
            return
        self._answered_at = time.monotonic()
        there = {node["NodeID"]: node for node in nodes if node["Alive"] and self._resource in node["Resources"]}
        for name, node in there.items():
            if name not in self._keepers:
                title = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
                self._keepers[name] = self._begin(self._keep(name, title))
        # A machine that comes back has another name.
        for name in self._keepers.keys() - there.keys():
            self._keepers.pop(name).cancel()
            self._reasons.pop(name, None)
            if (life := self._lives.get(name)) is not None:
                life.lose("Ray says that the machine has gone")
                self._log(logging.WARNING, f"{life.title}: {life.why}")
                self._bury(name)
        if not self._is_ready:
            self._judge(there)
        self._say("stats", self._sum())

    def _judge(self, there: Mapping[str, Any]) -> None:
        """Decides whether work can begin. Raises Refused if it cannot."""
        if self._lives:
            self._is_ready = True
            self._say("ready")
        elif not there:
            address = self._ray.get_runtime_context().gcs_address
            raise Refused(
                f"no machine of the Ray cluster at {address} carries the resource {self._resource!r}. On each machine that "
                f"measures: {member_command(address, self._resource)}"
            )
        elif there.keys() <= self._reasons.keys():
            raise Refused("no machine can measure: " + "; ".join(self._reasons.values()))

    async def _keep(self, name: str, title: str) -> None:
        """Keeps an actor on a machine, again and again, until the machine has gone or says that it never can."""
        rests = 0
        while True:
            began_at = time.monotonic()
            life = Life(title, self._make(name))
            try:
                await self._live(name, life)
            except Refused as refused:
                self._reasons[name] = f"{title}: {refused}"
                self._log(logging.WARNING, f"cannot use {self._reasons[name]}")
                return
            finally:
                self._bury(name)
                self._ray.kill(life.actor)
            self._reasons[name] = f"{title}: {life.why}"
            rests = 0 if time.monotonic() > began_at + START_S else min(rests + 1, len(REST_S) - 1)
            self._log(logging.WARNING, f"{self._reasons[name]}; tried again in {REST_S[rests]:g} s")
            await asyncio.sleep(REST_S[rests])

    def _make(self, name: str) -> Any:
        """Starts an actor, which ends with this process: it is not detached, and Ray never starts it again."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return self._host_class.options(
            num_cpus=0,
            resources={self._resource: 1},
            scheduling_strategy=NodeAffinitySchedulingStrategy(name, soft=False),
            max_restarts=0,
            max_task_retries=0,
        ).remote()

    async def _live(self, name: str, life: Life) -> None:
        """Lives one life of an actor to its end. Raises Refused if the machine cannot be used."""
        ours, taken = version(), f"does another program use its {self._resource}?"
        with self._losing(life, f"Ray had no place for an actor within {PLACE_S:g} s; {taken}"):
            async with asyncio.timeout(PLACE_S):
                state, answer = await life.actor.version.remote()
            if state == "refused" or answer != ours:
                there = answer if state == "refused" else f"torchtune_ext {answer} is installed there"
                raise Refused(f"{there}, and {ours} here: install the same")
        if life.lost.is_set():
            return
        with self._losing(life, f"the actor was not ready within {START_S:g} s"):
            async with asyncio.timeout(START_S):
                state, text, room = await life.actor.start.remote(*self._start_with)
            if state == "refused":
                raise Refused(text)
            self._reasons.pop(name, None)
            self._lives[name] = life
            self._dispatch.join(name, text, room)
            self._log(logging.INFO, f"{life.title} measures: {text}")
            self._give()
        while not life.lost.is_set():
            with self._losing(life, f"no answer in {SILENT_S:g} s"):
                async with asyncio.timeout(SILENT_S):
                    self._stats[name], lines = await life.actor.look.remote()
                for level, logger, line in lines:
                    self._say("log", level, logger, f"{life.title}: {line}")
            await _set_within(life.lost, LOOK_S)

    @contextmanager
    def _losing(self, life: Life, late: str) -> Iterator[None]:
        """An actor that does not answer, or not in time, is lost."""
        try:
            yield
        except TimeoutError:
            life.lose(late)
        except self._ray.exceptions.RayError as error:
            life.lose(short(error))

    def _bury(self, name: str) -> None:
        """Takes a life out of service. What it had goes to others."""
        if (life := self._lives.pop(name, None)) is None:
            return
        stats = self._stats.pop(name, {})
        self._past.update({key: value for key, value in stats.items() if key not in NOW})
        for number in self._dispatch.leave(name):
            self._calls.pop(number, None)
            self._past["moved"] += 1
            if self._is_last_try(number, f"{life.title}: {life.why}"):
                self._dispatch.cancel(number)
        self._give()

    # The texts.

    def _give(self) -> None:
        """Gives texts to machines that have room."""
        while (given := self._dispatch.next()) is not None:
            number, name = given
            self._begin(self._measure(number, self._lives[name]))

    async def _measure(self, number: int, life: Life) -> None:
        call = self._calls[number] = life.actor.measure.remote(self._payloads[number])
        try:
            state, value = await call
        except self._ray.exceptions.RayError as error:
            # A canceled one is forgotten. Otherwise the actor has ended, and its keeper gives what it had to others.
            if self._calls.get(number) is call:
                life.lose(short(error))
            return
        if self._calls.get(number) is not call:
            # It was canceled, or was given to another machine in the meantime.
            return
        if state == "broken":
            life.lose(value)
            return
        if state == "failed" and not self._is_last_try(number, f"{life.title}: {value}"):
            del self._calls[number]
            self._dispatch.again(number)
        elif state != "failed":
            self._dispatch.done(number)
            self._forget(number)
            self._say("result", number, value) if state == "result" else self._say("failed", number, value)
        else:
            self._dispatch.done(number)
        self._give()

    def _is_last_try(self, number: int, why: str) -> bool:
        """Counts a try that failed. After the last one the trainer is told."""
        self._tries[number] += 1
        if self._tries[number] < MAX_TRIES:
            return False
        self._forget(number)
        self._say("failed", number, f"tried {MAX_TRIES} times; the last time: {why}")
        return True

    def _forget(self, number: int) -> Any:
        """Drops what is kept of a text. Returns Ray's handle of its answer, or None."""
        self._payloads.pop(number, None)
        self._tries.pop(number, None)
        return self._calls.pop(number, None)

    def _sum(self) -> dict[str, float]:
        """The counters of all machines, added up, and those of this process."""
        total = Counter(self._past)
        for stats in self._stats.values():
            total.update(stats)
        at_work = self._dispatch.at_work
        return {**total, "machines": len(self._lives), "sent": at_work, "unsent": len(self._dispatch) - at_work}

    def _begin(self, work: Any) -> asyncio.Task:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)
        return task

    def _finish(self, task: asyncio.Task) -> None:
        """An error that nobody has foreseen ends this process, and the trainer starts another one."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
            self._ended.set()

    async def _close(self) -> None:
        """Has the actors end their processes and remove their folders. They themselves end with this process."""
        closing = [self._begin(_quietly(life.actor.close.remote())) for life in self._lives.values()]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_S)
        for task in [*self._tasks]:
            task.cancel()


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        pass


async def _quietly(promised: Any) -> None:
    try:
        await promised
    except Exception:  # noqa: BLE001 (what is closed may have ended in any way)
        pass


def main(fd: int, parent: int) -> None:
    die_with_parent(parent)
    connection = Connection(fd)
    address, resource, settings, path = connection.recv()
    try:
        ray = connect(address, lambda why: connection.send(("refused", why)))
        asyncio.run(Driver(ray, connection, resource, settings, path).run())
    except Refused as refused:
        connection.send(("refused", str(refused)))
    except ConnectionError:
        # The trainer has ended.
        return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
