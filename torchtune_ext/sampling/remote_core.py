"""One life of a vLLM engine whose client lives in a process of its own: the trainer's end of `client_process.py`.

Training and the client of sampling do not share an interpreter, so that neither waits for the other's lock. To its
lane it is a `Core` like others: if the client's process dies or hangs, this life is over, and another one begins
with the published weights.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torchtune_ext.sampling.calls import Call, CoreLost, Step, bounded
from torchtune_ext.sampling.child_process import ChildProcess, log_tail, session_cpu_seconds
from torchtune_ext.sampling.records import Completion, EngineConfig
from torchtune_ext.sampling.server_command import engine_environment, one_machine
from torchtune_ext.sampling.vllm_core import VLLMCore

CLIENT = "torchtune_ext.sampling.client_process"


class RemoteCore(VLLMCore):
    """Runs a vLLM engine of our own, with its client in another process. `Core` says what its methods promise."""

    def __init__(
        self, model_dir: str, config: EngineConfig, log_path: Path, temp_dir: str, on_step: Callable[[Step], None]
    ):
        """Starts the client's process; it imports vLLM in the background. `launch` waits for it. Raises OSError."""
        super().__init__(config)
        self.on_step, self.log = on_step, log_path
        self._configured = False
        self._loop = asyncio.get_running_loop()
        self.log_start = log_path.stat().st_size if log_path.exists() else 0
        environ = engine_environment(config) | {"VLLM_CONFIGURE_LOGGING": "0", "TMPDIR": temp_dir} | one_machine()
        environ |= {"VLLM_RPC_BASE_PATH": temp_dir}
        self._client = ChildProcess(
            "the engine's client", CLIENT, log_path, self._hear, [model_dir, config], environ=environ
        )
        self.cpu_seconds = partial(session_cpu_seconds, self._client.pid)  # without the client

    @property
    def group(self) -> int:
        """The process group of the client, the engine and its workers."""
        return self._client.pid

    @property
    def dead(self) -> bool:
        return self._client.gone

    @property
    def sign_of_life(self) -> float:
        """What the client says without being asked comes from the engine."""
        return self._client.heard

    def ending(self) -> str:
        return self._client.ending()

    def configure(self) -> None:
        """Lets the client import vLLM and make its configuration, and waits for that. Raises ValueError when vLLM refuses the
        config, OSError when the client is lost."""
        try:
            asyncio.run_coroutine_threadsafe(self._configure(), self._loop).result()
        except CoreLost as error:
            raise OSError(f"{error}\n--- end of the engine's log ---\n{self.log_tail()}") from error

    async def _configure(self) -> None:
        await bounded(self, self._client.ask("configure"), self.config.start_deadline_s, "configure")
        self._configured = True

    async def launch(self) -> None:
        """Brings the engine up, in 8 to 15 s with a small model, and until `start_deadline_s` at most. Raises CoreLost;
        ValueError when vLLM refuses the configuration."""
        if not self._configured:
            await self._configure()
        self.cache_tokens, self.block, self.vocabulary = await bounded(
            self, self._client.ask("launch"), self.config.start_deadline_s, "launch"
        )

    async def generate(self, call: Call) -> Completion:
        """Runs one request to its end. Raises CoreLost, or ValueError when vLLM refuses the request."""
        with call.running(self.calls):
            return await self._client.ask("generate", replace(call, task=None), self.salt, self.adapted)

    def ask(self, method: str, /, **arguments: Any) -> Awaitable[Any]:
        return self._client.ask("engine", method, arguments)

    def kill(self) -> None:
        self._client.kill()

    def log_tail(self) -> str:
        return log_tail(self.log, self.log_start)

    async def stop(self) -> None:
        """Ends this life and everything that waits for it. The waiting requests end with CoreLost."""
        for call in list(self.calls.values()):
            call.lose()
        await self._client.stop()

    def _hear(self, kind: str, value: Any) -> None:
        if kind == "dead":
            self._client.ended = value
        elif kind == "step" and self.broken is None:
            try:
                self.on_step(value)
            except Exception as error:
                self.broken = error  # the lane ends the run over it
