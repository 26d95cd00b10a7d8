"""Task of questions and answers from a file or the Hugging Face hub, graded by any function."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from torchtune_ext.run.errors import UsageError
from torchtune_ext.tasks.agent_functions import Agent, find_agent
from torchtune_ext.tasks.examples import Example, field_names, field_value, fill_template, hub_examples, read_examples
from torchtune_ext.tasks.grade_functions import CombinedGrader, GradeFunction, GroupGradeFunction, use_graders
from torchtune_ext.tasks.task import Message, Problem, Score, require_index, require_question, task_length, to_score

# A field in a prompt. The braces of \boxed{answer} and x^{n} are LaTeX, not fields.
_FIELD = re.compile(r"(?<![\w\\}^])\{([A-Za-z_][\w.]*)\}")
# Chat messages that a CSV or parquet file stores as text.
_CHAT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:.*\]\s*""", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ExampleSource:
    """The source of examples, and the names of their fields."""

    hub: str | None = None  # id of a dataset of the hub, if `path` is None
    config: str | None = None  # config of the hub's dataset
    split: str = "train"  # split of the hub's dataset
    path: str | None = None  # a .parquet, .csv or .tsv file; any other file is read as JSONL
    question: str = "question"  # a field, "a.b.0" if nested, or a template "{Body} {Question}"
    answer: str | None = "answer"  # a field or a template, as in `question`; None: without answers
    solution: str | None = None  # a field with a worked solution
    # (field, text): keeps examples whose field contains the text.
    keep_if: tuple[str, str] | None = None
    # Texts to remove from questions, such as another project's prompt.
    remove_texts: tuple[str, ...] = ()
    # Regex to remove from worked solutions, such as calculator marks.
    strip_pattern: str | None = None

    def examples(
        self, extra_fields: Sequence[str] | None = (), optional: Sequence[str] = ()
    ) -> list[tuple[str, Example]]:
        """Returns (location, example) for every kept example.

        Args:
            extra_fields: further fields to read; None: all.
            optional: fields to read if they exist.

        Raises:
            UsageError: path and hub are both missing, or the examples cannot be read.
        """
        if self.path is None and self.hub is None:
            raise UsageError(
                "path and hub are both missing. Fix: set path: FILE (JSONL, CSV or parquet), or hub: OWNER/NAME"
            )
        # Columns are read as a whole, so a nested field is represented by the name of its column.
        fields = None
        if extra_fields is not None:
            templates = [self.question, self.answer, self.solution, self.keep_if and self.keep_if[0]]
            names = {name for template in templates if template for name in field_names(template)} | set(extra_fields)
            fields = {name.split(".")[0] for name in names}
        maybe = {name.split(".")[0] for name in optional}
        if self.path is not None:
            examples = read_examples(self.path, fields, maybe)
        else:
            assert self.hub is not None
            examples = hub_examples(self.hub, self.config, self.split, fields, maybe)
        if self.keep_if is None:
            return list(examples)
        field, text = self.keep_if
        return [(where, example) for where, example in examples if text in str(fill_template(field, example, where))]


def require_one(**given: str | None) -> None:
    """Raises UsageError if both of two arguments are set."""
    if None not in given.values():
        what = ", ".join(f"{key}={value!r}" for key, value in given.items())
        raise UsageError(f"{what}: mutually exclusive. Fix: give one of the two")


class QuestionTask:
    """The base of `Jsonl` and `Math`: questions with hidden answers and optional solutions."""

    checks_reference_answers = True

    def __init__(
        self,
        source: ExampleSource,
        prompt: str,
        system: str | None,
        count: int | None,
        first: int,
        prefix: str,
        grader: str | GradeFunction | None,
        group_grader: str | GroupGradeFunction | None,
        fields: Sequence[str] | None,
    ) -> None:
        length = task_length(first, count)
        require_question(prompt)
        if isinstance(fields, str):
            raise UsageError(f"fields={fields!r}: a string; expected a list. Fix: fields=[{fields}]")
        use_graders(self, grader, group_grader)
        self.first, self.prompt, self.system = first, prompt, system
        where = source.path or f"{source.hub} {source.split}"
        hub_name = "" if prefix else f"{source.hub}-".rpartition("/")[2].lower()
        # The ids of the problems start with this name.
        self.name = prefix + (Path(where).stem if source.path else hub_name + source.split)
        named = [name for name in _FIELD.findall(prompt) if name != "question"]
        examples = source.examples(fields, named)
        if examples and (known := [name for name in named if name.split(".")[0] in examples[0][1]]):
            fix = f"write it in the question, as in question='{{{source.question.strip('{}')}}} {{{known[0]}}}'"
            raise UsageError(
                f"prompt={prompt!r:.80}: unknown placeholder {{{known[0]}}}; expected {{question}} only. Fix: "
                + (fix if known[0] != source.answer else "remove the answer")
            )
        chosen = list(islice(examples, first, first + length))
        if not examples:
            kept = f" whose {source.keep_if[0]} contains {source.keep_if[1]!r}" if source.keep_if else ""
            raise UsageError(f"{where} has no example{kept}")
        if not chosen or len(chosen) < (count or 0):
            raise UsageError(
                f"{where}: too few examples ({len(examples)}) for first={first}, count={count}. Fix: lower them"
            )
        self.examples = []
        for place, example in chosen:
            question = _read_question(source, example, place)
            answer = None if source.answer is None else fill_template(source.answer, example, place, "answer")
            shown = example if fields is None else {name: field_value(name, example, place) for name in fields}
            self.examples.append((question, answer, shown))
        self.worked_solutions = (
            [fill_template(source.solution, example, place) for place, example in chosen] if source.solution else None
        )

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Problem:
        require_index(index, len(self.examples), "question")
        question, answer, example = self.examples[index]
        # `str.format` would fail on other braces of a prompt, as in \boxed{}.
        if isinstance(question, str):
            question = ({"role": "user", "content": self.prompt.replace("{question}", question)},)
        before = () if self.system is None else ({"role": "system", "content": self.system},)
        return Problem(f"{self.name}-{self.first + index:06d}", (*before, *question), answer, example)

    def solution(self, problem: Problem) -> str:
        """Returns the worked solution if the source has one, else the answer.

        Raises:
            UsageError: the problem has neither.
        """
        if self.worked_solutions is not None:
            return str(self.worked_solutions[self.index_of(problem)])
        if problem.answer is None:
            raise UsageError(
                f"{problem.id}: no reference answer or solution to train on. Fix: set solution: to a field with a right text"
            )
        return str(problem.answer)

    def index_of(self, problem: Problem) -> int:
        """Returns the index of a problem."""
        return int(problem.id.rpartition("-")[2]) - self.first

    def __getstate__(self) -> dict:
        # A grading process gets no examples: a problem holds everything that it needs.
        return self.__dict__ | {"examples": [], "worked_solutions": None}


class Jsonl(QuestionTask):
    """A task of questions with hidden answers, graded by the user's function.

    Args:
        grader: a function (problem, text) -> float or Score, or its dotted path.
        path: a JSONL file (one object per line), a .csv or .tsv file (names in its first line) or a
            .parquet file.
        hub: id of a dataset of the Hugging Face hub, instead of `path`.
        config: config of the hub's dataset.
        split: split of the hub's dataset.
        question: field of the question, "a.b.0" if nested, or a template: "{Body} {Question}". The
            field may hold chat messages: a list of {"role": ..., "content": ...}, or its JSON text,
            that ends with the user's message. They are then the prompt.
        answer: field of the answer ("a.b.0" if nested), of any JSON type. The function gets it unchanged as
            `problem.answer`. None: the examples have no answers.
        solution: field of a right text, for the SFT warm-up. Default: the answer.
        prompt: the user's message, in which {question} stands for the question.
        system: a system message before the prompt.
        count: number of questions; None: all, starting with `first`.
        first: index of the first example. It separates training and held-out questions.
        group_grader: instead of `grader`, a function (problem, texts) -> list of floats or Scores,
            one for each text. It gets all samples of a question in one call.
        fields: fields of the example that the function also gets, as `problem.example`; None: all.
        agent: instead of `grader`, dotted path of a function (problem, client) -> float or Score, which
            may be a coroutine function. It plays an episode through the endpoint `client.base_url`.
        command: instead of `agent`, a program and its arguments. It gets OPENAI_BASE_URL,
            OPENAI_API_KEY and OPENAI_MODEL, the problem as JSON on stdin, and prints its reward, or a
            JSON object with `reward`, as the last line.
        graders: instead of `grader`, several functions by name: {correct: my.f, short: my.g}. The reward
            is the sum, and each reward is a part (`advantage.parts`).

    Raises:
        UsageError: the source is missing or unreadable, an example lacks a field or has an empty
            question, there are fewer than `count` examples, or a function is not found.
    """

    grade_group: GroupGradeFunction  # set by `use_graders` if `group_grader` is given

    def __init__(
        self,
        grader: str | GradeFunction | None = None,
        path: str | None = None,
        hub: str | None = None,
        config: str | None = None,
        split: str = "train",
        question: str = "question",
        answer: str | None = "answer",
        solution: str | None = None,
        prompt: str = "{question}",
        system: str | None = None,
        count: int | None = None,
        first: int = 0,
        group_grader: str | GroupGradeFunction | None = None,
        fields: Sequence[str] | None = None,
        agent: str | Agent | None = None,
        command: Sequence[str] | None = None,
        graders: Mapping[str, str | GradeFunction] | None = None,
    ) -> None:
        given = {"grader": grader, "group_grader": group_grader, "agent": agent, "command": command, "graders": graders}
        given = {key: value for key, value in given.items() if value is not None}
        if not given and type(self).grade is Jsonl.grade:
            raise UsageError(
                "grader is missing. Fix: name a function f(problem, text), such as grader: my_reward.f for my_reward.py, or "
                "an agent f(problem, client)"
            )
        if ("agent" in given or "command" in given) and len(given) > 1:
            raise UsageError(
                f"{', '.join(given)}: mutually exclusive, since an agent returns the reward. Fix: keep one"
            )
        if graders is not None and len(given) > 1:
            raise UsageError(f"{', '.join(given)}: mutually exclusive. Fix: keep one")
        if agent is not None or command is not None:
            self.run_agent = find_agent(agent, command)
        require_one(hub=hub, path=path)
        source = ExampleSource(hub, config, split, path, question, answer, solution)
        grader = grader if graders is None else CombinedGrader(graders)
        super().__init__(source, prompt, system, count, first, "", grader, group_grader, fields)
        if prompt != "{question}" and not all(isinstance(question, str) for question, _, _ in self.examples):
            raise UsageError(
                f"prompt={prompt!r:.80}: the questions are chat messages, which are the whole prompt. Fix: remove prompt"
            )

    def grade(self, problem: Problem, text: str) -> Score:
        """Grades one text with the `group_grader`."""
        # A `grader` replaces this method (`use_graders`), so there is a `group_grader`.
        return to_score(self.grade_group(problem, [text])[0])


def _read_question(source: ExampleSource, example: Example, where: str) -> str | tuple[Message, ...]:
    question = fill_template(source.question, example, where, "question")
    if isinstance(question, str) and _CHAT.fullmatch(question):
        try:
            question = json.loads(question)
        except ValueError as error:
            raise UsageError(
                f"{where}: {source.question!r} looks like chat messages, but is not JSON ({error}). Fix: use json.dumps"
            ) from error
    if isinstance(question, list) and question and all(isinstance(message, Mapping) for message in question):
        last = question[-1].get("role")
        if last != "user":
            raise UsageError(
                f"{where}: the last message of {source.question!r} has role {last!r}; expected 'user'. Fix: end a question "
                "with the user's message, and store the reference answer in a separate field (answer)"
            )
        if not all(isinstance(message.get("content"), str) for message in question):
            raise UsageError(
                f"{where}: a message of {source.question!r} has no string as its content. Fix: write a string for each"
            )
        return tuple(question)
    if not isinstance(question, str) or not question.strip():
        raise UsageError(f"{where}: {source.question!r} is {question!r:.60}. Fix: write the text of the question")
    for text in source.remove_texts:
        question = question.replace(text, "")
    return question.strip()
