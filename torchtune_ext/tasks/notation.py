r"""Normalizes formulas and answers, and parses lists, brackets, matrices and assignments.

`normalize` removes notation that never changes a value: math delimiters, spacing, sizes, colors.
All other functions take its result.
"""

import re
from functools import lru_cache

MAX_ITEMS = 400  # longest list

GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho varsigma sigma tau upsilon "
    "phi chi psi omega"
).split()
_CHARACTERS = {ord(a): b for a, b in zip("−–—‐\u00a0\u202f\u2009×·÷√∞≤≥≠≈°′’‘“”…∪∩∈ℝ∖∅±", (
    "-", "-", "-", "-", " ", " ", " ", r"\times ", r"\cdot ", r"\div ", r"\sqrt ", r"\infty ", r"\le ", r"\ge ", r"\ne ",
    r"\approx ", r"^\circ ", "'", "'", "'", '"', '"', r"\ldots ", r"\cup ", r"\cap ", r"\in ", r"\mathbb{R}",
    r"\setminus ", r"\emptyset ", r"\pm ",
), strict=True)}  # fmt: skip
_CHARACTERS |= {0x3B1 + i: f"\\{name} " for i, name in enumerate(GREEK)}
_CHARACTERS |= {ord(a): rf"\frac{{{b}}}{{{c}}}" for a, b, c in ("½12", "⅓13", "⅔23", "¼14", "¾34", "⅕15", "⅛18")}
_CHARACTERS |= {0x200B: None, 0x200C: None, 0x200D: None, 0xFEFF: None, 0x2061: None}
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")

