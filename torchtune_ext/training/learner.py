"""Rows -> gradient -> updated weights, for any algorithm: objective and weights of labels come from outside."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchtune_ext.kernels.packed_attention import TILE_SIZE
from torchtune_ext.objective.loss import Loss, Tokens, loss_requirements
from torchtune_ext.pipeline.packing import Row, RowLayout
from torchtune_ext.policy.logprobs import LabelLogprobs, PackedPolicy
from torchtune_ext.policy.lora import AdapterDisabledReference, adapter_names
from torchtune_ext.run.errors import RunFailure, UsageError
from torchtune_ext.settings.records import config_record
from torchtune_ext.training.buckets import Breakdown
from torchtune_ext.training.distributed import Ranks, max_or_nan, reduce_over_ranks


class Learner:
    """A policy that learns: it says how likely tokens are, takes gradients of a loss, and makes updates.

    Every method is a collective: each rank gives its own share of the rows, and as many rows as the others.

    Args:
        loss: objective per label. If it needs a reference (`needs_of`), that is the policy as it is now.
        temperature: of sampling. The distribution that was sampled from is the one that is trained.
        optimizer: over `policy.trainable()`; None if `step` is never called.
        schedule: updates that were planned before one -> the factor of its learning rate (`make_schedule`).
        max_grad_norm: longer gradients are shortened to it; None: they are not.
        watch: a context for each part of the work: "logprobs" (of the proximal policy and of the reference), "backward"
            (with the forward), "wait" (for the other ranks at the end of the rows) and "optimizer".
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
        self.schedule_step = 0  # place in the schedule: updates that were planned before the next one
        self.needs = loss_requirements(loss)
        self._reference = make_reference(policy.model) if self.needs.reference_logprobs else None

    @property
    def layout(self) -> RowLayout:
        """How rows are packed for these ranks."""
        # Compiled kernels, on CUDA, need rows of few different lengths: multiples of a tile.
        tile = TILE_SIZE if self.ranks.device.type == "cuda" else None
        return RowLayout(self.ranks.world_size, tile, self.policy.attention_pair_cost)

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Row], temperature: float | None = None, top_k: int = 0) -> list[LabelLogprobs]:
        """Log-probs of each row's labels, and of the `top_k` likeliest tokens, without gradient and without dropout.

        `temperature` None is that of sampling.
        """
        temperature = self.temperature if temperature is None else temperature
        training = self.policy.model.training
        self.policy.model.eval()
        try:
            return [self.policy(row.to(self.ranks.device), temperature, top_k) for row in rows]
        finally:
            self.policy.model.train(training)
            _reshard(self.policy.model)

    def proximal_logprobs(self, updates: Sequence[Sequence[Row]]) -> list[list[LabelLogprobs] | None]:
        """The log-probs of the rows of each update under the policy before the first one; None where not needed."""
        # In the first update the policy is still the proximal one, so its own forward pass computes them. With dropout
        # every forward pass is another policy, and even the first update needs this one.
        needs = [self.needs.proximal_logprobs if i else self.policy.has_dropout for i in range(len(updates))]
        with self._timer("logprobs"):
            return [
                self.logprobs(rows, top_k=self.needs.top_k) if need else None
                for rows, need in zip(updates, needs, strict=True)
            ]

    def reference_logprobs(self, updates: Sequence[Sequence[Row]]) -> list[list[LabelLogprobs] | None]:
        """The log-probs of the rows of each update under the reference; None for a loss that needs no reference."""
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
        """Adds the gradient of sum(weight * loss) over the rows of all ranks to that of the parameters.

        Args:
            proximal: log-probs under the proximal policy; None: it is the present one (ratio 1), or not needed.
            reference: the same of the reference, if the loss needs one.
            version: of the proximal policy, from which the age of samples is counted.
            on_row: called after each row, for progress.

        Returns:
            For each row of this rank the log-probs under the proximal policy, which in a first update is the policy itself,
            without gradient. And the metrics for `step`, over all ranks: "loss/total" is that sum, all others of "loss/..."
            are means over labels, or the maximum for names in `_max`.

        Raises ValueError if the loss does not return one value per label.
        """
        device, logprobs = self.ranks.device, []
        values = {"total": torch.zeros((), dtype=torch.float64, device=device)}
        breakdown = Breakdown(("clip_fraction", "masked_fraction", "kl_teacher"))
        with self._timer("backward"):
            for i, cpu_row in enumerate(rows):
                row = cpu_row.to(device)
                # The log-probs of the same top-k tokens are compared, those that were likeliest under the old policy.
                stored_ids = None if proximal is None else proximal[i].top_ids_LK
                new = self.policy(row, self.temperature, 0 if stored_ids is None else stored_ids)
                old = new.detach() if proximal is None else proximal[i]
                tokens = Tokens(
                    logprobs_L=new.logprobs_L,
                    entropy_L=new.entropy_L,
                    old_logprobs_L=old.logprobs_L if self.needs.proximal_logprobs else None,
                    behavior_logprobs_L=row.logprobs_L,
                    ref_logprobs_L=None if reference is None else reference[i].logprobs_L,
                    advantages_L=row.advantages_L,
                    versions_L=row.versions_L,
                    samples_L=row.samples_L,
                    old_top_LK=old.top_LK,
                    top_LK=new.top_LK,
                    teacher_logprobs_L=row.teacher_logprobs_L,
                    version=version,
                )
                token_loss_L, metrics = self.loss(tokens)
                self._require_label_shapes(row, token_loss_L, metrics)
                row_loss = (row.loss_weights_L * token_loss_L).sum()
                if self.ranks.shards < self.ranks.world_size:
                    # Copies of the weights, often on other machines, sum their gradients once: FSDP2, at the last row.
                    self.policy.model.set_requires_all_reduce(i == len(rows) - 1)  # pyright: ignore[reportCallIssue]
                # FSDP averages gradients over ranks, but the weights of labels sum to one over all of them.
                (row_loss * self.ranks.world_size).backward()
                # All numbers stay on the device until the last row is on its way, so the CPU waits for the GPU once.
                metrics = {name: values_L.detach() for name, values_L in metrics.items()}
                sums = {f"loss/{name}": v.sum() for name, v in metrics.items() if not name.endswith("_max")}
                for name, value in (sums | {"total": row_loss.detach()}).items():
                    values[name] = values.get(name, 0.0) + value.double()
                for name, values_L in metrics.items():
                    if name.endswith("_max") and values_L.numel():
                        highest, key = values_L.max().double(), f"loss/{name}"
                        values[key] = highest.maximum(values.get(key, highest))
                breakdown.add(row, metrics, version)
                logprobs.append(old)
                if on_row:
                    on_row(cpu_row)
        with self._timer("wait"):
            values |= breakdown.sums()
            # One transfer brings all numbers from the device, and one reduction brings them over the ranks.
            numbers = dict(zip(values, torch.stack([*values.values()]).tolist(), strict=True))
            totals = reduce_over_ranks(numbers | {"labels": sum(row.num_labels for row in rows)})
            labels = totals["labels"] or 1.0
            metrics = {
                name: value if name.endswith("_max") else value / labels
                for name, value in totals.items()
                if name.startswith("loss/")
            }
        return logprobs, metrics | {"loss/total": totals["total"]} | breakdown.means(totals)

    def step(self, metrics: dict[str, float], advice: Callable[[], str]) -> dict[str, float]:
        """Makes one update of the weights, clears the gradient, and returns its metrics with those of the gradient.

        Raises Failure, with `advice()` for the user, if loss or gradient is not finite. The weights are then as before.
        """
        optimizer = self.optimizer
        assert optimizer is not None  # only a learner without one is never stepped
        with self._timer("optimizer"):
            # Without a limit the norm is still wanted, as a metric and for the check below.
            norm = torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), self._max_grad_norm or torch.inf)
            norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
            if not (math.isfinite(norm) and math.isfinite(metrics["loss/total"])):
                optimizer.zero_grad(set_to_none=True)
                raise RunFailure(f"loss is {metrics['loss/total']}, gradient norm {norm}: {advice()}")
            factor = self._schedule(self.schedule_step)
            for group, base_lr in zip(optimizer.param_groups, self._base_lrs, strict=True):
                group["lr"] = base_lr * factor
            optimizer.step()
            self.schedule_step += 1
            optimizer.zero_grad(set_to_none=True)
            return metrics | {"optim/grad_norm": norm, "optim/lr": float(self._base_lrs[0] * factor)}

    def _require_label_shapes(self, row: Row, token_loss_L: Tensor, metrics: dict[str, Tensor]) -> None:
        # `check_loss` has tried the loss, but one of the user's may return something else in a later step.
        name, labels = type(self.loss).__name__, tuple(row.labels_L.shape)
        if token_loss_L.shape != labels:
            raise UsageError(
                f"loss {name} returned shape {tuple(token_loss_L.shape)}; it must return one value per label, shape {labels} "
                "(the learner does the weighted sum)"
            )
        for metric, values_L in metrics.items():
            if values_L.shape != labels:
                raise UsageError(
                    f"metric {metric!r} of loss {name} has shape {tuple(values_L.shape)}; it must hold one value per label, "
                    f"shape {labels}"
                )


