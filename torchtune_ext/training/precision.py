"""`precision:` of a recipe: in what the trainer's linear layers compute, and in what the engine's do.

flow             trainer          engine
"bf16"           `dtype`          `engine.dtype`     no FP8 anywhere
"fp8_rollout"    `dtype`          FP8 blocks         the usual way, to compare with: two flows that drift apart
"fp8_unified"    FP8 blocks       the same bytes     Jet-RL, arXiv 2601.14243: what samples is a part of what trains
"""

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torchtune.modules import TransformerDecoder

from torchtune_ext.policy.families import hf_name
from torchtune_ext.policy.fp8 import Fp8Config
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.policy.logprobs import PackedPolicy
from torchtune_ext.policy.lora import AdapterSpec
from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.output import print_text
from torchtune_ext.sampling.types import EngineConfig
from torchtune_ext.settings.records import config_record

if TYPE_CHECKING:
    from torchtune_ext.policy.fp8.plan import Fp8Plan

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Deadline for a step of an engine in a dtype in which the processor does not compute.
SLOW_STEP_S = 900.0


def chosen_dtype(dtype: str, device: str, fp8: bool = False) -> str:
    """With "auto", bfloat16 where the device computes in it, else float32."""
    # Layers in FP8 work only beside bfloat16.
    return ("bfloat16" if fp8 or computes_in_bfloat16(device) else "float32") if dtype == "auto" else dtype


def dtype_note(dtype: str, device: str) -> str:
    """Why a dtype was chosen, or that it is a slow one; "" where there is nothing to say."""
    able = computes_in_bfloat16(device)
    if dtype == "auto":
        what = "processor" if device == "cpu" else "GPU"
        return f" (dtype=auto: this {what} {'computes' if able else 'does not compute'} in bfloat16)"
    if dtype == "bfloat16" and not able:
        return ", in which this processor does not compute: it is slow, and dtype=auto or float32 is not"
    return ""


@cache
def computes_in_bfloat16(device: str) -> bool:
    """Whether a device multiplies matrices in bfloat16, and not only stores them."""
    # Every GPU that vLLM 0.32 runs on does, from compute capability 8.0.
    if device == "cuda":
        return True
    # On a processor without these a plain loop stands in for oneDNN and takes eight times as long as float32.
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return any(f" {flag}" in flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))


@config_record("precision")
class PrecisionConfig(Fp8Config):
    """The keys of `precision:`, the precision flow."""

    SHORTHAND_KEY: ClassVar[str] = "flow"  # the key of a plain value: `precision: bf16` is `precision: {flow: bf16}`

    flow: Literal["bf16", "fp8_rollout", "fp8_unified"] = Field(
        default="bf16", description="bf16; fp8_rollout: FP8 in the engine only; fp8_unified: FP8 in engine and trainer"
    )

    def __post_init__(self) -> None:
        Fp8Config.__post_init__(self)
        default = Fp8Config()
        names = [field.name for field in fields(Fp8Config) if getattr(self, field.name) != getattr(default, field.name)]
        if self.flow == "fp8_rollout":
            # The other settings are the trainer's.
            names = [name for name in names if name != "skip"]
        if self.flow != "fp8_unified" and names:
            where = " in the trainer" if self.flow == "fp8_rollout" else ""
            raise UsageError(
                f"precision.{names[0]}={getattr(self, names[0])!r} with precision.flow={self.flow}, which has no FP8{where}: "
                "leave it out, or take precision.flow=fp8_unified"
            )

    @property
    def fp8(self) -> bool:
        """Whether some layers are in FP8."""
        return self.flow != "bf16"

    @property
    def side_configs(self) -> tuple[Fp8Config | None, Fp8Config | None]:
        """FP8 of the trainer's layers and of the engine's; None: the side has no FP8."""
        return self if self.flow == "fp8_unified" else None, None if self.flow == "bf16" else self


