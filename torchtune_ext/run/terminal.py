"""How wide a terminal is, and text in color where it has any (NO_COLOR, https://no-color.org, is obeyed)."""

import logging
import os
import sys
from typing import TextIO

RED, YELLOW, BOLD = "1;31", "33", "1"


def width(stream: TextIO | None) -> int | None:
    """Returns the characters of a line of the terminal that a stream writes to; None where it is none, or has no lines (a
    container's, sometimes)."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (AttributeError, OSError, ValueError):
        # There is no stream, it is no terminal or in memory, or it is closed.
        return None
    return size.columns if size.lines and size.columns else None


def styled(text: str, style: str, stream: TextIO | None) -> str:
    """Returns text as a terminal shows it in a style, one of the above; as it is for another stream."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or width(stream) is None
    return text if plain else f"\033[{style}m{text}\033[0m"


def show_warnings() -> None:
    """Makes warnings stand out on a terminal, unless the user has configured logging."""
    logging.lastResort.setFormatter(logging.Formatter(styled("%(message)s", YELLOW, sys.stderr)))
