"""Terminal width and styled text; respects NO_COLOR (https://no-color.org)."""

import logging
import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import TextIO

RED, YELLOW, BOLD = "1;31", "33", "1"


def terminal_width(stream: TextIO | None) -> int | None:
    """Return the columns of the terminal of a stream; None if the stream is not a terminal."""
    if stream is None:
        return None
    try:
        size = os.get_terminal_size(stream.fileno())
    except (AttributeError, OSError, ValueError):
        # The stream is in memory, closed, or not a terminal.
        return None
    # A terminal in a container sometimes reports the size 0 x 0.
    return size.columns if size.lines and size.columns else None


def apply_style(text: str, style: str, stream: TextIO | None) -> str:
    """Return text in one of the styles above if the stream is a terminal; otherwise plain text."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or terminal_width(stream) is None
    return text if plain else f"\033[{style}m{text}\033[0m"


def replace_unencodable() -> None:
    """Make stdout and stderr write ? for unencodable characters, so no output ends a run."""
    for stream in (sys.stdout, sys.stderr):
        # Keep an error handler that the user has set (PYTHONIOENCODING=ascii:xmlcharrefreplace).
        if isinstance(stream, TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def run_until_closed(work: Callable[[], int | None]) -> int:
    """Returns the exit status that `work` returns, or 0 if the reader closes stdout while it runs."""
    try:
        try:
            status = work() or 0
        except SystemExit as error:
            # argparse exits after it has printed --help.
            if error.code:
                raise
            status = 0
        # Flush here, where a closed pipe can still be caught.
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has read enough (`| head -1`). Python flushes stdout at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def style_warnings() -> None:
    """Color warnings on a terminal, unless the user has configured logging."""
    # Python uses this handler only while no other handler is configured.
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(logging.Formatter(apply_style("%(message)s", YELLOW, sys.stderr)))
