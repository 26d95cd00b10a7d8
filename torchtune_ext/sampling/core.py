"""One life of a vLLM engine: its client (`AsyncLLM`) in this process, its EngineCore in a process of its own.

The client's process makes and uses it for the trainer, or the supervisor does so itself, always in one asyncio thread.
What goes wrong in here comes out as `CoreLost`: this life is over, and another one may begin.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from torchtune_ext.run.errors import Mistake
from torchtune_ext.sampling.calls import Call, CoreLost, Step, bounded, paused, require_cleared
from torchtune_ext.sampling.core_process import (
    LOG_FORMAT,
    LOG_LEVEL,
    CoreContext,
    CoreProcess,
    environment_kept,
    import_vllm,
)
from torchtune_ext.sampling.records import Completion, EngineConfig
from torchtune_ext.sampling.server_command import CPU_KV_CACHE as CPU_KV_CACHE
from torchtune_ext.sampling.server_command import DEFAULT_MAX_NUM_SEQS as DEFAULT_MAX_NUM_SEQS
from torchtune_ext.sampling.server_command import engine_args, engine_environment, one_machine
from torchtune_ext.sampling.weight_buffer import ADAPTER_ID, WeightBuffer


def core_environment(config: EngineConfig, temp_dir: str) -> dict[str, str]:
    """Returns the variables that the engine's process needs on top of the trainer's environment."""
    apart = {"VLLM_CONFIGURE_LOGGING": "0", "TMPDIR": temp_dir}
    return engine_environment(config) | apart | one_machine()


class LocalCore:
    """Runs a vLLM engine of our own. What the methods of `Core` promise is said there."""

    def __init__(
        self,
        model_dir: str,
        config: EngineConfig,
        log_path: Path,
        temp_dir: str,
        on_step: Callable[[Step], None],
        process: CoreProcess | None = None,
    ):
        """Starts the engine's process, unless it is given; it imports vLLM in the background. `launch` waits for it."""
        self.config, self.model_dir, self.temp_dir, self.on_step = config, model_dir, temp_dir, on_step
        self.llm: Any = None
        self._vllm_config: Any = None
        self.cache_tokens = self.block = self.vocabulary = 0  # known after the launch
        self.asleep = 0  # level of sleep
        self._stopping = False
        self.broken: Exception | None = None  # the error of our own code over a step's counters
        self._lora_request: Any = None  # it goes with every request once an adapter is loaded
        self._salt: str | None = None  # a prefix is shared by requests of the same salt alone
        self.calls: dict[str, Call] = {}
        self.sign_of_life = time.monotonic()
        self.process = process or CoreProcess(core_environment(config, temp_dir), log_path)

    @property
    def group(self) -> int:
        """The process group of the engine's process and its workers."""
        return self.process.pid

    @property
    def dead(self) -> bool:
        return not self.process.is_alive() or (self.llm is not None and self.llm.errored)

    def ending(self) -> str:
        return self.process.ending()

    def engine_args(self) -> dict[str, Any]:
        """Returns the arguments of vLLM's AsyncEngineArgs."""
        # The default loggers are not wanted; ours counts.
        return engine_args(self.model_dir, self.config) | {"disable_log_stats": True}

    async def launch(self) -> None:
        """Brings the engine up. Blocks the calling thread, for 8 to 15 s with a small model, and until
        `start_deadline_s` at most. Raises CoreLost; ValueError when vLLM refuses the configuration."""
        timer = threading.Timer(self.config.start_deadline_s, self.process.kill)
        timer.daemon = True
        timer.start()
        try:
            if self._vllm_config is None:
                self.configure()
            with environment_kept():
                os.environ |= {"VLLM_RPC_BASE_PATH": self.temp_dir, "VLLM_CONFIGURE_LOGGING": "0"}
                self.llm = self._launch()
        except (RuntimeError, OSError) as error:
            late = " within start_deadline_s" if not timer.is_alive() else ""
            how = "" if late or self.process.is_alive() else f"; {self.ending()}"
            raise CoreLost(f"its process did not come up{late}: {error}{how}") from error
        finally:
            timer.cancel()
        cache = self.llm.vllm_config.cache_config
        self.block = cache.block_size
        self.cache_tokens = (cache.num_gpu_blocks or 0) * self.block
        self.vocabulary = self.llm.model_config.get_vocab_size()
        self.sign_of_life = time.monotonic()

    def configure(self) -> None:
        """Imports vLLM and makes its configuration. Both write into the environment for a moment, so nobody else may read it
        meanwhile. Raises ValueError when vLLM refuses the config."""
        import_vllm()
        self._redirect_log()
        with environment_kept() as changed:
            from vllm.engine.arg_utils import AsyncEngineArgs

            os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
            self._vllm_config = AsyncEngineArgs(**self.engine_args()).create_engine_config()
        self.process.settings = changed

    def _redirect_log(self) -> None:
        """Sends what vLLM logs in this process to the engine's log; what matters of it comes as exceptions."""
        logger = logging.getLogger("vllm")
        logger.setLevel(LOG_LEVEL)
        logger.propagate = False
        for handler in logger.handlers[:]:
            logger.removeHandler(handler)
            handler.close()
        handler = logging.FileHandler(self.process.log)
        handler.setFormatter(logging.Formatter(LOG_FORMAT.replace("core", "client")))
        logger.addHandler(handler)

    def _launch(self) -> Any:
        import vllm.v1.engine.utils as engine_utils
        from vllm.v1.engine.async_llm import AsyncLLM

        make_context = engine_utils.get_mp_context
        engine_utils.get_mp_context = lambda: CoreContext(self.process, make_context())
        try:
            llm = AsyncLLM.from_vllm_config(self._vllm_config, stat_loggers=[self._stat_logger], disable_log_stats=True)
        finally:
            engine_utils.get_mp_context = make_context
        # Only ours stays; vLLM has added one for Prometheus.
        llm.logger_manager.stat_loggers = llm.logger_manager.stat_loggers[:1]
        return llm

    def _stat_logger(self, vllm_config: Any, engine_index: int = 0) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        core = self

        class StepLogger(StatLoggerBase):
            """Hands the counters of every scheduler step on."""

            def __init__(self):
                pass

            def record(self, scheduler_stats=None, iteration_stats=None, mm_cache_stats=None, engine_idx=0):
                core.sign_of_life = time.monotonic()
                if scheduler_stats is None or core.broken is not None:
                    return
                try:
                    prefix = scheduler_stats.prefix_cache_stats
                    core.on_step(
                        Step(
                            usage=scheduler_stats.kv_cache_usage,
                            running=scheduler_stats.num_running_reqs,
                            waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
                            preempted=iteration_stats.num_preempted_reqs if iteration_stats else 0,
                            prefix_queries=prefix.queries,
                            prefix_hits=prefix.hits,
                        )
                    )
                except Exception as error:
                    # From here it would end vLLM's client, which says "the engine died".
                    core.broken = error

            def log_engine_initialized(self):
                pass

        return StepLogger()

    async def generate(self, call: Call) -> Completion:
        """Runs one request to its end. Raises CoreLost, or ValueError when vLLM refuses the request."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        call.begin()
        self.calls[call.id] = call
        prompt = {"type": "token", "prompt_token_ids": call.prompt}
        prompt |= {"cache_salt": self._salt} if self._salt is not None else {}
        try:
            outputs = self.llm.generate(
                prompt, self._params(call), call.id, lora_request=self._lora_request, priority=call.priority
            )
            async for output in outputs:
                part = output.outputs[0]
                if call.add(part.token_ids, part.logprobs.logprobs) and not output.finished:
                    await self.llm.abort(call.id)  # one more output follows it
            spans = [(span.version, span.start, span.end) for span in part.weight_versions or ()]
            return call.completion(part.finish_reason, spans, output.num_cached_tokens or 0)
        except EngineDeadError as error:
            raise CoreLost(self.ending()) from error
        except EngineGenerateError as error:
            raise CoreLost(f"the engine failed in a request: {error.__cause__!r}") from error
        except VLLMClientError as error:
            raise Mistake(f"vLLM refuses the request: {error}") from error
        except asyncio.CancelledError:
            if call.was_lost():
                raise CoreLost("the engine was ended") from None
            raise
        finally:
            del self.calls[call.id]

    def _params(self, call: Call) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = call.sampling
        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=call.seed,
            stop_token_ids=list(sampling.stop_token_ids),
            # The tokenizer's end token is one of these, or is meant not to end a completion.
            ignore_eos=True,
            # It asks for the log-prob of the sampled token and of no others.
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if call.watch is not None else RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        params.flat_logprobs = True
        return params

    async def end(self, call: Call, reason: str) -> None:
        """Asks for the end of a running request; it returns what was sampled until now."""
        if not call.ended_by:
            call.ended_by = reason
            await self._quick(self.llm.abort(call.id))

    async def ping(self, deadline_s: float) -> None:
        """Returns once the engine's main loop has answered. Raises CoreLost after `deadline_s`."""
        await bounded(self, self.llm.is_paused(), deadline_s)
        self.sign_of_life = time.monotonic()

    async def load(self, buffers: Sequence[WeightBuffer], version: int) -> tuple[float, float]:
        """Replaces weights between two steps; requests in flight go on with the new ones.

        Args: buffers: what to load, the model before its adapter; empty: only the label `version` is set.
        Returns: seconds of pause, seconds of loading in it. Raises CoreLost: the engine must not be used further.
        """
        llm = self.llm
        await self.ping(self.config.probe_deadline_s)
        if not buffers:
            await self._quick(llm.update_weight_version(str(version)))
            return 0.0, 0.0
        if self.asleep:
            await self._bounded(llm.wake_up(["weights"]))
        started = time.monotonic()
        with paused():
            await self._quick(llm.pause_generation(mode="keep", clear_cache=False))
            if self.config.kv_on_publish == "recompute":
                # It throws out all requests in flight, whose keys and values are then computed again.
                require_cleared(await self._quick(llm.reset_prefix_cache(reset_running_requests=True)))
            else:
                # The old keys and values stay for those who have them; requests that come from now on never find them.
                self._salt = str(version)
            loading = time.monotonic()
            for buffer in buffers:
                load = self._load_model if buffer.adapter is None else self._load_adapter
                await load(buffer, version)
            loaded = time.monotonic()
            if self.asleep:
                await self._bounded(llm.wake_up(["kv_cache", "scheduling"]))
                self.asleep = 0
            await self._quick(llm.resume_generation())
        return time.monotonic() - started, loaded - loading

    async def _load_model(self, buffer: WeightBuffer, version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        await self._quick(self.llm.init_weight_transfer_engine(WeightTransferInitRequest(buffer.address())))
        await self._bounded(self.llm.start_weight_update())
        await self._bounded(self.llm.update_weights(WeightTransferUpdateRequest(buffer.manifest)))
        await self._bounded(self.llm.finish_weight_update(str(version)))

    async def _load_adapter(self, buffer: WeightBuffer, version: int) -> None:
        from vllm.lora.request import LoRARequest

        arguments = (buffer.address(), buffer.manifest, buffer.adapter)
        await self._bounded(self.llm.collective_rpc("load_adapter", args=arguments))
        await self._quick(self.llm.update_weight_version(str(version)))
        # A path has to be named; nothing is read there, since the adapter is in the engine already.
        self._lora_request = LoRARequest("policy", ADAPTER_ID, "/nowhere/the-adapter-is-in-memory")

    async def checksums(self) -> list[dict[str, int | None]]:
        """Returns what each worker says of the weights that it has taken. Raises CoreLost."""
        return await self._quick(self.llm.collective_rpc("checksums"))

    async def weight_version(self) -> int:
        return int(await self._quick(self.llm.get_weight_version()))

    async def sleep(self, level: int) -> None:
        """Gives the GPU's memory back. Level 1 keeps the weights in host memory, level 2 drops them. Raises CoreLost."""
        await self.ping(self.config.probe_deadline_s)
        await self._bounded(self.llm.sleep(level=level, mode="keep"))
        self.asleep = level

    async def wake(self) -> None:
        """Takes the memory again after a sleep of level 1; after level 2 only `load` wakes it. Raises CoreLost."""
        await self.ping(self.config.probe_deadline_s)
        await self._bounded(self.llm.wake_up())
        self.asleep = 0

    async def _quick(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Awaits a call that the engine answers between two steps. Raises CoreLost, ValueError."""
        return await bounded(self, call, self.config.probe_deadline_s)

    async def _bounded(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Awaits a call that moves weights: it may take long, but not stand still. Raises CoreLost, ValueError."""
        config = self.config
        return await bounded(self, call, config.rpc_deadline_s, self.process.cpu_seconds, config.probe_deadline_s)

    def kill(self) -> None:
        self.process.kill()

    def log_tail(self) -> str:
        return self.process.log_tail()

    async def stop(self) -> None:
        """Ends this life and everything that waits for it. The waiting requests end with CoreLost."""
        self.process.kill()
        # `close` and a restart that it ends may both come here.
        first, self._stopping = not self._stopping, True
        try:
            if self.llm is not None and first:
                give_up_at = time.monotonic() + 5.0
                while not self.llm.errored and time.monotonic() < give_up_at:
                    # vLLM's own monitor notices the death and fails the requests.
                    await asyncio.sleep(0.02)
                await asyncio.sleep(0.05)
                self.llm.shutdown(timeout=1)
        finally:
            for call in list(self.calls.values()):
                call.lose()
            self.process.close()
