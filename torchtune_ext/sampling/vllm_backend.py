"""vLLM backends: the shared `VLLMBackend`, and `ProcessBackend` for a replica that this run starts.

`server.ServerBackend` is the backend of a vLLM server.
"""

import asyncio
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtune_ext.sampling import prestart
from torchtune_ext.sampling.backend import (
    BackendCrashed,
    EngineRequest,
    EngineStepStats,
    ProcessStatus,
    call_with_deadline,
)
from torchtune_ext.sampling.child_process import ChildProcess, log_tail
from torchtune_ext.sampling.engine_args import LOOPBACK_VARIABLES, engine_environment
from torchtune_ext.sampling.types import Completion, EngineConfig
from torchtune_ext.sampling.weight_buffer import WeightBuffer

ALREADY_ACTIVE = "weight update is already active"  # vLLM's error if a weight update was started but not finished


class VLLMBackend(ProcessStatus):
    """The weight-sync half of a `Backend`, which documents the methods."""

    def __init__(self, config: EngineConfig, on_step: Callable[[EngineStepStats], None], salt_prefix: str = ""):
        """Creates a backend without a process.

        Args:
            config: The `engine:` section of this replica.
            on_step: Called with the counters of each step.
            salt_prefix: Prefix of cache salts, for a replica with other users.
        """
        self.config, self.on_step, self._salt_prefix = config, on_step, salt_prefix
        self.num_self_preempted = 0  # requests preempted by our own pauses and not yet resumed
        self._waiting = 0  # requests in the replica's own queue, as of its last step
        self.requests: dict[str, EngineRequest] = {}
        self.cache_tokens = self.block_size = self.vocab_size = 0  # known after the launch
        self.sleep_level = 0
        self.stats_error: Exception | None = None  # error of our own code while it read a step's counters
        self.uses_adapter = False  # whether requests use the adapter
        self.cache_salt: str | None = None  # requests share cached prefixes only with the same salt

    @abstractmethod
    def rpc(self, method: str, /, **arguments: Any) -> Awaitable[Any]:
        """Calls a method of `AsyncLLM` by name. Raises BackendCrashed, ValueError."""

    def report_step(self, step: EngineStepStats) -> None:
        """Passes the counters of a step to `on_step`, without preemptions by our own pauses."""
        # A pause that clears the cache preempts every running request, like a full cache, and the
        # throttle would lower its limit. vLLM counts each with the request's next token.
        own = min(step.preempted, self.num_self_preempted)
        self.num_self_preempted, self._waiting = self.num_self_preempted - own, step.waiting
        self.on_step(replace(step, preempted=step.preempted - own))

    async def quick_call(self, method: str, /, **arguments: Any) -> Any:
        """Calls a method that the replica answers between two steps (`probe_deadline_s`).

        Raises:
            BackendCrashed: If the replica crashes or does not answer in time.
            ValueError: If the replica refuses the call.
        """
        return await call_with_deadline(self, self.rpc(method, **arguments), self.config.probe_deadline_s, method)

    async def slow_call(self, method: str, /, **arguments: Any) -> Any:
        """Calls a slow method, which moves weights (`rpc_deadline_s`)."""
        return await call_with_deadline(self, self.rpc(method, **arguments), self.config.rpc_deadline_s, method)

    async def ping(self, deadline_s: float) -> None:
        await call_with_deadline(self, self.rpc("is_paused"), deadline_s, "is_paused")

    async def load(self, buffers: Sequence[WeightBuffer], version: int) -> tuple[float, float]:
        await self.ping(self.config.probe_deadline_s)
        if self.sleep_level:
            await self.slow_call("wake_up", tags=["weights"])
        if self.sleep_level == 2 and all(buffer.adapter is not None for buffer in buffers):
            # Level 2 has dropped the base weights, and no buffer holds them: vLLM rereads its files.
            await self.slow_call("collective_rpc", method="reload_base")
        if not buffers:
            await self.finish_wake_up()
            await self.quick_call("update_weight_version", new_version=str(version))
            return 0.0, 0.0
        await self.init_transfer(buffers)
        started = time.monotonic()
        try:
            await self.quick_call("pause_generation", mode="keep", clear_cache=False)
            if self.config.kv_on_publish == "recompute":
                # The reset preempts all in-flight requests, whose keys and values are recomputed.
                self.num_self_preempted = max(0, len(self.requests) - self._waiting)
                if not await self.quick_call("reset_prefix_cache", reset_running_requests=True):
                    raise BackendCrashed(
                        "the engine refused to clear its KV cache, and would keep keys and values of the old weights"
                    )
            else:
                # New requests never reuse the old keys and values of in-flight requests.
                self.cache_salt = f"{self._salt_prefix}-{version}"
            loading = time.monotonic()
            for buffer in buffers:
                await self.load_buffer(buffer, version)
            loaded = time.monotonic()
            await self.finish_wake_up()
            await self.quick_call("resume_generation")
        except ValueError as error:
            # The replica is paused and its weights may be half loaded, so it must be restarted.
            raise BackendCrashed(f"the engine refused a weight update after its start: {error}") from error
        return time.monotonic() - started, loaded - loading

    async def finish_wake_up(self) -> None:
        """Wakes what sleeps next to the weights, which `load` has woken and loaded before."""
        if self.sleep_level:
            await self.slow_call("wake_up", tags=["kv_cache", "scheduling"])
            self.sleep_level = 0

    async def init_transfer(self, buffers: Sequence[WeightBuffer]) -> None:
        """Lets the replica open (on a GPU: pin) the trainer's memory; sampling continues."""
        await self.slow_call("init_weight_transfer_engine", init_info=buffers[0].address())

    async def load_buffer(self, buffer: WeightBuffer, version: int) -> None:
        """Loads a buffer into the paused replica."""
        await self.begin_update(buffer)
        await self.transfer_tensors(buffer)
        await self.finish_update(buffer, version)

    async def begin_update(self, buffer: WeightBuffer) -> None:
        """Starts a weight update; an adapter needs no start."""
        if buffer.adapter is not None:
            return
        try:
            return await self.slow_call("start_weight_update")
        except BackendCrashed as error:
            if ALREADY_ACTIVE not in str(error):
                raise
        # A previous trainer died during an update. Once it is finished, every layer has a complete
        # set of arbitrary tensors, which this update overwrites.
        try:
            await self.slow_call("finish_weight_update")
            await self.slow_call("start_weight_update")
        except BackendCrashed as error:
            raise BackendCrashed(
                f"a weight update of another trainer is active and cannot be finished; restart the server ({error})"
            ) from error

    async def transfer_tensors(self, buffer: WeightBuffer, broadcast: bool = False) -> None:
        """Lets the replica read the tensors, from the trainer's memory or by a broadcast."""
        if buffer.adapter is None:
            await self.slow_call("update_weights", update_info=buffer.manifest)
        else:
            method, source = ("receive_adapter", []) if broadcast else ("load_adapter", [buffer.address()])
            await self.slow_call("collective_rpc", method=method, args=[*source, buffer.manifest, buffer.adapter])

    async def finish_update(self, buffer: WeightBuffer, version: int) -> None:
        """Finishes a weight update, and sets the version of the tokens sampled from then on."""
        if buffer.adapter is None:
            await self.slow_call("finish_weight_update", weight_version=str(version))
        else:
            await self.quick_call("update_weight_version", new_version=str(version))
            self.uses_adapter = True

    async def checksums(self) -> list[dict[str, int | None]]:
        return await self.quick_call("collective_rpc", method="checksums")

    async def weight_version(self) -> int:
        return int(await self.quick_call("get_weight_version"))

    async def sleep(self, level: int) -> None:
        await self.ping(self.config.probe_deadline_s)
        self.num_self_preempted = max(0, len(self.requests) - self._waiting)
        await self.slow_call("sleep", level=level, mode="keep")
        self.sleep_level = level


