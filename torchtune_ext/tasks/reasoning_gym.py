"""Tasks of reasoning-gym (arXiv 2505.24760): a hundred puzzle generators, each with its own grader.

task:
  _component_: torchtune_ext.tasks.reasoning_gym.ReasoningGym
  generators:
    spell_backward: {min_word_len: 3, max_word_len: 4}
    letter_counting: {weight: 2, max_words: 5}
"""

import json
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from torchtune_ext.run.errors import UsageError, closest_match
from torchtune_ext.tasks.answers import strip_thinking
from torchtune_ext.tasks.arithmetic import is_held_out
from torchtune_ext.tasks.grade_functions import GradeFunction, use_graders
from torchtune_ext.tasks.task import (
    GradedGroup,
    Problem,
    Score,
    require_choice,
    require_index,
    require_question,
    task_length,
)

SPLITS = ("train", "heldout")
REWARD_MODES = ("solved", "credit")
BLOCK_SIZE = 100  # problems per generator instance; some generators create all of them in advance
MAX_DRAWS = 400  # draws after which a split counts as empty
SOLVED_SCORE = 1.0 - 1e-9  # lowest score of a generator at which a problem counts as solved
CURRICULUM_WINDOW = 32  # newest groups of a generator that a curriculum averages over
# These generators draw from Python sets, whose order differs without PYTHONHASHSEED.
HASH_ORDERED = ("isomorphic_strings", "knight_swap", "ransom_note", "word_ladder")
RUNS_TEXT = "executes an answer as Python code, which may be any program. Fix: set grader: FILE.FUNCTION"
# Generators that are rejected, and why.
REFUSED_GENERATORS = dict.fromkeys(
    ("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication",
     "puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
    RUNS_TEXT,
) | {
    "codeio": "runs programs of its dataset in the run directory. Fix: use another generator",
    "list_functions": "draws from an unseeded random state, so a run cannot be resumed. Fix: use another generator",
    "propositional_logic": "rewards a copy of a premise. Fix: set grader: FILE.FUNCTION",
}  # fmt: skip
_NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:e[+-]?\d+)?|-?\.\d+", re.IGNORECASE)


def _same_text(gold: str, answer: str) -> bool:
    return gold.casefold().split() == answer.casefold().split()


def _same_numbers(gold: str, answer: str, digits: int = 15, slack: float = 0.0) -> bool:
    """Tells whether two texts have equal numbers in order, to `digits` digits or within `slack`."""
    right, given = ([Decimal(number) for number in _NUMBER.findall(text)] for text in (gold, answer))
    return len(right) == len(given) and all(
        abs(a - b) <= max(Decimal(5).scaleb(a.adjusted() - digits), Decimal(slack))
        for a, b in zip(right, given, strict=True)
    )


# Additional checks where a generator gives its full score to wrong answers: (gold, answer) -> bool.
EXTRA_RULES: dict[str, Callable[[str, str], bool]] = {
    "coin_flip": lambda gold, answer: _same_numbers(gold, str(float(Fraction(answer))), digits=4),
    # The generator accepts "nan"; a complex number has no letters but e, i and j.
    "complex_arithmetic": lambda gold, answer: not re.search(r"[a-df-hk-z]", answer.casefold()),
    "decimal_arithmetic": lambda gold, answer: _same_numbers(gold, answer, digits=12),
    "fraction_simplification": _same_numbers,
    "game_of_life_halting": _same_text,
    "gsm_symbolic": lambda gold, answer: _same_numbers(gold, answer) and not re.search(r"[^\W\d]|[!%]", answer),
    "letter_jumble": _same_text,
    "number_format": lambda gold, answer: _same_numbers(gold, answer.replace(",", "")),
    "number_sorting": _same_numbers,
    "polynomial_equations": lambda gold, answer: answer.count(",") == gold.count(","),
    "pool_matrix": lambda gold, answer: _same_numbers(gold, answer, slack=0.0051),  # two decimals
    "spell_backward": _same_text,
    "word_sorting": lambda gold, answer: answer.count(",") == gold.count(","),
}


class ReasoningGym:
    """A task over one or more generators of reasoning-gym.

    The answer in a text is the part between the last `<answer>` and `</answer>` after a closed
    thought; without these marks, the whole text after the thought. The generator scores it from 0
    to 1. Many generators give partial credit to a long text that contains the answer.

    Args:
        generators: a name, several names with equal probability ([gcd, lcm]), or {name: options}.
            Option `weight` is the relative probability (1); the generator gets the others.
        seed: seed of the questions. Question i depends on (generators, seed, first + i, split).
        count: number of questions; None: endless.
        first: index of the first question.
        split: "train" or "heldout" (one question in eight). The hash of a question selects its
            split, so the splits never overlap.
        prompt: the user's message, in which {question} stands for the question.
        system: a system message before the prompt.
        reward: "solved": 1 for the generator's full score, else 0; "credit": its score.
        grader: dotted path of a function (problem, text) that replaces `grade`. `problem.example`
            is the generator's entry.

    Raises:
        UsageError: reasoning-gym is not installed, or a generator or its options are invalid.
    """

    checks_reference_answers = True

    def __init__(
        self,
        generators: str | Sequence[str] | Mapping[str, Mapping[str, Any]],
        seed: int = 0,
        count: int | None = None,
        first: int = 0,
        split: str = "train",
        prompt: str = "{question}\nGive only the final answer.",
        system: str | None = None,
        reward: str = "solved",
        grader: str | GradeFunction | None = None,
    ) -> None:
        require_choice("split", split, SPLITS)
        require_choice("reward", reward, REWARD_MODES)
        require_question(prompt)
        self.seed, self.first, self.split, self.prompt, self.system, self.reward = (
            seed, first, split, prompt, system, reward,
        )  # fmt: skip
        self.length = task_length(first, count)
        self.weights, self.options = _parse_generators(generators, graded=grader is not None)
        use_graders(self, grader, None)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Problem:
        require_index(index, self.length, "question")
        number = self.first + index
        (name,) = random.Random(f"{self.seed}/{number}").choices(list(self.weights), list(self.weights.values()))
        block, place = divmod(number, BLOCK_SIZE)
        # A question of the wrong split is replaced by the question at the same position of another
        # instance, whose seed contains the draw. So a problem does not depend on earlier problems.
        for draw in range(MAX_DRAWS):
            entry = self.generator(name, f"{self.seed}/{block}/{draw}")[place]
            # For an empty reference answer, some generators reward every text, others none.
            if is_held_out(entry["question"]) == (self.split == "heldout") and str(entry["answer"]).strip():
                break
        else:
            raise UsageError(
                f"generators.{name}: none of {MAX_DRAWS} questions is in split={self.split!r}: it has only a few different "
                "questions. Fix: set larger sizes"
            )
        question = {"role": "user", "content": self.prompt.replace("{question}", entry["question"])}
        before = () if self.system is None else ({"role": "system", "content": self.system},)
        # The problem stores its options, because a curriculum may have changed them before grading.
        example = {"generator": name, "options": self.options[name], **entry}
        return Problem(f"{name}-{self.split}-{self.seed}-{number:06d}", (*before, question), entry["answer"], example)

    def grade(self, problem: Problem, text: str) -> Score:
        """Grades a text.

        Parts: "solved" (1.0 for the full score), "credit" (the generator's score), and with several
        generators "solved_NAME".
        """
        name = problem.example["generator"]
        answer = extract_answer(strip_thinking(text))
        # Generators parse answers, and some raise an error for an unreadable answer.
        try:
            # The score depends only on the entry, so any instance will do.
            judge = _generator(name, json.dumps(problem.example["options"], sort_keys=True), "0")
            credit = float(judge.score_answer(answer, dict(problem.example))) if answer else 0.0
            if credit >= SOLVED_SCORE and name in EXTRA_RULES and not EXTRA_RULES[name](str(problem.answer), answer):
                credit = 0.0
        except Exception as error:  # noqa: BLE001 (a text of the policy must not make `grade` raise)
            return self._score(name, 0.0, f"{type(error).__name__}: {error}")
        return self._score(name, min(max(credit, 0.0), 1.0), "")

    def _score(self, name: str, credit: float, note: str) -> Score:
        solved = float(credit >= SOLVED_SCORE)
        reward = solved if self.reward == "solved" else credit
        several = {f"solved_{name}": solved} if len(self.weights) > 1 else {}
        return Score(reward, {"solved": solved, "credit": credit} | several, note)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A grading process creates the generators (seconds) here, not at its first text.
        for name in self.options:
            self.generator(name, "0")

    def solution(self, problem: Problem) -> str:
        """Returns the reference answer. Raises UsageError if the generator only scores answers."""
        if problem.answer is None:
            raise UsageError(
                f"{problem.id} has no reference answer: its generator only scores answers. Fix: remove it from the warm-up"
            )
        return str(problem.answer)

    def generator(self, name: str, seed: str) -> Any:
        """Returns an instance of a generator. `seed` is any string."""
        return _generator(name, json.dumps(self.options[name], sort_keys=True), seed)


class ReasoningGymCurriculum(ReasoningGym):
    """`ReasoningGym` with sizes that grow by reasoning-gym's curricula.

    Each generator starts at level 0 of every size in its curriculum, regardless of its options. Its
    level rises if at least `raise_at` of the samples of its newest 32 groups at it are solved.

    Args:
        generators: see `ReasoningGym`.
        raise_at: fraction of solved samples at which the level of a generator rises.
        **rest: further arguments of `ReasoningGym`.

    Raises:
        UsageError: as `ReasoningGym`; or a generator has no curriculum.
    """

    def __init__(self, generators: Any, raise_at: float = 0.7, **rest: Any) -> None:
        super().__init__(generators, **rest)
        if not 0.0 < raise_at <= 1.0:
            raise UsageError(f"raise_at={raise_at}: expected a fraction of solved samples, above 0 and at most 1")
        self.raise_at = raise_at
        self.base_options, self.levels = dict(self.options), dict.fromkeys(self.options, 0)
        # Generator -> the solved fraction of each of its newest groups at its current level.
        self.recent_shares: dict[str, list[float]] = {name: [] for name in self.options}
        for name in self.options:
            self._set_level(name, 0)

    def ask(self, index: int, cursor: int) -> Problem:
        """Returns the problem at the current level of its generator."""
        return self[index]

    def __getitem__(self, index: int) -> Problem:
        # The id holds the level of the problem, for `observe`.
        problem = super().__getitem__(index)
        return replace(problem, id=f"{problem.id}-level{self.levels[problem.example['generator']]}")

    def observe(self, step: int, groups: Sequence[GradedGroup], folder: Path) -> dict[str, float]:
        """Raises levels, and returns the level of each generator."""
        for problem, samples in groups:
            name, scores = problem.id.split("-")[0], [score for _, score, _ in samples if score is not None]
            # A group from before the last level change says nothing about the new level.
            if scores and problem.id.endswith(f"-level{self.levels[name]}"):
                shares = self.recent_shares[name]
                shares.append(
                    sum(score.parts.get("solved", score.reward) >= SOLVED_SCORE for score in scores) / len(scores)
                )
                del shares[:-CURRICULUM_WINDOW]
                if len(shares) == CURRICULUM_WINDOW and sum(shares) / CURRICULUM_WINDOW >= self.raise_at:
                    self._set_level(name, self.levels[name] + 1)
        return {f"curriculum/{name}": float(level) for name, level in self.levels.items()}

    def state_dict(self) -> dict[str, Any]:
        newest = {name: list(shares) for name, shares in self.recent_shares.items()}
        return {"levels": dict(self.levels), "newest": newest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state["levels"]) != set(self.levels):
            raise UsageError(
                f"task.generators: the checkpoint has {', '.join(state['levels'])}. Fix: set the same generators, or start a "
                "new run in another output_dir"
            )
        for name, level in state["levels"].items():
            self._set_level(name, level)
        self.recent_shares = {name: list(shares) for name, shares in state["newest"].items()}

    def _set_level(self, name: str, level: int) -> None:
        """Sets the sizes of a generator to a level of its curriculum."""
        from reasoning_gym.factory import create_curriculum, has_curriculum

        if not has_curriculum(name):
            raise UsageError(
                f"generators.{name} has no curriculum. Fix: set task._component_ to ReasoningGym, or remove the generator"
            )
        curriculum = create_curriculum(name)
        # The last level is kept.
        level = min(level, max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1)
        curriculum.set_global_level(level)
        config = curriculum.generate_configuration(dict(self.base_options[name]))
        # Only the fields that the curriculum changes are copied, since the config also has a seed
        # and a size. An attribute names one field, or two: the smallest and the largest size.
        attributes = map(vars, curriculum.attributes.values())
        changed = [field for fields in attributes for key, field in fields.items() if key.endswith("field_name")]
        self.options[name] = {**self.base_options[name], **{field: getattr(config, field) for field in changed}}
        self.levels[name], self.recent_shares[name] = level, []


