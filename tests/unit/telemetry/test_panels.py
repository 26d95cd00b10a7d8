"""The report draws what docs/telemetry.md explains. That runs write the same is held by tests/integration/test_metrics_contract.py."""

import re

from metric_names import documented, drawn, known_as

from torchtune_ext.telemetry.panels import panels_for
from torchtune_ext.training.breakdown import NAMES


def test_the_report_draws_what_the_docs_explain(repo_root):
    assert drawn() == documented(repo_root / "docs" / "telemetry.md")


def test_the_docs_list_the_buckets_of_places_and_ages(repo_root):
    text = (repo_root / "docs" / "telemetry.md").read_text(encoding="utf-8")
    listed = {}
    for word, name in (("place", "at"), ("age", "age")):
        sentence = re.search(rf"`<{word}>` is [^:]+: ((?:`\w+`[,\s]*)+)", text)[1]
        listed[name] = [f"{name}_{bucket}" for bucket in re.findall(r"`(\w+)`", sentence)]
    assert listed["at"] + listed["age"] == NAMES


def test_a_name_is_known_by_itself_or_by_the_longest_that_it_fits():
    known = {"loss/*", "loss/total", "loss/clip_fraction_at_*"}
    assert known_as("loss/total", known) == "loss/total"
    assert known_as("loss/clip_fraction_at_16_255", known) == "loss/clip_fraction_at_*"
    assert known_as("loss/mine", known) == "loss/*"
    assert known_as("loss/mine/more", known) is None and known_as("gloss/mine", known) is None


def test_an_unknown_metric_comes_last_in_a_panel_of_its_own():
    panels = panels_for(["odd/b", "reward/length_penalty", "odd/a", "reward/mean"])
    assert [(panel.section, panel.series) for panel in panels] == [
        ("Learning", (("reward/mean", "mean"),)),
        ("Learning", (("reward/length_penalty", "length penalty"),)),
        ("Other", (("odd/a", "a"),)),
        ("Other", (("odd/b", "b"),)),
    ]


def test_a_band_needs_both_its_metrics_and_no_metrics_need_no_panel():
    assert panels_for(["reward/mean"])[0].band is None
    assert panels_for(["reward/mean", "reward/std"])[0].band == ("spread", "reward/mean", "reward/std")
    assert panels_for([]) == []
