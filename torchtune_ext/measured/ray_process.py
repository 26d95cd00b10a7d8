"""The process that is Ray's driver for `RayBench`, and the actor that runs on each machine that measures.

    python -P -m torchtune_ext.measured.ray_process SOCKET PARENT

The trainer asks as `child_process.ChildProcess` does. Unasked the process says (0, "gone", which machine is lost, and why).
"""

import asyncio
import os
import pickle
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchtune_ext.cluster.connection import connect, member_command
from torchtune_ext.run.errors import RunFailure, describe_error
from torchtune_ext.run.process_env import die_with_parent
from torchtune_ext.sampling.child_process import MessageChannel

RAY_RESOURCE = "bench_host"  # of Ray, which the machines that measure carry
CLOSE_TIMEOUT_S = 10.0  # seconds for the actors to end their processes
START_TIMEOUT_S = 180.0  # seconds until an actor is ready; another program may hold the resource
MAX_TRIES = 3  # how often a text may be lost with its machine


class BenchActor:
    """The actor: a `Bench` on a machine that measures."""

    # The class travels there by value, and its methods import torchtune_ext only there. So a machine that has another
    # version, or none, can say so. They return what went wrong, since our exceptions may be unknown where they arrive.
    def __init__(self) -> None:
        self.bench: Any = None  # a Bench

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
            from torchtune_ext.measured.results import code_version
        except ImportError as error:
            return (
                "refused",
                f"torchtune_ext cannot be imported there ({error}), and {version_here} is here: install the same",
            )
        if code_version() != version_here:
            return (
                "refused",
                f"torchtune_ext {code_version()} is installed there, and {version_here} here: install the same",
            )
        sys.path += [entry for entry in path if entry not in sys.path and os.path.isdir(entry)]
        from torchtune_ext.measured.machine import machine_fingerprint
        from torchtune_ext.run.errors import describe_error
        from torchtune_ext.run.process_env import die_with_parent

        # Ray lets an actor live for a while after the raylet that started it is gone.
        die_with_parent(os.getppid())
        try:
            # Ray raises the niceness of its workers by 15. A neighbor of normal priority would starve what is timed.
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))
        except PermissionError:
            return (
                "refused",
                "programs would be measured at the low priority that Ray gives its workers: start Ray with "
                "RAY_worker_niceness=0 in its environment",
            )
        try:
            from torchtune_ext.measured.bench import Bench

            self.bench = Bench(**pickle.loads(settings))
        except Exception as error:  # noqa: BLE001 (whatever it is, the trainer says which machine it comes from)
            return "refused", describe_error(error)
        return "ready", machine_fingerprint()

    async def measure(self, payload: bytes) -> tuple[str, Any]:
        """Measures one text.

        Args:
            payload: (kernel, text, permitted), pickled, as in `Bench.submit`; the kernel by itself, too.

        Returns:
            ("result", a pickled Result), or ("failed", why).
        """
        from torchtune_ext.measured.results import BenchError

        try:
            kernel_bytes, text, permitted = pickle.loads(payload)
            kernel = pickle.loads(kernel_bytes)
        except Exception as error:  # noqa: BLE001 (unpickling runs the user's code)
            return "failed", f"the kernel cannot be unpickled: {type(error).__name__}: {error}"
        try:
            future = self.bench.submit(kernel, text, permitted=permitted)
        except BenchError:
            # The Bench has failed for good. Without this process the driver gives its texts to other machines.
            os._exit(1)
        try:
            return "result", pickle.dumps(await asyncio.wrap_future(future))
        except BenchError as error:
            return "failed", str(error)

    async def close(self) -> None:
        """Ends all processes and removes all folders."""
        if self.bench is not None:
            self.bench.close()


@dataclass(eq=False, slots=True)
class BenchMachine:
    """A machine that measures, as long as its actor lives."""

    label: str  # for people
    actor: Any
    in_flight: int = 0  # that it has


