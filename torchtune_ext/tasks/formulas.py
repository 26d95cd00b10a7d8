r"""Compares the values of two formulas in LaTeX or plain text.

`same_value` parses two normalized formulas and evaluates them at a few fixed points: exactly if
they are rational, else to 80 and to 120 digits. The difference counts as zero if more digits make
it smaller. Sizes are bounded before each evaluation, so a formula cannot take long. A formula
outside the grammar raises `UnreadableFormula`.
"""

import math
import operator
import re
import zlib
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

from torchtune_ext.tasks.notation import GREEK

MAX_BITS = 100_000  # largest size of an exact number
MAX_LOG_SIZE = 1e5  # largest natural logarithm of an inexact number
MAX_DEPTH = 40  # deepest nesting of brackets
DIGITS = (80, 120)
MANY_DIGITS = (80, 1200)  # for formulas without symbols, whose values may differ by 1e-400
NUM_POINTS = 6
NUM_INTEGER_POINTS = 5  # additional points with integer coordinates
POINT_SIGNS = (1, 1, 1, 1, -1, -1)


class UnreadableFormula(Exception):
    """A formula is outside this module's grammar, has no value, or is too large to evaluate."""


def expect(fulfilled: object, cause: str) -> None:
    """Raises UnreadableFormula with `cause` unless a condition holds."""
    if not fulfilled:
        raise UnreadableFormula(cause)


# ---- the grammar

_OF_SEVERAL = {"max", "min", "gcd", "lcm"}
FUNCTIONS = set("sin cos tan cot sec csc asin acos atan sinh cosh tanh ln log lg exp".split()) | _OF_SEVERAL
_ALIASES = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arctg": "atan", "tg": "tan", "ctg": "cot"}
SYMBOLS = (
    {f"\\{name}" for name in GREEK} - {"\\pi"} | {"\\" + name.capitalize() for name in GREEK} | {"\\ell", "\\hbar"}
)
_DECORATED = {f"\\{name}" for name in "vec hat bar overline tilde dot ddot mathbb mathcal overrightarrow".split()}
_TIMES = {"\\cdot": "*", "\\times": "*", "*": "*", "\\div": "/", "/": "/", "\\bmod": "mod", "\\mod": "mod"}
_NO_FACTOR = {"\\}", "\\over", "\\choose", "\\rfloor", "\\rceil", "\\\\", "\\pm", "\\mp", *_TIMES}
_CLOSING = {"(": ")", "[": "]", "{": "}", "|": "|", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_OF_BRACKETS = {"|": "abs", "\\lfloor": "floor", "\\lceil": "ceil"}
_PERCENT = ("number", Fraction(1, 100))
_FACTORS = {"%": _PERCENT, "\\%": _PERCENT, "\\degree": ("/", ("constant", "pi"), ("number", Fraction(180)))}
_DEGREE = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})")
_REPEATING = re.compile(r"(\d*)\.(\d*)\s*(?:\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d)))")
_DOTTED = re.compile(r"(\d*)\.(\d*?)(?:(\d)\3{2,}|(\d{2,})\4{1,})\s*(?:\\ldots|\.\.\.)")
_MIXED = re.compile(r"(?<![\d.}])(\d+)(?:\s*\\frac\s*(?:\{(\d+)\}\s*\{(\d+)\}|(\d)(\d))|\s+(\d+)\s*/\s*(\d+))(?!\d)")
_LITERAL = re.compile(r"\\[A-Za-z]+|\\.|\d+\.?\d*|\.\d+|\S")
_SENTENCE = re.compile(r"(?<![A-Za-z\\])(?:[A-Za-z]{5,}|[A-Za-z]{3,}\s+[A-Za-z]{2,}|[A-Za-z]{2,}\s+[A-Za-z]{3,})")
_SCIENTIFIC = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+))\s?[eE]\s?([-+]?\d{1,4})")


def _expand_repeating(match: re.Match) -> str:
    """Rewrites a repeating decimal as a fraction."""
    whole, fixed, block = match[1] or "0", match[2], match[3] or match[4]
    top = int(whole + fixed + block) - int(whole + fixed)
    return f"(\\frac{{{top}}}{{{'9' * len(block)}{'0' * len(fixed)}}})"


def _expand_mixed(match: re.Match) -> str:
    whole, top, below = match[1], match[2] or match[4] or match[6], match[3] or match[5] or match[7]
    return f"({whole}+\\frac{{{top}}}{{{below}}})" if int(top) < int(below) else match[0]


def _function_name(token: str) -> str | None:
    r"""Returns the name of a function such as \sin, or None."""
    name = _ALIASES.get(token[1:], token[1:])
    return name if token[:1] == "\\" and name in FUNCTIONS else None


class _Parser:
    """Recursive-descent parser to nested tuples: ("+", a, b), ("number", 2), ("symbol", "x")."""

    def __init__(self, text: str) -> None:
        expect(not _SENTENCE.search(text), "words")
        if power := _SCIENTIFIC.fullmatch(text):
            text = f"{power[1]} \\times 10^{{{power[2]}}}"
        text = _DEGREE.sub(r"\\degree ", text)
        text = re.sub(r"\\dot\s*\{(\d)\}(\d*)\\dot\s*\{(\d)\}", r"\\overline{\1\2\3}", text)
        text = _MIXED.sub(_expand_mixed, _DOTTED.sub(_expand_repeating, _REPEATING.sub(_expand_repeating, text)))
        self.tokens, self.at, self.depth, self.open_bars = _LITERAL.findall(text), 0, 0, 0
        self.group_end = -1  # end of the last group in braces that is not an argument

    def parse(self) -> tuple:
        result = self.sum()
        expect(self.at == len(self.tokens), self.peek())
        return result

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def expect(self, token: str = "") -> str:
        found = self.peek()
        expect(found and found == (token or found), found)
        self.at += 1
        return found

    def accept(self, *tokens: str) -> bool:
        found = self.peek() in tokens and self.at < len(self.tokens)
        self.at += found
        return found

    def sum(self) -> tuple:
        self.depth += 1
        expect(self.depth <= MAX_DEPTH, "too deep")
        result = self.product()
        while self.peek() in ("+", "-"):
            result = ("+", result, self.product())
        if self.accept("\\over"):
            result = ("/", result, self.sum())
        elif self.accept("\\choose"):
            result = ("binom", result, self.sum())
        self.depth -= 1
        return result

    def signed(self, parse: Callable[[], tuple]) -> tuple:
        minus = False
        while self.peek() in ("+", "-"):
            minus ^= self.expect() == "-"
        return ("neg", parse()) if minus else parse()

    def product(self, implicit: bool = False) -> tuple:
        result = self.signed(self.power)
        while True:
            token = self.peek()
            if not implicit and token in _TIMES:
                self.expect()
                result = (_TIMES[token], result, self.signed(self.power))
            elif self.starts_factor(token) and not (implicit and _function_name(token)):
                last = self.at - 1
                while last and last + 1 <= self.group_end and self.tokens[last] == "}":
                    last -= 1
                first = next((other for other in self.tokens[self.at :] if other != "{"), "")
                numbers = first[:1].isdigit() and self.tokens[last][-1].isdigit()
                expect(not numbers, "two numbers side by side")
                result = ("*", result, self.power())
            else:
                return result

    def starts_factor(self, token: str) -> bool:
        if token == "|":
            return self.open_bars == 0
        return bool(token) and (token[0].isalnum() or token[0] in ".([{\\") and token not in _NO_FACTOR

    def power(self) -> tuple:
        result = self.atom()
        while True:
            if self.accept("^"):
                result = ("^", result, self.argument())
            elif self.accept("!"):
                result = ("factorial", result)
            elif self.peek() in _FACTORS:
                result = ("*", result, _FACTORS[self.expect()])
            else:
                return result

    def argument(self) -> tuple:
        r"""Parses the argument of ^, \sqrt or \frac: a braced group, bracket, digit or symbol."""
        if self.accept("{"):
            result = self.sum()
            self.expect("}")
            return result
        token = self.peek()
        if token[:1].isdigit() and len(token) > 1:
            self.tokens[self.at : self.at + 1] = [token[0], token[1:]]
        return self.signed(self.argument) if token == "-" else self.atom()

    def atom(self) -> tuple:
        token = self.expect()
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            return ("number", Fraction(token.rstrip(".") or "x"))
        if token in _CLOSING:
            self.open_bars += token == "|"
            result = self.sum()
            self.open_bars -= token == "|"
            self.expect(_CLOSING[token])
            self.group_end = self.at if token == "{" else self.group_end
            return (_OF_BRACKETS[token], result) if token in _OF_BRACKETS else result
        if token in ("\\frac", "\\binom"):
            return ("/" if token == "\\frac" else "binom", self.argument(), self.argument())
        if token == "\\sqrt":
            index = ("number", Fraction(2))
            if self.accept("["):
                index = self.sum()
                self.expect("]")
            return ("root", self.argument(), index)
        if token in ("\\pi", "e", "i"):
            return ("constant", token.strip("\\")) if self.peek() != "_" else self.symbol(token)
        if token in _DECORATED:
            return self.symbol(token + "".join(self.group()))
        if name := _function_name(token):
            return self.function(name)
        if (token.isalpha() and token.isascii()) or token in SYMBOLS:
            return self.symbol(token)
        raise UnreadableFormula(token)

    def group(self) -> list[str]:
        if not self.accept("{"):
            return [self.expect()]
        start = self.at
        while not self.accept("}"):
            expect(re.fullmatch(r"[A-Za-z0-9,+\-']|\d+|\\[A-Za-z]+", self.expect()), "subscript")
        return self.tokens[start : self.at - 1]

    def symbol(self, name: str) -> tuple:
        while self.peek() in ("_", "'"):
            name += self.expect()
            if name[-1] == "_":
                name += "".join(self.group())
        return ("symbol", name)

    def function(self, name: str) -> tuple:
        base, exponent = None, None
        while self.peek() in ("_", "^"):
            if self.expect() == "_":
                base = self.argument()
            else:
                exponent = self.argument()
        if self.peek() in ("(", "[", "{", "\\{"):
            self.expect()
            arguments = [self.sum()]
            while self.accept(","):
                arguments.append(self.sum())
            self.expect()
        else:
            arguments = [self.product(implicit=True)]
        if exponent == ("neg", ("number", Fraction(1))):
            name, exponent = f"a{name}", None
        expect(name in FUNCTIONS, name)
        expect((not base or name == "log") and (len(arguments) == 1 or name in _OF_SEVERAL), name)
        result = ("log", arguments[0], base) if base else (name, *arguments)
        return result if exponent is None else ("^", result, exponent)


@lru_cache(maxsize=4096)
def parse_formula(text: str) -> tuple:
    """Parses a normalized formula, or raises UnreadableFormula."""
    try:
        return _Parser(text).parse()
    except (ValueError, IndexError, RecursionError, ZeroDivisionError) as error:
        raise UnreadableFormula(text[:40]) from error


def symbol_names(tree: Any) -> set[str]:
    """Returns the symbols and constants of a parsed formula."""
    if tree[0] in ("symbol", "constant"):
        return {tree[1]} if tree[0] == "symbol" else {f"\\{tree[1]}"}
    return set().union(*(symbol_names(part) for part in tree[1:] if isinstance(part, tuple)))


# ---- evaluation

_SIMPLE = {
    "+": operator.add, "*": operator.mul, "/": operator.truediv, "neg": operator.neg, "abs": abs, "max": max, "min": min,
}  # fmt: skip


class UndefinedValue(Exception):
    """A formula is undefined at a point."""


@lru_cache(maxsize=3)
def _mp_context(digits: int) -> Any:
    import mpmath

    context = mpmath.MPContext()
    context.dps = digits
    return context


class _Evaluator:
    """Evaluates formulas at one point, in exact fractions where possible, else with mpmath."""

    def __init__(self, point: dict[str, Fraction], digits: int, complex_values: bool) -> None:
        self.point, self.complex_values, self.mp = point, complex_values, _mp_context(digits)

    def evaluate(self, tree: tuple) -> Any:
        kind = tree[0]
        if kind == "number":
            return tree[1]
        if kind == "symbol":
            return self.point[tree[1]]
        if kind == "constant":
            return {"pi": self.mp.pi, "e": self.mp.e, "i": self.mp.mpc(0, 1)}[tree[1]] * 1
        parts = [self.evaluate(part) for part in tree[1:]]
        try:
            result = self.apply(kind, *parts)
        except (ZeroDivisionError, ValueError, TypeError, OverflowError) as error:
            raise UndefinedValue(kind) from error
        return self.require_bounded(result)

    def require_bounded(self, result: Any) -> Any:
        if isinstance(result, Fraction):
            expect(max(result.numerator.bit_length(), result.denominator.bit_length()) <= MAX_BITS, "too large")
            return result
        if not self.mp.isfinite(result):
            raise UndefinedValue("infinite")
        if isinstance(result, self.mp.mpc):
            if result.imag == 0:
                return result.real
            if not self.complex_values:
                raise UndefinedValue("complex")
        elif result:
            expect(abs(self.mp.mag(result)) <= MAX_LOG_SIZE * 1.5, "too large")
        return result

    def to_mp(self, value: Any) -> Any:
        return self.mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value

    def apply(self, kind: str, *parts: Any) -> Any:
        exact = all(isinstance(part, Fraction) for part in parts)
        if kind in ("gcd", "lcm", "mod"):
            expect(exact and all(part.denominator == 1 for part in parts), kind)
            return parts[0] % parts[1] if kind == "mod" else Fraction(getattr(math, kind)(*map(int, parts)))
        if kind in ("^", "root"):
            return self.power(parts[0], parts[1] if kind == "^" else 1 / parts[1])
        if not exact:
            parts = tuple(map(self.to_mp, parts))
        if kind in _SIMPLE:
            return _SIMPLE[kind](*parts)
        if kind in ("floor", "ceil"):
            return Fraction(int(getattr(math if exact else self.mp, kind)(parts[0])))
        if kind in ("factorial", "binom"):
            return self.combinatorial(kind, *parts)
        return self.call_function(kind, *map(self.to_mp, parts))

    def power(self, base: Any, exponent: Any) -> Any:
        if base == 0:
            if isinstance(exponent, self.mp.mpc) or exponent <= 0:
                raise UndefinedValue("0^0")
            return Fraction(0)
        if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
            count = int(exponent) if abs(base) != 1 else int(exponent) % 2
            bits = abs(count) * max(base.numerator.bit_length(), base.denominator.bit_length())
            expect(bits <= MAX_BITS, "too large")
            return base**count
        number, power = self.to_mp(base), self.to_mp(exponent)
        expect(abs(power) * (abs(self.mp.mag(number)) + 1) <= MAX_LOG_SIZE, "too large")
        real = not isinstance(number, self.mp.mpc) and isinstance(exponent, Fraction)
        if real and number < 0 and exponent.denominator % 2 == 1:
            # A negative number has a real odd root, such as the cube root of -8.
            return abs(number) ** power * (-1 if exponent.numerator % 2 else 1)
        return self.mp.power(number, power)

    def combinatorial(self, kind: str, first: Any, second: Any = Fraction(0)) -> Any:
        is_real = not isinstance(first, self.mp.mpc) and not isinstance(second, self.mp.mpc)
        expect(is_real and max(abs(first), abs(second)) <= 10_000, "too large")
        if isinstance(first, Fraction) and first.denominator == second.denominator == 1:
            if first < 0 or second < 0:
                raise UndefinedValue(kind)
            return Fraction(math.factorial(int(first)) if kind == "factorial" else math.comb(int(first), int(second)))
        number = self.to_mp(first)
        return self.mp.gamma(number + 1) if kind == "factorial" else self.mp.binomial(number, self.to_mp(second))

    def call_function(self, name: str, value: Any, base: Any = None) -> Any:
        expect(name not in ("exp", "sinh", "cosh", "tanh") or abs(value) <= MAX_LOG_SIZE, "too large")
        if name in ("ln", "log", "lg"):
            base = self.mp.mpf(10) if name == "lg" else base
            return self.mp.log(value) / (1 if base is None else self.mp.log(base))
        return getattr(self.mp, name)(value)


