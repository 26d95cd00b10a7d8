r"""Finds the answer in a text, and compares it with the right one by math-verify.

Only the text after the last `</think>` is read. The first of these rules that finds an answer counts:

1. The last \boxed{...} or \fbox{...}, with the other boxes of its sentence as one list.
2. With `brackets`, the last [...].
3. `#### 72` in the last line, as GSM8K writes it.
4. The last "answer is ..." or "Answer: ...".
5. In the last `TAIL_CHARS` characters, the last joined values: "2, 3 or 5" is one list.
6. The one expression that math-verify chooses in the same characters.

Answers are equal when they are the same text, the same plain number, or the same for math-verify: values (1/2 = 0.5, to
six decimals), sets in any order, tuples, intervals, equations. Units (`values.py`) are left out.

Some answers take forever (10^{10^{10}}), so `grade` must run in the processes of `torchtune_ext.grading`, which end it
at its deadline. Metric `groups/infra_failed` counts such groups. If it grows, the policy has found such answers: then
subclass the task and give them a reward yourself.
"""

import importlib.util
import logging
import re
from dataclasses import replace
from decimal import Decimal
from functools import lru_cache
from typing import Any

from torchtune_ext.run.errors import Mistake
from torchtune_ext.tasks.task import Score
from torchtune_ext.tasks.values import SENTENCE_END, STYLES, changes_value, joined_values, without_unit, word_behind

MAX_CHARS = 1000  # characters of an answer; a longer answer is wrong, unless the right one is more than half as long
TAIL_CHARS = 2000  # characters at the end of a text without a mark, which are searched for values or an expression
FORMATS = ("box", "think")

# A box with braces, or one without, around what follows a space: \boxed 7.
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:(?P<brace>\{)|(?<=\s)(?P<token>[^\s${}\\]+))")
_BRACKETS = re.compile(r"(?<!\\)\[([^\[\]]*[^\[\]\\])\]")
_HASHES = re.compile(r"(?:(?!####).)*####\s*:?\s*(\S.*)")
_PHRASE = re.compile(r"\banswer\b[*_\s]*(?:is|:|=)[*_:\s]*", re.IGNORECASE)
# A semicolon ends a clause only if no number follows soon after it.
_CLAUSE_END = re.compile(r"[.!?](?=\s|$)|;\s(?![^\n]{0,80}\d)|,?\s(?:because|since|so|which)\b")
# Clauses such as "the largest $n$ is 34": a subject that is no number, one verb, the answer. Words such as "or" and
# "if" would leave the answer open.
_STATED = re.compile(
    r"(?!.*\b(?:or|if|unless|either|not|but)\b)[A-Za-z$\\(](?:(?!\b(?:is|are|equals)\b)[^,;:?])*\s(?:is|are|equals)\s+"
    r"((?:(?!\b(?:is|are|equals)\b).)+)",
    re.IGNORECASE,
)
_GROUPED = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # 1,234,567
_PLAIN = re.compile(r"(?:0|-?[1-9][0-9]{0,14})|-?(?:0|[1-9][0-9]{0,8})\.[0-9]{1,5}|-?[1-9][0-9]{0,2}(?:,[0-9]{3}){1,4}")
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?|-?\.[0-9]+|-?[0-9]+/[0-9]+|-?\\frac\{[0-9]+\}\{[0-9]+\}")
_NARROW = re.compile(r"\\!\s*")  # 11,\! 111
_SCIENTIFIC = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]{1,3})")
_STYLE = re.compile(rf"\\(?:{STYLES})\s*\{{([^{{}}]*)\}}")
_SYMBOL = re.compile(rf"\\(?:{STYLES})\s*\{{\s*([A-Za-z0-9])\s*\}}")
_PERCENT = re.compile(rf"(\\(?:{STYLES})\s*\{{\s*)?\b(?:per\s?cent(?:age)?|pct)\b(?(1)\s*\}})", re.IGNORECASE)


# ---- extraction


def spoken(text: str) -> str:
    """Returns the answer part of a text: everything after the last closed thought, or "" if a thought is still open."""
    # Every grader reads texts by this rule. A text that never opens a thought is all answer.
    rest = text.rpartition("</think>")[2]
    return "" if "<think>" in rest else rest


def last_box(text: str) -> str | None:
    r"""Returns what the last \boxed{...} or \fbox{...} holds ("\boxed 7": 7), or None without one that is closed."""
    boxes = last_boxes(text)
    return boxes[-1] if boxes else None


def last_boxes(text: str) -> list[str] | None:
    """Returns what the boxes of the last sentence with a box hold, in order, or None as `last_box` does."""
    # Boxes of earlier sentences do not count. Otherwise a text could answer twice.
    boxes, until = [], len(text)
    for box in reversed(list(_BOX.finditer(text))):
        held = _held(text, box, until)
        # The last box is never closed, or an earlier box contains the one after it.
        if held is None:
            break
        if boxes and _parts(text[held[1] : until]):
            break
        boxes.append(held[0])
        until = box.start()
    return boxes[::-1] or None


def _held(text: str, box: re.Match, until: int) -> tuple[str, int] | None:
    """Returns what a box holds and where it ends, or None when it is not closed before `until`."""
    if box["token"]:
        return box["token"].rstrip(".,;"), box.end()
    depth, at = 1, box.end()
    while at < until:
        if text[at] == "\\":
            # The braces of \{ and \} are printed. They do not open or close a group.
            at += 1
        elif text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return text[box.end() : at].strip(), at + 1
        at += 1
    return None


def _parts(between: str) -> bool:
    """Tells whether a sentence ends between two boxes."""
    # Boxes of one list may stand on lines of their own with "and" or "or" between them. Other words on a new line begin
    # a new sentence.
    words = set(re.findall(r"(?<!\\)\b[A-Za-z]{2,}", between))
    return bool(SENTENCE_END.search(between)) or ("\n" in between and not words <= {"and", "or"})


def after_hashes(text: str) -> str | None:
    """Returns what follows `####` in the last line that is not empty, without thousands separators, or None."""
    # In earlier lines `####` may begin a heading.
    lines = text.rstrip().rsplit("\n", 1)
    match = _HASHES.match(lines[-1])
    return _GROUPED.sub("", match[1].strip()) if match else None


def after_phrase(text: str) -> str | None:
    """Returns the clause after the last "answer is" or "answer:", or None without one."""
    phrases = list(_PHRASE.finditer(text))
    if not phrases:
        return None
    # Of several phrases in the last sentence, the first counts.
    first = len(phrases) - 1
    while first and not re.search(r"[.!?]\s|\n", text[phrases[first - 1].end() : phrases[first].start()]):
        first -= 1
    clause = _CLAUSE_END.split(text[phrases[first].end() :].partition("\n")[0], maxsplit=1)[0].strip()
    # In "the answer is that the largest n is 34", only 34 is the answer.
    stated = _STATED.fullmatch(clause)
    return stated[1] if stated else clause


def extract(text: str, require_box: bool = False, brackets: bool = False) -> str | None:
    """Returns the answer in a text by rules 1 to 4 of this module, or None if these rules find no answer."""
    # A box that is empty or never closed is no answer, and no other rule is tried then.
    if require_box or "\\boxed" in text or "\\fbox" in text:
        boxes = last_boxes(text)
        return None if boxes is None else ", ".join(dict.fromkeys(boxes))
    if brackets and (contents := _BRACKETS.findall(text)):
        return contents[-1].strip()
    hashes = after_hashes(text)
    return hashes if hashes is not None else after_phrase(text)


