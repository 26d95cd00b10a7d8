"""The process of vLLM's EngineCore: started early, in an environment of its own, bound to the life of the trainer.

vLLM would spawn this process itself, with `multiprocessing`, after the trainer has imported vLLM. That has four
faults for us: the core imports vLLM only when the trainer has done so (twice the wait), it inherits the trainer's
environment (while on CPU the core alone needs `TORCHDYNAMO_DISABLE=1` and one OpenMP thread), it imports the trainer's
`__main__` once more (a whole recipe under `tune run`), and it lives on for ever when the trainer is killed.

So the trainer starts `python -m torchtune_ext.sampling.core_process`, which asks the kernel to be killed with its
parent, imports vLLM at once, and waits on stdin for the pickled function that `multiprocessing` would have called.
`CoreProcess` is the trainer's end and looks to vLLM like a `multiprocessing.Process`.
"""

import asyncio
import inspect
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from torchtune_ext.run.errors import Failure
from torchtune_ext.run.parent import die_with_parent, environment
from torchtune_ext.sampling import janitor

LOG_LEVEL = os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")
LOG_FORMAT = "(core) %(asctime)s %(levelname)s %(name)s: %(message)s"
# Variables that begin so tell the trainer its place among its ranks; the core has none.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
_LENGTH = struct.Struct("<Q")
# Importing and configuring vLLM writes variables with these beginnings into os.environ. They belong to the core, not to the
# trainer.
VLLM_ENVIRONMENT = (
    *("VLLM_", "TORCHINDUCTOR_", "NUMEXPR_MAX_", "PYTORCH_NVML_", "TRITON_CACHE_", "TILELANG_", "AITER_", "NCCL_"),
    *("LD_PRELOAD", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"),
)
CORES = "TORCHTUNE_EXT_CORES"  # variable that holds the cores which one of several engines on a CPU may use


class CoreProcess:
    """Holds one engine core, from its start to its end. Make it from a thread that lives as long as the run: the kernel
    counts the end of that thread as the end of the parent."""

    name = "EngineCore"

    def __init__(self, environ: dict[str, str], log: Path):
        """Starts the process, with `environ` on top of our own environment and its output appended to `log`. Raises OSError."""
        self.log_start = log.stat().st_size if log.exists() else 0
        self.log = log
        module = "torchtune_ext.sampling.core_process"
        self._popen = start_module(module, log, environ=environ, stdin=subprocess.PIPE)
        self.pid = self._popen.pid
        try:
            self.sentinel = os.pidfd_open(self.pid)  # readable once the process has ended
        except OSError:
            # Nobody else knows of it yet.
            self.close()
            raise
        # `close` does not close it, since vLLM's monitor may still look at it.
        weakref.finalize(self, os.close, self.sentinel)
        self.settings: dict[str, str] = {}  # environment variables that vLLM's configuration asks for
        self._work: tuple[Callable, dict[str, Any]] | None = None

    def assign(self, target: Callable, kwargs: dict[str, Any]) -> "CoreProcess":
        """Remembers what to call in the process; `start` sends it."""
        self._work = (target, kwargs)
        return self

    def start(self) -> None:
        """Sends the function to call. Raises BrokenPipeError when the process has ended."""
        assert self._work is not None and self._popen.stdin is not None
        payload = pickle.dumps(self._work)
        with self._popen.stdin as pipe:
            pipe.write(pickle.dumps(self.settings) + payload)

    @property
    def exitcode(self) -> int | None:
        """The exit code; that of a signal is negative, and None means that the process lives."""
        return self._popen.poll()

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def join(self, timeout: float | None = None) -> None:
        """Waits for the end of the process, for `timeout` seconds at most. It does not say which of both it was."""
        try:
            self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            pass  # as multiprocessing does: the caller asks is_alive()

    def terminate(self) -> None:
        self._popen.terminate()

    def kill(self) -> None:
        """Kills the core and its workers (one process group), also when they are stopped. May be called from any thread."""
        janitor.kill(self.pid)

    def close(self, timeout: float = 5.0) -> None:
        """Ends the process if it still runs, with its workers, and frees what it holds in the trainer."""
        janitor.end(self.pid, timeout)
        self.join(timeout)
        if self._popen.stdin is not None and not self._popen.stdin.closed:
            try:
                self._popen.stdin.close()
            except BrokenPipeError:
                pass

    def ending(self) -> str:
        """Says how the process ended. Ask before `kill`, whose signal it would name."""
        return how_it_ended(self.exitcode, "the engine's process")

    def cpu_seconds(self) -> float:
        """Returns the seconds of CPU time that the process and its workers have used until now."""
        ticks = 0
        for folder in os.scandir("/proc"):
            if folder.name.isdigit():
                try:
                    # The name in the brackets is whatever its process has called itself, so it is taken as bytes.
                    fields = Path(folder.path, "stat").read_bytes().rsplit(b")", 1)[1].split()
                except OSError:
                    continue  # it has ended meanwhile
                # The fourth field is the session, which a core and its workers share.
                if int(fields[3]) == self.pid:
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def log_tail(self) -> str:
        """Returns the last lines that this process wrote."""
        return log_tail(self.log, self.log_start)


def how_it_ended(code: int | None, what: str) -> str:
    """Says how a process ended, from its exit code; None: it lives, and vLLM gave up over something else."""
    if code is None:
        return "vLLM gave the engine up (the end of its log says why)"
    if code >= 0:
        return f"{what} ended with exit code {code}"
    hint = ", perhaps by the kernel's out-of-memory killer (see dmesg)" if -code == signal.SIGKILL else ""
    return f"{what} was killed by {signal.Signals(-code).name}{hint}"


def start_module(
    module: str,
    log: Path,
    *words: str,
    environ: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    keep: Sequence[int] = (),
) -> subprocess.Popen:
    """Starts a module as a process in a session of its own. It finds the modules that we find, and no variable of torchrun's.

    Args:
        module: by its full name.
        log: its output is appended to it.
        words: its arguments; the last one is always our process id, to whose life it binds itself.
        environ: on top of our own environment.
        stdin: as `subprocess.Popen` takes it.
        keep: descriptors that it inherits.

    Raises:
        OSError: it cannot be started, or the log cannot be written.
    """
    path = [os.path.abspath(entry or ".") for entry in sys.path]
    env = {key: value for key, value in environment().items() if not key.startswith(TORCHRUN)}
    env |= {"PYTHONPATH": os.pathsep.join(path), **(environ or {})}
    command = [sys.executable, "-P", "-m", module, *words, str(os.getpid())]
    with open(log, "ab", buffering=0) as out:
        return subprocess.Popen(
            command, stdin=stdin, stdout=out, stderr=out, env=env, pass_fds=keep, start_new_session=True
        )


def log_tail(log: Path, start: int, lines: int = 30) -> str:
    """Returns the last lines of a log from the byte `start` on."""
    try:
        with open(log, "rb") as file:
            file.seek(max(start, log.stat().st_size - 16384))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"(cannot be read: {error})"
    return "\n".join(text.splitlines()[-lines:])


class CoreContext:
    """Stands in for the `multiprocessing` context in which vLLM makes its core; everything else is passed on."""

    def __init__(self, process: CoreProcess, context: Any):
        self._process, self._context = process, context

    def Process(self, target: Callable, kwargs: dict[str, Any], name: str) -> CoreProcess:  # noqa: N802 (their name)
        return self._process.assign(target, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def forget_preemptions_of_pauses() -> None:
    """Makes vLLM count only the preemptions of a KV cache that was full, not those of our own pauses.

    A pause that clears the cache (`pause_generation(mode="keep", clear_cache=True)`, and `sleep`) ends in
    `Scheduler.reset_prefix_cache(reset_running_requests=True)`, which throws out every running request by the same method as
    a full cache. The request notes an event PREEMPTED, and the event travels with the request's next token. So the trainer
    would count it after the pause, in whatever step the request happens to run again, next to real preemptions and not to be
    told from them: only here, where it is noted, its reason is known. It is the last event of each request that ran, and it
    is taken back. Raises RuntimeError when vLLM's method is another one.
    """
    import vllm
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreEventType

    original = Scheduler.reset_prefix_cache
    found = list(inspect.signature(original).parameters)
    if found != ["self", "reset_running_requests", "reset_connector"]:
        raise Failure(
            f"vLLM {vllm.__version__} is not the version that this was written for: its Scheduler.reset_prefix_cache takes "
            f"{found}; install the version that setup.cfg names"
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


def main(parent: int) -> None:
    """Lives as the core: imports vLLM, then does whatever the trainer sends. Args: parent: process id of the trainer."""
    die_with_parent(parent)
    if cores := os.environ.get(CORES):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    logging.basicConfig(level=LOG_LEVEL, format=LOG_FORMAT)
    started = time.monotonic()
    # It takes seconds, in which the trainer imports its own half.
    import vllm.v1.engine.core  # noqa: F401

    forget_preemptions_of_pauses()
    # A publication has what a checkpoint has: no buffers of RoPE, and no second copy of a tied output layer. vLLM calls that a
    # failure, ten times in each; whether every tensor has arrived is what its checksum says.
    reload = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    reload.addFilter(lambda record: record.msg != "%s: Failed to load weights")
    print(
        f"engine core {os.getpid()}: vLLM imported in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True
    )
    os.environ.update(pickle.load(sys.stdin.buffer))
    target, kwargs = pickle.load(sys.stdin.buffer)
    target(**kwargs)


if __name__ == "__main__":
    main(int(sys.argv[1]))


# Messages between two processes of the sampler are pickled lists with their length before them, over a socket pair.
def pack(messages: list[Any]) -> bytes:
    """Returns the bytes that carry some messages."""
    data = pickle.dumps(messages, protocol=5)
    return _LENGTH.pack(len(data)) + data


def receive(end: socket.socket) -> list[Any]:
    """Reads one frame before a loop runs, and not a byte behind it. Returns its messages. Raises EOFError, OSError."""
    (length,) = _LENGTH.unpack(_exactly(end, _LENGTH.size))
    return pickle.loads(_exactly(end, length))


def _exactly(end: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = end.recv(count - len(data))
        if not part:
            raise EOFError("the other end was closed")
        data += part
    return bytes(data)


class Frames(asyncio.Protocol):
    """One end of the socket pair in an asyncio loop.

    What is said in one turn of the loop leaves as one frame: the other end is woken once, not for each message.
    """

    def __init__(self, on_messages: Callable[[list[Any]], None], on_end: Callable[[], None]) -> None:
        """Args: on_messages: takes what has arrived; on_end: called once when the other end is gone."""
        self._on_messages, self._on_end = on_messages, on_end
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiting: list[Any] = []  # messages that have not left yet
        self._flushing = False
        self._arrived = bytearray()

    def say(self, message: Any) -> None:
        """Sends a message, unless the other end is gone."""
        self._waiting.append(message)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Ends the connection, without a word to `on_end`. What was said before still leaves."""
        self._flush()
        self._on_end = lambda: None
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        self._flushing = False
        if self._transport is not None and self._waiting:
            messages, self._waiting = self._waiting, []
            self._transport.write(pack(messages))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._arrived += data
        begin = 0
        while len(self._arrived) >= begin + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._arrived, begin)
            end = begin + _LENGTH.size + length
            if len(self._arrived) < end:
                break
            messages = pickle.loads(self._arrived[begin + _LENGTH.size : end])
            begin = end
            self._on_messages(messages)
        del self._arrived[:begin]

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._on_end()


if __name__ == "__main__":
    main(int(sys.argv[1]))


def on_cpu() -> bool:
    """Whether the installed torch, and so the vLLM beside it, is the CPU build."""
    return torch.version.cuda is None and torch.version.hip is None


@contextmanager
def environment_kept() -> Iterator[dict[str, str]]:
    """Undoes what vLLM does to this process's environment. Afterwards the dictionary holds what it had set."""
    before, changed = dict(os.environ), {}
    try:
        yield changed
    finally:
        for key, value in list(os.environ.items()):
            if key.startswith(VLLM_ENVIRONMENT) and before.get(key) != value:
                changed[key] = value
                if key in before:
                    os.environ[key] = before[key]
                else:
                    del os.environ[key]


def import_vllm() -> None:
    """Imports what the engine's thread will use, in the thread that calls. In two threads at once Python would see half-made
    modules: Transformers, Accelerate and torch are imported by the trainer, too."""
    if on_cpu():
        # It would warn that there is no Triton, which nobody expects.
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    with environment_kept():
        os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
        # Dynamo and inductor come before vLLM, which changes their environment variables.
        import torch._dynamo
        import torch._inductor.config  # noqa: F401
        import vllm.engine.arg_utils
        import vllm.renderers.hf
        import vllm.v1.engine.async_llm  # noqa: F401


if __name__ == "__main__":
    main(int(sys.argv[1]))
