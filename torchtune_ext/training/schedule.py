"""Learning rate over the updates of a run."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def make_schedule(optimizer: Optimizer, name: str, warmup: int, total: int) -> LambdaLR:
    """Linear warm-up over `warmup` updates, then "constant", or "linear" / "cosine" to zero at update `total`."""
    check_schedule(name, warmup, total)

    def factor(update: int) -> float:
        if update < warmup:
            return (update + 1) / warmup
        progress = (update - warmup) / max(1, total - warmup)
        return {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}[name]

    return LambdaLR(optimizer, factor)


def check_schedule(name: str, warmup: int, total: int) -> None:
    """Raises ValueError for what `make_schedule` would not take."""
    if name not in ("constant", "linear", "cosine"):
        raise ValueError(f"lr_schedule={name!r} is unknown; use 'constant', 'linear' or 'cosine'")
    if not 0 <= warmup <= total:
        raise ValueError(f"lr_warmup={warmup} must lie between 0 and the number of updates, {total}")


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
