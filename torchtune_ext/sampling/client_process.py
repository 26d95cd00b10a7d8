"""The process of vLLM's client: `AsyncLLM`, with all that a request and a token cost outside of the engine's own process.

That is most of what sampling asks of Python (0.7 ms for a request of eleven tokens), and in the trainer's interpreter it
would take the lock from training, which then took twice as long (benchmarks/README.md). So the client lives here.
`remote_core.RemoteCore` is the trainer's end.

    python -P -m torchtune_ext.sampling.client_process SOCKET PARENT

The first frame holds (directory of the model, EngineConfig, folder for temporary files). After that a message is (number,
method, arguments), and its answer (number, "value", value) or (number, "lost" | "refused", message). Three more come
unasked: (0, "step", Step), (0, "dead", how the engine ended), and (0, "beat", None).

The engine's process is a fork of this one, so vLLM is imported once for both, and it and its workers belong to our session.
It ends when this one ends, and this one when the trainer does.
"""

import asyncio
import inspect
import logging
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from torchtune_ext.run.errors import Failure, Mistake
from torchtune_ext.run.parent import die_with_parent, how_it_ended
from torchtune_ext.sampling.calls import Call, CoreLost, Step, bounded, paused, require_cleared
from torchtune_ext.sampling.child_process import Frames, receive
from torchtune_ext.sampling.records import Completion, EngineConfig, Priority
from torchtune_ext.sampling.server_command import CORES, engine_args, on_cpu
from torchtune_ext.sampling.weight_buffer import ADAPTER_ID

LOG_LEVEL = os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LOOK_S = 0.1  # seconds between two looks at the engine's process
BEAT_S = 1.0  # seconds between two messages which say that the client itself works


