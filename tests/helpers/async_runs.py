"""Invariants of runs with `staleness` above 0, checked on their outputs."""

import json
from collections import Counter
from pathlib import Path

import pytest

from helpers import recipe_runs as runs
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.pipeline.rollout_store import read_rollouts, rollout_paths
from torchtune_ext.tasks.problem_stream import problem_index

STALENESS, GROUPS, PROBLEMS = 2, 4, 64  # GROUPS a step and PROBLEMS of the task: as in recipe_runs
AHEAD = [f"staleness={STALENESS}", f"prefetch_steps={STALENESS}", "evaluation.task=null"]


def stored(run: Path) -> dict[int, list[Group]]:
    """Return the stored groups of each step of a run."""
    return {step: read_rollouts(path) for step, path in rollout_paths(run).items()}


def problem_of(number: int) -> int:
    """Return the problem index of group `number` of the run, both counted from 0."""
    return problem_index(number, PROBLEMS, seed=0)


def require_ahead(run: Path, steps: int) -> None:
    """Raise AssertionError if a run of this many steps violates the staleness limit."""
    lines, groups = runs.metrics(run)[1:], stored(run)
    assert [line["step"] for line in lines] == list(groups) == list(range(1, steps + 1))
    for line in lines:
        present = line["step"] - 1  # the version that the step begins with
        versions = [v for g in groups[line["step"]] for s in g.samples for v in s.completion.versions.tolist()]
        assert 0 <= line["async/staleness_mean"] <= line["async/staleness_max"] <= STALENESS
        shares = [line[f"async/staleness_{age}"] for age in range(STALENESS + 1)]
        assert sum(shares) == pytest.approx(1.0) and shares[int(line["async/staleness_max"])] > 0.0
        assert sum(age * share for age, share in enumerate(shares)) == pytest.approx(line["async/staleness_mean"])
        assert present - line["async/staleness_max"] <= min(versions) and max(versions) <= present
        assert line["async/dropped"] == line["async/dropped_tokens"] == 0.0

    # Every submitted problem is trained on once, and no request or group remains.
    want = [f"letters-{problem_of(number)}" for number in range(GROUPS * steps)]
    assert Counter(g.problem.id for step in groups.values() for g in step) == Counter(want)
    assert lines[-1]["async/running"] == lines[-1]["async/buffer"] == 0.0
    last = json.loads((run / "checkpoints" / f"step_{steps:06d}" / "recipe.json").read_text())
    assert last["source"] == {} and last["cursor"] == GROUPS * steps
