"""Error bound of FP8 quantization."""

import torch

from torchtune_ext.kernels.fp8_quantize import (
    Fp8Blocks,
    dequantize,
)


def quantization_error(x, q):
    """Elementwise bound of |x^ - x| in float64, x^ = value * scale.

    v = x / scale is rounded to float32, then to E4M3, whose spacing is 2^(e-3) for 2^e <= |v| < 2^(e+1), so that half of
    it is at most 2^-4 |v|; below 2^-6 it is 2^-9 throughout, half of it 2^-10. Clamping at 448 and float32 add a few
    roundings of 2^-24 |v|: the rounding of the scale may push v above 448, and the rounding of v across a midpoint of two codes.
    """
    scales = dequantize(Fp8Blocks(torch.ones_like(q.values), q.scales, q.block, q.shape), torch.float64)
    return torch.maximum(2**-4 * x.double().abs(), 2**-10 * scales) + 4 * 2**-24 * x.double().abs()
