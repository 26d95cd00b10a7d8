"""Waits of tests that have threads and processes."""

import threading
import time


def wait_until(condition, seconds=60):
    """Returns once the condition holds; it is an error when it does not within so many seconds."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, "did not happen in time"
        time.sleep(0.002)


def in_thread(work):
    """Runs `work` in a thread. Returns the thread and a list, which gets the result or the error."""
    outcome = []

    def run():
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome
