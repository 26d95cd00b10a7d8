"""The worker process of `processes.py`: a script that calls an object with the arguments that arrive on a socket.

    python -P worker_process.py FD PARENT_PID

message                        answer
(sys.path, pickled object)     ("ready", None, "", False) or ("failed", None, cause, False)
the arguments of a call        ("returned", value, "", is_spent) or ("raised", None, cause, is_spent)

The process is spent if its last calls have failed, unlike earlier ones: one may have ruined it for all later ones, by
closing its output, lowering a limit or deleting a module. An object may say itself that its call has `failed`.
"""

import os
import pickle
import signal
import sys
import traceback
from io import TextIOWrapper
from multiprocessing.connection import Connection

MAX_CAUSE_CHARS = 1000
MAX_FAILURES = 5  # failed calls in a row after which a process is spent


def error_line(error: BaseException) -> str:
    """Returns the last line of a traceback with the place: "ValueError: no digits (my_task.py:12)"."""
    lines = traceback.TracebackException(type(error), error, None)
    lines.__notes__ = None  # they would come after the error
    text = [*lines.format_exception_only()][-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return text[:MAX_CAUSE_CHARS] + place


def main(fd: int, parent_pid: int) -> None:
    """Answers the messages on the socket `fd` until the parent closes it."""
    # If memory runs out, the kernel kills this process first, and not the trainer or an engine.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    if isinstance(sys.stdout, TextIOWrapper):
        # Otherwise a process that is killed loses what it has printed.
        sys.stdout.reconfigure(line_buffering=True, errors="replace")
    parent = Connection(fd)
    # The import below and those of the object have to find what they find in the trainer. So the object stays pickled
    # until the path is set.
    sys.path[:], payload = parent.recv()
    from torchtune_ext.run.process_env import die_with_parent

    die_with_parent(parent_pid)
    try:
        target = pickle.loads(payload)
    except BaseException as error:  # noqa: BLE001 (the parent raises it as an error of its own)
        parent.send(("failed", None, error_line(error), False))
        return
    parent.send(("ready", None, "", False))
    pid, has_worked, failures = os.getpid(), False, 0
    while True:
        try:
            message = parent.recv_bytes()
        except (EOFError, ConnectionError):
            # The parent closed the socket. By returning, the process ends like any program and runs its exit functions.
            return
        try:
            try:
                value = target(*pickle.loads(message))
            finally:
                # An alarm that the call left set would kill this process during a later one.
                for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
                    signal.setitimer(timer, 0)
            failures = failures + 1 if getattr(target, "failed", False) else 0
            has_worked |= not failures
            answer = pickle.dumps(("returned", value, "", has_worked and failures >= MAX_FAILURES))
        except BaseException as error:  # noqa: BLE001 (reported to the parent)
            failures += 1
            answer = pickle.dumps(("raised", None, error_line(error), has_worked and failures >= MAX_FAILURES))
        if os.getpid() != pid:
            # The call forked, and this is the child, which must not answer.
            os._exit(0)
        parent.send_bytes(answer)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
    except (EOFError, ConnectionError):
        # The parent ended before it sent the object, or while this process was about to answer.
        pass
