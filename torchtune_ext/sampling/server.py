"""Uses a vLLM server that somebody else started (`server_command`), behind the same interface as an engine of our own.

Completions go over HTTP (`/inference/v1/generate`). Weights do not: a server on the trainer's machine reads them from
its memory, any other gets them from the trainer's sender (`courier.py`).
"""

import asyncio
import json
import logging
import resource
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
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

RETRY_S = 0.5  # seconds between two tries to reach a server that does not answer
MODEL_SIZE_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
)
ADAPTER_NAME = "policy"  # by which requests ask a server for the adapter
ADAPTER_PATH = "/nowhere/the-adapter-is-in-memory"  # vLLM wants one, and reads nothing there
ADAPTER_LOADED_ERROR = "already been loaded"
# The routes whose name is not that of the method of `AsyncLLM`, and the key of the result in the answer.
ROUTES = {
    "is_paused": ("GET", "/is_paused", None),
    "get_weight_version": ("GET", "/weight_info", "weight_version"),
    "pause_generation": ("POST", "/pause?mode=keep&clear_cache=false", None),
    "reset_prefix_cache": ("POST", "/reset_prefix_cache?reset_running_requests=true", "success"),
    "resume_generation": ("POST", "/resume", None),
    "collective_rpc": ("POST", "/collective_rpc", "results"),
    "add_lora": ("POST", "/v1/load_lora_adapter", None),
}
METRICS_INTERVAL_S = 0.5  # seconds between two looks at the server's counters
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
    # The `repr` of an error of aiohttp would hold the headers of the request, and so the key.
    return f"{type(error).__name__}: {error}"


def _diff_facts(has: dict[str, Any], needs: dict[str, Any]) -> list[str] | None:
    """The facts that differ, in words: those of `has` and those of `needs`. None: all are the same."""
    keys = [key for key in {**needs, **has} if has.get(key) != needs.get(key)]
    return [", ".join(f"{key}={each.get(key)}" for key in keys) for each in (has, needs)] if keys else None


