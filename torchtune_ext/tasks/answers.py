r"""Extracts the answer from a text, and grades it against the reference answer.

Only the text after the last `</think>` is read. The first rule that finds an answer applies:

1. The last \boxed{...} or \fbox{...}, with the other boxes of its sentence as one list.
2. With `brackets`, the last [...].
3. `#### 72` in the last line with a digit, as in GSM8K.
4. The last "answer is ..." or "Answer: ...".
5. With `unmarked: last_number`, the value at the end of the last `TAIL_CHARS` characters: "2, 3 or
   5" is one list.

`equality.py` compares answers. An ambiguous text gets no reward. An answer that takes longer than
`COMPARE_TIMEOUT_S` to compare is wrong and sets the part `timed_out`.
"""

import contextlib
import importlib.util
import math
import re
import signal
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torchtune_ext.run.errors import UsageError
from torchtune_ext.tasks.equality import MAX_CHARS, answers_equal
from torchtune_ext.tasks.equality import readable as readable
from torchtune_ext.tasks.notation import is_name, letter_tokens, normalize
from torchtune_ext.tasks.prose_values import DENIAL, SENTENCE_END, last_values
from torchtune_ext.tasks.task import Score, require_choice, strip_thinking

TAIL_CHARS = 2000  # characters at the end of an unmarked text that are searched for values
COMPARE_TIMEOUT_S = 3.0  # time limit of one comparison, well below `grader.timeout_s`
FORMATS = ("box", "think")
UNMARKED_MODES = ("last_number", "none")

# A box with braces, or without braces around the word after a space: \boxed 7.
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*(?:(?P<brace>\{)|(?<=\s)(?P<token>[^\s${}\\]+))")
_BOX_MARK = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])")
# \{ and \} are printed braces, which do not delimit a group.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BRACKETS = re.compile(r"(?<!\\)\[([^\[\]]*[^\[\]\\])\]")
_HASHES = re.compile(r"(?:(?!####).)*####\s*:?\s*(\S.*)")
_PHRASE = re.compile(
    r"\b(?:answer|correct (?:option|choice))\b(?: to (?:the|this) \w+)?[*_\s]{0,9}(?:is|:|=|\n)[*_:\s]{0,9}"
    r"(?:(?:\\\[|\$\$)\s*\n\s*)?",
    re.IGNORECASE,
)
_NEXT_PHRASE = re.compile(r"[.!?]\s|\n|^(?:the )?(?:final |correct )?$", re.IGNORECASE)
_TOKENS = re.compile(r"<\|\w+\|>|</?(?:s|answer)>")  # special tokens, and answer tags
# A semicolon ends a clause only if the next 80 characters of the line have no digit.
_CLAUSE_END = re.compile(
    r"(?<!\\)[.!?](?=\s|$)|;\s(?![^\n]{0,80}\d)|, and (?:we|this|that)\b"
    r"|,?\s(?:because|since|so|which|as (?:required|desired))\b|,\sas\b|\s\((?:because|since|as|i\.e)\b"
)
_GROUPED = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # 1,234,567
_LABEL = re.compile(r"(\\?[A-Za-z][\w\\{}']{0,20}(?:\([^()\s]{1,9}\))?)\s*=\s*\$?\s*$")
_ITEM = re.compile(r"\s*(?:[-*•]|\(?\w{1,3}[.):]|(?:option|case|candidate|choice)\s*\w{1,3}\W)\s*", re.IGNORECASE)
_DOUBT = re.compile(
    r"(?:\b(?:not|never|neither|cannot|wrong|incorrect|unlike|except|than|rul(?:e|ed|ing) out|eliminate|reject)\b|n't\b)"
    r"(?:\s+[\w$]+){0,4}[\s$(*:]*$",
    re.IGNORECASE,
)
_REJECTED = re.compile(
    r"(?:\b(?:(?:wrong|incorrect|false)(?:\s\w+)?\s*:|(?:\w+thing|option|choice) but)"
    r"|(?:^|[.;:]\s)\s*(?:if|suppose|assume)\b[^,.]{0,40}(?:\b(?:were|was|is|equals)|=))[\s$(*]*$",
    re.IGNORECASE,
)
_QUESTION = re.compile(r"[\s$).*]{0,9}\?")
_OTHER_VALUE = re.compile(r"[\s$]{0,9}or\s+\$?(-?[\d.,/]*\d)\$?[\s.]*(?=\n|$)")
_OTHERWISE = re.compile(r"[\s$.,)*]{0,20}(?:or|alternatively|maybe)\b", re.IGNORECASE)


