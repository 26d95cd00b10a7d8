"""Writes Hugging Face model directories and adapters from a model that may be sharded."""

import filecmp
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors_torch
from torch import Tensor, nn

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.chat.templates import ChatTemplate
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.policy.lora import AdapterSpec, adapter_hf_tensors, merged_hf_tensors
from torchtune_ext.run.errors import RunFailure, UsageError, UsageFileError
from torchtune_ext.run.files import finalize_folder, make_empty_folder, partial_path
from torchtune_ext.run.folder import RECORD_FILE, read_all_settings, require_usable_folder
from torchtune_ext.run.json_files import read_json_or_empty
from torchtune_ext.telemetry.metrics import read_metrics
from torchtune_ext.training.collectives import (
    EXCEPTION_TYPES,
    call_on_main,
    describe,
    rank,
    root_cause,
    run_on_all_ranks,
)

TEMPLATE, INDEX, CARD = "chat_template.jinja", "model.safetensors.index.json", "README.md"
CARD_MARK = "<!-- Written by torchtune-ext. Remove this line if you edit the card. -->"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
SHARD_BYTES = 4 << 30  # largest size of one safetensors file
# Files to copy from a model directory. Other files there may be data, logs, weights or the state of
# a checkpoint.
_CONFIG_PATTERNS = (
    "config.json",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
    "configuration_*.py",
    "modeling_*.py",
)
_TOKENIZER_PATTERNS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
               "merges.txt", "tokenizer.model", TEMPLATE, "tokenization_*.py")  # fmt: skip
_WEIGHT_PATTERNS = ("model-*-of-*.safetensors", INDEX)


@contextmanager
def discard_on_failure(folder: Path, disk_advice: Callable[[], str]) -> Iterator[None]:
    """Removes `partial_path(folder)` if the enclosed code, which writes it on all ranks, fails.

    Args:
        folder: the final path of the folder.
        disk_advice: returns the end of the message after a disk error: advice to the user.

    Raises:
        UsageFileError: the disk failed.
        RunFailure: something else failed, such as another rank.
    """
    try:
        yield
    except BaseException as error:
        if rank() == 0:
            shutil.rmtree(partial_path(folder), ignore_errors=True)
        if not isinstance(error, EXCEPTION_TYPES):
            raise
        cause = root_cause(error)
        # DCP also wraps a KeyboardInterrupt, which must stop the run and not become an OSError.
        if not isinstance(cause, Exception):
            raise cause from None
        text = f"{folder} was not saved: {describe(cause)}"
        if isinstance(cause, OSError | SafetensorError):
            raise UsageFileError(f"{text}. {disk_advice()}") from error
        raise RunFailure(text) from error


def save_model(
    folder: Path, model: nn.Module, hf_model: HFModel, dtype: torch.dtype, tokenizer: ChatTokenizer | None = None
) -> Path:
    """Writes a model directory and returns its path. A collective.

    Raises:
        UsageFileError: the disk failed. An earlier directory is unchanged.
        RunFailure: something else failed, such as another rank.
    """
    with discard_on_failure(folder, lambda: "Free space there, or choose another output_dir"):
        partial = partial_path(folder)
        call_on_main(lambda: make_empty_folder(partial))
        run_on_all_ranks(lambda: export_model(partial if rank() == 0 else None, model, hf_model, dtype, tokenizer))
        call_on_main(lambda: finalize_folder(folder))
    return folder


