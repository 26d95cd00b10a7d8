"""Builds a page: one HTML file with scripts and data, which needs neither network nor server."""

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
    """Writes a page, and returns its size in bytes.

    Args:
        out: the file to write.
        title: the title of the page.
        data: element id -> data, as `excerpts.encode_json` returns it.

    Raises:
        UsageError: `out` holds something other than a report.
        OSError: `out` cannot be written.
    """
    # Data are base64, and the scripts write them as text nodes. So no completion can run scripts.
    parts = {
        "title": html.escape(title),
        "css": _resource_text("page.css"),
        "js": "\n".join(_resource_text(f"{name}.js") for name in SCRIPT_NAMES),
        "data": "\n".join(f'<script type="text/plain" id="{key}">{blob}</script>' for key, blob in data.items()),
    }
    # All placeholders are replaced in one pass, so a title such as "{{data}}" is kept.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _resource_text("page.html")).encode()
    with explain_os_errors(f"cannot write {out}", "Free disk space, or name another file by --out"):
        begin = out.read_bytes()[:4096] if out.is_file() else b""
        if begin and _TITLE_MARKER not in begin:
            raise UsageError(
                f"cannot write {out}: it holds something other than a report. Fix: name another file by --out"
            )
        out.parent.mkdir(parents=True, exist_ok=True)
        # Not through a temporary file: `out` may be a link, or a device such as /dev/stdout.
        out.write_bytes(page)
    return len(page)


def _resource_text(name: str) -> Any:
    return (resources.files("torchtune_ext.telemetry") / "page" / name).read_text(encoding="utf-8")
