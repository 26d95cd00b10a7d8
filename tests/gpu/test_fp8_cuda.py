"""On a GPU: the Triton quantizers against the torch path, bit for bit, and every GEMM backend against the reference."""

import pytest
import torch

from torchtune_ext.kernels.fp8_gemm import BACKENDS, choose_backend, dgrad, fprop, wgrad
from torchtune_ext.kernels.fp8_quantize import (
    Fp8Blocks,
    dequantize,
    quantize_columns,
    quantize_rows,
    quantize_weight,
)

FUNCTIONS = {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}
# out, in: K / 128 = 7, 38, 70, 86 and 2 with neither all even nor multiples of 4; and one of a 7B model
SHAPES = [(896, 896), (128, 896), (896, 4864), (1536, 8960), (11008, 2048), (256, 256), (18944, 3584)]


def random(*shape, scale=1.0, dtype=torch.bfloat16):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def assert_same_bits(result: Fp8Blocks, want: Fp8Blocks):
    assert result.block == want.block and result.shape == want.shape
    assert result.values.shape == want.values.shape and result.values.stride() == want.values.stride()
    assert result.scales.shape == want.scales.shape and result.scales.stride() == want.scales.stride()
    assert torch.equal(result.scales.cpu(), want.scales.cpu())
    differ = result.values.contiguous().view(torch.uint8).cpu() != want.values.contiguous().view(torch.uint8).cpu()
    assert not differ.any(), f"{differ.sum()} of {differ.numel()} values differ"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("M", [1, 127, 128, 300, 4096])
def test_triton_activation_equals_torch(M, dtype):
    """With torch on CUDA and with torch on the CPU: three ways, one result."""
    torch.manual_seed(M)
    sizes = torch.logspace(-13, 4, M, device="cuda")[:, None] if dtype != torch.float16 else 1.0
    x = (torch.randn(M, 896, device="cuda") * sizes).to(dtype)
    x[:, ::17] = 0
    strided = x.new_full((2 * M, 1800), 1e4)[::2, 4:1796:2].copy_(x)
    for quantize in (quantize_rows, quantize_columns):
        want = quantize(x.cpu())
        for given, backend in ((x, "torch"), (x, "triton"), (strided, "triton"), (x.T.contiguous().T, "triton")):
            assert_same_bits(quantize(given, backend), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_triton_weight_equals_torch(dtype):
    w = random(896, 4864, scale=0.02, dtype=dtype)
    want = quantize_weight(w.cpu())
    for backend in ("torch", "triton"):
        assert_same_bits(quantize_weight(w, backend), want)
        assert_same_bits(quantize_weight(w.T, backend), quantize_weight(w.T.cpu()))


def test_every_bfloat16_equals_the_cpu():
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()]
    for largest in (2.0**-126, 7.5e-13, 448 * 2.0**-50, 1.0, 1.375, 450.0, torch.finfo(torch.bfloat16).max):
        kept = x[x.abs() <= largest]
        tiles = torch.nn.functional.pad(kept, (0, -kept.numel() % 127)).view(-1, 127)
        tiles = torch.cat([tiles, tiles.new_full((tiles.shape[0], 1), largest)], dim=1)
        assert_same_bits(quantize_rows(tiles.cuda(), backend="triton"), quantize_rows(tiles))
        columns = torch.nn.functional.pad(tiles.T, (0, -tiles.shape[0] % 128))
        assert_same_bits(quantize_columns(columns.cuda(), backend="triton"), quantize_columns(columns))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_triton_quantizers_propagate_non_finite_values(bad):
    x = torch.ones(256, 256, device="cuda")
    x[5, 7] = bad
    for quantize in (quantize_rows, quantize_columns, quantize_weight):
        result, want = (dequantize(quantize(x, backend=backend)).isnan() for backend in ("triton", "torch"))
        assert want.any() and torch.equal(result, want)


def test_the_row_form_equals_vllms_kernel():
    """Same steps as the sampler's own quantizer (its floor of 1e-10 is not reached here)."""
    fp8_utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.fp8_utils")
    x = random(300, 896)
    values, scales = fp8_utils.per_token_group_quant_fp8(x, 128, use_ue8m0=False)
    result = quantize_rows(x)
    assert torch.equal(result.scales, scales)
    assert torch.equal(result.values.view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("tokens", [1, 200, 2048])
@pytest.mark.parametrize("out, features", SHAPES)
def test_backend_equals_reference(backend, gemm, tokens, out, features):
    """A tensor core adds 32 products (each exact) to its sum by cutting every addend at about 2^-13 of the largest, and
    float32 takes over after 128. So a block loses at most 4 * 33 * 2^-13 of its largest addend, which is at most the sum
    of its magnitudes; a bfloat16 result adds 2^-9 of itself. That is the worst case, element by element; the norm may
    be off by a fifth of what quantization costs (3.7 %), where a misread scale costs more than quantization does."""
    torch.manual_seed(0)
    x, w, dy = random(tokens, features), random(out, features, scale=0.02), random(tokens, out, scale=1e-6)
    for dtype in (torch.float32, torch.bfloat16) if gemm == "wgrad" else (torch.bfloat16,):
        compare(backend, gemm, x, w, dy, dtype)


def compare(backend, gemm, x, w, dy, dtype):
    first = {"fprop": quantize_rows(x), "dgrad": quantize_rows(dy), "wgrad": quantize_columns(dy)}[gemm]
    second = quantize_columns(x) if gemm == "wgrad" else quantize_weight(w)
    try:
        result = FUNCTIONS[gemm](first, second, dtype, backend)
    except ValueError as error:
        pytest.skip(str(error))
    want = FUNCTIONS[gemm](first, second, torch.float32, "reference")

    def magnitudes(q):
        return Fp8Blocks(q.values.float().abs().to(q.values.dtype), q.scales, q.block, q.shape)

    sums = FUNCTIONS[gemm](magnitudes(first), magnitudes(second), torch.float32, "reference")
    bound = 132 * 2**-13 * sums + (2**-9 * (1 + 2**-6) * want.abs() if dtype == torch.bfloat16 else 0)
    assert result.dtype == dtype and ((result.float() - want).abs() <= bound).all()
    assert (result.float() - want).norm() < 2**-7 * want.norm()


def test_auto_takes_a_fast_backend_on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    x, w = quantize_rows(random(256, 896)), quantize_weight(random(128, 896))
    choice = choose_backend("fprop", x, w, torch.bfloat16)
    assert choice.backend != "reference", choice.reason
