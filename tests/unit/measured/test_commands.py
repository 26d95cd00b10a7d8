"""Commands that hang, flood their output or leave something behind."""

import time

import pytest

from torchtune_ext.measured import compiler
from torchtune_ext.measured.compiler import MAX_OUTPUT_BYTES, CommandResult, Compiler
from torchtune_ext.measured.sandbox import Sandbox, SandboxError


@pytest.fixture(scope="module")
def sandbox():
    try:
        with Sandbox(Compiler.find().path, namespaces=False) as instance:
            yield instance
    except (ValueError, SandboxError) as error:
        pytest.skip(str(error))


def run(sandbox: Sandbox, words: str, deadline_s: float) -> CommandResult:
    return compiler.run_locked_in(sandbox, ["/bin/sh", "-c", words], sandbox.new_folder(), deadline_s)


def test_a_command_that_hangs_or_floods_is_killed(sandbox):
    start = time.monotonic()
    hung = run(sandbox, "sleep 60 & sleep 60", 0.3)
    assert hung.status is None and hung.timed_out and "0.3 s" in hung.cause
    flooded = run(sandbox, "yes", 30.0)
    assert flooded.status is None and not flooded.timed_out and f"{MAX_OUTPUT_BYTES} bytes" in flooded.cause
    assert len(flooded.output) == MAX_OUTPUT_BYTES
    silent = run(sandbox, "exec >&- 2>&-; sleep 60", 0.3)
    assert silent.status is None and silent.timed_out
    assert time.monotonic() - start < 20
    good = run(sandbox, "echo out; echo err >&2; exit 3", 10.0)
    assert (good.status, good.output, good.errors, good.cause) == (3, "out\n", "err\n", "")


def test_sandbox_command_background_processes_are_killed(sandbox):
    """A process in the background ends with the command."""
    start = time.monotonic()
    done = run(sandbox, "sleep 60 & echo $!", 10.0)
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
