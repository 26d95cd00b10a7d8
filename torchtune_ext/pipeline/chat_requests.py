"""Requests and responses of the chat completions API: parsing, checks, errors, and messages from sampled text."""

import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchtune_ext.sampling.types import Completion, SamplingConfig
from torchtune_ext.tasks.task import strip_thinking
from torchtune_ext.tasks.tool_calls import parse_tool_calls

MODEL, UNTRAINED_MODEL = "policy", "policy-untrained"

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


def parse_request(
    body: bytes, sampling: SamplingConfig, ignores_sampling: bool, warn: Callable[[str, str], None]
) -> ChatRequest:
    """Returns the request in the body.

    Args:
        sampling: the sampling parameters of the run.
        ignores_sampling: ignore other sampling parameters in place of refusing them.
        warn: gets a key of the request and a warning about it.

    Raises:
        ApiError: the request is invalid.
    """
    try:
        fields = json.loads(body)
        json.dumps(fields)  # deep values would fail later
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "invalid_json", f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "invalid_json", "the body is not a JSON object")
    fields = {key: value for key, value in fields.items() if value is not None}
    if fields.get("model", MODEL) not in (MODEL, UNTRAINED_MODEL):
        message = f"model={fields['model']!r:.80}: expected {MODEL!r} or {UNTRAINED_MODEL!r}"
        raise ApiError(404, "model_not_found", message)
    _check_sampling(fields, sampling, ignores_sampling, warn)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid_request("messages: expected a list of messages")
    for index, message in enumerate(messages):
        _check_message(index, message)
    tools = fields.get("tools", [])
    if not isinstance(tools, list) or not all(
        isinstance(t, dict) and isinstance(t.get("function"), dict) and isinstance(t["function"].get("name"), str)
        for t in tools
    ):
        raise invalid_request('tools: expected a list of {"type": "function", "function": {"name": ..., ...}}')
    choice = fields.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        warn("tool_choice", f"tool_choice={choice!r:.80} is not enforced: the policy may answer without a call")
    limits = [fields[key] for key in ("max_tokens", "max_completion_tokens") if key in fields]
    if wrong := [limit for limit in limits if type(limit) is not int or limit < 1]:
        raise invalid_request(f"max_tokens={wrong[0]!r:.80}: expected a positive integer")
    stop = fields.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
        raise invalid_request(f"stop={stop!r:.80}: expected a string or a list of strings")
    options = fields.get("stream_options") or {}
    return ChatRequest(
        messages=[message | {"role": "system"} if message["role"] == "developer" else message for message in messages],
        tools=tools if choice != "none" else [],
        max_tokens=min([sampling.max_tokens, *limits]),
        stop=[text for text in stop if text],
        logprobs=bool(fields.get("logprobs")),
        stream=bool(fields.get("stream")),
        include_usage=bool(options.get("include_usage")) if isinstance(options, dict) else False,
        is_trained=fields.get("model", MODEL) == MODEL,
    )


def _check_sampling(
    fields: dict[str, Any], sampling: SamplingConfig, ignores_sampling: bool, warn: Callable[[str, str], None]
) -> None:
    """Refuses sampling parameters that would make the response off-policy."""
    allowed = NEUTRAL_VALUES | {
        "temperature": (1, sampling.temperature), "top_p": (1, sampling.top_p), "top_k": (0, -1, sampling.top_k),
    }  # fmt: skip
    for key, value in fields.items():
        # An agent sends the temperature of training also in a greedy evaluation.
        if key == "temperature" and sampling.temperature == 0:
            continue
        if key in IGNORED_KEYS or key in READ_KEYS or (key in allowed and value in allowed[key]):
            continue
        reason = "unknown parameter"
        if key in allowed:
            expected = " or ".join(
                dict.fromkeys(f"{one:g}" if isinstance(one, float) else str(one) for one in allowed[key])
            )
            reason = f"expected {expected}, as in the run: another value would be off-policy"
        given = f"{key:.80}={value!r:.80}"
        if not ignores_sampling:
            raise ApiError(
                400, "unsupported_parameter",
                f"{given}: {reason}. Fix: leave it out, or set agent.ignore_client_sampling=true",
            )  # fmt: skip
        warn(key, f"{given} of a client is ignored: {reason}")


async def response_events(answer: dict[str, Any], request: ChatRequest) -> AsyncIterator[str]:
    """Yields a response as server-sent events."""
    (choice,) = answer["choices"]
    head = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    message = choice["message"]
    calls = [call | {"index": index} for index, call in enumerate(message.get("tool_calls", ()))]
    deltas = [{"role": "assistant"} | {k: message[k] for k in ("reasoning_content", "content") if message.get(k)}]
    deltas += [{"tool_calls": calls}] if calls else []
    for number, delta in enumerate(deltas):
        logprobs = None if number else choice["logprobs"]  # clients concatenate them over the events
        one = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": logprobs}
        yield f"data: {json.dumps(head | {'choices': [one]})}\n\n"
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    yield f"data: {json.dumps(head | {'choices': [last]})}\n\n"
    if request.include_usage:
        yield f"data: {json.dumps(head | {'choices': [], 'usage': answer['usage']})}\n\n"
    yield "data: [DONE]\n\n"


def make_message(raw: str, request: ChatRequest, completion: Completion) -> tuple[dict[str, Any], str]:
    """Returns the message that the agent gets, and its finish reason."""
    content = strip_thinking(raw)
    thought = raw[: len(raw) - len(content)]
    # Nothing follows a stop, no tool call either.
    cuts = [at for text in request.stop if (at := content.find(text)) >= 0]
    content = content[: min(cuts, default=len(content))]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thought.strip():
        message["reasoning_content"] = thought.replace("<think>", "").replace("</think>", "").strip("\n")
    finish_reason = "stop" if cuts or completion.finish_reason == "stop" else "length"
    if request.tools:
        try:
            calls = parse_tool_calls(content)
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
    return message, finish_reason


def _check_message(index: int, message: Any) -> None:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, dict) else message
        raise invalid_request(f"messages[{index}].role={role!r:.80}: expected {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else part
                raise invalid_request(f"messages[{index}].content: part {kind!r:.40}; the policy reads text only")
    elif not isinstance(content, str) and not (content is None and message["role"] == "assistant"):
        raise invalid_request(f"messages[{index}].content={content!r:.40}: expected a text or a list of text parts")
    calls = message.get("tool_calls") or []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid_request(
                f"messages[{index}].tool_calls: expected {{'function': {{'name': ..., 'arguments': ...}}}}"
            )


def invalid_request(message: str) -> ApiError:
    """Returns the error 400 with this message."""
    return ApiError(400, "invalid_request", message)
