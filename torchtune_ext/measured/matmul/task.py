"""The task of C programs for matrix multiplication and other kernels, rewarded by measured speed.

A staged curriculum (stages.py) selects the permitted techniques of a prompt, and an archive
(archive.py) keeps the fastest programs. Both depend only on the graded groups, so a run that
resumes or replays rollouts has the same prompts.
"""

import logging
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from torchtune_ext.measured.check import extract_code
from torchtune_ext.measured.grading import MeasuredTask, measured_score
from torchtune_ext.measured.kernel import Kernel, validate_kernel
from torchtune_ext.measured.kernels import KERNELS
from torchtune_ext.measured.matmul.archive import ARCHIVE_FILE, Archive, ArchiveEntry
from torchtune_ext.measured.matmul.prompts import messages, short_messages
from torchtune_ext.measured.matmul.rewards import REWARD_KINDS, program_reward
from torchtune_ext.measured.matmul.stages import STAGES, Curriculum, Visit
from torchtune_ext.measured.results import NOISY, Result
from torchtune_ext.measured.techniques import find_techniques
from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.files import explain_os_errors, write_atomic
from torchtune_ext.tasks.grade_functions import import_named
from torchtune_ext.tasks.task import GradedGroup, Problem, Score, require_choice, require_index, require_share

log = logging.getLogger(__name__)

ALL_STAGE = "all"  # the stage of a task without a curriculum
PROMPT_KINDS = ("long", "short")


class Matmul(MeasuredTask):
    """Asks for fast programs, rewarded by measured speed.

    Args:
        kernels: kernel -> size or sizes: {"dgemm": [256, 512], "gemv": 1536}. A key is "dgemm",
            "gemv", "reduction", or the dotted path of a `Kernel` class that takes a size.
        stages: names of STAGES in order. Each problem starts at the first stage and advances with
            the curriculum. None permits all techniques from the start.
        reward: "log_speedup", "peak_share" or "published" (rewards.py).
        prompt: "long" describes the problem; "short" ("dgemm 256 256 256 blocking") is for a model
            after the warm-up (programs.py).
        show: share of long prompts that show a program of the archive to improve, in [0, 1].
        seed: seed for the choice of shown programs.
        bench: settings of the benchmark service (`BenchConfig`): cores, threads, budget_s, ...

    Raises:
        UsageError: an argument is invalid.
    """

    def __init__(
        self,
        kernels: Mapping[str, int | Sequence[int]] | None = None,
        stages: Sequence[str] | None = None,
        reward: str = "log_speedup",
        prompt: str = "long",
        show: float = 0.0,
        seed: int = 0,
        bench: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(bench)
        require_choice("task.reward", reward, REWARD_KINDS)
        require_choice("task.prompt", prompt, PROMPT_KINDS)
        require_share("task.show", show, "the prompts")
        if show and prompt == "short":
            raise UsageError(f"task.show={show}: short prompts cannot show a program. Fix: set prompt=long, or show=0")
        self.kernels = make_kernels({"dgemm": 256} if kernels is None else kernels)
        self._problems = {problem_id(kernel): kernel for kernel in self.kernels}
        self._reward, self._prompt, self._show_probability, self._seed = reward, prompt, show, seed
        if stages is not None:
            # A single string would be read as a list of letters.
            stage_list = stages if isinstance(stages, Sequence) and not isinstance(stages, str) else ()
            if not set(stage_list) <= set(STAGES) or not 0 < len(set(stage_list)) == len(stage_list):
                raise UsageError(
                    f"task.stages={stages!r}: list some of {', '.join(STAGES)}, each once, or null for none"
                )
            for kernel in self.kernels:
                # This raises UsageError if the kernel's naive program is unsuitable for comparison.
                find_techniques(kernel.naive, kernel)
        self._readable_kernels = {kernel.name for kernel in self.kernels if _is_readable(kernel)}
        self.curriculum = Curriculum(tuple(stages)) if stages is not None else None
        self.machine: str | None = None  # fingerprint of the machine that measured last
        self.archive = Archive()

    def __len__(self) -> int:
        return len(self.kernels)

    def __getitem__(self, index: int) -> Problem:
        return self.ask(index, index)

    def ask(self, index: int, cursor: int) -> Problem:
        """Returns problem `index` at its current stage. `cursor` seeds the shown program."""
        require_index(index, len(self.kernels))
        kernel = self.kernels[index]
        name = problem_id(kernel)
        stage = ALL_STAGE if self.curriculum is None else self.curriculum.stage_of(name)
        answer = {"problem": name, "stage": stage}
        if self._prompt == "short":
            return Problem(f"{name}/{stage}", short_messages(kernel, stage), answer)
        elite = self._draw_elite(kernel, stage, random.Random(f"{self._seed}/{cursor}"))
        return Problem(f"{name}/{stage}{'/improve' if elite else ''}", messages(kernel, stage, elite), answer)

    def solution(self, problem: Problem) -> str:
        """Returns the kernel's naive program: correct, slow, and permitted at every stage."""
        return f"```c\n{self.kernel(problem).naive}```"

    def kernel(self, problem: Problem) -> Kernel:
        """Returns the kernel of a problem."""
        return self._problems[problem.answer["problem"]]

    def permitted(self, problem: Problem) -> Collection[str] | None:
        """Returns the techniques of the problem's stage, or None for an unsupported kernel."""
        return STAGES[problem.answer["stage"]] if self.kernel(problem).name in self._readable_kernels else None

    def score(self, problem: Problem, result: Result) -> Score:
        """Returns the reward of a program with its measurements."""
        value = program_reward(result.outcome, result.timing, self._reward)
        assert value is not None  # only a noisy result has no reward
        return measured_score(result, value)

    def observe(self, step: int, groups: Sequence[GradedGroup], folder: Path) -> dict[str, float]:
        """Updates the curriculum, writes the archive to `folder`, and returns metrics."""
        moves = 0
        for problem, samples in groups:
            name, stage = problem.answer["problem"], problem.answer["stage"]
            if name not in self._problems:
                continue  # replayed rollouts of a run with more problems
            if (
                self.curriculum is not None
                and stage == self.curriculum.stage_of(name)
                and (visit := _summarize_visit(samples))
                and (reason := self.curriculum.observe(name, visit))
            ):
                moves += 1
                new = self.curriculum.stage_of(name)
                log.info("matmul: problem %s advances from stage %s to %s: %s", name, stage, new, reason)
            for text, score, _ in samples:
                if score is not None and score.parts.get("speedup"):
                    self._archive_program(self._problems[name], extract_code(text) or "", score, step)
        self._write_archive(folder)
        return dict(self._metrics(moves))

    def state_dict(self) -> dict[str, Any]:
        """Returns the curriculum and the archive, JSON-serializable."""
        return {
            "curriculum": None if self.curriculum is None else self.curriculum.state_dict(),
            "archive": self.archive.dumps(),
            "machine": self.machine,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the return value of `state_dict`.

        Raises:
            UsageError: the state has other stages.
        """
        if (state["curriculum"] is None) != (self.curriculum is None):
            had = "none" if state["curriculum"] is None else state["curriculum"]["stages"]
            now = "none" if self.curriculum is None else list(self.curriculum.stages)
            raise UsageError(
                f"task.stages: {now}, but the checkpoint was written with {had}. Fix: use these, or begin anew"
            )
        if self.curriculum is not None:
            self.curriculum.load_state_dict(state["curriculum"])
        self.archive = Archive.loads(state["archive"])
        self.machine = state["machine"]

    def _archive_program(self, kernel: Kernel, source: str, score: Score, step: int) -> None:
        parts, self.machine = score.parts, score.facts["machine"]
        spread = parts["speedup_spread"]
        # A very wide or undefined interval could never be replaced by a significantly faster one.
        if 0 < spread < 1:
            used = tuple(word for word in score.facts["techniques"].split(",") if word)
            speed = parts["speedup"], spread, parts["gflops"]
            size = tuple(kernel.timed.items())
            self.archive.add(ArchiveEntry(self.machine, kernel.name, size, used, source, *speed, step))

    def _write_archive(self, folder: Path) -> None:
        try:
            with explain_os_errors(f"cannot write {folder / ARCHIVE_FILE}", "free disk space"):
                write_atomic(folder / ARCHIVE_FILE, self.archive.dumps().encode())
        except OSError as error:
            # The checkpoints also contain the archive, so a write error does not stop the run.
            log.warning("matmul: %s. The run continues and retries at each step", error)

    def _metrics(self, moves: int) -> Iterator[tuple[str, float]]:
        yield "archive/cells", float(len(self.archive))
        # Speeds of different machines are not comparable.
        if here := [entry for entry in self.archive if entry.machine == self.machine]:
            yield "archive/best_speedup", max(here, key=lambda entry: entry.speedup_low).ratio
        if self.curriculum is not None:
            at = [self.curriculum.stage_of(name) for name in self._problems]
            yield from ((f"stage/{stage}", float(at.count(stage))) for stage in self.curriculum.stages)
            yield "stage/moves", float(moves)

    def _draw_elite(self, kernel: Kernel, stage: str, rng: random.Random) -> ArchiveEntry | None:
        """Draws the program to show, if any: a permitted elite of the last measuring machine."""
        if rng.random() >= self._show_probability:
            return None
        problem = self.machine, kernel.name, tuple(kernel.timed.items())
        elites = [
            entry
            for entry in self.archive
            if (entry.machine, entry.kernel, entry.size) == problem and STAGES[stage] >= set(entry.techniques)
        ]
        return rng.choice(elites) if elites else None


def problem_id(kernel: Kernel) -> str:
    """Returns "dgemm-256-256-256"."""
    return "-".join([kernel.name, *map(str, kernel.timed.values())])


def make_kernels(mapping: Mapping[str, int | Sequence[int]]) -> list[Kernel]:
    """Creates the kernels of a mapping of names to sizes.

    Raises:
        UsageError: a name or a size is invalid.
    """
    if not isinstance(mapping, Mapping) or not mapping:
        raise UsageError(f"task.kernels={mapping!r}: map each kernel to its sizes, as {{dgemm: [256, 512]}}")
    kernels = []
    for name, sizes in mapping.items():
        if name not in KERNELS and "." not in str(name):
            raise UsageError(
                f"task.kernels: unknown kernel {name!r}; use {', '.join(KERNELS)}, or the dotted path of a class"
            )
        kind = KERNELS.get(name) or import_named(name, "task.kernels", "class", "my_kernel.Outer")
        size_list = list(sizes) if isinstance(sizes, Sequence) and not isinstance(sizes, str) else [sizes]
        if not size_list:
            raise UsageError(f"task.kernels.{name}=[]: expected a size, or a list of sizes ([256, 512])")
        for size in size_list:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise UsageError(f"task.kernels.{name}={size!r}: expected a whole number, 1 or more")
            try:
                kernel = kind(size)
                validate_kernel(kernel)
            except Exception as error:
                # A user's class may raise any error.
                raise UsageError(
                    f"task.kernels.{name}={size}: {error or type(error).__name__}; expected a class that takes a size"
                ) from error
            kernels.append(kernel)
    names = [problem_id(kernel) for kernel in kernels]
    if duplicates := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"task.kernels: {', '.join(sorted(duplicates))} is listed twice. Fix: remove one")
    return kernels


def _is_readable(kernel: Kernel) -> bool:
    try:
        find_techniques(kernel.naive, kernel)
    except ValueError:
        return False
    return True


def _summarize_visit(samples: Sequence[tuple[str, Score | None, str]]) -> Visit | None:
    """Returns the visit of a group, or None if the machine failed for every sample."""
    scores = [score for _, score, _ in samples if score is not None]
    speeds = [math.log2(score.parts["speedup"]) for score in scores if score.parts.get("speedup")]
    correct = [score.parts["outcome_ok"] for score in scores]
    # A correct program counts as correct even if its speed could not be measured. Otherwise a busy
    # machine would look like a regression of the model.
    correct += [1.0 for *_, kind in samples if kind == NOISY]
    return Visit(fmean(correct), fmean(speeds) if speeds else None) if correct else None
