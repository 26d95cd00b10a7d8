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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchtune_ext.groups import Group, Sample

PAD_ID = -1  # group and parent id of padding, so that padding sees only padding


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
    group_ids_T: Tensor  # int32, id of the prompt or of the completion; PAD_ID on padding
    parent_ids_T: Tensor  # int32, id of the prompt; PAD_ID on padding
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
    """Measures of how well the rows are used."""

    rows: int  # rows that hold labels
    tokens: int  # input tokens in the rows, without padding
    labels: int  # labels in the rows
    rho: float  # tokens without shared prompts / tokens with them, at most N(P + R) / (P + NR)
    fill: float  # tokens / (rows * row_tokens)

    def metrics(self) -> dict[str, float]:
        """Returns the measures by their names in the log."""
        return {f"pack/{name}": float(getattr(self, name)) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class _Piece:
    """A prompt with as many of its completions as go into one row."""

    prompt_tokens: np.ndarray
    samples: tuple[Sample, ...]
    num_tokens: int


def pack(
    groups: Sequence[Group],
    row_tokens: int,
    aggregation: str = "token",
    aggregation_constant: int | None = None,
    pad_id: int = 0,
    pad_to: int | None = None,
    num_rows_multiple: int = 1,
    completions: float | None = None,
) -> tuple[list[Row], PackStats]:
    """Packs the trained samples of `groups` into rows, by best-fit decreasing. A group larger than a row is split.

    Args:
        groups: groups with advantages; samples with `trained=False` are left out.
        row_tokens: capacity of a row in input tokens.
        aggregation: "token" (every label weighs the same), "sequence" (every completion weighs the same) or
            "constant" (every label weighs 1 / (completions * `aggregation_constant`), Dr.GRPO, arXiv 2503.20783). The
            first two divide by what is trained on. "constant" divides by all completions that were graded, so that no
            factor depends on the rewards.
        aggregation_constant: tokens, for example max_tokens; needed by "constant".
        pad_id: token id that padding gets.
        pad_to: rows are padded to this length in tokens (compiled kernels need fixed shapes); None: rows keep their
            length.
        num_rows_multiple: empty rows are appended until the number of rows is a multiple of this, so that every rank
            gets the same number.
        completions: the number of completions that "constant" divides by; None: those of `groups` that were graded.

    Returns:
        The rows in a deterministic order, and how well they are used.

    Raises:
        ValueError: a prompt with one of its completions is longer than a row, the aggregation is unknown, or "constant"
            has no `aggregation_constant`.
    """
    pieces = [piece for group in groups for piece in _pieces(group, row_tokens)]
    if completions is None:
        completions = sum(group.completions for group in groups)
    samples = [s for piece in pieces for s in piece.samples]
    weight_of = _weights(samples, aggregation, aggregation_constant, completions)
    rows = [_build(bin_, weight_of, pad_id, pad_to) for bin_ in _bins(pieces, row_tokens)]
    tokens = sum(piece.num_tokens for piece in pieces)
    unpacked = sum(len(p.prompt_tokens) + len(s.completion.tokens) - 1 for p in pieces for s in p.samples)
    stats = PackStats(
        rows=len(rows),
        tokens=tokens,
        labels=sum(row.num_labels for row in rows),
        rho=unpacked / tokens if tokens else 1.0,
        fill=tokens / (len(rows) * row_tokens) if rows else 0.0,
    )
    while len(rows) % num_rows_multiple or not rows:
        rows.append(_build([], weight_of, pad_id, pad_to))
    return rows, stats


def pack_updates(
    groups: Sequence[Group], num_updates: int, row_tokens: int, **options
) -> tuple[list[list[Row]], PackStats]:
    """Distributes the trained groups over `num_updates` updates and packs the groups of each.

    Each update stands for an equal share of all completions, however many of them are trained on.

    Args:
        groups: groups with advantages.
        num_updates: how many updates the step makes.
        row_tokens: capacity of a row in input tokens.
        options: the other arguments of `pack`.

    Returns:
        The rows of every update that has labels, and the statistics of all updates together.
    """
    trained = [group for group in groups if any(s.trained for s in group.samples)]
    share = sum(group.completions for group in groups) / num_updates
    packed = [pack(trained[i::num_updates], row_tokens, completions=share, **options) for i in range(num_updates)]
    packed = [(rows, stats) for rows, stats in packed if stats.labels]
    tokens = sum(stats.tokens for _, stats in packed)
    num_rows = sum(stats.rows for _, stats in packed)
    total = PackStats(
        rows=num_rows,
        tokens=tokens,
        labels=sum(stats.labels for _, stats in packed),
        rho=sum(stats.rho * stats.tokens for _, stats in packed) / tokens if tokens else 1.0,
        fill=tokens / (num_rows * row_tokens) if num_rows else 0.0,
    )
    return [rows for rows, _ in packed], total


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


def _pieces(group: Group, row_tokens: int) -> list[_Piece]:
    """Splits a group into pieces that fit into a row."""
    samples = [s for s in group.samples if s.trained and len(s.completion.tokens)]
    prompt = len(group.prompt_tokens)
    pieces, current, used = [], [], prompt
    for sample in samples:
        cost = len(sample.completion.tokens) - 1
        if prompt + cost > row_tokens:
            raise ValueError(
                f"row_tokens={row_tokens} cannot hold problem {group.problem.id!r}: its prompt has {prompt} tokens and a "
                f"completion {len(sample.completion.tokens)}; raise row_tokens to at least {prompt + cost}, or lower max_tokens"
            )
        if current and used + cost > row_tokens:
            pieces.append(_Piece(group.prompt_tokens, tuple(current), used))
            current, used = [], prompt
        current.append(sample)
        used += cost
    if current:
        pieces.append(_Piece(group.prompt_tokens, tuple(current), used))
    return pieces


def _bins(pieces: list[_Piece], row_tokens: int) -> list[list[_Piece]]:
    """Distributes pieces over rows by best-fit decreasing: at most 11/9 of the fewest possible rows (Johnson 1973)."""
    bins: list[list[_Piece]] = []
    free: list[int] = []
    # The sort is stable: pieces of equal size keep their order, so the rows are deterministic.
    for piece in sorted(pieces, key=lambda p: -p.num_tokens):
        fitting = [i for i, room in enumerate(free) if room >= piece.num_tokens]
        if fitting:
            best = min(fitting, key=lambda i: free[i])
        else:
            best = len(bins)
            bins.append([])
            free.append(row_tokens)
        bins[best].append(piece)
        free[best] -= piece.num_tokens
    return bins


def _weights(samples: list[Sample], aggregation: str, constant: int | None, completions: float):
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


def _build(pieces: list[_Piece], weight_of, pad_id: int, pad_to: int | None) -> Row:
    """Makes a row from its pieces. This is the only place where labels are made."""
    tokens, positions, group_ids, parent_ids, segments = [], [], [], [], []
    labels, sources, logprobs, advantages, weights, versions, sample_ids = [], [], [], [], [], [], []
    at = next_id = next_sample = 0
    for piece in pieces:
        prompt_len, prompt_id = len(piece.prompt_tokens), next_id
        prompt = (at, at + prompt_len)
        tokens.append(piece.prompt_tokens)
        positions.append(np.arange(prompt_len))
        group_ids.append(np.full(prompt_len, prompt_id))
        parent_ids.append(np.full(prompt_len, prompt_id))
        at, next_id = at + prompt_len, next_id + 1
        intervals = []
        for sample in piece.samples:
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
    # An empty row still holds one token of padding, so that a model can run it.
    padding = max((pad_to or 0) - at, 0 if at else 1)
    tokens.append(np.full(padding, pad_id))
    positions.append(np.zeros(padding))
    group_ids.append(np.full(padding, PAD_ID))
    parent_ids.append(np.full(padding, PAD_ID))
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