def require_replaceable(folder: Path, reads: Iterable[Path], setting: str) -> None:
    """Checks that `save_model` would replace only an earlier model of the same recipe.

    Args:
        folder: folder of the model, inside the run's folder.
        reads: the paths that the run reads.
        setting: a key that identifies runs of this recipe in the folder's records.

    Raises:
        UsageError: the folder holds something else, or the run reads it.
    """
    require_usable_folder(folder.parent)
    if not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir())):
        return
    inputs_inside = [str(path) for path in reads if path.resolve().is_relative_to(folder.resolve())]
    known_patterns = (*_CONFIG_PATTERNS, *_TOKENIZER_PATTERNS, *_WEIGHT_PATTERNS)
    records = [record for record in read_all_settings(folder.parent) if setting in record]
    # Earlier versions copied further files of model_dir.
    earlier_model_dirs = [Path(record["model_dir"]) for record in records if record.get("model_dir")]
    if inputs_inside:
        reason = f"this run reads {inputs_inside[0]}"
    elif folder.is_symlink() or not folder.is_dir():
        reason = "it is not a folder"
    elif not records:
        reason = "it was not written by a run of this recipe"
    elif others := sorted(
        file.name
        for file in folder.iterdir()
        if not any(fnmatch(file.name, name) for name in known_patterns)
        and not (file.name == CARD and CARD_MARK in file.read_text(encoding="utf-8", errors="replace"))
        and not any(_equal(file, start) for start in earlier_model_dirs)
    ):
        reason = f"it holds files that were not written by a run: {', '.join(others[:3])}"
    else:
        return
    raise UsageError(
        f"output_dir={folder.parent}: the new model would replace {folder}, but {reason}. Fix: choose another output_dir, "
        f"or move {folder} away"
    )


def _equal(file: Path, folder: Path) -> bool:
    other = folder / file.name
    return file.is_file() and other.is_file() and filecmp.cmp(file, other, shallow=False)


def export_model(
    folder: Path | None,
    model: nn.Module,
    hf_model: HFModel,
    dtype: torch.dtype,
    tokenizer: ChatTokenizer | None = None,
) -> None:
    """Writes a model directory for any tool, with adapters merged into the weights. A collective.

    Args:
        folder: an existing folder on rank 0, None on the other ranks.
        model: the model; it may be sharded.
        hf_model: the model directory whose config files are copied.
        dtype: dtype of the written weights.
        tokenizer: the tokenizer of the training, whose files and template are saved; None: the
            tokenizer of `hf_model`.
    """
    tensors = merged_hf_tensors(model, hf_model, dtype)
    with _drain_on_error(tensors):
        _write_model(folder, hf_model.fuse(tensors), hf_model, tokenizer)


