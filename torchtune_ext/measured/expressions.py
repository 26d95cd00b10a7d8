"""Reads expressions: which inputs and which loops a number comes from, and where it is added to a sum."""

import re
from collections.abc import Callable
from dataclasses import replace

import tree_sitter

from torchtune_ext.measured.declarations import is_intrinsic, is_vector
from torchtune_ext.measured.records import (
    MAX_ITEMS,
    NOTHING,
    Facts,
    Item,
    Mark,
    Place,
    Site,
    Unreadable,
    Value,
    first_of,
    join,
    text_of,
)

MAX_STEPS = 100_000  # expressions and statements of one program; those that the tests read take at most 400
MAX_SITES = 100_000  # pieces of work of one program
MAX_DEPTH = 120  # expressions and statements inside each other; the interpreter's own limit is some 1,000 calls
# A copy of more numbers than this is a panel, of fewer numbers one in registers: half of what AVX-512 has, in columns.
MAX_COPIED_TO_REGISTERS = 16
_ALLOCATES = re.compile(r"(_mm_)?(malloc|calloc|realloc|aligned_alloc|memalign|valloc|alloca)|__builtin_alloca\w*")
_COPIES = re.compile(r"(__builtin_(_)?)?(memcpy|memmove|mempcpy)(_chk)?")
_STORES = re.compile(r"_mm\d*_(mask_)?(store|stream|maskstore|scatter|i32scatter|i64scatter)\w*|vst\d\w*|svst\d\w*")
_FOLDED: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b if max(abs(a), abs(b)) < 1 << 40 else 0,
    "/": lambda a, b: a // b if b and a >= 0 < b else 0,
    "%": lambda a, b: a % b if b and a >= 0 < b else 0,
    "<<": lambda a, b: a << b if 0 <= b < 32 and abs(a) < 1 << 31 else 0,
    ">>": lambda a, b: a >> b if 0 <= b < 64 else 0,
    "<": lambda a, b: int(a < b),
    ">": lambda a, b: int(a > b),
    "<=": lambda a, b: int(a <= b),
    ">=": lambda a, b: int(a >= b),
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "&&": lambda a, b: int(bool(a and b)),
    "||": lambda a, b: int(bool(a or b)),
}
_WRAPPERS = ("parenthesized_expression", "cast_expression")


class Expressions:
    """Reads the expressions of a program. The statements are read by `Reader` (reader.py), which is made of this."""

    def __init__(self, inputs: frozenset[str], vectors: frozenset[str], line_of: Callable[[tree_sitter.Node], int]):
        self.inputs, self.vectors, self.line_of = inputs, vectors, line_of
        self.facts = Facts()
        self.scopes: list[dict[str, Place]] = [{}]
        self.constants: dict[str, int] = {}  # of enumerations
        self.active: tuple[int, ...] = ()  # the loops around, from the outermost
        self.branch: tuple[tuple[int, int], ...] = ()
        self.steps = self.depth = 0

    def place_of(self, name: str) -> Place | None:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), None)

    def count(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS or self.depth > MAX_DEPTH:
            raise Unreadable("it calls or nests too much to be read")

    def value(self, node: tree_sitter.Node | None) -> Value:
        """Returns the value of an expression, and notes what it does."""
        if node is None:
            return Value()
        self.depth += 1
        self.count()
        try:
            method = getattr(self, f"_{node.type}", None)
            if method is not None:
                return method(node) or Value()
            return join(Value(), *(self.value(child) for child in node.named_children))
        finally:
            self.depth -= 1

    # Names and memory ------------------------------------------------------------------------------------------------

    def _identifier(self, node: tree_sitter.Node) -> Value:
        name = text_of(node)
        place = self.place_of(name)
        if place is None:
            functions = frozenset((name,)) if self.is_own(name) else NOTHING
            return Value(constant=self.constants.get(name), functions=functions)
        address = Value(frozenset((place,)), rank=place.rank)
        return address if place.is_array else self._load(address)

    def address(self, node: tree_sitter.Node | None) -> Value:
        """Returns where the left side of an assignment is."""
        if node is None:
            return Value()
        if node.type == "identifier":
            place = self.place_of(text_of(node))
            return Value() if place is None else Value(frozenset((place,)), rank=place.rank)
        if node.type == "subscript_expression":
            return self._element(node)
        if node.type == "pointer_expression" and text_of(node).startswith("*"):
            return self._pointed(node.child_by_field_name("argument"))
        if node.type == "field_expression":
            argument = node.child_by_field_name("argument")
            return self.value(argument) if "->" in text_of(node) else self.address(argument)
        if node.type in _WRAPPERS:
            return self.address(node.child_by_field_name("value") or first_of(node))
        return self.value(node)

    def _element(self, node: tree_sitter.Node) -> Value:
        """The address of an element."""
        argument, index = node.child_by_field_name("argument"), self.value(node.child_by_field_name("index"))
        base = self._pointed(argument)
        # With several subscripts, all but the last step over rows.
        strided = index.loops if base.rank > 1 else index.strided
        return replace(
            base, loops=base.loops | index.loops, strided=base.strided | strided, constant=None, rank=base.rank - 1
        )

    def _pointed(self, node: tree_sitter.Node | None) -> Value:
        """What a pointer, an array or a vector points to."""
        while node is not None and node.type == "parenthesized_expression":
            node = first_of(node)
        if node is not None and node.type == "subscript_expression":
            base = self._element(node)
            return self._load(base) if any(place.content.places for place in base.places) else base
        base = self.value(node)
        # A vector has elements, though it is no array.
        return base if base.places or node is None or node.type != "identifier" else self.address(node)

    def _load(self, address: Value) -> Value:
        parts = []
        for place in address.places:
            if place.kind == "input":
                item = Item(((place.name, address.loops),), address.strided)
                items = (item,) if len(self.inputs) == 1 else ()
                parts.append(
                    Value(NOTHING, address.loops, address.strided, frozenset((place.name,)), items),
                )
                continue
            content = place.content
            items = content.items
            if place.is_array and len(self.inputs) == 1 and content.origins and not content.is_computed:
                loops = content.loops | address.loops
                items = (Item(tuple((name, loops) for name in content.origins), address.strided),)
            parts.append(
                replace(
                    content,
                    loops=content.loops | address.loops,
                    strided=content.strided | address.strided,
                    items=items,
                    reads=frozenset((place,)),
                    rank=place.rank - place.is_array if content.places else 0,
                )
            )
        return join(*parts) if parts else Value(loops=address.loops)

    def _subscript_expression(self, node: tree_sitter.Node) -> Value:
        address = self._element(node)
        is_row = address.rank > 0 and not any(place.content.places for place in address.places)
        return address if is_row else self._load(address)

    def _pointer_expression(self, node: tree_sitter.Node) -> Value:
        argument = node.child_by_field_name("argument")
        if text_of(node).startswith("&"):
            found = self.address(argument)
            return replace(found, rank=max(1, found.rank + 1))
        return self._load(self._pointed(argument))

    def _field_expression(self, node: tree_sitter.Node) -> Value:
        return self._load(self.address(node))

    # Numbers ---------------------------------------------------------------------------------------------------------

    def _number_literal(self, node: tree_sitter.Node) -> Value:
        text = text_of(node).rstrip("uUlL")
        try:
            return Value(constant=int(text, 0) if len(text) < 20 else None)
        except ValueError:
            return Value()

    def _nothing(self, node: tree_sitter.Node) -> Value:
        return Value()

    _string_literal = _char_literal = _sizeof_expression = _alignof_expression = _offsetof_expression = _nothing
    _type_descriptor = _comment = _type_identifier = _field_identifier = _attribute_specifier = _nothing

    def _parenthesized_expression(self, node: tree_sitter.Node) -> Value:
        return self.value(first_of(node))

    def _cast_expression(self, node: tree_sitter.Node) -> Value:
        self._mark_vector(node.child_by_field_name("type"))
        found = self.value(node.child_by_field_name("value"))
        declarator = text_of(node.child_by_field_name("type"))
        rank = declarator.count("*") + declarator.count("[")
        return replace(found, rank=rank) if rank and found.places else found

    def _compound_literal_expression(self, node: tree_sitter.Node) -> Value:
        self._mark_vector(node.child_by_field_name("type"))
        return self.value(node.child_by_field_name("value"))

    def _mark_vector(self, node: tree_sitter.Node | None) -> None:
        if node is not None and is_vector(node, self.vectors):
            self.mark("vectorization", node, f"the type {text_of(node)} is one of vectors")

    def mark(self, technique: str, node: tree_sitter.Node, words: str) -> None:
        self.facts.marks.append(Mark(technique, self.line_of(node), words))

    def _unary_expression(self, node: tree_sitter.Node) -> Value:
        found = self.value(node.child_by_field_name("argument"))
        sign, number = text_of(node)[:1], found.constant
        folded = {"-": lambda: -number, "!": lambda: int(not number), "~": lambda: ~number, "+": lambda: number}
        return replace(found, constant=folded[sign]() if number is not None and sign in folded else None)

    def _binary_expression(self, node: tree_sitter.Node) -> Value:
        # A sum of a thousand terms is a thousand expressions inside each other, always on the left.
        chain = []
        while node is not None and node.type == "binary_expression":
            self.steps += 1
            chain.append(node)
            node = node.child_by_field_name("left")
        found = self.value(node)
        for each in reversed(chain):
            right = self.value(each.child_by_field_name("right"))
            found = self._combined(text_of(each.child_by_field_name("operator")), found, right)
        return found

    def _combined(self, sign: str, left: Value, right: Value) -> Value:
        both = join(left, right)
        constant, strided = None, both.strided
        if left.constant is not None and right.constant is not None and sign in _FOLDED:
            constant = _FOLDED[sign](left.constant, right.constant)
        if sign == "*" and left.constant is None and right.constant is None:
            strided = both.loops
        items = self._product(left, right) if sign == "*" else both.items
        return replace(both, strided=strided, items=items, is_computed=True, constant=constant)

    def _product(self, left: Value, right: Value) -> tuple[Item, ...]:
        """The work that is in a product: that of its sides, or itself, if only both together have numbers of all inputs."""
        whole = self.inputs
        if len(whole) > 1 and not left.origins >= whole and not right.origins >= whole:
            if left.origins | right.origins >= whole:
                loops = {
                    name: NOTHING.union(*(side.loops for side in (left, right) if name in side.origins))
                    for name in whole
                }
                return (Item(tuple(sorted(loops.items())), left.strided | right.strided),)
        return (left.items + right.items)[:MAX_ITEMS]

    def _conditional_expression(self, node: tree_sitter.Node) -> Value:
        condition = self.value(node.child_by_field_name("condition"))
        sides = [node.child_by_field_name("consequence"), node.child_by_field_name("alternative")]
        if condition.constant is not None:
            return self.value(sides[0 if condition.constant else 1])
        found = [self.value(side) for side in sides]
        # Only one of them is computed: (i < 4 ? a : b) * c is one product.
        return replace(join(*found), items=max((value.items for value in found), key=len))

    def _comma_expression(self, node: tree_sitter.Node) -> Value:
        self.value(node.child_by_field_name("left"))
        return self.value(node.child_by_field_name("right"))

    def _update_expression(self, node: tree_sitter.Node) -> Value:
        argument = node.child_by_field_name("argument")
        found = self.value(argument)
        for place in self.address(argument).places:
            place.content = replace(place.content, constant=None)
        return replace(found, constant=None)

    # Assignments and calls -------------------------------------------------------------------------------------------

    def _assignment_expression(self, node: tree_sitter.Node) -> Value:
        found = self.value(node.child_by_field_name("right"))
        sign = text_of(node.child_by_field_name("operator"))
        self.store(self.address(node.child_by_field_name("left")), found, node, adds=sign != "=")
        return replace(found, items=())

    def store(self, address: Value, value: Value, node: tree_sitter.Node, adds: bool = False) -> None:
        """Notes that a value is written, or with `adds` added to what is there."""
        for place in address.places:
            if place.kind == "input":
                continue
            is_sum = adds or place in value.reads
            is_local = place.kind == "local"
            if not is_local:
                self.facts.stored |= address.loops
            is_work = is_sum if is_local else is_sum or value.is_computed
            if value.items and is_work:
                line = self.line_of(node)
                reset = place.reset if is_local else NOTHING
                if len(self.facts.sites) > MAX_SITES:
                    raise Unreadable("it does too much work in too many places to be read")
                self.facts.sites += [
                    Site(self.active, self.branch, place, address.loops, reset, item, line) for item in value.items
                ]
            if is_local:
                self._keep(place, address, replace(value, items=()) if is_work else value, is_sum, node)

    def _keep(self, place: Place, address: Value, value: Value, is_sum: bool, node: tree_sitter.Node) -> None:
        is_panel = place.is_array and (place.numbers is None or place.numbers > MAX_COPIED_TO_REGISTERS)
        is_part = len(self.inputs) > 1 and not value.origins >= self.inputs
        if is_panel and value.origins and not is_sum and (is_part or not value.is_computed):
            names = " and ".join(sorted(value.origins))
            self.mark("packing", node, f"copies numbers of {names} to {place.name}")
        if is_sum:
            place.content = replace(join(place.content, value), constant=None, items=value.items, is_computed=True)
            return
        place.reset = frozenset(self.active) - address.loops
        if place.is_array or self.branch != place.branch:
            place.content = replace(join(place.content, value), rank=value.rank)
            if place.is_array:
                place.content = replace(place.content, constant=None)
        else:
            place.content = value

    def _call_expression(self, node: tree_sitter.Node) -> Value:
        name = text_of(node.child_by_field_name("function"))
        arguments = node.child_by_field_name("arguments")
        nodes = [] if arguments is None else [each for each in arguments.named_children if each.type != "comment"]
        if self.is_own(name):
            return self.called(name, [self.value(each) for each in nodes], node)
        if is_intrinsic(name):
            self.mark("vectorization", node, f"calls {name}()")
        values = [self.value(each) for each in nodes]
        if functions := sorted(self.value(node.child_by_field_name("function")).functions):
            return join(*(self.called(each, values, node) for each in functions))
        if _ALLOCATES.fullmatch(name):
            place = Place(f"the memory of {name}()", "local", 1, True, None, reset=frozenset(self.active))
            return Value(frozenset((place,)), rank=1)
        if _COPIES.fullmatch(name) and len(values) > 1:
            self.store(values[0], self._load(values[1]) if values[1].places else values[1], node)
            return values[0]
        if name in ("memset", "__builtin_memset") and values:
            self.store(values[0], Value(), node)
            return values[0]
        if _STORES.fullmatch(name) and len(values) > 1:
            numbers = [each for each in values[1:] if each.origins] or values[-1:]
            self.store(values[0], numbers[-1], node)
            return Value()
        return self._computed(values)

    def is_own(self, name: str) -> bool:
        """Tells whether the program defines this function."""
        raise NotImplementedError

    def called(self, name: str, arguments: list[Value], node: tree_sitter.Node) -> Value:
        """Reads a function of the program itself."""
        raise NotImplementedError

    def _computed(self, values: list[Value]) -> Value:
        """The value of a function of the system: fma(a, b, c) and its like hold a product."""
        values = [self._load(value) if value.places else value for value in values]
        with_numbers = [value for value in values if value.origins]
        both = join(Value(), *values)
        for at, left in enumerate(with_numbers):
            for right in with_numbers[at + 1 :]:
                product = self._product(left, right)
                if len(self.inputs) > 1 and product and product != left.items + right.items:
                    rest = [value.items for value in values if value is not left and value is not right]
                    items = product + tuple(item for each in rest for item in each)
                    return replace(both, items=items[:MAX_ITEMS], is_computed=True, constant=None)
        # With one number, such as _mm256_loadu_pd(p), it is a copy.
        return replace(both, is_computed=both.is_computed or len(with_numbers) > 1, constant=None)
