"""Metrics: the file is valid JSON whatever happens, a resumed run has the same lines, and sinks never stop a run."""

import json
import logging
import math
import os
import sys
import textwrap

import numpy as np
import pytest
import torch

from helpers.full_disk import full_disk
from helpers.tiny_runs import VOLATILE_PREFIXES
from torchtune_ext.pipeline.rollout_store import RolloutStore
from torchtune_ext.run.folder import RUN_FILES, RunFolder
from torchtune_ext.telemetry import metrics as module
from torchtune_ext.telemetry.metrics import MetricLogger, read_metrics, truncate_metrics
from torchtune_ext.telemetry.report import build_report
from torchtune_ext.telemetry.sinks import LoggingConfig


def strict_lines(path):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_one_json_line_a_step(tmp_path):
    with MetricLogger(tmp_path / "a" / "run", sinks=()) as metrics:
        metrics.log(1, {"reward/mean": np.float32(0.5), "groups/used": 7, "loss/total": torch.tensor(0.25)})
        assert strict_lines(metrics.path) == [{"step": 1, "reward/mean": 0.5, "groups/used": 7, "loss/total": 0.25}]
        metrics.log(2, {"reward/mean": math.nan, "loss/kl_ref": math.inf, "optim/lr": -math.inf, "pack/rho": 2.0})
    assert strict_lines(metrics.path)[1] == {
        "step": 2, "reward/mean": None, "loss/kl_ref": None, "optim/lr": None, "pack/rho": 2.0,
        "nonfinite": ["reward/mean", "loss/kl_ref", "optim/lr"],
    }  # fmt: skip


def test_lines_of_one_step_are_merged(tmp_path):
    with MetricLogger(tmp_path, sinks=()) as metrics:
        metrics.log(3, {"a/x": math.nan})
        metrics.log(3, {"a/y": math.nan, "a/z": 1})
        metrics.log(4, {"a/x": 2})
    assert read_metrics(metrics.path) == [
        {"step": 3, "a/x": None, "a/y": None, "a/z": 1, "nonfinite": ["a/x", "a/y"]},
        {"step": 4, "a/x": 2},
    ]


def test_refuses_steps_that_go_back_and_reserved_names(tmp_path):
    with MetricLogger(tmp_path, sinks=()) as metrics:
        metrics.log(5, {})
        with pytest.raises(ValueError, match="step=4 after step 5"):
            metrics.log(4, {})
        with pytest.raises(ValueError, match="'step'"):
            metrics.log(6, {"step": 1.0})
    assert len(read_metrics(metrics.path)) == 1


def values_of(step):
    return {"reward/mean": math.sin(step), "time/step": np.random.default_rng().random()}


def without_clock(records):
    return [{k: v for k, v in record.items() if not k.startswith(VOLATILE_PREFIXES)} for record in records]


def test_killed_and_resumed_equals_uninterrupted(tmp_path):
    with MetricLogger(tmp_path / "whole", sinks=()) as whole:
        for step in range(1, 11):
            whole.log(step, values_of(step))
    killed = MetricLogger(tmp_path / "killed", sinks=())
    for step in range(1, 8):
        killed.log(step, values_of(step))
    with open(killed.path, "a") as file:
        file.write('{"step": 8, "rew')  # killed inside a write
    # The checkpoint is older than the last line.
    with MetricLogger(tmp_path / "killed", sinks=(), resume_step=6) as resumed:
        for step in range(6, 11):
            resumed.log(step, values_of(step))
    assert without_clock(strict_lines(resumed.path)) == without_clock(strict_lines(whole.path))
    assert sorted(os.listdir(tmp_path / "killed")) == ["metrics.jsonl"]


def test_metrics_truncation_write_failure_leaves_file_unchanged(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        truncate_metrics(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n' and os.listdir(tmp_path) == ["metrics.jsonl"]


def test_metrics_broken_middle_line_raises_with_line_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path)


def test_a_fresh_run_mixes_with_no_earlier_one(tmp_path):
    with MetricLogger(tmp_path, sinks=()) as metrics:
        metrics.log(1, {})
    with pytest.raises(ValueError, match=r"metrics\.jsonl belongs to an earlier run"):
        MetricLogger(tmp_path, sinks=())
    assert read_metrics(metrics.path) == [{"step": 1}]


def test_metrics_full_disk_at_resume_leaves_file_unchanged(tmp_path):
    with MetricLogger(tmp_path, sinks=()) as metrics:
        for step in range(1, 30):
            metrics.log(step, {"a/b": 1})
    before = metrics.path.read_bytes()
    with full_disk(100), pytest.raises(OSError, match=r"metrics\.jsonl to step 20: .*free disk space") as caught:
        MetricLogger(tmp_path, sinks=(), resume_step=20)
    assert "[Errno" not in str(caught.value)
    assert metrics.path.read_bytes() == before and os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_files_follow_the_umask(tmp_path, umask):
    pytest.importorskip("tensorboard")
    before = os.umask(umask)
    try:
        with RunFolder(tmp_path / "run") as folder:
            run = folder.start_run({}, resuming=False)
            with MetricLogger(folder.path, ("tensorboard",), run) as metrics:
                metrics.log(1, {"a/b": 1})
            RolloutStore(folder.path).write(1, [])
            build_report(folder.path)
    finally:
        os.umask(before)
    files = [path for path in folder.path.rglob("*") if path.is_file()]
    assert {path.name.split(".")[0] for path in files} == {"run", "metrics", "events", "step_000001", "report"}
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {oct(0o666 & ~umask)}


def test_metrics_on_other_ranks_write_nothing(tmp_path):
    with MetricLogger(tmp_path / "run", sinks=("tensorboard",), rank=1) as metrics:
        metrics.log(1, {"a/b": 1.0})
    assert os.listdir(tmp_path) == []


def test_unknown_sink_and_missing_package(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="'wnadb'"):
        MetricLogger(tmp_path / "run", sinks=("wnadb",))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        MetricLogger(tmp_path / "run", sinks=("wandb",))
    assert os.listdir(tmp_path) == []


def test_metrics_custom_sink_is_loaded_by_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "csv_sink.py").write_text(
        textwrap.dedent("""
            class Table:
                def __init__(self, opening):
                    (opening.run_dir / "sinks").mkdir(exist_ok=True)
                    self.file = open(opening.run_dir / "sinks" / "reward.csv", "a")

                def log(self, step, values):
                    self.file.write(f"{step},{values.get('reward')}\\n")

                def show(self, step, rows): ...

                def close(self, status):
                    self.file.close()
        """)
    )
    with pytest.raises(ValueError, match="logging.to=csv_sink.Tabel: .*did you mean 'Table'"):
        MetricLogger(tmp_path / "run", sinks=("csv_sink.Tabel",))
    with MetricLogger(tmp_path / "run", sinks=("csv_sink.Table",)) as metrics:
        metrics.log(1, {"reward": 0.5})
    assert (tmp_path / "run" / "sinks" / "reward.csv").read_text() == "1,0.5\n"
    assert "sinks" in RUN_FILES  # what the next run sets aside, with all else of this one


class FailingSink:
    """Raises in the method that a test names, and is not touched again."""

    at = ""

    def __init__(self, opening):
        self.dropped = False
        self._come("__init__")

    def _come(self, name):
        assert not self.dropped, "a dropped sink is not touched again"
        if name == self.at:
            self.dropped = True
            raise RuntimeError("the network is down")

    def log(self, step, values):
        self._come("log")

    def show(self, step, rows):
        self._come("show")

    def close(self, status):
        self._come("close")


@pytest.mark.parametrize("at", ["__init__", "log", "show", "close"])
def test_a_failing_sink_is_reported_once_and_dropped(tmp_path, monkeypatch, caplog, at):
    monkeypatch.setattr(module, "sink_class", lambda name: FailingSink)
    monkeypatch.setattr(FailingSink, "at", at)
    with caplog.at_level(logging.WARNING), MetricLogger(tmp_path, sinks=("tensorboard",)) as metrics:
        for step in range(1, 5):
            metrics.show(step, [])
            metrics.log(step, {"a/b": 1, "eval/reward_sampled": 0.5})
    assert [record["step"] for record in read_metrics(metrics.path)] == [1, 2, 3, 4]
    assert [m for m in caplog.messages if "tensorboard" in m and "network is down" in m] == caplog.messages
    assert len(caplog.messages) == 1


class RecordingSink(FailingSink):
    def __init__(self, opening):
        super().__init__(opening)
        self.opening, self.shown, self.status = opening, [], None

    def show(self, step, rows):
        self.shown.append(step)

    def close(self, status):
        self.status = status


def test_metrics_sink_receives_start_step_and_exit_status(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "sink_class", lambda name: RecordingSink)
    settings = LoggingConfig(to=("tensorboard",), samples=2, samples_every=3)

    def lines(metrics, steps):
        for step in steps:
            metrics.show(step, [])
            metrics.log(step, {"length/tokens": 100.0})

    metrics = MetricLogger(tmp_path, settings)
    sink = metrics._sinks["tensorboard"]
    lines(metrics, range(1, 5))
    metrics.close()
    assert sink.shown == [1, 3] and sink.status == 0

    # The run goes on from step 3.
    metrics = MetricLogger(tmp_path, settings, resume_step=3, status=lambda: 130)
    sink = metrics._sinks["tensorboard"]
    assert sink.opening.resume_step == 3
    lines(metrics, range(3, 7))
    metrics.close()
    assert sink.status == 130


def test_metrics_full_disk_raises_and_keeps_valid_lines(tmp_path):
    with MetricLogger(tmp_path, sinks=()) as metrics:
        metrics.log(1, {"a/b": 1})
        with full_disk(metrics.path.stat().st_size + 10), pytest.raises(OSError, match="free disk space"):
            metrics.log(2, {"a/b": 1})
        metrics.log(2, {"a/b": 2})
    assert strict_lines(metrics.path) == [{"step": 1, "a/b": 1}, {"step": 2, "a/b": 2}]


def test_full_disk_drops_tensorboard_only(tmp_path, caplog):
    with MetricLogger(tmp_path, sinks=("tensorboard",)) as metrics, full_disk(1000):
        for step in range(12):
            metrics.log(step, {"a/b": 1.0, "a/c": 2.0, "a/d": 3.0, "a/with_a_long_name": 4.0})
    assert len(strict_lines(metrics.path)) == 12
    assert len([m for m in caplog.messages if "tensorboard failed" in m]) == 1


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_it_and_a_resume_purges(tmp_path):
    with MetricLogger(tmp_path, sinks=("tensorboard",)) as metrics:
        for step in range(1, 6):
            metrics.log(step, {"reward/mean": step / 4})
    assert scalars(tmp_path / "tensorboard") == {"reward/mean": [(step, step / 4) for step in range(1, 6)]}
    with MetricLogger(tmp_path, sinks=("tensorboard",), resume_step=4) as metrics:
        metrics.log(4, {"reward/mean": 10.0})
    expected = [(1, 0.25), (2, 0.5), (3, 0.75), (4, 10.0)]
    assert scalars(tmp_path / "tensorboard") == {"reward/mean": expected}
    assert [(r["step"], r["reward/mean"]) for r in read_metrics(metrics.path)] == expected


def test_old_metric_names_are_read_as_current(tmp_path):
    old = {
        "step": 1,
        "pack/used": 0.9,
        "eval/accuracy_sampled": 0.5,
        "async/age_mean": 1.0,
        "loss/clip_fraction_age_2_3": 0.5,
        "reward/age_mean": 2.0,
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps(old) + "\n")
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {
            "step": 1,
            "pack/efficiency": 0.9,
            "eval/reward_sampled": 0.5,
            "async/staleness_mean": 1.0,
            "loss/clip_fraction_staleness_2_3": 0.5,
            "reward/age_mean": 2.0,  # a part of a user's reward
        }
    ]
