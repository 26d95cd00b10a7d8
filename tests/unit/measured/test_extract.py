"""The program in a model's answer."""

import time

import pytest

from torchtune_ext.measured.check import extract_code

PROGRAM = "void f(void) {\n    return;\n}\n"


def block(language: str = "c", program: str = PROGRAM, fence: str = "```") -> str:
    return f"{fence}{language}\n{program}{fence}\n"


@pytest.mark.parametrize("language", ["c", "C", "cpp", "c++", "", " c", "c title=dgemm.c"])
def test_block_fenced_as_c(language):
    assert extract_code("Here it is:\n\n" + block(language) + "\nIt blocks for the cache.") == PROGRAM


@pytest.mark.parametrize("language", ["python", "text", "fortran", "bash", "cuda"])
def test_extract_block_in_other_language_is_rejected(language):
    assert extract_code(block(language)) is None
    assert extract_code(block() + block(language)) == PROGRAM


def test_last_closed_block_counts():
    last = PROGRAM.replace("f", "g")
    assert extract_code(block() + "Better:\n" + block(program=last)) == last
    assert extract_code(block() + "Better still:\n```c\nvoid cut_off(") == PROGRAM


@pytest.mark.parametrize(
    "text", ["", "void f(void) {}", "```c\nvoid f(void) {}", "`c` ```void f(void) {}```", "```c\n\n```\n"]
)
def test_answer_without_a_program(text):
    assert extract_code(text) is None


def test_thought_is_not_the_answer():
    assert extract_code("<think>\nPerhaps\n" + block() + "is too slow.\n</think>\nI do not know.") is None
    assert extract_code("<think>\nPerhaps\n" + block("", "draft\n") + "</think>\n" + block()) == PROGRAM


@pytest.mark.parametrize("thought", ["```c\nvoid draft(", "```\nsome text", "````", "``` and then ```", "~~~\nvoid"])
def test_extract_ignores_earlier_unclosed_fence(thought):
    assert extract_code(f"Let me think.\n{thought}\nNo. The answer is\n{block()}") == PROGRAM


def test_fences_may_be_indented_or_longer_or_tildes():
    assert extract_code("1. So:\n    ```c\n    int x;\n    ```\n") == "    int x;\n"
    assert extract_code(block(fence="~~~")) == PROGRAM
    assert extract_code("````c\n// ```\nint x;\n````\n") == "// ```\nint x;\n"


def test_lines_of_windows():
    assert extract_code("```c\r\nint x;\r\n```\r\n") == "int x;\n"


def test_extract_keeps_characters_python_treats_as_newlines():
    assert extract_code("```c\n// \x0c\u2028\n```\n") == "// \x0c\u2028\n"


def test_no_line_makes_the_pattern_slow():
    start = time.monotonic()
    for line in (
        "```" + "a" * 200_000 + "`",
        "`" * 200_000,
        " " * 200_000 + "`",
        "```" + " " * 200_000 + "`",
        "```a" * 50_000,
    ):
        assert extract_code(line) is None
    assert time.monotonic() - start < 10