class Client:
    """Does what the trainer asks, and tells it what happens. The methods that it may ask for are those of `Core`."""

    def __init__(self, end: socket.socket, model_dir: str, config: EngineConfig):
        self.config, self.model_dir = config, model_dir
        self.calls: dict[str, Call] = {}
        self.socket = end
        self.process: Any = None  # of the engine
        self._frames: Frames | None = None
        self._tasks: dict[int, asyncio.Task] = {}  # what is under way, by its number
        self._gone = asyncio.Event()  # the trainer's end is closed
        self._llm: Any = None
        self._vllm_config: Any = None
        self._asleep = 0  # level of sleep
        self._lora_request: Any = None  # it goes with every request once an adapter is loaded
        self._salt: str | None = None  # only requests of the same salt share a prefix

    async def serve(self) -> None:
        """Works until the trainer closes its end."""
        self._frames = Frames(self._receive, self._gone.set)
        await asyncio.get_running_loop().create_connection(lambda: self._frames, sock=self.socket)
        beat_at = 0.0
        while not self._gone.is_set() and not self.dead:
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT_S
                self._frames.say((0, "beat", None))
            try:
                await asyncio.wait_for(self._gone.wait(), LOOK_S)
            except TimeoutError:
                pass
        if not self._gone.is_set():
            self._frames.say((0, "dead", self.ending()))
            await self._gone.wait()  # requests that fail over it are answered; the trainer ends this process

    def _receive(self, messages: list[Any]) -> None:
        for number, method, arguments in messages:
            if method == "cancel":
                task = self._tasks.get(arguments[0])
                if task is not None:
                    task.cancel()
                continue
            task = self._tasks[number] = asyncio.ensure_future(self._do(number, method, arguments))
            task.add_done_callback(lambda _, number=number: self._tasks.pop(number))

    async def _do(self, number: int, method: str, arguments: tuple) -> None:
        try:
            answer = ("value", await getattr(self, method)(*arguments))
        except ValueError as error:
            answer = ("refused", str(error))
        except CoreLost as error:
            answer = ("lost", str(error))
        except asyncio.CancelledError:
            return  # the trainer does not wait for it any more
        except BaseException as error:
            # Nobody sees this process: the trainer has to hear of it, and the log keeps the traceback.
            logging.getLogger(__name__).exception("%s failed", method)
            answer = ("lost", f"the engine's client failed in {method}: {error!r}")
        self._frames.say((number, *answer))

    @property
    def dead(self) -> bool:
        """Whether the engine has ended."""
        ended = self.process is not None and not self.process.is_alive()
        return ended or (self._llm is not None and self._llm.errored)

    def ending(self) -> str:
        """Says how the engine ended."""
        return how_it_ended(self.process.exitcode, "the engine's process")

    # -- what the trainer asks for ------------------------------------------------------------------------------------

    async def configure(self) -> None:
        """Lets vLLM take its configuration. Raises ValueError when it refuses it."""
        from vllm.engine.arg_utils import AsyncEngineArgs

        # vLLM's default loggers are not needed; ours counts.
        args = engine_args(self.model_dir, self.config) | {"disable_log_stats": True}
        self._vllm_config = AsyncEngineArgs(**args).create_engine_config()

    async def launch(self) -> tuple[int, int, int]:
        """Brings the engine up. Returns tokens of its KV cache, tokens of a block of it, and token ids of the model. Raises
        CoreLost; ValueError when vLLM refuses the configuration."""
        import vllm.v1.engine.utils as engine_utils
        from vllm.v1.engine.async_llm import AsyncLLM

        make_context = engine_utils.get_mp_context
        engine_utils.get_mp_context = lambda: EngineContext(self, make_context())
        try:
            self._llm = AsyncLLM.from_vllm_config(
                self._vllm_config, stat_loggers=[self._stat_logger], disable_log_stats=True
            )
        except (RuntimeError, OSError) as error:
            how = f"; {self.ending()}" if self.dead else ""
            raise CoreLost(f"its process did not come up: {error}{how}") from error
        finally:
            engine_utils.get_mp_context = make_context
        # Only ours stays; vLLM has added one for Prometheus.
        self._llm.logger_manager.stat_loggers = self._llm.logger_manager.stat_loggers[:1]
        cache = self._llm.vllm_config.cache_config
        block = cache.block_size
        return (cache.num_gpu_blocks or 0) * block, block, self._llm.model_config.get_vocab_size()

    def _stat_logger(self, vllm_config: Any, engine_index: int = 0) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        frames = self._frames

        class StepLogger(StatLoggerBase):
            """Hands the counters of every scheduler step on."""

            def __init__(self):
                pass

            def record(self, scheduler_stats=None, iteration_stats=None, mm_cache_stats=None, engine_idx=0):
                if scheduler_stats is None:
                    return
                prefix = scheduler_stats.prefix_cache_stats
                step = Step(
                    usage=scheduler_stats.kv_cache_usage,
                    running=scheduler_stats.num_running_reqs,
                    waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
                    preempted=iteration_stats.num_preempted_reqs if iteration_stats else 0,
                    prefix_queries=prefix.queries,
                    prefix_hits=prefix.hits,
                )
                frames.say((0, "step", step))

            def log_engine_initialized(self):
                pass

        return StepLogger()

    async def generate(self, call: Call) -> Completion:
        """Runs one request to its end. Raises CoreLost, or ValueError when vLLM refuses it."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        call.begin()
        self.calls[call.id] = call
        prompt = {"type": "token", "prompt_token_ids": call.prompt}
        prompt |= {"cache_salt": self._salt} if self._salt is not None else {}
        try:
            outputs = self._llm.generate(
                prompt, self._params(call), call.id, lora_request=self._lora_request, priority=call.priority
            )
            async for output in outputs:
                part = output.outputs[0]
                if call.add(part.token_ids, part.logprobs.logprobs) and not output.finished:
                    await self._llm.abort(call.id)  # one more output follows it
            spans = [(span.version, span.start, span.end) for span in part.weight_versions or ()]
            scores = output.prompt_logprobs.logprobs if call.priority is Priority.SCORE else ()
            return call.completion(part.finish_reason, spans, output.num_cached_tokens or 0, scores)
        except EngineDeadError as error:
            raise CoreLost(self.ending()) from error
        except EngineGenerateError as error:
            raise CoreLost(f"the engine failed in a request: {error.__cause__!r}") from error
        except VLLMClientError as error:
            raise Mistake(f"vLLM refuses the request: {error}") from error
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
            # Only the log-prob of the sampled token is returned.
            logprobs=0,
            prompt_logprobs=0 if call.priority is Priority.SCORE else None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if call.watch is not None else RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        params.flat_logprobs = True
        return params

    async def end(self, name: str, reason: str) -> None:
        """Asks for the end of a running request; it returns what was sampled until now."""
        call = self.calls.get(name)
        if call is not None and not call.ended_by:  # it may have ended meanwhile
            call.ended_by = reason
            await self._quick(self._llm.abort(name))

    async def ping(self, deadline_s: float) -> None:
        """Returns once the engine's main loop has answered. Raises CoreLost after `deadline_s`."""
        await bounded(self, self._llm.is_paused(), deadline_s)

    async def load(self, buffers: Sequence[tuple], version: int) -> tuple[float, float]:
        """Replaces weights between two steps; requests in flight go on with the new ones.

        Args: buffers: (address, manifest, PEFT's config or None) of what to load, the model before its adapter; empty: only the
        label `version` is set.
        Returns: seconds of pause, seconds of loading in it. Raises CoreLost: the engine must not be used further.
        """
        llm = self._llm
        await self.ping(self.config.probe_deadline_s)
        if not buffers:
            await self._quick(llm.update_weight_version(str(version)))
            return 0.0, 0.0
        if self._asleep:
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
            for address, manifest, adapter in buffers:
                if adapter is None:
                    await self._load_model(address, manifest, version)
                else:
                    await self._load_adapter(address, manifest, adapter, version)
            loaded = time.monotonic()
            if self._asleep:
                await self._bounded(llm.wake_up(["kv_cache", "scheduling"]))
                self._asleep = 0
            await self._quick(llm.resume_generation())
        return time.monotonic() - started, loaded - loading

    async def _load_model(self, address: dict, manifest: dict, version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        await self._quick(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(address)))
        await self._bounded(self._llm.start_weight_update())
        await self._bounded(self._llm.update_weights(WeightTransferUpdateRequest(manifest)))
        await self._bounded(self._llm.finish_weight_update(str(version)))

    async def _load_adapter(self, address: dict, manifest: dict, adapter: dict, version: int) -> None:
        from vllm.lora.request import LoRARequest

        await self._bounded(self._llm.collective_rpc("load_adapter", args=(address, manifest, adapter)))
        await self._quick(self._llm.update_weight_version(str(version)))
        # A path has to be named; nothing is read there, since the adapter is in the engine already.
        self._lora_request = LoRARequest("policy", ADAPTER_ID, "/nowhere/the-adapter-is-in-memory")

    async def checksums(self) -> list[dict[str, int | None]]:
        """Returns what each worker says of the weights that it has taken. Raises CoreLost."""
        return await self._quick(self._llm.collective_rpc("checksums"))

    async def weight_version(self) -> int:
        return int(await self._quick(self._llm.get_weight_version()))

    async def sleep(self, level: int) -> None:
        """Gives the GPU's memory back. Level 1 keeps the weights in host memory, level 2 drops them. Raises CoreLost."""
        await self.ping(self.config.probe_deadline_s)
        await self._bounded(self._llm.sleep(level=level, mode="keep"))
        self._asleep = level

    async def wake(self) -> None:
        """Takes the memory again after a sleep of level 1; after level 2 only `load` wakes it. Raises CoreLost."""
        await self.ping(self.config.probe_deadline_s)
        await self._bounded(self._llm.wake_up())
        self._asleep = 0

    async def _quick(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Awaits a call that the engine answers between two steps. Raises CoreLost, ValueError."""
        return await bounded(self, call, self.config.probe_deadline_s)

    async def _bounded(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Awaits a call that moves weights: it may take long, but not stand still. Raises CoreLost, ValueError."""
        config = self.config
        return await bounded(self, call, config.rpc_deadline_s, engine_cpu_seconds, config.probe_deadline_s)


class EngineContext:
    """Stands in for the `multiprocessing` context in which vLLM makes its engine's process."""

    def __init__(self, client: Client, context: Any):
        # vLLM says "spawn" on a CPU, since OpenMP's threads do not survive a fork; this process has none.
        self._client, self._context = client, multiprocessing.get_context("fork") if on_cpu() else context

    def Process(self, target: Callable, kwargs: dict[str, Any], name: str) -> Any:  # noqa: N802 (their name)
        end = self._client.socket.fileno() if self._context.get_start_method() == "fork" else None
        self._client.process = self._context.Process(
            target=run_engine, args=(os.getpid(), end, target, kwargs), name=name
        )
        return self._client.process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def run_engine(parent: int, end: int | None, target: Callable, kwargs: dict[str, Any]) -> None:
    """Lives as the engine's process. Args: parent: process id of the client; end: descriptor of the client's socket, which a
    fork has inherited; target, kwargs: the function that vLLM runs in it, and its arguments."""
    die_with_parent(parent)
    if end is not None:
        os.close(end)  # else the trainer would not see that the client has died
    if cores := os.environ.get(CORES):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    Path("/proc/self/comm").write_text("vllm-engine")  # what `top` shows
    logging.basicConfig(level=LOG_LEVEL, format=f"(engine) {LOG_FORMAT}", force=True)
    forget_preemptions_of_pauses()
    # A publication has what a checkpoint has: no buffers of RoPE, and no second copy of a tied output layer. vLLM calls that a
    # failure, ten times in each; whether every tensor has arrived is what its checksum says.
    reload = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    reload.addFilter(lambda record: record.msg != "%s: Failed to load weights")
    target(**kwargs)


def engine_cpu_seconds() -> float:
    """Returns the seconds of CPU time that the engine's process and its workers have used until now: all of our session, but
    this process."""
    ticks = 0
    for folder in os.scandir("/proc"):
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                # The name in the brackets is whatever its process has called itself, so it is taken as bytes.
                fields = Path(folder.path, "stat").read_bytes().rsplit(b")", 1)[1].split()
            except OSError:
                continue  # it has ended meanwhile
            # The fourth field is the session.
            if int(fields[3]) == os.getsid(0):
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def forget_preemptions_of_pauses() -> None:
    """Makes vLLM count only the preemptions of a KV cache that was full, not those of our own pauses.

    A pause that clears the cache (`pause_generation(mode="keep", clear_cache=True)`, and `sleep`) ends in
    `Scheduler.reset_prefix_cache(reset_running_requests=True)`, which throws out every running request by the same method as
    a full cache. The request notes an event PREEMPTED, and the event travels with the request's next token. So the trainer
    would count it after the pause, in whatever step the request happens to run again, as if it were a real preemption: its
    reason is known only here, where it is noted. It is the last event of each request that ran, and it is taken back. Raises
    RuntimeError when vLLM's method is another one.
    """
    import vllm
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreEventType

    original = Scheduler.reset_prefix_cache
    parameters = list(inspect.signature(original).parameters)
    if parameters != ["self", "reset_running_requests", "reset_connector"]:
        raise Failure(
            f"vLLM {vllm.__version__} is not the version that this was written for: its Scheduler.reset_prefix_cache takes "
            f"{parameters}; install the version that setup.cfg names"
        )

    @wraps(original)
    def reset_prefix_cache(self: Any, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        thrown_out = [(request, len(request.events)) for request in self.running] if reset_running_requests else []
        try:
            return original(self, reset_running_requests, reset_connector)
        finally:
            for request, events in thrown_out:
                if len(request.events) > events and request.events[-1].type == EngineCoreEventType.PREEMPTED:
                    request.events.pop()

    Scheduler.reset_prefix_cache = reset_prefix_cache


def main(descriptor: int, parent: int) -> None:
    """Lives as the client of one engine. Args: descriptor: of the socket; parent: process id of the trainer."""
    die_with_parent(parent)
    logging.basicConfig(level=LOG_LEVEL, format=f"(client) {LOG_FORMAT}")
    end = socket.socket(fileno=descriptor)
    model_dir, config = receive(end)
    if on_cpu():
        # It would warn that there is no Triton, which nobody expects.
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    started = time.monotonic()
    import vllm.engine.arg_utils
    import vllm.renderers.hf
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core  # noqa: F401

    print(f"engine {os.getpid()}: vLLM imported in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    asyncio.run(Client(end, model_dir, config).serve())
    # What is left of vLLM's threads and of the engine ends with this process.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
