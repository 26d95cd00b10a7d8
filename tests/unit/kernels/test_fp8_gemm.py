"""Reference GEMMs against float64 with derived bounds; arguments and choice of GPU backends."""

import importlib.machinery
import inspect
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.fp8_bounds import quantization_error
from torchtune_ext.kernels import fp8_gemm as module
from torchtune_ext.kernels.fp8_gemm import choose_backend, dgrad, fprop, wgrad
from torchtune_ext.kernels.fp8_quantize import (
    Fp8Blocks,
    dequantize,
    quantize_columns,
    quantize_rows,
    quantize_weight,
)

FUNCTIONS = {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}
# hidden size, MLP size, heads, key/value heads, head dim, from the models' config.json
MODELS = {
    "qwen2.5-0.5b": (896, 4864, 14, 2, 64),
    "qwen2.5-7b": (3584, 18944, 28, 4, 128),
    "qwen2.5-32b": (5120, 27648, 40, 8, 128),
    "qwen3-4b": (2560, 9728, 32, 8, 128),
}


def linears(width, mlp, heads, kv_heads, head):
    """(out, in) of every linear layer except the output projection, which stays in bfloat16."""
    return {(heads * head, width), (kv_heads * head, width), (width, heads * head), (mlp, width), (width, mlp)}


SHAPES = sorted(set.union(*(linears(*sizes) for sizes in MODELS.values())))


def operands(gemm, tokens, out, features, seed=0):
    """Returns the bfloat16 matrices of a GEMM, their quantization, and the float64 product as a function."""
    rng = np.random.default_rng(seed)

    def random(*shape, scale):  # every hundredth value is ten times larger, like activations
        x = rng.normal(size=shape) * np.where(rng.random(shape) < 0.01, 10, 1) * scale
        return torch.from_numpy(x.astype(np.float32)).bfloat16()

    if gemm == "fprop":
        x, w = random(tokens, features, scale=1), random(out, features, scale=0.02)
        return (x, w), (quantize_rows(x), quantize_weight(w)), lambda a, b: a @ b.T
    if gemm == "dgrad":
        dy, w = random(tokens, out, scale=1e-6), random(out, features, scale=0.02)
        return (dy, w), (quantize_rows(dy), quantize_weight(w)), lambda a, b: a @ b
    dy, x = random(tokens, out, scale=1e-6), random(tokens, features, scale=1)
    return (dy, x), (quantize_columns(dy), quantize_columns(x)), lambda a, b: a.T @ b


def cut(gemm, out, features):
    """A product of a linear layer with the full contracted axis, which determines the error; other axes are cut."""
    if gemm == "fprop":
        return gemm, 24, min(out, 128), features
    return (gemm, 24, out, min(features, 128)) if gemm == "dgrad" else (gemm, 300, min(out, 256), min(features, 128))


@pytest.mark.parametrize(
    "gemm, tokens, out, features", sorted({cut(gemm, *shape) for gemm in FUNCTIONS for shape in SHAPES})
)
def test_every_linear_of_qwen(gemm, tokens, out, features):
    (first, second), quantized, product = operands(gemm, tokens, out, features, seed=out + features)
    result = FUNCTIONS[gemm](*quantized, out_dtype=torch.float32, backend="reference").double()
    first, second = first.double(), second.double()
    first_q, second_q = (dequantize(q, torch.float64) for q in quantized)

    # 1. Against the dequantized operands: each product of K has the roundings of two dequantizations, its own and
    #    at most K of the sum in any order: |got - exact| <= (K + 3) u / (1 - (K + 3) u) sum |a| |b|, u = 2^-24.
    K = {"fprop": features, "dgrad": out, "wgrad": tokens}[gemm]
    n = (K + 3) * 2**-24
    rounding = n / (1 - n) * product(first_q.abs(), second_q.abs())
    assert ((result - product(first_q, second_q)).abs() <= rounding).all()

    # 2. Against the operands before quantization: |a^ b^ - a b| <= e_a |b| + |a| e_b + e_a e_b, summed.
    a, b = first.abs(), second.abs()
    e_a, e_b = quantization_error(first, quantized[0]), quantization_error(second, quantized[1])
    assert ((first_q - first).abs() <= e_a).all() and ((second_q - second).abs() <= e_b).all()
    error = result - product(first, second)
    assert (error.abs() <= product(a + e_a, b + e_b) - product(a, b) + rounding).all()

    # 3. On average far smaller: the RMS of an error uniform in its interval is 1/sqrt(3) of the bound, and
    #    independent errors without a common sign add in squares, like the products: sqrt(2/3) 2^-4 = 5.1%.
    assert error.norm() / product(first, second).norm() < (2 / 3) ** 0.5 * 2**-4


