"""Holds the last published weights in an anonymous memory file that vLLM opens through /proc."""

import asyncio
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from torchtune_ext.run.errors import DeadlineExceeded, UsageError
from torchtune_ext.sampling.backend import Backend, BackendCrashed
from torchtune_ext.sampling.types import EngineFailed, WeightsIncomplete

log = logging.getLogger(__name__)

UNREADABLE = "cannot read the trainer's weights"  # start of the engine's error if it cannot open the memory file
ADAPTER_ID = 1  # vLLM's id of the run's adapter
ALIGNMENT = 64  # bytes; every tensor starts at a multiple
TOKEN_BYTES = 64  # length of the random token at the start of the file, which identifies it
MANIFEST = ("names", "dtype_names", "shapes", "offsets")  # columns of a buffer's tensor list
MAX_WRITE_BYTES = 1 << 30  # bytes per write: the kernel writes at most 2 GiB at a time
LOCK_POLL_S = 0.02  # seconds between two attempts of a coroutine to get the lock
LINE_WORDS = 1 << 12  # 32-bit words that a checksum sums at once (one line)
_PINNED: set[int] = set()  # addresses of memory that `pin` has pinned
LINES_PER_BATCH = {"cpu": 16, "cuda": 1 << 12}  # lines per batch: fits a core's cache, or keeps a GPU busy


