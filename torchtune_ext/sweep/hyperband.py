"""Which runs a sweep stops early, by the rule of W&B (`early_terminate: {type: hyperband}`).

A run is looked at when it has logged the metric so often as a band says. There, the values of all runs that came so far are
compared: a run stays only if it is among the best 1/eta of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BANDS = 100  # W&B makes so many from min_iter on, most of them beyond every run


@dataclass(frozen=True, slots=True)
class Hyperband:
    """When runs are compared, and how strictly."""

    bands: tuple[int, ...]  # how often a run has logged the metric when it is compared, ascending
    eta: float  # of the runs that are compared, 1/eta stay
    strict: bool  # the value at the band counts, and not the best one until now

    def stopped(self, histories: Mapping[str, Sequence[float]], running: Sequence[str], maximize: bool) -> list[str]:
        """Returns which of the running runs are stopped.

        Args:
            histories: what each run has logged of the metric, in order, those that have ended among them. Values are finite.
            running: those that can be stopped.
        """
        sign = -1.0 if maximize else 1.0
        losses = {run: [sign * value for value in values] for run, values in histories.items() if values}
        found = []
        for run in running:
            own = losses.get(run, [])
            reached = [band for band in self.bands if band <= len(own)]
            if not reached:
                continue
            there = sorted(values[reached[-1] - 1] for values in losses.values() if len(values) >= reached[-1])
            threshold = there[int(1.0 / self.eta * len(there))]
            if (own[reached[-1] - 1] if self.strict else min(own)) > threshold:
                found.append(run)
        return found


def hyperband_of(given: object) -> Hyperband:
    """Reads the node `early_terminate` of a sweep's file.

    Raises:
        ValueError: it is none that W&B takes.
    """
    keys = ("type", "min_iter", "max_iter", "s", "eta", "strict")
    if not isinstance(given, dict) or given.get("type") != "hyperband":
        raise ValueError(f"early_terminate: {given}: write {{type: hyperband, min_iter: 3}}; W&B has no other type")
    for key in given:
        if key not in keys:
            raise ValueError(f"early_terminate: unknown key {key!r}; it takes {', '.join(keys)}")
    for key in ("min_iter", "max_iter", "s", "eta"):
        value = given.get(key, 2)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ValueError(f"early_terminate: {key}: {value} must be a number above 0")
    eta = given.get("eta", 3)
    if eta <= 1:
        raise ValueError(f"early_terminate: eta: {eta} must be above 1: of the runs that are compared, 1/eta stay")
    if "max_iter" in given and "s" in given:
        band, bands = given["max_iter"], []
        for _ in range(int(given["s"])):
            band /= eta
            if band < 1:
                break
            bands.append(int(band))
        if not bands:
            raise ValueError(
                f"early_terminate: max_iter: {given['max_iter']}, s: {given['s']}, eta: {eta} leave no band; raise max_iter"
            )
    elif "min_iter" in given:
        if given["min_iter"] < 1:
            raise ValueError(f"early_terminate: min_iter: {given['min_iter']} must be 1 or more")
        band, bands = given["min_iter"], []
        for _ in range(BANDS):
            bands.append(int(band))
            band *= eta
    else:
        raise ValueError("early_terminate: hyperband needs min_iter, or max_iter and s")
    return Hyperband(tuple(sorted(bands)), eta, bool(given.get("strict", True)))
