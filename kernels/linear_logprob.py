"""Computes log-probs and entropies of labels from hidden states without the full logits [L, V].

With z = f(h W^T) / temperature, p = softmax(z) and H the entropy of p, for one label y::

    log p(y) = z_y - logsumexp(z)                     d log p(y) / dz = onehot(y) - p
    H        = logsumexp(z) - sum(p * z)              dH / dz         = -p * (log p + H)

f is the identity, or a soft cap: f(x) = c tanh(x / c), with the derivative 1 - tanh(x / c)^2.
Forward and backward process the labels in chunks of C labels, so peak memory is one chunk [C, V]
for any L. (With a vocabulary of 151,936, the logits of 16k labels would need 10 GB in float32.)
Gradients are exact. Sums over the vocabulary are in float32 (in float64 for float64 input).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Logits per chunk: 512 MiB in float32, and 2 GiB on a GPU of 80 GB or more.
CHUNK_ELEMENTS, LARGE_CHUNK_ELEMENTS = 1 << 27, 1 << 29
LARGE_GPU_BYTES = 80 * 10**9
# Logits per block on a CPU. The passes over a block find it in the caches, and float32 copies of
# half-precision logits are at most as large as a block.
BLOCK_ELEMENTS = 1 << 20


def linear_logprob_reference(
    hidden_LD: Tensor,
    weight_VD: Tensor,
    labels_L: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes `linear_logprob` from the full logits, as a reference for tests."""
    logits_LV = _upcast(hidden_LD @ weight_VD.T)
    if softcap is not None:
        logits_LV = softcap * torch.tanh(logits_LV / softcap)
    logprobs_LV = torch.log_softmax(logits_LV / temperature, dim=-1)
    entropy_L = -(logprobs_LV.exp() * logprobs_LV).sum(-1)
    return logprobs_LV.gather(1, labels_L[:, None])[:, 0], entropy_L