def extract_answer(text: str) -> str:
    """Returns the text between the last `<answer>` and `</answer>`, else the whole text."""
    # A regular expression for a pair of marks would take quadratic time for many unclosed marks.
    closed = [piece for piece in text.split("</answer>")[:-1] if "<answer>" in piece]
    return (closed[-1].rpartition("<answer>")[2] if closed else text).strip()


# Problems are not stored: each is generated again from its index, and neighbors share an instance.
@lru_cache(maxsize=64)
def _generator(name: str, options: str, seed: str) -> Any:
    # The options are a JSON string because the cache must hash them.
    from reasoning_gym import create_dataset

    return create_dataset(name, **json.loads(options), seed=random.Random(seed).getrandbits(31), size=BLOCK_SIZE)


def _raise_unknown(error_text: str, name: object, known: Sequence[str], fix: str) -> NoReturn:
    near = closest_match(str(name), known)
    raise UsageError(f"{error_text}; {f'did you mean {near!r}?' if near else fix}")


def _parse_generators(generators: Any, graded: bool) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """Checks the generators, and returns the weight and the options of each."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UsageError('reasoning-gym is not installed: pip install "torchtune-ext[gym]"') from None
    if isinstance(generators, str):
        generators = [generators]
    if not isinstance(generators, Mapping):
        generators = {name: {} for name in generators}
    if not generators:
        raise UsageError("generators is empty. Fix: name a generator, such as generators=[spell_backward]")
    weights, options = {}, {}
    for name, given in generators.items():
        # "composite" mixes other generators, as this class does.
        known = [name for name in DATASETS if name != "composite"]
        if name not in known:
            fix = "the README of reasoning-gym lists them"
            _raise_unknown(f"generators: unknown generator {name!r} of reasoning-gym", name, known, fix)
        if name in REFUSED_GENERATORS and not (graded and "grader: FILE.FUNCTION" in REFUSED_GENERATORS[name]):
            raise UsageError(f"generators.{name} {REFUSED_GENERATORS[name]}")
        if given is not None and not isinstance(given, Mapping):
            raise UsageError(f"generators.{name}={given!r}: expected a mapping of options ({{}} for defaults)")
        if name in HASH_ORDERED and not os.environ.get("PYTHONHASHSEED", "random").isdigit():
            raise UsageError(
                f"generators.{name} depends on Python's string hashes and yields other questions in every process, so a run "
                "cannot be resumed. Fix: set PYTHONHASHSEED=0 before the command, or use another generator"
            )
        rest = dict(given or {})
        weights[name], options[name] = rest.pop("weight", 1.0), rest
        taken = [field for field in DATASETS[name][1].__dataclass_fields__ if field not in ("seed", "size")]
        if unknown := [key for key in rest if key not in taken]:
            fix = f"expected {', '.join(['weight', *taken])}"
            _raise_unknown(f"generators.{name}: unknown option {unknown[0]!r}", unknown[0], taken, fix)
        if not isinstance(weights[name], int | float) or not weights[name] > 0:
            raise UsageError(f"generators.{name}.weight={weights[name]!r}: expected a number above 0")
        # Each generator checks its options differently, many by an assertion.
        try:
            _generator(name, json.dumps(rest, sort_keys=True), "0")
        except Exception as error:
            raise UsageError(
                f"generators.{name} rejects its options {rest}: {error or type(error).__name__}"
            ) from error
    return weights, options
