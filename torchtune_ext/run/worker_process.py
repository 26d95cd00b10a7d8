"""The worker process of `processes.py`: a script that calls an object with the arguments that arrive on a socket.

    python -P worker_process.py FD PARENT_PID

It is a plain subprocess. A process of `multiprocessing` would import the trainer's `__main__` (the recipe, and with it
torch) a second time.

The first message is (sys.path, pickled object). The answer is ("ready", None, "") or ("failed", None, cause). Each later
message holds the arguments of a call, and the answer is ("returned", value, "") or ("raised", None, cause).

When the parent closes the socket, this process ends as Python programs do, so that what `atexit` knows is done. The kernel
kills it when the thread that started it ends, however it ends. The process leads its own session, so that Ctrl-C in the
trainer's terminal does not reach it.
"""

import os
import pickle
import sys
import traceback
from multiprocessing.connection import Connection

MAX_CAUSE_CHARS = 1000


def last_line(error: BaseException) -> str:
    """Returns the last line of a traceback and the place of the error: "ValueError: no digits (my_task.py:12)"."""
    text = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return text[:MAX_CAUSE_CHARS] + place


def main(fd: int, parent_pid: int) -> None:
    """Receives the object and then arguments from the socket `fd`, and answers until the parent closes the socket."""
    # If memory runs out, this process is what the kernel ends, and not the trainer or an engine.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    if sys.stdout is not None:
        # Otherwise a process that is killed takes with it what it has printed.
        sys.stdout.reconfigure(line_buffering=True)
    parent = Connection(fd)
    sys.path[:], payload = parent.recv()
    from torchtune_ext.run.parent import die_with_parent

    die_with_parent(parent_pid)
    try:
        target = pickle.loads(payload)
    except Exception as error:  # noqa: BLE001 (whatever it is, the parent raises it as an error of its own)
        parent.send(("failed", None, last_line(error)))
        return
    parent.send(("ready", None, ""))
    pid = os.getpid()
    while True:
        try:
            message = parent.recv_bytes()
        except (EOFError, ConnectionError):
            # The parent closed the socket.
            return
        try:
            answer = pickle.dumps(("returned", target(*pickle.loads(message)), ""))
        except (Exception, SystemExit) as error:  # noqa: BLE001 (the parent is told)
            answer = pickle.dumps(("raised", None, last_line(error)))
        if os.getpid() != pid:
            # The object forked, and this is the child, which must not answer.
            os._exit(0)
        parent.send_bytes(answer)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
    except (EOFError, ConnectionError):
        # The parent ended before it sent the object, or while this process was about to answer.
        pass
