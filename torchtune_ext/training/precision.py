"""`precision:` of a recipe: in what the trainer's linear layers compute, and in what the engine's do.

flow             trainer          engine
"bf16"           `dtype`          `dtype`
"fp8_rollout"    `dtype`          FP8 blocks         the usual way, to compare with: two flows that drift apart
"fp8_unified"    FP8 blocks       the same bytes     Jet-RL, arXiv 2601.14243: what samples is a part of what trains
"""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torchtune.modules import TransformerDecoder

from torchtune_ext.policy.fp8 import Fp8Receipt, fp8_hf_tensors, plan
from torchtune_ext.policy.fp8_linear import Fp8Config
from torchtune_ext.policy.weights import HFModel
from torchtune_ext.sampling.records import EngineConfig

FLOWS = ("bf16", "fp8_rollout", "fp8_unified")


@dataclass(frozen=True, slots=True)
class PrecisionConfig(Fp8Config):
    """The flow, and how FP8 is made where it has some."""

    flow: str = "bf16"

    def __post_init__(self) -> None:
        if self.flow not in FLOWS:
            near = difflib.get_close_matches(str(self.flow), FLOWS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(FLOWS)}"
            raise ValueError(f"precision.flow={self.flow!r} is unknown; {hint}")
        Fp8Config.__post_init__(self)
        if self.flow != "bf16" and self.recipe != "block":
            raise ValueError(f"precision.recipe={self.recipe!r}: the engine computes in blocks only; use recipe=block")
        if self.flow != "bf16" and self.power_of_two:
            raise ValueError(
                "precision.power_of_two=true: the engine keeps float32 scales as they are published; leave it out"
            )


@dataclass(frozen=True, slots=True)
class Precision:
    """What a run makes of its setting."""

    trainer: Fp8Config | None  # of the policy; None: `dtype` alone
    sampler: Fp8Receipt | None  # which layers the engine holds in FP8; None: none

    def engine_config(self, config: EngineConfig) -> EngineConfig:
        return config if self.sampler is None else replace(config, quantization=self.sampler.quantization_config())

    def published(self, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterable[tuple[str, Tensor]]:
        """Whole weights, as gathered in the trainer's dtype -> as the engine holds them."""
        return tensors if self.sampler is None else fp8_hf_tensors(tensors, self.sampler, dtype)

    def write_receipt(self, folder: str) -> None:
        """Prints which layers are in FP8 and why the others are not, and keeps it in `folder`/fp8.txt."""
        if self.sampler is None:
            return
        text = f"{self.sampler.table()}\n  trainer: {'the same' if self.trainer else 'none of them'}"
        print(text, flush=True)
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "fp8.txt").write_text(text + "\n", encoding="utf-8")


def plan_precision(
    config: PrecisionConfig, make_model: Callable[[], TransformerDecoder], source: HFModel, dtype: torch.dtype
) -> Precision:
    """Decides for every layer, before the engine starts and before weights exist.

    Raises:
        ValueError: FP8 with a trainer in float32; a model without a layer that fits.
    """
    if config.flow == "bf16":
        return Precision(None, None)
    if dtype != torch.bfloat16:
        raise ValueError(
            f"precision.flow={config.flow} with dtype={str(dtype)[6:]}: FP8 stands beside bfloat16; set dtype so"
        )
    with torch.device("meta"):
        model = make_model()
    receipt = plan(model, source, config, dtype)
    return Precision(config if config.flow == "fp8_unified" else None, receipt)
