"""Calls in processes that can be killed: what becomes of each, deadlines that wait, folders, and a quiet end.

How a process is killed, stopped, shared and interrupted: tests/unit/grading/test_grading_workers.py, which has them below a Grader.
"""

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cloudpickle
import pytest

from helpers import waiting
from helpers.waiting import has_exited, wait_until
from torchtune_ext.run.processes import ProcessPool, start_deadline_s


class Target:
    """Perform the action named by the first argument."""

    def __call__(self, verb, *rest):
        return getattr(self, verb)(*rest)

    def same(self, value):
        return value

    def raises(self):
        raise ValueError("no digits")

    def function(self):
        return lambda: 1

    def hostile(self):
        return Unreadable()

    def dies(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def sleeps(self, seconds):
        time.sleep(seconds)

    def folder(self):
        path = Path(tempfile.mkdtemp())
        (path / "file").write_text("x")
        return path

    def badness(self):
        return int(Path("/proc/self/oom_score_adj").read_text())

    def notes_its_end(self, file):
        atexit.register(Path(file).write_text, "ended")

    def starts_a_child(self):
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


class Unreadable:
    def __reduce__(self):
        return (int, ("not a number",))


@pytest.fixture
def processes():
    instance = ProcessPool(cloudpickle.dumps(Target()), 1, "testing", "target")
    yield instance
    instance.close(RuntimeError("closed"))
    assert not instance.folder.exists()


def answer(processes, *arguments, timeout_s=20.0, **more):
    """Return the result of the call, or (kind of failure, cause)."""
    return processes.submit(arguments, timeout_s, lambda *failure: failure, **more).result(timeout=60)


def test_process_call_outcomes_are_distinguished(processes):
    answers = [
        answer(processes, "same", 5),
        answer(processes, "raises"),
        answer(processes, "dies"),
        answer(processes, "sleeps", 60, timeout_s=0.2),
        answer(processes, "same", 6, timeout_s=1e9),
    ]
    kind, cause = answers.pop(1)
    assert kind == "raised" and "ValueError: no digits (test_processes.py:" in cause
    assert answers == [5, ("died", "signal SIGSEGV"), ("stalled", "no answer within 0.2 s; the process was killed"), 6]


def test_process_unpicklable_values_are_call_errors(processes):
    assert "<lambda>" in answer(processes, "function")[1]
    kind, cause = answer(processes, "hostile")
    assert kind == "raised" and "the answer cannot be read: ValueError: invalid lit" in cause
    kind, cause = answer(processes, "same", (i for i in range(3)))
    assert kind == "raised" and cause.startswith("cannot be sent to a testing process: TypeError: cannot pickle")
    assert answer(processes, "same", 7) == 7


def test_process_callback_error_reaches_waiting_caller(processes):
    with pytest.raises(ZeroDivisionError):
        processes.submit(("raises",), 20.0, lambda kind, cause: 1 / 0).result(timeout=60)
    assert answer(processes, "same", 5) == 5


def test_folders_go_with_their_process_however_it_ends(processes):
    first = answer(processes, "folder")
    assert first.exists() and first.parent.parent == processes.folder and first.parent.stat().st_mode & 0o777 == 0o711
    killed = processes.pids()[0]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: has_exited(killed))  # a call that was sent before the crash fails with it
    second = answer(processes, "folder")
    assert second.exists() and not first.parent.exists() and len(os.listdir(processes.folder)) == 1


def test_a_start_that_fails_ends_those_before_it(monkeypatch):
    start, workers = ProcessPool._start_worker, []

    def once(self):
        if workers:
            raise OSError("no more processes")
        workers.append(start(self))
        return workers[0]

    monkeypatch.setattr(ProcessPool, "_start_worker", once)
    with pytest.raises(OSError, match="no more processes"):
        ProcessPool(cloudpickle.dumps(Target()), 2, "testing", "target")
    wait_until(lambda: workers[0].process.returncode is not None, 20)


@pytest.mark.parametrize("count, seconds", [(1, 120.0), (16, 120.0), (32, 240.0)])
def test_many_processes_have_longer_to_start(monkeypatch, count, seconds):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert start_deadline_s(count) == seconds


def test_a_quiet_end_lets_processes_clean_up(tmp_path):
    processes = ProcessPool(cloudpickle.dumps(Target()), 2, "testing", "target")
    answer(processes, "notes_its_end", str(tmp_path / "a"))
    begin = time.monotonic()
    processes.close(RuntimeError("closed"), grace_s=20.0)
    assert time.monotonic() - begin < 10 and (tmp_path / "a").read_text() == "ended"
    with pytest.raises(RuntimeError, match="closed"):
        processes.submit(("same", 1), 1.0, print)


def test_process_close_does_not_wait_for_hung_call(processes):
    child = answer(processes, "starts_a_child")
    hanging = processes.submit(("sleeps", 600), 600.0, print)
    wait_until(lambda: processes._workers[0].call is not None)  # else the process would end by itself
    begin = time.monotonic()
    processes.close(RuntimeError("closed"), grace_s=0.5)
    assert 0.4 < time.monotonic() - begin < 10 and not processes.folder.exists()
    with pytest.raises(RuntimeError, match="closed"):
        hanging.result(1)
    wait_until(lambda: has_exited(child))


KILLED = f"""
import sys, time, cloudpickle
sys.path[:0] = {[str(Path(__file__).parent), str(Path(waiting.__file__).parents[1])]!r}
from test_processes import ProcessPool, Target, answer
processes = ProcessPool(cloudpickle.dumps(Target()), 1, "testing", "target")
print(processes.pids()[0], answer(processes, "starts_a_child"), answer(processes, "folder"), flush=True)
time.sleep(600)
"""


def test_killed_trainer_leaves_no_processes_or_folder():
    """No processes, no children of them, and no temporary folder remain."""
    trainer = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    *pids, folder = trainer.stdout.readline().split()
    assert len(pids) == 2 and Path(folder).is_dir() and not any(has_exited(int(pid)) for pid in pids)
    trainer.kill()
    trainer.wait()
    wait_until(lambda: all(has_exited(int(pid)) for pid in pids) and not Path(folder).parent.exists())


def test_worker_processes_are_preferred_by_oom_killer(processes):
    assert answer(processes, "badness") == 1000
