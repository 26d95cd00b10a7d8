"""Mathematics with verifiable answers, from public datasets or a user's file. See `MathGrader`."""

import logging
import re
from collections.abc import Sequence
from dataclasses import replace

from torchtune_ext.run.errors import UsageError
from torchtune_ext.tasks.answers import MathGrader, gold_answer, last_box, readable
from torchtune_ext.tasks.grade_functions import GradeFunction, GroupGradeFunction
from torchtune_ext.tasks.jsonl import ExampleSource, QuestionTask, require_one
from torchtune_ext.tasks.task import Problem, Score

log = logging.getLogger(__name__)

PROMPT = "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
# The answer format that a prompt asks for.
ANSWER_MARK = re.compile(r"\\boxed|\\fbox|####|\banswer\b[*_\s]*(?:is|:)", re.IGNORECASE)
# Reference answers that are parsed at the start; each takes some milliseconds.
MAX_ANSWERS_READ = 1000

# Licenses stated on the pages of the hub: MIT for gsm8k, deepmath and svamp; Apache-2.0 for
# aime2023 and the original of dapo_math_17k. The pages of math500 (taken from MATH, which is MIT),
# aime2024 and aime2025 do not state a license.
DATASETS = {
    # Cobbe et al., arXiv 2110.14168. Solutions have calculator marks, "48/2 = <<48/2=24>>24".
    "gsm8k": ExampleSource("openai/gsm8k", "main", "train", solution="answer", strip_pattern=r"<<[^<>\n]*>>|\s*####[^\n]*\s*$"),
    "math500": ExampleSource("HuggingFaceH4/MATH-500", None, "test", question="problem", solution="solution"),
    "deepmath": ExampleSource("zwhe99/DeepMath-103K", answer="final_answer"),
    # This copy omits the 1.79 million duplicates of BytedTsinghua-SIA/DAPO-Math-17k.
    "dapo_math_17k": ExampleSource(
        "open-r1/DAPO-Math-17k-Processed", "en", question="prompt", answer="solution",
        remove_texts=(
            "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
            "$Answer (without quotes) where $Answer is the answer to the problem.",
            'Remember to put your answer on its own line after "Answer:".',
        ),
    ),
    "aime2023": ExampleSource(
        "AI-MO/aimo-validation-aime", question="problem", solution="solution", keep_if=("url", "2023_AIME")
    ),
    "aime2024": ExampleSource("HuggingFaceH4/aime_2024", question="problem", solution="solution"),
    "aime2025": ExampleSource("math-ai/aime25", split="test", question="problem"),
    "svamp": ExampleSource("ChilleD/SVAMP", question="{Body} {Question}", answer="Answer"),
}  # fmt: skip


