"""The archive in the report: every cell is there once, programs stay text, and a run without an archive loses nothing."""

import base64
import gzip
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
from archives import MACHINE, made_up_entries

from torchtune_ext.measured.matmul.archive import FILE, Archive
from torchtune_ext.run.errors import Mistake
from torchtune_ext.telemetry.metrics import Metrics
from torchtune_ext.telemetry.report import archive_of, build_report

HOSTILE = "</script></pre><script>document.title='broken'</script><!-- <img src=x onerror=\"document.title='broken'\"> {{js}} \u2028\ud800"
ELSEWHERE = "another machine <b>"


def make_run(folder, entries, steps=12, **metrics):
    with Metrics(folder, sinks=()) as lines:
        for step in range(1, steps + 1):
            lines.log(
                step, {"reward/mean": step / steps, **{name: values[step - 1] for name, values in metrics.items()}}
            )
    Archive(entries).save(folder / FILE)
    return folder


def blob(page, name):
    found = re.search(rf'<script type="text/plain" id="{name}">([^<]*)</script>', page)
    return None if found is None else json.loads(gzip.decompress(base64.b64decode(found[1])))


def entries():
    here = made_up_entries(30, steps=12)
    here[7] = replace(here[7], source=HOSTILE + here[7].source, ratio=200.0)  # surely an elite
    return here + made_up_entries(10, steps=12, seed=1, machine=ELSEWHERE, kernels=("gemv", "stencil"))


def test_every_elite_is_there_once_the_fastest_first(tmp_path):
    archive = Archive(entries())
    archive.save(tmp_path / FILE)
    tables = archive_of(tmp_path / FILE)
    assert [(table["kernel"], table["size"], table["machine"]) for table in tables] == [
        ("dgemm", "m=256 n=256 k=256", MACHINE), ("gemv", "n=4096", ELSEWHERE), ("stencil", "n=4096", ELSEWHERE)]  # fmt: skip
    shown = [(table, program) for table in tables for program in table["programs"]]
    for table in tables:
        lows = [program["low"] for program in table["programs"]]
        assert lows == sorted(lows, reverse=True)
    elites = {entry.source: entry for entry in archive}
    assert {program["source"] for _, program in shown} == elites.keys() and len(shown) == len(archive)
    for table, program in shown:
        entry = elites[program["source"]]
        assert (table["machine"], table["kernel"]) == (entry.machine, entry.kernel)
        assert program["techniques"] == (", ".join(entry.techniques).replace("_", " ") or "none")
        assert all(program[name] == getattr(entry, name) for name in ("ratio", "low", "high", "gflops", "found"))


def test_a_run_without_an_archive_has_the_rest(tmp_path):
    run = make_run(tmp_path / "run", entries())
    assert len(blob(build_report(run).path.read_text(), "archive")) == 3
    (run / FILE).write_bytes((run / FILE).read_bytes()[:-40])
    with pytest.raises(Mistake, match="archive.jsonl: damaged .*; delete it"):
        build_report(run)
    (run / FILE).unlink()
    page = build_report(run).path.read_text()
    assert blob(page, "archive") is None and blob(page, "overview")["steps"] == list(range(1, 13))


def test_a_report_does_without_what_programs_are_read_with():
    """tree-sitter is an extra. A report of another run must not need it."""
    code = "import sys, torchtune_ext.telemetry.report; print([name for name in sys.modules if 'matmul' in name or 'tree_sitter' in name])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_program_cannot_break_the_page(tmp_path):
    page = build_report(make_run(tmp_path / "run", entries())).path.read_text()
    assert "<img" not in page and "document.title='broken'" not in page and ELSEWHERE not in page
    assert any(HOSTILE in program["source"] for table in blob(page, "archive") for program in table["programs"])


# Opens every program, and tells which was shown.
CLICKS = """<script>setTimeout(() => {
  const say = (id, text) => { const node = document.createElement("pre"); node.id = id; node.textContent = text; document.body.append(node); };
  const sources = [...document.querySelectorAll(".source details")].map((details) => {
    details.querySelector("summary").click();
    const cells = [...details.closest("tr").children].map((cell) => cell.textContent), program = details.querySelector("pre"), text = program.textContent;
    program.textContent = ""; // chromium cannot print half of a surrogate pair
    return [cells.slice(0, 5), details.open, text];
  });
  say("wide", document.documentElement.scrollWidth <= innerWidth);
  say("sources", btoa(unescape(encodeURIComponent(JSON.stringify(sources).replace(/\\\\ud800/g, "?")))));
}, 1500);</script></body>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("width", [500, 1600])
def test_a_browser_opens_every_program(tmp_path, width):
    run = make_run(tmp_path / "run", entries(), **{"archive/cells": [float(step) for step in range(12)]})
    page = build_report(run).path
    page.write_text(page.read_text().replace("</body>", CLICKS))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", f"--window-size={width},900",
               f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=5000", "--enable-logging=stderr", "--dump-dom",
               f"file://{page}"]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "CONSOLE" not in ended.stderr
    said = dict(re.findall(r'<pre id="(\w+)">(.*?)</pre>', ended.stdout))
    dom = re.sub(r"<script.*?</script>", "", ended.stdout, flags=re.DOTALL)
    assert (
        "<title>run · torchtune-ext</title>" in dom
        and "<img" not in dom
        and 'id="trouble" class="notice" hidden' in dom
    )
    assert said["wide"] == "true"
    shown = json.loads(base64.b64decode(said["sources"]))
    elites = {entry.source.replace("\ud800", "?"): entry for entry in Archive(entries())}
    assert len(shown) == len(Archive(entries()))
    for (techniques, *_, gflops, found), is_open, source in shown:
        entry = elites[source]
        assert is_open and techniques == (", ".join(entry.techniques).replace("_", " ") or "none")
        assert found == str(entry.found) and float(gflops) == pytest.approx(entry.gflops, rel=5e-3)
