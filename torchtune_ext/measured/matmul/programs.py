"""The SFT warm-up task: correct and broken programs for C = A B, each with a matching prompt.

Program i of a family is a pure function of (seed, i). Its outcome and its techniques are known by
construction. The median program has 320 characters, or 73 tokens with a vocabulary of 512
(`policy.scratch.make_tokenizer`).
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtune_ext.measured.kernel import Kernel
from torchtune_ext.measured.matmul.prompts import short_messages
from torchtune_ext.measured.matmul.stages import STAGES
from torchtune_ext.measured.matmul.task import make_kernels, problem_id
from torchtune_ext.measured.matmul.writers import WRITERS, ZERO_OUTPUT
from torchtune_ext.run.errors import UsageError
from torchtune_ext.tasks.task import ENDLESS_LENGTH, Problem, Score, require_index, require_share

# The first stage permits 1 program in 40. All of MAX_DRAWS draws miss with probability e^-25.
MAX_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Fault:
    """A way to break a program, and the resulting outcome."""

    description: str
    outcome: str  # one of check.OUTCOMES
    pattern: str  # regular expression of the text to replace
    replacement: str
    is_last: bool = False  # whether to replace the last match and not the first
    excluded_by: str = "\0"  # the fault is unreliable in a source with this text


_HEAD = r"(void dgemm\([^)]*\)\{\n)"
# Wrong bounds compute too little, since the outcome of an out-of-bounds access is undefined (a
# crash or a wrong result). In vectorized programs, some faults would affect only the remainder
# loop, which not every size runs.
FAULTS = (
    Fault("a semicolon is missing", "compile_error", r";\n", r"\n"),
    Fault("the last brace is missing", "compile_error", r"\}\n$", r"\n", is_last=True),
    Fault("a name is not declared", "compile_error", r"\bA\[", r"X["),
    Fault("an argument is missing", "compile_error", r"(void dgemm\()int \w,", r"\1"),
    Fault("a type of the signature is wrong", "compile_error", r"double\*C\)\{", r"float*C){", is_last=True),
    Fault("the function has another name", "compile_error", r"void dgemm\(", r"void fdgemm("),
    Fault("rows are left out", "wrong_result", r"\b([iI])<m;", r"\1<m-1;", excluded_by="typedef"),
    Fault("the sum begins at 1", "wrong_result", r"\bl=0;l<k", r"l=1;l<k", excluded_by="typedef"),
    Fault("C is not zeroed", "wrong_result", re.escape(ZERO_OUTPUT), r""),
    Fault("adds to an output that holds anything", "wrong_result", r"C\[i\*n\+j\]=(?=[st]\b)", r"C[i*n+j]+="),
    Fault("B is read as its transpose", "wrong_result", r"\*B\[l\*n\+j\]", r"*B[j*k+l]", excluded_by="typedef"),
    Fault("adds where it should multiply", "wrong_result", r"\]\*(?=B\[)", r"]+"),
    Fault("the sum is in single precision", "wrong_result", r"double s=0;", r"float s=0;", excluded_by="typedef"),
    Fault("it writes to an input", "runtime_error", _HEAD, r"\1*(double*)A=0;\n"),
    Fault(
        "it calls a library", "forbidden", _HEAD + r"[\s\S]*", r"\1cblas_dgemm(101,111,111,m,n,k,1,A,k,B,n,0,C,n);}\n"
    ),
)
UNCLOSED_FENCE = Fault("the block of code is not closed", "format", r"\A", "")


@dataclass(frozen=True, slots=True)
class Program:
    """One program of a family."""

    source: str
    outcome: str  # the checker's outcome of `answer`
    techniques: frozenset[str]  # of the program before the fault

    @property
    def answer(self) -> str:
        """A model's answer with this program."""
        return f"```\n{self.source}" + ("```" if self.outcome != "format" else "")


class ProgramFamily:
    """The random programs of one seed.

    Args:
        seed: programs of different seeds are independent.
        broken: share of broken programs, in [0, 1].
        weights: {writer name: relative frequency}. Other writers keep their weight in WRITERS.

    Raises:
        UsageError: an argument is out of range.
    """

    def __init__(self, seed: int = 0, broken: float = 0.25, weights: Mapping[str, float] | None = None) -> None:
        require_share("broken", broken, "the programs")
        chosen: dict[str, float] = {writer.__name__: weight for writer, weight in WRITERS.items()}
        if unknown := set(weights or {}) - set(chosen):
            raise UsageError(f"weights: unknown writer {', '.join(sorted(unknown))}; expected {', '.join(chosen)}")
        chosen |= weights or {}
        if min(chosen.values()) < 0 or not sum(chosen.values()) > 0:
            raise UsageError(f"weights={chosen} must not be negative, nor all 0")
        self.seed, self.broken, self._weights = seed, broken, list(chosen.values())

    def __getitem__(self, index: int) -> Program:
        rng = random.Random(f"dgemm/{self.seed}/{index}")
        (writer,) = rng.choices(list(WRITERS), self._weights)
        source, techniques = writer(rng)
        outcome = "ok"
        if rng.random() < self.broken:
            fault = _draw_fault(rng, source)
            source, outcome = apply_fault(fault, source), fault.outcome
        return Program(source, outcome, frozenset(techniques))


