"""MLflow and trackio with the real packages, offline: metrics, config, tables, a resumed run, and failures."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtune_ext.telemetry.sinks.tables import COLUMNS

# The Makefile installs the trackers in this folder, because they require older versions of two packages.
TRACKERS = Path(sys.prefix) / "trackers"
LOGS = """
import json, logging, math, os, sys
import numpy as np
from pathlib import Path
from helpers.records import make_sample
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.run.folder import Run
from torchtune_ext.tasks.task import Problem, Score
from torchtune_ext.telemetry.metrics import MetricLogger
from torchtune_ext.telemetry.sinks import LoggingConfig

def group(step):
    sample = make_sample([1, 2], outcome=Score(1.0, {}, "note"), text=f"text {step} \\0\\ud800")
    return Group(Problem("p", ({"role": "user", "content": "q"},), 0), np.arange(3, dtype=np.int32), (sample,))

def start(steps, resume_step, status, **config):
    run = Run("id1", "name", 0.0, {"seed": 1, "task": {"_component_": "a.B", "odd key?": [1]}, **config}, {"command": "c"})
    settings = LoggingConfig(to=(TRACKER,), project="letters", samples_every=1)
    with MetricLogger("run", settings, run, resume_step, status=lambda: status) as metrics:
        for step in steps:
            metrics.show(step, [group(step)])
            metrics.log(step, {"reward/mean": step / 4, "loss/total": math.nan, "reward/part=a": 1})
            BREAK(metrics)

BREAK = lambda metrics: None
TRACKER = sys.argv[1]
"""
BOTH = "start((1, 2), None, 143, max_steps=2)\nstart((2, 3), 2, 0, max_steps=3)\n"
READ = {
    "mlflow": """
from mlflow import MlflowClient
client = MlflowClient()
runs = client.search_runs([client.get_experiment_by_name("letters").experiment_id])
history = {name: [(m.step, m.value) for m in client.get_metric_history(runs[0].info.run_id, name)] for name in runs[0].data.metrics}
tables = json.loads(runs[0].data.tags["mlflow.loggedArtifacts"])
folder = Path(client.download_artifacts(runs[0].info.run_id, ""))
config, table = (json.loads((folder / name).read_text()) for name in ("config.json", "samples/step_000003.json"))
print(json.dumps([[r.info.run_name + r.info.status for r in runs], history, runs[0].data.params, tables, config, table]))
""",
    "trackio": """
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_run_records("letters")
logs = SQLiteStorage.get_logs("letters", run["name"], run_id=run["id"])
config = SQLiteStorage.get_run_config("letters", run["name"], run_id=run["id"])
print(json.dumps([run["name"], logs, config]))
""",
}


def run_script(folder, tracker, code, ok=True, **variables):
    if importlib.util.find_spec(tracker) is None and not TRACKERS.is_dir():
        pytest.skip(f"{tracker} is not installed")
    environ = {
        **os.environ,
        "PYTHONPATH": f"{Path(__file__).parents[2]}:{TRACKERS}",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "TRACKIO_DIR": str(folder / "trackio"),
        "HF_HUB_OFFLINE": "1",
        **variables,
    }
    done = subprocess.run(
        [sys.executable, "-c", LOGS + code, tracker], cwd=folder, env=environ, capture_output=True, text=True
    )
    assert (done.returncode == 0) == ok, done.stderr
    return done


@pytest.mark.slow
def test_mlflow_resumed_run_continues_one_run(tmp_path):
    done = run_script(tmp_path, "mlflow", BOTH + READ["mlflow"])
    runs, history, params, tables, config, table = json.loads(done.stdout.splitlines()[-1])
    assert runs == ["nameFINISHED"] and "dropped" not in done.stderr
    assert sorted(history["reward/mean"]) == [[1, 0.25], [2, 0.5], [2, 0.5], [3, 0.75]]
    assert len(history["loss/total"]) == 4 and "reward/part_a" in history
    assert params["max_steps"] == "2" and params["task._component_"] == "a.B", "parameters of the first start"
    assert config["max_steps"] == 3 and config["process"] == {"command": "c"}
    assert [one["path"] for one in tables] == [f"samples/step_00000{step}.json" for step in (1, 2, 3)]
    assert table["columns"] == COLUMNS and table["data"][0][3] == "text 3 \ufffd?"


@pytest.mark.slow
def test_trackio_resumed_run_continues_one_run(tmp_path):
    done = run_script(tmp_path, "trackio", BOTH + READ["trackio"])
    name, logs, config = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    assert name == "name-id1" and "dropped" not in done.stderr
    assert done.stdout.count("* Run finished") == 2, "once for each start"
    scalars = [(line["step"], line["reward/mean"]) for line in logs if "reward/mean" in line]
    assert sorted(scalars) == [(1, 0.25), (2, 0.5), (2, 0.5), (3, 0.75)]
    assert config["max_steps"] == 3 and config["task"]["_component_"] == "a.B"
    (table,) = (line["samples/step_000003"] for line in logs if "samples/step_000003" in line)
    assert list(table["_value"][0]) == COLUMNS and table["_value"][0]["completion"] == "text 3 \ufffd?"


@pytest.mark.slow
def test_mlflow_unreachable_server_does_not_stop_run(tmp_path):
    done = run_script(tmp_path, "mlflow", "start((1, 2), None, 0)\n", MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert done.stderr.count("sink mlflow failed and is dropped") == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("tracker", ["mlflow", "trackio"])
def test_failing_tracker_does_not_stop_run(tmp_path, tracker):
    lost = "BREAK = lambda metrics: [vars(sink).clear() for sink in metrics._sinks.values()]\n"
    done = run_script(tmp_path, tracker, lost + "start((1, 2, 3), None, 0)\n")
    assert done.stderr.count(f"sink {tracker} failed and is dropped") == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
def test_trackio_invalid_server_stops_start(tmp_path):
    done = run_script(tmp_path, "trackio", "start((1,), None, 0)\n", ok=False, TRACKIO_SERVER_URL="x.example")
    assert "logging.to: 'trackio' cannot start: `server_url` must be a full URL" in done.stderr
