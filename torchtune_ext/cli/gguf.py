"""`torchtune-ext gguf FILE OUT` converts a GGUF file to a model directory in Hugging Face's format.

    torchtune-ext gguf SmolLM2-135M-Instruct.Q4_1.gguf models/SmolLM2-135M-Instruct

Any config takes such a directory. The weights are written in bfloat16; the precision lost by
quantization is not restored.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.files import finalize_folder, make_empty_folder, partial_path
from torchtune_ext.run.output import print_text
from torchtune_ext.training.export import discard_on_failure, save_file

GGUF_MAGIC = b"GGUF"
# Architectures that transformers reads from GGUF, and from_config builds.
SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
# Keys that transformers ignores, and the values that it uses for all models of an architecture. A
# file lacks the scale of Gemma's scores, which transformers sets for heads of 256 numbers.
ASSUMED_VALUES = {
    "qwen3": {"attention.key_length": 128},
    "gemma2": {"attention.key_length": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {"attention.key_length": 256, "attention.sliding_window_pattern": 6, "rope.freq_base_swa": 1e4},
}
UNQUANTIZED_TYPES = ("F64", "F32", "F16", "BF16")  # tensor types that are not quantized


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument("out", type=Path, help="the model directory to create")


def main(args: argparse.Namespace) -> int:
    """Converts one file. Returns the exit status."""
    print_text(convert(args.file, args.out))
    return 0


def convert(file: Path, out: Path) -> str:
    """Writes the model directory `out` and returns a one-line summary.

    The conversion takes 4 bytes of main memory per parameter.

    Raises:
        UsageError: the package gguf or `file` is missing, the file is damaged or its architecture
            unsupported, or `out` is not empty.
    """
    # Check the file before anything is written.
    reader = _open_gguf(file)
    kinds = {tensor.tensor_type.name for tensor in reader.tensors}
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty. Fix: name a new folder, or remove this one")
    # transformers drops the setting that prepends the token.
    bos = reader.fields.get("tokenizer.ggml.add_bos_token")
    tokenizer = _load_tokenizer(file, {"add_bos_token": True} if bos and bos.contents() else {})
    # `out` appears only when it is complete.
    with discard_on_failure(out, lambda: "Free disk space there, or choose another folder"):
        make_empty_folder(partial_path(out))
        parameters = _write_model(file, tokenizer, partial_path(out))
        finalize_folder(out)
    lost = "" if kinds <= set(UNQUANTIZED_TYPES) else "; the precision lost by quantization is not restored"
    return f"{out}: {parameters / 1e6:,.1f} million parameters in bfloat16, from {', '.join(sorted(kinds))}{lost}"


def _open_gguf(file: Path) -> Any:
    """Opens a file that can be converted, as a GGUFReader.

    Raises:
        UsageError: the file cannot be converted.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UsageError(
            "the package gguf is not installed, and GGUF files need it. Fix: pip install gguf==0.19.0"
        ) from None
    if not file.is_file():
        raise UsageError(f"{file}: file not found, relative to {Path.cwd()}. Fix: name the GGUF file")
    with open(file, "rb") as f:
        begin = f.read(len(GGUF_MAGIC))
    if begin != GGUF_MAGIC:
        raise UsageError(f"{file}: not a GGUF file, it does not begin with GGUF. Fix: name a GGUF file")
    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise UsageError(f"{file}: truncated or damaged ({error}). Fix: download or copy the file again") from error
    _require_equal_model(file, reader)
    return reader


def _require_equal_model(file: Path, reader: Any) -> None:
    """Raises UsageError if transformers would read another model than the file holds."""

    def value(name: str) -> Any:
        return reader.fields[name].contents() if name in reader.fields else None

    architecture = value("general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise UsageError(
            f"{file}: unsupported architecture {architecture!r}; expected one of: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    # Long-context models scale RoPE, by a key of the file or by a tensor of factors. Without the
    # scaling the model would run, but not as it was trained, and no error would show it.
    scaled = [name for name in reader.fields if ".rope.scaling." in name]
    scaled += [tensor.name for tensor in reader.tensors if "rope_freqs" in tensor.name]
    if scaled:
        raise UsageError(
            f"{file}: {scaled[0]} scales RoPE, and transformers does not read it from a GGUF file, so the model would "
            "differ. Fix: use the model's own directory instead"
        )
    assumed = dict(ASSUMED_VALUES.get(architecture, {}))
    names = ("embedding_length", "attention.head_count", "attention.key_length", "context_length", "rope.freq_base")
    own = {name: value(f"{architecture}.{name}") for name in {*names, *assumed}}
    width, heads = own["embedding_length"], own["attention.head_count"]
    if width and heads:
        own["attention.key_length"] = own["attention.key_length"] or width // heads
        assumed.setdefault("attention.key_length", width // heads)
    for name, expected in assumed.items():
        if own[name] not in (None, expected):
            raise UsageError(
                f"{file}: {name}={own[name]}, but transformers assumes {expected} for all files of {architecture}. "
                "Fix: use the model's own directory instead"
            )
    if (own["context_length"], own["rope.freq_base"]) == (32768, 1e4) and architecture == "llama":
        raise UsageError(
            f"{file}: a model of 32,768 tokens with rope.freq_base=10000 is Mistral 7B v0.1 or made of it, whose sliding "
            "window a GGUF file does not hold. Fix: use the model's own directory instead"
        )


def _load_tokenizer(file: Path, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    # transformers would warn that the model has another precision than the file.
    logging.set_verbosity_error()
    try:
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, **options)
    except Exception as error:  # each kind of tokenizer has its own converter and errors
        raise UsageError(
            f"{file}: the tokenizer cannot be read ({type(error).__name__}: {error}). Fix: use the model's own directory "
            "instead"
        ) from error


def _write_model(file: Path, tokenizer: Any, folder: Path) -> int:
    """Writes tokenizer, config and weights. Returns the number of parameters."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    tokenizer.save_pretrained(folder)
    # transformers marks a model from GGUF as quantized and refuses to save it, so this function
    # writes weights and config itself, in bfloat16 as most models of the hub.
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    config, ends = model.config, {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    # These entries would mark the model as quantized, and name the folder of the GGUF file.
    for name in ("quantization_config", "_model_name_or_path"):
        vars(config).pop(name, None)
    config.update(ends | {"architectures": [type(model).__name__]})
    config.save_pretrained(folder)
    GenerationConfig(**ends).save_pretrained(folder)
    # safetensors writes only contiguous tensors.
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    # A tied output layer is the embedding, which a file holds once.
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    return sum(weight.numel() for weight in weights.values())
