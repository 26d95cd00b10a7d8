r"""Is the answer in this text the right one? Extraction of the answer, and equality of two answers by math-verify.

Where the answer stands, the first that is found counts:

1. thinking is set aside: only what follows the last `</think>` is read, and nothing of a thought that never ends; 2.
the last \boxed{...} or \fbox{...}, together with those of the same sentence: they are one list. The last sentence
alone:
   a text cannot answer twice. A box that is never closed, or empty, is no answer, whatever stands before it;
3. with `brackets`, the last [...]; 4. `#### 72` in the last line, the habit of GSM8K; 5. the last "answer is ..." or
"Answer: ..."; 6. in the last `TAIL_CHARS` characters, the last values that are joined: "2, 3 or 5" is one list; 7.
math-verify's own extraction, from the same end. It settles on one expression as well. A text that is the right answer
   letter by letter, and no more, is right.

Two answers are equal when they are the same text, the same plain number, or the same by math-verify: values (1/2 = 0.5,
to six decimals), sets in any order, tuples, intervals, equations; units (`values.py`) are left out. `{1, 2, 3}` is not
3: to name candidates gains nothing, and where the right answer is a list, the whole list must be right.

**Time.** math-verify's own time-outs work by signals, which fail in threads, so they are off. Some answers take for
ever (10^{10^{10}}); `grade` therefore belongs into the processes of `torchtune_ext.grading`, which kill it at its
deadline. That outcome is `timed_out`, not a reward of 0: nobody knows whether the answer was right. Can a policy use
that? A hang is never reinforced: the sample has no advantage and is not trained on. But it is not discouraged either,
where a wrong answer in a group with a right one is. So what can be ruled out without computing is ruled out at once and
scored 0: more than `MAX_CHARS` characters, digits other than 0-9. The rest is counted (metric `groups/infra_failed`,
the cause is in the log): a count that grows means that the policy has found such answers; then subclass the task and
score them yourself.
"""

import importlib.util
import logging
import re
from dataclasses import replace
from decimal import Decimal
from functools import lru_cache
from typing import Any

from torchtune_ext.tasks.task import Score
from torchtune_ext.tasks.values import SENTENCE_END, STYLES, changes_value, joined_values, without_unit, word_behind

