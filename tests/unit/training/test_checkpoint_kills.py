"""A process that saves and prunes is killed: every listed checkpoint is complete afterwards."""

import os
import random
import shutil
import signal
import sys
import time
import timeit
from functools import partial
from pathlib import Path

import pytest

from helpers.checkpoint_runs import TrainedModel, checkpoints_in, fork, make_source
from torchtune_ext.run.files import remove_leftovers
from torchtune_ext.run.folder import checkpoint_step
from torchtune_ext.training.manifest import Manifest

CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")  # audit events before a change of a file


@pytest.fixture
def trained(tmp_path):
    trained = TrainedModel(make_source(tmp_path / "model"))
    trained.train(1, seed=0)
    return trained


def errors_of(folder: Path) -> str:
    return (folder / "errors").read_text() if (folder / "errors").exists() else "no error"


def require_whole(checkpoints, at_least):
    """Reads every file of every listed checkpoint completely."""
    remove_leftovers(checkpoints.folder)
    listed = checkpoints.paths()
    assert len(listed) >= at_least, os.listdir(checkpoints.folder)
    for path in listed:
        manifest = Manifest.read(path)
        assert manifest.find_file_error(path) is None and manifest.find_checksum_error(path) is None
    assert sorted(os.listdir(checkpoints.folder)) == [path.name for path in listed]


def test_killed_before_any_change_of_a_file(tmp_path, trained):
    """A save with pruning, killed before its n-th change: each of the last thirty, every third before."""
    trained.save(checkpoints_in(tmp_path / "old"), 1)
    old = tmp_path / "old" / "step_000001"

    def changes_of_a_save(kill_at: int, checkpoints) -> None:
        count = 0

        def watch(event, args):
            nonlocal count
            if event in CHANGES:
                count += 1
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        trained.save(checkpoints, 2)
        (tmp_path / "changes").write_text(str(count))

    def listed_after(kill_at: int) -> list[str]:
        checkpoints = checkpoints_in(tmp_path / f"killed_{kill_at}", keep_last=1)
        shutil.copytree(old, checkpoints.folder / old.name, copy_function=os.link)
        child = fork(partial(changes_of_a_save, kill_at, checkpoints), tmp_path / "errors")
        _, status = os.waitpid(child, 0)
        assert status == (signal.SIGKILL if kill_at else 0), f"killed at {kill_at}, {errors_of(tmp_path)}"
        require_whole(checkpoints, at_least=1)
        return [path.name for path in checkpoints.paths()]

    assert listed_after(0) == ["step_000002"]  # not killed
    changes = int((tmp_path / "changes").read_text())
    assert changes > 50
    lists = [listed_after(n) for n in (*range(1, changes - 30, 3), *range(changes - 30, changes))]
    before, both, after = ["step_000001"], ["step_000001", "step_000002"], ["step_000002"]
    assert lists == [before] * lists.count(before) + [both] * lists.count(both) + [after] * lists.count(after)
    assert lists.count(before) > 10 and lists.count(both) >= 1 and lists.count(after) > 5


def test_killed_at_random_moments(tmp_path, trained):
    """A loop of saves that is killed and restarted twenty times."""
    rng, folder, step = random.Random(0), tmp_path / "c", 0
    checkpoints = checkpoints_in(folder, keep_last=2)
    took = min(timeit.repeat(partial(trained.save, checkpoints, step), repeat=3, number=1))
    for _ in range(20):

        def save_on(step=step):
            for i in range(1, 1000):
                trained.save(checkpoints, step + i, eval_reward=float(-i))

        child = fork(save_on, tmp_path / "errors")
        path, deadline = folder / f"step_{step + rng.randrange(2):06d}", time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, took))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), errors_of(tmp_path)
        require_whole(checkpoints, at_least=1)
        step = checkpoint_step(checkpoints.latest())
    assert step > 0
