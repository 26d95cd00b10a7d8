"""`torchtune-ext report RUN` makes one HTML file with the curves of a run and a browser of its rollouts.

The file needs no network and no server. Everything that came from the run is embedded as base64 of gzipped JSON and
written into the page as text nodes only, so that no completion can break or script the page.
"""

import argparse
import base64
import gzip
import html
import json
import logging
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from torchtune_ext.group_json import run_lengths
from torchtune_ext.groups import Group, Sample
from torchtune_ext.run.files import explained
from torchtune_ext.run.folder import read_record
from torchtune_ext.telemetry.archive import FILE as ARCHIVE
from torchtune_ext.telemetry.archive import filled, pictures_of
from torchtune_ext.telemetry.metrics import read_metrics
from torchtune_ext.telemetry.panels import Panel, panels_for
from torchtune_ext.telemetry.pieces import TokenPieces, cut_text
from torchtune_ext.telemetry.rollouts import read_rollouts, rollout_paths
from torchtune_ext.telemetry.strip import strip_of
from torchtune_ext.telemetry.timeline import FILE as TRACE
from torchtune_ext.telemetry.timeline import read_trace

log = logging.getLogger(__name__)

SCRIPTS = ("charts", "strip", "archive", "rollouts", "main")  # of the page, in this order
CELLS = "archive/cells"
COUNTED = "By the steps that found the programs. Of a cell whose program was replaced, only the later program is known."


@dataclass(frozen=True, slots=True)
class Limits:
    """This says how much of the rollouts a page carries; the curves are always whole."""

    max_steps: int = 80  # So many steps have rollouts, evenly spaced, first and last among them.
    groups_per_step: int = 12  # They are evenly spaced over the reward spread, widest and narrowest among them.
    samples_per_group: int = 16  # They are evenly spaced over the reward, best and worst among them.
    max_tokens: int = 2000  # The middle of a sample that is longer is left out.
    max_mib: float = 16.0  # All rollouts in the page together take no more.


@dataclass(frozen=True, slots=True)
class Report:
    """This says what was written."""

    path: Path
    num_bytes: int
    steps: int  # So many have metrics.
    rollout_steps: int  # So many have rollouts in the page.
    stored_steps: int  # So many have rollouts in the run.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run (it holds metrics.jsonl)")
    parser.add_argument("--out", metavar="FILE", help="the page to write (default: RUN/report.html)")
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="model folder; shows the text of each token with its log-prob"
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
    try:
        limits = Limits(args.max_steps, args.groups_per_step, args.samples_per_group, args.max_tokens, args.max_mib)
        report = build_report(args.run, args.out, limits, args.tokenizer)
    except (OSError, ValueError) as error:
        print(f"torchtune-ext report: {error}", file=sys.stderr)
        return 1
    print(f"{report.path}: {report.num_bytes / 2**20:.1f} MiB, {report.steps} steps, "
          f"rollouts of {report.rollout_steps} of {report.stored_steps} stored steps")  # fmt: skip
    return 0


def build_report(
    run_dir: str | Path, out: str | Path | None = None, limits: Limits = Limits(), tokenizer: str | Path | None = None
) -> Report:
    """Writes the page of `run_dir` to `out`. Raises FileNotFoundError and ValueError, which say the cause and the fix."""
    for name, value in asdict(limits).items():
        if value < (0 if name == "max_mib" else 1):
            raise ValueError(f"{name}={value}: must be positive")
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir}: no such folder; name the folder of a run")
    metrics_path = run_dir / "metrics.jsonl"
    records = read_metrics(metrics_path) if metrics_path.exists() else []
    if not records:
        raise FileNotFoundError(f"{metrics_path}: no metrics yet; a run writes its first line at the end of a step")
    out = Path(out) if out is not None else run_dir / "report.html"
    paths = rollout_paths(run_dir)
    pieces = TokenPieces.from_folder(tokenizer) if tokenizer is not None else None
    blobs, index = _rollout_blobs(paths, limits, pieces)
    pictures = _pictures(run_dir / ARCHIVE)
    page = _page(_overview(run_dir, records, pictures, index, len(paths)), blobs, pictures)
    out.parent.mkdir(parents=True, exist_ok=True)
    with explained(f"cannot write {out}", "Free disk space, or name another file by --out"):
        # The page is written in place, since `out` may be a link, or no file at all.
        out.write_text(page, encoding="utf-8")
    return Report(out, len(page.encode()), len(records), len(blobs), len(paths))


# ---------------------------------------------------------------- curves


