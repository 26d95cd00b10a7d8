"""Answers in texts: where they stand, when two are equal, and what cannot be won by tricks."""

import json
import signal
import threading
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("math_verify")

from torchtune_ext.tasks import answers
from torchtune_ext.tasks.answers import (
    MAX_CHARS,
    TAIL_CHARS,
    MathGrader,
    after_hashes,
    after_phrase,
    answers_equal,
    answers_match,
    extract_answer,
    gold_answer,
    has_single_thought,
    last_box,
    readable,
    strip_thinking,
)
from torchtune_ext.tasks.formulas import same_value
from torchtune_ext.tasks.notation import normalize

quick = settings(max_examples=60)
TABLE = Path(__file__).parents[2] / "data" / "math_answers.jsonl"


def reward(gold, text, **options):
    return MathGrader(**options)(gold, text).reward


# ---- where the answer stands


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{1} \fbox{3}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed {7}", "7"),
        (r"\framebox{7}", "7"),
        (r"\boxed 7.", "7"),
        (r"$\boxed{}$", ""),
        (r"\boxed{1} and \boxed{2", None),
        ("2", None),
    ],
)
def test_the_last_box(text, answer):
    assert last_box(text) == answer


@pytest.mark.parametrize(
    "text, answer",
    [
        ("a\n#### 1,234,567\n", "1234567"),
        ("####: 55", "55"),
        ("#### Step 4\nthen 3 + 4 = 7", None),
        ("####", None),
        ("no", None),
    ],
)
def test_hashes_count_in_the_last_line(text, answer):
    assert after_hashes(text) == answer


@pytest.mark.parametrize(
    "text, answer",
    [
        ("The answer is 3. The answer is 4.", "4"),
        ("**Answer:** 3.5 because 7/2 = 3.5", "3.5"),
        ("Final answer:\n42", "42"),
        ("the answer is $\\frac{1}{2}$; done", "$\\frac{1}{2}$"),
        ("answers vary", None),
    ],
)
def test_the_clause_after_the_phrase(text, answer):
    assert after_phrase(text) == answer


def test_the_order_of_the_places():
    assert extract_answer("#### 1\n\\boxed{2} and the answer is 3\n#### 4") == "2"
    assert extract_answer("the answer is 3\n#### 4") == "4"
    assert extract_answer("the answer is [5], see [6]", brackets=True) == "6"
    assert reward("3", "the answer is 3", require_box=True) == 0.0
    assert extract_answer("\\[ x = [3] \\]", brackets=True) == "3"


def test_a_thought_is_not_an_answer():
    assert strip_thinking("<think>\\boxed{1}</think>\\boxed{2}") == "\\boxed{2}"
    assert strip_thinking("it began in the prompt \\boxed{1}</think> I do not know") == " I do not know"
    assert strip_thinking("<think>\\boxed{1} and on") == ""
    assert strip_thinking("<think>a</think>\\boxed{1}<think>b") == ""  # the second thought is still open
    assert strip_thinking("\\boxed{1} <think>or 2") == ""
    assert reward("1", "<think>so it is \\boxed{1}, I") == 0.0
    assert reward("1", "\\boxed{1}") == 1.0 and reward("1", "\\boxed{1}", require_thinking=True) == 0.0
    assert reward("1", "x</think>\\boxed{1}", require_thinking=True) == 1.0


def test_math_score_parts_report_missing_format():
    def parts(text, **options):
        score = MathGrader(**options)("7", text).parts
        assert score.pop("timed_out") == 0.0
        return tuple(score[name] for name in ("accuracy", "format", "failed"))

    assert parts("\\boxed{7}") == (1.0, 1.0, 0.0)
    assert parts("it is 7") == (1.0, 0.0, 0.0)
    assert parts("no idea") == parts("it is 7", require_box=True) == (0.0, 0.0, 1.0)
    assert parts("it is 7", unmarked="none") == parts("\\boxed{}") == parts("7 = \\boxed{7") == (0.0, 0.0, 1.0)
    assert parts("The answer is 7", unmarked="none") == parts("so\n#### 7", unmarked="none") == (1.0, 0.0, 0.0)


def test_format_reward_is_its_configured_share():
    assert reward("7", "\\boxed{8}", format_reward=0.25) == 0.25
    assert reward("7", "it is 7", format_reward=0.25) == 0.75
    assert reward("7", "\\boxed{}", format_reward=0.25) == 0.0
    assert reward("7", "<think>a</think>\\boxed{7}", format="think", format_reward=0.5) == 1.0
    assert reward("7", "\\boxed{7}", format="think", format_reward=0.5) == 0.5
    assert has_single_thought("\n<think></think>x") and not has_single_thought("a<think></think>x")


# ---- when two are equal


@pytest.mark.parametrize(
    "gold, answer",
    [
        ("72", "$72$"), ("72", "\\$72.00"), ("72", "72 apples"), ("72", "**72**"), ("72", "72\\text{ km}"), ("1234", "1,234"),
        ("10236", "10,\\!236"), ("-3", "\N{MINUS SIGN}3"), ("1/2", "\\frac12"), ("0.5", "\\frac{1}{2}"), ("\\frac13", "0.333\\ldots"),
        ("\\{1,2\\}", "2, 1"), ("(3,\\frac{\\pi}{2})", "\\left(3, \\pi/2\\right)"), ("x^2-1", "(x-1)(x+1)"), ("\\text{even}", "Even"),
        ("(C)", "\\text{C}"), ("5", "x = 5"), ("0.001", "1e-3"), ("1e-07", "10^{-7}"), ("90^\\circ", "90"), ("does not converge", "Does not converge"),
        ("(1,2), (3,4)", "(3,4), (1,2), (3,4)"), ("20 degrees Celsius", "20 celsius"), ("\\sum_{k=1}^n k^k", "\\sum_{k=1}^{n} k^{k}"),
    ],
)  # fmt: skip
def test_equal(gold, answer):
    assert answers_equal(gold, answer)


@pytest.mark.parametrize(
    "gold, answer",
    [
        ("72", "73"), ("72", "7 2"), ("72", "72 x"), ("72", "72 million"), ("72", "72 or more"), ("(1,2)", "(2,1)"), ("[0,1]", "[0,1)"),
        ("0.0000001", "0"), ("0.0000001", "0.0000002"), ("1.6 \\times 10^{-19}", "0.0"), ("\\frac13", "0.333333"), ("yes", "no"),
        ("x", "y"), ("2^{2005}", "2^{2006}"), ("72", ""), ("72", "\\frac{0}{0}"), ("72", "\\infty"), ("the", "a"), ("\\text{}", ""),
    ],
)  # fmt: skip
def test_not_equal(gold, answer):
    assert not answers_equal(gold, answer)


plain = st.integers(-(10**9), 10**9)


numbers = (
    plain.map(str)
    | plain.map("{:,}".format)
    | st.decimals(-(10**6), 10**6, places=2).map(str)
    | st.decimals(-2, 2, places=5).map(str)
)


@settings(quick, max_examples=300)
@given(numbers, numbers | st.none(), st.booleans())
def test_plain_number_answers_equal_only_by_exact_value(gold, other, point):
    value = Decimal(gold.replace(",", ""))
    if other is None:  # the same or nearly the same value, spelled in another way
        other = f"{value + Decimal('0.00001') * point:f}"
    same = value == Decimal(other.replace(",", ""))
    assert answers_equal(gold, other) is same_value(normalize(gold), normalize(other)) is same, (gold, other)


@quick
@given(st.fractions(-1000, 1000, max_denominator=99), st.integers(2, 9))
def test_fractions_are_equal_where_their_values_are(value, factor):
    spelled = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    assert answers_equal(spelled, f"{value.numerator * factor}/{value.denominator * factor}")
    moved = value + Fraction(1, 98)
    assert not answers_equal(spelled, f"\\frac{{{moved.numerator}}}{{{moved.denominator}}}")


@settings(quick, max_examples=25)
@given(st.lists(st.integers(-99, 99), min_size=2, max_size=6, unique=True), st.data())
def test_answer_listing_several_candidates_scores_zero(values, data):
    """A text that names several values is right for none of them, however they are put together."""
    one = str(data.draw(st.sampled_from(values)))
    for join in (", ", "; ", " or ", " \\text{ or } ", " and "):
        assert not answers_equal(one, join.join(map(str, values))), join
    assert not answers_equal(one, f"\\{{{', '.join(map(str, values))}\\}}")
    assert answers_equal(", ".join(map(str, values)), ", ".join(map(str, reversed(values))))  # as a set it is right


@quick
@given(st.text(max_size=60), plain, plain)
def test_the_boxes_of_the_last_sentence_alone_count(before, first, last):
    if "think>" not in before:
        text = f"{before} \\boxed{{{first}}}. No, it is \\boxed{{{last}}}"
        assert reward(str(last), text) == 1.0 and reward(str(first), text) == float(first == last)
        text = f"{before} \\boxed{{{first}}} or \\boxed{{{last}}}"  # one list, which is no number
        assert reward(str(last), text) == reward(str(first), text) == float(first == last)


pieces = st.sampled_from(
    ["\\boxed{", "}", "{", "$", "answer is ", "####", "[", "]", "\\frac", "\\sqrt", "<think>", "</think>", "\\", "7", "x=", "\n", "\x00", "٤", "\ud800", "=", "^2", "_", "\\text{", ",", "(", ")", "\\begin{matrix}", "&"]
)  # fmt: skip


@settings(max_examples=250)
@given(
    st.lists(pieces | st.text(max_size=8), max_size=14).map("".join),
    st.sampled_from(["7", "\\frac{1}{2}", "(1,2)", "even"]),
)
def test_no_text_makes_it_raise(text, gold):
    for options in ({}, {"require_box": True}, {"brackets": True, "require_thinking": True}):
        score = MathGrader(**options)(gold, text)
        assert score.reward in (0.0, 1.0) and set(score.parts) == {"accuracy", "format", "failed", "timed_out"}
        assert score.parts["failed"] == 0.0 or score.reward == 0.0


@pytest.mark.parametrize(
    "answer",
    ["9" * 5000, "1+" * 600 + "1", "٧", "７", "7" + "0" * 3000, "7." + "0" * 4000, "{7", "}7", "\\", "\\frac{7}{0}"],
)
def test_excluded_answers_are_rejected_quickly(answer):
    start = time.process_time()
    assert reward("7", f"\\boxed{{{answer}}}") == 0.0
    assert time.process_time() - start < 2.0


def test_an_answer_that_recurses_too_deeply_is_wrong():
    assert reward("7", f"\\boxed{{{'(' * 150}7}}") == 0.0


def test_unparsable_answer_is_not_searched_for_numbers():
    assert reward("7", "\\boxed{is it \\frac{1} or maybe see 7}") == 0.0
    assert not answers_equal("see \\frac{1} on page 7.", "7")


