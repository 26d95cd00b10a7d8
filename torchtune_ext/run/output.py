"""Prints text for the user. If the reader goes away (`| head`, a closed terminal), the run goes on without text."""

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

# The line with which a recipe says that its engines are ready. Programs that start a run elsewhere wait for it.
ENGINE_READY_PREFIX = "engine:    ready after"
LABEL_WIDTH = 11  # characters before the text in the lines that a run begins and ends with


def print_text(text: str, file: TextIO | None = None) -> None:
    """Prints `text` at once, above the progress bars. `file=None` means `sys.stdout`."""
    out = sys.stdout if file is None else file
    # `sys.stdout` is None in a process that has no standard output.
    if out is None:
        return

    def write() -> None:
        out.write(text + "\n")
        out.flush()

    def above_bars() -> None:
        with tqdm.external_write_mode(file=out):
            try_write(out, write)

    # tqdm clears the bars, which are on stderr, and then draws them again. Both may fail, too.
    try_write(sys.stderr, above_bars)


def format_labels(lines: Sequence[tuple[str, str]]) -> str:
    """Returns a table of (label, text), whose texts are wrapped if stdout is a terminal."""
    room = (terminal_width(sys.stdout) or sys.maxsize) - LABEL_WIDTH
    # Nothing fits beside the labels on a terminal that is narrower than they are, so its lines stay as they are.
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
    """Returns a table, one line per row, with its columns aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def try_write(stream: TextIO | None, write: Callable[[], Any]) -> bool:
    """Calls `write`, which writes to `stream`, and returns whether it succeeded. The first failure is a warning."""
    try:
        write()
    except OSError as error:
        log.warning("%s takes no more text (%s): the run goes on without it", getattr(stream, "name", stream), error)
        # What is in the buffer of the stream can still be written to the null device. Otherwise the interpreter's last
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
    # Libraries print without `say`, so their text may be in the buffers. The interpreter's own flush comes after this.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            try_write(stream, stream.flush)
