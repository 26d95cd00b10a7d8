"""`torchtune-ext gguf FILE OUT` makes a GGUF file a model directory in Hugging Face's format, which any config takes.

    torchtune-ext gguf SmolLM2-135M-Instruct.Q4_1.gguf models/SmolLM2-135M-Instruct

The weights are written in bfloat16. What a quantized file has lost stays lost.
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
SUPPORTED_ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
)  # architectures that transformers reads of such a file, and from_config builds
UNQUANTIZED_TYPES = ("F64", "F32", "F16", "BF16")  # kinds of tensors that are not quantized


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument("out", type=Path, help="the model directory to be made")


def main(args: argparse.Namespace) -> int:
    """Converts one file. Returns the exit status."""
    print_text(convert(args.file, args.out))
    return 0


def convert(file: Path, out: Path) -> str:
    """Writes the model directory `out` and returns what became of the weights, in words.

    It takes 4 bytes of main memory for each parameter.

    Raises:
        ValueError: `gguf` is missing, the file is damaged or of an unknown architecture, or `out` is not empty.
    """
    # What is wrong with the file is said before anything is written.
    kinds = _tensor_types(file)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there and not empty; name a new folder, or remove it")
    tokenizer = _load_tokenizer(file)
    # `out` appears only once it is whole.
    with discard_on_failure(out, lambda: "Free space there, or choose another folder"):
        make_empty_folder(partial_path(out))
        parameters = _write_model(file, tokenizer, partial_path(out))
        finalize_folder(out)
    lost = "" if kinds <= set(UNQUANTIZED_TYPES) else "; what the rounding of the file has lost stays lost"
    return f"{out}: {parameters / 1e6:,.1f} million parameters in bfloat16, from {', '.join(sorted(kinds))}{lost}"


def _tensor_types(file: Path) -> set[str]:
    """Returns the kinds of tensors in the file, as "Q4_1". Raises ValueError where it cannot be converted."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UsageError("GGUF files are read with gguf, which is not installed: pip install gguf==0.19.0") from None
    if not file.is_file():
        raise UsageError(f"{file}: no such file, seen from {Path.cwd()}; name the GGUF file")
    with open(file, "rb") as f:
        begin = f.read(len(GGUF_MAGIC))
    if begin != GGUF_MAGIC:
        raise UsageError(f"{file} is not a GGUF file: it does not begin with GGUF; take another one")
    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise UsageError(f"{file} is cut or damaged ({error}). Copy the file again from where it comes from") from error
    architecture = reader.fields["general.architecture"].contents() if "general.architecture" in reader.fields else None
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise UsageError(
            f"{file} holds a model of the architecture {architecture!r}, which is not supported; take one of these: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    # Long-context models stretch RoPE, by a key of the file or by a tensor of factors. Lost, it would go unnoticed: the
    # model would run, but not as it was trained.
    scaled = [name for name in reader.fields if ".rope.scaling." in name] + [
        t.name for t in reader.tensors if "rope_freqs" in t.name
    ]
    if scaled:
        raise UsageError(
            f"{file} has {scaled[0]}, which stretches RoPE and which transformers does not read of such a file: the model "
            "would be another one; take the model's own directory instead"
        )
    width, heads, own = (
        reader.fields[key].contents() if (key := f"{architecture}.{name}") in reader.fields else None
        for name in ("embedding_length", "attention.head_count", "attention.key_length")
    )
    if width and heads and (own or width // heads) != (usual := 128 if architecture == "qwen3" else width // heads):
        raise UsageError(
            f"{file} has heads of {own or width // heads} numbers, and transformers, which does not read their width of such a "
            f"file, takes {usual}; take the model's own directory instead"
        )
    return {tensor.tensor_type.name for tensor in reader.tensors}


def _load_tokenizer(file: Path) -> Any:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it warns that the model gets another precision than its file, which is what was asked for
    try:
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:
        # Each kind of tokenizer has a converter, with errors of its own.
        raise UsageError(
            f"the tokenizer in {file} cannot be read ({type(error).__name__}: {error}); take the model's own directory instead"
        ) from error


def _write_model(file: Path, tokenizer: Any, folder: Path) -> int:
    """Writes tokenizer, config and weights. Returns the number of parameters."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    tokenizer.save_pretrained(folder)
    # transformers marks a model that it loads from GGUF as quantized, and refuses to save it. Its weights are plain, so
    # weights and config are written here instead. bfloat16 is what nearly all models of the hub have.
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    config, ends = model.config, {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    # The config would call the model quantized, and name the folder of the GGUF file.
    for name in ("quantization_config", "_model_name_or_path"):
        vars(config).pop(name, None)
    config.update(ends | {"architectures": [type(model).__name__]})
    config.save_pretrained(folder)
    GenerationConfig(**ends).save_pretrained(folder)
    # safetensors writes only contiguous tensors.
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    # A tied output layer is the embedding itself, which a file holds once.
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    return sum(weight.numel() for weight in weights.values())
