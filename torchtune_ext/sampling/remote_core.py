"""One life of a vLLM engine whose client lives in a process of its own: the trainer's end of `client_process.py`.

Training and the client of sampling do not share an interpreter, so that neither waits for the other's lock. To the
supervisor it is a `Core` like others: if the client's process dies or hangs, this life is over, and another one begins
with the published weights.
"""

import asyncio
import itertools
import socket
import subprocess
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtune_ext.run.parent import how_it_ended
from torchtune_ext.sampling import janitor
from torchtune_ext.sampling.calls import Call, CoreLost, Step, bounded
from torchtune_ext.sampling.child_process import Frames, log_tail, pack, start_module
from torchtune_ext.sampling.records import Completion, EngineConfig
from torchtune_ext.sampling.server_command import engine_environment, one_machine
from torchtune_ext.sampling.weight_buffer import WeightBuffer

CLIENT = "torchtune_ext.sampling.client_process"
# The client bounds its own calls into the engine. This end waits longer by this margin, and then it is the client that hangs.
MARGIN_S = 5.0


class RemoteCore:
    """Runs a vLLM engine of our own, with its client in another process. `Core` says what its methods promise."""

    def __init__(
        self, model_dir: str, config: EngineConfig, log_path: Path, temp_dir: str, on_step: Callable[[Step], None]
    ):
        """Starts the client's process; it imports vLLM in the background. `launch` waits for it. Raises OSError."""
        self.config, self.on_step, self.log = config, on_step, log_path
        self.cache_tokens = self.block = self.vocabulary = 0  # known after the launch
        self.asleep = 0  # level of sleep
        self.broken: Exception | None = None  # the error of our own code over a step's counters
        self.calls: dict[str, Call] = {}
        self.sign_of_life = self._heard = time.monotonic()  # of the engine; of the client
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future] = {}  # who waits, by the number of the message
        self._how: str | None = None  # how this life ended, as far as the client could tell
        self._configured = False
        self._loop = asyncio.get_running_loop()
        self.log_start = log_path.stat().st_size if log_path.exists() else 0
        environ = engine_environment(config) | {"VLLM_CONFIGURE_LOGGING": "0", "TMPDIR": temp_dir} | one_machine()
        environ |= {"VLLM_RPC_BASE_PATH": temp_dir}
        ours, theirs = socket.socketpair()
        with theirs:
            self._client = start_module(CLIENT, log_path, str(theirs.fileno()), environ=environ, keep=[theirs.fileno()])
        ours.sendall(pack([model_dir, config]))
        ours.setblocking(False)
        self._frames = Frames(self._receive, self._end)
        self._connected = self._loop.create_task(self._loop.create_connection(lambda: self._frames, sock=ours))

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def group(self) -> int:
        """The process group of the client, the engine and its workers: the client's process id."""
        return self._client.pid

    @property
    def dead(self) -> bool:
        return self._how is not None or self._client.poll() is not None

    def ending(self) -> str:
        return self._how or how_it_ended(self._client.poll(), "the engine's client")

    def configure(self) -> None:
        """Lets the client import vLLM and make its configuration, and waits for that. Raises ValueError when vLLM refuses the
        config, OSError when the client is lost."""
        try:
            asyncio.run_coroutine_threadsafe(self._configure(), self._loop).result()
        except CoreLost as error:
            raise OSError(f"{error}\n--- end of the engine's log ---\n{self.log_tail()}") from error

    async def _configure(self) -> None:
        await self._bounded("configure", deadline_s=self.config.start_deadline_s)
        self._configured = True

    async def launch(self) -> None:
        """Brings the engine up, in 8 to 15 s with a small model, and until `start_deadline_s` at most. Raises CoreLost;
        ValueError when vLLM refuses the configuration."""
        if not self._configured:
            await self._configure()
        limit = self.config.start_deadline_s
        self.cache_tokens, self.block, self.vocabulary = await self._bounded("launch", deadline_s=limit)
        self.sign_of_life = time.monotonic()

    def kill(self) -> None:
        janitor.kill(self.group)

    def log_tail(self) -> str:
        return log_tail(self.log, self.log_start)

    async def stop(self) -> None:
        """Ends this life and everything that waits for it. The waiting requests end with CoreLost."""
        self._how = self._how or "the engine was ended"
        self.kill()
        for call in list(self.calls.values()):
            call.lose()
        self._lose_answers()
        self._connected.cancel()
        self._frames.close()
        await asyncio.to_thread(self._reap)

    def _reap(self) -> None:
        self._client.wait(5.0)
        janitor.end(self.group, 5.0)

    # -- work ---------------------------------------------------------------------------------------------------------

    async def generate(self, call: Call) -> Completion:
        """Runs one request to its end. Raises CoreLost, or ValueError when vLLM refuses the request."""
        # It leaves with the loop's next round, and the task that `begin` puts into it cannot be sent.
        number, answer = self._ask("generate", replace(call))
        call.begin()
        self.calls[call.id] = call
        try:
            return await answer
        except asyncio.CancelledError:
            if call.was_lost():
                raise CoreLost("the engine was ended") from None
            self._frames.say((0, "cancel", (number,)))
            raise
        finally:
            self._answers.pop(number, None)
            del self.calls[call.id]

    async def end(self, call: Call, reason: str) -> None:
        """Asks for the end of a running request; it returns what was sampled until now."""
        if not call.ended_by:
            call.ended_by = reason
            await self._bounded("end", call.id, reason, deadline_s=self.config.probe_deadline_s + MARGIN_S)

    async def ping(self, deadline_s: float) -> None:
        """Returns once the engine's main loop has answered. Raises CoreLost after `deadline_s`, or soon after it."""
        await self._bounded("ping", deadline_s, deadline_s=deadline_s + MARGIN_S)

    async def load(self, buffers: Sequence[WeightBuffer], version: int) -> tuple[float, float]:
        """Replaces weights between two steps; requests in flight go on with the new ones.

        Args: buffers: what to load, the model before its adapter; empty: only the label `version` is set.
        Returns: seconds of pause, seconds of loading in it. Raises CoreLost: the engine must not be used further.
        """
        sent = [(buffer.address(), buffer.manifest, buffer.adapter) for buffer in buffers]
        times = await self._moving("load", sent, version)
        self.asleep = 0 if buffers else self.asleep
        return times

    async def checksums(self) -> list[dict[str, int | None]]:
        """Returns what each worker says of the weights that it has taken. Raises CoreLost."""
        return await self._bounded("checksums", deadline_s=self.config.probe_deadline_s + MARGIN_S)

    async def weight_version(self) -> int:
        """Returns the label of what the engine samples. Raises CoreLost."""
        return await self._bounded("weight_version", deadline_s=self.config.probe_deadline_s + MARGIN_S)

    async def sleep(self, level: int) -> None:
        """Gives the GPU's memory back. Level 1 keeps the weights in host memory, level 2 drops them. Raises CoreLost."""
        await self._moving("sleep", level)
        self.asleep = level

    async def wake(self) -> None:
        """Takes the memory again after a sleep of level 1; after level 2 only `load` wakes it. Raises CoreLost."""
        await self._moving("wake")
        self.asleep = 0

    # -- messages -----------------------------------------------------------------------------------------------------

    def _ask(self, method: str, *arguments: Any) -> tuple[int, asyncio.Future]:
        """Sends a message. Returns its number, and the future of its answer. Raises CoreLost."""
        if self._how is not None:
            raise CoreLost(self._how)
        number, answer = next(self._numbers), self._loop.create_future()
        self._answers[number] = answer
        self._frames.say((number, method, arguments))
        return number, answer

    async def _answer(self, method: str, *arguments: Any) -> Any:
        number, answer = self._ask(method, *arguments)
        try:
            return await answer
        finally:
            self._answers.pop(number, None)

    async def _bounded(self, method: str, *arguments: Any, deadline_s: float) -> Any:
        """Asks for something and waits for it. Raises CoreLost, ValueError."""
        return await bounded(self, _named(self._answer(method, *arguments), method), deadline_s)

    async def _moving(self, method: str, *arguments: Any) -> Any:
        """Asks for something that moves weights: it may take long, but not stand still. Raises CoreLost, ValueError."""
        silence_s = self.config.probe_deadline_s + MARGIN_S

        def heard() -> float:
            if time.monotonic() > self._heard + silence_s:
                raise CoreLost(f"the engine's client is frozen: no word of it for {silence_s:g} s in {method}")
            return self._heard

        # The client makes several calls, each of them within rpc_deadline_s, and sees an engine that stands still.
        work = _named(self._answer(method, *arguments), method)
        return await bounded(self, work, 8 * self.config.rpc_deadline_s, heard, 2 * silence_s)

    def _receive(self, messages: list[Any]) -> None:
        self._heard = time.monotonic()
        for number, kind, value in messages:
            if kind == "beat":
                continue
            self.sign_of_life = self._heard
            if kind == "step":
                self._take_step(value)
            elif kind == "dead":
                self._how = value
            elif (answer := self._answers.get(number)) is not None and not answer.done():
                if kind == "value":
                    answer.set_result(value)
                else:
                    answer.set_exception(ValueError(value) if kind == "refused" else CoreLost(value))

    def _take_step(self, step: Step) -> None:
        if self.broken is None:
            try:
                self.on_step(step)
            except Exception as error:
                self.broken = error  # the supervisor ends the run over it

    def _end(self) -> None:
        """The client is gone."""
        try:
            code = self._client.wait(1.0)
        except subprocess.TimeoutExpired:
            code = None
        self._how = self._how or how_it_ended(code, "the engine's client")
        self._lose_answers()

    def _lose_answers(self) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(CoreLost(self._how))
                answer.exception()  # it is fetched here, since the one who waited may be gone


def _named(work: Coroutine[Any, Any, Any], name: str) -> Coroutine[Any, Any, Any]:
    """Gives a coroutine the name by which an error will speak of it."""
    work.__name__ = name
    return work
