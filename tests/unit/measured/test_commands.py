"""Commands that hang, flood their output or leave something behind."""

import time

from torchtune_ext.measured import compiler


def test_a_command_that_hangs_or_floods_is_killed(tmp_path):
    def run(words: str, deadline_s: float, most: int):
        return compiler.run(["/bin/sh", "-c", words], {"PATH": "/usr/bin:/bin"}, str(tmp_path), deadline_s, most)

    start = time.monotonic()
    hung = run("sleep 60 & sleep 60", 0.3, 100)
    assert hung.status is None and hung.timed_out and "0.3 s" in hung.cause
    flooded = run("while :; do echo yes; done", 30.0, 1000)
    assert flooded.status is None and not flooded.timed_out and "1000 bytes" in flooded.cause
    silent = run("exec >&- 2>&-; sleep 60", 0.3, 100)
    assert silent.status is None and silent.timed_out
    assert time.monotonic() - start < 20
    good = run("echo out; echo err >&2; exit 3", 10.0, 100)
    assert (good.status, good.output, good.errors, good.cause) == (3, "out\n", "err\n", "")


def test_what_a_command_leaves_behind_is_killed(tmp_path):
    """A process in the background ends with the command, whose output it holds open."""
    start = time.monotonic()
    done = compiler.run(
        ["/bin/sh", "-c", "sleep 60 >&- 2>&- & echo $!"], {"PATH": "/usr/bin:/bin"}, str(tmp_path), 10.0, 100
    )
    assert done.status == 0 and time.monotonic() - start < 9
    end = time.monotonic() + 10
    while (pid := int(done.output)) and alive(pid):
        assert time.monotonic() < end
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
