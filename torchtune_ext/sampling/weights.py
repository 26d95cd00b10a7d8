"""The last published weights, in an anonymous file in memory that vLLM's process opens through /proc.

Nothing has a name in a file system, so nothing is left when the trainer dies; and an engine that had to be started
again finds the current weights there, not those of the disk.
"""

import os
import time
from collections.abc import Iterable
from typing import Any

import torch

ADAPTER_ID = 1  # by which vLLM knows the one adapter of a run
ALIGNMENT = 64  # bytes; every tensor starts at a multiple
TOKEN = 64  # bytes at the start, by which the reader knows that the file is ours
CHUNK = 1 << 30  # bytes of one write: the kernel takes at most 2 GiB at a time


class WeightBuffer:
    """Holds one set of weights, of a model or of an adapter, and the list of what lies where."""

    def __init__(self):
        self.adapter: dict[str, Any] | None = None  # PEFT's config, when the tensors are those of an adapter
        self.version = -1  # of the policy whose weights these are; -1: never published
        self._fd = os.memfd_create("torchtune-ext-weights", os.MFD_CLOEXEC)
        self._token = os.urandom(TOKEN)
        self.manifest: dict[str, list] | None = None  # None before the first publication
        self.bytes = 0  # of the tensors in it
        self.complete = True  # False while a copy is under way or was cut short

    def address(self) -> dict[str, str]:
        """Where another process of this user, on this machine, opens the memory, and how it knows that it is the right
        one."""
        return {"path": f"/proc/{os.getpid()}/fd/{self._fd}", "token": self._token.hex()}

    def write(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> float:
        """Copies the tensors, one after the other, so that they may come out of a generator that gathers each of them.

        Args: named_tensors: (Hugging Face name, tensor of any dtype on any device).
        Returns: seconds it took. Raises ValueError on an empty or doubled set of names.
        """
        started = time.monotonic()
        names, dtypes, shapes, offsets, end, size = [], [], [], [], TOKEN, 0
        self.complete = False
        self._write(memoryview(self._token), 0)
        for name, tensor in named_tensors:
            flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
            names.append(name)
            dtypes.append(str(tensor.dtype).removeprefix("torch."))
            shapes.append(list(tensor.shape))
            offsets.append(end)
            self._write(memoryview(flat.numpy()), end)
            size += flat.numel()
            end += -(-flat.numel() // ALIGNMENT) * ALIGNMENT
        if not names:
            raise ValueError("publish: named_tensors is empty; pass the whole model, with Hugging Face names")
        if len(set(names)) != len(names):
            double = next(name for name in names if names.count(name) > 1)
            raise ValueError(
                f"publish: named_tensors holds {double!r} twice; leave out tied copies such as lm_head.weight"
            )
        os.ftruncate(self._fd, end)
        self.manifest = {"names": names, "dtypes": dtypes, "shapes": shapes, "offsets": offsets}
        self.bytes, self.complete = size, True
        return time.monotonic() - started

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            done = os.pwrite(self._fd, data[:CHUNK], offset)
            data, offset = data[done:], offset + done

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