def test_the_bounds_are_not_loose():
    """A relative error of 1e-3 in the scales, or one swapped block, exceeds the first bound."""
    (_, _), (x, w), product = operands("fprop", 16, 256, 512)
    exact = product(dequantize(x, torch.float64), dequantize(w, torch.float64))
    bound = 515 * 2**-23 * product(dequantize(x, torch.float64).abs(), dequantize(w, torch.float64).abs())
    for wrong in (
        Fp8Blocks(w.values, w.scales * 1.001, w.block, w.shape),
        Fp8Blocks(w.values, w.scales.flip(1), w.block, w.shape),
    ):
        assert ((fprop(x, wrong, torch.float32, "reference").double() - exact).abs() > bound).any()


def test_dgrad_reuses_the_bits_of_the_weight():
    (_dy, w), (dy_q, w_q), _ = operands("dgrad", 40, 384, 256)
    assert torch.equal(dgrad(dy_q, w_q), fprop(dy_q, quantize_weight(w.T)))


def test_out_dtype_and_no_tokens():
    for gemm, function in FUNCTIONS.items():
        _, (a, b), _ = operands(gemm, 130, 256, 384)
        full = function(a, b, out_dtype=torch.float32)
        assert torch.equal(function(a, b, out_dtype=torch.bfloat16), full.bfloat16())
        assert function(a, b).dtype == (torch.float32 if gemm == "wgrad" else torch.bfloat16)
        empty = function(*operands(gemm, 0, 256, 384)[1])
        assert empty.shape == ((256, 384) if gemm == "wgrad" else (0, full.shape[1])) and not empty.any()


def test_the_reference_ignores_a_lower_matmul_precision():
    _, (x, w), _ = operands("fprop", 64, 256, 512)
    want = fprop(x, w, torch.float32, "reference")
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(fprop(x, w, torch.float32, "reference"), want)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def fake_operands(gemm, tokens, out, features):
    """A and B as CUDA tensors without memory: torch checks their layouts as it would on the GPU."""

    def fake(q):
        values, scales = (
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in (q.values, q.scales)
        )
        return Fp8Blocks(values, scales, q.block, q.shape)

    x, w, dy = torch.empty(tokens, features), torch.empty(out, features), torch.empty(tokens, out)
    if gemm == "wgrad":
        return module._operands(gemm, fake(quantize_columns(dy)), fake(quantize_columns(x)))
    return module._operands(gemm, fake(quantize_rows(x if gemm == "fprop" else dy)), fake(quantize_weight(w)))


@pytest.mark.parametrize("tokens", [1, 3, 200, 256])
@pytest.mark.parametrize("out, features", [(128, 896), (896, 128), (256, 640), (512, 384), (128, 128)])
def test_scaled_mm_accepts_our_layouts(tokens, out, features):
    """Includes K / 128 = 7, 5, 3 and 1, which are not multiples of 4."""
    shapes = {"fprop": (tokens, out), "dgrad": (tokens, features), "wgrad": (out, features)}
    with FakeTensorMode():
        for gemm, shape in shapes.items():
            for dtype in (torch.bfloat16, torch.float32):
                result = module._scaled_mm(*fake_operands(gemm, tokens, out, features), dtype)
                assert result.shape == shape and result.dtype == dtype


