"""What the servers of one run have to have in common, so that it makes no difference which one a group goes to."""

from pathlib import Path
from typing import Any

SIZES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")


def server_facts(model: dict[str, Any]) -> dict[str, Any]:
    """Returns the model that a server holds, its sizes, its length and its kind of log-probs, by their names. Args: model:
    `vllm_config.model_config` of what it says of itself."""
    text = model["hf_text_config"] if isinstance(model.get("hf_text_config"), dict) else {}
    return {
        # Its folder may lie elsewhere on another machine.
        "model": Path(model["model"]).name,
        **{name: text[name] for name in SIZES if name in text},
        "max_model_len": model["max_model_len"],
        "dtype": str(model.get("dtype")),
        "logprobs_mode": model["logprobs_mode"],
    }


def require_alike(servers: dict[str, dict[str, Any]]) -> None:
    """Compares servers with the first one. Args: servers: what `server_facts` says of each, by its address.

    Raises:
        ValueError: one differs; says which and in what.
    """
    (first, wanted), *others = servers.items()
    for address, facts in others:
        keys = [key for key in {**wanted, **facts} if facts.get(key) != wanted.get(key)]
        if keys:
            has, should = (", ".join(f"{key}={each.get(key)}" for key in keys) for each in (facts, wanted))
            raise ValueError(
                f"engine.address: {address} has {has}, but {first} has {should}; the servers of a run have to be alike: start "
                f"{address} with the model and the flags of {first}, or leave it out"
            )
