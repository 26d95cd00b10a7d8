"""The stopwatch: phases add up to the step, details stand below their phase, and nothing between two laps is lost. And what is
counted of conversations."""

from dataclasses import replace

import numpy as np
import pytest

from helpers.records import make_guess_conversation, make_sample
from torchtune_ext.grading.environments import FINISH_REASONS
from torchtune_ext.grading.outcomes import timeout_score
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.tasks.task import Problem, Score
from torchtune_ext.telemetry import step_metrics
from torchtune_ext.telemetry.step_metrics import Timer, rollout_metrics, timing_metrics


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test moves it."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(step_metrics, "time", clock)
    return clock


def test_phases_their_details_and_laps(clock):
    watch = Timer()
    for seconds in (1.0, 2.0):
        with watch("train"):
            with watch("backward"):
                clock.now += seconds
            clock.now += 0.25
    clock.now += 0.5
    assert watch.lap() == {"time/train/backward": 3.0, "time/train": 3.5, "time/step": 4.0}
    with watch("log"):
        clock.now += 8.0
    assert watch.lap() == {"time/log": 8.0, "time/step": 8.0}, "a lap begins where the one before it ended"
    assert watch.lap() == {"time/step": 0.0}


def test_a_phase_that_fails_is_over(clock):
    watch = Timer()
    with pytest.raises(ZeroDivisionError), watch("train"), watch("backward"):
        clock.now += 1.0
        raise ZeroDivisionError
    with watch("save"):
        clock.now += 2.0
    assert watch.lap() == {"time/train/backward": 1.0, "time/train": 1.0, "time/save": 2.0, "time/step": 3.0}


def test_speeds_are_tokens_over_their_seconds():
    seconds = {"time/sample/generate": 2.0, "time/train": 4.0, "time/step": 9.0}
    values = {"length/tokens": 100.0, "pack/tokens": 300.0}
    assert timing_metrics(values, seconds) == seconds | {"speed/sampled_tokens_s": 50.0, "speed/trained_tokens_s": 75.0}
    assert timing_metrics(values, seconds, iterations=2)["speed/trained_tokens_s"] == 150.0
    assert timing_metrics({"pack/tokens": 300.0}, {"time/step": 9.0}) == {"time/step": 9.0}


@pytest.mark.parametrize("waited", [{}, {"time/sample/generate": 1e-5}])
def test_clock_metrics_asynchronous_throughput_uses_whole_step(waited):
    """The step has waited for nothing, or for an instant, in which the engine has not sampled all its tokens."""
    seconds = waited | {"time/train": 4.0, "time/step": 8.0}
    metrics = timing_metrics({"length/tokens": 100.0, "async/staleness_mean": 1.0}, seconds)
    wait = waited.get("time/sample/generate", 0.0)
    assert metrics == seconds | {"speed/sampled_tokens_s": 12.5, "time/wait_for_rollouts": wait}


def test_clock_metrics_rollout_wait_includes_engine_and_graders():
    seconds = {"time/sample": 6.0, "time/sample/generate": 3.0, "time/sample/grade": 2.0, "time/sample/store": 1.0}
    metrics = timing_metrics({"async/staleness_mean": 1.0}, seconds | {"time/step": 9.0})
    assert metrics["time/wait_for_rollouts"] == 5.0
    assert "time/wait_for_rollouts" not in timing_metrics({}, seconds), "an engine that does not sample ahead"


def test_the_metrics_of_conversations():
    """Nine tokens were sampled and six read in one, six and three in the other."""
    samples = (make_guess_conversation(), make_guess_conversation("max_turns", turns=(55, 58)))
    metrics = rollout_metrics([Group(Problem("game", (), 58), np.arange(3), samples)])
    assert (metrics["length/mean"], metrics["length/max"], metrics["length/tokens"]) == (7.5, 9.0, 15.0)
    assert (metrics["episode/turns"], metrics["episode/read_tokens"]) == (2.5, 4.5)
    endings = {name: metrics[f"episode/{name}"] for name in FINISH_REASONS}
    assert endings == dict.fromkeys(FINISH_REASONS, 0.0) | {"completed": 0.5, "max_turns": 0.5}
    assert (metrics["episode/forks"], metrics["episode/no_response"]) == (0.0, 0.0)
    plain = rollout_metrics([Group(Problem("p", (), 0), np.arange(3), (make_sample([1, 2]),))])
    assert not any(name.startswith("episode/") for name in plain)


def test_forks_and_empty_episodes_of_agents_are_counted():
    """Two concurrent paths of two turns each, and an agent that requested nothing."""
    tree = replace(make_sample(range(8)).completion, turns=((0, 2), (2, 4), (4, 6), (6, 8)), finish_reason="completed")
    tree = replace(tree, kept_prefix_lens=(3, 3, 5, 5), parents=(-1, -1, 0, 1))
    empty = make_sample([], outcome=Score(1.0), finish_reason="completed")
    samples = (replace(empty, completion=tree), empty)
    metrics = rollout_metrics([Group(Problem("game", (), 58), np.arange(3), samples)])
    assert (metrics["episode/forks"], metrics["episode/no_response"], metrics["length/max"]) == (0.5, 1.0, 8.0)
    alone = rollout_metrics([Group(Problem("game", (), 58), np.arange(3), (empty,))])
    assert (alone["episode/no_response"], alone["episode/completed"]) == (1.0, 1.0)


def test_rollout_metrics_hung_text_counts_as_zero():
    scores = timeout_score("late"), Score(1.0, {"accuracy": 1.0, "speed": 9.0}), Score(0.0, {"accuracy": 0.0})
    samples = tuple(make_sample([1], outcome=score) for score in scores)
    metrics = rollout_metrics([Group(Problem("p", (), 0), np.arange(3), samples)])
    rewards = {name: value for name, value in metrics.items() if name.startswith("reward/")}
    assert rewards.pop("reward/std") == pytest.approx(2**0.5 / 3)
    third = pytest.approx(1 / 3)
    assert rewards == {
        "reward/mean": third, "reward/timed_out": third, "reward/accuracy": third, "reward/speed": 9.0,
    }  # fmt: skip
