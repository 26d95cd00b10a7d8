"""Units, lists and candidates: what words behind a number do to it, and what is won by naming several values."""

import random

import pytest

pytest.importorskip("math_verify")

from torchtune_ext.tasks.answers import MathGrader, answers_equal
from torchtune_ext.tasks.notation import normalize
from torchtune_ext.tasks.prose_values import (
    changes_value,
    last_values,
    number_word,
    split_percent,
    split_unit,
    unit_words,
    units_conflict,
)

GRADER = MathGrader()
COUNT = 200  # of answers that name several candidates


def reward(gold, text):
    return GRADER(gold, text).reward


def without_unit(answer):
    return split_unit(normalize(answer))[0]


# ---- units

UNITS = r"""cm|square feet|cubic inches|miles per hour|apples|dollars|apples left|years old|people|hours in total|
US dollars|chocolate chip cookies|cups of sugar|km/h|m/s|months|units|square|pairs of socks|sq. ft.|in|in.|remaining|seconds|liters|gallons of milk|of the remaining red marbles""".replace(
    "\n", ""
).split("|")

NO_UNITS = r"""squared|cubed|factorial|hundredths|tenths|halves|thirds|quarters|twenty-firsts|minus one|plus|times|over|
per cent|percent|dozen|hundred|thousands|million|half|if odd or six otherwise|or six|to the power of two|choose two|
recurring|mod three|squared inches|factorial ways|hundred dollars|not six|is wrong|root|less|to six|doubled apples""".replace(
    "\n", ""
).split("|")


@pytest.mark.parametrize("unit", UNITS)
def test_answer_with_unit_equals_answer_without(unit):
    for answer in (f"5 {unit}", f"5 \\text{{ {unit}}}", f"5\\,\\mathrm{{{unit}}}", f"5~\\text{{{unit}}}"):
        assert without_unit(answer) == "5", answer
        assert reward("5", f"\\boxed{{{answer}}}") == 1.0 and reward("6", f"\\boxed{{{answer}}}") == 0.0
    assert (
        reward("5", f"5 {unit}") == reward("5", f"It is 5 {unit}.") == reward("5", f"${{5}}\\text{{ {unit}}}$") == 1.0
    )


@pytest.mark.parametrize("words", NO_UNITS)
def test_value_changing_words_are_not_units(words):
    for answer in (f"5 {words}", f"5 \\text{{ {words}}}", f"5\\text{{ ({words})}}"):
        assert without_unit(answer).replace("\\", "") != "5"
        assert reward("5", f"\\boxed{{{answer}}}") == 0.0, answer
        assert reward("5", f"The answer is {answer}.") == 0.0, answer
    for gold, value in (("2\\pi", "2\\pi"), ("\\frac{1}{2}", "0.5"), ("x+1", "x+1")):
        assert reward(gold, f"\\boxed{{{value} \\text{{ {words}}}}}") == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "5 \\text{ factorial}", "5 \\text{ hundredths}", "5 tenths", "5 \\text{ halves}", "5 minus one", "5 \\text{ or six}",
        "5 \\text{ if odd or six otherwise}", "It is 5 million.", "It is $5 \\text{ squared}$.", "5 per cent",
    ],
)  # fmt: skip
def test_value_changing_words_without_box_are_not_units(text):
    assert reward("5", text) == 0.0


@pytest.mark.parametrize(
    "gold, answer, right",
    [
        ("5\\%", "5 \\text{ percent}", True), ("5 per cent", "5\\%", True), ("5", "5\\%", True), ("5", "5 per cent", False),
        ("5 million", "5 \\text{ million}", True), ("5 \\text{ million}", "5", False), ("18 hours", "18", True),
        ("1", "1 apple", True), ("5", "5 \\text{ cm}^2", True), ("5", "5\\text{ m/s}^2", True), ("5", "\\text{5 cm}", True), ("12", "\\mathbf{12}", True), ("24", "4! \\text{ ways}", True),
        ("90", "90^\\circ", True), ("-5", "-5^\\circ\\text{C}", True), ("5", "5m", True), ("5", "5t", False),
        ("2m", "2", False), ("2m", "2m", True), ("5", "5\\mathrm{e}", False), ("5", "5 \\text{ kg} \\cdot \\text{m}", True), ("7 \\text{ a.m.}", "7 \\text{ p.m.}", False),
        ("3\\mathbf{i}+4\\mathbf{j}", "3\\mathbf{i}+4\\mathbf{k}", False), ("2\\pi", "2\\pi \\text{ cm}", True),
        ("11111111100", "11,\\! 111,\\! 111,\\! 100", True), ("1-1/e", "1 - \\frac{1}{\\mathrm{e}}", True),
    ],
)  # fmt: skip
def test_equal_but_for_units(gold, answer, right):
    assert answers_equal(gold, answer) is right


def test_split_unit_long_text_stays_fast():
    for text in ("a" * 900, "\\text{a" * 150, "5" + " a" * 450, "5" + "\\text{ a }" * 90 + "!", "ab-" * 300):
        assert split_unit(text) == (text, "")


@pytest.mark.parametrize(
    "unit, other, differ",
    [
        ("m", "km", True), ("m", "meters", False), ("minutes", "hours", True), ("min", "minutes", False), ("dollar", "cents", True), ("cm", "cm^2", True),
        ("cm^2", "square centimeters", False), ("mph", "miles per hour", False), ("mph", "km/h", True), ("m/s", "m s^{-1}", False), ("m/s", "m/s^2", True),
        ("apples", "pears", False), ("km", "apples", False), ("square units", "units", True), ("units", "cm", False), ("^\\circ\\text{C}", "^\\circ\\text{F}", True),
    ],
)  # fmt: skip
def test_unit_contradiction_is_symmetric_and_as_expected(unit, other, differ):
    assert (
        units_conflict(unit_words(unit), unit_words(other))
        is units_conflict(unit_words(other), unit_words(unit))
        is differ
    )


def test_number_word_parses_numbers_only():
    words = ("five", "Twenty-one", "negative three", "minus 3", "two hundred", "one hundred and five", "zero")
    assert [number_word(text) for text in words] == ["5", "21", "-3", "-3", "200", "105", "0"]
    assert [number_word(text) for text in ("", "five six", "twenty ten", "hundred", "5", "apples", "one or two")] == [
        None
    ] * 7


def test_percentages():
    assert split_percent("50\\%") == ("50", True) and split_percent("50 \\text{ percent}") == ("50", False)
    assert split_percent("50") is None and split_percent("\\%") is None


# ---- lists


@pytest.mark.parametrize(
    "text, values",
    [
        ("It is 3 or 4", ["3", "4"]),
        ("3 if even, 4 if odd", ["3", "4"]),
        ("3 but maybe 4", ["3", "4"]),
        ("She has 3 but needs 4.", ["4"]),
        ("2, 3 and 5", ["2", "3", "5"]),
        ("2,3,5", ["2,3,5"]),
        ("$x = 3$, $x = 4$.", ["x = 3", "x = 4"]),
        ("3 apples and 4 pears", ["3", "4"]),
        ("five or 6", ["five", "6"]),
        ("18 - 3 = 15", ["15"]),
        ("18 - 3 = 15 more than in 2 weeks", ["15"]),
        ("x - 3 = 15", ["x - 3 = 15"]),
        ("Let x = 3", []),
        ("the sum of 3 and 4 is 7", ["7"]),
        ("She sold 3 and 4, so 7 in all.", ["7"]),
        ("It is 3. It is 4.", ["4"]),
        ("It is 1,234,567.", ["1,234,567"]),
        ("It is 3 1/2.", ["3 1/2"]),
        ("It is 5 divided by 3.", ["5 / 3"]),
        ("It rang 22 times.", ["22"]),
        ("It is *7*.", ["7"]),
        ("$18 every day", ["$18"]),
        ("3\n4", []),
        ("It is not 3.", []),
        ("It is 5 squared.", []),
        ("5 per cent of it", []),
        ("Step 4", []),
        ("or so", None),
    ],
)
def test_last_values_finds_final_values_of_text(text, values):
    assert last_values(text) == values


def test_changes_value_detects_scaling_words():
    assert all(map(changes_value, ("squared", "tenths", "sixes", "lakhs", "crores", "gross", "twenties", "bn")))
    assert not any(map(changes_value, ("seconds", "boxes", "apples")))


@pytest.mark.parametrize(
    "gold, text, right",
    [
        ("2,3,5", "\\boxed{2}, \\boxed{3} and \\boxed{5}", True),
        ("(2,2),(6,2)", "$\\boxed{(2,2)}$ and $\\boxed{(6,2)}$", True),
        ("2,3", "\\boxed{2 \\text{ cm}} and \\boxed{3 \\text{ cm}}", True),
        ("2,3,5", "It is \\boxed{2}. Or \\boxed{3} and \\boxed{5}", False),
        ("2,3,5", "The primes are 2, 3 and 5.", True),
        ("7", "$x = \\boxed{7}$, that is \\boxed{7.0}", True),
        ("1/2", "$\\boxed{\\frac12} = \\boxed{0.5}$", True),
        ("12", "That makes $\\boxed{3}$. The total is $\\boxed{12}$.", True),
        ("12", "Step 1: \\boxed{3}\nStep 2: \\boxed{12}", True),
        ("11,111", "\\boxed{11}, \\boxed{111}", False),
        ("1 - \\frac{1}{\\mathrm{e}}", "$1 - \\frac{1}{\\mathrm{e}}$", True),
        ("1-1/e", "$1 - \\frac{1}{\\mathrm{e}}$", True),
        ("12:00", "$12:00$", True),
        ("12:30", "$12:00$", False),
        ("34", "Final Answer: The largest $n$ is 34.", True),
        ("34", "Final Answer: The largest of 3 is 34 or 35.", False),
        ("34", "Final Answer: The final answer is $34$. I hope it is correct.", True),
        ("3", "Answer: 3 if n is 4", False),
        ("4", "Answer: 3 if n is 4", False),
    ],
)
def test_where_the_answer_stands(gold, text, right):
    assert reward(gold, text) == float(right)


# ---- candidates


def naming_several(rng):
    """(right answer, an answer that names it among others)"""
    values = rng.sample(range(2, 99), rng.choice((2, 2, 3)))
    style = rng.choice(("{}", "{}", "{}", r"\frac{{{}}}{{7}}", "-{}", "{}.5"))
    names = [style.format(value) for value in values]
    joint = rng.choice((", ", " or ", " and ", "; ", r" \text{ or } ", r" \text{ and } ", ", or ", " or maybe "))
    listed = joint.join(names)
    boxes = [f"\\boxed{{{name}}}" for name in names]
    labelled = [f"{label}: {name}" for label, name in zip("ABC", names, strict=False)]
    one, other = names[:2]
    numeral = rng.choice(("six", "seven", "twelve"))
    anywhere = [
        f"\\boxed{{{listed}}}",
        f"\\boxed{{\\{{{', '.join(names)}\\}}}}",
        f"\\boxed{{x = {f'{joint}x = '.join(names)}}}",
        f"\\boxed{{\\text{{either }} {listed}}}",
        f"\\boxed{{{', '.join(labelled)}}}",
        f"\\boxed{{{one} \\text{{ (or {other})}}}}",
        f"\\boxed{{{one} \\text{{ or {numeral}}}}}",
        f"\\boxed{{{one} \\text{{ if odd, or {other} otherwise}}}}",
        f"\\boxed{{{one} \\text{{ cm or }} {other} \\text{{ cm}}}}",
        f"\\boxed{{{one} apples or {other} apples}}",
        f"It is {rng.choice([', ', ' or ', ' and ', ', or maybe '])}".join(["", *boxes]) + ".",
        f"Either ${boxes[0]}$ or ${boxes[1]}$.",
        f"So $x = {boxes[0]}$, $y = {boxes[1]}$.",
        f"$${boxes[0]}$$\nor\n$${boxes[1]}$$",
        f"The answer is {listed}.",
        f"The answer is either {listed}.",
        f"Answer: {', '.join(labelled)}",
        f"Final answer: {one}, final answer: {other}",
        f"The answer is {one} or the answer is {other}.",
        f"Answer: either x is {one} or x is {other}",
        f"Answer: {one}; {other}",
        f"Answer: {one} (or {other})",
        f"#### {listed}",
        f"#### {one} #### {other}",
        f"It is {' or '.join(names)}",
        f"It is either {one} or {other}.",
        f"{' '.join(labelled)}",
        f"{' or '.join(names)}",
        f"Maybe {one}, maybe {other}.",
        f"${'$ or $'.join(names)}$",
        f"<think>Is it {one}?</think>It is {' or '.join(names)}.",
        f"<think>{boxes[0]}</think>{boxes[0]} or {boxes[1]}",
    ]
    gold = rng.choice(names)
    if rng.random() < 0.7:
        return gold, rng.choice(anywhere)
    first = [  # one place counts, the last: it must not be the right one
        f"{boxes[0]}. No, it is {boxes[1]}.",
        f"It is {boxes[0]}.\nIt is {boxes[1]}.",
        f"The answer is {one}. The answer is {other}.",
        f"Final answer: {one}\nFinal answer: {other}",
        f"#### {one}\n#### {other}",
        f"It is {one}. It is {other}.",
        f"<think>So it is {boxes[0]}.</think>It is {boxes[1]}.",
        f"<think>It is {boxes[0]}, or {boxes[1]}, wait",
        f"{boxes[0]} and \\boxed{{{other}",
        f"{boxes[0]} and \\boxed{{}}",
    ]
    return one, rng.choice(first)


def test_text_naming_several_candidates_scores_zero():
    rng = random.Random(0)
    cases = [naming_several(rng) for _ in range(COUNT)]
    assert [case for case in cases if reward(*case)] == []
    assert len(set(cases)) > COUNT * 0.9


def test_a_list_is_right_as_a_whole_alone():
    """Where the right answer is a list: one member less, more or wrong, or a second list beside it."""
    rng = random.Random(0)
    for _ in range(COUNT // 4):
        *gold, other = map(str, rng.sample(range(2, 99), rng.randint(3, 5)))
        right, wrong = ", ".join(gold), [gold[:-1], [*gold, other], [*gold[:-1], other]]
        rng.shuffle(gold)
        boxes = " and ".join(f"\\boxed{{{value}}}" for value in gold)
        assert reward(right, f"\\boxed{{{', '.join(gold)}}}") == reward(right, boxes) == 1.0
        for values in wrong:
            joined = ", ".join(values)
            for text in (
                f"\\boxed{{{joined}}}",
                " and ".join(f"\\boxed{{{value}}}" for value in values),
                f"\\boxed{{{right}}} or \\boxed{{{joined}}}",
                f"The answer is {joined}.",
                f"They are {joined}.",
            ):
                assert reward(right, text) == 0.0, (right, text)
