"""Settings of FP8 in blocks of 128.

plan.py selects the layers, linear.py implements the layer, and vllm_plugin.py serves vLLM on CPUs.
"""

from typing import Literal

from pydantic import Field

from torchtune_ext.run.errors import UsageError
from torchtune_ext.settings.sections import config_section


@config_section("precision")
class Fp8Config:
    """How linear layers compute in FP8."""

    backend: Literal["auto", "scaled_mm", "deep_gemm", "torchao", "reference"] = Field(
        default="auto", description="implementation of the FP8 GEMMs"
    )
    save_activations: Literal["fp8", "full"] = Field(
        default="fp8",
        description="activations saved for WGrad: fp8 quantizes x by columns; full keeps x until the backward",
    )
    backward: Literal["fp8", "full"] = Field(
        default="fp8", description="DGrad and WGrad in FP8, or in the compute dtype with unquantized W and x"
    )
    skip: tuple[str, ...] = Field(
        default=(), description='layers kept in the compute dtype, by last name ("down_proj") or full name'
    )

    def __post_init__(self) -> None:
        if self.backward == "full" and self.save_activations == "fp8":
            raise UsageError(
                "precision.backward=full with precision.save_activations=fp8: the backward needs unquantized activations; "
                "set precision.save_activations=full"
            )

    def gemms(self, frozen: bool) -> tuple[str, ...]:
        """Returns the GEMMs of a layer that run in FP8. A frozen weight has no WGrad."""
        return ("fprop", "dgrad", "wgrad")[: 1 if self.backward == "full" else 2 if frozen else 3]
