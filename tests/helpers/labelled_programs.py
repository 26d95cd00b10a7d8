"""C programs with hand-labeled techniques."""

import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torchtune_ext.measured.techniques import find_techniques

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Labelled:
    name: str
    kernel: str
    techniques: frozenset[str]
    source: str


def labelled_programs(file: str = "labelled_programs.txt") -> list[Labelled]:
    text = (ROOT / "tests/unit/measured" / file).read_text(encoding="utf-8")
    programs = []
    for part in text.split("=== ")[1:]:
        head, _, source = part.partition("\n")
        name, kernel, techniques = (word.strip() for word in head.split("|"))
        programs.append(Labelled(name, kernel, frozenset(techniques.replace("-", "").split()), source))
    return programs


@cache
def preprocessed(source: str) -> str:
    """Preprocess as the checker does, without the sandbox: `gcc -E`, with AVX2 on every CPU."""
    command = ["gcc", "-E", "-std=gnu17", "-O3", "-mavx2", "-mfma", "-fopenmp", "-x", "c", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, timeout=60).stdout


def techniques(text: str, kernel) -> frozenset[str]:
    """Return the techniques that the reader finds in a program."""
    return frozenset(use.technique for use in find_techniques(text, kernel))
