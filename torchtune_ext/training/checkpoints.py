"""Writes and reads checkpoints: a model directory in Hugging Face's format, and what the recipe needs to go on.

checkpoints/step_000040/
    config.json  model-00001-of-00001.safetensors  tokenizer files    a model directory that any tool can read
    (or adapter_config.json  adapter_model.safetensors  [merged/]     an adapter, and if wanted the merged model; tokenizer)
    recipe.json                                                       step, version, cursor, task, throttle, accuracy
    state/                                                            float32 weights, optimizer (if saved), RNG: by DCP
    manifest.json                                                     what it belongs to; size and SHA-256 of every file

A checkpoint is whole or absent. DCP (torch.distributed.checkpoint) can load `state/` on another number of ranks. Beside
the checkpoints, `.partial_*` is being written, `.pruned_*` is being deleted, and `.replaced_*` was replaced.
"""

import json
import os
import shlex
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed.checkpoint as dcp
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from torchtune_ext.run.errors import MAX_DURATION_S, RunFailure, UsageError, UsageFileError
from torchtune_ext.run.files import finalize_folder, make_empty_folder, partial_path, rename_and_remove
from torchtune_ext.run.folder import Run, RunFolder, checkpoint_folders, checkpoint_step, diff_settings
from torchtune_ext.run.output import format_labels, print_text
from torchtune_ext.settings.records import config_record
from torchtune_ext.training.collectives import (
    EXCEPTION_TYPES,
    all_gather,
    call_on_main,
    describe,
    is_distributed,
    rank,
    root_cause,
    run_on_all_ranks,
)
from torchtune_ext.training.export import discard_on_failure
from torchtune_ext.training.manifest import DamagedCheckpoint, Identity, Manifest, flush_and_hash

# Frozen weights are not saved, because they can be read from model_dir.
TRAINABLE_ONLY = StateDictOptions(ignore_frozen_params=True, strict=False)
# In torch's errors for a saved state with names or shapes that this run does not have.
STATE_MISMATCH_ERRORS = (
    "Missing key",
    "Size mismatch",
    "unexpected key",
    "doesn't match",
    "different number of parameter groups",
)
# A resumed run always has other values of these settings, so they are not listed as changes.
ALWAYS_DIFFERENT_KEYS = ("output_dir", "resume_from_checkpoint", "dry_run")


@config_record("checkpoints")
class CheckpointConfig:
    """The keys of `checkpoints:`."""

    every: int = Field(default=50, ge=1, description="steps between checkpoints; there is also one after the last step")
    keep_last: int = Field(default=2, ge=1, description="newest checkpoints kept, in addition to the best one")
    save_optimizer: bool = Field(
        default=True, description="false: less than half the disk; a resumed optimizer starts anew"
    )
    stop_grace_s: float = Field(
        default=25.0,
        ge=0,
        le=MAX_DURATION_S,
        description="seconds after SIGTERM for the current step to end and its checkpoint to be written",
    )


