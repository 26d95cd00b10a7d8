"""Public models on the Hugging Face hub: their sizes, owners, and help to find a model directory."""

import re
from pathlib import Path
from typing import Any

from torchtune_ext.run.catalog import package_folder

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# A path that begins with one of these names is a local folder, not a model id on the hub.
_LOCAL_FOLDER_NAMES = ("models", "model", "runs", "run", "checkpoints", "data", "weights", "tmp")

# Layers, width, heads, key/value heads, width of the MLP, and whether the embeddings are tied.
# Sizes of Qwen2.5 and Llama come from torchtune's builders, sizes of Qwen3 from config.json on the
# hub.
_HUB_MODEL_SIZES = {
    "Qwen2.5-0.5B": (24, 896, 14, 2, 4864, True),
    "Qwen2.5-1.5B": (28, 1536, 12, 2, 8960, True),
    "Qwen2.5-3B": (36, 2048, 16, 2, 11008, True),
    "Qwen2.5-7B": (28, 3584, 28, 4, 18944, False),
    "Qwen2.5-14B": (48, 5120, 40, 8, 13824, False),
    "Qwen2.5-32B": (64, 5120, 40, 8, 27648, False),
    "Qwen2.5-72B": (80, 8192, 64, 8, 29568, False),
    "Qwen3-1.7B": (28, 2048, 16, 8, 6144, True),
    "Qwen3-4B": (36, 2560, 32, 8, 9728, True),
    "Qwen3-8B": (36, 4096, 32, 8, 12288, False),
    "Llama-3-8B": (32, 4096, 32, 8, 14336, False),
    "Llama-3.1-8B": (32, 4096, 32, 8, 14336, False),
    "Llama-3.1-70B": (80, 8192, 64, 8, 28672, False),
    "Llama-3.2-1B": (16, 2048, 32, 8, 8192, True),
    "Llama-3.2-3B": (28, 3072, 24, 8, 8192, True),
    "SmolLM2-135M": (30, 576, 9, 3, 1536, True),
}
_VOCAB_SIZES = {"Qwen2.5": 152064, "Qwen3": 151936, "Llama": 128256, "SmolLM2": 49152}
_SMALL_VOCAB_SIZE = 151936  # vocabulary of Qwen2.5 up to 3B
_MODEL_TYPES = {"Qwen2.5": "qwen2", "Qwen3": "qwen3", "Llama": "llama", "SmolLM2": "llama"}


def missing_config_hint(path: Path) -> str:
    """Explains why a model directory has no config.json, and how to get a valid directory."""
    # Likely errors come first: a file, a run's folder, an adapter, a GGUF file, a warm-up that was
    # never run.
    if path.is_file():
        return "it is a file; set it to a model directory in Hugging Face format, with config.json and the weights"
    for pattern in ("config.json", "merged/config.json"):
        if models := sorted(path.glob(f"checkpoints/step_*/{pattern}")):
            return f"it is the folder of a run; its newest checkpoint is the model {models[-1].parent}"
    if (path / "adapter_config.json").is_file():
        merged = path / "merged"
        hint = (
            f"the merged model is {merged}"
            if merged.is_dir()
            else "adapters.save_merged=True also saves the merged model"
        )
        return f"it holds an adapter and no model; {hint}"
    if files := sorted(path.glob("*.gguf")):
        return f"has no config.json; `torchtune-ext gguf {files[0]} OUT` converts {files[0].name} to a model directory"
    problem = "has no config.json" if path.is_dir() else f"folder not found, relative to {Path.cwd()}"
    if path.parts[-2:] == ("warmup", "model"):
        name = f"warmup/{path.parts[-3] if len(path.parts) > 2 else 'tiny'}"
        config = f" --config {name}" if (package_folder("configs") / f"{name}.yaml").is_file() else ""
        return f"{problem}: `tune run warmup_sft{config}` creates it"
    steps = [folder.name for folder in sorted(path.parent.glob("step_*/"))]
    if path.name.startswith("step_") and not path.is_dir() and steps:
        return f"{problem}; the checkpoints in {path.parent} are {', '.join(steps)}"
    # "Qwen/Qwen3-8B" may be a model id on the hub, but "models/Qwen3-8B" is most likely a folder.
    hub = _HUB_ID.fullmatch(str(path)) and path.parts[0] not in _LOCAL_FOLDER_NAMES and not path.is_dir()
    name = path.name or "MODEL"
    owner, place = (path.parts[0], f"models/{name}") if hub else (hub_owner(name), str(path))
    hint = (
        f"`hf download {owner}/{name} --local-dir {place}` fetches a model, and `hf download {owner}/{name} "
        f"config.json --local-dir {place}` the file that a plan of other models needs"
    )
    if hub:
        return f"{problem}. If it is a model id on the Hugging Face hub: {hint}; then set model_dir={place}"
    return f"{problem}; set it to a directory in Hugging Face format: {hint}"


def hub_owner(name: str) -> str:
    """Guesses the owner of a model on the hub from its name; "OWNER" if unknown."""
    owners = {"Qwen": "Qwen", "Llama-": "meta-llama", "DeepSeek-": "deepseek-ai", "SmolLM": "HuggingFaceTB"}
    owners |= {"Mistral-": "mistralai", "OLMo-2-": "allenai", "gemma-": "google", "Phi-": "microsoft"}
    return next((owner for begin, owner in owners.items() if name.startswith(begin)), "OWNER")


def hub_model_config(name: str) -> dict[str, Any] | None:
    """Returns the config.json sizes of a public model by its name on the hub; None if unknown."""
    # A run can thus be planned before any download. Fine-tuned variants have the sizes of their
    # base.
    base = re.sub(r"-(Instruct|Base)$", "", name).replace("-Coder-", "-").replace("-Math-", "-").removeprefix("Meta-")
    if base not in _HUB_MODEL_SIZES:
        return None
    layers, width, heads, kv_heads, mlp, tied = _HUB_MODEL_SIZES[base]
    family = base.split("-")[0]
    return {
        "model_type": _MODEL_TYPES[family],
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128 if family == "Qwen3" else width // heads,
        "intermediate_size": mlp,
        "vocab_size": _SMALL_VOCAB_SIZE if family == "Qwen2.5" and tied else _VOCAB_SIZES[family],
        "max_position_embeddings": 32768,
        "tie_word_embeddings": tied,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }
