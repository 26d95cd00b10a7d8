"""The lines of a candidate, out of what the preprocessor made of it, and the tree of them.

Macros are expanded; what the headers of the system say is left out. Text that stands alone is its own candidate.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import tree_sitter
import tree_sitter_c

MAX_TEXT = 400_000  # characters of a candidate after preprocessing; the parser needs up to 400 bytes for each
_DIGRAPHS = {"<:": "[", ":>": "]", "<%": "{", "%>": "}", "%:": "#"}
_MARK = re.compile(r'# (\d+) "((?:[^"\\]|\\.)*)"((?: \d)*)')
_PIECE = 1 << 14  # bytes that the parser gets at once
_DERIVED = ("function_declarator", "pointer_declarator", "array_declarator")


@dataclass(frozen=True, slots=True)
class Pragma:
    """A line of the candidate that speaks to the compiler."""

    line: int  # of the source
    text: str
    before: int  # the row of `Text.lines` that follows it


@dataclass(frozen=True, slots=True)
class Text:
    """The lines of the candidate itself."""

    lines: Sequence[bytes]  # directives and marks are left out
    numbers: Sequence[int]  # of the lines in the source
    includes: Sequence[tuple[int, str, bool]]  # line, path of the file, whether it is one of the system
    pragmas: Sequence[Pragma]


def own_text(preprocessed: str) -> Text:
    """Returns the candidate's own lines in the output of `gcc -E`, whose marks (# 7 "candidate.c") say whose each line is."""
    lines, numbers, includes, entered, pragmas = [], [], [], [], []
    candidate = current = None
    number = 0 if _MARK.match(preprocessed) else 1
    for text in preprocessed.split("\n"):
        if match := _MARK.fullmatch(text):
            flags = match[3].split()
            candidate = candidate or match[2]
            number = int(match[1])
            if current == candidate and "1" in flags and not match[2].startswith("<"):
                entered.append((match[2], "3" in flags))
            elif match[2] == candidate and "2" in flags:
                # Only the way back tells the line of an #include: it is the one before.
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
    return Text(lines, numbers, includes, pragmas)


def parse(content: bytes, is_late: Callable[[], bool]) -> tree_sitter.Tree:
    """Parses C.

    Raises:
        ValueError: `is_late` said so.
    """
    parser = tree_sitter.Parser(_language())
    return parser.parse(lambda offset, _: content[offset : offset + _PIECE], progress_callback=lambda *_: is_late())


@lru_cache(maxsize=1)
def _language() -> tree_sitter.Language:
    return tree_sitter.Language(tree_sitter_c.language())


@lru_cache
def query(pattern: str) -> tree_sitter.Query:
    """Returns a query for nodes of C."""
    return tree_sitter.Query(_language(), pattern)


def walk(cursor: tree_sitter.TreeCursor) -> Iterator[tuple[tree_sitter.Node, bool]]:
    """Yields each node twice: before its children with False, and after them with True."""
    while True:
        yield cursor.node, False
        if cursor.goto_first_child():
            continue
        yield cursor.node, True
        while not cursor.goto_next_sibling():
            if not cursor.goto_parent():
                return
            yield cursor.node, True


def declared(node: tree_sitter.Node) -> dict[str, bool]:
    """Returns the names that a declaration declares, and whether each is a function (not a pointer to one)."""
    found = {}
    for outermost in node.children_by_field_name("declarator"):
        chain = list(declarators(outermost))
        if chain[-1].type == "identifier":
            # What stands nearest to the name decides: int *f(void) is a function, int (*f)(void) a pointer.
            kinds = [each.type for each in chain if each.type in _DERIVED]
            found[text_of(chain[-1])] = kinds[-1:] == ["function_declarator"]
    return found


def declarators(node: tree_sitter.Node | None) -> Iterator[tree_sitter.Node]:
    """Yields a declarator and those inside it, down to the name: (*p)[4], (*p), *p, p."""
    while node is not None:
        yield node
        named = (each for each in node.named_children if each.type.endswith(("declarator", "identifier")))
        node = node.child_by_field_name("declarator") or next(named, None)


def text_of(node: tree_sitter.Node | None) -> str:
    """Returns the text of a node, "" for none."""
    return "" if node is None else node.text.decode("utf-8", "replace")
