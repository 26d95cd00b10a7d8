"""Parses the tool calls in a sampled turn.

family                  format of a call
Qwen2.5, Qwen3, Hermes  <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, repeated
SmolLM2                 <tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>, one list
Llama 3.1, Llama 3.2    {"name": "add", "parameters": {"a": 1}}, the whole turn, separated by "; "
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from torchtune_ext.run.errors import UsageError
from torchtune_ext.tasks.task import strip_thinking

# A model may end its turn without the closing mark.
_CALL_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_SEPARATOR = re.compile(r"[; \n\t]*")
_PYTHON_TAG = "<|python_tag|>"
_DECODER = json.JSONDecoder()


# Calls are executed and never rendered again: the policy is trained on the ids that it sampled.
@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call."""

    name: str
    arguments: dict[str, Any]


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Returns the calls in the text of a turn.

    Raises:
        UsageError: the text between the marks of a call is invalid. The message is for the policy.
    """
    # Calls in a thought are ignored.
    text = strip_thinking(text)
    if marked := _CALL_BLOCK.findall(text):
        return [_parse_call(value) for piece in marked for value in _json_values(piece)]
    try:
        return [_parse_call(value) for value in _json_values(text.strip().removeprefix(_PYTHON_TAG))]
    except ValueError:
        # A text without marks that is not a call is an answer.
        return []


def _json_values(text: str) -> list[Any]:
    """Returns the JSON values of a text: one value, several values, or the members of a list."""
    values, text, end = [], text.strip(), 0
    while end < len(text):
        try:
            value, end = _DECODER.raw_decode(text, end)
        # The decoder raises RecursionError for many open brackets.
        except (ValueError, RecursionError) as error:
            raise UsageError(f"the tool call is not JSON: {error}") from None
        values += value if isinstance(value, list) else [value]
        between = _SEPARATOR.match(text, end)
        assert between is not None  # the pattern also matches an empty text
        end = between.end()
    return values


def _parse_call(value: Any) -> ToolCall:
    arguments = value.get("arguments", value.get("parameters")) if isinstance(value, dict) else None
    if not isinstance(arguments, dict) or not isinstance(value.get("name"), str):
        try:
            shown = json.dumps(value)
        except RecursionError:
            shown = "a value of a thousand levels"
        raise UsageError(f'{shown:.80} is not a tool call; write {{"name": "...", "arguments": {{...}}}}')
    return ToolCall(value["name"], arguments)
