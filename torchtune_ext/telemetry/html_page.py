"""Puts a page together: one HTML file of a template, scripts and packed data, which needs no network and no server."""

import html
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.files import explain_os_errors

_TITLE_MARKER = " · torchtune-ext</title>".encode()  # in the head of each page
SCRIPT_NAMES = ("charts", "runs", "rollouts", "shell", "main")  # in this order


def write_page(out: Path, title: str, data: Mapping[str, str]) -> int:
    """Writes a page of `data` (by id, as `excerpts.pack` makes it). Returns how many bytes it has. Raises OSError."""
    # What comes from a run is base64, and the scripts write it as text nodes. So no completion can script the page.
    parts = {
        "title": html.escape(title),
        "css": _resource_text("page.css"),
        "js": "\n".join(_resource_text(f"{name}.js") for name in SCRIPT_NAMES),
        "data": "\n".join(f'<script type="text/plain" id="{key}">{blob}</script>' for key, blob in data.items()),
    }
    # All placeholders are replaced in one pass, so a title such as "{{data}}" stays what it is.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _resource_text("page.html")).encode()
    with explain_os_errors(f"cannot write {out}", "Free disk space, or name another file by --out"):
        begin = out.read_bytes()[:4096] if out.is_file() else b""
        if begin and _TITLE_MARKER not in begin:
            raise UsageError(
                f"cannot write {out}: it holds something other than a report. Fix: name another file by --out"
            )
        out.parent.mkdir(parents=True, exist_ok=True)
        # Written in place, not through a temporary file: `out` may be a link, or no file at all, such as /dev/stdout.
        out.write_bytes(page)
    return len(page)


def _resource_text(name: str) -> Any:
    return (resources.files("torchtune_ext.telemetry") / "page" / name).read_text(encoding="utf-8")