def is_applicable(fault: Fault, source: str) -> bool:
    """Returns whether the fault applies to a program."""
    return fault.excluded_by not in source and re.search(fault.pattern, source) is not None


def apply_fault(fault: Fault, source: str) -> str:
    """Returns the program with the fault."""
    places = list(re.finditer(fault.pattern, source))
    place = places[-1 if fault.is_last else 0]
    return source[: place.start()] + place.expand(fault.replacement) + source[place.end() :]


def _draw_fault(rng: random.Random, source: str) -> Fault:
    # Compile errors and wrong results are a model's most frequent failures, so these outcomes are
    # four times as likely. Within an outcome, each fault is equally likely.
    by_outcome: dict[str, list[Fault]] = {}
    for fault in (*FAULTS, UNCLOSED_FENCE):
        if is_applicable(fault, source):
            by_outcome.setdefault(fault.outcome, []).append(fault)
    outcomes = sorted(by_outcome)
    weights = [1 if outcome in ("format", "forbidden", "runtime_error") else 4 for outcome in outcomes]
    (outcome,) = rng.choices(outcomes, weights)
    return rng.choice(by_outcome[outcome])


class Programs:
    """SFT warm-up programs with the prompts of `short_messages`.

    Problem i depends only on the arguments and i. All stages are equally frequent.

    Args:
        sizes: matrix sizes, equally frequent.
        seed: problems of different seeds are independent.
        broken: share of broken programs, in [0, 1].
        stages: names of `stages.STAGES`, in their order. Without "threads": no OpenMP pragmas.
        new: share of a stage's programs that no earlier stage permits; the others are any.
        weights: as in `ProgramFamily`.

    Raises:
        UsageError: an argument is out of range, or no program fits a stage.
    """

    def __init__(
        self,
        sizes: int | Sequence[int] = 256,
        seed: int = 0,
        broken: float = 0.25,
        stages: Sequence[str] = tuple(STAGES),
        new: float = 0.5,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        if not stages or not set(stages) <= set(STAGES) or list(stages) != [name for name in STAGES if name in stages]:
            raise UsageError(
                f"stages={list(stages)}: expected a subset of {', '.join(STAGES)}, in this order and without repetition"
            )
        require_share("new", new, "the programs")
        self.seed, self.stages, self.new = seed, tuple(stages), new
        self.family, self.kernels = ProgramFamily(seed, broken, weights), make_kernels({"dgemm": sizes})
        for stage in self.stages:
            if any(self._draw(stage, is_new, 0, random.Random(seed)) is None for is_new in (False, new > 0)):
                raise UsageError(
                    f"stages={list(stages)}: of {MAX_DRAWS} programs {stage} permits none, or no new one. Fix: remove "
                    "the stage, or change the weights"
                )

    def __len__(self) -> int:
        return ENDLESS_LENGTH

    def __getitem__(self, index: int) -> Problem:
        require_index(index, ENDLESS_LENGTH, "program")
        kernel, program, stage = self._draw_problem(index)
        # The answer is plain text without special tokens (see make_tokenizer).
        return Problem(f"{problem_id(kernel)}/{stage}/{index}", short_messages(kernel, stage), program.answer)

    def grade(self, problem: Problem, text: str) -> Score:
        """Not supported: the reward of a program must be measured, by the task `Matmul`.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "Programs is a task for warmup_sft and has no reward: the speed of a program must be measured. Fix: Train "
            "with torchtune_ext.measured.matmul.Matmul"
        )

    def solution(self, problem: Problem) -> str:
        """Returns the program as a model's answer; the share `broken` of the programs is broken."""
        return problem.answer

    def _draw_problem(self, index: int) -> tuple[Kernel, Program, str]:
        rng = random.Random(f"programs/{self.seed}/{index}")
        stage, kernel = rng.choice(self.stages), rng.choice(self.kernels)
        program = self._draw(stage, rng.random() < self.new, index, rng)
        assert program is not None  # the constructor has drawn from each stage
        return kernel, program, stage

    def _draw(self, stage: str, is_new: bool, index: int, rng: random.Random) -> Program | None:
        """Draws a program that the stage permits and, if `is_new`, no earlier stage permits.

        Returns:
            The program, or None after MAX_DRAWS draws.
        """
        for _ in range(MAX_DRAWS):
            program = self.family[index]
            possible = self._permitting_stages(program)
            # New programs teach the stage's technique, the others that it is optional.
            if stage in possible[:1] if is_new else stage in possible:
                return program
            index = rng.randrange(ENDLESS_LENGTH)
        return None

    def _permitting_stages(self, program: Program) -> list[str]:
        # With one thread per program, OpenMP is disabled, so its pragmas would have no effect.
        if "threads" not in self.stages and "#pragma omp" in program.source:
            return []
        return [stage for stage in self.stages if program.techniques <= STAGES[stage]]
