"""Writes and reads manifest.json, which says what a checkpoint belongs to, and the size and SHA-256 of every file.

It is written last and read first, so damage is found before anything is unpickled. It does not stop an attacker.
"""

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.policy.lora import AdapterSpec, adapter_names
from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.files import fsync_path, write_atomic

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 2
Entry = tuple[int, str]  # size in bytes, SHA-256 in hex
# DCP names the file of a rank so.
_PART = re.compile(r"state/__(\d+)_\d+\.distcp")
# These keys of config.json say who wrote the file and how, not what the model is.
_WRITERS_NOTES = ("transformers_version", "torch_dtype", "dtype")
_FIXES = {
    "run": "move it away, or give this run an output_dir of its own",
    "model": "set `model:` and model_dir back, or begin a new run in another output_dir",
    "base": "set model_dir to the weights that the run began with, or begin a new run in another output_dir",
}


class DamagedCheckpoint(UsageError):
    """A checkpoint differs from what was written. The message names the folder, the file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a checkpoint belongs to, in three short texts that a person can read. They are compared for equality."""

    run: str  # id of the run
    model: str  # architecture, and names and shapes of what is saved
    base: str  # fingerprint of the weights in model_dir, on which adapters and the reference of a KL term depend

    def explain_difference(self, saved: "Identity") -> str | None:
        """Why a checkpoint with the identity `saved` does not belong to this run, with the fix, or None."""
        differences = [
            f"it belongs to another {name} ({theirs}; this run has {ours}): {_FIXES[name]}"
            for name, ours in asdict(self).items()
            if (theirs := asdict(saved)[name]) != ours
        ]
        return "; ".join(differences) or None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The facts about a checkpoint that are known without reading its tensors."""

    step: int
    accuracy: float | None  # accuracy on held-out problems; None if there was no evaluation
    identity: Identity
    files: dict[str, Entry]  # every file but the manifest itself, by its path below the checkpoint

    def write(self, folder: Path) -> None:
        """Writes the manifest into a folder."""
        # It vouches for every other file and has nothing but its own checksum to vouch for it.
        content = {"format": FORMAT_VERSION, **asdict(self)}
        write_atomic(
            folder / MANIFEST_NAME, json.dumps({"content": content, "sha256": _digest_of(content)}, indent=1).encode()
        )

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Reads the manifest of a checkpoint.

        Raises DamagedCheckpoint if there is none or it is damaged, and ValueError if its format is another version's.
        """
        try:
            whole = json.loads((folder / MANIFEST_NAME).read_bytes())
            content, digest = whole["content"], whole["sha256"]
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{folder} is damaged: {MANIFEST_NAME} is missing") from None
        # Damaged JSON may have any shape: a list in place of a dict, or a nesting too deep to parse.
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{folder} is damaged: {MANIFEST_NAME} cannot be read ({error})") from None
        if _digest_of(content) != digest:
            raise DamagedCheckpoint(
                f"{folder} is damaged: {MANIFEST_NAME} has not the checksum that it was written with"
            )
        if content["format"] != FORMAT_VERSION:
            raise UsageError(
                f"{folder} cannot be resumed: {MANIFEST_NAME} has format {content['format']}, this version reads {FORMAT_VERSION}; another "
                "version of torchtune-ext wrote it. Go on with that one, or begin a new run in another output_dir "
                "(model_dir may be a checkpoint that is a whole model)"
            )
        files = {name: (size, checksum) for name, (size, checksum) in content["files"].items()}
        return cls(content["step"], content["accuracy"], Identity(**content["identity"]), files)

    def find_file_error(self, folder: Path) -> str | None:
        """Compares names and sizes only. Returns what is wrong with the first file that differs, or None."""
        # Nothing reads other files that are in the folder (a file manager's `.DS_Store`, notes), so they do no harm.
        for name in sorted(self.files):
            path, size = folder / name, self.files[name][0]
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
        return None

    def find_checksum_error(self, folder: Path, index: int = 0, num_shares: int = 1) -> str | None:
        """Reads share number `share` of `shares` of the files, and returns what is wrong with the first bad one."""
        # Dealt out by size, the shares are about equally large.
        by_size = sorted(self.files, key=lambda name: (-self.files[name][0], name))
        for name in sorted(by_size[index::num_shares]):
            try:
                _, checksum = _entry(folder / name)
            except OSError as error:
                return f"{name} cannot be read ({error})"
            if checksum != self.files[name][1]:
                return f"{name} has not the checksum that it was written with"
        return None


def flush_and_hash(folder: Path, rank: int) -> dict[str, Entry]:
    """Flushes the files that a rank wrote (its part of `state/`, on rank 0 all else), and returns their entries."""
    # Another rank's files are left out, because a network file system may show them late.
    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    mine = [name for name in paths if int(part[1] if (part := _PART.fullmatch(name)) else 0) == rank]
    # Checksums need the processor and pages in memory, so they are made while the disk writes.
    with ThreadPoolExecutor() as threads:
        written = threads.map(fsync_path, [paths[name] for name in mine])
        entries = dict(zip(mine, threads.map(lambda name: _entry(paths[name]), mine), strict=True))
        # Errors of the disk come out only here.
        list(written)
    return entries


def _entry(path: Path) -> Entry:
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def identify(run: str, hf_model: HFModel, model: nn.Module, adapter: AdapterSpec | None = None) -> Identity:
    """Makes the identity of a run from the weights in model_dir and from `model`, which may lie on the meta device."""
    return Identity(run, model_signature(hf_model, model, adapter), hf_model.fingerprint())


def model_signature(hf_model: HFModel, model: nn.Module, adapter: AdapterSpec | None = None) -> str:
    """A text with the size, the adapter, and a digest of config.json and of every name and shape that is saved."""
    adapters = adapter_names(model)
    # The saved weights are float32, whatever the precision of the forward pass is.
    saved = {
        name: ["float32", *param.shape] for name, param in model.named_parameters() if not adapters or name in adapters
    }
    config = {
        name: value for name, value in hf_model.raw_config.items() if name[0] != "_" and name not in _WRITERS_NOTES
    }
    settings: dict[str, Any] = asdict(adapter) if adapter is not None else {}
    whole = json.dumps([config, saved, settings], sort_keys=True)
    values = sum(torch.Size(shape[1:]).numel() for shape in saved.values())
    text = f"{config['model_type']} of {hf_model.config['num_hidden_layers']} layers, width {hf_model.config['hidden_size']}"
    if settings:
        texts = {name: value if not isinstance(value, tuple) else "+".join(value) for name, value in settings.items()}
        text += f", adapter {' '.join(f'{name}={value}' for name, value in texts.items())}"
    return f"{text}, {len(saved)} tensors of {values:,} values, {hashlib.sha256(whole.encode()).hexdigest()[:12]}"
