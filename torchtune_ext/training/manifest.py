"""Writes and reads manifest.json: the identity of a checkpoint, and size and SHA-256 of every file.

The manifest is written last and read first, so damage is found before anything is unpickled. It
does not protect against an attacker.
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
# DCP names the files of a rank by this pattern.
_PART = re.compile(r"state/__(\d+)_\d+\.distcp")
# These keys of config.json describe the writer of the file, not the model.
_NON_MODEL_KEYS = ("transformers_version", "torch_dtype", "dtype")
_FIXES = {
    "run": "move it away, or give this run its own output_dir",
    "model": "set `model:` and model_dir back, or start a new run in another output_dir",
    "base": "set model_dir to the weights that the run started with, or start a new run in another output_dir",
}


class DamagedCheckpoint(UsageError):
    """A checkpoint differs from the files that were written.

    The message names the folder, the file and the difference.
    """


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifies run, model and base weights of a checkpoint by texts, compared for equality."""

    run: str  # id of the run
    model: str  # architecture, and names and shapes of the saved tensors
    base: str  # fingerprint of the weights in model_dir; adapters and the KL reference depend on them

    def explain_difference(self, saved: "Identity") -> str | None:
        """Explains why a checkpoint with the identity `saved` does not belong to this run.

        Returns:
            The differences with their fixes, or None if the identities are equal.
        """
        differences = [
            f"it belongs to another {name} ({saved_value}; this run has {value}): {_FIXES[name]}"
            for name, value in asdict(self).items()
            if (saved_value := asdict(saved)[name]) != value
        ]
        return "; ".join(differences) or None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The metadata of a checkpoint, readable without its tensors."""

    step: int
    eval_reward: float | None  # mean reward on held-out problems; None without an evaluation
    identity: Identity
    files: dict[str, Entry]  # path relative to the checkpoint -> entry, of every file except the manifest

    def write(self, folder: Path) -> None:
        """Writes the manifest into a folder."""
        # The manifest holds the checksums of all other files, so it also needs its own checksum.
        content = {"format": FORMAT_VERSION, **asdict(self)}
        write_atomic(
            folder / MANIFEST_NAME, json.dumps({"content": content, "sha256": _digest_of(content)}, indent=1).encode()
        )

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Reads the manifest of a checkpoint.

        Raises:
            DamagedCheckpoint: the manifest is missing or damaged.
            UsageError: another version of torchtune-ext wrote its format.
        """
        try:
            document = json.loads((folder / MANIFEST_NAME).read_bytes())
            content, digest = document["content"], document["sha256"]
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{folder} is damaged: {MANIFEST_NAME} is missing") from None
        # Damaged JSON may have any shape: a list instead of a dict, or a nesting too deep to parse.
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{folder} is damaged: {MANIFEST_NAME} cannot be read ({error})") from None
        if _digest_of(content) != digest:
            raise DamagedCheckpoint(f"{folder} is damaged: {MANIFEST_NAME} does not match its checksum")
        if content["format"] != FORMAT_VERSION:
            raise UsageError(
                f"{folder} cannot be resumed: {MANIFEST_NAME} has format {content['format']}, this version reads "
                f"{FORMAT_VERSION}; another version of torchtune-ext wrote it. Resume with that version, or start a new run "
                "in another output_dir (model_dir may be a checkpoint that holds a complete model)"
            )
        files = {name: (size, checksum) for name, (size, checksum) in content["files"].items()}
        # "accuracy" is the key of an earlier commit.
        eval_reward = content["eval_reward"] if "eval_reward" in content else content["accuracy"]
        return cls(content["step"], eval_reward, Identity(**content["identity"]), files)

    def find_file_error(self, folder: Path) -> str | None:
        """Compares file names and sizes only.

        Returns:
            The error of the first file that differs, or None.
        """
        # Other files in the folder (a file manager's `.DS_Store`, notes) are never read, so they
        # are allowed.
        for name in sorted(self.files):
            path, size = folder / name, self.files[name][0]
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
        return None

    def find_checksum_error(self, folder: Path, index: int = 0, num_shares: int = 1) -> str | None:
        """Verifies the checksums of one share of the files.

        Args:
            folder: the checkpoint.
            index: which share, from 0.
            num_shares: number of shares, one per rank.

        Returns:
            The error of the first damaged file, or None.
        """
        # Files are assigned round-robin in the order of size, so the shares are about equally
        # large.
        by_size = sorted(self.files, key=lambda name: (-self.files[name][0], name))
        for name in sorted(by_size[index::num_shares]):
            try:
                _, checksum = _entry(folder / name)
            except OSError as error:
                return f"{name} cannot be read ({error})"
            if checksum != self.files[name][1]:
                return f"{name} does not match its checksum"
        return None


def flush_and_hash(folder: Path, rank: int) -> dict[str, Entry]:
    """Flushes and hashes the files that a rank wrote.

    Args:
        folder: the checkpoint.
        rank: a rank writes its part of `state/`; rank 0 also writes all other files.

    Returns:
        Path relative to `folder` -> entry.
    """
    # Files of other ranks are skipped, because a network file system may show them late.
    # The user may edit a model card.
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "README.md"]
    paths = {str(path.relative_to(folder)): path for path in files}
    local_names = [name for name in paths if int(part[1] if (part := _PART.fullmatch(name)) else 0) == rank]
    # Checksums need the CPU and cached pages, so they are computed while the disk writes.
    with ThreadPoolExecutor() as threads:
        written = threads.map(fsync_path, [paths[name] for name in local_names])
        entries = dict(zip(local_names, threads.map(lambda name: _entry(paths[name]), local_names), strict=True))
        # Disk errors are raised only here.
        list(written)
    return entries


def _entry(path: Path) -> Entry:
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def identify(run: str, hf_model: HFModel, model: nn.Module, adapter: AdapterSpec | None = None) -> Identity:
    """Makes the identity of a run.

    Args:
        run: id of the run.
        hf_model: the weights in model_dir.
        model: the trained model; it may be on the meta device.
        adapter: settings of its adapters; None: it has no adapters.
    """
    return Identity(run, model_signature(hf_model, model, adapter), hf_model.fingerprint())


def model_signature(hf_model: HFModel, model: nn.Module, adapter: AdapterSpec | None = None) -> str:
    """Describes a model by size, adapter, and a digest of config.json and all names and shapes."""
    adapters = adapter_names(model)
    # The saved weights are float32, independent of the precision of the forward pass.
    saved = {
        name: ["float32", *param.shape] for name, param in model.named_parameters() if not adapters or name in adapters
    }
    config = {
        name: value for name, value in hf_model.raw_config.items() if name[0] != "_" and name not in _NON_MODEL_KEYS
    }
    # Empty settings are omitted, so that checkpoints of versions without `fused` still fit.
    settings = {name: value for name, value in asdict(adapter).items() if value != {}} if adapter is not None else {}
    whole = json.dumps([config, saved, settings], sort_keys=True)
    values = sum(torch.Size(shape[1:]).numel() for shape in saved.values())
    text = f"{config['model_type']} of {hf_model.config['num_hidden_layers']} layers, width {hf_model.config['hidden_size']}"
    if settings:
        texts = {name: value if not isinstance(value, tuple) else "+".join(value) for name, value in settings.items()}
        text += f", adapter {' '.join(f'{name}={value}' for name, value in texts.items())}"
    return f"{text}, {len(saved)} tensors of {values:,} values, {hashlib.sha256(whole.encode()).hexdigest()[:12]}"
