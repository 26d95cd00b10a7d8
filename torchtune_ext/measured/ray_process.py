"""The process that is Ray's driver for `RayBench`, and the actor that runs on each machine that measures.

It keeps one actor on each machine, and gives each text to the machine with the least work; all texts of a group go to one
machine. What a machine that is lost had goes to another one.

    python -P -m torchtune_ext.measured.ray_process SOCKET PARENT

The first frame holds (address of the cluster, arguments of `Host.start`); then the trainer asks as
`child_process.ChildProcess` does. Unasked it says (0, "unreachable", why) and ends, if the cluster cannot be joined;
(0, "ready", which machine measures); and (0, "gone", which does not, and why).
"""

import asyncio
import os
import pickle
import socket
import sys
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torchtune_ext.measured.ray_connect import Refused, connect, member_command
from torchtune_ext.run.errors import Failure, text_of
from torchtune_ext.run.parent import die_with_parent
from torchtune_ext.sampling.child_process import Frames, pack, receive

RESOURCE = "bench_host"  # of Ray, which the machines that measure carry
CLOSE_S = 10.0  # seconds for the actors to end their processes
START_S = 180.0  # seconds until an actor is ready; another program may hold the resource
SILENT_S = 60.0  # seconds without an answer after which a machine counts as lost
LOOK_S = 5.0  # seconds between two looks at the cluster, and at each of its machines
LOST_S = 600.0  # seconds without any machine after which the service has failed
MAX_TRIES = 5  # how often a text may be lost with its machine, or fail there


class Host:
    """The actor: a `Bench` on a machine that measures.

    The class travels there by value, and looks for torchtune_ext only there. So a machine that has another version, or none,
    can say so. That is why its methods import what is ours themselves, and return what went wrong: an exception of ours may be
    unknown where it arrives.
    """

    def __init__(self) -> None:
        self.bench = None

    async def start(self, version_here: str, settings: bytes, path: Sequence[str]) -> tuple[str, str]:
        """Makes the Bench.

        Args:
            version_here: of the trainer, which has to be that of this machine.
            settings: the keywords of the Bench, pickled.
            path: the trainer's sys.path, for kernels of the user's own. What is installed on this machine comes first.

        Returns:
            ("ready", the fingerprint), or ("refused", why).
        """
        try:
            from torchtune_ext.measured.results import version
        except ImportError as error:
            why = f"torchtune_ext cannot be imported there ({error}), and {version_here} is here: install the same"
            return "refused", why
        if version() != version_here:
            return "refused", f"torchtune_ext {version()} is installed there, and {version_here} here: install the same"
        sys.path += [entry for entry in path if entry not in sys.path and os.path.isdir(entry)]
        from torchtune_ext.measured.machine import fingerprint
        from torchtune_ext.run.errors import text_of
        from torchtune_ext.run.parent import die_with_parent

        # Ray lets an actor live on for a while when the raylet, which has started it, is gone.
        die_with_parent(os.getppid())
        try:
            # Ray makes its workers nicer, by 15: a neighbor of ordinary priority would starve what is timed.
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))
        except PermissionError:
            why = "programs would be measured at the low priority that Ray gives its workers: start Ray with "
            return "refused", why + "RAY_worker_niceness=0 in its environment"
        try:
            from torchtune_ext.measured.bench import Bench

            self.bench = Bench(**pickle.loads(settings))
        except Exception as error:  # noqa: BLE001 (whatever it is, the trainer says which machine it comes from)
            return "refused", text_of(error)
        return "ready", fingerprint()

    async def measure(self, payload: bytes) -> tuple[str, Any]:
        """Measures one text.

        Args:
            payload: (kernel, text, permitted), pickled, as in `Bench.submit`; the kernel by itself, too.

        Returns:
            ("result", a pickled Result), or ("failed", why).
        """
        from torchtune_ext.measured.results import BenchError

        try:
            sent, text, permitted = pickle.loads(payload)
            kernel = pickle.loads(sent)
        except Exception as error:  # noqa: BLE001 (unpickling runs the user's code)
            return "failed", f"the kernel cannot be unpickled: {type(error).__name__}: {error}"
        try:
            future = self.bench.submit(kernel, text, permitted=permitted)
        except BenchError:
            # It measures nothing any more. The actor is lost then, and another one is made.
            os._exit(1)
        try:
            return "result", pickle.dumps(await asyncio.wrap_future(future))
        except BenchError as error:
            return "failed", str(error)

    async def look(self) -> None:
        """Answers, which shows that the machine is there."""

    async def close(self) -> None:
        """Ends all processes and removes all folders."""
        if self.bench is not None:
            self.bench.close()


@dataclass(eq=False, slots=True)
class Machine:
    """A machine that measures, as long as its actor lives."""

    title: str  # for people
    actor: Any
    texts: int = 0  # that it has
    is_lost: bool = False


class Driver:
    """Does what the trainer asks of Ray. A machine is known by Ray's name of it; one that comes back has another name."""

    def __init__(self, ray: Any, start_with: tuple) -> None:
        self._ray, self._start_with = ray, start_with
        self._machines: dict[str, Machine] = {}  # those that measure, by name
        self._faults: dict[str, str] = {}  # why a machine does not, and whether it never can
        self._refused: set[str] = set()
        # The machine of each group. A group is a problem of the task, so they are few.
        self._homes: dict[Hashable, Machine] = {}
        self._tasks: dict[int, asyncio.Task] = {}  # what is under way, by the number of the message
        self._has_machine = asyncio.Event()
        self._gone = asyncio.Event()  # the trainer has closed its end

    async def serve(self, end: socket.socket) -> None:
        """Works until the trainer is gone. The actors, which are not detached, end with this process."""
        self._frames = Frames(self._receive, self._gone.set)
        await asyncio.get_running_loop().create_connection(lambda: self._frames, sock=end)
        await self._gone.wait()

    def _receive(self, messages: list[tuple[int, str, tuple]]) -> None:
        for number, method, arguments in messages:
            if method != "cancel":
                task = self._tasks[number] = asyncio.ensure_future(self._do(number, method, arguments))
                task.add_done_callback(lambda _, number=number: self._tasks.pop(number))
            elif number in self._tasks:
                self._tasks[number].cancel()

    async def _do(self, number: int, method: str, arguments: tuple) -> None:
        try:
            answer = ("value", await getattr(self, method)(*arguments))
        except Failure as error:
            answer = ("lost", str(error))
        except Exception as error:  # noqa: BLE001 (Ray has many; the trainer is told)
            answer = ("lost", text_of(error))
        self._frames.say((number, *answer))

    async def keep(self) -> None:
        """Keeps an actor on each machine that carries the resource, also on those that come later.

        Raises:
            Failure: no machine can measure, at the start or for `LOST_S` seconds.
        """
        last_at = 0.0  # when there was a machine
        while True:
            nodes = [node for node in await asyncio.to_thread(self._ray.nodes) if node["Alive"]]
            titles = {
                node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
                for node in nodes
                if RESOURCE in node["Resources"]
            }
            for name in self._machines.keys() - titles.keys():
                self._lose(self._machines[name], "Ray says that the machine has gone")
            looks = [self._look(machine) for machine in self._machines.values()]
            new = titles.keys() - self._machines.keys() - self._refused
            await asyncio.gather(*looks, *[self._start(name, titles[name]) for name in new])
            if self._machines:
                last_at = time.monotonic()
            elif time.monotonic() > last_at + (LOST_S if last_at else 0.0):
                raise Failure(self._why_none(titles))
            await asyncio.sleep(LOOK_S)

    async def measure(self, payload: bytes, group: Hashable) -> tuple[str, Any]:
        """Has a text measured, by another machine if one is lost or fails. Returns what `Host.measure` does."""
        failed_at, machine, value = None, None, ""
        for _ in range(MAX_TRIES):
            machine = await self._chosen(group, failed_at)
            machine.texts += 1
            answer = machine.actor.measure.remote(payload)
            try:
                state, value = await answer
                if state == "result":
                    return state, value
                failed_at = machine
            except asyncio.CancelledError:
                # A Bench is told, too, in case that the text has not begun.
                self._ray.cancel(answer)
                raise
            except self._ray.exceptions.RayError as error:
                value = text_of(error)
                self._lose(machine, value)
            finally:
                machine.texts -= 1
        return "failed", f"tried {MAX_TRIES} times; the last time: {machine.title}: {value}"

    async def close(self) -> None:
        """Has all actors end their processes and remove their folders."""
        closing = [machine.actor.close.remote() for machine in self._machines.values()]
        await asyncio.to_thread(self._ray.wait, closing, num_returns=len(closing), timeout=CLOSE_S)

    async def _chosen(self, group: Hashable, failed_at: Machine | None) -> Machine:
        """The machine with the least work, or that of the group. A text that failed goes to another one if there is any."""
        # `keep` ends this wait, with the service.
        await self._has_machine.wait()
        machines = list(self._machines.values())
        home = self._homes.get(group)
        if failed_at is None and home in machines:
            return home
        others = [machine for machine in machines if machine is not failed_at] or machines
        chosen = min(others, key=lambda machine: machine.texts)
        if group is not None and failed_at is None:
            self._homes[group] = chosen
        return chosen

    async def _start(self, name: str, title: str) -> None:
        """Makes the actor of a machine. It waits until there is place for it."""
        place = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(name, soft=False)
        options = {"num_cpus": 0, "resources": {RESOURCE: 1}, "scheduling_strategy": place}
        machine = Machine(title, self._ray.remote(Host).options(**options).remote())
        try:
            async with asyncio.timeout(START_S):
                state, words = await machine.actor.start.remote(*self._start_with)
        except TimeoutError:
            state, words = "late", f"no actor within {START_S:g} s (does another program use its {RESOURCE}?)"
        except self._ray.exceptions.RayError as error:
            state, words = "late", text_of(error)
        if state == "ready":
            self._machines[name] = machine
            self._has_machine.set()
            self._frames.say((0, "ready", f"{title} measures: {words}"))
            return
        self._faults[name] = words
        if state == "refused":
            self._refused.add(name)
        self._lose(machine, words)

    async def _look(self, machine: Machine) -> None:
        """Loses a machine that is silent."""
        try:
            async with asyncio.timeout(SILENT_S):
                await machine.actor.look.remote()
        except TimeoutError:
            self._lose(machine, f"no answer within {SILENT_S:g} s")
        except self._ray.exceptions.RayError as error:
            self._lose(machine, text_of(error))

    def _lose(self, machine: Machine, why: str) -> None:
        """Ends the actor of a machine. Whoever waits for an answer of it hears that it is lost."""
        if machine.is_lost:
            return
        machine.is_lost = True
        self._ray.kill(machine.actor)
        self._machines = {name: each for name, each in self._machines.items() if each is not machine}
        if not self._machines:
            self._has_machine.clear()
        self._frames.say((0, "gone", f"{machine.title} does not measure: {why}"))

    def _why_none(self, titles: dict[str, str]) -> str:
        if not titles:
            address = self._ray.get_runtime_context().gcs_address
            return (
                f"no machine of the Ray cluster at {address} carries the resource {RESOURCE!r}. On each machine that "
                f"measures: {member_command(address)} --resources='{{\"{RESOURCE}\": 1}}'"
            )
        faults = [f"{titles[name]}: {self._faults.get(name, 'it was lost')}" for name in titles]
        return "no machine can measure: " + "; ".join(faults)


def main(fd: int, parent: int) -> None:
    die_with_parent(parent)
    # Ray adds the working directory to sys.path on every machine, where it may be anything.
    os.chdir("/")
    end = socket.socket(fileno=fd)

    def refuse(why: str) -> None:
        end.sendall(pack([(0, "unreachable", why)]))

    address, start_with = receive(end)
    try:
        ray = connect(address, refuse)
    except Refused as refused:
        refuse(str(refused))
        return
    asyncio.run(Driver(ray, start_with).serve(end))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
