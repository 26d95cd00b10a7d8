"""The tables of docs/reference/metrics.md and the panels of the report come from one registry, whose names tests/integration/
test_metrics_contract.py compares with real runs."""

from collections import Counter

from helpers.metric_names import documented, drawn, known_as
from torchtune_ext.grading.environments import FINISH_REASONS
from torchtune_ext.measured.check import OUTCOMES
from torchtune_ext.measured.matmul.rewards import FAILURES
from torchtune_ext.measured.matmul.stages import STAGES
from torchtune_ext.measured.results import NOISY
from torchtune_ext.telemetry.panels import PANELS, panels_for


def test_panels_and_docs_tables_have_same_names(repo_root):
    assert drawn() == documented(repo_root / "docs" / "reference" / "metrics.md")


def test_each_metric_has_one_short_meaning():
    metrics = [metric for panel in PANELS for metric in panel.metrics]
    assert set(Counter(metric.name for metric in metrics if metric.meaning).values()) == {1}
    assert {metric.name for metric in metrics if not metric.meaning} == {"time/save"}
    assert [cell for _, _, *cells in metrics for cell in cells if len(cell.split()) > 12] == []


def test_panel_note_joins_meanings_of_its_metrics():
    notes = {panel.title: panel.note for panel in panels_for(["reward/outcome_ok", "memory/rss_gib", "odd/x"])}
    assert notes == {
        "Outcomes of programs": "Fraction of graded programs with this outcome. Investigate if ok stays at 0.",
        "Memory": "Peak resident memory of the trainer; peak memory that the trainer allocated on its GPU.",
        "odd/x": "",
    }


def test_report_lists_all_episode_endings():
    names = [f"episode/{name}" for name in (*sorted(FINISH_REASONS), "turns", "forks", "no_response", "read_tokens")]
    panels = {panel.title: panel for panel in panels_for(names)}
    assert panels.keys() == {
        "Turns of a conversation", "Forks of a conversation", "Episodes without a response",
        "Tokens read in a conversation", "Endings of conversations",
    }  # fmt: skip
    endings = panels["Endings of conversations"]
    assert [name for name, _ in endings.series] == [f"episode/{ending}" for ending in FINISH_REASONS]
    # A run has environments or agents, so their failures share colors.
    for others in ("agent_", "environment_failed", "step_timeout"), ("agent_",):
        colors = [c for c, name in zip(endings.colors, FINISH_REASONS, strict=True) if not name.startswith(others)]
        assert len(set(colors)) == len(colors)
    assert endings.colors[-2:] == endings.colors[-4:-2]


def test_metric_matches_exact_name_or_longest_pattern():
    known = {"loss/*", "loss/total", "loss/clip_fraction_at_*"}
    assert known_as("loss/total", known) == "loss/total"
    assert known_as("loss/clip_fraction_at_16_255", known) == "loss/clip_fraction_at_*"
    assert known_as("loss/mine", known) == "loss/*"
    assert known_as("loss/mine/more", known) is None and known_as("gloss/mine", known) is None


def test_unknown_metrics_get_own_panels_last():
    panels = panels_for(["odd/b", "reward/length_penalty", "odd/a", "reward/mean"])
    assert [(panel.section, panel.series) for panel in panels] == [
        ("Learning", (("reward/mean", "reward"),)),
        ("Learning", (("reward/length_penalty", "length penalty"),)),
        ("Other", (("odd/a", "a"),)),
        ("Other", (("odd/b", "b"),)),
    ]


def test_measured_run_metric_panels_follow_matmul_order():
    """The panels name outcomes and stages themselves, since a report does without the packages that measured/matmul needs."""
    outcomes, stages = [*FAILURES, "ok", NOISY], list(STAGES)
    names = [f"reward/outcome_{outcome}" for outcome in sorted(outcomes)] + [f"stage/{name}" for name in sorted(stages)]
    names += [
        "stage/moves",
        "reward/gflops",
        "reward/speedup",
        "reward/peak_share",
        "reward/spread",
        "time/bench",
        "reward/speedup_spread",
    ]
    names += ["bench/noisy", "bench/cache_hits", "archive/cells", "archive/best_speedup", "reward/mine"]
    panels = panels_for(names)
    drawn_once = [metric for panel in panels for metric, _ in panel.series]
    assert sorted(drawn_once) == sorted(names) and {panel.section for panel in panels} == {
        "Learning", "Measured speed", "Archive"}  # fmt: skip
    by_title = {panel.title: panel for panel in panels}
    assert by_title["Reward parts"].series == (("reward/mine", "mine"),)
    shares, stage = by_title["Outcomes of programs"], by_title["Stages"]
    assert [metric for metric, _ in shares.series] == [f"reward/outcome_{outcome}" for outcome in outcomes]
    assert [metric for metric, _ in stage.series] == [f"stage/{name}" for name in stages]
    assert shares.style == stage.style == "stack" and sorted([*OUTCOMES, NOISY]) == sorted(outcomes)


def test_outcome_color_is_stable_when_others_are_missing():
    def colors(*outcomes):
        (panel,) = panels_for([f"reward/outcome_{outcome}" for outcome in outcomes])
        return dict(zip([label for _, label in panel.series], panel.colors, strict=True))

    whole = colors(*FAILURES, "ok")
    assert len(set(whole.values())) == 7
    assert colors("ok", "timeout") == {"timeout": whole["timeout"], "ok": whole["ok"]}
    assert list(colors("odd", "ok")) == ["ok", "odd"]
    assert panels_for(["reward/mine"])[0].colors == ()


def test_panels_require_their_metrics_and_band():
    around = ("eval/reward_sampled", "eval/low", "eval/high")
    assert panels_for(["reward/mean", "eval/low", "eval/high", "eval/reward_greedy"])[0].band is None
    assert panels_for([around[0], around[1]])[0].band is None
    assert panels_for(around)[0].band == around
    assert panels_for([]) == []


def test_metric_name_with_bracket_is_not_a_pattern():
    assert [panel.series for panel in panels_for(["odd/<b>"])] == [(("odd/<b>", "<b>"),)]


def test_first_panel_title_matches_available_metrics():
    """It stands above all others, also where a run has no evaluations, or is a warm-up."""
    for names, title in (
        (["reward/mean", "loss/total"], "Reward"),
        (["loss/nll", "optim/lr"], "Negative log-likelihood"),
    ):
        assert [panel.title for panel in panels_for(names) if panel.lead] == [title]
