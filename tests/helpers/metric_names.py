"""Metric names of docs/reference/metrics.md and of the report's panels, and the match of a logged name."""

import re
from collections.abc import Collection
from pathlib import Path

from torchtune_ext.telemetry.panels import PANELS


def documented(page: Path) -> set[str]:
    """Return the names in the first column of the tables, with "*" for a `<word>`."""
    cells = re.findall(r"^\| (`.*?) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"<\w+>", "*", name) for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def drawn() -> set[str]:
    """Return the names of all series and bands of the panels."""
    series = {metric for panel in PANELS for metric, _ in panel.series}
    return series | {metric for panel in PANELS if panel.band for metric in panel.band[1:]}


def known_as(name: str, known: Collection[str]) -> str | None:
    """Return the name itself, or the longest matching pattern with "*"."""
    fitting = [other for other in known if re.fullmatch(re.escape(other).replace(r"\*", "[^/]+"), name)]
    return name if name in known else max(fitting, key=len, default=None)
