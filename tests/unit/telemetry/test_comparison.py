"""The page of several runs: what it holds, what is said of paths that are no runs, and that nothing in a run can break it."""

import argparse
import gzip
import json
import shutil

import pytest
from compared_runs import make_one, make_sweep, settings
from pages import Scripts
from report_runs import HOSTILE
from tables import every_row

from torchtune_ext.telemetry import report as command
from torchtune_ext.telemetry.compared.samples import SampleLimits
from torchtune_ext.telemetry.comparison import ComparisonLimits, build_comparison


def run_main(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.main(parser.parse_args([str(word) for word in words]))


def data_of(path):
    return Scripts(path.read_text()).data()


@pytest.fixture
def two(tmp_path):
    return [
        make_one(tmp_path / "one", settings(1e-6), level=0.5),
        make_one(tmp_path / "two", settings(3e-6), level=0.7),
    ]


def test_the_page_holds_curves_results_and_samples(two, tmp_path):
    made = build_comparison(two, tmp_path / "page.html")
    assert (made.path, made.runs, made.settings, made.num_bytes) == (
        tmp_path / "page.html",
        2,
        2,
        (tmp_path / "page.html").stat().st_size,
    )
    data = data_of(made.path)
    overview, problems = data["overview"], data["problems"]
    assert [(each["letter"], each["label"]) for each in overview["settings"]] == [("A", "lr 1e-06"), ("B", "lr 3e-06")]
    assert overview["keys"] == [["optimizer.lr", "lr"]] and overview["values"] == [["1e-06"], ["3e-06"]]
    assert [(row["name"], row["state"], row["steps"]) for row in overview["rows"]] == [
        ("one", "finished", 60),
        ("two", "finished", 60),
    ]
    assert (
        overview["rows"][1]["last"]["value"] == pytest.approx(0.6872, abs=1e-4)
        and overview["rows"][1]["best_step"] == 60
    )
    assert {problem["step"] for problem in problems} == {20, 40, 60} and len(problems) == 9
    for problem in problems:
        assert [each["run"] for each in problem["runs"]] == [1, 0], "the better one first"
        for each in problem["runs"]:
            best, worst = each["samples"]
            assert best["reward"] == max(each["rewards"]) and worst["reward"] == min(each["rewards"])


def test_nothing_in_a_run_breaks_the_page(tmp_path):
    name = "größer </script> “B”"
    runs = [make_one(tmp_path / f"{name} {i}".replace("/", "|"), settings(1e-6 * (i + 1), note=HOSTILE * (i + 1)), hostile=True, **{f"own/{HOSTILE}": 1.0})
            for i in range(2)]  # fmt: skip
    page = build_comparison(runs, tmp_path / "page.html").path.read_text()
    scripts = Scripts(page)
    assert [each for each, _ in scripts.scripts] == ["overview", "problems", None]
    assert "img" not in scripts.tags and HOSTILE not in page and 'onerror="document' not in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page
    code = scripts.scripts[-1][1]
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert unsafe not in code


def test_a_sweep_is_in_its_own_order_with_what_failed(tmp_path):
    made = build_comparison([make_sweep(tmp_path / "sweep")])
    assert made.path == tmp_path / "sweep" / "report.html" and made.runs == 10
    overview = data_of(made.path)["overview"]
    (sweep,) = overview["sweeps"]
    assert sweep["axes"] == [
        {"key": "optimizer.lr", "label": "lr", "axis": "log"},
        {"key": "loss.clip_high", "label": "clip_high", "axis": "linear"},
    ]
    assert sweep["best"] == "run21" and [point["state"] for point in sweep["points"]].count("failed") == 2
    assert [row["name"] for row in overview["rows"]] == [f"run{i}{j}" for i in range(5) for j in range(2)] + [
        "bad0",
        "bad1",
    ]
    assert overview["rows"][-1]["cause"] == f"loss is not finite {HOSTILE}" and overview["rows"][-1]["seconds"] == 3.0
    # The interval of a value is that of the evaluation which gave it.
    assert sweep["points"][0]["high"] - sweep["points"][0]["low"] == pytest.approx(0.1, abs=1e-4)


def test_what_failed_late_is_not_what_its_setting_came_to(tmp_path):
    folder = make_sweep(tmp_path / "sweep", rates=(1e-5, 1e-4), failed=0, clips=(0.2,))
    record = json.loads((folder / "sweep.json").read_text())
    record["runs"][1] |= {"state": "failed", "value": None, "cause": "out of memory"}
    (folder / "sweep.json").write_text(json.dumps(record))
    made = build_comparison([folder])
    assert made.verdict.startswith("A (lr 1e-05): held-out accuracy 0.618") and made.verdict.endswith(
        "no other setting to compare it with."
    )
    row = data_of(made.path)["overview"]["rows"][1]
    assert (row["state"], row["cause"], row["steps"], row["target"]) == ("failed", "out of memory", 60, None)


def test_a_sweep_of_which_nothing_ran_yet_or_everything_failed(tmp_path):
    made = build_comparison([make_sweep(tmp_path / "sweep", rates=(), failed=3)])
    assert made.runs == 0 and made.verdict == "No run has eval/accuracy_sampled yet."
    make_sweep(tmp_path / "empty", rates=(), failed=0)
    with pytest.raises(ValueError, match="nothing to show yet. the sweep has started no run"):
        build_comparison([tmp_path / "empty"])


def test_the_command(two, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_main(*two) == 0
    out = capsys.readouterr().out
    assert (
        out.startswith("comparison.html: ") and "2 runs of 2 settings" in out and "B (lr 3e-06) has the highest" in out
    )
    assert run_main(tmp_path) == 0 and (tmp_path / "report.html").exists()
    assert run_main(two[0]) == 0 and (two[0] / "report.html").exists(), "one run has the page that it always had"
    assert (
        "class Browser" in (two[0] / "report.html").read_text()
        and "class SideBySide" not in (two[0] / "report.html").read_text()
    )
    capsys.readouterr()
    assert run_main(*two, "--max-mib", 3) == 1
    assert "--max-mib: for the page of one run alone" in capsys.readouterr().err


def test_paths_that_are_no_runs_are_named_with_those_near_them(two, tmp_path):
    (tmp_path / "empty").mkdir()
    for paths, error, words in (
        ([two[0], tmp_path / "twoo"], FileNotFoundError, "twoo: no such folder; runs in .*: two"),
        (
            [two[0], tmp_path / "empty"],
            ValueError,
            "empty is no run: the folder of a run holds run.json and metrics.jsonl, .*Runs near it: .*one",
        ),
        ([two[0], two[1] / "metrics.jsonl"], ValueError, "metrics.jsonl is a file: name a folder"),
        ([two[0], two[0]], ValueError, "one is named twice: name it once"),
        ([two[0], two[0] / ".." / "one"], ValueError, "is named twice, also as .*one"),
        ([two[0], tmp_path], ValueError, "one is named twice"),
    ):
        with pytest.raises(error, match=words):
            build_comparison(paths, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_the_copy_of_a_run_is_no_second_seed(two, tmp_path):
    shutil.copytree(two[0], tmp_path / "copy")
    with pytest.raises(ValueError, match="are the same run .*has the id one"):
        build_comparison([two[0], tmp_path / "copy"], tmp_path / "page.html")


def test_a_run_with_nothing_to_show_is_left_out_and_said(two, tmp_path, capsys):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "run.json").write_text(json.dumps({"id": "new", "config": settings()}))
    shutil.copytree(two[0], tmp_path / "broken")
    (tmp_path / "broken" / "metrics.jsonl").write_text('{"step": 1}\nno json\n{"step": 2}\n')
    shutil.copytree(two[0], tmp_path / "odd")
    (tmp_path / "odd" / "metrics.jsonl").write_text("[1, 2]\n[3]\n")
    made = build_comparison([tmp_path], tmp_path / "page.html")
    assert made.runs == 2 and len(made.left_out) == 3
    told = data_of(made.path)["overview"]["notices"]
    assert any(line.startswith("new is left out: no metrics yet") for line in told)
    assert any(line.startswith("broken is left out: metrics.jsonl is damaged") and "line 2" in line for line in told)
    assert any(line.startswith("odd is left out: metrics.jsonl is damaged") for line in told)
    assert "new is left out" in made.summary()
    with pytest.raises(ValueError, match="nothing to show yet. new is left out"):
        build_comparison([tmp_path / "new", tmp_path / "odd"], tmp_path / "page.html")


@pytest.mark.parametrize("place", ["rollouts", "run.json", "sweep.json"])
def test_other_formats_are_refused(tmp_path, place):
    folder = make_sweep(tmp_path / "sweep", rates=(1e-5, 3e-5), failed=0)
    if place == "rollouts":
        path = folder / "run00" / "rollouts" / "step_000060.jsonl.gz"
        path.write_bytes(gzip.compress(b'{"format": 2, "step": 60, "groups": 0}\n'))
    else:
        path = folder / place if place == "sweep.json" else folder / "run00" / place
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    with pytest.raises(ValueError, match=f"{path.name} has format 2, and this version of torchtune-ext reads format 1"):
        build_comparison([folder])


@every_row("text", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "name": "s", "method": "grid", "metric": null, "parameters": {}, "runs": []}',
                                  '{"format": 1, "name": "s", "method": "grid", "metric": {"name": "m"}, "parameters": {}, "runs": [{"id": "x", "folder": "../../x", "parameters": {}, "state": "failed"}]}'])  # fmt: skip
def test_a_damaged_sweep_is_said(tmp_path, text):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(ValueError, match="sweep.json is damaged .*name the folders of its runs instead"):
        build_comparison([tmp_path])


def test_damaged_rollouts_settings_and_evaluations_cost_no_page(two, tmp_path):
    (two[0] / "rollouts" / "step_000060.jsonl.gz").write_bytes(b"no gzip")
    (two[0] / "run.json").write_text("{")
    (two[1] / "evaluation.json").write_text("{")
    overview = data_of(build_comparison(two, tmp_path / "page.html").path)["overview"]
    assert any("The settings of one are not known" in line for line in overview["notices"])
    assert [each["label"] for each in overview["settings"]] == ["one", "two"]


def test_files_that_somebody_edited(two, tmp_path):
    path = two[0] / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[5] |= {"reward/mean": float("nan"), "time/step": "two", "length/tokens": True, "loss/total": float("inf")}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (two[1] / "metrics.jsonl").write_text(json.dumps({"step": "7", "reward/mean": 1.0}) + "\n")
    (two[1] / "evaluation.json").write_text('{"temperature 1": {"mean": NaN}}')
    made = build_comparison(two, tmp_path / "page.html")
    assert made.runs == 1 and made.left_out == ("two is left out: metrics.jsonl is damaged (a step is '7').",)
    assert data_of(made.path)["overview"]["rows"][0]["seconds"] == 118.0


def test_a_page_stays_small(tmp_path):
    for i in range(6):
        make_one(tmp_path / f"r{i}", settings(1e-6 * (i + 1)), steps=120)
    limits = ComparisonLimits(
        points=30, shown=2, curves=4, samples=SampleLimits(steps=1, problems=2, runs=3, characters=40)
    )
    data = data_of(build_comparison([tmp_path], limits=limits).path)
    overview, problems = data["overview"], data["problems"]
    assert len(overview["steps"]) == 30 and len(overview["drawn"]) == 4 and len(overview["shown"]) == 4
    assert all(len(line["mean"]) == 30 for chart in overview["charts"] for line in chart["lines"])
    assert len(problems) == 2 and all(len(problem["runs"]) == 3 for problem in problems)
    assert len(overview["rows"]) == 6


def test_evaluations_of_models_are_compared_too(tmp_path):
    """`evaluate` writes no metrics, but a table and samples."""
    for name, mean in (("base", 0.4), ("trained", 0.8)):
        folder = make_one(
            tmp_path / name,
            {"seed": 0, "max_steps": 1, "optimizer": {"lr": 1}, "model_dir": f"models/{name}"},
            steps=20,
        )
        (folder / "metrics.jsonl").unlink()
        table = {
            "temperature 1": {"mean": mean, "low": mean - 0.05, "high": mean + 0.05},
            "greedy": {"mean": 0.9, "low": 0.8, "high": None},
        }
        (folder / "evaluation.json").write_text(json.dumps({"model_dir": name, "skipped": {}, **table}))
    made = build_comparison([tmp_path])
    assert "B (model_dir models/trained) has the highest last held-out accuracy, 0.800 [0.750, 0.850]" in made.verdict
    data = data_of(made.path)
    assert data["overview"]["charts"] == [] and len(data["problems"]) == 3


def test_a_warm_up_beside_a_run_that_was_resumed_and_one_that_was_not_evaluated(tmp_path):
    make_one(
        tmp_path / "warmup",
        {"seed": 0, "num_problems": 60, "epochs": 1, "batch_problems": 1, "optimizer": {"lr": 1e-3}},
        every=0,
        **{"loss/nll": 0.5},
    )
    resumed = make_one(
        tmp_path / "resumed", settings(), **{"loss/kl_ref": lambda step: float("nan") if step == 3 else 0.1}
    )
    lines = (resumed / "metrics.jsonl").read_text().splitlines(keepends=True)
    (resumed / "metrics.jsonl").write_text(
        "".join(lines[:30]) + json.dumps({"step": 29, "time/save": 1.0}) + "\n" + "".join(lines[30:]) + '{"step": 6'
    )
    make_one(tmp_path / "short", settings(seed=1), steps=7, every=0)
    made = build_comparison([tmp_path])
    overview = data_of(made.path)["overview"]
    assert any("resumed: not finite: loss/kl_ref at 1 step." in line for line in overview["notices"])
    assert any("its seeds end at different steps (2 to step 7; 1 to step 60)" in line for line in overview["notices"])
    assert [row["state"] for row in overview["rows"]] == ["finished", "stopped", "finished"]
    assert {chart["metric"] for chart in overview["charts"]} >= {"loss/nll", "reward/mean", "eval/accuracy_sampled"}
