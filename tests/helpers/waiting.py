"""Waits of tests that have threads and processes."""

import threading
import time
from pathlib import Path


def wait_until(condition, seconds=60):
    """Returns once the condition holds; it is an error when it does not within so many seconds."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, "did not happen in time"
        time.sleep(0.002)


def engine_pid(engine, lane=0):
    """Process id of vLLM's engine in the present life; 0 while there is none."""
    import psutil

    core = engine._pool.lanes[lane].core
    try:
        children = psutil.Process(core.group).children() if core is not None else []
        return next((child.pid for child in children if child.name() == "vllm-engine"), 0)
    except psutil.NoSuchProcess:
        return 0


def ended(pid):
    """Whether a process has ended. A zombie has: only its parent has not asked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def in_thread(work):
    """Runs `work` in a thread. Returns the thread and a list, which gets the result or the error."""
    outcome = []

    def run():
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    # A test that fails must not wait for it when the process ends.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome
