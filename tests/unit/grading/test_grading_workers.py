"""The processes that grade: killed, stopped, shared by threads, interrupted, closed."""

import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from helpers.scripted_task import PROBLEM, Scripted
from helpers.waiting import has_exited, wait_until
from torchtune_ext.grading import Grader, gather_results
from torchtune_ext.run.process_env import copy_environment


def test_workers_stay_and_have_no_torch():
    with Grader(Scripted(), workers=1) as grader:
        first, second = (grader.grade([(PROBLEM, "pid")])[0].reward for _ in range(2))
        assert first == second != os.getpid()
        for module in ("torch", "transformers", "vllm"):
            assert grader.grade([(PROBLEM, f"imported {module}")])[0].reward == 0.0


def test_grading_worker_killed_while_idle_is_replaced():
    with Grader(Scripted(), workers=1) as grader:
        pid = int(grader.grade([(PROBLEM, "pid")])[0].reward)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: has_exited(pid))
        assert {o.kind for o in grader.grade([(PROBLEM, "reward 1")] * 20)} == {"scored"}


def test_a_stopped_worker_is_replaced():
    with Grader(Scripted(), workers=1, timeout_s=2.0) as grader:
        os.kill(int(grader.grade([(PROBLEM, "pid")])[0].reward), signal.SIGSTOP)
        first, second = grader.grade([(PROBLEM, "reward 1"), (PROBLEM, "reward 2")])
    assert first.kind == "timed_out" and second.reward == 2.0


def test_workers_outlive_the_thread_that_made_the_grader():
    """The kernel's death signal is tied to a thread, not to the process."""
    graders: list[Grader] = []
    pids: list[float] = []

    def in_a_thread(work) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(timeout=30)
        # It ends for Python a moment before it ends for the kernel.
        wait_until(lambda: not Path(f"/proc/self/task/{thread.native_id}").exists())

    def make() -> None:
        graders.append(Grader(Scripted()))
        ask()

    def ask() -> None:
        pids.append(graders[0].grade([(PROBLEM, "pid")])[0].reward)

    in_a_thread(make)
    with graders[0]:
        in_a_thread(ask)
        in_a_thread(ask)
    assert len(pids) == 3 and len(set(pids)) == 1


def test_threads_share_a_grader():
    results: dict[int, list[float]] = {}
    with Grader(Scripted(), workers=2) as grader:

        def work(base: int) -> None:
            items = [(PROBLEM, f"reward {base + i}") for i in range(100)]
            results[base] = [outcome.reward for outcome in grader.grade(items)]

        threads = [threading.Thread(target=work, args=(1000 * t,)) for t in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
    assert results == {base: [base + i for i in range(100)] for base in (0, 1000, 2000)}


def test_an_interrupted_call_leaves_no_stale_answers(tmp_path):
    """Ctrl-C in the middle of a call: the answer of that call must not become one of the next, and what it had not begun yet
    is left out."""
    # A shell that starts the tests in the background makes them ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with Grader(Scripted(), workers=1) as grader:
        pids = grader.processes.pids()
        try:
            with pytest.raises(KeyboardInterrupt):
                grader.grade([(PROBLEM, f"interrupts {tmp_path / 'go on'}"), *[(PROBLEM, "sleeps 60")] * 5])
        finally:
            signal.signal(signal.SIGINT, before)
        (tmp_path / "go on").touch()
        assert [o.reward for o in grader.grade([(PROBLEM, "reward 2")])] == [2.0]
        assert grader.processes.pids() == pids, "a text that sleeps would have cost its process"


def test_grading_workers_slow_text_delays_no_other(tmp_path):
    with Grader(Scripted(), workers=2, timeout_s=60.0) as grader:
        slow = grader.submit(PROBLEM, f"waits {tmp_path / 'go on'}")
        fast = [grader.submit(PROBLEM, f"reward {i}") for i in range(50)]
        assert [future.result(timeout=50)[0].reward for future in fast] == list(range(50))
        assert not slow.done()
        (tmp_path / "go on").touch()
        assert slow.result(timeout=50)[0].kind == "scored"


def test_grader_close_ends_pending_futures():
    grader = Grader(Scripted(), workers=1, timeout_s=60.0)
    futures = [grader.submit(PROBLEM, "sleeps 60") for _ in range(3)]
    grader.close()
    for future in futures:
        with pytest.raises(RuntimeError, match="closed"):
            future.result(timeout=5)
    with pytest.raises(RuntimeError, match="closed"):
        grader.submit(PROBLEM, "reward 1")


def test_grading_workers_slow_callback_causes_no_timeout(tmp_path):
    """The second text is graded while a callback of the first one holds up the thread that takes the answers."""
    both, begun, called, over = (tmp_path / name for name in ("both", "begun", "called", "over"))

    def slow(future):
        called.touch()
        wait_until(over.exists)
        time.sleep(3.5)  # beyond the deadline of the second

    with Grader(Scripted(), workers=2, timeout_s=3.0) as grader:
        # Both processes have started.
        wait_until(lambda: len({each.reward for each in grader.grade([(PROBLEM, "pid")] * 20)}) == 2)
        first = grader.submit(PROBLEM, f"waits {both}")
        second = grader.submit(PROBLEM, f"answers {begun} {called} {over}")
        first.add_done_callback(slow)
        wait_until(begun.exists)
        both.touch()
        assert second.result(timeout=60)[0].kind == "scored"


def test_grading_workers_failed_process_start_raises_at_once(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        Grader(Scripted())


def test_grader_failure_during_cancel_completes_all_futures():
    class RefusesToLoad(Scripted):
        def __reduce__(self):
            return (int, ("not a number",))

    for _ in range(5):
        with Grader(RefusesToLoad()) as grader:
            futures = []
            # A future raises it, or `submit` where it is over already.
            with pytest.raises(RuntimeError, match="could not start"):
                for _ in range(200):
                    futures.append(grader.submit(PROBLEM, "reward 1"))
                gather_results(futures)
            done, waiting = concurrent.futures.wait(futures, timeout=10)
            assert len(done) == len(futures) and not waiting


def test_close_twice_and_use_after():
    grader = Grader(Scripted())
    grader.close()
    grader.close()
    with pytest.raises(RuntimeError, match="closed"):
        grader.grade([(PROBLEM, "reward 1")])


def test_workers_start_while_another_thread_changes_the_environment():
    """As vLLM's configuration does beside them: exec must not read the table that is being rewritten."""
    stop = threading.Event()

    def change():
        while not stop.is_set():
            for i in range(300):
                os.environ[f"TTE_TEST_{i}"] = "x" * 200
            for i in range(300):
                del os.environ[f"TTE_TEST_{i}"]

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(150):
            assert subprocess.run(["true"], env=copy_environment(), check=False).returncode == 0
    finally:
        stop.set()
        thread.join()
