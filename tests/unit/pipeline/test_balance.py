"""Balancing: every completion is in one row, no row is too long, prompts rarely repeat, ranks are balanced."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_ext.pipeline import packing
from torchtune_ext.pipeline.packing import (
    BUCKETS_PER_OCTAVE,
    SINGLE_RANK,
    GroupSize,
    PackStats,
    RowCostModel,
    balance_rows,
    partition,
)

GROUPS = st.lists(
    st.builds(GroupSize, st.integers(1, 30), st.lists(st.integers(0, 40), min_size=1, max_size=8).map(tuple)),
    max_size=12,
)
COST_MODELS = st.builds(
    RowCostModel,
    st.integers(1, 5),
    st.sampled_from([None, 1, 8]),
    st.sampled_from([0.0, 0.01, 1.0]),
    st.sampled_from([{None: 1.0}, {20: 1.0}, {None: 0.25, 5: 0.75}]),
)


def tokens(row):
    return sum(part.tokens for part in row)


@settings(max_examples=300)
@given(groups=GROUPS, cost_model=COST_MODELS, slack=st.integers(0, 100))
def test_balance_places_each_completion_in_one_row(groups, cost_model, slack):
    capacity = max((g.prompt + max(g.completion_input_lens) for g in groups), default=1) + slack
    rows = balance_rows(groups, capacity, cost_model)
    assert len(rows) >= cost_model.ranks and len(rows) % cost_model.ranks == 0
    placed = sorted((part.group, i) for row in rows for part in row for i in part.completions)
    assert placed == [(g, i) for g, group in enumerate(groups) for i in range(len(group.completion_input_lens))]
    for row in rows:
        assert tokens(row) <= capacity
        assert len({part.group for part in row}) == len(row), "the prompt of a group is twice in a row"
        for part in row:
            group = groups[part.group]
            lengths = [group.completion_input_lens[i] for i in part.completions]
            assert part.tokens == group.prompt + sum(lengths)
            # Each query sees the keys up to itself in its own sequence, or the last `window` of them.
            keys = [*range(1, group.prompt + 1)]
            keys += [position for n in lengths for position in range(group.prompt + 1, group.prompt + n + 1)]
            seen = {window: sum(min(n, window or n) for n in keys) for window in cost_model.windows}
            assert part.attention_pairs == sum(share * seen[window] for window, share in cost_model.windows.items())
    assert rows == balance_rows(groups, capacity, cost_model)


@given(st.integers(1, 8), st.integers(1, 8))
def test_balance_ranks_idle_only_with_too_few_completions(completions, ranks):
    """Completions that are long compared with their prompt: a rank is idle only if there are not enough."""
    for groups in ([GroupSize(1, (100,) * completions)], [GroupSize(1, (100,))] * completions):
        rows = balance_rows(groups, 1000, RowCostModel(ranks))
        assert sum(not row for row in rows) == max(ranks - completions, 0)


def test_the_rows_of_equal_groups_are_equal():
    """32 groups on 8 ranks: 4 per rank, without a repeated prompt."""
    rows = balance_rows([GroupSize(100, (50,) * 16)] * 32, 16_384, RowCostModel(8, 128))
    assert [tokens(row) for row in rows] == [3600] * 8
    assert all(len(row) == 4 for row in rows)


def test_balance_long_group_splits_into_equal_rows():
    """16 completions of 1,000 tokens on 4 ranks, in rows of 8,192: four completions per rank."""
    rows = balance_rows([GroupSize(200, (1000,) * 16)], 8192, RowCostModel(4))
    assert [len(row[0].completions) for row in rows] == [4] * 4


def test_balance_unpaired_long_completions_keep_rows_short():
    """Two completions of 9,000 tokens do not fit into a row of 16,384, so rows of 9,010 are enough."""
    rows = balance_rows([GroupSize(10, (9000,) * 4)], 16_384, SINGLE_RANK)
    assert [tokens(row) for row in rows] == [9010] * 4


def test_attention_counts():
    """One completion of 8,000 tokens costs more attention than eight of 1,000: equal tokens, unequal cost."""
    groups = [GroupSize(1, (8000,)), GroupSize(1, (8000,)), GroupSize(1, (1000,) * 8), GroupSize(1, (1000,) * 8)]
    rows = balance_rows(groups, 8192, RowCostModel(2, attention_pair_cost=1e-3))
    rounds = [{len(row[0].completions) for row in rows[start : start + 2]} for start in (0, 2)]
    assert rounds == [{1}, {8}], "the ranks of a round do not do the same"


def test_windowed_attention_counts_only_keys_in_window():
    """The completion of 8,000 tokens costs hardly more than eight of 1,000 when a token sees at most 100 keys."""
    groups = [GroupSize(1, (8000,)), GroupSize(1, (1000,) * 8)]
    for windows, ratio in (({None: 1.0}, 7.98), ({100: 1.0}, 1.05), ({None: 0.5, 100: 0.5}, 6.87)):
        one, eight = balance_rows(groups, 8192, RowCostModel(1, None, 1e-3, windows))
        assert one[0].attention_pairs / eight[0].attention_pairs == pytest.approx(ratio, abs=0.01)


def rank_sums(rows, cost_model):
    return [sum(map(cost_model.row_cost, rows[rank :: cost_model.ranks])) for rank in range(cost_model.ranks)]


@pytest.mark.parametrize("ranks", [1, 4, 6, 8])
def test_close_to_the_best_that_there_is(ranks):
    """Lognormal completion lengths after short prompts: a round costs at most 3% more than the mean of its rows.

    A row holds about 30 completions, so a sum can reach any size within half a completion, 2%; the grid of row
    capacities adds 1%.
    """
    rng = random.Random(ranks)
    groups = [GroupSize(50, tuple(int(rng.lognormvariate(6, 0.5)) for _ in range(16))) for _ in range(48)]
    cost_model = RowCostModel(ranks)
    rows = balance_rows(groups, 16_384, cost_model)
    mean = sum(map(cost_model.row_cost, rows)) / ranks
    assert cost_model.total_round_cost(rows, cost_model.row_cost) <= 1.03 * mean
    assert max(rank_sums(rows, cost_model)) <= 1.03 * mean


def test_few_lengths():
    cost_model = RowCostModel(tile=128)
    lengths = [cost_model.padded_length(n) for n in range(0, 16_385)]
    assert all(n <= length and length % 128 == 0 for n, length in enumerate(lengths))
    assert all(length <= max(n * (1 + 1 / BUCKETS_PER_OCTAVE) + 1, n + 127) for n, length in enumerate(lengths) if n)
    assert len({length for length in lengths if 8192 < length <= 16_384}) == BUCKETS_PER_OCTAVE
    assert all(RowCostModel(tile=96).padded_length(n) % 96 == 0 for n in range(0, 4096, 7))
    assert lengths[0] == 128 and RowCostModel().padded_length(0) == 1 and RowCostModel().padded_length(77) == 77


def test_many_rows_are_found_soon(monkeypatch):
    """Rows hold little more than the longest completion, so far more rows are needed than the tokens would fill.

    A search through all numbers of rounds takes 8,782 fills, 42 s, and finds 563 rows.
    """
    rng, fills, fill = random.Random(64), [], packing._fill_rows
    groups = [GroupSize(rng.randint(400, 800), tuple(rng.randint(300, 3000) for _ in range(16))) for _ in range(64)]
    monkeypatch.setattr(packing, "_fill_rows", lambda *args: fills.append(args[3]) or fill(*args))
    rows = balance_rows(groups, 4096, RowCostModel(1, None, 1e-4))
    assert len(fills) < 500 and len(rows) < 1.03 * 563


def test_a_round_less_is_worth_a_repeated_prompt(monkeypatch):
    """Three groups of 100 tokens in rows of 175: two rows with a split group (350 tokens), or three rows (300)."""
    groups = [GroupSize(50, (25, 25))] * 3
    assert [tokens(row) for row in balance_rows(groups, 175, SINGLE_RANK)] == [175, 175]
    monkeypatch.setattr(packing, "ROUND_OVERHEAD_TOKENS", 0)
    assert [tokens(row) for row in balance_rows(groups, 175, SINGLE_RANK)] == [100] * 3


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 6))
def test_dealing_is_fair(sizes, hands):
    deal = partition(sizes, hands)
    assert sorted(i for hand in deal for i in hand) == list(range(len(sizes)))
    assert len(deal) == min(hands, len(sizes)) and deal == sorted(deal)
    sums = [sum(sizes[i] for i in hand) for hand in deal]
    # Graham's bound: when the largest bin got its last item, every other bin was at least as large without it.
    assert not sizes or max(sums) - min([*sums, *[0] * (hands - len(deal))]) <= max(sizes)


def test_dealing_keeps_the_order_of_equal_items():
    assert partition([5] * 6, 3) == [[0, 3], [1, 4], [2, 5]]


def test_pack_stats_match_hand_computed_counts():
    one = PackStats(rows=2, tokens=30, labels=20, tokens_unshared=60, tokens_ideal=28, tokens_computed=40)
    assert PackStats().metrics() == {
        "pack/rows": 0.0, "pack/tokens": 0.0, "pack/labels": 0.0, "pack/rho": 1.0, "pack/efficiency": 0.0,
    }  # fmt: skip
    assert (one + one).metrics() == {
        "pack/rows": 4.0, "pack/tokens": 60.0, "pack/labels": 40.0, "pack/rho": 2.0, "pack/efficiency": 0.7,
    }  # fmt: skip


def test_partition_places_the_largest_items_first():
    assert partition([1, 1, 2], 2) == [[0, 1], [2]]


def test_context_hashes_are_published_values_of_splitmix64():
    # The first outputs of the generator with seed 0 are those of the keys 1, 2 and 3.
    hashes = packing._splitmix64(np.zeros(3, np.int64), np.array([1, 2, 3]))
    assert hashes.tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    wide = packing._splitmix64(np.zeros(1, np.int64), np.array([2**32 + 2]))
    assert packing._splitmix64(np.array([1]), np.array([2])) == wide
