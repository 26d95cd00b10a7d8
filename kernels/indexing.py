"""Deterministic gather and scatter-add, so that a run can be reproduced bit for bit."""

from torch import Tensor


def gather_rows(x: Tensor, index_L: Tensor) -> Tensor:
    """Returns the rows of `x` at int64 [L] indices, which may repeat."""
    # The hidden state of a prompt's last token predicts every first label of its group, so the
    # gradient adds several values at one index. The backward of `x[index]` is `index_put`, and the
    # backward of `index_select` is `index_add`. `add_rows_at` says why each device needs its own.
    return x[index_L] if x.is_cuda else x.index_select(0, index_L)


def add_rows_at(zeros: Tensor, index_L: Tensor, values_L: Tensor) -> Tensor:
    """Returns a copy of `zeros` with each value added at its index."""
    # On CUDA, `index_put` sorts values by index before it adds them, and `index_add` adds in
    # nondeterministic order. On a CPU, only `index_add` adds values in their order.
    if zeros.is_cuda:
        return zeros.index_put((index_L,), values_L, accumulate=True)
    return zeros.index_add(0, index_L, values_L)
