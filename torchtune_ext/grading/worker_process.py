"""The worker process of `grader.py`: a script that grades the texts that arrive on a socket until the socket closes.

    python -P worker_process.py FD PARENT_PID

It is a plain subprocess. A process of `multiprocessing` would import the trainer's `__main__` (the recipe, and with it
torch) a second time.

The first message is (sys.path, task). The answer is ("ready", "") or ("failed", cause). Each later message is (problem,
texts, together). The answer is a list with (kind, reward, parts, note, cause) for each text. If `together` is true, the
texts are graded by `grade_group`; otherwise there is one text, graded by `grade`.

The kernel kills this process when the thread that started it ends, however it ends. The process leads its own session,
so that Ctrl-C in the trainer's terminal does not reach it.
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
FAILED_PART = "failed"  # if this part of a Score is not 0, the outcome is "policy_failed"


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when the parent ends. If the parent has ended already, exits at once."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(0)


def last_line(error: BaseException) -> str:
    """Returns the last line of a traceback and the place of the error: "ValueError: no digits (my_task.py:12)"."""
    text = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return text[:MAX_CAUSE_CHARS] + place


def failed(cause: str) -> tuple[str, float, dict[str, float], str, str]:
    """Returns the answer for a text that could not be graded."""
    return "infra_failed", 0.0, {}, "", cause


def checked_all(scores, count: int) -> list[tuple[str, float, dict[str, float], str, str]]:
    """Returns one answer for each of `count` texts that were graded together."""
    if not isinstance(scores, list | tuple) or len(scores) != count:
        what = f"{len(scores)} scores" if isinstance(scores, list | tuple) else type(scores).__name__
        return [failed(f"grade_group() returned {what} for {count} texts")] * count
    return [checked(score) for score in scores]


def checked(score) -> tuple[str, float, dict[str, float], str, str]:
    """Checks what a grader returned, and returns (kind, reward, parts, note, cause)."""
    # This import comes late, because sys.path arrives with the first message.
    from torchtune_ext.tasks.task import Score

    if not isinstance(score, Score):
        return failed(f"grade() returned {type(score).__name__}, not a Score")
    reward, parts = float(score.reward), {str(name): float(value) for name, value in score.parts.items()}
    for name, value in {"reward": reward, **parts}.items():
        if not math.isfinite(value):
            return failed(f"grade() returned {name}={value}, which is not finite")
    kind = "policy_failed" if parts.get(FAILED_PART) else "scored"
    return kind, reward, parts, str(score.note or "")[:MAX_NOTE_CHARS], ""


def main(fd: int, parent_pid: int) -> None:
    """Receives the task and then texts from the socket `fd`, and answers until the parent closes the socket."""
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
            # The parent closed the socket.
            return
        try:
            scores = task.grade_group(problem, list(texts)) if together else [task.grade(problem, texts[0])]
            answers = checked_all(scores, len(texts))
        except (Exception, SystemExit) as error:  # noqa: BLE001 (reported as infra_failed)
            answers = [failed(last_line(error))] * len(texts)
        if os.getpid() != pid:
            # A grader forked, and this is the child, which must not answer.
            os._exit(0)
        parent.send(answers)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
    except ConnectionError:
        # The parent ended while this process was about to answer.
        pass
