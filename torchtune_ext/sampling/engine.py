"""The sampler: one engine, or several, for the whole run, behind plain blocking calls.

    engine = Engine(model_dir, EngineConfig(max_model_len=1024), run_dir)
    engine.start()
    groups = engine.sample([[1, 2, 3], [4, 5]], n=16, sampling=SamplingConfig(max_tokens=256, seed=1))
    engine.publish(model.named_parameters(), version=1)

One asyncio thread serves all engines (`pool.py`, `lane.py`). All methods may be called from any thread, also at the
same time. See docs/sampling.md.
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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchtune_ext.run.catalog import import_object
from torchtune_ext.run.errors import DeadlineExceeded, RunFailure, UsageError
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
from torchtune_ext.sampling.vllm_backend import RemoteBackend
from torchtune_ext.sampling.weight_buffer import WeightBuffers

if TYPE_CHECKING:
    from torchtune_ext.sampling.weight_sender import WeightSender

log = logging.getLogger(__name__)

CLOSE_S = 30.0  # seconds that the engine's thread has to end everything

# A backend is called with the model's directory, the config, the file that takes the engine's log, a folder for
# temporary files, and the function that takes the counters of each step. It returns at once; `Backend.launch` then waits.
BackendFactory = Callable[[str, EngineConfig, Path, str, Callable[[EngineStepStats], None]], Backend]


async def _with_error_retrieved(work: Coroutine[Any, Any, Any]) -> Any:
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(mark_retrieved)
    return await work


class LoopThread(threading.Thread):
    """An asyncio loop in a thread of its own, which runs coroutines for other threads."""

    def __init__(self, name: str):
        super().__init__(name=name, daemon=True)
        self._loop = asyncio.new_event_loop()
        self._futures: set[Future] = set()  # of what has not ended

    def assert_not_loop_thread(self) -> None:
        """Raises RuntimeError in the loop's own thread."""
        # There a call would wait for its own thread, for ever.
        if threading.current_thread() is self:
            raise RunFailure("on_completion may not call the engine: it runs in the engine's own thread")

    def schedule(self, work: Coroutine[Any, Any, Any]) -> Future:
        """Begins `work` and returns. It is cancelled when the thread ends. Raises EngineFailed when none runs."""
        attended = _with_error_retrieved(work)
        try:
            if self.is_alive():
                future = asyncio.run_coroutine_threadsafe(attended, self._loop)
                self._futures.add(future)
                future.add_done_callback(self._futures.discard)
                # The thread may have ended since the first look, without a look at the work.
                if not self.is_alive():
                    future.cancel()
                return future
        except RuntimeError:
            pass  # the loop was closed since that look
        # Python would warn of coroutines that were never awaited.
        attended.close()
        work.close()
        raise EngineFailed("the engine is not running: call start() first, and nothing after close()")

    def call(self, work: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        """Runs `work` and returns its result. Raises EngineFailed, TimeoutError; RuntimeError in the thread itself."""
        try:
            self.assert_not_loop_thread()
        except RuntimeError:
            work.close()
            raise
        return self.result(self.schedule(work), timeout)

    def result(self, future: Future, timeout: float | None = None) -> Any:
        """Waits for submitted work, and cancels it if the wait ends first. Raises as `call` does."""
        limit = float("inf") if timeout is None else timeout
        give_up_at = time.monotonic() + limit
        try:
            # A future whose loop has died never ends, so the thread is looked at twice a second. Canceled after that, a
            # future is done, but not to `wait`: this would take a call from the loop.
            while not wait([future], timeout=0.5).done and not future.done():
                if time.monotonic() > give_up_at:
                    raise DeadlineExceeded(f"the engine's thread did not answer within {limit:g} s")
                if not self.is_alive():
                    raise EngineFailed("the engine was closed")
            return future.result()
        except CancelledError:
            raise EngineFailed("the engine was closed") from None
        finally:
            # On work that is done this has no effect. Otherwise the caller is leaving (Ctrl-C).
            future.cancel()

    def stop(self) -> None:
        """Ends the thread, and what still runs in it. Raises TimeoutError."""
        if self.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self.join(5.0)
            if self.is_alive():
                raise DeadlineExceeded(f"the thread {self.name} did not end")
        # A loop that has stopped tells nobody what became of the work. A copy of a set is made at once, even while
        # another thread submits.
        for future in self._futures.copy():
            future.cancel()

    def run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        give_up_at = time.monotonic() + 2.0
        # A task that ends may begin others.
        while (rest := asyncio.all_tasks(self._loop)) and time.monotonic() < give_up_at:
            for task in rest:
                # Cancelled a turn later, a new task makes its first step before: Python warns of work that never began.
                self._loop.call_soon(task.cancel)
            self._loop.run_until_complete(asyncio.wait(rest, timeout=give_up_at - time.monotonic()))
        self._loop.close()


class Engine:
    """Owns the sampling engines and everything around them: their thread, their janitor, the published weights."""

    def __init__(self, model_dir: str, config: EngineConfig, run_dir: str, version: int = 0, name: str = "engine"):
        """Starts nothing yet. Raises ValueError for a backend that nobody knows, and for more engines than devices.

        Args: model_dir: of a Hugging Face model; run_dir: takes `engine.log` (of several engines: `engine_0.log`, ...);
        version: policy version of the weights in `model_dir`; name: in messages.
        """
        self.config = config
        self._backend_factory = find_backend(config.backend)
        self.model_dir = str(model_dir)
        self._buffers = WeightBuffers(config.rpc_deadline_s)
        self._publish_lock = threading.Lock()  # one publication at a time, and none beside an evaluation
        self._evaluation: set[Future] = set()  # of the groups that are drawn for one
        self._thread = LoopThread("torchtune-ext-engine")
        self._reaper: ProcessReaper | None = None
        self._server_info: dict[str, dict[str, Any]] = {}  # what each server was when it was met
        self._weight_sender: WeightSender | None = None  # brings weights to servers over a network
        self._started: Future[float] | None = None  # the seconds that the first start took
        self._closed = False
        self._pool = Pool(config, self._make_backend, self._buffers, version, name)
        self.log_path = Path(run_dir).absolute() / log_name(config)

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to bring the engine up and returns; with `engine.sleep` it returns once the engine is up and sleeps.

        Raises EngineFailed when the engine refuses its config; RuntimeError when it was started before.
        """
        if self._started is not None or self._closed:
            raise RunFailure("Engine.start: an engine is started once; make a new one")
        if self._backend_factory is RemoteBackend and self.config.address is None:
            warn_ignored_variables()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._reaper = ProcessReaper()
        # A strong reference in atexit would keep the engine alive until the trainer ends.
        close = weakref.WeakMethod(self.close)
        atexit.register(lambda: (method := close()) and method())
        self._thread.start()
        self._thread.call(self._pool.create_backends(), timeout=30.0)
        prestart.discard_prestarted()  # engines of another kind have not taken it
        try:
            # The client imports vLLM (5 s) and takes the config, so that a config which vLLM refuses is an error of
            # this call. The other engines have the same settings and configure themselves later.
            self._pool.backends[0].configure()
        except (ValueError, OSError) as error:
            self.close()
            raise EngineFailed(f"the engine did not start: {error}") from error
        self._started = self._thread.schedule(self._pool.start())
        if self.config.sleep:
            # The engine measures the GPU before the trainer has taken its part, and the trainer then finds it free.
            self.wait_ready()
            self.sleep()

    def wait_ready(self, timeout: float | None = None) -> float:
        """Waits until the engine can sample. Returns the seconds that its start took.

        Raises EngineFailed; TimeoutError after `timeout` seconds (or `start_deadline_s`); RuntimeError before `start`.
        """
        if self._started is None:
            raise RunFailure("Engine.wait_ready: call start() first")
        timeout = self.config.start_deadline_s if timeout is None else timeout
        try:
            self._started.exception(timeout)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the engine did not start within {timeout:g} s (engine.start_deadline_s); see {self.log_path}"
            ) from None
        except CancelledError:
            pass  # `result` says that the engine was closed
        return self._thread.result(self._started)

    def close(self) -> None:
        """Ends the engine, also during a restart or a publication. May be called twice.

        Calls under way in other threads end with EngineFailed. Raises EngineFailed when a process is left.
        """
        if self._closed:
            return
        self._thread.assert_not_loop_thread()
        self._closed = True
        # The pool forgets its cores as they end, and they are looked at once more at the bottom.
        backends = self._pool.backends
        self._pool.kill_all()
        if self._thread.is_alive():
            self._attempt("the engine", lambda: self._thread.call(self._pool.close(), CLOSE_S))
            if (weight_sender := self._weight_sender) is not None:
                self._attempt("the sender", lambda: self._thread.call(weight_sender.stop(), CLOSE_S))
        self._attempt("its thread", self._thread.stop)
        self._attempt("the shared memory", self._buffers.close)
        if self._reaper is not None:
            self._attempt("the janitor", self._reaper.close)
        if groups := [backend.process_group for backend in backends if backend.process_group and not backend.is_dead]:
            raise EngineFailed(f"Engine.close: process {groups[0]} of the engine did not end")

    def _attempt(self, what: str, step: Callable[[], None]) -> None:
        try:
            step()
        # One step that fails must not keep `close` from the others.
        except Exception:
            log.warning("Engine.close: %s was not closed properly", what, exc_info=True)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- work ---------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version of the weights that the engine has loaded."""
        return self._pool.version

    def sample(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: SamplingConfig, priority: Priority = Priority.SAMPLE
    ) -> list[list[Completion]]:
        """Draws `n` completions of each prompt, and waits for them. The prompts are groups 0, 1, ... (see `submit`).

        Args: prompts: P lists of token ids; priority: who goes first where others wait, too.
        Returns: P lists of n completions, in the order of the prompts.
        Raises: ValueError for prompts that do not fit, before anything is sent; EngineFailed; WeightsIncomplete when
        the engine sleeps and the last publication broke off (publish again).
        """
        self._thread.assert_not_loop_thread()
        groups = self._groups(prompts, n, sampling, priority)

        async def generate_all() -> list[list[Completion]]:
            return await gather_or_cancel(*map(self._pool.generate, groups))

        return self._thread.result(self._submit(generate_all(), priority))

    def _groups(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: SamplingConfig, priority: Priority
    ) -> list[list[EngineRequest]]:
        limit = self.config.max_model_len
        return [build_requests(prompt, n, sampling, p, priority, limit) for p, prompt in enumerate(prompts)]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Scores texts under the current weights, at temperature 1 and over the whole vocabulary. Raises as `sample`.

        Args: texts: lists of token ids, each of at least two and fewer than `max_model_len`.
        Returns: for each text the log-probs of its tokens from the second on, in nats, float32.
        """
        one = SamplingConfig(max_tokens=1, temperature=0.0)  # vLLM samples one token at least
        scores = []
        for row in self.sample(sequences, 1, one, priority=Priority.SCORE):
            assert row[0].prompt_logprobs is not None  # `Priority.SCORE` asks for them
            scores.append(row[0].prompt_logprobs)
        return scores

    def submit(
        self,
        prompt: Sequence[int],
        n: int,
        sampling: SamplingConfig,
        on_completion: OnCompletion = lambda sample, completion: None,
        group: int = 0,
        priority: Priority = Priority.SAMPLE,
        affinity_key: object = None,
    ) -> "Future[list[Completion]]":
        """Begins to draw one group, `n` completions of a prompt, and returns. Groups of equal priority go in order.

        Args: on_completion: called with (sample index, completion) in the engine's thread, may not call the engine;
        group: number, from which the seeds follow, with `sampling.seed` and the sample index; priority: who goes first
        where others wait, too; home: an object that conversations share whose turns go to one engine (prefix cache).
        Returns: a future of the completions, or of what `sample` raises. Canceling it, or `close`, ends the sampling.
        Raises: ValueError for a prompt that does not fit.
        """
        self._thread.assert_not_loop_thread()
        requests = build_requests(prompt, n, sampling, group, priority, self.config.max_model_len)
        return self._submit(self._pool.generate(requests, on_completion, affinity_key), priority)

    def _submit(self, work: Coroutine[Any, Any, Any], priority: Priority) -> Future:
        if priority is not Priority.EVALUATION:
            return self._thread.schedule(work)
        # An evaluation belongs to one version, so it waits for a publication under way and begins with its weights.
        with self._publish_lock:
            future = self._thread.schedule(work)
            self._evaluation.add(future)
        future.add_done_callback(self._evaluation.discard)
        return future

    def publish(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int, adapter: dict[str, Any] | None = None
    ) -> PublishReport:
        """Gives the engine new weights. Requests in flight go on with them, from their next token.

        Args: named_tensors: (Hugging Face name, tensor) of the whole model without tied copies, of any dtype on any
        device, may be a generator; version: larger than the last one; adapter: PEFT's config, if the tensors are those
        of an adapter (this needs `engine.lora_rank`), which all requests use from now on.
        Raises: ValueError for tensors or a version that cannot be; RuntimeError while an evaluation is drawn;
        EngineFailed when the engine takes the weights neither now nor after a restart.
        """
        if adapter is not None and self.config.lora_rank is None:
            raise UsageError("publish: an adapter, but the engine was started without engine.lora_rank")
        with self._publish_lock:
            if not all(future.done() for future in self._evaluation.copy()):
                raise RunFailure(
                    f"publish: version {version}, while an evaluation of version {self.version} is drawn, which belongs to one "
                    f"version; publish when it is over, or cancel it"
                )
            buffer, copy_s = self._buffers.write(named_tensors, version, adapter, self.version)
            pause_s, load_s = self._thread.call(self._pool.load(version))
            return PublishReport(buffer.bytes, buffer.checksums, copy_s, pause_s, load_s)

    def checksums(self) -> list[dict[str, int | None]]:
        """The `weight_buffer.checksum` of every tensor of the last publications, by name, for each worker.

        None stands for a tensor that came in two forms. Raises EngineFailed.
        """
        return self._thread.call(self._pool.checksums())

    def canary(self, prompts: Sequence[Sequence[int]], n: int, sampling: SamplingConfig) -> list[CanaryAnswer]:
        """Asks every engine that serves for the same samples, ahead of all others, and for checksums.

        Raises as `sample`. Returns one answer of each engine that is not lost meanwhile.
        """
        # An engine that was lost serves again only with weights that it has proven, so its answer is not missed.
        return self._thread.call(self._pool.canary(self._groups(prompts, n, sampling, Priority.CANARY)))

    def require_unmodified_server(self) -> None:
        """Raises ValueError when a server holds weights that a run has published there."""
        if self._weight_sender is None:
            return
        from torchtune_ext.sampling.server import ServerBackend

        for backend in self._pool.backends:
            if isinstance(backend, ServerBackend) and backend.model_replaced:
                raise UsageError(f"engine.address: {backend.replaced_model_message()}")

    def sleep(self) -> None:
        """With `engine.sleep`, frees GPU memory until `publish` or `sample` wakes the engine. Raises EngineFailed."""
        if self.config.sleep:
            self._thread.call(self._pool.sleep())

    def stats(self) -> EngineStats:
        """The counters of the run until now."""
        return self._pool.stats()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run should know: the throttle's findings."""
        return self._pool.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from an earlier run's `state_dict`."""
        self._pool.load_state_dict(state)

    # -- inside the loop's thread -------------------------------------------------------------------------------------

    def _make_backend(self, replica: EngineReplica) -> Backend:
        """Makes a life of an engine. Raises OSError when the janitor could not clean up after it."""
        assert self._reaper is not None  # since `start`
        log_path = self.log_path.with_name(self.log_path.name.replace("*", str(replica.number)))
        if replica.config.address is not None and self._backend_factory is RemoteBackend:
            # Imported here, since a run with an engine of its own needs none of it.
            from torchtune_ext.sampling.server import ServerBackend
            from torchtune_ext.sampling.weight_sender import WeightSender

            self._weight_sender = self._weight_sender or WeightSender(self.log_path)
            backend = ServerBackend(replica.config, replica.on_step)
            backend.server_info, backend.weight_sender = self._server_info, self._weight_sender
        else:
            backend = self._backend_factory(
                self.model_dir, replica.config, log_path, self._reaper.folder, replica.on_step
            )
        # The janitor kills these process groups when the trainer dies.
        try:
            self._reaper.set_groups([other.process_group for other in self._pool.backends] + [backend.process_group])
        except BaseException:
            backend.kill()  # nobody else knows of it yet
            raise
        return backend


BACKENDS: dict[str, BackendFactory] = {"vllm": RemoteBackend}


def find_backend(name: str) -> BackendFactory:
    """The backend of that name or dotted path. Raises ValueError where there is none."""
    if name in BACKENDS:
        return BACKENDS[name]
    if "." not in name:
        raise UsageError(
            f"engine.backend is {name!r}: use one of {', '.join(sorted(BACKENDS))}, or a class of your own (my_module.MyCore)"
        )
    return import_object(name, f"engine.backend={name}")