class ProcessBackend(ChildProcess, VLLMBackend):
    """The client process of a replica that this run starts. `Backend` documents the methods."""

    def __init__(
        self,
        model_dir: str,
        config: EngineConfig,
        log_path: Path,
        temp_dir: str,
        on_step: Callable[[EngineStepStats], None],
    ):
        """Starts the client process, which imports vLLM in the background; `launch` waits for it.

        Raises:
            OSError: If the process cannot be started.
        """
        VLLMBackend.__init__(self, config, on_step)
        self.log = log_path
        self._configured = False
        self.log_start = log_path.stat().st_size if log_path.exists() else 0
        folders = {"TMPDIR": temp_dir, "VLLM_RPC_BASE_PATH": temp_dir}
        environ = engine_environment(config) | prestart.CLIENT_VARIABLES | folders | LOOPBACK_VARIABLES
        environ = prestart.child_environment(environ)
        frame, client = [model_dir, config, str(log_path), environ], prestart.take_prestarted()
        ChildProcess.__init__(
            self, "the engine's client", prestart.CLIENT_MODULE, log_path, self._handle_event, frame, environ, client
        )

    def configure(self) -> None:
        """Waits until vLLM has validated the config.

        Raises:
            ValueError: If vLLM refuses the config.
            OSError: If the client process crashes.
        """
        try:
            asyncio.run_coroutine_threadsafe(self._configure(), self._loop).result()
        except BackendCrashed as error:
            raise OSError(f"{error}\n--- end of the engine's log ---\n{self.log_tail()}") from error

    async def _configure(self) -> None:
        await call_with_deadline(self, self.send_request("configure"), self.config.start_deadline_s, "configure")
        self._configured = True

    async def launch(self) -> None:
        if not self._configured:
            await self._configure()
        self.cache_tokens, self.block_size, self.vocab_size = await call_with_deadline(
            self, self.send_request("launch"), self.config.start_deadline_s, "launch"
        )

    async def generate(self, request: EngineRequest) -> Completion:
        with request.track_in(self.requests):
            # `replace` drops the task, which cannot be pickled.
            return await self.send_request("generate", replace(request), self.cache_salt, self.uses_adapter)

    def rpc(self, method: str, /, **arguments: Any) -> Awaitable[Any]:
        return self.send_request("engine", method, arguments)

    def log_tail(self) -> str:
        return log_tail(self.log, self.log_start)

    def _handle_event(self, kind: str, value: Any) -> None:
        if kind == "dead":
            self.exit_reason = value
        elif kind == "step" and self.stats_error is None:
            try:
                self.report_step(value)
            except Exception as error:  # noqa: BLE001 (it retires the replica)
                self.stats_error = error
