"""Computes gradients of packed rows and updates the weights.

The caller supplies the objective and the loss weights of labels, so the learner does not depend on
the algorithm.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchtune_ext.kernels.packed_attention import TILE_SIZE
from torchtune_ext.objective.loss import Loss, Tokens, loss_requirements
from torchtune_ext.pipeline.packing import Row, RowCostModel
from torchtune_ext.policy.logprobs import LabelLogprobs, PackedPolicy
from torchtune_ext.policy.lora import AdapterDisabledReference, adapter_names
from torchtune_ext.run.errors import RunFailure, UsageError
from torchtune_ext.sampling.weight_buffer import pin, unpin
from torchtune_ext.settings.sections import config_section
from torchtune_ext.training.buckets import Accumulator, bucket_ids
from torchtune_ext.training.distributed import Ranks

# Metrics of a loss that are also reported by position and staleness, to show where in completions
# it clips or masks.
BUCKETED_METRICS = ("clip_fraction", "masked_fraction", "kl_teacher")


class Learner:
    """Trains a policy: computes log-probs and gradients of a loss, and updates the weights.

    Every method is a collective. Each rank passes its own share of the rows, and all ranks pass
    equally many rows.

    Args:
        policy: the policy to train.
        loss: objective per label. If it needs a reference (`loss_requirements`), the reference is
            the policy at construction.
        ranks: the ranks of the run.
        temperature: sampling temperature. Log-probs are trained at this temperature, because the
            samples come from that distribution.
        optimizer: over `policy.trainable_parameters()`; None if `step` is never called.
        schedule: index of an update -> learning-rate multiplier (`make_schedule`).
        max_grad_norm: limit of gradient clipping; None: no clipping.
        timer: returns a context for each stage: "logprobs" (proximal policy and reference),
            "backward" (with the forward), "wait" (for other ranks after the last row, with the
            reductions) and "optimizer".
    """

    def __init__(
        self,
        policy: PackedPolicy,
        loss: Loss,
        ranks: Ranks,
        temperature: float = 1.0,
        optimizer: torch.optim.Optimizer | None = None,
        schedule: Callable[[int], float] = lambda updates: 1.0,
        max_grad_norm: float | None = None,
        timer: Callable[[str], AbstractContextManager] = nullcontext,
    ):
        self.policy, self.loss, self.ranks, self.temperature = policy, loss, ranks, temperature
        self.optimizer, self._schedule, self._max_grad_norm, self._timer = optimizer, schedule, max_grad_norm, timer
        self._base_lrs = [group["lr"] for group in optimizer.param_groups] if optimizer is not None else []
        self.update_index = 0  # index of the next update in the schedule
        self.loss_requirements = loss_requirements(loss)
        self._reference = make_reference(policy.model) if self.loss_requirements.reference_logprobs else None

    # Deprecated name, for recipes of an earlier commit. Fix: use `update_index`.
    @property
    def schedule_step(self) -> int:
        return self.update_index

    @schedule_step.setter
    def schedule_step(self, index: int) -> None:
        self.update_index = index

    @property
    def loss_state(self) -> dict[str, float]:
        """The numbers that the loss adapts to its metrics, for checkpoints; {} if it has none."""
        return getattr(self.loss, "adaptive_state", {})

    @property
    def cost_model(self) -> RowCostModel:
        """How rows are packed for these ranks."""
        # On CUDA, compiled kernels need few different row lengths, so lengths are multiples of a
        # tile.
        tile = TILE_SIZE if self.ranks.device.type == "cuda" else None
        return RowCostModel(self.ranks.world_size, tile, self.policy.attention_pair_cost, self.policy.windows)

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Row], temperature: float | None = None, top_k: int = 0) -> list[LabelLogprobs]:
        """Computes log-probs of each row's labels, without gradient and dropout.

        Args:
            rows: packed rows of this rank.
            temperature: None: the sampling temperature.
            top_k: also return log-probs of the `top_k` most likely tokens of each label.
        """
        temperature = self.temperature if temperature is None else temperature
        training = self.policy.model.training
        self.policy.model.eval()
        try:
            return [self.policy(row.to(self.ranks.device), temperature, top_k) for row in rows]
        finally:
            self.policy.model.train(training)
            _reshard(self.policy.model)

    def proximal_logprobs(
        self, updates: Sequence[Sequence[Row]], iterations: int = 1
    ) -> list[list[LabelLogprobs] | None]:
        """Computes the proximal policy's log-probs of the rows of each update.

        The proximal policy is the policy before the first update.

        Args:
            updates: rows of each update.
            iterations: how often each update is made.

        Returns:
            The log-probs of each row, for each update; None for an update that does not need them,
            or whose first `forward_backward` returns them.
        """
        # In the first update the policy still equals the proximal policy, so the forward pass of
        # the update computes these log-probs. With dropout every forward pass is a different
        # policy, so the first update needs this pass, too. That forward pass also has no top k,
        # which the first update needs when it is made again.
        first_needs_it = self.policy.has_dropout or (iterations > 1 and self.loss_requirements.top_k > 0)
        later_updates_need_it = self.loss_requirements.proximal_logprobs
        needs_pass = [later_updates_need_it if i else first_needs_it for i in range(len(updates))]
        with self._timer("logprobs"):
            return [
                self.logprobs(rows, top_k=self.loss_requirements.top_k) if is_needed else None
                for rows, is_needed in zip(updates, needs_pass, strict=True)
            ]

    def reference_logprobs(self, updates: Sequence[Sequence[Row]]) -> list[list[LabelLogprobs] | None]:
        """Computes the reference's log-probs of the rows of each update.

        Returns:
            The log-probs of each row, for each update; None if the loss needs no reference.
        """
        if self._reference is None:
            return [None] * len(updates)
        with self._timer("logprobs"), self._reference.activate():
            return [self.logprobs(rows) for rows in updates]

    def forward_backward(
        self,
        rows: Sequence[Row],
        proximal: Sequence[LabelLogprobs] | None = None,
        reference: Sequence[LabelLogprobs] | None = None,
        version: int | None = None,
        on_row: Callable[[Row], None] | None = None,
    ) -> tuple[list[LabelLogprobs], dict[str, float]]:
        """Accumulates the gradient of sum(loss weight * loss) over the rows of all ranks.

        With `environment_coef`, the loss includes the mean cross-entropy on the environment's content.

        Args:
            proximal: log-probs under the proximal policy; None: the current policy, or not needed.
            reference: log-probs under the reference, if the loss needs one.
            version: version of the proximal policy, from which staleness is counted.
            on_row: called after each row, for progress.

        Returns:
            The rows' detached log-probs under the proximal policy. The metrics for `step` over all
            ranks: "loss/total" is the weighted sum, others are means over labels (`_max`: maxima).

        Raises:
            UsageError: the loss does not return one value per label.
        """
        device, proximal_logprobs, env_coef = self.ranks.device, [], self.loss_requirements.environment_coef
        accumulator = Accumulator(device)
        # An update without rows has a loss, too.
        accumulator.add_sum("loss/total", torch.zeros((), device=device))
        with self._timer("backward"):
            for i, cpu_row in enumerate(rows):
                row = cpu_row.to(device)
                # Current and proximal policy are compared on the proximal policy's top-k tokens.
                top_ids_LK = None if proximal is None else proximal[i].top_ids_LK
                current = self.policy(row, self.temperature, top_ids_LK=top_ids_LK, environment=bool(env_coef))
                row_proximal = current.detach() if proximal is None else proximal[i]
                tokens = Tokens(
                    logprobs_L=current.logprobs_L,
                    entropy_L=current.entropy_L,
                    proximal_logprobs_L=row_proximal.logprobs_L if self.loss_requirements.proximal_logprobs else None,
                    behavior_logprobs_L=row.logprobs_L,
                    ref_logprobs_L=None if reference is None else reference[i].logprobs_L,
                    advantages_L=row.advantages_L,
                    versions_L=row.versions_L,
                    completion_index_L=row.completion_index_L,
                    proximal_top_LK=row_proximal.top_LK,
                    top_LK=current.top_LK,
                    teacher_logprobs_L=row.teacher_logprobs_L,
                    version=version,
                )
                token_loss_L, metrics = self.loss(tokens)
                self._require_label_shapes(row, token_loss_L, metrics)
                row_loss = (row.loss_weights_L * token_loss_L).sum()
                if current.env_logprobs_E is not None:
                    env_loss = -(row.env_weights_E * current.env_logprobs_E).sum()
                    row_loss = row_loss + env_coef * env_loss
                    # Without content in an update, the metric is missing instead of 0.
                    if row.env_labels_E.numel():
                        accumulator.add_sum("loss/environment_nll", env_loss.detach())
                if self.ranks.shards < self.ranks.world_size:
                    # FSDP2 sums gradients over replicas (HSDP) only once, at the last row.
                    self.policy.model.set_requires_all_reduce(i == len(rows) - 1)  # pyright: ignore[reportCallIssue]
                # FSDP averages gradients over ranks, but loss weights sum to one over all ranks.
                (row_loss * self.ranks.world_size).backward()
                accumulator.add_sum("loss/total", row_loss.detach())
                accumulator.add_labels(buckets_2L := bucket_ids(row, version))
                for name, values_L in metrics.items():
                    add = accumulator.add_max if name.endswith("_max") else accumulator.add_mean
                    add(f"loss/{name}", values_L.detach())
                    if name in BUCKETED_METRICS:
                        accumulator.add_bucketed(f"loss/{name}", values_L.detach(), buckets_2L)
                proximal_logprobs.append(row_proximal)
                if on_row:
                    on_row(cpu_row)
        with self._timer("wait"):
            return proximal_logprobs, accumulator.reduce()

    def step(self, metrics: dict[str, float], advice: Callable[[], str]) -> dict[str, float]:
        """Makes one update of the weights and clears the gradient.

        Args:
            metrics: metrics of `forward_backward`.
            advice: returns advice to the user for the error message.

        Returns:
            `metrics` with gradient norm and learning rate.

        Raises:
            RunFailure: loss or gradient norm is not finite. The weights are unchanged.
        """
        optimizer = self.optimizer
        assert optimizer is not None  # `step` needs an optimizer
        with self._timer("optimizer"):
            # The norm is also needed without clipping: as a metric and for the check below.
            norm = torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), self._max_grad_norm or torch.inf)
            norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
            if not (math.isfinite(norm) and math.isfinite(metrics["loss/total"])):
                optimizer.zero_grad(set_to_none=True)
                raise RunFailure(f"loss is {metrics['loss/total']}, gradient norm {norm}: {advice()}")
            factor = self._schedule(self.update_index)
            for group, base_lr in zip(optimizer.param_groups, self._base_lrs, strict=True):
                group["lr"] = base_lr * factor
            optimizer.step()
            self.update_index += 1
            optimizer.zero_grad(set_to_none=True)
            if observe := getattr(self.loss, "observe", None):
                observe(metrics)
            return metrics | {"optim/grad_norm": norm, "optim/lr": float(self._base_lrs[0] * factor)}

    def _require_label_shapes(self, row: Row, token_loss_L: Tensor, metrics: dict[str, Tensor]) -> None:
        # `check_loss` has tried the loss, but a user's loss may return another shape in a later
        # step.
        name = type(self.loss).__name__
        labels = tuple(row.labels_L.shape)
        if token_loss_L.shape != labels:
            raise UsageError(
                f"loss {name} returned shape {tuple(token_loss_L.shape)}; expected one value per label, shape {labels}. "
                "Fix: return the unreduced loss (the learner computes the weighted sum)"
            )
        for metric, values_L in metrics.items():
            if values_L.shape != labels:
                raise UsageError(
                    f"metric {metric!r} of loss {name} has shape {tuple(values_L.shape)}; expected one value per label, "
                    f"shape {labels}. Fix: return the unreduced metric"
                )


def mean_over_updates(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Combines metrics of the updates of one step: the mean, and for `*_max` the maximum."""
    columns: dict[str, list[float]] = {}
    for update in metrics:
        # An update may lack a bucket of the breakdown, so each name has its own count.
        for name, value in update.items():
            columns.setdefault(name, []).append(value)
    # NumPy's maximum, unlike Python's, is NaN if any value is NaN.
    return {name: float(np.max(v)) if name.endswith("_max") else sum(v) / len(v) for name, v in columns.items()}