def mean_over_updates(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of the updates of one step as one: the mean, and for `*_max` the maximum."""
    values: dict[str, list[float]] = {}
    for update in metrics:
        # An update may lack a bucket of the breakdown, so each name has its own count.
        for name, value in update.items():
            values.setdefault(name, []).append(value)
    return {name: max_or_nan(v) if name.endswith("_max") else sum(v) / len(v) for name, v in values.items()}


def make_reference(model: nn.Module) -> "WeightCopy | AdapterDisabledReference":
    """The frozen reference policy: what the model is now."""
    # With the adapters switched off a model is what it was before training, which costs no memory.
    return AdapterDisabledReference(model) if adapter_names(model) else WeightCopy(model)


class WeightCopy:
    """A copy of a model's weights in main memory that takes their place while the reference computes."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._weights = [_local(p).detach().to("cpu", copy=True) for p in model.parameters()]

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Inside, the model has the weights of the copy; afterwards its own, bit for bit."""
        _reshard(self._model)
        # The values change in place, because FSDP gathers from these very tensors.
        params = [_local(p).detach() for p in self._model.parameters()]
        own = [p.to("cpu", copy=True) for p in params]
        self._copy(params, self._weights)
        try:
            yield
        finally:
            _reshard(self._model)
            self._copy(params, own)

    @staticmethod
    def _copy(params: list[Tensor], weights: list[Tensor]) -> None:
        with torch.no_grad():
            for param, weight in zip(params, weights, strict=True):
                param.copy_(weight)


def _reshard(model: nn.Module) -> None:
    # After a forward FSDP2 leaves the root's weights gathered until the backward. Where none follows, the next forward
    # would not see a change of the shards.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _local(param: nn.Parameter) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


@config_record("schedule")
class ScheduleConfig:
    """The keys of `schedule:`, the learning-rate schedule."""

    decay: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="decay after the warm-up; linear and cosine reach 0 at the end of the run"
    )
    warmup: int = Field(default=0, ge=0, description="optimizer updates of linear warm-up")

    def require_fits(self, total: int) -> None:
        """Raises ValueError if the warm-up is longer than the run of `total` updates."""
        if not 0 <= self.warmup <= total:
            raise UsageError(
                f"schedule.warmup={self.warmup} must lie between 0 and the number of updates, {total}; set a shorter "
                "warm-up, or train longer"
            )


def make_schedule(config: ScheduleConfig, total: int) -> Callable[[int], float]:
    """Makes a schedule over `total` updates: a linear warm-up, then the decay, which ends at its lowest rate.

    `config` has passed `require_fits`. Factors lie in [0, 1], also after `total` updates.
    """
    warmup = config.warmup

    def factor(update: int) -> float:
        # Update 0 already has a rate above 0; otherwise it would change no weight.
        if update < warmup:
            return (update + 1) / warmup
        progress = min(1.0, (update - warmup) / max(1, total - warmup))
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return {"constant": 1.0, "linear": 1.0 - progress, "cosine": cosine}[config.decay]

    return factor
