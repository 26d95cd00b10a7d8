"""The runs of a sweep: side by side, failed, stopped early, interrupted, killed, gone on with. A small program stands for the recipe."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from helpers import small_sweeps
from torchtune_ext.sweep.runner import OUTPUT_FILE, SweepFolder, failure_cause, latest_step
from torchtune_ext.sweep.spec import read_sweep
from torchtune_ext.telemetry.progress import ProgressBar

RATES = "parameters: {lr: {values: [0.1, 0.2, 0.3]}}\n"


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr("torchtune_ext.sweep.runner.POLL_S", 0.05)


def starts(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "starts").read_text().splitlines()]


def record(folder: Path) -> dict:
    return json.loads((folder / "sweep.json").read_text())


def wait_until(true, process: subprocess.Popen, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def as_process(file: Path, folder: Path, jobs: int) -> subprocess.Popen:
    words = [sys.executable, small_sweeps.__file__, str(file), str(folder), str(jobs)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_sweep_runs_every_point_once_and_records_it(tmp_path, capsys, monkeypatch):
    for name in ("WANDB_SWEEP_ID", "WANDB_RUN_ID"):
        monkeypatch.setenv(name, "outside")
    file = small_sweeps.write(tmp_path / "lr.yaml", RATES)
    runner, folder = small_sweeps.runner(file, tmp_path / "out", 2, "steps=2")
    assert runner.run() and not runner.num_unfinished
    sweep = record(tmp_path / "out")
    assert (
        sweep["format"] == 1 and sweep["method"] == "grid" and sweep["name"] == "lr" and sweep["words"] == ["steps=2"]
    )
    assert sweep["metric"] == {"name": "eval/reward_sampled", "goal": "maximize"}
    assert [run["parameters"]["lr"] for run in sweep["runs"]] == [0.1, 0.2, 0.3]
    assert all(run["state"] == "finished" and run["value"] == 2 * run["parameters"]["lr"] for run in sweep["runs"])
    assert sorted(line[0] for line in starts(tmp_path)) == ["run_01", "run_02", "run_03"]
    # No agent has started these runs: their folder is said to them. With an account they stand together.
    assert {tuple(line[3:]) for line in starts(tmp_path)} == {("None", "lr")}
    assert (tmp_path / "out" / "sweep.yaml").read_text() == file.read_text()
    output = capsys.readouterr().out
    assert "run_01 (1 of 3) starts: lr=0.1" in output and "finished after" in output
    folder.close()


def test_sweep_prints_step_and_time_of_silent_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torchtune_ext.sweep.runner.ProgressBar", partial(ProgressBar, log_every_s=0.1))
    file = small_sweeps.write(tmp_path / "lr.yaml", "parameters: {lr: {values: [0.1]}}\n")
    runner, _ = small_sweeps.runner(file, tmp_path / "out", 1, "steps=4", "seconds=0.3")
    assert runner.run()
    lines = capsys.readouterr().err.splitlines()
    steps = [int(re.fullmatch(r"run_01: step (\d) after \d+ s", line)[1]) for line in lines]
    assert steps == sorted(steps) and len(set(steps)) > 1, lines


@pytest.mark.parametrize(
    "text, step",
    [(None, 0), ("", 0), ('{"step": 3}\n', 3), ('{"step": 3}\n{"step": 4', 3), ('{"loss": 1}\n', 0), ("[1]\n{\n", 0)],
)
def test_latest_step_ignores_unfinished_or_damaged_lines(text, step, tmp_path):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert latest_step(tmp_path / "metrics.jsonl") == step


def test_cause_is_not_a_line_of_time(tmp_path):
    output = tmp_path / "output.log"
    output.write_text("engine: starting\nstart: not ready after 30 s\nsample: 3 of 9 samples after 60 s, 5 tok/s\n")
    assert failure_cause(output, -9) == "engine: starting (killed by SIGKILL)"
    output.write_text("start: not ready after 30 s\n")
    assert failure_cause(output, 1) == "start: not ready after 30 s (status 1)"


def test_a_run_that_fails_is_a_result(tmp_path, capsys):
    file = small_sweeps.write(tmp_path / "lr.yaml", "parameters: {lr: {values: [-1.0, 0.2]}}\n")
    runner, folder = small_sweeps.runner(file, tmp_path / "out", 1, "steps=1")
    assert runner.run()
    failed, fine = folder.runs
    assert failed.state == "failed" and failed.value is None
    assert failed.cause == "optimizer.lr=-1.0 must be 0 or more (status 2)"
    assert fine.state == "finished"
    assert "run_01 failed after 0 s: optimizer.lr=-1.0 must be 0 or more" in capsys.readouterr().out


def test_sweep_unwritable_record_starts_no_run(tmp_path, monkeypatch):
    file = small_sweeps.write(tmp_path / "lr.yaml", RATES)
    runner, folder = small_sweeps.runner(file, tmp_path / "out", 1, "steps=1")

    def full():
        raise OSError("No space left on device")

    monkeypatch.setattr(folder, "save", full)
    with pytest.raises(OSError, match="No space left"):
        runner.run()
    assert not (tmp_path / "out" / "run_01" / OUTPUT_FILE).exists(), "a run has been started"


def test_sweep_worse_runs_stop_early_and_keep_checkpoints(tmp_path):
    text = "parameters: {lr: {values: [0.3, 0.1, 0.2]}}\nearly_terminate: {type: hyperband, min_iter: 2, eta: 3}\n"
    file = small_sweeps.write(tmp_path / "lr.yaml", text)
    runner, folder = small_sweeps.runner(file, tmp_path / "out", 1, "steps=30", "seconds=0.05")
    assert runner.run()
    assert [run.state for run in folder.runs] == ["finished", "stopped_early", "stopped_early"]
    stopped = folder.runs[1]
    assert 0.1 * 2 <= stopped.value < 0.1 * 30
    assert list((tmp_path / "out" / "run_02").glob("checkpoints/step_*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_sweep_signal_saves_runs_and_resume_continues_them(tmp_path, number):
    file = small_sweeps.write(tmp_path / "lr.yaml", "parameters: {lr: {values: [0.1, 0.2]}, seconds: {value: 0.2}}\n")
    process = as_process(file, tmp_path / "out", 1)
    wait_until(lambda: list(tmp_path.glob("out/run_01/checkpoints/step_000002")), process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and "the runs end their steps and save" in output, output
    assert [run["state"] for run in record(tmp_path / "out")["runs"]] == ["waiting"]
    runner, folder = small_sweeps.runner(file, tmp_path / "out")
    assert runner.run()
    first, again, second = starts(tmp_path)
    assert (first[:2], second[:2]) == (["run_01", "0"], ["run_02", "0"])
    assert again[0] == "run_01" and int(again[1]) >= 2
    steps = [json.loads(line)["step"] for line in open(tmp_path / "out" / "run_01" / "metrics.jsonl")]
    assert steps == list(range(1, 7)) and all(run.state == "finished" for run in folder.runs)


def test_sweep_second_signal_ends_runs_at_once(tmp_path):
    file = small_sweeps.write(tmp_path / "lr.yaml", "parameters: {lr: {values: [0.1, 0.2]}, seconds: {value: 20}}\n")
    process = as_process(file, tmp_path / "out", 2)
    wait_until(lambda: len(list(tmp_path.glob("out/*/metrics.jsonl"))) == 2, process)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: "once more" in process.stdout.readline(), process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=15)
    assert "the runs end at once" in output, output
    assert [run["state"] for run in record(tmp_path / "out")["runs"]] == ["waiting", "waiting"]


def test_a_run_that_does_not_end_is_killed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torchtune_ext.sweep.runner.TERMINATE_TIMEOUT_S", 0.05)
    text = "parameters: {lr: {values: [0.3, 0.1]}}\nearly_terminate: {type: hyperband, min_iter: 1, eta: 3}\n"
    file = small_sweeps.write(tmp_path / "lr.yaml", text)
    runner, folder = small_sweeps.runner(file, tmp_path / "out", 1, "steps=2", "seconds=2.5")
    assert runner.run() and [run.state for run in folder.runs] == ["finished", "stopped_early"]
    assert "run_02 has not ended within 0.05 s of SIGTERM: it is killed" in capsys.readouterr().out


def test_killed_and_resumed_no_point_runs_twice(tmp_path):
    text = "parameters: {lr: {values: [0.1, 0.2, 0.3, 0.4]}, seconds: {value: 0.2}}\n"
    file = small_sweeps.write(tmp_path / "lr.yaml", text)
    process = as_process(file, tmp_path / "out", 2)
    wait_until(lambda: len(list(tmp_path.glob("out/run_0[34]/checkpoints/step_000001"))) == 2, process)
    process.kill()
    process.communicate(timeout=30)
    pids = [int(line[2]) for line in starts(tmp_path)]
    deadline = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{pid}") and "Z" not in status(pid) for pid in pids):
        assert time.monotonic() < deadline, "a run outlives its sweep"
        time.sleep(0.02)
    before = len(pids)
    runner, folder = small_sweeps.runner(file, tmp_path / "out", 2)
    assert runner.run()
    begun = [(line[0], line[1]) for line in starts(tmp_path)]
    assert sorted(name for name, step in begun if step == "0") == ["run_01", "run_02", "run_03", "run_04"]
    assert {name for name, _ in begun[before:]} <= {"run_03", "run_04"}
    for run in folder.runs:
        lines = open(tmp_path / "out" / run.id / "metrics.jsonl")
        assert run.state == "finished" and [json.loads(line)["step"] for line in lines] == list(range(1, 7))


def status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_sweep_bayes_resume_tries_identical_points(tmp_path):
    pytest.importorskip("optuna")
    text = "run_cap: 7\nparameters: {lr: {min: 0.0, max: 1.0}, steps: {value: 1}, seconds: {value: 0.01}}\n"
    file = small_sweeps.write(tmp_path / "lr.yaml", text, "bayes")
    whole, folder = small_sweeps.runner(file, tmp_path / "whole")
    assert whole.run() and len(folder.runs) == 7
    cut, half = small_sweeps.runner(file, tmp_path / "cut")
    cut._next_before = cut._next_run
    cut._next_run = lambda: cut._next_before() if len(half.runs) < 5 else None
    cut.run()
    half.close()
    rest, other = small_sweeps.runner(file, tmp_path / "cut")
    assert rest.run()
    assert [run.parameters for run in other.runs] == [run.parameters for run in folder.runs]


def test_sweep_search_counts_failed_run_as_worst(tmp_path):
    text = "run_cap: 9\nparameters: {lr: {min: 0.0, max: 1.0}}\n"
    file = small_sweeps.write(tmp_path / "lr.yaml", text, "bayes")
    runner, folder = small_sweeps.runner(file, tmp_path / "out")
    for u, (state, logged) in enumerate([("finished", 0.7), ("failed", 0.4), ("stopped_early", 0.1), ("running", 0.5)]):
        run = folder.add({"lr": u})
        run.state, run.value = state, logged
    folder.add({"lr": 4}).state = "finished"  # it logged nothing
    assert [value for _, value in runner._point_results()] == [0.7, 0.1, 0.1, None, None]


def test_two_processes_do_not_run_one_sweep(tmp_path):
    file = small_sweeps.write(tmp_path / "lr.yaml", RATES)
    sweep = read_sweep(file)
    first, second = (SweepFolder(tmp_path / "out", sweep, [], 0) for _ in range(2))
    assert not (tmp_path / "out").exists(), "a sweep that did not begin leaves nothing"
    first.acquire()
    with pytest.raises(ValueError, match="another process runs this sweep"):
        second.acquire()
    with pytest.raises(ValueError, match="another process runs this sweep"):
        small_sweeps.runner(file, tmp_path / "out")
    first.close()
    assert small_sweeps.runner(file, tmp_path / "out")[0].run()
