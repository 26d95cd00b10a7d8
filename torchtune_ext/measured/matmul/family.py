"""A family of programs, good and broken ones: what a small model is warmed up on before measured speed teaches it.

Program i is a pure function of (kernel, seed, i). What becomes of it is known by construction, and so are its techniques.
The broken ones are there since a model that has never seen an error has nothing to learn from the checker.

Programs for dgemm have 320 characters in the median. With a tokenizer of 512 words that was made from 4,000 of them
(`policy.scratch.make_tokenizer`), an answer has 73 tokens in the median and at most 147 (400 others).
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torchtune_ext.measured.matmul.writers import DGEMM, GEMV, REDUCTION, STENCIL, ZERO, Writer
from torchtune_ext.run.errors import Mistake

WRITERS: Mapping[str, Mapping[Writer, int]] = {"dgemm": DGEMM, "gemv": GEMV, "stencil": STENCIL, "reduction": REDUCTION}
"""The writers of each kernel, and how often each is chosen."""


ENDLESS = 2**31 - 1  # the length of a family


@dataclass(frozen=True, slots=True)
class Fault:
    """A way to break a program, and what the checker then says."""

    words: str
    outcome: str  # one of check.OUTCOMES
    pattern: str  # a regular expression; the fault fits where the source has it
    replacement: str
    is_last: bool = False  # the last such place, else the first
    never_with: str = "\0"  # a source that has this is not sure to be wrong


_HEADS = r"void (?:dgemm|gemv|stencil|reduction)\("
# Bounds are wrong such that too little is computed: beyond an array a program may crash or only be wrong. Where vectors do most
# of the work, some faults would touch but the edge, which not every size has.
FAULTS = (
    Fault("a semicolon is missing", "compile_error", r";\n", r"\n"),
    Fault("the last brace is missing", "compile_error", r"\}\n$", r"\n", is_last=True),
    Fault("a name is not declared", "compile_error", r"\b[Axu]\[", r"X["),
    Fault("an argument is missing", "compile_error", rf"({_HEADS})int \w,", r"\1"),
    Fault(
        "a type of the signature is wrong", "compile_error", r"double\*(C|y|v|total)\)\{", r"float*\1){", is_last=True
    ),
    Fault("the function has another name", "compile_error", r"void (dgemm|gemv|stencil|reduction)\(", r"void f\1("),
    Fault("rows are left out", "wrong_result", r"\b([iI])<m;", r"\1<m-1;", never_with="typedef"),
    Fault("the sum begins at 1", "wrong_result", r"\bl=0;l<k", r"l=1;l<k", never_with="typedef"),
    Fault("C is not zeroed", "wrong_result", re.escape(ZERO), r""),
    Fault(
        "adds to an output that holds anything", "wrong_result", r"(C\[i\*n\+j\]|y\[i\]|\*total)=(?=[st]\b)", r"\1+="
    ),
    Fault("B is read as its transpose", "wrong_result", r"\*B\[l\*n\+j\]", r"*B[j*k+l]", never_with="typedef"),
    Fault("adds where it should multiply", "wrong_result", r"\]\*(?=[Bx]\[)", r"]+"),
    Fault("the sum is in single precision", "wrong_result", r"double s=0;", r"float s=0;", never_with="typedef"),
    Fault("a coefficient is wrong", "wrong_result", r"=\.5\*", r"=.6*"),
    Fault("numbers are left out", "wrong_result", r"\b([iI])<n;", r"\1<n-1;"),
    Fault("it writes to an input", "runtime_error", r"(void (?:dgemm|gemv)\([^)]*\)\{\n)", r"\1*(double*)A=0;\n"),
    Fault("it writes to an input", "runtime_error", r"(void reduction\([^)]*\)\{\n)", r"\1*(double*)x=0;\n"),
    Fault("it writes to an input", "runtime_error", r"(void stencil\([^)]*\)\{\n)", r"\1*(double*)u=0;\n"),
    Fault(
        "it calls a library",
        "forbidden",
        r"(void dgemm\([^)]*\)\{\n)[\s\S]*",
        r"\1cblas_dgemm(101,111,111,m,n,k,1,A,k,B,n,0,C,n);}\n",
    ),
    Fault("it reads the clock", "forbidden", r"(void (?:gemv|stencil|reduction)\([^)]*\)\{\n)", r"\1clock();\n"),
)
UNCLOSED = Fault("the block of code is not closed", "format", r"\A", "")


@dataclass(frozen=True, slots=True)
class Program:
    """One program of a family."""

    kernel: str
    source: str
    outcome: str  # what the checker says of `text`
    techniques: frozenset[str]  # that it uses, or did before it was broken

    @property
    def text(self) -> str:
        """The answer of a model that writes it."""
        return f"```\n{self.source}" + ("```" if self.outcome != "format" else "")


class Family:
    """The programs for one kernel.

    Args:
        kernel: its name, a key of WRITERS.
        seed: programs of two seeds are drawn independently.
        broken: the share that is wrong in some way.
        weights: {name of a writer: how often it is chosen beside the others}; those not named are chosen as WRITERS says.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self, kernel: str = "dgemm", seed: int = 0, broken: float = 0.25, weights: Mapping[str, float] | None = None
    ) -> None:
        if kernel not in WRITERS:
            raise Mistake(f"kernel={kernel!r}: there are programs for {', '.join(WRITERS)}")
        if not 0.0 <= broken <= 1.0:
            raise Mistake(f"broken={broken} is a share of the programs: give a number from 0 to 1")
        self.kernel, self.seed, self.broken = kernel, seed, broken
        chosen = {writer.__name__: weight for writer, weight in WRITERS[kernel].items()}
        if unknown := set(weights or {}) - set(chosen):
            raise Mistake(
                f"weights: no writer of {kernel} is named {', '.join(sorted(unknown))}; {', '.join(chosen)} are"
            )
        chosen |= weights or {}
        if min(chosen.values()) < 0 or not sum(chosen.values()) > 0:
            raise Mistake(f"weights={chosen} must not be negative, nor all 0")
        self._writers, self._weights = list(WRITERS[kernel]), list(chosen.values())

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Program:
        if not 0 <= index < ENDLESS:
            raise IndexError(f"program {index} of {ENDLESS}")
        rng = random.Random(f"{self.kernel}/{self.seed}/{index}")
        (writer,) = rng.choices(self._writers, self._weights)
        source, techniques = writer(rng)
        outcome = "ok"
        if rng.random() < self.broken:
            fault = _fault(rng, source)
            source, outcome = break_by(fault, source), fault.outcome
        return Program(self.kernel, source, outcome, frozenset(techniques))


def fits(fault: Fault, source: str) -> bool:
    """Tells whether a program can be broken in this way."""
    return fault.never_with not in source and re.search(fault.pattern, source) is not None


def break_by(fault: Fault, source: str) -> str:
    """Returns the program with the fault in it."""
    places = list(re.finditer(fault.pattern, source))
    place = places[-1 if fault.is_last else 0]
    return source[: place.start()] + place.expand(fault.replacement) + source[place.end() :]


def _fault(rng: random.Random, source: str) -> Fault:
    # Compilers and wrong numbers are what a model stumbles over most; each way there is as likely as another.
    by_outcome: dict[str, list[Fault]] = {}
    for fault in (*FAULTS, UNCLOSED):
        if fits(fault, source):
            by_outcome.setdefault(fault.outcome, []).append(fault)
    outcomes = sorted(by_outcome)
    weights = [1 if outcome in ("format", "forbidden", "runtime_error") else 4 for outcome in outcomes]
    (outcome,) = rng.choices(outcomes, weights)
    return rng.choice(by_outcome[outcome])
