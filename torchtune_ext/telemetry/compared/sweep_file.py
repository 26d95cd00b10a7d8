"""`sweep.json`, the record that `torchtune-ext sweep` keeps in the folder of a sweep, as the page of several runs reads it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune_ext.run.errors import Mistake

FILE = "sweep.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep."""

    id: str
    folder: Path  # The run's folder, which a run that never started does not have.
    parameters: Mapping[str, Any]
    state: str  # "waiting", "running", "finished", "failed" or "stopped_early"
    value: float | None  # of the sweep's metric
    low: float | None  # its interval, where one is known
    high: float | None
    cause: str  # why it failed, in one line
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep and its runs, in the order in which it started them."""

    folder: Path
    name: str
    method: str
    metric: str
    goal: str  # "maximize" or "minimize"
    parameters: Mapping[str, Mapping[str, Any]]  # as in the sweep's file
    points: Sequence[Point]

    @property
    def best(self) -> Point | None:
        """Returns the run with the best value, or None while none has a value."""
        valued = [point for point in self.points if point.value is not None]
        pick = min if self.goal == "minimize" else max
        return pick(valued, key=lambda point: point.value, default=None)

    def swept(self) -> dict[str, str]:
        """Returns the parameters that take more than one value, each with its axis: "linear", "log" or "category"."""
        found = {}
        for key, given in self.parameters.items():
            values = [point.parameters[key] for point in self.points if key in point.parameters]
            if len({json.dumps(value) for value in values}) > 1:
                found[key] = _axis(given, values)
        return found


def read_sweep(folder: Path) -> Sweep:
    """Reads `folder/sweep.json`.

    Raises:
        ValueError: it is damaged, or of another format.
    """
    path = folder / FILE
    try:
        record = json.loads(path.read_bytes())
        version = record["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise Mistake(f"{path} is damaged ({error!r}): name the folders of its runs instead") from error
    if version != FORMAT:
        raise Mistake(
            f"{path} has format {version!r}, and this version of torchtune-ext reads format {FORMAT}: make the report with the "
            "version that ran the sweep, or name the folders of its runs"
        )
    try:
        return Sweep(
            folder=folder,
            name=str(record["name"] or folder.resolve().name),
            method=str(record["method"]),
            metric=str(record["metric"]["name"]),
            goal=str(record["metric"].get("goal", "minimize")),  # as W&B has it
            parameters={key: given if isinstance(given, Mapping) else {"value": given}
                        for key, given in record["parameters"].items()},
            points=[_point(folder, run) for run in record["runs"]],
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError) as error:
        raise Mistake(f"{path} is damaged ({error!r}): name the folders of its runs instead") from error


def _point(folder: Path, run: Mapping[str, Any]) -> Point:
    place = folder / str(run["folder"])
    if not place.resolve().is_relative_to(folder.resolve()):
        raise TypeError(f"the run {run['id']} lies outside of the sweep's folder, in {run['folder']}")
    return Point(
        id=str(run["id"]),
        folder=place,
        parameters=dict(run["parameters"]),
        state=str(run["state"]),
        value=_float(run.get("value")),
        low=_float(run.get("low")),
        high=_float(run.get("high")),
        cause=str(run.get("cause") or ""),
        seconds=_float(run.get("seconds")),
    )


def _axis(given: Mapping[str, Any], values: Sequence[Any]) -> str:
    """The axis is logarithmic where the distribution is, and where a list of values is a geometric series."""
    if not all(_number(value) for value in values):
        return "category"
    if min(values) <= 0:
        return "linear"
    if "log" in str(given.get("distribution", "")):
        return "log"
    listed = sorted({float(value) for value in given.get("values", ()) if _number(value) and value > 0})
    if len(listed) < 2 or listed[-1] < 8 * listed[0]:
        return "linear"
    ratios = [high / low for low, high in zip(listed, listed[1:], strict=False)]
    # 1e-4, 3e-4, 1e-3 is one as people write it: no ratio is more than a few times another.
    return "log" if max(ratios) <= max(2 * min(ratios), 4) else "linear"


def _float(value: Any) -> float | None:
    return float(value) if _number(value) else None


def _number(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and value == value and abs(value) != float("inf")
    )
