"""Prints how often README, docs and sources use phrases that the vocabulary of CONTRIBUTING.md replaces.

python tests/vocabulary.py [FOLDER] [--lines]    # of a checkout; this one if no folder is given
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("torchtune_ext", "recipes", "kernels", "benchmarks", "configs", "scripts", "examples")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "benchmarks", "examples")
MAX_TEST_WORDS = 8

# A phrase that is not the field's -> what to write. `test_vocabulary.py` allows none of them.
BANNED = {
    r"(?-i:(is|are) (no|none))\b": "is not a, unknown, missing, not found",
    r"go(es|ing)? on\b(?! ((the|a)\b|to [A-Z]))": "resume, continue",
    r"went on\b": "resumed, continued",
    r"(?<!lag )(?<!lags )(?<!lagged )behind\b": "after",
    r"besides?\b(?![`\"])": "next to, with, in addition to",
    r"told\b": "reported, shown, passed",
    r"mend(s|ed|ing)?\b": "fix",
    r"(is|are|was|were|be|been) lost\b": "crashed, exited, is dropped",
    r"a (new |second |third )?life\b|lives of (an|the) engines?\b|life of (an|the) engine\b": "process, incarnation",
    r"knobs?\b(?!\")": "config key",
    r"no such (word|key|recipe|run|file|folder|task)\b": "unknown KIND 'NAME', not found",
    r"nobody\b(?!\|)": "subject and verb of what happens",
    r"lock step\b": "data parallel",
    r"too few\b(?= to say)": "not enough",
    r"an? (mistake|mistakes) of the user\b": "usage error",
    r"the very\b": "identical",
    r"once it is whole\b|whole or absent\b|whole files?\b": "atomic, complete",
    r"publications?\b": "weight sync",
    r"lane\b(?!\")": "engine replica",
    r"ledger\b(?!\")": "staleness scheduler",
    r"courier\b": "weight sender",
    r"janitor\b": "process reaper",
}
PATTERNS = {re.compile(rf"\b(?:{phrase})", re.IGNORECASE): instead for phrase, instead in BANNED.items()}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line number, text) of a page, or of the comments and strings of a Python file."""
    source = path.read_text(errors="replace")
    if path.suffix == ".md":
        # The table of the vocabulary names the phrases.
        source = re.sub(r"\| write \| not \|\n(\|.*\n)+", lambda table: "\n" * table[0].count("\n"), source)
        yield from enumerate(source.splitlines(), 1)
        return
    if path.suffix != ".py":
        yield from ((number, line) for number, line in enumerate(source.splitlines(), 1) if "#" in line)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from enumerate(token.string.splitlines(), token.start[0])


def files(root: Path) -> list[Path]:
    """Returns the pages and sources that users and maintainers read; tests are not among them."""
    pages = [
        path for name in PAGES for path in ([root / name] if name.endswith(".md") else (root / name).rglob("*.md"))
    ]
    sources = [path for name in SOURCES for kind in ("py", "yaml", "sh") for path in (root / name).rglob(f"*.{kind}")]
    # The module of renames lists old names.
    return sorted({path for path in pages + sources if path.is_file() and path.name != "renames.py"})


def found(root: Path) -> dict[str, list[str]]:
    """Returns phrase -> "FILE:LINE: text" of every use."""
    uses: dict[str, list[str]] = {phrase: [] for phrase in BANNED}
    for path in files(root):
        for number, text in texts(path):
            for (pattern, _), phrase in zip(PATTERNS.items(), BANNED, strict=True):
                if pattern.search(text):
                    uses[phrase].append(f"{path.relative_to(root)}:{number}: {text.strip()}")
    return uses


def long_test_names(root: Path, words: int = MAX_TEST_WORDS) -> list[str]:
    """Returns "FILE: test name" of tests with more words than `words`."""
    return [
        f"{path.relative_to(root)}: {node.name}"
        for path in sorted((root / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name.startswith("test_") and node.name.count("_") > words
    ]


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--lines"]
    root = Path(words[0]).resolve() if words else ROOT
    for phrase, uses in found(root).items():
        print(f"{len(uses):5}  {phrase}  ->  {BANNED[phrase]}")
        if "--lines" in sys.argv:
            print(*(f"       {use}" for use in uses), sep="\n")
    for limit in (MAX_TEST_WORDS, 10):
        print(f"{len(long_test_names(root, limit)):5}  test names of more than {limit} words")


if __name__ == "__main__":
    main()