def make_reference(model: nn.Module) -> "WeightCopy | AdapterDisabledReference":
    """Makes the frozen reference policy from the current model."""
    # With its adapters disabled, a model equals the model before training. This costs no memory.
    return AdapterDisabledReference(model) if adapter_names(model) else WeightCopy(model)


class WeightCopy:
    """A copy of a model's weights in main memory, swapped in while the reference computes."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._weights = self._host_copy()
        # Where the model's weights wait while the copy is swapped in. With a GPU, this memory is
        # kept, because pinning takes seconds.
        self._model_weights: list[Tensor] | None = None

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Swaps in the weights of the copy; on exit restores the model's weights, bit for bit."""
        _reshard(self._model)
        # The values change in place, because FSDP gathers from the existing tensors.
        params = self._params()
        if self._model_weights is None:
            self._model_weights = self._host_copy()
        else:
            self._copy(self._model_weights, params)
        self._copy(params, self._weights)
        try:
            yield
        finally:
            _reshard(self._model)
            self._copy(params, self._model_weights)
            if not params[0].is_cuda:
                self._model_weights = None

    def _params(self) -> list[Tensor]:
        return [_local(p).detach() for p in self._model.parameters()]

    def _host_copy(self) -> list[Tensor]:
        """Copies the weights to one block of main memory, which is pinned for a GPU."""
        params = self._params()
        sizes = [p.numel() for p in params]
        assert len({p.dtype for p in params}) == 1  # all master weights are in float32
        block = torch.empty(sum(sizes), dtype=params[0].dtype)
        if params[0].is_cuda:
            pin(memory := block.view(torch.uint8))
            weakref.finalize(self, unpin, memory).atexit = False
        weights = [part.view_as(p) for part, p in zip(block.split(sizes), params, strict=True)]
        self._copy(weights, params)
        return weights

    @staticmethod
    def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
        # Pinned memory is copied without waiting, in the order of the device's stream.
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)


