"""The process of vLLM's client: python -P -m torchtune_ext.sampling.client_process SOCKET PARENT

In the trainer's process, the client held the GIL and training took twice as long: a request of
eleven tokens costs 0.7 ms of Python. The first frame holds (model folder, EngineConfig, log
path, environment). The following frames hold messages of `child_process.ChildProcess`. The events
are (0, "step", EngineStepStats) and (0, "dead", exit reason of the engine). The engine's process
ends with this process, and this process ends with the trainer.
"""

import asyncio
import logging
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.process_env import describe_exit, die_with_parent
from torchtune_ext.sampling.backend import BackendCrashed, EngineRequest, EngineStepStats
from torchtune_ext.sampling.child_process import EXIT_TIMEOUT_S, MessageChannel, receive_messages
from torchtune_ext.sampling.engine_args import CORES_VARIABLE, engine_args, on_cpu
from torchtune_ext.sampling.types import Completion, EngineConfig, Priority
from torchtune_ext.sampling.weight_buffer import ADAPTER_ID

# vLLM also accepts lower case.
LOG_LEVEL = logging.getLevelNamesMapping().get(os.environ.get("VLLM_LOGGING_LEVEL", "").upper(), logging.WARNING)
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class Client:
    """Serves the trainer's requests and reports events."""

    def __init__(self, end: socket.socket, model_dir: str, config: EngineConfig):
        """Must be called in the asyncio loop of `serve`."""
        self.config, self.model_dir = config, model_dir
        self.requests: dict[str, EngineRequest] = {}
        self.socket = end  # to the trainer
        self.process: Any = None  # the engine's process
        self._tasks: dict[int, asyncio.Task] = {}  # running tasks by message number
        self._disconnected = asyncio.Event()  # set once the trainer's end is closed
        self._engine_ended = asyncio.Event()
        self._channel = MessageChannel(self._receive, self._disconnected.set)
        self._llm: Any = None
        self._vllm_config: Any = None

    async def serve(self) -> None:
        """Serves requests until the trainer closes its end, and reports the end of the engine's process."""
        await asyncio.get_running_loop().create_connection(lambda: self._channel, sock=self.socket)
        ends = [asyncio.ensure_future(event.wait()) for event in (self._disconnected, self._engine_ended)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not self._disconnected.is_set():
            # The kernel closes the files of a process before its exit code can be read.
            with suppress(TimeoutError):
                async with asyncio.timeout(EXIT_TIMEOUT_S):
                    while self.process.is_alive():
                        await asyncio.sleep(0.01)
            self._channel.send((0, "dead", self.describe_exit()))
            await self._disconnected.wait()  # failing requests still get answers; the trainer ends this process

    def _receive(self, messages: list[Any]) -> None:
        for number, method, arguments in messages:
            if method == "cancel":
                if number in self._tasks:
                    self._tasks[number].cancel()
                continue
            task = self._tasks[number] = asyncio.ensure_future(self._handle(number, method, arguments))
            task.add_done_callback(lambda _, number=number: self._tasks.pop(number))

    async def _handle(self, number: int, method: str, arguments: tuple) -> None:
        try:
            answer = ("value", await getattr(self, method)(*arguments))
        except ValueError as error:
            answer = ("refused", str(error))
        except BackendCrashed as error:
            answer = ("lost", str(error))
        except asyncio.CancelledError:
            return  # the trainer has canceled the request
        except BaseException as error:
            # vLLM wraps errors of the engine's process in a bare Exception. The trainer gets the
            # message, and the log gets the traceback.
            method = arguments[0] if method == "engine" else method
            logging.getLogger(__name__).exception("%s failed", method)
            answer = ("lost", self.describe_exit() if self.is_dead else f"the engine failed in {method}: {error!r}")
        self._channel.send((number, *answer))

    @property
    def is_dead(self) -> bool:
        ended = self.process is not None and not self.process.is_alive()
        return ended or (self._llm is not None and self._llm.errored)

    def describe_exit(self) -> str:
        return describe_exit(self.process.exitcode, "the engine's process")

    # -- requests of the trainer -------------------------------------------------------------------

    async def configure(self) -> None:
        """Creates vLLM's config. Raises ValueError if vLLM refuses it."""
        from vllm.engine.arg_utils import AsyncEngineArgs

        # `_stat_logger` replaces vLLM's default loggers.
        args: dict[str, Any] = engine_args(self.model_dir, self.config) | {"disable_log_stats": True}
        self._vllm_config = AsyncEngineArgs(**args).create_engine_config()

    async def launch(self) -> tuple[int, int, int]:
        """Starts the engine.

        Returns:
            Capacity of the KV cache in tokens, tokens per block, and vocabulary size.

        Raises:
            BackendCrashed: If the engine does not start.
            ValueError: If vLLM refuses the config.
        """
        import vllm.v1.engine.utils as engine_utils
        from vllm.v1.engine.async_llm import AsyncLLM

        # EngineContext forks the engine's process where possible, and keeps a handle to it.
        make_context = engine_utils.get_mp_context
        engine_utils.get_mp_context = lambda: EngineContext(self, make_context())
        try:
            self._llm = AsyncLLM.from_vllm_config(
                self._vllm_config, stat_loggers=[self._stat_logger], disable_log_stats=True
            )
        except (RuntimeError, OSError) as error:
            how = f"; {self.describe_exit()}" if self.is_dead else ""
            raise BackendCrashed(f"its process did not start: {error}{how}") from error
        finally:
            engine_utils.get_mp_context = make_context
        asyncio.get_running_loop().add_reader(self.process.sentinel, self._on_engine_end)
        # vLLM has added a Prometheus logger, which is unused. Only `_stat_logger` stays.
        self._llm.logger_manager.stat_loggers = self._llm.logger_manager.stat_loggers[:1]
        cache = self._llm.vllm_config.cache_config
        block = cache.block_size
        return (cache.num_gpu_blocks or 0) * block, block, self._llm.model_config.get_vocab_size()

    def _on_engine_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self.process.sentinel)
        self._engine_ended.set()

    def _stat_logger(self, vllm_config: Any, engine_index: int = 0) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        channel = self._channel

        class StepLogger(StatLoggerBase):
            def __init__(self):
                pass

            def record(self, scheduler_stats=None, iteration_stats=None, mm_cache_stats=None, engine_idx=0):
                if scheduler_stats is None:
                    return
                prefix = scheduler_stats.prefix_cache_stats
                step = EngineStepStats(
                    usage=scheduler_stats.kv_cache_usage,
                    running=scheduler_stats.num_running_reqs,
                    waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
                    preempted=iteration_stats.num_preempted_reqs if iteration_stats else 0,
                    prefix_queries=prefix.queries,
                    prefix_hits=prefix.hits,
                )
                channel.send((0, "step", step))

            def log_engine_initialized(self):
                pass

        return StepLogger()

    async def generate(self, request: EngineRequest, cache_salt: str | None, uses_adapter: bool) -> Completion:
        """Runs one request.

        Args:
            request: The request.
            cache_salt: Requests share cached prefixes only with the same salt.
            uses_adapter: Whether the request uses the adapter.

        Raises:
            BackendCrashed: If the engine fails.
            UsageError: If vLLM refuses the request.
        """
        from vllm.exceptions import VLLMClientError
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        salted = {} if cache_salt is None else {"cache_salt": cache_salt}
        prompt = {"type": "token", "prompt_token_ids": request.prompt, **salted}
        # vLLM requires a path but does not read it, since the adapter is already loaded.
        lora = LoRARequest("policy", ADAPTER_ID, "/nowhere/the-adapter-is-in-memory") if uses_adapter else None
        output: Any = None
        part: Any = None
        try:
            with request.track_in(self.requests):
                outputs = self._llm.generate(
                    prompt, self._params(request), request.id, lora_request=lora, priority=request.priority
                )
                async for output in outputs:
                    part = output.outputs[0]
                    if request.add(part.token_ids, part.logprobs.logprobs) and not output.finished:
                        await self._llm.abort(request.id)  # vLLM yields one more output afterwards
            assert output is not None and part is not None  # vLLM yields at least one output
            if part.finish_reason == "abort" and request.num_kept is None:
                raise BackendCrashed("the engine aborted an unfinished request")
            spans = [(span.version, span.start, span.end) for span in part.weight_versions or ()]
            scores = output.prompt_logprobs.logprobs if request.priority is Priority.SCORE else ()
            return request.completion(part.finish_reason, spans, output.num_cached_tokens or 0, scores)
        except EngineDeadError as error:
            raise BackendCrashed(self.describe_exit()) from error
        except EngineGenerateError as error:
            raise BackendCrashed(f"the engine failed in a request: {error.__cause__!r}") from error
        except VLLMClientError as error:
            raise UsageError(f"vLLM refuses the request: {error}") from error

    def _params(self, request: EngineRequest) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        kind = RequestOutputKind.DELTA if request.needs_streaming else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(**request.vllm_params(), output_kind=kind, skip_clone=True)
        params.flat_logprobs = True
        return params

    async def engine(self, method: str, arguments: dict[str, Any]) -> Any:
        """Calls a method of `AsyncLLM` by name. The trainer sets the deadline."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        if method == "init_weight_transfer_engine":
            arguments = {"request": WeightTransferInitRequest(**arguments)}
        elif method == "update_weights":
            arguments = {"request": WeightTransferUpdateRequest(**arguments)}
        return await getattr(self._llm, method)(**arguments)


class EngineContext:
    """Replaces the `multiprocessing` context with which vLLM starts the engine's process."""

    def __init__(self, client: Client, context: Any):
        # With a fork vLLM is imported only once for both processes. On a CPU vLLM would spawn,
        # since OpenMP threads do not survive a fork, but this process has no OpenMP threads.
        self._client, self._context = client, multiprocessing.get_context("fork") if on_cpu() else context

    def Process(self, target: Callable, kwargs: dict[str, Any], name: str) -> Any:  # noqa: N802 (its name there)
        end = self._client.socket.fileno() if self._context.get_start_method() == "fork" else None
        self._client.process = self._context.Process(
            target=run_engine, args=(os.getpid(), end, target, kwargs), name=name
        )
        return self._client.process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def run_engine(parent: int, end: int | None, target: Callable, kwargs: dict[str, Any]) -> None:
    """Runs vLLM's main function of the engine, `target`.

    Args:
        parent: Process id of the client.
        end: File descriptor of the client's socket after a fork.
        target, kwargs: The function and its arguments.
    """
    die_with_parent(parent)
    if end is not None:
        os.close(end)  # an open copy would hide the client's death from the trainer
    if cores := os.environ.get(CORES_VARIABLE):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    if on_cpu():
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # OpenMP may have read another thread count
    Path("/proc/self/comm").write_text("vllm-engine")  # process name in `top`
    logging.basicConfig(level=LOG_LEVEL, format=f"(engine) {LOG_FORMAT}", force=True)
    # Like a checkpoint, a weight sync has no RoPE buffers and no second copy of a tied output
    # layer. vLLM logs ten failures for each. The checksums verify that every tensor has arrived.
    reload = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    reload.addFilter(lambda record: record.msg != "%s: Failed to load weights")
    target(**kwargs)