# ---- extraction


def restore_box_commands(text: str) -> str:
    r"""Restores the backslash of `boxed{` if no box of the text has one."""
    return re.sub(r"(?<![\w\\])boxed\{", r"\\boxed{", text) if "boxed{" in text and "\\boxed" not in text else text


def last_box(text: str) -> str | None:
    r"""Returns the content of the last \boxed{...} or \fbox{...} ("\boxed 7": 7), or None."""
    spans = _last_box_spans(text)
    return spans[-1][0] if spans else None


def last_boxes(text: str) -> list[str] | None:
    """Returns the contents of the boxes in the last sentence with a box, in order.

    With several boxes, a name before a box is included: "x = 3".

    Returns:
        None if the text has no closed box; an empty list if the words around the last negate it.
    """
    spans = _last_box_spans(text)
    if not spans:
        return None
    line = text[: spans[-1][1]].rpartition("\n")[2][-200:]
    clause = re.split(
        r"[,;:.!?](?=\s)|\b(?:so|that|then|hence|thus)\b|(?<!thing )(?<!option )(?<!choice )\bbut\b", line
    )[-1]
    after = spans[-1][2]
    if _QUESTION.match(text, after) or DENIAL.match(text, after) or _DOUBT.search(clause) or _REJECTED.search(line):
        return []
    is_ended = any(_has_sentence_end(text[end:start]) for (_, _, end), (_, start, _) in pairwise(spans))
    if is_ended and len({letter_tokens(normalize(content)) for content, _, _ in spans}) > 1:
        return []  # different candidates in several sentences
    held = []
    for content, start, _ in spans:
        label = _LABEL.search(text, max(0, start - 60), start) if len(spans) > 1 else None
        held.append(f"{label[1]} = {content}" if label and is_name(label[1]) and "=" not in content else content)
    other = _OTHER_VALUE.match(text, after)
    return [*held, other[1]] if other else held


def _last_box_spans(text: str) -> list[tuple[str, int, int]]:
    """Returns (content, start, end) of each box in the last sentence with a box."""
    # Boxes of earlier sentences are ignored. Otherwise a text could give two answers.
    boxes, until = [], len(text)
    for box in reversed(list(_BOX.finditer(text))):
        held = _box_content(text, box, until)
        # The last box is never closed, or an earlier box contains the next box.
        if held is None or (boxes and _separates_boxes(text, box.start(), held[1], until)):
            break
        boxes.append((held[0], box.start(), held[1]))
        until = box.start()
    return boxes[::-1]


def _box_content(text: str, box: re.Match, until: int) -> tuple[str, int] | None:
    """Returns the content and the end of a box, or None if it is not closed before `until`."""
    if box["token"]:
        return box["token"].rstrip(".,;"), box.end()
    depth = 1
    for brace in _BRACE.finditer(text, box.end(), until):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[box.end() : brace.start()].strip(), brace.end()
    return None


def _separates_boxes(text: str, start: int, end: int, until: int) -> bool:
    """Tells whether a sentence ends between a box [start, end) and the next box at `until`."""
    between = text[end:until]
    if len(between) > TAIL_CHARS:
        return True
    # A question, "or" at the start of a sentence, and list items name candidates of one list.
    sentence = re.split(r"[.!?\n]", between)[-1] if re.search(r"[.!?\n]", between) else ""
    if _QUESTION.match(between) or _OTHERWISE.match(sentence):
        return False
    lines = text[max(0, start - 200) : start].rpartition("\n")[2], between.rpartition("\n")[2]
    return not ("\n" in between and all(map(_ITEM.match, lines))) and _has_sentence_end(between)


