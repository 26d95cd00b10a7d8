"""What the report finds worth a look, and which sections that opens."""

import pytest

from torchtune_ext.telemetry.findings import FOLDED_SECTIONS, collect_findings, read_curves
from torchtune_ext.telemetry.panels import panels_for
from torchtune_ext.telemetry.report_header import RunStatus

DONE = RunStatus("finished", "finished, 40 steps", 40, 40)


def texts(metrics, config=None, state=DONE, steps=40):
    """Findings of a run in which each metric is a constant, or a function of the step."""
    records = [
        {"step": step, **{name: value(step) if callable(value) else value for name, value in metrics.items()}}
        for step in range(1, steps + 1)
    ]
    return [(item.text, item.section) for item in findings_of(records, config or {}, state)]


def findings_of(records, config, state):
    names = sorted({name for record in records for name in record} - {"step", "nonfinite"})
    series = {name: [record.get(name) for record in records] for name in names}
    series = {name: values for name, values in series.items() if set(values) != {None}}
    panels = panels_for(names)
    curves = read_curves(series, [record["step"] for record in records], panels)
    return collect_findings(records, curves, panels, config, state)


HEALTHY = {
    "groups/used": 20.0, "groups/no_signal": 12.0, "groups/infra_failed": 0.0, "length/truncated": 0.1,
    "mismatch/mean_abs": 0.01, "mismatch/ess": 0.99, "canary/update_applied": 1.1, "canary/adapter_applied": None,
    "engines/restarts": 0.0, "engine/preemptions": 3.0,
    "time/sample": lambda step: 60.0 if step == 1 else 2.0, "time/train": 3.0, "time/save": lambda step: 20.0 * (step % 10 == 0),
}  # fmt: skip


def test_findings_of_healthy_run_are_empty():
    assert texts(HEALTHY, {"max_mismatch": 0.05}) == []
    assert texts({"reward/mean": 0.5}) == texts({}) == []


@pytest.mark.parametrize(
    "change, words, section",
    [
        ({"groups/infra_failed": 1.0}, "40 samples not graded", "Learning"),
        ({"problems/skipped": lambda step: step // 20}, "2 problems skipped: invalid, or too long", "Learning"),
        ({"eval/skipped": 1.0}, "1 held-out problem skipped", "Learning"),
        (
            {"groups/used": lambda step: 20.0 * (step not in (4, 7))},
            "2 steps had only zero-variance groups, so the rewards gave no gradient, first at step 4: check the grader",
            "Learning",
        ),
        ({"length/truncated": 0.25}, "25% of the latest samples were truncated at sampling.max_tokens", "Learning"),
        ({"engines/restarts": lambda step: float(step > 30)}, "restarted 1 time.", "Machine"),
        ({"engines/retired": lambda step: float(step > 20)}, "1 engine failed too often", "Machine"),
        ({"mismatch/mean_abs": 0.046}, "mismatch is 0.046 nats (first 0.046)", "Trainer/engine mismatch"),
        (
            {"mismatch/mean_abs": lambda step: 0.002 + 0.0002 * step},
            "the limit without the margin for chance is 0.05",
            "Trainer/engine mismatch",
        ),
        (
            {"reward/mean": lambda step: 0.07 + 0.002 * step, "reward/solved": 0.0},
            "rose from 0.075 to 0.147, but the fraction of solved problems did not rise (0.0%, then 0.0%)",
            "Learning",
        ),
        ({"mismatch/ess": 0.89}, "89% of the tokens", "Trainer/engine mismatch"),
        (
            {"canary/update_applied": 0.1},
            "reproduces 10% of the log-prob change of the last step",
            "Trainer/engine mismatch",
        ),
        (
            {"canary/adapter_applied": 1.6},
            "reproduces 160% of the log-prob change of the adapter",
            "Trainer/engine mismatch",
        ),
        (
            {"time/train": lambda step: 3.0 + 25.0 * (step in (7, 9)) + 2.0 * (step == 9)},
            "2 steps took more than 3 times the median of 5.0 s. The longest is step 9 with 32.0 s; the "
            "phase train accounts for most of the excess.",
            "Speed",
        ),
    ],
)
def test_findings_problem_appears_in_its_section(change, words, section):
    ((text, there),) = texts(HEALTHY | change, {"max_mismatch": 0.05})
    assert words in text and there == section
    assert section in ("Learning", *FOLDED_SECTIONS)


def test_findings_rising_reward_with_its_target_is_healthy():
    rising = {"reward/mean": lambda step: 0.07 + 0.002 * step}
    assert texts(HEALTHY | rising) == texts(HEALTHY | rising | {"eval/solved_sampled": lambda step: 0.001 * step}) == []
    assert texts(HEALTHY | {"reward/mean": 0.3, "reward/solved": 0.0}) == []


def test_findings_teacher_needs_no_reward_signal():
    silent = HEALTHY | {"groups/used": lambda step: 20.0 * (step > 1)}
    assert len(texts(silent)) == 1 and texts(silent | {"loss/kl_teacher": 0.5}) == []


def test_findings_mismatch_limit_ignores_older_policy_tokens():
    ahead = HEALTHY | {"async/staleness_mean": 1.0, "mismatch/mean_abs": 0.04, "mismatch/mean_abs_staleness_0": 0.001}
    assert texts(ahead, {"max_mismatch": 0.05}) == []
    assert len(texts(ahead | {"mismatch/mean_abs_staleness_0": 0.046}, {"max_mismatch": 0.05})) == 1


def test_findings_nonfinite_metric_links_to_its_section():
    records = [{"step": 3, "nonfinite": ["mismatch/k1", "odd/x"], "mismatch/k1": None, "odd/x": None}]
    items = findings_of(records, {}, DONE)
    assert [(item.text[:27], item.section) for item in items] == [
        ("mismatch/k1 was not finite ", "Trainer/engine mismatch"), ("odd/x was not finite at 1 s", "Other")]  # fmt: skip


def test_findings_early_end_is_listed_first():
    stopped = RunStatus("stopped", "", 40, 100)
    items = texts(HEALTHY | {"mismatch/ess": 0.5}, state=stopped)
    assert items[0] == ("The run ended at step 40 of 100: it crashed or was stopped.", "") and len(items) == 2
    (onward,) = texts({}, {"resume_from_checkpoint": False}, stopped)
    assert onward[0].endswith(" Resume it with resume_from_checkpoint=True.")


def test_findings_report_zero_variance_group_share():
    ((text, section),) = texts({"groups/used": 16.0, "groups/no_signal": 48.0})
    assert text == "75% of the latest groups are zero-variance groups: their problems are too easy or too hard."
    assert section == "Learning"
