"""Computes log-prob and entropy of labels from hidden states, without ever holding all the logits [L, V].

With z = h W^T / temperature, p = softmax(z) and H the entropy of p, for one label y::

    log p(y) = z_y - logsumexp(z)                     d log p(y) / dz = onehot(y) - p
    H        = logsumexp(z) - sum(p * z)              dH / dz         = -p * (log p + H)

Forward and backward go over the labels in chunks. The backward pass computes the logits of a chunk again, so the peak
of memory is one chunk [C, V] for any L. (With a vocabulary of 151,936, the logits of 16k labels would need 10 GB in
float32.) The gradients of hidden states and weight are exact. Sums over the vocabulary are computed in float32 (in
float64 for float64 input).
"""

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 27  # logits held at a time: 512 MiB in float32


def linear_logprob_reference(
    hidden_LD: Tensor, weight_VD: Tensor, labels_L: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Computes from whole logits what `linear_logprob` must equal."""
    logprobs_LV = torch.log_softmax(_upcast(hidden_LD @ weight_VD.T) / temperature, dim=-1)
    entropy_L = -(logprobs_LV.exp() * logprobs_LV).sum(-1)
    return logprobs_LV.gather(1, labels_L[:, None])[:, 0], entropy_L


def linear_logprob(
    hidden_LD: Tensor, weight_VD: Tensor, labels_L: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns the log-prob of each label and the entropy of its distribution, in nats.

    Args:
        hidden_LD: the hidden states that predict the labels, of a floating-point dtype.
        weight_VD: output projection.
        labels_L: ids of the labels in [0, V), int64.
        temperature: the logits are divided by it, as in sampling.

    Returns:
        (logprobs_L, entropy_L), float32 (float64 for float64 input), differentiable in `hidden_LD` and `weight_VD`.
    """
    return _LinearLogProb.apply(hidden_LD, weight_VD, labels_L, 1.0 / temperature)


@torch.no_grad()
def linear_top_k(hidden_LD: Tensor, weight_VD: Tensor, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns the k highest log-probs of every distribution, the highest first, and their ids, without gradients.

    Returns:
        (logprobs_LK, ids_LK), in nats and int64. K is at most the size of the vocabulary.
    """
    k = min(k, weight_VD.shape[0])
    num_labels = hidden_LD.shape[0]
    logprobs_LK = _upcast(hidden_LD).new_empty(num_labels, k)
    ids_LK = torch.empty(num_labels, k, dtype=torch.int64, device=hidden_LD.device)
    for c in _chunks(num_labels, weight_VD.shape[0]):
        z = _upcast(hidden_LD[c] @ weight_VD.T).mul_(1.0 / temperature)
        top, ids_LK[c] = z.topk(k, dim=-1)
        logprobs_LK[c] = top - torch.logsumexp(z, dim=-1, keepdim=True)
    return logprobs_LK, ids_LK


@torch.no_grad()
def linear_gather(hidden_LD: Tensor, weight_VD: Tensor, ids_LK: Tensor, temperature: float = 1.0) -> Tensor:
    """Returns the log-probs [L, K] of given ids, in nats, without gradients."""
    logprobs_LK = _upcast(hidden_LD).new_empty(ids_LK.shape)
    for c in _chunks(hidden_LD.shape[0], weight_VD.shape[0]):
        z = _upcast(hidden_LD[c] @ weight_VD.T).mul_(1.0 / temperature)
        logprobs_LK[c] = z.gather(1, ids_LK[c]) - torch.logsumexp(z, dim=-1, keepdim=True)
    return logprobs_LK


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _chunks(num_labels: int, vocab: int) -> list[slice]:
    """Returns at least one chunk, which is empty where there are no labels."""
    size = max(1, CHUNK_ELEMENTS // vocab)
    return [slice(start, min(start + size, num_labels)) for start in range(0, max(num_labels, 1), size)]


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_LD: Tensor, weight_VD: Tensor, labels_L: Tensor, scale: float):
        ctx.set_materialize_grads(False)
        accumulate = torch.float64 if hidden_LD.dtype == torch.float64 else torch.float32
        logprobs_L = torch.empty(labels_L.shape, dtype=accumulate, device=hidden_LD.device)
        entropy_L, lse_L = torch.empty_like(logprobs_L), torch.empty_like(logprobs_L)
        for c in _chunks(labels_L.numel(), weight_VD.shape[0]):
            # Two arrays of the chunk's size are all that is needed, so what torch.logsumexp does is done here in place.
            z = _upcast(hidden_LD[c] @ weight_VD.T).mul_(scale)
            top = z.amax(dim=-1, keepdim=True)
            z.sub_(top)
            p = z.exp()
            total = p.sum(-1)
            logprobs_L[c] = z.gather(1, labels_L[c, None])[:, 0] - total.log()
            entropy_L[c] = total.log() - p.mul_(z).sum(-1) / total
            lse_L[c] = top[:, 0] + total.log()
            del z, p
        ctx.save_for_backward(hidden_LD, weight_VD, labels_L, lse_L, entropy_L)
        ctx.scale = scale
        return logprobs_L, entropy_L

    @staticmethod
    def backward(ctx, d_logprobs_L: Tensor | None, d_entropy_L: Tensor | None):
        hidden_LD, weight_VD, labels_L, lse_L, entropy_L = ctx.saved_tensors
        d_logprobs_L = torch.zeros_like(lse_L) if d_logprobs_L is None else d_logprobs_L
        d_hidden_LD = torch.empty_like(hidden_LD)
        # With adapters the output projection is frozen and needs no gradient. That gradient would be as large as the
        # projection, and a third of the work.
        d_weight_VD = None
        for c in _chunks(labels_L.numel(), weight_VD.shape[0]):
            # The gradient is dz = d_logprob * (onehot - p) - d_entropy * p * (log p + H).
            dz = _upcast(hidden_LD[c] @ weight_VD.T).mul_(ctx.scale).sub_(lse_L[c, None])
            if d_entropy_L is None:
                dz.exp_().mul_(-d_logprobs_L[c, None])
            else:
                p = dz.exp()
                dz.add_(entropy_L[c, None]).mul_(d_entropy_L[c, None]).add_(d_logprobs_L[c, None]).mul_(p).neg_()
                del p
            dz.scatter_add_(1, labels_L[c, None], d_logprobs_L[c, None])
            dz = dz.mul_(ctx.scale).to(weight_VD.dtype)
            d_hidden_LD[c] = dz @ weight_VD
            if ctx.needs_input_grad[1]:
                product = dz.T @ hidden_LD[c]
                # Chunks are summed up in float32. A single one is rounded once and needs no copy.
                d_weight_VD = product if d_weight_VD is None else _upcast(d_weight_VD).add_(product)
            del dz
        return d_hidden_LD, None if d_weight_VD is None else d_weight_VD.to(weight_VD.dtype), None, None