def _has_sentence_end(between: str) -> bool:
    """Tells whether a sentence ends in a text between two boxes."""
    # The boxes of one list may be on separate lines with "and" or "or" between them. Other words on
    # a new line start a new sentence.
    words = set(re.findall(r"(?<!\\)\b[A-Za-z]{2,}", between))
    return bool(SENTENCE_END.search(between)) or ("\n" in between and not words <= {"and", "or"})


def after_hashes(text: str) -> str | None:
    """Returns the text after `####` in the last line with a digit or `####`, or None.

    Thousands separators are removed.
    """
    # In earlier lines, `####` may start a heading.
    for line in reversed(text[-TAIL_CHARS:].rstrip().split("\n")):
        match = _HASHES.match(line)
        if match or re.search(r"\d", line):
            return _GROUPED.sub("", match[1].strip()) if match else None
    return None


def after_phrase(text: str) -> str | None:
    """Returns the clause after the last "answer is" or "answer:", or None."""
    found = _last_phrase(text)
    return None if found is None else found[0]


def _last_phrase(text: str) -> tuple[str, int, int] | None:
    """Returns (clause, start, end) of the clause after the last phrase, or None."""
    phrases = list(_PHRASE.finditer(text))
    if not phrases:
        return None
    # With several phrases in the last sentence, the first counts, unless it is a heading, as in
    # "Final answer: The final answer is 5".
    first = len(phrases) - 1
    while first and not _NEXT_PHRASE.search(text[phrases[first - 1].end() : phrases[first].start()]):
        first -= 1
    start = phrases[first].end()
    line = text[start:].partition("\n")[0]
    clause = _CLAUSE_END.split(line[: 4 * MAX_CHARS], maxsplit=1)[0]
    return clause.strip(), start, start + len(clause)


def extract_answer(text: str, brackets: bool = False) -> str | None:
    """Returns the answer in a text by rules 1 to 4 of this module, or None."""
    # An empty or unclosed box is not an answer, and the other rules do not apply.
    if _BOX_MARK.search(text):
        boxes = last_boxes(text)
        return None if boxes is None else ", ".join(dict.fromkeys(boxes))
    if brackets and (contents := _BRACKETS.findall(text)):
        return contents[-1].strip()
    hashes = after_hashes(text)
    return hashes if hashes is not None else after_phrase(text)


