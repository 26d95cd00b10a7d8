"""Backend for an external vLLM server (started by `server_command`).

Requests use HTTP (`/inference/v1/generate`). Weights do not: a server on the trainer's machine
reads them from the trainer's memory, and other servers get them from the weight sender
(`weight_sender.py`).
"""

import asyncio
import json
import logging
import resource
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from torchtune_ext.run.errors import UsageError
from torchtune_ext.sampling.backend import BackendCrashed, EngineRequest, EngineStepStats, call_with_deadline
from torchtune_ext.sampling.engine_args import LOADER, resolve_transfer
from torchtune_ext.sampling.server_command import (
    KEY_VARIABLE,
    authorization,
    redact_command,
    server_command,
    server_key,
)
from torchtune_ext.sampling.types import TRANSFERS, Completion, EngineConfig
from torchtune_ext.sampling.vllm_backend import VLLMBackend
from torchtune_ext.sampling.weight_buffer import UNREADABLE, WeightBuffer
from torchtune_ext.sampling.weight_sender import SENDER_START_S, WeightSender

__all__ = ["ServerBackend", "server_command"]

log = logging.getLogger(__name__)

RETRY_S = 0.5  # seconds between two attempts to reach a server that does not answer
MODEL_SIZE_KEYS = "model_type vocab_size hidden_size num_hidden_layers intermediate_size num_attention_heads".split()
ADAPTER_NAME = "policy"  # model name of requests that use the adapter
ADAPTER_PATH = "/nowhere/the-adapter-is-in-memory"  # vLLM requires a path but does not read it
ADAPTER_LOADED_ERROR = "already been loaded"
# Method of `AsyncLLM` -> (HTTP verb, route, result key), if the route has another name.
ROUTES = {
    "is_paused": ("GET", "/is_paused", None),
    "get_weight_version": ("GET", "/weight_info", "weight_version"),
    "pause_generation": ("POST", "/pause?mode=keep&clear_cache=false", None),
    "reset_prefix_cache": ("POST", "/reset_prefix_cache?reset_running_requests=true", "success"),
    "resume_generation": ("POST", "/resume", None),
    "collective_rpc": ("POST", "/collective_rpc", "results"),
    "add_lora": ("POST", "/v1/load_lora_adapter", None),
}
METRICS_INTERVAL_S = 0.5  # seconds between two polls of the server's counters
METRICS = {  # names on vLLM's Prometheus page -> our names
    "vllm:kv_cache_usage_perc": "usage",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_preemptions_total": "preempted",
    "vllm:prefix_cache_queries_total": "queries",
    "vllm:prefix_cache_hits_total": "hits",
    "vllm:iteration_tokens_total_count": "steps",
}


def _message(error: Exception) -> str:
    # The `repr` of an aiohttp error would contain the request headers, and with them the key.
    return f"{type(error).__name__}: {error}"


def _diff_facts(has: dict[str, Any], needs: dict[str, Any]) -> list[str] | None:
    """Returns the differing facts of `has` and of `needs` as text; None if all are equal."""
    keys = [key for key in {**needs, **has} if has.get(key) != needs.get(key)]
    return [", ".join(f"{key}={settings.get(key)}" for key in keys) for settings in (has, needs)] if keys else None


