"""Writes and reads manifest.json, which says what a checkpoint belongs to, and the size and SHA-256 of every file.

The manifest is written last and read first, so that damage is found before anything is loaded or unpickled. It does not
protect against an attacker: anyone who can write into the folder can also write a manifest that fits.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import IO, Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.policy.lora import AdapterSpec, adapter_names
from torchtune_ext.run.errors import FileMistake, Mistake
from torchtune_ext.run.files import write_atomic
from torchtune_ext.training.outcome import true_cause

NAME = "manifest.json"
FORMAT = 2
BESIDE = 1 << 20  # bytes; a larger write is hashed in a second thread, for a smaller one that would cost more time
Entry = tuple[int, str]  # size in bytes, SHA-256 in hex
# These keys of config.json say who wrote the file and how, and not what the model is.
_WRITERS_NOTES = ("transformers_version", "torch_dtype", "dtype")
_FIX = {
    "run": "move it away, or give this run an output_dir of its own",
    "model": "set `model:` and model_dir back, or begin a new run in another output_dir",
    "base": "set model_dir to the weights that the run began with, or begin a new run in another output_dir",
}


class DamagedCheckpoint(Mistake):
    """A checkpoint differs from what was written. The message names the folder, the file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Says what a checkpoint belongs to, in three short texts that a person can read. They are compared for equality."""

    run: str  # id of the run
    model: str  # architecture, and names and shapes of what is saved
    base: str  # fingerprint of the weights in model_dir, on which adapters and the reference of a KL term depend

    def refusal(self, saved: "Identity") -> str | None:
        """Returns why a checkpoint with the identity `saved` does not belong to this run, with the fix, or None."""
        parts = [
            f"it belongs to another {name} ({theirs}; this run has {ours}): {_FIX[name]}"
            for name, ours in asdict(self).items()
            if (theirs := asdict(saved)[name]) != ours
        ]
        return "; ".join(parts) or None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The facts about a checkpoint that are known without reading its tensors."""

    step: int
    accuracy: float | None  # accuracy on held-out problems; None if there was no evaluation
    identity: Identity
    files: dict[str, Entry]  # every file but the manifest itself, by its path below the checkpoint

    def write(self, folder: Path) -> None:
        """Writes the manifest into a folder, with a checksum of its own."""
        content = {"format": FORMAT, **asdict(self)}
        whole = {"content": content, "sha256": _digest_of(content)}
        write_atomic(folder / NAME, json.dumps(whole, indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Reads the manifest of a checkpoint.

        Raises:
            DamagedCheckpoint: there is no manifest, or it differs from what was written.
            ValueError: another version of torchtune-ext wrote it, in another format.
        """
        try:
            whole = json.loads((folder / NAME).read_bytes())
            content, digest = whole["content"], whole["sha256"]
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{folder} is damaged: {NAME} is missing") from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{folder} is damaged: {NAME} cannot be read ({error})") from None
        if _digest_of(content) != digest:
            raise DamagedCheckpoint(f"{folder} is damaged: {NAME} has not the checksum that it was written with")
        if content["format"] != FORMAT:
            raise Mistake(
                f"{folder} cannot be resumed: {NAME} has format {content['format']}, this version reads {FORMAT}; another "
                "version of torchtune-ext wrote it. Go on with that one, or begin a new run in another output_dir "
                "(model_dir may be a checkpoint that is a whole model)"
            )
        files = {name: (size, checksum) for name, (size, checksum) in content["files"].items()}
        return cls(content["step"], content["accuracy"], Identity(**content["identity"]), files)

    def wrong_with_files(self, folder: Path) -> str | None:
        """Compares names and sizes only. Returns what is wrong with the first file that differs, or None.

        Files that others have put into the folder (a file manager's `.DS_Store`, notes) are not looked at: nothing reads them.
        """
        for name in sorted(self.files):
            path = folder / name
            if path.is_dir() or not os.path.lexists(path):
                return f"{name} is missing"
            try:
                size = path.stat().st_size
            except OSError as error:
                # The file may be a link that leads nowhere.
                return f"{name} cannot be read ({error})"
            if size != self.files[name][0]:
                return f"{name} has {size:,} bytes instead of {self.files[name][0]:,}"
        return None

    def wrong_with_bytes(self, folder: Path, share: int = 0, shares: int = 1) -> str | None:
        """Reads a share of the files completely. Returns what is wrong with the first bad file, or None.

        Args:
            folder: the checkpoint.
            share: the number of the share, from 0.
            shares: how many shares there are.
        """
        by_size = sorted(self.files, key=lambda name: (-self.files[name][0], name))
        for name in sorted(by_size[share::shares]):
            try:
                with open(folder / name, "rb") as file:
                    checksum = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                return f"{name} cannot be read ({error})"
            if checksum != self.files[name][1]:
                return f"{name} has not the checksum that it was written with"
        return None


class Checksums:
    """Takes the sizes and checksums of the files that this process writes into a folder, while it writes them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.seconds = 0.0  # time that writing waited for checksums
        self._files: dict[Path, Future[Entry]] = {}
        self._reader = ThreadPoolExecutor(1)  # reads finished files back while the next ones are written
        self._beside = ThreadPoolExecutor(1)  # hashes bytes while they are written

    def __enter__(self) -> "Checksums":
        return self

    def __exit__(self, *_: Any) -> None:
        self._reader.shutdown(cancel_futures=True)
        self._beside.shutdown()

    def read_back(self, path: Path) -> None:
        """Takes the checksum of a finished file in the background. The file may be renamed meanwhile."""
        file = open(path, "rb")  # noqa: SIM115  (closed by the thread)
        self._files[path] = self._reader.submit(_entry, file)

    def renamed(self, old: Path, new: Path) -> None:
        """Records that a file was renamed."""
        self._files[new] = self._files.pop(old)

    def finish(self) -> dict[str, Entry]:
        """Waits for all checksums, and returns them by path below the folder."""
        with self.waiting():
            return {str(path.relative_to(self.folder)): entry.result() for path, entry in self._files.items()}

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Adds the time of the block to `seconds`."""
        began = perf_counter()
        try:
            yield
        finally:
            self.seconds += perf_counter() - began

    @contextmanager
    def stream(self, raw: IO[bytes], path: Path) -> Iterator["_HashedStream"]:
        """Yields a stream that writes to `raw` and takes the checksum of the bytes."""
        stream = _HashedStream(raw, self, self._beside)
        try:
            yield stream
        except Exception as error:
            # When an error is sent to other ranks, the errors that caused it are lost. So the true cause is raised
            # itself.
            cause = true_cause(error)
            if cause is error:
                raise
            raise cause from None
        entry: Future[Entry] = Future()
        entry.set_result((stream.size, stream.checksum.hexdigest()))
        self._files[path] = entry


def all_files(folder: Path, known: dict[str, Entry]) -> dict[str, Entry]:
    """Returns the size and checksum of every file in a folder. Files that are not in `known` are read.

    Raises:
        OSError: a known file is missing or has another size.
    """
    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    for name, (size, _) in known.items():
        if name not in paths or paths[name].stat().st_size != size:
            raise FileMistake(
                f"{name} was written by another rank and is not to be seen here as it was written: all ranks need one "
                "shared output_dir"
            )
    return {name: known[name] if name in known else _entry(open(path, "rb")) for name, path in paths.items()}


def state_writer(folder: Path, checksums: Checksums) -> FileSystemWriter:
    """Returns a writer for DCP (torch.distributed.checkpoint) that takes checksums while it writes."""
    writer = FileSystemWriter(folder)
    writer.fs = _HashingFileSystem(checksums)
    return writer


class _HashingFileSystem(FileSystem):
    def __init__(self, checksums: Checksums):
        self._checksums = checksums

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as raw, self._checksums.stream(raw, Path(path)) as stream:
            yield stream

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self._checksums.renamed(Path(path), Path(new_path))


class _HashedStream:
    """A file for writing, with the methods that DCP uses, which takes the checksum of its bytes."""

    def __init__(self, raw: IO[bytes], checksums: Checksums, beside: ThreadPoolExecutor):
        self._raw, self._checksums, self._beside = raw, checksums, beside
        self.checksum, self.size = hashlib.sha256(), 0
        self.tell, self.flush, self.fileno, self.close = raw.tell, raw.flush, raw.fileno, raw.close

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.size += size
        if size < BESIDE:
            with self._checksums.waiting():
                self.checksum.update(data)
            return self._raw.write(data)
        hashed = self._beside.submit(self.checksum.update, data)
        try:
            return self._raw.write(data)
        finally:
            # This waits also if the write failed, because the caller may free the memory of `data` after this call.
            with self._checksums.waiting():
                hashed.result()


def _entry(file: IO[bytes]) -> Entry:
    with file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def identify(run: str, source: HFModel, model: nn.Module, adapter: AdapterSpec | None = None) -> Identity:
    """Makes the identity of a run from the headers and a sample of the weights in model_dir, and from the names and shapes of
    `model`, which may lie on the meta device."""
    return Identity(run, model_text(source, model, adapter), source.fingerprint())


def model_text(source: HFModel, model: nn.Module, adapter: AdapterSpec | None = None) -> str:
    """Returns a text with the size, the adapter and a digest of a model.

    The digest covers config.json, without `_WRITERS_NOTES`, and every name and shape that is saved.
    """
    adapters = adapter_names(model)
    # The saved weights are float32, whatever the precision of the forward pass is.
    saved = {
        name: ["float32", *param.shape] for name, param in model.named_parameters() if not adapters or name in adapters
    }
    config = {name: value for name, value in source.config.items() if name[0] != "_" and name not in _WRITERS_NOTES}
    settings: dict[str, Any] = asdict(adapter) if adapter is not None else {}
    whole = json.dumps([config, saved, settings], sort_keys=True)
    values = sum(torch.Size(shape[1:]).numel() for shape in saved.values())
    text = f"{config['model_type']} of {config.get('num_hidden_layers')} layers, width {config['hidden_size']}"
    if settings:
        texts = {name: value if not isinstance(value, tuple) else "+".join(value) for name, value in settings.items()}
        text += f", adapter {' '.join(f'{name}={value}' for name, value in texts.items())}"
    return f"{text}, {len(saved)} tensors of {values:,} values, {hashlib.sha256(whole.encode()).hexdigest()[:12]}"
