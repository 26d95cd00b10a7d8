"""An OpenAI-compatible endpoint on the policy, for agents that own their loop.

POST /v1/chat/completions and GET /v1/models. Each episode has its own API key. Messages are rendered
to token ids here and sent to the engine of the run, so the sampled ids, not their text, are trained
on (`agent_session.py`). The server runs in the engine's asyncio thread.
"""

import asyncio
import hashlib
import json
import logging
import os
import resource
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading.agents import AgentConfig, AgentPool
from torchtune_ext.pipeline.agent_session import AgentSession, Context, agent_sample
from torchtune_ext.pipeline.chat_requests import (
    MODEL,
    UNTRAINED_MODEL,
    ApiError,
    ChatRequest,
    invalid_request,
    make_message,
    parse_request,
    response_events,
)
from torchtune_ext.pipeline.groups import Sample
from torchtune_ext.run.errors import DeadlineExceeded, RunFailure, UsageError
from torchtune_ext.sampling.backend import derive_seed, mark_retrieved
from torchtune_ext.sampling.engine import Engine, EngineFailed, EngineRequest, Priority, SamplingConfig
from torchtune_ext.sampling.types import Completion, WeightsIncomplete
from torchtune_ext.tasks.task import AgentClient, Problem

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BODY_BYTES = 16 << 20
RETRY_GRACE_S = 10.0  # a generation without a client waits this long for the client's retry
START_TIMEOUT_S = 30.0
RETRY_HEADER = "x-stainless-retry-count"  # set by the openai package
NO_RETRY = {"x-should-retry": "false"}  # read by the openai package
MAX_CONNECTIONS = 4096
FIRST_REQUEST_TIMEOUT_S = 30.0  # a connection without a request is closed after this many seconds
KEEP_ALIVE_S = 10  # above the 5 s of httpx, so that a client does not reuse a connection that closes
THREAD_BYTES = 16 << 10  # smaller inputs are processed in less time than a change of threads takes
TOKEN_BYTES = 64  # of input that takes as long as to decode a token
ACCEPT_PAUSE_S = 0.2  # before the next attempt if no file descriptor is left


@dataclass(eq=False, slots=True)
class Generation:
    """A response in progress. A client's retry attaches to it."""

    task: asyncio.Task[dict[str, Any]]
    clients: int = 0
    delivered: bool = False  # to a client; the others are not trained on
    abort: asyncio.TimerHandle | None = None  # waits for a retry

    @property
    def has_failed(self) -> bool:
        task = self.task
        return bool(task.cancelling()) or (task.done() and (task.cancelled() or task.exception() is not None))


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
    is_trained: bool = True  # False: requests for the trained model are not stored either
    tasks: set[asyncio.Task] = field(default_factory=set)  # all unfinished generations
    # Contexts and `max_tokens` of trained requests in flight.
    in_flight: list[tuple[list[int], int]] = field(default_factory=list)
    # Its result is an error of the engine, which ends the run.
    failure: Future[Exception] = field(default_factory=Future)
    generations: dict[str, list[Generation]] = field(default_factory=dict)  # by digest of the request
    seeds_used: Counter[int] = field(default_factory=Counter)

    @property
    def is_generating(self) -> bool:
        """Whether the agent waits for a response."""
        return bool(self.tasks)

    def retried(self, digest: str) -> Generation | None:
        """Returns the generation that a client's retry attaches to; None: it needs a new one."""
        made = self.generations.get(digest, [])
        if waiting := [each for each in made if not each.has_failed and not each.delivered]:
            return min(waiting, key=lambda each: each.clients)
        # Each failed one had a client of its own, which now retries.
        if failed := [each for each in made if each.has_failed]:
            made.remove(failed[0])
            return None
        return made[-1] if made else None

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
        host, port: an address in place of `agent.host`; port 0 takes a free one.

    Raises:
        UsageError: this machine does not have the address `agent.host`.
        OSError: `host` and `port` are given, and not free.
    """

    def __init__(
        self, engine: Engine, tokenizer: ChatTokenizer, config: AgentConfig, host: str | None = None, port: int = 0
    ) -> None:
        self._engine, self._tokenizer, self._config = engine, tokenizer, config
        self._episodes: dict[str, AgentEpisode] = {}
        self._finished: dict[str, None] = {}  # keys of finished episodes, the latest ones
        self._warned: set[str] = set()
        self._has_checked_tools = False
        self._socket = socket.create_server((host, port), backlog=2048) if host else _listen(config.host)
        self._socket.setblocking(False)
        self.url = f"http://{host or config.host}:{self._socket.getsockname()[1]}/v1"
        self._server: Any = None
        self._free_connections = asyncio.Semaphore(max_connections())
        self._serving = engine.schedule(self._serve())
        self._serving.add_done_callback(self._fail_episodes)

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
        made = [generation for each in episode.generations.values() for generation in each]
        episode.session.finish(
            {
                each.task.result()["id"]
                for each in made
                if each.task.done() and not each.has_failed and not each.delivered
            }
        )
        episode.generations.clear()

    def close(self) -> None:
        """Stops the server."""
        if self._server is None:
            self._serving.cancel()
        else:
            self._server.should_exit = True
        with suppress(Exception):
            self._serving.result(START_TIMEOUT_S)
        self._socket.close()

    def _fail_episodes(self, serving: Future) -> None:
        """Ends the episodes of a server that has failed, whose agents would wait."""
        if serving.cancelled() or (error := serving.exception()) is None:
            return
        failure = RunFailure(f"the endpoint of agents has ended: {error!r}")
        for episode in list(self._episodes.values()):
            if not episode.failure.done():
                episode.failure.set_result(failure)

    # -- server ----------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        import uvicorn
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        async def not_found(request: Any, error: Exception) -> Any:
            message = f"{request.method} {request.url.path:.80}: expected POST /v1/chat/completions or GET /v1/models"
            return JSONResponse(ApiError(404, "not_found", message).body, 404)

        routes = [
            Route("/v1/chat/completions", self._handle(self._chat), methods=["POST"]),
            Route("/v1/models", self._handle(self._models), methods=["GET"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes, exception_handlers={404: not_found, 405: not_found}),
            log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2,
            timeout_keep_alive=KEEP_ALIVE_S, ws="none",
        )  # fmt: skip
        config.load()
        self._server = uvicorn.Server(config)
        async with asyncio.TaskGroup() as group:
            accepting = group.create_task(self._accept(config, self._server.server_state))
            await self._server.serve(sockets=[])
            accepting.cancel()

    async def _accept(self, config: Any, server_state: Any) -> None:
        """Accepts connections up to a limit. Further ones wait in the backlog of the socket.

        The run needs descriptors for its own files, too. asyncio's server accepts without a limit,
        and uvicorn's `limit_concurrency` counts connections that have a descriptor already.
        """
        from uvicorn.protocols.http.h11_impl import H11Protocol

        free, loop = self._free_connections, asyncio.get_running_loop()

        class Connection(H11Protocol):
            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                loop.call_later(FIRST_REQUEST_TIMEOUT_S, self.close_if_idle, None)

            def close_if_idle(self, last: Any) -> None:
                # uvicorn's own timer ends with the first bytes of a request, even of one that stalls.
                cycle = self.cycle
                if cycle is last and (cycle is None or cycle.response_complete or cycle.more_body):
                    self.transport.close()
                elif not self.transport.is_closing():
                    loop.call_later(FIRST_REQUEST_TIMEOUT_S, self.close_if_idle, cycle)

            def connection_lost(self, exc: Exception | None) -> None:
                super().connection_lost(exc)
                free.release()

        while True:
            if free.locked():
                self._warn_once(
                    "connections",
                    "all connections are in use; others wait. Fix: raise the limit of open files, ulimit -n",
                )
            await free.acquire()
            try:
                client, _ = await loop.sock_accept(self._socket)
                await loop.connect_accepted_socket(lambda: Connection(config, server_state, {}), client)
            except OSError as error:
                # No descriptor is left, or the client has gone.
                free.release()
                self._warn_once("accept", f"a connection was not accepted: {error}")
                await asyncio.sleep(ACCEPT_PAUSE_S)

    def _handle(self, handler):
        from starlette.requests import ClientDisconnect, Request
        from starlette.responses import JSONResponse, Response

        async def handle(request: Request) -> Response:
            try:
                response = await handler(request)
            except ApiError as error:
                response = JSONResponse(error.body, error.status, error.headers)
            except ClientDisconnect:
                response = Response(status_code=499)
            except Exception as error:
                log.exception("endpoint: a request failed")
                response = JSONResponse(ApiError(500, "internal_error", str(error)).body, 500)
            # An idle connection must not keep others waiting.
            if self._free_connections.locked():
                response.headers["connection"] = "close"
            return response

        return handle

    def _authenticate(self, request: Any) -> AgentEpisode:
        key = request.headers.get("authorization", "")
        key = (key[7:] if key[:7].lower() == "bearer " else key).strip()
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
        parsed = await _run_off_loop(
            len(body), parse_request, body, episode.sampling, self._config.ignore_client_sampling, self._warn_once
        )
        if episode.closed:
            raise ApiError(401, "episode_finished", "the episode of this key has finished")
        parsed = replace(parsed, is_trained=parsed.is_trained and episode.is_trained)
        digest = hashlib.sha256(body).hexdigest()
        generation = episode.retried(digest) if request.headers.get(RETRY_HEADER, "0") != "0" else None
        if generation is None:
            generation = Generation(asyncio.create_task(self._respond(episode, parsed, len(body))))
            episode.generations.setdefault(digest, []).append(generation)
            episode.tasks.add(generation.task)
            generation.task.add_done_callback(episode.tasks.discard)
            generation.task.add_done_callback(mark_retrieved)  # no client may be left for its error
        disconnected = asyncio.create_task(_wait_disconnected(request))
        try:
            answer = await self._attach(generation, disconnected)
        finally:
            disconnected.cancel()
        # The events follow when the response is complete, so that errors have their status.
        if parsed.stream:
            return StreamingResponse(response_events(answer, parsed), media_type="text/event-stream")
        return JSONResponse(answer)

    async def _attach(self, generation: Generation, disconnected: asyncio.Task) -> dict[str, Any]:
        """Waits for a generation. Without a client it is aborted, unless the client retries soon."""
        generation.clients += 1
        if generation.abort is not None:
            generation.abort.cancel()
        try:
            await asyncio.wait({generation.task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if not generation.task.done():
                raise ApiError(499, "disconnected", "the client has disconnected")
            if generation.task.cancelled():
                raise ApiError(401, "episode_finished", "the episode of this key has finished")
            answer = generation.task.result()
            generation.delivered |= not disconnected.done()
            return answer
        finally:
            generation.clients -= 1
            if not generation.clients and not generation.task.done():
                generation.abort = asyncio.get_running_loop().call_later(RETRY_GRACE_S, generation.task.cancel)

    async def _respond(self, episode: AgentEpisode, request: ChatRequest, size: int) -> dict[str, Any]:
        """Generates one response to a request of `size` bytes and adds it to the episode."""
        session, max_turns = episode.session, self._config.max_turns
        try:
            context = await _run_off_loop(size, session.find_context, request.messages, request.tools)
            if request.tools and context.extended is None and not self._has_checked_tools:
                self._has_checked_tools = True
                await asyncio.to_thread(self._check_tools, context)
        except UsageError as error:
            raise invalid_request(str(error)) from None
        # Concurrent requests count, too, so that they cannot exceed a limit together. One row must hold
        # all branches of an episode, and `row_tokens` may be as small as `max_model_len`.
        contexts, reserved = [ids for ids, _ in episode.in_flight], sum(tokens for _, tokens in episode.in_flight)
        limit, is_trained = self._engine.config.max_model_len, request.is_trained
        branches = session.packed_size([*contexts, context.ids]) + reserved if is_trained else 0
        used, what = max((len(context.ids), "the context"), (branches, "all branches of the episode"))
        if is_trained and max_turns is not None and len(session.trained) + len(contexts) >= max_turns:
            episode.finish_reason = "max_turns"
            raise ApiError(429, "max_turns", f"the episode has had agent.max_turns={max_turns} responses", NO_RETRY)
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
            raise invalid_request(str(error)) from None
        except (EngineFailed, WeightsIncomplete, DeadlineExceeded) as error:
            # The agent may end with any reward, but the run must end without its engine.
            if not episode.failure.done():
                episode.failure.set_result(error)
            raise ApiError(503, "engine_unavailable", str(error), {"Retry-After": "10"}) from None
        except TimeoutError:
            message = f"no response within agent.request_timeout_s={timeout_s:g}"
            raise ApiError(504, "timeout", message) from None
        response_id = f"chatcmpl-{secrets.token_hex(12)}"
        raw, message, finish_reason, logprobs = await _run_off_loop(
            len(completion.tokens) * TOKEN_BYTES, self._read, context, request, completion
        )
        if episode.closed:
            raise ApiError(401, "episode_finished", "the episode of this key has finished")
        if request.is_trained:
            episode.finish_reason = "completed"  # the agent has recovered from a limit
        session.add(response_id, request.messages, request.tools, context, completion, raw, message, request.is_trained)
        episode.on_response(completion)
        choice = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": logprobs}
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

    def _read(
        self, context: Context, request: ChatRequest, completion: Completion
    ) -> tuple[str, dict[str, Any], str, dict[str, Any] | None]:
        """Returns the text, the message, the finish reason and the log-probs of a response."""
        ids = completion.tokens.tolist()
        raw = self._tokenizer.thought_prefix(context.ids) + self._tokenizer.decode(ids)
        message, finish_reason = make_message(raw, request, completion)
        entries = []
        for token, logprob in zip(ids, completion.logprobs.tolist(), strict=True) if request.logprobs else ():
            text = self._tokenizer.decode_all([token])
            entries.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return raw, message, finish_reason, {"content": entries} if request.logprobs else None

    def _check_tools(self, context: Context) -> None:
        if context.ids == self._tokenizer.prompt_ids(context.new_messages):
            self._warn_once(
                "tools",
                "the chat template does not render tools, so the policy does not see them. Fix: set tokenizer.template to a "
                "template that does (docs/how_to/agents.md)",
            )

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            log.warning("endpoint: %s", message)


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
        agent = asyncio.wrap_future(agents.submit(problem, AgentClient(endpoint.url, episode.key)))
        failed = asyncio.wrap_future(episode.failure)
        try:
            await asyncio.wait({agent, failed}, return_when=asyncio.FIRST_COMPLETED)
            if episode.failure.done():
                raise episode.failure.result()
            failure, outcome = agent.result()
        finally:
            failed.cancel()
            agent.cancel()  # without an effect on a finished agent; one in the queue is not started
    finally:
        endpoint.finish(episode)
    # An agent that fails at a limit of the run ends with that limit.
    finish_reason = failure if failure == "agent_timeout" or episode.finish_reason == "completed" else ""
    return await asyncio.to_thread(
        agent_sample, episode.session, prompt, finish_reason or episode.finish_reason, outcome, sampling.max_tokens
    )


def max_connections() -> int:
    """Returns a quarter of the file descriptors that this process may still open, at most `MAX_CONNECTIONS`."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    # `task` and `evaluation.task` may each have an endpoint.
    return min(max((limit - len(os.listdir("/proc/self/fd"))) // 4, 2), MAX_CONNECTIONS)


def _listen(host: str) -> socket.socket:
    try:
        # Agents connect to it, so it has to be one address, not all of the machine.
        if host in ("", "0.0.0.0"):
            raise OSError("it is not one address")
        return socket.create_server((host, 0), backlog=2048)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"agent.host={host!r}: {reason}; expected an IPv4 address or a name of this machine. "
            "Fix: choose one that `ip address` lists, or 127.0.0.1 for agents on this machine"
        ) from None


async def _run_off_loop(size: int, function: Callable[..., T], *args: Any) -> T:
    """Calls a function, in a thread if its input has many bytes: the engine's messages use this loop, too."""
    return function(*args) if size < THREAD_BYTES else await asyncio.to_thread(function, *args)


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
