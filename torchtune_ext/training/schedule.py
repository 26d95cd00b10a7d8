"""Schedules the learning rate over the updates of a run."""

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torchtune_ext.run.errors import nearest

DECAYS = ("constant", "linear", "cosine")


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """The node `schedule:` of a recipe."""

    decay: str = "constant"  # "constant", or "linear" or "cosine", which reach zero at the end of the run
    warmup: int = 0  # updates until the full learning rate

    def __post_init__(self) -> None:
        if self.decay not in DECAYS:
            near = nearest(str(self.decay), DECAYS)
            hint = f"did you mean {near!r}?" if near else "use 'constant', 'linear' or 'cosine'"
            raise ValueError(f"schedule.decay={self.decay!r} is unknown; {hint}")

    def require_fits(self, total: int) -> None:
        """Raises ValueError if the warm-up is longer than the run of `total` updates."""
        if not 0 <= self.warmup <= total:
            raise ValueError(
                f"schedule.warmup={self.warmup} must lie between 0 and the number of updates, {total}; set a shorter "
                "warm-up, or train longer"
            )


def make_schedule(optimizer: Optimizer, config: ScheduleConfig, total: int) -> LambdaLR:
    """Makes a schedule over `total` updates: a linear warm-up, then the decay of `config`.

    Raises:
        ValueError: the warm-up is longer than the run.
    """
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
    """Sets a schedule, and the learning rates of its optimizer, to their values after `updates` updates.

    A resumed run needs this to go on from its checkpoint. A step also needs it if some of its planned updates were left
    out because no group had a signal: all planned updates count, so that "linear" still ends at zero.
    """
    schedule.last_epoch = updates
    rates = [base * factor(updates) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates
