"""Converts weights between Hugging Face directories, torchtune models and the engines."""

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torchtune.modules import TiedLinear

from torchtune_ext.policy.families import FAMILIES, FUSED_PARTS
from torchtune_ext.policy.hf_config import MULTIMODAL, complete_config, read_hf_config
from torchtune_ext.policy.sharding import fill_param, gather_full
from torchtune_ext.run.errors import UsageError, UsageFileError
from torchtune_ext.run.json_files import read_json_object, require_no_lfs_pointer

# Dtypes of weights, as safetensors spells them. Other dtypes belong to a quantized checkpoint.
_FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
_UNQUANTIZED_HINT = "use the model in bfloat16 or float32; precision=fp8_unified quantizes it in this run"
# A fingerprint reads this many samples per tensor, of this many bytes each.
_SAMPLES, _SAMPLE_BYTES = 8, 1024
# Prefixes of the weights of a vision tower, which are skipped, in files of either format.
_VISION = tuple(f"{x}{part}." for x in ("", "model.") for part in ("vision_tower", "multi_modal_projector"))
# Activation checkpointing and compile add these parts to the names of parameters.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


class HFModel:
    """A model directory in Hugging Face format.

    Raises:
        UsageFileError: config.json is missing or damaged.
        UsageError: the architecture is unsupported.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        # config.json of the text model, without defaults.
        self.raw_config: dict[str, Any] = read_hf_config(path)
        # Whether the folder also holds a vision tower.
        self.is_multimodal = read_json_object(self.path / "config.json")["model_type"] in MULTIMODAL
        self.config = complete_config(self.raw_config)
        self._family = FAMILIES[self.config["model_type"]]
        self._shape = {
            "num_heads": self.config["num_attention_heads"],
            "num_kv_heads": self.config["num_key_value_heads"],
            "dim": self.config["hidden_size"],
            "head_dim": self.config["head_dim"],
        }
        self.tied_embeddings: bool = self.config["tie_word_embeddings"]
        # Part of a fused layer -> the fused layer, if the files hold fused layers.
        fused = FUSED_PARTS if self._family.fused else {}
        self.fused_names = {part: name for name, parts in fused.items() for part in parts}

    def files(self) -> list[Path]:
        """Returns the safetensors files, in order.

        Raises:
            UsageFileError: a file is missing, or a file does not belong to the model.
            UsageError: the index is invalid.
        """
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            from torchtune_ext.policy.hub import hub_owner

            unread = sorted(path.name for ending in ("*.bin", "*.pth", "*.gguf") for path in self.path.glob(ending))
            there = f" (found {unread[0]}, an unsupported format)" if unread else ""
            raise UsageFileError(
                f"model_dir={str(self.path)!r} has no *.safetensors file{there}: "
                f"`hf download {hub_owner(self.path.name)}/{self.path.name} --local-dir {self.path}` fetches the weights"
            )
        return self._select_indexed(files)

    def _select_indexed(self, files: list[Path]) -> list[Path]:
        # Some folders hold the same weights twice: in shards and in a single file.
        index = self.path / "model.safetensors.index.json"
        if not index.is_file():
            # vLLM reads all files of such a folder, so a stray file cannot be skipped.
            stray = [file.name for file in files if not file.name.startswith("model")]
            if 0 < len(stray) < len(files):
                raise UsageFileError(
                    f"model_dir={str(self.path)!r} holds {stray[0]} in addition to the model's weights, and no "
                    f"{index.name} says which files belong to the model; move {', '.join(stray)} to another folder"
                )
            return files
        names = read_json_object(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise UsageError(
                f"{index} has no weight_map of file names. Fix: copy the file again from the model repository"
            )
        named = set(names.values())
        missing = sorted(named - {file.name for file in files})
        if missing:
            raise UsageFileError(
                f"model_dir={str(self.path)!r} lacks {missing[0]} ({len(missing)} of {len(named)} files are missing), "
                f"which {index.name} names: the download is incomplete. `hf download OWNER/{self.path.name} --local-dir "
                f"{self.path}` resumes it"
            )
        return [file for file in files if file.name in named]

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...], Path]]:
        """Yields (torchtune name, shape, file) of every weight. It reads only the files' headers.

        Raises:
            UsageError: a file is damaged, or holds quantized weights or weights of another family.
        """
        self.require_unquantized()
        for file in self.files():
            for name, entry in _read_header(file)[1].items():
                if (text_name := self._text_name(name)) is None:
                    continue
                _require_float_dtype(name, entry["dtype"], file)
                empty = torch.empty(entry["shape"], device="meta")
                try:
                    converted = self._family.to_tune({text_name: empty}, **self._shape)
                except Exception as error:
                    # The family's converter may be torchtune's, which raises errors of several
                    # classes.
                    raise UsageError(
                        f"{file}: unknown weight {name} of shape {tuple(entry['shape'])} for model_type="
                        f"{self.config['model_type']}. Fix: copy config.json again from the model repository"
                    ) from error
                yield from ((tune_name, tuple(tensor.shape), file) for tune_name, tensor in converted.items())

    def require_readable(self) -> None:
        """Raises UsageFileError if weights are missing, UsageError if a file is damaged."""
        for file in self.files():
            _read_header(file)

    def require_fits(self, model: nn.Module, new_params: Collection[str] = ()) -> None:
        """Checks that the files have the names and shapes of a model, by their headers.

        Args:
            model: the model; it may be on the meta device.
            new_params: parameters that are not in the files, such as adapters.

        Raises:
            UsageError: a name or a shape differs.
        """
        self.require_tied(model)
        expected = {clean_name(name): tuple(p.shape) for name, p in model.named_parameters() if name not in new_params}
        missing = set(expected)
        for name, shape, file in self.shapes():
            if expected.get(name) != shape:
                raise UsageError(self._shape_error(name, shape, expected.get(name), file))
            missing.discard(name)
        self._require_none_missing(missing)

    def require_tied(self, model: nn.Module) -> None:
        """Raises UsageError if model and config.json disagree about tied embeddings."""
        if self.tied_embeddings != isinstance(model.output, TiedLinear):
            raise UsageError(
                f"tie_word_embeddings={self.tied_embeddings} in {self.path / 'config.json'}, but `model:` builds a "
                f"model with {'untied' if self.tied_embeddings else 'tied'} embeddings; change `model:`"
            )

    def _shape_error(self, name: str, shape: tuple, expected: tuple | None, file: Path) -> str:
        text = "no weight of this name" if expected is None else f"shape {expected}"
        return (
            f"model does not fit model_dir={str(self.path)!r}: {name} has shape {shape} in {file.name}, the built model "
            f"has {text}; compare `model:` in the YAML with {self.path / 'config.json'}"
        )

    def _require_none_missing(self, missing: Collection[str]) -> None:
        if missing:
            first = ", ".join(sorted(missing)[:4]) + (", ..." if len(missing) > 4 else "")
            fix = "`model:` is larger than the files, or a file is missing; copy the files again, or change `model:`"
            if set(missing) == {"output.weight"}:
                fix = f"if the output layer is the embedding, set tie_word_embeddings: true in {self.path / 'config.json'}"
            raise UsageError(
                f"model_dir={str(self.path)!r} lacks {len(missing)} of the model's weights ({first}): {fix}"
            )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (torchtune name, tensor) of every weight, one at a time."""
        self.require_unquantized()
        for file in self.files():
            with safe_open(file, framework="pt") as f:
                for name in f.keys():
                    if (text_name := self._text_name(name)) is None:
                        continue
                    _require_float_dtype(name, f.get_slice(name).get_dtype(), file)
                    yield from self._family.to_tune({text_name: f.get_tensor(name)}, **self._shape).items()

    def _text_name(self, name: str) -> str | None:
        """Returns the name of a weight in a file of the text model alone; None: it is not read."""
        if self.is_multimodal and name.startswith(_VISION):
            return None
        if self.is_multimodal:
            name = name.replace("model.language_model.", "model.").removeprefix("language_model.")
        # Some files of tied models repeat the embedding as lm_head.weight.
        return None if name == "__metadata__" or (self.tied_embeddings and name == "lm_head.weight") else name

    def fingerprint(self) -> str:
        """Computes a short text that identifies the weights, independent of their files.

        Raises:
            UsageFileError: the directory has no safetensors file.
            UsageError: a file is damaged.
        """
        # Eight samples per tensor, from its first bytes to its last, take seconds for tens of
        # gigabytes. They distinguish weights that were trained, rounded or converted differently,
        # and miss only bytes between the samples.
        tensors, total = {}, 0
        for file in self.files():
            with open(file, "rb") as f:
                begin, header = _read_header(file)
                for name, entry in header.items():
                    if self._text_name(name) is None:
                        continue
                    start, end = entry["data_offsets"]
                    size, digest = end - start, hashlib.sha256(f"{entry['dtype']} {entry['shape']} ".encode())
                    whole = size <= _SAMPLES * _SAMPLE_BYTES
                    offsets = [0] if whole else [i * (size - _SAMPLE_BYTES) // (_SAMPLES - 1) for i in range(_SAMPLES)]
                    for offset in offsets:
                        digest.update(os.pread(f.fileno(), size if whole else _SAMPLE_BYTES, begin + start + offset))
                    tensors[name], total = digest.hexdigest(), total + size
        digest = hashlib.sha256(json.dumps(tensors, sort_keys=True).encode()).hexdigest()
        return f"{len(tensors)} tensors of {total:,} bytes, {digest[:12]}"

    def require_unquantized(self) -> None:
        """Raises UsageError if `config.json` says that the weights are quantized.

        No code of this package reads their scales.
        """
        if (quantization := self.config.get("quantization_config")) is not None:
            raise UsageError(
                f"model_dir={str(self.path)!r} holds quantized weights (quantization_config in config.json, quant_method="
                f"{quantization.get('quant_method')!r}): {_UNQUANTIZED_HINT}"
            )

    def to_hf(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        """Returns the Hugging Face name of a torchtune weight, and the weight in that layout."""
        # An adapter's B is permuted like its base weight, but has fewer columns.
        shape = self._shape | {"dim": tensor.shape[-1]}
        return next(iter(self._family.to_hf({name: tensor}, **shape).items()))

    def fuse(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Concatenates the parts of layers that the files hold fused. Engines also load the parts."""
        pending: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors:
            *stem, layer, kind = name.split(".")
            if layer not in self.fused_names:
                yield name, tensor
                continue
            fused = self.fused_names[layer]
            parts = pending.setdefault(whole := ".".join([*stem, fused, kind]), {})
            parts[layer] = tensor
            if len(parts) == len(FUSED_PARTS[fused]):
                yield whole, torch.cat([pending[whole][part] for part in FUSED_PARTS[fused]])
                del pending[whole]


def _require_float_dtype(name: str, dtype: str, file: Path) -> None:
    """Raises UsageError if a tensor is, or belongs to, a quantized weight."""
    if "_scale" in name.rpartition(".")[2] or dtype not in _FLOAT_DTYPES:
        raise UsageError(f"{name} in {file} is, or belongs to, a quantized weight: {_UNQUANTIZED_HINT}")


def _read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Reads the header of a safetensors file.

    Returns:
        Offset of the data in bytes; and the header: dtype, shape and data offsets of each tensor.

    Raises:
        UsageError: the file is damaged or not a safetensors file.
    """
    require_no_lfs_pointer(file)
    with open(file, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        try:
            # In a file of another format, the first 8 bytes do not hold a length.
            header = json.loads(f.read(length) if 0 < length < file.stat().st_size else b"")
            entries = [entry for name, entry in header.items() if name != "__metadata__"]
            end = max(
                (entry["data_offsets"][1] for entry in entries if entry["dtype"] and entry["shape"] is not None),
                default=0,
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            raise UsageError(
                f"{file} is not a safetensors file, or its header is damaged. Fix: copy it again from the model repository"
            ) from None
    if 8 + length + end != file.stat().st_size:
        raise UsageError(
            f"{file} has {file.stat().st_size:,} bytes; expected {8 + length + end:,} from its header. Fix: copy the file "
            "again from the model repository"
        )
    return 8 + length, header


def clean_name(name: str) -> str:
    """Returns the name of a parameter without the components that wrappers add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@torch.no_grad()
def load_weights(model: nn.Module, hf_model: HFModel, new_params: Collection[str] = ()) -> None:
    """Copies weights into a model. If the model is sharded, each rank keeps its shard.

    Args:
        model: the model.
        hf_model: the model directory.
        new_params: parameters that are not in the files, such as adapters.

    Raises:
        UsageError: names or shapes do not match.
    """
    params = {clean_name(name): p for name, p in model.named_parameters()}
    missing = set(params) - set(new_params)
    for name, tensor in hf_model.tensors():
        param = params.get(name)
        if param is None or tuple(param.shape) != tuple(tensor.shape):
            expected = None if param is None else tuple(param.shape)
            raise UsageError(hf_model._shape_error(name, tuple(tensor.shape), expected, hf_model.path))
        fill_param(param, tensor)
        missing.discard(name)
    hf_model._require_none_missing(missing)


@torch.no_grad()
def named_hf_tensors(model: nn.Module, hf_model: HFModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, unsharded tensor) of every parameter in `dtype`. A collective."""
    # It gathers one sharded parameter at a time, so all ranks must exhaust it together.
    for name, param in model.named_parameters():
        yield hf_model.to_hf(clean_name(name), gather_full(param, dtype))
