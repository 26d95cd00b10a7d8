"""Buckets by position and staleness equal a count by hand."""

from types import SimpleNamespace

import pytest
import torch

from torchtune_ext.training.buckets import BUCKET_NAMES, Breakdown, bucket_ids, bucket_means, completion_positions


def row(lengths, versions):
    samples = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return SimpleNamespace(
        completion_index_L=samples,
        versions_L=torch.tensor(versions, dtype=torch.int32)[samples],
        loss_weights_L=torch.ones(len(samples)),
    )


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


def test_bucket_means_cover_rows_and_skip_excluded_labels():
    first, second = row([2, 17], [4, 2]), row([1], [4])
    clipped = [torch.tensor([1.0, 0.0, 1.0, *[0.5] * 15, 0.0]), torch.tensor([0.0])]
    breakdown = Breakdown(("clip_fraction", "masked_fraction"))
    for r, values in zip((first, second), clipped, strict=True):
        breakdown.add(r, {"clip_fraction": values, "entropy": values}, version=4)
    means = breakdown.means({name: value.item() for name, value in breakdown.sums().items()})
    assert means == pytest.approx(
        {
            "loss/clip_fraction_at_0": 2 / 3,
            "loss/clip_fraction_at_1_15": (0 + 15 * 0.5) / 16,
            "loss/clip_fraction_at_16_255": 0.0,
            "loss/clip_fraction_staleness_0": 1 / 3,
            "loss/clip_fraction_staleness_2_3": 8.5 / 17,
        }
    )


def test_bucket_single_staleness_has_no_breakdown():
    r = row([3], [1])
    assert set(bucket_means(torch.ones(3), bucket_ids(r, 5))) == {"at_0", "at_1_15"}
    empty = Breakdown(("clip_fraction",))
    assert empty.means(empty.sums()) == {}
