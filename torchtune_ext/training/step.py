"""Rows -> gradients -> updated weights. Blind to the algorithm: the objective and the weights arrive from outside."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchtune_ext.objective.loss import Tokens
from torchtune_ext.packing import Row
from torchtune_ext.policy.logprobs import LabelScores, PackedPolicy
from torchtune_ext.training.breakdown import Breakdown
from torchtune_ext.training.distributed import reduce

Loss = Callable[[Tokens], tuple[Tensor, dict[str, Tensor]]]


@torch.no_grad()
def score(
    policy: PackedPolicy, rows: Sequence[Row], temperature: float, device: torch.device, top_k: int = 0
) -> list[LabelScores]:
    """Scores every row under the current weights, without gradient and without dropout; also the `top_k` likeliest tokens."""
    policy.model.eval()
    scored = [policy(row.to(device), temperature, top_k) for row in rows]
    policy.model.train()
    _reshard(policy.model)
    return scored


def forward_backward(
    policy: PackedPolicy,
    rows: Sequence[Row],
    loss: Loss,
    temperature: float,
    device: torch.device,
    old: Sequence[LabelScores] | None = None,
    ref: Sequence[LabelScores] | None = None,
    version: int | None = None,
    world_size: int = 1,
    on_row: Callable[[Row], None] | None = None,
) -> tuple[float, dict[str, float], list[LabelScores]]:
    """Accumulates the gradient of sum(weight * loss) over the rows of all ranks.

    Args:
        rows: this rank's share; every rank must bring the same number.
        old: per row, what the proximal policy says; None: it is the policy as it is now (ratio 1, gradient kept).
        ref: the same of the reference, if the loss wants one.
        version: of the policy, for the age of its samples in the metrics.
        on_row: called after each row, for progress.

    Returns:
        Loss and metrics over all ranks ("loss/...", means over labels, whatever the aggregation), and what the proximal policy
        says of this rank's rows.
    """
    total, sums, peaks, scored = 0.0, {}, {}, []
    breakdown = Breakdown(("clip_fraction", "masked_fraction"))
    for i, cpu_row in enumerate(rows):
        row = cpu_row.to(device)
        stored_ids = None if old is None else old[i].top_ids_LK
        scores = policy(row, temperature, 0 if stored_ids is None else stored_ids)
        before = scores.detached() if old is None else old[i]
        token_loss_L, metrics = loss(
            Tokens(
                logprobs_L=scores.logprobs_L,
                entropy_L=scores.entropy_L,
                old_logprobs_L=before.logprobs_L,
                behavior_logprobs_L=row.logprobs_L,
                ref_logprobs_L=None if ref is None else ref[i].logprobs_L,
                advantages_L=row.advantages_L,
                versions_L=row.versions_L,
                samples_L=row.samples_L,
                old_top_LK=before.top_LK,
                top_LK=scores.top_LK,
            )
        )
        if token_loss_L.shape != row.labels_L.shape:
            raise ValueError(
                f"loss {type(loss).__name__} returned shape {tuple(token_loss_L.shape)}; it must return one value per "
                f"label, shape {tuple(row.labels_L.shape)} (the step does the weighted sum)"
            )
        row_loss = (row.weights_L * token_loss_L).sum()
        (row_loss * world_size).backward()  # FSDP averages over ranks; the weights sum to one over all of them
        total += row_loss.item()
        for name, values_L in metrics.items():
            if values_L.shape != row.labels_L.shape:
                raise ValueError(
                    f"metric {name!r} of loss {type(loss).__name__} has shape {tuple(values_L.shape)}; it must hold one value "
                    f"per label, shape {tuple(row.labels_L.shape)}"
                )
            if name.endswith("_max"):
                peaks[name] = max(
                    peaks.get(name, -torch.inf), values_L.max().item() if values_L.numel() else -torch.inf
                )
            else:
                sums[name] = sums.get(name, 0.0) + values_L.sum().item()
        breakdown.add(row, metrics, version)
        scored.append(before)
        if on_row:
            on_row(cpu_row)
    whole = reduce({"loss": total, "labels": sum(row.num_labels for row in rows)}, "sum", device)
    labels = whole["labels"] or 1.0
    means = {name: value / labels for name, value in reduce(sums, "sum", device).items()}
    reduced = means | reduce(peaks, "max", device) | breakdown.metrics(device)
    return whole["loss"], {f"loss/{name}": value for name, value in reduced.items()}, scored


def optimizer_step(
    policy: PackedPolicy,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    max_grad_norm: float | None,
    loss: float,
    advice: Callable[[], str],
) -> float:
    """Clips, steps, clears. Returns the gradient's norm before clipping.

    Args:
        loss: value whose gradient this is, for the message.
        advice: says what the user can do when it is not finite.

    Raises:
        FloatingPointError: loss or gradient is not finite; weights and optimizer state are as before.
    """
    norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), max_grad_norm or torch.inf)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if not (torch.isfinite(norm) and math.isfinite(loss)):
        optimizer.zero_grad(set_to_none=True)
        raise FloatingPointError(f"loss is {loss}, gradient norm {norm.item()}: {advice()}")
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.item()


def over_updates(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of the updates of one step as one: the mean, and for `*_max` the maximum."""
    values: dict[str, list[float]] = {}
    for update in metrics:
        for name, value in update.items():  # an update may lack a bucket of the breakdown
            values.setdefault(name, []).append(value)
    return {name: max(v) if name.endswith("_max") else sum(v) / len(v) for name, v in values.items()}


def _reshard(model: nn.Module) -> None:
    """FSDP2 leaves the root's weights gathered after a forward; without a backward, changes of the shards would not show."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class Reference:
    """The frozen reference policy: a copy of the weights on the CPU that takes the model's place while it is scored."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._weights = [_local(p).detach().to("cpu", copy=True) for p in model.parameters()]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the model has the reference's weights; afterwards its own, bit for bit."""
        _reshard(self._model)
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


def _local(param: nn.Parameter) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param
