"""Writes and reads checkpoints: a model directory of Hugging Face's format, and what the recipe needs to go on.

checkpoints/step_000040/
    config.json  model-00001-of-00001.safetensors  tokenizer files    a model directory that any tool can read
    (or adapter_config.json  adapter_model.safetensors  [merged/]     an adapter, and if wanted the merged model)
    recipe.json                                                       step, version, cursor, task, throttle, accuracy
    state/                                                            float32 weights, optimizer (if saved), RNG: by DCP
    manifest.json                                                     what it belongs to; size and SHA-256 of every file

A checkpoint is whole or absent. DCP (torch.distributed.checkpoint) can load `state/` on another number of ranks. Other
folders beside the checkpoints: `.partial_*` is being written, `.pruned_*` is being deleted, `damaged_*` was damaged, so
the run went on from an older one, `old_*` was in the place where this run had to write, and `.replaced_*` is what a
new folder has taken the place of.
"""

import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from torchtune_ext.run.errors import Failure, FileMistake, Mistake
from torchtune_ext.run.files import PARTIAL, PRUNED, REPLACED, remove
from torchtune_ext.run.folder import checkpoint_folders, step_of
from torchtune_ext.run.output import say
from torchtune_ext.training.manifest import Checksums, DamagedCheckpoint, Identity, Manifest, all_files, state_writer
from torchtune_ext.training.outcome import (
    FAILURES,
    describe,
    distributed,
    from_main,
    gathered,
    rank,
    together,
    true_cause,
)

log = logging.getLogger(__name__)
# Frozen weights are not saved, because they can be read from model_dir.
TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True, strict=False)


@dataclass(frozen=True)
class CheckpointConfig:
    """The node `checkpoints:` of a recipe."""

    every: int = 50  # steps between checkpoints; there is also one after the last step
    keep_last: int = 2  # newest checkpoints that are kept, besides the one with the highest accuracy
    save_optimizer: bool = True  # False: less than half the disk; a resumed optimizer begins anew
    fall_back: bool = False  # True: if the newest checkpoint is damaged, the run goes on from the newest whole one
    stop_grace_s: float = 25.0  # seconds after SIGTERM within which a step must end for a checkpoint to be written

    def __post_init__(self) -> None:
        if self.every < 1:
            raise Mistake(f"checkpoints.every={self.every} must be at least 1 step")
        if self.keep_last < 1:
            raise Mistake(
                f"checkpoints.keep_last={self.keep_last} must be at least 1: a run resumes from its last checkpoint"
            )
        if not 0 <= self.stop_grace_s < float("inf"):
            raise Mistake(
                f"checkpoints.stop_grace_s={self.stop_grace_s} must be a number of seconds, 0 or more; 0 writes none"
            )


class Checkpoints:
    """The checkpoints of one run.

    `choose`, `save` and `load` are collectives: all ranks call them together, and a failure on one rank raises on all
    ranks. The other methods only read names and manifests, and any rank may call them by itself.
    """

    def __init__(self, folder: str | Path, identity: Identity | None, config: CheckpointConfig | None = None):
        """Looks after the checkpoints in a folder, which need not exist yet.

        Args:
            folder: the folder of all checkpoints of the run.
            identity: what the checkpoints belong to. Only rank 0 writes and checks it; it may be None on the others.
            config: the settings; None for the defaults.
        """
        self.folder, self._identity, self._config = Path(folder), identity, config or CheckpointConfig()
        self._main = rank() == 0
        self._verified: Path | None = None
        assert identity is not None or not self._main, "rank 0 has to know what the checkpoints belong to"

    def all(self) -> list[Path]:
        """Returns every checkpoint, whole or damaged, the oldest first."""
        return checkpoint_folders(self.folder)

    def latest(self) -> Path | None:
        """Returns the newest checkpoint that looks whole by the names and sizes of its files, or None."""
        return next((path for path in reversed(self.all()) if _glance(path) is not None), None)

    def best(self) -> tuple[Path, float] | None:
        """Returns the checkpoint with the highest accuracy on held-out problems, and that accuracy, or None."""
        pairs = ((path, manifest) for path in self.all() if (manifest := _glance(path)) is not None)
        evaluated = [(path, manifest.accuracy) for path, manifest in pairs if manifest.accuracy is not None]
        return max(evaluated, key=lambda pair: pair[1], default=None)

    def choose(self) -> Path | None:
        """Returns the checkpoint to go on from, or None where there is no checkpoint at all. A collective.

        Every file of the returned checkpoint has been verified. With `checkpoints.fall_back`, checkpoints that are
        newer and damaged are renamed to `damaged_step_*`.

        Raises:
            DamagedCheckpoint: the newest checkpoint is damaged, and `checkpoints.fall_back` is not set or no other is
                whole.
            ValueError: the newest checkpoint belongs to another run, model or base.
        """
        newest, *older = from_main(self.all)[::-1] or [None]
        if newest is None:
            return None
        try:
            self._verify(newest)
            return newest
        except DamagedCheckpoint as error:
            damage = str(error)
        tried = [newest]
        for path in older:
            try:
                self._verify(path)
                break
            except ValueError:
                # This one is damaged as well, or it belongs to another run.
                tried.append(path)
        else:
            raise DamagedCheckpoint(
                f"{damage}. No other checkpoint in {self.folder} can be used: put the files back from a copy, or begin a new "
                "run in another output_dir"
            )
        if not self._config.fall_back:
            raise DamagedCheckpoint(
                f"{damage}. The newest whole checkpoint is {path}; set checkpoints.fall_back=True to go on from it (what is "
                "newer is renamed to damaged_*, nothing is deleted), or put the files back from a copy"
            )
        aside = from_main(lambda: [rename_to_free(p, f"damaged_{p.name}").name for p in tried])
        if self._main:
            log.warning("%s. Going on from %s; set aside: %s", damage, path, ", ".join(aside))
        return path

    def advice(self, step: int) -> str:
        """Returns a text that says what to do after a step whose update cannot be made."""
        newest = self.latest()
        how = (
            f"go on from {newest} with resume_from_checkpoint=True"
            if newest
            else "start again: there is no checkpoint yet"
        )
        return (
            f"step {step} stopped before this update. Look at its samples and rewards in {self.folder.parent / 'rollouts'}; "
            f"lower the learning rate or the loss coefficients, and {how}"
        )

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        export: Callable[..., None],
        recipe: dict[str, Any],
        accuracy: float | None = None,
    ) -> float:
        """Writes a checkpoint beside its final place and renames it there. A collective.

        Args:
            step: the step that has ended.
            model: the model, which may be sharded.
            optimizer: its optimizer.
            export: writes what other tools read (`export_model`, `export_adapter`). It is called with a folder on rank
                0, and with None on the other ranks, where it only takes part in gathering the weights. It must finish
                gathering on every rank also when it fails. The argument `checksums=` may take the checksums of finished
                files.
            recipe: JSON-able state of the recipe.
            accuracy: accuracy of these weights on held-out problems. The checkpoint with the highest accuracy is kept.

        Returns:
            Seconds in which some rank waited for checksums. What the hashing threads take from the processor meanwhile is not
            in them.

        Raises:
            OSError: nothing was saved, because of a full disk for example. This is raised on all ranks, and earlier
                checkpoints are untouched.
        """
        final = self.folder / f"step_{step:06d}"
        partial = partial_of(final)
        if self._main:
            self._prune()  # a lower `keep_last` makes room on a disk that was full
        with written_aside(final, self._advice_on_saving), Checksums(partial) as checksums:
            together(lambda: make_empty(partial) if self._main else None)
            together(lambda: export(partial if self._main else None, checksums=checksums))
            state = together(lambda: _state(model, optimizer, self._config.save_optimizer))
            together(lambda: _save_state(partial / "state", state, checksums))
            mine = together(checksums.finish)
            known = {name: entry for entries in gathered(mine) for name, entry in entries.items()}
            content = {"step": step, "accuracy": accuracy, **recipe}
            together(lambda: self._complete(final, content, known, checksums) if self._main else None)
            waited = max(gathered(checksums.seconds))
        if self._main:
            self._prune()
        return waited

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Restores weights, optimizer and random states in place, and returns the state of the recipe. A collective.

        The optimizer keeps the settings (learning rate, betas, ...) that it was built with. If the checkpoint has no state of
        it (`checkpoints.save_optimizer=false`), it begins anew, and a line says so. If there are more ranks than before, or
        another kind of device, random states that were not saved stay as they are.

        Raises:
            DamagedCheckpoint: `path` does not come from `choose`, and is damaged.
            ValueError: `path` does not come from `choose`, and belongs to another run, model or base.
            OSError: it cannot be loaded, for example because it was saved with another kind of optimizer.
        """
        if path != self._verified:
            self._verify(path)
        try:
            recipe, has_optimizer = together(lambda: _load(path, model, optimizer))
        except FAILURES as error:
            cause = true_cause(error)
            if not isinstance(cause, Exception):
                raise cause from None
            raise FileMistake(
                f"{path} could not be loaded: {describe(cause).rstrip('.')}. Its files are whole: set `model:` and "
                "`optimizer:` back to what it was saved with, or begin a new run in another output_dir"
            ) from error
        if self._main and not has_optimizer:
            say(
                f"{path} was saved without the state of the optimizer (checkpoints.save_optimizer=false): its moments begin at "
                "zero, so the first updates are larger than they would have been"
            )
        return recipe

    def _verify(self, path: Path) -> None:
        """Verifies every file of a checkpoint. Each rank reads a share of the files. A collective.

        Raises:
            DamagedCheckpoint: the checkpoint is damaged.
            ValueError: the checkpoint belongs to another run, model or base.
        """
        manifest = from_main(lambda: self._inspect(path))
        shares = len(gathered(None))
        wrong = [text for text in gathered(manifest.wrong_with_bytes(path, rank(), shares)) if text is not None]
        if wrong:
            raise DamagedCheckpoint(f"{path} is damaged: {min(wrong)}")
        self._verified = path

    def _inspect(self, path: Path) -> Manifest:
        """Checks everything that can be checked without reading tensors, and returns the manifest."""
        manifest = Manifest.read(path)
        if (refusal := self._identity.refusal(manifest.identity)) is not None:
            raise Mistake(f"{path} cannot be resumed: {refusal}")
        if manifest.step != step_of(path):
            raise DamagedCheckpoint(f"{path} is damaged: it holds step {manifest.step} and was renamed")
        if (wrong := manifest.wrong_with_files(path)) is not None:
            raise DamagedCheckpoint(f"{path} is damaged: {wrong}")
        return manifest

    def _complete(self, final: Path, recipe: dict[str, Any], known: dict, checksums: Checksums) -> None:
        """Writes the other files on rank 0, when all tensors are written, and renames the checkpoint to its place."""
        partial = partial_of(final)
        (partial / "recipe.json").write_text(json.dumps(recipe))
        with checksums.waiting():
            files = all_files(partial, known)
        Manifest(recipe["step"], recipe["accuracy"], self._identity, files).write(partial)
        if final.exists() and not self._is_mine(_glance(final)):
            log.warning(
                "%s is damaged or of another run: it is now %s",
                final,
                rename_to_free(final, f"old_{final.name}"),
            )
        put_in_place(final)

    def _prune(self) -> None:
        """Deletes old checkpoints of this run. Damaged ones and those of other runs are neither counted nor touched."""
        mine = [(path, manifest) for path in self.all() if self._is_mine(manifest := _glance(path))]
        keep = {path for path, _ in mine[-self._config.keep_last :]}
        evaluated = [(path, manifest.accuracy) for path, manifest in mine if manifest.accuracy is not None]
        if evaluated:
            keep.add(max(evaluated, key=lambda pair: pair[1])[0])
        for path, _ in mine:
            if path not in keep:
                discard(path)

    def _is_mine(self, manifest: Manifest | None) -> bool:
        return manifest is not None and manifest.identity.run == self._identity.run

    def _advice_on_saving(self) -> str:
        return f"Free space there, then resume with resume_from_checkpoint=True; the last whole checkpoint: {self.latest()}"


def _glance(path: Path) -> Manifest | None:
    """Returns the manifest of a checkpoint that looks whole, or None."""
    try:
        manifest = Manifest.read(path)
        return manifest if manifest.wrong_with_files(path) is None else None
    except (ValueError, OSError):
        # It is damaged or of another format, or it is just being deleted.
        return None


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, with_optimizer: bool) -> dict[str, Any]:
    if not with_optimizer:
        return {"model": get_model_state_dict(model, options=TRAINED_ONLY)}
    model_state, optimizer_state = get_state_dict(model, optimizer, options=TRAINED_ONLY)
    return {"model": model_state, "optimizer": optimizer_state}


def _save_state(folder: Path, state: dict[str, Any], checksums: Checksums) -> None:
    with _one_process_is_fine():
        dcp.save(state | _rng(), storage_writer=state_writer(folder, checksums), no_dist=not distributed())


def _load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], bool]:
    """Returns the state of the recipe, and whether there was one of the optimizer."""
    settings = [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups]
    saved = dcp.FileSystemReader(path / "state").read_metadata().state_dict_metadata
    mine = f"rng_{rank()}"
    rng = {name: value for name, value in _rng()[mine].items() if f"{mine}.{name}" in saved}
    has_optimizer = any(name.startswith("optimizer.") for name in saved)
    state = _state(model, optimizer, has_optimizer) | ({mine: rng} if rng else {})
    with _one_process_is_fine():
        dcp.load(state, checkpoint_id=path / "state", no_dist=not distributed())
    if has_optimizer:
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=TRAINED_ONLY,
        )
    else:
        set_model_state_dict(model, state["model"], options=TRAINED_ONLY)
        # Moments of another run, which this optimizer may have by now, do not belong to these weights.
        optimizer.state.clear()
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    if "cpu" in rng:
        torch.set_rng_state(rng["cpu"])
    if "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"])
    return json.loads((path / "recipe.json").read_text()), has_optimizer


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    """Hides the warning of DCP that no other process takes part, because a run of one process intends that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        yield