def _overview(
    run_dir: Path, records: list[dict], pictures: list[dict] | None, index: list[dict], stored: int
) -> dict[str, Any]:
    """Collects everything but the rollouts: the series as columns, the panels, and which rollouts the page has."""
    names = {name for record in records for name in record if name not in ("step", "nonfinite")}
    series = {name: [_short(record.get(name)) for record in records] for name in sorted(names)}
    series = {name: values for name, values in series.items() if any(value is not None for value in values)}
    steps = [record["step"] for record in records]
    panels = panels_for(series)
    if pictures and CELLS not in series:
        # The run did not write the metric; the archive tells nearly as much.
        series[CELLS] = filled(pictures, steps)
        panels = [
            replace(panel, note=COUNTED) if (CELLS, "cells") in panel.series else panel for panel in panels_for(series)
        ]
    try:
        run = read_record(run_dir) or {}
    except ValueError as error:
        log.warning("left out of the report: %s", error)
        run = {}
    return {
        "name": run.get("name", run_dir.resolve().name),
        "config": _flat(run.get("config", {})),
        "started": run.get("started"),
        "written": time.time(),
        "steps": steps,
        "series": series,
        "panels": [asdict(panel) for panel in panels if not panel.quiet or _any(panel, series)],
        "strip": _strip(run_dir / TRACE),
        "notices": _notices(records),
        "rollouts": index,
        "stored": stored,
    }


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


def _notices(records: list[dict]) -> list[str]:
    """Says what a reader should look at first."""
    notices = []
    broken: dict[str, list[int]] = {}
    for record in records:
        for name in record.get("nonfinite", ()):
            broken.setdefault(name, []).append(record["step"])
    for name, steps in broken.items():
        notices.append(f"{name} was not finite at {_count(len(steps), 'step')}, first at step {steps[0]}.")
    last = records[-max(1, len(records) // 10) :]  # This is the last tenth of the run.

    def recent(name: str) -> float:
        values = [record[name] for record in last if record.get(name) is not None]
        return sum(values) / len(values) if values else 0.0

    infra = sum(record.get("groups/infra_failed") or 0 for record in records)
    if infra:
        notices.append(f"{_count(int(infra), 'sample')} could not be graded (grader raised, hung or crashed).")
    restarts = max(record.get("engine/restarts") or 0 for record in records)
    if restarts:
        notices.append(f"The engine was restarted {_count(int(restarts), 'time')}.")
    groups = recent("groups/used") + recent("groups/no_signal")
    if groups and recent("groups/no_signal") > 0.5 * groups:
        share = recent("groups/no_signal") / groups
        notices.append(
            f"{share:.0%} of the latest groups carry no signal: the problems are too easy or too hard by now."
        )
    if recent("length/truncated") > 0.2:
        notices.append(f"{recent('length/truncated'):.0%} of the latest samples hit the token limit.")
    return notices


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _flat(config: dict, prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, dict) and value:
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)))
    return rows


def _short(value: float | None, digits: int = 6) -> float | None:
    """Rounds to six digits, which are more than a screen shows and half the bytes."""
    return value if value is None or isinstance(value, int) else float(f"{value:.{digits}g}")


# ---------------------------------------------------------------- rollouts


def _rollout_blobs(
    paths: dict[int, Path], limits: Limits, pieces: TokenPieces | None
) -> tuple[dict[int, str], list[dict]]:
    """Packs groups of some steps, and says what each of these steps holds. What one leaves of the budget, others use."""
    blobs: dict[int, str] = {}
    index: list[dict] = []
    steps = _spaced(sorted(paths), limits.max_steps) if limits.max_mib > 0 else []
    left = limits.max_mib * 2**20
    for number, step in enumerate(steps):
        try:
            groups = read_rollouts(paths[step])
        except ValueError as error:
            log.warning("left out of the report: %s", error)
            continue
        blob, chosen = _fit(groups, limits, pieces, left / (len(steps) - number))
        left -= len(blob)
        blobs[step] = blob
        index.append({"step": step, "groups": len(groups), "ids": [group.problem.id for group in chosen]})
    return blobs, index


