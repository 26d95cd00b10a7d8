"""Factories of common records."""

from dataclasses import replace

import numpy as np

from torchtune_ext.pipeline.episodes import Episode
from torchtune_ext.pipeline.groups import Sample
from torchtune_ext.sampling.types import Completion
from torchtune_ext.tasks.task import EnvironmentReply


def make_sample(tokens, logprobs=None, versions=None, finish_reason="stop", **rest) -> Sample:
    """Return a sample with these tokens; log-probs and versions default to 0."""
    tokens = np.asarray(tokens, dtype=np.int32)
    logprobs = np.zeros(len(tokens)) if logprobs is None else logprobs
    versions = np.zeros(len(tokens)) if versions is None else versions
    completion = Completion(
        tokens, np.asarray(logprobs, dtype=np.float32), np.asarray(versions, dtype=np.int32), finish_reason
    )
    return Sample(completion, **rest)


def make_guess_conversation(ending="completed", turns=(55, 62, 58), read=(20, 21, 22), **rest) -> Sample:
    """Return a conversation about a number, the last of `turns`; its guess has reward 1, all others 0.

    Each turn has three tokens with log-probs of -1, -2 and -3 nats, and its index as policy version. Each reply, with its
    template tokens, has the ids `read`.
    """
    episode = Episode()
    for version, guess in enumerate(turns):
        episode.add_turn(make_sample([guess // 10, guess % 10, 9], [-1, -2, -3], [version] * 3).completion, str(guess))
        done = version == len(turns) - 1
        answer = [] if done else [{"role": "user", "content": "higher" if guess < turns[-1] else "lower"}]
        episode.add_reply(EnvironmentReply(answer, reward=float(done), done=done))
        if not done:
            episode.set_next_context([*episode.path, *read], "")
    return replace(episode.to_sample(ending), **rest)