@torch.no_grad()
def checksum(tensor: torch.Tensor, device: torch.device | None = None) -> int:
    """Returns a 64-bit checksum of a tensor's bytes; not cryptographic.

    Args:
        tensor: The tensor.
        device: The device that computes. It gets one batch of lines at a time. None: the tensor's.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    device = device or tensor.device
    size, weights = data.numel(), _checksum_weights(device)
    # Each line of 32-bit words x_i becomes the sum of w_i x_i modulo 2^64. The sums are the words
    # of the next round, until one sum is left. The w_i are odd, so a change of one word is always
    # detected. They are pseudo-random, so any other change, for instance two swapped words, is
    # missed with a probability of 2^-32 per round.
    while True:
        whole = data.numel() // (4 * LINE_WORDS) * (4 * LINE_WORDS)
        rest = torch.zeros(4 * LINE_WORDS, dtype=torch.uint8, device=data.device)
        rest[: data.numel() - whole] = data[whole:]
        # A view as 32-bit words requires four-byte alignment.
        body = data[:whole] if data.storage_offset() % 4 == 0 else data[:whole].clone()
        lines = [
            *body.view(torch.int32)
            .view(-1, LINE_WORDS)
            .split(LINES_PER_BATCH.get(device.type, LINES_PER_BATCH["cuda"]))
        ]
        lines.append(rest.view(torch.int32)[None])
        # All products share one buffer, because new pages for each would be slow.
        room = torch.empty(max(map(len, lines)), LINE_WORDS, dtype=torch.int64, device=device)
        sums = [torch.mul(part.to(device, non_blocking=True), weights, out=room[: len(part)]).sum(1) for part in lines]
        data = torch.cat(sums).view(torch.uint8)
        if data.numel() == 8:
            return int(data.view(torch.int64).item()) ^ size


@lru_cache
def _checksum_weights(device: torch.device) -> torch.Tensor:
    """Returns [LINE_WORDS] odd int64: SplitMix64's mixer (Steele et al. 2014) on 1, 2, 3, ..."""
    values = np.arange(1, LINE_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    values = (values ^ (values >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(values.view(np.int64)).to(device)


def describe_differences(
    sent: Mapping[str, int], taken: Mapping[str, int | None], engine: str, worker: int
) -> str | None:
    """Describes which tensors of a worker differ from the published ones; None if all match.

    Args:
        sent: Name -> checksum of the published tensors.
        taken: Name -> checksum of the worker's tensors.
        engine: Name of the engine.
        worker: Index of the worker.
    """
    differing = sorted(name for name in sent.keys() | taken.keys() if sent.get(name) != taken.get(name))
    if not differing:
        return None
    num_missing = sum(name not in taken for name in differing)
    return (
        f"{len(differing)} of the {len(sent)} tensors in {engine} (worker {worker}) differ from the published ones: "
        f"{num_missing} missing, the others are stale or damaged, e.g. {', '.join(differing[:3])}"
    )


async def find_differing_tensors(published: "Sequence[WeightBuffer]", backend: Backend) -> str | None:
    """Returns `describe_differences` of the first worker that has any; needs the read lock.

    Raises:
        BackendCrashed: If the engine crashes.
    """
    sent = {name: value for buffer in published for name, value in buffer.checksums.items()}
    for worker, taken in enumerate(await backend.checksums()):
        if differences := describe_differences(sent, taken, "it", worker):
            return differences
    return None


class WeightBuffer:
    """The weights of a model or an adapter, and the manifest of its tensors."""

    def __init__(self):
        self.adapter: dict[str, Any] | None = None  # PEFT's config if this is an adapter
        self.version = -1  # policy version of the weights; -1: never published
        self.loaded_version = -1  # last version that a replica has loaded
        # The file has no name in a file system, so it disappears when the trainer dies.
        self._fd = os.memfd_create("torchtune-ext-weights", os.MFD_CLOEXEC)
        self._token = os.urandom(TOKEN_BYTES)
        self.manifest: dict[str, list] | None = None  # None before the first weight sync
        self.bytes = 0  # total size of the tensors
        self.complete = True  # False during a copy, or after an interrupted one
        self.checksums: dict[str, int] = {}  # tensor name -> checksum
        # The whole memory [bytes], pinned if possible, once weights came from a GPU.
        self._mapped: torch.Tensor | None = None

    def address(self) -> dict[str, str]:
        """Returns the path at which other processes of this user open the memory, and its token."""
        return {"path": f"/proc/{os.getpid()}/fd/{self._fd}", "token": self._token.hex()}

    def write(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> float:
        """Copies tensors of any dtype from any device. Returns the duration in seconds.

        Args:
            named_tensors: (Hugging Face name, tensor) pairs.

        Raises:
            UsageError: For no tensors, or two tensors with the same name.
        """
        started = time.monotonic()
        rows, sums, end, size, on_gpu = [], {}, TOKEN_BYTES, 0, False
        self._write(memoryview(self._token), 0)
        # The tensors are copied one by one, so that a generator can gather each one on demand.
        for name, tensor in named_tensors:
            # From here on the previous weights are overwritten.
            self.complete = False
            sums[name] = checksum(tensor)
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            on_gpu = tensor.is_cuda
            rows.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end))
            if self._mapped is not None and end + flat.numel() <= self._mapped.numel():
                self._mapped[end : end + flat.numel()].copy_(flat)
            else:
                self._write(flat.cpu().numpy().data, end)
            size += flat.numel()
            end += -(-flat.numel() // ALIGNMENT) * ALIGNMENT
        if not rows:
            raise UsageError("publish: named_tensors is empty; pass the whole model, with Hugging Face names")
        if len(sums) < len(rows):
            (double, _), *_ = Counter(name for name, *_ in rows).most_common(1)
            raise UsageError(
                f"publish: named_tensors holds {double!r} twice; leave out tied copies such as lm_head.weight"
            )
        if self._mapped is None or self._mapped.numel() < end:
            self._unmap()
            os.ftruncate(self._fd, end)
            # Pinning needs the total size, so the first weight sync is slow.
            if on_gpu:
                self._mapped = pin(map_memory(self.address()["path"]))
        self.manifest = manifest_of(rows)
        self.bytes, self.checksums, self.complete = size, sums, True
        return time.monotonic() - started

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            size = os.pwrite(self._fd, data[:MAX_WRITE_BYTES], offset)
            data, offset = data[size:], offset + size

    def _unmap(self) -> None:
        if self._mapped is not None:
            unpin(self._mapped)
            self._mapped = None

    def close(self) -> None:
        """Frees the memory. May be called twice."""
        if self._fd >= 0:
            self._unmap()
            os.close(self._fd)
            self._fd = -1


def map_memory(path: str) -> torch.Tensor:
    """Maps the memory of a `WeightBuffer` without a copy.

    Args:
        path: The path in `WeightBuffer.address()`.

    Returns:
        [bytes], uint8.
    """
    return torch.from_file(path, shared=True, size=os.stat(path).st_size, dtype=torch.uint8)


def _cudart() -> Any:
    return torch.cuda.cudart()


def pin(memory: torch.Tensor) -> torch.Tensor:
    """Pins main memory [bytes] for GPU copies, until `unpin`. If that fails, copies are slow."""
    # The 15 GB of a 7B model then take 0.3 s on an H100. Without pinning, the driver's staging
    # buffers take 11 s in one direction and 3 s in the other.
    try:
        torch.cuda.check_error(_cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        _PINNED.add(memory.data_ptr())
    except RuntimeError as error:  # under WSL2, in containers with a limit, ...
        _warn_unpinned(str(error))
        # CUDA keeps the error for the next kernel launch, which would raise it again.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
    return memory


@cache
def _warn_unpinned(reason: str) -> None:
    log.warning("memory: this process cannot pin main memory (%s), so copies to and from the GPU are slower", reason)


def unpin(memory: torch.Tensor) -> None:
    """Unpins memory of `pin`."""
    # The result is not checked: an error would only hide the message of an earlier GPU failure.
    if memory.data_ptr() in _PINNED:
        _PINNED.remove(memory.data_ptr())
        _cudart().cudaHostUnregister(memory.data_ptr())


def manifest_of(rows: Iterable[tuple]) -> dict[str, list]:
    """Returns the manifest of tensors; each row has the columns of `MANIFEST`."""
    return dict(zip(MANIFEST, map(list, zip(*rows, strict=True)), strict=True))


def iter_views(memory: torch.Tensor, manifest: Mapping[str, Sequence]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) views of memory [bytes], uint8, at the offsets of a manifest."""
    for name, dtype_name, shape, offset in zip(*(manifest[key] for key in MANIFEST), strict=True):
        dtype = getattr(torch, dtype_name)
        yield name, memory[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


class WeightBuffers:
    """The model's and the adapter's buffer of a run: one thread writes, all replicas read."""

    def __init__(self, deadline_s: float):
        """Creates empty buffers.

        Args:
            deadline_s: Deadline in seconds of one engine call, and of a copy that a replica waits
                for.
        """
        self.model, self.adapter = WeightBuffer(), WeightBuffer()
        self.deadline_s = deadline_s
        # No replica may load half-written weights. The publisher holds the lock while it copies, and
        # releases it before it waits for the replicas. The engine's loop holds the lock while any
        # replica loads. This order prevents a deadlock.
        self._lock = threading.Lock()
        self._readers = 0  # replicas that load now and share the lock
        self._writer_waits = False
        self._closed = False

    @property
    def published(self) -> list[WeightBuffer]:
        """Buffers with weights, the model's before the adapter's.

        Raises:
            WeightsIncomplete: If a write was interrupted.
        """
        buffers = [buffer for buffer in (self.model, self.adapter) if buffer.manifest is not None]
        if not all(buffer.complete for buffer in buffers):
            raise WeightsIncomplete(
                "the last weight sync was interrupted while copying, so its weights are incomplete; publish again"
            )
        return buffers

    def check_complete(self) -> None:
        """Raises WeightsIncomplete, unless a running write may complete the weights."""
        # Readers or the writer hold the lock. A locked lock without readers means a running write.
        if self._readers or not self._lock.locked():
            self.published  # noqa: B018  (it raises)

    def write(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        adapter: dict[str, Any] | None,
        current: int,
    ) -> tuple[WeightBuffer, float]:
        """Copies new weights (`Engine.publish`) into a buffer.

        Args:
            named_tensors: As in `Engine.publish`.
            version: As in `Engine.publish`.
            adapter: As in `Engine.publish`.
            current: Version that the engine holds.

        Returns:
            The written buffer, and the duration of the copy in seconds.

        Raises:
            UsageError: For unsupported tensors or a version that does not grow.
            EngineFailed: If the engine was closed or does not release the lock.
        """
        buffer, other, kind = (
            (self.model, self.adapter, "adapter") if adapter is None else (self.adapter, self.model, "model")
        )
        self._acquire()
        try:
            if self._closed:
                raise EngineFailed("the engine was closed")
            # A version that no engine has loaded may be published again.
            if version < current or version <= buffer.loaded_version:
                raise UsageError(
                    f"publish: version {version} after {max(current, buffer.loaded_version)}; versions must increase"
                )
            if other.manifest is not None and not other.complete:
                raise UsageError(
                    f"publish: the last weight sync of the {kind} was interrupted; publish the {kind} first"
                )
            copy_s = buffer.write(self._until_closed(named_tensors))
            buffer.adapter, buffer.version = adapter, version
            return buffer, copy_s
        finally:
            self._lock.release()

    def _acquire(self) -> None:
        # Longer than the deadlines of all calls of one load together.
        limit = 6 * self.deadline_s
        give_up_at = time.monotonic() + limit
        self._writer_waits = True
        try:
            while not self._lock.acquire(timeout=min(0.2, limit / 10)):
                if self._closed:
                    raise EngineFailed("the engine was closed")
                if time.monotonic() > give_up_at:
                    raise EngineFailed(
                        f"publish: the engine has not finished loading the last weights within {limit:g} s"
                    )
        finally:
            self._writer_waits = False

    def _until_closed(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in named_tensors:
            if self._closed:
                raise EngineFailed("the engine was closed during publish")
            yield pair

    @asynccontextmanager
    async def read_lock(self) -> AsyncIterator[None]:
        """Excludes writers while the body runs. May be called in one thread only.

        Raises:
            BackendCrashed: After `deadline_s` seconds, or if the engine is closed.
        """
        give_up_at = time.monotonic() + self.deadline_s
        # The first reader takes the lock. Other readers share it unless the writer waits, which
        # would otherwise starve. A blocking `acquire` would stop the loop of all replicas.
        while not ((self._readers and not self._writer_waits) or self._lock.acquire(blocking=False)):
            if self._closed:
                raise BackendCrashed("the engine is closed")
            if time.monotonic() > give_up_at:
                late = f"a weight sync did not finish its copy within engine.rpc_deadline_s={self.deadline_s:g} s"
                raise BackendCrashed(late)
            await asyncio.sleep(LOCK_POLL_S)
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            if not self._readers:
                self._lock.release()

    def close(self) -> None:
        """Frees the memory. Raises DeadlineExceeded if a running copy does not end."""
        self._closed = True
        # During a write the file must keep its descriptor: another file could get the same number.
        if not self._lock.acquire(timeout=5.0):
            raise DeadlineExceeded("a weight sync is still copying; its memory is freed with this process")
        try:
            self.model.close()
            self.adapter.close()
        finally:
            self._lock.release()
