"""vLLM engines: what all share (`VLLMCore`, also of `server.ServerCore`), and the engine of our own (`RemoteCore`)."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtune_ext.sampling import early
from torchtune_ext.sampling.calls import Call, CoreLost, Step, bounded
from torchtune_ext.sampling.child_process import ChildProcess, log_tail
from torchtune_ext.sampling.early import child_environment
from torchtune_ext.sampling.engine_args import ONE_MACHINE, engine_environment
from torchtune_ext.sampling.records import Completion, EngineConfig
from torchtune_ext.sampling.weight_buffer import WeightBuffer

ALREADY_ACTIVE = "weight update is already active"  # vLLM's answer when an update was begun and never finished


class VLLMCore:
    """The half of a `Core` that speaks of weights. `Core` says what its methods promise."""

    def __init__(self, config: EngineConfig, on_step: Callable[[Step], None], life: str = ""):
        """Args: on_step: takes the counters of each step; life: prefix of salts, where others use the engine."""
        self.config, self.on_step, self._life = config, on_step, life
        self.thrown_out = 0  # requests that our own pauses have thrown out, and that have not come again yet
        self._waiting = 0  # requests that wait in the engine's own queue, as of its last step
        self.calls: dict[str, Call] = {}
        self.cache_tokens = self.block = self.vocabulary = 0  # known after the launch
        self.asleep = 0  # level of sleep
        self.broken: Exception | None = None  # the error of our own code over a step's counters
        self.adapted = False  # whether requests use the adapter
        self.salt: str | None = None  # only requests of the same salt share a prefix

    @property
    def dead(self) -> bool:
        raise NotImplementedError

    def ending(self) -> str:
        raise NotImplementedError

    def rpc(self, method: str, /, **arguments: Any) -> Awaitable[Any]:
        """Calls a method of `AsyncLLM`, by its name there. Raises CoreLost, ValueError."""
        raise NotImplementedError

    def count(self, step: Step) -> None:
        """Hands the counters of a step on, without the preemptions by our own pauses."""
        # A pause that clears the cache throws out every running request, as a full cache would. vLLM counts that with
        # the request's next token. The throttle would take it for a limit that was too high.
        forgiven = min(step.preempted, self.thrown_out)
        self.thrown_out, self._waiting = self.thrown_out - forgiven, step.waiting
        self.on_step(replace(step, preempted=step.preempted - forgiven))

    async def quick(self, method: str, /, **arguments: Any) -> Any:
        """A call that the engine answers between two steps. Raises CoreLost, ValueError."""
        return await bounded(self, self.rpc(method, **arguments), self.config.probe_deadline_s, method)

    async def slow(self, method: str, /, **arguments: Any) -> Any:
        """A call that moves weights, and may take long. Raises CoreLost, ValueError."""
        return await bounded(self, self.rpc(method, **arguments), self.config.rpc_deadline_s, method)

    async def ping(self, deadline_s: float) -> None:
        await bounded(self, self.rpc("is_paused"), deadline_s, "is_paused")

    async def load(self, buffers: Sequence[WeightBuffer], version: int) -> tuple[float, float]:
        await self.ping(self.config.probe_deadline_s)
        if not buffers:
            if self.asleep:
                await self.slow("wake_up")
                self.asleep = 0
            await self.quick("update_weight_version", new_version=str(version))
            return 0.0, 0.0
        if self.asleep:
            await self.slow("wake_up", tags=["weights"])
        await self.prepare(buffers)
        started = time.monotonic()
        try:
            await self.quick("pause_generation", mode="keep", clear_cache=False)
            if self.config.kv_on_publish == "recompute":
                # This throws out all requests in flight, and their keys and values are computed again.
                self.thrown_out = max(0, len(self.calls) - self._waiting)
                if not await self.quick("reset_prefix_cache", reset_running_requests=True):
                    raise CoreLost(
                        "the engine refused to clear its KV cache, and would go on with keys and values of the old weights"
                    )
            else:
                # Requests in flight keep their old keys and values. New ones have another salt and never find them.
                self.salt = f"{self._life}-{version}"
            loading = time.monotonic()
            for buffer in buffers:
                await self.bring(buffer, version)
            loaded = time.monotonic()
            if self.asleep:
                await self.slow("wake_up", tags=["kv_cache", "scheduling"])
                self.asleep = 0
            await self.quick("resume_generation")
        except ValueError as error:
            # The engine is paused with weights that may be half loaded, so this life is over.
            raise CoreLost(f"the engine refused an update that had begun: {error}") from error
        return time.monotonic() - started, loaded - loading

    async def prepare(self, buffers: Sequence[WeightBuffer]) -> None:
        """Lets the engine open, and on a GPU pin, the trainer's memory. It samples meanwhile."""
        await self.slow("init_weight_transfer_engine", init_info=buffers[0].address())

    async def bring(self, buffer: WeightBuffer, version: int) -> None:
        """Loads a buffer while the engine is paused."""
        await self.begin_update(buffer)
        await self.take(buffer)
        await self.finish_update(buffer, version)

    async def begin_update(self, buffer: WeightBuffer) -> None:
        """Begins an update. For an adapter there is nothing to begin."""
        if buffer.adapter is not None:
            return
        try:
            return await self.slow("start_weight_update")
        except CoreLost as error:
            if ALREADY_ACTIVE not in str(error):
                raise
        # A trainer before us died in an update. Finishing it gives every layer a whole set of tensors, whatever they
        # hold, and ours then overwrite them.
        try:
            await self.slow("finish_weight_update")
            await self.slow("start_weight_update")
        except CoreLost as error:
            raise CoreLost(
                f"it is in the midst of an update of another trainer that cannot be finished; start the server again ({error})"
            ) from error

    async def take(self, buffer: WeightBuffer, broadcast: bool = False) -> None:
        """Lets the engine take the tensors from the trainer's memory, or from a broadcast of the sender."""
        if buffer.adapter is None:
            await self.slow("update_weights", update_info=buffer.manifest)
        elif broadcast:
            await self.slow("collective_rpc", method="receive_adapter", args=[buffer.manifest, buffer.adapter])
        else:
            arguments = [buffer.address(), buffer.manifest, buffer.adapter]
            await self.slow("collective_rpc", method="load_adapter", args=arguments)

    async def finish_update(self, buffer: WeightBuffer, version: int) -> None:
        """Ends an update, and labels what is sampled from then on."""
        if buffer.adapter is None:
            await self.slow("finish_weight_update", weight_version=str(version))
        else:
            await self.quick("update_weight_version", new_version=str(version))
            self.adapted = True

    async def checksums(self) -> list[dict[str, int | None]]:
        return await self.quick("collective_rpc", method="checksums")

    async def weight_version(self) -> int:
        return int(await self.quick("get_weight_version"))

    async def sleep(self, level: int) -> None:
        await self.ping(self.config.probe_deadline_s)
        self.thrown_out = max(0, len(self.calls) - self._waiting)
        await self.slow("sleep", level=level, mode="keep")
        self.asleep = level


