"""A replacement of nn.Linear with three FP8 GEMMs: one precision for training and sampling.

    FProp   y  = rows(x) tiles(W)^T            in the dtype of x
    DGrad   dx = rows(dy) tiles(W)             the same tiles as FProp
    WGrad   dW = columns(dy)^T columns(x)      summed in float32

After Jet-RL (arXiv:2601.14243). The parameter remains the master weight that FSDP2 shards. Each
forward quantizes it, and rounding has the gradient of the identity (straight-through estimator).
Inputs and outputs of layers are in the compute dtype.

With width D and MLP width F, a decoder layer saves 1.03 (3D + F) bytes per token for the backward,
instead of 2 (2D + F).
"""

import weakref

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn
from torchtune.modules.peft import LoRALinear

from torchtune_ext.kernels import fp8_gemm
from torchtune_ext.kernels.fp8_quantize import (
    BLOCK_SIZE,
    COLUMN_BLOCK,
    FP8_DTYPE,
    ROW_BLOCK,
    Fp8Blocks,
    quantize_columns,
    quantize_rows,
    quantize_weight,
)
from torchtune_ext.policy.fp8 import Fp8Config


class Fp8BlockLinear(nn.Linear):
    """nn.Linear in FP8 blocks. The in-features must be a multiple of 128."""

    fp8 = Fp8Config()

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out] in the dtype of the input."""
        return fp8_linear(input, self.weight, self.bias, self.fp8)


class Fp8LoRALinear(LoRALinear):
    """torchtune's LoRALinear with the frozen weight in FP8 (no WGrad); adapters are not in FP8."""

    weight: Tensor
    bias: Tensor | None
    fp8 = Fp8Config()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out] in the dtype of x."""
        out = fp8_linear(x, self.weight, self.bias, self.fp8)
        if self.disabled:
            return out
        return out + (self.alpha / self.rank) * self.lora_b(self.lora_a(self.dropout(x)))


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: Fp8Config) -> Tensor:
    """Computes x [..., K] times weight^T [K, N] in FP8, plus bias.

    Args:
        x: activations [..., K], bfloat16, float16 or float32; K is a multiple of 128.
        weight: master weight [N, K].
        bias: [N], or None.
        config: FP8 settings.

    Returns:
        [..., N] in the dtype of x.

    Raises:
        ValueError: K or the dtype is unsupported, or the backend cannot run.
    """
    trains = weight.requires_grad and torch.is_grad_enabled()
    columns = trains and config.save_activations == "fp8"
    keep_x = trains and not columns
    y = _Fp8Linear.apply(x, weight, *_quantize_once(x, columns), keep_x, config.backend, config.backward == "full")
    # vLLM also adds the bias after the product.
    return y if bias is None else y + bias


class _Fp8Linear(torch.autograd.Function):
    """The product and its gradients.

    The caller passes the quantized forms of x, so that layers with the same input share them.
    """

    @staticmethod
    def forward(ctx, x, weight, rows, row_scales, columns, column_scales, keep_x, backend, full):
        # The columns of x, 1 + 4/128 bytes per element, are saved instead of x, unless the backward
        # needs x. W is not copied: rounding it again gives the same bits, and FSDP2 can free the
        # gathered weight until then.
        ctx.save_for_backward(weight, *((x,) if keep_x else (columns, column_scales)))
        ctx.keep_x, ctx.backend, ctx.full, ctx.shape = keep_x, backend, full, x.shape
        return _fprop(rows, row_scales, weight, x.dtype, backend).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        (dy,) = grad_outputs
        weight, *inputs = ctx.saved_tensors
        dy = dy.reshape(-1, weight.shape[0])
        need_dx, need_dw = ctx.needs_input_grad[:2]
        if ctx.full:
            dx = dy @ weight.to(dy.dtype) if need_dx else None
            dw = (dy.T @ inputs[0].reshape(-1, weight.shape[1])).to(weight.dtype) if need_dw else None
        else:
            # Columns that were not saved are quantized now, or are empty if only dx is needed.
            if ctx.keep_x and need_dw:
                _, _, *inputs = _quantize(inputs[0].reshape(-1, weight.shape[1]), False, True)
            elif ctx.keep_x:
                inputs = dy.new_empty(0, dtype=FP8_DTYPE), dy.new_empty(0, dtype=torch.float32)
            dx, dw = _backward(dy, weight, *inputs, need_dx, need_dw, ctx.backend)
        return (dx.view(ctx.shape) if need_dx and dx is not None else None, dw if need_dw else None, *(None,) * 7)


# The last quantized activation: (weak reference, (columns, tensor version), quantized tensors).
_last_quantized: tuple = (lambda: None, None, None)


def _quantize_once(x: Tensor, columns: bool) -> tuple[Tensor, ...]:
    """Returns an activation's rows, row scales, columns, column scales; caches one tensor."""
    global _last_quantized
    # A compiled graph already deduplicates equal calls. An inference tensor has no version, so the
    # validity of its quantized tensors cannot be checked.
    if torch.compiler.is_compiling() or x.is_inference():
        return _quantize(x.detach().reshape(-1, x.shape[-1]), True, columns)
    # q, k and v read the same tensor one after the other, as gate and up do. The tensor is
    # quantized and saved only once.
    key = columns, x._version
    last_input, last_key, quantized = _last_quantized
    if last_input() is not x or last_key != key:
        quantized = _quantize(x.detach().reshape(-1, x.shape[-1]), True, columns)
        _last_quantized = weakref.ref(x, _clear_last), key, quantized
    return quantized


