"""Which points a sweep tries: all of a grid, random ones, or those that a search expects to be good (Optuna's TPE).

A point follows from the seed, its number and, in a search that learns, from the results until then. Nothing else is kept, so a
sweep that was killed goes on with the points that it would have tried.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from torchtune_ext.sweep.space import Parameter, Point


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
        warm_up: the first points, so many, are random.
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
    asked = study.ask(space).params
    return _point(parameters, {each.name: _off_axis(each, asked[each.name]) for each in drawn})


def require_optuna() -> None:
    """Raises ImportError if Optuna is missing."""
    if find_spec("optuna") is None:
        raise ImportError(
            "method: bayes needs Optuna: pip install 'torchtune-ext[sweep]'; grid and random need nothing further"
        )


def _point(parameters: Sequence[Parameter], quantiles: dict[str, float]) -> tuple[Point, dict[str, float]]:
    # Without a quantile there is one value alone.
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
