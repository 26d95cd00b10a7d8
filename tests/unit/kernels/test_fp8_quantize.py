"""Quantizers against float64 and an independent E4M3 table, and their layouts (Triton: test_fp8_triton.py)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_ext.kernels.fp8_quantize import (
    COLUMN_BLOCK,
    ROW_BLOCK,
    TILE_BLOCK,
    Fp8Blocks,
    dequantize,
    quantize_columns,
    quantize_rows,
    quantize_weight,
)

# E4M3: sign, 4 exponent bits with bias 7, 3 mantissa bits; exponent 0 is subnormal; only S.1111.111 is NaN.
MAGNITUDES = np.array(
    [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:-1]
)
MIDDLES = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
QUANTIZERS = {ROW_BLOCK: quantize_rows, COLUMN_BLOCK: quantize_columns, TILE_BLOCK: quantize_weight}


def e4m3(x):
    """float64 -> codes; nearest, ties to the even code, saturating."""
    below = np.searchsorted(MIDDLES, np.abs(x), side="left")  # midpoints strictly below |x|
    tie = (below < len(MIDDLES)) & (np.abs(x) == MIDDLES[np.minimum(below, len(MIDDLES) - 1)])
    return (below + (tie & (below % 2 == 1)) + 128 * np.signbit(x)).astype(np.uint8)


def expected(x, block):
    """Codes and scales of a float32 array without partial blocks: float64 steps, each rounded once to float32."""
    (M, K), (m, k) = x.shape, block
    tiles = x.astype(np.float64).reshape(M // m, m, K // k, k)
    amax = np.maximum(np.abs(tiles).max((1, 3), keepdims=True), np.float32(1e-12))
    scale = (amax / 448).astype(np.float32)
    codes = e4m3((tiles / scale.astype(np.float64)).astype(np.float32).astype(np.float64))
    return codes.reshape(M, K), scale[:, 0, :, 0]


def codes_of(q):
    return q.values.contiguous().view(torch.uint8).numpy()


def assert_exact(q: Fp8Blocks, x: torch.Tensor):
    padded = np.zeros(q.values.shape, np.float32)
    padded[: x.shape[0]] = x.float().numpy()
    codes, scales = expected(padded, q.block)
    np.testing.assert_array_equal(q.scales.numpy(), scales)
    np.testing.assert_array_equal(codes_of(q), codes)


def test_the_table():
    finite = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_array_equal(finite[:127], MAGNITUDES)
    np.testing.assert_array_equal(finite[128:255], -MAGNITUDES)
    assert np.isnan(finite[[127, 255]]).all() and len(np.unique(finite[~np.isnan(finite)])) == 253


def all_bfloat16_up_to(largest: float) -> torch.Tensor:
    """[n, 128] bfloat16: every finite number of both signs up to `largest`, 127 per row, with `largest` at the end.

    n is a multiple of 128; the rest is zeros.
    """
    x = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(torch.bfloat16)
    x = x[x.isfinite() & (x.abs() <= largest)]
    x = torch.nn.functional.pad(x, (0, -x.numel() % (127 * 128))).view(-1, 127)
    return torch.cat([x, x.new_full((x.shape[0], 1), largest)], dim=1)


# Maxima that shift the values on the grid, including 448 * 2^k and the neighbors of the floor.
LARGEST = [
    2.0**-126,
    7.5e-13,
    2.0**-39,
    448 * 2.0**-50,
    1.0,
    1.0078125,
    1.375,
    1.9921875,
    448.0,
    450.0,
    2.0**60,
    torch.finfo(torch.bfloat16).max,
]


@pytest.mark.parametrize("block", [ROW_BLOCK, COLUMN_BLOCK, TILE_BLOCK])
def test_every_bfloat16(block):
    codes = set()
    for largest in LARGEST:
        x = all_bfloat16_up_to(largest)
        if block == COLUMN_BLOCK:
            x = x.T
        q = QUANTIZERS[block](x)
        assert_exact(q, x)
        codes.update(np.unique(codes_of(q)).tolist())
    assert codes == set(range(256)) - {127, 255}  # every finite code, both zeros, both ends


@st.composite
def matrices(draw):
    """Random matrices whose blocks differ in magnitude by many powers of two, with zeros, ties and odd strides."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    M, K = draw(st.sampled_from([1, 3, 127, 128, 129, 256])), draw(st.sampled_from([128, 256]))
    low = draw(st.integers(-40, 0))
    x = rng.normal(size=(M, K)) * 2.0 ** rng.integers(low, draw(st.integers(low, 30)) + 1, size=(M, K))
    x[rng.random((M, K)) < 0.1] = 0
    if draw(st.booleans()):  # few mantissa bits: many quotients lie midway between two codes
        x = np.sign(x) * 2.0 ** np.floor(np.log2(np.abs(x) + 1e-30)) * (1 + rng.integers(0, 32, size=(M, K)) / 32)
    x = torch.from_numpy(x.astype(np.float32)).to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))
    x = x.where(x.isfinite(), 0)
    layout = draw(st.sampled_from(["plain", "transposed", "slice"]))
    if layout == "transposed":
        x = x.T.contiguous().T
    elif layout == "slice":
        wide = x.new_full((2 * M, 2 * K + 3), 1e4)
        wide[::2, 3::2] = x
        x = wide[::2, 3::2]
    return x


@settings(max_examples=100)
@given(x=matrices())
def test_random_tiles(x):
    rows, columns = quantize_rows(x), quantize_columns(x)
    assert_exact(rows, x)
    assert_exact(columns, x)
    if x.shape[0] % 128 == 0:
        assert_exact(quantize_weight(x), x)


