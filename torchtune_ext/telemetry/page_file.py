"""Puts a page together: one HTML file out of a template, scripts and packed data, that needs no network and no server.

Everything that came from a run is embedded as base64 of gzipped JSON and written into the page as text nodes only, so that no
completion can break or script the page.
"""

import html
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from torchtune_ext.run.files import explained

SCRIPTS = ("charts", "runs", "rollouts", "shell", "main")  # in this order


def write_page(out: Path, title: str, data: Mapping[str, str]) -> int:
    """Writes a page, in place, since `out` may be a link, or no file at all. Returns how many bytes it has.

    Args:
        title: of the page; any text.
        data: what the scripts read, by id, each as `excerpts.pack` makes it.

    Raises:
        OSError: it cannot be written.
    """
    parts = {
        "title": html.escape(title),
        "css": _part("page.css"),
        "js": "\n".join(_part(f"{name}.js") for name in SCRIPTS),
        "data": "\n".join(f'<script type="text/plain" id="{key}">{blob}</script>' for key, blob in data.items()),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _part("page.html")).encode()
    with explained(f"cannot write {out}", "Free disk space, or name another file by --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(page)
    return len(page)


def _part(name: str) -> Any:
    return (resources.files("torchtune_ext.telemetry") / "page" / name).read_text(encoding="utf-8")
