"""Compares sets of numbers: inequalities, intervals, their unions, and the real numbers without some points."""

import re

from torchtune_ext.tasks.formulas import Unreadable, differ_by_factor, parsed, real, same_value
from torchtune_ext.tasks.notation import COMMA, CUP, inside, is_name, split, unnamed

ORDER = re.compile(r"(\\(?:le|ge|ne)(?![A-Za-z])|[<>])")
_BUILDER = re.compile(r"\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?[|:]\s*([^|]*)\\\}")
_AND = re.compile(r"\\text\{\s*and\s*\}|(?<![A-Za-z\\])and(?![A-Za-z])|\\wedge(?![A-Za-z])")
REALS = re.compile(r"\\mathbb\s*\{?\s*R\s*\}?|R|all\s*real\s*numbers?|all\s*reals")
ENDLESS = re.compile(r"([-+]?)\s*\\infty")


def regions(gold: str, answer: str) -> bool | None:
    """Compares two sets of numbers, at least one of which is an inequality or lacks points; else returns None."""
    forms = (ORDER, re.compile(r"\\setminus"), REALS)
    if not any(form.search(gold) or form.search(answer) for form in forms[:2]) and not (
        REALS.fullmatch(gold) or REALS.fullmatch(answer)
    ):
        return None
    try:
        (name, right), (other, given) = region(gold), region(answer)
    except Unreadable:
        return same_inequality(gold, answer)
    if (name and other and name != other) or len(right) != len(given):
        return False
    return all(
        a[2] == b[2] and a[5] == b[5] and ends(a[1], b[1]) and ends(a[4], b[4])
        for a, b in zip(right, given, strict=True)
    )


def ends(first: str, second: str) -> bool:
    return first == second or (
        not ENDLESS.fullmatch(first) and not ENDLESS.fullmatch(second) and same_value(first, second)
    )


def same_inequality(gold: str, answer: str) -> bool | None:
    """Compares two inequalities of several symbols."""
    right, given = ORDER.split(gold), ORDER.split(answer)
    if len(right) != 3 or len(given) != 3:
        return False if ORDER.search(answer) or ORDER.search(gold) else None
    sign = differ_by_factor(difference(right[::2]), difference(given[::2]))
    turned = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne"}[given[1]]
    return bool(sign) and right[1] == (given[1] if sign > 0 else turned)


def region(text: str) -> tuple[str | None, list[tuple]]:
    """Returns the name of the symbol and the intervals of a set of numbers. Raises `Unreadable`."""
    builder = _BUILDER.fullmatch(text)
    if builder:
        text = builder[1]
    both = split(text, _AND)
    if len(both) == 2 and all(ORDER.search(part) for part in both):
        names, parts = zip(*map(region, both), strict=True)
        if len(parts[0]) == len(parts[1]) == 1 and names[0] == names[1]:
            (a,), (b,) = parts
            low = max(a, b, key=lambda part: (part[0], not part[2]))
            high = min(a, b, key=lambda part: (part[3], part[5]))
            if (low[0], 0) < (high[3], 0):
                return names[0], [(*low[:3], *high[3:])]
        raise Unreadable(text)
    names, result = set(), []
    for part in split(text, re.compile(rf"{CUP.pattern}|{COMMA.pattern}")):
        name, found = interval(part)
        names.add(name)
        result += found
    names -= {None}
    if len(names) > 1:
        raise Unreadable(text)
    return (names.pop() if names else None), union(result)


def interval(text: str) -> tuple[str | None, list[tuple]]:
    """Returns the intervals of a set that is no union."""
    name, text = unnamed(text)
    if "\\setminus" in text or re.fullmatch(r".+-\s*\\\{.*", text):
        whole, _, points = re.sub(r"\s*-\s*(?=\\\{)", r"\\setminus ", text).partition("\\setminus")
        listed = inside(points.strip())
        if not listed or listed[0] != "\\{":
            raise Unreadable(text)
        result = interval(whole.strip())[1]
        for point in listed[1]:
            result = without(result, point)
        return name, result
    if REALS.fullmatch(text):
        return name, [bounds("-\\infty", False, "\\infty", False)]
    listed = inside(text)
    if listed and len(listed[1]) == 2 and listed[0] in "([" and listed[2] in ")]":
        return name, [bounds(listed[1][0], listed[0] == "[", listed[1][1], listed[2] == "]")]
    return inequality(text)


def inequality(text: str) -> tuple[str | None, list[tuple]]:
    pieces = [piece.strip() for piece in ORDER.split(text)]
    values, order = pieces[::2], pieces[1::2]
    symbols = [index for index, value in enumerate(values) if is_name(value) and value != "e"]
    if len(symbols) != 1 or len(order) not in (1, 2) or (len(order) == 2 and symbols != [1]):
        raise Unreadable(text)
    at, name = symbols[0], re.sub(r"\s", "", values[symbols[0]])
    if order == ["\\ne"]:
        return name, without([bounds("-\\infty", False, "\\infty", False)], values[1 - at])
    turned = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
    low, high = ("-\\infty", False), ("\\infty", False)
    for index, sign in enumerate(order):
        if sign not in turned:
            raise Unreadable(text)
        bound, sign = (values[index], turned[sign]) if at > index else (values[index + 1], sign)
        if sign in ("<", "\\le"):
            high = bound, sign == "\\le"
        else:
            low = bound, sign == "\\ge"
    if len(order) == 2 and "\\infty" in (low[0], high[0]):
        raise Unreadable(text)
    return name, [bounds(*low, *high)]


def bounds(low: str, low_closed: bool, high: str, high_closed: bool) -> tuple:
    keys = []
    for value, closed in ((low, low_closed), (high, high_closed)):
        endless = ENDLESS.fullmatch(value.strip())
        if endless and closed:
            raise Unreadable("a closed bound at infinity")
        keys.append(float(endless[1] + "inf") if endless else real(value.strip()))
    if not keys[0] <= keys[1] or (keys[0] == keys[1] and not low_closed):
        raise Unreadable("an empty interval")
    return (keys[0], low.strip(), low_closed, keys[1], re.sub(r"^\+\s*", "", high.strip()), high_closed)


def without(parts: list[tuple], point: str) -> list[tuple]:
    key, result = real(point), []
    for low, low_text, low_closed, high, high_text, high_closed in parts:
        if low < key < high:
            result += [
                (low, low_text, low_closed, key, point, False),
                (key, point, False, high, high_text, high_closed),
            ]
        else:
            result.append((low, low_text, low_closed and low != key, high, high_text, high_closed and high != key))
    return result


def union(parts: list[tuple]) -> list[tuple]:
    result: list[tuple] = []
    for part in sorted(parts, key=lambda part: (part[0], not part[2])):
        last = result[-1] if result else None
        if last and (part[0] < last[3] or (part[0] == last[3] and (part[2] or last[5]))):
            high = max(last, part, key=lambda part: (part[3], part[5]))
            result[-1] = (*last[:3], *high[3:])
        else:
            result.append(part)
    return result


def difference(sides: list[str]) -> tuple:
    if any(re.search(r"\\frac\s*\{\s*d", side) or "'" in side for side in sides):
        raise Unreadable("a derivative")
    return ("+", parsed(sides[0]), ("neg", parsed(sides[1])))