@pytest.mark.parametrize("M", [0, 1, 100, 128, 300])
def test_layouts_and_padding(M):
    x = torch.randn(M, 256, generator=torch.Generator().manual_seed(0))
    padded = torch.cat([x, torch.zeros(-M % 128, 256)])
    rows, columns = quantize_rows(x), quantize_columns(x)
    assert rows.values.shape == (M, 256) and rows.values.is_contiguous() and rows.scales.stride() == (1, max(M, 1))
    assert columns.values.shape == padded.shape and columns.values.T.is_contiguous()
    assert columns.scales.shape == (padded.shape[0] // 128, 256) and columns.scales.stride() == (256, 1)
    assert rows.shape == columns.shape == x.shape == dequantize(rows).shape == dequantize(columns).shape
    same = quantize_columns(padded)
    assert torch.equal(same.values.view(torch.uint8), columns.values.view(torch.uint8))
    assert torch.equal(same.scales, columns.scales)
    assert columns.T.block == ROW_BLOCK and torch.equal(dequantize(columns.T), dequantize(columns).T)


@pytest.mark.parametrize("quantize", [quantize_rows, quantize_columns, quantize_weight])
def test_zero_blocks(quantize):
    x = torch.zeros(256, 256)
    x[:128, :128] = 3.0
    q = quantize(x)
    assert (q.scales > 0).all() and q.scales.isfinite().all()
    assert torch.equal(dequantize(q) == 0, x == 0)


def test_a_quotient_above_448_saturates():
    """The largest value divided by its scale may round to the next float32 above 448."""
    x = torch.rand(4096, 128, generator=torch.Generator().manual_seed(0))
    q = quantize_rows(x)
    largest = x.amax(1, keepdim=True)
    assert (largest / q.scales > 448).any()
    assert torch.equal(q.values.float().amax(1), torch.full((4096,), 448.0))


@pytest.mark.parametrize("quantize", [quantize_rows, quantize_columns, quantize_weight])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_quantize_non_finite_values_stay_visible(quantize, bad):
    x = torch.ones(256, 256)
    x[5, 7] = bad
    q = quantize(x)
    block = torch.zeros(256, 256, dtype=torch.bool)
    block[5 if q.block[0] == 1 else slice(0, 128), 7 if q.block[1] == 1 else slice(0, 128)] = True
    assert torch.equal(dequantize(q).isnan(), block)


def test_small_gradients_survive():
    """Relative error 2^-4 at any magnitude, down to 2^-6 of the smallest scale; a floor of 1e-4 would give zeros."""
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    x = x.sign() * x.abs().clamp_min(0.05) * 1e-13
    for q in (quantize_rows(x), quantize_columns(x)):
        assert ((dequantize(q) - x).abs() <= 2**-4 * (1 + 2**-20) * x.abs()).all()


def test_a_transposed_weight_has_the_same_bits():
    w = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, t = quantize_weight(w), quantize_weight(w.T).T
    assert torch.equal(q.scales, t.scales) and t.block == TILE_BLOCK and t.shape == q.shape
    np.testing.assert_array_equal(codes_of(q), codes_of(t))
    rows, other = quantize_rows(w), quantize_rows(w.T)  # rows differ: WGrad needs its own quantization
    assert (codes_of(rows) != codes_of(other).T).mean() > 0.1


@pytest.mark.parametrize("rows", [1, 100, 200])
def test_quantize_weight_partial_tiles_equal_zero_padding(rows):
    w = torch.randn(rows, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, whole = quantize_weight(w), quantize_weight(torch.nn.functional.pad(w, (0, 0, 0, -rows % 128)))
    assert torch.equal(q.scales, whole.scales) and q.shape == (rows, 256) and q.values.is_contiguous()
    np.testing.assert_array_equal(codes_of(q), codes_of(whole)[:rows])
    assert torch.equal(dequantize(q), dequantize(whole)[:rows])
    assert torch.equal(dequantize(q.T), dequantize(whole)[:rows].T)


def test_vllm_reads_our_weights():
    quant_utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.quant_utils")
    for rows in (384, 320):
        w = torch.randn(rows, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
        q = quantize_weight(w)
        assert q.scales.shape == (3, 2) and q.scales.is_contiguous() and q.values.is_contiguous()
        if rows == 384:
            group = quant_utils.GroupShape(128, 128)
            assert torch.equal(quant_utils.scaled_dequantize(q.values, q.scales, group), dequantize(q))


def test_rows_have_the_bits_of_vllms_own_path():
    """Against the torch path of vLLM's activation quantizer; its CUDA kernel does the same steps (tests/gpu)."""
    quantizer = pytest.importorskip("vllm.model_executor.layers.quantization.input_quant_fp8")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    with set_current_vllm_config(VllmConfig()):
        layer = quantizer.QuantFP8(static=False, group_shape=GroupShape(1, 128), use_ue8m0=False)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(300, 896, generator=torch.Generator().manual_seed(0)).to(dtype)
        values, scales = layer.forward_native(x)
        q = quantize_rows(x)
        assert torch.equal(q.scales, scales)
        np.testing.assert_array_equal(codes_of(q), values.view(torch.uint8).numpy())


def test_refusals():
    x = torch.zeros(128, 128)
    for bad, message in (
        (x[0], "flatten"),
        (x.double(), "float64"),
        (x[:, :100], "100 features"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize_rows(bad)
    with pytest.raises(ValueError, match="choose auto, torch or triton"):
        quantize_rows(x, backend="cuda")
    with pytest.raises(ValueError, match="move it to a CUDA device"):
        quantize_rows(x, backend="triton")
