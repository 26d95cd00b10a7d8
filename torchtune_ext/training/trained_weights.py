"""The trained weights of a model: all weights, or adapters over frozen weights.

Each class handles both sides: the weights that the trainer keeps and saves, and the settings and
weights of the engine.

class        reference            published                                checkpoint
FullWeights  copy of the weights  all weights                            model
LoRAWeights  disabled adapters    "adapter": the adapters; if the base   adapters; `save_merged`:
                                  was rounded, also the base, one time;  also the model
                                  "merged": all weights, with adapters
                                  merged
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torchtune.modules import TransformerDecoder

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.pipeline.packing import Row
from torchtune_ext.policy.hf_model import HFModel, named_hf_tensors
from torchtune_ext.policy.lora import (
    AdapterDisabledReference,
    AdapterSpec,
    adapter_hf_tensors,
    adapter_spec,
    base_hf_tensors,
    base_tensors,
    merged_hf_tensors,
    merged_tensors,
)
from torchtune_ext.run.errors import UsageError
from torchtune_ext.sampling.engine_args import on_cpu
from torchtune_ext.sampling.types import LORA_RANKS, EngineConfig
from torchtune_ext.settings.sections import config_section
from torchtune_ext.training.collectives import all_gather
from torchtune_ext.training.export import export_adapter, export_model
from torchtune_ext.training.learner import Learner
from torchtune_ext.training.mismatch import UpdateEffect, measure_update_effect
from torchtune_ext.training.precision import Precision

UNUSED_ADAPTER_FIXES = {
    "adapter": "look for a request that does not name the adapter; adapters.publish=merged needs no adapter name",
    "merged": "look for cached keys and values of an earlier weight sync",
}

# Rows, weights -> log-probs of each row (`streamed_logprobs`).
LogprobsFn = Callable[..., list[Tensor]]
# Pairs (name, unsharded tensor), and PEFT's config if the tensors are an adapter.
WeightStream = tuple[Iterable[tuple[str, Tensor]], dict[str, Any] | None]


@config_section("adapters")
class AdapterConfig:
    """The keys of `adapters:`. The model's builder (`model:`) configures the adapters."""

    publish: Literal["auto", "adapter", "merged"] = Field(
        default="auto", description="weights sent to the engine: adapter (applied by vLLM) or merged (whole weights)"
    )
    save_merged: bool = Field(default=False, description="checkpoints also hold the merged model")

    def resolve_publish_mode(self, dora: bool, dtype: str) -> str:
        """Resolves the publish mode for an engine in `dtype`: "adapter" or "merged"."""
        # vLLM does not support DoRA, nor float32 adapters on a GPU.
        if self.publish == "auto":
            return "merged" if dora or (dtype == "float32" and _lora_needs_half()) else "adapter"
        return self.publish


def _lora_needs_half() -> bool:
    """Whether vLLM applies adapters only in half precision, as on a GPU."""
    # A CUDA build of vLLM may run on a machine without a GPU.
    return not on_cpu() and torch.cuda.is_available()


def select_trained_weights(
    model: TransformerDecoder,
    hf_model: HFModel,
    section: Mapping[str, Any],
    adapters: AdapterConfig,
    shards: int = 1,
) -> "FullWeights | LoRAWeights":
    """Selects the trained part of a model: its adapters if it has any, else all weights.

    Args:
        model: the model; it may be on the meta device.
        hf_model: the weights in model_dir.
        section: the config section `model:`, which may have keys that the builder ignored.
        adapters: the config section `adapters:`.
        shards: number of shards of each copy of the weights.

    Raises:
        UsageError: the adapters are unsupported, or `adapters:` is set for a model without
            adapters.
    """
    spec = adapter_spec(model, hf_model, section, shards)
    if spec is not None:
        return LoRAWeights(spec, adapters)
    if adapters != AdapterConfig():
        raise UsageError(
            f"adapters.publish={adapters.publish}, adapters.save_merged={adapters.save_merged}, but `model:` has no "
            "adapters. Fix: set model.lora_attn_modules, or remove `adapters:`"
        )
    return FullWeights()


def measure_rounding(
    trained_weights: "FullWeights | LoRAWeights",
    precision: Precision,
    model: nn.Module,
    logprobs_fn: LogprobsFn,
    rows: Sequence[Row],
) -> float:
    """Measures the mismatch of a correct engine that is due to rounding. A collective.

    Args:
        trained_weights: the trained part of the model.
        precision: precision of trainer and engine.
        model: the policy's model.
        logprobs_fn: `streamed_logprobs` with the model's builder, device and temperature.
        rows: packed rows of this rank.

    Returns:
        Mean |d| of log-probs in nats, over all ranks.
    """
    coarse = precision.coarsest_dtype
    if coarse == torch.float32:
        return 0.0

    def rounded_weights() -> Iterator[tuple[str, Tensor]]:
        # Both computations use weights rounded to the coarser dtype, so that only the arithmetic
        # differs. Rounding of the weights is equal on both sides and causes no mismatch.
        return ((name, weight.to(coarse)) for name, weight in merged_tensors(model))

    exact_logprobs = logprobs_fn(rows, rounded_weights(), dtype=torch.float32)
    arithmetic = _mean_abs_diff(
        exact_logprobs, logprobs_fn(rows, rounded_weights(), dtype=coarse, fp8_plan=precision.engine_fp8)
    )
    # The arithmetic above already includes all FP8 rounding.
    without_fp8 = copy(precision)
    without_fp8.engine_fp8 = None
    if not trained_weights.weights_differ(without_fp8):
        return arithmetic

    def round_to_compute_dtype(weight: Tensor) -> Tensor:
        return weight.to(precision.dtype).float()

    # The engine's weights differ from the trainer's. This error is independent of the arithmetic
    # error, so the two add in quadrature.
    trainer_logprobs = logprobs_fn(
        rows,
        merged_tensors(model, lambda name, weight: round_to_compute_dtype(weight), round_to_compute_dtype),
        dtype=torch.float32,
    )
    engine_logprobs = logprobs_fn(rows, trained_weights.engine_weights(model, without_fp8), dtype=torch.float32)
    return math.hypot(arithmetic, _mean_abs_diff(trainer_logprobs, engine_logprobs))


def _mean_abs_diff(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Mean |difference| over all ranks. A collective."""
    abs_diffs = [(a - b).abs().double() for a, b in zip(first, second, strict=True)]
    rank_sum = sum(diff.sum().item() for diff in abs_diffs), sum(map(len, abs_diffs))
    total, num_labels = map(sum, zip(*all_gather(rank_sum), strict=True))
    return total / max(1.0, num_labels)


class FullWeights:
    """Every weight is trained. `LoRAWeights` has the same methods."""

    spec: AdapterSpec | None = None
    # FullWeights publishes complete weights, as LoRAWeights does in the mode "merged".
    publish_mode = "merged"

    def __str__(self) -> str:
        return "all weights"

    def configure_engine(self, config: EngineConfig) -> EngineConfig:
        """Returns the engine's settings; `LoRAWeights` adds rank and layers of the adapters."""
        return config

    def weight_streams(self, model: nn.Module, hf_model: HFModel, precision: Precision) -> Iterator[WeightStream]:
        """Yields the streams of one weight sync. Iterating a stream is a collective."""
        yield precision.convert_for_engine(partial(named_hf_tensors, model, hf_model)), None

    def weights_differ(self, precision: Precision) -> bool:
        """Whether the engine's weights differ from the trainer's compute weights."""
        return precision.is_mixed

    def engine_weights(self, model: nn.Module, precision: Precision) -> Iterator[tuple[str, Tensor]]:
        """Yields (torchtune's name, the engine's merged weight in float32). A collective."""
        return merged_tensors(model, base=precision.round_for_engine)

    def measure_effects(
        self,
        learner: Learner,
        rows: Sequence[Row],
        published_logprobs: Sequence[Tensor],
        logprobs_fn: LogprobsFn | None,
        precision: Precision,
    ) -> dict[str, UpdateEffect]:
        """Measures changes that the engine must have, other than the last update. A collective.

        Args:
            learner: the learner of the policy.
            rows: packed rows of this rank, sampled by the engine.
            published_logprobs: log-probs of each row under the published weights, [L].
            logprobs_fn: the function that computed `published_logprobs`; None: the policy did.
            precision: precision of the published weights.

        Returns:
            Name of a change -> its effect.
        """
        return {}

    def make_exporter(
        self, model: nn.Module, hf_model: HFModel, dtype: torch.dtype, tokenizer: ChatTokenizer | None = None
    ) -> Callable[..., None]:
        """Returns the function that exports files for other tools (`Checkpoints.save`)."""
        return partial(export_model, model=model, hf_model=hf_model, dtype=dtype, tokenizer=tokenizer)


class LoRAWeights:
    """Adapters are trained: LoRA, DoRA, or either over weights in NF4 (QLoRA)."""

    def __init__(self, spec: AdapterSpec, config: AdapterConfig):
        """Checks settings that would fail at the first weight sync.

        Raises:
            UsageError: a setting is unsupported.
        """
        if spec.dropout and "lm_head" in spec.targets:
            raise UsageError(
                f"model.lora_dropout={spec.dropout} with model.apply_lora_to_output: the output layer supports no dropout. "
                "Fix: set model.lora_dropout=0"
            )
        if config.publish == "adapter" and spec.dora:
            raise UsageError(
                "adapters.publish=adapter with model.use_dora: vLLM does not support DoRA. Fix: set adapters.publish=merged"
            )
        self.spec, self._config = spec, config
        # The default dtype applies until `configure_engine` receives the engine's settings.
        self.publish_mode = config.resolve_publish_mode(spec.dora, EngineConfig().dtype)
        self._base_published = False

    def __str__(self) -> str:
        kind = ("Q" if self.spec.quantized else "") + ("DoRA" if self.spec.dora else "LoRA")
        where = " ".join(self.spec.targets)
        form = "adapter" if self.publish_mode == "adapter" else "merged weights"
        return f"{kind} of rank {self.spec.rank}, alpha {self.spec.alpha:g}, on {where}, published as {form}"

    def configure_engine(self, config: EngineConfig) -> EngineConfig:
        if config.lora_rank is not None or config.lora_targets:
            raise UsageError(
                f"engine.lora_rank={config.lora_rank}, engine.lora_targets={list(config.lora_targets)}: the recipe sets them "
                "from `model:`. Fix: remove both keys"
            )
        self.publish_mode = self._config.resolve_publish_mode(self.spec.dora, config.dtype)
        if self.publish_mode == "adapter" and self.spec.max_rank > LORA_RANKS[-1]:
            if self._config.publish == "adapter":
                raise UsageError(
                    f"adapters.publish=adapter: model.lora_rank={self.spec.rank} makes an adapter of rank {self.spec.max_rank} "
                    f"(fused layers add up); vLLM supports at most {LORA_RANKS[-1]}. Fix: set adapters.publish=merged, or a "
                    "lower model.lora_rank"
                )
            self.publish_mode = "merged"
        if self.publish_mode == "merged":
            return config
        if config.dtype == "float32" and _lora_needs_half():
            raise UsageError(
                "adapters.publish=adapter with engine.dtype=float32: on a GPU vLLM applies adapters in half precision "
                "only. Fix: set engine.dtype=bfloat16, or adapters.publish=merged"
            )
        return replace(config, lora_rank=self.spec.max_rank, lora_targets=self.spec.targets)

    def weight_streams(self, model: nn.Module, hf_model: HFModel, precision: Precision) -> Iterator[WeightStream]:
        if self.publish_mode == "merged":
            yield precision.convert_for_engine(partial(merged_hf_tensors, model, hf_model)), None
            return
        if (self.spec.quantized or precision.engine_fp8) and not self._base_published:
            # The engine read the base from model_dir. It must sample with the base as rounded to
            # NF4 or FP8. The base is frozen, so it is sent only once.
            yield precision.convert_for_engine(partial(base_hf_tensors, model, hf_model)), None
            self._base_published = True
        yield adapter_hf_tensors(model, hf_model, precision.engine_dtype), self.spec.peft_config(str(hf_model.path))

    def weights_differ(self, precision: Precision) -> bool:
        return precision.is_mixed or (self.publish_mode == "merged" and precision.engine_dtype != torch.float32)

    def engine_weights(self, model: nn.Module, precision: Precision) -> Iterator[tuple[str, Tensor]]:
        if self.publish_mode == "merged":
            return ((name, precision.round_for_engine(name, weight)) for name, weight in merged_tensors(model))
        return merged_tensors(
            model, base=precision.round_for_engine, factor=lambda weight: weight.to(precision.engine_dtype)
        )

    def measure_effects(
        self,
        learner: Learner,
        rows: Sequence[Row],
        published_logprobs: Sequence[Tensor],
        logprobs_fn: LogprobsFn | None,
        precision: Precision,
    ) -> dict[str, UpdateEffect]:
        # After few updates, an engine that samples from the base model causes only a small
        # mismatch. So log-probs without the adapter are compared, too.
        model = learner.policy.model
        if logprobs_fn is not None:
            base_logprobs = logprobs_fn(
                rows, ((name, precision.round_for_engine(name, weight)) for name, weight in base_tensors(model))
            )
        else:
            with AdapterDisabledReference(model).activate():
                base_logprobs = [scores.logprobs_L for scores in learner.logprobs(rows)]
        missing_cause = f"the engine has the adapter but samples without it ({UNUSED_ADAPTER_FIXES[self.publish_mode]})"
        return {"adapter": measure_update_effect(rows, published_logprobs, base_logprobs, missing_cause)}

    def make_exporter(
        self, model: nn.Module, hf_model: HFModel, dtype: torch.dtype, tokenizer: ChatTokenizer | None = None
    ) -> Callable[..., None]:
        merged_dtype, options = (
            dtype if self._config.save_merged else None,
            {"adapter": self.spec, "tokenizer": tokenizer},
        )
        return partial(export_adapter, model=model, hf_model=hf_model, merged_dtype=merged_dtype, **options)
