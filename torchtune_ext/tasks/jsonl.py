"""Questions with answers from a file or from the Hugging Face hub, and any function as the grader."""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torchtune_ext.tasks.examples import Example, field_names, fill, hub_examples, read_examples
from torchtune_ext.tasks.task import Problem, Score

GraderFunction = Callable[[Any, str], float | Score]  # (answer, text)


@dataclass(frozen=True, slots=True)
class Source:
    """Where examples come from and what their fields are called."""

    hub: str | None = None  # id of a data set of the hub, when there is no path
    config: str | None = None  # of the hub's data set
    split: str = "train"  # of the hub's data set
    path: str | None = None  # a .parquet file, or any other as JSONL
    question: str = "question"  # a field, "a.b.0" below others, or a template "{Body} {Question}"
    answer: str = "answer"  # the same
    solution: str | None = None  # a field with a worked solution
    keep: tuple[str, str] | None = None  # (field, text): only examples whose field holds the text
    remove: tuple[str, ...] = ()  # what is cut out of questions: the prompt of another project

    def examples(self) -> list[tuple[str, Example]]:
        """(place, example) of all that are kept. Raises ValueError: see `examples.py`."""
        if self.path is None and self.hub is None:
            raise ValueError("name where the questions come from: path: FILE (JSONL or parquet), or hub: OWNER/NAME")
        templates = [self.question, self.answer, self.solution or self.answer, (self.keep or (self.answer,))[0]]
        fields = {name.split(".")[0] for template in templates for name in field_names(template)}
        if self.path is not None:
            examples = read_examples(self.path, fields)
        else:
            examples = hub_examples(self.hub, self.config, self.split, fields)
        if self.keep is None:
            return list(examples)
        field, text = self.keep
        return [(where, example) for where, example in examples if text in str(fill(field, example, where))]


class Questions:
    """A task over examples: a question, its hidden answer, and perhaps a worked solution. `Jsonl` and `Math` fill it in.

    A grading process gets the task without its examples: what `grade` needs is in the problem.
    """

    def __init__(
        self,
        source: Source,
        grader: str | GraderFunction,
        prompt: str,
        system: str | None,
        count: int | None,
        first: int,
        prefix: str,
    ) -> None:
        if first < 0 or (count is not None and count < 1):
            raise ValueError(f"first={first}, count={count}: first counts from 0, count from 1")
        if "{question}" not in prompt:
            raise ValueError(f"prompt={prompt!r} shows no question: write {{question}} where it belongs")
        self.grader = by_path(grader) if isinstance(grader, str) else grader
        self.first, self.prompt, self.system = first, prompt, system
        where = source.path or f"{source.hub} {source.split}"
        hub_name = "" if prefix else f"{source.hub}-".rpartition("/")[2].lower()
        self.name = prefix + (Path(where).stem if source.path else hub_name + source.split)  # begins the ids
        examples = source.examples()
        chosen = list(islice(examples, first, None if count is None else first + count))
        if not chosen or len(chosen) < (count or 0):
            raise ValueError(f"{where}: {len(examples)} examples, too few for first={first}, count={count}")
        self.examples = [
            (_question(source, example, place), fill(source.answer, example, place)) for place, example in chosen
        ]
        self.worked = [fill(source.solution, example, place) for place, example in chosen] if source.solution else None

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < len(self.examples):
            raise IndexError(f"question {index} of {len(self.examples)}")
        question, answer = self.examples[index]
        message = {"role": "user", "content": self.prompt.replace("{question}", question)}
        before = () if self.system is None else ({"role": "system", "content": self.system},)
        return Problem(f"{self.name}-{self.first + index:06d}", (*before, message), answer)

    def grade(self, problem: Problem, text: str) -> Score:
        score = self.grader(problem.answer, text)
        return score if isinstance(score, Score) else Score(float(score), {})

    def solution(self, problem: Problem) -> str:
        """The worked solution, or without one the answer."""
        return str(problem.answer) if self.worked is None else str(self.worked[self.index_of(problem)])

    def index_of(self, problem: Problem) -> int:
        """Which of this task's problems it is."""
        return int(problem.id.rpartition("-")[2]) - self.first

    def __getstate__(self) -> dict:
        return self.__dict__ | {"examples": [], "worked": None}


class Jsonl(Questions):
    """The task. Every example is a question with a hidden answer; `grader` compares it with what the policy writes.

    Args:
        grader: dotted path of a function (answer, text) -> float or Score; in Python, the function itself.
        path: a JSONL file (one object a line) or a .parquet file.
        hub: id of a data set of the Hugging Face hub, in place of a path; `config` and `split` are the hub's.
        question: field of the question, "a.b.0" for one below others, or a template of several: "{Body} {Question}".
        answer: field of the answer, of any JSON type: the grader gets it as it is.
        solution: field of a text that scores 1.0, for the supervised warm-up; without it, the answer is that text.
        prompt: the user's message; {question} stands for the question.
        system: a system message before it.
        count: how many questions; None: all from `first` on.
        first: index of the first example, to keep training and held-out questions apart.

    Raises:
        ValueError: nothing to read, an example without one of the fields or with an empty question, fewer than `count`.
    """

    def __init__(
        self,
        grader: str | GraderFunction,
        path: str | None = None,
        hub: str | None = None,
        config: str | None = None,
        split: str = "train",
        question: str = "question",
        answer: str = "answer",
        solution: str | None = None,
        prompt: str = "{question}",
        system: str | None = None,
        count: int | None = None,
        first: int = 0,
    ) -> None:
        if hub is not None and path is not None:
            raise ValueError(f"hub={hub!r}, path={path!r}: give one of the two")
        source = Source(hub, config, split, path, question, answer, solution)
        super().__init__(source, grader, prompt, system, count, first, "")


def by_path(path: str) -> GraderFunction:
    """The function that a dotted path names; modules in the working directory are found, too."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"grader={path!r} cannot be imported ({error}); write MODULE.FUNCTION") from error
    if not callable(function):
        raise ValueError(
            f"grader={path!r} is a {type(function).__name__}; name a function (answer, text) -> float or Score"
        )
    return function


def _question(source: Source, example: Example, where: str) -> str:
    question = fill(source.question, example, where)
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where}: {source.question!r} is {question!r:.60}; write the text of the question")
    for text in source.remove:
        question = question.replace(text, "")
    return question.strip()
