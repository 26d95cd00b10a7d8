"""A task whose questions and answers come from a file or from the Hugging Face hub, with any function as the grader."""

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
    """The place that examples come from, and the names of their fields."""

    hub: str | None = None  # id of a data set of the hub, when there is no path
    config: str | None = None  # config of the data set of the hub
    split: str = "train"  # split of the data set of the hub
    path: str | None = None  # a .parquet file, or any other file, which is read as JSONL
    question: str = "question"  # a field, "a.b.0" for a field below others, or a template "{Body} {Question}"
    answer: str = "answer"  # a field or a template, as in `question`
    solution: str | None = None  # a field with a worked solution
    keep: tuple[str, str] | None = None  # (field, text): only examples whose field contains the text are kept
    remove: tuple[str, ...] = ()  # texts that are removed from questions, such as the prompt of another project

    def examples(self) -> list[tuple[str, Example]]:
        """Returns the place and the content of all examples that are kept.

        Raises:
            ValueError: there is neither a path nor a hub, or the examples cannot be read (see `examples.py`).
        """
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
    """A task over examples, each with a question, its hidden answer, and perhaps a worked solution.

    `Jsonl` and `Math` derive from it. A grading process gets the task without its examples, because the problem holds
    all that `grade` needs.
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
        # The ids of the problems begin with this name.
        self.name = prefix + (Path(where).stem if source.path else hub_name + source.split)
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
        """Grades a text with the grader of the task. A plain number becomes a score without parts."""
        score = self.grader(problem.answer, text)
        return score if isinstance(score, Score) else Score(float(score), {})

    def solution(self, problem: Problem) -> str:
        """Returns the worked solution, or the answer where there is none."""
        return str(problem.answer) if self.worked is None else str(self.worked[self.index_of(problem)])

    def index_of(self, problem: Problem) -> int:
        """Returns the index of a problem of this task."""
        return int(problem.id.rpartition("-")[2]) - self.first

    def __getstate__(self) -> dict:
        return self.__dict__ | {"examples": [], "worked": None}


class Jsonl(Questions):
    """A task whose examples are questions with hidden answers. `grader` compares the answer with the policy's text.

    Args:
        grader: dotted path of a function (answer, text) -> float or Score; in Python, the function itself.
        path: a JSONL file (one object a line) or a .parquet file.
        hub: id of a data set of the Hugging Face hub, in place of a path.
        config: config of the data set of the hub.
        split: split of the data set of the hub.
        question: field of the question, "a.b.0" for a field below others, or a template: "{Body} {Question}".
        answer: field of the answer. It may have any JSON type; the grader gets it unchanged.
        solution: field of a text with reward 1.0, for the supervised warm-up. Without it the answer is used.
        prompt: the message of the user, in which {question} stands for the question.
        system: a system message before the message of the user.
        count: number of questions; None: all from `first` on.
        first: index of the first example. It keeps training and held-out questions apart.

    Raises:
        ValueError: there is nothing to read, an example lacks a field or has an empty question, or there are fewer than
            `count` examples.
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
    """Returns the function that a dotted path names. Modules in the working directory are found, too.

    Raises:
        ValueError: the function cannot be imported.
    """
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