def linear_logprob(
    hidden_LD: Tensor,
    weight_VD: Tensor,
    labels_L: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the log-prob of each label and the entropy of its distribution, in nats.

    Args:
        hidden_LD: hidden states that predict the labels, floating point.
        weight_VD: output projection.
        labels_L: label ids in [0, V), int64.
        temperature: divides the logits, as in sampling.
        softcap: soft cap of the logits, before the temperature; None: no cap.

    Returns:
        (logprobs_L, entropy_L), float32 (float64 for float64 input), differentiable in `hidden_LD`
        and `weight_VD`.
    """
    return _LinearLogProb.apply(hidden_LD, weight_VD, labels_L, 1.0 / temperature, softcap)


@torch.no_grad()
def linear_top_k(
    hidden_LD: Tensor, weight_VD: Tensor, k: int, temperature: float = 1.0, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the K = min(k, V) highest log-probs and their ids, both [L, K], without gradient."""
    k = min(k, weight_VD.shape[0])
    num_labels = hidden_LD.shape[0]
    logprobs_LK = _upcast(hidden_LD).new_empty(num_labels, k)
    ids_LK = torch.empty(num_labels, k, dtype=torch.int64, device=hidden_LD.device)
    for c in _chunks(num_labels, weight_VD):
        z = _scaled_logits(hidden_LD[c] @ weight_VD.T, 1.0 / temperature, softcap)
        top, ids_LK[c] = z.topk(k, dim=-1)
        logprobs_LK[c] = top - torch.logsumexp(z, dim=-1, keepdim=True)
    return logprobs_LK, ids_LK


@torch.no_grad()
def linear_gather(
    hidden_LD: Tensor, weight_VD: Tensor, ids_LK: Tensor, temperature: float = 1.0, softcap: float | None = None
) -> Tensor:
    """Returns the log-probs [L, K] of the given ids, in nats, without gradient."""
    logprobs_LK = _upcast(hidden_LD).new_empty(ids_LK.shape)
    for c in _chunks(hidden_LD.shape[0], weight_VD):
        z = _scaled_logits(hidden_LD[c] @ weight_VD.T, 1.0 / temperature, softcap)
        logprobs_LK[c] = z.gather(1, ids_LK[c]) - torch.logsumexp(z, dim=-1, keepdim=True)
    return logprobs_LK


def chunk_elements(gpu_bytes: int) -> int:
    """Returns the number of logits per chunk on a GPU with this memory; 0: on a CPU."""
    # Each chunk of the backward reads and writes a gradient of the weight's size in float32. With
    # small chunks and a wide model this takes longer than the chunk's matrix products.
    return LARGE_CHUNK_ELEMENTS if gpu_bytes >= LARGE_GPU_BYTES else CHUNK_ELEMENTS


@cache
def _gpu_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _chunks(num_labels: int, weight_VD: Tensor) -> list[slice]:
    # Zero labels make one empty chunk, so that the weight still gets a gradient (zeros).
    size = max(1, chunk_elements(_gpu_bytes(weight_VD.device)) // weight_VD.shape[0])
    return [slice(start, min(start + size, num_labels)) for start in range(0, max(num_labels, 1), size)]


def _scaled_logits(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Returns z = `scale` * f(`logits`), upcast; f caps. It may overwrite `logits`."""
    z = _upcast(logits)
    return z.mul_(scale) if softcap is None else z.div_(softcap).tanh_().mul_(softcap * scale)


def _logit_stats(z_CV: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Computes statistics of each row of z = `scale` * f(logits).

    Returns:
        max z, log sum exp(z - max z), and the entropy in nats, each [C].
    """
    # The in-place operations need only two arrays of the chunk's size. torch.logsumexp would need
    # more.
    z_CV = _scaled_logits(z_CV, scale, softcap)
    max_C1 = z_CV.amax(dim=-1, keepdim=True)
    z_CV.sub_(max_C1)
    p_CV = z_CV.exp()
    sum_C = p_CV.sum(-1)
    return max_C1[:, 0], sum_C.log(), sum_C.log() - p_CV.mul_(z_CV).sum(-1) / sum_C


def _logit_grad(
    z_CV: Tensor,
    scale: float,
    softcap: float | None,
    lse_C1: Tensor,
    entropy_C1: Tensor,
    d_logprobs_C1: Tensor,
    d_entropy_C1: Tensor | None,
    is_label: bool = False,
) -> Tensor:
    """Returns the gradient of the logits, of the labels with the onehot term, of others without it.

    It is scale f' dz, dz = d_logprob * (onehot - p) - d_entropy * p * (log p + H).
    """
    z_CV = _scaled_logits(z_CV, scale, softcap)
    # f' = 1 - (f / c)^2, f = z / scale.
    slope_CV = None if softcap is None else 1.0 - (z_CV / (softcap * scale)).square_()
    z_CV = z_CV.sub_(lse_C1)
    # Without an entropy term, p can overwrite z.
    if d_entropy_C1 is None:
        dz_CV = z_CV.exp_().mul_(-d_logprobs_C1)
    else:
        p_CV = z_CV.exp()
        dz_CV = z_CV.add_(entropy_C1).mul_(d_entropy_C1).add_(d_logprobs_C1).mul_(p_CV).neg_()
    if is_label:
        dz_CV = dz_CV + d_logprobs_C1
    dz_CV = dz_CV.mul_(scale)
    return dz_CV if slope_CV is None else dz_CV.mul_(slope_CV)


def _blocks(z_CV: Tensor) -> list[slice]:
    size = max(1, BLOCK_ELEMENTS // z_CV.shape[1])
    return [slice(start, start + size) for start in range(0, max(len(z_CV), 1), size)]


def _blockwise_logit_stats(z_CV: Tensor, *factors: Any) -> tuple[Tensor, ...]:
    blocks = [_logit_stats(z_CV[b], *factors) for b in _blocks(z_CV)]
    return tuple(torch.cat(parts) for parts in zip(*blocks, strict=True))


def _blockwise_logit_grad(z_CV: Tensor, dtype: torch.dtype, scale: float, softcap: float | None, *rows: Any) -> Tensor:
    # In half precision the logits may be needed again. In float32 they are overwritten anyway.
    dz_CV = torch.empty_like(z_CV, dtype=dtype) if dtype.itemsize == 2 else z_CV
    for b in _blocks(z_CV):
        parts: list[Any] = [row if row is None else row[b] for row in rows]
        block = _logit_grad(z_CV[b], scale, softcap, *parts)
        if block.data_ptr() != dz_CV[b].data_ptr():
            dz_CV[b] = block
    return dz_CV


def _rounded_logit_grad(z_CV: Tensor, dtype: torch.dtype, *arguments: Any) -> Tensor:
    return _logit_grad(z_CV, *arguments).to(dtype)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # On a GPU, the compiled function makes one pass over the logits of a chunk instead of seven. On
    # a CPU, compilation is skipped, because importing the compiler takes more than a second.
    return torch.compile(function, dynamic=True)


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_LD: Tensor, weight_VD: Tensor, labels_L: Tensor, scale: float, softcap: float | None):
        # The gradient of an unused entropy is None instead of zeros.
        ctx.set_materialize_grads(False)
        accumulate = torch.float64 if hidden_LD.dtype == torch.float64 else torch.float32
        logprobs_L = torch.empty(labels_L.shape, dtype=accumulate, device=hidden_LD.device)
        entropy_L, lse_L = torch.empty_like(logprobs_L), torch.empty_like(logprobs_L)
        statistics = _compiled(_logit_stats) if hidden_LD.is_cuda else _blockwise_logit_stats
        chunks = _chunks(labels_L.numel(), weight_VD)
        # The backward recomputes the logits. A single chunk in half precision is saved instead, which
        # spares a product; on a GPU the float32 copy in `statistics` takes twice as much anyway.
        keep = len(chunks) == 1 and hidden_LD.dtype.itemsize == 2 and any(ctx.needs_input_grad)
        saved_CV = None
        for c in chunks:
            z_CV = hidden_LD[c] @ weight_VD.T
            # Read the labels' logits first: for float32 input `statistics` overwrites the logits.
            z_C = _scaled_logits(z_CV.gather(1, labels_L[c, None])[:, 0], scale, softcap)
            max_C, log_sum_C, entropy_L[c] = statistics(z_CV, scale, softcap)
            logprobs_L[c] = z_C - max_C - log_sum_C
            lse_L[c] = max_C + log_sum_C
            saved_CV = z_CV if keep else None
            # Free these logits before the next chunk is computed.
            del z_CV
        ctx.save_for_backward(hidden_LD, weight_VD, labels_L, lse_L, entropy_L, saved_CV)
        ctx.scale, ctx.softcap = scale, softcap
        return logprobs_L, entropy_L

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor | None):
        d_logprobs_L, d_entropy_L = grad_outputs
        hidden_LD, weight_VD, labels_L, lse_L, entropy_L, saved_CV = ctx.saved_tensors
        d_logprobs_L = torch.zeros_like(lse_L) if d_logprobs_L is None else d_logprobs_L
        d_hidden_LD = torch.empty_like(hidden_LD)
        # With LoRA adapters the output projection is frozen and needs no gradient, which saves
        # memory of its size and a third of the work.
        d_weight_VD = None
        gradient = _compiled(_rounded_logit_grad) if hidden_LD.is_cuda else _blockwise_logit_grad
        for c in _chunks(labels_L.numel(), weight_VD):
            # The gradient is dz = d_logprob * (onehot - p) - d_entropy * p * (log p + H).
            z_CV = hidden_LD[c] @ weight_VD.T if saved_CV is None else saved_CV
            d_entropy_C1 = None if d_entropy_L is None else d_entropy_L[c, None]
            factors = ctx.scale, ctx.softcap, lse_L[c, None], entropy_L[c, None], d_logprobs_L[c, None], d_entropy_C1
            # The label's own entry, which includes the onehot, is computed separately in float32
            # and replaces the rounded entry: near p = 1, half precision would lose most of 1 - p.
            label_grad_C1 = _logit_grad(z_CV.gather(1, labels_L[c, None]), *factors, is_label=True)
            dz_CV = gradient(z_CV, weight_VD.dtype, *factors)
            dz_CV.scatter_(1, labels_L[c, None], label_grad_C1.to(dz_CV.dtype))
            d_hidden_LD[c] = dz_CV @ weight_VD
            if ctx.needs_input_grad[1]:
                product = dz_CV.T @ hidden_LD[c]
                # Chunks are summed in float32. A single chunk needs neither a sum nor a float32
                # copy.
                d_weight_VD = product if d_weight_VD is None else _upcast(d_weight_VD).add_(product)
            del z_CV, dz_CV
        return d_hidden_LD, None if d_weight_VD is None else d_weight_VD.to(weight_VD.dtype), None, None, None