class Checkpoints:
    """The checkpoints of one run.

    `choose`, `save` and `load` are collectives: a failure on one rank raises on all. Other methods are not.
    """

    def __init__(
        self,
        folder: str | Path,
        identity: Identity | None,
        config: CheckpointConfig | None = None,
        prompt_source: str = "",
    ):
        """Prepares the checkpoints of a run.

        Args:
            folder: need not exist yet.
            identity: may be None on other ranks than 0, which writes and checks it.
            prompts: what `export.own_prompts` says of the saved models.
        """
        self.prompt_source = prompt_source
        self.folder, self._identity, self._config = Path(folder), identity, config or CheckpointConfig()
        self._main = rank() == 0
        self._verified: Path | None = None
        assert identity is not None or not self._main, "rank 0 has to know what the checkpoints belong to"

    def all(self) -> list[Path]:
        """Every checkpoint, whole or damaged, the oldest first."""
        return checkpoint_folders(self.folder)

    def latest(self) -> Path | None:
        """The newest checkpoint that looks whole by the names and sizes of its files, or None."""
        return next((path for path in reversed(self.all()) if _read_if_complete(path) is not None), None)

    def best(self) -> tuple[Path, float] | None:
        """The checkpoint with the highest accuracy on held-out problems, and that accuracy, or None."""
        return _best((path, manifest) for path in self.all() if (manifest := _read_if_complete(path)) is not None)

    def verify_latest(self) -> Path | None:
        """The newest checkpoint, verified, or None where there is none. A collective.

        Raises:
            DamagedCheckpoint: it is damaged.
            ValueError: it belongs to another run, model or base.
        """
        # An older checkpoint never silently takes the place of a damaged one: the user may have a copy of the bad file.
        newest = call_on_main(lambda: next(reversed(self.all()), None))
        if newest is not None:
            try:
                self._verify(newest)
            except DamagedCheckpoint as error:
                raise DamagedCheckpoint(
                    f"{error}. Put the file back from a copy, or move the whole folder away: the run then goes on from the "
                    "checkpoint before it, or begins anew where there is none"
                ) from None
        return newest

    def failed_update_advice(self, step: int) -> str:
        """What the user can do after a step whose update cannot be made."""
        return (
            f"step {step} stopped before this update. Look at its samples and rewards in {self.folder.parent / 'rollouts'}; "
            "lower the learning rate or the loss coefficients, and start again with resume_from_checkpoint=True"
        )

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        export: Callable[..., None],
        recipe_state: dict[str, Any],
        accuracy: float | None = None,
    ) -> float:
        """Writes a checkpoint, and returns the seconds of checksums and flush on the slowest rank. A collective.

        Args:
            step: the step that has ended.
            model: may be sharded.
            export: writes what other tools read (`export_model`, `export_adapter`) into a folder on rank 0. Other ranks
                pass None and only take part in gathering. Even when it fails it must finish gathering on every rank.
            recipe: JSON-able state of the recipe.
            accuracy: of these weights on held-out problems. The checkpoint with the highest one is kept.

        Raises:
            OSError: nothing was saved, for example because the disk is full. Earlier checkpoints are untouched.
        """
        final = self.folder / f"step_{step:06d}"
        partial = partial_path(final)
        content = json.dumps({"step": step, "accuracy": accuracy, **recipe_state})

        def begin() -> None:
            make_empty_folder(partial)
            (partial / "recipe.json").write_text(content)

        if self._main:
            # If the disk was full and the user lowered `keep_last`, this makes the room.
            self._prune()
        disk_advice = "Free space there, then resume with resume_from_checkpoint=True; the last whole checkpoint: {}"
        with discard_on_failure(final, lambda: disk_advice.format(self.latest())):
            # Each part ends on all ranks before the next begins, so that no rank waits in a collective for one that
            # has failed.
            call_on_main(begin)
            run_on_all_ranks(lambda: export(partial if self._main else None))
            had_state = bool(optimizer.state)
            state = run_on_all_ranks(lambda: _build_state_dict(model, optimizer, self._config.save_optimizer))
            if optimizer.state and not had_state:
                # To have something to save, torch has made an update without gradient, which must not count as the first.
                optimizer.state.clear()
                del state["optimizer"]
            run_on_all_ranks(lambda: _save_state(partial / "state", state))
            began = time.perf_counter()
            # Each rank reads only the files that it wrote: a network file system may show those of others late.
            mine = run_on_all_ranks(lambda: flush_and_hash(partial, rank()))
            seconds = max(all_gather(time.perf_counter() - began))
            files = {name: entry for entries in all_gather(mine) for name, entry in entries.items()}
            call_on_main(lambda: self._complete(final, Manifest(step, accuracy, self._own, files)))
        if self._main:
            self._prune()
        return seconds

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Restores weights, optimizer and random states in place, and returns the state of the recipe. A collective.

        The optimizer keeps its settings (learning rate, betas, ...). Without a saved state it begins anew.

        Raises:
            DamagedCheckpoint: `path` is damaged.
            ValueError: `path` belongs to another run, model or base.
            FileMistake: it was saved with another kind of optimizer, or the disk failed.
            Failure: it cannot be loaded, for example because memory does not suffice or a rank has exited.
        """
        # `choose` has already read every byte of what it returned, which takes long.
        if path != self._verified:
            self._verify(path)
        try:
            recipe_state, has_optimizer = run_on_all_ranks(lambda: _load(path, model, optimizer))
        except EXCEPTION_TYPES as error:
            cause = root_cause(error)
            # KeyboardInterrupt and the like are no fault of the files.
            if not isinstance(cause, Exception):
                raise cause from None
            text = f"{path} could not be loaded: {describe(cause).rstrip('.')}"
            if any(words in str(cause) for words in STATE_MISMATCH_ERRORS):
                raise UsageFileError(
                    f"{text}. Its files are whole: set `model:` and `optimizer:` back to what it was saved with, or begin a "
                    "new run in another output_dir"
                ) from error
            if isinstance(cause, OSError):
                raise UsageFileError(f"{text}. Its checksums were right: look at the disk, then resume") from error
            # Memory that does not suffice and ranks that exited raise these. Any other error is a bug.
            if isinstance(cause, RuntimeError | MemoryError):
                raise RunFailure(text) from error
            raise cause from None
        if self._main and not has_optimizer:
            print_text(
                f"{path} was saved without the state of the optimizer (checkpoints.save_optimizer=false, or no update was "
                "made): its moments begin at zero, and the first updates may be larger than they would have been"
            )
        return recipe_state

    def _verify(self, path: Path) -> None:
        """Reads every file of a checkpoint, each rank a share of them. A collective; raises as `choose`."""
        manifest = call_on_main(lambda: self._read_matching_manifest(path))
        shares = len(all_gather(None))
        wrong = [text for text in all_gather(manifest.find_checksum_error(path, rank(), shares)) if text is not None]
        if wrong:
            raise DamagedCheckpoint(f"{path} is damaged: {min(wrong, default='')}")
        self._verified = path

    def _read_matching_manifest(self, path: Path) -> Manifest:
        """Checks on rank 0 what can be checked without reading tensors, and returns the manifest."""
        manifest = Manifest.read(path)
        refusal = self._own.explain_difference(manifest.identity)
        if refusal is not None:
            raise UsageError(f"{path} cannot be resumed: {refusal}")
        if manifest.step != checkpoint_step(path):
            raise DamagedCheckpoint(f"{path} is damaged: it holds step {manifest.step} and was renamed")
        wrong = manifest.find_file_error(path)
        if wrong is not None:
            raise DamagedCheckpoint(f"{path} is damaged: {wrong}")
        return manifest

    def _complete(self, final: Path, manifest: Manifest) -> None:
        wrong = manifest.find_file_error(partial_path(final))
        if wrong is not None:
            raise UsageFileError(
                f"{wrong}, as rank 0 sees what another rank has written: all ranks need one shared output_dir"
            )
        # The manifest comes last: it vouches for every other file.
        manifest.write(partial_path(final))
        finalize_folder(final)

    def _prune(self) -> None:
        # Damaged ones do not count: if they did, one of them could be kept in the place of a whole one.
        looks = [(path, manifest) for path in self.all() if (manifest := _read_if_complete(path)) is not None]
        mine = [(path, manifest) for path, manifest in looks if manifest.identity.run == self._own.run]
        keep = {path for path, _ in mine[-self._config.keep_last :]}
        if (best := _best(mine)) is not None:
            keep.add(best[0])
        for path, _ in mine:
            if path not in keep:
                rename_and_remove(path)

    @property
    def _own(self) -> Identity:
        assert self._identity is not None  # of a run that saves or resumes
        return self._identity


def _best(checkpoints: Iterable[tuple[Path, Manifest]]) -> tuple[Path, float] | None:
    evaluated = [(path, manifest.accuracy) for path, manifest in checkpoints if manifest.accuracy is not None]
    return max(evaluated, key=lambda pair: pair[1], default=None)


def _read_if_complete(path: Path) -> Manifest | None:
    """The manifest of a checkpoint that looks whole, or None."""
    try:
        manifest = Manifest.read(path)
        return manifest if manifest.find_file_error(path) is None else None
    except (ValueError, OSError):
        # It is damaged or of another format, or it is just being deleted.
        return None


def _build_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, with_optimizer: bool) -> dict[str, Any]:
    if not with_optimizer:
        return {"model": get_model_state_dict(model, options=TRAINABLE_ONLY)}
    model_state, optimizer_state = get_state_dict(model, optimizer, options=TRAINABLE_ONLY)
    return {"model": model_state, "optimizer": optimizer_state}


class _RaisingFileSystem(FileSystem):
    # DCP pickles an error to send it to the other ranks, which loses its cause. So the disk's own error is raised here.
    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            try:
                yield stream
            except Exception as error:  # noqa: BLE001 (its cause is raised)
                raise root_cause(error) from None


def _save_state(folder: Path, state: dict[str, Any]) -> None:
    # The default of one thread stays, since an error in a second one would be lost (torch 2.13). DCP need not sync the
    # files, because `entries_of` does.
    writer = FileSystemWriter(folder, sync_files=False)
    writer.fs = _RaisingFileSystem()
    with _ignore_no_dist_warning():
        dcp.save(state | _rng_state_dict(), storage_writer=writer, no_dist=not is_distributed())


def _load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], bool]:
    """Returns the state of the recipe, and whether there was one of the optimizer."""
    # The saved state of the optimizer holds its settings, too. Those of this run are put back below.
    settings = [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups]
    saved = dcp.FileSystemReader(path / "state").read_metadata().state_dict_metadata
    mine = f"rng_{rank()}"
    # DCP fails on a key that was not saved, such as the random state of a rank or a GPU that the earlier run lacked.
    rng = {name: value for name, value in _rng_state_dict()[mine].items() if f"{mine}.{name}" in saved}
    has_optimizer = any(name.startswith("optimizer.") for name in saved)
    state: dict[str, Any] = _build_state_dict(model, optimizer, has_optimizer) | ({mine: rng} if rng else {})
    with _ignore_no_dist_warning():
        dcp.load(state, checkpoint_id=path / "state", no_dist=not is_distributed())
    if has_optimizer:
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=TRAINABLE_ONLY,
        )
    else:
        set_model_state_dict(model, state["model"], options=TRAINABLE_ONLY)
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
def _ignore_no_dist_warning() -> Iterator[None]:
    # DCP warns where no other process takes part, but a run of one process intends that.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        yield


def _rng_state_dict() -> dict[str, dict[str, Tensor]]:
    rng = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    return {f"rng_{rank()}": rng}


class RunAlreadyComplete(Exception):
    """The run had done all its steps before this process began. It is no error."""


@dataclass(frozen=True, slots=True)
class RunState:
    """How far a run has come."""

    step: int  # the last step that has ended
    version: int  # version of the policy
    cursor: int  # places of the order of problems that were passed
    throttle: dict[str, Any]  # state of the engine's throttle
    source: dict[str, Any]  # groups between submission and training
    # What the task has learned from outcomes, and which of its problems are passed over.
    task: dict[str, Any] = field(default_factory=dict)
    updates: int = 0  # only copies of earlier recipes write and read it

    @classmethod
    def from_recipe_state(cls, recipe_state: Mapping[str, Any]) -> Self:
        """The state in a checkpoint's recipe.json. Other keys there are ignored."""
        return cls(**{each.name: recipe_state[each.name] for each in fields(cls) if each.name in recipe_state})


