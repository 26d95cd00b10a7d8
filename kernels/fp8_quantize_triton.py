"""Triton kernels for fp8_quantize.py, with bit-identical results. The import needs triton."""

import contextlib
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_SIZE = 128
# One program holds a tile of 128x128 in registers. With 4 warps, a thread has too few registers for
# its part of the tile and spills.
NUM_WARPS = 16
# Columns are written transposed, so values move between threads. Tiles of 128x128 leave too few
# registers for a second program per multiprocessor, so these tiles are 128x64: on an H100 they
# reached 74 to 77% of the bandwidth of a copy, and tiles of 128x128 34 to 40%
# (benchmarks/results/one_h100.md).
COLUMNS_WIDTH, COLUMNS_WARPS = 64, 8


@triton.jit
def _scale(amax_bits, FLOOR_BITS: tl.constexpr, MAX: tl.constexpr):
    # Positive floats sort like their bits as integers.
    amax = tl.maximum(amax_bits, FLOOR_BITS).to(tl.float32, bitcast=True)
    # `div_rn` rounds like torch. A plain `/` becomes `div.full`, which has an error of up to two
    # ulps.
    return tl.div_rn(amax, tl.full(amax.shape, MAX, tl.float32))


@triton.jit
def _values(x, scale, MAX: tl.constexpr):
    """Returns x / scale as E4M3. Both arguments have the same shape."""
    # A plain clamp may drop NaN.
    return tl.clamp(tl.div_rn(x, scale), -MAX, MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def activation_kernel(
    x_ptr,  # [M, K] with strides (stride_m, stride_k)
    values_ptr,  # E4M3: rows [M, K], or columns [K, leading]
    scales_ptr,  # float32: rows [K / 128, M], or columns [leading / 128, K]
    M,
    K,
    leading,  # M rounded up to a multiple of 128
    stride_m,
    stride_k,
    COLUMNS: tl.constexpr,  # blocks of 128x1 instead of 1x128
    WIDTH: tl.constexpr,  # features per tile; 128 for rows
    FLOOR_BITS: tl.constexpr,  # bits of the smallest amax, as int32
    MAX: tl.constexpr,  # 448.0
    SIZE: tl.constexpr,  # 128
):
    # The offset of a tile needs 64 bits: 128k tokens of 27,648 features are more than 2^31
    # elements. The offset inside a tile needs 32 bits.
    tile_m, tile_k = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    m, k = tl.arange(0, SIZE), tl.arange(0, WIDTH)
    in_bounds = m < M - tile_m * SIZE
    x_ptr += tile_m * SIZE * stride_m + tile_k * WIDTH * stride_k
    x = tl.load(x_ptr + m[:, None] * stride_m + k[None, :] * stride_k, mask=in_bounds[:, None], other=0.0).to(
        tl.float32
    )
    # The maximum is over the bits of |x|. As integers they sort like the floats, with NaN as the
    # largest. A maximum of floats would drop NaN.
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    if COLUMNS:
        scale = _scale(tl.max(bits, axis=0), FLOOR_BITS, MAX)
        value = _values(x, tl.broadcast_to(scale[None, :], (SIZE, WIDTH)), MAX)
        # The transpose makes the tokens contiguous, which WGrad contracts.
        values_ptr += tile_k * WIDTH * leading + tile_m * SIZE
        tl.store(values_ptr + k[:, None] * leading + m[None, :], tl.trans(value))
        tl.store(scales_ptr + tile_m * K + tile_k * WIDTH + k, scale)
    else:
        scale = _scale(tl.max(bits, axis=1), FLOOR_BITS, MAX)
        value = _values(x, tl.broadcast_to(scale[:, None], (SIZE, WIDTH)), MAX)
        tl.store(
            values_ptr + (tile_m * K + tile_k) * SIZE + m[:, None] * K + k[None, :], value, mask=in_bounds[:, None]
        )
        tl.store(scales_ptr + tile_k * M + tile_m * SIZE + m, scale, mask=in_bounds)


@triton.jit
def weight_kernel(
    w_ptr,  # [N, K] with strides (stride_n, stride_k)
    values_ptr,  # E4M3 [N, K]
    scales_ptr,  # float32 [N / 128 rounded up, K / 128]
    N,
    K,
    stride_n,
    stride_k,
    FLOOR_BITS: tl.constexpr,  # bits of the smallest amax, as int32
    MAX: tl.constexpr,  # 448.0
    SIZE: tl.constexpr,  # 128
):
    tile_n, tile_k = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    n, k = tl.arange(0, SIZE), tl.arange(0, SIZE)
    w_ptr += tile_n * SIZE * stride_n + tile_k * SIZE * stride_k
    in_bounds = (n < N - tile_n * SIZE)[:, None]
    w = tl.load(w_ptr + n[:, None] * stride_n + k[None, :] * stride_k, mask=in_bounds, other=0.0).to(tl.float32)
    # Rows beyond N are loaded as zeros, which do not change the scale.
    amax_bits = tl.max(tl.max(tl.abs(w).to(tl.int32, bitcast=True), axis=1, keep_dims=True), axis=0, keep_dims=True)
    scale = _scale(amax_bits, FLOOR_BITS, MAX)  # [1, 1]
    value = _values(w, tl.broadcast_to(scale, (SIZE, SIZE)), MAX)
    tl.store(values_ptr + (tile_n * K + tile_k) * SIZE + n[:, None] * K + k[None, :], value, mask=in_bounds)
    one = tl.arange(0, 1)
    tl.store(scales_ptr + tile_n * (K // SIZE) + tile_k + one[:, None] + one[None, :], scale)


QuantizedPair = tuple[Tensor, Tensor]  # values and scales, in the layouts of fp8_quantize.Fp8Blocks


def quantize_rows(x: Tensor, amax_floor: float, fp8_max: float) -> QuantizedPair:
    """Quantizes x [M, K] in rows. K must be a multiple of 128."""
    M, K = x.shape
    values, scales = _outputs(x, (M, K), (K // BLOCK_SIZE, M))
    _quantize_activation(x, values, scales, False, BLOCK_SIZE, NUM_WARPS, amax_floor, fp8_max)
    return values, scales.T


def quantize_columns(x: Tensor, amax_floor: float, fp8_max: float) -> QuantizedPair:
    """Quantizes x [M, K] in columns. K must be a multiple of 128."""
    features, num_tiles = x.shape[1], -(-x.shape[0] // BLOCK_SIZE)
    values, scales = _outputs(x, (features, num_tiles * BLOCK_SIZE), (num_tiles, features))
    _quantize_activation(x, values, scales, True, COLUMNS_WIDTH, COLUMNS_WARPS, amax_floor, fp8_max)
    return values.T, scales


def _quantize_activation(
    x: Tensor, values: Tensor, scales: Tensor, columns: bool, width: int, warps: int, amax_floor: float, fp8_max: float,
) -> None:  # fmt: skip
    (M, K), num_tiles = x.shape, -(-x.shape[0] // BLOCK_SIZE)
    if x.numel():
        with _device_guard(x):
            activation_kernel[(num_tiles, K // width)](
                x, values, scales, M, K, num_tiles * BLOCK_SIZE, *x.stride(),
                columns, width, _bits(amax_floor), fp8_max, BLOCK_SIZE, num_warps=warps,
            )  # fmt: skip


def quantize_weight(w: Tensor, amax_floor: float, fp8_max: float) -> QuantizedPair:
    """Quantizes w [N, K] in tiles. K must be a multiple of 128."""
    (N, K), num_tiles = w.shape, -(-w.shape[0] // BLOCK_SIZE)
    values, scales = _outputs(w, (N, K), (num_tiles, K // BLOCK_SIZE))
    if w.numel():
        with _device_guard(w):
            weight_kernel[(num_tiles, K // BLOCK_SIZE)](
                w, values, scales, N, K, *w.stride(), _bits(amax_floor), fp8_max, BLOCK_SIZE, num_warps=NUM_WARPS,
            )  # fmt: skip
    return values, scales


def _outputs(x: Tensor, values: tuple[int, int], scales: tuple[int, int]) -> tuple[Tensor, Tensor]:
    return x.new_empty(values, dtype=torch.float8_e4m3fn), x.new_empty(scales, dtype=torch.float32)


def _bits(number: float) -> int:
    """Returns the bits of a float32 as an int32."""
    return struct.unpack("<i", struct.pack("<f", number))[0]


def _device_guard(x: Tensor) -> contextlib.AbstractContextManager:
    # Triton launches on the current device, which may differ from the tensor's device.
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
