"""The report as a reader sees it: narrow and wide, light and dark, in one start of a browser that shows six copies of a page."""

import json
from dataclasses import replace

import numpy as np
import pytest

from helpers.pages import MISSING, WIDTHS, opened
from helpers.records import make_guess_conversation
from helpers.report_runs import HOSTILE, make_run
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.pipeline.rollout_store import encode_rollouts, read_rollouts, rollout_paths
from torchtune_ext.tasks.task import Problem
from torchtune_ext.telemetry.metrics import MetricLogger
from torchtune_ext.telemetry.report import build_report

pytestmark = pytest.mark.skipif(MISSING, reason="needs chromium")

STEPS = 60

BEFORE = """
  const order = ["about", "notices", "tiles", "lead", "pair", "charts", "rollouts", "configuration"].map((id) => document.getElementById(id).offsetTop);
  const folded = [...document.querySelectorAll("details.section:not([open])")].map((node) => node.id);
  for (const node of document.querySelectorAll("details")) node.open = true;
  await settled();
  const legend = (title) => [...document.querySelectorAll("figure")].find((node) => node.querySelector("h3").textContent.startsWith(title));
  const read = () => [...document.querySelector(".detail-pane .sample").querySelectorAll(".turn")].map((row) => [
    row.classList.contains("answer"), row.querySelector(".role").textContent, row.querySelector("pre").textContent,
    row.querySelector(".earned")?.textContent ?? "", row.querySelectorAll("[style]").length]);
  document.querySelector(`.group[data-id="game"]`).click();
  const turns = read(), ending = document.querySelector(".detail-pane .bar").textContent;
"""
PROBE = """
    order, folded,
    plots: [...document.querySelectorAll(".plot")].map((node) => node.querySelectorAll("path, circle, rect").length),
    state: text("#state"), about: text("#about"), notices: text("#notices"), said: text(".said"),
    tiles: Object.fromEntries([...document.querySelectorAll(".tile")].map((tile) => [tile.dataset.metric, [tile.querySelector("b").textContent, tile.querySelector(".note").textContent]])),
    wrapped: [...document.querySelectorAll(".tile .value")].filter((node) => node.offsetHeight > 1.4 * node.querySelector("b").offsetHeight).length,
    legends: Object.fromEntries(["Reward", "Completion length", "Entropy"].map((title) => [title, [...legend(title).querySelectorAll(".number")].map((node) => node.textContent)])),
    when: legend("Entropy").querySelector(".at").textContent, lead: legend("Reward").querySelector("svg").getBoundingClientRect().height,
    pair: [...document.querySelectorAll("#pair .sample")].map((node) => [node.querySelector(".verdict").textContent, node.querySelector(".reward").textContent, node.querySelector("pre").textContent]),
    turns, ending,
    groups: [...document.querySelectorAll(".group")].map((node) => node.classList.contains("silent")),
"""


