"""What the declarations of a program say: types of vectors, constants, functions, and the shape of a variable."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import tree_sitter

from torchtune_ext.measured.parsing import inner_declarator, walk
from torchtune_ext.measured.records import text_of

VECTOR_TYPES = re.compile(
    r"__m(64|128|256|512)[dih]?|(float|int|uint)\d+x\d+(x\d)?_t|sv(float|int|uint|bool)\w*_t|__v\w+"
)
VECTOR_ATTRIBUTE = re.compile(r"\b(__vector_size__|vector_size|ext_vector_type)\b")
# Functions of the vector headers that compute no vectors.
_NO_VECTORS = re.compile(r"_mm_(malloc|free|prefetch|pause|[slm]fence|getcsr|setcsr|clflush\w*)|__builtin_ia32_pause")
_INTRINSICS = re.compile(r"_mm\d*_\w+|__builtin_ia32_\w+|v[a-z]+q?_\w*[fsu](16|32|64)|sv\w+_[a-z]*(16|32|64)\w*")
_PARALLEL = re.compile(r"omp\b.*\b(parallel|teams)\b")
_SIMD = re.compile(r"omp\b.*\bsimd\b")
_UNROLL = re.compile(r"(?:GCC\s+unroll|clang\s+loop\s+.*\bunroll(?:_count)?|unroll|omp\s+unroll|omp\s+tile)\b\W*(\w+)?")
_VECTOR = re.compile(r"GCC\s+ivdep|clang\s+loop\s+.*\bvectorize(?:_width)?\b|ivdep\b|simd\b|vector\b")
_OPTIMIZE = re.compile(r"GCC\s+(?:optimize|push_options|target)\b(.*)")
_OFF = ("0", "1", "disable", "off")


def is_intrinsic(name: str) -> bool:
    """Tells whether a function of this name computes with vectors."""
    return bool(_INTRINSICS.fullmatch(name)) and not _NO_VECTORS.fullmatch(name)


def nodes_of(root: tree_sitter.Node, *types: str) -> Iterator[tree_sitter.Node]:
    """Yields the nodes of some types below a node, in the order of the text."""
    for node, leaving in walk(root.walk()):
        if not leaving and node.type in types:
            yield node


def vector_types(root: tree_sitter.Node) -> frozenset[str]:
    """Returns the names that the program gives to types of vectors."""
    found: set[str] = set()
    for node in nodes_of(root, "type_definition"):
        base = text_of(node.child_by_field_name("type"))
        if VECTOR_ATTRIBUTE.search(text_of(node)) or VECTOR_TYPES.fullmatch(base) or base in found:
            for declarator in node.children_by_field_name("declarator"):
                found.update(text_of(name) for name in nodes_of(declarator, "type_identifier"))
    return frozenset(found)


def is_vector(node: tree_sitter.Node, known: frozenset[str]) -> bool:
    """Tells whether a declaration, a cast or a parameter has a type of vectors."""
    kind = node.child_by_field_name("type")
    base = text_of(kind)
    if base in known or VECTOR_TYPES.fullmatch(base):
        return True
    head = [child for child in node.children if child.type == "attribute_specifier"]
    return any(VECTOR_ATTRIBUTE.search(text_of(child)) for child in head)


def functions(root: tree_sitter.Node) -> dict[str, tree_sitter.Node]:
    """Returns the functions that the program defines."""
    found = {}
    for node in nodes_of(root, "function_definition"):
        name, parameters = function_head(node)
        if name and parameters is not None:
            found[name] = node
    return found


def function_head(function: tree_sitter.Node) -> tuple[str, tree_sitter.Node | None]:
    """Returns the name of a function and the node of its parameters."""
    declarator = function.child_by_field_name("declarator")
    parameters = None
    while declarator is not None and declarator.type != "identifier":
        parameters = declarator.child_by_field_name("parameters") or parameters
        declarator = inner_declarator(declarator)
    return text_of(declarator), parameters


def shape_of(declarator: tree_sitter.Node | None) -> tuple[str, int, list[tree_sitter.Node | None] | None]:
    """Returns the name that a declarator declares, how many subscripts lead to a number, and the sides of the array.

    The sides are None where it is no array, such as a pointer to one: double (*p)[4].
    """
    rank, sides, nearest = 0, [], ""
    while declarator is not None and declarator.type != "identifier":
        if declarator.type == "array_declarator":
            rank += 1
            sides.append(declarator.child_by_field_name("size"))
        elif declarator.type == "pointer_declarator":
            rank += 1
        if declarator.type in ("array_declarator", "pointer_declarator"):
            nearest = declarator.type
        declarator = inner_declarator(declarator)
    return text_of(declarator), rank, sides if nearest == "array_declarator" else None


@dataclass(frozen=True, slots=True)
class Assignment:
    """A variable gets another value."""

    start: int  # byte of the text
    name: str
    added: tree_sitter.Node | None  # the right side, None for ++ and --


def assignments(root: tree_sitter.Node) -> list[Assignment]:
    """Returns the assignments to variables (not through pointers) in the order of the text."""
    found = []
    for node in nodes_of(root, "assignment_expression", "update_expression"):
        target = node.child_by_field_name("left") or node.child_by_field_name("argument")
        while target is not None and target.type == "parenthesized_expression":
            target = target.named_child(0) if target.named_child_count else None
        if target is not None and target.type == "identifier":
            found.append(Assignment(node.start_byte, text_of(target), node.child_by_field_name("right")))
    return found


def techniques_of(pragma: str, openmp: bool, is_global: bool = False) -> Iterator[tuple[str, str]]:
    """Yields the techniques that a line such as "#pragma omp parallel for" asks for, each with words about it.

    Args:
        pragma: the line.
        openmp: whether the compiler obeys OpenMP.
        is_global: whether it stands outside of all functions, where only options of the compiler mean something.
    """
    text = re.sub(r"^\s*#\s*pragma\s+", "", pragma).strip()
    if optimize := _OPTIMIZE.match(text):
        if "unroll" in optimize[1] and "no-unroll" not in optimize[1]:
            yield "unrolling", f"#pragma {text}"
        return
    if is_global:
        return
    if text.startswith("omp"):
        if not openmp:
            return
        if _PARALLEL.match(text):
            yield "threads", f"#pragma {text}"
        if _SIMD.match(text):
            yield "vectorization", f"#pragma {text}"
        if re.match(r"omp\s+tile\b", text):
            yield "blocking", f"#pragma {text}"
            return
    if (unroll := _UNROLL.match(text)) and unroll[1] not in _OFF:
        yield "unrolling", f"#pragma {text}"
    if _VECTOR.match(text):
        yield "vectorization", f"#pragma {text}"
