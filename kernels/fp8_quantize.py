"""Quantizes to FP8 with one scale per block, in the three forms that the GEMMs of a linear layer need.

The values are E4M3 numbers and the scales are float32 multipliers.

For a block B of x (amax is its largest magnitude)::

    scale = max(amax, 1e-12) / 448             448: the largest E4M3 number
    value = E4M3(clamp(x / scale, -448, 448))  round to nearest, ties to even
    x    ~= value * scale                      `scale` is a multiplier, as in vLLM, which calls it weight_scale_inv

A GEMM can take a scale out of its sum only if the scale is constant over 128 places of the contracted axis. This gives
three forms:

* **rows**, 1x128 along the features, are for activations in FProp and output gradients in DGrad.
* **columns**, 128x1 along the tokens, are for both operands of WGrad.
* **tiles**, 128x128, are for weights. The transpose of a tile has the same scale and the same bits, so DGrad needs no
  second copy.

This file is the reference, in plain torch on any device. fp8_quantize_triton.py is the fast implementation on CUDA,
with the same bits. A block with a NaN or an infinity dequantizes to NaN as a whole, so that the failure stays visible.
"""

import importlib.util
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtune_ext.run.errors import UsageError

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0
# The floor is 1e-10 in vLLM and 1e-4 in DeepGEMM, where small gradients would vanish. With 1e-12 a number keeps its
# three bits of mantissa down to 1e-12 / 448 * 2^-6 = 3.5e-17.
AMAX_FLOOR = 1e-12
BLOCK_SIZE = 128
ROW_BLOCK, COLUMN_BLOCK, TILE_BLOCK = (1, BLOCK_SIZE), (BLOCK_SIZE, 1), (BLOCK_SIZE, BLOCK_SIZE)
# Bytes of a number with its share of the scale: in rows or columns, and in tiles.
LINE_BYTES_PER_VALUE = 1 + 4 / BLOCK_SIZE
TILE_BYTES_PER_VALUE = 1 + 4 / BLOCK_SIZE**2


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """A quantized matrix. Only columns are padded, with zero tokens to whole blocks."""

    # The GEMMs of Hopper read these layouts without a copy. In rows and columns, values are contiguous along the
    # blocks, and scales are contiguous across them: the scales of rows have strides (1, M), those of columns (K, 1).

    values: Tensor  # float8_e4m3fn [M, K]; for columns [M rounded up to a multiple of 128, K]
    scales: Tensor  # float32, one per block; value * scale is the original number, up to rounding
    block: tuple[int, int]  # ROWS, COLUMNS or TILES
    shape: tuple[int, int]  # (M, K) without padding

    @property
    def T(self) -> "Fp8Blocks":  # noqa: N802
        """Returns the transpose, as views. Rows become columns of the transposed matrix; tiles stay tiles."""
        (rows, columns), (M, K) = self.block, self.shape
        return Fp8Blocks(self.values.T, self.scales.T, (columns, rows), (K, M))


@torch.no_grad()
def quantize_rows(x: Tensor, backend: str = "auto") -> Fp8Blocks:
    """Quantizes x [M, K] in blocks of 1x128 along the features.

    Args:
        x: bfloat16, float16 or float32, with any strides; K must be a multiple of 128.
        backend: "torch", "triton" (CUDA, compute capability 8.9 or later), or "auto", which is Triton where it can run.

    Raises:
        ValueError: the dtype, the shape or the backend does not fit.
    """
    _check(x)
    if _use_triton(x, backend):
        # Imported here, because an environment for CPU lacks triton.
        from torchtune_ext.kernels.fp8_quantize_triton import quantize_rows as kernel

        return Fp8Blocks(*kernel(x, AMAX_FLOOR, FP8_MAX), ROW_BLOCK, (x.shape[0], x.shape[1]))
    return Fp8Blocks(*_quantize(x, ROW_BLOCK), ROW_BLOCK, (x.shape[0], x.shape[1]))


@torch.no_grad()
def quantize_columns(x: Tensor, backend: str = "auto") -> Fp8Blocks:
    """Quantizes x [M, K] in blocks of 128x1 along the tokens. The arguments are those of `quantize_rows`."""
    _check(x)
    if _use_triton(x, backend):
        from torchtune_ext.kernels.fp8_quantize_triton import quantize_columns as kernel

        return Fp8Blocks(*kernel(x, AMAX_FLOOR, FP8_MAX), COLUMN_BLOCK, (x.shape[0], x.shape[1]))
    # Zeros fill the last block and do not change its scale. The columns of x are the rows of x^T.
    padded = F.pad(x, (0, 0, 0, -x.shape[0] % BLOCK_SIZE))
    return Fp8Blocks(*_quantize(padded.T, ROW_BLOCK), ROW_BLOCK, (x.shape[1], x.shape[0])).T


@torch.no_grad()
def quantize_weight(w: Tensor, backend: str = "auto") -> Fp8Blocks:
    """Quantizes a weight w [N, K] in tiles of 128x128, of which the last may have fewer rows.

    `values` and `scales` are vLLM's `weight` and `weight_scale_inv`. The arguments are those of `quantize_rows`.
    """
    _check(w)
    if _use_triton(w, backend):
        from torchtune_ext.kernels.fp8_quantize_triton import quantize_weight as kernel

        return Fp8Blocks(*kernel(w, AMAX_FLOOR, FP8_MAX), TILE_BLOCK, (w.shape[0], w.shape[1]))
    values, scales = _quantize(F.pad(w, (0, 0, 0, -w.shape[0] % BLOCK_SIZE)), TILE_BLOCK)
    return Fp8Blocks(values[: w.shape[0]], scales, TILE_BLOCK, (w.shape[0], w.shape[1]))


def dequantize(q: Fp8Blocks, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the matrix [M, K] of shape `q.shape`, without padding, computed in float32 or float64."""
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    (rows, columns), (m, k) = q.scales.shape, q.block
    # The last tiles of a weight may not be whole.
    missing = rows * m - q.values.shape[0], columns * k - q.values.shape[1]
    values = F.pad(q.values.to(accumulate), (0, missing[1], 0, missing[0]))
    tiles = _tiles(values, q.block) * q.scales.to(accumulate)[:, None, :, None]
    return tiles.flatten(2).flatten(0, 1)[: q.shape[0], : q.shape[1]].to(dtype)


def _quantize(x: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns the values, row-major, and the scales of a matrix of whole blocks."""
    tiles = _tiles(x.float(), block)
    # Each step is one IEEE operation in float32, so that other implementations can have the same bits. The two
    # divisions are those of vLLM's CUDA kernel for activations (per_token_group_quant.cu), since the sampler uses it.
    # DeepGEMM and torchao multiply by a reciprocal, which moves a few values to the neighboring E4M3 number. The
    # divisor is a tensor, because on CUDA torch turns a division by a Python number into a product with its reciprocal.
    scales = tiles.abs().amax(dim=(1, 3)).clamp_min(AMAX_FLOOR) / torch.full((), FP8_MAX, device=x.device)
    # x / scale may round to just above 448, which an older torch casts to NaN.
    values = (tiles / scales[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)
    values = values.flatten(2).flatten(0, 1).contiguous()
    return values, scales if block == TILE_BLOCK else column_major(scales)


def _tiles(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Returns a view of x [M, K] by blocks: [M / block[0], block[0], K / block[1], block[1]]."""
    (M, K), (m, k) = x.shape, block
    return x.unflatten(1, (K // k, k)).unflatten(0, (M // m, m))


def column_major(x: Tensor) -> Tensor:
    """Returns the matrix with strides (1, number of rows), without a copy if it has them."""
    # `.contiguous()` would leave any stride of a dimension of size 1 as it is, so the strides are compared.
    return x if x.stride() == (1, x.shape[0]) else x.T.clone(memory_format=torch.contiguous_format).T


def _check(x: Tensor) -> None:
    if x.ndim != 2 or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise UsageError(
            f"FP8 blocks are made of a bfloat16, float16 or float32 matrix, got {x.dtype} of shape {tuple(x.shape)}: "
            "flatten the leading dimensions"
        )
    if x.shape[1] % BLOCK_SIZE:
        raise UsageError(
            f"{x.shape[1]} features are not a multiple of 128: leave this layer in bfloat16, here and in the sampler"
        )


def _use_triton(x: Tensor, backend: str) -> bool:
    if backend not in ("auto", "torch", "triton"):
        raise UsageError(f"backend of the quantizer is {backend!r}: choose auto, torch or triton")
    if backend == "torch" or (backend == "auto" and not x.is_cuda):
        return False
    if not x.is_cuda:
        problem = f"the tensor is on {x.device}; move it to a CUDA device"
    elif torch.cuda.get_device_capability(x.device) < (8, 9):
        problem = "casts to E4M3 need compute capability 8.9 or later"
    elif importlib.util.find_spec("triton") is None:
        problem = "it is not installed: pip install triton"
    else:
        return True
    if backend == "triton":
        raise UsageError(f"backend of the quantizer is 'triton', but {problem}, or take backend='torch'")
    return False
