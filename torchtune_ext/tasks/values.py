r"""Reads values in prose: which words after a number are its unit, and which values form a list.

Units: "18 dollars" is 18 and "5 \text{ cm}^2" is 5, but "5 squared", "5 tenths" and "5 or six" are not 5.
Lists: "3 or 4", "2, 3 and 5" and "A: 3 B: 4" name several values, "12 eggs, so 4 are left" only one.
"""

import re

MAX_WORDS = 3  # words of one phrase of a unit
MAX_JOINT = 8  # words between two alternatives
SENTENCE_END = re.compile(r"(?<!\\)[.!?][^\w\s]*\s")

STYLES = "text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox"
_STYLED = rf"\\(?:{STYLES})\s*\{{[^{{}}]*\}}"
# From the first letter after the value to the end of the text, but not from inside a word or a command. Each repetition
# takes one letter or one group. So there is only one way to match, and backtracking is never slow.
_TAIL = re.compile(
    r"(?:(?<![A-Za-z\\])|(?![A-Za-z]))"
    rf"(?:(?:{_STYLED}|[A-Za-z])(?:\^(?:[23]|\{{[23]\}}))?|[\s/~-]|\\[ ,;:]|\\cdot(?=\s*\\[tm])|(?<=[A-Za-z])\.)+$"
)
_POWER = re.compile(r"\^\{?[23]\}?")
_STYLE = re.compile(rf"\\(?:{STYLES})\s*\{{([^{{}}]*)\}}")
_PRODUCT = re.compile(r"[A-Za-z^{}23]+|\s*[A-Za-z]\s*")
_VALUE_END = re.compile(r"[\w})\]%!]$")
_SPACES = re.compile(r"\\(?:[ ,;:]|cdot)|[~()-]")
_PREPOSITION = re.compile(r"(?<=\w)\s+(?:per|of|in|an?|each)\b")
_PER_CENT = re.compile(r"\bper cents?\b")
_PLURAL = re.compile(r"[a-z]+[^siu\W\d_]s")  # does not match less, is, plus
_FRACTION = re.compile(
    r"(?:thir|four|fif|six|seven|eigh|nin|ten|eleven|twelf|\w+teen|\w+tie|hundred|thousand|\w+illion)(?:d|th)s?"
)
_LARGE = re.compile(r"(?:ten|dozen|hundred|thousand|\w*illion)s?")

# A word of the next three sets is never part of a unit: it is a number itself, changes the value before it, or joins
# something to it.
NUMBERS = set(
    (
        "zero one two three four five six seven eight nine eleven twelve thirteen fourteen fifteen sixteen seventeen "
        "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety half halves quarter quarters twice "
        "thrice double triple"
    ).split()
)
OPERATIONS = set(
    (
        "plus minus times over equals squared cubed doubled tripled halved negated inverted factorial factorials root "
        "roots power powers mod modulo choose divided multiplied added subtracted raised log percent percents "
        "percentage percentages pct negative positive reciprocal reciprocals inverse repeating recurring pi"
    ).split()
)
JOINTS = set(
    (
        "and or nor xor not no but if when unless otherwise else either neither maybe perhaps possibly alternatively "
        "is are was vs versus than to from by for with"
    ).split()
)
# Units without a plural in -s, and singulars. "100 square" is 100, because answers to MATH are often written so.
MEASURES = set(
    (
        "in mm cm dm km nm ft yd mi mph kph kmh kmph sq square cubic cu mg kg lb oz gal qt pt ml dl cl cc ms sec min hr "
        "yr am pm rpm hz khz mhz ghz kj kw mw kwh mv ma pa kpa atm mol cal kcal ev db ohm usd eur gbp inr cad aud rs "
        "rupee yen yuan won cent dollar euro pound peso unit degree deg radian meter metre liter litre gram kilogram "
        "kilometer kilometre centimeter centimetre mile foot feet inch inches yard acre hectare gallon ounce ton "
        "tonne second minute hour day week month year people men women children teeth geese mice fish sheep deer dice "
        "celsius fahrenheit kelvin bit byte kb mb gb tb th st nd rd"
    ).split()
)
# Words that join the values on both sides to a list. Single letters do, too ("A: 3 B: 4"). `_ALTERNATIVES` join if
# there are few words between the values. The other words of `_JOINING` need a hedge or a comma beside them.
_ALTERNATIVES = set("or if unless else otherwise alternatively versus vs".split())
_HEDGES = set("and either maybe perhaps possibly option case choice candidate".split())
_JOINING = _HEDGES | set("but it is are was could might may be".split())
# A formula between math signs, a fraction, a number, or a number word.
_VALUE = re.compile(
    r"\$(?=\S)[^$\n]+(?<=\S)\$(?!\d)|\\\((?:(?!\\\)).)+\\\)|-?\\frac\{\d+\}\{\d+\}"
    r"|(?<![\w.])[-+]?(?:(?:\d{1,3}(?:[ ,]\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:/\d+)?\\?%?"
    rf"|\b(?:{'|'.join(sorted(NUMBERS))})\b"
)
_NEXT_WORD = re.compile(r"[\s~$-]*(?:\\[a-z]+\s*\{\s*)?([Pp]er\s?cent|[A-Za-z]+)")
_JOINT = re.compile(r"\b(?:and|or)\b")
_LABEL = re.compile(r"\b[A-Za-z]\s*=")  # x = 3 or x = 4
_OPERATOR = re.compile(r"[-+*=^<>]")
# The only single letters that are units: meters, grams, seconds, hours, liters. Others are variables, unless a style
# sets them upright.
LETTERS = set("mgshlL")
STYLED_LETTERS = LETTERS | set("NJWVCF")


