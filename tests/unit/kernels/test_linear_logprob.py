"""linear_logprob against full logits and finite differences."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune_ext.kernels import linear_logprob as module
from torchtune_ext.kernels.linear_logprob import linear_gather, linear_logprob, linear_logprob_reference, linear_top_k


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("chunk_elements", [1, 60, 1 << 27])  # one label per chunk, a ragged last chunk, one chunk
def test_equals_whole_logits(monkeypatch, temperature, chunk_elements, softcap):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_elements)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 60)  # six blocks of at most two labels
    torch.manual_seed(0)
    hidden = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(23, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 23, (11,))
    upstream = torch.randn(2, 11, dtype=torch.float64)
    want = torch.stack(linear_logprob_reference(hidden, weight, labels, temperature, softcap))
    result = torch.stack(linear_logprob(hidden, weight, labels, temperature, softcap))
    assert (want - result).abs().max() < 1e-12
    for a, b in zip(
        torch.autograd.grad(want, (hidden, weight), upstream),
        torch.autograd.grad(result, (hidden, weight), upstream),
        strict=True,
    ):
        assert (a - b).abs().max() < 1e-12


def test_gradcheck(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 10)
    torch.manual_seed(0)
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    for softcap in (None, 1.5):
        assert torch.autograd.gradcheck(
            lambda h, w, cap=softcap: linear_logprob(h, w, torch.arange(5), 0.8, cap), (hidden, weight)
        )


def test_bfloat16_states_get_float32_sums():
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 32).bfloat16(), (torch.randn(500, 32) * 0.5).bfloat16()
    labels = torch.randint(0, 500, (64,))
    logprobs, entropy = linear_logprob(hidden, weight, labels)
    want, want_entropy = linear_logprob_reference(hidden.double(), weight.double(), labels)
    assert logprobs.dtype == entropy.dtype == torch.float32
    # the logits are rounded to bfloat16 (8 bits): half an ulp of a logit below 16 is 2^-5, once for z_y and once in logsumexp
    assert (logprobs - want).abs().max() < 2 * 2**-5
    assert (entropy - want_entropy).abs().max() < 4 * 2**-5


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("softcap", [None, 10.0])
@pytest.mark.parametrize(
    "dtype, chunk_elements, products",
    [(torch.bfloat16, 1 << 27, 3), (torch.bfloat16, 32 * 500, 8), (torch.float32, 1 << 27, 4)],
)
def test_linear_logprob_half_precision_chunk_logits_computed_once(
    monkeypatch, dtype, chunk_elements, products, softcap
):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_elements)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 3 * 500)
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 32).to(dtype).requires_grad_() for n in (64, 500))
    labels, upstream = torch.randint(0, 500, (64,)), torch.randn(2, 64)
    with Products() as counter:
        logprobs = torch.stack(linear_logprob(hidden, weight, labels, 0.8, softcap))
        grads = torch.autograd.grad(logprobs, (hidden, weight), upstream, retain_graph=True)
    assert counter.count == products
    again = torch.autograd.grad(logprobs, (hidden, weight), upstream)  # the saved logits are unchanged
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    whole = torch.stack(linear_logprob_reference(*exact, labels, 0.8, softcap))
    want = torch.autograd.grad(whole, exact, upstream.double())
    # A logit is rounded to 8 bits, and so is its share of the gradient. The sums over 500 and 64 average the errors.
    for a, b in zip(grads, want, strict=True):
        assert (a - b).norm() < (2**-5 if dtype == torch.bfloat16 else 1e-5) * b.norm()


@pytest.mark.parametrize(
    ("device", "gpu_bytes", "labels"),
    [
        ("cpu", 0, 883),
        ("cuda", 24 << 30, 883),
        ("cuda", 48 << 30, 883),
        ("cuda", 79 << 30, 3533),
        ("cuda", 139 << 30, 3533),
    ],
)
def test_head_chunks_are_larger_on_large_gpu(device, gpu_bytes, labels, monkeypatch):
    """The vocabulary of Qwen2.5 7B, on the named device in place of a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=gpu_bytes))
    module._gpu_bytes.cache_clear()
    chunks = module._chunks(16_000, SimpleNamespace(shape=(151_936, 8), device=torch.device(device)))
    module._gpu_bytes.cache_clear()
    assert {c.stop - c.start for c in chunks[:-1]} == {labels} and chunks[-1].stop == 16_000


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[80.0, 0.0], [-80.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    logprobs, entropy = linear_logprob(hidden, weight, torch.tensor([1, 0]))
    (logprobs + entropy).sum().backward()
    assert logprobs.tolist() == pytest.approx([-160.0, -160.0])
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()


def test_no_labels():
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    logprobs, entropy = linear_logprob(hidden, weight, torch.empty(0, dtype=torch.int64))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == (0,) and weight.grad.abs().max() == 0


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("k", [1, 5, 23, 40])  # 40 exceeds the vocabulary
def test_top_k_and_gather(monkeypatch, k, softcap):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 60)
    torch.manual_seed(0)
    hidden = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(23, 8, dtype=torch.float64, requires_grad=True)

    def whole_logprobs(hidden):
        logits = hidden @ weight.T
        return torch.log_softmax((softcap * torch.tanh(logits / softcap) if softcap else logits) / 0.7, -1).detach()

    whole = whole_logprobs(hidden)
    top, ids = linear_top_k(hidden, weight, k, 0.7, softcap)
    want = whole.topk(min(k, 23), -1)
    assert torch.equal(ids, want.indices) and (top - want.values).abs().max() < 1e-12
    assert not top.requires_grad
    other = torch.randn(11, 8, dtype=torch.float64)
    logprobs = linear_gather(other, weight, ids, 0.7, softcap)
    assert (logprobs - whole_logprobs(other).gather(1, ids)).abs().max() < 1e-12
    assert linear_gather(other[:0], weight, ids[:0]).shape == (0, min(k, 23))