def test_long_gold_answer_accepts_long_correct_answer():
    # A policy that repeats itself: the patterns of units would take twenty minutes.
    assert not answers_equal("72", "So the answer is " * 12_000 + "72")
    assert not answers_match("5", ["the answer " * 12_000 + "= 5", "5"])
    gold = ", ".join(map(str, range(MAX_CHARS // 4)))
    assert len(gold) > MAX_CHARS
    assert reward(gold, f"\\boxed{{{gold.replace(', ', ',')}}}") == 1.0


@pytest.mark.parametrize(
    "piece",
    [
        "$",
        "\\boxed{",
        "answer is ",
        "[",
        "#### ",
        "1 ",
        "\\[ a ",
        "(",
        "answer = $",
        "1/",
        "<think>",
        "{",
        "\\frac{1}{",
        " the ",
        "answer is ; ",
        "\\(1 ",
        "$1",
        "1 or ",
        "1, ",
        "\\boxed{1} ",
        "\\boxed{\\text{ a",
        "is ",
        "a.",
        "\n",
        "answer is x is ",
        "1\n",
        "0.3",
        "(1,2),",
        "\\quad",
        "? \\boxed{1}",
    ],
)
def test_long_texts_are_read_in_bounded_time(piece):
    start = time.process_time()
    MathGrader(brackets=True)("7", piece * (100_000 // len(piece)))
    MathGrader()("x + 1", f"\\boxed{{{piece * (990 // len(piece))}}}", piece * 400)
    MathGrader()("7", f"the answer is x is{' ' * 20_000}is {piece}")
    assert time.process_time() - start < 5.0


def test_unboxed_answer_search_covers_only_text_end():
    assert reward("7", "it is 7 " + "or so " * 10) == 1.0
    assert reward("7", "it is 7 " + "or so " * TAIL_CHARS) == 0.0
    assert reward("5", "\\boxed{3} " + "word " * TAIL_CHARS + "\\boxed{5}") == 1.0


# ---- right answers


@pytest.mark.parametrize(
    "field, answer",
    [(72, "72"), (145.0, "145"), (0.5, "0.5"), (" 72 ", "72"), ("5 + 3 = <<5+3=8>>8\n#### 1,008", "1008"), ("so \\boxed{\\frac12}", "\\frac12"), ("The answer is 4.", "4"), ("$x$", "$x$")],
)  # fmt: skip
def test_right_answers_of_data_sets(field, answer):
    assert gold_answer(field) == answer
    assert MathGrader()(gold_answer(field), f"\\boxed{{{answer}}}").reward == 1.0


@pytest.mark.parametrize("field, message", [(None, "neither"), (True, "neither"), ([1], "neither"), (float("nan"), "neither"), ("", "holds no answer"), ("$$", "holds no answer"), ("\\boxed{}", "holds no answer"), ("{1", "braces"), ("\\boxed{1", "braces")])  # fmt: skip
def test_invalid_gold_answers_are_refused(field, message):
    with pytest.raises(ValueError, match=message):
        gold_answer(field)


def test_answers_unreadable_by_math_verify_compare_as_text():
    assert readable("\\frac{1}{2}") and readable("72") and not readable("see \\frac{1} on page 7.")
    # Only spaces are ignored.
    assert answers_equal("see \\frac{1} on page 7.", "See  \\frac{1} on page 7") is False
    assert answers_equal("see \\frac{1} on page 7.", "see  \\frac{1} on page 7")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"format": "boxed"}, "format='boxed': unknown. Fix: choose"),
        ({"unmarked": "first"}, "unmarked='first': unknown. Fix: choose"),
        ({"format_reward": 1.0}, "format_reward=1.0: expected"),
    ],
)
def test_math_grader_out_of_range_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        MathGrader(**options)


def test_answer_equal_to_expensive_gold_scores_at_once():
    assert answers_equal("10^{10^{10}}", "$10^{10^{10}}$")


def test_normalize_keeps_brackets():
    assert normalize("\\[ x \\]") == "x" and normalize("\\left[0,1\\right]").replace(" ", "") == "[0,1]"


# ---- verdicts


def test_answer_table_rows_get_expected_rewards():
    rows = [json.loads(line) for line in TABLE.read_text().splitlines()]
    grader = MathGrader()
    assert len(rows) >= 800
    assert [row for row in rows if grader(row["gold"], row["text"]).reward != row["want"]] == []


@pytest.mark.parametrize(
    "gold, text, question, right",
    [
        ("4495", "\\boxed{\\dbinom{31}{28}}", "Compute $\\dbinom{31}{28}$.", False),
        ("4495", "\\boxed{\\binom{31}{3}}", "Compute $\\dbinom{31}{28}$.", True),
        ("(a+5)(b+2)", "\\boxed{ab+5b+2a+10}", "Factor $ab + 5b + 2a + 10$.", False),
        ("x+1", "\\boxed{x+1}", "Is it $x+1$?", True),
        ("15", "It is 7+8.", "What is 7+8?", False),
        ("15", "7 + 8 = 15", "What is 7+8?", True),
        ("\\frac{1}{2}", "\\boxed{\\frac{2}{4}}", "Simplify $\\frac{2}{4}$.", False),
        ("2\\sqrt{3}", "\\boxed{\\sqrt{12}}", "Simplify $\\sqrt{12}$.", False),
        ("\\frac{1}{2}", "\\boxed{1/2}", "She ate 1/2 of it.", True),
        ("\\pi/2", "\\boxed{\\frac{\\pi}{2}}", "for $0 < x < \\frac{\\pi}{2}$", True),
        ("72", "The answer is 48+24.", "If 48+24 is the price, then 3?", False),
    ],
)
def test_question_formula_repeated_is_not_an_answer(gold, text, question, right):
    assert MathGrader()(gold, text, question).reward == float(right)


@pytest.mark.parametrize("gold", ["\\frac{1}{2004!}", "10^{-5000}", "e^{-10000}", "10^{10^{10}}", "\\sum_{k=1}^{n} k^{k}", "9" * 900, "x_{{", "\\frac{", "=" * 20])  # fmt: skip
def test_no_right_answer_makes_the_grader_raise(gold):
    assert reward(gold, f"\\boxed{{{gold}}}") in (0.0, 1.0)
    assert reward(gold, "\\boxed{5}") == reward(gold, "it is 5") == 0.0
    assert readable(gold) in (True, False)


def test_a_comparison_that_hangs_is_wrong_and_counted(monkeypatch):
    monkeypatch.setattr(answers, "COMPARE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(answers, "answers_equal", lambda gold, answer: time.sleep(30))
    before, timer = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        score = MathGrader(format_reward=0.5)("x + 7", "\\boxed{x + 8}")
        assert score.reward == 0.0 and score.parts["timed_out"] == 1.0 and score.parts["failed"] == 0.0
        # The timer and the handler of the caller are back.
        assert signal.getsignal(signal.SIGALRM) is before and 50 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)


def test_math_grader_works_outside_main_thread():
    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(reward("7", "\\boxed{x = 7}")))
    thread.start()
    thread.join()
    assert rewards == [1.0]


@pytest.mark.parametrize(
    "answer",
    [
        "10^{10^{10}}", "9^{9^{9^{9}}}", "((((9!)!)!)!)!", "99999999!", "\\binom{100000000}{50000000}", "\\gcd(10^{10^8}, 3)", "(x+1)^{1000}", "x^{x^{x^{x^x}}}",
        "e^{e^{e^{e^5}}}", "2^{99999} \\cdot 3^{60000}", "1+" * 400 + "1", "1 1/2 " * 100, "=".join("x" * 300), "\\sum_{k=1}^{100000} \\frac1k", "(" * 300 + "5" + ")" * 300,
    ],
)  # fmt: skip
def test_formulas_that_hang_sympy_are_compared_at_once(answer):
    for gold in ("x = \\frac{e^{t}}{3} + ce^{-2t}", "x^2-1", "(1,2)"):
        start = time.process_time()
        score = MathGrader()(gold, f"\\boxed{{{answer}}}")
        assert score.reward == score.parts["timed_out"] == 0.0 and time.process_time() - start < 2.0
