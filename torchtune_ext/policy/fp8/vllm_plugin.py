"""Lets vLLM run block-FP8 models on a CPU, with the slow reference GEMM, to test without a GPU."""

from typing import Any

import torch
from torch import Tensor, nn

from torchtune_ext.kernels.fp8_gemm import fprop
from torchtune_ext.kernels.fp8_quantize import BLOCK_SIZE, TILE_BLOCK, Fp8Blocks, quantize_rows


def register() -> None:
    """Registers the kernel before vLLM's own kernels, if vLLM runs on a CPU."""
    # vLLM calls this in every process, through the entry point `vllm.general_plugins` (setup.cfg).
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
    from vllm.platforms.interface import PlatformEnum

    # vLLM uses the first kernel that can run. Its own kernels need AMX, and quantize activations
    # per token or not at all. The reference kernel quantizes blocks of 1x128, as the trainer does.
    # A process may call this function twice.
    kernels = _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    if not any(kernel.__name__ == "ReferenceFp8BlockKernel" for kernel in kernels):
        kernels.insert(0, _kernel())


def _kernel() -> type:
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel

    class ReferenceFp8BlockKernel(Fp8BlockScaledMMLinearKernel):
        """A block-FP8 kernel with vLLM's interface."""

        # `apply_weights` quantizes the activations itself, as the trainer does.
        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        @classmethod
        def can_implement(cls, config) -> Any:  # vLLM annotates only the answer of its own class
            group = config.weight_quant_key.scale.group_shape
            if (group.row, group.col) != (BLOCK_SIZE, BLOCK_SIZE):
                return False, f"weights come in {BLOCK_SIZE}x{BLOCK_SIZE} blocks, not {group.row}x{group.col}"
            return super().can_implement(config)

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            # The weights stay as loaded, so that their checksums match the published weights.
            pass

        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None, **kwargs) -> Tensor:
            weight = Fp8Blocks(layer.weight, layer.weight_scale_inv, TILE_BLOCK, tuple(layer.weight.shape))
            y = fprop(quantize_rows(x.flatten(0, -2)), weight, out_dtype=torch.float32, backend="reference")
            y = y.to(x.dtype)
            return (y if bias is None else y + bias).unflatten(0, x.shape[:-1])

        def apply_block_scaled_mm(self, *args, **kwargs) -> Tensor:
            raise NotImplementedError("ReferenceFp8BlockKernel implements apply_weights instead")

    return ReferenceFp8BlockKernel
