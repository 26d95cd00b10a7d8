"""Writes what other tools read: Hugging Face model directories and adapters, from a model that may be sharded."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors_torch
from torch import Tensor, nn

from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.policy.lora import AdapterSpec, adapter_hf_tensors, merged_hf_tensors
from torchtune_ext.run.errors import Failure, FileMistake
from torchtune_ext.run.files import make_empty, partial_of, put_in_place
from torchtune_ext.training.collectives import FAILURES, describe, from_main, rank, together, true_cause
from torchtune_ext.training.manifest import NAME as MANIFEST

SHARD_BYTES = 4 << 30  # largest size of one safetensors file
# Files of the source with these endings are its weights, which are not copied.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data")
# If the source is a checkpoint, these files of it belong to another run.
_OF_CHECKPOINTS = ("recipe.json", MANIFEST)


@contextmanager
def written_aside(folder: Path, advice: Callable[[], str]) -> Iterator[None]:
    """Surrounds the code by which all ranks write `partial_of(folder)`. If it fails, the folder is removed.

    Args:
        folder: the final place of the folder.
        advice: returns what the user can do about a disk, the end of the message.

    Raises OSError if the disk failed, and RuntimeError if something else did, such as another rank.
    """
    try:
        yield
    except BaseException as error:
        if rank() == 0:
            shutil.rmtree(partial_of(folder), ignore_errors=True)
        if not isinstance(error, FAILURES):
            raise
        cause = true_cause(error)
        # DCP wraps a Ctrl-C as well, which must stop the run and not become an OSError.
        if not isinstance(cause, Exception):
            raise cause from None
        text = f"{folder} was not saved: {describe(cause)}"
        if isinstance(cause, OSError | SafetensorError):
            raise FileMistake(f"{text}. {advice()}") from error
        raise Failure(text) from error


def save_model(folder: Path, model: nn.Module, source: HFModel, dtype: torch.dtype) -> Path:
    """Writes a model directory and returns its path. A collective. On an OSError an earlier directory is untouched."""
    with written_aside(folder, lambda: "Free space there, or choose another output_dir"):
        partial = partial_of(folder)
        from_main(lambda: make_empty(partial))
        together(lambda: export_model(partial if rank() == 0 else None, model, source, dtype))
        from_main(lambda: put_in_place(folder))
    return folder


def export_model(folder: Path | None, model: nn.Module, source: HFModel, dtype: torch.dtype) -> None:
    """Writes a model directory that any tool can read, with adapters merged into the weights. A collective.

    Args:
        folder: an existing folder on rank 0, None on the other ranks.
        source: the model directory whose config and tokenizer files are copied.
        dtype: of the written weights.
    """
    tensors = merged_hf_tensors(model, source, dtype)
    with _drained(tensors):
        _write_model(folder, tensors, source)


def export_adapter(
    folder: Path | None,
    model: nn.Module,
    source: HFModel,
    adapter: AdapterSpec,
    merged: torch.dtype | None = None,
) -> None:
    """Writes an adapter in float32 that PEFT and vLLM can read. A collective.

    Args:
        folder: an existing folder on rank 0, None on the other ranks.
        source: the model directory that the adapter belongs to.
        merged: dtype of the merged model, which is then written into the subfolder `merged`; None: it is not.
    """
    small = {name: tensor.cpu().contiguous() for name, tensor in adapter_hf_tensors(model, source, torch.float32)}
    large = merged_hf_tensors(model, source, merged) if merged is not None else iter(())
    inside = folder / "merged" if folder is not None else None
    with _drained(large):
        if folder is not None:
            save_file(small, folder / "adapter_model.safetensors")
            (folder / "adapter_config.json").write_text(json.dumps(adapter.peft_config(str(source.path)), indent=1))
        if merged is not None:
            if inside is not None:
                inside.mkdir()
            _write_model(inside, large, source)


@contextmanager
def _drained(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[None]:
    """Takes part in the remaining gathers if the block raises."""
    try:
        yield
    except Exception:
        # If this rank stopped gathering, because its disk is full for example, the others would wait for it.
        for _ in tensors:
            pass
        raise


def _write_model(folder: Path | None, tensors: Iterator[tuple[str, Tensor]], source: HFModel) -> None:
    """Writes tensors one by one into safetensors files of at most SHARD_BYTES. Without a folder, only gathers them."""
    if folder is None:
        for _ in tensors:
            pass
        return
    _copy_files(source.path, folder)
    shards: list[tuple[Path, list[str]]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal size
        if pending:
            # The final name contains the number of files, which is known only after the last one.
            path = folder / f"shard-{len(shards)}"
            save_file(pending, path)
            shards.append((path, list(pending)))
        pending.clear()
        size = 0

    for name, tensor in tensors:
        bytes_ = tensor.numel() * tensor.element_size()
        if pending and size + bytes_ > SHARD_BYTES:
            flush()
        pending[name] = tensor.to("cpu", copy=True).contiguous()
        size, total = size + bytes_, total + bytes_
    flush()
    weight_map = {}
    for i, (path, names) in enumerate(shards):
        final = folder / f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(path, final)
        weight_map |= dict.fromkeys(names, final.name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _copy_files(source: Path, folder: Path) -> None:
    # What is copied are the config, the tokenizer and the chat template, whatever their names are.
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHTS) and file.name not in _OF_CHECKPOINTS:
            shutil.copyfile(file, folder / file.name)


def save_file(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes a safetensors file with the mode that the umask gives."""
    # safetensors writes files that only the user can read. An empty file shows the mode of the umask.
    path.touch()
    mode = path.stat().st_mode & 0o7777
    safetensors_torch.save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)
