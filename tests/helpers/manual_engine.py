"""An engine whose completions the test releases, and problems for it."""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from helpers.letter_tokens import LetterTokenizer, completion
from torchtune_ext.pipeline.source import sampling_seed
from torchtune_ext.tasks.task import Problem, Score

SEED, PROBLEMS, SAMPLES = 3, 100, 2
# Seed -> (step, refill round).
SEED_ORIGINS = {sampling_seed(SEED, step, refill): (step, refill) for step in range(200) for refill in range(16)}


class NumberedTask:
    """Problem i has the id i and the prompt i. The reward is the length of the text; some texts fail in grading or take long."""

    def __len__(self):
        return PROBLEMS

    def __getitem__(self, index):
        return Problem(str(index), ({"role": "user", "content": str(index)},), index)

    def grade(self, problem, text):
        if text == "broken":
            raise ValueError("a broken text")
        time.sleep(60.0 if text == "long" else 0.0)
        return Score(float(len(text)), {})


@dataclass
class GroupRequest:
    """A requested group. `step` and `refill` come from its seed."""

    problem: str
    step: int
    refill: int
    seed_index: int
    on_completion: object = field(compare=False)
    future: Future = field(compare=False, default_factory=Future)

    def complete(self, *texts):
        for sample, text in enumerate(texts or ["xx"] * SAMPLES):
            self.on_completion(sample, completion(text))
        self.future.set_result([])


class ManualEngine:
    """An engine that completes requests when the test says so, or, with `completes_immediately`, immediately."""

    def __init__(self, completes_immediately=False):
        self.requests, self.completes_immediately = [], completes_immediately

    def submit(self, prompt, n, sampling, on_completion, group, priority, affinity_key=None):
        assert n == SAMPLES and sampling.max_tokens == 8
        step, refill = SEED_ORIGINS[sampling.seed]
        self.requests.append(GroupRequest(LetterTokenizer().decode(prompt), step, refill, group, on_completion))
        if self.completes_immediately:
            self.requests[-1].complete()
        return self.requests[-1].future
