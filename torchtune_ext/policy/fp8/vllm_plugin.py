"""Lets vLLM compute block-FP8 models on a CPU with the (slow) reference GEMM, to check an FP8 run without a GPU."""

from typing import Any

import torch
from torch import Tensor, nn

from torchtune_ext.kernels.fp8_gemm import fprop
from torchtune_ext.kernels.fp8_quantize import BLOCK_SIZE, TILE_BLOCK, Fp8Blocks, quantize_rows


def register() -> None:
    """Puts the kernel before vLLM's own, if vLLM runs on a CPU."""
    # vLLM calls this in every process, through the entry point `vllm.general_plugins` (setup.cfg).
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
    from vllm.platforms.interface import PlatformEnum

    # vLLM takes the first kernel that can run. Its own need AMX, and quantize activations per token or not at all. This
    # one does it in blocks of 1x128, as the trainer does. A process may call this twice.
    kernels = _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    if not any(kernel.__name__ == "ReferenceFp8BlockKernel" for kernel in kernels):
        kernels.insert(0, _kernel())


def _kernel() -> type:
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel

    class ReferenceFp8BlockKernel(Fp8BlockScaledMMLinearKernel):
        """vLLM's interface of a kernel for block-FP8 weights."""

        # `apply_weights` quantizes the activations itself, as the trainer does.
        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        @classmethod
        def can_implement(cls, config) -> Any:  # vLLM's annotation is the one answer of its own class
            group = config.weight_quant_key.scale.group_shape
            if (group.row, group.col) != (BLOCK_SIZE, BLOCK_SIZE):
                return False, f"weights come in {BLOCK_SIZE}x{BLOCK_SIZE} blocks, not {group.row}x{group.col}"
            return super().can_implement(config)

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            # The weights stay as they were loaded, so that a publication can be compared with them.
            pass

        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None, **kwargs) -> Tensor:
            weight = Fp8Blocks(layer.weight, layer.weight_scale_inv, TILE_BLOCK, tuple(layer.weight.shape))
            y = fprop(quantize_rows(x.flatten(0, -2)), weight, out_dtype=torch.float32, backend="reference")
            y = y.to(x.dtype)
            return (y if bias is None else y + bias).unflatten(0, x.shape[:-1])

        def apply_block_scaled_mm(self, *args, **kwargs) -> Tensor:
            raise NotImplementedError("apply_weights does it all")

    return ReferenceFp8BlockKernel
