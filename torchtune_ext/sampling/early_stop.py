"""Stops completions that have lost the thread: a running mean of the sampled tokens' log-probs falls below a threshold.

The mean is an exponentially weighted one, started at zero and divided by `1 - decay^t`, so that it is a true weighted
mean from the first token on (without the division the zero it starts from hides the first hundred tokens). The rule
depends on the tokens alone, not on when they arrive: the completion is cut at the token where the rule fired.
"""

import math
from collections.abc import Sequence


class RunningLogprob:
    """Watches one completion and says where to cut it."""

    __slots__ = ("threshold", "decay", "min_tokens", "count", "_sum")

    def __init__(self, threshold: float, decay: float = 0.992, min_tokens: int = 64):
        """Args: threshold: the mean log-prob, in nats, below which to stop; decay: the factor by which a log-prob counts less
        with each further token; min_tokens: tokens to wait for, since a mean of few is noise."""
        self.threshold, self.decay, self.min_tokens = threshold, decay, min_tokens
        self.count = 0  # tokens seen
        self._sum = 0.0

    @property
    def mean(self) -> float:
        """The running mean in nats; 0 before the first token."""
        return self._sum / (1.0 - self.decay**self.count) if self.count else 0.0

    def update(self, logprobs: Sequence[float]) -> int | None:
        """Takes the next tokens' log-probs. Returns how many tokens of the completion to keep once the rule has fired,
        else None. A log-prob that is not a number fires at once."""
        for logprob in logprobs:
            self.count += 1
            self._sum = self.decay * self._sum + (1.0 - self.decay) * logprob
            if math.isnan(logprob) or (self.count >= self.min_tokens and self.mean < self.threshold):
                return self.count
        return None
