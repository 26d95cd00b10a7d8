"""The page of several runs: what it holds, what is said of paths that are no runs, and that nothing in a run can break it."""

import argparse
import json
import shutil

import numpy as np
import pytest

from helpers.compared_runs import make_one, make_sweep, settings
from helpers.pages import Scripts
from helpers.report_runs import HOSTILE
from torchtune_ext.telemetry import comparison
from torchtune_ext.telemetry import report as command
from torchtune_ext.telemetry.comparison import build_comparison


def run_main(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.main(parser.parse_args([str(word) for word in words]))


def texts(overview):
    return [notice["text"] for notice in overview["notices"]]


def overview_of(report):
    return Scripts(report.path.read_text()).data()["overview"]


@pytest.fixture
def two(tmp_path):
    return [
        make_one(tmp_path / "one", settings(1e-6), level=0.5),
        make_one(tmp_path / "two", settings(3e-6), level=0.7),
    ]


def test_the_page_holds_curves_and_results(two, tmp_path):
    report = build_comparison(two, tmp_path / "page.html")
    size = (tmp_path / "page.html").stat().st_size
    assert (report.path, report.runs, report.num_bytes) == (tmp_path / "page.html", 2, size)
    overview = overview_of(report)
    assert overview["runs"] == [
        {"letter": "A", "label": "lr 1e-06", "name": "one", "rank": 1},
        {"letter": "B", "label": "lr 3e-06", "name": "two", "rank": 0},
    ]
    assert overview["heads"] == ["lr", "held-out reward", "95% interval", "run"]
    assert overview["rows"] == [
        [1, "3e-06", "0.6872", "0.6372 to 0.7372", "two"],
        [0, "1e-06", "0.4908", "0.4408 to 0.5408", "one"],
    ]


def test_comparison_hostile_run_content_is_escaped(tmp_path):
    name = "größer </script> “B”"
    runs = [make_one(tmp_path / f"{name} {i}".replace("/", "|"), settings(1e-6 * (i + 1), note=HOSTILE * (i + 1)), hostile=True, **{f"own/{HOSTILE}": 1.0})
            for i in range(2)]  # fmt: skip
    page = build_comparison(runs, tmp_path / "page.html").path.read_text()
    scripts = Scripts(page)
    assert [each for each, _ in scripts.scripts] == ["overview", None]
    assert "img" not in scripts.tags and HOSTILE not in page and 'onerror="document' not in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page
    code = scripts.scripts[-1][1]
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert unsafe not in code


def test_comparison_of_sweep_excludes_failed_runs(tmp_path):
    report = build_comparison([make_sweep(tmp_path / "sweep")])
    assert report.path == tmp_path / "sweep" / "report.html" and report.runs == 10
    assert report.table.splitlines()[1].split("  ")[:4] == ["F", "lr 0.0001, clip_high 0.3", "0.7461", ""]
    overview = overview_of(report)
    assert [each["name"] for each in overview["runs"]] == [f"run{i}{j}" for i in range(5) for j in range(2)]
    assert texts(overview) == [f"bad{number} failed: loss is not finite {HOSTILE}." for number in range(2)]


def test_comparison_excludes_runs_that_failed_late(tmp_path):
    folder = make_sweep(tmp_path / "sweep", rates=(1e-5, 1e-4), failed=0, clips=(0.2,))
    record = json.loads((folder / "sweep.json").read_text())
    record["runs"][1] |= {"state": "failed", "value": None, "cause": "out of memory"}
    (folder / "sweep.json").write_text(json.dumps(record))
    report = build_comparison([folder])
    assert report.table.splitlines()[1:] == ["A  run00  0.6185           0.5685 to 0.6685"]
    assert report.skipped_runs == ["run10 failed: out of memory."]


def test_comparison_of_fully_failed_sweep_raises(tmp_path):
    with pytest.raises(ValueError, match="sweep: .*bad0 failed: loss is not finite"):
        build_comparison([make_sweep(tmp_path / "sweep", rates=(), failed=3)])


def test_comparison_minimizing_sweep_sorts_lower_first(tmp_path):
    for name, rate, loss in (("a", 1e-6, 0.5), ("b", 2e-6, 0.3)):
        make_one(tmp_path / name, settings(rate), rollouts=False, **{"loss/total": loss})
    runs = [{"id": name, "parameters": {}, "state": "finished", "cause": ""} for name in ("a", "b")]
    metric = {"name": "loss/total", "goal": "minimize"}
    (tmp_path / "sweep.json").write_text(json.dumps({"format": 1, "name": "", "metric": metric, "runs": runs}))
    report = build_comparison([tmp_path])
    assert [line.split()[:4] for line in report.table.splitlines()] == [
        ["run", "loss/total", "95%", "interval"], ["B", "lr", "2e-06", "0.3"], ["A", "lr", "1e-06", "0.5"]]  # fmt: skip


def test_the_command(two, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_main(*two) == 0
    out = capsys.readouterr().out
    assert "comparison.html: " in out and "2 runs" in out
    first, second, *_ = out.strip().splitlines()[1:]
    assert first.split()[:4] == ["B", "lr", "3e-06", "0.6872"] and second.startswith("A  lr 1e-06"), (
        "the best one first"
    )
    assert run_main(tmp_path) == 0 and (tmp_path / "report.html").exists()
    assert run_main(two[0]) == 0 and "class Browser" in (two[0] / "report.html").read_text(), "the page of one run"
    capsys.readouterr()


def test_comparison_invalid_paths_reported_with_nearby_runs(two, tmp_path):
    (tmp_path / "empty").mkdir()
    for path, words in (
        (tmp_path / "three", "three: not the folder of a run or a sweep; runs in .*: one, two"),
        (tmp_path / "empty", "empty: not the folder of a run or a sweep; runs in .*: one, two"),
        (two[1] / "metrics.jsonl", "metrics.jsonl: not the folder of a run"),
    ):
        with pytest.raises(ValueError, match=words):
            build_comparison([two[0], path], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_comparison_duplicate_run_is_listed_once(two, tmp_path):
    assert build_comparison([two[0], two[0] / ".." / "one", tmp_path], tmp_path / "page.html").runs == 2


def test_comparison_empty_run_is_reported_and_skipped(two, tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "run.json").write_text(json.dumps({"id": "new", "config": settings()}))
    for name, text in (("broken", '{"step": 1}\nno json\n{"step": 2}\n'), ("odd", "[1, 2]\n[3]\n")):
        shutil.copytree(two[0], tmp_path / name)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    report = build_comparison([tmp_path], tmp_path / "page.html")
    assert report.runs == 2 and len(report.skipped_runs) == 3
    notices = texts(overview_of(report))
    assert any(line.startswith("new is skipped: no metrics yet") for line in notices)
    assert any(line.startswith("broken is skipped: metrics.jsonl is damaged") and "line 2" in line for line in notices)
    assert any(line.startswith("odd is skipped: metrics.jsonl is damaged") for line in notices)
    assert "new is skipped" in report.summary()
    with pytest.raises(ValueError, match="no metrics found; .*new is skipped"):
        build_comparison([tmp_path / "new", tmp_path / "odd"], tmp_path / "page.html")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "name": "s", "metric": null, "parameters": {}, "runs": []}',
                                  '{"format": 1, "name": "s", "metric": {"name": "m"}, "parameters": {}, "runs": [{"id": "../../x", "parameters": {}, "state": "failed", "cause": ""}]}'])  # fmt: skip
def test_comparison_damaged_sweep_is_reported(tmp_path, text):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(ValueError, match="sweep.json: damaged"):
        build_comparison([tmp_path])


def test_a_sweep_of_another_format_is_refused(tmp_path):
    path = make_sweep(tmp_path / "sweep", rates=(), failed=1) / "sweep.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    with pytest.raises(ValueError, match="sweep.json: damaged .*format 2, expected 1"):
        build_comparison([path.parent])


def test_damaged_settings_cost_no_page(two, tmp_path):
    (two[0] / "run.json").write_text("{")
    overview = overview_of(build_comparison(two, tmp_path / "page.html"))
    assert any("The settings of one are unknown" in line for line in texts(overview))
    assert [each["label"] for each in overview["runs"]] == ["one", "two"]


def test_a_page_stays_small(tmp_path, monkeypatch):
    for i in range(6):
        make_one(tmp_path / f"r{i}", settings(1e-6 * (i + 1)), steps=120)
    for name, value in {"MAX_POINTS": 30, "MAX_CURVE_RUNS": 4}.items():
        monkeypatch.setattr(comparison, name, value)
    overview = overview_of(build_comparison([tmp_path]))
    assert len(overview["steps"]) == 30 and {len(chart["lines"]) for chart in overview["panels"]} == {4}
    assert all(len(line["raw"]) == 30 for chart in overview["panels"] for line in chart["lines"])
    assert len(overview["rows"]) == 6


