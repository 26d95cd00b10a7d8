"""Checkpoints: a Hugging Face model directory plus what the recipe needs to go on, written so that none is ever half there.

checkpoints/step_000040/
    config.json  model-00001-of-00001.safetensors  tokenizer files    a model directory for any other tool
    (or adapter_config.json  adapter_model.safetensors  [merged/]     an adapter, and if asked for the merged model)
    recipe.json                                                       cursor, step, policy version, throttle, scores
    state/                                                            float32 weights, optimizer, RNG (DCP, resharding)
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from torchtune_ext.policy.lora import AdapterSpec, adapter_hf_tensors, merged_hf_tensors
from torchtune_ext.policy.weights import HFModel

SHARD_BYTES = 4 << 30  # of one safetensors file
TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True, strict=False)  # what is frozen can be had from model_dir
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".index.json")  # weights of the source; its other files are kept


class Checkpoints:
    """The checkpoints of one run. Every method is called by all ranks together."""

    def __init__(self, folder: str | Path, keep_last: int = 2, keep_best: bool = True):
        if keep_last < 1:
            raise ValueError(f"keep_last={keep_last} must be at least 1: a run resumes from its last checkpoint")
        self.folder, self._keep_last, self._keep_best = Path(folder), keep_last, keep_best
        self._main = not dist.is_initialized() or dist.get_rank() == 0

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(p for p in self.folder.glob("step_*") if (p / "recipe.json").is_file())

    def latest(self) -> Path | None:
        return next(reversed(self.all()), None)

    @staticmethod
    def step_of(path: Path) -> int:
        return json.loads((path / "recipe.json").read_text())["step"]

    def advice(self) -> str:
        """What to do after a step that cannot be used."""
        return (
            f"Its samples are in {self.folder.parent / 'rollouts'}, the newest checkpoint is {self.latest()}; lower the "
            "learning rate or the loss coefficients and go on from there with resume_from_checkpoint=True"
        )

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        export: Callable[[Path | None], None],
        recipe: dict[str, Any],
        score: float | None = None,
    ) -> Path:
        """Writes a checkpoint beside its final place and renames it there.

        Args:
            export: writes what other tools read (`export_model`, `export_adapter`) into a folder; on ranks other than 0 it
                gets None and only takes part in gathering the weights.
            recipe: JSON-able state of the recipe.
            score: the higher the better; the best checkpoint is kept.

        Raises:
            OSError: nothing was saved (a full disk, say); earlier checkpoints are untouched.
        """
        final = self.folder / f"step_{step:06d}"
        partial = self.folder / f".partial_{step:06d}"
        try:
            if self._main:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            export(partial if self._main else None)
            _barrier()
            _save_state(partial / "state", model, optimizer)
            if self._main:
                (partial / "recipe.json").write_text(json.dumps({"step": step, "score": score, **recipe}))
                _fsync_tree(partial)
                shutil.rmtree(final, ignore_errors=True)
                os.replace(partial, final)
                self._prune()
        except Exception as cause:  # DCP wraps a rank's error in its own type
            if self._main:
                shutil.rmtree(partial, ignore_errors=True)
            raise OSError(
                f"checkpoint of step {step} was not saved to {self.folder}: {_root(cause)}. Free space or change "
                f"output_dir, then resume with resume_from_checkpoint=True; last complete checkpoint: {self.latest()}"
            ) from cause
        _barrier()
        return final

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Restores weights, optimizer moments and RNG in place and returns what `recipe` held.

        The optimizer keeps the settings (learning rate, betas, ...) that it was built with. On more ranks than saved, or on
        another kind of device, the random states that do not exist are left as they are.
        """
        settings = [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups]
        model_state, optimizer_state = get_state_dict(model, optimizer, options=TRAINED_ONLY)
        saved = dcp.FileSystemReader(path / "state").read_metadata().state_dict_metadata
        mine = f"rng_{_rank()}"
        rng = {name: value for name, value in _rng()[mine].items() if f"{mine}.{name}" in saved}
        state = {"model": model_state, "optimizer": optimizer_state} | ({mine: rng} if rng else {})
        with _one_process_is_fine():
            dcp.load(state, checkpoint_id=path / "state", no_dist=not _distributed())
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=TRAINED_ONLY,
        )
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update(own)
        if "cpu" in rng:
            torch.set_rng_state(rng["cpu"])
        if "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"])
        return json.loads((path / "recipe.json").read_text())

    def _prune(self) -> None:
        found = self.all()
        keep = set(found[-self._keep_last :])
        if self._keep_best:
            scores = {p: json.loads((p / "recipe.json").read_text()).get("score") for p in found}
            scored = [p for p in found if scores[p] is not None]
            keep |= {max(scored, key=lambda p: scores[p])} if scored else set()
        for path in found:
            if path not in keep:
                shutil.rmtree(path)


