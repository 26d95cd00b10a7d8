"""The worker process of `processes.py`: call an object with arguments from a socket.

    python -P worker_process.py FD PARENT_PID

message                     answer
(sys.path, pickled object)  ("ready", None, "", False) or ("failed", None, cause, False)
the arguments of a call     ("returned", value, "", is_spent) or ("raised", None, cause, is_spent)

The process is spent if its last `MAX_FAILURES` calls have failed after earlier calls succeeded. A
call may have broken the process for all later calls, by closing its output, lowering a limit or
deleting a module. An object may report a failed call itself by its attribute `failed`.
"""

import os
import pickle
import signal
import sys
import traceback
from io import TextIOWrapper
from multiprocessing.connection import Connection

MAX_CAUSE_CHARS = 1000
MAX_FAILURES = 5  # consecutive failed calls after which a process is spent


def error_line(error: BaseException) -> str:
    """Return the last line of a traceback with its location: "ValueError: x (my_task.py:12)"."""
    lines = traceback.TracebackException(type(error), error, None)
    lines.__notes__ = None  # notes would follow the error
    text = [*lines.format_exception_only()][-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return text[:MAX_CAUSE_CHARS] + place


def main(fd: int, parent_pid: int) -> None:
    """Answer the messages on the socket `fd` until the parent closes it."""
    # If memory runs out, the kernel kills this process before the trainer or an engine.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    if isinstance(sys.stdout, TextIOWrapper):
        # Otherwise a killed process loses its buffered output.
        sys.stdout.reconfigure(line_buffering=True, errors="replace")
    parent = Connection(fd)
    # Imports must resolve as in the trainer, so the object stays pickled until the path is set.
    sys.path[:], payload = parent.recv()
    from torchtune_ext.run.process_env import die_with_parent

    die_with_parent(parent_pid)
    try:
        target = pickle.loads(payload)
    except BaseException as error:  # noqa: BLE001 (the parent raises a RunFailure)
        parent.send(("failed", None, error_line(error), False))
        return
    parent.send(("ready", None, "", False))
    pid, has_worked, failures = os.getpid(), False, 0
    while True:
        try:
            message = parent.recv_bytes()
        except (EOFError, ConnectionError):
            return  # the parent closed the socket; the process runs its exit functions
        try:
            try:
                value = target(*pickle.loads(message))
            finally:
                # A pending alarm of this call would kill the process during a later call.
                for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
                    signal.setitimer(timer, 0)
            failures = failures + 1 if getattr(target, "failed", False) else 0
            has_worked |= not failures
            answer = pickle.dumps(("returned", value, "", has_worked and failures >= MAX_FAILURES))
        except BaseException as error:  # noqa: BLE001 (reported to the parent)
            failures += 1
            answer = pickle.dumps(("raised", None, error_line(error), has_worked and failures >= MAX_FAILURES))
        if os.getpid() != pid:
            # The call forked. The child must not answer.
            os._exit(0)
        parent.send_bytes(answer)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
    except (EOFError, ConnectionError):
        pass  # the parent ended before it sent the object, or before the answer