def _clear_last(reference: weakref.ref) -> None:
    # Without this, the quantized tensors would stay in memory until the next call.
    global _last_quantized
    if _last_quantized[0] is reference:
        _last_quantized = (lambda: None, None, None)


# torch.compile treats the three operators below as opaque, because their kernels depend on device
# and installed packages, and a compiled model must give the bits of an eager model. Operators pass
# only contiguous matrices: matrices that Fp8Blocks holds transposed are transposed for the call.


@library.custom_op("torchtune_ext::fp8_quantize", mutates_args=())
def _quantize(x: Tensor, rows: bool, columns: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantizes x [M, K] by rows, by columns or both.

    Returns:
        Rows [M, K], their scales^T [K/128, M], columns^T [K, M'] and their scales [M'/128, K]. M'
        is M rounded up to a multiple of 128. A form that was not requested is empty.
    """
    # A custom operator must not return one tensor twice, so the tensors are cloned.
    values, scales = x.new_empty(0, dtype=FP8_DTYPE), x.new_empty(0, dtype=torch.float32)
    row_form, column_form = (values, scales), (values.clone(), scales.clone())
    if rows:
        quantized = quantize_rows(x)
        row_form = quantized.values.contiguous(), quantized.scales.T.contiguous()
    if columns:
        quantized = quantize_columns(x)
        column_form = quantized.values.T.contiguous(), quantized.scales.contiguous()
    return (*row_form, *column_form)


@_quantize.register_fake
def _(x, rows, columns):
    (tokens, features), blocks = x.shape, -(-x.shape[0] // BLOCK_SIZE)
    return (
        x.new_empty((tokens, features) if rows else 0, dtype=FP8_DTYPE),
        x.new_empty((features // BLOCK_SIZE, tokens) if rows else 0, dtype=torch.float32),
        x.new_empty((features, blocks * BLOCK_SIZE) if columns else 0, dtype=FP8_DTYPE),
        x.new_empty((blocks, features) if columns else 0, dtype=torch.float32),
    )


@library.custom_op("torchtune_ext::fp8_fprop", mutates_args=())
def _fprop(rows: Tensor, row_scales: Tensor, weight: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    """Returns y [M, N] in `dtype`."""
    x = Fp8Blocks(rows, row_scales.T, ROW_BLOCK, (rows.shape[0], rows.shape[1]))
    return fp8_gemm.fprop(x, quantize_weight(weight), dtype, backend)


@_fprop.register_fake
def _(rows, row_scales, weight, dtype, backend):
    return weight.new_empty((rows.shape[0], weight.shape[0]), dtype=dtype)


@library.custom_op("torchtune_ext::fp8_backward", mutates_args=())
def _backward(
    dy: Tensor,
    weight: Tensor,
    columns: Tensor,
    column_scales: Tensor,
    need_dx: bool,
    need_dw: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Returns dx [M, K] as dy and dW [N, K] as weight; each is empty if not needed."""
    dx = dw = None
    features, padded = weight.shape[0], weight
    if missing := -features % BLOCK_SIZE:
        # DGrad contracts the out-features in groups of 128, so zeros fill the last group. `pad`
        # copies even if there is nothing to add, so the condition avoids a copy.
        dy, padded = F.pad(dy, (0, missing)), F.pad(weight, (0, 0, 0, missing))
    if need_dx:
        # The tiles of W^T have the same bits as the tiles of W, in the memory layout that DGrad
        # needs. Transposing the tiles of W would copy them, which took half as long as the product
        # on an H100.
        dx = fp8_gemm.dgrad(quantize_rows(dy), quantize_weight(padded.T).T, dy.dtype, backend)
    if need_dw:
        x = Fp8Blocks(columns.T, column_scales, COLUMN_BLOCK, (dy.shape[0], weight.shape[1]))
        dw = fp8_gemm.wgrad(quantize_columns(dy), x, weight.dtype, backend)[:features]
    return dy.new_empty(0) if dx is None else dx, weight.new_empty(0) if dw is None else dw


@_backward.register_fake
def _(dy, weight, columns, column_scales, need_dx, need_dw, backend):
    dx = dy.new_empty((dy.shape[0], weight.shape[1]) if need_dx else 0)
    return dx, weight.new_empty(weight.shape if need_dw else 0)
