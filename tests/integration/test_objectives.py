"""benchmarks/objectives.py on samples of an older policy: what is held equal, what the tables say of given runs, and real runs."""

from collections import Counter
from dataclasses import asdict
from statistics import mean, stdev

import objectives
import objectives_stale as stale
from objectives_report import Result
from omegaconf import OmegaConf

from torchtune_ext.recipes import grpo
from torchtune_ext.run.catalog import package_folder
from torchtune_ext.settings.config import load_config


def settings(run):
    """All that the recipe gets, as a flat dict."""
    words = [*run.words, "output_dir=x", "model_dir=x", f"updates_per_step={run.updates}"]
    file = OmegaConf.load(package_folder("configs") / "grpo" / "tiny_arithmetic.yaml")
    cfg = load_config(grpo.Config, OmegaConf.merge(file, OmegaConf.from_dotlist(words)))
    values = asdict(cfg)
    return values | {f"loss.{key}": value for key, value in values.pop("loss").items()}


def test_stale_plan_runs_differ_only_in_staleness_correction(tmp_path):
    runs = objectives.plan_stale(tmp_path, list(objectives.CORRECTIONS), [1, 4], [0, 1, 2, 3, 4])
    assert Counter(run.staleness for run in runs) == {0: 5, 1: 25, 4: 25}
    assert len({run.folder for run in runs}) == len(runs) == 55
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    base, *others = map(settings, runs[:11])
    assert (base["staleness"], base["prefetch_steps"]) == (0, 0)
    corrections = set()
    for other in others:
        changed = {key: other.get(key) for key in base | other if base.get(key) != other.get(key)}
        assert changed.pop("staleness") == changed.pop("prefetch_steps") in (1, 4)
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
    assert f"| 4 | TIS | 3 | {mean(same):+.3f} ± {4.303 * stdev(same) / 3**0.5:.3f}, not significant | " in lines[3]
    assert len(lines) == 4
    lines = stale.differences(rows, 0).splitlines()
    assert lines[2].startswith("| 4 | decoupled | 1 | -0.300, one seed | ") and len(lines) == 5