def find_resume_checkpoint(checkpoints: Checkpoints, folder: RunFolder | None, resume: bool, total: int) -> Path | None:
    """Chooses the checkpoint from which a run goes on, or None, and prints it on rank 0. A collective.

    Args:
        folder: of the run, on rank 0.
        resumes: `resume_from_checkpoint`.
        total: the steps that the run shall have.

    Raises NothingToDo if the run has all its steps, and what `Checkpoints.choose` raises.
    """
    path = checkpoints.verify_latest() if resume else None
    if path is None:
        return None
    step = checkpoint_step(path)
    if step >= total:
        raise RunAlreadyComplete(
            f"step {step} >= max_steps={total}: nothing to do\n{status_message(step, step, checkpoints)}"
        )
    if folder is not None:
        print_text(resume_text(path, step, folder.run, folder.previous_settings))
    return path


def resume_text(path: Path, step: int, run: Run, earlier_config: Mapping[str, Any]) -> str:
    """What a run prints when it goes on: from where, and how its settings differ from `earlier` (empty: not known)."""
    begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started))
    lines = [("resume", f"from step {step} of run {run.id}, begun {begun}: {path}")]
    # The earlier settings come from run.json. The present ones take the same way through JSON, so that a tuple and a
    # list do not count as a change.
    now = json.loads(json.dumps(run.config, default=str))
    changed = [change for change in diff_settings(earlier_config, now) if change.key not in ALWAYS_DIFFERENT_KEYS]
    if not earlier_config:
        lines.append(("changed", "not known: run.json does not say what was set until now"))
    elif changed:
        lines.append(("changed", ", ".join(map(str, changed))))
        decay = (now.get("schedule") or {}).get("decay", "constant")
        if decay != "constant" and any(change.key == "max_steps" for change in changed):
            lines.append(
                ("rate", f"schedule.decay={decay} now ends with the new max_steps, so the learning rate jumps here")
            )
    return format_labels(lines)


