"""The worker process of `grader.py`: started as a script, it grades what arrives on a socket until that closes.

    python -P worker_process.py FD PARENT_PID

It is a plain subprocess and not a `multiprocessing` one, because that would import the trainer's `__main__` (the
recipe, and with it torch) a second time. Messages: first (sys.path, task), answered by ("ready", "") or ("failed",
cause); then (problem, texts, together) one at a time, each answered by a (kind, reward, parts, note, cause) for each text: by
`grade_group` if together, else one by `grade`. The kernel kills this process
when the thread that started it ends, however it ends. It leads a session of its own, so that Ctrl-C in the trainer's
terminal does not reach it.
"""

import ctypes
import math
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
MAX_CAUSE_CHARS, MAX_NOTE_CHARS = 1000, 2000
FAILED_PART = "failed"  # the part of a Score that makes an outcome "policy_failed" when it is not 0


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel for SIGKILL when the parent goes; leaves at once when it has gone already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(0)


def last_line(error: BaseException) -> str:
    """The last line of a traceback and where it was raised: "ValueError: no digits (my_task.py:12)"."""
    text = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return text[:MAX_CAUSE_CHARS] + place


def failed(cause: str) -> tuple[str, float, dict[str, float], str, str]:
    """The answer for a text that could not be graded."""
    return "infra_failed", 0.0, {}, "", cause


def checked_all(scores, count: int) -> list[tuple[str, float, dict[str, float], str, str]]:
    """One answer for each of `count` texts that were graded together."""
    if not isinstance(scores, list | tuple) or len(scores) != count:
        what = f"{len(scores)} scores" if isinstance(scores, list | tuple) else type(scores).__name__
        return [failed(f"grade_group() returned {what} for {count} texts")] * count
    return [checked(score) for score in scores]


def checked(score) -> tuple[str, float, dict[str, float], str, str]:
    """(kind, reward, parts, note, cause) of what a grader returned."""
    from torchtune_ext.tasks.task import Score  # here, because sys.path arrives with the first message

    if not isinstance(score, Score):
        return failed(f"grade() returned {type(score).__name__}, not a Score")
    reward, parts = float(score.reward), {str(name): float(value) for name, value in score.parts.items()}
    for name, value in {"reward": reward, **parts}.items():
        if not math.isfinite(value):
            return failed(f"grade() returned {name}={value}, which is not finite")
    kind = "policy_failed" if parts.get(FAILED_PART) else "scored"
    return kind, reward, parts, str(score.note or "")[:MAX_NOTE_CHARS], ""


def main(fd: int, parent_pid: int) -> None:
    die_with_parent(parent_pid)
    parent = Connection(fd)
    try:
        sys.path[:], payload = parent.recv()
        task = pickle.loads(payload)
    except Exception as error:  # noqa: BLE001 (whatever it is, the parent raises it as an error of its own)
        parent.send(("failed", last_line(error)))
        return
    parent.send(("ready", ""))
    pid = os.getpid()
    while True:
        try:
            problem, texts, together = pickle.loads(parent.recv_bytes())
        except (EOFError, ConnectionError):
            return  # the parent closed the socket
        try:
            scores = task.grade_group(problem, list(texts)) if together else [task.grade(problem, texts[0])]
            answers = checked_all(scores, len(texts))
        except (Exception, SystemExit) as error:  # noqa: BLE001 (reported as infra_failed)
            answers = [failed(last_line(error))] * len(texts)
        if os.getpid() != pid:
            os._exit(0)  # a grader forked, and this is the child that came back: it has no say
        parent.send(answers)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
    except ConnectionError:
        pass  # the parent ended while this process was about to answer: nobody is left to hear of it
