"""Log-prob and entropy of labels straight from hidden states, without ever holding the logits [L, V].

With z = h W^T / temperature, for one label y (p = softmax(z), H its entropy)::

    log p(y) = z_y - logsumexp(z)                     d log p(y) / dz = onehot(y) - p
    H        = logsumexp(z) - sum(p * z)              dH / dz         = -p * (log p + H)

Forward and backward walk over the labels in chunks; the backward computes a chunk's logits again, so the peak is one
chunk [C, V] whatever L is (a vocabulary of 151,936 would need 10 GB for 16k labels in float32). The gradients of hidden
states and weight are exact. Sums over the vocabulary are made in float32 (float64 for float64 input).
"""

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 27  # logits held at a time: 512 MiB in float32


def linear_logprob_reference(
    hidden_LD: Tensor, weight_VD: Tensor, labels_L: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The same from whole logits: what `linear_logprob` must equal."""
    logprobs_LV = torch.log_softmax(_upcast(hidden_LD @ weight_VD.T) / temperature, dim=-1)
    entropy_L = -(logprobs_LV.exp() * logprobs_LV).sum(-1)
    return logprobs_LV.gather(1, labels_L[:, None])[:, 0], entropy_L


def linear_logprob(
    hidden_LD: Tensor, weight_VD: Tensor, labels_L: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy of its distribution (nats).

    Args:
        hidden_LD: states that predict the labels, float.
        weight_VD: output projection.
        labels_L: int64 ids in [0, V).
        temperature: divides the logits, as in sampling.

    Returns:
        (logprobs_L, entropy_L), float32 (float64 for float64 input), differentiable in `hidden_LD` and `weight_VD`.
    """
    return _LinearLogProb.apply(hidden_LD, weight_VD, labels_L, 1.0 / temperature)


@torch.no_grad()
def linear_top_k(hidden_LD: Tensor, weight_VD: Tensor, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The k highest log-probs of every distribution, highest first, and their ids: (logprobs_LK, ids_LK int64). No gradient."""
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
    """Log-probs [L, K] of given ids. No gradient."""
    logprobs_LK = _upcast(hidden_LD).new_empty(ids_LK.shape)
    for c in _chunks(hidden_LD.shape[0], weight_VD.shape[0]):
        z = _upcast(hidden_LD[c] @ weight_VD.T).mul_(1.0 / temperature)
        logprobs_LK[c] = z.gather(1, ids_LK[c]) - torch.logsumexp(z, dim=-1, keepdim=True)
    return logprobs_LK


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _chunks(num_labels: int, vocab: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // vocab)
    return [slice(start, min(start + size, num_labels)) for start in range(0, num_labels, size)]


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_LD: Tensor, weight_VD: Tensor, labels_L: Tensor, scale: float):
        accumulate = torch.float64 if hidden_LD.dtype == torch.float64 else torch.float32
        logprobs_L = torch.empty(labels_L.shape, dtype=accumulate, device=hidden_LD.device)
        entropy_L, lse_L = torch.empty_like(logprobs_L), torch.empty_like(logprobs_L)
        for c in _chunks(labels_L.numel(), weight_VD.shape[0]):
            z = _upcast(hidden_LD[c] @ weight_VD.T).mul_(scale)
            lse = torch.logsumexp(z, dim=-1)
            logprobs_L[c] = z.gather(1, labels_L[c, None])[:, 0] - lse
            lse_L[c] = lse
            p = torch.exp(z - lse[:, None])
            entropy_L[c] = lse - p.mul_(z).sum(-1)
        ctx.save_for_backward(hidden_LD, weight_VD, labels_L, lse_L, entropy_L)
        ctx.scale = scale
        return logprobs_L, entropy_L

    @staticmethod
    def backward(ctx, d_logprobs_L: Tensor, d_entropy_L: Tensor):
        hidden_LD, weight_VD, labels_L, lse_L, entropy_L = ctx.saved_tensors
        d_hidden_LD = torch.empty_like(hidden_LD)
        d_weight_VD = None  # a frozen head (adapters) needs none: it is as large as the head, and a third of the work
        if ctx.needs_input_grad[1]:
            d_weight_VD = torch.zeros(weight_VD.shape, dtype=lse_L.dtype, device=weight_VD.device)
        for c in _chunks(labels_L.numel(), weight_VD.shape[0]):
            logp = _upcast(hidden_LD[c] @ weight_VD.T).mul_(ctx.scale).sub_(lse_L[c, None])
            p = logp.exp()
            # dz = d_logprob * (onehot - p) - d_entropy * p * (log p + H)
            logp.add_(entropy_L[c, None]).mul_(d_entropy_L[c, None]).add_(d_logprobs_L[c, None])
            dz = p.mul_(logp).neg_()
            dz.scatter_add_(1, labels_L[c, None], d_logprobs_L[c, None])
            dz = dz.mul_(ctx.scale).to(weight_VD.dtype)
            d_hidden_LD[c] = dz @ weight_VD
            if d_weight_VD is not None:
                d_weight_VD += dz.T @ hidden_LD[c]
        return d_hidden_LD, None if d_weight_VD is None else d_weight_VD.to(weight_VD.dtype), None, None