def save_model(folder: Path, model: nn.Module, source: HFModel, dtype: torch.dtype, is_main: bool) -> Path:
    """Writes a model directory, replacing an earlier one only when it is complete. Called by all ranks together."""
    partial = folder.with_name(f".partial_{folder.name}")
    if is_main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    export_model(partial if is_main else None, model, source, dtype)
    if is_main:
        _fsync_tree(partial)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    _barrier()
    return folder


def export_model(folder: Path | None, model: nn.Module, source: HFModel, dtype: torch.dtype) -> None:
    """A model directory for any other tool, with adapters merged, beside the config and tokenizer files of `source`.

    A collective; folder: None on ranks other than 0.
    """
    if folder is not None:
        _copy_files(source.path, folder)
    _save_hf(merged_hf_tensors(model, source, dtype), folder)


def export_adapter(
    folder: Path | None, model: nn.Module, source: HFModel, adapter: AdapterSpec, merged: torch.dtype | None = None
) -> None:
    """An adapter for PEFT or vLLM, in float32, and, if asked for, the merged model in that dtype in the folder `merged`.

    A collective; folder: None on ranks other than 0.
    """
    tensors = {name: tensor.cpu().contiguous() for name, tensor in adapter_hf_tensors(model, source, torch.float32)}
    inside = folder and folder / "merged"
    if folder is not None:
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(adapter.peft_config(str(source.path)), indent=1))
    if merged is not None:
        if inside is not None:
            inside.mkdir()
        export_model(inside, model, source, merged)


def require_same_adapter(checkpoint: Path, adapter: AdapterSpec) -> None:
    """Raises ValueError when a checkpoint holds another adapter than the one that the config builds."""
    saved = json.loads((checkpoint / "recipe.json").read_text()).get("adapter")
    if saved is None:
        raise ValueError(f"{checkpoint} holds no adapter: it was written by another recipe; choose another output_dir")
    for name, wanted in json.loads(json.dumps(asdict(adapter))).items():
        if saved[name] != wanted:
            raise ValueError(
                f"{checkpoint} holds an adapter with {name}={saved[name]}, `model:` asks for {wanted}; set it back, or "
                "begin a new run in another output_dir"
            )


def _copy_files(source: Path, folder: Path) -> None:
    """Config, tokenizer and template files of a model directory."""
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_NOT_COPIED) and file.name != "recipe.json":
            shutil.copyfile(file, folder / file.name)


def _save_hf(tensors: Iterable[tuple[str, Tensor]], folder: Path | None) -> None:
    """Streams tensors into safetensors files of at most SHARD_BYTES; folder None: only takes part in the gathers."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal size
        if pending and folder is not None:
            save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
            shards.append(list(pending))
        pending.clear()
        size = 0

    for name, tensor in tensors:
        if folder is None:
            continue
        bytes_ = tensor.numel() * tensor.element_size()
        if pending and size + bytes_ > SHARD_BYTES:
            flush()
        pending[name] = tensor.to("cpu", copy=True).contiguous()
        size, total = size + bytes_, total + bytes_
    flush()
    if folder is None:
        return
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for i, name in enumerate(names):
        os.replace(folder / f"shard-{i}", folder / name)
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _save_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer, options=TRAINED_ONLY)
    state = {"model": model_state, "optimizer": optimizer_state, **_rng()}
    with _one_process_is_fine():
        dcp.save(state, checkpoint_id=folder, no_dist=not _distributed())


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    """DCP warns that nobody else takes part; a run of one process means it so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        yield


def _rng() -> dict[str, dict[str, Tensor]]:
    rng = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    return {f"rng_{_rank()}": rng}


def _distributed() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if _distributed():
        dist.barrier()


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _fsync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