_BOLD = "mathbf|mathit|boldsymbol|bm|underline|uline|smash"
_TEXT = rf"text(?:bf|it|rm|sf|tt|up|normal)?|emph|math(?:rm|sf|tt)|mbox|hbox|operatorname|{_BOLD}"
_STYLE_COMMAND = re.compile(rf"\\(?:(?P<bold>{_BOLD})|{_TEXT})(?![A-Za-z])\s*(?=\{{)")
_NOISE = re.compile(
    r"(?P<row>\\\\(?:\s*\[[-\d. ]*[a-z]{0,2}\])?)"
    r"|(?P<group>(?<=\d)\\[,;: ](?=\d{3}(?!\d)))|\\!\s*"
    r"|(?P<side>\\m?(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*)(?P<bracket>\\?[()\[\]{}|<>.]|\\[A-Za-z]+)?"
    r"|\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|tiny|small|normalsize|large|Large|LARGE|huge|Huge|bf|rm"
    r"|it|sf|tt|bfseries|centering|therefore|mathop|mathstrut|null|nonumber|notag|checkmark|blacksquare|square|Box|qed|hfill|thinspace|enspace|quad|qquad)(?![A-Za-z])"
    r"|\\(?:[,;:>\s]|[()\[\]](?!\s*\]))|~"
)
_REMOVED_COMMAND = re.compile(
    r"\\(?:h?phantom|vphantom|x?cancel|bcancel|sout|tag\*?|label|color|hspace\*?|vspace\*?)\s*\{[^{}]*\}"
)
_WRAPPER_COMMAND = re.compile(
    r"\\(?:textcolor|colorbox)\s*\{[^{}]*\}(?=\s*\{)|\\(?:boxed|fbox|framebox|ensuremath)(?=\s*\{)"
)
_ALIGN_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{(?:aligned|align\*?|equation\*?|gathered|split)\}")
_STYLE = re.compile(rf"\\(?:{_TEXT})(?![A-Za-z])\s*\{{([^{{}}]*)\}}")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,]|\.\d*,)")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,] )(?<![\d.,])[1-9]\d{0,2}(?:(?: \d{3})+|(?:, 000)+)(?![\d,]| \d|, \d)")
_LEADING_SIGNS = re.compile(r"(?:=|:|\\(?:quad|approx|implies|Rightarrow|simeq|to)(?![A-Za-z])|\s)+")
_FRACTION = re.compile(r"\\(?:[dtc]|nice)frac(?![A-Za-z])")
_PLAIN_NAMES = re.compile(
    r"(?<![A-Za-z\\])(sqrt|arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|infinity|infty)"
    r"(?![A-Za-z])"
)
_SPELLINGS = {
    "...": r"\ldots ", "**": "^", "<=": r"\le ", ">=": r"\ge ", "!=": r"\ne ", "\\lbrace": "\\{", "\\rbrace": "\\}",
    "\\surd": "\\sqrt", "\\degree": "^\\circ", "\\dots": "\\ldots", "\\cdots": "\\ldots",
}  # fmt: skip
_SYNONYMS = {
    "\\leq": "\\le", "\\geq": "\\ge", "\\neq": "\\ne", "\\leqslant": "\\le", "\\geqslant": "\\ge", "\\lt": "<", "\\gt": ">",
    "\\ast": "*", "\\star": "*", "\\varnothing": "\\emptyset", "\\vert": "|", "\\lvert": "|", "\\rvert": "|", "\\mid": "|",
    "\\lbrack": "[", "\\rbrack": "]", "\\land": "\\wedge", "\\backslash": "\\setminus", "\\R": "\\mathbb{R}",
    "\\Reals": "\\mathbb{R}", "\\infin": "\\infty", "\\colon": ":", "\\varepsilon": "\\epsilon", "\\varphi": "\\phi",
    "\\dbinom": "\\binom", "\\tbinom": "\\binom", "\\dotsc": "\\ldots", "\\AA": "Å",
}  # fmt: skip
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"\\text\{[^{}]*\}|\\[A-Za-z]+|\\.|[A-Za-z]+")
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\.\d+|\S")
_GREEK = "|".join(GREEK + [name.capitalize() for name in GREEK] + ["ell"])
_SYMBOL = (
    rf"(?:\\(?:vec|hat|bar|tilde|dot|overline|mathbb|mathcal)\s*(?:\{{\s*[A-Za-z]{{1,2}}\s*\}}|[A-Za-z])|\\(?:{_GREEK})(?![A-Za-z])"
    r"|[A-Za-z])\s*'*(?:\s*_\s*(?:\{[^{}]*\}|[A-Za-z0-9]))?'*"
)
NAME = re.compile(rf"(?!\\pi\s*$){_SYMBOL}")
_TUPLE_OF_NAMES = re.compile(rf"\(\s*{_SYMBOL}(?:\s*,\s*{_SYMBOL})+\s*\)")
_CALL = re.compile(
    rf"(?:[fghFGHPE]\s*'*(?:_\s*\w|_\s*\{{\w+\}})?(?:\^\s*\{{?\s*(?:-1|\([0-9n]\))\s*\}}?)?\s*\([^()=]{{1,40}}\)|{_SYMBOL}\s*\(\s*{_SYMBOL}(?:\s*,\s*{_SYMBOL})*\s*\)"
    rf"|[A-Za-z]\s*\(\s*\d+\s*\))"
)
_OTHER_NAME = re.compile(
    rf"(?:{_SYMBOL}|[A-Z]{{2,3}})\s*:\s*(?:{_SYMBOL}|[A-Z]{{2,3}})|\\frac\s*\{{[A-Z]{{2}}\}}\s*\{{[A-Z]{{2}}\}}|"
    r"\\begin\{vmatrix\}.*\\end\{vmatrix\}|m?\s*\\angle\s*[A-Z]{1,3}|\\overline\s*\{[A-Z]{2}\}|\|?\s*[A-Z]{2,4}\s*\|?|\[\s*[A-Z]{3,6}\s*\]|\\frac\s*\{\s*d\s*\^?2?\s*[a-zA-Z]\s*\}\s*\{\s*d\s*[a-zA-Z]\s*(?:\^\s*\{?2\}?)?\s*\}"
)
# Words that make a statement ambiguous, or change its value.
OPEN_WORDS = re.compile(
    r"\b(?:or|if|unless|either|not|but|never|no|none|wrong|incorrect|false|rejected|when|let|assume|suppose|half|twice|double|triple|plus|minus|"
    r"negative|square (?:root|of)|squared|cube|(?:less|more) than|opposite|reciprocal|inverse)\b|n't",
    re.IGNORECASE,
)
_OPERATION = re.compile(r"a?(?:sin|cos|tan|log|ln|sqrt|abs|exp|max|min)", re.IGNORECASE)
_WORD_NAME = re.compile(r"(?=.*[A-Za-z]{4})[A-Za-z][A-Za-z0-9 .'()-]*")
_JOINT = re.compile(
    r"\\text\{\s*,?\s*(?:and|or|und|oder)\s*,?\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\(?:vee|lor)(?![A-Za-z])"
)
_BRACKET = re.compile(r"\\(?:langle|rangle|begin|end|.)|[()\[\]{}]", re.DOTALL)
_DEPTH = dict.fromkeys(["(", "[", "{", "\\{", "\\langle", "\\begin"], 1)
_DEPTH |= dict.fromkeys([")", "]", "}", "\\}", "\\rangle", "\\end"], -1)
_MATRIX = re.compile(
    r"\[?\s*\(?\s*\\begin\s*\{(?:[pbB]?matrix|smallmatrix|array)\}\s*(?:\{[lcr|\s]*\})?(.*?)\\end\s*\{(\w+)\}\s*\)?\s*\]?"
)
COMMA = re.compile(rf"\s*(?:[,;]|\\quad|{_JOINT.pattern})")
EQUALS = re.compile(r"=")
CUP = re.compile(r"\\cup(?![A-Za-z])")


# ---- the normal form


@lru_cache(maxsize=1024)
def normalize(text: str) -> str:
    """Returns the normal form of a formula or an answer."""
    text = _SUPERSCRIPT_RUN.sub(lambda run: f"^{{{run[0].translate(_SUPERSCRIPTS)}}}", text + " ").translate(
        _CHARACTERS
    )
    if text.count("$") - text.count("\\$") == 1:
        text = re.sub(r"(?<!\\)\$(?=\s*\d)", r"\\$", text)  # a single dollar sign is a currency
    text = re.sub(r"(?<!\\)\$", " ", text)
    text = re.sub(r"\{,\s?\}", ",", re.sub(r"(?<=\d) (?=\{, ?\})", "", text))
    if "\\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)  # a command whose backslash was escaped
    text = _NOISE.sub(_replace_noise, re.sub(r"^\W*\*\*|\*\*\W*$|(?<!\S)\*\*(?=\w)|(?<=\w)\*\*(?=\s)", " ", text))
    text = re.sub(r"\\begin\{cases\}([^&]*)\\end\{cases\}", lambda held: held[1].replace("\\\\", ", "), text)
    text = text.replace("&", " ") if _ALIGN_ENVIRONMENT.match(text.strip()) else text
    text = _ALIGN_ENVIRONMENT.sub(" ", _WRAPPER_COMMAND.sub("", _REMOVED_COMMAND.sub(" ", text)))
    text = _COMMAND.sub(lambda name: _SYNONYMS.get(name[0], name[0]), _FRACTION.sub(r"\\frac", text))
    for written, meant in _SPELLINGS.items():
        text = text.replace(written, meant)
    text = _STYLE.sub(_normalize_style, _strip_bold(text))
    text = _PLAIN_NAMES.sub(lambda name: f"\\{name[1].replace('infinity', 'infty')} ", text)
    text = re.sub(r"(?<=\d)\s+[xX]\s+(?=\d)", r"\\times ", text)
    return _strip_ends(_strip_thousands(" ".join(text.split())))