class ServerBackend(VLLMBackend):
    """One connection to a server. It ends (`CoreLost`) with the first error, and the lane tries another one."""

    process_group = 0

    def __init__(self, config: EngineConfig, on_step: Callable[[EngineStepStats], None]):
        assert config.address is not None
        self.connection_id = secrets.token_hex(8)  # a server outlives trainers, whose versions begin anew
        super().__init__(config, on_step, self.connection_id)
        self.address = config.address.rstrip("/")
        self.last_heartbeat = time.monotonic()
        self._dead = False
        self._session: Any = None
        self._poll: asyncio.Task | None = None
        self._model = "MODEL_DIR"  # the real one is known after the launch
        self.server_info: dict[str, dict[str, Any]] = {}  # what each server of the run was when it was met, by address
        self.transfer: str = "shm"  # how it takes weights: "shm", "nccl" or "gloo"; known after the launch
        self.workers = 1  # of its engine; each takes weights; known after the launch
        self.weight_sender: WeightSender | None = None  # of all servers of the run, where weights go over a network
        # Whether it holds a whole model that somebody has published, in place of that of its folder.
        self.model_replaced = False
        self._headers: dict[str, str] = {}  # they hold the key, once it is configured
        self._last: dict[str, float] | None = None

    def configure(self) -> None:
        """Reads the key. Raises ValueError without one."""
        # Whoever reaches the server's weight routes can replace the model, so every request carries a key. It lives
        # only in an environment variable on both sides, never in a config, a log or a command line.
        key = server_key()
        if key is None:
            raise UsageError(
                f"engine.address is {self.address}, but {KEY_VARIABLE} is not set: set it to the key of the server, which "
                "is started like this, with the same variable in its environment (e.g. from `openssl rand -hex 32`): "
                f"{self.start_command()}"
            )
        self._headers = {"Authorization": authorization(key)}
        import aiohttp  # noqa: F401  (imported here, it is not imported beside the trainer's own modules)

    async def launch(self) -> None:
        """Waits for the server. Raises CoreLost when it does not answer; ValueError for a wrong server or key."""
        import aiohttp

        self.configure()
        # Every request under way has a connection, and there may be more of them than files that a process may open.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard := resource.getrlimit(resource.RLIMIT_NOFILE)[1], hard))
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),  # since every request has its own deadline
            connector=aiohttp.TCPConnector(limit=0, force_close=True),  # a kept connection may be closed as we use it
        )
        give_up_at = time.monotonic() + self.config.start_deadline_s
        while True:
            try:
                await asyncio.wait_for(self._require_key_guard(), 30.0)
                info = await asyncio.wait_for(self._request("GET", "/server_info?config_format=json"), 30.0)
                break
            except (BackendCrashed, TimeoutError) as error:
                if self._session.closed:
                    raise BackendCrashed("the connection was ended") from error
                if time.monotonic() > give_up_at:
                    raise BackendCrashed(f"no answer from {self.address} within start_deadline_s: {error}") from error
                await asyncio.sleep(min(RETRY_S, self.config.start_deadline_s / 10))
        self._dead = False
        self.check_server_info(info["vllm_config"])
        if self.transfer != "shm":
            assert self.weight_sender is not None  # `Engine` gives every server the courier of the run
            self.weight_sender.start()
        # An earlier trainer may have died, or lost this server, during a publication. Its requests would go on with
        # half-loaded weights.
        await self.slow_call("abort_requests")
        await self.slow_call("resume_generation")
        self.model_replaced = any(".lora_" not in name for worker in await self.checksums() for name in worker)
        self._poll = asyncio.create_task(self._poll_metrics())
        self.last_heartbeat = time.monotonic()

    def check_server_info(self, info: dict[str, Any]) -> None:
        """Checks and takes what `/server_info` says. Raises ValueError: what differs, and how to start the server."""
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
            "logprobs_mode": "processed_logprobs",  # those under the sampling temperature
            "worker_extension_cls": LOADER,
            "quantization": "fp8" if config.quantization else "none",
            "scheduling_policy": "priority",  # else a canary would wait behind all samples
            "data_parallel_size": 1,  # other ranks would not be told of new weights
            "max_lora_rank": max(has["max_lora_rank"], config.lora_rank or 0),
            "max_model_len": max(has["max_model_len"], config.max_model_len),
        }
        needs |= {name: value for name in ("dtype", "transfer") if (value := getattr(config, name)) != "auto"}
        if needs["transfer"] not in TRANSFERS[1:]:
            needs["transfer"] = resolve_transfer(config)
        if unlike := _diff_facts(has, needs):
            theirs, ours = unlike
            raise UsageError(
                f"engine.address: {self.address} has {theirs}, and this run needs {ours}; start it like this: {self.start_command()}"
            )
        on_cpu = (info.get("device_config") or {}).get("device") == "cpu"
        if transfer == "nccl" and (on_cpu or not torch.cuda.is_available()):
            raise UsageError(
                f"engine.transfer: nccl moves weights between GPUs only, and {self.address if on_cpu else 'this trainer'} has "
                f"none; use engine.transfer=gloo, and start the server like this: {self.start_command()}"
            )
        assert transfer is not None  # else it were unlike what the run needs
        text = model["hf_text_config"] if isinstance(model.get("hf_text_config"), dict) else {}
        # Only the folder's name is compared: its path may differ on another machine.
        facts = {"model": Path(model["model"]).name, "max_model_len": model["max_model_len"], "dtype": has["dtype"]}
        self.require_alike(facts | {name: text[name] for name in MODEL_SIZE_KEYS if name in text})
        self.transfer, self.workers = transfer, parallel.get("world_size") or 1
        self.block = cache["block_size"]
        self.cache_tokens = (cache["num_gpu_blocks"] or 0) * self.block
        self.vocabulary = text.get("vocab_size") or sys.maxsize  # else the server refuses what is too large

    def require_alike(self, facts: dict[str, Any]) -> None:
        """Raises ValueError where the server differs from what it was before, or from the first one of the run."""
        first = self.address if self.address in self.server_info else next(iter(self.server_info), self.address)
        if unlike := _diff_facts(facts, self.server_info.get(first, facts)):
            raise UsageError(
                f"engine.address: {self.address} has {unlike[0]}, but when this run met {first}, that had {unlike[1]}; the "
                f"servers of a run have to be alike: start {self.address} with the model and the flags of {first}, or leave it "
                "out"
            )
        self.server_info[self.address] = facts

    def replaced_model_message(self) -> str:
        return (
            f"{self.address} does not hold the model of its folder any more: a run has published another one there; start it "
            f"again: {self.start_command()}"
        )

    def start_command(self) -> str:
        command = redact_command(*server_command(self._model, self.config))
        return f"torchtune-ext serve --config CONFIG, with the config and the settings of this run; in full: {command}"

    async def _require_key_guard(self) -> None:
        """Raises ValueError when the server answers without a key; CoreLost when it does not answer."""
        import aiohttp

        # This request carries no key, so a guarded server has to refuse it.
        try:
            async with self._session.get(self.address + "/is_paused") as response:
                status = response.status
        except (aiohttp.ClientError, OSError, RuntimeError) as error:  # RuntimeError: `stop` closed the session
            raise BackendCrashed(f"no connection to {self.address}: {_message(error)}") from error
        if status >= 500:
            raise BackendCrashed(f"{self.address} is not ready ({status})")
        if status not in (401, 403):
            raise UsageError(
                f"engine.address: {self.address} asks for no key, so whoever reaches it may replace its weights; "
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
            # The first token has no log-prob. Each other one has a dict with a single entry.
            scores += [next(iter(entry.values()))["logprob"] for entry in (part.get("prompt_logprobs") or ())[1:]]
            for choice in part["choices"]:
                logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
                if request.add(choice["token_ids"], logprobs) and choice["finish_reason"] is None:
                    await self._abort(request)
                reason = choice["finish_reason"] or reason
                spans += [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or ()]
        if reason == "abort" and request.num_kept is None:
            raise BackendCrashed(f"{self.address} ended a request before it was done")
        return request.completion(reason, spans, cached, scores)

    async def _abort(self, request: EngineRequest) -> None:
        path, body = "/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{request.id}"]}
        await call_with_deadline(self, self._request("POST", path, body), self.config.rpc_deadline_s, "abort_requests")

    @property
    def is_dead(self) -> bool:
        return self._dead

    def describe_exit(self) -> str:
        return f"the connection to {self.address} was lost"

    async def rpc(self, method: str, /, **arguments: Any) -> Any:
        verb, path, result = ROUTES.get(method, ("POST", f"/{method}", None))
        answer = await self._request(verb, path, arguments if verb == "POST" else None)
        return answer if result is None else answer[result]

    async def ping(self, deadline_s: float) -> None:
        await super().ping(deadline_s)
        self.last_heartbeat = time.monotonic()

    async def load(self, buffers: Sequence[WeightBuffer], version: int) -> tuple[float, float]:
        only_adapter = all(buffer.adapter is not None for buffer in buffers)
        # An adapter was trained over the model of the folder, and would be applied to another one.
        if self.model_replaced and buffers and only_adapter:
            raise UsageError(f"publish: an adapter, but {self.replaced_model_message()}")
        times = await super().load(buffers, version)
        if buffers:
            self.model_replaced = self.model_replaced and only_adapter
        return times

    async def init_transfer(self, buffers: Sequence[WeightBuffer]) -> None:
        if self.transfer != "shm":
            return
        try:
            await super().init_transfer(buffers)
        except BackendCrashed as error:
            if UNREADABLE not in str(error):
                raise
            raise UsageError(
                f"publish: {self.address} cannot read this process's memory ({error}); the server has to run on this "
                f"machine, as the same user and in the same PID namespace, started like this: {self.start_command()}; on "
                "another machine set engine.transfer=gloo or nccl, here and there"
            ) from error

    async def load_buffer(self, buffer: WeightBuffer, version: int) -> None:
        if self.transfer == "shm":
            return await super().load_buffer(buffer, version)
        # The courier serves one server after the other, each with a deadline. Their sum is for a courier that hangs.
        assert self.weight_sender is not None
        limit_s = (1 + len(self.server_info)) * (self.config.rpc_deadline_s + SENDER_START_S)
        await call_with_deadline(self, self.weight_sender.update_server(self, buffer, version), limit_s, "deliver")

    async def finish_update(self, buffer: WeightBuffer, version: int) -> None:
        await super().finish_update(buffer, version)
        if buffer.adapter is None:
            return
        try:
            # vLLM gives the first adapter that it is told of the id 1, which is `ADAPTER_ID`.
            await self.quick_call("add_lora", lora_name=ADAPTER_NAME, lora_path=ADAPTER_PATH)
        except (BackendCrashed, ValueError) as error:
            if ADAPTER_LOADED_ERROR not in str(error):
                raise

    async def sleep(self, level: int) -> None:
        """Does nothing, since the server has its own GPU."""

    def kill(self) -> None:
        self._dead = True  # the server is not ours to kill

    def log_tail(self) -> str:
        return f"(in the log of the server {self.address})"

    async def stop(self) -> None:
        """Ends the connection and all that waits for it. The server ends its requests when we hang up."""
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
                continue  # the watch or the next request finds out
            try:
                step = self._parse_step_stats(text)
                if step is not None:
                    self.last_heartbeat = time.monotonic()
                    self.report_step(step)
            except Exception as error:  # noqa: BLE001 (the watch ends the run with it)
                self.stats_error = error
                return

    def _parse_step_stats(self, text: str) -> EngineStepStats | None:
        """What has changed since the last look, from vLLM's Prometheus page; None if a busy engine has made no step."""
        now = dict.fromkeys(METRICS.values(), 0.0)
        for line in text.splitlines():
            name = METRICS.get(line.split("{")[0].split(" ")[0])
            if name is not None:
                now[name] += float(line.rsplit(" ", 1)[1])
        last = self._last or now
        busy = now["running"] or now["waiting"] or self.requests
        # None is no sign of life, so that an engine that hangs with requests is noticed.
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
        """Yields one JSON object or text, or the objects of an event stream. Raises CoreLost, ValueError."""
        import aiohttp

        try:
            async with self._session.request(method, self.address + path, json=body, headers=self._headers) as response:
                if response.status in (401, 403):
                    raise UsageError(
                        f"engine.address: {self.address} refuses the key in {KEY_VARIABLE} (it says: "
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
