"""Takes rows by index, and adds values by index, so that a run can be replayed bit for bit."""

from torch import Tensor


def gather_rows(x: Tensor, index_L: Tensor) -> Tensor:
    """Returns the rows of `x` at int64 [L] indices, repeated ones too."""
    # A prompt's last token is the source of every first label of its group, so the gradient adds several values in one
    # place. The backward of `x[index]` is `index_put`, that of `index_select` is `index_add`: see `add_at`.
    return x[index_L] if x.is_cuda else x.index_select(0, index_L)


def add_rows_at(zeros: Tensor, index_L: Tensor, values_L: Tensor) -> Tensor:
    """Returns `zeros` with each value added at its index."""
    # On CUDA, `index_put` sorts values with the same index before it adds them, and `index_add` takes any order. On a
    # CPU, only `index_add` adds them in their order.
    if zeros.is_cuda:
        return zeros.index_put((index_L,), values_L, accumulate=True)
    return zeros.index_add(0, index_L, values_L)