class Precision:
    """What the flow means for each layer of a model, decided before the engine starts and before weights exist.

    Args:
        model: of the policy; it may lie on the meta device.
        dtype: of the trainer's forward and backward, "bfloat16" or "float32".
        engine: its settings.
        device: of this rank.
        adapter: of a model that has one, with the `way` in which it is published.

    Raises ValueError for FP8 with another dtype than bfloat16, on a GPU other than a Hopper, with merged adapters in
    the flow "fp8_unified", for a model without a layer that fits, or without a backend.
    """

    def __init__(
        self,
        config: PrecisionConfig,
        model: TransformerDecoder,
        hf_model: HFModel,
        dtype: str,
        engine: EngineConfig,
        device: torch.device,
        adapter: AdapterSpec | None = None,
        publish_mode: str = "adapter",
    ):
        self.flow = config.flow
        self.dtype = DTYPES[dtype]  # of the trainer's forward and backward
        engine = engine.with_trainer_defaults(dtype)
        self.engine_dtype = getattr(torch, engine.dtype)
        self.trainer_fp8, sampler = config.side_configs
        self.engine = engine  # the settings to start it with
        self.engine_fp8: Fp8Plan | None = None  # which layers the engine holds in FP8
        if device.type == "cpu" and engine.dtype == "bfloat16" and not computes_in_bfloat16("cpu"):
            # A step of the engine that takes minutes must not pass for one that has frozen.
            self.engine = replace(engine, probe_deadline_s=max(engine.probe_deadline_s, SLOW_STEP_S))
        self.device = device
        self._sent = (
            "which are sent once, adapters after each step"
            if adapter and publish_mode == "adapter"
            else "sent after each step"
        )
        hf_model.require_unquantized()
        # The rest concerns FP8 only.
        if sampler is None:
            return
        for key, value in (("dtype", self.dtype), ("engine.dtype", self.engine_dtype)):
            if value != torch.bfloat16:
                raise UsageError(
                    f"precision.flow={config.flow} with {key}={str(value)[6:]}: FP8 stands beside bfloat16; set "
                    f"{key}=bfloat16, or precision=bf16"
                )
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
            raise UsageError(
                f"precision.flow={config.flow} on a {torch.cuda.get_device_name(device)}: FP8 in blocks needs a Hopper GPU "
                "(compute capability 9.0, as H100 and H200 have); set precision=bf16"
            )
        if adapter and self.trainer_fp8 and publish_mode == "merged":
            raise UsageError(
                "precision.flow=fp8_unified with adapters.publish=merged: the trainer adds the adapter to a base in FP8, the "
                "engine would round their sum; set adapters.publish=adapter"
                f"{' and model.use_dora=False' * adapter.dora}, or precision=bf16 or fp8_rollout"
            )
        # Only runs in FP8 need this import.
        from torchtune_ext.policy.fp8.plan import make_fp8_plan

        self.engine_fp8 = make_fp8_plan(model, hf_model, config, self.dtype, device if self.trainer_fp8 else None)
        self.engine_fp8.require_whole_shards(engine.tensor_parallel_size, hf_model.config["num_key_value_heads"])
        self.engine = replace(self.engine, quantization=self.engine_fp8.quantization_config())

    def __str__(self) -> str:
        """For instance "in float32", or "precision fp8_rollout, trainer in bfloat16, engine in FP8 and bfloat16"."""
        trainer, engine = str(self.dtype)[6:], str(self.engine_dtype)[6:]
        if self.engine_fp8:
            fp8 = "FP8 and "
            return f"precision {self.flow}, trainer in {fp8 * bool(self.trainer_fp8)}{trainer}, engine in {fp8}{engine}"
        if not self.is_mixed:
            return f"in {trainer}"
        loss = f": it cannot hold what is smaller than half a step of {engine}" if trainer == "float32" else ""
        return f"trainer in {trainer}, engine in {engine}{loss}"

    @property
    def coarsest_dtype(self) -> torch.dtype:
        """Dtype of the side that rounds more. Some layers may be in FP8, too."""
        return torch.float32 if self.dtype == self.engine_dtype == torch.float32 else torch.bfloat16

    @property
    def coarsest_name(self) -> str:
        return "FP8" if self.engine_fp8 else str(self.coarsest_dtype)[6:]

    @property
    def is_mixed(self) -> bool:
        """Whether the engine holds other values of the weights than the trainer computes with."""
        return self.dtype != self.engine_dtype or (self.engine_fp8 is not None and self.trainer_fp8 is None)

    def round_for_engine(self, name: str, weight: Tensor) -> Tensor:
        """A weight as the engine holds it, but in float32. `name` is torchtune's."""
        if self.engine_fp8 and hf_name(name).removesuffix(".weight") in self.engine_fp8.fp8_layer_names:
            return self.engine_fp8.round_weight(weight)
        return weight.to(self.engine_dtype).float()

    def convert_for_engine(
        self, gather: Callable[[torch.dtype], Iterable[tuple[str, Tensor]]]
    ) -> Iterable[tuple[str, Tensor]]:
        """Whole weights as the engine holds them. `gathered` makes (Hugging Face name, whole tensor)s in a dtype."""
        if self.engine_fp8 is None:
            return gather(self.engine_dtype)
        from torchtune_ext.policy.fp8.plan import fp8_hf_tensors

        # FP8 is made of the trainer's dtype, because that is what the trainer's forward rounds.
        return fp8_hf_tensors(gather(self.dtype), self.engine_fp8, self.engine_dtype)

    def write_fp8_report(self, folder: str, policy: PackedPolicy) -> None:
        """Prints which layers are in FP8 and why others are not, and keeps that in `folder`/fp8.txt."""
        if self.engine_fp8 is None:
            return
        lines = [
            (policy.fp8_plan or self.engine_fp8).format_table(),
            f"  engine: {len(self.engine_fp8.fp8_layer_names)} weights in FP8, {self._sent}",
        ]
        if policy.fp8_plan is None:
            lines.append(f"  trainer: none of them, {str(self.dtype)[6:]}; it and the engine drift apart")
        text = "\n".join(lines)
        print_text(text)
        (Path(folder) / "fp8.txt").write_text(f"{text}\n", encoding="utf-8")
