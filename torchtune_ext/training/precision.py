"""`precision:` of a recipe: the number formats of the linear layers in trainer and engine.

flow             trainer          engine
"bf16"           `dtype`          `engine.dtype`     no FP8
"fp8_rollout"    `dtype`          FP8 blocks         the usual method, a baseline: the two diverge
"fp8_unified"    FP8 blocks       the same bytes     Jet-RL, arXiv 2601.14243: one policy in both
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
from torchtune_ext.settings.sections import config_section

if TYPE_CHECKING:
    from torchtune_ext.policy.fp8.plan import Fp8Plan

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Deadline in seconds of an engine step in a dtype that the CPU only emulates.
SLOW_STEP_S = 900.0


def chosen_dtype(dtype: str, device: str, fp8: bool = False) -> str:
    """Resolves dtype "auto": bfloat16 if the device computes in it (or `fp8`), else float32."""
    # Layers in FP8 require bfloat16 for the rest of the model.
    return ("bfloat16" if fp8 or computes_in_bfloat16(device) else "float32") if dtype == "auto" else dtype


def dtype_note(dtype: str, device: str) -> str:
    """Explains why a dtype was chosen, or warns that it is slow; "" otherwise."""
    has_bfloat16 = computes_in_bfloat16(device)
    if dtype == "auto":
        what = "processor" if device == "cpu" else "GPU"
        return f" (dtype=auto: this {what} {'computes' if has_bfloat16 else 'does not compute'} in bfloat16)"
    if dtype == "bfloat16" and not has_bfloat16:
        return ", which is slow because this processor does not compute in it; dtype=auto or float32 is faster"
    return ""


@cache
def computes_in_bfloat16(device: str) -> bool:
    """Whether a device multiplies matrices in bfloat16, instead of only storing them."""
    # A run refuses GPUs that do not (`run.nvidia.MIN_CAPABILITY`).
    if device == "cuda":
        return True
    # On a processor without these flags, oneDNN falls back to a plain loop, which takes eight times
    # as long as float32.
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return any(f" {flag}" in flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))


@config_section("precision")
class PrecisionConfig(Fp8Config):
    """The keys of `precision:`, the precision flow."""

    SHORTHAND_KEY: ClassVar[str] = "flow"  # the key of a plain value: `precision: bf16` is `precision: {flow: bf16}`

    flow: Literal["bf16", "fp8_rollout", "fp8_unified"] = Field(
        default="bf16",
        description="bf16; fp8_rollout: FP8 in the engine only; fp8_unified: FP8 in engine and trainer; "
        "short form: `precision: fp8_unified`",
    )

    def __post_init__(self) -> None:
        Fp8Config.__post_init__(self)
        default = Fp8Config()
        names = [field.name for field in fields(Fp8Config) if getattr(self, field.name) != getattr(default, field.name)]
        if self.flow == "fp8_rollout":
            # All settings except `skip` concern only the trainer.
            names = [name for name in names if name != "skip"]
        if self.flow != "fp8_unified" and names:
            where = " in the trainer" if self.flow == "fp8_rollout" else ""
            raise UsageError(
                f"precision.{names[0]}={getattr(self, names[0])!r} with precision.flow={self.flow}, which has no FP8"
                f"{where}: leave it out, or set precision.flow=fp8_unified"
            )

    @property
    def fp8(self) -> bool:
        """Whether some layers are in FP8."""
        return self.flow != "bf16"

    @property
    def fp8_configs(self) -> tuple[Fp8Config | None, Fp8Config | None]:
        """FP8 settings of the trainer's and the engine's layers; None: no FP8 on that side."""
        return self if self.flow == "fp8_unified" else None, None if self.flow == "bf16" else self


class Precision:
    """The number format of each layer, decided before the engine starts and before weights exist.

    Args:
        config: the section `precision:`.
        model: the policy's model; it may be on the meta device.
        hf_model: the weights in model_dir.
        dtype: dtype of the trainer's forward and backward, "bfloat16" or "float32".
        engine: settings of the engine.
        device: device of this rank.
        adapter: settings of the model's adapters; None: it has no adapters.
        publish_mode: weights that the engine receives, "adapter" or "merged".

    Raises:
        UsageError: the weights are quantized; or FP8 is combined with another dtype than bfloat16,
            a GPU other than Hopper, or merged adapters (flow "fp8_unified"); or no layer can use
            FP8; or no backend supports the device.
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
        self.dtype = DTYPES[dtype]  # dtype of the trainer's forward and backward
        engine = engine.with_trainer_defaults(dtype)
        self.engine_dtype = getattr(torch, engine.dtype)
        self.trainer_fp8, engine_fp8 = config.fp8_configs
        self.engine = engine  # settings for starting the engine
        self.engine_fp8: Fp8Plan | None = None  # which layers the engine holds in FP8
        if device.type == "cpu" and engine.dtype == "bfloat16" and not computes_in_bfloat16("cpu"):
            # The health check must not take a slow engine step of minutes for a hang.
            self.engine = replace(engine, probe_deadline_s=max(engine.probe_deadline_s, SLOW_STEP_S))
        self.device = device
        self._sync_note = (
            "which are sent once, adapters after each step"
            if adapter and publish_mode == "adapter"
            else "sent after each step"
        )
        hf_model.require_unquantized()
        # The rest concerns FP8 only.
        if engine_fp8 is None:
            return
        for key, value in (("dtype", self.dtype), ("engine.dtype", self.engine_dtype)):
            if value != torch.bfloat16:
                raise UsageError(
                    f"precision.flow={config.flow} with {key}={str(value)[6:]}: FP8 requires bfloat16. Fix: set "
                    f"{key}=bfloat16, or precision=bf16"
                )
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
            raise UsageError(
                f"precision.flow={config.flow} on a {torch.cuda.get_device_name(device)}: FP8 in blocks needs a Hopper "
                "GPU (compute capability 9.0, as H100 and H200 have); set precision=bf16"
            )
        if adapter and self.trainer_fp8 and publish_mode == "merged":
            raise UsageError(
                "precision.flow=fp8_unified with adapters.publish=merged: the trainer adds the adapter to a base in FP8, "
                "but the engine would round their sum; set adapters.publish=adapter"
                f"{' and model.use_dora=False' * adapter.dora}, or precision=bf16 or fp8_rollout"
            )
        # Only runs in FP8 need this import.
        from torchtune_ext.policy.fp8.plan import make_fp8_plan

        self.engine_fp8 = make_fp8_plan(model, hf_model, config, self.dtype, device if self.trainer_fp8 else None)
        self.engine_fp8.require_whole_shards(engine.tensor_parallel_size, hf_model.config["num_key_value_heads"])
        self.engine = replace(self.engine, quantization=self.engine_fp8.quantization_config())

    def __str__(self) -> str:
        """Formats the precision, for instance "in float32".

        A longer example: "precision fp8_rollout, trainer in bfloat16, engine in FP8 and bfloat16".
        """
        trainer, engine = str(self.dtype)[6:], str(self.engine_dtype)[6:]
        if self.engine_fp8:
            fp8 = "FP8 and "
            return f"precision {self.flow}, trainer in {fp8 * bool(self.trainer_fp8)}{trainer}, engine in {fp8}{engine}"
        if not self.is_mixed:
            return f"in {trainer}"
        loss = f": the engine rounds off changes below half a {engine} ulp" if trainer == "float32" else ""
        return f"trainer in {trainer}, engine in {engine}{loss}"

    @property
    def coarsest_dtype(self) -> torch.dtype:
        """The coarser of the trainer's and the engine's dtype. Some layers may be in FP8, too."""
        return torch.float32 if self.dtype == self.engine_dtype == torch.float32 else torch.bfloat16

    @property
    def coarsest_name(self) -> str:
        return "FP8" if self.engine_fp8 else str(self.coarsest_dtype)[6:]

    @property
    def is_mixed(self) -> bool:
        """Whether the engine holds other values of the weights than the trainer computes with."""
        return self.dtype != self.engine_dtype or (self.engine_fp8 is not None and self.trainer_fp8 is None)

    def round_for_engine(self, name: str, weight: Tensor) -> Tensor:
        """Rounds a weight to the value that the engine holds, in float32. `name` is torchtune's."""
        if self.engine_fp8 and hf_name(name).removesuffix(".weight") in self.engine_fp8.fp8_layer_names:
            return self.engine_fp8.round_weight(weight)
        return weight.to(self.engine_dtype).float()

    def convert_for_engine(
        self, gather: Callable[[torch.dtype], Iterable[tuple[str, Tensor]]]
    ) -> Iterable[tuple[str, Tensor]]:
        """Converts unsharded weights to the format of the engine.

        Args:
            gather: dtype -> pairs (Hugging Face name, unsharded tensor).
        """
        if self.engine_fp8 is None:
            return gather(self.engine_dtype)
        from torchtune_ext.policy.fp8.plan import fp8_hf_tensors

        # FP8 is quantized from the trainer's dtype, as in the trainer's forward.
        return fp8_hf_tensors(gather(self.dtype), self.engine_fp8, self.engine_dtype)

    def write_fp8_report(self, folder: str, policy: PackedPolicy) -> None:
        """Prints which layers are in FP8, and why others are not, and writes `folder`/fp8.txt."""
        if self.engine_fp8 is None:
            return
        lines = [
            (policy.fp8_plan or self.engine_fp8).format_table(),
            f"  engine: {len(self.engine_fp8.fp8_layer_names)} weights in FP8, {self._sync_note}",
        ]
        if policy.fp8_plan is None:
            lines.append(f"  trainer: no weight in FP8, all in {str(self.dtype)[6:]}; trainer and engine diverge")
        text = "\n".join(lines)
        print_text(text)
        (Path(folder) / "fp8.txt").write_text(f"{text}\n", encoding="utf-8")
