"""Which points a sweep tries: all of a grid, random ones, or those that a search expects to be good (Optuna's TPE).

A point follows from the seed, its number and, in a search that learns, from the results until then. Nothing else is kept, so a
sweep that was killed goes on with the points that it would have tried.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from torchtune_ext.run.errors import Mistake
from torchtune_ext.sweep.space import Parameter, Point

BANDS = 100  # W&B makes this many from min_iter on, most of them beyond every run


@dataclass(frozen=True, slots=True)
class Tried:
    """A point of a search that learns, and what became of it."""

    quantiles: dict[str, float]  # of each parameter that is drawn
    value: float | None  # of the metric; None while the run goes on, or where it has none


def draw(parameters: Sequence[Parameter], seed: int, number: int) -> tuple[Point, dict[str, float]]:
    """Returns the random point of a number, from 0, and its quantiles."""
    dice = random.Random(f"{seed}/{number}")
    return _point(parameters, {each.name: dice.random() for each in parameters if not each.fixed})


def suggest(
    parameters: Sequence[Parameter], seed: int, number: int, tried: Sequence[Tried], maximize: bool, warm_up: int
) -> tuple[Point, dict[str, float]]:
    """Returns the point of a number, from 0, that Optuna's TPE suggests, and its quantiles.

    Args:
        tried: the points until then. One whose run goes on counts as a bad one, so that runs side by side differ.
        warm_up: how many points at the beginning are random.
    """
    if number < warm_up:
        return draw(parameters, seed, number)
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    drawn = [each for each in parameters if not each.fixed]
    space = {each.name: _axis(each) for each in drawn}
    sampler = optuna.samplers.TPESampler(
        seed=(seed * 1_000_003 + number) % 2**32, n_startup_trials=0, multivariate=True, constant_liar=True
    )
    study = optuna.create_study(direction="maximize" if maximize else "minimize", sampler=sampler)
    states = optuna.trial.TrialState
    for point in tried:
        study.add_trial(
            optuna.trial.create_trial(
                params={each.name: _on_axis(each, point.quantiles[each.name]) for each in drawn},
                distributions=space,
                value=point.value,
                state=states.RUNNING if point.value is None else states.COMPLETE,
            )
        )
    params = study.ask(space).params
    return _point(parameters, {each.name: _off_axis(each, params[each.name]) for each in drawn})


def require_optuna() -> None:
    """Raises ImportError if Optuna is missing."""
    if find_spec("optuna") is None:
        raise Mistake(
            "method: bayes needs Optuna: pip install 'torchtune-ext[sweep]'; grid and random need nothing further"
        )


def _point(parameters: Sequence[Parameter], quantiles: dict[str, float]) -> tuple[Point, dict[str, float]]:
    # A parameter without a quantile has only one value.
    return {each.name: each.at(quantiles.get(each.name, 0.0)) for each in parameters}, quantiles


def _choices(parameter: Parameter) -> int:
    """Returns how many values without an order a parameter has; 0 if they have an order."""
    values = parameter.given.get("values", ())
    return len(values) if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values) else 0


def _axis(parameter: Parameter):
    import optuna

    choices = _choices(parameter)
    if choices:
        return optuna.distributions.CategoricalDistribution(range(choices))
    return optuna.distributions.FloatDistribution(0.0, 1.0)


def _on_axis(parameter: Parameter, u: float) -> float | int:
    choices = _choices(parameter)
    return min(int(u * choices), choices - 1) if choices else u


def _off_axis(parameter: Parameter, place: float | int) -> float:
    choices = _choices(parameter)
    return (place + 0.5) / choices if choices else place


# Which runs a sweep stops early, by the rule of W&B (`early_terminate: {type: hyperband}`).
#
# A run is looked at when it has logged the metric as often as a band says. There, the values of all runs that came that far are
# compared: a run stays only if it is among the best 1/eta of them.
@dataclass(frozen=True, slots=True)
class Hyperband:
    """When runs are compared, and how strictly."""

    bands: tuple[int, ...]  # how often a run has logged the metric when it is compared, ascending
    eta: float  # of the runs that are compared, 1/eta stay
    strict: bool  # the value at the band counts, and not the best one until now

    def stopped(self, histories: Mapping[str, Sequence[float]], running: Sequence[str], maximize: bool) -> list[str]:
        """Returns which of the running runs are stopped.

        Args:
            histories: what each run has logged of the metric, in order, also of runs that have ended. Values are finite.
            running: those that can be stopped.
        """
        sign = -1.0 if maximize else 1.0
        losses = {run: [sign * value for value in values] for run, values in histories.items() if values}
        losers = []
        for run in running:
            own = losses.get(run, [])
            reached = [band for band in self.bands if band <= len(own)]
            if not reached:
                continue
            there = sorted(values[reached[-1] - 1] for values in losses.values() if len(values) >= reached[-1])
            threshold = there[int(1.0 / self.eta * len(there))]
            if (own[reached[-1] - 1] if self.strict else min(own)) > threshold:
                losers.append(run)
        return losers


def hyperband_of(given: object) -> Hyperband:
    """Reads the node `early_terminate` of a sweep's file.

    Raises:
        ValueError: it is none that W&B takes.
    """
    keys = ("type", "min_iter", "max_iter", "s", "eta", "strict")
    if not isinstance(given, dict) or given.get("type") != "hyperband":
        raise Mistake(f"early_terminate: {given}: write {{type: hyperband, min_iter: 3}}; W&B has no other type")
    for key in given:
        if key not in keys:
            raise Mistake(f"early_terminate: unknown key {key!r}; it takes {', '.join(keys)}")
    for key in ("min_iter", "max_iter", "s", "eta"):
        value = given.get(key, 2)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise Mistake(f"early_terminate: {key}: {value} must be a number above 0")
    eta = given.get("eta", 3)
    if eta <= 1:
        raise Mistake(f"early_terminate: eta: {eta} must be above 1: of the runs that are compared, 1/eta stay")
    if "max_iter" in given and "s" in given:
        band, bands = given["max_iter"], []
        for _ in range(int(given["s"])):
            band /= eta
            if band < 1:
                break
            bands.append(int(band))
        if not bands:
            raise Mistake(
                f"early_terminate: max_iter: {given['max_iter']}, s: {given['s']}, eta: {eta} leave no band; raise max_iter"
            )
    elif "min_iter" in given:
        if given["min_iter"] < 1:
            raise Mistake(f"early_terminate: min_iter: {given['min_iter']} must be 1 or more")
        band, bands = given["min_iter"], []
        for _ in range(BANDS):
            bands.append(int(band))
            band *= eta
    else:
        raise Mistake("early_terminate: hyperband needs min_iter, or max_iter and s")
    return Hyperband(tuple(sorted(bands)), eta, bool(given.get("strict", True)))
