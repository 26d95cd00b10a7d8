"""Looks at a server that somebody else started: is it one that this run can use?"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchtune_ext.sampling.engine_args import LOADER
from torchtune_ext.sampling.records import TRANSFERS, EngineConfig


@dataclass(frozen=True, slots=True)
class ServerKind:
    """What a server says of itself."""

    transfer: str  # how it takes weights: "shm", "nccl" or "gloo"
    workers: int  # of its engine; each takes weights
    cache_tokens: int  # that its KV cache holds
    block: int  # tokens of a block of it
    vocabulary: int  # token ids


def check_kind(address: str, told: dict[str, Any], config: EngineConfig, how: Callable[[], str]) -> ServerKind:
    """Compares a server with what a run asks of it.

    Args: address: of the server; told: vLLM's configuration, as its route `/server_info` tells it; config: of the run; how:
    returns the command that starts it right.
    Raises: ValueError, which says what differs and how to start it.
    """
    model, cache, parallel = told["model_config"], told["cache_config"], told["parallel_config"]
    transfer = (told.get("weight_transfer_config") or {}).get("backend")

    def refuse(what: str) -> None:
        raise ValueError(f"engine.address: {address} {what}; start it like this: {how()}")

    if model["logprobs_mode"] != "processed_logprobs":
        refuse(
            f"gives log-probs of the kind {model['logprobs_mode']!r}, not those under the sampling temperature",
        )
    if transfer not in TRANSFERS[1:] or parallel.get("worker_extension_cls", LOADER) != LOADER:
        refuse("was not started to take weights from this trainer")
    if config.transfer not in ("auto", transfer):
        refuse(f"takes weights by {transfer}, and engine.transfer is {config.transfer}")
    if (parallel.get("data_parallel_size") or 1) > 1:
        refuse("runs with data parallelism, whose ranks are not told of new weights: start a server for each instead")
    if transfer == "nccl":
        _check_nccl(address, told, how)
    if told["scheduler_config"]["policy"] != "priority":
        refuse("serves requests as they come, so a canary would wait behind all samples")
    rank = (told.get("lora_config") or {}).get("max_lora_rank", 0)
    if (config.lora_rank or 0) > rank:
        refuse(f"has no room for an adapter of rank {config.lora_rank}, which this run publishes")
    if bool(config.quantization) != (model.get("quantization") == "fp8"):
        held = model.get("quantization") or model.get("dtype") or "full precision"
        refuse(
            f"holds its layers in {held}, and this run publishes {'FP8 blocks' if config.quantization else 'none in FP8'}"
        )
    if model["max_model_len"] < config.max_model_len:
        raise ValueError(
            f"engine.max_model_len is {config.max_model_len}, but {address} was started with "
            f"{model['max_model_len']}; lower the one or raise the other"
        )
    text = model["hf_text_config"] if isinstance(model.get("hf_text_config"), dict) else {}
    return ServerKind(
        transfer=transfer,
        workers=parallel.get("world_size") or 1,
        cache_tokens=(cache["num_gpu_blocks"] or 0) * cache["block_size"],
        block=cache["block_size"],
        vocabulary=text.get("vocab_size") or sys.maxsize,  # else the server refuses what is too large
    )


def _check_nccl(address: str, told: dict[str, Any], how: Callable[[], str]) -> None:
    """Raises ValueError when one of both ends has no GPU."""
    device = (told.get("device_config") or {}).get("device")
    there, here = device != "cpu", torch.cuda.is_available()
    if not (there and here):
        side = "this trainer has none" if there else f"{address} runs on {device}"
        both = "" if there or here else ", and this trainer has none"
        raise ValueError(
            f"engine.transfer: nccl moves weights between GPUs only, and {side}{both}; use engine.transfer=gloo, and start the "
            f"server like this: {how()}"
        )