def test_scaled_mm_rejects_other_layouts():
    """Validates the test above: each layout with one change is rejected."""
    rows, tiles = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    with FakeTensorMode():
        a, b = fake_operands("fprop", 200, 256, 640)
        good = [a.values, b.values.T, a.scales, torch.empty(256 // 128, 8, device="cuda").T]
        assert F.scaled_mm(good[0], good[1], good[2], rows, good[3], tiles).shape == (200, 256)
        for place, wrong in (
            (1, b.values.T.clone(memory_format=torch.contiguous_format)),  # row-major B
            (2, a.scales.clone(memory_format=torch.contiguous_format)),  # row-major scales of A
            (3, b.scales.T),  # [5, 2], not padded to 8
        ):
            given = [*good[:place], wrong, *good[place + 1 :]]
            with pytest.raises((RuntimeError, ValueError)):
                F.scaled_mm(given[0], given[1], given[2], rows, given[3], tiles)
        a, b = fake_operands("wgrad", 200, 256, 640)
        assert F.scaled_mm(a.values, b.values.T, a.scales, rows, b.scales, rows).shape == (256, 640)
        with pytest.raises((RuntimeError, ValueError)):
            F.scaled_mm(a.values, b.values.T, a.scales, rows, b.scales.T, rows)


def product_of_blocks(a, scale_a, b, scale_b):
    """A B^T of K-major E4M3 operands and scales, expanded here and not by the tested dequantization."""

    def spread(values, scales):
        rows = scales.repeat_interleave(values.shape[0] // scales.shape[0], 0)
        return values.float() * rows.repeat_interleave(values.shape[1] // scales.shape[1], 1)

    return spread(a, scale_a) @ spread(b, scale_b).T


@pytest.fixture
def deep_gemm(monkeypatch):
    """A fake of DeepGEMM's Hopper function: its assertions on the arguments, then the documented product."""
    calls = []

    def fp8_gemm_nt(a, b, d, c=None, recipe=None, compiled_dims="nk", disable_ue8m0_cast=False):
        (a, scale_a), (b, scale_b) = a, b
        M, N, K = a.shape[0], b.shape[0], a.shape[1]
        assert a.dtype == b.dtype == torch.float8_e4m3fn and scale_a.dtype == scale_b.dtype == torch.float32
        assert a.shape == (M, K) and a.stride() == (K, 1) and b.shape == (N, K) and b.stride() == (K, 1)
        assert K % 128 == 0 and scale_a.shape == (M, K // 128) and d.shape == (M, N) and d.is_contiguous()
        assert scale_a.stride() == (1, M)  # MN-major: used without a transposing kernel if M is a multiple of 4
        if recipe is None:
            assert d.dtype == torch.bfloat16 and c is None
            assert scale_b.shape == (N // 128, K // 128) and scale_b.is_contiguous()
            d.copy_(product_of_blocks(a, scale_a, b, scale_b))
        else:
            assert recipe == (1, 1, 128) and d.dtype == torch.float32 and c is not None
            assert scale_b.shape == (N, K // 128) and scale_b.stride() == (1, N)
            d.copy_(c + product_of_blocks(a, scale_a, b, scale_b))
        calls.append((M, N, K))

    stub = types.ModuleType("deep_gemm")
    stub.__spec__ = importlib.machinery.ModuleSpec("deep_gemm", None)
    stub.fp8_gemm_nt = fp8_gemm_nt
    monkeypatch.setitem(module.importlib.sys.modules, "deep_gemm", stub)
    module._deep_gemm_module.cache_clear()
    yield calls
    module._deep_gemm_module.cache_clear()


@pytest.mark.parametrize("tokens", [1, 130, 256])
def test_deep_gemm_receives_operands_it_asserts(deep_gemm, tokens):
    padded = -(-tokens // 128) * 128
    for gemm, call in (("fprop", (tokens, 256, 896)), ("dgrad", (tokens, 896, 256)), ("wgrad", (256, 896, padded))):
        _, (first, second), _ = operands(gemm, tokens, 256, 896)
        want = FUNCTIONS[gemm](first, second, backend="reference")
        result = module._deep_gemm(*module._operands(gemm, first, second), want.dtype)
        assert deep_gemm.pop() == call and result.dtype == want.dtype
        # two orders of a float32 sum may round to neighboring bfloat16 values
        assert (result - want).norm() < (2**-8 if want.dtype == torch.bfloat16 else 2**-18) * want.norm()


def test_real_deep_gemm_has_that_signature():
    deep_gemm = pytest.importorskip("deep_gemm", reason="DeepGEMM is not installed", exc_type=ImportError)
    names = ("c", "recipe", "disable_ue8m0_cast")
    assert all(
        name in (deep_gemm.fp8_gemm_nt.__doc__ or str(inspect.signature(deep_gemm.fp8_gemm_nt))) for name in names
    )


def test_torchao_receives_operands_it_asserts(monkeypatch):
    """Checks its wrappers' assertions, the product, and that unmasked loads of scales stay inside the buffer."""

    def check(a, b, scale_a, scale_b, past_b):
        assert a.stride(1) == 1 and b.stride(0) == 1 and scale_a.stride(0) == 1
        for scales, rows, columns in ((scale_a, 255, 0), (scale_b, *past_b)):
            last = (scales.shape[0] - 1 + rows) * scales.stride(0) + (scales.shape[1] - 1 + columns) * scales.stride(1)
            assert last < scales.untyped_storage().nbytes() // 4

    def of_tiles(a, b, a_s, b_s, block_size=128, out_dtype=torch.float32):
        check(a, b, a_s, b_s, past_b=(0, 1))
        assert b_s.stride(0) == 1 and b_s.shape == (b.shape[0] // 128, b.shape[1] // 128)
        return product_of_blocks(a, a_s, b.T, b_s.T).to(out_dtype)

    def of_columns(a, b, a_s, b_s, block_size=128, out_dtype=torch.float32):
        check(a, b, a_s, b_s, past_b=(0, 255))
        assert b_s.stride(1) == 1 and b_s.shape == (b.shape[0] // 128, b.shape[1])
        return product_of_blocks(a, a_s, b.T, b_s.T).to(out_dtype)

    kernels = types.SimpleNamespace(triton_fp8_gemm_1x128_128x128=of_tiles, triton_fp8_gemm_1x128_128x1=of_columns)
    monkeypatch.setattr(module, "_torchao_module", lambda: kernels)
    for gemm in FUNCTIONS:
        for tokens in (1, 130, 256):
            _, (first, second), _ = operands(gemm, tokens, 256, 896)
            want = FUNCTIONS[gemm](first, second, torch.float32, "reference")
            result = module._torchao(*module._operands(gemm, first, second), torch.float32)
            assert (result - want).norm() < 2**-18 * want.norm()


@pytest.mark.parametrize(
    "capability, cuda, installed, gemm, dtype, backend, reason",
    [
        ((9, 0), "13.0", True, "fprop", torch.bfloat16, "scaled_mm", "the first that can run"),
        ((9, 0), "12.8", True, "fprop", torch.bfloat16, "deep_gemm", "CUDA 12.9"),
        ((9, 0), "12.8", True, "fprop", torch.float32, "reference", "returns bfloat16"),
        ((9, 0), "12.8", True, "wgrad", torch.float32, "deep_gemm", "CUDA 12.9"),
        ((9, 0), "12.8", False, "wgrad", torch.float32, "reference", "a GPU build of vLLM has a copy"),
        ((10, 0), "13.0", True, "fprop", torch.bfloat16, "reference", "Hopper"),
        ((8, 0), "13.0", True, "dgrad", torch.bfloat16, "reference", "8.9 or later"),
    ],
)
def test_fp8_gemm_auto_choice_reports_reason(capability, cuda, installed, gemm, dtype, backend, reason, monkeypatch):
    def missing():
        return ImportError("No module named 'x'")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(module, "_torchao_module", missing)
    monkeypatch.setattr(module, "_deep_gemm_module", (lambda: None) if installed else missing)
    with FakeTensorMode():
        a, b = fake_operands(gemm, 128, 128, 128)
        first = a.T if gemm == "wgrad" else a
        choice = choose_backend(gemm, first, b if gemm == "fprop" else b.T, dtype)
    assert choice.backend == backend and reason in choice.reason


def test_deep_gemm_failed_import_attempted_once(tmp_path, monkeypatch):
    """DeepGEMM asserts that nvcc exists. Every GEMM looks it up, so a failed import must not be retried."""
    (tmp_path / "deep_gemm").mkdir()
    body = (
        "import pathlib\npathlib.Path(__file__).with_name('tries').open('a').write('x')\nassert False, 'no CUDA_HOME'"
    )
    (tmp_path / "deep_gemm" / "__init__.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)  # the real module, if installed
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    module._deep_gemm_module.cache_clear()
    try:
        with FakeTensorMode():
            a, b = fake_operands("fprop", 128, 128, 128)
            for _ in range(2):
                objection = module._deep_gemm_unsupported(a, b, torch.bfloat16)
                assert "AssertionError('no CUDA_HOME')" in objection and "a GPU build of vLLM has a copy" in objection
    finally:
        module._deep_gemm_module.cache_clear()
    assert (tmp_path / "deep_gemm" / "tries").read_text() == "x"


def test_refusals():
    _, (x, w), _ = operands("fprop", 128, 256, 384)
    rows, columns = quantize_rows(torch.zeros(128, 256)), quantize_columns(torch.zeros(128, 256))
    assert choose_backend("fprop", x, w, torch.bfloat16).backend == "reference"
    for backend in ("scaled_mm", "deep_gemm", "torchao"):
        with pytest.raises(ValueError, match=f"{backend}.*CUDA device, .* cpu"):
            fprop(x, w, backend=backend)
    for call, message in (
        (lambda: fprop(x, w, backend="cublas"), "choose auto or one of scaled_mm, deep_gemm, torchao, reference"),
        (lambda: choose_backend("forward", x, w, torch.bfloat16), "choose one of fprop, dgrad, wgrad"),
        (lambda: fprop(columns, w), "quantize_rows"),
        (lambda: wgrad(rows, columns), "quantize_columns"),
        (lambda: fprop(rows, w), r"cannot contract \(128, 256\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


class Linear(torch.autograd.Function):
    """A minimal layer on these kernels: FP8 activations are saved for the backward, the weight bits are reused."""

    @staticmethod
    def forward(ctx, x, w):
        rows, columns = quantize_rows(x), quantize_columns(x)
        tiles = quantize_weight(w)
        ctx.save_for_backward(columns.values, columns.scales, tiles.values, tiles.scales)
        ctx.meta = (columns.block, columns.shape), (tiles.block, tiles.shape)
        return fprop(rows, tiles, x.dtype)

    @staticmethod
    def backward(ctx, dy):
        saved = ctx.saved_tensors
        columns, tiles = Fp8Blocks(*saved[:2], *ctx.meta[0]), Fp8Blocks(*saved[2:], *ctx.meta[1])
        return dgrad(quantize_rows(dy), tiles, dy.dtype), wgrad(quantize_columns(dy), columns)


def test_a_layer_of_the_three_gemms_compiles_whole():
    """A ragged number of tokens and a non-contiguous gradient: one graph, identical bits."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(200, 256, generator=rng).bfloat16().requires_grad_()
    w = torch.randn(384, 256, generator=rng).requires_grad_()
    upstream = torch.randn(384, 200, generator=rng).bfloat16().T
    results = []
    for layer in (Linear.apply, torch.compile(lambda x, w: Linear.apply(x, w), backend="eager", fullgraph=True)):
        y = layer(x, w)
        results.append((y.detach(), *torch.autograd.grad(y, (x, w), upstream)))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
    exact = (x.double() @ w.double().T, upstream.double() @ w.double(), upstream.double().T @ x.double())
    for result, want in zip(results[0], exact, strict=True):  # the third bound above, and one rounding to bfloat16
        assert (result.double() - want).norm() < ((2 / 3) ** 0.5 * 2**-4 + 2**-9) * want.norm()
