"""Interpret a program abstractly, from its entry function through every reachable loop and helper.

Unreachable code is skipped: uncalled functions, dead branches, statements after a `return`. A loop
made of `goto` is not detected. The `Value` of an expression holds the inputs and the loops that it
depends on. Each place where work is added to a sum, or stored, is a `WorkSite`.
"""

import math
import re
import time
from collections import ChainMap, defaultdict
from functools import reduce

from torchtune_ext.measured.dataflow import (
    EMPTY,
    MAX_ITEMS,
    Location,
    Loop,
    TechniqueUse,
    Value,
    WorkSite,
    fold_constants,
    join_values,
)
from torchtune_ext.measured.kernel import Kernel, Parameter, input_parameters
from torchtune_ext.measured.parsing import (
    MAX_TEXT_CHARS,
    Node,
    candidate_text,
    declarators,
    node_text,
    parse,
    query_matches,
)

PARSE_TIMEOUT_S = 10.0  # timeout of the parser, in seconds
MAX_STEPS = 100_000  # expressions, statements and sites of one program; the test programs need at most 400
# Nesting of expressions and statements. Each level takes about 4 of Python's 1,000 stack frames,
# and tree-sitter crashes at that limit.
MAX_DEPTH = 120
# A larger copy is a panel. A smaller copy fits in registers: half of AVX-512's 32, as columns.
MAX_COPIED_TO_REGISTERS = 16

_VECTOR_TYPES = re.compile(
    r"\b(__m(64|128|256|512)[dih]?|(float|u?int)\d+x\d+(x\d)?_t|sv(float|int|uint|bool)\w*_t|__v\d\w+"
    r"|__vector_size__|vector_size|ext_vector_type)\b"
)
_INTRINSICS = re.compile(
    # These functions of the vector headers do not compute with vectors.
    r"(?!_mm_(malloc|free|prefetch|pause|[slm]fence|getcsr|setcsr|clflush\w*)$|__builtin_ia32_pause$)"
    r"(_mm\d*_\w+|__builtin_ia32_\w+|v[a-z]+q?_\w*[fsu](16|32|64)|sv\w+_[a-z]*(16|32|64)\w*)"
)
_ALLOCATORS = re.compile(r"(_mm_)?(malloc|calloc|realloc|aligned_alloc|memalign|valloc|alloca)|__builtin_alloca\w*")
_COPY_FUNCTIONS = re.compile(
    r"(__builtin_(_)?)?(memcpy|memmove|mempcpy|memset)(_chk)?"
    r"|_mm\d*_(mask_)?(store|stream|maskstore|scatter|i32scatter|i64scatter)\w*|vst\d\w*|svst\d\w*"
)
_UNROLL_OPTIONS = re.compile(r"\boptimize\b.*(?<!no-)unroll")
_PRAGMA_PATTERNS = {
    "threads": r"omp\b.*\b(parallel|teams)\b",
    "vectorization": r"omp\b.*\bsimd\b|GCC\s+ivdep|clang\s+loop\s.*\bvectorize(_width)?\b|(ivdep|simd|vector)\b",
    "blocking": r"omp\s+tile\b|(GCC\s+unroll|clang\s+loop\s.*\bunroll(_count)?|(omp\s+)?unroll)\b(?!\W*(0|1|disable|off)\b)",
}
_ASSIGNMENT_QUERY = """
(assignment_expression
    left: [(identifier) @name (parenthesized_expression (identifier) @name)])
(update_expression argument: [(identifier) @name (parenthesized_expression (identifier) @name)])
"""
_WRAPPERS = ("parenthesized_expression", "cast_expression")
_JUMPS = ("return_statement", "break_statement", "continue_statement", "goto_statement")


class UnreadableProgram(ValueError):
    """The program is nested too deeply, or takes too many steps to read."""


class ProgramReader:
    """The work sites, loops and directly visible techniques of a program.

    The index in `loops` identifies a loop.

    Args:
        preprocessed: the output of `gcc -E`, or the source if it has no macros.
        openmp: whether OpenMP is enabled. Otherwise its pragmas have no effect.

    Raises:
        UnreadableProgram: the program is too long, nested too deeply, or takes too many steps.
    """

    def __init__(self, preprocessed: str, kernel: Kernel, openmp: bool = True) -> None:
        self.inputs = frozenset(each.name for each in input_parameters(kernel))
        self.loops: list[Loop] = []
        self.sites: list[WorkSite] = []
        self.uses: list[TechniqueUse] = []  # techniques that are visible without the loop nest
        self.recursions: list[TechniqueUse] = []
        self.output_loops: set[int] = set()  # loops that select the element of an output
        self._openmp = openmp
        self._functions: dict[str, tuple[Node, Node]] = {}  # name -> (definition, parameters)
        self._vector_types: set[str] = set()  # vector types that the program defines
        self._scope: ChainMap[str, Location] = ChainMap()
        self._open_loops: tuple[int, ...] = ()  # enclosing loops, outermost first
        self._branch: tuple[int, ...] = ()
        self._call_stack: list[str] = []
        self._return_values: list[Value] = []
        self._assigned: dict[int, set[str]] = {}  # node id of a loop -> names that it assigns
        self._steps = self._depth = 0
        root = self._parse_program(preprocessed)
        self._read_globals(root)
        if kernel.name in self._functions:
            arguments = [Value() for _ in kernel.size_names]
            self._read_call(kernel.name, arguments + [_argument_value(each) for each in kernel.parameters], root)

    def _parse_program(self, preprocessed: str) -> Node:
        text = candidate_text(preprocessed)
        if sum(map(len, text.lines)) > MAX_TEXT_CHARS:
            raise UnreadableProgram(f"its macros expand to more than {MAX_TEXT_CHARS} characters")
        end = time.monotonic() + PARSE_TIMEOUT_S
        try:
            root = parse(b"\n".join(text.lines), lambda: time.monotonic() >= end).root_node
        except ValueError:
            raise UnreadableProgram(f"parsing it takes more than {PARSE_TIMEOUT_S:g} s") from None
        self._numbers = text.line_numbers
        self._pragmas = defaultdict(list)  # row of the next statement -> pragmas
        for pragma in text.pragmas:
            row = pragma.next_row
            while row < len(text.lines) and not text.lines[row].strip():
                row += 1
            words = re.sub(r"^\s*#\s*pragma\s+", "", pragma.text).strip()
            self._pragmas[row].append((words, pragma.line))
            if words.startswith("GCC") and _UNROLL_OPTIONS.search(words):
                self.uses.append(TechniqueUse("blocking", pragma.line, f"#pragma {words}"))
        return root

    def _line(self, node: Node) -> int:
        return self._numbers[min(node.start_point.row, len(self._numbers) - 1)]

    def _record_use(self, technique: str, node: Node, words: str) -> None:
        self.uses.append(TechniqueUse(technique, self._line(node), words))

    def _read(self, node: Node | None) -> Value:
        if node is None:
            return Value()
        self._steps += 1
        self._depth += 1
        if self._steps > MAX_STEPS or self._depth > MAX_DEPTH:
            raise UnreadableProgram("it calls or nests too much to be read")
        if self._pragmas:
            self._read_pragmas(node)
        method = getattr(self, f"_{node.type}", None)
        value = method(node) if method else join_values(*[self._read(child) for child in node.named_children])
        self._depth -= 1
        return value or Value()

    def _read_pragmas(self, node: Node) -> None:
        """Records the pragmas before a node, the first executable node of its row."""
        for words, line in self._pragmas.pop(node.start_point.row, ()):
            for technique, pattern in _PRAGMA_PATTERNS.items():
                if re.match(pattern, words) and (self._openmp or not words.startswith("omp")):
                    self.uses.append(TechniqueUse(technique, line, f"#pragma {words}"))

    # Functions -------------------------------------------------------------------------------------------------------

    def _read_globals(self, root: Node) -> None:
        for (node,) in (nodes["function"] for nodes in query_matches("(function_definition) @function", root)):
            chain = [*declarators(node.child_by_field_name("declarator"))]
            parameters = chain[-2].child_by_field_name("parameters") if len(chain) > 1 else None
            if parameters is not None:
                name = node_text(chain[-1])
                self._functions[name] = node, parameters
                self._scope[name] = Location(name, "function", is_array=True)
        for node in root.named_children:
            if node.type.endswith(("declaration", "type_definition", "specifier")):
                self._read(node)

    def _read_call(self, name: str, arguments: list[Value], node: Node) -> Value:
        # Reading a recursive function would not end. Recursion divides the work: blocking.
        if name in self._call_stack:
            self.recursions.append(
                TechniqueUse("blocking", self._line(node), f"{name}() calls itself for a part of its work")
            )
            return Value()
        # A helper is read again at each call, so that its loops extend the caller's loop nest.
        function, parameters = self._functions[name]
        self._read_pragmas(function)
        for each in function.children:
            # __attribute__((optimize("unroll-loops"))) requests unrolling: blocking.
            if each.type == "attribute_specifier" and _UNROLL_OPTIONS.search(node_text(each)):
                self._record_use("blocking", each, node_text(each))
        scope, returned = self._scope, self._return_values
        # A function sees its local names and the global names, not its caller's names.
        self._scope, self._return_values = ChainMap({}, scope.maps[-1]), []
        self._call_stack.append(name)
        declared = [each for each in parameters.named_children if each.type == "parameter_declaration"]
        for each, argument in zip(declared, arguments, strict=False):
            # A parameter declared as an array, double p[4], is a pointer.
            place = self._declare(each.child_by_field_name("declarator"), self._holds_vectors(each))
            place.is_array, place.num_elements, place.content = False, 1, argument
        self._read(function.child_by_field_name("body"))
        value = join_values(Value(), *self._return_values)
        self._call_stack.pop()
        self._scope, self._return_values = scope, returned
        return value

    def _call_expression(self, node: Node) -> Value:
        function, arguments = node.child_by_field_name("function"), node.child_by_field_name("arguments")
        given = [] if arguments is None else arguments.named_children
        values = [self._read(each) for each in given if each.type != "comment"]
        own = [place.name for place in self._read(function).pointees if place.kind == "function"]
        if own:
            return join_values(*[self._read_call(each, values, node) for each in sorted(own)])
        name = node_text(function)
        if _INTRINSICS.fullmatch(name):
            self._record_use("vectorization", node, f"calls {name}()")
        if _ALLOCATORS.fullmatch(name):
            memory = Location(
                f"the memory of {name}()", is_array=True, num_elements=None, reset_loops=frozenset(self._open_loops)
            )
            return Value(frozenset((memory,)))
        if _COPY_FUNCTIONS.fullmatch(name) and len(values) > 1:
            others = [self._load(value) for value in values[1:]]
            self._store(values[0], next((value for value in others if value.origins), others[-1]), node)
            return values[0]
        return self._join_computed([self._load(value) for value in values])

    def _join_computed(self, values: list[Value]) -> Value:
        # The program does not define the function: fma(a, b, c) counts as a product.
        numbers = [value for value in values if value.origins]
        value = join_values(Value(), *values)
        # A call with one number, such as _mm256_loadu_pd(p), is a copy.
        value = value._replace(is_computed=value.is_computed or len(numbers) > 1)
        factors = [value for value in numbers if not value.origins >= self.inputs]
        if factors:
            product = reduce(lambda left, right: self._combine("*", left, right), factors)
            value = value._replace(items=(product.items + value.items)[:MAX_ITEMS])
        return value

    # Statements ------------------------------------------------------------------------------------------------------

    def _compound_statement(self, node: Node) -> Value:
        self._scope = self._scope.new_child()
        value, is_dead = Value(), False
        for child in node.named_children:
            # After a return or a jump, code is unreachable up to the next label.
            is_dead = is_dead and child.type not in ("labeled_statement", "case_statement")
            if not is_dead:
                value = self._read(child)
                is_dead = child.type in _JUMPS
        self._scope = self._scope.parents
        # The last expression is the value of ({ ...; value; }).
        return value

    def _type_definition(self, node: Node) -> None:
        self._read(node.child_by_field_name("type"))
        if self._is_vector(node_text(node)):
            names = node.children_by_field_name("declarator")
            self._vector_types |= {node_text([*declarators(each)][-1]) for each in names}

    def _holds_vectors(self, declaration: Node) -> bool:
        first = declaration.child_by_field_name("declarator")
        end = declaration.end_byte if first is None else first.start_byte
        return any(self._is_vector(node_text(each)) for each in declaration.children if each.end_byte <= end)

    def _is_vector(self, words: str) -> bool:
        return bool(_VECTOR_TYPES.search(words)) or not self._vector_types.isdisjoint(re.findall(r"\w+", words))

    def _enumerator_list(self, node: Node) -> None:
        following = 0
        for each in node.named_children:
            number = self._read(each.child_by_field_name("value")).constant
            following = following if number is None else number
            name = node_text(each.child_by_field_name("name"))
            self._scope[name] = Location(name, content=Value(constant=following))
            following += 1

    def _declaration(self, node: Node) -> None:
        self._read(node.child_by_field_name("type"))
        is_vector = self._holds_vectors(node)
        for each in node.children_by_field_name("declarator"):
            initial = each.child_by_field_name("value")
            # A forward declaration of a function must not shadow its definition.
            if initial is None and node_text([*declarators(each)][-1]) in self._functions:
                continue
            value = self._read(initial)
            place = self._declare(each, is_vector)
            if initial is not None:
                if place.is_array and "[]" in node_text(each.child_by_field_name("declarator")):
                    place.num_elements = initial.named_child_count
                self._store(Value(frozenset((place,))), value._replace(reads=value.reads - {place}), initial)

    def _declare(self, declarator: Node | None, is_vector: bool) -> Location:
        chain = [*declarators(declarator)]
        name = node_text(chain[-1]) if chain else ""
        derived = [each for each in chain if each.type in ("array_declarator", "pointer_declarator")]
        place = Location(name, depth=len(derived), branch=self._branch, reset_loops=frozenset(self._open_loops))
        # A pointer to an array, double (*p)[4], is not an array.
        if derived and derived[-1].type == "array_declarator":
            place.is_array = True
            # The vector width is ignored: a vector of four numbers counts as one element.
            sides = [self._read(each.child_by_field_name("size")).constant for each in derived if "array" in each.type]
            known = [side for side in sides if side is not None]
            place.num_elements = math.prod(known) if len(known) == len(sides) else None
        if is_vector and declarator is not None:
            place.vector_use = TechniqueUse("vectorization", self._line(declarator), f"{name} is a vector")
        self._scope[name] = place
        return place

    def _return_statement(self, node: Node) -> None:
        self._return_values += [self._read(each) for each in node.named_children]

    def _if_statement(self, node: Node) -> None:
        condition = self._read(node.child_by_field_name("condition")).constant
        sides = [node.child_by_field_name("consequence"), node.child_by_field_name("alternative")]
        if condition is not None:
            self._read(sides[0 if condition else 1])
        else:
            self._read_branches(*sides)

    def _switch_statement(self, node: Node) -> None:
        self._read(node.child_by_field_name("condition"))
        body = node.child_by_field_name("body")
        self._read_branches(*(() if body is None else body.named_children))

    def _read_branches(self, *sides: Node | None) -> None:
        before = self._branch
        for side in sides:
            if side is not None:
                self._branch = (*before, side.id)
                self._read(side)
        self._branch = before

    def _for_statement(self, node: Node) -> None:
        self._scope = self._scope.new_child()
        self._read(node.child_by_field_name("initializer"))
        condition, update = node.child_by_field_name("condition"), node.child_by_field_name("update")
        before, can_repeat = self._open_loops, self._read(condition).constant != 0
        if can_repeat or node.type == "do_statement":
            assigned, trip = self._assignments(node), self._trip_count(condition, update)
            # A body that runs only once, such as do { ... } while (0), is not a loop.
            if can_repeat and trip != 1:
                self._open_loops = (*before, len(self.loops))
                self.loops.append(Loop(_loop_variable(update, condition, assigned), trip, self._line(node)))
            self._add_loop(assigned, frozenset(self._open_loops[len(before) :]))
            self._read(node.child_by_field_name("body"))
            self._read(update)
        self._open_loops = before
        self._scope = self._scope.parents

    _while_statement = _do_statement = _for_statement

    def _assignments(self, loop: Node) -> set[str]:
        # A helper's loops are read at each call, but their assignments stay the same.
        if loop.id not in self._assigned:
            initial = loop.child_by_field_name("initializer")
            start = loop.start_byte if initial is None else initial.end_byte
            names = [nodes["name"][0] for nodes in query_matches(_ASSIGNMENT_QUERY, loop)]
            self._steps += len(names)
            self._assigned[loop.id] = {node_text(name) for name in names if name.start_byte >= start}
        return self._assigned[loop.id]

    def _add_loop(self, assigned: set[str], loop: frozenset[int]) -> None:
        for name in assigned:
            place = self._scope.get(name)
            if place is not None and not place.is_array:
                content = place.content
                place.content = content._replace(loops=content.loops | loop, constant=None)

    def _trip_count(self, condition: Node | None, update: Node | None) -> int | None:
        """Returns the trip count of a loop such as `for (r = 0; r < 4; r++)`, or None."""
        sign, added = _field_text(condition, "operator"), _field_text(update, "operator")
        if condition is None or update is None or sign not in ("<", "<=", "!=") or added not in ("++", "+="):
            return None
        first = self._read(condition.child_by_field_name("left")).constant
        last = self._read(condition.child_by_field_name("right")).constant
        step = 1 if added == "++" else self._read(update.child_by_field_name("right")).constant
        if first is None or last is None or step is None or step < 1:
            return None
        # Dividing the negated distance rounds the number of steps up.
        return max(0, -(-(last + (sign == "<=") - first) // step))

    # Memory ----------------------------------------------------------------------------------------------------------

    def _address(self, node: Node | None) -> Value:
        """Returns the address of an lvalue."""
        while node is not None and (node.type in _WRAPPERS or _field_text(node, "operator") == "."):
            node = node.child_by_field_name("argument") or node.child_by_field_name("value") or node.named_child(0)
        if node is None:
            return Value()
        argument = node.child_by_field_name("argument")
        if node.type == "identifier":
            place = self._scope.get(node_text(node))
            if place is not None and place.vector_use is not None:
                self.uses.append(place.vector_use)
            return Value() if place is None else Value(frozenset((place,)))
        if node.type == "subscript_expression":
            base, index = self._pointee(argument), self._read(node.child_by_field_name("index"))
            return base._replace(loops=base.loops | index.loops, constant=None)
        if node.type == "pointer_expression" and _field_text(node, "operator") == "*":
            return self._pointee(argument)
        # The node is x->y, where x is the address, or an expression such as a call.
        return self._read(argument if node.type == "field_expression" else node)

    def _pointee(self, node: Node | None) -> Value:
        """Returns the target of a pointer, an array or a vector."""
        value = self._read(node)
        # A vector can be subscripted, although it is not an array.
        return value if value.pointees else self._address(node)

    def _identifier(self, node: Node) -> Value:
        address, subscripts = self._address(node), 0
        while node.type in ("subscript_expression", "parenthesized_expression") and node.named_children:
            subscripts += node.type == "subscript_expression"
            node = node.named_children[0]
        place = self._scope.get(node_text(node), Location(""))
        if not subscripts:
            return address if place.is_array else self._load(address)
        # All subscripts except the last yield rows, or pointers to rows.
        is_row = subscripts < place.depth and not any(each.content.pointees for each in address.pointees)
        return address if is_row else self._load(address)

    _subscript_expression = _identifier

    def _pointer_expression(self, node: Node) -> Value:
        is_address = _field_text(node, "operator") == "&"
        return self._address(node.child_by_field_name("argument")) if is_address else self._load(self._address(node))

    def _load(self, address: Value) -> Value:
        """Returns the content of an address, or the value itself if it is not an address."""
        parts = []
        for place in address.pointees:
            if place.kind == "function":
                parts.append(Value(frozenset((place,))))
                continue
            content, items = place.content, place.content.items
            loops = content.loops | address.loops
            # With a single input, each element read is a work item, without a product.
            if place.is_array and len(self.inputs) == 1 and content.origins and not content.is_computed:
                items = (frozenset((name, loop) for name in content.origins for loop in loops),)
            parts.append(content._replace(loops=loops, items=items, reads=frozenset((place,))))
        return join_values(*parts) if parts else address

    def _assignment_expression(self, node: Node) -> Value:
        value = self._read(node.child_by_field_name("right"))
        self._store(self._address(node.child_by_field_name("left")), value, node, _field_text(node, "operator") != "=")
        return value._replace(items=())

    def _store(self, address: Value, value: Value, node: Node, adds: bool = False) -> None:
        """Records that a value is stored at an address, or added to it if `adds` is set."""
        for place in address.pointees:
            if place.kind in ("input", "function"):
                continue
            is_sum, is_local = adds or place in value.reads, place.kind == "local"
            is_work = is_sum or (value.is_computed and not is_local)
            if not is_local:
                self.output_loops |= address.loops
            if is_work:
                reset, line = place.reset_loops if is_local else EMPTY, self._line(node)
                self._steps += len(value.items)
                self.sites += [
                    WorkSite(self._open_loops, self._branch, place, address.loops, reset, item, line)
                    for item in value.items
                ]
            if is_local:
                self._assign_local(place, address, value._replace(items=()) if is_work else value, is_sum, node)

    def _assign_local(self, place: Location, address: Value, value: Value, is_sum: bool, node: Node) -> None:
        if is_sum:
            place.content = join_values(place.content, value)._replace(constant=None, items=(), is_computed=True)
            return
        is_panel = place.is_array and (place.num_elements is None or place.num_elements > MAX_COPIED_TO_REGISTERS)
        is_part = len(self.inputs) > 1 and not value.origins >= self.inputs
        if is_panel and value.origins and (is_part or not value.is_computed):
            names = " and ".join(sorted(value.origins))
            self._record_use("packing", node, f"copies numbers of {names} to {place.name}")
        place.reset_loops = frozenset(self._open_loops) - address.loops
        if place.is_array:
            place.content = join_values(place.content, value)._replace(constant=None)
        else:
            # In another branch than the declaration, the assignment may not run.
            place.content = value if self._branch == place.branch else join_values(place.content, value)

    # Numbers ---------------------------------------------------------------------------------------------------------

    def _number_literal(self, node: Node) -> Value:
        try:
            return Value(constant=int(node_text(node).rstrip("uUlL"), 0))
        except ValueError:
            return Value()

    def _cast_expression(self, node: Node) -> Value:
        words = node_text(node.child_by_field_name("type"))
        if self._is_vector(words):
            self._record_use("vectorization", node, f"{words} is a vector type")
        return self._read(node.child_by_field_name("value"))

    _compound_literal_expression = _cast_expression

    def _unary_expression(self, node: Node) -> Value:
        value, sign = self._read(node.child_by_field_name("argument")), _field_text(node, "operator")
        # -x is 0 - x, and !x is 0 == x.
        return value._replace(constant=fold_constants("==" if sign == "!" else sign, 0, value.constant))

    def _binary_expression(self, node: Node) -> Value:
        # A sum of a thousand terms is a thousand nested expressions, always on the left.
        chain, left = [], node
        while left is not None and left.type == "binary_expression":
            self._steps += 1
            chain.append(left)
            left = left.child_by_field_name("left")
        value = self._read(left)
        for each in reversed(chain):
            value = self._combine(_field_text(each, "operator"), value, self._read(each.child_by_field_name("right")))
        return value

    def _combine(self, sign: str, left: Value, right: Value) -> Value:
        value = join_values(left, right)._replace(
            is_computed=True, constant=fold_constants(sign, left.constant, right.constant)
        )
        if sign != "*":
            return value
        # If only both sides together depend on all inputs, the product is a new work item.
        # Otherwise, it has the work items of its sides.
        if value.origins >= self.inputs and not any(side.origins >= self.inputs for side in (left, right)):
            chosen = frozenset((name, loop) for side in (left, right) for name in side.origins for loop in side.loops)
            return value._replace(items=(chosen,))
        return value

    def _conditional_expression(self, node: Node) -> Value:
        condition = self._read(node.child_by_field_name("condition")).constant
        sides = [node.child_by_field_name("consequence"), node.child_by_field_name("alternative")]
        if condition is not None:
            return self._read(sides[0 if condition else 1])
        values = [self._read(side) for side in sides]
        # Only one side is computed: (i < 4 ? a : b) * c is one product.
        return join_values(*values)._replace(items=max((value.items for value in values), key=len))


def _argument_value(parameter: Parameter) -> Value:
    """Returns the address of an input or output."""
    kind, origins = ("output", EMPTY) if parameter.is_output else ("input", frozenset((parameter.name,)))
    return Value(frozenset((Location(parameter.name, kind, is_array=True, content=Value(origins=origins)),)))


def _field_text(node: Node | None, name: str) -> str:
    return "" if node is None else node_text(node.child_by_field_name(name))


def _loop_variable(update: Node | None, condition: Node | None, assigned: set[str]) -> str:
    """Returns the presumed name of the loop variable."""
    names = re.findall(r"[A-Za-z_]\w*", f"{node_text(update)} {node_text(condition)}")
    return next((name for name in names if name in assigned), names[0] if names else "no variable")