def without_unit(answer: str, variables: bool = True) -> str:
    """Returns the answer without a unit at its end. If letters may be `variables`, "2m" and "2 m" have none."""
    # Without a value before them, the words are the answer itself.
    tail = _TAIL.search(answer)
    if tail is None or not _VALUE_END.search(value := answer[: tail.start()].rstrip()):
        return answer
    if variables and _PRODUCT.fullmatch(tail[0]):
        return answer
    styled = _STYLE.fullmatch(tail[0].strip())
    words = _STYLE.sub(r" \1 ", _POWER.sub("", tail[0]))
    upright = styled is not None and styled[1].strip() in STYLED_LETTERS
    # After 1, a unit is in the singular.
    return value if upright or is_unit(words, singular=value in ("1", "-1")) else answer


def is_unit(words: str, singular: bool = False) -> bool:
    """Tells whether words name a unit, such as "miles per hour"; with `singular`, also "apple"."""
    # No list of units can be complete, but the words that change a value are few and known. So a unit is recognized by
    # its form: phrases of a few words, none of which is a number ("million"), an operation ("times") or a joint ("or").
    words = _SPACES.sub(" ", words).replace("/", " per ").replace(".", "").strip()
    phrases = [phrase.split() for phrase in _PREPOSITION.split(words)]
    every = [word for phrase in phrases for word in phrase]
    if not phrases[0] or max(map(len, phrases)) > MAX_WORDS or _PER_CENT.search(words):
        return False
    if not all(word in LETTERS if len(word) == 1 else _neutral(word.lower()) for word in every):
        return False
    # A plural or a known measure shows that the first phrase has a noun, unlike "over" or "left".
    return singular or any(
        word in LETTERS or word.lower() in MEASURES or _PLURAL.fullmatch(word.lower()) for word in phrases[0]
    )


def _neutral(word: str) -> bool:
    return word.isalpha() and word not in JOINTS and not changes_value(word)


def changes_value(word: str) -> bool:
    """Tells whether a word after a number changes its value: "5 million", "5 tenths", "5 squared"."""
    if word in MEASURES:
        return False
    return word in NUMBERS or word in OPERATIONS or bool(_FRACTION.fullmatch(word) or _LARGE.fullmatch(word))


def joined_values(text: str) -> list[str]:
    """Returns the last value of a text (a number, number word or formula with a digit), after those joined to it."""
    # From the last value backwards, for as long as the text between two values joins them.
    line, values = _last_line(text)
    tail = values[-1:]
    for value, following in zip(values[-2::-1], values[:0:-1], strict=True):
        if not _joins(line[value.end() : following.start()]):
            break
        tail.append(value)
    return [value[0] for value in tail[::-1]]


def _last_line(text: str) -> tuple[str, list[re.Match]]:
    """Returns the last line that has a value, and its values."""
    # A list is assumed not to go beyond its line.
    for line in reversed(text.split("\n")):
        values = [v for v in _VALUE.finditer(line) if v[0].isalpha() or any(map(str.isdigit, v[0]))]
        if values:
            return line, values
    return "", []


def _joins(between: str) -> bool:
    """Tells whether the text between two values makes them alternatives or members of one list."""
    # In "x = 3 or x = 4" the second label is no operation.
    if _JOINT.search(between):
        between = _LABEL.sub("", between)
    if SENTENCE_END.search(between) or _OPERATOR.search(between):
        return False
    words = [word.lower() for word in re.findall(r"(?<!\\)\b[A-Za-z]+", between)]
    if _ALTERNATIVES.intersection(words):
        return len(words) <= MAX_JOINT
    # Single letters are labels, so they are left out.
    others = [word for word in words if len(word) > 1 and word not in _JOINING]
    # Other words are allowed only as a unit: "3 apples and 4 pears".
    if others:
        return words[-1] == "and" and is_unit(" ".join(words[:-1]))
    return not words or bool(_HEDGES.intersection(words) or re.search(r"[,;:/|&]", between))


def word_behind(text: str) -> str:
    """Returns the word right after the last number of a text, in lower case, or "". "per cent" is one word."""
    line, values = _last_line(text)
    numbers = [value for value in values if not value[0].isalpha()]
    word = _NEXT_WORD.match(line, numbers[-1].end()) if numbers else None
    if word is None or (word[1] == "times" and numbers[-1].start() and not line[word.end() :].strip(" .!*$")):
        # In "it rang 22 times." the word is a count and multiplies nothing.
        return ""
    return re.sub(r"per\s", "per", word[1].lower())
