"""The engine: one or several vLLM replicas for the whole run, with a blocking API.

    engine = Engine(model_dir, EngineConfig(max_model_len=1024), run_dir)
    engine.start()
    sampling = SamplingConfig(max_tokens=256, seed=1)
    groups = engine.sample([[1, 2, 3], [4, 5]], n=16, sampling=sampling)
    engine.publish(model.named_parameters(), version=1)

One asyncio thread serves all replicas (`pool.py`, `replica.py`). All methods are thread-safe. See
docs/how_to/engines.md.
"""

import asyncio
import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError, Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from torchtune_ext.run.catalog import import_object
from torchtune_ext.run.errors import DeadlineExceeded, UsageError
from torchtune_ext.run.processes import Closing
from torchtune_ext.run.reaper import ProcessReaper
from torchtune_ext.sampling import prestart
from torchtune_ext.sampling.backend import (
    Backend,
    EngineRequest,
    EngineStepStats,
    OnCompletion,
    build_requests,
    gather_or_cancel,
    mark_retrieved,
)
from torchtune_ext.sampling.engine_args import log_name, warn_ignored_variables
from torchtune_ext.sampling.pool import Pool
from torchtune_ext.sampling.replica import EngineReplica
from torchtune_ext.sampling.types import (
    CanaryAnswer,
    Completion,
    EngineConfig,
    EngineFailed,
    EngineStats,
    Priority,
    PublishReport,
    SamplingConfig,
)
from torchtune_ext.sampling.vllm_backend import ProcessBackend
from torchtune_ext.sampling.weight_buffer import WeightBuffers

if TYPE_CHECKING:
    from torchtune_ext.sampling.weight_sender import WeightSender

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_TIMEOUT_S = 30.0  # deadline in seconds of each part of `close` in the engine's thread

# The arguments are the model folder, the config, the log file of the replica, a folder for temporary
# files, and the callback for step counters. A factory does not wait; `Backend.launch` does.
BackendFactory = Callable[[str, EngineConfig, Path, str, Callable[[EngineStepStats], None]], Backend]


async def _mark_error_retrieved(work: Coroutine[Any, Any, Any]) -> Any:
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(mark_retrieved)
    return await work


class LoopThread(threading.Thread):
    """A thread with an asyncio loop that runs coroutines for other threads."""

    def __init__(self, name: str):
        super().__init__(name=name, daemon=True)
        self._loop = asyncio.new_event_loop()
        self._futures: set[Future] = set()  # unfinished work

    def assert_not_loop_thread(self) -> None:
        """Raises RuntimeError in the loop's own thread, where a blocking call would deadlock."""
        if threading.current_thread() is self:
            raise RuntimeError("on_completion may not call the engine: it runs in the engine's own thread")

    def schedule(self, work: Coroutine[Any, Any, Any]) -> Future:
        """Schedules `work` without waiting; the end of the thread cancels it.

        Raises:
            EngineFailed: If the thread does not run.
        """
        wrapped = _mark_error_retrieved(work)
        try:
            if self.is_alive():
                future = asyncio.run_coroutine_threadsafe(wrapped, self._loop)
                self._futures.add(future)
                future.add_done_callback(self._futures.discard)
                # The thread may have ended since the first check, without having run the work.
                if not self.is_alive():
                    future.cancel()
                return future
        except RuntimeError:
            pass  # the loop was closed since the check
        # Otherwise Python would warn of coroutines that were never awaited.
        wrapped.close()
        work.close()
        raise EngineFailed("the engine is not running. Fix: call start() first, and make no calls after close()")

    def call(self, work: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        """Runs `work` and returns its result.

        Raises:
            EngineFailed: If the thread does not run or ends.
            DeadlineExceeded: After `timeout` seconds.
            RuntimeError: If called in the loop's own thread.
        """
        try:
            self.assert_not_loop_thread()
        except RuntimeError:
            work.close()
            raise
        return self.result(self.schedule(work), timeout)

    def result(self, future: Future, timeout: float | None = None) -> Any:
        """Waits for scheduled work, and cancels it if the wait ends first. Raises as `call`."""
        limit = float("inf") if timeout is None else timeout
        give_up_at = time.monotonic() + limit
        try:
            # A dead loop never completes a future and never wakes its waiters, so the future and the
            # thread are both polled every 0.5 s.
            while not wait([future], timeout=0.5).done and not future.done():
                if time.monotonic() > give_up_at:
                    raise DeadlineExceeded(f"the engine's thread did not answer within {limit:g} s")
                if not self.is_alive():
                    raise EngineFailed("the engine was closed")
            return future.result()
        except CancelledError:
            raise EngineFailed("the engine was closed") from None
        finally:
            future.cancel()  # if the caller stops waiting (Ctrl-C)

    def stop(self) -> None:
        """Ends the thread and cancels its work.

        Raises:
            DeadlineExceeded: If the thread does not end.
        """
        if self.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self.join(5.0)
            if self.is_alive():
                raise DeadlineExceeded(f"the thread {self.name} did not end")
        # A stopped loop does not resolve its futures. Copying a set is atomic.
        for future in self._futures.copy():
            future.cancel()

    def run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        give_up_at = time.monotonic() + 2.0
        # A task that ends may create others.
        while (tasks := asyncio.all_tasks(self._loop)) and time.monotonic() < give_up_at:
            for task in tasks:
                # The cancellation is delayed by one loop iteration, so that a new task runs its
                # first step. Otherwise Python warns that the coroutine was never awaited.
                self._loop.call_soon(task.cancel)
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=give_up_at - time.monotonic()))
        self._loop.close()


