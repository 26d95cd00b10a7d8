"""Reads a program as it would run: from the function that is called, through every loop and helper that it reaches.

A helper is read again at each call, so that its loops stand in the nest of whoever calls it. What cannot run is not read:
functions that nobody calls, branches of a constant condition, statements behind a `return`. A loop made of `goto` is not
seen as a loop.
"""

import re
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import replace

import tree_sitter

from torchtune_ext.measured.declarations import (
    assignments,
    function_head,
    functions,
    is_vector,
    nodes_of,
    shape_of,
    techniques_of,
    vector_types,
)
from torchtune_ext.measured.expressions import Expressions
from torchtune_ext.measured.kernel import Kernel, inputs_of
from torchtune_ext.measured.parsing import MAX_TEXT, Text, own_text, parse
from torchtune_ext.measured.records import Facts, Loop, Mark, Place, Unreadable, Value, first_of, join, text_of

PARSE_S = 10.0  # seconds that the parser may take
_UNROLLS = re.compile(r"optimize.*(?<!no-)unroll")
_ENDS = ("return_statement", "break_statement", "continue_statement", "goto_statement")


def read(preprocessed: str, kernel: Kernel, openmp: bool = True) -> Facts:
    """Reads a program.

    Args:
        preprocessed: the program after `gcc -E`, or as it was written, if it has no macros.
        kernel: what it computes.
        openmp: whether it is compiled with OpenMP; without, its pragmas say nothing.

    Raises:
        Unreadable: it is too long, nested too deeply, or calls too much.
    """
    text = own_text(preprocessed)
    if sum(map(len, text.lines)) > MAX_TEXT:
        raise Unreadable(f"its macros expand to more than {MAX_TEXT} characters")
    try:
        return Reader(text, kernel, openmp).facts
    except RecursionError:
        raise Unreadable("it is nested too deeply to be read") from None


def _parsed(content: bytes) -> tree_sitter.Node:
    end = time.monotonic() + PARSE_S
    try:
        return parse(content, lambda: time.monotonic() >= end).root_node
    except ValueError:
        raise Unreadable(f"parsing it takes more than {PARSE_S:g} s") from None


