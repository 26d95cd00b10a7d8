"""Holds the last published weights in an anonymous file in memory, which vLLM's process opens through /proc."""

import asyncio
import math
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from torchtune_ext.run.errors import DeadlineExceeded, UsageError
from torchtune_ext.sampling.backend import Backend, BackendCrashed
from torchtune_ext.sampling.types import EngineFailed, WeightsIncomplete

UNREADABLE = "cannot read the trainer's weights"  # in the engine's error when our memory is not there for it
ADAPTER_ID = 1  # by which vLLM knows the one adapter of a run
ALIGNMENT = 64  # bytes; every tensor starts at a multiple
TOKEN_BYTES = 64  # bytes at the start of the file, by which the reader knows that it is ours
MANIFEST = ("names", "dtype_names", "shapes", "offsets")  # what the list of a buffer's tensors has of each
MAX_WRITE_BYTES = 1 << 30  # bytes of one write: the kernel takes at most 2 GiB at a time
LOCK_POLL_S = 0.02  # seconds between two tries of a coroutine to get the lock
LINE_WORDS = 1 << 12  # words of 32 bits that a checksum adds up at once
LINES_PER_BATCH = {"cpu": 16, "cuda": 1 << 12}  # lines in one go: they stay in a core's cache, or keep a GPU busy


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> int:
    """A checksum of the bytes of a tensor, 64 bits, computed on its device. It is no defense against forgery."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    size, weights = data.numel(), _checksum_weights(tensor.device)
    # Each line of 32-bit words x_i becomes the sum of w_i x_i modulo 2^64. The sums are words again, until one is left.
    # The w_i are odd, so a change of one word always shows. They look random, so any other change, for instance two
    # words that were swapped, is overlooked with a chance of 2^-32 in each round.
    while True:
        whole = data.numel() // (4 * LINE_WORDS) * (4 * LINE_WORDS)
        rest = torch.zeros(4 * LINE_WORDS, dtype=torch.uint8, device=tensor.device)
        rest[: data.numel() - whole] = data[whole:]
        # A view as words has to be aligned to four bytes.
        body = data[:whole] if data.storage_offset() % 4 == 0 else data[:whole].clone()
        lines = [
            *body.view(torch.int32)
            .view(-1, LINE_WORDS)
            .split(LINES_PER_BATCH.get(tensor.device.type, LINES_PER_BATCH["cuda"]))
        ]
        lines.append(rest.view(torch.int32)[None])
        # All products use one buffer: fresh pages for each would be slow.
        room = torch.empty(max(map(len, lines)), LINE_WORDS, dtype=torch.int64, device=tensor.device)
        sums = [torch.mul(part, weights, out=room[: len(part)]).sum(1) for part in lines]
        data = torch.cat(sums).view(torch.uint8)
        if data.numel() == 8:
            return int(data.view(torch.int64).item()) ^ size


@lru_cache
def _checksum_weights(device: torch.device) -> torch.Tensor:
    """[LINE] odd numbers, int64: the mixer of SplitMix64 (Steele et al. 2014) over 1, 2, 3, ..."""
    values = np.arange(1, LINE_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    values = (values ^ (values >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(values.view(np.int64)).to(device)


def describe_differences(
    sent: Mapping[str, int], taken: Mapping[str, int | None], engine: str, worker: int
) -> str | None:
    """Says which tensors of a worker differ from those that were sent, by their checksums; None: all are the same."""
    wrong = sorted(name for name in sent.keys() | taken.keys() if sent.get(name) != taken.get(name))
    if not wrong:
        return None
    lost = sum(name not in taken for name in wrong)
    return (
        f"{len(wrong)} of the {len(sent)} tensors in {engine} (worker {worker}) are not those that were sent, {lost} of them "
        f"lost, the others old or damaged, e.g. {', '.join(wrong[:3])}"
    )


async def find_wrong_tensors(published: "Sequence[WeightBuffer]", backend: Backend) -> str | None:
    """What `differences` says of the first worker that has any, or None. Raises CoreLost.

    The caller has to keep writers out.
    """
    sent = {name: value for buffer in published for name, value in buffer.checksums.items()}
    messages = [
        describe_differences(sent, taken, "it", worker) for worker, taken in enumerate(await backend.checksums())
    ]
    return next(filter(None, messages), None)


class WeightBuffer:
    """One set of weights, of a model or of an adapter, and the list of what lies where."""

    def __init__(self):
        self.adapter: dict[str, Any] | None = None  # PEFT's config, when the tensors are those of an adapter
        self.version = -1  # version of the policy whose weights these are; -1: never published
        self.loaded_version = -1  # last version of these weights that an engine has taken
        # The file has no name in a file system, so nothing is left when the trainer dies.
        self._fd = os.memfd_create("torchtune-ext-weights", os.MFD_CLOEXEC)
        self._token = os.urandom(TOKEN_BYTES)
        self.manifest: dict[str, list] | None = None  # None before the first publication
        self.bytes = 0  # size of the tensors in it
        self.complete = True  # False while a copy is under way or was cut short
        self.checksums: dict[str, int] = {}  # checksum of every tensor in it, by name
        self._pinned: torch.Tensor | None = None  # all of it [bytes], once weights came from a GPU

    def address(self) -> dict[str, str]:
        """Where another process of this user on this machine opens the memory, and the token with which it begins."""
        return {"path": f"/proc/{os.getpid()}/fd/{self._fd}", "token": self._token.hex()}

    def write(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> float:
        """Copies tensors of any dtype from any device, with their Hugging Face names. Returns the seconds that it took.

        Raises ValueError when there are no tensors, or two of one name.
        """
        started = time.monotonic()
        rows, sums, end, size, on_gpu = [], {}, TOKEN_BYTES, 0, False
        self._write(memoryview(self._token), 0)
        # One tensor after the other, so that a generator may gather each one when it is asked for it.
        for name, tensor in named_tensors:
            # From here on the last publication is overwritten.
            self.complete = False
            sums[name] = checksum(tensor)
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            on_gpu = tensor.is_cuda
            rows.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end))
            if self._pinned is not None and end + flat.numel() <= self._pinned.numel():
                self._pinned[end : end + flat.numel()].copy_(flat)
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
        if self._pinned is None or self._pinned.numel() < end:
            self._unpin()
            os.ftruncate(self._fd, end)
            # Pinning needs the size, which the first publication tells only at its end. So only that one is slow.
            if on_gpu:
                self._pinned = pin(map_memory(self.address()["path"]))
        self.manifest = manifest_of(rows)
        self.bytes, self.checksums, self.complete = size, sums, True
        return time.monotonic() - started

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            size = os.pwrite(self._fd, data[:MAX_WRITE_BYTES], offset)
            data, offset = data[size:], offset + size

    def _unpin(self) -> None:
        if self._pinned is not None:
            unpin(self._pinned)
            self._pinned = None

    def close(self) -> None:
        """Frees the memory. May be called twice."""
        if self._fd >= 0:
            self._unpin()
            os.close(self._fd)
            self._fd = -1


def map_memory(path: str) -> torch.Tensor:
    """The memory of a `WeightBuffer` [bytes], uint8, mapped and not copied. Args: path: that of its `address()`."""
    return torch.from_file(path, shared=True, size=os.stat(path).st_size, dtype=torch.uint8)


def _cudart() -> Any:
    return torch.cuda.cudart()


def pin(memory: torch.Tensor) -> torch.Tensor:
    """Lets a GPU copy directly to and from mapped memory [bytes], until `unpin`. Raises torch.cuda.CudaError."""
    # The 15 GB of a 7B model then take 0.3 s on an H100. Through the driver's own buffers they take 11 s one way and 3
    # s the other.
    torch.cuda.check_error(_cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    return memory


def unpin(memory: torch.Tensor) -> None:
    """Ends what `pin` began."""
    # Unchecked: an error would only repeat that the GPU has failed before, and hide the first message.
    _cudart().cudaHostUnregister(memory.data_ptr())


def iter_tensors(path: str, manifest: dict[str, list]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor): views of the memory of a `WeightBuffer`. Args: path: as in `memory_of`."""
    return iter_views(map_memory(path), manifest)


