"""Rows taken by index, and values added by index, so that a run can be replayed bit for bit.

Several labels may have one index: a prompt's last token is the source of every first label of its group. Then the
gradient, or the sum, adds several values in one place. `index_add`, which is also the backward of `index_select`, adds
them in their order on a CPU and in any order on CUDA. `index_put`, the backward of `x[index]`, sorts them first on CUDA
and not on a CPU.
"""

from torch import Tensor


def take(x: Tensor, index_L: Tensor) -> Tensor:
    """Returns the rows of `x` at int64 [L] indices, repeated ones too."""
    return x[index_L] if x.is_cuda else x.index_select(0, index_L)


def add_at(zeros: Tensor, index_L: Tensor, values_L: Tensor) -> Tensor:
    """Returns `zeros` with each value added at its index."""
    if zeros.is_cuda:
        return zeros.index_put((index_L,), values_L, accumulate=True)
    return zeros.index_add(0, index_L, values_L)
