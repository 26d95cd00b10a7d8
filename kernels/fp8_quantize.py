"""Quantizes to FP8 with one scale per block, in the three layouts that linear layers need.

The values are E4M3 numbers and the scales are float32 multipliers.

For a block B of x (amax is its largest magnitude)::

    scale = max(amax, 1e-12) / 448             448: the largest E4M3 number
    value = E4M3(clamp(x / scale, -448, 448))  round to nearest, ties to even
    x    ~= value * scale                      `scale` is a multiplier, as in vLLM, which calls it weight_scale_inv

A GEMM can move a scale out of its sum only if the scale is constant over 128 elements of the
contracted axis. This gives three layouts:

* **rows**, 1x128 along the features, are for activations in FProp and output gradients in DGrad.
* **columns**, 128x1 along the tokens, are for both operands of WGrad.
* **tiles**, 128x128, are for weights. The transpose of a tile has the same scale and the same bits,
  so DGrad needs no second copy.

This file is the reference, in plain torch on any device. fp8_quantize_triton.py is the fast
implementation on CUDA, with identical bits. A block with a NaN or an infinity dequantizes entirely
to NaN, so that the failure stays visible.
"""

import importlib.util
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtune_ext.run.errors import UsageError

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0
# The floor is 1e-10 in vLLM and 1e-4 in DeepGEMM. With these floors, small gradients would vanish.
# With 1e-12, a number keeps its three bits of mantissa down to 1e-12 / 448 * 2^-6 = 3.5e-17.
AMAX_FLOOR = 1e-12
BLOCK_SIZE = 128
ROW_BLOCK, COLUMN_BLOCK, TILE_BLOCK = (1, BLOCK_SIZE), (BLOCK_SIZE, 1), (BLOCK_SIZE, BLOCK_SIZE)
# Bytes per value including its share of the scale: in rows or columns, and in tiles.
LINE_BYTES_PER_VALUE = 1 + 4 / BLOCK_SIZE
TILE_BYTES_PER_VALUE = 1 + 4 / BLOCK_SIZE**2


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """A quantized matrix. Only columns are padded: zero tokens fill the last block."""

    # Hopper GEMMs read these layouts without a copy. In rows and columns, values are contiguous
    # along the blocks, and scales are contiguous across the blocks: the scales of rows have strides
    # (1, M), the scales of columns (K, 1).

    values: Tensor  # float8_e4m3fn [M, K]; for columns [M rounded up to a multiple of 128, K]
    scales: Tensor  # float32, one per block; value * scale is the original value up to rounding
    block: tuple[int, int]  # ROW_BLOCK, COLUMN_BLOCK or TILE_BLOCK
    shape: tuple[int, int]  # (M, K) without padding

    @property
    def T(self) -> "Fp8Blocks":  # noqa: N802
        """The transpose, as views. Rows become columns of the transpose; tiles stay tiles."""
        (rows, columns), (M, K) = self.block, self.shape
        return Fp8Blocks(self.values.T, self.scales.T, (columns, rows), (K, M))


@torch.no_grad()
def quantize_rows(x: Tensor, backend: str = "auto") -> Fp8Blocks:
    """Quantizes x [M, K] in blocks of 1x128 along the features.

    Args:
        x: bfloat16, float16 or float32, with any strides; K must be a multiple of 128.
        backend: "torch", "triton" (CUDA, compute capability 8.9 or later), or "auto" (Triton if it
            can run).

    Raises:
        UsageError: the dtype, shape or backend is not supported.
    """
    _check(x)
    if _use_triton(x, backend):
        # Import here, because a CPU installation lacks triton.
        from torchtune_ext.kernels.fp8_quantize_triton import quantize_rows as kernel

        return Fp8Blocks(*kernel(x, AMAX_FLOOR, FP8_MAX), ROW_BLOCK, (x.shape[0], x.shape[1]))
    return Fp8Blocks(*_quantize(x, ROW_BLOCK), ROW_BLOCK, (x.shape[0], x.shape[1]))


@torch.no_grad()
def quantize_columns(x: Tensor, backend: str = "auto") -> Fp8Blocks:
    """Quantizes x [M, K] in blocks of 128x1 along the tokens. Arguments as in `quantize_rows`."""
    _check(x)
    if _use_triton(x, backend):
        from torchtune_ext.kernels.fp8_quantize_triton import quantize_columns as kernel

        return Fp8Blocks(*kernel(x, AMAX_FLOOR, FP8_MAX), COLUMN_BLOCK, (x.shape[0], x.shape[1]))
    # Zeros pad the last block and do not change its scale. The columns of x are the rows of x^T.
    padded = F.pad(x, (0, 0, 0, -x.shape[0] % BLOCK_SIZE))
    return Fp8Blocks(*_quantize(padded.T, ROW_BLOCK), ROW_BLOCK, (x.shape[1], x.shape[0])).T


