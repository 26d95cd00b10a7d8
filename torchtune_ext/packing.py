"""Packs groups into rows: a prompt is in a row once, its completions follow it, and every label has its source.

A row is one flat sequence that holds several groups::

    tokens      p0 p1 p2 | a0 a1 | b0 b1 b2 | q0 q1 | c0 ...
    group id     0  0  0    1  1    2  2  2    3  3    4
    parent id    0  0  0    0  0    0  0  0    3  3    3
    position     0  1  2    3  4    3  4  5    0  1    2

Query i sees key j when j <= i and (group[i] == group[j] or parent[i] == group[j]). So the completions of a prompt do
not see each other.

The last token of a completion predicts nothing, so it is a label but never an input. A completion of R tokens therefore
takes R - 1 places in the row. Its first token is predicted from the last *prompt* token, whatever is before it in the
row. No other file shifts labels.

The weights do the aggregation: the loss of an update is the sum over all its rows of weight * token loss. With token
and sequence mean, the weights of an update sum to one, whichever row a group is in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchtune_ext.balance import ALONE, Layout, Lengths, Parts, balanced_rows, dealt
from torchtune_ext.groups import Group, Sample


@dataclass(frozen=True, slots=True)
class Segment:
    """The places of one prompt and its completions in a row, as half-open [start, stop) intervals."""

    prompt: tuple[int, int]
    completions: tuple[tuple[int, int], ...]  # the interval of a completion of one token is empty


@dataclass(frozen=True, slots=True)
class Row:
    """One packed sequence of T tokens with L labels. All tensors are on the CPU until `to` moves them to a device."""

    tokens_T: Tensor  # int64, input ids
    positions_T: Tensor  # int64, position of the token in its own unpacked sequence
    group_ids_T: Tensor  # int32, id of the prompt or of the completion; -1, -2, ... on padding, which sees itself alone
    parent_ids_T: Tensor  # int32, id of the prompt; on padding the group id
    segments: tuple[Segment, ...]  # places of the prompts and their completions, as intervals
    labels_L: Tensor  # int64, id of the token to be predicted
    sources_L: Tensor  # int64, index into T of the hidden state that predicts the label
    logprobs_L: Tensor  # float32, log-prob of the label under the policy that sampled it, as the sampler reported
    advantages_L: Tensor  # float32
    weights_L: Tensor  # float32, weight of the label in the loss of the update
    versions_L: Tensor  # int32, policy version that sampled the label
    samples_L: Tensor  # int64, index of the label's completion in the row, 0 .. number of completions - 1

    @property
    def num_labels(self) -> int:
        return self.labels_L.numel()

    def to(self, device: torch.device) -> "Row":
        """Returns the row with its tensors on `device`."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in _TENSORS}
        return Row(segments=self.segments, **moved)


_TENSORS = tuple(name for name in Row.__slots__ if name != "segments")