def _replace_noise(match: re.Match) -> str:
    if match["row"]:
        return "\\\\ "
    if match["side"]:
        bracket = match["bracket"] or ""
        return {".": "", "\\[": "[", "\\]": "]", "\\(": "(", "\\)": ")", "\\lvert": "|", "\\rvert": "|"}.get(
            bracket, bracket
        ) + " "
    return "" if match["group"] or match[0].startswith("\\!") else " \\quad " if "quad" in match[0] else " "


def _strip_bold(text: str) -> str:
    """Removes bold type, and other styles if their content has groups in braces."""
    for match in reversed(list(_STYLE_COMMAND.finditer(text))):
        end = closing_index(text, match.end())
        held = text[match.end() + 1 : end]
        if end > 0 and (match["bold"] or "{" in held):
            text = f"{text[: match.start()]} {held} {text[end + 1 :]}"
    return text


def _normalize_style(match: re.Match) -> str:
    r"""Writes each style as \text{...}; removes it from numbers, symbols and function names."""
    inner = match[1].strip()
    if match[0].startswith("\\operatorname"):
        return f"\\{inner} "
    return f" {inner} " if re.fullmatch(r"[^A-Za-z]*|[eidxyzjk]", inner) else f"\\text{{{match[1]}}}"


def _strip_thousands(text: str) -> str:
    """Removes the separators of 1,234 and 1 234, but not in brackets: they may separate members."""
    pieces, at = [], 0
    for bracket in re.finditer(r"[(\[]|\\\{", text):
        start = bracket.start()
        if start >= at:
            end = closing_index(text, start) + 1 or len(text)
            pieces += [_strip_separators(text[at:start]), text[start:end]]
            at = end
    return "".join(pieces) + _strip_separators(text[at:])


def _strip_separators(text: str) -> str:
    text = _SPACED_THOUSANDS.sub(lambda number: re.sub("[, ]", "", number[0]), text)
    return _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)


def _strip_ends(text: str) -> str:
    """Removes outer punctuation, outer braces, an outer style and leading signs such as =."""
    before = None
    while text != before:
        before = text
        text = text.strip().strip('"*`').strip()
        text = re.sub(r"(?:\\\\|\\quad|:\)|[.,;:✓✔✅∎\s])+$", "", text)
        text = text[leading.end() :] if (leading := _LEADING_SIGNS.match(text)) else text
        if text.startswith("\\text{") and closing_index(text, 5) == len(text) - 1:
            text = text[6:-1]
        elif text.startswith("{") and closing_index(text, 0) == len(text) - 1:
            text = text[1:-1]
    return text


def closing_index(text: str, start: int) -> int:
    """Returns the index at which the bracket at `start` closes, or -1.

    The closing bracket may be of another kind, as in [0, 1).
    """
    depth = 0
    for bracket in _BRACKET.finditer(text, start):
        depth += _DEPTH.get(bracket[0], 0)
        if depth == 0:
            return bracket.start() + bracket[0].startswith("\\")
    return -1


@lru_cache(maxsize=1024)
def letter_tokens(text: str) -> tuple[str, ...]:
    """Returns the tokens of a normalized text without styles and spacing, to compare literally."""
    text = re.sub(r"\\text\{([^{}]*)\}|\\quad", r" \1 ", text)
    tokens: list[str] = []
    for token in _TOKEN.findall(re.sub(r"(?<=[A-Za-z])\s+(?=[A-Za-z])", "", text)):
        tokens.append(token)
        if token == "}" and len(tokens) > 2 and tokens[-3] == "{":
            tokens[-3:] = tokens[-2:-1]  # {x} is x
    return tuple(tokens)


# ---- structure


def plain_text(text: str) -> str:
    """Returns a normalized text without styles."""
    return " ".join(re.sub(r"\\text\{([^{}]*)\}", r"\1", text).split())


