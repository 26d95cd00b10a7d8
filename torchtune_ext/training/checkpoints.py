"""Writes and reads checkpoints: a Hugging Face model directory, and the state for resuming.

checkpoints/step_000040/
    config.json  model-00001-of-00001.safetensors  tokenizer files  model directory for any tool
    (or adapter_config.json  adapter_model.safetensors  [merged/]   adapter, maybe merged model)
    recipe.json     step, cursor, task, throttle, source, loss, eval_reward
    state/          float32 weights, optimizer (if saved), RNG; written by DCP
    manifest.json   run, model and base weights; size and SHA-256 of every file

Checkpoints are written atomically. DCP (torch.distributed.checkpoint) can load `state/` on a
different number of ranks. Next to the checkpoints, `.partial_*` is being written, `.pruned_*` is
being deleted, and `.replaced_*` was replaced.
"""

import json
import os
import shlex
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field, fields
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
from torchtune_ext.settings.sections import config_section
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

# Frozen weights are not saved, because model_dir has them.
TRAINABLE_ONLY = StateDictOptions(ignore_frozen_params=True, strict=False)
# Phrases of torch's errors if the saved state has other names or shapes than this run.
STATE_MISMATCH_ERRORS = (
    "Missing key",
    "Size mismatch",
    "unexpected key",
    "doesn't match",
    "different number of parameter groups",
)
# These settings describe one start, not the run, so a resumed run does not list their changes.
UNREPORTED_KEYS = ("output_dir", "resume_from_checkpoint", "dry_run")


@config_section("checkpoints")
class CheckpointConfig:
    """The keys of `checkpoints:`."""

    every: int = Field(default=50, ge=1, description="steps between checkpoints; the last step also writes one")
    keep_last: int = Field(default=2, ge=1, description="newest checkpoints kept, in addition to the best one")
    save_optimizer: bool = Field(
        default=True,
        description="false: 8 bytes less per trained value (AdamW); a resumed optimizer starts from zero",
    )
    stop_grace_s: float = Field(
        default=25.0,
        ge=0,
        le=MAX_DURATION_S,
        description="seconds after SIGTERM in which the step must end; then its checkpoint is written",
    )


class Checkpoints:
    """The checkpoints of one run.

    `verify_latest`, `save` and `load` are collectives: a failure on one rank raises on all ranks.
    The other methods are not collectives.
    """

    def __init__(
        self,
        folder: str | Path,
        identity: Identity | None,
        config: CheckpointConfig | None = None,
        prompt_format_note: str = "",
    ):
        """Prepares the checkpoints of a run.

        Args:
            folder: the folder of all checkpoints; it need not exist yet.
            identity: identity of this run. Only rank 0 writes and checks it; other ranks may pass
                None.
            config: the section `checkpoints:`; None: the defaults.
            prompt_format_note: describes tokenizer and chat template of the saved models if they are not
                the files of model_dir (`export.describe_prompt_format`).
        """
        self.prompt_format_note = prompt_format_note
        self.folder, self._identity, self._config = Path(folder), identity, config or CheckpointConfig()
        self._main = rank() == 0
        self._verified: Path | None = None
        assert identity is not None or not self._main, "rank 0 needs the identity of the run"

    def paths(self) -> list[Path]:
        """Every checkpoint, oldest first, including damaged ones."""
        return checkpoint_folders(self.folder)

    def latest(self) -> Path | None:
        """The newest checkpoint whose files have the right names and sizes, or None."""
        return next((path for path in reversed(self.paths()) if _read_if_complete(path) is not None), None)

    def best(self) -> tuple[Path, float] | None:
        """The checkpoint with the highest held-out reward, and this reward, or None."""
        return _best((path, manifest) for path in self.paths() if (manifest := _read_if_complete(path)) is not None)

    def verify_latest(self) -> Path | None:
        """Verifies the newest checkpoint and returns it; None if the run has no checkpoint.

        A collective.

        Raises:
            DamagedCheckpoint: the checkpoint is damaged.
            UsageError: it belongs to another run, model or base weights.
        """
        # An older checkpoint never silently replaces a damaged one: the user may have a copy of the
        # damaged file.
        newest = call_on_main(lambda: next(reversed(self.paths()), None))
        if newest is not None:
            try:
                self._verify(newest)
            except DamagedCheckpoint as error:
                raise DamagedCheckpoint(
                    f"{error}. Restore the file from a copy, or move the whole folder away: the run then resumes from "
                    "the previous checkpoint, or starts at step 1 without one"
                ) from None
        return newest

    def failed_update_advice(self, step: int) -> str:
        """Advises the user after a step whose update failed."""
        return (
            f"step {step} stopped before this update. Look at its samples and rewards in "
            f"{self.folder.parent / 'rollouts'}; lower the learning rate or the loss coefficients, and resume with "
            "resume_from_checkpoint=True"
        )

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        export: Callable[..., None],
        recipe_state: dict[str, Any],
        eval_reward: float | None = None,
    ) -> float:
        """Writes a checkpoint. A collective.

        Args:
            step: the step that has ended.
            model: may be sharded.
            optimizer: its state is saved if `checkpoints.save_optimizer`.
            export: writes the files for other tools (`export_model`, `export_adapter`) into the
                folder that rank 0 passes. Other ranks pass None and only take part in gathering.
                Even if it fails, it must finish gathering on every rank.
            recipe_state: JSON-serializable state of the recipe.
            eval_reward: held-out reward of these weights. The checkpoint with the highest value
                is never pruned.

        Returns:
            The seconds of checksums and flush on the slowest rank.

        Raises:
            OSError: nothing was saved, for example because the disk is full. Earlier checkpoints
                are unchanged.
        """
        final = self.folder / f"step_{step:06d}"
        partial = partial_path(final)
        content = json.dumps({"step": step, "eval_reward": eval_reward, **recipe_state})

        def begin() -> None:
            make_empty_folder(partial)
            (partial / "recipe.json").write_text(content)

        if self._main:
            # If the disk was full and the user lowered `keep_last`, this frees the space.
            self._prune()
        disk_advice = "Free space there, then resume with resume_from_checkpoint=True; the last complete checkpoint: {}"
        with discard_on_failure(final, lambda: disk_advice.format(self.latest())):
            # Each stage ends on all ranks before the next stage begins, so that no rank waits in a
            # collective for a failed rank.
            call_on_main(begin)
            run_on_all_ranks(lambda: export(partial if self._main else None))
            had_state = bool(optimizer.state)
            state = run_on_all_ranks(lambda: _build_state_dict(model, optimizer, self._config.save_optimizer))
            if optimizer.state and not had_state:
                # To create the optimizer's state, torch made an update without gradients. That
                # update must not count as the first one.
                optimizer.state.clear()
                del state["optimizer"]
            run_on_all_ranks(lambda: _save_state(partial / "state", state))
            hashing_started = time.perf_counter()
            # Each rank reads only the files that it wrote: a network file system may show files of
            # other ranks late.
            local_files = run_on_all_ranks(lambda: flush_and_hash(partial, rank()))
            seconds = max(all_gather(time.perf_counter() - hashing_started))
            files = {name: entry for entries in all_gather(local_files) for name, entry in entries.items()}
            call_on_main(lambda: self._complete(final, Manifest(step, eval_reward, self._run_identity, files)))
        if self._main:
            self._prune()
        return seconds

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Restores weights, optimizer and RNG states in place. A collective.

        The optimizer keeps this run's settings (learning rate, betas, ...). Without a saved
        optimizer state, its moments start from zero.

        Returns:
            The recipe's state (`recipe.json`).

        Raises:
            DamagedCheckpoint: `path` is damaged.
            UsageError: `path` belongs to another run, model or base weights.
            UsageFileError: it was saved with another kind of optimizer, or the disk failed.
            RunFailure: it cannot be loaded, for example because memory does not suffice or a rank
                has exited.
        """
        # `verify_latest` has already read every byte of the checkpoint that it returned, which
        # takes long.
        if path != self._verified:
            self._verify(path)
        try:
            recipe_state, has_optimizer = run_on_all_ranks(lambda: _load(path, model, optimizer))
        except EXCEPTION_TYPES as error:
            cause = root_cause(error)
            # A KeyboardInterrupt or SystemExit is not an error of the checkpoint.
            if not isinstance(cause, Exception):
                raise cause from None
            text = f"{path} could not be loaded: {describe(cause).rstrip('.')}"
            if any(words in str(cause) for words in STATE_MISMATCH_ERRORS):
                raise UsageFileError(
                    f"{text}. Its files are undamaged: set `model:` and `optimizer:` back to the values of the "
                    "checkpoint, or start a new run in another output_dir"
                ) from error
            if isinstance(cause, OSError):
                raise UsageFileError(f"{text}. Its checksums were right: check the disk, then resume") from error
            # Out-of-memory errors and exited ranks raise these classes. Any other error is a bug.
            if isinstance(cause, RuntimeError | MemoryError):
                raise RunFailure(text) from error
            raise cause from None
        if self._main and not has_optimizer:
            print_text(
                f"{path} was saved without the optimizer state (checkpoints.save_optimizer=false, or no update "
                "was made): its moments start from zero, and the first updates may be larger than with that state"
            )
        return recipe_state

    def _verify(self, path: Path) -> None:
        """Verifies every file of a checkpoint; each rank reads a share. A collective.

        Raises:
            DamagedCheckpoint, UsageError: as `verify_latest`.
        """
        manifest = call_on_main(lambda: self._read_matching_manifest(path))
        shares = len(all_gather(None))
        error = manifest.find_checksum_error(path, rank(), shares)
        errors = [error for error in all_gather(error) if error is not None]
        if errors:
            raise DamagedCheckpoint(f"{path} is damaged: {min(errors)}")
        self._verified = path

    def _read_matching_manifest(self, path: Path) -> Manifest:
        """Reads the manifest on rank 0, and checks identity, step, file names and sizes."""
        manifest = Manifest.read(path)
        difference = self._run_identity.explain_difference(manifest.identity)
        if difference is not None:
            raise UsageError(f"{path} cannot be resumed: {difference}")
        if manifest.step != checkpoint_step(path):
            raise DamagedCheckpoint(f"{path} is damaged: its manifest is of step {manifest.step}")
        error = manifest.find_file_error(path)
        if error is not None:
            raise DamagedCheckpoint(f"{path} is damaged: {error}")
        return manifest

    def _complete(self, final: Path, manifest: Manifest) -> None:
        error = manifest.find_file_error(partial_path(final))
        if error is not None:
            raise UsageFileError(
                f"{error}, as seen from rank 0: the folder of another rank is not shared. Fix: set output_dir to a folder that "
                "all ranks share"
            )
        # The manifest is written last, because it holds the checksums of all other files.
        manifest.write(partial_path(final))
        finalize_folder(final)

    def _prune(self) -> None:
        # Damaged checkpoints do not count. Otherwise a damaged one could be kept instead of a
        # complete one.
        complete = [(path, manifest) for path in self.paths() if (manifest := _read_if_complete(path)) is not None]
        of_run = [(path, manifest) for path, manifest in complete if manifest.identity.run == self._run_identity.run]
        paths_to_keep = {path for path, _ in of_run[-self._config.keep_last :]}
        if (best := _best(of_run)) is not None:
            paths_to_keep.add(best[0])
        for path, _ in of_run:
            if path not in paths_to_keep:
                rename_and_remove(path)

    @property
    def _run_identity(self) -> Identity:
        assert self._identity is not None  # a run that saves or resumes has one
        return self._identity


def _best(checkpoints: Iterable[tuple[Path, Manifest]]) -> tuple[Path, float] | None:
    evaluated = [(path, manifest.eval_reward) for path, manifest in checkpoints if manifest.eval_reward is not None]
    return max(evaluated, key=lambda pair: pair[1], default=None)


def _read_if_complete(path: Path) -> Manifest | None:
    """The manifest of a checkpoint whose files have the right names and sizes, or None."""
    try:
        manifest = Manifest.read(path)
        return manifest if manifest.find_file_error(path) is None else None
    except (ValueError, OSError):
        # The checkpoint is damaged, has another format, or is being deleted.
        return None


def _build_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, with_optimizer: bool) -> dict[str, Any]:
    if not with_optimizer:
        return {"model": get_model_state_dict(model, options=TRAINABLE_ONLY)}
    model_state, optimizer_state = get_state_dict(model, optimizer, options=TRAINABLE_ONLY)
    return {"model": model_state, "optimizer": optimizer_state}


class _RaisingFileSystem(FileSystem):
    # DCP pickles an error to send it to the other ranks and drops its cause. So the disk's own
    # error is raised here.
    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            try:
                yield stream
            except Exception as error:  # noqa: BLE001 (its cause is raised)
                raise root_cause(error) from None


def _save_state(folder: Path, state: dict[str, Any]) -> None:
    # The writer keeps the default of one thread, because DCP swallows an error of a second thread
    # (torch 2.13). DCP need not sync the files, because `flush_and_hash` does.
    writer = FileSystemWriter(folder, sync_files=False)
    writer.fs = _RaisingFileSystem()
    with _ignore_no_dist_warning():
        dcp.save(state | _rng_state_dict(), storage_writer=writer, no_dist=not is_distributed())


def _load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], bool]:
    """Returns the recipe's state, and whether the checkpoint has an optimizer state."""
    # The saved optimizer state includes settings. The settings of this run are restored below.
    settings = [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups]
    saved = dcp.FileSystemReader(path / "state").read_metadata().state_dict_metadata
    rng_key = f"rng_{rank()}"
    # DCP fails on a key that was not saved, such as the RNG state of a rank or GPU that the earlier
    # run lacked.
    rng = {name: value for name, value in _rng_state_dict()[rng_key].items() if f"{rng_key}.{name}" in saved}
    has_optimizer = any(name.startswith("optimizer.") for name in saved)
    state: dict[str, Any] = _build_state_dict(model, optimizer, has_optimizer) | ({rng_key: rng} if rng else {})
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
        # The optimizer may already have moments, which do not belong to the loaded weights.
        optimizer.state.clear()
    for group, group_settings in zip(optimizer.param_groups, settings, strict=True):
        group.update(group_settings)
    if "cpu" in rng:
        torch.set_rng_state(rng["cpu"])
    if "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"])
    return json.loads((path / "recipe.json").read_text()), has_optimizer


@contextmanager
def _ignore_no_dist_warning() -> Iterator[None]:
    # DCP warns if no other process takes part, which is intended in a run of one process.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        yield


def _rng_state_dict() -> dict[str, dict[str, Tensor]]:
    rng = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    return {f"rng_{rank()}": rng}


class RunAlreadyComplete(Exception):
    """The run had all its steps before this process started. This is not an error."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The progress of a run, as a checkpoint stores it."""

    step: int  # the last step that has ended, which is also the version of the policy
    cursor: int  # position in the shuffled problem order
    throttle: dict[str, Any]  # state of the engine's throttle
    source: dict[str, Any]  # groups between submission and training
    # State of the task: what it learned from outcomes, and which problems it skips.
    task: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, float] = field(default_factory=dict)  # `Learner.loss_state`
    # Only copies of earlier recipes pass and read these two.
    updates: int = 0
    version: InitVar[Any] = None

    @classmethod
    def from_recipe_state(cls, recipe_state: Mapping[str, Any]) -> Self:
        """Reads the state from a checkpoint's recipe.json, and ignores other keys."""
        return cls(**{key.name: recipe_state[key.name] for key in fields(cls) if key.name in recipe_state})


# The version that copies of earlier recipes pass and store is the step.
RunState.version = property(lambda state: state.step)  # pyright: ignore[reportAttributeAccessIssue]


def find_resume_checkpoint(checkpoints: Checkpoints, folder: RunFolder | None, resume: bool, total: int) -> Path | None:
    """Finds the checkpoint to resume from and prints it on rank 0. A collective.

    Args:
        checkpoints: checkpoints of the run.
        folder: folder of the run on rank 0; None on other ranks.
        resume: `resume_from_checkpoint`.
        total: `max_steps`.

    Returns:
        The checkpoint, or None if the run starts at step 1.

    Raises:
        RunAlreadyComplete: the run has all its steps.
        DamagedCheckpoint, UsageError: as `Checkpoints.verify_latest`.
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
    """Formats the lines that a resumed run prints: its checkpoint, and its changed settings.

    Args:
        path: the checkpoint.
        step: the checkpoint's step.
        run: the run.
        earlier_config: settings before this start; empty: unknown.
    """
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started))
    lines = [("resume", f"from step {step} of run {run.id}, started {started}: {path}")]
    # The earlier settings come from run.json. The current settings are also converted to JSON and
    # back, so that a tuple and a list do not count as a change.
    config = json.loads(json.dumps(run.config, default=str))
    changed = [change for change in diff_settings(earlier_config, config) if change.key not in UNREPORTED_KEYS]
    if not earlier_config:
        lines.append(("changed", "unknown: run.json does not hold the earlier settings"))
    elif changed:
        lines += [("changed", str(change)) for change in changed]
        if any(change.key == "task._component_" for change in changed):
            lines.append(("warning", "the task is another one than before: set output_dir for a separate run"))
        decay = (config.get("schedule") or {}).get("decay", "constant")
        if decay != "constant" and any(change.key == "max_steps" for change in changed):
            lines.append(
                (
                    "rate",
                    f"schedule.decay={decay} now ends with the new max_steps, so the learning rate changes abruptly here",
                )
            )
    return format_labels(lines)


def status_message(step: int, total: int, checkpoints: Checkpoints | None) -> str:
    """Formats a run's progress, its model, and how to resume it.

    Args:
        step: the current step, or the last step of a run that has ended; 0: before the first step.
        total: `max_steps`.
        checkpoints: checkpoints of the run, None if set-up failed before they existed.
    """
    newest = checkpoints.latest() if checkpoints is not None else None
    progress = f"The run was at step {step} of {total}" if step else "The run had not started its first step"
    if checkpoints is None or newest is None:
        return f"{progress}, and has no checkpoint yet, so the next start begins at step 1"
    best, report = checkpoints.best(), shlex.join(["torchtune-ext", "report", str(checkpoints.folder.parent)])
    if checkpoint_step(newest) < total:
        text = f"{progress}. The newest checkpoint is {newest}; resume from there with resume_from_checkpoint=True"
        if best is not None and best[0] != newest:
            text += f". Best checkpoint: {best[0]} (held-out reward {best[1]:.3f})"
        return f"{text}. Curves and samples: {report}"
    if (newest / "config.json").exists():
        kind = "a model in Hugging Face format"
    elif (newest / "merged").exists():
        kind = "an adapter in PEFT format; its folder merged/ holds a complete model"
    else:
        kind = "an adapter in PEFT format (adapters.save_merged=True also saves a complete model)"
    prompt_format_note = (
        f"built with {checkpoints.prompt_format_note}, not with the tokenizer files in model_dir; saved with the model"
    )
    lines = {
        "done": f"{max(step, checkpoint_step(newest))} of {total} steps",
        "model": f"{newest}, {kind}",
        "prompts": prompt_format_note if checkpoints.prompt_format_note else "",
        "best": f"{best[0]} (held-out reward {best[1]:.3f})" if best is not None else "",
        "report": report,
        "extend": f"the same command with max_steps above {total} and resume_from_checkpoint=True",
    }
    return format_labels([line for line in lines.items() if line[1]])
