"""The table of a sweep's runs, the best first. Which one is better is said by `telemetry.comparison`."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchtune_ext.sweep.file import Sweep
from torchtune_ext.sweep.record import SweepRun
from torchtune_ext.sweep.runner import shown


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
