"""What the servers of one run have to have in common, so that it makes no difference which one a group goes to."""

from pathlib import Path
from typing import Any

from torchtune_ext.run.errors import Mistake

SIZES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")


def server_facts(model: dict[str, Any]) -> dict[str, Any]:
    """Returns the model that a server holds, its sizes, its length and its kind of log-probs, by their names. Args: model:
    `vllm_config.model_config` as the server reports it."""
    text = model["hf_text_config"] if isinstance(model.get("hf_text_config"), dict) else {}
    return {
        # Its folder may lie elsewhere on another machine.
        "model": Path(model["model"]).name,
        **{name: text[name] for name in SIZES if name in text},
        "max_model_len": model["max_model_len"],
        "dtype": str(model.get("dtype")),
        "logprobs_mode": model["logprobs_mode"],
    }


def require_alike(servers: dict[str, dict[str, Any]], again: tuple[str, dict[str, Any]] | None = None) -> None:
    """Compares servers with the first one.

    Args:
        servers: what `server_facts` returned for each at the start of the run, by its address.
        again: address and facts of one that has come back; None: it is the start.

    Raises:
        ValueError: one differs; says which and in what.
    """
    if not servers:
        return
    (first, expected), *others = servers.items()
    for address, facts in others if again is None else [again]:
        keys = [key for key in {**expected, **facts} if facts.get(key) != expected.get(key)]
        if keys:
            has, should = (", ".join(f"{key}={each.get(key)}" for key in keys) for each in (facts, expected))
            others_have = f"{first} has {should}" if again is None else f"it had {should} when the run began"
            raise Mistake(
                f"engine.address: {address} has {has}, but {others_have}; the servers of a run have to be alike: start "
                f"{address} with {'the model and the flags of ' + first if again is None else 'what it had'}, or leave it out"
            )
