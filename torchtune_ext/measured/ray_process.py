"""The process that is Ray's driver for `RayBench`, and the actor that runs on each machine that measures.

Ray takes over the signals of its driver, and ends the whole process when its cluster is lost. A trainer shall have neither,
so the driver is this process. It decides nothing: it does what the trainer asks, as `child_process.ChildProcess` asks.

    python -P -m torchtune_ext.measured.ray_process SOCKET PARENT

The first frame holds (address of the cluster, resource of the machines that measure). If the cluster cannot be joined it says
(0, "unreachable", why), and ends.
"""

import asyncio
import logging
import os
import pickle
import queue
import socket
import sys
from collections.abc import Sequence
from logging.handlers import QueueHandler
from typing import Any

from torchtune_ext.measured.ray_connect import Refused, connect
from torchtune_ext.run.errors import text_of
from torchtune_ext.run.parent import die_with_parent
from torchtune_ext.sampling.child_process import Frames, pack, receive

CLOSE_S = 10.0  # seconds for the actors to end their processes
LOGGED = 1000  # lines of a machine's log that are kept until they are fetched


class Host:
    """The actor: a `Bench` on a machine that measures.

    The class travels there by value, and looks for torchtune_ext only there. So a machine that has another version, or none,
    can say so. That is why its methods import what is ours themselves, and return what went wrong: an exception of ours may be
    unknown where it arrives.
    """

    def __init__(self) -> None:
        self.bench = None
        # Nobody reads the log of an actor.
        self.log: queue.Queue[logging.LogRecord] = queue.Queue(LOGGED)
        handler = QueueHandler(self.log)
        handler.setLevel(logging.WARNING)
        logging.getLogger("torchtune_ext").addHandler(handler)

    async def start(self, version_here: str, settings: bytes, path: Sequence[str]) -> tuple[str, str, int]:
        """Makes the Bench.

        Args:
            version_here: of the trainer, which has to be that of this machine.
            settings: the keywords of the Bench, pickled.
            path: the trainer's sys.path, for kernels of the user's own. What is installed on this machine comes first.

        Returns:
            ("ready", the fingerprint, for how many texts there is room), or ("refused", why, 0).
        """
        try:
            from torchtune_ext.measured.results import version
        except ImportError as error:
            why = f"torchtune_ext cannot be imported there ({error}), and {version_here} is here: install the same"
            return "refused", why, 0
        if version() != version_here:
            why = f"torchtune_ext {version()} is installed there, and {version_here} here: install the same"
            return "refused", why, 0
        sys.path += [entry for entry in path if entry not in sys.path and os.path.isdir(entry)]
        from torchtune_ext.measured.machine import fingerprint
        from torchtune_ext.run.errors import text_of
        from torchtune_ext.run.parent import die_with_parent

        # Ray lets an actor live on for a while when the raylet, which has started it, is gone.
        die_with_parent(os.getppid())
        self._be_as_nice_as_ray()
        keywords = pickle.loads(settings)
        try:
            from torchtune_ext.measured.bench import Bench

            self.bench = Bench(**keywords)
        except Exception as error:  # noqa: BLE001 (whatever it is, the trainer says which machine it comes from)
            return "refused", text_of(error), 0
        workers = keywords.get("workers") or len(os.sched_getaffinity(0))
        # As many wait here as are at work, so that no worker is idle while a result travels.
        return "ready", fingerprint(), 2 * workers + 2

    async def measure(self, payload: bytes) -> tuple[str, Any]:
        """Measures one text.

        Args:
            payload: (kernel, text, permitted), pickled, as in `Bench.submit`; the kernel by itself, too.

        Returns:
            ("result", a pickled Result), ("failed", why), or ("broken", why) if the Bench measures nothing any more.
        """
        from torchtune_ext.measured.results import BenchError

        try:
            sent, text, permitted = pickle.loads(payload)
            kernel = pickle.loads(sent)
        except Exception as error:  # noqa: BLE001 (unpickling runs the user's code)
            return "failed", f"the kernel cannot be unpickled: {type(error).__name__}: {error}"
        try:
            future = self.bench.submit(kernel, text, permitted=permitted)
        except BenchError as error:
            return "broken", str(error)
        try:
            return "result", pickle.dumps(await asyncio.wrap_future(future))
        except BenchError as error:
            return "failed", str(error)

    async def look(self) -> tuple[dict[str, float], list[tuple[int, str, str]]]:
        """Returns the counters of the Bench, and (level, name of the logger, message) of each new line of the log."""
        records = [self.log.get_nowait() for _ in range(self.log.qsize())]
        return self.bench.stats(), [(each.levelno, each.name, each.getMessage()) for each in records]

    async def close(self) -> None:
        """Ends all processes and removes all folders."""
        if self.bench is not None:
            self.bench.close()

    def _be_as_nice_as_ray(self) -> None:
        """Takes back that Ray makes its workers nicer (by 15): a neighbor of ordinary priority would starve what is timed."""
        priority = os.getpriority(os.PRIO_PROCESS, os.getppid())
        if os.getpriority(os.PRIO_PROCESS, 0) > priority:
            try:
                os.setpriority(os.PRIO_PROCESS, 0, priority)
            except PermissionError:
                logging.getLogger("torchtune_ext.measured.ray_process").warning(
                    "programs are measured at the low priority that Ray gives its workers, so that neighbors disturb them: "
                    "start Ray with RAY_worker_niceness=0 in its environment"
                )


