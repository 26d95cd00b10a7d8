"""GSM8K (Cobbe et al., arXiv 2110.14168): grade-school mathematics in words; 7,473 training, 1,319 test questions."""

import re

from torchtune_ext.run.errors import Mistake
from torchtune_ext.tasks.functions import Grade, GradeGroup
from torchtune_ext.tasks.math import PROMPT, Math

_CALCULATOR = re.compile(r"<<[^<>\n]*>>")  # marks for a calculator, as in "48/2 = <<48/2=24>>24"
_FINAL = re.compile(r"\s*####[^\n]*\s*$")


class GSM8K(Math):
    r"""The task GSM8K. The reward is 1 for the right number, else 0.

    The number may be in \boxed{}, or follow #### or "answer is".

    Args:
        split: "train" or "test" of `openai/gsm8k` on the Hugging Face hub.
        path: a local copy of one split, in place of the hub: JSONL or parquet with the fields question and answer.
        count, first, prompt, system: see `Jsonl`.
        require_box, require_thinking, format, format_reward: see `MathGrader`.
        grader, group_grader: see `Jsonl`. A function takes the place of `MathGrader`.
    """

    def __init__(
        self,
        split: str = "train",
        path: str | None = None,
        count: int | None = None,
        first: int = 0,
        prompt: str = PROMPT,
        system: str | None = None,
        require_box: bool = False,
        require_thinking: bool = False,
        format: str = "box",
        format_reward: float = 0.0,
        grader: str | Grade | None = None,
        group_grader: str | GradeGroup | None = None,
    ) -> None:
        if split not in ("train", "test"):
            raise Mistake(f"split={split!r}: GSM8K has 'train' and 'test'")
        super().__init__(
            "gsm8k", path, split=split, prompt=prompt, system=system, count=count, first=first, require_box=require_box,
            require_thinking=require_thinking, format=format, format_reward=format_reward,
            grader=grader, group_grader=group_grader,
        )  # fmt: skip

    def explained(self, worked: str) -> str:
        """Returns a worked solution without the marks for a calculator and without its last line, `#### 72`."""
        return _FINAL.sub("", _CALCULATOR.sub("", worked))
