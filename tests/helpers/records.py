"""Records that tests need many of."""

import numpy as np

from torchtune_ext.groups import Sample
from torchtune_ext.sampling.records import Completion


def sampled(tokens, logprobs=None, versions=None, finish_reason="stop", **rest) -> Sample:
    """A sample with these tokens; log-probs and versions are 0 where they are not given."""
    tokens = np.asarray(tokens, dtype=np.int32)
    logprobs = np.zeros(len(tokens)) if logprobs is None else logprobs
    versions = np.zeros(len(tokens)) if versions is None else versions
    completion = Completion(
        tokens, np.asarray(logprobs, dtype=np.float32), np.asarray(versions, dtype=np.int32), finish_reason
    )
    return Sample(completion, **rest)
