"""Problems -> graded groups: prompt ids, completions from the sampler, texts, outcomes."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np

from torchtune_ext.advantages import Group, Sample
from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading import Grader, Outcome
from torchtune_ext.sampling.engine import Completion, Engine, SamplingConfig
from torchtune_ext.tasks.task import Problem


class Watcher(Protocol):
    """Who wants to see samples as they come: a progress bar. Called from threads."""

    def on_completion(self, problem: int, sample: int, completion: Completion) -> None: ...

    def add_reward(self, reward: float) -> None: ...


def sample_groups(
    problems: Sequence[Problem],
    samples_per_prompt: int,
    sampling: SamplingConfig,
    engine: Engine,
    tokenizer: ChatTokenizer,
    grader: Grader,
    watcher: Watcher | None = None,
) -> list[Group]:
    """Samples `samples_per_prompt` completions of every problem and grades each while others are still sampled.

    A grader reads the assistant's turn: where the prompt ends in an open "<think>", the text begins with it.

    Returns:
        One group per problem, in order, without advantages.
    """
    prompts = [tokenizer.prompt_ids(list(problem.messages)) for problem in problems]
    opened = [tokenizer.opened_thought(prompt) for prompt in prompts]
    arrived: SimpleQueue[tuple[int, int, Completion] | None] = SimpleQueue()  # None: there will be no more
    graded: dict[tuple[int, int], tuple[str, Outcome]] = {}

    def on_completion(problem: int, sample: int, completion: Completion) -> None:
        arrived.put((problem, sample, completion))
        if watcher is not None:
            watcher.on_completion(problem, sample, completion)

    def grade() -> None:
        while batch := _waiting(arrived):
            texts = [opened[p] + tokenizer.decode(completion.tokens.tolist()) for p, _, completion in batch]
            outcomes = grader.grade([(problems[p], text) for (p, _, _), text in zip(batch, texts, strict=True)])
            for (p, s, _), text, outcome in zip(batch, texts, outcomes, strict=True):
                graded[p, s] = text, outcome
                if watcher is not None and outcome.score is not None:
                    watcher.add_reward(outcome.score.reward)

    with ThreadPoolExecutor(1, thread_name_prefix="grading") as thread:
        try:
            grading = thread.submit(grade)
            completions = engine.sample(prompts, samples_per_prompt, sampling, on_completion)
        finally:
            arrived.put(None)  # also when Ctrl-C comes while the thread is being started, which then waits all the same
        grading.result()  # the grader has a deadline for every text
    return [
        Group(
            problem=problem,
            prompt_tokens=np.asarray(prompt, dtype=np.int32),
            samples=tuple(
                Sample(c.tokens, c.logprobs, c.versions, graded[p, s][0], c.finish_reason, graded[p, s][1])
                for s, c in enumerate(group)
            ),
        )
        for p, (problem, prompt, group) in enumerate(zip(problems, prompts, completions, strict=True))
    ]


def _waiting(queue: SimpleQueue) -> list:
    """All that waits in the queue, at least one item; empty after None."""
    items = [queue.get()]
    try:
        while items[-1] is not None:
            items.append(queue.get_nowait())
    except Empty:
        return items
    if len(items) > 1:
        queue.put(None)  # for the next call
    return items[:-1]