def _fit(groups: list[Group], limits: Limits, pieces: TokenPieces | None, budget: float) -> tuple[str, list[Group]]:
    """Takes as many groups as `budget` bytes hold. Where one alone is too large it has fewer samples, then fewer tokens."""
    ranked = sorted(groups, key=_spread, reverse=True)
    num_groups, num_samples, num_tokens = limits.groups_per_step, limits.samples_per_group, limits.max_tokens
    while True:
        chosen = _spaced(ranked, num_groups)
        blob = _pack([_group_record(group, num_samples, num_tokens, pieces) for group in chosen])
        ratio = budget / len(blob)
        if ratio >= 1:
            return blob, chosen
        if num_groups > 1:
            num_groups = max(1, min(num_groups - 1, int(len(chosen) * ratio)))
        elif num_samples > 2:
            num_samples = max(2, min(num_samples - 1, int(num_samples * ratio)))
        elif num_tokens > 32:
            num_tokens = max(32, num_tokens // 2)
        else:
            return blob, chosen


def _rewards(group: Group) -> list[float]:
    return [sample.score.reward for sample in group.samples if sample.score is not None]


def _spread(group: Group) -> float:
    rewards = _rewards(group)
    return float(np.std(rewards)) if rewards else 0.0


def _group_record(group: Group, num_samples: int, num_tokens: int, pieces: TokenPieces | None) -> dict[str, Any]:
    def order(sample: Sample) -> float:
        return -np.inf if sample.score is None else sample.score.reward

    rewards = _rewards(group)
    samples = _spaced(sorted(group.samples, key=order, reverse=True), num_samples)
    answer = group.problem.answer
    return {
        "id": group.problem.id,
        "messages": [{"role": m["role"], "content": cut_text(str(m["content"]), 8 * num_tokens)}
                     for m in group.problem.messages],
        "answer": answer if isinstance(answer, str) else json.dumps(answer, default=repr),
        "prompt_tokens": len(group.prompt_tokens),
        "count": len(group.samples),
        "trained": sum(sample.trained for sample in group.samples),
        "signal": group.has_signal,
        "failed": sum(sample.score is None for sample in group.samples),
        "mean": _finite(float(np.mean(rewards))) if rewards else None,
        "spread": _finite(_spread(group)),
        "rewards": [_finite(reward) for reward in rewards],
        "samples": [_sample_record(sample, num_tokens, pieces) for sample in samples],
    }  # fmt: skip


def _sample_record(sample: Sample, num_tokens: int, pieces: TokenPieces | None) -> dict[str, Any]:
    completion, outcome, score = sample.completion, sample.outcome, sample.score
    count = len(completion.tokens)
    head = count if count <= num_tokens else num_tokens // 2
    keep = np.r_[0:head, max(head, count - num_tokens // 2) : count] if count > num_tokens else np.arange(count)
    logprobs = np.nan_to_num(completion.logprobs[keep].astype(np.float64), nan=-99.0, posinf=0.0, neginf=-99.0)
    record: dict[str, Any] = {
        "text": sample.text if count <= num_tokens else cut_text(sample.text, 8 * num_tokens),
        "ids": completion.tokens[keep].tolist(),
        # They are thousandths of nats, and positive.
        "nats": np.rint(-1000 * logprobs).astype(int).tolist(),
        "count": count,
        # Tokens were left out here.
        "gap": head if count > num_tokens else None,
        "reward": None if score is None else _finite(score.reward),
        "parts": {} if score is None else {k: _finite(v) for k, v in score.parts.items()},
        "note": "" if score is None else cut_text(score.note, 2000),
        "outcome": "not graded" if outcome is None else outcome.kind,
        "cause": "" if outcome is None else cut_text(outcome.cause, 2000),
        "advantage": _finite(sample.advantage),
        "trained": bool(sample.trained),
        "finish": completion.finish_reason,
        "versions": run_lengths(completion.versions),
        "logprob": _finite(float(np.mean(completion.logprobs, dtype=np.float64))) if count else None,
    }
    if pieces is not None:
        record["pieces"] = pieces.split(completion.tokens)[:head] + pieces.split(completion.tokens[keep[head:]])
    return record


def _finite(value: float) -> float | None:
    return _short(float(value)) if np.isfinite(value) else None


def _spaced(items: Sequence, number: int) -> list:
    """Takes at most `number` of `items`, evenly spaced, first and last among them (only the first when `number` is 1)."""
    if len(items) <= number:
        return list(items)
    return [items[round(i * (len(items) - 1) / max(1, number - 1))] for i in range(number)]


# ---------------------------------------------------------------- page


def _pack(data: Any) -> str:
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def _page(overview: dict[str, Any], blobs: dict[int, str], pictures: list[dict] | None) -> str:
    folder = resources.files("torchtune_ext.telemetry") / "page"
    data = {"overview": _pack(overview)} | {f"rollouts-{step}": blob for step, blob in blobs.items()}
    if pictures:
        data["archive"] = _pack(pictures)
    parts = {
        "title": html.escape(overview["name"]),
        "css": (folder / "page.css").read_text(encoding="utf-8"),
        "js": "\n".join((folder / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS),
        "data": "\n".join(f'<script type="text/plain" id="{key}">{blob}</script>' for key, blob in data.items()),
    }
    template = (folder / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)
