"""Signals stop a run: at once, at the end of a step, or with a blocked main thread."""

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from torchtune_ext.run.stop import RunStopped, StopSignals

SCRIPT = """
import contextlib, ctypes, os, sys, time
import torchtune_ext.run.output  # as every run does: what nobody reads is no error at the end
from torchtune_ext.run.stop import RunStopped, StopSignals

def stuck():
    mutex = ctypes.create_string_buffer(64)  # a pthread mutex: locking it twice waits for ever, in C, whatever signals come
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
    print("begun", flush=True)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)

def steps(seconds, count=100):
    stop.defer_sigterm()
    print("begun", flush=True)
    for step in range(count):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.01)
        print(f"step {step}", flush=True)
        if stop.agree_to_stop(lambda mine: mine):
            with stop.protect_save():
                time.sleep(SAVING)
                print("saved", flush=True)
            time.sleep(0.3)  # other work after it, such as a line of metrics
            stop.raise_stopped()

def closing(seconds):
    stop.begin_cleanup()
    print("closing", flush=True)
    time.sleep(seconds)

SAVING = 0.0
with StopSignals(GRACE, lambda: "It stood there.", reaction_s=REACTION) as stop:
    try:
        print("ready", flush=True)
        WORK
    except RunStopped as stopped:
        closing(CLOSING)
        with contextlib.suppress(OSError):
            os.write(2, f"{stopped.signal.name} orderly={stopped.at_step_end}\\n".encode())
        sys.exit(128 + stopped.signal)
print("well")
"""


def heed_signals():
    """Under nohup this process ignores SIGHUP, and its children would inherit this."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def start(work, grace=60.0, closing=0.0, reaction=60.0, preexec_fn=heed_signals, **more):
    text = textwrap.dedent(SCRIPT).replace("WORK", work)
    for name, seconds in {"GRACE": grace, "CLOSING": closing, "REACTION": reaction}.items():
        text = text.replace(name, str(seconds))
    command = [sys.executable, "-c", text]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": preexec_fn}
    process = subprocess.Popen(command, text=True, **(pipes | more))
    assert process.stdout.readline() == "ready\n"
    return process


def begun(*arguments, **more):
    """A run in progress."""
    process = start(*arguments, **more)
    assert process.stdout.readline() == "begun\n"
    return process


def end(process):
    """Return the exit status. Work that the run must not wait for takes a minute or more."""
    try:
        out, err = process.communicate(timeout=50)
    finally:
        process.kill()  # only has an effect if the process is blocked
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_stop_signal_before_first_step_ends_at_once(number):
    process = start("time.sleep(600)")
    process.send_signal(number)
    assert end(process)[::2] == (128 + number, f"{number.name} orderly=False\n")


def test_sigterm_waits_for_the_end_of_the_step():
    process = begun("steps(0.5)")
    process.send_signal(signal.SIGTERM)
    status, out, err = end(process)
    assert status == 143 and "saved" in out and "SIGTERM orderly=True" in err
    assert "stops after this step, if the step ends within 60 s" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_the_others_do_not_wait(number):
    process = begun("steps(600)")
    process.send_signal(number)
    assert end(process)[::2] == (128 + number, f"{number.name} orderly=False\n")


def test_stop_step_exceeding_grace_time_is_abandoned():
    process = begun("steps(600)", grace=0.5)
    process.send_signal(signal.SIGTERM)
    status, out, err = end(process)
    assert status == 143 and "saved" not in out and "SIGTERM orderly=False" in err


def test_stop_checkpoint_write_may_exceed_grace_time():
    process = begun("SAVING = 2.5; steps(0.1)", grace=2.0)
    process.send_signal(signal.SIGTERM)
    status, out, err = end(process)
    assert status == 143 and "saved" in out and "orderly=True" in err


def test_stop_periodic_checkpoint_write_is_finished():
    work = """
        stop.defer_sigterm()
        with stop.protect_save():
            print("saving", flush=True)
            time.sleep(1.5)
            print("saved", flush=True)
        time.sleep(600)"""
    process = start(textwrap.dedent(work).replace("\n", "\n        "), grace=0.5)
    assert process.stdout.readline() == "saving\n"
    process.send_signal(signal.SIGTERM)
    status, out, err = end(process)
    assert status == 143 and "saved" in out and "orderly=False" in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 7)])
def test_stop_signal_of_forked_child_is_ignored(number, code):
    """A forked child inherits our handlers and our wake-up socket, which would receive its signals."""
    work = f"""
        import os
        there, here = os.pipe()
        for _ in range(10):
            try:
                child = os.fork()
                if not child:
                    os.write(here, b"x")
                    # One long sleep would miss a signal that comes just before it: Python acts on it only afterwards.
                    while True:
                        time.sleep(0.01)
            except KeyboardInterrupt:
                os._exit(7)
            os.read(there, 1)
            os.kill(child, {number:d})
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == {code}
        time.sleep(0.2)  # until the parent has received it"""
    process = start(textwrap.dedent(work).replace("\n", "\n        "))
    assert end(process)[:2] == (0, "well\n")