def export_adapter(
    folder: Path | None,
    model: nn.Module,
    hf_model: HFModel,
    adapter: AdapterSpec,
    merged_dtype: torch.dtype | None = None,
    tokenizer: ChatTokenizer | None = None,
) -> None:
    """Writes an adapter in float32 that PEFT and vLLM can read. A collective.

    Args:
        folder: an existing folder on rank 0, None on the other ranks.
        model: the model with adapters; it may be sharded.
        hf_model: the model directory of the base model.
        adapter: settings of the adapter.
        merged_dtype: also writes the merged model in this dtype into the subfolder `merged`; None:
            does not.
        tokenizer: as for `export_model`.
    """
    adapter_tensors = {
        name: tensor.cpu().contiguous() for name, tensor in adapter_hf_tensors(model, hf_model, torch.float32)
    }
    merged_tensors = merged_hf_tensors(model, hf_model, merged_dtype) if merged_dtype is not None else iter(())
    merged_folder = folder / "merged" if folder is not None else None
    with _drain_on_error(merged_tensors):
        if folder is not None:
            save_file(adapter_tensors, folder / "adapter_model.safetensors")
            # The path is absolute, because PEFT takes a relative path for a model id on the hub.
            config = adapter.peft_config(os.path.abspath(hf_model.path))
            (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
            _save_tokenizer(folder, hf_model, tokenizer)
            write_card(folder, hf_model.path, adapter=True)
        if merged_dtype is not None:
            if merged_folder is not None:
                merged_folder.mkdir()
            _write_model(merged_folder, hf_model.fuse(merged_tensors), hf_model, tokenizer)


@contextmanager
def _drain_on_error(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[None]:
    """Takes part in the remaining gathers if the block raises."""
    try:
        yield
    except Exception:
        # If this rank stopped gathering, for example because its disk is full, the other ranks
        # would wait for it.
        for _ in tensors:
            pass
        raise


def _write_model(
    folder: Path | None, tensors: Iterator[tuple[str, Tensor]], hf_model: HFModel, tokenizer: ChatTokenizer | None
) -> None:
    """Writes safetensors files of at most SHARD_BYTES. With folder None it only gathers."""
    if folder is None:
        for _ in tensors:
            pass
        return
    _copy_files(hf_model.path, folder, _CONFIG_PATTERNS)
    if hf_model.is_multimodal:
        # Only the text model is written.
        (folder / "config.json").write_text(json.dumps(hf_model.raw_config, indent=1))
    _save_tokenizer(folder, hf_model, tokenizer)
    write_card(folder, hf_model.path)
    shards: list[tuple[Path, list[str]]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal size
        if pending:
            # The final name contains the number of files, which is known only after the last file.
            path = folder / f"shard-{len(shards)}"
            save_file(pending, path)
            shards.append((path, list(pending)))
        pending.clear()
        size = 0

    for name, tensor in tensors:
        bytes_ = tensor.numel() * tensor.element_size()
        if pending and size + bytes_ > SHARD_BYTES:
            flush()
        pending[name] = tensor.to("cpu", copy=True).contiguous()
        size, total = size + bytes_, total + bytes_
    flush()
    weight_map = {}
    for i, (path, names) in enumerate(shards):
        final = folder / f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(path, final)
        weight_map |= dict.fromkeys(names, final.name)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))


def write_card(folder: Path, base: Path, adapter: bool = False) -> None:
    """Writes the model card from the records of the run that `folder` is in; without a run, none.

    A README.md of the base model is not copied, because it describes other weights. Its license
    and Hub id are kept.
    """
    from huggingface_hub import metadata_load
    from yaml import YAMLError, safe_dump

    run_dir = next((path for path in list(folder.absolute().parents)[:3] if (path / RECORD_FILE).is_file()), None)
    if run_dir is None:
        return
    record, state = read_json_or_empty(run_dir / RECORD_FILE), read_json_or_empty(folder / "recipe.json")
    state = state or read_json_or_empty(folder.parent / "recipe.json")  # of the folder `merged`
    config, process = record.get("config") or {}, record.get("process") or {}
    try:
        given = metadata_load(base / CARD) or {} if (base / CARD).is_file() else {}
    except (OSError, ValueError, YAMLError):
        given = {}  # a damaged card of the base does not stop the export
    # The Hub's cache has folders such as models--org--name/snapshots/COMMIT.
    cached = re.search(r"models--([\w.-]+?)--([\w.-]+)/snapshots", str(base.absolute()))
    names = ["/".join(cached.groups()) if cached else "", read_json_or_empty(base / "config.json").get("_name_or_path")]
    # A local path may look like an id.
    hub_ids = [name for name in names if name and _HUB_ID.fullmatch(name) and not Path(name).exists()]
    hub_id = hub_ids[0] if hub_ids else given.get("base_model")
    method = config.get("preset") or ("sft" if "tokenizer_problems" in config else "custom loss")
    front = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "base_model": hub_id,
        **{key: given.get(key) for key in ("license", "license_name", "license_link", "language")},
        "tags": ["torchtune-ext", *([] if method == "custom loss" else [method])],
    }
    rows = {
        "base": hub_id or base,
        "recipe": "warmup_sft" if "tokenizer_problems" in config else "grpo",
        "preset": config.get("preset"),
        "task": _component_text(config.get("task")),
        "steps": state.get("step"),
        "held-out task": _component_text((config.get("evaluation") or {}).get("task")),
        "held-out reward": _held_out_text(run_dir / "metrics.jsonl"),
        "license of the base": given.get("license"),
        "versions": ", ".join(f"{name} {number}" for name, number in (process.get("versions") or {}).items() if number),
    }
    table = "\n".join(f"| {name} | {str(value).replace('|', '&#124;')} |" for name, value in rows.items() if value)
    text = (
        f"---\n{safe_dump({key: value for key, value in front.items() if value}, sort_keys=False)}---\n{CARD_MARK}\n\n"
        f"# {record.get('name') or run_dir.name}\n\n| | |\n|---|---|\n{table}\n"
    )
    if process.get("command"):
        text += f"\n```\n{process['command']}\n```\n"
    (folder / CARD).write_text(text, encoding="utf-8")