def conversation():
    """Two turns; the first answer tries to break the page."""
    sample = make_guess_conversation("max_turns", turns=(55, 58), advantage=1.0, in_loss=True)
    first, answer, second = sample.messages
    messages = first, {**answer, "content": HOSTILE}, second
    return replace(sample, messages=messages, text="\n".join(f"{m['role']}: {m['content']}" for m in messages))


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What six copies of the page of one run tell, by width and theme, and what the browser wrote on its console."""
    folder = tmp_path_factory.mktemp("browser")
    run = make_run(folder / "run", keep_every=6, steps=STEPS, groups=5)
    (run / "metrics.jsonl").unlink()
    config = {
        "max_steps": 200,
        "preset": "dapo",
        "optimizer": {"lr": 2e-6},
        "model_dir": "models/Qwen2.5-7B-Instruct",
        "max_mismatch": 0.05,
    }
    (run / "run.json").write_text(json.dumps({"id": "ab", "name": "run", "config": config}))
    with MetricLogger(run, sinks=()) as metrics:
        for step in range(STEPS + 1):
            values = {
                "reward/mean": step / 100, "reward/std": 0.3, "reward/accuracy": 0.5, "length/mean": 10.0 + step, "length/max": 90.0,
                "length/truncated": 0.01, "groups/used": 6.0, "groups/no_signal": 2.0, "loss/entropy": 1 / (1 + step), "loss/total": 0.0,
                "loss/kl_ref": 0.1, "loss/clip_fraction": 0.01, "loss/ratio_max": 2.0, "optim/lr": 2e-6, "optim/grad_norm": 1.0, "mismatch/mean_abs": 0.01 + step / 2000, "mismatch/k1": 0.01,
                "engines/restarts": 0.0, "engine/kv_max": 0.5, "memory/rss_gib": 1.0, "publish/bytes": 1e9, "time/step": 5.0, "pack/rho": 4.0,
            }  # fmt: skip
            if step % 20 == 0:
                low = 0.4 + step / 200
                values |= {
                    "eval/reward_sampled": low + 0.05,
                    "eval/low": low,
                    "eval/high": low + 0.1,
                    "eval/solved_sampled": 0.2,
                }
            metrics.log(step, values)
    stored = rollout_paths(run)[42]
    game = Group(Problem("game", ({"role": "user", "content": HOSTILE},), 58), np.arange(3), (conversation(),))
    stored.write_bytes(encode_rollouts(42, [*read_rollouts(stored), game]))
    page = build_report(run, folder / "page.html").path
    return opened(page, PROBE, BEFORE, place="&step=40")


def test_it_fits_narrow_and_wide_light_and_dark(shown):
    copies, console = shown
    assert copies.keys() == {(width, theme) for width in WIDTHS for theme in ("light", "dark")}
    assert "CONSOLE" not in console
    for copy in copies.values():
        assert copy["faults"] == [] and copy["trouble"] and copy["over"] <= 0, copy
        assert all(copy["plots"]) and (copy["width"] == WIDTHS[0] or not copy["wrapped"]), copy
        assert copy["order"] == sorted(copy["order"]), "what tells most stands first"


def test_browser_tile_shows_value_of_its_legend(shown):
    for copy in shown[0].values():
        tiles, legends = copy["tiles"], copy["legends"]
        # A tenth of 61 steps are six: 55 to 60.
        assert tiles["reward/mean"] == ["0.575", "mean of steps 55–60"] and legends["Reward"][0] == "0.575"
        assert tiles["eval/reward_sampled"] == ["0.75", "step 60 · 95% interval 0.7 to 0.8"]
        assert legends["Reward"][1] == "0.75 at step 60"
        assert tiles["length/mean"][0] == legends["Completion length"][0] == "68"
        assert tiles["loss/entropy"][0] == legends["Entropy"][0] and copy["when"] == "mean of steps 55–60"
        assert copy["lead"] >= 220


def test_browser_report_shows_run_identity_and_findings(shown):
    for copy in shown[0].values():
        assert copy["state"] == "stopped at step 60 of 200"
        assert all(words in copy["about"] for words in ("Qwen2.5-7B-Instruct", "dapo", "2e-06", "5 min"))
        assert "The run ended at step 60 of 200" in copy["notices"] and "nats (first 0.01" in copy["notices"]
        # A finding concerns the agreement, and none the speed or the machine.
        assert copy["folded"] == ["section-speed", "section-machine"]


def test_browser_report_shows_samples_and_missing_steps(shown):
    for copy in shown[0].values():
        good, bad = copy["pair"]
        assert (good[0], bad[0]) == ("highest advantage", "lowest advantage") and float(good[1]) > float(bad[1])
        assert good[2].startswith("sample ") and "</script>" in good[2]
        assert copy["said"] == "The rollouts of step 40 are not in this page; step 42 is shown instead."
        assert copy["groups"] == [False] * 5 + [True], "groups with a signal come first"


def test_a_conversation_stands_there_turn_by_turn(shown):
    for copy in shown[0].values():
        assert copy["turns"] == [
            [False, "assistant", "55", "0.000", 0], [True, "user", HOSTILE, "", 0], [False, "assistant", "58", "1.000", 0],
        ]  # fmt: skip
        assert all(words in copy["ending"] for words in ("max turns", "2 turns", "6 tokens", "log-prob -2"))
