"""Problems -> graded groups: prompt ids, completions from the sampler, texts, outcomes."""

from collections.abc import Callable, Sequence

import numpy as np

from torchtune_ext.advantages import Group, Sample
from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading import Grader
from torchtune_ext.sampling.engine import Completion, Engine, SamplingConfig
from torchtune_ext.tasks.task import Problem


def sample_groups(
    problems: Sequence[Problem],
    samples_per_prompt: int,
    sampling: SamplingConfig,
    engine: Engine,
    tokenizer: ChatTokenizer,
    grader: Grader,
    on_completion: Callable[[int, int, Completion], None] | None = None,
) -> list[Group]:
    """Samples and grades `samples_per_prompt` completions of every problem.

    Args:
        on_completion: called with (problem index, sample index, completion) as each one arrives.

    Returns:
        One group per problem, in order, without advantages.
    """
    prompts = [tokenizer.prompt_ids(list(problem.messages)) for problem in problems]
    completions = engine.sample(prompts, samples_per_prompt, sampling, on_completion=on_completion)
    texts = [[tokenizer.decode(c.tokens.tolist()) for c in group] for group in completions]
    jobs = [(problem, text) for problem, group in zip(problems, texts, strict=True) for text in group]
    outcomes = iter(grader.grade(jobs))
    return [
        Group(
            problem=problem,
            prompt_tokens=np.asarray(prompt, dtype=np.int32),
            samples=tuple(
                Sample(c.tokens, c.logprobs, c.versions, text, c.finish_reason, next(outcomes))
                for c, text in zip(group, group_texts, strict=True)
            ),
        )
        for problem, prompt, group, group_texts in zip(problems, prompts, completions, texts, strict=True)
    ]
