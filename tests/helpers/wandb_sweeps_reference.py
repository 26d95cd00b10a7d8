"""Write the grids of W&B's own search, the reference of the tests of torchtune_ext/sweep: tests/unit/sweep/reference.json.

The package `sweeps` needs an older numpy than vLLM, so this runs in a separate environment:

    python -m venv ref && ref/bin/pip install sweeps==0.3.0
    ref/bin/python tests/helpers/wandb_sweeps_reference.py tests/unit/sweep/reference.json
"""

import json
import sys

GRIDS = [
    {"b": {"values": [1, 2]}, "a": {"values": ["x", "y"]}, "c": {"value": 7}},
    {"a": {"values": [1, 1.0, 2]}},
    {"optimizer.lr": {"values": [1e-4, 1e-3]}, "loss.clip_high": {"values": [0.2, 0.28]}},
]


def main(path):
    from sweeps import next_runs

    reference = {
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
    }
    with open(path, "w") as file:
        json.dump(reference, file, default=lambda value: value.item())
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
