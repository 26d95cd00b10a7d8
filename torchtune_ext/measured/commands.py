"""Runs a command that may hang, flood its output or leave children behind, such as a compiler with a hostile source."""

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtune_ext.measured.cgroups import NO_GROUP, Group

END_S = 2.0  # seconds until killed processes are gone


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended."""

    status: int | None  # exit status, negative for a signal; None: it was killed at its deadline, or for its output
    output: str
    errors: str
    cause: str  # why it was killed, "" if it was not
    timed_out: bool  # it was killed at its deadline
    seconds: float


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    deadline_s: float,
    max_bytes: int,
    pass_fds: Sequence[int] = (),
    group: Group = NO_GROUP,
) -> Finished:
    """Runs the command and kills its process group when it has not ended in time or says too much.

    `group` is that in which the command puts itself. It goes with the command.

    Raises:
        OSError: it cannot be started.
    """
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
        cwd=folder,
        pass_fds=pass_fds,
        start_new_session=True,
    )
    parts: dict[str, list[bytes]] = {"output": [], "errors": []}
    timed_out, cause = False, ""
    with process.stdout, process.stderr, selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, "output")
        selector.register(process.stderr, selectors.EVENT_READ, "errors")
        try:
            timed_out = not _read(selector, parts, start + deadline_s, max_bytes)
            if not timed_out and selector.get_map():
                cause = f"it wrote more than {max_bytes} bytes"
            elif not timed_out:
                process.wait(max(0.1, start + deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            # Also after a good end: what it left behind shares its process group.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
            group.close()
            # What was killed is gone when nobody holds the other ends any more.
            _read(selector, {"output": [], "errors": []}, time.monotonic() + END_S, max_bytes=1 << 30)
    if timed_out:
        cause = f"it did not end within {deadline_s:g} s"
    output, errors = (b"".join(parts[name]).decode(errors="replace") for name in ("output", "errors"))
    return Finished(None if cause else process.returncode, output, errors, cause, timed_out, time.monotonic() - start)


def _read(selector: selectors.BaseSelector, parts: dict[str, list[bytes]], end: float, max_bytes: int) -> bool:
    """Reads until all ends are closed or `max_bytes` have come. Returns whether that was before `end`."""
    said = 0
    while selector.get_map():
        ready = selector.select(max(0.0, end - time.monotonic()))
        if not ready and time.monotonic() >= end:
            return False
        for key, _ in ready:
            data = os.read(key.fd, 1 << 16)
            said += len(data)
            parts[key.data].append(data)
            if not data:
                selector.unregister(key.fileobj)
        if said > max_bytes:
            return True
    return True
