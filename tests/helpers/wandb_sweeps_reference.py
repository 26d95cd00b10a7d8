"""Writes what W&B's own search says, for the tests of torchtune_ext/sweep to compare with: tests/unit/sweep/reference.json.

The package `sweeps` needs an older numpy than vLLM, so this runs in an environment of its own:

    python -m venv ref && ref/bin/pip install sweeps==0.3.0
    ref/bin/python tests/helpers/wandb_sweeps_reference.py tests/unit/sweep/reference.json
"""

import json
import random
import sys

QUANTILES = [0.01, 0.125, 0.31, 0.5, 0.77, 0.99]
PARAMETERS = [
    {"value": 3},
    {"values": ["a", "b", "c"]},
    {"values": [1, 2, 4, 8]},
    {"values": [1, 2, 4], "probabilities": [0.2, 0.3, 0.5]},
    {"min": 2, "max": 9},
    {"min": 0.5, "max": 9},
    {"min": 0.5, "max": 9.5},
    {"distribution": "uniform", "min": -1, "max": 1},
    {"distribution": "q_uniform", "min": 0, "max": 1, "q": 0.25},
    {"distribution": "q_uniform", "min": 0, "max": 10},
    {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-1},
    {"distribution": "q_log_uniform_values", "min": 1, "max": 1000},
    {"distribution": "q_log_uniform_values", "min": 1, "max": 1000, "q": 0.5},
    {"distribution": "inv_log_uniform_values", "min": 1e-5, "max": 1e-1},
    {"distribution": "normal"},
    {"distribution": "normal", "mu": 3, "sigma": 0.5},
    {"distribution": "q_normal", "mu": 3, "sigma": 2, "q": 0.5},
    {"distribution": "log_normal", "mu": -1, "sigma": 0.5},
    {"distribution": "q_log_normal", "mu": 2, "sigma": 1},
]
GRIDS = [
    {"b": {"values": [1, 2]}, "a": {"values": ["x", "y"]}, "c": {"value": 7}},
    {"a": {"min": 1, "max": 3}, "b": {"distribution": "q_uniform", "min": 0, "max": 1, "q": 0.25}},
    {"node": {"parameters": {"x": {"values": [1, 2]}, "y": {"value": 3}}}, "z": {"values": [0.1]}},
    {"a": {"values": [1, 1.0, 2]}},
    {"optimizer.lr": {"values": [1e-4, 1e-3]}, "loss.clip_high": {"values": [0.2, 0.28]}},
]


def stops(case, dice):
    """A case of early termination: settings, histories, which runs go on, and which of them W&B stops."""
    from sweeps import RunState, SweepRun, stop_runs

    early = {"type": "hyperband"} | dice.choice(
        [{"min_iter": dice.randint(1, 4)}, {"max_iter": dice.randint(4, 27), "s": dice.randint(1, 3)}]
    )
    if dice.random() < 0.7:
        early["eta"] = dice.choice([2, 3, 4, 1.5])
    if dice.random() < 0.5:
        early["strict"] = dice.random() < 0.5
    goal = dice.choice(["minimize", "maximize"])
    runs = {f"r{i}": [round(dice.random(), 2) for _ in range(dice.randint(0, 14))] for i in range(dice.randint(1, 9))}
    running = [name for name in runs if dice.random() < 0.7]
    config = {
        "method": "random",
        "metric": {"name": "m", "goal": goal},
        "early_terminate": early,
        "parameters": {"a": {"values": [1, 2]}},
    }
    made = [
        SweepRun(
            name=name,
            state=RunState.running if name in running else RunState.finished,
            history=[{"m": value} for value in values],
        )
        for name, values in runs.items()
    ]
    try:
        stopped = [run.name for run in stop_runs(config, made)]
    except ValueError as error:
        stopped = str(error)
    return {"early": early, "goal": goal, "runs": runs, "running": running, "stopped": stopped}


def main(path):
    from sweeps import next_runs
    from sweeps.params import HyperParameter

    dice = random.Random(7)
    found = {
        "quantiles": [
            {"given": given, "at": [[u, HyperParameter("a", given).ppf(u)] for u in QUANTILES]} for given in PARAMETERS
        ],
        "grids": [
            {
                "parameters": given,
                "points": [
                    run.config
                    for run in next_runs({"method": "grid", "parameters": given}, [], n=1000)
                    if run is not None
                ],
            }
            for given in GRIDS
        ],
        "stops": [stops(i, dice) for i in range(200)],
    }
    with open(path, "w") as file:
        json.dump(found, file, default=lambda value: value.item())
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
