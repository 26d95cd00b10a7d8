"""Learning rate over the updates of a run."""

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

DECAYS = ("constant", "linear", "cosine")


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """The node `schedule:` of a recipe."""

    decay: str = "constant"  # "constant", "linear" or "cosine", to zero at the last update
    warmup: int = 0  # updates until the full learning rate

    def __post_init__(self) -> None:
        if self.decay not in DECAYS:
            raise ValueError(f"schedule.decay={self.decay!r} is unknown; use 'constant', 'linear' or 'cosine'")

    def require_fits(self, total: int) -> None:
        """Raises ValueError for a warm-up that is longer than the run."""
        if not 0 <= self.warmup <= total:
            raise ValueError(f"schedule.warmup={self.warmup} must lie between 0 and the number of updates, {total}")


def make_schedule(optimizer: Optimizer, config: ScheduleConfig, total: int) -> LambdaLR:
    """Linear warm-up, then what `config.decay` says, over `total` updates."""
    config.require_fits(total)
    warmup = config.warmup

    def factor(update: int) -> float:
        if update < warmup:
            return (update + 1) / warmup
        progress = (update - warmup) / max(1, total - warmup)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return {"constant": 1.0, "linear": 1.0 - progress, "cosine": cosine}[config.decay]

    return LambdaLR(optimizer, factor)


def move_schedule(schedule: LambdaLR, updates: int) -> None:
    """Sets a schedule, and its optimizer's learning rates, to where `updates` updates bring it.

    So a run goes on from its checkpoint; and so a step counts as the updates that were planned for it, where some were left
    out because no group had a signal: "linear" then still ends at zero.
    """
    schedule.last_epoch = updates
    rates = [base * factor(updates) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates
