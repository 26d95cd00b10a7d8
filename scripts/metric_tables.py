#!/usr/bin/env python3
"""Writes the tables of metrics in docs/telemetry.md from torchtune_ext/telemetry/panels.py: python scripts/metric_tables.py"""

from pathlib import Path

from torchtune_ext.telemetry.panels import PANELS

PAGE = Path(__file__).parents[1] / "docs" / "telemetry.md"
BEGIN, END = "<!-- metrics: begin (scripts/metric_tables.py) -->\n", "<!-- metrics: end -->"
UNITS = {
    "": "",
    "percent": "fraction",
    "seconds": "s",
    "bytes": "bytes",
    "gib": "GiB",
    "int": "count",
    "tok/s": "tokens/s",
}


def updated(text: str) -> str:
    """Return the text of the page with current tables, one per section of the report."""
    lines, section = [], ""
    for panel in PANELS:
        if panel.section != section:
            section = panel.section
            lines += [f"\n### {section}\n", "| metric | unit | meaning | investigate if |", "|---|---|---|---|"]
        for name, _, meaning, investigate in panel.metrics:
            # "time/sample/generate" is a part of "time/sample".
            total = name.rpartition("/")[0]
            meaning = f"breakdown of `{total}`: {meaning}" if "/" in total and meaning else meaning
            lines += [f"| `{name}` | {UNITS[panel.unit]} | {meaning} | {investigate} |"] if meaning else []
    (before, rest), tables = text.split(BEGIN), "\n".join(lines)
    return f"{before}{BEGIN}{tables}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
