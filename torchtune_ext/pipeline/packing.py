"""Packs groups into rows with prefix sharing: a row stores a prompt once for its completions.

A row is one flat sequence that holds several groups. Each group is a prefix tree, usually of depth
2, and each path of the tree is a sampled sequence::

    index        0  1  2    3  4    5  6  7    8  9   10
    tokens      p0 p1 p2 | a0 a1 | b0 b1 b2 | q0 q1 | c0 ...
    end          8  8  8    5  5    8  8  8   11 11   11
    position     0  1  2    3  4    3  4  5    0  1    2

Query i sees key j when j <= i < end[j]. An index counts the tokens of the row; a position is a RoPE
position. Tokens are in depth-first order of the tree, and the end of a token is the
exclusive end of its subtree. So completions do not see each other.

A completion of R tokens has R - 1 input tokens: its last token is a label but never an input, and
its first token is predicted from the last *prompt* token. No other file shifts labels. An episode
is one completion, in which the environment's replies are inputs, and their content is the labels of
a separate term of the loss (`env_labels_E`). If a turn keeps only a part of its parent's path, or
several turns have one parent (`Completion.parents`), the tree branches, and one hidden state may
predict several labels.

The loss of an update is the sum of weight * token loss over all labels of its rows.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from torchtune_ext.kernels.packed_attention import padded_length
from torchtune_ext.pipeline.groups import Group, Sample
from torchtune_ext.pipeline.prefix_tree import NO_WINDOW, GroupSize, Tree, path_pairs
from torchtune_ext.run.errors import UsageError

# Number of padded row lengths between two powers of two. Kernels are compiled for each length, so
# there should be few. With 32 lengths, padding is at most 3% of a row, or less than a tile.
BUCKETS_PER_OCTAVE = 32
# Overhead of a round (one row per rank), in tokens: kernel launches and weight all-gathers.
ROUND_OVERHEAD_TOKENS = 512
CAPACITIES_PER_ROUND_COUNT = 5  # row capacities that are compared for each number of rounds
PATIENCE = 8  # successive numbers of rounds without an improvement before the search stops
CAPACITY_RATIO = 1.02  # ratio between successive row capacities


@dataclass(frozen=True, slots=True)
class Row:
    """One packed sequence of T tokens with L labels. `pack` makes its tensors on the CPU."""

    tokens_T: Tensor  # int64, input ids
    positions_T: Tensor  # int64, position of the token in its unpacked sequence
    ends_T: Tensor  # int32, one past the last index that sees the token; padding sees only itself
    max_path_len: int  # tokens of the longest path
    labels_L: Tensor  # int64, id of the predicted token
    hidden_index_L: Tensor  # int64, index into T of the hidden state that predicts the label
    logprobs_L: Tensor  # float32, log-prob that the engine reported for the label, nats
    advantages_L: Tensor  # float32
    loss_weights_L: Tensor  # float32, weight of the label in the loss of the update
    versions_L: Tensor  # int32, policy version that sampled the label
    completion_index_L: Tensor  # int64, index of the label's completion in the row, from 0
    # The environment's content, E tokens. They are labels of one term of the loss (`environment_coef`), so
    # they have no log-prob, advantage or version, and no L tensor contains them.
    env_labels_E: Tensor  # int64, ids
    env_sources_E: Tensor  # int64, index into T of the hidden state that predicts the label
    env_weights_E: Tensor  # float32, 1 / (content tokens of the update)
    teacher_logprobs_L: Tensor | None = None  # float32, nats; None without a teacher

    @property
    def num_labels(self) -> int:
        return self.labels_L.numel()

    def to(self, device: torch.device) -> "Row":
        """Returns the row with its tensors on `device`."""
        tensors = {name: value for name in self.__slots__ if isinstance(value := getattr(self, name), Tensor)}
        return replace(self, **{name: value.to(device, non_blocking=True) for name, value in tensors.items()})


@dataclass(frozen=True, slots=True)
class PackStats:
    """Token counts that measure packing efficiency. Two objects can be added."""

    rows: int = 0  # rows that hold labels
    tokens: int = 0  # input tokens in the rows, without padding
    labels: int = 0  # labels in the rows
    tokens_unshared: int = 0  # input tokens without prefix sharing
    tokens_ideal: int = 0  # input tokens if every prompt were stored exactly once
    # Tokens that ranks compute or wait for: sum over rounds of (longest row length x ranks).
    tokens_computed: float = 0

    def __add__(self, other: "PackStats") -> "PackStats":
        return PackStats(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def metrics(self) -> dict[str, float]:
        """Returns counts and ratios by metric name."""
        counts = {f"pack/{name}": float(getattr(self, name)) for name in ("rows", "tokens", "labels")}
        # Prefix sharing reduces tokens by the factor rho, at most G(P + R) / (P + GR) for G
        # completions of R tokens after a prompt of P tokens. Padding, repeated prompts and idle
        # ranks lower `pack/efficiency`.
        rho = self.tokens_unshared / self.tokens if self.tokens else 1.0
        return counts | {
            "pack/rho": rho,
            "pack/efficiency": self.tokens_ideal / self.tokens_computed if self.tokens_computed else 0.0,
        }


@dataclass(frozen=True, slots=True)
class GroupPart:
    """Completions of one group in one row, after their prompt.

    Args:
        group: index of the group.
        completions: indices of the completions in the group, ascending.
        tokens: input tokens of the prompt and of these completions.
        attention_pairs: number of (query, key) pairs that the attention mask allows, averaged over
            layers.
    """

    group: int
    completions: tuple[int, ...]
    tokens: int
    attention_pairs: float


RowPlan = tuple[GroupPart, ...]  # the groups of a row; empty for an idle rank


@dataclass(frozen=True, slots=True)
class RowCostModel:
    """The padded length and the cost of a row.

    Args:
        ranks: number of data-parallel ranks, which compute one row each per round.
        tile: rows are padded to one of a few lengths, all multiples of it; None: no padding.
        attention_pair_cost: cost of an allowed (query, key) pair over all layers and heads, in
            units of the cost of one token without attention.
        windows: as for `path_pairs`.
    """

    ranks: int = 1
    tile: int | None = None
    attention_pair_cost: float = 0.0
    windows: Mapping[int | None, float] = field(default_factory=lambda: NO_WINDOW)

    def padded_length(self, tokens: int) -> int:
        """Returns the padded length of a row: 768 for 700 tokens and tile 128."""
        # The model needs at least one token.
        tokens = max(tokens, 1)
        return tokens if self.tile is None else padded_length(tokens, self.tile, BUCKETS_PER_OCTAVE)

    def row_length(self, row: RowPlan) -> int:
        """Returns the length of a planned row, including padding."""
        return self.padded_length(sum(part.tokens for part in row))

    def row_cost(self, row: RowPlan) -> float:
        """Returns the cost of a row, in tokens."""
        return self.row_length(row) + self.attention_pair_cost * sum(part.attention_pairs for part in row)

    def total_round_cost(self, rows: Sequence[RowPlan], cost: Callable[[RowPlan], float]) -> float:
        """Returns the sum over rounds of the largest row cost, which all ranks wait for."""
        return sum(max(map(cost, rows[start : start + self.ranks])) for start in range(0, len(rows), self.ranks))


SINGLE_RANK = RowCostModel()  # one rank without padding


def pack(
    groups: Sequence[Group],
    row_tokens: int,
    aggregation: str = "token",
    aggregation_constant: int | None = None,
    pad_id: int = 0,
    cost_model: RowCostModel = SINGLE_RANK,
    completion_divisor: float | None = None,
) -> tuple[list[Row], PackStats]:
    """Packs the trained samples of `groups` into rows. A group may be split over rows.

    Args:
        groups: groups with advantages; samples with `in_loss=False` are skipped.
        row_tokens: capacity of a row in input tokens; padding may exceed it up to the next length
            of `cost_model`.
        aggregation: "token" (equal weight per label), "sequence" (equal weight per completion) or
            "constant" (weight 1 / (completions * `aggregation_constant`) per label; Dr.GRPO, arXiv
            2503.20783).
        aggregation_constant: tokens, for example max_tokens; required by "constant".
        pad_id: token id of padding.
        cost_model: padded length and cost of a row.
        completion_divisor: divisor of "constant": completions per update, which may be fractional.
            None for the sum of `Group.num_completions`.

    Returns:
        The rows in a deterministic order, and their counts. `Ranks.local_slice` gives every rank
        the same number of rows, and the rows of a round cost about the same. A row is empty only if
        there are fewer completions than rows.

    Raises:
        UsageError: a prompt with one of its completions is longer than a row, the aggregation is
            unknown, or "constant" has no `aggregation_constant`.
    """
    trees = [tree for group in groups if (tree := Tree(group)).trained_samples]
    sizes = [tree.group_size(row_tokens, cost_model.windows) for tree in trees]
    # "constant" also counts completions that are not trained on: weights do not depend on rewards.
    if completion_divisor is None:
        completion_divisor = sum(group.num_completions for group in groups)
    samples = [sample for tree in trees for sample in tree.trained_samples]
    weight_of = _label_weight_fn(samples, aggregation, aggregation_constant, completion_divisor)
    env_weight = 1.0 / max(1, sum(len(sample.completion.content_indices) for sample in samples))
    plans = balance_rows(sizes, row_tokens, cost_model)
    rows = [_build_row(plan, trees, weight_of, env_weight, pad_id, cost_model.row_length(plan)) for plan in plans]
    stats = PackStats(
        rows=sum(bool(plan) for plan in plans),
        tokens=sum(part.tokens for plan in plans for part in plan),
        labels=sum(row.num_labels for row in rows),
        tokens_unshared=sum(size.prompt + length for size in sizes for length in size.completion_input_lens),
        tokens_ideal=sum(size.tokens for size in sizes),
        tokens_computed=cost_model.ranks * cost_model.total_round_cost(plans, cost_model.row_length),
    )
    return rows, stats


def pack_updates(
    groups: Sequence[Group], num_updates: int, row_tokens: int, **options
) -> tuple[list[list[Row]], PackStats]:
    """Partitions the trained groups into updates of about equal tokens, and packs each update.

    Args:
        groups: groups with advantages.
        num_updates: updates of the step.
        row_tokens: capacity of a row in input tokens.
        **options: other arguments of `pack`.

    Returns:
        The rows of every update that has labels, and the total counts.
    """
    trained = [group for group in groups if any(s.in_loss and len(s.completion.tokens) for s in group.samples)]
    sizes = [len(g.prompt_tokens) + sum(len(s.completion.tokens) for s in g.samples if s.in_loss) for g in trained]
    # Each update counts an equal share of all completions, however many completions it trains on.
    divisor = sum(group.num_completions for group in groups) / num_updates
    updates, total = [], PackStats()
    for bin_items in partition(sizes, num_updates):
        rows, stats = pack([trained[i] for i in bin_items], row_tokens, completion_divisor=divisor, **options)
        updates.append(rows)
        total += stats
    return updates, total


def context_hashes(row: Row) -> tuple[Tensor, Tensor]:
    """Returns hashes of the path before each label, and of the path including the label, int64 [L].

    Labels with equal paths before them, also in different rows, are predicted from equal hidden
    states. If the labels are equal, too, they have the same log-prob under the same policy.
    """
    tokens, positions = row.tokens_T.numpy(), row.positions_T.numpy()
    # The hash of a path is the sum of the hashes of its (position, token) pairs, modulo 2^64.
    # Tokens are in depth-first order, so a cumulative sum includes a token from its index until
    # its end.
    hashes_T = _splitmix64(positions, tokens)
    subtree_end_sums = np.zeros(len(tokens) + 1, np.uint64)
    np.add.at(subtree_end_sums, row.ends_T.numpy(), hashes_T)
    hidden_index_L = row.hidden_index_L.numpy()
    before_L = (hashes_T.cumsum() - subtree_end_sums[:-1].cumsum())[hidden_index_L]
    after_L = before_L + _splitmix64(positions[hidden_index_L] + 1, row.labels_L.numpy())
    return torch.from_numpy(before_L.view(np.int64)), torch.from_numpy(after_L.view(np.int64))


def _splitmix64(positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) of positions and tokens, uint64."""
    value = (positions.astype(np.uint64) << np.uint64(32) | tokens.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return value ^ value >> np.uint64(31)


def _label_weight_fn(
    samples: list[Sample], aggregation: str, constant: int | None, completions: float
) -> Callable[[int], float]:
    """Returns a function: number of labels of a completion -> weight of each of its labels."""
    labels = sum(len(s.completion.sampled_indices) for s in samples)
    if aggregation == "token":
        return lambda length: 1.0 / labels
    if aggregation == "sequence":
        return lambda length: 1.0 / (len(samples) * length)
    if aggregation == "constant":
        if not constant or constant < 1:
            raise UsageError(
                f"aggregation_constant={constant!r}: expected a positive number of tokens, e.g. max_tokens"
            )
        return lambda length: 1.0 / (completions * constant)
    raise UsageError(f"aggregation={aggregation!r}: unknown; expected 'token', 'sequence' or 'constant'")


def _build_row(
    plan: RowPlan,
    trees: Sequence[Tree],
    weight_of: Callable[[int], float],
    env_weight: float,
    pad_id: int,
    row_length: int,
) -> Row:
    tokens, positions, ends = [], [], []
    labels, hidden_index, logprobs, advantages = [], [], [], []
    weights, versions, completion_index, teacher = [], [], [], []
    env_labels, env_sources = [], []
    offset = num_completions = 0
    for part in plan:
        tree = trees[part.group]
        prompt, shared = tree.group.prompt_tokens, tree.shared_prefix_len
        tokens.append(prompt[:shared])
        positions.append(np.arange(shared))
        ends.append(np.full(shared, offset + part.tokens))
        offset += shared
        prompt_end = offset - 1  # index of the last token of the shared prompt
        for sample, layout in ((tree.trained_samples[i], tree.layouts[i]) for i in part.completions):
            # Only sampled tokens are labels of the policy's loss.
            completion, sampled_S = sample.completion, sample.completion.sampled_indices
            tokens.append(np.concatenate([prompt, completion.tokens])[layout.token_indices_N])
            positions.append(layout.positions_N)
            ends.append(offset + layout.ends_N)
            labels.append(completion.tokens[sampled_S])
            hidden_R = np.where(layout.hidden_indices_R < 0, prompt_end, offset + layout.hidden_indices_R)
            hidden_index.append(hidden_R[sampled_S])
            logprobs.append(completion.logprobs[sampled_S])
            if sample.teacher_logprobs is not None:
                teacher.append(sample.teacher_logprobs[sampled_S])
            spans = [stop - start for start, stop in completion.sampled_spans]
            advantages.append(np.repeat(sample.turn_advantages or [sample.advantage] * len(spans), spans))
            weights.append(np.full(len(sampled_S), weight_of(len(sampled_S))))
            versions.append(completion.versions[sampled_S])
            completion_index.append(np.full(len(sampled_S), num_completions))
            env_labels.append(completion.tokens[completion.content_indices])
            env_sources.append(hidden_R[completion.content_indices])
            offset += len(layout.token_indices_N)
            num_completions += 1
    # Padding sees only itself, and no other token sees padding.
    padding = row_length - offset
    tokens.append(np.full(padding, pad_id))
    positions.append(np.zeros(padding))
    ends.append(np.arange(offset, row_length) + 1)
    return Row(
        tokens_T=_tensor(tokens, torch.int64),
        positions_T=_tensor(positions, torch.int64),
        ends_T=_tensor(ends, torch.int32),
        max_path_len=max(int(part_positions.max(initial=-1)) for part_positions in positions) + 1,
        labels_L=_tensor(labels, torch.int64),
        hidden_index_L=_tensor(hidden_index, torch.int64),
        logprobs_L=_tensor(logprobs, torch.float32),
        advantages_L=_tensor(advantages, torch.float32),
        loss_weights_L=_tensor(weights, torch.float32),
        versions_L=_tensor(versions, torch.int32),
        completion_index_L=_tensor(completion_index, torch.int64),
        env_labels_E=_tensor(env_labels, torch.int64),
        env_sources_E=_tensor(env_sources, torch.int64),
        env_weights_E=torch.full((sum(map(len, env_labels)),), env_weight, dtype=torch.float32),
        # A row without labels gets an empty tensor. None means missing teacher log-probs.
        teacher_logprobs_L=_tensor(teacher, torch.float32) if len(teacher) == len(labels) else None,
    )


def _tensor(parts: list[np.ndarray], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(dtype) if parts else torch.empty(0, dtype=dtype)


def balance_rows(groups: Sequence[GroupSize], row_tokens: int, cost_model: RowCostModel) -> list[RowPlan]:
    """Distributes the completions of groups over rows of at most `row_tokens` tokens.

    A group may be split over rows. Each of these rows then stores the prompt once.

    Args:
        groups: sizes of the groups; every completion fits into a row with its prompt.
        row_tokens: capacity of a row in input tokens.
        cost_model: padded length and cost of a row.

    Returns:
        The rows in a deterministic order: rows [k * ranks, (k + 1) * ranks) form round k, one row
        for each rank. There is at least one round.
    """
    # FSDP synchronizes the ranks in every layer. In every round each rank computes one row, and the
    # round takes as long as its most expensive row. So the rows of all ranks are chosen together.
    # AReaL's Algorithm 1 (arXiv 2505.24298, App. B.3) balances the tokens of one rank. Here
    # sequences also share prompts, and the cost of a row includes its tokens, its padding and the
    # area of its attention mask.
    #
    # Rows are filled by best-fit decreasing up to a capacity. A group that fits nowhere is split:
    # its longest completions that fit go into the emptiest row. The search tries several capacities
    # and numbers of rounds, and returns the cheapest result.
    total, ranks = sum(group.tokens for group in groups), cost_model.ranks
    # The sort is stable, so items of equal length keep their order and the rows are deterministic.
    largest_first = sorted(range(len(groups)), key=lambda i: -groups[i].tokens)
    longest_first = [
        sorted(range(len(g.completion_input_lens)), key=lambda i: -g.completion_input_lens[i]) for g in groups
    ]
    # Fewer rounds launch fewer kernels, but more rounds balance better.
    fewest = rounds = max(math.ceil(total / (ranks * row_tokens)), 1)
    best, best_cost, best_rounds = None, math.inf, 0
    # Even perfectly balanced rounds cost at least `total / ranks + rounds * ROUND_OVERHEAD_TOKENS`.
    # Once this bound exceeds the best cost, more rounds cannot win. The bound ignores attention.
    while best is None or (
        rounds <= min(2 * fewest, best_rounds + PATIENCE) and total / ranks + rounds * ROUND_OVERHEAD_TOKENS < best_cost
    ):
        # If the largest capacity fails, all fail. Then try one more round, or 3% more if many.
        if best is None and _fill_rows(groups, largest_first, longest_first, rounds * ranks, row_tokens) is None:
            rounds += max(1, rounds // 32)
            continue
        tries = 0
        for capacity in _candidate_capacities(total / (rounds * ranks), row_tokens):
            filled = _fill_rows(groups, largest_first, longest_first, rounds * ranks, capacity)
            if filled is None:
                continue
            rows = _order_into_rounds([_make_row_plan(groups, row, cost_model) for row in filled], cost_model)
            cost = cost_model.total_round_cost(rows, cost_model.row_cost) + rounds * ROUND_OVERHEAD_TOKENS
            if cost < best_cost:
                best, best_cost, best_rounds = rows, cost, rounds
            tries += 1
            if tries == CAPACITIES_PER_ROUND_COUNT:
                break
        rounds += 1
    return best


def partition(sizes: Sequence[float], num_bins: int) -> list[list[int]]:
    """Partitions items into at most `num_bins` bins of about equal sums.

    Greedy: the largest item first, each into the bin with the smallest sum (Graham 1969).

    Returns:
        The item indices of each non-empty bin, ascending.
    """
    sums, items = [0.0] * num_bins, [[] for _ in range(num_bins)]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        smallest = sums.index(min(sums))
        sums[smallest] += sizes[index]
        items[smallest].append(index)
    # Sort bins by their first item. Otherwise the last update would tend to get the smallest items.
    return sorted(sorted(bin_items) for bin_items in items if bin_items)


def _candidate_capacities(smallest: float, largest: int) -> list[int]:
    """Returns row capacities to try, in tokens, ascending from `smallest` to `largest`."""
    capacities = [max(math.ceil(smallest), 1)]
    while capacities[-1] < largest:
        capacities.append(min(math.ceil(capacities[-1] * CAPACITY_RATIO), largest))
    return capacities


def _fill_rows(
    groups: Sequence[GroupSize],
    largest_first: Sequence[int],
    longest_first: Sequence[Sequence[int]],
    num_rows: int,
    capacity: int,
) -> list[list[tuple[int, Sequence[int]]]] | None:
    """Fills rows up to `capacity` tokens.

    Returns:
        For each row, [(group index, indices of its completions in this row), ...]; None if the
        groups do not fit.
    """
    rows: list[list[tuple[int, Sequence[int]]]] = [[] for _ in range(num_rows)]
    room = [(capacity, row) for row in range(num_rows)]  # (free tokens, row), ascending
    for index in largest_first:
        group, left, needed = groups[index], longest_first[index], groups[index].tokens
        while left:
            # Best fit: the row with the least room that holds the rest of the group, else the row
            # with the most room.
            best = bisect_left(room, (needed, -1))
            fits = best < len(room)
            free, row = room.pop(best if fits else -1)
            taken = left if fits else _take_longest_fitting(group, left, free)
            if not taken:
                return None
            rows[row].append((index, taken))
            tokens = sum(group.completion_input_lens[i] for i in taken)
            insort(room, (free - group.prompt - tokens, row))
            needed -= tokens
            left = [] if fits else [i for i in left if i not in taken]
    return _fill_empty_rows(rows)


def _fill_empty_rows(rows: list[list[tuple[int, Sequence[int]]]]) -> list[list[tuple[int, Sequence[int]]]]:
    # A rank with an empty row would idle, so it gets half of the row with the most completions.
    for empty in (row for row in rows if not row):
        fullest = max(rows, key=lambda row: sum(len(taken) for _, taken in row))
        if len(fullest) > 1:
            empty.extend(fullest[::2])
            del fullest[::2]
        elif fullest and len(fullest[0][1]) > 1:
            ((index, taken),) = fullest
            empty.append((index, taken[::2]))
            fullest[0] = (index, taken[1::2])
    return rows


def _take_longest_fitting(group: GroupSize, candidates: Sequence[int], free: int) -> list[int]:
    taken, free = [], free - group.prompt
    for i in candidates:
        if group.completion_input_lens[i] <= free:
            taken.append(i)
            free -= group.completion_input_lens[i]
    return taken


def _make_row_plan(
    groups: Sequence[GroupSize], row: Sequence[tuple[int, Sequence[int]]], cost_model: RowCostModel
) -> RowPlan:
    plan = []
    for index, taken in row:
        group, prompt = groups[index], groups[index].prompt
        lengths = [group.completion_input_lens[i] for i in taken]
        prompt_pairs = path_pairs(prompt, cost_model.windows)
        if group.attention_pairs:
            pairs = [group.attention_pairs[i] for i in taken]
        else:
            # A completion without branches and its prompt are one path.
            pairs = [path_pairs(prompt + n, cost_model.windows) - prompt_pairs for n in lengths]
        plan.append(GroupPart(index, tuple(sorted(taken)), prompt + sum(lengths), prompt_pairs + sum(pairs)))
    return tuple(plan)


def _order_into_rounds(rows: Sequence[RowPlan], cost_model: RowCostModel) -> list[RowPlan]:
    """Orders rows to minimize the total cost of the rounds."""
    # Sorting puts rows of similar cost into one round. Every other round is reversed, so that no
    # rank gets the most expensive row of every round.
    ordered = sorted(rows, key=cost_model.row_cost, reverse=True)
    rounds = [ordered[start : start + cost_model.ranks] for start in range(0, len(ordered), cost_model.ranks)]
    return [row for k, members in enumerate(rounds) for row in (members if k % 2 == 0 else members[::-1])]
