"""Keeps the frozen weights of adapters in main memory while an engine on the same GPU is awake."""

import weakref
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchao.dtypes.nf4tensor import NF4Tensor

from torchtune_ext.run.errors import UsageError
from torchtune_ext.sampling.weight_buffer import ALIGNMENT, pin, unpin


class FrozenOffload:
    """Moves the frozen weights of a model from their device to main memory and back.

    Frozen weights never change, so they are copied to main memory only once. Meanwhile the
    parameters hold the tensors in main memory: they can be read and saved, but a forward raises
    RuntimeError.

    Args:
        model: a model with frozen weights, not sharded.

    Raises:
        UsageError: the weights are sharded.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        frozen = [param for param in model.parameters() if not param.requires_grad]
        if any(isinstance(param, DTensor) for param in frozen):
            raise UsageError("offload: the frozen weights are sharded. Fix: offload on one rank only")
        # (parameter, attribute that holds its tensor). An NF4 weight consists of several tensors.
        self._slots: list[tuple[Any, str]] = [
            (param, name)
            for param in frozen
            for name in (param.__tensor_flatten__()[0] if isinstance(param, NF4Tensor) else ["data"])
        ]
        self._devices = [getattr(*slot).device for slot in self._slots]
        self._host_tensors: list[Tensor] = []
        self._hook: Any = None

    @property
    def is_on_host(self) -> bool:
        """Whether the frozen weights are in main memory only."""
        return self._hook is not None

    def to_host(self) -> None:
        """Frees the frozen weights on the device; the allocator still caches their memory."""
        if self.is_on_host:
            return
        self._host_tensors = self._host_tensors or self._copy_to_host()
        for (param, name), tensor in zip(self._slots, self._host_tensors, strict=True):
            setattr(param, name, tensor)
        self._hook = self._model.register_forward_pre_hook(_refuse_forward)

    def to_device(self) -> None:
        """Copies the frozen weights back to their device."""
        if not self.is_on_host:
            return
        for (param, name), tensor, device in zip(self._slots, self._host_tensors, self._devices, strict=True):
            setattr(param, name, tensor.to(device, copy=True))
        self._hook.remove()
        self._hook = None

    def _copy_to_host(self) -> list[Tensor]:
        tensors = [getattr(*slot) for slot in self._slots]
        # One block, because PyTorch rounds each pinned tensor up to a power of two.
        *offsets, size = accumulate((-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in tensors), initial=0)
        memory = torch.empty(size, dtype=torch.uint8)
        if any(device.type == "cuda" for device in self._devices):
            pin(memory)
            weakref.finalize(self, unpin, memory).atexit = False
        views = [
            memory[offset : offset + t.nbytes].view(t.dtype).view(t.shape)
            for t, offset in zip(tensors, offsets, strict=True)
        ]
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor)
        return views


def _refuse_forward(module: nn.Module, inputs: Any) -> None:
    raise RuntimeError(
        "the frozen weights are in main memory while the engine is awake (engine.sleep with adapters). Fix: call "
        "publisher.onload() before the update, as recipes/grpo.py does"
    )