@dataclass(frozen=True, slots=True)
class PackStats:
    """Counts of how well the rows are used. They can be added."""

    rows: int = 0  # rows that hold labels
    tokens: int = 0  # input tokens in the rows, without padding
    labels: int = 0  # labels in the rows
    unpacked: int = 0  # the tokens if every completion had a prompt of its own
    needed: int = 0  # the tokens if every prompt stood once
    computed: int = 0  # places that the ranks compute or wait for: of every round, its longest row, for each rank

    def __add__(self, other: "PackStats") -> "PackStats":
        return PackStats(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def metrics(self) -> dict[str, float]:
        """Returns the counts and their ratios by their names in the log.

        `pack/rho` says how many times fewer tokens there are because prompts are shared, at most N(P + R) / (P + NR).
        `pack/used` is the share of the computed places that is needed: padding, repeated prompts and waiting lower it.
        """
        counts = {f"pack/{name}": float(getattr(self, name)) for name in ("rows", "tokens", "labels")}
        rho = self.unpacked / self.tokens if self.tokens else 1.0
        return counts | {"pack/rho": rho, "pack/used": self.needed / self.computed if self.computed else 0.0}


def pack(
    groups: Sequence[Group],
    row_tokens: int,
    aggregation: str = "token",
    aggregation_constant: int | None = None,
    pad_id: int = 0,
    layout: Layout = ALONE,
    completions: float | None = None,
) -> tuple[list[Row], PackStats]:
    """Packs the trained samples of `groups` into rows. A group may be split over rows.

    Args:
        groups: groups with advantages; samples with `trained=False` are left out.
        row_tokens: capacity of a row in input tokens; padding may go beyond it, to the next length of the layout.
        aggregation: "token" (every label weighs the same), "sequence" (every completion weighs the same) or
            "constant" (every label weighs 1 / (completions * `aggregation_constant`), Dr.GRPO, arXiv 2503.20783). The
            first two divide by what is trained on. "constant" divides by all completions that were graded, so that no
            factor depends on the rewards.
        aggregation_constant: tokens, for example max_tokens; needed by "constant".
        pad_id: token id that padding gets.
        layout: what the ranks want of the rows.
        completions: the number of completions that "constant" divides by; None: those of `groups` that were graded.

    Returns:
        The rows in a deterministic order, and how well they are used. `Ranks.share` gives every rank its own: all have
        the same number, and those that are computed at the same time cost about the same. A row is empty only where there
        are fewer completions than rows.

    Raises:
        ValueError: a prompt with one of its completions is longer than a row, the aggregation is unknown, or "constant"
            has no `aggregation_constant`.
    """
    trained = [(group, [s for s in group.samples if s.trained and len(s.completion.tokens)]) for group in groups]
    trained = [(group, samples) for group, samples in trained if samples]
    lengths = [_lengths(group, samples, row_tokens) for group, samples in trained]
    if completions is None:
        completions = sum(group.completions for group in groups)
    weight_of = _weights([s for _, samples in trained for s in samples], aggregation, aggregation_constant, completions)
    planned = balanced_rows(lengths, row_tokens, layout)
    rows = [_build(parts, trained, weight_of, pad_id, layout.row_length(parts)) for parts in planned]
    stats = PackStats(
        rows=sum(bool(parts) for parts in planned),
        tokens=sum(part.tokens for parts in planned for part in parts),
        labels=sum(row.num_labels for row in rows),
        unpacked=sum(group.prompt + places for group in lengths for places in group.completions),
        needed=sum(group.tokens for group in lengths),
        computed=layout.ranks * layout.over_rounds(planned, layout.row_length),
    )
    return rows, stats


def pack_updates(
    groups: Sequence[Group], num_updates: int, row_tokens: int, **options
) -> tuple[list[list[Row]], PackStats]:
    """Deals the trained groups to `num_updates` updates of about equally many tokens, and packs the groups of each.

    Each update stands for an equal share of all completions, however many of them are trained on.

    Args:
        groups: groups with advantages.
        num_updates: how many updates the step makes.
        row_tokens: capacity of a row in input tokens.
        options: the other arguments of `pack`.

    Returns:
        The rows of every update that has labels, and the counts of all updates together.
    """
    trained = [group for group in groups if any(s.trained and len(s.completion.tokens) for s in group.samples)]
    sizes = [len(g.prompt_tokens) + sum(len(s.completion.tokens) for s in g.samples if s.trained) for g in trained]
    share = sum(group.completions for group in groups) / num_updates
    updates, total = [], PackStats()
    for hand in dealt(sizes, num_updates):
        rows, stats = pack([trained[i] for i in hand], row_tokens, completions=share, **options)
        updates.append(rows)
        total += stats
    return updates, total


def contexts(row: Row) -> list[int]:
    """Returns a hash for each label of a row, [L], over its prompt, the tokens before it and the label itself.

    Labels with equal hashes, also in different rows, have the same log-prob under the same policy.
    """
    labels, found, begin = row.labels_L.tolist(), [], 0
    for segment in row.segments:
        prompt = hash(tuple(row.tokens_T[slice(*segment.prompt)].tolist()))
        for start, stop in segment.completions:
            # A completion has one label more than places in the row, since its last token is no input.
            end, context = begin + stop - start + 1, prompt
            for label in labels[begin:end]:
                context = hash((context, label))
                found.append(context)
            begin = end
    return found


def _lengths(group: Group, samples: Sequence[Sample], row_tokens: int) -> Lengths:
    prompt, completions = len(group.prompt_tokens), tuple(len(s.completion.tokens) - 1 for s in samples)
    longest = prompt + max(completions)
    if longest > row_tokens:
        raise ValueError(
            f"row_tokens={row_tokens} cannot hold problem {group.problem.id!r}: its prompt has {prompt} tokens and a "
            f"completion {max(completions) + 1}; raise row_tokens to at least {longest}, or lower max_tokens"
        )
    return Lengths(prompt, completions)


def _weights(
    samples: list[Sample], aggregation: str, constant: int | None, completions: float
) -> Callable[[int], float]:
    """Returns a function from the length of a completion to the weight of each of its labels."""
    labels = sum(len(s.completion.tokens) for s in samples)
    if aggregation == "token":
        return lambda length: 1.0 / labels
    if aggregation == "sequence":
        return lambda length: 1.0 / (len(samples) * length)
    if aggregation == "constant":
        if not constant or constant < 1:
            raise ValueError(f"aggregation_constant={constant!r} must be a positive number of tokens, e.g. max_tokens")
        return lambda length: 1.0 / (completions * constant)
    raise ValueError(f"aggregation={aggregation!r} is unknown; use 'token', 'sequence' or 'constant'")


def _build(
    parts: Parts,
    groups: Sequence[tuple[Group, Sequence[Sample]]],
    weight_of: Callable[[int], float],
    pad_id: int,
    row_length: int,
) -> Row:
    """Makes a row of `row_length` places from its parts. This is the only place where labels are made."""
    tokens, positions, group_ids, parent_ids, segments = [], [], [], [], []
    labels, sources, logprobs, advantages, weights, versions, sample_ids = [], [], [], [], [], [], []
    at = next_id = next_sample = 0
    for part in parts:
        group, samples = groups[part.group]
        prompt_len, prompt_id = len(group.prompt_tokens), next_id
        prompt = (at, at + prompt_len)
        tokens.append(group.prompt_tokens)
        positions.append(np.arange(prompt_len))
        group_ids.append(np.full(prompt_len, prompt_id))
        parent_ids.append(np.full(prompt_len, prompt_id))
        at, next_id = at + prompt_len, next_id + 1
        intervals = []
        for sample in (samples[i] for i in part.completions):
            length = len(sample.completion.tokens)
            tokens.append(sample.completion.tokens[:-1])
            positions.append(np.arange(prompt_len, prompt_len + length - 1))
            group_ids.append(np.full(length - 1, next_id))
            parent_ids.append(np.full(length - 1, prompt_id))
            labels.append(sample.completion.tokens)
            sources.append(np.concatenate([[prompt[1] - 1], np.arange(at, at + length - 1)]))
            logprobs.append(sample.completion.logprobs)
            advantages.append(np.full(length, sample.advantage))
            weights.append(np.full(length, weight_of(length)))
            versions.append(sample.completion.versions)
            sample_ids.append(np.full(length, next_sample))
            intervals.append((at, at + length - 1))
            at, next_id, next_sample = at + length - 1, next_id + 1, next_sample + 1
        segments.append(Segment(prompt, tuple(intervals)))
    padding = row_length - at
    pad_ids = -1 - np.arange(padding)  # each place of padding is a group of its own
    tokens.append(np.full(padding, pad_id))
    positions.append(np.zeros(padding))
    group_ids.append(pad_ids)
    parent_ids.append(pad_ids)
    return Row(
        tokens_T=_tensor(tokens, torch.int64),
        positions_T=_tensor(positions, torch.int64),
        group_ids_T=_tensor(group_ids, torch.int32),
        parent_ids_T=_tensor(parent_ids, torch.int32),
        segments=tuple(segments),
        labels_L=_tensor(labels, torch.int64),
        sources_L=_tensor(sources, torch.int64),
        logprobs_L=_tensor(logprobs, torch.float32),
        advantages_L=_tensor(advantages, torch.float32),
        weights_L=_tensor(weights, torch.float32),
        versions_L=_tensor(versions, torch.int32),
        samples_L=_tensor(sample_ids, torch.int64),
    )


def _tensor(parts: list[np.ndarray], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(dtype) if parts else torch.empty(0, dtype=dtype)