def test_comparison_supports_warmup_resumed_and_unevaluated_runs(tmp_path):
    warmup = {"seed": 0, "num_problems": 60, "epochs": 1, "batch_problems": 1, "optimizer": {"lr": 1e-3}}
    make_one(tmp_path / "warmup", warmup, every=0, **{"loss/nll": 0.5})
    broken = {"loss/kl_ref": lambda step: float("nan") if step == 3 else 0.1}
    resumed = make_one(tmp_path / "resumed", settings(), **broken)
    lines = (resumed / "metrics.jsonl").read_text().splitlines(keepends=True)
    (resumed / "metrics.jsonl").write_text(
        "".join(lines[:30]) + json.dumps({"step": 29, "time/save": 1.0}) + "\n" + "".join(lines[30:]) + '{"step": 6'
    )
    make_one(tmp_path / "short", settings(seed=1), steps=7, every=0)
    overview = overview_of(build_comparison([tmp_path]))
    assert "resumed: loss/kl_ref was not finite at 1 step, first at step 3." in texts(overview)
    assert [row[-1] for row in overview["rows"]] == ["resumed", "warmup", "short (stopped at step 7 of 60)"]
    titles = [chart["title"] for chart in overview["panels"]]
    # What the runs are compared by comes first.
    assert titles[:4] == ["Reward", "Held-out reward", "Completion length", "Negative log-likelihood"]


def test_comparison_lines_equal_logged_values(tmp_path):
    make_one(tmp_path / "a", settings(), rollouts=False)
    make_one(
        tmp_path / "b",
        settings(seed=1),
        rollouts=False,
        **{"own/holes": lambda step: float("nan") if step % 7 else step / 3},
    )
    overview = overview_of(build_comparison([tmp_path]))
    records = [json.loads(line) for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()]
    assert overview["steps"] == [record["step"] for record in records]
    lines = {chart["title"]: chart["lines"] for chart in overview["panels"]}
    assert [line["run"] for line in lines["own/holes"]] == [1]
    reward = next(line for line in lines["Held-out reward"] if line["run"] == 1)
    for column, metric in (
        (lines["own/holes"][0]["raw"], "own/holes"),
        (reward["raw"], "eval/reward_sampled"),
        (reward["band"][0], "eval/low"),
    ):
        values = [record.get(metric) for record in records]
        np.testing.assert_allclose(np.array(column, float), np.array(values, float), rtol=1e-4, equal_nan=True)
    # Intervals of many runs would hide their lines.
    for i in range(4):
        make_one(tmp_path / f"c{i}", settings(seed=2 + i), steps=20, rollouts=False)
    overview = overview_of(build_comparison([tmp_path]))
    assert all(line["band"] is None for chart in overview["panels"] for line in chart["lines"])


def test_many_steps_share_points(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "MAX_POINTS", 100)
    for name, seed, steps in (("a", 0, 999), ("b", 1, 499)):
        make_one(tmp_path / name, settings(1e-6 * (1 + seed)), steps=steps, rollouts=False)
    overview = overview_of(build_comparison([tmp_path]))
    assert len(overview["steps"]) == 100 and overview["steps"][-1] == 999
    lines = next(chart["lines"] for chart in overview["panels"] if chart["title"] == "Reward")
    first, second = sorted(lines, key=lambda line: line["run"])
    rewards = [
        json.loads(line).get("reward/mean") for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    ]
    means = np.nanmean(np.array(rewards, float).reshape(100, 10), 1)
    np.testing.assert_allclose(first["raw"], means, rtol=1e-4)
    assert set(second["raw"][50:]) == {None} and None not in second["raw"][:50]
