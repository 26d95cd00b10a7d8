"""Extract a candidate's lines from the preprocessor's output, and parse them.

Macros are expanded, and headers are left out. Without line markers, all text is the candidate's.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torchtune_ext.run.errors import UsageError

try:
    import tree_sitter_c
    from tree_sitter import Language, Node, Parser, Query, QueryCursor, Tree, TreeCursor
except ImportError as error:
    raise UsageError(
        "tree-sitter not found, which parses the programs. Fix: pip install 'torchtune-ext[bench]'"
    ) from error

C_LANGUAGE = Language(tree_sitter_c.language())
MAX_TEXT_CHARS = 400_000  # characters of a preprocessed candidate; the parser needs up to 400 bytes per character
_DIGRAPHS = {"<:": "[", ":>": "]", "<%": "{", "%>": "}", "%:": "#"}
_LINE_MARKER = re.compile(r'# (\d+) "((?:[^"\\]|\\.)*)"((?: \d)*)')
_CHUNK_BYTES = 1 << 14  # bytes per read of the parser
_DERIVED_DECLARATORS = ("function_declarator", "pointer_declarator", "array_declarator")


@dataclass(frozen=True, slots=True)
class Pragma:
    """A pragma line of the candidate."""

    line: int  # line number in the source
    text: str
    next_row: int  # the following row of `CandidateText.lines`


@dataclass(frozen=True, slots=True)
class CandidateText:
    """The lines of the candidate itself."""

    lines: Sequence[bytes]  # without directives and line markers
    line_numbers: Sequence[int]  # source line of each of `lines`
    includes: Sequence[tuple[int, str, bool]]  # (line, path of the file, whether it is a system header)
    pragmas: Sequence[Pragma]


def candidate_text(preprocessed: str) -> CandidateText:
    """Returns the candidate's lines of `gcc -E` output, by its line markers (# 7 "candidate.c")."""
    lines, numbers, includes, entered, pragmas = [], [], [], [], []
    candidate = current = None
    number = 0 if _LINE_MARKER.match(preprocessed) else 1
    for text in preprocessed.split("\n"):
        if match := _LINE_MARKER.fullmatch(text):
            flags = match[3].split()
            candidate = candidate or match[2]
            number = int(match[1])
            if current == candidate and "1" in flags and not match[2].startswith("<"):
                entered.append((match[2], "3" in flags))
            elif match[2] == candidate and "2" in flags:
                # Only the return marker gives the line of an #include: the preceding line.
                includes += [(number - 1, *each) for each in entered]
                entered = []
            current = match[2]
            continue
        if current == candidate:
            if text.lstrip().startswith("#"):
                pragmas.append(Pragma(number, text, len(lines)))
            else:
                for written, meant in _DIGRAPHS.items():
                    text = text.replace(written, meant)
                lines.append(text.replace("\0", " ").encode("utf-8", "replace"))
                numbers.append(number)
        number += 1
    includes += [(number, *each) for each in entered]
    return CandidateText(lines, numbers, includes, pragmas)


def parse(content: bytes, is_timed_out: Callable[[], bool]) -> Tree:
    """Parses C.

    Args:
        content: the source.
        is_timed_out: the parser polls it and stops once it returns True.

    Raises:
        ValueError: `is_timed_out` returned True.
    """
    return Parser(C_LANGUAGE).parse(
        lambda offset, _: content[offset : offset + _CHUNK_BYTES], progress_callback=lambda *_: is_timed_out()
    )


def query_matches(pattern: str, node: Node) -> Iterator[dict[str, list[Node]]]:
    """Yields {capture name (@name): nodes} for each match of a query below a node."""
    for _, nodes in QueryCursor(_query(pattern)).matches(node):
        yield nodes


@lru_cache
def _query(pattern: str) -> Query:
    return Query(C_LANGUAGE, pattern)


def walk(cursor: TreeCursor) -> Iterator[tuple[Node, bool]]:
    """Yields (node, leaving): each node once before its children and once after them."""
    while True:
        yield _current_node(cursor), False
        if cursor.goto_first_child():
            continue
        yield _current_node(cursor), True
        while not cursor.goto_next_sibling():
            if not cursor.goto_parent():
                return
            yield _current_node(cursor), True


def _current_node(cursor: TreeCursor) -> Node:
    assert cursor.node is not None
    return cursor.node


def declared_names(node: Node) -> dict[str, bool]:
    """Returns {declared name: whether it is a function (not a function pointer)}."""
    names = {}
    for outermost in node.children_by_field_name("declarator"):
        chain = list(declarators(outermost))
        if chain[-1].type == "identifier":
            # The declarator nearest to the name decides: int *f(void), not int (*f)(void).
            kinds = [each.type for each in chain if each.type in _DERIVED_DECLARATORS]
            names[node_text(chain[-1])] = kinds[-1:] == ["function_declarator"]
    return names


def declarators(node: Node | None) -> Iterator[Node]:
    """Yields a declarator and its nested declarators, down to the name: (*p)[4], (*p), *p, p."""
    while node is not None:
        yield node
        named = (each for each in node.named_children if each.type.endswith(("declarator", "identifier")))
        node = node.child_by_field_name("declarator") or next(named, None)


def node_text(node: Node | None) -> str:
    """Returns the text of a node, or "" for None."""
    return "" if node is None else (node.text or b"").decode("utf-8", "replace")
