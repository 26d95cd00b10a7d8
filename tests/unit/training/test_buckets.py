"""Buckets by position and staleness equal a count by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from torchtune_ext.training.buckets import BUCKET_NAMES, Accumulator, bucket_ids, bucket_means, completion_positions


def row(lengths, versions):
    samples = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return SimpleNamespace(completion_index_L=samples, versions_L=torch.tensor(versions, dtype=torch.int32)[samples])


def test_completion_positions_restart_per_completion():
    assert completion_positions(torch.tensor([0, 0, 0, 1, 2, 2])).tolist() == [0, 1, 2, 0, 0, 1]
    assert completion_positions(torch.empty(0, dtype=torch.int64)).tolist() == []


def test_every_position_and_staleness_has_its_bucket():
    assert BUCKET_NAMES == ["at_0", "at_1_15", "at_16_255", "at_256_1023", "at_1024_4095", "at_4096_up",
                     "staleness_0", "staleness_1", "staleness_2_3", "staleness_4_7", "staleness_8_up"]  # fmt: skip
    position, staleness = bucket_ids(row([5000], [3]), version=3)
    assert [int((position == i).sum()) for i in range(6)] == [1, 15, 240, 768, 3072, 904]
    staleness_buckets = [int(bucket_ids(row([1], [0]), version)[1]) - 6 for version in range(10)]
    assert staleness_buckets == [0, 1, 2, 2, 3, 3, 3, 3, 4, 4]
    assert staleness.unique().tolist() == [6] and bucket_ids(row([2], [7]), None)[1].tolist() == [6, 6]


def accumulate(*rows):
    """Accumulates the values of each row as `clip_fraction`, and as a mean, a sum and a maximum."""
    accumulator = Accumulator(torch.device("cpu"))
    for r, values in rows:
        buckets_2L = bucket_ids(r, 4)
        accumulator.add_labels(buckets_2L)
        accumulator.add_bucketed("clip_fraction", values, buckets_2L)
        accumulator.add_mean("mean", values)
        accumulator.add_max("largest", values)
        accumulator.add_sum("total", values.sum())
    return accumulator


def test_accumulator_reduces_rows_and_skips_excluded_labels():
    first, second = row([2, 17], [4, 2]), row([1], [4])
    clipped = [torch.tensor([1.0, 0.0, 1.0, *[0.5] * 15, 0.0]), torch.tensor([0.0])]
    metrics = accumulate((first, clipped[0]), (second, clipped[1])).reduce()
    assert metrics == pytest.approx(
        {
            "mean": 9.5 / 20,
            "largest": 1.0,
            "total": 9.5,
            "clip_fraction_at_0": 2 / 3,
            "clip_fraction_at_1_15": (0 + 15 * 0.5) / 16,
            "clip_fraction_at_16_255": 0.0,
            "clip_fraction_staleness_0": 1 / 3,
            "clip_fraction_staleness_2_3": 8.5 / 17,
        }
    )


def test_accumulator_mean_counts_rows_without_metric():
    accumulator = accumulate((row([2], [4]), torch.ones(2)), (row([6], [4]), torch.ones(6)))
    accumulator.add_mean("some", torch.full((2,), 4.0))
    assert accumulator.reduce()["some"] == 1.0


@pytest.mark.parametrize(
    "values, largest", [([-2.0, -1.0], -1.0), ([torch.inf, 1.0], torch.inf), ([-torch.inf] * 2, -torch.inf)]
)
def test_accumulator_maximum_keeps_infinity_and_nan(values, largest):
    rows = [(row([1], [4]), torch.tensor([value])) for value in values]
    assert accumulate(*rows).reduce()["largest"] == largest
    for place in range(3):
        rows_with_nan = [*rows[:place], (row([1], [4]), torch.tensor([torch.nan])), *rows[place:]]
        assert math.isnan(accumulate(*rows_with_nan).reduce()["largest"])


def test_accumulator_without_labels_has_no_maximum():
    empty = row([0], [4]), torch.empty(0)
    assert accumulate(empty).reduce() == {"mean": 0.0, "total": 0.0}
    assert Accumulator(torch.device("cpu")).reduce() == {}


def test_bucket_single_staleness_has_no_breakdown():
    r = row([3], [1])
    assert set(bucket_means(torch.ones(3), bucket_ids(r, 5))) == {"at_0", "at_1_15"}
