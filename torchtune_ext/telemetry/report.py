"""`torchtune-ext report RUN` makes one HTML file with the curves of a run and a browser of its rollouts.

Of several runs, or of a sweep, `telemetry.comparison` makes the page.
"""

import argparse
import logging
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torchtune_ext.run.errors import Mistake
from torchtune_ext.run.folder import checkpoint_folders
from torchtune_ext.telemetry.comparison import build_comparison
from torchtune_ext.telemetry.excerpts import Excerpts, Limits, excerpts_of, pack, short
from torchtune_ext.telemetry.findings import FOLDED, findings
from torchtune_ext.telemetry.heading import facts, flat, origin, state_of
from torchtune_ext.telemetry.metrics import read_metrics
from torchtune_ext.telemetry.page_file import page_of, write_page
from torchtune_ext.telemetry.panels import Panel, panels_for
from torchtune_ext.telemetry.pieces import TokenPieces, cut_text
from torchtune_ext.telemetry.readings import PART, readings, tiles
from torchtune_ext.telemetry.rollouts import rollout_paths
from torchtune_ext.telemetry.runs import is_several, record_of
from torchtune_ext.telemetry.timeline import FILE as TRACE
from torchtune_ext.telemetry.timeline import read_trace, strip_of

log = logging.getLogger(__name__)

SCRIPTS = ("charts", "shell", "strip", "archive", "rollouts", "main")  # of the page, in this order
CELLS = "archive/cells"
COUNTED = "By the steps that found the programs. Of a cell whose program was replaced, only the later program is known."
ARCHIVE = "archive.jsonl"
MAX_CHARACTERS = 16_000  # of a program
MAX_TOGETHER = 4_000_000  # characters of all programs in a page
MAX_BANDS = 16  # of a picture; where the speeds lie farther apart, bands without a program are left out


@dataclass(frozen=True, slots=True)
class Report:
    """This says what was written."""

    path: Path
    num_bytes: int
    steps: int  # the newest one with metrics
    rollout_steps: int  # how many have rollouts in the page
    stored_steps: int  # how many have rollouts in the run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    several = "several are compared, also those of a sweep's folder, or of one that holds runs"
    parser.add_argument("runs", metavar="RUN", nargs="+", help=f"folder of a run (it holds metrics.jsonl); {several}")
    default = "RUN/report.html; of a sweep or a folder of runs, report.html in it; of several, comparison.html here"
    parser.add_argument("--out", metavar="FILE", help=f"the page to write (default: {default})")
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="model folder with the tokenizer of the run (default: its newest checkpoint)"
    )
    defaults = Limits()
    for name, text in (
        ("max_steps", "steps whose rollouts go into the page"),
        ("groups_per_step", "groups of a step that go into the page"),
        ("samples_per_group", "samples of a group that go into the page"),
        ("max_tokens", "tokens of a sample that go into the page"),
        ("max_mib", "bound on the rollouts in the page, in MiB; 0 leaves them out"),
    ):
        default = getattr(defaults, name)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(default), default=default, help=f"{text} (default: {default:g})")


def main(args: argparse.Namespace) -> int:
    """Writes the page. Returns 0, or 1 after a message that says why the run cannot be read."""
    if len(args.runs) > 1 or is_several(args.runs[0]):
        return _compare(args)
    try:
        limits = Limits(args.max_steps, args.groups_per_step, args.samples_per_group, args.max_tokens, args.max_mib)
        report = build_report(args.runs[0], args.out, limits, args.tokenizer)
    except (OSError, ValueError) as error:
        print(f"torchtune-ext report: {error}", file=sys.stderr)
        return 1
    print(f"{report.path}: {report.num_bytes / 2**20:.1f} MiB, {report.steps} steps, "
          f"rollouts of {report.rollout_steps} of {report.stored_steps} stored steps")  # fmt: skip
    return 0


def _compare(args: argparse.Namespace) -> int:
    """Writes the page of several runs. What bounds the rollouts of one run is not for it."""
    given = [f"--{name.replace('_', '-')}" for name, value in asdict(Limits()).items() if getattr(args, name) != value]
    given += ["--tokenizer"] if args.tokenizer else []
    try:
        if given:
            raise Mistake(f"{', '.join(given)}: for the page of one run alone; leave it out, or name one run")
        page = build_comparison(args.runs, args.out)
    except (OSError, ValueError) as error:
        print(f"torchtune-ext report: {error}", file=sys.stderr)
        return 1
    print(page.summary())
    return 0


def build_report(
    run_dir: str | Path,
    out: str | Path | None = None,
    limits: Limits | None = None,
    tokenizer: str | Path | None = None,
) -> Report:
    """Writes the page of `run_dir` to `out`. Raises FileNotFoundError and ValueError, which say the cause and the fix."""
    limits = limits or Limits()
    for name, value in asdict(limits).items():
        if value < (0 if name == "max_mib" else 1):
            raise Mistake(f"{name}={value}: must be positive")
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise Mistake(f"{run_dir}: no such folder; name the folder of a run")
    metrics_path = run_dir / "metrics.jsonl"
    records = read_metrics(metrics_path) if metrics_path.exists() else []
    if not records:
        if (evaluation := run_dir / "evaluation.json").exists():
            raise Mistake(
                f"{run_dir} holds an evaluation, which has no curves: its figures are in {evaluation}, its samples in "
                f"{run_dir / 'rollouts'} (docs/telemetry.md)"
            )
        if (above := run_dir.absolute().parent / "metrics.jsonl").exists():
            raise Mistake(f"{run_dir} is a folder of a run, not the run; name {above.parent}")
        if not (run_dir / "run.json").exists():
            raise Mistake(f"{run_dir} is no folder of a run: it has no run.json; name one, an output_dir")
        raise Mistake(f"{metrics_path}: no metrics yet; a run writes its first line at the end of a step")
    out = Path(out) if out is not None else run_dir / "report.html"
    paths, run = rollout_paths(run_dir), record_of(run_dir)
    if tokenizer is not None:
        TokenPieces.from_folder(tokenizer)  # What the user names has to be there.
    tokenizers = [tokenizer] if tokenizer is not None else _tokenizers(run_dir, run)
    latest = records[-max(1, len(records) // PART)]["step"]
    excerpts = excerpts_of(paths, limits, tokenizers, latest)
    pictures = _pictures(run_dir / ARCHIVE)
    page = _page(_overview(run_dir, run, records, pictures, excerpts, len(paths)), excerpts, pictures)
    write_page(out, page)
    return Report(out, len(page.encode()), records[-1]["step"], len(excerpts.blobs), len(paths))


# ---------------------------------------------------------------- what the page shows


def _tokenizers(run_dir: Path, run: Mapping[str, Any]) -> list[Path]:
    """Returns where the tokenizer of the run may lie: in its checkpoints, in a warm-up's model, where its settings say."""
    config = run["config"] if isinstance(run.get("config"), dict) else {}
    tokenizer = config.get("tokenizer")
    named = [tokenizer.get("path") if isinstance(tokenizer, dict) else None, config.get("model_dir")]
    inside = [*checkpoint_folders(run_dir / "checkpoints")[-1:], run_dir / "model", run_dir / "start"]
    return [Path(path) for path in (*inside, *named) if isinstance(path, str | Path)]


def _overview(
    run_dir: Path,
    run: Mapping[str, Any],
    records: list[dict],
    pictures: list[dict] | None,
    excerpts: Excerpts,
    stored: int,
) -> dict[str, Any]:
    """Collects all but the rollouts: the series as columns, the panels, the notices, and which rollouts there are."""
    names = {name for record in records for name in record if name not in ("step", "nonfinite")}
    series = {name: [short(record.get(name)) for record in records] for name in sorted(names)}
    series = {name: values for name, values in series.items() if any(value is not None for value in values)}
    steps = [record["step"] for record in records]
    panels = panels_for(series)
    if pictures and CELLS not in series:
        # The run did not write the metric; the archive tells nearly as much.
        series[CELLS] = filled(pictures, steps)
        panels = [
            replace(panel, note=COUNTED) if (CELLS, "cells") in panel.series else panel for panel in panels_for(series)
        ]
    panels = [panel for panel in panels if not panel.quiet or _any(panel, series)]
    config = run["config"] if isinstance(run.get("config"), dict) else {}
    state, curves = state_of(run_dir, config, steps[-1]), readings(series, steps, panels)
    notices = findings(records, panels, config, state, excerpts.silent)
    warned = {notice.section for notice in notices}
    return {
        "name": _name(run_dir, run),
        "state": state,
        "facts": facts(run_dir, run, records),
        "made": origin(run),
        "config": [row for row in flat(config) if row[1] not in ("{}", "[]", "null")],  # what is not set
        "written": time.time(),
        "steps": steps,
        "series": series,
        "readings": curves,
        "tiles": tiles(curves, panels),
        "panels": panels,
        "folded": [section for section in FOLDED if section not in warned],
        "strip": _strip(run_dir / TRACE),
        "notices": notices,
        "pair": excerpts.pair,
        "rollouts": excerpts.index,
        "stored": stored,
    }


def _name(run_dir: Path, run: Mapping[str, Any]) -> str:
    return str(run.get("name", run_dir.resolve().name))


def _strip(path: Path) -> dict[str, Any] | None:
    """Returns what ran when, or None for a run without a timeline, or with a damaged one."""
    try:
        return strip_of(read_trace(path)) if path.exists() else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("left out of the report: %s: %r", path, error)
        return None


def _pictures(path: Path) -> list[dict[str, Any]] | None:
    """Returns the pictures of the archive, or None for a run without one, or with a damaged one."""
    try:
        return pictures_of(path) if path.exists() else None
    except (OSError, ValueError, ImportError) as error:
        log.warning("left out of the report: %s", error)
        return None


def _any(panel: Panel, series: dict[str, list]) -> bool:
    return any(value for metric, _ in panel.series for value in series[metric])


def _page(overview: dict[str, Any], excerpts: Excerpts, pictures: list[dict] | None) -> str:
    data = {"overview": pack(overview)} | {f"rollouts-{step}": blob for step, blob in excerpts.blobs.items()}
    if excerpts.pieces:
        data["pieces"] = pack(excerpts.pieces)
    if pictures:
        data["archive"] = pack(pictures)
    return page_of(overview["name"], "report", SCRIPTS, data)


# What the report shows of an archive: a picture for each problem and machine, and how many cells were filled when.
#
# A picture has a row for each set of techniques and a column for each band of speed; a cell of it is a cell of the archive.
def pictures_of(path: Path) -> list[dict[str, Any]]:
    """Returns what the page needs, JSON-able: a dict for each problem and machine.

    Returns:
        `kernel`, `size`, `machine`: the problem, for people. `rows`: the sets of techniques, in words, those with few
        techniques first. `bands`: the columns, floor(log2(times as fast as the naive program)), ascending. `cells`: `row` and
        `column`, the speed `ratio`, the ends `low` and `high` of its interval, `gflops`, `found`, `source`.

    Raises:
        ImportError: a package is missing that programs are read with.
        OSError, ValueError: the file cannot be read, or is damaged.
    """
    # Only the archive of a run needs these packages; a report of other runs does without.
    from torchtune_ext.measured.matmul.archive import Archive, size_in_words, techniques_in_words

    elites = Archive.load(path).cells()
    limit = min(MAX_CHARACTERS, MAX_TOGETHER // max(1, len(elites)))
    problems = defaultdict(list)
    for cell, entry in elites.items():
        problems[cell.kernel, cell.size, cell.machine].append((cell, entry))
    pictures = []
    for (kernel, size, machine), entries in sorted(problems.items()):
        rows = sorted({cell.techniques for cell, _ in entries}, key=lambda techniques: (len(techniques), techniques))
        bands = _bands({cell.band for cell, _ in entries})
        cells = [
            {
                "row": rows.index(cell.techniques),
                "column": bands.index(cell.band),
                "ratio": entry.ratio,
                "low": entry.low,
                "high": entry.high,
                "gflops": entry.gflops,
                "found": entry.found,
                "source": cut_text(entry.source, limit),
            }
            for cell, entry in entries
        ]
        words = [techniques_in_words(techniques) for techniques in rows]
        problem = {"kernel": kernel, "size": size_in_words(size), "machine": machine}
        pictures.append({**problem, "rows": words, "bands": bands, "cells": cells})
    return pictures


def filled(pictures: Sequence[dict[str, Any]], steps: Sequence[int]) -> list[int]:
    """Counts, for each step, the cells whose program had been found by then. Where a program was replaced, only the later one
    is known."""
    cell_steps = sorted(cell["found"] for picture in pictures for cell in picture["cells"])
    return [bisect_right(cell_steps, step) for step in steps]


def _bands(used: set[int]) -> list[int]:
    lowest, highest = min(used), max(used)
    return list(range(lowest, highest + 1)) if highest - lowest < MAX_BANDS else sorted(used)