class Math(QuestionTask):
    r"""A task of mathematics. The reward is 1 for the right answer, else 0.

    This is the accuracy reward of DeepSeek-R1 (arXiv 2501.12948, section 2.2.2). `format_reward` and
    `grader` change it.

    Args:
        dataset: a public dataset: gsm8k, math500, deepmath, dapo_math_17k, aime2023, aime2024,
            aime2025 or svamp. It sets the id, the split and the fields. The other arguments
            override these, so `path` reads a local copy.
        path, hub, config, split, question, solution, prompt, system, count, first: see `Jsonl`.
        answer: field of a number, an answer, or a solution that ends with the answer.
        require_box, require_thinking, brackets, format, format_reward: see `MathGrader`.
        unmarked: see `MathGrader`. The default is "none" if `prompt` or `system` asks for a mark
            (\boxed, ####, "answer is"), else "last_number".
        grader, group_grader: see `Jsonl`. A function replaces `MathGrader`.
        fields: see `Jsonl`. Without a function, `problem.example` is empty.

    Raises:
        UsageError: as `Jsonl` and `MathGrader`; arguments are mutually exclusive; or examples have
            no usable reference answer (the message counts them and lists the first).
    """

    def __init__(
        self,
        dataset: str | None = None,
        path: str | None = None,
        hub: str | None = None,
        config: str | None = None,
        split: str | None = None,
        question: str | None = None,
        answer: str | None = None,
        solution: str | None = None,
        prompt: str = PROMPT,
        system: str | None = None,
        count: int | None = None,
        first: int = 0,
        require_box: bool = False,
        require_thinking: bool = False,
        brackets: bool = False,
        format: str = "box",
        format_reward: float = 0.0,
        unmarked: str | None = None,
        grader: str | GradeFunction | None = None,
        group_grader: str | GroupGradeFunction | None = None,
        fields: Sequence[str] | None = None,
    ) -> None:
        if dataset is not None and dataset not in DATASETS:
            raise UsageError(
                f"dataset={dataset!r}: unknown. Fix: choose one of {', '.join(DATASETS)}, or set path: or hub:"
            )
        require_one(hub=hub, path=path)
        require_one(dataset=dataset, hub=hub)
        named = {
            "path": path, "hub": hub, "config": config, "split": split, "question": question, "answer": answer,
            "solution": solution,
        }  # fmt: skip
        source = DATASETS[dataset] if dataset else ExampleSource()
        source = replace(source, **{key: value for key, value in named.items() if value is not None})
        self.strip_pattern = source.strip_pattern
        if unmarked is None:
            unmarked = "none" if ANSWER_MARK.search(f"{prompt} {system}") else "last_number"
        self.math_grader = MathGrader(require_box, require_thinking, brackets, format, format_reward, unmarked)
        prefix = f"{dataset}-" if dataset else ""
        if grader is None and group_grader is None:
            # `MathGrader` reads only the answer, and some examples have many kilobytes.
            fields = ()
        super().__init__(source, prompt, system, count, first, prefix, grader, group_grader, fields)
        self._read_answers()

    def _read_answers(self) -> None:
        # Dropping an example without a usable answer would silently change the dataset.
        bad, examples = [], []
        for index, (question, value, example) in enumerate(self.examples):
            try:
                examples.append((question, gold_answer(value), example))
            except ValueError as error:
                bad.append(f"{self[index].id} {error}")
        if bad:
            raise UsageError(
                f"{self.name}: {len(bad)} of {len(self.examples)} reference answers cannot be used: {'; '.join(bad[:3])}. "
                "Fix: repair or remove these examples, or set answer: to another field"
            )
        self.examples = examples
        looked_at = [self[index] for index in range(min(len(examples), MAX_ANSWERS_READ))]
        unread = [problem.id for problem in looked_at if not readable(problem.answer)]
        if unread:
            log.warning(
                "%s: %d of the first %d reference answers cannot be parsed as mathematics and are compared as text: %s",
                self.name, len(unread), len(looked_at), ", ".join(unread[:5]),
            )  # fmt: skip

    def grade(self, problem: Problem, text: str) -> Score:
        """Grades a text by `MathGrader`. A formula copied from the question is not an answer."""
        asked = [message["content"] for message in problem.messages if message["role"] == "user"]
        return self.math_grader(problem.answer, text, asked[-1] if asked else "")

    def solution(self, problem: Problem) -> str:
        """Returns the worked solution, if the dataset has one, and the answer in a box."""
        # Marks such as <<48/2=24>> are calculator calls, which the policy cannot make.
        worked = "" if self.worked_solutions is None else str(self.worked_solutions[self.index_of(problem)])
        worked = re.sub(self.strip_pattern, "", worked).strip() if self.strip_pattern else worked.strip()
        box = f"The answer is $\\boxed{{{problem.answer}}}$."
        # If the grader expects a thought, the worked solution is written as a thought.
        if self.math_grader.require_thinking or self.math_grader.format == "think":
            return f"<think>\n{worked}\n</think>\n\n{box}"
        return worked if last_box(worked) == problem.answer else f"{worked}\n\n{box}".lstrip()
