"""Print text for the user.

If the output is closed (`| head`, a closed terminal), the run continues without text.
"""

import atexit
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from tqdm import tqdm

from torchtune_ext.run.terminal import terminal_width

log = logging.getLogger(__name__)

# A recipe prints this line when its engines are ready. Programs that start runs may wait for it.
ENGINE_READY_PREFIX = "engine:    ready after"
LABEL_WIDTH = 11  # width of the labels in the header and the summary of a run


def print_text(text: str, file: TextIO | None = None) -> None:
    """Print and flush `text` above the progress bars. `file=None` means `sys.stdout`."""
    out = sys.stdout if file is None else file
    # `sys.stdout` is None in a process without standard output.
    if out is None:
        return

    def write() -> None:
        out.write(text + "\n")
        out.flush()

    def above_bars() -> None:
        with tqdm.external_write_mode(file=out):
            try_write(out, write)

    # tqdm clears and redraws the bars on stderr, which may fail as well.
    try_write(sys.stderr, above_bars)


def format_labels(lines: Sequence[tuple[str, str]]) -> str:
    """Format a table of (label, text). Texts are wrapped if stdout is a terminal."""
    room = (terminal_width(sys.stdout) or sys.maxsize) - LABEL_WIDTH
    # On a terminal narrower than the labels, lines are not wrapped.
    wrapped = [
        textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
        if len(text) > room > LABEL_WIDTH
        else [text]
        for _, text in lines
    ]
    below = "\n" + " " * LABEL_WIDTH
    return "\n".join(
        f"{label + ':':<{LABEL_WIDTH}}{below.join(text)}" for (label, _), text in zip(lines, wrapped, strict=True)
    )


def format_columns(rows: Sequence[Sequence[str]]) -> str:
    """Format a table, one line per row, with left-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def try_write(stream: TextIO | None, write: Callable[[], Any]) -> bool:
    """Call `write`, which writes to `stream`.

    On the first failure, a warning is logged and the stream is redirected to the null device.

    Returns:
        Whether the write succeeded.
    """
    try:
        write()
    except OSError as error:
        log.warning("%s is closed (%s); the run continues without this output", getattr(stream, "name", stream), error)
        # The buffer of the stream is flushed to the null device. Otherwise the interpreter's last
        # flush would fail and set the exit status to 120.
        _redirect_to_null(stream)
        return False
    return True


def _redirect_to_null(stream: TextIO | None) -> None:
    if stream is None:
        return
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):
        # The stream is in memory, or closed.
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


@atexit.register
def _flush() -> None:
    # Libraries print without `print_text`. The interpreter would flush their text only later.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            try_write(stream, stream.flush)
