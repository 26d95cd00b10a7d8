"""Ray's driver process for `RayBench`, and the actor that runs on each measuring machine.

    python -P -m torchtune_ext.measured.ray_process SOCKET PARENT

The trainer sends requests through `child_process.ChildProcess`. The process reports a crashed
machine with the unsolicited message (0, "gone", machine and cause).
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

RAY_RESOURCE = "bench_host"  # Ray resource of the measuring machines
CLOSE_TIMEOUT_S = 10.0  # seconds for the actors to end their processes
START_TIMEOUT_S = 180.0  # seconds until an actor is ready; another program may hold the resource
MAX_TRIES = 3  # machines that may crash while they measure one text


class BenchActor:
    """A Ray actor with a `Bench` on a measuring machine."""

    # Ray pickles the class by value, and its methods import torchtune_ext on the remote machine. So
    # a machine with another version, or without the package, can report that. The methods return
    # errors as values, since the exception classes may be missing at the receiver.
    def __init__(self) -> None:
        self.bench: Any = None  # a Bench

    async def start(self, version_here: str, settings: bytes, path: Sequence[str]) -> tuple[str, str]:
        """Creates the Bench.

        Args:
            version_here: code version of the trainer. This machine must have the same version.
            settings: the pickled keyword arguments of the Bench.
            path: the trainer's sys.path, for users' kernels. This machine's packages come first.

        Returns:
            ("ready", fingerprint), or ("refused", cause).
        """
        try:
            from torchtune_ext.measured.results import code_version
        except ImportError as error:
            fix = f"install the trainer's version {version_here}"
            return "refused", f"torchtune_ext cannot be imported there ({error}). Fix: {fix}"
        if (there := code_version()) != version_here:
            return (
                "refused",
                f"torchtune_ext {there} is installed there, but {version_here} here. Fix: install the same",
            )
        sys.path += [entry for entry in path if entry not in sys.path and os.path.isdir(entry)]
        from torchtune_ext.measured.machine import machine_fingerprint
        from torchtune_ext.run.errors import describe_error
        from torchtune_ext.run.process_env import die_with_parent

        # Ray keeps an actor running for a while after its raylet has exited.
        die_with_parent(os.getppid())
        try:
            # Ray raises its workers' niceness by 15: a normal process would starve the timings.
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))
        except PermissionError:
            fix = "start Ray with RAY_worker_niceness=0 in its environment"
            return "refused", f"programs would run at the low priority of Ray's workers. Fix: {fix}"
        try:
            from torchtune_ext.measured.bench import Bench

            self.bench = Bench(**pickle.loads(settings))
        except Exception as error:  # noqa: BLE001 (the trainer reports any error with the machine's name)
            return "refused", describe_error(error)
        return "ready", machine_fingerprint()

    async def measure(self, payload: bytes) -> tuple[str, Any]:
        """Measures one text.

        Args:
            payload: pickled (pickled kernel, text, permitted), as in `Bench.submit`.

        Returns:
            ("result", pickled Result), or ("failed", cause).
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
            # The Bench has failed permanently. After this exit, other machines get the texts.
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
    """A measuring machine with its actor."""

    label: str  # name for messages
    actor: Any
    in_flight: int = 0  # number of texts


