"""What a sweep says at its end: a table of its runs, the best first, and whether the best can be told apart from the others."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchtune_ext.sweep.file import Sweep
from torchtune_ext.sweep.record import SweepRun
from torchtune_ext.sweep.runner import shown
from torchtune_ext.telemetry.compared.intervals import Estimate, difference_of_problems

NAMED = 4  # runs that a sentence names


def ranked(sweep: Sweep, runs: Sequence[SweepRun]) -> list[SweepRun]:
    """Returns the runs, the best first. One that was stopped early or failed stands behind all that finished."""
    sign = -1 if sweep.metric.maximize else 1
    order = ("finished", "stopped_early", "failed", "running", "waiting")
    return sorted(runs, key=lambda run: (order.index(run.state), run.value is None, sign * (run.value or 0.0)))


def table(sweep: Sweep, runs: Sequence[SweepRun], usual: Mapping[str, Any]) -> str:
    """Returns the table.

    Args:
        usual: what the config gives the parameters without the sweep; the run with all of these values has a star.
    """
    names = [each.name for each in sweep.parameters if not each.fixed]
    rows = [["run", *names, sweep.metric.name, "95% interval", "state", "seconds"]]
    for run in ranked(sweep, runs):
        interval = f"{run.low:.4f} to {run.high:.4f}" if run.low is not None and run.high is not None else "-"
        rows.append(
            [
                run.id + ("*" if _usual(run, names, usual) else ""),
                *(shown(run.parameters[name]) for name in names),
                "-" if run.value is None else f"{run.value:.4f}",
                interval,
                run.state.replace("_", " "),
                f"{run.seconds:.0f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if any(_usual(run, names, usual) for run in runs):
        lines.append("* as the config has it")
    lines += [f"{run.id}: {run.cause}" for run in runs if run.cause]
    return "\n".join(lines)


def _usual(run: SweepRun, names: Sequence[str], usual: Mapping[str, Any]) -> bool:
    return bool(names) and all(name in usual and usual[name] == run.parameters[name] for name in names)


def verdict(sweep: Sweep, runs: Sequence[SweepRun]) -> str:
    """Returns which run is the best, and whether that can be told from the others."""
    metric = sweep.metric
    found = [run for run in ranked(sweep, runs) if run.state == "finished" and run.value is not None]
    if not found:
        return f"No run finished with a {metric.name}, so none is the best."
    best, *others = found
    at = ", ".join(f"{each.name}={best.parameters[each.name]}" for each in sweep.parameters if not each.fixed)
    said = f"best: {best.id}{f', {at}' if at else ''}: {metric.name} {best.value:.4f}"
    if not others:
        return f"{said}. No other run finished, so there is nothing to compare it with."
    if best.low is None or best.high is None:
        return (
            f"{said}, before {others[0].id} with {others[0].value:.4f}. {metric.name} has no interval, so nothing says how "
            "much of that is chance: repeat both with other seeds."
        )
    # As the page of the sweep says it.
    pairs = (len(others) + 1) * len(others) // 2
    near = [run for run in others if not _apart(best, run, pairs)]
    if not near:
        return (
            f"{said}. It is better than all others. That is so of these runs and any held-out problems; what other seeds would "
            "have learned is not known: repeat the best two with other seeds."
        )
    named = ", ".join(run.id for run in near[:NAMED]) + (f" and {len(near) - NAMED} more" if len(near) > NAMED else "")
    return (
        f"{said}. It cannot be told apart from {named}: the interval of the difference includes 0. More held-out problems "
        "(evaluation.task.count) make intervals shorter; other seeds say what training's own chance is."
    )


def _apart(best: SweepRun, other: SweepRun, pairs: int) -> bool:
    """Returns whether the difference of two runs is more than the chance of their held-out problems."""
    difference = difference_of_problems(
        Estimate(best.value, best.low, best.high), Estimate(other.value, other.low, other.high), pairs
    )
    return difference.known and not difference.low <= 0 <= difference.high