def real_value(text: str) -> Fraction:
    """Returns the real value of a normalized formula without symbols, to 80 digits.

    Raises:
        UnreadableFormula: the formula is outside the grammar, has symbols, or is not real.
    """
    tree = parse_formula(text)
    expect(symbol_names(tree) <= {"\\pi", "\\e"}, text)
    try:
        value = _Evaluator({}, DIGITS[0], False).evaluate(tree)
    except UndefinedValue as error:
        raise UnreadableFormula(text) from error
    if isinstance(value, Fraction):
        return value
    expect(hasattr(value, "man_exp"), text)
    mantissa, exponent = value.man_exp
    return Fraction(mantissa if value > 0 else -mantissa) * Fraction(2) ** exponent


def same_value(first: str, second: str) -> bool:
    """Tells whether two normalized formulas have the same value wherever they are defined.

    Raises:
        UnreadableFormula: a formula is outside the grammar.
    """
    return differ_by_factor(parse_formula(first), parse_formula(second), factor=False) is True


def differ_by_factor(first: tuple, second: tuple, factor: bool = True) -> bool | int:
    """Tells whether two parsed formulas are equal, or proportional.

    Args:
        factor: True compares up to a constant factor.

    Returns:
        With `factor`, the sign of the constant ratio, or False; else whether the values are equal.
    """
    known = symbol_names(first) | symbol_names(second)
    symbols = sorted(name for name in known if name not in ("\\pi", "\\e", "\\i"))
    complex_values = "\\i" in known or not symbols
    # Step functions and powers of negative numbers are also, or only, compared at integers.
    stepped = re.search("floor|ceil", f"{first}{second}") is not None
    begin = NUM_POINTS if stepped and set(symbols) <= set("nmkij") else 0
    ratio: list[Any] = []
    checked = 0
    for index in range(begin, NUM_POINTS + NUM_INTEGER_POINTS) if symbols else [0]:
        if index == NUM_POINTS and checked and not stepped:
            break
        point = {name: _coordinate(name, index) for name in symbols}
        evaluations = [_Evaluator(point, digits, complex_values) for digits in (DIGITS if symbols else MANY_DIGITS)]
        try:
            right = [evaluation.evaluate(first) for evaluation in evaluations]
        except UndefinedValue:
            continue  # outside the domain of the first formula
        try:
            other = [evaluation.evaluate(second) for evaluation in evaluations]
        except UndefinedValue:
            return False
        checked += 1
        if factor:
            right, other = ([e.to_mp(v) for e, v in zip(evaluations, values, strict=True)] for values in (right, other))
            if not all(right):
                return False
            ratio = ratio or [b / a for a, b in zip(right, other, strict=True)]
            right = [a * r for a, r in zip(right, ratio, strict=True)]
        if not _is_zero_difference(evaluations, right, other):
            return False
    return checked > 0 and (_real_sign(ratio[0]) if factor else True)


def _real_sign(ratio: Any) -> int:
    return 0 if hasattr(ratio, "imag") and ratio.imag else (ratio.real > 0) - (ratio.real < 0)


def _is_zero_difference(evaluations: list, right: list, other: list) -> bool:
    """Tells whether the difference of two values is exactly zero, or shrinks with more digits."""
    if all(isinstance(value, Fraction) for value in (*right, *other)):
        return right[0] == other[0]
    rough, fine = (
        abs(evaluation.to_mp(a) - evaluation.to_mp(b))
        for evaluation, a, b in zip(evaluations, right, other, strict=True)
    )
    mp = evaluations[1].mp
    return fine < (rough * mp.mpf(10) ** -20 if rough else mp.mpf(10) ** (-mp.dps // 2))


def _coordinate(name: str, index: int) -> Fraction:
    """Returns the value of a symbol at a point, identical for every formula."""
    # Odd numerators over powers of two: a negative number has no real power of this kind.
    number = zlib.crc32(f"{name} {index}".encode())
    if index >= NUM_POINTS:
        return Fraction(index - NUM_POINTS + 1 + 6 * (number % 4))
    size = Fraction(2 * (number % 29) + 3, 64)
    return POINT_SIGNS[index] * (size + index) if index < 5 or number & 4096 else size + 1
