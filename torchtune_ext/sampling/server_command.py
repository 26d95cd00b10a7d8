"""The command line of a vLLM server that `ServerCore` can use."""

import json
import secrets
import sys

from torchtune_ext.sampling.core import DEFAULT_MAX_NUM_SEQS, LOADER, UNIPROC
from torchtune_ext.sampling.doors import GUARD, KEY_VARIABLE, one_machine, server_key
from torchtune_ext.sampling.imports import on_cpu
from torchtune_ext.sampling.records import CANARY_REQUESTS, EngineConfig


def server_command(
    model_dir: str, config: EngineConfig, host: str = "127.0.0.1", port: int = 8000
) -> tuple[list[str], dict[str, str]]:
    """Returns the command line that starts a server which `ServerCore` can use, and the environment variables to add.

    They hold the key that the server will ask for: the one of our own environment (`doors.KEY_VARIABLE`), or else a fresh
    random one, which then has to get into the trainer's. Raises ValueError for a key that no header can carry.
    Args: model_dir: directory of a Hugging Face model; config: how its engine is built; host: address to listen on: the trainer
    is on the same machine, and over a network the key would travel in the clear; port: its number.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model_dir]
    command += ["--host", host, "--port", str(port), "--middleware", GUARD]
    command += ["--dtype", config.dtype, "--max-model-len", str(config.max_model_len)]
    command += ["--max-num-seqs", str((config.max_num_seqs or DEFAULT_MAX_NUM_SEQS) + CANARY_REQUESTS)]
    command += ["--scheduling-policy", "priority"]
    command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    command += ["--skip-tokenizer-init", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    command += ["--worker-extension-cls", LOADER, "--weight-transfer-config", json.dumps({"backend": "shm"})]
    key = server_key() or secrets.token_urlsafe(32)
    environ = {KEY_VARIABLE: key, "VLLM_API_KEY": key}  # else a VLLM_API_KEY of the user's would ask for another one
    environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}  # the weight routes are in the "dev mode"
    environ |= one_machine()
    if on_cpu():
        command += ["--enforce-eager", "--distributed-executor-backend", UNIPROC, "--no-enable-chunked-prefill"]
        command += ["--block-size", str(config.block_size or 32)]
        command += ["--max-num-batched-tokens", str(max(4096, config.max_model_len))]
        command += ["--kv-cache-memory-bytes", str(config.kv_cache_bytes or 1 << 30)]
        environ |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    return command, environ
