"""The prefix tree of a group: which tokens a packed row stores, and which of them see each other.

The root is the prompt prefix that all completions share. Below it, each completion is a subtree: a
path, or with branches (`Completion.parents`, `Completion.kept_prefix_lens`) a tree of turns.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from torchtune_ext.pipeline.groups import Group
from torchtune_ext.run.errors import UsageError
from torchtune_ext.sampling.types import Completion

NO_WINDOW: Mapping[int | None, float] = {None: 1.0}  # `windows` of a model without sliding windows


def path_pairs(length: int, windows: Mapping[int | None, float]) -> float:
    """Returns the number of allowed (query, key) pairs on a path, averaged over layers.

    Args:
        length: tokens of the path.
        windows: window -> fraction of the layers that have it; a token sees at most `window` keys,
            itself included; None: all.
    """
    pairs = 0.0
    for window, share in windows.items():
        inside = length if window is None else min(length, window)
        pairs += share * (inside * (inside + 1) // 2 + (length - inside) * inside)
    return pairs


@dataclass(frozen=True, slots=True)
class GroupSize:
    """The number of input tokens of a group.

    Args:
        prompt: tokens of the prompt prefix that all completions share.
        completion_input_lens: input tokens of each completion after that prefix, 0 or more.
        attention_pairs: for each completion, the number of allowed pairs of a query in the
            completion and any key, averaged over layers. None: no branches, so computed from the
            lengths.
    """

    prompt: int
    completion_input_lens: tuple[int, ...]
    attention_pairs: tuple[float, ...] | None = None

    @property
    def tokens(self) -> int:
        """The input tokens of the group with its prompt stored once."""
        return self.prompt + sum(self.completion_input_lens)


class Tree:
    """The prefix tree of a group: a shared prompt prefix, then the trained completions."""

    def __init__(self, group: Group):
        self.group = group
        self.trained_samples = [s for s in group.samples if s.in_loss and len(s.completion.tokens)]
        kept_lens = [kept_len for s in self.trained_samples for kept_len in s.completion.kept_prefix_lens]
        self.shared_prefix_len = min([len(group.prompt_tokens), *kept_lens])
        self.layouts = [
            _lay_out_completion(len(group.prompt_tokens), self.shared_prefix_len, s.completion)
            for s in self.trained_samples
        ]

    def group_size(self, row_tokens: int, windows: Mapping[int | None, float] = NO_WINDOW) -> GroupSize:
        """Returns the number of input tokens of the group.

        Args:
            row_tokens: capacity of a row in input tokens.
            windows: as for `path_pairs`.

        Raises:
            UsageError: the prompt with one of its completions does not fit into a row.
        """
        lengths = tuple(len(layout.positions_N) for layout in self.layouts)
        longest = self.shared_prefix_len + max(lengths)
        if longest > row_tokens:
            raise UsageError(
                f"row_tokens={row_tokens}: problem {self.group.problem.id!r} needs {longest} tokens of a row for its "
                f"prompt and one completion. Fix: raise row_tokens to at least {longest}, or lower sampling.max_tokens"
            )
        # No path is longer than a row.
        pairs = tuple(
            sum(
                share * np.minimum(layout.positions_N + 1, window or row_tokens).sum()
                for window, share in windows.items()
            )
            for layout in self.layouts
        )
        return GroupSize(self.shared_prefix_len, lengths, pairs)


@dataclass(frozen=True, slots=True)
class CompletionLayout:
    """The N input tokens of a completion of R tokens, after the shared prompt."""

    token_indices_N: np.ndarray  # index of the token in the prompt followed by the completion
    positions_N: np.ndarray  # position of the token in its path
    ends_N: np.ndarray  # one past the last index in N that sees the token
    # Index in N that predicts the token; -1: end of the shared prompt. R ends with the last turn.
    hidden_indices_R: np.ndarray


def _lay_out_completion(prompt_len: int, shared_len: int, completion: Completion) -> CompletionLayout:
    """Lays out a completion after the first `shared_len` tokens of its prompt."""
    # A segment holds the tokens that a turn adds to its parent's path; segment 0 is the rest of the
    # prompt after the shared prefix. (If any completion of the group branches inside the prompt,
    # every completion stores a copy of that rest.) Tokens are indexed in prompt + completion.
    spans, paths = completion.sampled_spans, completion.turn_paths(prompt_len)
    firsts = [shared_len, prompt_len, *(prompt_len + stop for _, stop in spans)]
    segments = range(1, len(spans) + 1)
    # Before each segment, its path has `depths` tokens and ends with the token `before`. A
    # turn that keeps nothing starts a tree of its own.
    depths = [shared_len, *(len(path) - firsts[s + 1] + firsts[s] for s, path in zip(segments, paths, strict=True))]
    before = [shared_len - 1]
    before += [int(path[depth - 1]) if depth else -1 for path, depth in zip(paths, depths[1:], strict=True)]
    # The last token of a turn is an input only if another segment follows it.
    followed = set(before[1:])
    inputs = [prompt_len - shared_len]
    inputs += [firsts[s + 1] - firsts[s] - (firsts[s + 1] - 1 not in followed) for s in segments]
    # Segments that branch off from a segment. Those of the shared prefix count to segment 0.
    owners = [max(0, bisect_right(firsts, token) - 1) for token in before]
    subtrees, children = inputs.copy(), [[] for _ in inputs]
    for s in reversed(segments):
        subtrees[owners[s]] += subtrees[s]
        children[owners[s]].append(s)
    starts = [0] * len(inputs)
    tokens_N, positions_N, ends_N = (np.empty(subtrees[0], np.int64) for _ in range(3))
    for s, count in enumerate(inputs):
        start, end = starts[s], starts[s] + count
        tokens_N[start:end] = np.arange(firsts[s], firsts[s] + count)
        positions_N[start:end] = np.arange(depths[s], depths[s] + count)
        ends_N[start:end] = end
        # The order is depth-first: segments that branch off at later tokens come first.
        for child in sorted(children[s], key=lambda child: (-before[child], child)):
            starts[child] = end
            end += subtrees[child]
            ends_N[start : max(start, start + before[child] + 1 - firsts[s])] = end
    hidden = []
    for s in segments:
        indices_R = np.arange(starts[s] - 1, starts[s] - 1 + firsts[s + 1] - firsts[s])
        # The shared prefix or another segment predicts the first token.
        owner = owners[s]
        indices_R[0] = starts[owner] + before[s] - firsts[owner] if before[s] >= shared_len else -1
        hidden.append(indices_R)
    return CompletionLayout(tokens_N, positions_N, ends_N, np.concatenate(hidden))
