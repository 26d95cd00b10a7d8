"""The guard: signals, exit statuses, and that no process outlives the command or its actor."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

GUARD = [sys.executable, "-P", "-m", "torchtune_ext.cluster.actor"]
TOLD = """
import os, signal, sys, time
def told(number, frame):
    os.write(1, f"told {number}\\n".encode())  # the main thread may be inside of print
    time.sleep(float(sys.argv[1]))
    sys.exit(7)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, told)
print("ready", flush=True)
time.sleep(600)
"""
# Starts a process in its own session, which starts another one that prints "ready": orphans of any
# depth. It exits once the file exists.
PARENT = """
import os, subprocess, sys, time
inner = "import time; print('ready', flush=True); time.sleep(600)"
outer = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", outer], start_new_session=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


@pytest.fixture
def guard():
    """Starts a Python program under a guard with a grace period of 0.5 s, with signals blocked as in Ray."""
    begun = []

    def start(code, *arguments):
        process = subprocess.Popen(
            [*GUARD, "0.5", "-", sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}),
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        with process:
            for each in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
                each.kill()
            process.kill()


def below(process):
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize(
    ("code", "status"),
    [("pass", 0), ("raise SystemExit(3)", 3), ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137)],
)
def test_the_status_is_that_of_the_command(guard, code, status):
    assert guard(code).wait(30) == status


@pytest.mark.parametrize("number", [2, 15])
def test_guard_forwards_signal_to_command(guard, number):
    process = guard(TOLD, "0")
    assert process.stdout.readline() == b"ready\n"
    process.stdin.write(f"{number} 30\n".encode())
    assert process.stdout.readline() == f"told {number}\n".encode()
    assert process.wait(30) == 7


def test_guard_kills_command_after_deadline(guard):
    process = guard(TOLD, "600")
    assert process.stdout.readline() == b"ready\n"
    process.stdin.write(b"15 0.5\n")
    assert process.stdout.readline() == b"told 15\n"
    assert process.wait(30) == 137


def test_guard_signals_once_and_keeps_earliest_deadline(guard):
    """After a second SIGTERM torchrun ends its ranks at once."""
    process = guard(TOLD, "600")
    assert process.stdout.readline() == b"ready\n"
    process.stdin.write(b"15 600\n")
    assert process.stdout.readline() == b"told 15\n"
    process.stdin.write(b"15 600\n2 600\n")
    assert process.stdout.readline() == b"told 2\n"
    process.stdin.write(b"15 0.5\n15 600\n")
    assert process.stdout.read() == b"" and process.wait(30) == 137


@pytest.mark.parametrize("seconds", ["0", "600"])
def test_guard_lost_actor_sends_sigterm_then_kills(guard, seconds):
    """The guard does not kill a command that exits in time, so that a trainer can save its step."""
    process = guard(TOLD, seconds)
    assert process.stdout.readline() == b"ready\n"
    process.stdin.close()
    assert process.stdout.readline() == b"told 15\n"
    assert process.wait(30) == (7 if seconds == "0" else 137)


@pytest.mark.parametrize("way", ["ends", "is killed", "actor is gone"])
def test_guard_leaves_no_descendant_processes(guard, way, tmp_path):
    process = guard(PARENT, str(tmp_path / "end"))
    assert process.stdout.readline() == b"ready\n"
    started = below(process)
    assert len(started) == 3
    if way == "ends":
        (tmp_path / "end").touch()
    if way == "is killed":
        psutil.Process(process.pid).children()[0].kill()
    if way == "actor is gone":
        process.stdin.close()
    process.wait(30)
    assert psutil.wait_procs(started, timeout=30)[1] == []


def test_guard_killed_ends_its_command(guard):
    process = guard(TOLD, "600")
    assert process.stdout.readline() == b"ready\n"
    started = below(process)
    process.kill()
    assert len(started) == 1 and psutil.wait_procs(started, timeout=30)[1] == []


def test_guard_is_detached_from_its_starter():
    """Ray kills an actor's children, but not its grandchildren."""
    ours, theirs = os.pipe()
    others = psutil.Process().children(recursive=True)  # of other tests
    command = [*GUARD, "0.5", str(theirs), sys.executable, "-c", TOLD, "0"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, pass_fds=[theirs]
    ) as process:
        os.close(theirs)
        assert process.wait(30) == 0
        assert process.stdout.readline() == b"ready\n"
        assert set(psutil.Process().children(recursive=True)) <= set(others)
        process.stdin.write(b"2 30\n")
        assert process.stdout.readline() == b"told 2\n" and os.read(ours, 16) == b"7"
    os.close(ours)


def test_it_sleeps_while_the_command_runs(guard):
    process = guard("import time; print('ready', flush=True); time.sleep(600)")
    assert process.stdout.readline() == b"ready\n"
    used = psutil.Process(process.pid).cpu_times()
    time.sleep(1.0)
    after = psutil.Process(process.pid).cpu_times()
    assert after.user + after.system - used.user - used.system < 0.2
