"""Select the points of a sweep and the runs to stop early, by a grid or by Optuna."""

from collections.abc import Sequence
from typing import Any

from torchtune_ext.sweep.spec import Parameter, Point, Sweep, grid_points

MAX_STARTUP_TRIALS = 5  # random points at most before TPE starts


def next_point(sweep: Sweep, seed: int, number: int, results: Sequence[tuple[Point, float | None]] = ()) -> Point:
    """Returns point `number`, from 0: a grid point, a random point, or a suggestion of TPE.

    Args:
        results: all earlier points, each with its metric; None for an unfinished run.
    """
    if sweep.method == "grid":
        return grid_points(sweep.parameters)[number]
    import optuna

    # A point depends only on the seed, its number and the earlier results. So a killed sweep
    # resumes with the points that it would have tried.
    own_seed = (seed * 1_000_003 + number) % 2**32
    if sweep.method == "bayes":
        first = max(1, min(MAX_STARTUP_TRIALS, sweep.num_runs // 2))
        # With a few tens of runs, independent models of the parameters find more good points than a
        # joint one. `constant_liar` gives unfinished runs a bad value, so concurrent ones differ.
        sampler = optuna.samplers.TPESampler(
            seed=own_seed, n_startup_trials=first, multivariate=False, constant_liar=True
        )
    else:
        sampler = optuna.samplers.RandomSampler(seed=own_seed)
    study = _create_study(sweep, sampler=sampler)
    space = {each.name: _distribution(each) for each in sweep.varied_parameters}
    states = optuna.trial.TrialState
    for point, value in results:
        places = {
            each.name: each.values.index(point[each.name]) if each.values else point[each.name]
            for each in sweep.varied_parameters
        }
        state = states.RUNNING if value is None else states.COMPLETE
        study.add_trial(optuna.trial.create_trial(params=places, distributions=space, value=value, state=state))
    drawn = study.ask(space).params
    return {
        each.name: each.values[drawn.get(each.name, 0)] if each.values else drawn[each.name]
        for each in sweep.parameters
    }


class Pruner:
    """Stops runs that are not among the best 1/eta in Optuna's successive halving."""

    def __init__(self, sweep: Sweep):
        import optuna

        assert sweep.halving is not None  # only a sweep with early_terminate has a pruner
        halving = optuna.pruners.SuccessiveHalvingPruner(sweep.halving.min_iter, sweep.halving.eta)
        self._study = _create_study(sweep, pruner=halving)
        self._trials: dict[str, optuna.Trial] = {}
        self._num_reported: dict[str, int] = {}  # number of reported values per run

    def should_stop(self, run: str, values: Sequence[float]) -> bool:
        """Reports all logged values of a run, in order. Returns whether the run should stop."""
        if run not in self._trials:
            self._trials[run] = self._study.ask()
        trial, reported, stops = self._trials[run], self._num_reported.get(run, 0), False
        # The pruner decides only at certain steps, so it is queried after each new value.
        for step, value in enumerate(values[reported:], reported + 1):
            trial.report(value, step)
            stops = stops or trial.should_prune()
        self._num_reported[run] = max(reported, len(values))
        return stops


def _create_study(sweep: Sweep, **parts: Any) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(direction="maximize" if sweep.maximize else "minimize", **parts)


def _distribution(parameter: Parameter) -> Any:
    import optuna

    values = parameter.values
    if not values:
        return optuna.distributions.FloatDistribution(parameter.low, parameter.high, log=parameter.log)
    # Optuna searches the index of a value: an integer for numbers (ordered), else a category.
    if isinstance(values, range) or all(type(value) in (int, float) for value in values):
        return optuna.distributions.IntDistribution(0, len(values) - 1)
    return optuna.distributions.CategoricalDistribution(range(len(values)))
