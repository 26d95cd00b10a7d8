"""Problems -> graded groups: prompt ids, completions from the sampler, texts, outcomes."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Protocol

import numpy as np

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading import Grader, Outcome, log_failures, results
from torchtune_ext.groups import Group, Sample
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
    watch: Callable[[str], AbstractContextManager] = nullcontext,
) -> list[Group]:
    """Samples `samples_per_prompt` completions of every problem and grades each while others are still sampled, or, with a
    grader that compares, each group when it is whole.

    A grader reads the assistant's turn: where the prompt ends in an open "<think>", the text begins with it. `watch` gives a
    context for "generate", while the engine samples, and one for "grade", while only grades are waited for.

    Returns:
        One group per problem, in order, without advantages.
    """
    prompts = [tokenizer.prompt_ids(list(problem.messages)) for problem in problems]
    opened = [tokenizer.opened_thought(prompt) for prompt in prompts]
    arrived: SimpleQueue[tuple[int, int, Completion] | None] = SimpleQueue()  # None: there will be no more
    texts: dict[tuple[int, int], str] = {}
    grades: dict[tuple[int, int], Future[Outcome]] = {}
    together: dict[int, Future[list[Outcome]]] = {}  # by problem, of a grader that compares

    def on_completion(problem: int, sample: int, completion: Completion) -> None:
        arrived.put((problem, sample, completion))
        if watcher is not None:
            watcher.on_completion(problem, sample, completion)

    def hand_in() -> None:
        """Decodes what arrives and hands it to the grader: a text at a time, or a group when it is whole."""
        waiting = [samples_per_prompt] * len(problems)
        while (item := arrived.get()) is not None:
            p, s, completion = item
            texts[p, s] = opened[p] + tokenizer.decode(completion.tokens.tolist())
            waiting[p] -= 1
            if not grader.compares:
                grades[p, s] = grader.submit(problems[p], texts[p, s])
                grades[p, s].add_done_callback(show)
            elif not waiting[p]:
                together[p] = grader.submit_group(problems[p], [texts[p, i] for i in range(samples_per_prompt)])
                together[p].add_done_callback(show)

    def show(future: Future) -> None:
        if watcher is None or future.cancelled() or future.exception() is not None:
            return
        found = future.result()
        for outcome in found if isinstance(found, list) else [found]:
            if outcome.score is not None:
                watcher.add_reward(outcome.score.reward)

    try:
        with ThreadPoolExecutor(1, thread_name_prefix="decoding") as thread:
            try:
                decoding = thread.submit(hand_in)
                with watch("generate"):
                    completions = engine.sample(prompts, samples_per_prompt, sampling, on_completion)
            finally:
                # Also when Ctrl-C comes while the thread is being started, which then waits all the same.
                arrived.put(None)
            with watch("grade"):
                decoding.result()
                outcomes = _outcomes(grades, together)
    except BaseException:
        for future in (*grades.values(), *together.values()):
            future.cancel()  # the grader's next texts do not wait behind those that nobody wants any more
        raise
    log_failures(list(outcomes.values()))
    return [
        Group(
            problem=problem,
            prompt_tokens=np.asarray(prompt, dtype=np.int32),
            samples=tuple(
                Sample(completion, text=texts[p, s], outcome=outcomes[p, s]) for s, completion in enumerate(group)
            ),
        )
        for p, (problem, prompt, group) in enumerate(zip(problems, prompts, completions, strict=True))
    ]


def _outcomes(
    grades: dict[tuple[int, int], "Future[Outcome]"], together: dict[int, "Future[list[Outcome]]"]
) -> dict[tuple[int, int], Outcome]:
    """(problem, sample) -> outcome, when all are there: the grader has a deadline for each."""
    found = dict(zip(grades, results(list(grades.values())), strict=True))
    groups = zip(together, results(list(together.values())), strict=True)
    return found | {(p, s): outcome for p, outcomes in groups for s, outcome in enumerate(outcomes)}
