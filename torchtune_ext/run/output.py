"""Text for the user. A reader who goes away (`| head`, a closed terminal) ends the text, not the run."""

import atexit
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm

log = logging.getLogger(__name__)


def say(text: str, file: TextIO | None = None) -> None:
    """Prints lines at once, above bars that are drawn at the moment. `file`: None for `sys.stdout`."""
    out = sys.stdout if file is None else file
    if out is None:  # a process may be started without standard output
        return

    def write() -> None:
        out.write(text + "\n")
        out.flush()

    def above_bars() -> None:
        with tqdm.external_write_mode(file=out):
            attempt(out, write)

    attempt(sys.stderr, above_bars)  # where the bars are, which are cleared and drawn again


def attempt(stream: TextIO | None, write: Callable[[], Any]) -> bool:
    """Whether `write`, which writes to `stream`, could do so.

    The first time that it cannot, a warning says so, and the descriptor leads to the null device from then on: what still
    waits in the buffers has a place to go, so that the flush at the end of the interpreter does not fail and set the exit
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
    except (AttributeError, OSError, ValueError):  # none, a stream in memory, or a closed one
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


@atexit.register
def _flush() -> None:
    """Before the interpreter does, for what others printed."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            attempt(stream, stream.flush)
