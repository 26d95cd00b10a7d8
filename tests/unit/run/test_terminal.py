"""Output on a pseudo-terminal of a given width."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

SCREEN = """
import sys
from torchtune_ext.run.errors import UsageError, report_errors
from torchtune_ext.run.output import format_labels, print_text
from torchtune_ext.telemetry.progress import Progress
progress = Progress(total_steps=3)
progress.log_step(1, {"reward/mean": 0.5, "mismatch/mean_abs": 1e-3, "time/step": 1.0})
print_text(format_labels([("objective", "a text of some twenty words " * 4), ("files", "runs/tiny")]))
with report_errors():
    raise UsageError("a mistake")
"""


def screen(columns, **variables):
    """Return the output on a terminal with this number of columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm"} | variables
    with subprocess.Popen([sys.executable, "-c", SCREEN], stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        text = b""
        try:
            while part := os.read(ours, 4096):
                text += part
        except OSError:  # the terminal closes with the process
            pass
        os.close(ours)
    assert process.returncode == 2
    return text.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("columns, titles", [(120, 14), (80, 9), (50, 5)])
def test_lines_fit_the_terminal(columns, titles):
    lines = screen(columns, NO_COLOR="1").splitlines()
    assert all(len(line) <= columns for line in lines), lines
    assert len(lines[0].split()) == titles and lines[0].split()[:2] == ["step", "reward"]
    assert (
        lines[2].startswith("objective: a text of")
        and lines[3].startswith(" " * 11)
        and lines[-1] == "error: a mistake"
    )
    assert "\x1b" not in "".join(lines)


def test_terminal_error_is_colored_where_supported():
    assert screen(80).splitlines()[-1] == "\x1b[1;31merror:\x1b[0m a mistake"
    assert screen(80, TERM="dumb").splitlines()[-1] == "error: a mistake"
