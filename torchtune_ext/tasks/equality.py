r"""Compares an answer with the reference answer, both in normal form (`notation.normalize`).

The comparison goes from the outside in: lists in any order, tuples, intervals and matrices by
member, equations, inequalities as sets of numbers, then single values: words, times, units,
percentages and numbers (`formulas.same_value`). An ambiguous answer is not equal. math-verify
compares sums, integrals and limits, which `formulas` does not parse.
"""

import logging
import re
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

from torchtune_ext.tasks.formulas import UnreadableFormula, differ_by_factor, real_value, same_value
from torchtune_ext.tasks.notation import (
    COMMA,
    CUP,
    EQUALS,
    MAX_ITEMS,
    OPEN_WORDS,
    bare_name,
    is_name,
    letter_tokens,
    list_members,
    matrix_rows,
    name_stem,
    normalize,
    parse_brackets,
    plain_text,
    split_assignment,
    split_outside,
)
from torchtune_ext.tasks.number_sets import INFINITY, REALS, compare_sets, parse_difference
from torchtune_ext.tasks.prose_values import number_word, split_percent, split_unit, units_conflict

# Longest answer in characters, unless the reference is more than half as long.
MAX_CHARS = 1000
MAX_SIDES = 12  # largest number of sides of an equation such as a = b = c

_VERB = re.compile(r"\s(?:is|are|was|were|has|have|had|equals|gets|got|makes|costs|needs|pays|earns)\s|:\s")
_TIME = re.compile(r"(\d{1,2})(?::(\d\d)(?::\d\d)?)?\s*(?:([ap])\.?\s*m\.?)?", re.IGNORECASE)
_RATIO = re.compile(r"(\d+(?:\.\d+)?)\s*(?::|to)\s*(\d+(?:\.\d+)?)(?:\s*(?::|to)\s*(\d+(?:\.\d+)?))?")
_BASE = re.compile(r"\(?([0-9][0-9A-F]*(?:\.[0-9A-F]+)?)\)?\s*_\s*\{?\s*(\d+|\w+)\s*\}?")
_CHOICE = re.compile(r"\(?\s*([A-Z])\s*[).:]?")
_LABELLED = re.compile(
    r"(?:(?:the\s+)?(?:correct\s+)?(?:option|choice|answer)\s*(?:is)?\s*:?\s*)?(?:\(([A-Z])\)|([A-Z])(?:[).:](?:\s|$)|$))(.*)",
    re.IGNORECASE,
)
_LABEL = re.compile(
    r"^\s*[\^_']|\([A-Z]\)|(?<![A-Za-z])[A-Z](?:\)|\.\s)|(?<![A-Za-z])(?:or|and|not|wrong|false|incorrect)(?![A-Za-z])|n't"
)
_LABEL_BEFORE = re.compile(
    r"(?:\\text\{)?\s*(?:\([A-E]\)|[A-E][).:]\s)\s*\}?(?=.*\S)(?!\s*(?:or|and)\b)|(?:\\text\{\s*)?(?:[Ee]xactly|[Oo]nly)\b[\s}]*"
)
_GENERAL = re.compile(r"[\s,]*\\text\{[\s,]*for (?:all|any|every|each)\b.*")
_WORD = re.compile(r"[a-z]+|[-+]?\d*\.?\d+|[^\s\w.'\"-]|(?<![a-z])-|-(?![a-z])")
_APPROXIMATE = re.compile(r"\\approx(?![A-Za-z])")
_CALCULUS = re.compile(r"\\(?:sum|prod|int|iint|oint|lim)(?![A-Za-z])")
_DECIMALS = re.compile(r"-?[0-9]*\.([0-9]+)")
# Expressions that may hang math-verify: towers of powers, large limits, nested factorials.
_LARGE = re.compile(r"\^\s*\{?[^{}]*\^|\^\s*\{?\s*-?\d{3}|\d{5}|!\W*!|\{\W*\{\W*\{\W*\{|(?:\\\w+\W*){12}")
_PLAIN = re.compile(r"-?(?:[1-9][0-9]{0,14}|[1-9][0-9]{0,2}(?:,[0-9]{3}){1,4}|0)(?:\.[0-9]{1,5})?")
_OR = re.compile(r";|\\text\{\s*,?\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z])")
_INTEGER = re.compile(r"-?\d{1,18}")
# A number with a decimal comma, not a thousands separator.
_COMMA = re.compile(r"-?(?:0,\d+|\d+,(?:\d{1,2}|\d{4,})(?:\s*[€$])?)")


def answers_equal(gold: str, answer: str) -> bool:
    """Tells whether an answer equals the reference answer. Neither is normalized yet."""
    if len(answer) > max(MAX_CHARS, 2 * len(gold)):
        return False
    comma, other = (gold, answer) if "," in gold else (answer, gold)
    if _COMMA.fullmatch(comma) and re.sub(r"\s*[€$]$", "", comma).replace(",", ".") == other:
        return comma is gold or not comma.startswith("0,") or len(comma) > 4
    if _PLAIN.fullmatch(gold) and _PLAIN.fullmatch(answer):
        # Most answers of GSM8K and AIME have this form.
        return Decimal(gold.replace(",", "")) == Decimal(answer.replace(",", ""))
    gold, answer = normalize(gold), normalize(answer)
    if not letter_tokens(gold) or not letter_tokens(answer):
        return False
    if not answer.isascii() and any(c.isdecimal() and not c.isascii() for c in answer):
        return letter_tokens(gold) == letter_tokens(answer)
    if same_choice(plain_text(gold), plain_text(answer)) or normalized_equal(gold, answer):
        return True
    # Words may surround the value: "Jane has 5 apples", "(B) 5", "x + 1 for all x".
    # If the reference answer is a choice, a label before it, as in "D) C", is another choice.
    label = None if _CHOICE.fullmatch(plain_text(gold)) else _LABEL_BEFORE.match(answer)
    general = _GENERAL.search(answer)
    value = stated_value(answer) or (label and answer[label.end() :]) or (general and answer[: general.start()])
    value = value or (_GENERAL.search(gold) and answer)
    return bool(value) and (
        same_choice(plain_text(gold), plain_text(value)) or normalized_equal(_GENERAL.sub("", gold), normalize(value))
    )


def stated_value(answer: str) -> str | None:
    """Returns the value in a statement such as "Jane has 5 apples" or "Jane: 5", or None."""
    subject, _, value = re.sub(_VERB, "\x00", plain_text(answer)).rpartition("\x00")
    if (
        not re.search(r"[A-Za-z]", subject)
        or re.search(r"\d", subject)
        or OPEN_WORDS.search(subject)
        or not value.strip()
    ):
        return None
    return normalize(value)


def readable(gold: str) -> bool:
    """Tells whether a reference answer can be parsed. If not, only the identical text equals it."""
    gold = normalize(gold)
    try:
        return not isinstance(_expressions(gold)[0], str) if _CALCULUS.search(gold) else _compare(gold, gold)
    except Exception:  # noqa: BLE001 (as in `normalized_equal`)
        return False


def normalized_equal(gold: str, answer: str) -> bool:
    """Tells whether two normalized answers are equal. An unreadable answer is not equal."""
    try:
        return letter_tokens(gold) == letter_tokens(answer) or _compare(gold, answer)
    except Exception:  # noqa: BLE001 (sympy, mpmath raise many types; no text of the policy may stop a run)
        return False


def _compare(gold: str, answer: str) -> bool:
    if _CALCULUS.search(gold + answer):
        return same_by_math_verify(gold, answer)
    gold, answer = solutions(gold), solutions(answer)
    right, given = list_members(gold), list_members(answer)
    text = None if REALS.fullmatch(gold) else same_text(gold, answer)
    if text is not None and (text or len(right) == 1):
        return text
    if not right or not given or len(right) > MAX_ITEMS or len(given) > MAX_ITEMS:
        return False
    order = compare_sets(gold, answer)
    if order is not None:
        return order
    return same_member(right[0], given[0]) if len(right) == len(given) == 1 else same_list(right, given)


def solutions(text: str) -> str:
    """Rewrites "x = 3, y = 4 or x = 4, y = 3" as "(3, 4), (4, 3)"."""
    parts = [[split_assignment(item) for item in split_outside(part, COMMA)] for part in split_outside(text, _OR)]
    names = [name for name, _ in parts[0]]
    if (
        len(parts) < 2
        or len(names) < 2
        or not has_distinct_names(names)
        or any([n for n, _ in part] != names for part in parts)
    ):
        return text
    return ", ".join(f"({', '.join(value for _, value in part)})" for part in parts)


def same_list(right: list[str], given: list[str]) -> bool:
    """Compares two lists. At least one has several members."""
    pairs, others = ([pair for item in items for pair in assignments(item, len(items))] for items in (right, given))
    names, given_names = [name for name, _ in pairs], [name for name, _ in others]
    if len(pairs) > 1 and has_distinct_names(names) and has_distinct_names(given_names):
        table = {bare_name(name): value for name, value in others}
        return len(pairs) == len(others) and all(
            normalized_equal(value, table.get(bare_name(name), "")) for name, value in pairs
        )
    if len(pairs) > 1 and has_distinct_names(names):
        # The reference answer is x = 3, y = 4, and the answer is (3, 4) or 3, 4.
        listed = parse_brackets(others[0][1]) if len(given) == 1 else None
        values = listed[1] if listed and listed[0] == "(" else [value for name, value in others if name is None]
        return same_in_order([value for _, value in pairs], values)
    if len(given) > 1 and has_distinct_names(given_names):
        # The answer is x = 3, y = 4, and the reference answer is (3, 4).
        listed = parse_brackets(pairs[0][1]) if len(right) == 1 else None
        if not listed or listed[0] not in "([" or len(listed[1]) != len(given):
            return len({name_stem(name) for name in given_names}) == 1 and same_plain_list(right, given)
        if all(re.fullmatch(r"\s*[A-Za-z]\s*", name) for name in given_names):
            others = sorted(others)
        return same_in_order(listed[1], [value for _, value in others])
    return same_plain_list(right, given)


def assignments(item: str, count: int) -> list[tuple]:
    """Returns the (name, value) pairs of an item: several only for (x, y) = (3, 4)."""
    name, value = split_assignment(item)
    names, values = parse_brackets(name or ""), parse_brackets(value)
    if count == 1 and names and values and len(names[1]) == len(values[1]):
        return list(zip(names[1], values[1], strict=True))
    return [(name, value)]


def has_distinct_names(names: list) -> bool:
    """Tells whether all members of a list have names, and all names differ."""
    return None not in names and len(set(map(bare_name, names))) == len(names)


def same_plain_list(right: list[str], given: list[str]) -> bool:
    """Compares the members of two lists in any order."""
    (name, right), (other, given) = common_name(right), common_name(given)
    if name and other and name != other:
        return False
    right, given = ([part for item in items for part in split_union(item)] for items in (right, given))
    if all(item.startswith("(") for item in given):
        # A point may be listed twice.
        given = list({letter_tokens(item): item for item in given}.values())
    if len(right) == len(given):
        return same_in_any_order(right, given)
    held, other = (parse_brackets(items[0]) if len(items) == 1 else None for items in (right, given))
    if held and held[0] + held[2] == "()":
        return same_in_order(held[1], given)
    for single, items in ((held, given), (other, right)):
        if single and single[0] == "\\{":
            return same_in_any_order(single[1], items)
    if len(given) == 1 and len(right) == len(given[0]) and all(re.fullmatch(r"\(?[A-J]\)?", item) for item in right):
        return sorted(item.strip("()") for item in right) == sorted(given[0])
    return False


def common_name(items: list[str]) -> tuple[str | None, list[str]]:
    """Returns the common name of all members, or None, and their values.

    Examples: x = 2 or x = 3; x_1 = 2 and x_2 = 3; x = 2, 3.
    """
    pairs = [split_assignment(item) for item in items]
    stems = {name_stem(name) for name, _ in pairs}
    if pairs[0][0] and (len(stems) == 1 or {name for name, _ in pairs[1:]} == {None}):
        return name_stem(pairs[0][0]), [value for _, value in pairs]
    return None, items


def split_union(item: str) -> list[str]:
    parts = split_outside(item, CUP)
    return parts if all(parse_brackets(part) for part in parts) else [item]


def same_in_order(right: list[str], given: list[str]) -> bool:
    return len(right) == len(given) and all(map(normalized_equal, right, given))


def same_in_any_order(right: list[str], given: list[str]) -> bool:
    """Tells whether two lists have equal members in any order, each matched once."""
    if len(right) != len(given):
        return False
    if all(map(_INTEGER.fullmatch, (*right, *given))):
        return sorted(map(int, right)) == sorted(map(int, given))
    rest = list(given)
    for item in right:
        found = next((index for index, other in enumerate(rest) if normalized_equal(item, other)), None)
        if found is None:
            return False
        del rest[found]
    return True


def same_member(gold: str, answer: str) -> bool:
    """Compares two answers that are not lists."""
    near = split_outside(answer, _APPROXIMATE)
    if len(near) == 2 and "\\approx" not in gold:
        return same_approximation(gold, *near)
    sides, given = split_outside(gold, EQUALS), split_outside(answer, EQUALS)
    if len(sides) > 1 or len(given) > 1:
        return same_equation(sides, given)
    gold, answer = split_assignment(gold)[1], split_assignment(answer)[1]
    right, other = parse_brackets(gold), parse_brackets(answer)
    if right and other:
        if right[0] == other[0] == "\\{":
            return same_in_any_order(right[1], other[1])
        return (right[0], right[2]) == (other[0], other[2]) and same_in_order(right[1], other[1])
    if container := right or other:
        # The container is a set with at most one member: tuples have at least two.
        held, single = container[1], answer if right else gold
        return normalized_equal(held[0], single) if len(held) == 1 else not held and single == "\\emptyset"
    table, rows = matrix_rows(gold), matrix_rows(answer)
    if table and rows:
        return len(table) == len(rows) and all(map(same_in_order, table, rows))
    parts, others = split_outside(gold, CUP), split_outside(answer, CUP)
    return same_in_any_order(parts, others) if len(parts) > 1 or len(others) > 1 else same_leaf(gold, answer)


def same_approximation(gold: str, value: str, decimal: str) -> bool:
    r"""Compares an answer such as \\sqrt{2} \\approx 1.41, whose sides must agree."""
    name, value = split_assignment(value)
    if name is None and is_name(value):
        return normalized_equal(gold, decimal)
    exact, rounded = (real_value(split_unit(side)[0]) for side in (value, decimal))
    return abs(exact - rounded) <= abs(rounded) / 100 and (
        normalized_equal(gold, value) or normalized_equal(gold, decimal)
    )


def same_equation(sides: list[str], given: list[str]) -> bool:
    """Compares two answers. At least one is an equation."""
    if max(len(sides), len(given)) > MAX_SIDES:
        return False
    if len(sides) == 1:
        return same_chain(sides[0], given)
    if len(given) == 1:
        # The value alone is enough if the other sides of the reference answer only name it.
        named = [side for side in sides[1:] if not is_name(side)]
        return bool(named) and (len(sides) > 2 or is_name(sides[0])) and normalized_equal(named[-1], given[0])
    heads = [
        re.sub(r"(?<=[a-z])\s*\([a-z]\)$", "", side[0]) if is_name(side[0]) else side[0] for side in (sides, given)
    ]
    if len(sides) == len(given) and letter_tokens(heads[0]) == letter_tokens(heads[1]):
        return same_in_order(sides[1:], given[1:])
    if len(sides) != 2 or len(given) != 2:
        return len(sides) == 2 and letter_tokens(sides[0]) == letter_tokens(given[0]) and same_chain(sides[1], given)
    return bool(differ_by_factor(parse_difference(sides), parse_difference(given)))


def same_chain(gold: str, sides: list[str]) -> bool:
    """Compares a value with x = y = 5 or 2 + 3 = 5: each side must be a name or equal the value."""
    verdicts = [normalized_equal(gold, side) for side in sides]
    return any(verdicts) and all(ok or is_name(side) for ok, side in zip(verdicts, sides, strict=True))


# ---- words, times, bases and single values


def same_text(gold: str, answer: str) -> bool | None:
    """Compares words, choices such as (B), times and numbers in a base; None for other answers."""
    right, given = plain_text(split_assignment(gold)[1]), plain_text(split_assignment(answer)[1])
    time, other = parse_time(right), parse_time(given)
    if time and other:
        return time[:2] == other[:2] and (time[2] == other[2] or not time[2] or not other[2])
    if hour := time or other:
        return f"{hour[0]}" == (given if time else right) and ":" not in right + given
    base, other = parse_numeral(right), parse_numeral(given)
    if base and other:
        return base == other
    if base or other:
        return base is not None and given.lstrip("0") == base[0]
    return same_words(plain_text(gold), plain_text(answer), "\\text" in gold)


def parse_time(text: str) -> tuple[int, str, str] | None:
    """Returns (hour, minute, "a", "p" or "") of a time such as 7:30 or 7 p.m., else None."""
    found = _TIME.fullmatch(text)
    if not found or not (found[2] or found[3]):
        return None
    return int(found[1]), found[2] or "00", (found[3] or "").lower()


def parse_numeral(text: str) -> tuple[str, str] | None:
    """Returns (digits, base) of a number such as 1101_2 or 1101_{two}, else None."""
    found = _BASE.fullmatch(text)
    return (found[1].lstrip("0"), number_word(found[2]) or found[2]) if found else None


def same_choice(right: str, given: str) -> bool:
    """Compares a choice such as (B) with "Option B" or "B) 42"."""
    choice, labelled = _CHOICE.fullmatch(right), _LABELLED.fullmatch(given)
    if not choice or not labelled or _LABEL.search(labelled[3]):
        return False
    label = labelled[1] or labelled[2]
    return label == choice[1] or (label.upper() == choice[1] <= "E" and len(given) < 4)


def same_words(right: str, given: str, styled: bool) -> bool | None:
    """Compares answers in words (ignoring case, periods, plurals), or None for other answers."""
    if not re.search(r"(?<![A-Za-z\\])[A-Za-z]{3,}|^no$", right, re.IGNORECASE) or re.search(r"[=^_<>\\]", right):
        return None
    words, others = (_WORD.findall(text.casefold().rstrip("!")) for text in (right, given))
    words, others = (found[found[:1] in (["a"], ["an"], ["the"]) :] for found in (words, others))
    if not words or not others:
        return None
    if words == others or [*words[:-1], words[-1].rstrip("s")] == [*others[:-1], others[-1].rstrip("s")]:
        return True
    numeric = any(map(str.isdigit, right)) or number_word(right) is not None
    return None if numeric or (len(right) < 4 and not styled) else False


def same_leaf(gold: str, answer: str) -> bool:
    """Compares two single values: infinities, ratios, percentages and units, then formulas."""
    right, given = INFINITY.fullmatch(gold), INFINITY.fullmatch(answer)
    if right and given:
        return (right[1] == "-") == (given[1] == "-")
    ratio, other = _RATIO.fullmatch(plain_text(gold)), _RATIO.fullmatch(plain_text(answer))
    if ratio and other:
        return ratio[3] is None and other[3] is None and same_value(f"{ratio[1]}/{ratio[2]}", f"{other[1]}/{other[2]}")
    if found := ratio or other:
        rest = answer if ratio else gold
        return ":" in found[0] and found[3] is None and same_value(f"\\frac{{{found[1]}}}{{{found[2]}}}", rest)
    gold_percent, answer_percent = split_percent(gold), split_percent(answer)
    if gold_percent or answer_percent:
        return same_percent(gold, answer, gold_percent, answer_percent)
    if ("^\\circ" in gold) != ("^\\circ" in answer) and "\\pi" in gold + answer:
        return same_value(gold, answer)
    numeric = not re.search(
        r"(?<![A-Za-z\\{])[A-Za-z]", re.sub(r"\\text\{[^{}]*\}|\\[A-Za-z]+|(?<=\d)[eE](?=[-+\d])", " ", gold)
    )
    (gold, unit), (answer, given_unit) = split_unit(gold, not numeric), split_unit(answer, not numeric)
    if unit and given_unit and units_conflict(unit, given_unit):
        return False
    words = number_word(plain_text(gold)), number_word(plain_text(answer))
    return same_value(words[0] or gold, words[1] or answer) or same_rounded(gold, answer)


def same_rounded(gold: str, answer: str) -> bool:
    """Tells whether one answer is the other rounded to at least six significant decimals."""
    if re.fullmatch(r"-?0?\.\d{14,}", answer):
        return abs(real_value(gold) - Fraction(answer)) < Fraction(1, 10 ** (len(answer.partition(".")[2]) - 1))
    places, other = _DECIMALS.fullmatch(gold), _DECIMALS.fullmatch(answer)
    decimals = [text for text, found in ((gold, places), (answer, other)) if found]
    if not places or any(len(text.replace(".", "").strip("-0")) < 6 for text in decimals):
        return False
    exact, decimal, digits = (gold, answer, other[1]) if other else (answer, gold, places[1])
    return abs(real_value(exact) - Fraction(decimal)) * 2 * 10 ** len(digits) <= 1


def same_percent(gold: str, answer: str, right: tuple | None, given: tuple | None) -> bool:
    """Compares percentages: 50% equals 0.5; 18% equals 18 if the question asks for a percentage."""
    if right and given:
        return same_leaf(right[0], given[0])
    percentage = right or given
    assert percentage is not None  # `same_leaf` has found a percentage
    value, other, sign = percentage[0], answer if right else gold, right is not None or percentage[1]
    try:
        if same_value(f"({value})/100", other):
            return True
        return sign and same_leaf(other, value) and bool(abs(real_value(value)) >= 1 or right)
    except UnreadableFormula:
        return False


def same_by_math_verify(gold: str, answer: str) -> bool:
    """Compares two normalized answers by math-verify. `answers.MathGrader` limits the time."""
    if any(len(text) > MAX_CHARS // 2 or _LARGE.search(text) or text.count("(") > 20 for text in (gold, answer)):
        return False
    right, given = _expressions(gold), _expressions(answer)
    if isinstance(right[0], str) or isinstance(given[0], str):
        return False
    return _math_verify()[0].verify(right[:1], given[:1], timeout_seconds=None)


@lru_cache(maxsize=1024)
def _expressions(text: str) -> list:
    """Parses a normalized answer with math-verify. If that fails, the result starts with a text."""
    # With "first_match", math-verify does not search parts of an unreadable answer for an
    # expression. Its timeouts use signals, which `answers.MathGrader` uses itself.
    library, config = _math_verify()
    boxed = f"\\boxed{{{text}}}"
    return library.parse(boxed, [config], extraction_mode="first_match", parsing_timeout=None) or [text]


@lru_cache(maxsize=1)
def _math_verify() -> tuple:
    """Imports math-verify, which takes 0.5 s. Returns the module and its LaTeX config."""
    import math_verify

    # Silences the warning about disabled timeouts.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # With units=True, math-verify drops any \text at the end, even "million".
    latex = math_verify.LatexExtractionConfig()
    return math_verify, replace(latex, normalization_config=replace(latex.normalization_config, units=False))