def status_message(step: int, total: int, checkpoints: Checkpoints | None) -> str:
    """Where a run is, which model it has, and how to go on with it. `step` is the one that it is in or ended with."""
    newest = checkpoints.latest() if checkpoints is not None else None
    progress = f"It was at step {step} of {total}" if step else "It had not begun its first step"
    if checkpoints is None or newest is None:
        return f"{progress}, and there is no checkpoint yet, so the next start begins anew"
    best, report = checkpoints.best(), shlex.join(["torchtune-ext", "report", str(checkpoints.folder.parent)])
    if checkpoint_step(newest) < total:
        text = f"{progress}. The newest checkpoint is {newest}; go on from there with resume_from_checkpoint=True"
        if best is not None and best[0] != newest:
            text += f". The best on held-out problems: {best[0]} ({best[1]:.3f})"
        return f"{text}. Curves and samples: {report}"
    if (newest / "config.json").exists():
        kind = "a model in Hugging Face's format"
    elif (newest / "merged").exists():
        kind = "an adapter in PEFT's format; its folder merged/ is a whole model"
    else:
        kind = "an adapter in PEFT's format (adapters.save_merged=True saves a whole model, too)"
    prompt_source = f"made with {checkpoints.prompt_source}, not with the files of model_dir; saved with the model"
    lines = {
        "done": f"{max(step, checkpoint_step(newest))} of {total} steps",
        "model": f"{newest}, {kind}",
        "prompt_source": prompt_source if checkpoints.prompt_source else "",
        "best": f"{best[0]}, the best on held-out problems: {best[1]:.3f}" if best is not None else "",
        "report": report,
        "longer": f"the same command with max_steps above {total} and resume_from_checkpoint=True",
    }
    return format_labels([line for line in lines.items() if line[1]])
