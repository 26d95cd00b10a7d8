"""The table of `chaos.py`: fault by fault, what a run survived."""

import os
import platform
from collections.abc import Sequence
from typing import Any

from chaos_draw import NAMES

HEAD = ("fault", "rounds", "survived", "lost, steps", "longest recovery, s", "phases hit", "worst message")
MESSAGE_CHARS = 160


def machine() -> str:
    return f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Linux {platform.release()}"


def table(seed: int, records: Sequence[dict[str, Any]]) -> str:
    """Markdown: one row a fault, the rounds that failed, what was lost by design, and what could not be tried."""
    rows = [_row(name, [r for r in records if r["fault"] == name]) for name in NAMES]
    lines = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|", *(row for row in rows if row)]
    played = [r for r in records if not r["skipped"]]
    failed = [r for r in played if r["problems"]]
    commits = ", ".join(sorted({r["commit"] for r in records}))
    minutes = sum(r["seconds"] for r in records) / 60
    intro = (
        f"Seed {seed}, commit {commits}, {machine()}. {len(played)} rounds in {minutes:.0f} minutes, "
        f'{len(played) - len(failed)} survived. "Lost" are steps that were made again (the most in a round); recovery is the '
        "time from the fault to the next new line of metrics, ends and starts of processes included."
    )
    notes = [f"- Round {r['round']} failed ({_where(r)}): {'; '.join(r['problems'])}" for r in failed]
    notes += [f"- By design, round {r['round']} ({_where(r)}): {r['allowed']}." for r in played if r["allowed"]]
    notes += [f"- Not tried, round {r['round']} ({r['fault']}): {r['skipped']}" for r in records if r["skipped"]]
    return "\n".join([intro, "", *lines, *([""] if notes else []), *notes]) + "\n"


def _where(record: dict[str, Any]) -> str:
    return f"{record['fault']}, {record['hit'] or record['phase']}"


def _row(name: str, records: list[dict[str, Any]]) -> str:
    played = [r for r in records if not r["skipped"]]
    if not played:
        return f"| {name} | 0 | not tried |" + " |" * (len(HEAD) - 3) if records else ""
    worst = max(played, key=lambda r: (bool(r["problems"]), r["recovery_s"]))
    phases = sorted({r["hit"].split(",")[0] for r in played if r["hit"]})
    message = " ".join((worst["problems"] or [worst["message"]])[0].split()).replace("|", "\\|")
    survived = sum(not r["problems"] for r in played)
    cells = [
        name, str(len(played)), str(survived), str(max(r["lost"] for r in played)),
        f"{max(r['recovery_s'] for r in played):.1f}", ", ".join(phases), message[:MESSAGE_CHARS],
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"