class Reader(Expressions):
    """Reads the statements of a program, and so all of it. The result is in `facts`."""

    def __init__(self, text: Text, kernel: Kernel, openmp: bool) -> None:
        self.text, self.openmp = text, openmp
        content = b"\n".join(text.lines)
        starts = [0]
        for line in text.lines:
            starts.append(starts[-1] + len(line) + 1)
        self.pragmas = [(starts[min(pragma.before, len(text.lines))], pragma) for pragma in text.pragmas]
        self.offsets = [offset for offset, _ in self.pragmas]
        root = _parsed(content)
        self.functions = functions(root)
        self.calls: list[str] = []
        self.names: dict[int, Counter] = {}  # how often each name stands in a block, by its node
        self.assignments = assignments(root)
        self.assigned: dict[int, dict[str, list]] = {}  # what a loop assigns, by its node
        self.returned: list[Value] = []
        super().__init__(frozenset(each.name for each in inputs_of(kernel)), vector_types(root), self._line)
        self._globals(root)
        start = self.functions.get(kernel.name)
        if start is not None:
            self._start(start, kernel)

    def _line(self, node: tree_sitter.Node) -> int:
        return self.text.numbers[min(node.start_point.row, len(self.text.numbers) - 1)]

    def _globals(self, root: tree_sitter.Node) -> None:
        for node in nodes_of(root, "enumerator_list"):
            following = 0
            for each in node.named_children:
                if each.type == "enumerator":
                    number = self.value(each.child_by_field_name("value")).constant
                    following = following if number is None else number
                    self.constants[text_of(each.child_by_field_name("name"))] = following
                    following += 1
        for node in root.named_children:
            if node.type == "declaration":
                self.run(node)
        # What stands outside of the functions, such as #pragma GCC optimize("unroll-loops"), is for all of them.
        inside = [(each.start_byte, each.end_byte) for each in self.functions.values()]
        for offset, pragma in self.pragmas:
            if not any(start < offset < end for start, end in inside):
                for technique, words in techniques_of(pragma.text, self.openmp, is_global=True):
                    self.facts.marks.append(Mark(technique, pragma.line, words))

    def _start(self, function: tree_sitter.Node, kernel: Kernel) -> None:
        arguments = [Value() for _ in kernel.size_names]
        for each in kernel.parameters:
            place = Place(each.name, "output" if each.is_output else "input", 1, True, None)
            arguments.append(Value(frozenset((place,)), rank=1))
        self.called(kernel.name, arguments, function)

    # Functions -------------------------------------------------------------------------------------------------------

    def is_own(self, name: str) -> bool:
        return name in self.functions

    def called(self, name: str, arguments: list[Value], node: tree_sitter.Node) -> Value:
        function = self.functions[name]
        if name in self.calls:
            self.facts.recursions.append((name, self._line(node)))
            return Value()
        body, (_, parameters) = function.child_by_field_name("body"), function_head(function)
        scopes, returned = self.scopes, self.returned
        self.scopes, self.returned = [scopes[0], {}], []
        self.calls.append(name)
        self.count()
        self._speaks(function)
        for each in function.children:
            if each.type == "attribute_specifier" and _UNROLLS.search(text_of(each)):
                self.mark("unrolling", each, text_of(each))
        declared = [each for each in parameters.named_children if each.type == "parameter_declaration"]
        for each, argument in zip(declared, arguments, strict=False):
            own, rank, _ = shape_of(each.child_by_field_name("declarator"))
            content = replace(argument, rank=rank) if argument.places else argument
            self.scopes[-1][own] = Place(
                own, "local", rank, branch=self.branch, content=content, reset=frozenset(self.active)
            )
            if is_vector(each, self.vectors):
                self.mark("vectorization", each, f"the parameter {own} is a vector")
        try:
            self.run(body)
            return join(Value(), *self.returned)
        finally:
            self.calls.pop()
            self.scopes, self.returned = scopes, returned

    # Statements ------------------------------------------------------------------------------------------------------

    def run(self, node: tree_sitter.Node | None) -> Value:
        """Reads a statement. Returns the value of the last expression, for ({ ...; value; })."""
        if node is None:
            return Value()
        self.depth += 1
        self.count()
        try:
            self._speaks(node)
            method = getattr(self, f"_{node.type}", None)
            if method is not None:
                return method(node) or Value()
            return join(Value(), *(self.value(child) for child in node.named_children))
        finally:
            self.depth -= 1

    def _speaks(self, node: tree_sitter.Node) -> None:
        """Reads the pragmas that stand right before a statement."""
        before = node.prev_sibling
        if not self.offsets or before is None and node.parent is not None and node.parent.type != "translation_unit":
            return
        first = bisect_left(self.offsets, 0 if before is None else before.end_byte)
        for offset, pragma in self.pragmas[first:]:
            if offset > node.start_byte:
                break
            if node.named_child_count:
                for technique, words in techniques_of(pragma.text, self.openmp):
                    self.facts.marks.append(Mark(technique, pragma.line, words))

    def _compound_statement(self, node: tree_sitter.Node) -> Value:
        self.scopes.append({})
        found, is_dead = Value(), False
        for child in node.named_children:
            is_dead = is_dead and child.type not in ("labeled_statement", "case_statement")
            if not is_dead:
                found = self.run(child)
                is_dead = child.type in _ENDS
        self.scopes.pop()
        return found

    def _declaration(self, node: tree_sitter.Node) -> None:
        vector = is_vector(node, self.vectors)
        for each in node.children_by_field_name("declarator"):
            initial = each.child_by_field_name("value") if each.type == "init_declarator" else None
            name, rank, sides = shape_of(each)
            if not name or (name in self.functions and initial is None):
                continue
            # The number of bytes in a vector is not asked: one of four numbers counts as one place in a register.
            numbers: int | None = 1
            for side in sides or ():
                length = self.value(side).constant
                numbers = None if numbers is None or length is None else numbers * length
            value = self.value(initial)
            place = Place(name, "local", rank, sides is not None, numbers, self.branch, reset=frozenset(self.active))
            if sides and sides[0] is None and initial is not None:
                place.numbers = initial.named_child_count
            self.scopes[-1][name] = place
            if initial is not None:
                self.store(Value(frozenset((place,)), rank=rank), replace(value, reads=value.reads - {place}), initial)
                if not place.is_array:
                    place.content = replace(place.content, rank=rank if place.content.places else 0)
            if vector and self._is_used(name, node):
                self.mark("vectorization", node, f"{name} is a vector")

    def _is_used(self, name: str, declaration: tree_sitter.Node) -> bool:
        around = declaration.parent
        if around is None:
            return False
        if around.id not in self.names:
            self.names[around.id] = Counter(text_of(each) for each in nodes_of(around, "identifier"))
        return self.names[around.id][name] > 1

    def _expression_statement(self, node: tree_sitter.Node) -> Value:
        return self.value(first_of(node))

    def _return_statement(self, node: tree_sitter.Node) -> None:
        self.returned.append(self.value(first_of(node)))

    def _labeled_statement(self, node: tree_sitter.Node) -> None:
        for child in node.named_children[1:]:
            self.run(child)

    def _attributed_statement(self, node: tree_sitter.Node) -> None:
        for child in node.named_children:
            self.run(child)

    def _type_definition(self, node: tree_sitter.Node) -> None:
        return None

    _function_definition = _goto_statement = _break_statement = _continue_statement = _type_definition
    _struct_specifier = _enum_specifier = _union_specifier = _type_definition

    def _if_statement(self, node: tree_sitter.Node) -> None:
        condition = self.value(node.child_by_field_name("condition")).constant
        alternative = node.child_by_field_name("alternative")
        sides = [node.child_by_field_name("consequence"), first_of(alternative)]
        if condition is not None:
            self.run(sides[0 if condition else 1])
            return
        before = self.branch
        for way, side in enumerate(sides):
            self.branch = (*before, (node.id, way))
            self.run(side)
        self.branch = before

    def _switch_statement(self, node: tree_sitter.Node) -> None:
        self.value(node.child_by_field_name("condition"))
        before = self.branch
        self.scopes.append({})
        body = node.child_by_field_name("body")
        for way, case in enumerate([] if body is None else body.named_children):
            self.branch = (*before, (node.id, way))
            self.run(case)
        self.scopes.pop()
        self.branch = before

    def _case_statement(self, node: tree_sitter.Node) -> None:
        has_value = node.child_by_field_name("value") is not None
        for child in node.named_children[has_value:]:
            self.run(child)

    # Loops -----------------------------------------------------------------------------------------------------------

    def _for_statement(self, node: tree_sitter.Node) -> None:
        self.scopes.append({})
        first = node.child_by_field_name("initializer")
        if first is not None:
            self.run(first) if first.type == "declaration" else self.value(first)
        self._loop(node, node.child_by_field_name("update"))
        self.scopes.pop()

    def _while_statement(self, node: tree_sitter.Node) -> None:
        self._loop(node, None)

    def _do_statement(self, node: tree_sitter.Node) -> None:
        self._loop(node, None, is_tested_first=False)

    def _loop(self, node: tree_sitter.Node, update: tree_sitter.Node | None, is_tested_first: bool = True) -> None:
        condition, body = node.child_by_field_name("condition"), node.child_by_field_name("body")
        if is_tested_first and self.value(condition).constant == 0:
            return
        assigned = self._assigned(node)
        counted = [each for each in (update, condition) if each is not None]
        trip = self._trip(condition, update)
        runs_once = trip == 1 or (not is_tested_first and self.value(condition).constant == 0)
        before = self.active
        if not runs_once:
            number = len(self.facts.loops)
            self.facts.loops.append(Loop(_counter(counted, assigned), trip, self._line(node)))
            self.active = (*before, number)
        for name, added in assigned.items():
            place = self.place_of(name)
            if place is not None and not place.is_array:
                here = frozenset(self.active[len(before) :])
                by_rows = any(each is not None and self.value(each).constant is None for each in added)
                content = place.content
                strided = content.strided | here if by_rows and content.places else content.strided
                place.content = replace(content, loops=content.loops | here, strided=strided, constant=None)
        self.run(body)
        self.value(update)
        self.active = before

    def _assigned(self, loop: tree_sitter.Node) -> dict[str, list[tree_sitter.Node | None]]:
        """What the steps of a loop assign: for each variable the right sides, None for ++."""
        if loop.id not in self.assigned:
            initial = loop.child_by_field_name("initializer")
            start = loop.start_byte if initial is None else initial.end_byte
            first, end = (
                bisect_left(self.assignments, at, key=lambda each: each.start) for at in (start, loop.end_byte)
            )
            found: dict[str, list[tree_sitter.Node | None]] = {}
            for each in self.assignments[first:end]:
                found.setdefault(each.name, []).append(each.added)
            self.assigned[loop.id] = found
        return self.assigned[loop.id]

    def _trip(self, condition: tree_sitter.Node | None, update: tree_sitter.Node | None) -> int | None:
        """How often `for (r = 0; r < 4; r++)` runs, None if that is not written in constants."""
        if condition is None or update is None or condition.type != "binary_expression":
            return None
        sign = text_of(condition.child_by_field_name("operator"))
        first = self.value(condition.child_by_field_name("left")).constant
        last = self.value(condition.child_by_field_name("right")).constant
        step = 1
        if update.type == "assignment_expression":
            is_added = text_of(update.child_by_field_name("operator")) == "+="
            step = self.value(update.child_by_field_name("right")).constant if is_added else None
        elif update.type != "update_expression" or "--" in text_of(update):
            step = None
        if first is None or last is None or step is None or step < 1 or sign not in ("<", "<=", "!="):
            return None
        return max(0, -(-(last + (sign == "<=") - first) // step))


def _counter(parts: list[tree_sitter.Node], assigned: dict) -> str:
    """The name of the variable that a loop counts with, as well as can be told."""
    names = [text_of(each) for part in parts for each in nodes_of(part, "identifier")]
    return next((name for name in names if name in assigned), names[0] if names else "no variable")
