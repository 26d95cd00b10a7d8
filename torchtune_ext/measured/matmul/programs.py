"""The task of the warm-up: programs of the family, each asked for by a stage that permits it.

A model that learned them can begin: it writes programs that mostly compile and are mostly right, and knows the names of the
stages. How fast they are it has not seen.
"""

import random
from collections.abc import Mapping, Sequence

from torchtune_ext.measured.kernel import Kernel
from torchtune_ext.measured.kernels import KERNELS
from torchtune_ext.measured.matmul.family import ENDLESS, WRITERS, Family, Program
from torchtune_ext.measured.matmul.prompts import short_messages
from torchtune_ext.measured.matmul.stages import STAGES, permitted
from torchtune_ext.run.errors import Mistake
from torchtune_ext.tasks.task import Problem, Score

# One program in 40 for dgemm is permitted by the first stage, and none is rarer: this many draws miss all of them with
# a probability of e^-25.
MOST_DRAWS = 1000


class Programs:
    """Programs to learn from, asked for in the short words of `short_messages`.

    Problem i depends only on (kernels, seed, broken, stages, new, weights) and i. Each stage is equally frequent, however few
    programs it permits. The share `new` of its programs is permitted by no earlier stage (where there are such), and the
    others are any that it permits. So a model learns what is new at each stage, and that nobody has to use it.

    Args:
        kernels: their names, keys of WRITERS, or {name: size} or {name: [size, ...]}. They are equally frequent, and so are
            the sizes of one. Without a size it is the kernel's own.
        seed: problems of two seeds are drawn independently.
        broken: the share of the programs that is wrong in some way.
        stages: names of `stages.STAGES`, from the first to the last. Without "threads" no program has pragmas of
            OpenMP: a machine that gives one thread compiles without it, and they would be mere words.
        new: the share of a stage's programs that no earlier stage permits.
        weights: {kernel: its `weights` of `Family`}.

    Raises:
        ValueError: an argument is out of its range, or no program fits the stages.
    """

    def __init__(
        self,
        kernels: Sequence[str] | Mapping[str, int | Sequence[int] | None] = ("dgemm",),
        seed: int = 0,
        broken: float = 0.25,
        stages: Sequence[str] = tuple(STAGES),
        new: float = 0.5,
        weights: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        if not stages or not set(stages) <= set(STAGES) or list(stages) != [name for name in STAGES if name in stages]:
            raise Mistake(f"stages={list(stages)}: give some of {', '.join(STAGES)}, each once and in this order")
        if not 0.0 <= new <= 1.0:
            raise Mistake(f"new={new} is a share of the programs: give a number from 0 to 1")
        self.seed, self.stages, self.new = seed, tuple(stages), new
        sized = kernels if isinstance(kernels, Mapping) else dict.fromkeys(kernels)
        if not sized:
            raise Mistake(f"kernels is empty: give some of {', '.join(WRITERS)}")
        if unknown := set(weights or {}) - set(sized):
            raise Mistake(f"weights: there are no programs for {', '.join(sorted(unknown))} among these kernels")
        self.families = {name: Family(name, seed, broken, (weights or {}).get(name)) for name in sized}
        self.choices = {name: _kernels(name, sizes) for name, sizes in sized.items()}
        # Not every stage brings every kernel something new.
        self.brings: dict[str, set[str]] = {}
        for name in sized:
            if any(self._draw(name, stage, False, 0, random.Random(seed)) is None for stage in self.stages):
                raise Mistake(
                    f"stages={list(stages)}: of {MOST_DRAWS} programs for {name} the first of them permits none; leave it out, "
                    "or change the weights"
                )
            self.brings[name] = {
                stage for stage in self.stages if self._draw(name, stage, True, 0, random.Random(seed)) is not None
            }

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < ENDLESS:
            raise IndexError(f"program {index} of {ENDLESS}")
        kernel, program, stage = self._at(index)
        size = "-".join(str(kernel.timed[name]) for name in kernel.size_names)
        # The answer is plain text, whose words need no tokens of their own (see make_tokenizer).
        return Problem(f"{kernel.name}-{size}/{stage}/{index}", short_messages(kernel, stage), program.text)

    def grade(self, problem: Problem, text: str) -> Score:
        """Refuses: what a program is worth is measured on a machine, by the task `Matmul`.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "Programs are there for warmup_sft and give no reward: the speed of a program has to be measured. Train with "
            "torchtune_ext.measured.matmul.Matmul"
        )

    def solution(self, problem: Problem) -> str:
        """Returns the program as a model would answer it; the share `broken` is wrong."""
        return problem.answer

    def program(self, problem: Problem) -> Program:
        """Returns what is known of the program of a problem: its outcome and its techniques."""
        return self._at(int(problem.id.rpartition("/")[2]))[1]

    def _at(self, index: int) -> tuple[Kernel, Program, str]:
        rng = random.Random(f"programs/{self.seed}/{index}")
        name, stage = rng.choice(list(self.families)), rng.choice(self.stages)
        kernel, is_new = rng.choice(self.choices[name]), rng.random() < self.new
        return kernel, self._draw(name, stage, is_new and stage in self.brings[name], index, rng), stage

    def _draw(self, kernel: str, stage: str, is_new: bool, index: int, rng: random.Random) -> Program | None:
        """Draws a program that the stage permits, and no earlier one if it has to be new. Returns None if it finds none."""
        for _ in range(MOST_DRAWS):
            program = self.families[kernel][index]
            possible = self._permitting(program)
            if stage in possible[:1] if is_new else stage in possible:
                return program
            index = rng.randrange(ENDLESS)
        return None

    def _permitting(self, program: Program) -> list[str]:
        if "threads" not in self.stages and "#pragma omp" in program.source:
            return []
        return [stage for stage in self.stages if program.techniques <= permitted(stage)]


def _kernels(name: str, sizes: int | Sequence[int] | None) -> list[Kernel]:
    """Makes a kernel of each size."""
    if sizes is None:
        return [KERNELS[name]()]
    sizes = [sizes] if isinstance(sizes, int) else list(sizes)
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise Mistake(f"kernels.{name}={sizes}: give a size, at least 1, or several ([192, 256])")
    return [KERNELS[name](size) for size in sizes]