MAX_CHARS = 1000  # of an answer; a longer one is wrong, unless the right one is as long
TAIL_CHARS = 2000  # of a text without a box or a phrase; its end is searched for an expression
FORMATS = ("box", "think")

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:(?P<brace>\{)|(?<=\s)(?P<token>[^\s${}\\]+))")
_BRACKETS = re.compile(r"(?<!\\)\[([^\[\]]*[^\[\]\\])\]")
_HASHES = re.compile(r"(?:(?!####).)*####\s*:?\s*(\S.*)")
_PHRASE = re.compile(r"\banswer\b[*_\s]*(?:is|:|=)[*_:\s]*", re.IGNORECASE)
_CLAUSE_END = re.compile(r"[.!?](?=\s|$)|;\s(?![^\n]{0,80}\d)|,?\s(?:because|since|so|which)\b")
# "the largest $n$ is 34": a subject that is no number and leaves nothing open, one verb, the answer.
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
    """What follows the thinking. Empty when a thought begins and never ends."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def last_box(text: str) -> str | None:
    r"""What the last \boxed{...} or \fbox{...} holds ("\boxed 7": 7); None without one, or when it is never closed."""
    boxes = last_boxes(text)
    return boxes[-1] if boxes else None


def last_boxes(text: str) -> list[str] | None:
    """What the boxes of the last sentence that has one hold, in order; None as `last_box`."""
    found, until = [], len(text)
    for box in reversed(list(_BOX.finditer(text))):
        held = _held(text, box, until)
        if held is None:  # for an earlier one: it holds the one that follows
            break
        if found and _parts(text[held[1] : until]):
            break
        found.append(held[0])
        until = box.start()
    return found[::-1] or None


def _held(text: str, box: re.Match, until: int) -> tuple[str, int] | None:
    """What a box holds, and where it ends; None when it is not closed before `until`."""
    if box["token"]:
        return box["token"].rstrip(".,;"), box.end()
    depth, at = 1, box.end()
    while at < until:
        if text[at] == "\\":
            at += 1  # \{ and \} are signs, not braces
        elif text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return text[box.end() : at].strip(), at + 1
        at += 1
    return None


def _parts(between: str) -> bool:
    """Whether a sentence ends between two boxes: at a stop, or with a line, unless at most "and" or "or" stands there."""
    words = set(re.findall(r"(?<!\\)\b[A-Za-z]{2,}", between))
    return bool(SENTENCE_END.search(between)) or ("\n" in between and not words <= {"and", "or"})


def after_hashes(text: str) -> str | None:
    """What follows `####` in the last line that is not empty, without thousands separators. Earlier ones are headings."""
    lines = text.rstrip().rsplit("\n", 1)
    found = _HASHES.match(lines[-1])
    return _GROUPED.sub("", found[1].strip()) if found else None


def after_phrase(text: str) -> str | None:
    """The clause after the last "answer is" or "answer:"; of several in one sentence, after the first of them."""
    phrases = list(_PHRASE.finditer(text))
    if not phrases:
        return None
    first = len(phrases) - 1
    while first and not re.search(r"[.!?]\s|\n", text[phrases[first - 1].end() : phrases[first].start()]):
        first -= 1
    clause = _CLAUSE_END.split(text[phrases[first].end() :].partition("\n")[0], maxsplit=1)[0].strip()
    stated = _STATED.fullmatch(clause)
    return stated[1] if stated else clause


def extract(text: str, require_box: bool = False, brackets: bool = False) -> str | None:
    """The answer in a text by rules 2 to 5 of this module; None: there is none, or it has no mark."""
    if require_box or "\\boxed" in text or "\\fbox" in text:
        boxes = last_boxes(text)
        return None if boxes is None else ", ".join(dict.fromkeys(boxes))
    if brackets and (found := _BRACKETS.findall(text)):
        return found[-1].strip()
    hashes = after_hashes(text)
    return hashes if hashes is not None else after_phrase(text)


def gold_answer(value: Any) -> str:
    r"""The right answer in a field of a data set: a number, an answer, or a solution that ends in one (\boxed, ####, a phrase).

    Raises:
        ValueError: the field holds neither text nor a number, is empty, or has braces that do not match.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value != value:
        raise ValueError(f"is {value!r:.60}, neither text nor a number")
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 145.0 of a table
    found = extract(str(value))
    answer = str(value).strip() if found is None else found
    if not tidy(answer):
        raise ValueError(f"is {value!r:.60}, which holds no answer")
    if last_box(f"\\boxed{{{answer}}}") != answer:
        raise ValueError(f"is {value!r:.60}: its braces do not match")
    return answer


def thinks(text: str) -> bool:
    """One thought, from the first character on, closed, then the rest: <think>...</think>..."""
    return text.lstrip().startswith("<think>") and text.count("<think>") == text.count("</think>") == 1


# ---- equality


def tidy(answer: str) -> str:
    r"""An answer without what never changes its value: math signs, dollars, spacing commands, emphasis, a full stop.

    1.5e-7, as computers write it, becomes 1.5 \times 10^{-7}.
    """
    answer = _NARROW.sub("", answer)
    for useless in ("\\$", "$", "\\(", "\\)", "\\,", "\\;"):
        answer = answer.replace(useless, "")
    answer = answer.replace("{,}", ",").replace("\N{MINUS SIGN}", "-")
    if "\\left" not in answer:  # \[ ... \]; in "\left\[" it would be a bracket
        answer = answer.replace("\\[", "").replace("\\]", "")
    answer = answer.strip().strip("*").strip()
    answer = answer[:-1].rstrip() if answer.endswith((".", ",")) else answer
    power = _SCIENTIFIC.fullmatch(answer)
    return f"{power[1]} \\times 10^{{{int(power[2])}}}" if power else answer


def equal(gold: str, answer: str) -> bool:
    """Whether `answer` is right where `gold` is. May take for ever, or kill the process: see the module."""
    gold, answer = tidy(gold), tidy(answer)
    if not gold or not answer:
        return False
    if _words(gold) == _words(answer):
        return True
    if _PERCENT.search(answer) and not _percentage(gold):
        return False
    whole = _STYLE.fullmatch(answer)
    answer = without_unit(whole[1].strip() if whole else answer, variables=not _NUMBER.fullmatch(gold))
    numbers = _plain(gold), _plain(answer)
    if None not in numbers:
        return numbers[0] == numbers[1]
    if len(answer) > max(MAX_CHARS, 2 * len(gold)) or _foreign_digits(answer):
        return False
    return verified(gold, expression(answer))


def all_equal(gold: str, answers: list[str]) -> bool:
    """Whether several answers are right: all of them, or none alone and the list of them."""
    verdicts = {equal(gold, answer) for answer in answers}
    values = (without_unit(tidy(answer), variables=False) for answer in answers)
    return verdicts == {True} or (len(answers) > 1 and True not in verdicts and equal(gold, ", ".join(values)))


def expression(answer: str) -> list:
    """What math-verify makes of an answer: a sympy object, then the text itself; the text alone when it cannot be read.

    The answer as a whole ("first_match"): no part is searched for in one that cannot be read.
    """
    answer = _PERCENT.sub(r"\\%", _SYMBOL.sub(r" \1", answer))
    return _library().parse(f"\\boxed{{{answer}}}", [_latex()], extraction_mode="first_match", parsing_timeout=None)


def search(text: str) -> list:
    """What math-verify finds in a text, as `expression`. Empty when there is nothing."""
    library = _library()
    return library.parse(_SYMBOL.sub(r" \1", text), [_latex(), library.ExprExtractionConfig()], parsing_timeout=None)


def verified(gold: str, found: list) -> bool:
    """math-verify's verdict on the first of what it found in a text; only one, so that there is no second guess."""
    right = _gold_expressions(tidy(gold))
    return _library().verify(right, found[:1], float_rounding=_decimals(right), timeout_seconds=None)


def unmarked(gold: str, tail: str) -> tuple[bool, bool]:
    """(found, right) for the end of a text without a box or a phrase: rules 6 and 7 of this module."""
    if _words(tidy(tail)) == _words(tidy(gold)):
        return True, True
    values = joined_values(tail)
    if len(values) > 1:
        return True, all_equal(gold, values)
    read = [] if _foreign_digits(tail) else search(tail)
    if not read:
        return False, False
    behind, text = word_behind(tail), str(read[-1])
    if changes_value(behind) and not (_PERCENT.fullmatch(behind) and _percentage(gold)):
        return True, False
    # within math signs, a unit may stand behind the value
    return True, verified(gold, read) or (without_unit(text) != text and equal(gold, text))


def _percentage(gold: str) -> bool:
    return "%" in gold or bool(_PERCENT.search(gold))


def readable(gold: str) -> bool:
    """Whether math-verify makes an expression of the right answer. One that it cannot read is compared as text."""
    gold = tidy(gold)
    return _plain(gold) is not None or any(not isinstance(e, str) for e in _gold_expressions(gold))


def _words(answer: str) -> str:
    """Text for comparison letter by letter: words without a style, and without case when they are words alone."""
    plain = " ".join(_STYLE.sub(r"\1", answer).split())
    return plain.casefold() if len(plain) > 1 and plain.replace(" ", "").isalpha() else plain


def _plain(answer: str) -> Decimal | None:
    """The value of an integer (15 digits) or a decimal (5 behind the point), where math-verify's rounding to six decimals
    changes nothing: most answers of GSM8K or AIME need no library."""
    return Decimal(answer.replace(",", "")) if _PLAIN.fullmatch(answer) else None


def _foreign_digits(text: str) -> bool:
    return not text.isascii() and any(c.isdecimal() and not c.isascii() for c in text)


def _decimals(right: list) -> int:
    """math-verify rounds floats to six decimals, which makes 0 of 0.0000001. Small values keep three digits that count."""
    if right and getattr(right[0], "is_number", False):
        size = abs(right[0].evalf(3))
        if size.is_finite and 0 < size < 1e-4:
            return 3 + len(str(int(1 / size)))
    return 6


@lru_cache(maxsize=1024)
def _gold_expressions(gold: str) -> list:
    return expression(without_unit(gold))


@lru_cache(maxsize=1)
def _latex() -> Any:
    r"""How math-verify reads LaTeX: units are ours, since it drops any \text at the end, whatever that says."""
    defaults = _library().LatexExtractionConfig()
    return replace(defaults, normalization_config=replace(defaults.normalization_config, units=False))


@lru_cache(maxsize=1)
def _library() -> Any:
    """math-verify, imported when it is first needed: half a second, most of it sympy's."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time-outs are off, which is our doing
    return math_verify


# ---- the grader


class MathGrader:
    r"""A right answer and a text -> Score: 1.0 when the answer in the text is right, else 0.0.

    Parts: "accuracy"; "format", 1.0 for an answer in a box (or, with format="think", one closed thought before the
        rest);
    "failed", 1.0 when the text holds no answer.

    Args:
        require_box: only an answer in \boxed{} counts.
        require_thinking: only an answer after `</think>` counts.
        brackets: [45] is an answer, too, as Geometry3K's prompts ask for.
        format: "box" or "think", what the part "format" looks for.
        format_reward: share of the reward that the format earns: (1 - format_reward) * accuracy + format_reward *
            format.
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
            raise ValueError(f"format={format!r}: choose one of {', '.join(FORMATS)}")
        if not 0.0 <= format_reward < 1.0:
            raise ValueError(f"format_reward={format_reward} must lie in [0, 1): it is a share of the reward")
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("grading mathematics needs math-verify: pip install 'torchtune-ext[math]'")
        self.require_box, self.require_thinking, self.brackets = require_box, require_thinking, brackets
        self.format, self.format_reward = format, format_reward

    def __setstate__(self, state: dict) -> None:
        """In a grading process: loads the library now, so that the first text does not pay for it."""
        self.__dict__.update(state)
        expression("1")

    def __call__(self, gold: str, text: str) -> Score:
        said = spoken(text) if not self.require_thinking or "</think>" in text else ""
        boxes = last_boxes(said)
        answer = extract(said, self.require_box, self.brackets)
        if answer is not None:
            found = bool(tidy(answer))
            right = all_equal(gold, [answer] if boxes is None else boxes)
        elif self.require_box or "\\boxed" in said or "\\fbox" in said:
            found, right = False, False
        else:
            found, right = unmarked(gold, said[-TAIL_CHARS:])
        boxed = found and boxes is not None
        well_formed = float(boxed if self.format == "box" else thinks(text))
        reward = (1.0 - self.format_reward) * right + self.format_reward * well_formed
        return Score(reward, {"accuracy": float(right), "format": well_formed, "failed": float(not found)})


def grade(answer: Any, text: str) -> Score:
    """`MathGrader` with its defaults, for `grader:` of a task. `answer` is anything that `gold_answer` understands."""
    return MathGrader()(gold_answer(answer), text)
