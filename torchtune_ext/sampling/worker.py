"""Code that runs inside vLLM's process: loads weights out of the trainer's shared memory.

Named in the engine's arguments as `worker_extension_cls="torchtune_ext.sampling.worker.WeightLoader"`; importing it
registers the weight-transfer backend "shm". The same two arguments make any vLLM server on this machine able to take
our weights.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

BACKEND = "shm"


@dataclass
class SharedMemory(WeightTransferInitInfo):
    """Where the weights lie."""

    path: str  # of a memory file of the trainer: /proc/<pid>/fd/<number>
    token: str  # hexadecimal; the file begins with these bytes


@dataclass
class Manifest(WeightTransferUpdateInfo):
    """What lies there, tensor by tensor."""

    names: list[str]  # Hugging Face names
    dtypes: list[str]  # "bfloat16", ...
    shapes: list[list[int]]
    offsets: list[int]  # bytes from the start of the file


def tensors(path: str, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor); the tensors are views of the shared memory, good until the generator is dropped."""
    columns = (manifest.names, manifest.dtypes, manifest.shapes, manifest.offsets)
    memory = torch.from_file(path, shared=True, size=os.stat(path).st_size, dtype=torch.uint8)
    for name, dtype, shape, offset in zip(*columns, strict=True):
        kind = getattr(torch, dtype)
        yield name, memory[offset : offset + math.prod(shape) * kind.itemsize].view(kind).view(shape)


def retie_lm_head(model: torch.nn.Module) -> None:
    """Packs a tied output head again. On CPU vLLM 0.32 copies linear weights into oneDNN's own layout, and its
    layer-by- layer reload skips a head that shares its weight with the embedding: the head would go on with the old
    weights."""
    if not current_platform.is_cpu():
        return
    inner, head = getattr(model, "model", None), getattr(model, "lm_head", None)
    embedding = getattr(inner, "embed_tokens", None)
    if head is None or embedding is None or head is embedding:
        return
    if getattr(head, "weight", None) is getattr(embedding, "weight", embedding):
        head.quant_method.process_weights_after_loading(head)


class SharedMemoryTransfer(WeightTransferEngine):
    """vLLM's side of a publication."""

    init_info_cls = SharedMemory
    update_info_cls = Manifest

    def init_transfer_engine(self, init_info: SharedMemory) -> None:
        token = bytes.fromhex(init_info.token)
        try:
            with open(init_info.path, "rb") as file:
                ours = file.read(len(token)) == token
        except OSError:
            ours = False
        if not ours:
            raise ValueError(
                f"cannot read the trainer's weights at {init_info.path}: vLLM has to run on the trainer's machine, "
                f"as the same user and in the same PID namespace"
            )
        self.path = init_info.path

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Manifest) -> None:
        expected = {name for name, _ in self.model.named_parameters()}
        if self.model_config.hf_text_config.tie_word_embeddings:
            expected.discard("lm_head.weight")
        loaded = self.model.load_weights(tensors(self.path, update_info))
        missing = sorted(expected - loaded) if loaded is not None else []
        if missing:
            raise ValueError(f"published weights leave out {len(missing)} parameters, e.g. {missing[:3]}")

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        retie_lm_head(self.model)

    def shutdown(self) -> None:
        pass


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)


class WeightLoader:
    """vLLM mixes this class into its workers; its import has registered the backend, it needs no methods."""