def gold_answer(value: Any) -> str:
    r"""Returns the right answer from a field with it, or with a solution that ends with it (\boxed, ####, a phrase).
    Raises ValueError if the field is neither text nor a number, is empty, or has unmatched braces."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value != value:
        raise Mistake(f"is {value!r:.60}, neither text nor a number")
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a table may hold 145.0 where 145 is meant
    final = extract(str(value))
    answer = str(value).strip() if final is None else final
    if not tidy(answer):
        raise Mistake(f"is {value!r:.60}, which holds no answer")
    # `expression` puts answers into a box, which unmatched braces would end too early or never.
    if last_box(f"\\boxed{{{answer}}}") != answer:
        raise Mistake(f"is {value!r:.60}: its braces do not match")
    return answer


def thinks(text: str) -> bool:
    """Tells whether a text is <think>...</think>... with no other thought."""
    return text.lstrip().startswith("<think>") and text.count("<think>") == text.count("</think>") == 1


# ---- equality


def tidy(answer: str) -> str:
    r"""Returns an answer without what never changes its value: math signs, dollars, spacing, emphasis, a full stop."""
    answer = _NARROW.sub("", answer)
    for useless in ("\\$", "$", "\\(", "\\)", "\\,", "\\;"):
        answer = answer.replace(useless, "")
    answer = answer.replace("{,}", ",").replace("\N{MINUS SIGN}", "-")
    # \[ ... \] are math signs, but in "\left\[" the same characters are a bracket.
    if "\\left" not in answer:
        answer = answer.replace("\\[", "").replace("\\]", "")
    answer = answer.strip().strip("*").strip()
    answer = answer[:-1].rstrip() if answer.endswith((".", ",")) else answer
    # math-verify reads e as Euler's number.
    power = _SCIENTIFIC.fullmatch(answer)
    return f"{power[1]} \\times 10^{{{int(power[2])}}}" if power else answer


def equal(gold: str, answer: str) -> bool:
    """Tells whether `answer` equals the right answer `gold`. It may never return, so a grading process must run it."""
    gold, answer = tidy(gold), tidy(answer)
    if not gold or not answer:
        return False
    if _words(gold) == _words(answer):
        return True
    # math-verify takes 5% for 5 as well as for 0.05, so a percentage is right only where one is asked for.
    if _PERCENT.search(answer) and not _percentage(gold):
        return False
    # What the patterns below and math-verify may not finish is rejected here, with reward 0. A sample that hangs is not
    # trained on, so a policy would never unlearn to write such answers, while it unlearns wrong ones.
    if _too_long(gold, answer) or _foreign_digits(answer):
        return False
    # A style may enclose the whole answer, value and unit: \text{18 dollars}. Where the right answer is a number,
    # letters are a unit and no variables.
    whole = _STYLE.fullmatch(answer)
    answer = without_unit(whole[1].strip() if whole else answer, variables=not _NUMBER.fullmatch(gold))
    numbers = _plain(gold), _plain(answer)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return verified(gold, expression(answer))


def _too_long(gold: str, answer: str) -> bool:
    return len(answer) > max(MAX_CHARS, 2 * len(gold))


def all_equal(gold: str, answers: list[str]) -> bool:
    """Tells whether several answers are right: each of them equals `gold`, or only the whole list does."""
    # If some are right and others wrong, the text has only listed candidates.
    if any(_too_long(gold, answer) for answer in answers):
        return False
    verdicts = {equal(gold, answer) for answer in answers}
    values = (without_unit(tidy(answer), variables=False) for answer in answers)
    return verdicts == {True} or (len(answers) > 1 and True not in verdicts and equal(gold, ", ".join(values)))


def expression(answer: str) -> list:
    """Parses an answer with math-verify: a sympy object and the text itself, or only the text if it cannot be read."""
    # With "first_match", no part of an unreadable answer is searched for an expression. The time-outs of math-verify
    # work by signals, which fail in threads, so they are off here and below.
    answer = _PERCENT.sub(r"\\%", _SYMBOL.sub(r" \1", answer))
    return _library().parse(f"\\boxed{{{answer}}}", [_latex()], extraction_mode="first_match", parsing_timeout=None)


def search(text: str) -> list:
    """Searches a text with math-verify. Returns a list as `expression` does, empty if nothing is found."""
    library = _library()
    return library.parse(_SYMBOL.sub(r" \1", text), [_latex(), library.ExprExtractionConfig()], parsing_timeout=None)


def verified(gold: str, guesses: list) -> bool:
    """Tells whether the first of `guesses` equals `gold`."""
    # math-verify would accept a match among any of the guesses. A text has only one.
    right = _gold_expressions(tidy(gold))
    return _library().verify(right, guesses[:1], float_rounding=_decimals(right), timeout_seconds=None)


def unmarked(gold: str, tail: str) -> tuple[bool, bool]:
    """Tells whether the end of a text has an answer by rules 5 and 6 of this module, and whether that is right."""
    # Whatever the rules would find in it, the right answer itself is right.
    if _words(tidy(tail)) == _words(tidy(gold)):
        return True, True
    values = joined_values(tail)
    if len(values) > 1:
        return True, all_equal(gold, values)
    read = [] if _foreign_digits(tail) else search(tail)
    if not read:
        return False, False
    # math-verify reads "5 million" and "5 tenths" as 5.
    behind, text = word_behind(tail), str(read[-1])
    if changes_value(behind) and not (_PERCENT.fullmatch(behind) and _percentage(gold)):
        return True, False
    # Inside math signs, a unit may follow the value. Then the value without it is compared.
    return True, verified(gold, read) or (without_unit(text) != text and equal(gold, text))


def _percentage(gold: str) -> bool:
    return "%" in gold or bool(_PERCENT.search(gold))


def readable(gold: str) -> bool:
    """Tells whether math-verify can read the right answer. Otherwise it is compared as text."""
    gold = tidy(gold)
    return _plain(gold) is not None or any(not isinstance(e, str) for e in _gold_expressions(gold))


def _words(answer: str) -> str:
    """Returns the text that is compared letter by letter, without styles."""
    plain = " ".join(_STYLE.sub(r"\1", answer).split())
    # In words the case does not matter. In formulas and single letters, which may be variables, it does.
    return plain.casefold() if len(plain) > 1 and plain.replace(" ", "").isalpha() else plain


def _plain(answer: str) -> Decimal | None:
    """Returns the value of an integer (at most 15 digits) or a decimal (at most 5 digits after the point), or None."""
    # The rounding of math-verify to six decimals does not change such numbers, so they need no library. Most answers of
    # GSM8K and AIME are such numbers.
    return Decimal(answer.replace(",", "")) if _PLAIN.fullmatch(answer) else None


def _foreign_digits(text: str) -> bool:
    return not text.isascii() and any(c.isdecimal() and not c.isascii() for c in text)


def _decimals(right: list) -> int:
    """Returns the number of decimals to which math-verify rounds: six, or more for a small right answer."""
    # Rounded to six decimals, 0.0000001 would equal 0.
    if right and getattr(right[0], "is_number", False):
        size = abs(right[0].evalf(3))
        if size.is_finite and 0 < size < 1e-4:
            return 3 + len(str(int(1 / size)))
    return 6


# All samples of a problem have the same right answer.
@lru_cache(maxsize=1024)
def _gold_expressions(gold: str) -> list:
    return expression(without_unit(gold))


@lru_cache(maxsize=1)
def _latex() -> Any:
    # With units=True, math-verify drops any \text at the end, also "million". `values.py` removes units instead.
    defaults = _library().LatexExtractionConfig()
    return replace(defaults, normalization_config=replace(defaults.normalization_config, units=False))


@lru_cache(maxsize=1)
def _library() -> Any:
    # The import takes half a second, most of it for sympy.
    import math_verify

    # It warns that its time-outs are off, which is intended.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


# ---- the grader


class MathGrader:
    r"""Grades a text against a right answer: reward 1.0 if the answer in the text is right, else 0.0.

    Parts of the score: "accuracy", 1.0 for a right answer; "format", 1.0 for an answer in a box (or, with
    format="think", one closed thought before the rest); "failed", 1.0 when the text holds no answer.

    Args:
        require_box: only an answer in \boxed{} counts.
        require_thinking: only an answer after `</think>` counts.
        brackets: [45] counts as an answer, too; the prompts of Geometry3K ask for this form.
        format: what the part "format" looks for: "box" or "think".
        format_reward: share of the reward for the format: (1 - format_reward) * accuracy + format_reward * format.

    Raises:
        ValueError: `format` is unknown, `format_reward` is not in [0, 1), or math-verify is not installed.
    """

    def __init__(
        self,
        require_box: bool = False,
        require_thinking: bool = False,
        brackets: bool = False,
        format: str = "box",
        format_reward: float = 0.0,
    ) -> None:
        if format not in FORMATS:
            raise Mistake(f"format={format!r}: choose one of {', '.join(FORMATS)}")
        if not 0.0 <= format_reward < 1.0:
            raise Mistake(f"format_reward={format_reward} must lie in [0, 1): it is a share of the reward")
        if importlib.util.find_spec("math_verify") is None:
            raise Mistake("grading mathematics needs math-verify: pip install 'torchtune-ext[math]'")
        self.require_box, self.require_thinking, self.brackets = require_box, require_thinking, brackets
        self.format, self.format_reward = format, format_reward

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        # This loads math-verify in the grading process, so that the first text does not wait for it.
        expression("1")

    def __call__(self, gold: str, text: str) -> Score:
        # Where thinking is required, a text without a closed thought has no reply.
        reply = spoken(text) if not self.require_thinking or "</think>" in text else ""
        boxes = last_boxes(reply)
        answer = extract(reply, self.require_box, self.brackets)
        if answer is not None:
            has_answer = bool(tidy(answer))
            right = all_equal(gold, [answer] if boxes is None else boxes)
        elif self.require_box or "\\boxed" in reply or "\\fbox" in reply:
            # A box was required, or one is never closed. Nothing else counts then.
            has_answer, right = False, False
        else:
            has_answer, right = unmarked(gold, reply[-TAIL_CHARS:])
        boxed = has_answer and boxes is not None
        well_formed = float(boxed if self.format == "box" else thinks(text))
        reward = (1.0 - self.format_reward) * right + self.format_reward * well_formed
        return Score(reward, {"accuracy": float(right), "format": well_formed, "failed": float(not has_answer)})


def grade(answer: Any, text: str) -> Score:
    """Grades a text by `MathGrader` with its defaults. `gold_answer` reads the answer."""
    return MathGrader()(gold_answer(answer), text)
