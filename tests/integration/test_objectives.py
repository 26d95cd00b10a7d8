"""benchmarks/objectives.py on samples of an older policy: what is held equal, what the tables say of given runs, and real runs."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from statistics import mean, stdev

import objectives
import objectives_stale as stale
import pytest
from objectives_report import Result
from omegaconf import OmegaConf
from records import sampled

from torchtune_ext.groups import Group
from torchtune_ext.recipes import grpo
from torchtune_ext.run.catalog import folder
from torchtune_ext.settings.config import load_config
from torchtune_ext.tasks.task import Problem
from torchtune_ext.telemetry.rollouts import RolloutStore


def settings(run):
    """All that the recipe gets, as a flat dict."""
    words = [*run.words, "output_dir=x", "model_dir=x", f"updates_per_step={run.updates}"]
    file = OmegaConf.load(folder("configs") / "grpo" / "tiny_arithmetic.yaml")
    cfg = load_config(grpo.Config, OmegaConf.merge(file, OmegaConf.from_dotlist(words)))
    values = asdict(cfg)
    return values | {f"loss.{key}": value for key, value in values.pop("loss").items()}


def test_runs_of_the_other_comparison(tmp_path):
    """Their folders keep their names, so that what was measured is found again; on-policy only distinct methods have all seeds."""
    runs = objectives.plan(tmp_path, list(objectives.METHODS), [1, 4], [0, 1, 2, 3, 4])
    names = {run.folder.name: run for run in runs}
    assert len(names) == len(runs) == 5 * 9 + 5 * 4 + 1 * 5
    assert names["atr_grpo_0.02_u4_s3"].words == ("preset=atr_grpo", "loss.delta=0.02")
    assert "gspo_u1_s0" in names and "gspo_u1_s1" not in names


def test_runs_on_old_samples_differ_in_age_and_correction_alone(tmp_path):
    runs = objectives.plan_stale(tmp_path, list(objectives.CORRECTIONS), [1, 4], [0, 1, 2, 3, 4])
    assert Counter(run.staleness for run in runs) == {0: 5, 1: 25, 4: 25}
    assert len({run.folder for run in runs}) == len(runs) == 55
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    base, *others = map(settings, runs[:11])
    assert (base["staleness"], base["depth"]) == (0, 0)
    corrections = set()
    for other in others:
        changed = {key: other.get(key) for key in base | other if base.get(key) != other.get(key)}
        assert changed.pop("staleness") == changed.pop("depth") in (1, 4)
        corrections.add(tuple(sorted(changed.items())))
    assert corrections == {
        (),
        (("loss.old", "interpolated"),),
        (("loss.importance", "tis"),),
        (("loss.importance", "none"),),
        (("loss.importance", "none"), ("loss.old", "sampler")),
    }


def result(tmp_path, method, staleness, seed, last, rewards=(0.2, 0.4)):
    run = objectives.Run(method, 4, seed, tmp_path / f"{method}{staleness}{seed}", (), staleness)
    return Result(run, dict.fromkeys(stale.COLUMNS, 0.5) | {"sampled": last}, list(rewards))


def test_the_tables_of_given_runs(tmp_path):
    """Every figure is worked out here: paired differences with Student's t at two degrees of freedom, and what they tell."""
    base, none, tis = [0.50, 0.60, 0.70], [0.30, 0.42, 0.48], [0.52, 0.55, 0.74]
    rows = [result(tmp_path, "decoupled", 4, seed, value) for seed, value in enumerate(base)]
    rows += [result(tmp_path, "none", 4, seed, value, [0.5] * 10 + [0.1] * 10) for seed, value in enumerate(none)]
    rows += [result(tmp_path, "TIS", 4, seed, value) for seed, value in enumerate(tis)]
    rows += [result(tmp_path, "decoupled", 0, 0, 0.8)]

    lines = stale.table(rows).splitlines()
    assert [line.split(" | ")[:3] for line in lines[2:]] == [
        ["| 0", "decoupled", "1"], ["| 4", "decoupled", "3"], ["| 4", "none", "3"], ["| 4", "TIS", "3"],
    ]  # fmt: skip
    assert f"| {mean(base):.3f} ± {4.303 * stdev(base) / 3**0.5:.3f} |" in lines[3]
    assert lines[3].endswith("| 0 of 3 |") and lines[4].endswith("| 3 of 3 |")

    lost = [b - a for a, b in zip(base, none, strict=True)]
    same = [b - a for a, b in zip(base, tis, strict=True)]
    lines = stale.differences(rows, None).splitlines()
    assert lines[2].startswith(f"| 4 | none | 3 | {mean(lost):+.3f} ± {4.303 * stdev(lost) / 3**0.5:.3f} | ")
    assert f"| 4 | TIS | 3 | {mean(same):+.3f} ± {4.303 * stdev(same) / 3**0.5:.3f}, not told apart | " in lines[3]
    assert len(lines) == 4
    lines = stale.differences(rows, 0).splitlines()
    assert lines[2].startswith("| 4 | decoupled | 1 | -0.300, one seed | ") and len(lines) == 5


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.3] * 10 + [0.6] * 10, False),
        ([0.3] * 10 + [0.6] * 10 + [0.31] * 10, False),
        ([0.2] * 10 + [0.6] * 10 + [0.29] * 10, True),
        ([0.3] * 10 + [0.29] * 10, True),
        ([0.3], False),
    ],
)
def test_collapsed(rewards, expected):
    assert stale.collapsed(rewards) == expected


def test_the_age_of_the_tokens_is_that_of_the_step_that_trains_them(tmp_path):
    """Step 1 trains version 0: ages 0 and 0. Step 3 trains version 2: ages 2, 2 and 1."""
    store = RolloutStore(tmp_path)
    for step, versions in ((1, [0, 0]), (3, [0, 0, 1])):
        sample = sampled([5] * len(versions), versions=versions)
        problem = Problem("p", ({"role": "user", "content": "?"},), 1)
        store.write(step, [Group(problem, sample.completion.tokens, (sample,))])
    assert stale.token_age(tmp_path) == 1.0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_old_samples_in_small(repo_root, tmp_path):
    """Two real runs on sums of two digits: every group is one version old, and what is done is not done again."""
    out, easy = tmp_path / "stale", ("task.level=1", "num_problems=3200", "schedule.warmup=10")
    objectives.warm_up(out, 1, {name: (*words, *easy) for name, words in objectives.STALE_WARM_UPS.items()})
    command = [sys.executable, str(repo_root / "benchmarks" / "objectives.py"), "--out", str(tmp_path), "--jobs", "2"]
    command += ["--staleness", "1", "--methods", "none", "--seeds", "0", "--grpo", "task.level=1", "max_steps=5"]
    command += ["prompts_per_step=8", "evaluation.task.count=4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "stale" / "table.md").read_text() in done.stdout and (out / "stale.png").is_file()
    assert "| 0 | decoupled | 1 |" in done.stdout and "| 1 | none | 1 |" in done.stdout
    assert "nan" not in done.stdout
    lines = [json.loads(line) for line in (out / "none_k1_s0" / "metrics.jsonl").read_text().splitlines()]
    assert [line["async/age_mean"] for line in lines if "async/age_mean" in line] == [0.0, 1.0, 1.0, 1.0, 1.0]
    again = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert again.returncode == 0 and again.stdout == done.stdout
    assert "none_k1_s0: " in done.stderr and "none_k1_s0: " not in again.stderr
