"""Identifies what a checkpoint belongs to: a run, a model, and the weights that the run began with."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.policy.lora import AdapterSpec, adapter_names

# These keys of config.json say who wrote the file and how, and not what the model is.
_WRITERS_NOTES = ("transformers_version", "torch_dtype", "dtype")
_FIX = {
    "run": "move it away, or give this run an output_dir of its own",
    "model": "set `model:` and model_dir back, or begin a new run in another output_dir",
    "base": "set model_dir to the weights that the run began with, or begin a new run in another output_dir",
}


@dataclass(frozen=True, slots=True)
class Identity:
    """Three short texts that a person can read. They are compared for equality."""

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
        shown = {name: value if not isinstance(value, tuple) else "+".join(value) for name, value in settings.items()}
        text += f", adapter {' '.join(f'{name}={value}' for name, value in shown.items())}"
    return f"{text}, {len(saved)} tensors of {values:,} values, {hashlib.sha256(whole.encode()).hexdigest()[:12]}"