def manifest_of(rows: Iterable[tuple]) -> dict[str, list]:
    """The manifest of tensors, of each of which a row has what `MANIFEST` names."""
    return dict(zip(MANIFEST, map(list, zip(*rows, strict=True)), strict=True))


def iter_views(memory: torch.Tensor, manifest: Mapping[str, Sequence]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor): views of memory [bytes], uint8, in which tensors lie as a manifest says."""
    for name, dtype_name, shape, offset in zip(*(manifest[key] for key in MANIFEST), strict=True):
        dtype = getattr(torch, dtype_name)
        yield name, memory[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


class WeightBuffers:
    """The buffers of a run, the model's and the adapter's, which one thread writes and all engines read."""

    def __init__(self, deadline_s: float):
        """Args: deadline_s: seconds that one call into the engine may take, and a copy that the engine waits for."""
        self.model, self.adapter = WeightBuffer(), WeightBuffer()
        self.deadline_s = deadline_s
        # No engine may load what is half written. The publisher holds the lock while it copies, and gives it back
        # before it waits for the engines. Their loop holds it while any of them loads. So neither waits for the other
        # for ever.
        self._lock = threading.Lock()
        self._readers = 0  # engines that load now; they share the lock
        self._writer_waits = False
        self._closed = False

    @property
    def published(self) -> list[WeightBuffer]:
        """The buffers with weights in them, the model's before the adapter's. Raises WeightsIncomplete."""
        buffers = [buffer for buffer in (self.model, self.adapter) if buffer.manifest is not None]
        if not all(buffer.complete for buffer in buffers):
            raise WeightsIncomplete(
                "the last publication broke off while copying: there are no complete weights to load; publish again"
            )
        return buffers

    def check_complete(self) -> None:
        """Raises WeightsIncomplete, unless somebody is writing now and may complete them."""
        # The lock is held by readers or by the writer. Without readers it is the writer.
        if self._readers or not self._lock.locked():
            self.published  # noqa: B018  (it raises)

    def write(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        adapter: dict[str, Any] | None,
        current: int,
    ) -> tuple[WeightBuffer, float]:
        """Copies a publication (`Engine.publish`). Returns the buffer that was written, and the seconds that it took.

        Args: current: the version that the engine holds.
        Raises: ValueError; EngineFailed when the engine was closed or does not stop reading.
        """
        buffer, other, kind = (
            (self.model, self.adapter, "adapter") if adapter is None else (self.adapter, self.model, "model")
        )
        self._acquire()
        try:
            if self._closed:
                raise EngineFailed("the engine was closed")
            # A version counts once an engine has loaded it. One that no engine took may be tried again.
            if version < current or version <= buffer.loaded_version:
                raise UsageError(
                    f"publish: version {version} after {max(current, buffer.loaded_version)}; versions grow"
                )
            if other.manifest is not None and not other.complete:
                raise UsageError(f"publish: the last publication of the {kind} broke off; publish the {kind} first")
            copy_s = buffer.write(self._until_closed(named_tensors))
            buffer.adapter, buffer.version = adapter, version
            return buffer, copy_s
        finally:
            self._lock.release()

    def _acquire(self) -> None:
        # More than all calls of one load may take together.
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
                raise EngineFailed("the engine was closed in the midst of publish")
            yield pair

    @asynccontextmanager
    async def read_lock(self) -> AsyncIterator[None]:
        """Keeps writers out while the body runs. One thread only. Raises CoreLost after `deadline_s` seconds."""
        give_up_at = time.monotonic() + self.deadline_s
        # The first reader takes the lock, and others join it unless the writer waits, who would otherwise starve. The
        # wait polls, since a blocked `acquire` would stop the loop of all engines.
        while not ((self._readers and not self._writer_waits) or self._lock.acquire(blocking=False)):
            if self._closed:
                raise BackendCrashed("the engine is closed")
            late = f"a publication did not finish its copy within rpc_deadline_s = {self.deadline_s:g}"
            if time.monotonic() > give_up_at:
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
        """Ends a copy that is under way, and frees the memory. Raises TimeoutError when the copy does not end."""
        self._closed = True
        # A file that is still written has to keep its descriptor: a file opened later could get the same number.
        if not self._lock.acquire(timeout=5.0):
            raise DeadlineExceeded("a publication is still copying; its memory is freed with this process")
        try:
            self.model.close()
            self.adapter.close()
        finally:
            self._lock.release()
