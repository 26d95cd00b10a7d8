"""Metrics of labels: over all labels, and by position in the completion and by staleness.

The staleness of a label is the number of policy versions since it was sampled.
"""

import itertools
from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from torchtune_ext.pipeline.packing import Row
from torchtune_ext.training.collectives import all_gather, is_distributed

POSITION_EDGES = (0, 1, 16, 256, 1024, 4096)  # first position of each bucket; 0: first token of a completion
STALENESS_EDGES = (0, 1, 2, 4, 8)  # lowest staleness of each bucket, in versions


def bucket_names(prefix: str, edges: Sequence[int]) -> list[str]:
    """Makes bucket names from the buckets' first values: "at_0", "at_1_15", ..., "at_4096_up"."""
    last = [f"_{stop - 1}" if stop - start > 1 else "" for start, stop in itertools.pairwise(edges)]
    return [f"{prefix}_{start}{end}" for start, end in zip(edges, [*last, "_up"], strict=True)]


BUCKET_NAMES = [*bucket_names("at", POSITION_EDGES), *bucket_names("staleness", STALENESS_EDGES)]
STALENESS_0_BUCKET = len(POSITION_EDGES)  # index into BUCKET_NAMES of tokens that the current version sampled


def completion_positions(completion_index_L: Tensor) -> Tensor:
    """The position of every label in its completion, from 0; int64 [L].

    The labels of a completion must be contiguous.
    """
    index_L = torch.arange(completion_index_L.numel(), device=completion_index_L.device)
    first_L = torch.ones_like(completion_index_L, dtype=torch.bool)
    first_L[1:] = completion_index_L[1:] != completion_index_L[:-1]
    # The running maximum of the first labels' indices is the start of the completion of each label.
    return index_L - torch.where(first_L, index_L, 0).cummax(0).values if completion_index_L.numel() else index_L


def bucket_ids(row: Row, version: int | None) -> Tensor:
    """The position bucket and the staleness bucket of every label.

    Args:
        row: a packed row.
        version: the current policy version, from which staleness is counted; None: every staleness is 0.

    Returns:
        Indices into BUCKET_NAMES, int64 [2, L].
    """
    staleness_L = torch.zeros_like(row.versions_L) if version is None else (version - row.versions_L).clamp(min=0)
    position_edges, staleness_edges = _edges_on(staleness_L.device)
    position_L = torch.bucketize(completion_positions(row.completion_index_L), position_edges, right=True)
    staleness_L = torch.bucketize(staleness_L, staleness_edges, right=True)
    return torch.stack([position_L, STALENESS_0_BUCKET + staleness_L])


@cache
def _edges_on(device: torch.device) -> tuple[Tensor, Tensor]:
    """The first values of all buckets but the first, of positions and of staleness."""
    # A copy to a GPU waits for the GPU, so it is not made for each row.
    return torch.tensor(POSITION_EDGES[1:], device=device), torch.tensor(STALENESS_EDGES[1:], device=device)


def bucket_means(values_L: Tensor, buckets_2L: Tensor) -> dict[str, float]:
    """The mean of each bucket that has a label. Staleness buckets are omitted if only one has labels."""
    sums, counts = _sums(values_L, buckets_2L), _sums(torch.ones_like(values_L), buckets_2L)
    return _means("", sums.tolist(), counts.tolist())


def _sums(values_L: Tensor, buckets_2L: Tensor) -> Tensor:
    # Each label counts in two buckets: its position bucket and its staleness bucket.
    sums = torch.zeros(len(BUCKET_NAMES), dtype=torch.float64, device=values_L.device)
    return sums.index_add(0, buckets_2L.flatten(), values_L.double().repeat(2))


def _means(prefix: str, sums: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
    # If all labels are in one staleness bucket, that bucket would only repeat the mean of all labels.
    varies = sum(count > 0 for count in counts[len(POSITION_EDGES) :]) > 1
    return {
        f"{prefix}{name}": sums[i] / counts[i]
        for i, name in enumerate(BUCKET_NAMES)
        if counts[i] > 0 and (varies or i < len(POSITION_EDGES))
    }


class Accumulator:
    """Accumulates metrics over the rows of an update: sums, and means and maxima over labels.

    A mean is over all labels, also of rows without the metric. All numbers stay on the device until
    `reduce`, so that the CPU waits for the device only once.
    """

    # In the order of the reduced metrics; the count of labels is first.
    KINDS = ("count", "mean", "max", "sum", "buckets")

    def __init__(self, device: torch.device):
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        # (kind, name) -> a scalar, or one number per bucket. For a maximum: NaN if it is NaN, else 0.
        self._totals = {("count", ""): self._zero}
        self._maxima: dict[tuple[str, str], Tensor] = {}

    def add_labels(self, buckets_2L: Tensor) -> None:
        """Counts the labels of a row, given their `bucket_ids`."""
        self._add(("count", ""), _sums(torch.ones_like(buckets_2L[0]), buckets_2L))

    def add_sum(self, name: str, value: Tensor) -> None:
        """Adds a scalar to a sum."""
        self._add(("sum", name), value)

    def add_mean(self, name: str, values_L: Tensor) -> None:
        """Adds the labels of a row to a mean."""
        self._add(("mean", name), values_L.sum())

    def add_bucketed(self, name: str, values_L: Tensor, buckets_2L: Tensor) -> None:
        """Adds the labels of a row to the means of their buckets, such as "<name>_at_0"."""
        self._add(("buckets", name), _sums(values_L, buckets_2L))

    def add_max(self, name: str, values_L: Tensor) -> None:
        """Adds the labels of a row to a maximum, which is NaN if any value is NaN."""
        if values_L.numel():
            key, maximum = ("max", name), values_L.max().double()
            self._maxima[key] = maximum.maximum(self._maxima.get(key, maximum))
            # The maximum over ranks may drop a NaN, but their sum does not.
            self._add(key, torch.where(maximum.isnan(), maximum, 0.0))

    def _add(self, key: tuple[str, str], value: Tensor) -> None:
        self._totals[key] = self._totals.get(key, self._zero) + value.double()

    def reduce(self) -> dict[str, float]:
        """Returns the metrics over the rows of all ranks, on every rank. A collective."""
        # Ranks may have different metrics: a rank without labels has no maxima, and a loss may
        # return a metric for some rows only.
        keys = dict.fromkeys(key for rank_keys in all_gather([*self._totals]) for key in rank_keys)
        keys = sorted(keys, key=lambda key: self.KINDS.index(key[0]))
        # One tensor holds all numbers, so a scalar fills all buckets.
        maxima = torch.stack([self._maxima.get(key, self._zero - torch.inf) for key in keys])
        sums = torch.stack([self._totals.get(key, self._zero).expand(len(BUCKET_NAMES)) for key in keys], dim=1)
        numbers = torch.vstack([maxima, sums]).to("cpu")
        if is_distributed():
            dist.all_reduce(numbers[0], op=dist.ReduceOp.MAX)
            dist.all_reduce(numbers[1:])
        (_, *counts), *columns = numbers.T.tolist()
        # Every label is in one position bucket.
        num_labels = sum(counts[: len(POSITION_EDGES)]) or 1.0
        metrics: dict[str, float] = {}
        for (kind, name), (maximum, *column) in zip(keys[1:], columns, strict=True):
            if kind == "buckets":
                metrics |= _means(f"{name}_", column, counts)
            else:
                metrics[name] = {"mean": column[0] / num_labels, "max": column[0] or maximum, "sum": column[0]}[kind]
        return metrics
