"""A group between its submission to the engine and its last grade."""

import time
from concurrent.futures import Future

import numpy as np

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading import Outcome
from torchtune_ext.groups import Group, GroupKey, Sample
from torchtune_ext.sampling.records import Completion
from torchtune_ext.tasks.task import Problem


class Unfinished:
    """A group on its way: its completions arrive, then their outcomes, each in any order."""

    def __init__(self, key: GroupKey, problem: Problem, tokenizer: ChatTokenizer, samples: int):
        self.key, self.problem, self._decode = key, problem, tokenizer.decode
        self.prompt = tokenizer.prompt_ids(list(problem.messages))
        self._opened = tokenizer.opened_thought(self.prompt)
        self._completions: list[Completion | None] = [None] * samples
        self.texts = [""] * samples
        self.outcomes: list[Outcome | None] = [None] * samples
        self.futures: list[Future] = []  # of the engine, of the grader
        self.submitted = time.monotonic()
        self.drawn = False  # the engine is done with it
        self.cancelled = False

    def add(self, sample: int, completion: Completion) -> str:
        """Takes a completion and returns its text."""
        self._completions[sample] = completion
        self.texts[sample] = self._opened + self._decode(completion.tokens.tolist())
        return self.texts[sample]

    def cancel(self) -> None:
        self.cancelled = True
        for future in list(self.futures):
            future.cancel()

    @property
    def arrived(self) -> bool:
        """Tells whether all completions are there."""
        return all(completion is not None for completion in self._completions)

    @property
    def arrived_so_far(self) -> list[tuple[Completion | None, Outcome | None]]:
        """The completion and the outcome of each sample, as far as they are there."""
        return list(zip(self._completions, self.outcomes, strict=True))

    @property
    def graded(self) -> bool:
        return all(outcome is not None for outcome in self.outcomes)

    @property
    def tokens(self) -> int:
        """The tokens of the completions that are there."""
        return sum(len(completion.tokens) for completion in self._completions if completion is not None)

    @property
    def number(self) -> int:
        return self.key[1]

    @property
    def versions(self) -> list[int]:
        """The lowest and the highest version that sampled a token of the completions that are there."""
        found = [completion.versions for completion in self._completions if completion is not None]
        found = np.concatenate(found) if found else np.zeros(0)
        return [int(found.min()), int(found.max())] if len(found) else []

    @property
    def missing(self) -> str:
        since = f"submitted {time.monotonic() - self.submitted:.0f} s ago"
        samples = len(self.outcomes)
        undrawn, ungraded = self._completions.count(None), self.outcomes.count(None)
        if undrawn:
            return f"{since}, the engine has not ended {undrawn} of {samples} completions"
        return f"{since}, {ungraded} of {samples} texts are not graded"

    def finish(self) -> Group:
        found = zip(self._completions, self.texts, self.outcomes, strict=True)
        samples = tuple(Sample(completion, text=text, outcome=outcome) for completion, text, outcome in found)
        return Group(self.problem, np.asarray(self.prompt, dtype=np.int32), samples)