class ServerBackend(VLLMBackend):
    """One connection to a server. After its first error, the replica opens another one."""

    process_group = 0

    def __init__(self, config: EngineConfig, on_step: Callable[[EngineStepStats], None]):
        assert config.address is not None
        self.connection_id = secrets.token_hex(8)  # unique: a server outlives trainers, whose versions restart
        super().__init__(config, on_step, self.connection_id)
        self.address = config.address.rstrip("/")
        self.last_heartbeat = time.monotonic()
        self._dead = False
        self._session: Any = None
        self._poll: asyncio.Task | None = None
        self._model = "MODEL_DIR"  # placeholder until the launch
        self.server_info: dict[str, dict[str, Any]] = {}  # server address -> facts at its first connection
        self.transfer: str = "shm"  # weight transfer: "shm", "nccl" or "gloo"; known after the launch
        self.workers = 1  # vLLM workers that load weights; known after the launch
        self.weight_sender: WeightSender | None = None  # shared by all servers; None without network transfer
        # Whether a run has published a whole model that replaced the model of the server's folder.
        self.model_replaced = False
        self._headers: dict[str, str] = {}  # with the key, after `configure`
        self._last: dict[str, float] | None = None

    def configure(self) -> None:
        """Reads the API key. Raises UsageError if it is missing."""
        # Clients of the weight routes can replace the model, so every request carries a key, which
        # is only in an environment variable on both sides, never in a config, a log or a command.
        key = server_key()
        if key is None:
            raise UsageError(
                f"engine.address={self.address}, but {KEY_VARIABLE} is not set: set it to the key of the server. Start "
                "the server with the same variable in its environment (e.g. from `openssl rand -hex 32`): "
                f"{self.start_command()}"
            )
        self._headers = {"Authorization": authorization(key)}
        import aiohttp  # noqa: F401  (imported here, so that only runs with a server import it)

    async def launch(self) -> None:
        """Waits for the server.

        Raises:
            BackendCrashed: If the server does not answer within `start_deadline_s`.
            UsageError: For an unsuitable server or a wrong key.
        """
        import aiohttp

        self.configure()
        # Every in-flight request has a connection, which may exceed the soft limit of open files.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard := resource.getrlimit(resource.RLIMIT_NOFILE)[1], hard))
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),  # every request has its own deadline
            connector=aiohttp.TCPConnector(limit=0, force_close=True),  # the server may close idle connections
        )
        give_up_at = time.monotonic() + self.config.start_deadline_s
        while True:
            try:
                await asyncio.wait_for(self._require_key_guard(), 30.0)
                info = await asyncio.wait_for(self._request("GET", "/server_info?config_format=json"), 30.0)
                break
            except (BackendCrashed, TimeoutError) as error:
                if self._session.closed:
                    raise BackendCrashed("the connection was closed") from error
                if time.monotonic() > give_up_at:
                    raise BackendCrashed(f"no answer from {self.address} within start_deadline_s: {error}") from error
                await asyncio.sleep(min(RETRY_S, self.config.start_deadline_s / 10))
        self._dead = False
        self.check_server_info(info["vllm_config"])
        if self.transfer != "shm":
            assert self.weight_sender is not None  # set by `Engine` for every server
            self.weight_sender.start()
        # An earlier trainer may have died, or lost the connection, during a weight sync. Its
        # requests would continue with half-loaded weights.
        await self.slow_call("abort_requests")
        await self.slow_call("resume_generation")
        self.model_replaced = any(".lora_" not in name for worker in await self.checksums() for name in worker)
        self._poll = asyncio.create_task(self._poll_metrics())
        self.last_heartbeat = time.monotonic()

    def check_server_info(self, info: dict[str, Any]) -> None:
        """Checks the answer of `/server_info` and stores the server's properties.

        Raises:
            UsageError: If the server differs from this run's config. The message has the command
                that starts a suitable server.
        """
        model, cache, parallel = info["model_config"], info["cache_config"], info["parallel_config"]
        config, self._model = self.config, model["model"]
        transfer = (info.get("weight_transfer_config") or {}).get("backend")
        has = {
            "logprobs_mode": model["logprobs_mode"],
            "transfer": transfer,
            "worker_extension_cls": parallel.get("worker_extension_cls", LOADER),
            "dtype": str(model.get("dtype", config.dtype)).rpartition(".")[2],
            "quantization": "fp8" if model.get("quantization") == "fp8" else "none",
            "scheduling_policy": info["scheduler_config"]["policy"],
            "data_parallel_size": parallel.get("data_parallel_size") or 1,
            "max_lora_rank": (info.get("lora_config") or {}).get("max_lora_rank", 0),
            "max_model_len": model["max_model_len"],
        }
        needs = has | {
            "logprobs_mode": "processed_logprobs",  # log-probs under the sampling temperature
            "worker_extension_cls": LOADER,
            "quantization": "fp8" if config.quantization else "none",
            "scheduling_policy": "priority",  # otherwise a canary would wait for all samples
            "data_parallel_size": 1,  # other data-parallel ranks would not get new weights
            "max_lora_rank": max(has["max_lora_rank"], config.lora_rank or 0),
            "max_model_len": max(has["max_model_len"], config.max_model_len),
        }
        needs |= {name: value for name in ("dtype", "transfer") if (value := getattr(config, name)) != "auto"}
        if needs["transfer"] not in TRANSFERS[1:]:
            needs["transfer"] = resolve_transfer(config)
        if differences := _diff_facts(has, needs):
            server_settings, needed_settings = differences
            raise UsageError(
                f"engine.address: {self.address} has {server_settings}, but this run needs {needed_settings}. "
                f"Fix: start it with {self.start_command()}"
            )
        on_cpu = (info.get("device_config") or {}).get("device") == "cpu"
        if transfer == "nccl" and (on_cpu or not torch.cuda.is_available()):
            raise UsageError(
                f"engine.transfer=nccl needs GPUs, but {self.address if on_cpu else 'this trainer'} has no GPU; "
                f"use engine.transfer=gloo, and start the server like this: {self.start_command()}"
            )
        assert transfer is not None  # otherwise it would differ from the run's needs
        text = model["hf_text_config"] if isinstance(model.get("hf_text_config"), dict) else {}
        # Only the folder's name is compared, because its path may differ on another machine.
        facts = {"model": Path(model["model"]).name, "max_model_len": model["max_model_len"], "dtype": has["dtype"]}
        self.require_same_setup(facts | {name: text[name] for name in MODEL_SIZE_KEYS if name in text})
        self.transfer, self.workers = transfer, parallel.get("world_size") or 1
        self.block_size = cache["block_size"]
        self.cache_tokens = (cache["num_gpu_blocks"] or 0) * self.block_size
        self.vocab_size = text.get("vocab_size") or sys.maxsize  # if unknown, the server checks token ids

    def require_same_setup(self, facts: dict[str, Any]) -> None:
        """Raises UsageError if the server has changed, or differs from the run's first server."""
        first = self.address if self.address in self.server_info else next(iter(self.server_info), self.address)
        if differences := _diff_facts(facts, self.server_info.get(first, facts)):
            raise UsageError(
                f"engine.address: {self.address} has {differences[0]}, but {first} had {differences[1]} at its first "
                f"connection; all servers of a run must be alike: start {self.address} with the model and the flags of "
                f"{first}, or leave it out"
            )
        self.server_info[self.address] = facts

    def replaced_model_message(self) -> str:
        return (
            f"{self.address} no longer holds the model of its folder, because another run has published weights there; "
            f"restart it: {self.start_command()}"
        )

    def start_command(self) -> str:
        command = redact_command(*server_command(self._model, self.config))
        return f"torchtune-ext serve --config CONFIG, with the config and the settings of this run; in full: {command}"

    async def _require_key_guard(self) -> None:
        """Sends a request without a key.

        Raises:
            UsageError: If the server accepts it.
            BackendCrashed: If the server does not answer.
        """
        import aiohttp

        try:
            async with self._session.get(self.address + "/is_paused") as response:
                status = response.status
        except (aiohttp.ClientError, OSError, RuntimeError) as error:  # RuntimeError: `stop` closed the session
            raise BackendCrashed(f"no connection to {self.address}: {_message(error)}") from error
        if status >= 500:
            raise BackendCrashed(f"{self.address} is not ready ({status})")
        if status not in (401, 403):
            raise UsageError(
                f"engine.address: {self.address} requires no key, so every client can replace its weights; "
                f"start it like this: {self.start_command()}"
            )

    async def generate(self, request: EngineRequest) -> Completion:
        body = {
            "request_id": request.id,
            "model": ADAPTER_NAME if self.uses_adapter else None,
            "token_ids": request.prompt,
            "priority": request.priority,
            "cache_salt": self.cache_salt,
            "stream": request.needs_streaming,
            "stream_options": {"include_usage": True} if request.needs_streaming else None,
            "sampling_params": request.vllm_params(),
        }
        with request.track_in(self.requests):
            return await self._generate(request, body)

    async def _generate(self, request: EngineRequest, body: dict[str, Any]) -> Completion:
        reason, spans, cached, scores = "abort", [], 0, []
        async for part in self._open("POST", "/inference/v1/generate", body):
            self.last_heartbeat = time.monotonic()
            if "error" in part:
                raise BackendCrashed(f"{self.address} failed in a request: {part.get('error')}")
            details = (part.get("usage") or {}).get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens") or cached
            # The first token has no log-prob. Every other token has a dict with a single entry.
            scores += [next(iter(entry.values()))["logprob"] for entry in (part.get("prompt_logprobs") or ())[1:]]
            for choice in part["choices"]:
                logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
                if request.add(choice["token_ids"], logprobs) and choice["finish_reason"] is None:
                    await self._abort(request)
                reason = choice["finish_reason"] or reason
                spans += [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or ()]
        if reason == "abort" and request.num_kept is None:
            raise BackendCrashed(f"{self.address} aborted an unfinished request")
        return request.completion(reason, spans, cached, scores)

    async def _abort(self, request: EngineRequest) -> None:
        path, body = "/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{request.id}"]}
        await call_with_deadline(self, self._request("POST", path, body), self.config.rpc_deadline_s, "abort_requests")

    @property
    def is_dead(self) -> bool:
        return self._dead

    def describe_exit(self) -> str:
        return f"the connection to {self.address} was closed"

    async def rpc(self, method: str, /, **arguments: Any) -> Any:
        verb, path, result = ROUTES.get(method, ("POST", f"/{method}", None))
        answer = await self._request(verb, path, arguments if verb == "POST" else None)
        return answer if result is None else answer[result]

    async def ping(self, deadline_s: float) -> None:
        await super().ping(deadline_s)
        self.last_heartbeat = time.monotonic()

    async def load(self, buffers: Sequence[WeightBuffer], version: int) -> tuple[float, float]:
        only_adapter = all(buffer.adapter is not None for buffer in buffers)
        # The adapter was trained on the model of the folder and does not fit other weights.
        if self.model_replaced and buffers and only_adapter:
            raise UsageError(f"publish: an adapter, but {self.replaced_model_message()}")
        async with self._sender_turn(buffers):
            times = await super().load(buffers, version)
        if buffers:
            self.model_replaced = self.model_replaced and only_adapter
        return times

    def _sender_turn(self, buffers: Sequence[WeightBuffer]) -> AbstractAsyncContextManager[None]:
        # The weight sender updates one server after the other. A server samples until its turn,
        # instead of waiting for the others while it is paused.
        if self.transfer == "shm" or not buffers:
            return nullcontext()
        assert self.weight_sender is not None
        # The deadlines of one server: a model and an adapter, and the short calls before and after.
        limit_s = 2 * (self.config.rpc_deadline_s + SENDER_START_S) + 5 * self.config.probe_deadline_s
        return self.weight_sender.turn((1 + len(self.server_info)) * limit_s)

    async def init_transfer(self, buffers: Sequence[WeightBuffer]) -> None:
        if self.transfer != "shm":
            return
        try:
            await super().init_transfer(buffers)
        except BackendCrashed as error:
            if UNREADABLE not in str(error):
                raise
            raise UsageError(
                f"publish: {self.address} cannot read this process's memory ({error}); run the server on this "
                f"machine, as the same user and in the same PID namespace: {self.start_command()}; for a server on "
                "another machine set engine.transfer=gloo or nccl, here and there"
            ) from error

    async def load_buffer(self, buffer: WeightBuffer, version: int) -> None:
        if self.transfer == "shm":
            return await super().load_buffer(buffer, version)
        assert self.weight_sender is not None
        # Twice the sum of its own deadlines, for a sender that hangs.
        limit_s = 2 * (self.config.rpc_deadline_s + SENDER_START_S)
        update = self.weight_sender.update_server(self, buffer, version)
        await call_with_deadline(self, update, limit_s, "update_server")

    async def finish_update(self, buffer: WeightBuffer, version: int) -> None:
        await super().finish_update(buffer, version)
        if buffer.adapter is None:
            return
        try:
            # vLLM gives its first adapter the id 1, which is `ADAPTER_ID`.
            await self.quick_call("add_lora", lora_name=ADAPTER_NAME, lora_path=ADAPTER_PATH)
        except (BackendCrashed, ValueError) as error:
            if ADAPTER_LOADED_ERROR not in str(error):
                raise

    async def sleep(self, level: int) -> None:
        """Does nothing: the server has its own GPU."""

    def kill(self) -> None:
        self._dead = True  # this run has not started the server and must not kill it

    def log_tail(self) -> str:
        return f"(in the log of the server {self.address})"

    async def stop(self) -> None:
        """Closes the connection and fails its requests, which the server then aborts."""
        self._dead = True
        if self._poll is not None:
            self._poll.cancel()
        for request in list(self.requests.values()):
            request.fail()
        if self._session is not None:
            await self._session.close()

    async def _poll_metrics(self) -> None:
        while not self.is_dead:
            await asyncio.sleep(METRICS_INTERVAL_S)
            try:
                text = await call_with_deadline(self, self._request("GET", "/metrics"), 30.0, "metrics")
            except (BackendCrashed, ValueError):
                continue  # the health check or the next request will detect the failure
            try:
                step = self._parse_step_stats(text)
                if step is not None:
                    self.last_heartbeat = time.monotonic()
                    self.report_step(step)
            except Exception as error:  # noqa: BLE001 (the health check retires the replica)
                self.stats_error = error
                return

    def _parse_step_stats(self, text: str) -> EngineStepStats | None:
        """Returns the counters since the last Prometheus page; None if a busy server made no step."""
        now = dict.fromkeys(METRICS.values(), 0.0)
        for line in text.splitlines():
            name = METRICS.get(line.split("{")[0].split(" ")[0])
            if name is not None:
                now[name] += float(line.rsplit(" ", 1)[1])
        last = self._last or now
        busy = now["running"] or now["waiting"] or self.requests
        # None does not count as a heartbeat, so a replica that hangs with requests is detected.
        if self._last is not None and busy and now["steps"] and now["steps"] == last["steps"]:
            return None
        self._last = now
        return EngineStepStats(
            usage=now["usage"],
            running=int(now["running"]),
            waiting=int(now["waiting"]),
            preempted=int(now["preempted"] - last["preempted"]),
            prefix_queries=int(now["queries"] - last["queries"]),
            prefix_hits=int(now["hits"] - last["hits"]),
        )

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        async for part in self._open(method, path, body):
            return part

    async def _open(self, method: str, path: str, body: dict[str, Any] | None) -> AsyncIterator[Any]:
        """Yields one JSON object or text, or the objects of an event stream.

        Raises:
            BackendCrashed: If the connection or the request fails.
            UsageError: If the server refuses the key or the request.
        """
        import aiohttp

        try:
            async with self._session.request(method, self.address + path, json=body, headers=self._headers) as response:
                if response.status in (401, 403):
                    raise UsageError(
                        f"engine.address: {self.address} refuses the key in {KEY_VARIABLE} (its answer: "
                        f"{(await response.text())[:200]}); set it to the same value here and where the server is started"
                    )
                if response.status in (400, 404, 422):
                    raise UsageError(f"{self.address}{path} refuses the request: {(await response.text())[:500]}")
                if response.status >= 400:
                    raise BackendCrashed(
                        f"{self.address}{path} failed ({response.status}): {(await response.text())[:500]}"
                    )
                if response.content_type == "application/json":
                    yield await response.json()
                elif response.content_type != "text/event-stream":
                    yield await response.text()
                else:
                    async for line in response.content:
                        if line.startswith(b"data: {"):
                            yield json.loads(line[6:])
        except (aiohttp.ClientError, OSError, RuntimeError) as error:  # RuntimeError: our own `stop` closed the session
            if isinstance(error, BackendCrashed):
                raise
            self._dead = True
            raise BackendCrashed(f"no connection to {self.address}: {_message(error)}") from error
