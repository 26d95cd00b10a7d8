"""Completions that span weight syncs, and the log-prob errors of the tokens of each version."""

from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np

from helpers.waiting import wait_until
from torchtune_ext.sampling.engine import Completion, Engine, SamplingConfig

# Engine steps before each weight sync: every version samples at least this many tokens of each completion.
STEPS = 8


def flown(
    engine: Engine, prompts: list[list[int]], n: int, sampling: SamplingConfig, publications: list[Callable[[], None]]
) -> list[list[Completion]]:
    """Sample `n` completions of each prompt, publish weights meanwhile, and return the completions.

    Raises:
        AssertionError: a request completed before the last weight sync.
    """
    core, running = engine._pool.replicas[0].backend, []
    on_step = core.on_step
    core.on_step = lambda step: (running.append(step.running), on_step(step))
    try:
        futures = [engine.submit(prompt, n, sampling, seed_index=g) for g, prompt in enumerate(prompts)]
        wait_until(lambda: n * len(prompts) in running, 60)
        for publish in publications:
            begin = len(running)
            wait_until(lambda begin=begin: len(running) > begin + STEPS, 60)
            publish()
        assert not any(future.done() for future in futures), "requests completed before the last weight sync"
        return [future.result(timeout=120) for future in futures]
    finally:
        core.on_step = on_step


def spans(versions: Sequence[int]) -> dict[int, slice]:
    """Return version -> slice of its tokens. Raise AssertionError if a version comes after a newer one."""
    slices, start = {}, 0
    for version, tokens in groupby(np.asarray(versions).tolist()):
        end = start + len(list(tokens))
        assert version > max(slices, default=-1), f"version {version} after {max(slices)}"
        slices[version], start = slice(start, end), end
    return slices


def distances(
    completion: Completion, logprobs: Callable[[int], np.ndarray], other: Callable[[int], int]
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Compare each span of a completion with its labeled version and with another version.

    Args:
        logprobs: version -> log-probs [R] of all tokens of the completion under its weights.
        other: version -> another version.

    Returns:
        Version -> |engine - log-prob| of the tokens of its span, by its own weights and by the weights of the other version.
    """
    return {
        version: tuple(
            np.abs(logprobs(which)[place] - completion.logprobs[place]) for which in (version, other(version))
        )
        for version, place in spans(completion.versions).items()
    }
