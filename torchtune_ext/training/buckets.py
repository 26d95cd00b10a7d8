"""Means over labels, by position in the completion and by staleness.

The staleness of a label is the number of policy versions since it was sampled.
"""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchtune_ext.pipeline.packing import Row

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
    position_L = torch.bucketize(
        completion_positions(row.completion_index_L),
        torch.tensor(POSITION_EDGES[1:], device=staleness_L.device),
        right=True,
    )
    staleness_L = torch.bucketize(staleness_L, torch.tensor(STALENESS_EDGES[1:], device=staleness_L.device), right=True)
    return torch.stack([position_L, STALENESS_0_BUCKET + staleness_L])


def bucket_means(values_L: Tensor, buckets_2L: Tensor) -> dict[str, float]:
    """The mean of each bucket that has a label. Age buckets are omitted if only one has labels."""
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


class Breakdown:
    """Accumulates loss metrics over the rows of an update, by position and staleness.

    The means show where in completions the loss clips or masks.
    """

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._sums: dict[str, Tensor] = {}  # metric of the loss -> sum per bucket; "" -> counts

    def add(self, row: Row, metrics: Mapping[str, Tensor], version: int | None) -> None:
        """Adds the loss metrics of a row: detached tensors of one value per label, [L]."""
        buckets_2L = bucket_ids(row, version)
        columns = {name: metrics[name] for name in self._names if name in metrics}
        for name, values_L in (columns | {"": torch.ones_like(row.loss_weights_L)}).items():
            self._sums[name] = self._sums.get(name, 0.0) + _sums(values_L, buckets_2L)

    def sums(self) -> dict[str, Tensor]:
        """The sums and counts of this rank, to be summed over all ranks; scalars on the device."""
        return {f"{name}/{i}": value for name, column in self._sums.items() for i, value in enumerate(column)}

    def means(self, totals: Mapping[str, float]) -> dict[str, float]:
        """The means, such as "loss/clip_fraction_at_0", from sums over all ranks."""

        def column(name: str) -> list[float]:
            return [totals[f"{name}/{i}"] for i in range(len(BUCKET_NAMES))]

        means = {}
        for name in self._names:
            if f"{name}/0" in totals:
                means |= _means(f"loss/{name}_", column(name), column(""))
        return means