def _rng() -> dict[str, dict[str, Tensor]]:
    rng = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    return {f"rng_{rank()}": rng}


# -- folders that are whole or absent, however the process ends ------------------------------------------------------------
def partial_of(folder: Path) -> Path:
    """Returns the path where a folder is written before it is renamed to its place."""
    return folder.with_name(PARTIAL + folder.name)


@contextmanager
def written_aside(folder: Path, advice: Callable[[], str]) -> Iterator[None]:
    """Surrounds the code by which all ranks write `partial_of(folder)`. If it fails, the folder is removed.

    Args:
        folder: the final place of the folder.
        advice: returns the end of the message about a disk, which says what the user can do.

    Raises:
        OSError: the disk failed, RuntimeError: something else did, a rank that is lost for instance. The message has the true
            cause. KeyboardInterrupt and SystemExit are raised unchanged.
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


def make_empty(folder: Path) -> None:
    """Makes an empty folder, in place of an earlier one if there is one."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def put_in_place(folder: Path) -> None:
    """Renames the finished `partial_of(folder)` to `folder`. An earlier folder is removed after that."""
    partial, old = partial_of(folder), None
    sync_tree(partial)
    if folder.exists():
        old = folder.with_name(REPLACED + folder.name)
        if old.exists():
            remove(old)
        folder.rename(old)
    try:
        partial.rename(folder)
    except BaseException:
        if old is not None:
            old.rename(folder)
        raise
    sync(folder.parent)
    if old is not None:
        remove(old)


def discard(folder: Path) -> None:
    """Renames a folder and then deletes it, so that its name never shows half of it. A failure is only a warning."""
    aside = _free(folder.with_name(PRUNED + folder.name))
    try:
        folder.rename(aside)
        # Without this, a power cut could undo the renaming but keep the deletions.
        sync(folder.parent)
    except OSError as error:
        log.warning("%s is not needed any more but cannot be removed: %s", folder, error)
    else:
        remove(aside)


def rename_to_free(folder: Path, name: str) -> Path:
    """Renames a folder to `name`, or to `name-2`, `name-3`, ... if that exists already. Returns the new path."""
    return folder.rename(_free(folder.with_name(name)))


def sync_tree(folder: Path) -> None:
    """Returns when the folder and everything below it are on the disk."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Returns when the file or the entries of the folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free(path: Path) -> Path:
    name, number = path.name, 1
    while path.exists() or path.is_symlink():
        number += 1
        path = path.with_name(f"{name}-{number}")
    return path