class RemoteCore(ChildProcess, VLLMCore):
    """The process of the client of our own vLLM engine. `Core` says what its methods promise."""

    def __init__(
        self, model_dir: str, config: EngineConfig, log_path: Path, temp_dir: str, on_step: Callable[[Step], None]
    ):
        """Starts the client's process; it imports vLLM in the background. `launch` waits for it. Raises OSError."""
        VLLMCore.__init__(self, config, on_step)
        self.log = log_path
        self._configured = False
        self.log_start = log_path.stat().st_size if log_path.exists() else 0
        environ = engine_environment(config) | early.CLIENT_VARIABLES | {"TMPDIR": temp_dir} | ONE_MACHINE
        environ = child_environment(environ | {"VLLM_RPC_BASE_PATH": temp_dir})
        first, begun = [model_dir, config, str(log_path), environ], early.take()
        ChildProcess.__init__(self, "the engine's client", early.CLIENT, log_path, self._hear, first, environ, begun)

    def configure(self) -> None:
        """Waits for vLLM's configuration. Raises ValueError when vLLM refuses it; OSError when the client is lost."""
        try:
            asyncio.run_coroutine_threadsafe(self._configure(), self._loop).result()
        except CoreLost as error:
            raise OSError(f"{error}\n--- end of the engine's log ---\n{self.log_tail()}") from error

    async def _configure(self) -> None:
        await bounded(self, self.ask("configure"), self.config.start_deadline_s, "configure")
        self._configured = True

    async def launch(self) -> None:
        if not self._configured:
            await self._configure()
        self.cache_tokens, self.block, self.vocabulary = await bounded(
            self, self.ask("launch"), self.config.start_deadline_s, "launch"
        )

    async def generate(self, call: Call) -> Completion:
        with call.running(self.calls):
            # A copy is without the task, which lives in this process and cannot be pickled.
            return await self.ask("generate", replace(call), self.salt, self.adapted)

    def rpc(self, method: str, /, **arguments: Any) -> Awaitable[Any]:
        return self.ask("engine", method, arguments)

    def log_tail(self) -> str:
        return log_tail(self.log, self.log_start)

    def _hear(self, kind: str, value: Any) -> None:
        if kind == "dead":
            self.ended = value
        elif kind == "step" and self.broken is None:
            try:
                self.count(value)
            except Exception as error:  # noqa: BLE001 (the lane ends the run over it)
                self.broken = error  # the lane ends the run over it