def _adopt_environment(log: str, environ: dict[str, str]) -> None:
    """Applies log and environment to a process that may have been prestarted (`prestart.py`)."""
    with open(log, "ab", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ.update(environ)
    sys.path += [entry for entry in environ["PYTHONPATH"].split(os.pathsep) if entry not in sys.path]
    tempfile.tempdir = None  # Python caches the folder of the previous TMPDIR


async def serve(end: socket.socket, model_dir: str, config: EngineConfig) -> None:
    """Serves requests until the trainer closes its end of the socket `end`."""
    await Client(end, model_dir, config).serve()


def main(descriptor: int, parent: int) -> None:
    """Runs the client of one replica.

    Args:
        descriptor: File descriptor of the socket.
        parent: Process id of the trainer.
    """
    die_with_parent(parent)
    logging.basicConfig(level=LOG_LEVEL, format=f"(client) {LOG_FORMAT}")
    end = socket.socket(fileno=descriptor)
    if on_cpu():
        # torch would warn that Triton is missing, which is expected on a CPU.
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    started = time.monotonic()
    try:
        import vllm.engine.arg_utils
        import vllm.renderers.hf
        import vllm.v1.engine.async_llm
        import vllm.v1.engine.core  # noqa: F401
    finally:
        imported_s = time.monotonic() - started
        # An import error belongs in the log, whose path only the first frame holds.
        model_dir, config, log, environ = receive_messages(end)
        _adopt_environment(log, environ)
    print(f"engine {os.getpid()}: vLLM imported in {imported_s:.1f} s", file=sys.stderr, flush=True)
    asyncio.run(serve(end, model_dir, config))
    # `os._exit` also ends the remaining threads of vLLM and the engine's process.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