def _component_text(section: Mapping[str, Any] | None) -> str:
    """Returns "Math(dataset=gsm8k)" for the section of a component, and "" without one."""
    if not section:
        return ""
    values = ", ".join(f"{key}={value}" for key, value in section.items() if key != "_component_" and value is not None)
    return f"`{str(section.get('_component_')).rpartition('.')[2]}({values})`"


def _held_out_text(path: Path) -> str:
    """Returns the last held-out reward with its 95% interval and step, and "" without one."""
    records = []
    with suppress(UsageError):  # a damaged line
        if path.is_file():
            records = [one for one in read_metrics(path) if one.get("eval/reward_sampled") is not None]
    if not records:
        return ""
    reward, low, high = (records[-1].get(f"eval/{name}") for name in ("reward_sampled", "low", "high"))
    interval = f" (95% interval {low:.3f} to {high:.3f})" if low is not None and high is not None else ""
    return f"{reward:.3f}{interval} at step {records[-1]['step']}"


def _copy_files(source: Path, folder: Path, names: Sequence[str]) -> None:
    for file in source.iterdir():
        if file.is_file() and any(fnmatch(file.name, name) for name in names):
            shutil.copyfile(file, folder / file.name)


def _save_tokenizer(folder: Path, hf_model: HFModel, tokenizer: ChatTokenizer | None) -> None:
    """Writes tokenizer files that reproduce the prompts and EOS tokens of the training."""
    _copy_files(Path(getattr(tokenizer, "path", hf_model.path)), folder, _TOKENIZER_PATTERNS)
    if tokenizer is None or not describe_prompt_format(hf_model, tokenizer):
        return
    text, settings = inline_template_options(tokenizer.template), folder / "tokenizer_config.json"
    (folder / TEMPLATE).write_text(text, encoding="utf-8")
    # Some tools read the template from this file.
    if "chat_template" in (values := read_json_or_empty(settings)):
        settings.write_text(json.dumps(values | {"chat_template": text}, indent=2))
    # An adapter has no config.json; its base model has it.
    if (folder / "config.json").is_file():
        generation = folder / "generation_config.json"
        ends = list(tokenizer.stop_token_ids)
        values = read_json_or_empty(generation) | {"eos_token_id": ends if ends[1:] else ends[0]}
        generation.write_text(json.dumps(values, indent=2))


def describe_prompt_format(hf_model: HFModel, tokenizer: ChatTokenizer | None) -> str:
    """Describes the prompts' tokenizer and template if they differ from the model's, else ""."""
    template, parts = getattr(tokenizer, "template", None), []
    if tokenizer is None or not isinstance(template, ChatTemplate):
        return ""
    if os.path.realpath(tokenizer.path) != os.path.realpath(hf_model.path):
        parts.append(f"the tokenizer of {tokenizer.path}")
    if template.options or template.name != str(tokenizer.path):
        options = ", ".join(f"{name}={value!r}" for name, value in template.options.items())
        parts.append(f"the chat template {template.name}{f' with {options}' if options else ''}")
    return " and ".join(parts)


def inline_template_options(template: ChatTemplate) -> str:
    """Writes a template's options into its source, so that it renders the same without options."""
    # A renderer may still override an option, but always sets special tokens. Jinja drops the
    # newline after a block (`trim_blocks`), so the white space of the template is
    # unchanged.
    lines = [
        f"{{% set {name} = {value!r} %}}\n"
        if name.endswith(("_token", "_tokens"))
        else f"{{% set {name} = {name} | default({value!r}) %}}\n"
        for name, value in template.options.items()
        if name.isidentifier()
    ]
    return template.source if template.source.startswith(head := "".join(lines)) else head + template.source


def save_file(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes a safetensors file with the file mode of the umask."""
    # safetensors makes files that only the user can read. An empty file has the umask's mode.
    path.touch()
    mode = path.stat().st_mode & 0o7777
    safetensors_torch.save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)
