"""Which points a sweep tries: all of a grid, random ones, or those that a search expects to be good (Optuna's TPE).

A point follows from the seed, its number and, in a search that learns, from the results until then. Nothing else is kept, so a
sweep that was killed goes on with the points that it would have tried.
"""

import random
from collections.abc import Sequence
from itertools import accumulate

from torchtune_ext.sweep.file import Parameter, Point, Sweep, grid

Quantiles = dict[str, float]  # of each parameter that is drawn

WARM_UP = 5  # random points, at most, at the beginning of a search that learns
TRIED = 200  # points at most that are tried before the start; a point takes 0.05 s


def point_at(sweep: Sweep, quantiles: Quantiles) -> Point:
    """Returns the point at some quantiles. A parameter without a quantile has only one value."""
    return {each.name: each.at(quantiles.get(each.name, 0.0)) for each in sweep.parameters}


def draw(sweep: Sweep, seed: int, number: int) -> Point:
    """Returns the random point of a number, from 0."""
    dice = random.Random(f"{seed}/{number}")
    return point_at(sweep, {each.name: dice.random() for each in sweep.drawn})


def planned(sweep: Sweep, seed: int) -> list[Point]:
    """Returns the points that are known before the first result; none of a search that learns."""
    if sweep.method == "grid":
        return grid(sweep.parameters)[: sweep.runs]
    return [draw(sweep, seed, number) for number in range(sweep.runs)] if sweep.method == "random" else []


def tries(sweep: Sweep, seed: int) -> list[Point]:
    """Returns points whose settings are tried before the start: those that are known, at most TRIED.

    Of a search that learns, and of a larger grid, these are one point and those that differ from it in one value.
    """
    points = planned(sweep, seed)
    if sweep.method == "random" or 0 < len(points) <= TRIED:
        return points[:TRIED]
    first = draw(sweep, seed, 0)
    values = {
        each.name: each.all() if points else each.given.get("values", [each.at(0.0), each.at(1.0)])
        for each in sweep.drawn
    }
    return [first, *({**first, name: value} for name, some in values.items() for value in some)][:TRIED]


def suggest(sweep: Sweep, seed: int, number: int, results: Sequence[tuple[Quantiles, float | None]]) -> Quantiles:
    """Returns the quantiles of the point of a number, from 0, which Optuna's TPE suggests; the first points are random.

    Args:
        results: of the metric at the points until then. None: the run goes on. It counts as a bad one, so that runs side by
            side differ.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(
        seed=(seed * 1_000_003 + number) % 2**32,
        n_startup_trials=max(1, min(WARM_UP, sweep.runs // 2)),
        multivariate=True,
        constant_liar=True,
    )
    study = optuna.create_study(direction="maximize" if sweep.metric.maximize else "minimize", sampler=sampler)
    space = {each.name: _axis(each) for each in sweep.drawn}
    states = optuna.trial.TrialState
    for quantiles, value in results:
        state = states.RUNNING if value is None else states.COMPLETE
        study.add_trial(optuna.trial.create_trial(params=quantiles, distributions=space, value=value, state=state))
    return study.ask(space).params


def _axis(parameter: Parameter):
    """Returns where Optuna looks for the quantile of a parameter: anywhere, or, where values have no order, in the middle of
    the share of each."""
    import optuna

    values = parameter.given.get("values", ())
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return optuna.distributions.FloatDistribution(0.0, 1.0)
    shares = parameter.given.get("probabilities", [1 / len(values)] * len(values))
    middles = [end - share / 2 for share, end in zip(shares, accumulate(shares), strict=True) if share]
    return optuna.distributions.CategoricalDistribution(middles)
