"""The same service as `Bench`, on the machines of a Ray cluster: one queue of timings on each of them.

The machines run `ray start --resources='{"bench_host": 1}'`, and on each lives one actor with a `Bench` of its own. Ray itself
lives in a process of its own, which does what it is asked (ray_process.py). All is decided here. Whatever is lost, an actor, a
machine or Ray's process, the task of a text then asks another machine.
"""

import asyncio
import logging
import pickle
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchtune_ext.measured.bench import Service
from torchtune_ext.measured.check import Deadlines
from torchtune_ext.measured.kernel import Kernel
from torchtune_ext.measured.ray_connect import member_command
from torchtune_ext.measured.results import BenchConfig, BenchError, Result, version
from torchtune_ext.measured.sandbox import Limits
from torchtune_ext.run.errors import Mistake
from torchtune_ext.sampling.calls import CoreLost, within
from torchtune_ext.sampling.child_process import ChildProcess, log_tail

log = logging.getLogger(__name__)

READY_S = 180.0  # seconds until the first machine is ready
LOOK_S = 1.0  # seconds between two looks at the cluster, and at each of its machines
SILENT_S = 60.0  # seconds without an answer after which a machine, or the whole cluster, counts as lost
REST_S = 10.0  # seconds before what was lost is started again
LOST_S = 600.0  # seconds without any machine after which the service has failed
CLOSE_S = 20.0  # seconds for everything to end in good order
MAX_TRIES = 5  # how often a text may be lost with its machine, or fail there
MAX_PRINTED = 2000  # characters of what Ray's process has printed, if it ends badly
NOW = ("queued_checks", "queued_timings", "checking", "timing")  # counters of this moment; the others only grow


@dataclass(eq=False, slots=True)
class Machine:
    """A machine that measures, as long as its actor lives."""

    name: str
    kind: str  # its fingerprint: speeds of machines of one kind may be compared
    room: int  # texts that it may have at a time
    title: str = ""  # for people
    fault: str = ""  # why it gets nothing more


@dataclass(eq=False, slots=True)
class Text:
    """A text that is not done."""

    group: Hashable = None  # texts of one group are measured on one machine; None: it has none
    machine: Machine | None = None  # the one that has it; None: it waits
    placed: asyncio.Event = field(default_factory=asyncio.Event)  # a machine has it
    failed_at: str = ""  # the machine that could not measure it


class Dispatch:
    """Gives each text to the machine with the least work at that moment, and all texts of a group to one machine.

    A machine has only a few texts at a time, so one that joins finds work and one that is lost takes little with it. A group is
    bound to a machine when its first text goes out. If that machine is lost, what is not done goes to another one together: one
    of the same kind if there is any. A text that failed goes to another machine, without its group.
    """

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}  # by name
        self.texts: list[Text] = []  # all that are not done, in the order in which they came
        # The machine of each group, also when it is lost: a group is a problem of the task, so they are few.
        self._homes: dict[Hashable, Machine] = {}

    def next(self) -> Text | None:
        """Gives out a text, whose `machine` is then the one that gets it; None: nothing can be given out now."""
        loads = Counter(text.machine for text in self.texts)
        free = [each for each in self.machines.values() if loads[each] < each.room and not each.fault]
        for text in self.texts if free else ():
            if text.machine is None and (possible := [each for each in self._possible(text) if each in free]):
                text.machine = min(possible, key=lambda each: loads[each])
                if text.group is not None and not text.failed_at:
                    self._homes[text.group] = text.machine
                return text
        return None

    def _possible(self, text: Text) -> list[Machine]:
        """The machines that a text may go to."""
        home = self._homes.get(text.group)
        if home is not None and home.name in self.machines and not text.failed_at:
            return [self.machines[home.name]]
        others = [each for each in self.machines.values() if each.name != text.failed_at] or [*self.machines.values()]
        return [each for each in others if home is not None and each.kind == home.kind] or others


class RayBench(Service):
    """Measures programs on the machines of a Ray cluster that carry a resource.

    A machine that joins later, or comes back, is used from then on. What a machine had when it was lost is measured on
    another one, and its future never notices. Everything that this object starts on other machines ends with it.

    Args:
        address: "auto" (the cluster that this machine is part of), or HOST:PORT of its head. This machine must be a member.
        resource: what the machines that measure carry.
        deadlines, limits, settings: those of each machine's `Bench`. `workers` and `cores` are chosen by each machine if they
            are not given.

    Raises:
        ValueError: a setting is out of range, or Ray is not installed.
        TypeError: `Bench` has no such keyword.
        BenchError: nobody answers at the address, no machine carries the resource, or none of them can measure.
    """

    def __init__(
        self,
        address: str = "auto",
        resource: str = "bench_host",
        deadlines: Deadlines | None = None,
        limits: Limits | None = None,
        **settings: Any,
    ) -> None:
        BenchConfig(**settings, address=address, resource=resource)
        if not re.fullmatch(r"auto|[^/\s]+:\d+", address):
            raise Mistake(
                f"bench.address={address!r}: use auto, or HOST:PORT of the cluster's head as 10.0.0.1:6379 (and no ray://: "
                "this machine must be a member of the cluster)"
            )
        if find_spec("ray") is None:
            raise Mistake("bench.address needs Ray: pip install 'torchtune-ext[ray]', here and on each machine")
        self._address, self._resource = address, resource
        settings |= {"deadlines": deadlines, "limits": limits}
        self._start_with = (version(), pickle.dumps(settings), list(sys.path))
        self._process: ChildProcess | None = None  # Ray's driver
        self._dispatch = Dispatch()
        self._counters: dict[Machine, dict[str, float]] = {}  # also of machines that have left
        self._moved = 0  # texts that were lost with a machine
        self._faults: dict[str, str] = {}  # why a machine, or the cluster (""), cannot be used
        super().__init__()

    def stats(self) -> dict[str, float]:
        """Returns the counters of `Bench.stats`, added over all machines, at most some seconds old.

        And: "machines", "unsent" (texts that wait for a machine), "sent" (to one), "moved" (texts lost with a machine, so far).
        """
        waits = Counter(text.machine is None for text in [*self._dispatch.texts])
        machines = len(self._dispatch.machines)
        total = Counter(moved=self._moved, machines=machines, sent=waits[False], unsent=waits[True])
        for counters in [*self._counters.values()]:
            total.update(counters)
        return dict(total)

    async def _serve(self) -> None:
        """Keeps Ray's process, and through it an actor on each machine."""
        try:
            async with asyncio.timeout(READY_S) as self._patience:
                while True:
                    await self._keep_process()
                    log.warning("bench on Ray: %s", self._faults[""])
                    if not self._started.done():
                        raise BenchError(self._faults[""])
                    await asyncio.sleep(REST_S)
        except TimeoutError:
            seconds = LOST_S if self._started.done() else READY_S
            why = "; ".join(self._faults.values()) or "none is ready"
            raise BenchError(f"no machine with the resource {self._resource!r} for {seconds:g} s: {why}") from None

    async def _keep_process(self) -> None:
        """Lives one life of Ray's process. Raises BenchError where, at the start, no machine can be used."""
        keepers: dict[str, asyncio.Task] = {}  # one for each machine, by Ray's name of it
        # Ray prints a page for each machine that is lost. It is read only if the process itself ends badly.
        with tempfile.NamedTemporaryFile(prefix="ray-") as printed:
            module, first = "torchtune_ext.measured.ray_process", [self._address, self._resource]
            self._process = ChildProcess("Ray's process", module, Path(printed.name), self._hear, first)
            self._faults.pop("", None)
            try:
                while True:
                    async with within(SILENT_S, "no answer of the Ray cluster"):
                        address, titles = await self._process.ask("machines")
                    for name in keepers.keys() - titles.keys():
                        keeper = keepers.pop(name)
                        keeper.cancel()
                        log.warning("bench: %s: Ray says that the machine has gone", keeper.get_name())
                    for name in titles.keys() - keepers.keys():
                        keeper = self._keep_actor(name, titles[name])
                        keepers[name] = asyncio.create_task(keeper, name=titles[name])
                    for keeper in keepers.values():
                        if keeper.done():
                            # It may have ended with an error that nobody has foreseen.
                            keeper.result()
                    if not self._started.done():
                        self._judge(address, titles)
                    await asyncio.sleep(LOOK_S)
            except CoreLost as lost:
                tail = log_tail(Path(printed.name), 0)[-MAX_PRINTED:]
                self._faults.setdefault("", f"{lost}; it had printed:\n{tail}" if tail else str(lost))
            finally:
                with suppress(CoreLost):
                    async with within(CLOSE_S, "no end"):
                        await self._process.ask("close")
                for keeper in keepers.values():
                    keeper.cancel()
                await self._process.stop()

    def _hear(self, kind: str, why: str) -> None:
        """Takes what Ray's process says unasked: why it cannot join the cluster."""
        self._faults[""] = why

    def _judge(self, address: str, titles: Mapping[str, str]) -> None:
        """Raises BenchError where no machine can be used."""
        if not titles:
            raise BenchError(
                f"no machine of the Ray cluster at {address} carries the resource {self._resource!r}. On each machine that "
                f"measures: {member_command(address, self._resource)}"
            )
        if titles.keys() <= self._faults.keys():
            raise BenchError("no machine can measure: " + "; ".join(self._faults[name] for name in titles))

    async def _keep_actor(self, name: str, title: str) -> None:
        """Keeps an actor on a machine, again and again, until the machine has gone or says that it never can measure."""
        state = ""
        while state != "refused":
            try:
                async with within(SILENT_S, f"no actor was ready (does another program use its {self._resource}?)"):
                    state, text, room = await self._process.ask("call", name, "start", *self._start_with)
                if state == "refused":
                    raise CoreLost(text)
                await self._look_after(Machine(name, text, room, title))
            except CoreLost as lost:
                self._faults[name] = f"{title}: {lost}"
                again = "it is not used" if state == "refused" else f"tried again in {REST_S:g} s"
                log.warning("bench: %s; %s", self._faults[name], again)
            with suppress(CoreLost):
                await self._process.ask("kill", name)
            await asyncio.sleep(REST_S)

    async def _look_after(self, machine: Machine) -> None:
        """Has a machine measure as long as its actor is well. Raises CoreLost."""
        log.info("bench: %s measures: %s", machine.title, machine.kind)
        self._dispatch.machines[machine.name] = machine
        self._faults.pop(machine.name, None)
        if not self._started.done():
            self._started.set_result(None)
        try:
            while not machine.fault:
                self._give()
                async with within(SILENT_S, "no answer"):
                    self._counters[machine], lines = await self._process.ask("call", machine.name, "look")
                for level, logger, line in lines:
                    logging.getLogger(logger).log(level, "%s: %s", machine.title, line)
                self._patience.reschedule(self._loop.time() + LOST_S)
                await asyncio.sleep(LOOK_S)
            raise CoreLost(machine.fault)
        finally:
            del self._dispatch.machines[machine.name]
            self._counters[machine] = self._counters.get(machine, {}) | dict.fromkeys(NOW, 0.0)
            self._give()

    def _give(self) -> None:
        """Gives texts to machines that have room, whenever something has changed."""
        while (text := self._dispatch.next()) is not None:
            text.placed.set()

    async def _measure(
        self, kernel: Kernel, sent: bytes, text: str, group: str | int | None, permitted: tuple[str, ...] | None
    ) -> Result:
        """Has a text measured, by another machine if one is lost or fails."""
        payload, its = pickle.dumps((sent, text, permitted)), Text(group)
        self._dispatch.texts.append(its)
        try:
            for _ in range(MAX_TRIES):
                self._give()
                await its.placed.wait()
                machine = its.machine
                try:
                    state, value = await self._process.ask("call", machine.name, "measure", payload)
                except CoreLost as lost:
                    state, value = "broken", str(lost)
                if state == "result":
                    return pickle.loads(value)
                if state == "broken":
                    machine.fault = machine.fault or value
                    self._moved += 1
                else:
                    its.failed_at = machine.name
                its.machine = None
                its.placed.clear()
            raise BenchError(f"tried {MAX_TRIES} times; the last time: {machine.title}: {value}")
        finally:
            self._dispatch.texts.remove(its)
            self._give()
