"""`torchtune-ext report RUN` writes an HTML file with a run's curves and rollouts."""

import argparse
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchtune_ext.pipeline.rollout_store import rollout_paths
from torchtune_ext.run.errors import UsageError, UsageFileError
from torchtune_ext.run.folder import checkpoint_folders
from torchtune_ext.telemetry.comparison import build_comparison
from torchtune_ext.telemetry.excerpts import (
    DEFAULT_LIMITS,
    ExcerptLimits,
    Excerpts,
    collect_excerpts,
    encode_json,
    round_digits,
)
from torchtune_ext.telemetry.findings import FOLDED_SECTIONS, Reading, collect_findings, make_tiles, read_curves
from torchtune_ext.telemetry.html_page import write_page
from torchtune_ext.telemetry.metrics import read_metrics
from torchtune_ext.telemetry.panels import Panel, panels_for
from torchtune_ext.telemetry.report_header import config_section, flatten_config, run_facts, run_origin, run_status
from torchtune_ext.telemetry.runs import METRICS_FILE, holds_several_runs, read_run_record


@dataclass(frozen=True, slots=True)
class Report:
    """The page that was written."""

    path: Path
    num_bytes: int
    steps: int  # the newest step with metrics
    rollout_steps: int  # number of steps with rollouts in the page
    stored_steps: int  # number of steps with rollouts in the run

    def summary(self) -> str:
        """Returns the line for the terminal."""
        text = f"{self.path}: {self.num_bytes / 2**20:.1f} MiB, {self.steps} steps"
        stored = self.stored_steps
        return f"{text}, rollouts of {self.rollout_steps} of {stored} stored steps" if stored else text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    several = "several runs, a sweep's folder or a folder of runs make a comparison"
    parser.add_argument("runs", metavar="RUN", nargs="+", help=f"folder of a run (with metrics.jsonl); {several}")
    default = "report.html in RUN; for several RUNs, comparison.html in the working directory"
    parser.add_argument("--out", metavar="FILE", help=f"the page to write (default: {default})")


def main(args: argparse.Namespace) -> int:
    """Writes the page, of a comparison for several runs or a sweep. Returns the exit status.

    Raises:
        UsageError: a run cannot be read.
        UsageFileError: the page cannot be written.
    """
    try:
        if len(args.runs) > 1 or holds_several_runs(args.runs[0]):
            page = build_comparison(args.runs, args.out)
        else:
            page = build_report(args.runs[0], args.out)
    except OSError as error:
        raise UsageFileError(str(error)) from error
    print(page.summary())
    return 0


def build_report(run_dir: str | Path, out: str | Path | None = None, limits: ExcerptLimits = DEFAULT_LIMITS) -> Report:
    """Writes the report of one run.

    Args:
        run_dir: the folder of the run.
        out: the file to write; None: `report.html` in `run_dir`.
        limits: the most rollouts in the page.

    Raises:
        UsageError: `run_dir` is not the folder of a run, or has no metrics.
        OSError: the page cannot be written.
    """
    run_dir = Path(run_dir)
    records = _read_run_metrics(run_dir)
    out = Path(out) if out is not None else run_dir / "report.html"
    paths, run = rollout_paths(run_dir), read_run_record(run_dir)
    excerpts = collect_excerpts(paths, limits, _tokenizer_folders(run_dir, config_section(run, "config")))
    overview: dict[str, Any] = _page_data(run_dir, run, records, excerpts) | {"stored": len(paths)}
    blobs = {f"rollouts-{step}": blob for step, blob in excerpts.blobs.items()}
    num_bytes = write_page(out, overview["name"], {"overview": encode_json(overview), **blobs})
    return Report(out, num_bytes, records[-1]["step"], len(blobs), len(paths))


# ---------------------------------------------------------------- data of the page


def _read_run_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the metrics of each step, at least one, or raises UsageError."""
    # A wrong path is the usual cause, so each message says what the path is instead.
    if not run_dir.is_dir():
        raise UsageError(f"{run_dir}: folder not found. Fix: name the folder of a run")
    path = run_dir / METRICS_FILE
    if records := read_metrics(path) if path.exists() else []:
        return records
    above = run_dir.absolute().parent
    if (above / METRICS_FILE).exists():
        raise UsageError(f"{run_dir}: a folder inside a run; expected the run. Fix: name {above}")
    if not (run_dir / "run.json").exists():
        raise UsageError(f"{run_dir}: not the folder of a run, run.json is missing. Fix: name the output_dir of a run")
    raise UsageError(
        f"{run_dir}: no metrics; a training run writes them from the end of its first step, an evaluation writes "
        "evaluation.json instead. Fix: name the output_dir of a training run"
    )


def _tokenizer_folders(run_dir: Path, config: Mapping[str, Any]) -> list[Path]:
    # The run's own folder comes first: its copies exist, even if the paths in its settings do not.
    named = [config_section(config, "tokenizer").get("path"), config.get("model_dir")]
    inside = [*checkpoint_folders(run_dir / "checkpoints")[-1:], run_dir / "model", run_dir / "start"]
    return [Path(path) for path in (*inside, *named) if isinstance(path, str | Path)]


def _page_data(
    run_dir: Path, run: Mapping[str, Any], records: list[dict[str, Any]], excerpts: Excerpts
) -> dict[str, Any]:
    """Returns the data of the page except for the rollouts."""
    names = {name for record in records for name in record if name not in ("step", "nonfinite")}
    columns = {name: [round_digits(record.get(name)) for record in records] for name in sorted(names)}
    # A metric without a single finite value has no curve.
    series = {name: values for name, values in columns.items() if set(values) != {None}}
    steps, config = [record["step"] for record in records], config_section(run, "config")
    panels = [
        panel
        for panel in panels_for(series)
        if not panel.hide_if_zero or any(value for metric, _ in panel.series for value in series[metric])
    ]
    # A section with a finding is unfolded, so that the reader sees its curves.
    state, curves = run_status(run_dir, config, steps[-1]), read_curves(series, steps, panels)
    notices = collect_findings(records, curves, panels, config, state)
    warned = {notice.section for notice in notices}
    return {
        "name": str(run.get("name", run_dir.resolve().name)),
        "state": state,
        "facts": run_facts(run, records),
        "made": run_origin(run),
        "config": [row for row in flatten_config(config) if row[1] != "[]"],
        "written": time.time(),
        "steps": steps,
        "tiles": make_tiles(curves, panels),
        "panels": [asdict(panel) | {"lines": _chart_lines(panel, series, curves)} for panel in panels],
        "folded": [section for section in FOLDED_SECTIONS if section not in warned],
        "notices": notices,
        "rollouts": excerpts.index,
    }


def _chart_lines(
    panel: Panel, series: Mapping[str, list[float | None]], curves: Mapping[str, Reading]
) -> list[dict[str, Any]]:
    # In a panel without a band, no metric matches "".
    around, *edges = panel.band or ("",)
    return [
        {
            "label": label,
            "raw": series[metric],
            "reading": curves[metric],
            "color": panel.colors[place] if panel.colors else place % 7 + 1,
            "band": [series[edge] for edge in edges] if metric == around else None,
        }
        for place, (metric, label) in enumerate(panel.series)
    ]