class Engine(Closing):
    """Owns the engine replicas, their thread, their process reaper and the published weights."""

    def __init__(self, model_dir: str, config: EngineConfig, run_dir: str, version: int = 0, name: str = "engine"):
        """Checks the config; `start` starts the replicas.

        Args:
            model_dir: Folder of a Hugging Face model.
            config: The `engine:` section.
            run_dir: Folder for `engine.log` (several replicas: `engine_0.log`, ...).
            version: Policy version of the weights in `model_dir`.
            name: Name of the engine in messages.

        Raises:
            UsageError: For an unknown backend, or more replicas than devices.
        """
        self.config = config
        self._backend_factory = find_backend(config.backend)
        self.model_dir = str(model_dir)
        self._buffers = WeightBuffers(config.rpc_deadline_s)
        self._publish_lock = threading.Lock()  # one weight sync at a time, and none during an evaluation
        self._evaluation: set[Future] = set()  # groups of an evaluation in flight
        self._thread = LoopThread("torchtune-ext-engine")
        self._reaper: ProcessReaper | None = None
        self._server_info: dict[str, dict[str, Any]] = {}  # facts about each server at its first connection
        self._weight_sender: WeightSender | None = None  # sends weights to servers over a network
        self._started: Future[float] | None = None  # duration of the first start in seconds
        self._closed = False
        self._pool = Pool(config, self._make_backend, self._buffers, version, name)
        # With several replicas `*` stands for a replica's number.
        self.log_pattern = Path(run_dir).absolute() / log_name(config)

    # -- start and close ---------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the engine without waiting; with `engine.sleep`, waits until the engine sleeps.

        Raises:
            EngineFailed: If the engine refuses its config.
            RuntimeError: If the engine was started before.
        """
        if self._started is not None or self._closed:
            raise RuntimeError("Engine.start: this engine was already started or closed. Fix: create a new one")
        if self._backend_factory is ProcessBackend and self.config.address is None:
            warn_ignored_variables()
        self.log_pattern.parent.mkdir(parents=True, exist_ok=True)
        self._reaper = ProcessReaper()
        # A strong reference in atexit would keep the engine alive until the trainer ends.
        close = weakref.WeakMethod(self.close)
        atexit.register(lambda: (method := close()) and method())
        self._thread.start()
        self._thread.call(self._pool.create_backends(), timeout=30.0)
        prestart.discard_prestarted()  # only ProcessBackend uses the prestarted client process
        try:
            # The client imports vLLM (5 s) and validates the config, so this call raises if vLLM
            # refuses it. The other replicas have the same settings and configure themselves later.
            self._pool.backends[0].configure()
        except (ValueError, OSError) as error:
            self.close()
            raise EngineFailed(f"the engine did not start: {error}") from error
        self._started = self._thread.schedule(self._pool.start())
        if self.config.sleep:
            # The engine measures the free GPU memory before the trainer allocates, and releases it.
            self.wait_ready()
            self.sleep()

    def wait_ready(self, timeout: float | None = None) -> float:
        """Waits until the engine can sample. Returns the duration of its start in seconds.

        Raises:
            EngineFailed: If the engine did not start.
            DeadlineExceeded: After `timeout` seconds (default `engine.start_deadline_s`).
            RuntimeError: Before `start`.
        """
        if self._started is None:
            raise RuntimeError("Engine.wait_ready: the engine was not started. Fix: call start() first")
        timeout = self.config.start_deadline_s if timeout is None else timeout
        try:
            self._started.exception(timeout)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the engine did not start within {timeout:g} s (engine.start_deadline_s); see {self.log_pattern}"
            ) from None
        except CancelledError:
            pass  # `result` raises EngineFailed: the engine was closed
        return self._thread.result(self._started)

    def close(self) -> None:
        """Ends the engine, also during a restart or a weight sync. May be called twice.

        Pending calls in other threads raise EngineFailed.

        Raises:
            EngineFailed: If a process of the engine did not end.
        """
        if self._closed:
            return
        self._thread.assert_not_loop_thread()
        self._closed = True
        # The pool drops its backends while it closes; the check at the end needs them.
        backends = self._pool.backends
        self._pool.kill_all()
        if self._thread.is_alive():
            self._attempt("the engine", lambda: self._thread.call(self._pool.close(), CLOSE_TIMEOUT_S))
            if (weight_sender := self._weight_sender) is not None:
                self._attempt("the sender", lambda: self._thread.call(weight_sender.stop(), CLOSE_TIMEOUT_S))
        self._attempt("its thread", self._thread.stop)
        self._attempt("the shared memory", self._buffers.close)
        if self._reaper is not None:
            self._attempt("the process reaper", self._reaper.close)
        running = [backend.process_group for backend in backends if backend.process_group and not backend.is_dead]
        if running:
            raise EngineFailed(f"Engine.close: process {running[0]} of the engine did not end")

    def _attempt(self, part: str, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:  # `close` must still run the other steps
            log.warning("Engine.close: %s was not closed properly", part, exc_info=True)

    # -- sampling and weight sync ------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Policy version of the weights that the engine has loaded."""
        return self._pool.version

    def sample(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: SamplingConfig, priority: Priority = Priority.SAMPLE
    ) -> list[list[Completion]]:
        """Generates `n` completions of each prompt and waits for them.

        The prompts have the seed indices 0, 1, ... (see `submit`).

        Args:
            prompts: P lists of token ids.
            n: Completions per prompt.
            sampling: Sampling parameters.
            priority: Priority in the queues.

        Returns:
            P lists of n completions, in the order of the prompts.

        Raises:
            UsageError: For prompts that do not fit, before any request is sent.
            EngineFailed: If the engine cannot be restarted.
            WeightsIncomplete: If the engine sleeps and the last weight sync was interrupted.
        """
        self._thread.assert_not_loop_thread()
        group_requests = self._build_group_requests(prompts, n, sampling, priority)

        async def generate_all() -> list[list[Completion]]:
            return await gather_or_cancel(*map(self._pool.generate_group, group_requests))

        return self._thread.result(self.schedule(generate_all(), priority))

    def _build_group_requests(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: SamplingConfig, priority: Priority
    ) -> list[list[EngineRequest]]:
        max_len = self.config.max_model_len
        return [build_requests(prompt, n, sampling, p, priority, max_len) for p, prompt in enumerate(prompts)]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Returns log-probs under the current weights, at temperature 1 over the full vocabulary.

        Args:
            sequences: Lists of token ids, each of at least two and fewer than `max_model_len`.

        Returns:
            For each sequence the log-probs of its tokens from the second on, in nats, float32.

        Raises:
            UsageError, EngineFailed, WeightsIncomplete: As `sample`.
        """
        sampling = SamplingConfig(max_tokens=1, temperature=0.0)  # vLLM samples at least one token
        logprobs = []
        for (completion,) in self.sample(sequences, 1, sampling, priority=Priority.SCORE):
            assert completion.prompt_logprobs is not None  # `Priority.SCORE` asks for them
            logprobs.append(completion.prompt_logprobs)
        return logprobs

    def submit(
        self,
        prompt: Sequence[int],
        n: int,
        sampling: SamplingConfig,
        on_completion: OnCompletion = lambda sample_index, completion: None,
        seed_index: int = 0,
        priority: Priority = Priority.SAMPLE,
        affinity_key: object = None,
    ) -> "Future[list[Completion]]":
        """Submits one group, `n` completions of a prompt, without waiting.

        Groups of equal priority are served in order.

        Args:
            prompt: Token ids.
            n: Completions of the prompt.
            sampling: Sampling parameters.
            on_completion: Called with (sample index, completion) in the engine's thread; may not
                call the engine.
            seed_index: Index of the group among groups with the same `sampling.seed`. That seed, this
                index and the sample index determine the seeds of the requests.
            priority: Priority in the queues.
            affinity_key: Requests with the same object go to one replica, for its prefix cache.

        Returns:
            A future of the completions; its exceptions are those of `sample`. Canceling the future,
            or `close`, ends the sampling.

        Raises:
            UsageError: For a prompt that does not fit.
        """
        self._thread.assert_not_loop_thread()
        requests = build_requests(prompt, n, sampling, seed_index, priority, self.config.max_model_len)
        return self.schedule(self._pool.generate_group(requests, on_completion, affinity_key), priority)

    async def generate(self, request: EngineRequest, affinity_key: object = None) -> Completion:
        """Generates one completion in the engine's thread (`schedule`). Raises as `sample`.

        Args:
            request: One of the requests of `build_requests`.
            affinity_key: As in `submit`.
        """
        return await self._pool.generate(request, affinity_key)

    def schedule(self, work: Coroutine[Any, Any, T], priority: Priority = Priority.SAMPLE) -> "Future[T]":
        """Runs a coroutine in the engine's thread. A weight sync waits for work of an evaluation."""
        if priority is not Priority.EVALUATION:
            return self._thread.schedule(work)
        # An evaluation belongs to one version, so it waits for the end of a running weight sync.
        with self._publish_lock:
            future = self._thread.schedule(work)
            self._evaluation.add(future)
        future.add_done_callback(self._evaluation.discard)
        return future

    def publish(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        adapter: dict[str, Any] | None = None,
        before_load: Callable[[], None] = lambda: None,
    ) -> PublishReport:
        """Syncs new weights to the engine; in-flight requests use them from their next token on.

        Args:
            named_tensors: (Hugging Face name, tensor) pairs of the whole model without tied copies,
                any dtype, any device; may be a generator.
            version: Policy version, larger than the last one.
            adapter: PEFT's config if the tensors belong to an adapter (needs `engine.lora_rank`).
                All requests use the adapter from now on.
            before_load: Called after the copy, before the engine wakes up and loads it; frees the
                trainer's GPU memory.

        Raises:
            UsageError: For unsupported tensors or a version that does not grow.
            RuntimeError: While an evaluation is in flight.
            EngineFailed: If the engine cannot load the weights, even after a restart.
        """
        if adapter is not None and self.config.lora_rank is None:
            raise UsageError(
                "publish: the tensors are an adapter, but the engine was started without engine.lora_rank. Fix: set "
                "engine.lora_rank"
            )
        with self._publish_lock:
            if not all(future.done() for future in self._evaluation.copy()):
                raise RuntimeError(
                    f"publish: cannot publish version {version} during an evaluation of version {self.version}. Fix: "
                    "publish after the evaluation, or cancel it"
                )
            buffer, copy_s = self._buffers.write(named_tensors, version, adapter, self.version)
            before_load()
            pause_s, load_s = self._thread.call(self._pool.load(version))
            return PublishReport(buffer.bytes, buffer.checksums, copy_s, pause_s, load_s)

    def checksums(self) -> list[dict[str, int | None]]:
        """Returns the `weight_buffer.checksum` of each synced tensor by name, one dict per worker.

        The value is None if the tensor was loaded into several parameters whose checksums differ.

        Raises:
            EngineFailed: If the engine cannot be restarted.
        """
        return self._thread.call(self._pool.checksums())

    def sample_canary(self, prompts: Sequence[Sequence[int]], n: int, sampling: SamplingConfig) -> list[CanaryAnswer]:
        """Samples the canary prompts on every serving replica, with the highest priority.

        Returns:
            One answer, with checksums, per replica that does not crash meanwhile.

        Raises:
            UsageError, EngineFailed, WeightsIncomplete: As `sample`.
        """
        # A crashed replica needs no answer: it serves again only after its weights were verified.
        group_requests = self._build_group_requests(prompts, n, sampling, Priority.CANARY)
        return self._thread.call(self._pool.sample_canary(group_requests))

    def require_unmodified_server(self) -> None:
        """Raises UsageError if a server holds weights that another run has published."""
        if self._weight_sender is None:
            return
        from torchtune_ext.sampling.server import ServerBackend

        for backend in self._pool.backends:
            if isinstance(backend, ServerBackend) and backend.model_replaced:
                raise UsageError(f"engine.address: {backend.replaced_model_message()}")

    def sleep(self) -> None:
        """With `engine.sleep`, frees GPU memory until `publish` or `sample` wakes the engine.

        Raises:
            EngineFailed: If the engine cannot be restarted.
        """
        if self.config.sleep:
            self._thread.call(self._pool.sleep())

    def stats(self) -> EngineStats:
        """Returns the counters since the start of the run."""
        return self._pool.stats()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a resumed run: the throttles' measured limits."""
        return self._pool.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the `state_dict` of an earlier run."""
        self._pool.load_state_dict(state)

    # -- in the loop's thread ----------------------------------------------------------------------

    def _make_backend(self, replica: EngineReplica) -> Backend:
        """Creates a backend of a replica. Raises OSError if the process reaper has failed."""
        assert self._reaper is not None  # since `start`
        if replica.config.address is not None and self._backend_factory is ProcessBackend:
            # Imported here, since only runs with servers need these modules.
            from torchtune_ext.sampling.server import ServerBackend
            from torchtune_ext.sampling.weight_sender import WeightSender

            self._weight_sender = self._weight_sender or WeightSender(self.log_pattern)
            backend = ServerBackend(replica.config, replica.on_step)
            backend.server_info, backend.weight_sender = self._server_info, self._weight_sender
        else:
            log_file = self.log_pattern.with_name(self.log_pattern.name.replace("*", str(replica.number)))
            folder = self._reaper.folder
            backend = self._backend_factory(self.model_dir, replica.config, log_file, folder, replica.on_step)
        # The process reaper kills these process groups if the trainer dies.
        try:
            process_groups = [other.process_group for other in self._pool.backends] + [backend.process_group]
            self._reaper.set_process_groups(process_groups)
        except BaseException:
            backend.kill()  # the pool does not have this backend yet
            raise
        return backend


BACKENDS: dict[str, BackendFactory] = {"vllm": ProcessBackend}


def find_backend(name: str) -> BackendFactory:
    """Returns the backend factory of a name or dotted path. Raises UsageError if it is unknown."""
    if name in BACKENDS:
        return BACKENDS[name]
    if "." not in name:
        raise UsageError(
            f"engine.backend={name!r}: unknown backend; expected {', '.join(sorted(BACKENDS))} or the dotted path of a class. "
            "Fix: set engine.backend=vllm, or name your class (my_module.MyBackend)"
        )
    return import_object(name, f"engine.backend={name}")
