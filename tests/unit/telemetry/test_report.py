"""The report: everything embedded can be read back, nothing in a run can break the page, errors are clear."""

import argparse
import shutil
import subprocess
import sys

import numpy as np
import pytest

from helpers.pages import Scripts
from helpers.report_runs import HOSTILE, make_group, make_run
from torchtune_ext.telemetry import report as module
from torchtune_ext.telemetry.metrics import MetricLogger
from torchtune_ext.telemetry.report import ExcerptLimits, build_report


def test_embeds_the_run(tmp_path):
    run = make_run(tmp_path / "run")
    report = build_report(run)
    assert report.path == run / "report.html"
    assert (report.steps, report.rollout_steps, report.stored_steps) == (12, 4, 4)
    page = report.path.read_text()
    assert report.num_bytes == report.path.stat().st_size
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page
    data = Scripts(page).data()
    overview = data["overview"]
    assert overview["steps"] == list(range(1, 13))
    lines = {panel["title"]: panel["lines"][0]["raw"] for panel in overview["panels"]}
    assert lines["Reward"][2] == 0.25 and lines["KL"][:3] == [0.1, None, 0.1]
    broken = "loss/kl_ref was not finite at 1 step, first at step 2."
    assert {"text": broken, "section": "Policy change"} in overview["notices"]
    assert ["task.path", HOSTILE] in overview["config"]
    assert [entry["step"] for entry in overview["rollouts"]] == [3, 6, 9, 12]
    assert [(entry["groups"], entry["signals"]) for entry in overview["rollouts"]] == [(4, 3)] * 4
    groups = data["rollouts-6"]
    # The widest spread comes first.
    assert [group["id"][:9] for group in groups] == ["problem-3", "problem-2", "problem-1", "problem-0"]
    source = make_group(6, 3, spread=3 / 4)
    sample = next(sample for sample in groups[0]["samples"] if sample["text"] == source.samples[0].text)
    np.testing.assert_allclose(sample["logprob"], source.samples[0].completion.logprobs.mean(), rtol=1e-5)
    assert sample["versions"] == [[6, 10], [7, 10]] and sample["note"] == f"note {HOSTILE}"
    assert groups[3]["trained"] == 0
    failed = next(sample for sample in groups[2]["samples"] if sample["outcome"] == "infra_failed")
    assert failed["reward"] is None and failed["cause"] == HOSTILE and groups[2]["failed"] == 1


def test_report_hostile_run_content_is_escaped(tmp_path):
    page = build_report(make_run(tmp_path / "run", steps=3)).path.read_text()
    scripts = Scripts(page)
    assert [name for name, _ in scripts.scripts] == ["overview", "rollouts-3", None]
    assert scripts.title == f"run {HOSTILE} · torchtune-ext"
    assert "img" not in scripts.tags and HOSTILE not in page and 'onerror="document' not in page
    code = scripts.scripts[-1][1]
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert unsafe not in code
    assert "class Chart" in code and "class Browser" in code


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_shows_it(tmp_path):
    report = build_report(make_run(tmp_path / "run"))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
               f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=5000", "--dump-dom",
               f"file://{report.path}#step=6"]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "<title>run &lt;/script&gt;" in dom
    assert 'id="trouble" class="notice" hidden' in dom
    assert dom.count('class="series"') >= 3 and "step 6</output>" in dom
    assert dom.count("<article") == 6 + 2
    assert "&lt;img src=x" in dom and "<img" not in dom
    assert 'class="said" role="status" hidden' in dom and dom.count('class="verdict"') == 2


def test_limits(tmp_path):
    run = make_run(tmp_path / "run", steps=20, groups=9, keep_every=1, num_samples=8, length=40)
    limits = ExcerptLimits(max_steps=5, groups_per_step=3, samples_per_group=4, max_characters=100)
    data = Scripts(build_report(run, tmp_path / "out" / "page.html", limits).path.read_text()).data()
    assert [entry["step"] for entry in data["overview"]["rollouts"]] == [1, 6, 11, 15, 20]
    for step in (1, 6, 20):
        groups = data[f"rollouts-{step}"]
        # The one group without a signal, problem-0, gets no place while three others have a signal.
        assert [group["id"][:9] for group in groups] == ["problem-8", "problem-4", "problem-1"]
        assert all(len(group["samples"]) == 4 and group["count"] == 8 for group in groups)
        for sample in groups[0]["samples"]:
            assert sample["count"] == 40 and "characters left out" in sample["text"] and len(sample["text"]) < 150
        rewards = [sample["reward"] for sample in groups[0]["samples"]]
        assert rewards[0] == max(groups[0]["rewards"]) and rewards[-1] == min(groups[0]["rewards"])


def test_the_budget_holds(tmp_path):
    run = make_run(tmp_path / "run", steps=6, groups=9, keep_every=1, num_samples=16, length=300)
    whole = build_report(run, tmp_path / "whole.html").num_bytes
    bare = build_report(run, tmp_path / "bare.html", ExcerptLimits(max_steps=0)).num_bytes
    budget = (whole - bare) // 2
    small = build_report(run, tmp_path / "small.html", ExcerptLimits(max_mib=budget / 2**20))
    assert small.rollout_steps == 6 and bare < small.num_bytes < bare + 1.05 * budget
    data = Scripts(small.path.read_text()).data()
    assert all(data[f"rollouts-{step}"] for step in range(1, 7))


def test_metrics_without_rollouts_and_a_single_step(tmp_path):
    with MetricLogger(tmp_path / "run", sinks=()) as metrics:
        metrics.log(7, {"reward/mean": 0.5})
    report = build_report(tmp_path / "run")
    assert (report.steps, report.rollout_steps) == (7, 0)


def test_a_damaged_run_file_is_left_out(tmp_path, caplog):
    with MetricLogger(tmp_path / "run", sinks=()) as metrics:
        metrics.log(1, {"reward/mean": 0.5})
    (tmp_path / "run" / "run.json").write_text('{"id": "a')
    assert build_report(tmp_path / "run").steps == 1
    assert "run.json is damaged" in caplog.text


def test_report_omits_all_zero_failure_panels(tmp_path):
    def titles(failed):
        run = tmp_path / f"run-{failed}"
        with MetricLogger(run, sinks=()) as metrics:
            metrics.log(1, {"groups/used": 2.0, "groups/infra_failed": failed})
        overview = Scripts(build_report(run).path.read_text()).data()["overview"]
        return [panel["title"] for panel in overview["panels"]], [notice["text"] for notice in overview["notices"]]

    assert titles(0.0) == (["Groups"], [])
    assert titles(1.0) == (
        ["Groups", "Grading failures"],
        ["1 sample not graded: the grader or environment raised or crashed."],
    )


def test_a_damaged_rollout_file_is_left_out(tmp_path, caplog):
    run = make_run(tmp_path / "run")
    (run / "rollouts" / "step_000006.jsonl.gz").write_bytes(b"torn")
    report = build_report(run)
    assert report.rollout_steps == 3 and "step_000006" in caplog.text


def run_main(*words):
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.main(parser.parse_args(list(map(str, words))))


def test_command_line(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert run_main(run, "--out", tmp_path / "page.html") == 0
    assert "rollouts of 4 of 4 stored steps" in capsys.readouterr().out
    for words, message in (
        ((tmp_path / "nowhere",), "folder not found"),
        ((tmp_path,), "not the folder of a run, run.json is missing. Fix: name the output_dir"),
    ):
        with pytest.raises(ValueError, match=message):
            run_main(*words)


def test_report_import_does_not_load_tree_sitter():
    """tree-sitter is an extra. A report of another run must not need it."""
    code = "import sys, torchtune_ext.telemetry.report; print([name for name in sys.modules if 'matmul' in name or 'tree_sitter' in name])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
