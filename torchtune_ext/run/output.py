"""Prints text for the user. If the reader goes away (`| head`, a closed terminal), the run goes on without text."""

import atexit
import logging
import math
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from tqdm import tqdm

from torchtune_ext.run.terminal import width

log = logging.getLogger(__name__)

# The line with which a recipe says that its engines are ready. Who started the run on another machine waits for it.
ENGINE_READY = "engine:    ready after"
LABEL = 11  # characters before the text in the lines that a run begins and ends with


def say(text: str, file: TextIO | None = None) -> None:
    """Prints `text` at once, above the progress bars that are on the screen. `file=None` means `sys.stdout`."""
    out = sys.stdout if file is None else file
    # `sys.stdout` is None in a process that was started without standard output.
    if out is None:
        return

    def write() -> None:
        out.write(text + "\n")
        out.flush()

    def above_bars() -> None:
        with tqdm.external_write_mode(file=out):
            attempt(out, write)

    # The bars are on stderr. To print above them, tqdm clears them and draws them again, which may fail as well.
    attempt(sys.stderr, above_bars)


def labelled(lines: Sequence[tuple[str, str]]) -> str:
    """Returns one line for each (label, text), the texts below each other, and wrapped where stdout is a terminal."""
    room = (width(sys.stdout) or math.inf) - LABEL
    wrapped = [
        textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
        if len(text) > room > LABEL
        else [text]
        for _, text in lines
    ]
    below = "\n" + " " * LABEL
    return "\n".join(
        f"{label + ':':<{LABEL}}{below.join(text)}" for (label, _), text in zip(lines, wrapped, strict=True)
    )


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table: a line for each row, cells of one column below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def attempt(stream: TextIO | None, write: Callable[[], Any]) -> bool:
    """Calls `write`, which writes to `stream`, and returns whether it succeeded.

    The first failure is logged as a warning. From then on the descriptor of the stream leads to the null device. Python
    can then empty its buffers into it. Otherwise the flush at the end of the interpreter would fail and set the exit
    status to 120.
    """
    try:
        write()
    except OSError as error:
        log.warning("%s takes no more text (%s): the run goes on without it", getattr(stream, "name", stream), error)
        _lead_away(stream)
        return False
    return True


def _lead_away(stream: TextIO | None) -> None:
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):
        # There is no stream, it is a stream in memory, or it is closed.
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


@atexit.register
def _flush() -> None:
    """Flushes both streams before the interpreter does, because other libraries may have printed without `say`."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            attempt(stream, stream.flush)