class RayDriver:
    """Does what the trainer asks of Ray."""

    def __init__(self) -> None:
        self._machines: list[BenchMachine] = []  # those that measure
        self._tasks: set[asyncio.Task] = set()  # what the trainer waits for
        self._trainer_closed = asyncio.Event()  # the trainer has closed its end

    async def serve(self, end: socket.socket) -> None:
        """Works until the trainer is gone. The actors, which are not detached, end with this process."""
        self._frames = MessageChannel(self._receive, self._trainer_closed.set)
        await asyncio.get_running_loop().create_connection(lambda: self._frames, sock=end)
        await self._trainer_closed.wait()

    def _receive(self, messages: list[tuple[int, str, tuple]]) -> None:
        for number, method, arguments in messages:
            # A text that nobody waits for any more is measured all the same.
            if method != "cancel":
                task = asyncio.ensure_future(self._handle_request(number, method, arguments))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _handle_request(self, number: int, method: str, arguments: tuple) -> None:
        try:
            answer = ("value", await getattr(self, method)(*arguments))
        except RunFailure as error:
            answer = ("lost", str(error))
        except Exception as error:  # noqa: BLE001 (Ray has many; the trainer is told)
            answer = ("lost", describe_error(error))
        self._frames.send((number, *answer))

    async def start(self, address: str, *start_with: Any) -> list[str]:
        """Joins the cluster, and makes an actor on each machine that carries the resource.

        Args:
            address: of the cluster.
            start_with: the arguments of `Host.start`.

        Returns:
            A line about each of these machines.

        Raises:
            Failure: the cluster cannot be joined, or no machine of it can measure.
        """
        # If Ray does not answer at all, this process ends, and the trainer reads what it has printed.
        self._ray, self._start_args = connect(address, lambda why: print(why, flush=True)), start_with
        nodes = [node for node in await asyncio.to_thread(self._ray.nodes) if node["Alive"]]
        nodes = [node for node in nodes if RAY_RESOURCE in node["Resources"]]
        if not nodes:
            address = self._ray.get_runtime_context().gcs_address
            raise RunFailure(
                f"no machine of the Ray cluster at {address} carries the resource {RAY_RESOURCE!r}. On each machine that "
                f"measures: {member_command(address)} --resources='{{\"{RAY_RESOURCE}\": 1}}'"
            )
        lines = await asyncio.gather(*map(self._start_machine, nodes))
        if not self._machines:
            raise RunFailure("no machine can measure: " + "; ".join(lines))
        return lines

    async def measure(self, payload: bytes) -> tuple[str, Any]:
        """Has a text measured by the machine with the least work, by another one if that is lost.

        Returns what `Host.measure` does.

        Raises:
            Failure: no machine is left, or the text was lost too often.
        """
        title = ""
        for _ in range(MAX_TRIES):
            if not self._machines:
                raise RunFailure(
                    "no machine that measures is left; start the run again, which goes on from its checkpoint"
                )
            machine = min(self._machines, key=lambda machine: machine.in_flight)
            machine.in_flight, title = machine.in_flight + 1, machine.label
            try:
                return await machine.actor.measure.remote(payload)
            except self._ray.exceptions.RayError as error:
                self._remove_machine(machine, describe_error(error))
            finally:
                machine.in_flight -= 1
        raise RunFailure(f"a program was lost with {MAX_TRIES} machines, the last of which was {title}")

    async def close(self) -> None:
        """Has all actors end their processes and remove their folders."""
        if closing := [machine.actor.close.remote() for machine in self._machines]:
            await asyncio.to_thread(self._ray.wait, closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)

    async def _start_machine(self, node: dict[str, Any]) -> str:
        """Makes the actor of a machine. It waits until there is place for it. Returns what became of it, for people."""
        title = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        place = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        options = {"num_cpus": 0, "resources": {RAY_RESOURCE: 1}, "scheduling_strategy": place}
        machine = BenchMachine(title, self._ray.remote(BenchActor).options(**options).remote())
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                state, words = await machine.actor.start.remote(*self._start_args)
        except TimeoutError:
            state, words = (
                "refused",
                f"no actor within {START_TIMEOUT_S:g} s (does another program use its {RAY_RESOURCE}?)",
            )
        except self._ray.exceptions.RayError as error:
            state, words = "refused", describe_error(error)
        if state == "ready":
            self._machines.append(machine)
            return f"{title} measures: {words}"
        self._ray.kill(machine.actor)
        return f"{title} does not measure: {words}"

    def _remove_machine(self, machine: BenchMachine, why: str) -> None:
        # Killing the actor makes every call that waits for it fail, and each then tries another machine.
        if machine in self._machines:
            self._machines.remove(machine)
            self._ray.kill(machine.actor)
            self._frames.send((0, "gone", f"{machine.label} does not measure any more: {why}"))


def main(fd: int, parent: int) -> None:
    die_with_parent(parent)
    # Ray adds the working directory to sys.path on every machine, where it may be anything.
    os.chdir("/")
    asyncio.run(RayDriver().serve(socket.socket(fileno=fd)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