def split_outside(text: str, separator: re.Pattern) -> list[str]:
    """Splits a normalized text at the separators outside all brackets."""
    if not separator.search(text):
        return [text.strip()]
    pieces, start, at = [], 0, 0
    while at < len(text):
        if text[at] in "([{" or text.startswith(("\\{", "\\langle", "\\begin"), at):
            end = closing_index(text, at)
            if end > at and not text.startswith("\\text{", max(0, at - 5)):
                at = end + 1
                continue
        found = separator.match(text, at)
        if found and found.end() > at:
            pieces.append(text[start:at])
            start = at = found.end()
            continue
        command = _WORD.match(text, at)
        at = command.end() if command else at + 1
    return [piece.strip() for piece in (*pieces, text[start:])]


def list_members(text: str) -> list[str]:
    """Returns the members of a list, or the text alone. A member with ± counts as two."""
    return [member for piece in split_outside(text, COMMA) if piece for member in expand_plus_minus(piece)][
        : MAX_ITEMS + 1
    ]


def expand_plus_minus(piece: str) -> list[str]:
    if "\\pm" not in piece and "\\mp" not in piece:
        return [piece]
    name, equals, rest = piece.rpartition("=")
    upper = rest.replace("\\pm", "+").replace("\\mp", "-")
    lower = rest.replace("\\pm", "-").replace("\\mp", "+")
    return [name + equals + upper, name + equals + lower]


def parse_brackets(text: str) -> tuple[str, list[str], str] | None:
    """Returns (opening, members, closing bracket) of a tuple, interval or set, else None."""
    for opener in ("(", "[", "\\{", "\\langle"):
        if text.startswith(opener):
            end = closing_index(text, 0)
            close = {"\\{": "\\}", "\\langle": "\\rangle"}.get(opener, text[-1])
            if end < 0 or (end < len(text) - len(close) + (opener == "\\{")) or not text.endswith(close):
                return None
            held = text[len(opener) : -len(close)]
            items = split_outside(held, re.compile("[,;]"))
            if opener == "\\{":
                items = [sign for item in items for sign in expand_plus_minus(item)] if held.strip() else []
            elif len(items) < 2:
                return None
            return ("(" if opener == "\\langle" else opener), items, (")" if opener == "\\langle" else close)
    return None


def matrix_rows(text: str) -> list[list[str]] | None:
    """Returns the rows of a matrix or a vector, or None."""
    found = _MATRIX.fullmatch(text)
    if not found or "\\begin" in found[1]:
        return None
    rows = [row for row in found[1].split("\\\\") if row.strip()]
    return [[entry.strip() for entry in row.split("&")] for row in rows]


def split_assignment(text: str) -> tuple[str | None, str]:
    """Returns (name, value) of an assignment such as x = 3 or f(x) = 3, else (None, text)."""
    sides = split_outside(text, EQUALS)
    if len(sides) == 2 and sides[1] and is_name(sides[0]):
        return sides[0], sides[1]
    found = re.fullmatch(r"(.+?)\s*\\in(?![A-Za-z])(.+)", text)
    if found and any(form.fullmatch(found[1].strip()) for form in (NAME, _TUPLE_OF_NAMES)):
        return found[1].strip(), found[2].strip()
    return None, text


def is_name(side: str) -> bool:
    """Tells whether a side of an equation only names a value: x, f(x), AB, words; not x^2 or 2x."""
    if any(pattern.fullmatch(side) for pattern in (NAME, _TUPLE_OF_NAMES, _CALL, _OTHER_NAME)):
        return True
    words = plain_text(side)
    return bool(_WORD_NAME.fullmatch(words)) and not _OPERATION.match(words) and not OPEN_WORDS.search(words)


def bare_name(name: str) -> str:
    return re.sub(r"[\s{}]", "", name)


def name_stem(name: str | None) -> str | None:
    return None if name is None else re.sub(r"_.*|\s", "", name)