@torch.no_grad()
def quantize_weight(w: Tensor, backend: str = "auto") -> Fp8Blocks:
    """Quantizes a weight w [N, K] in tiles of 128x128. The last tiles may have fewer rows.

    `values` and `scales` are vLLM's `weight` and `weight_scale_inv`. Arguments as in
    `quantize_rows`.
    """
    _check(w)
    if _use_triton(w, backend):
        from torchtune_ext.kernels.fp8_quantize_triton import quantize_weight as kernel

        return Fp8Blocks(*kernel(w, AMAX_FLOOR, FP8_MAX), TILE_BLOCK, (w.shape[0], w.shape[1]))
    values, scales = _quantize(F.pad(w, (0, 0, 0, -w.shape[0] % BLOCK_SIZE)), TILE_BLOCK)
    return Fp8Blocks(values[: w.shape[0]], scales, TILE_BLOCK, (w.shape[0], w.shape[1]))


def dequantize(q: Fp8Blocks, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the matrix [M, K] without padding, computed in float32 (in float64 for float64)."""
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    (rows, columns), (m, k) = q.scales.shape, q.block
    # The last tiles of a weight may be partial.
    missing = rows * m - q.values.shape[0], columns * k - q.values.shape[1]
    values = F.pad(q.values.to(accumulate), (0, missing[1], 0, missing[0]))
    tiles = _tiles(values, q.block) * q.scales.to(accumulate)[:, None, :, None]
    return tiles.flatten(2).flatten(0, 1)[: q.shape[0], : q.shape[1]].to(dtype)


def _quantize(x: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns the row-major values and the scales of a matrix without partial blocks."""
    tiles = _tiles(x.float(), block)
    # Each step is one IEEE operation in float32, so that other implementations can produce
    # identical bits. The two divisions match vLLM's CUDA kernel for activations
    # (per_token_group_quant.cu), which the engine uses. DeepGEMM and torchao multiply by a
    # reciprocal, which moves a few values to the neighboring E4M3 number. The divisor is a tensor,
    # because on CUDA torch turns a division by a Python number into a product with its reciprocal.
    scales = tiles.abs().amax(dim=(1, 3)).clamp_min(AMAX_FLOOR) / torch.full((), FP8_MAX, device=x.device)
    # x / scale may round to just above 448, which older torch versions cast to NaN.
    values = (tiles / scales[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)
    values = values.flatten(2).flatten(0, 1).contiguous()
    return values, scales if block == TILE_BLOCK else column_major(scales)


def _tiles(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Returns a view of x [M, K] by blocks: [M / block[0], block[0], K / block[1], block[1]]."""
    (M, K), (m, k) = x.shape, block
    return x.unflatten(1, (K // k, k)).unflatten(0, (M // m, m))


def column_major(x: Tensor) -> Tensor:
    """Returns the matrix with strides (1, number of rows); copies only if needed."""
    # `.contiguous()` ignores the stride of a dimension of size 1, so compare the strides.
    return x if x.stride() == (1, x.shape[0]) else x.T.clone(memory_format=torch.contiguous_format).T


def _check(x: Tensor) -> None:
    if x.ndim != 2 or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise UsageError(
            f"x of dtype {x.dtype} and shape {tuple(x.shape)}: FP8 quantization expects a bfloat16, float16 or float32 "
            "matrix; flatten the leading dimensions"
        )
    if x.shape[1] % BLOCK_SIZE:
        raise UsageError(
            f"{x.shape[1]} features are not a multiple of 128; leave this layer in bfloat16 in trainer and engine"
        )


def _use_triton(x: Tensor, backend: str) -> bool:
    if backend not in ("auto", "torch", "triton"):
        raise UsageError(f"quantizer backend={backend!r} is unknown; choose auto, torch or triton")
    if backend == "torch" or (backend == "auto" and not x.is_cuda):
        return False
    if not x.is_cuda:
        problem = f"the tensor is on {x.device}; move it to a CUDA device"
    elif torch.cuda.get_device_capability(x.device) < (8, 9):
        problem = "casts to E4M3 need compute capability 8.9 or later"
    elif importlib.util.find_spec("triton") is None:
        problem = "triton is not installed: pip install triton"
    else:
        return True
    if backend == "triton":
        raise UsageError(f"quantizer backend='triton' cannot run: {problem}, or use backend='torch'")
    return False
