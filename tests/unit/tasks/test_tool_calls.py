"""Tool calls as the templates of the families write them."""

import json
import time

import pytest

from torchtune_ext.tasks.tool_calls import ToolCall, parse_tool_calls

ADD, NOW = ToolCall("add", {"a": 1, "b": [2, "{;}"]}), ToolCall("now", {})
ADD_TEXT, NOW_TEXT = (json.dumps({"name": call.name, "arguments": call.arguments}) for call in (ADD, NOW))
LLAMA = ADD_TEXT.replace("arguments", "parameters")


@pytest.mark.parametrize(
    "text, calls",
    [
        (f"<tool_call>\n{ADD_TEXT}\n</tool_call>", [ADD]),
        (f"Let me see.\n<tool_call>{ADD_TEXT}</tool_call>\n<tool_call>{NOW_TEXT}</tool_call>", [ADD, NOW]),
        (f"<tool_call>[{ADD_TEXT}, {NOW_TEXT}]</tool_call>", [ADD, NOW]),
        ("<tool_call>[]</tool_call>", []),
        (f"<tool_call>{NOW_TEXT}", [NOW]),
        (f"<think>or <tool_call>{NOW_TEXT}</tool_call></think>\n\n<tool_call>{ADD_TEXT}</tool_call>", [ADD]),
        (f"<think><tool_call>{NOW_TEXT}</tool_call>", []),
        (LLAMA, [ADD]),
        (f"<|python_tag|>{LLAMA}", [ADD]),
        (f"{LLAMA}; {NOW_TEXT}", [ADD, NOW]),
        (f'{{"type": "function", {LLAMA[1:]}', [ADD]),
        ('{"name": "Ann", "age": 7}', []),
        ("The sum is 3.", []),
        ("3", []),
        ("", []),
        (f"{LLAMA} is what I would call", []),
        ("[" * 100_000, []),
    ],
)
def test_calls_are_read(text, calls):
    assert parse_tool_calls(text) == calls


@pytest.mark.parametrize(
    "inside, words",
    [
        ('{"name": "add", "arguments": {"a": 1}', "not JSON: Expecting"),
        ("add(1, 2)", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"name": "add"}', '{"name": "add"} is not a tool call; write {"name": "...", "arguments": {...}}'),
        ('{"name": "add", "arguments": "a=1"}', "is not a tool call"),
        ('{"name": 3, "arguments": {}}', "is not a tool call"),
        ("7", "7 is not a tool call"),
    ],
)
def test_tool_calls_unreadable_text_raises(inside, words):
    with pytest.raises(ValueError, match=".*") as error:
        parse_tool_calls(f"<tool_call>{inside}</tool_call>")
    assert words in str(error.value)


def test_tool_calls_thousand_nested_levels_raise():
    # At some of these depths the call can be read, but not written again.
    for depth in range(900, 1100):
        with pytest.raises(ValueError, match="not JSON|is not a tool call"):
            parse_tool_calls('<tool_call>{"name": "add", "arguments": ' + "[" * depth + "]" * depth + "}")


def test_tool_calls_long_text_takes_linear_time():
    begin = time.process_time()
    assert parse_tool_calls("7;" * (1 << 18)) == parse_tool_calls("<tool_call>[]</tool_call>" * 5000) == []
    assert time.process_time() - begin < 1.0
