"""One number for each curve: what a tile says is what the legend says, and both say which steps it averages."""

import pytest

from torchtune_ext.telemetry.findings import Reading, make_tiles, read_curves
from torchtune_ext.telemetry.panels import panels_for


def read(series, steps):
    panels = panels_for(series)
    return read_curves(series, steps, panels), panels


def test_reading_is_mean_of_last_tenth_of_curve():
    steps = list(range(41))
    reward = [None, *(float(step) for step in steps[1:])]
    curves, panels = read({"reward/mean": reward}, steps)
    # 41 steps: a tenth is four of them. Step 0 has no reward.
    assert curves["reward/mean"] == Reading((1 + 2 + 3 + 4) / 4, (37 + 38 + 39 + 40) / 4, 37, 40)
    reading = curves["reward/mean"]
    assert make_tiles(curves, panels) == [
        {"label": "Reward", "metric": "reward/mean", "reading": reading, "unit": "", "note": ""}
    ]


def test_reading_sparse_and_counting_metrics_use_newest_value():
    steps = list(range(31))
    evaluated = [step / 100 if step % 10 == 0 else None for step in steps]
    series = {"eval/reward_sampled": evaluated, "eval/low": evaluated, "eval/high": evaluated}
    series |= {"optim/lr": [0.1 * step for step in steps], "engines/restarts": [0.0] * 30 + [1.0]}
    curves, panels = read(series, steps)
    assert curves["eval/reward_sampled"] == Reading(0.0, 0.3, 30, 30)
    assert curves["optim/lr"] == Reading(0.0, pytest.approx(3.0), 30, 30)
    assert curves["engines/restarts"] == Reading(0.0, 1.0, 30, 30)
    (tile,) = make_tiles(curves, panels)
    assert (tile["label"], tile["note"]) == ("Held-out reward", "95% interval 0.3 to 0.3")


def test_reading_newest_value_may_precede_last_step():
    curves, _ = read({"eval/reward_greedy": [0.5, None, 0.75, None, None]}, [0, 1, 2, 3, 4])
    assert curves["eval/reward_greedy"] == Reading(0.5, 0.75, 2, 2)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_reading_short_run_uses_last_step(count):
    curves, _ = read({"loss/entropy": [float(i) for i in range(count)]}, list(range(5, 5 + count)))
    assert curves["loss/entropy"] == Reading(0.0, count - 1.0, 4 + count, 4 + count)


def test_tile_unit_equals_unit_of_metric_panel():
    series = {name: [1.0] for name in ("length/mean", "time/step", "speed/sampled_tokens_s", "pack/rho", "loss/nll")}
    curves, panels = read(series, [1])
    units = {panel.series[0][0]: panel.unit for panel in panels}
    assert {tile["metric"]: tile["unit"] for tile in make_tiles(curves, panels)} == {
        name: units.get(name, "tok/s") for name in series
    }
