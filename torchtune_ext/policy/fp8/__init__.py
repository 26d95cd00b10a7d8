"""FP8 in 128-blocks: the settings. plan.py chooses the layers, linear.py is the layer, vllm_plugin.py is for CPUs."""

from dataclasses import dataclass

from torchtune_ext.run.errors import Mistake

KEPT = ("fp8", "full")


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """How linear layers compute in FP8."""

    backend: str = "auto"  # computes the GEMMs: auto, scaled_mm, deep_gemm, torchao, or reference
    # What a layer keeps for WGrad: "fp8" keeps the columns of x, "full" keeps x and quantizes it in the backward.
    save_activations: str = "fp8"
    backward: str = "fp8"  # "full" computes DGrad and WGrad in the compute dtype, with W and x as they are
    # Layers that are left alone, by Hugging Face's names: "down_proj", "model.layers.0.mlp.down_proj".
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        choices = {"save_activations": KEPT, "backward": KEPT}
        if self.backend != "auto":
            # A run without FP8 loads none of it.
            from torchtune_ext.kernels.fp8_gemm import BACKENDS

            choices["backend"] = ("auto", *BACKENDS)
        for knob, known in choices.items():
            if getattr(self, knob) not in known:
                raise Mistake(f"precision.{knob}={getattr(self, knob)!r} is unknown: choose one of {', '.join(known)}")
        if isinstance(self.skip, str):
            raise Mistake(f"precision.skip={self.skip!r} must be a list of names: [{self.skip}]")
        object.__setattr__(self, "skip", tuple(self.skip))
        if self.backward == "full" and self.save_activations == "fp8":
            raise Mistake(
                "precision.backward=full needs the activations themselves: set precision.save_activations=full"
            )

    def gemms(self, frozen: bool) -> tuple[str, ...]:
        """Returns the GEMMs of a layer that are in FP8. A frozen weight has no WGrad."""
        return ("fprop", "dgrad", "wgrad")[: 1 if self.backward == "full" else 2 if frozen else 3]
