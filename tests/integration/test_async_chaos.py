"""A run that samples for later steps recovers from its faults, and nothing of them is left. Faults that end a run: tests/chaos."""

import re
import shutil
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from chaos_run import Round, Run, left_in, left_outside

from helpers import faulty_optimizer
from helpers import recipe_runs as runs
from helpers.async_runs import AHEAD, GROUPS, STALENESS, problem_of, require_ahead, stored
from helpers.waiting import wait_until
from torchtune_ext.telemetry.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.rest, pytest.mark.timeout(600)]

# The engine needs longer for the samples of a step than the trainer does, so that there always are groups on their way.
BUSY = ["engine.max_concurrency=2", "sampling.max_tokens=300", "engine.max_model_len=512", "row_tokens=512"]
BUSY += ["samples_per_prompt=2", "updates_per_step=1"]
PROBE_S = 5.0  # seconds until an engine that does not answer is given up
WATCHED = [f"engine.probe_deadline_s={PROBE_S}", "engine.probe_interval_s=1"]
GRADERS = ["task._component_=faulty_task.Hanging", "grader.workers=2"]
FAULTY = [*AHEAD, *BUSY, *WATCHED, *GRADERS]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = runs.make_workspace(tmp_path_factory.mktemp("chaos"), max_position_embeddings=512)
    for name in ("faulty_task.py", "faulty_optimizer.py"):
        shutil.copyfile(Path(faulty_optimizer.__file__).with_name(name), folder / name)
    return folder


@pytest.fixture
def recovers(workspace, tmp_path):
    home = Round(workspace, tmp_path / "round")
    yield home
    home.end()


def wait_for_step(run: Run, step: int) -> None:
    """Waits until this step has its metrics."""
    wait_until(lambda: run.watch.logged() >= step or run.process.poll() is not None, 240)
    assert run.process.poll() is None, run.output()


def require_nothing_left(home: Round) -> None:
    assert home.left_running() == []
    assert left_outside(home.temp, home.shared) == [] and left_in(home.output_dir) == []


def over_publication(run: Path, version: int) -> tuple[int, int]:
    """What became of the completions of groups that were submitted before `version` was published and are trained after it.

    So far ahead as these runs are, groups are submitted `STALENESS` + 1 steps before the one that trains them.

    Returns:
        How many went on over the publication, and how many began with it. Of those some had been under way before it, or had
        waited for others that were.
    """
    groups = [g for step, part in stored(run).items() if version < step <= version + STALENESS for g in part]
    series = [s.completion.versions.tolist() for g in groups for s in g.samples]
    return sum(versions[0] < version <= versions[-1] for versions in series), sum(v[0] == version for v in series)


def test_async_run_survives_engine_freeze_crash_grader_hang(workspace, recovers):
    """The engine is frozen at the publication of version 3, and killed in that of version 6, while groups are on their way."""
    steps, hung = 9, problem_of(7 * GROUPS + 1)
    (workspace / f"hang_{hung}").touch()
    frozen = workspace / "frozen"
    # Without checkpoints a step is short, so that the groups of the last publication are under way when the next one begins.
    args = [*FAULTY, f"max_steps={steps}", "grader.timeout_s=4", "checkpoints.every=100"]
    args += ["optimizer._component_=faulty_optimizer.Freezing", "optimizer.after=[3,6]"]
    run = recovers.start(*args)
    wait_for_step(run, 5)
    wait_until(lambda: run.process.poll() is not None or frozen.read_text().count("\n") == 2, 120)
    assert run.process.poll() is None, run.output()
    engine = psutil.Process(int(frozen.read_text().split()[1]))
    time.sleep(1.0)  # the publication has begun meanwhile, and waits for an answer
    assert engine.status() == psutil.STATUS_STOPPED
    engine.kill()
    assert run.wait(240) == 0, run.output()

    output = " ".join(run.output().split())
    # An engine that is frozen before a publication takes no weights. Who waits for it notices first: mostly the publication.
    lost = re.findall(r"engine: crashed \((?:weight sync: )?(.*?)\), consecutive failure (\d):", output)
    assert [failure for _, failure in lost] == ["1", "1"], lost
    assert lost[0][0] == f"the engine did not answer is_paused within {PROBE_S:g} s" and "SIGKILL" in lost[1][0], lost
    folder = recovers.output_dir
    lines = read_metrics(folder / "metrics.jsonl")[1:]
    assert [line["engines/restarts"] for line in lines] == [0.0] * 3 + [1.0] * 3 + [2.0] * 3
    # What was under way went on over other publications, and began again behind these.
    assert sum(over_publication(folder, version)[0] for version in (1, 2, 4, 5)) > 0
    for struck in (3, 6):
        went_on, began = over_publication(folder, struck)
        assert went_on == 0 and began > 0

    # The text that held its grader has no reward, and it is not trained on.
    assert (workspace / f"hung_{hung}").exists() and "1 of 8 texts timed_out" in output
    (group,) = [g for g in stored(folder)[8] if g.problem.id == f"letters-{hung}"]
    assert Counter(s.outcome.kind for s in group.samples) == {"scored": 1, "timed_out": 1}
    assert not any(s.in_loss for s in group.samples if s.score is None)
    assert [line["groups/timed_out"] for line in lines] == [0.0] * 7 + [1.0, 0.0]

    require_ahead(folder, steps)
    require_nothing_left(recovers)