def gold_answer(value: Any) -> str:
    r"""Returns the reference answer from a data field.

    Args:
        value: the answer, or a solution that ends with it (\boxed, ####, a phrase).

    Raises:
        UsageError: the value is neither a string nor a number, is empty, or has unmatched braces.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value != value:
        raise UsageError(f"is {value!r:.60}, neither text nor a number")
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a table may store 145 as 145.0
    final = extract_answer(str(value))
    answer = str(value).strip() if final is None else final
    if not has_content(answer):
        raise UsageError(f"is {value!r:.60}, which holds no answer")
    # An answer with unmatched braces cannot be written in a box.
    if last_box(f"\\boxed{{{answer}}}") != answer:
        raise UsageError(f"is {value!r:.60}: its braces do not match")
    return answer


def has_single_thought(text: str) -> bool:
    """Tells whether a text is <think>...</think>... with no other thought."""
    return text.lstrip().startswith("<think>") and text.count("<think>") == text.count("</think>") == 1


# ---- comparison


def has_content(answer: str) -> bool:
    """Tells whether an answer has more than markup and spacing."""
    return any(map(str.isdigit, answer)) or bool(letter_tokens(normalize(answer[: 2 * MAX_CHARS])))


def answers_match(gold: str, answers: list[str], question: str = "") -> bool:
    """Tells whether a list of answers is right.

    Either each answer equals `gold`, or only the whole list does. A formula copied from the
    `question` is not accepted.
    """
    # If some answers are right and others wrong, the text only lists candidates.
    answers = list(dict.fromkeys(answers))
    if not answers:
        return False
    verdicts = {answers_equal(gold, answer) for answer in answers}
    right = verdicts == {True} or (
        len(answers) > 1 and True not in verdicts and answers_equal(gold, ", ".join(answers))
    )
    return right and not (question and copies_question(gold, answers, question))


def grade_prose(gold: str, text: str, question: str) -> tuple[bool, bool]:
    """Grades the value at the end of an unmarked text.

    Returns:
        (has an answer, the answer is right).
    """
    tail = text[-TAIL_CHARS:]
    # A text without prose is the answer itself.
    words = re.findall(r"(?<![A-Za-z\\])[A-Za-z]{2,}", tail)
    short = len(tail) < MAX_CHARS // 4 and (
        len(words) < 2 or letter_tokens(normalize(gold)) == letter_tokens(normalize(tail))
    )
    if short and answers_match(gold, [tail], question):
        return True, True
    values = last_values(tail)
    return values is not None, bool(values) and answers_match(gold, values, question)


def grade_phrase(gold: str, text: str, question: str) -> tuple[bool, bool]:
    """Grades the answer after the phrase "answer is".

    Returns:
        (has an answer, the answer is right).
    """
    phrase = _last_phrase(text)
    assert phrase is not None  # the caller has found a phrase
    clause, start, end = phrase
    if _OTHERWISE.match(text, end) or DENIAL.match(text, end):
        return True, False
    if answers_match(gold, [clause], question):
        return True, True
    # In "the answer is the number of apples, which is 3" and "To find the answer: add 3 and 4", the
    # value comes later.
    words = re.sub(r"\\[A-Za-z]+|\$[^$]*\$", " ", clause)
    if not re.search(r"[A-Za-z]{3,}", words) or re.match(r"[$*(\s]*-?\d", clause) or _QUESTION.match(text, end):
        return has_content(clause), False
    return grade_prose(gold, text[start:], question)


def copies_question(gold: str, answers: list[str], question: str) -> bool:
    """Tells whether an answer is an unevaluated formula copied from the question."""
    # A number in its final form may also occur in the question.
    pieces = re.split(r"(?<!\\)\$+|\\[()\[\]]", question)
    words = r"(?<!\S)[A-Za-z]{2,}(?=[\s.,;:?!]|$)(?!\s*[-+*/=^<>])"
    asked = "\0".join(_strip_markup(piece if n % 2 else re.sub(words, "\0", piece)) for n, piece in enumerate(pieces))
    for answer in answers:
        copied = _strip_markup(answer)
        if copied == _strip_markup(gold) or len(copied) < 3 or is_final_form(answer):
            continue
        if re.search(rf"(?<![\w^+*/()|!\\-]){re.escape(copied)}(?![\w^+*/()|!\\-])", asked):
            return True
    return False


def is_final_form(answer: str) -> bool:
    r"""Tells whether an answer is a word or a number in final form: 3/4, -2\sqrt{3}, \pi/2."""
    text = _strip_markup(answer.rpartition("=")[2] if is_name(answer.partition("=")[0].strip()) else answer)
    if not re.fullmatch(r"-?(?:[\d.,/%()]|\\(?:frac|sqrt|pi|%|circ)|\^(?=\\circ)|)*|[A-Za-z]+|\(?[A-Za-z]\)?", text):
        return False
    parts = [(int(a), int(b)) for a, b in re.findall(r"(?<!\d)(\d{1,9})/(\d{1,9})", text)]
    parts += [(int(a), int(b)) for a, b in re.findall(r"frac\s*\{(\d{1,9})\}\s*\{(\d{1,9})\}", answer)]
    roots = map(int, re.findall(r"sqrt(\d{1,6})", text))
    return all(math.gcd(a, b) == 1 and b > 1 for a, b in parts) and not any(
        root % (factor * factor) == 0 for root in roots for factor in range(2, math.isqrt(root) + 1)
    )


def _strip_markup(text: str) -> str:
    return re.sub(r"\\left|\\right|\\[,;:!]|[\s${}]|(?<=\\)[dt](?=frac|binom)", "", text)


_NUMBER = re.compile(r"-?\d{1,30}(?:\.\d{1,30})?")


class _CompareTimeout(BaseException):
    """A timeout of a comparison. As a `BaseException`, libraries do not catch it."""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises `_CompareTimeout` in the block after `seconds`. In other threads, does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: Any) -> None:
        raise _CompareTimeout

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


class MathGrader:
    r"""Grades a text against a reference answer: reward 1.0 or 0.0, unless `format_reward` is set.

    Parts of the score:
        accuracy: 1.0 for a right answer.
        format: 1.0 for an answer in a box; with format="think", for one closed thought first.
        failed: 1.0 if the text holds no answer.
        timed_out: 1.0 if the comparison took longer than `COMPARE_TIMEOUT_S`; the reward is then 0.

    Args:
        require_box: True: only an answer in \boxed{} counts.
        require_thinking: True: only an answer after `</think>` counts.
        brackets: True: [45] is also an answer, the form that the prompts of Geometry3K request.
        format: the form that the part "format" checks: "box" or "think".
        format_reward: fraction of the reward for the format:
            (1 - format_reward) * accuracy + format_reward * format.
        unmarked: the answer of a text without a box, `####` or "answer is": "last_number" or
            "none".

    Raises:
        UsageError: `format` or `unmarked` is unknown, `format_reward` is not in [0, 1), or
            math-verify is not installed.
    """

    def __init__(
        self,
        require_box: bool = False,
        require_thinking: bool = False,
        brackets: bool = False,
        format: str = "box",
        format_reward: float = 0.0,
        unmarked: str = "last_number",
    ) -> None:
        require_choice("format", format, FORMATS)
        require_choice("unmarked", unmarked, UNMARKED_MODES)
        if not 0.0 <= format_reward < 1.0:
            raise UsageError(f"format_reward={format_reward}: expected a share of the reward in [0, 1)")
        if importlib.util.find_spec("math_verify") is None:
            raise UsageError(
                "math-verify is not installed, which grades mathematics. Fix: pip install 'torchtune-ext[math]'"
            )
        self.require_box, self.require_thinking, self.brackets = require_box, require_thinking, brackets
        self.format, self.format_reward, self.unmarked = format, format_reward, unmarked

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        # This imports the arithmetic in the grading process before its first text.
        answers_equal("x", "x+0")

    def __call__(self, gold: str, text: str, question: str = "") -> Score:
        """Grades a text. A formula of the `question` is right only if it equals `gold` exactly."""
        # If thinking is required, a text without a closed thought has no reply.
        has_reply = not self.require_thinking or "</think>" in text
        reply = _TOKENS.sub(" ", restore_box_commands(strip_thinking(text))) if has_reply else ""
        boxes = last_boxes(reply)
        hung = False
        try:
            # Comparing two numbers cannot hang, and a timer would take a third of the time.
            short = boxes is not None and all(map(_NUMBER.fullmatch, (gold, *boxes)))
            with contextlib.nullcontext() if short else _time_limit(COMPARE_TIMEOUT_S):
                has_answer, right = self._grade_reply(gold, reply, boxes, question)
        except _CompareTimeout:
            has_answer, right, hung = True, False, True
        well_formed = float(has_answer and boxes is not None if self.format == "box" else has_single_thought(text))
        reward = 0.0 if hung else (1.0 - self.format_reward) * right + self.format_reward * well_formed
        parts = {"accuracy": float(right), "format": well_formed, "failed": float(not has_answer)}
        return Score(reward, parts | {"timed_out": float(hung)})

    def _grade_reply(self, gold: str, reply: str, boxes: list[str] | None, question: str) -> tuple[bool, bool]:
        """Grades a reply.

        Returns:
            (has an answer, the answer is right).
        """
        if self.require_box or _BOX_MARK.search(reply):
            # A box is required, or a box is never closed. Other answers do not count.
            if not boxes:
                return boxes is not None, False
            return any(map(has_content, boxes)), answers_match(gold, boxes, question)
        answer = extract_answer(reply, brackets=self.brackets)
        if answer is None:
            return grade_prose(gold, reply, question) if self.unmarked == "last_number" else (False, False)
        if after_hashes(reply) is None and not (self.brackets and _BRACKETS.search(reply)):
            return grade_phrase(gold, reply, question)
        return has_content(answer), answers_match(gold, [answer], question)