class Driver:
    """Does what the trainer asks of Ray. A machine is known by Ray's name of it; one that comes back has another name."""

    def __init__(self, ray: Any, resource: str) -> None:
        self._ray, self._resource = ray, resource
        self._host = ray.remote(Host)
        self._actors: dict[str, Any] = {}  # by machine
        self._tasks: dict[int, asyncio.Task] = {}  # what is under way, by the number of the message
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
        except Exception as error:  # noqa: BLE001 (Ray has many; the trainer is told)
            answer = ("lost", text_of(error))
        self._frames.say((number, *answer))

    async def machines(self) -> tuple[str, dict[str, str]]:
        """Returns the address of the cluster, and the title of each machine that carries the resource."""
        nodes = [node for node in await asyncio.to_thread(self._ray.nodes) if node["Alive"]]
        titles = {
            node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            for node in nodes
            if self._resource in node["Resources"]
        }
        return self._ray.get_runtime_context().gcs_address, titles

    async def call(self, name: str, method: str, *arguments: Any) -> Any:
        """Calls a method of the actor on a machine. It is made for `start`, which waits until there is place for it."""
        if method == "start":
            place = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(name, soft=False)
            options = {"num_cpus": 0, "resources": {self._resource: 1}, "scheduling_strategy": place}
            self._actors[name] = self._host.options(**options).remote()
        answer = getattr(self._actors[name], method).remote(*arguments)
        try:
            return await answer
        except asyncio.CancelledError:
            # A Bench is told, too, in case that the text has not begun.
            self._ray.cancel(answer)
            raise

    async def kill(self, name: str) -> None:
        """Ends the actor of a machine. Whoever waits for an answer of it hears that it is lost."""
        self._ray.kill(self._actors.pop(name))

    async def close(self) -> None:
        """Has all actors end their processes and remove their folders."""
        closing = [actor.close.remote() for actor in self._actors.values()]
        await asyncio.to_thread(self._ray.wait, closing, num_returns=len(closing), timeout=CLOSE_S)


def main(fd: int, parent: int) -> None:
    die_with_parent(parent)
    # Ray adds the working directory to sys.path on every machine, where it may be anything.
    os.chdir("/")
    end = socket.socket(fileno=fd)

    def refuse(why: str) -> None:
        end.sendall(pack([(0, "unreachable", why)]))

    address, resource = receive(end)
    try:
        ray = connect(address, refuse)
    except Refused as refused:
        refuse(str(refused))
        return
    asyncio.run(Driver(ray, resource).serve(end))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
