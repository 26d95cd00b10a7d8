"""Waits for tests with threads and processes."""

import threading
import time
from pathlib import Path


def wait_until(condition, seconds=60):
    """Return once the condition holds; fail after `seconds`."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, "did not happen in time"
        time.sleep(0.002)


def engine_pid(engine, replica=0):
    """Return the process id of vLLM's current engine process; 0 if it does not run."""
    import psutil

    core = engine._pool.replicas[replica].backend
    try:
        children = psutil.Process(core.process_group).children() if core is not None else []
        return next((child.pid for child in children if child.name() == "vllm-engine"), 0)
    except psutil.NoSuchProcess:
        return 0


def has_exited(pid):
    """Whether a process has exited. A zombie has exited, but its parent has not reaped it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def start_thread(work):
    """Run `work` in a thread. Return the thread and a list, which receives the result or the error."""
    outcome = []

    def run():
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    # A failed test must not wait for the thread at process exit.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome
