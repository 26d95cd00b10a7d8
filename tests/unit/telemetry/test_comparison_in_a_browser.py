"""The page of several runs as a reader sees it: two settings with two seeds each, hostile texts, a sweep, and thirty runs."""

import pytest

from helpers.compared_runs import make_one, make_sweep, settings
from helpers.pages import MISSING, WIDTHS, opened
from helpers.report_runs import HOSTILE
from torchtune_ext.telemetry.comparison import build_comparison

pytestmark = [pytest.mark.rest, pytest.mark.skipif(MISSING, reason="needs chromium")]

BEFORE = """
  const order = ["notices", "runs", "legend", "lead", "front", "charts"].map((id) => document.getElementById(id)?.offsetTop).filter((top) => top != null);
  const open = [...document.querySelectorAll("#front figure, #lead figure")].length;
  for (const node of document.querySelectorAll("details")) node.open = true;
  await settled();
  const scaled = [...document.querySelectorAll(".plot svg")].filter((node) => !fits(node)).length;
  const svgs = [...document.querySelectorAll(".plot svg")], box = (node) => node.getBoundingClientRect();
  const apart = (a, b) => a.bottom <= b.top + 1 || b.bottom <= a.top + 1 || a.right <= b.left + 1 || b.right <= a.left + 1;
  const beside = [...document.querySelectorAll("figure")].every((node) => !node.querySelector(".legend") || apart(box(node.querySelector(".legend")), box(node.querySelector(".plot"))));
  const lines = () => document.querySelectorAll("#lead .series").length, before = lines();
  document.querySelector("#legend .setting").click();
  const without = lines();
  document.querySelector("#legend .setting").click();
  const plot = document.querySelector("#lead .plot svg"), middle = box(plot);
  plot.dispatchEvent(new PointerEvent("pointermove", { clientX: middle.left + middle.width / 2, clientY: middle.top + middle.height / 2, bubbles: true }));
  const readouts = [...document.querySelectorAll("figure h3 .at")].map((node) => node.textContent);
  plot.dispatchEvent(new PointerEvent("pointerleave"));
"""
PROBE = """
    order, open, beside, before, without, readouts,
    scaled,
    empty: svgs.filter((node) => !node.querySelector("path, circle")).length,
    title: document.title, notices: text("#notices"), nav: text("#nav"), images: document.images.length,
    bands: document.querySelectorAll("#lead .band").length,
    legend: [...document.querySelectorAll("#legend .setting")].map((node) => [node.textContent, node.getAttribute("aria-pressed")]),
    rows: [...document.querySelectorAll("#runs tbody tr")].map((row) => [...row.children].map((cell) => cell.textContent)),
    requests: performance.getEntriesByType("resource").map((entry) => entry.name),
"""


def show(page):
    copies, console = opened(page, PROBE, BEFORE)
    assert copies.keys() == {(width, theme) for width in WIDTHS for theme in ("light", "dark")}
    assert "CONSOLE" not in console
    for copy in copies.values():
        assert copy["faults"] == [] and copy["trouble"] and copy["over"] <= 0, copy
        assert copy["requests"] == [] and copy["images"] == 0, "no request leaves the file"
        assert copy["scaled"] == copy["empty"] == 0, "each chart is drawn for its width, and has something in it"
        assert copy["beside"], "no legend lies over the data"
        assert copy["order"] == sorted(copy["order"]), "what tells most stands first"
        assert len(set(copy["readouts"])) == 1 and copy["readouts"][0].startswith("step "), "one cursor for all charts"
    return copies


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("browser")


def test_two_settings_with_seeds(folder):
    runs = [make_one(folder / f"two/r{i}", settings(lr, seed), level=level + 0.02 * seed, hostile=True)
            for i, (lr, seed, level) in enumerate([(1e-6, 0, 0.6), (1e-6, 1, 0.6), (3e-6, 0, 0.75), (3e-6, 1, 0.75)])]  # fmt: skip
    for copy in show(build_comparison(runs, folder / "two.html").path).values():
        assert copy["rows"][0] == ["D", "1", "3e-06", "0.7559", "0.7059 to 0.8059", "r3"] and len(copy["rows"]) == 4
        assert copy["bands"] == 4
        assert (copy["before"], copy["without"]) == (4, 3), "a click in the legend turns a run off"
        assert copy["legend"][0] == ["Dseed 1, lr 3e-06", "true"]


def test_a_sweep(folder):
    page = build_comparison([make_sweep(folder / "sweep")]).path
    assert page == folder / "sweep" / "report.html"
    for copy in show(page).values():
        assert copy["notices"].count("loss is not finite") == 2 and HOSTILE in copy["notices"]
        assert copy["title"] == "tiny_lr · torchtune-ext"
        assert copy["rows"][0][0] == "F"


def test_thirty_runs(folder):
    for i in range(30):
        make_one(
            folder / f"thirty/r{i:02}",
            settings(1e-6 * (i + 1)),
            steps=20 + i,
            every=10,
            level=0.4 + 0.01 * i,
            rollouts=False,
        )
    for copy in show(build_comparison([folder / "thirty"]).path).values():
        assert [on for _, on in copy["legend"]].count("true") == 8, "the best ones are drawn, others a click away"
        assert (copy["before"], copy["without"]) == (8, 7)
        assert len(copy["rows"]) == 30
