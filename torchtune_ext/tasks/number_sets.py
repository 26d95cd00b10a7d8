"""Compares sets of numbers: inequalities, intervals, unions, and the real numbers without points.

A set is a sorted list of intervals, and an interval is a pair of cuts. The cut (3, 0) lies just
before the number 3, and (3, 1) just after it: [3, 5) is ((3, 0), (5, 0)).
"""

import re
from fractions import Fraction

from torchtune_ext.tasks.formulas import UnreadableFormula, differ_by_factor, expect, parse_formula, real_value
from torchtune_ext.tasks.notation import COMMA, CUP, is_name, parse_brackets, split_assignment, split_outside

ORDER = re.compile(r"(\\(?:le|ge|ne)(?![A-Za-z])|[<>])")
REALS = re.compile(r"\\mathbb\s*\{?\s*R\s*\}?|R|all\s*real\s*numbers?|all\s*reals")
INFINITY = re.compile(r"([-+]?)\s*\\infty")
REAL_LINE = ((float("-inf"), 1), (float("inf"), 0))
PRECISION = Fraction(1, 10**60)  # relative; `real_value` returns 80 digits

_BUILDER = re.compile(r"\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?[|:]\s*([^|]*)\\\}")
_AND = re.compile(r"\\text\{\s*and\s*\}|(?<![A-Za-z\\])and(?![A-Za-z])|\\wedge(?![A-Za-z])")
_UNION = re.compile(rf"{CUP.pattern}|{COMMA.pattern}")
_REVERSED_SIGN = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne"}

Cut = tuple[Fraction | float, int]
Interval = tuple[Cut, Cut]


def compare_sets(gold: str, answer: str) -> bool | None:
    """Compares two sets of numbers. None: neither is an inequality, R, or a set without points."""
    if not any(ORDER.search(text) or "\\setminus" in text or REALS.fullmatch(text) for text in (gold, answer)):
        return None
    try:
        (name, right), (other, given) = parse_set(gold), parse_set(answer)
    except UnreadableFormula:
        return same_inequality(gold, answer)
    if (name and other and name != other) or len(right) != len(given):
        return False
    return all(map(same_cut, sum(right, ()), sum(given, ())))


def same_cut(first: Cut, second: Cut) -> bool:
    (value, side), (other, other_side) = first, second
    return side == other_side and (value == other or abs(value - other) < abs(value) * PRECISION)


def same_inequality(gold: str, answer: str) -> bool | None:
    """Compares two inequalities of several symbols."""
    right, given = ORDER.split(gold), ORDER.split(answer)
    if len(right) != 3 or len(given) != 3:
        return False if ORDER.search(answer) or ORDER.search(gold) else None
    sign = differ_by_factor(parse_difference(right[::2]), parse_difference(given[::2]))
    return bool(sign) and right[1] == (given[1] if sign > 0 else _REVERSED_SIGN[given[1]])


def parse_difference(sides: list[str]) -> tuple:
    """Parses an equation to the difference of its left and right side."""
    expect(not any(re.search(r"\\frac\s*\{\s*d", side) or "'" in side for side in sides), "a derivative")
    return ("+", parse_formula(sides[0]), ("neg", parse_formula(sides[1])))


def parse_set(text: str) -> tuple[str | None, list[Interval]]:
    """Returns (symbol or None, intervals) of a set of numbers, or raises UnreadableFormula."""
    if builder := _BUILDER.fullmatch(text):
        text = builder[1]
    both = split_outside(text, _AND)
    if len(both) == 2 and all(map(ORDER.search, both)):
        (name, first), (other, second) = map(parse_set, both)
        common = [(max(a[0], b[0]), min(a[1], b[1])) for a in first for b in second]
        common = [(low, high) for low, high in common if low < high]
        expect(name == other and common, text)
        return name, sorted(common)
    names, parts = zip(*map(parse_interval, split_outside(text, _UNION)), strict=True)
    known = set(names) - {None}
    expect(len(known) < 2, text)
    return (known.pop() if known else None), merge_intervals([found for part in parts for found in part])


def parse_interval(text: str) -> tuple[str | None, list[Interval]]:
    """Returns (symbol or None, intervals) of a set that is not a union."""
    name, text = split_assignment(text)
    whole, _, points = re.sub(r"-\s*(?=\\\{)", r"\\setminus ", text).partition("\\setminus")
    if points:
        listed = parse_brackets(points.strip())
        if not listed or listed[0] != "\\{":
            raise UnreadableFormula(text)
        parts = parse_interval(whole.strip())[1]
        for point in listed[1]:
            parts = remove_point(parts, real_value(point))
        return name, parts
    if REALS.fullmatch(text):
        return name, [REAL_LINE]
    listed = parse_brackets(text)
    if listed and len(listed[1]) == 2 and listed[0] in "([" and listed[2] in ")]":
        (low, high), closed = listed[1], listed[2] == "]"
        return name, [make_interval(parse_cut(low, listed[0] == "("), parse_cut(high, closed))]
    return parse_inequality(text)


def parse_inequality(text: str) -> tuple[str | None, list[Interval]]:
    """Returns (symbol, intervals) of x > 3, 3 < x, 1 <= x < 5 or x != 3."""
    pieces = [piece.strip() for piece in ORDER.split(text)]
    values, order = pieces[::2], pieces[1::2]
    symbols = [index for index, value in enumerate(values) if is_name(value) and value != "e"]
    expect(len(symbols) == 1 and (len(order) == 1 or (len(order) == 2 and symbols == [1])), text)
    at, name = symbols[0], re.sub(r"\s", "", values[symbols[0]])
    if order == ["\\ne"]:
        return name, remove_point([REAL_LINE], real_value(values[1 - at]))
    low, high = REAL_LINE
    for index, sign in enumerate(order):
        bound, sign = (values[index], _REVERSED_SIGN[sign]) if index < at else (values[index + 1], sign)
        if sign in ("<", "\\le"):
            high = parse_cut(bound, sign == "\\le")
        elif sign in (">", "\\ge"):
            low = parse_cut(bound, sign == ">")
    expect(len(order) == 1 or (low != REAL_LINE[0] and high != REAL_LINE[1]), text)
    return name, [make_interval(low, high)]


def parse_cut(text: str, after: bool) -> Cut:
    """Returns the cut before or after a number or an infinity."""
    endless = INFINITY.fullmatch(text.strip())
    return (float(f"{endless[1]}inf") if endless else real_value(text.strip())), int(after)


def make_interval(low: Cut, high: Cut) -> Interval:
    expect(REAL_LINE[0] <= low < high <= REAL_LINE[1], "an empty interval, or an interval closed at infinity")
    return low, high


def remove_point(parts: list[Interval], point: Fraction) -> list[Interval]:
    """Removes a point from intervals."""
    halves = [half for low, high in parts for half in ((low, min(high, (point, 0))), (max(low, (point, 1)), high))]
    return [(low, high) for low, high in halves if low < high]


def merge_intervals(parts: list[Interval]) -> list[Interval]:
    """Sorts intervals and joins those that touch."""
    result: list[Interval] = []
    for low, high in sorted(parts):
        if result and low <= result[-1][1]:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    return result