def _reshard(model: nn.Module) -> None:
    # After a forward, FSDP2 leaves the root's weights gathered until the backward. Without a
    # backward, the next forward would not see a change of the shards.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _local(param: nn.Parameter) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


@config_section("schedule")
class ScheduleConfig:
    """The keys of `schedule:`, the learning-rate schedule."""

    decay: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="decay after the warm-up; linear and cosine reach 0 at the end of the run"
    )
    warmup: int = Field(default=0, ge=0, description="optimizer updates of linear warm-up, at most those of the run")

    def require_fits(self, total: int) -> None:
        """Raises UsageError if the warm-up is longer than `total` updates."""
        if not 0 <= self.warmup <= total:
            raise UsageError(
                f"schedule.warmup={self.warmup}: expected 0 to {total}, the number of updates. Fix: set a shorter warm-up, "
                "or train longer"
            )


def make_schedule(config: ScheduleConfig, total: int) -> Callable[[int], float]:
    """Makes a learning-rate schedule: a linear warm-up, then the decay.

    Args:
        config: has passed `require_fits`.
        total: number of updates; the decay ends with the last one.

    Returns:
        Index of an update -> multiplier in [0, 1], also after `total` updates.
    """
    warmup = config.warmup

    def factor(update: int) -> float:
        # The rate of update 0 is above 0; otherwise the update would not change any weight.
        if update < warmup:
            return (update + 1) / warmup
        progress = min(1.0, (update - warmup) / max(1, total - warmup))
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return {"constant": 1.0, "linear": 1.0 - progress, "cosine": cosine}[config.decay]

    return factor