class RayDriver:
    """Serves the trainer's requests to Ray."""

    def __init__(self) -> None:
        self._machines: list[BenchMachine] = []  # machines with a ready actor
        self._tasks: set[asyncio.Task] = set()  # pending requests
        self._trainer_closed = asyncio.Event()  # set when the trainer closes its socket

    async def serve(self, end: socket.socket) -> None:
        """Serves until the trainer exits. The actors, which are not detached, end too."""
        self._frames = MessageChannel(self._receive, self._trainer_closed.set)
        await asyncio.get_running_loop().create_connection(lambda: self._frames, sock=end)
        await self._trainer_closed.wait()

    def _receive(self, messages: list[tuple[int, str, tuple]]) -> None:
        for number, method, arguments in messages:
            # "cancel" is ignored: a canceled text is measured all the same.
            if method != "cancel":
                task = asyncio.ensure_future(self._handle_request(number, method, arguments))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _handle_request(self, number: int, method: str, arguments: tuple) -> None:
        try:
            answer = ("value", await getattr(self, method)(*arguments))
        except RunFailure as error:
            answer = ("lost", str(error))
        except Exception as error:  # noqa: BLE001 (any error of Ray is reported to the trainer)
            answer = ("lost", describe_error(error))
        self._frames.send((number, *answer))

    async def start(self, address: str, *start_with: Any) -> list[str]:
        """Joins the cluster, and starts an actor on each machine with the resource.

        Args:
            start_with: the arguments of `BenchActor.start`.

        Returns:
            One status line per machine.

        Raises:
            RunFailure: the cluster cannot be joined, or none of its machines can measure.
        """
        # If Ray does not respond at all, this process ends, and the trainer reads its output.
        self._ray, self._start_args = connect(address, lambda why: print(why, flush=True)), start_with
        nodes = [node for node in await asyncio.to_thread(self._ray.nodes) if node["Alive"]]
        nodes = [node for node in nodes if RAY_RESOURCE in node["Resources"]]
        if not nodes:
            address = self._ray.get_runtime_context().gcs_address
            raise RunFailure(
                f"no machine of the Ray cluster at {address} carries the resource {RAY_RESOURCE!r}. Fix: run on each "
                f"measuring machine: {member_command(address)} --resources='{{\"{RAY_RESOURCE}\": 1}}'"
            )
        lines = await asyncio.gather(*map(self._start_machine, nodes))
        if not self._machines:
            raise RunFailure("no machine can measure: " + "; ".join(lines))
        return lines

    async def measure(self, payload: bytes) -> tuple[str, Any]:
        """Measures a text on the machine with the least work, or on another machine after a crash.

        Returns:
            The return value of `BenchActor.measure`.

        Raises:
            RunFailure: no machine is left, or `MAX_TRIES` machines crashed.
        """
        title = ""
        for _ in range(MAX_TRIES):
            if not self._machines:
                raise RunFailure(
                    "no machine that measures is left. Fix: restart the run, which resumes from its checkpoint"
                )
            machine = min(self._machines, key=lambda machine: machine.in_flight)
            machine.in_flight, title = machine.in_flight + 1, machine.label
            try:
                return await machine.actor.measure.remote(payload)
            except self._ray.exceptions.RayError as error:
                self._remove_machine(machine, describe_error(error))
            finally:
                machine.in_flight -= 1
        raise RunFailure(f"{MAX_TRIES} machines crashed while measuring one program; the last was {title}")

    async def close(self) -> None:
        """Makes all actors end their processes and remove their folders."""
        if closing := [machine.actor.close.remote() for machine in self._machines]:
            await asyncio.to_thread(self._ray.wait, closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)

    async def _start_machine(self, node: dict[str, Any]) -> str:
        """Starts the actor of a machine, once the resource is free. Returns a status line."""
        title = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        place = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        options = {"num_cpus": 0, "resources": {RAY_RESOURCE: 1}, "scheduling_strategy": place}
        machine = BenchMachine(title, self._ray.remote(BenchActor).options(**options).remote())
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                state, words = await machine.actor.start.remote(*self._start_args)
        except TimeoutError:
            hint = f"does another program use its {RAY_RESOURCE}?"
            state, words = "refused", f"the actor did not start within {START_TIMEOUT_S:g} s ({hint})"
        except self._ray.exceptions.RayError as error:
            state, words = "refused", describe_error(error)
        if state == "ready":
            self._machines.append(machine)
            return f"{title} measures: {words}"
        self._ray.kill(machine.actor)
        return f"{title} does not measure: {words}"

    def _remove_machine(self, machine: BenchMachine, why: str) -> None:
        # This fails all pending calls of the actor, and each call then tries another machine.
        if machine in self._machines:
            self._machines.remove(machine)
            self._ray.kill(machine.actor)
            self._frames.send((0, "gone", f"{machine.label} does not measure any more: {why}"))


def main(fd: int, parent: int) -> None:
    die_with_parent(parent)
    # Ray adds the working directory to sys.path on every machine, where it may hold other files.
    os.chdir("/")
    asyncio.run(RayDriver().serve(socket.socket(fileno=fd)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
