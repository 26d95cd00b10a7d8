"""What the machine, or somebody at it, does wrong: a compiler or a process that is killed or stopped, no memory, a fork, Ctrl-C."""

import os
import shutil
import time

import pytest

from helpers.calm_kernels import HONEST, CalmReduction, fenced

pytest.importorskip("tree_sitter_c")

from torchtune_ext.measured import cli, machine
from torchtune_ext.measured import compiler as compilers
from torchtune_ext.measured.bench import Bench, BenchError, is_deterministic
from torchtune_ext.measured.check import Checker
from torchtune_ext.measured.kernels import Dgemm, Reduction
from torchtune_ext.measured.results import Result, Timing
from torchtune_ext.measured.sandbox import Sandbox, SandboxError

pytestmark = [pytest.mark.rest, pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")]
GCC = shutil.which("gcc")
# The compiler itself is killed, or a part of it while it compiles.
KILLED = {"all": ["/bin/sh", "-c", "kill -9 $$"], "cc1": [GCC, "-wrapper", "sh,-c,kill -9 $$", "-c", "candidate.c"]}


@pytest.fixture(scope="module", params=[False, None], ids=["bare", "namespaces"])
def checker(request):
    try:
        with Checker(Reduction(), namespaces=request.param) as instance:
            yield instance
    except SandboxError as error:
        pytest.skip(str(error))


def compiling_by(monkeypatch, command: list[str]) -> None:
    """From now on this command runs in place of the compiler."""

    def instead(sandbox, compiler, flags, folder, deadline_s):
        return compilers.run_locked_in(sandbox, command, folder, deadline_s)

    monkeypatch.setattr(compilers, "compile_library", instead)


@pytest.mark.parametrize("what", KILLED)
def test_checker_killed_compiler_verdict_is_not_cached(checker, monkeypatch, what):
    compiling_by(monkeypatch, KILLED[what])
    verdict = checker.check_source(HONEST)
    assert (verdict.outcome, verdict.stage) == ("compile_error", "compile")
    assert verdict.note.startswith("SIGKILL: the compiler was killed")
    assert not is_deterministic(verdict)


@pytest.mark.parametrize("what", KILLED)
def test_checker_compiler_killed_on_own_program_raises(checker, monkeypatch, what):
    compiling_by(monkeypatch, KILLED[what])
    with pytest.raises(SandboxError, match="reduction was killed while it was checked: SIGKILL"):
        Checker(Reduction(), namespaces=checker.sandbox.namespaces)
    with pytest.raises(SandboxError, match="(?i)kill|status 137"):
        checker.compile_naive(checker.kernel)


@pytest.mark.parametrize("is_full", [True, False])
def test_checker_disk_error_requires_an_actually_full_disk(checker, monkeypatch, is_full):
    command = ["/bin/sh", "-c", "echo 'ld: final link failed: No space left on device' >&2; exit 1"]
    compiling_by(monkeypatch, command)
    usage = shutil.disk_usage("/")._replace(free=1000 if is_full else 1 << 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    if is_full:
        with pytest.raises(SandboxError, match="the disk of .* is full: ld: final link failed"):
            checker.check_source(HONEST)
    else:
        assert checker.check_source(HONEST).outcome == "compile_error"


def test_the_error_comes_before_the_warnings(checker):
    warned = "".join(f"int *p{i} = {i + 1};\n" for i in range(100))
    assert checker.check_source(warned + HONEST).outcome == "ok"
    note = checker.check_source(warned + "void reduction(int n, const double *x, double *total) { nobody; }").note
    assert "nobody" in note and "warning" not in note


def test_sandbox_invalid_compiler_is_named():
    with pytest.raises(SandboxError, match="/bin/true cannot compile the sandbox"):
        Sandbox("/bin/true")


def test_arrays_that_no_machine_has_room_for():
    with pytest.raises(SandboxError, match="no room for .* GB of arrays"):
        Checker(Dgemm(1 << 26), namespaces=False)


def test_timing_wait_for_busy_core_is_reported(monkeypatch, caplog):
    monkeypatch.setattr(machine, "lock_name", lambda core: f"\0test-{os.getpid()}-{core}")
    monkeypatch.setattr(machine, "_LOG_AFTER_S", 0.05)
    with machine.lock_cores([5], 1.0):
        with pytest.raises(TimeoutError, match="core 5 .*0.3 s, by another process"):
            machine.lock_cores([5], 0.3).__enter__()
        assert caplog.text.count("timing on core 5 waits for another process that times on it") == 1


def quick_bench() -> Bench:
    try:
        return Bench(workers=1, budget_s=0.2, namespaces=False)
    except SandboxError as error:
        pytest.skip(str(error))


def test_bench_rejects_forked_use_and_closes_from_callback():
    with quick_bench() as bench:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                bench.submit(CalmReduction(), "nothing")
            except BenchError as error:
                # What runs at the end of a process that ends in the usual way, too.
                bench.close()
                status = 0 if "before a fork" in str(error) and bench.__class__ is Bench else 2
            os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert bench._pools["check"].folder.exists()
        raised = []

        def close(future):
            try:
                bench.close()
            except BaseException as error:
                raised.append(error)

        done = bench.submit(CalmReduction(), fenced("void reduction("))
        done.add_done_callback(close)
        assert done.result(timeout=100).outcome == "compile_error"
        assert _until(lambda: not bench._pools["check"].folder.exists()) and not raised


def _until(is_so, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.02)
    return is_so()


# ---------------------------------------------------------------- the command


def test_a_row_shows_no_interval_of_one_block():
    def last(timing: Timing) -> list[str]:
        return cli.table_row("a.c", Result("dgemm", "ok", "time", timing=timing))[-2:]

    numbers = dict.fromkeys(("seconds", "relative_ci", "gflops", "speedup", "roofline_fraction"), 0.001)
    counts = {"calls": 3, "disturbed_fraction": 0.0, "is_narrow": True, "is_noisy": False}
    assert last(Timing(**numbers, speedup_ci=0.0, **counts)) == ["?", ""]
    short = Timing(**{**numbers, "seconds": 1e-4}, speedup_ci=0.01, **counts)
    assert "larger --size" in last(short)[1]
