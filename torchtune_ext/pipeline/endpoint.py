"""An OpenAI-compatible endpoint on the policy, for agents that own their loop.

POST /v1/chat/completions and GET /v1/models. Each episode has its own API key. Messages are rendered
to token ids here and sent to the engine of the run, so the sampled ids, not their text, are trained
on (`agent_session.py`). The server runs in the engine's asyncio thread.
"""

import asyncio
import hashlib
import json
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading.agents import AgentConfig, AgentPool
from torchtune_ext.pipeline.agent_session import AgentSession, Context, agent_sample
from torchtune_ext.pipeline.groups import Sample
from torchtune_ext.run.errors import DeadlineExceeded, RunFailure, UsageError
from torchtune_ext.sampling.backend import derive_seed
from torchtune_ext.sampling.engine import Engine, EngineFailed, EngineRequest, Priority, SamplingConfig
from torchtune_ext.sampling.types import Completion, WeightsIncomplete
from torchtune_ext.tasks.task import AgentClient, Problem, strip_thinking
from torchtune_ext.tasks.tool_calls import parse_tool_calls

log = logging.getLogger(__name__)

MODEL, UNTRAINED_MODEL = "policy", "policy-untrained"
MAX_BODY_BYTES = 16 << 20
RETRY_GRACE_S = 10.0  # a generation without a client waits this long for the client's retry
START_TIMEOUT_S = 30.0
RETRY_HEADER = "x-stainless-retry-count"  # set by the openai package

# Request keys without an effect on sampling.
IGNORED_KEYS = {
    "user", "store", "metadata", "seed", "parallel_tool_calls", "stream_options", "service_tier", "prompt_cache_key",
    "safety_identifier", "top_logprobs",
}  # fmt: skip
READ_KEYS = {
    "model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "logprobs", "stream",
}  # fmt: skip
# Sampling keys and the values that change nothing.
NEUTRAL_VALUES = {
    "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "n": (1,), "presence_penalty": (0,), "frequency_penalty": (0,),
    "repetition_penalty": (1,), "logit_bias": ({},), "response_format": ({"type": "text"},),
}  # fmt: skip
ROLES = ("system", "developer", "user", "assistant", "tool")


class ApiError(Exception):
    """An error response in OpenAI's JSON shape."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.code, self.headers = status, code, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A validated request."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    max_tokens: int
    stop: list[str]
    logprobs: bool
    stream: bool
    include_usage: bool
    is_trained: bool


@dataclass(eq=False, slots=True)
class Generation:
    """A response in progress. A client's retry attaches to it."""

    task: asyncio.Task
    clients: int = 0


@dataclass(eq=False)
class AgentEpisode:
    """An episode that the endpoint serves: one sample of a group."""

    key: str
    session: AgentSession
    prompt: list[int]  # the problem's messages, rendered
    sampling: SamplingConfig
    first_request: EngineRequest  # for `prompt`, with its seed
    sample_index: int
    priority: Priority
    on_response: Callable[[Completion], None]
    finish_reason: str = "completed"
    closed: bool = False
    tasks: set[asyncio.Task] = field(default_factory=set)  # all unfinished generations
    # Contexts and `max_tokens` of trained requests in flight.
    in_flight: list[tuple[list[int], int]] = field(default_factory=list)
    failure: Exception | None = None  # an error of the engine, which ends the run
    generations: dict[str, Generation] = field(default_factory=dict)  # by digest of the request
    seeds_used: Counter[int] = field(default_factory=Counter)

    @property
    def is_generating(self) -> bool:
        """Whether the agent waits for a response."""
        return bool(self.tasks)

    def seed(self, context: Context) -> int | None:
        """The seed of a request: a function of the problem, the sample and the path."""
        base = self.first_request.seed
        if base is None:
            return None
        depth = self.session.num_turns(context)
        # The path that begins with the problem's own messages has the seeds of an environment.
        root_ids = context.extended.root_ids if context.extended else context.ids
        if root_ids == self.prompt:
            seed = derive_seed(base, depth, 0) if depth else base
        else:
            digest = int.from_bytes(hashlib.sha256(json.dumps(context.ids).encode()).digest()[:6])
            seed = derive_seed(base, digest)
        # Equal requests are different samples.
        self.seeds_used[seed] += 1
        repeats = self.seeds_used[seed] - 1
        return derive_seed(seed, repeats) if repeats else seed


class Endpoint:
    """Serves the policy to the agents of a run.

    Args:
        engine: the started engine.
        tokenizer: renders messages.
        config: the `agent:` section.
        host, port: address; port 0 takes a free one.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: ChatTokenizer,
        config: AgentConfig,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._engine, self._tokenizer, self._config = engine, tokenizer, config
        self._episodes: dict[str, AgentEpisode] = {}
        self._finished: dict[str, None] = {}  # keys of finished episodes, the latest ones
        self._warned: set[str] = set()
        self._socket = socket.create_server((host, port), backlog=2048)
        self.url = f"http://{host}:{self._socket.getsockname()[1]}/v1"
        self._server: Any = None
        self._serving = engine.schedule(self._serve())

    # -- episodes; in the engine's thread --------------------------------------------------------------

    def open(self, *settings: Any) -> AgentEpisode:
        """Opens an episode with a key of its own. `settings` are the fields of `AgentEpisode`."""
        if self._serving.done():
            raise RunFailure("the endpoint of agents has ended") from self._serving.exception()
        episode = AgentEpisode(f"sk-{secrets.token_hex(16)}", AgentSession(self._tokenizer), *settings)
        self._episodes[episode.key] = episode
        return episode

    def finish(self, episode: AgentEpisode) -> None:
        """Ends an episode: its key becomes invalid, and requests in flight are aborted."""
        episode.closed = True
        self._episodes.pop(episode.key, None)
        self._finished[episode.key] = None
        while len(self._finished) > 10_000:
            del self._finished[next(iter(self._finished))]
        for task in list(episode.tasks):
            task.cancel()
        episode.generations.clear()
        episode.session.forget_histories()

    def close(self) -> None:
        """Stops the server."""
        if self._server is None:
            self._serving.cancel()
        else:
            self._server.should_exit = True
        with suppress(Exception):
            self._serving.result(START_TIMEOUT_S)
        self._socket.close()

    # -- server ----------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [
            Route("/v1/chat/completions", self._handle(self._chat), methods=["POST"]),
            Route("/v1/models", self._handle(self._models), methods=["GET"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2
        )
        self._server = uvicorn.Server(config)
        await self._server.serve(sockets=[self._socket])

    def _handle(self, handler):
        from starlette.requests import Request
        from starlette.responses import JSONResponse, Response

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except ApiError as error:
                return JSONResponse(error.body, error.status, error.headers)
            except Exception as error:
                log.exception("endpoint: a request failed")
                return JSONResponse(ApiError(500, "internal_error", str(error)).body, 500)

        return handle

    def _authenticate(self, request: Any) -> AgentEpisode:
        key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if (episode := self._episodes.get(key)) is not None:
            return episode
        if key in self._finished:
            raise ApiError(401, "episode_finished", "the episode of this key has finished")
        raise ApiError(401, "invalid_api_key", "unknown key; expected the api_key of a running episode")

    async def _models(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        self._authenticate(request)
        models = [
            {"id": name, "object": "model", "created": 0, "owned_by": "policy"} for name in (MODEL, UNTRAINED_MODEL)
        ]
        return JSONResponse({"object": "list", "data": models})

    async def _chat(self, request: Any) -> Any:
        from starlette.responses import JSONResponse, StreamingResponse

        episode = self._authenticate(request)
        body = await _read_body(request)
        parsed = await asyncio.to_thread(self._parse, body, episode.sampling)
        if episode.closed:
            raise ApiError(401, "episode_finished", "the episode of this key has finished")
        digest = hashlib.sha256(body).hexdigest()
        generation = episode.generations.get(digest) if _retry_count(request) else None
        # A retry after an error is a new request.
        if generation is None or (generation.task.done() and not _has_result(generation.task)):
            generation = Generation(asyncio.create_task(self._respond(episode, parsed)))
            episode.generations[digest] = generation
            episode.tasks.add(generation.task)
            generation.task.add_done_callback(episode.tasks.discard)
        disconnected = asyncio.create_task(_wait_disconnected(request))
        try:
            answer = await self._attach(generation, disconnected)
        finally:
            disconnected.cancel()
        # The events follow when the response is complete, so that errors have their status.
        if parsed.stream:
            return StreamingResponse(_events(answer, parsed), media_type="text/event-stream")
        return JSONResponse(answer)

    async def _attach(self, generation: Generation, disconnected: asyncio.Task) -> dict[str, Any]:
        """Waits for a generation. Without a client it is aborted, unless the client retries soon."""
        generation.clients += 1
        try:
            await asyncio.wait({generation.task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if not generation.task.done():
                raise ApiError(499, "disconnected", "the client has disconnected")
            if generation.task.cancelled():
                raise ApiError(401, "episode_finished", "the episode of this key has finished")
            return generation.task.result()
        finally:
            generation.clients -= 1
            if not generation.clients and not generation.task.done():

                def abort() -> None:
                    if not generation.clients:
                        generation.task.cancel()

                asyncio.get_running_loop().call_later(RETRY_GRACE_S, abort)

    # -- requests --------------------------------------------------------------------------------------

    def _parse(self, body: bytes, sampling: SamplingConfig) -> ChatRequest:
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, "invalid_json", f"the body is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ApiError(400, "invalid_json", "the body is not a JSON object")
        fields = {key: value for key, value in fields.items() if value is not None}
        if fields.get("model", MODEL) not in (MODEL, UNTRAINED_MODEL):
            raise ApiError(
                404, "model_not_found", f"model={fields['model']!r}: expected {MODEL!r} or {UNTRAINED_MODEL!r}"
            )
        self._check_sampling(fields, sampling)
        messages = fields.get("messages")
        if not isinstance(messages, list) or not messages:
            raise _invalid("messages: expected a list of messages")
        for index, message in enumerate(messages):
            _check_message(index, message)
        tools = fields.get("tools", [])
        if not isinstance(tools, list) or not all(
            isinstance(t, dict) and isinstance(t.get("function"), dict) and isinstance(t["function"].get("name"), str)
            for t in tools
        ):
            raise _invalid('tools: expected a list of {"type": "function", "function": {"name": ..., ...}}')
        choice = fields.get("tool_choice", "auto")
        if choice not in ("auto", "none"):
            self._warn_once(
                "tool_choice", f"tool_choice={choice!r} is not enforced: the policy may answer without a call"
            )
        limits = [fields[key] for key in ("max_tokens", "max_completion_tokens") if key in fields]
        if not all(isinstance(limit, int) and limit >= 1 for limit in limits):
            raise _invalid(f"max_tokens={limits[0]!r}: expected a positive integer")
        stop = fields.get("stop", [])
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
            raise _invalid(f"stop={stop!r}: expected a string or a list of strings")
        options = fields.get("stream_options") or {}
        return ChatRequest(
            messages=[
                message | {"role": "system"} if message["role"] == "developer" else message for message in messages
            ],
            tools=tools if choice != "none" else [],
            max_tokens=min([sampling.max_tokens, *limits]),
            stop=[text for text in stop if text],
            logprobs=bool(fields.get("logprobs")),
            stream=bool(fields.get("stream")),
            include_usage=bool(options.get("include_usage")) if isinstance(options, dict) else False,
            is_trained=fields.get("model", MODEL) == MODEL,
        )

    def _check_sampling(self, fields: dict[str, Any], sampling: SamplingConfig) -> None:
        """Refuses sampling parameters that would make the response off-policy."""
        allowed = NEUTRAL_VALUES | {"temperature": (1, sampling.temperature)}
        for key, value in fields.items():
            if key in IGNORED_KEYS or key in READ_KEYS or (key in allowed and value in allowed[key]):
                continue
            reason = "unknown parameter"
            if key in allowed:
                expected = " or ".join(
                    dict.fromkeys(f"{one:g}" if isinstance(one, float) else str(one) for one in allowed[key])
                )
                reason = f"expected {expected}, as in the run: another value would be off-policy"
            if not self._config.ignore_client_sampling:
                raise ApiError(
                    400, "unsupported_parameter",
                    f"{key}={value!r}: {reason}. Fix: leave it out, or set agent.ignore_client_sampling=true",
                )  # fmt: skip
            self._warn_once(key, f"{key}={value!r} of a client is ignored: {reason}")

    async def _respond(self, episode: AgentEpisode, request: ChatRequest) -> dict[str, Any]:
        """Generates one response and adds it to the episode."""
        session, max_turns = episode.session, self._config.max_turns
        try:
            context = await asyncio.to_thread(session.find_context, request.messages, request.tools)
        except UsageError as error:
            raise _invalid(str(error)) from None
        # Concurrent requests count, too, so that they cannot exceed a limit together. One row must hold
        # all branches of an episode, and `row_tokens` may be as small as `max_model_len`.
        contexts, reserved = [ids for ids, _ in episode.in_flight], sum(tokens for _, tokens in episode.in_flight)
        limit, is_trained = self._engine.config.max_model_len, request.is_trained
        branches = session.packed_size([*contexts, context.ids]) + reserved if is_trained else 0
        used, what = max((len(context.ids), "the context"), (branches, "all branches of the episode"))
        if is_trained and max_turns is not None and len(session.trained) + len(contexts) >= max_turns:
            episode.finish_reason = "max_turns"
            raise ApiError(429, "max_turns", f"the episode has had agent.max_turns={max_turns} responses")
        if used + request.max_tokens > limit:
            if is_trained:
                episode.finish_reason = "context_overflow"
            raise ApiError(
                400, "context_length_exceeded",
                f"{what}: {used} tokens and {request.max_tokens} for the response exceed engine.max_model_len={limit}",
            )  # fmt: skip
        if not is_trained:
            return await self._generate(episode, request, context)
        episode.in_flight.append(reservation := (context.ids, request.max_tokens))
        try:
            return await self._generate(episode, request, context)
        finally:
            episode.in_flight.remove(reservation)

    async def _generate(self, episode: AgentEpisode, request: ChatRequest, context: Context) -> dict[str, Any]:
        session, timeout_s = episode.session, self._config.request_timeout_s
        priority = min(episode.priority, Priority.TURN) if session.responses else episode.priority
        engine_request = EngineRequest(
            context.ids,
            replace(episode.sampling, max_tokens=request.max_tokens),
            episode.seed(context),
            priority,
            episode.first_request.seed_index,
        )
        try:
            async with asyncio.timeout(timeout_s):
                completion = await self._engine.generate(engine_request, affinity_key=episode)
        except UsageError as error:
            raise _invalid(str(error)) from None
        except (EngineFailed, WeightsIncomplete, DeadlineExceeded) as error:
            # The agent may end with any reward, but the run must end without its engine.
            episode.failure = error
            raise ApiError(503, "engine_unavailable", str(error), {"Retry-After": "10"}) from None
        except TimeoutError:
            message = f"no response within agent.request_timeout_s={timeout_s:g}"
            raise ApiError(504, "timeout", message) from None
        response_id = f"chatcmpl-{secrets.token_hex(12)}"
        raw = self._tokenizer.thought_prefix(context.ids) + self._tokenizer.decode(completion.tokens.tolist())
        message, finish_reason = make_message(raw, request, completion)
        entries = await asyncio.to_thread(self._logprob_entries, completion) if request.logprobs else None
        if episode.closed:
            raise ApiError(401, "episode_finished", "the episode of this key has finished")
        if request.is_trained:
            episode.finish_reason = "completed"  # the agent has recovered from a limit
        session.add(response_id, request.messages, request.tools, context, completion, raw, message, request.is_trained)
        episode.on_response(completion)
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}
        if entries is not None:
            choice["logprobs"] = {"content": entries}
        prompt_tokens, completion_tokens = len(context.ids), len(completion.tokens)
        return {
            "id": response_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": MODEL if request.is_trained else UNTRAINED_MODEL,
            "choices": [choice],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
                "prompt_tokens_details": {"cached_tokens": completion.cached_prompt_tokens},
            },
        }

    def _logprob_entries(self, completion: Completion) -> list[dict[str, Any]]:
        entries = []
        for token, logprob in zip(completion.tokens.tolist(), completion.logprobs.tolist(), strict=True):
            text = self._tokenizer.decode_all([token])
            entries.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return entries

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            log.warning("endpoint: %s", message)


async def _events(answer: dict[str, Any], request: ChatRequest) -> AsyncIterator[str]:
    """Yields a response as server-sent events."""
    (choice,) = answer["choices"]
    head = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    message = choice["message"]
    calls = [call | {"index": index} for index, call in enumerate(message.get("tool_calls", ()))]
    deltas = [{"role": "assistant"} | {k: message[k] for k in ("reasoning_content", "content") if message.get(k)}]
    deltas += [{"tool_calls": calls}] if calls else []
    for delta in deltas:
        one = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": choice["logprobs"]}
        yield f"data: {json.dumps(head | {'choices': [one]})}\n\n"
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    yield f"data: {json.dumps(head | {'choices': [last]})}\n\n"
    if request.include_usage:
        yield f"data: {json.dumps(head | {'choices': [], 'usage': answer['usage']})}\n\n"
    yield "data: [DONE]\n\n"


async def run_agent(
    agents: AgentPool,
    engine: Engine,
    tokenizer: ChatTokenizer,
    problem: Problem,
    prompt: list[int],
    sampling: SamplingConfig,
    first_request: EngineRequest,
    sample_index: int,
    priority: Priority,
    on_response: Callable[[Completion], None],
    episodes: dict[int, AgentEpisode],
) -> Sample:
    """Runs the agent of one episode to its end, in the engine's thread.

    Args:
        agents: the agents' processes; the first episode opens their endpoint.
        prompt, sampling, first_request, sample_index, priority, on_response: as in `AgentEpisode`.
        episodes: gets the episode under its sample index, before the agent starts.
    """
    endpoint = agents.endpoint(lambda config: Endpoint(engine, tokenizer, config))
    episode = endpoint.open(prompt, sampling, first_request, sample_index, priority, on_response)
    episodes[sample_index] = episode
    try:
        client = AgentClient(endpoint.url, episode.key)
        failure, outcome = await asyncio.wrap_future(agents.submit(problem, client))
    finally:
        endpoint.finish(episode)
    if episode.failure is not None:
        raise episode.failure
    # An agent that fails at a limit of the run ends with that limit.
    finish_reason = failure if failure == "agent_timeout" or episode.finish_reason == "completed" else ""
    return await asyncio.to_thread(
        agent_sample, episode.session, prompt, finish_reason or episode.finish_reason, outcome
    )


def make_message(raw: str, request: ChatRequest, completion: Completion) -> tuple[dict[str, Any], str]:
    """Returns the message that the agent gets, and its finish reason."""
    content = strip_thinking(raw)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if (thought := raw[: len(raw) - len(content)]).strip():
        message["reasoning_content"] = thought.replace("<think>", "").replace("</think>", "").strip("\n")
    finish_reason = "stop" if completion.finish_reason == "stop" else "length"
    if request.tools:
        try:
            calls = parse_tool_calls(raw)
        except ValueError:
            calls = []  # the agent reads the broken call as text
        if calls:
            message["content"] = content.partition("<tool_call>")[0].strip() or None
            if content.lstrip().startswith("{"):  # Llama's calls are the whole turn
                message["content"] = None
            message["tool_calls"] = [
                {
                    "id": f"call_{secrets.token_hex(8)}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for call in calls
            ]
            finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
    if message["content"] and request.stop:
        cuts = [at for text in request.stop if (at := message["content"].find(text)) >= 0]
        if cuts:
            message["content"], finish_reason = message["content"][: min(cuts)], "stop"
    return message, finish_reason


def _check_message(index: int, message: Any) -> None:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, dict) else message
        raise _invalid(f"messages[{index}].role={role!r}: expected {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else part
                raise _invalid(f"messages[{index}].content: part {kind!r:.40}; the policy reads text only")
    elif not isinstance(content, str) and not (content is None and message["role"] == "assistant"):
        raise _invalid(f"messages[{index}].content={content!r:.40}: expected a text or a list of text parts")
    for call in message.get("tool_calls") or ():
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict) or "name" not in call["function"]:
            raise _invalid(f"messages[{index}].tool_calls: expected {{'function': {{'name': ..., 'arguments': ...}}}}")


def _invalid(message: str) -> ApiError:
    return ApiError(400, "invalid_request", message)


def _has_result(task: asyncio.Task) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _retry_count(request: Any) -> int:
    value = request.headers.get(RETRY_HEADER, "0")
    return int(value) if value.isdigit() else 0


async def _read_body(request: Any) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, "body_too_large", f"the body exceeds {MAX_BODY_BYTES >> 20} MB")
    return bytes(body)


async def _wait_disconnected(request: Any) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
