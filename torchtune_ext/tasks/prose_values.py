r"""Parses values in prose: units, numbers in words, and the final value of an unmarked text.

Units: "18 dollars" is 18 and "5 \text{ cm}^2" is 5; "5 squared", "5 tenths", "5 or six" are not 5.
Lists: "3 or 4", "2, 3 and 5", "A: 3 B: 4" name several values; "12 eggs, so 4 are left" names one.
"""

import re
from collections import Counter

MAX_PHRASE_WORDS = 3  # most words in one phrase of a unit
MAX_JOINT = 8  # most words between two alternatives
MAX_LINE_CHARS = 2000  # characters at the end of a text that are searched for a value
# Words that negate the value before them: "is wrong", "does not work", "Wait, that is not right".
DENIAL = re.compile(
    r"[\s$]{0,9}(?:(?:is|was)(?:\snot|n't)\b|\\ne)|[\s$\\)\].,*]{0,12}"
    r"(?:(?:which|but|and|though|however|wait|no|hmm|actually|oops|sorry)\b[,.\s]*){0,3}(?:(?:this|that|it)(?:'s)?\b\s*)?"
    r"(?:(?:is|was|would be|must be|seems|can be|turn(?:s|ed) out to be)\s)?(?:\w+ly\s)?"
    r"(?:(?:not|(?:is|was)n't|can(?:no|')t be)\s"
    r"(?:correct|right|true|valid|possible|(?:the|an) (?:correct )?(?:answer|solution)\b)"
    r"|(?:the )?(?:wrong|incorrect|false|invalid|impossible)|(?:an?|my) (?:mistake|error|slip)"
    r"|too (?:big|large|small|high|low|many|few|much)"
    r"|ruled out|eliminated|excluded|rejected|fails|(?:does|did|do)(?: not|n't) (?:work|fit|hold|satisfy))\b",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(r"(?<!\\)[.!?][^\w\s]*\s")

_TAIL = re.compile(
    r"(?:(?<![A-Za-z\\])|(?![A-Za-z]))"
    r"(?:(?:\\text\{[^{}]*\}|[A-Za-z])(?:\^(?:-?\d|\{\s*-?\d\s*\}))?|\\(?:mu|Omega|circ)(?![A-Za-z])|Å"
    r"|\^\s*(?:\\circ|\{\s*(?:\\circ|\\text\{(?:th|st|nd|rd)\}|th|st|nd|rd)\s*\}|\\text\{(?:th|st|nd|rd)\})"
    r"|[\s/()-]|\\cdot(?=\s*(?:\\text|[A-Za-z]))|(?<=[A-Za-z])\.)+$"
)
_RAISED = re.compile(r"\^(?:-?\d|\{\s*-?\d\s*\})")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_PRODUCT = re.compile(r"[A-Za-z^{}\d\s]+")
_VALUE_END = re.compile(r"[\w})\]%!]$")
_PREPOSITION = re.compile(r"(?<=\w)\s+(?:per|of|in|an?|each|for|on)\b")
_PLURAL = re.compile(r"[a-z]+[^siu\W\d_]s")  # does not match "less", "is" or "plus"
_ORDINAL = re.compile(
    r"(?:thir|four|fif|six|seven|eigh|nin|ten|eleven|twelf|\w+teen|\w+tie|hundred|thousand|\w+illion)(?:d|th)s?"
)
_MAGNITUDE = re.compile(
    r"(?:ten|dozen|hundred|thousand|\w*illion|lakh|lac|crore|score|gross|myriad|bn|mn|bio|mio|[ck]?k)s?"
)
_CURRENCY = {
    "\\$": "dollar", "US\\$": "dollar", "USD": "dollar", "€": "euro", "\\euro": "euro", "EUR": "euro", "£": "pound",
    "\\pounds": "pound", "GBP": "pound", "¥": "yen", "₹": "rupee", "Rs.": "rupee", "Rs": "rupee", "INR": "rupee",
}  # fmt: skip
_SIGN = "|".join(re.escape(sign) for sign in sorted(_CURRENCY, key=len, reverse=True))
_MONEY = re.compile(rf"([-+]?)\s*(?:({_SIGN})\s*(?=[-\d.\\(])(.+)|(.*[\d}})])\s*({_SIGN}))")
_MONEY_TEXT = re.compile(rf"\\text\{{\s*({_SIGN})\s*\}}")
_PERCENT = re.compile(r"(.*?)\s*(?:\\?(%)|\\text\{\s*(?:per\s?cent(?:age)?|pct)\s*\}|(?:per\s?cent(?:age)?|pct))")

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_NUMERALS = {word: number for number, word in enumerate(_ONES)} | {word: 10 * n for n, word in enumerate(_TENS, 2)}
_LARGE_NUMBERS = {"dozen": 12, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# Words of the next three sets are never part of a unit: they are numbers, change the value before
# them, or join another value to it.
NUMBER_WORDS = set(_NUMERALS) - {"ten"} | set("half halves quarter quarters twice thrice double triple".split())
OPERATION_WORDS = set(
    """
    plus minus times over equals squared cubed doubled tripled halved negated inverted factorial factorials root
    roots power powers mod modulo choose divided multiplied added subtracted raised log percent percents percentage
    percentages pct negative positive reciprocal reciprocals inverse repeating recurring pi off fewer more less
    short below above under greater smaller larger extra
    """.split()
)
JOINT_WORDS = set(
    """
    and or nor xor not no but if when unless otherwise else either neither maybe perhaps possibly alternatively is
    are was fails vs versus than to from by with
    """.split()
)
# Names of the same unit. The first name represents the unit.
_SAME_UNITS = """
    meter metre m|kilometer kilometre km|centimeter centimetre cm|millimeter mm|inch inche in|foot feet ft|yard yd|mile mi
    |second sec s|minute min|hour hr h|day|week|month|year yr|gram g|kilogram kg|milligram mg|pound lb|ounce oz|ton tonne
    |liter litre l L|milliliter ml mL|gallon gal|dollar usd|cent|euro eur|degree deg|radian rad|celsius C|fahrenheit F
    |kelvin K|joule J|newton N|watt W|volt V|unit|acre|hectare|mph|kph kmh kmph|rupee rs inr|yen|hz Hz|kilojoule kj kJ
    |kw kW|dm|nm
"""
_UNIT = {word: group.split()[0] for group in _SAME_UNITS.split("|") for word in group.split()}
_COMPOUND = {"mph": {"mile": 1, "hour": -1}, "kph": {"kilometer": 1, "hour": -1}}
# Units without a plural in -s, and singulars. "100 square" is 100, which is frequent in MATH.
KNOWN_UNITS = {word for word in _UNIT if len(word) > 1} | set(
    """
    sq square cubic cu qt pt dl cl cc ms hrs rpm khz mhz ghz mw kwh mv ma pa kpa atm mol cal kcal ev db ohm gbp cad
    aud yuan won peso inches people men women children teeth geese mice fish sheep deer dice bit byte kb mb gb tb th
    st nd rd ampere mole unitless remaining total altogether overall left gev mev erg
    """.split()
)
# The only single letters that are units: meters, grams, seconds, hours, liters. Other letters are
# variables, unless a style sets them upright.
LETTER_UNITS = set("mgshlL")
STYLED_LETTERS = LETTER_UNITS | set("NJWVCFA")


# ---- numbers in words, percentages, units


def number_word(text: str) -> str | None:
    """Returns the number named by up to four words, or None.

    Examples: "twenty-one", "negative three", "two hundred".
    """
    words = text.lower().replace("-", " ").split()
    sign = "-" if words[:1] in (["minus"], ["negative"]) else ""
    words = words[1:] if sign else words
    if not words or len(words) > 4:
        return None
    if len(words) == 2 and words[1] in _LARGE_NUMBERS and re.fullmatch(r"\d+(?:\.\d+)?", words[0]):
        return f"{sign}{words[0]}*{_LARGE_NUMBERS[words[1]]}"
    if sign and len(words) == 1 and re.fullmatch(r"\d+(?:\.\d+)?", words[0]):
        return sign + words[0]
    total, last = 0, ""
    for word in words:
        if word in ("hundred", "thousand") and last:
            total *= 100 if word == "hundred" else 1000
        elif word == "and" and last == "hundred":
            continue
        elif word in _NUMERALS and (
            not last or last == "hundred" or last == "thousand" or (last in _TENS and 0 < _NUMERALS[word] < 10)
        ):
            total += _NUMERALS[word]
        else:
            return None
        last = word
    return f"{sign}{total}"


def split_percent(text: str) -> tuple[str, bool] | None:
    """Returns (value, True for the sign % and False for the word) of a percentage, or None."""
    match = _PERCENT.fullmatch(text) if text.endswith(("%", "cent", "centage", "pct", "}")) else None
    return (match[1], match[2] is not None) if match and match[1] else None


def split_unit(answer: str, variables: bool = True) -> tuple[str, str]:
    """Returns (answer without its unit, unit) of a normalized answer.

    Args:
        variables: True: single letters may be variables, so "2m" has no unit.
    """
    answer = re.sub(r"\\frac\s*\{\s*(\\text\{[^{}]*\})\s*\}\s*\{\s*(\\text\{[^{}]*\})\s*\}$", r"\1/\2", answer)
    money = _MONEY.fullmatch(_MONEY_TEXT.sub(r"\1", answer))
    if money:
        rest, unit = money[1] + (money[3] or money[4]), _CURRENCY[money[2] or money[5]]
        return split_unit(rest, variables)[0], unit
    tail = _TAIL.search(answer)
    # If no value precedes the words, they are the answer itself.
    if tail is None or not _VALUE_END.search(value := answer[: tail.start()].rstrip()):
        return answer, ""
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", value) and "circ" in tail[0]:
        return answer, ""
    written = tail[0].strip()
    # In 10-h and 1/s, the letter is a symbol.
    if not written.strip("() ") or re.match(r"[-/(\s]*[-/][-/(\s]*[A-Za-z](?![A-Za-z])", written):
        return answer, ""
    words = unit_words(written)
    upright = (
        words not in ("", "per cent")
        and not re.search(r"[A-Za-z]", _TEXT.sub("", written).replace("\\cdot", ""))
        and all(
            word in STYLED_LETTERS or word.lower() in KNOWN_UNITS or (word in ("per", "K") and words != word)
            for word in _RAISED.sub("", words).split()
        )
    )
    if (
        variables
        and _PRODUCT.fullmatch(written)
        and not re.search(r"[A-Za-z]{3}| (?:in|cm|km|ft|kg|mm)$", " " + written)
    ):
        return answer, ""
    if not variables and re.fullmatch(r"[NJWV]|°?[CF]", written) and answer[tail.start()] == " ":
        upright = True
    # After 1, a unit is singular.
    return (value, words) if upright or is_unit(words, singular=value in ("1", "-1")) else (answer, "")


def unit_words(unit: str) -> str:
    """Rewrites a unit to words and exponents, such as "m per s^2"."""
    unit = _TEXT.sub(r" \1 ", unit)
    unit = re.sub(r"\^\s*\{?\s*(?:\\circ|th|st|nd|rd)\s*\}?|\\circ", " deg ", unit)
    unit = re.sub(r"\\mu\s*|\\Omega", lambda sign: "u" if "mu" in sign[0] else " ohm ", unit).replace(
        "Å", " angstroms "
    )
    unit = re.sub(r"\s*\^\s*\{?\s*(-?\d)\s*\}?", r"^\1 ", unit)
    unit = re.sub(r"\b(sq|ft|in|cu|yd|hr|min|sec|lb|oz)\.", r"\1 ", unit)
    return " ".join(re.sub(r"\\(?:cdot|[ ,;:])|[~()]|(?<!\^)-", " ", unit).replace("/", " per ").split())


def is_unit(words: str, singular: bool = False) -> bool:
    """Tells whether words name a unit, such as "miles per hour"; with `singular`, also "apple"."""
    # No list of units is complete, but few words change a value. So a unit is recognized by its
    # form: short phrases without a number ("million"), an operation ("times") or a joint ("or").
    words = re.sub(r"\^-?\d", "", words.replace(".", "")).strip()
    every = words.split()
    if words in ("in total", "in all", "deg C", "deg F"):
        return True
    phrases = [phrase.split() for phrase in _PREPOSITION.split(words)]
    if words.startswith("of the "):
        phrases[0] = every[2:]
    if not phrases[0] or max(map(len, phrases)) > MAX_PHRASE_WORDS or re.search(r"\bper cents?\b", words):
        return False
    if not all(
        word in LETTER_UNITS or (index and every[index - 1] == "of")
        if len(word) == 1 and word != "a"
        else word.isalpha() and word.lower() not in JOINT_WORDS and not changes_value(word.lower())
        for index, word in enumerate(every)
    ):
        return False
    # A plural or a known measure shows that the first phrase has a noun; "over" does not.
    return singular or any(
        word in LETTER_UNITS or word.lower() in KNOWN_UNITS or word in ("um", "uum") or _PLURAL.fullmatch(word.lower())
        for word in phrases[0]
    )


def changes_value(word: str) -> bool:
    """Tells whether a word changes the value of a number before it: "5 million", "5 squared"."""
    stems = {word, word.removesuffix("s"), word.removesuffix("es"), word.removesuffix("ies") + "y"}
    return (
        bool(stems & NUMBER_WORDS)
        or word in OPERATION_WORDS
        or bool(_ORDINAL.fullmatch(word) or _MAGNITUDE.fullmatch(word))
    )


def units_conflict(unit: str, other: str) -> bool:
    """Tells whether two units are known and different, such as m and km, or cm and cm^2."""
    first, second = unit_exponents(unit), unit_exponents(other)
    if first is None or second is None or ("unit" in first) != ("unit" in second):
        return False
    return first != second


def unit_exponents(unit: str) -> dict | None:
    """Returns {unit: exponent} of words such as "m per s^2", or None if a word is unknown."""
    for words, exponent in (("sq(?:uare)?", 2), ("cu(?:bic)?", 3)):
        unit = re.sub(rf"\b{words} (\w+)", rf"\1^{exponent}", unit, flags=re.IGNORECASE)
    result: Counter = Counter()
    sign = 1
    for word in unit.split():
        word, _, power = word.partition("^")
        lower = word.lower()
        if lower == "per":
            sign = -1
            continue
        singulars = (word, lower, lower.removesuffix("s"), lower.removesuffix("es"))
        known = next((_UNIT[name] for name in singulars if name in _UNIT), None)
        if known is None:
            return None
        for name, exponent in _COMPOUND.get(known, {known: 1}).items():
            result[name] += sign * exponent * int(power or 1)
    if "celsius" in result or "fahrenheit" in result:
        result.pop("degree", None)
    return dict(result) or None


# ---- values in prose

# Words that join the values on both sides to a list. Single letters also join values ("A: 3 B: 4").
# `_ALTERNATIVES` join values if there are few words between them. The other words of `_JOINING`
# join values only together with a hedge or a comma.
_ALTERNATIVES = set("or if unless else otherwise alternatively versus vs".split())
_HEDGES = set("and either maybe perhaps possibly option case choice candidate".split())
_JOINING = _HEDGES | set("but it is are was could might may be".split())
_JOINT = re.compile(r"\b(?:and|or)\b")
_LABEL = re.compile(r"\b[A-Za-z]\s*=")  # x = 3 or x = 4
_OPERATOR = re.compile(r"[-+*=^<>]")
_NEGATION = re.compile(
    r"\b(?:not|never|cannot|neither|nor|without|except|wrong|incorrect|instead of|unlike|anything but|rather than"
    r"|impossible|mistake|nobody|none of|no longer|rule out|ruled out|far from|nowhere)\b|n't\b|\bup to\s*$",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r"[,;:.!?](?=\s)|\b(?:so|then|therefore|thus|hence|because|since|which|it's)\b", re.IGNORECASE)
_BOUND = set(
    """
    than least most exceed exceeds exceeding maximum minimum under below above beyond between divides divisible
    coprime factor divisor digits
    """.split()
)
# In "the least value is 4", these words are not a bound.
_EXTREMES = set("least most maximum minimum divisor factor digits".split())
# Words that change the value after them ("half 6"), or use it as an index ("step 6").
_CHANGING_WORDS = set(
    """
    minus negative root roots half twice double triple thrice over times power mod modulo plus log sqrt square cube
    up almost nearly past through step steps problem question part case figure fig example equation eq option
    chapter section exercise page line method theorem lemma item no number table attempt round candidate candidates
    choice version
    """.split()
)
_ARTICLES = set("a an the about only just".split())
_PARTS = set(
    "half third quarter root roots out log logarithm factorial square cube multiple multiples percent twice double "
    "reciprocal inverse negative part parts power one".split()
)
_FORMULA = re.compile(r"\$\s*([^$\n]+?)\s*\$(?!\d)|\\\(\s*((?:(?!\\\)).)+?)\s*\\\)|\\\[\s*((?:(?!\\\]).)+?)\s*\\\]")
_FUNCTIONS = "sqrt|log|ln|sin|cos|tan|plus|minus|divided by|multiplied by|mod"
_PIECE = re.compile(
    rf"(?P<formula>\x01\d+\x01)|(?P<word>(?!(?:{_FUNCTIONS})\b)[A-Za-z](?:[A-Za-z]|['’-](?=[A-Za-z]))+|(?<!\S)[aAI](?= ))"
    r"|(?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)|(?P<blank>\s+)"
    rf"|(?P<math>(?:{_FUNCTIONS})\b|\\[A-Za-z]+|\\[%$]|[A-Za-z]|[-+*/=^<>(){{}}|!%$_−–×÷·π√∞≤≥≠≈°²³½¼¾€£¥]|[:,.](?=\d))|(?P<other>.)"
)
_COMPUTED = re.compile(r"\d[^=A-Za-z]*=[^=A-Za-z]*$")  # 3 + 4 = 7
_COUNTED_FOR = re.compile(
    r"(?:\W(?!and\b|or\b)[A-Za-z'-]+){0,5}?\s(?:in|for|to|of|on|over|with|within|than|per|after|if|that|who)\b[^.!?;:=\x01]*"
)
_LATER_DENIAL = re.compile(
    r"[^.!?\n]{0,20}\b(?:not|wrong|incorrect)\b|\s*(?:\w+\s+)?at (?:least|most)\b"
    r"|(?:st|nd|rd|th)\s+[a-z]"
)
_HYPOTHESIS = re.compile(
    r"^\W*(?:(?:now|we|i)\s)*(?:let|suppose|assum(?:e|ing)|try|test|check|plug|e\.g\.)\b|^\s*(?:if|when|given)\b[^\d\x01]*$",
    re.IGNORECASE,
)
# The end of a truncated text.
_CUT = re.compile(r"(?:\b(?:and|then|the|into|of|to|an?|with|but|by)|[,:])\s*$")
_WORDS_FOR_SIGNS = (("divided by", "/"), ("multiplied by", "*"), ("plus", "+"), ("minus", "-"))


def last_values(text: str) -> list[str] | None:
    """Returns the final value of a text, or the members of its final list.

    Returns:
        None if the text has no value; an empty list if the words around it change or negate it.
    """
    line, formulas = _last_line(text)
    runs = _runs(line)
    values = [run for run in runs if run[2].lower() in _NUMERALS or any(map(str.isdigit, run[2]))]
    if not values:
        return None
    # "4 + 5 = 9 songs in 2 days", "9 songs that fill two days"
    for index in range(len(values) - 2, -1, -1):
        written = values[-1][2].lower() in _NUMERALS and index == len(values) - 2
        if (written or _COMPUTED.search(values[index][2])) and _COUNTED_FOR.fullmatch(
            line[values[index][1] : values[-1][0]]
        ):
            del values[index + 1 :]
            break
    chosen = [values[-1]]
    for run in values[-2::-1]:
        if not _joins_values(line[run[1] : chosen[-1][0]]):
            break
        chosen.append(run)
    start, end = chosen[-1][0], chosen[0][1]
    if _is_rejected(line, start, end, values[: -len(chosen)], len(chosen)) or _is_list_item(text, line):
        return []
    return [_value_text(run[2], line[run[1] :], formulas) for run in chosen[::-1]]


def _last_line(text: str) -> tuple[str, list[str]]:
    """Returns the last line with a value, with placeholders for its formulas, and the formulas."""
    formulas: list[str] = []

    def mark(match: re.Match) -> str:
        held = match[1] or match[2] or match[3]
        words = re.sub(r"\\[A-Za-z]+(?:\{[^{}]*\})?", " ", held)
        if match[1] and re.search(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}|\w\s*,\s+[A-Za-z]{2,}|^\s*[.,;]", words):
            return match[0]
        formulas.append(held)
        return f"\x01{len(formulas) - 1}\x01"

    text = _FORMULA.sub(mark, re.sub(r"\$\$", "$", text.replace("\x01", " "))[-MAX_LINE_CHARS:])
    for line in reversed(text.split("\n")):
        line = re.sub(r"(?<!\S)\*(\S[^*]*)\*(?=[\s.,;!?]|$)|\*\*|\b__|__\b|[`\"“”]", r"\1", line)
        line = re.sub(r"^\s*\(?\d{1,2}[.)]\s+(?=\S*[A-Za-z])", "", line)
        if re.search(r"\d", line.replace("\x01", " ")) or set(re.findall(r"[a-z]+", line.lower())) & set(_NUMERALS):
            return line, formulas
    return "", formulas


def _runs(line: str) -> list[tuple[int, int, str]]:
    """Returns (start, end, text) of words, formulas and runs of numbers, signs and letters."""
    result: list[tuple[int, int, str]] = []
    start = end = -1
    for piece in _PIECE.finditer(line):
        kind, token = piece.lastgroup, piece[0]
        run = line[start : piece.start()] if start >= 0 else ""
        if token in (",", ";") and run.count("(") > run.count(")"):
            continue
        if kind in ("word", "other", "formula"):
            if start >= 0:
                result.append((start, end, line[start:end]))
            start = -1
            result.append((piece.start(), piece.end(), token))
        elif kind != "blank":
            start = piece.start() if start < 0 else start
            end = piece.end()
    if start >= 0:
        result.append((start, end, line[start:end]))
    return result


def _value_text(run: str, after: str, formulas: list[str]) -> str:
    if run.startswith("\x01"):
        return formulas[int(run.strip("\x01"))]
    run = run.strip()
    left, _, result = run.rpartition("=")
    if (
        _COMPUTED.search(run)
        and re.search(r"[-+*/x×÷−–]", left)
        and not re.search(r"[A-Za-z^]", re.sub(r"(?<=\d)\s*x\s*(?=[\d$])", "", left))
    ):
        run = result.strip()
    if not re.match(r"\s+[a-z]|\.", after):
        run = run.removesuffix("!")  # the end of a sentence, not a factorial
    for words, sign in _WORDS_FOR_SIGNS:
        run = run.replace(words, sign)
    run = run.removesuffix(")") if run.count(")") > run.count("(") else run
    return run.removeprefix("(") if run.count("(") > run.count(")") else run


def _is_rejected(line: str, start: int, end: int, earlier: list, count: int) -> bool:
    """Tells whether the words around a value change it, negate it, or use it as an index."""
    before, after = line[:start], line[end:]
    clause = _CLAUSE.split(before)[-1]
    words = [word.lower() for word in re.findall(r"[A-Za-z]+(?:'[a-z]+)?", clause)]
    near = next((word for word in words[:-3:-1] if word not in _ARTICLES), "")
    computed = _COMPUTED.search(line[start:end]) is not None
    if _NEGATION.search(clause) or _HYPOTHESIS.search(clause) or DENIAL.match(after) or _CUT.search(after):
        return True
    if near == "from" or re.match(r"[\s$*)]*\?", after) or (near == "for" and _LABEL.match(line, start)):
        return True
    if earlier:
        between, behind = line[earlier[-1][1] : start], re.match(r"\s*[a-z]+", after)
        if (
            re.fullmatch(r"[\d.,\s]+", line[start:end])
            and behind
            and unit_exponents(behind[0])
            and unit_exponents(between)
        ):
            return True  # 6 feet 2 inches
        if near in ("to", "by") and not between.strip(" \x01").removesuffix(near).strip():
            return True  # 3 to 5
    if not computed:
        extreme = words[-1:] in (["is"], ["was"], ["equals"]) and "at" not in words and _BOUND & set(words) <= _EXTREMES
        if (_BOUND & set(words[-5:]) and not extreme) or near in _CHANGING_WORDS or _LATER_DENIAL.match(after):
            return True
    is_part = near == "of" and (set(words[-3:-1]) & _PARTS or any(map(changes_value, words[-3:-1])))
    if is_part or (re.match(r"\s*or\b", before, re.IGNORECASE) and count == 1):
        return True
    glued = re.match(r"[-’']?([A-Za-z]{2,})", after)
    if glued and not is_unit(glued[1]) and glued[1] not in ("st", "nd", "rd", "th"):
        return True
    if computed:
        return False  # words such as "more than" or "are not green" belong to the result
    if re.match(r"[+#_@&]", after) or re.search(r"[#_@&A-Za-z±∛∜]\s*$", before[-1:]):
        return True
    behind_words = re.match(
        r"[\s~$-]*(?:\\[a-z]+\s*\{\s*)?([Pp]er\s?cent|[A-Za-z]+)(?:\s+([a-z]+))?(?:\s+([a-z]+))?", after
    )
    if not behind_words:
        return False
    first, second, third = (re.sub(r"per\s", "per", (word or "").lower()) for word in behind_words.groups())
    if first == "times" and not after[behind_words.end(1) :].strip(" .!*$"):
        return False  # in "it rang 22 times." the word is a count and multiplies nothing
    if first in ("more", "extra"):
        return "than" in (second, third)
    return (
        changes_value(first)
        or (first == "if" and count == 1)
        or (first == "or" and second != "so")
        or (first == "and" and (second in ("a", "one", "half") or changes_value(second)))
        or "than" in (second, third)
    )


def _is_list_item(text: str, line: str) -> bool:
    """Tells whether the last two lines each hold only a value: both are then members of a list."""
    bare = re.compile(r"\s*(?:.*:\s*)?[-*•]?\s*\(?[A-Za-z\d]?[\d.,/]*[.):]?\s*(?:-?[\d./]+)?\s*")
    lines = [part for part in text.rstrip().split("\n")[-3:] if part.strip()]
    return len(lines) > 1 and all(
        len(part) < 80 and bare.fullmatch(part) and any(map(str.isdigit, part)) for part in lines[-2:]
    )


def _joins_values(between: str) -> bool:
    """Tells whether the text between two values joins them to alternatives or to one list."""
    # In "x = 3 or x = 4" the second label does not belong to an operation.
    if _JOINT.search(between):
        between = _LABEL.sub("", between)
    if SENTENCE_END.search(between) or _OPERATOR.search(between):
        return False
    words = [word.lower() for word in re.findall(r"(?<!\\)\b[A-Za-z]+", between)]
    if _ALTERNATIVES.intersection(words):
        return len(words) <= MAX_JOINT
    # Single letters are labels, so they are ignored.
    others = [word for word in words if len(word) > 1 and word not in _JOINING]
    # Other words are allowed only as a unit: "3 apples and 4 pears".
    if others:
        return words[-1] == "and" and is_unit(" ".join(words[:-1]))
    return not words or bool(_HEDGES.intersection(words) or re.search(r"[,;:/|&]", between))
