"""Grading workers as processes: none outlives the trainer, none leaks, and a copied recipe may define the task."""

import os
import runpy
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil

from torchtune_ext.grading import Grader
from torchtune_ext.tasks.task import Problem, Score

ROOT = Path(__file__).resolve().parents[2]
PROBLEM = Problem("p", ({"role": "user", "content": "?"},), answer=None)

TASK = """
    import os, signal, subprocess, sys, time
    from torchtune_ext.grading import Grader
    from torchtune_ext.tasks.task import Problem, Score

    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell has started with "&"
    BONUS = 0.5  # a global of the recipe, which the task uses

    class MyTask:
        def grade(self, problem, text):
            if text == "hang":
                time.sleep(600)
            if text == "pid":
                return Score(float(os.getpid()), {})
            return Score(len(text) + BONUS, {})

    PROBLEM = Problem("p", ({"role": "user", "content": "?"},), None)
"""


class Crashing:
    """Dies, hangs, or grades, as the text says."""

    def grade(self, problem: Problem, text: str) -> Score:
        if text == "crash":
            os._exit(1)
        if text == "hang":
            time.sleep(600)
        if text.startswith("child "):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(text.removeprefix("child ")).write_text(str(child.pid))
            time.sleep(600)
        return Score(1.0, {})


def script(path: Path, body: str) -> Path:
    path.write_text(textwrap.dedent(TASK) + textwrap.dedent(body))
    return path


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def gone(pids: list[int], within_s: float = 60.0) -> bool:
    """Whether all these processes end (a zombie has ended) in time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        alive = [pid for pid in pids if psutil.pid_exists(pid)]
        if all(_status(pid) == psutil.STATUS_ZOMBIE for pid in alive):
            return True
        time.sleep(0.05)
    return False


def _status(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def test_grader_twenty_crashes_leak_no_processes():
    me = psutil.Process()
    others = {child.pid for child in me.children(recursive=True)}  # of tests that ran before: compilers' workers
    texts = [text for _ in range(10) for text in ("ok", "crash", "ok", "hang", "ok")]
    with Grader(Crashing(), workers=2, timeout_s=0.3) as grader:
        grader.grade([(PROBLEM, "ok")])
        fds = me.num_fds()
        outcomes = grader.grade([(PROBLEM, text) for text in texts])
        assert me.num_fds() == fds
        assert len({child.pid for child in me.children(recursive=True)} - others) == 3  # two that grade, and the reaper
        expected = {"ok": "scored", "crash": "infra_failed", "hang": "timed_out"}
        assert [outcome.kind for outcome in outcomes] == [expected[text] for text in texts]
    assert {child.pid for child in me.children(recursive=True)} <= others


def test_hung_grader_children_end_with_it(tmp_path):
    note = tmp_path / "pid"
    with Grader(Crashing(), workers=1, timeout_s=1.0) as grader:
        assert grader.grade([(PROBLEM, f"child {note}")])[0].kind == "timed_out"
        assert gone([int(note.read_text())])


def test_sigkill_of_the_trainer_leaves_no_worker(tmp_path):
    """Also not those that are inside a grader which never returns."""
    trainer_file = script(
        tmp_path / "trainer.py",
        """
        grader = Grader(MyTask(), workers=3, timeout_s=600)
        pids = {int(o.reward) for o in grader.grade([(PROBLEM, "pid")] * 600)}
        print(*grader.processes.pids(), flush=True)
        grader.grade([(PROBLEM, "hang")] * 2)
        """,
    )
    trainer = subprocess.Popen([sys.executable, trainer_file], stdout=subprocess.PIPE, text=True, env=environment())
    try:
        pids = [int(word) for word in trainer.stdout.readline().split()]
        assert len(pids) == 3 and all(psutil.pid_exists(pid) for pid in pids)
        time.sleep(0.3)
        trainer.send_signal(signal.SIGKILL)
        trainer.wait(timeout=30)
        assert gone(pids)
    finally:
        trainer.kill()
        trainer.stdout.close()


def test_unclosed_grader_leaves_no_workers(tmp_path):
    trainer_file = script(
        tmp_path / "trainer.py",
        """
        grader = Grader(MyTask(), workers=2)
        grader.grade([(PROBLEM, "pid")])
        print(*grader.processes.pids(), flush=True)
        """,
    )
    done = subprocess.run(
        [sys.executable, trainer_file], capture_output=True, text=True, env=environment(), timeout=60, check=True
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2 and gone(pids) and done.stderr == ""


def test_ctrl_c_prints_no_worker_traceback(tmp_path):
    """SIGINT to the whole process group, as a terminal sends it."""
    trainer_file = script(
        tmp_path / "trainer.py",
        """
        with Grader(MyTask(), workers=2, timeout_s=600) as grader:
            grader.grade([(PROBLEM, "pid")] * 10)
            print(*grader.processes.pids(), flush=True)
            try:
                print("now", flush=True)
                grader.grade([(PROBLEM, "hang")] * 2)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
        """,
    )
    trainer = subprocess.Popen(
        [sys.executable, trainer_file],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    try:
        pids = [int(word) for word in trainer.stdout.readline().split()]
        assert trainer.stdout.readline() == "now\n"  # inside the try: an interrupt is caught from here on
        time.sleep(0.3)
        os.killpg(trainer.pid, signal.SIGINT)
        out, err = trainer.communicate(timeout=30)
    finally:
        trainer.kill()
    assert (trainer.returncode, out, err) == (0, "interrupted\n", "")
    assert len(pids) == 2 and gone(pids)


def test_grader_interrupt_received_by_other_thread_is_handled(tmp_path):
    """The kernel may give SIGINT to any thread; Python acts on it in the main one, which has to wake up for it."""
    trainer_file = script(
        tmp_path / "trainer.py",
        """
        import threading
        with Grader(MyTask(), workers=1, timeout_s=600) as grader:
            grader.grade([(PROBLEM, "pid")])
            other = next(t for t in threading.enumerate() if t.name == "grading")
            threading.Timer(0.5, signal.pthread_kill, (other.ident, signal.SIGINT)).start()
            try:
                grader.grade([(PROBLEM, "hang")])
            except KeyboardInterrupt:
                print("interrupted")
        """,
    )
    command = [sys.executable, trainer_file]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def test_task_of_a_recipe_run_by_runpy(tmp_path, monkeypatch, capfd):
    """`tune run recipe.py` runs the recipe as `__main__` by runpy; it must not run a second time in the workers."""
    recipe = script(
        tmp_path / "recipe.py",
        """
        print("recipe runs", flush=True)
        with Grader(MyTask(), workers=2) as grader:
            rewards = [o.reward for o in grader.grade([(PROBLEM, "abc"), (PROBLEM, "")])]
        """,
    )
    monkeypatch.setattr(sys, "argv", [str(recipe)])
    assert runpy.run_path(str(recipe), run_name="__main__")["rewards"] == [3.5, 0.5]
    assert capfd.readouterr().out == "recipe runs\n"


def test_task_in_a_module_of_the_working_directory(tmp_path):
    script(tmp_path / "my_task.py", "")
    (tmp_path / "run.py").write_text(
        "import my_task\n"
        "with my_task.Grader(my_task.MyTask()) as grader:\n"
        "    print(grader.grade([(my_task.PROBLEM, 'abcd')])[0].reward)\n"
    )
    command = [sys.executable, "-c", "import runpy, sys; sys.path.insert(0, ''); runpy.run_path('run.py')"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment(), timeout=60, check=True
    )
    assert done.stdout == "4.5\n"