def test_the_error_travels_between_ranks():
    stopped = pickle.loads(pickle.dumps(RunStopped(signal.SIGTERM, at_step_end=True)))
    assert (stopped.signal, stopped.at_step_end, str(stopped)) == (signal.SIGTERM, True, "stopped by SIGTERM")


@pytest.mark.parametrize("standing", ["lambda: 1 / 0", "stuck"])
def test_stop_failing_status_message_still_ends_run(standing):
    process = begun(f"stop.status_message = {standing}; stop.defer_sigterm(); stuck()", grace=0.3, reaction=0.3)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 143


def test_ctrl_c_after_sigterm_no_longer_waits():
    process = begun("steps(600)")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    status, _, err = end(process)
    assert status == 130 and "SIGINT orderly=False" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_main_thread_stuck_in_c_is_ended(number):
    process = begun("stop.defer_sigterm(); stuck()", grace=0.5, reaction=0.3)
    time.sleep(0.2)  # until it waits for the mutex, in C
    process.send_signal(number)
    status, _, err = end(process)
    assert status == 128 + number and "while a call did not return. It stood there." in err


def test_a_second_ctrl_c_skips_the_cleanup():
    process = start("time.sleep(600)", closing=600)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "closing\n"
    process.send_signal(signal.SIGINT)  # one Ctrl-C, delivered by a terminal and a launcher
    time.sleep(1.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    status, _, err = end(process)
    assert status == 130 and "not all components were closed" in err


def test_stop_own_signal_is_not_second_ctrl_c():
    """The main thread runs C code, and the second thread reads its own signal more than a second later."""
    work = """
        import signal, threading
        kill, libc, mutex = signal.pthread_kill, ctypes.CDLL(None), ctypes.create_string_buffer(64)
        def late(*words):
            kill(*words)
            time.sleep(1.2)
            threading.Timer(0.5, libc.pthread_mutex_unlock, [mutex]).start()
        signal.pthread_kill = late
        libc.pthread_mutex_lock(mutex)
        print("begun", flush=True)
        libc.pthread_mutex_lock(mutex)
        time.sleep(600)"""
    process = begun(textwrap.dedent(work).replace("\n", "\n        "))
    time.sleep(0.2)  # until it waits for the mutex, in C
    process.send_signal(signal.SIGINT)
    assert end(process)[::2] == (130, "SIGINT orderly=False\n")


def listening():
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    return [*map(signal.getsignal, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)), wakeup]


def test_stop_keeps_ignored_signals_and_restores_handlers():
    process = start("time.sleep(0.5)", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    assert end(process)[:2] == (0, "well\n")
    before = listening()
    with StopSignals(1.0, str) as stop:
        with pytest.raises(RunStopped):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        assert stop.stop_requested
    assert before == listening()


def test_stop_closed_stderr_still_ends_run():
    process = begun("steps(600)", grace=0.3)
    process.stderr.close()
    process.send_signal(signal.SIGTERM)
    out = process.stdout.read()
    assert process.wait(50) == 143 and "saved" not in out


@pytest.mark.parametrize(
    "seconds, reaction, end",
    [(0.3, 20.0, "SIGINT orderly=False"), (60.0, 2.0, "while a call did not return. It stood there.")],
)
def test_ctrl_c_while_an_object_is_finalized(seconds, reaction, end):
    """In a finalizer, Python would print the exception, and the run would continue."""
    process = start(
        f"""
        class Dying:
            def __del__(self):
                print("begun", flush=True)
                begun = time.monotonic()
                while time.monotonic() < begun + {seconds}:
                    pass

        Dying()
        time.sleep(60)
        """,
        reaction=reaction,
    )
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and end in err and "ignored" not in err, err
