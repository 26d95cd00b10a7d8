"""Programs are timed on this machine: the real compiler, the real sandbox, the real clock.

The machine that runs the tests may be busy, so no figure is asserted: only what holds on a busy one, too.
"""

import multiprocessing
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

pytest.importorskip("tree_sitter_c")

from helpers.calm_kernels import CalmDgemm, CalmReduction
from helpers.exploits import exploits
from torchtune_ext.cli import cli
from torchtune_ext.measured import cli as command
from torchtune_ext.measured import compiler, probe
from torchtune_ext.measured.check import Checker
from torchtune_ext.measured.child import ChildFailed
from torchtune_ext.measured.kernels import Dgemm, Reduction
from torchtune_ext.measured.probe import UnstableMachine
from torchtune_ext.measured.sandbox import Limits, SandboxError
from torchtune_ext.measured.timing import ProgramTimer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def any_machine(monkeypatch):
    """Times on a busy machine, too."""
    monkeypatch.setattr(probe, "MAX_VARIATION", 1e9)


@pytest.fixture
def timer(any_machine):
    core = max(os.sched_getaffinity(0))
    with ProgramTimer(Checker(Dgemm(96), cores=[core], with_screen=False), budget_s=1.0) as timer:
        yield timer


def measured(timer, source):
    verdict, library = timer.checker.check_with_library(source, is_source=True)
    assert verdict.outcome == "ok", verdict.note
    return timer.time_library(library)


def test_a_program_that_does_more_is_slower(timer):
    naive = measured(timer, timer.kernel.naive)
    # The same work a hundred times: no neighbor makes that look like once.
    slow = measured(
        timer, timer.kernel.naive.replace("for (int i", "for (volatile int r = 0; r < 100; r++) for (int i", 1)
    )
    assert slow.speedup < naive.speedup / 5
    for timing in (naive, slow):
        assert 0 <= timing.relative_ci < 1 and timing.calls >= 3
        assert timing.gflops == pytest.approx(2 * 96**3 / timing.seconds / 1e9)
        assert timing.roofline_fraction == pytest.approx(timing.gflops / timer.probe.peak_gflops)


# From its 6th call on it computes in single precision.
LATE = """
void dgemm(int m, int n, int k, const double *A, const double *B, double *C) {
    static int calls;
    calls++;
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double sum = 0;
            float fast = 0;
            for (int l = 0; l < k; l++)
                if (calls > 5)
                    fast += (float)A[i * k + l] * (float)B[l * n + j];
                else
                    sum += A[i * k + l] * B[l * n + j];
            C[i * n + j] = calls > 5 ? fast : sum;
        }
}
"""


def test_every_timed_call_is_checked(timer):
    # It is not verified here, as if it had waited for the end of that.
    library = compiled(timer, LATE, timer.checker.sandbox.new_folder())
    with pytest.raises(ChildFailed, match="in a timed call: C") as refused:
        timer.time_library(library)
    assert refused.value.outcome == "wrong_result"


def compiled(timer, source, folder):
    compiler.write_source(timer.kernel, source, folder)
    checker = timer.checker
    done = compiler.compile_library(checker.sandbox, checker.compiler, checker.flags, folder, 60)
    assert done.status == 0, done.errors
    return (folder / compiler.LIBRARY_FILE).read_bytes()


def test_clock_exploits_gain_no_measured_speed(timer):
    """Those that pass verification: what they are paid for is no more than an honest naive program is."""
    honest = measured(timer, timer.kernel.naive).speedup
    these = [each for each in exploits() if each.kernel == "dgemm" and "timing" in (each.layer, each.layer_behind)]
    assert len(these) >= 4
    for each in these:
        verdict, library = timer.checker.check_with_library(each.source, is_source=True)
        if verdict.outcome != "ok":
            continue
        try:
            timing = timer.time_library(library)
        except ChildFailed:
            continue
        # They compute as the reference does. An answer that was kept would come some hundred times as fast.
        assert timing.speedup < 10 * honest, each.name


def test_bench_thread_working_during_reference_is_refused(timer):
    spoils = next(each for each in exploits() if each.name == "deferred_beside_the_reference")
    with pytest.raises(ChildFailed, match=r"its threads worked for .* ms while others were timed") as refused:
        measured(timer, spoils.source)
    assert refused.value.outcome == "runtime_error"


def test_bench_understated_peak_is_remeasured(timer):
    peak = timer.probe.peak_gflops
    timer.probe.peak_gflops = 1e-6
    # Whoever was in the way of the first measurement has gone.
    assert measured(timer, timer.kernel.naive).roofline_fraction < 1 and timer.probe.peak_gflops > peak / 10


@pytest.mark.parametrize("name", ["peak_gflops", "peak_gbytes_s"])
def test_bench_speed_above_roofline_rejected(timer, name, monkeypatch):
    if name == "peak_gflops":
        timer.probe.peak_gflops = 1e-6
        monkeypatch.setattr(timer.probe, "_measure_peak_gflops", lambda: 1e-6)
    else:
        monkeypatch.setattr(probe.Probe, name, 1e-6)
    with pytest.raises(ChildFailed, match="ms at least: rejected"):
        measured(timer, timer.kernel.naive)


def test_roofline_is_larger_of_compute_and_memory(timer):
    probe = timer.probe
    # The call that reads takes 1.1 ms, and one that does nothing takes 0.1 ms of them.
    probe.peak_gflops, probe._best_memory_s, probe._empty_s = 10.0, 1.1e-3, 1e-4
    assert timer.probe.peak_gbytes_s == pytest.approx(8e-9 * 2**20 / 1e-3)
    assert probe.roofline_s(Dgemm(1000)) == pytest.approx(2e9 / 10e9)
    # As long as the fixed kernel reads as much.
    assert probe.roofline_s(Reduction(2**20)) == pytest.approx(1e-3, rel=1e-5)


def burn(core, burns):
    os.sched_setaffinity(0, {core})
    burns.set()
    while True:
        pass


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) == 1, reason="this process would be a second neighbor of the only core"
)
def test_bench_busy_neighbor_process_marks_timing_noisy(any_machine):
    """The naive program works longer at a time than a scheduler lets one of two processes run."""
    core = max(os.sched_getaffinity(0))
    spawn = multiprocessing.get_context("spawn")
    burns = spawn.Event()
    neighbor = spawn.Process(target=burn, args=(core, burns), daemon=True)
    with ProgramTimer(Checker(Dgemm(256), cores=[core], with_screen=False), budget_s=1.5) as timer:
        neighbor.start()
        try:
            assert burns.wait(60)
            timing = measured(timer, timer.kernel.naive)
        finally:
            neighbor.kill()
            neighbor.join(30)
    assert timing.disturbed_fraction == 1 and timing.is_noisy  # the naive program felt it, too


def test_bench_naive_program_crash_is_sandbox_error(timer):
    _, library = timer.checker.check_with_library(timer.kernel.naive, is_source=True)
    os.kill(timer._reference.pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="the naive program of dgemm has failed: SIGKILL"):
        timer.time_library(library)


def cpu_limit(child):
    limits = Path(f"/proc/{child.pid}/limits").read_text().splitlines()
    return int(next(line.split()[3] for line in limits if line.startswith("Max cpu time")))


def test_bench_cpu_limit_long_for_own_programs_only(timer, monkeypatch):
    for child in (timer._reference, timer.probe.child):
        assert cpu_limit(child) >= 365 * 24 * 3600
    _, library = timer.checker.check_with_library(timer.kernel.naive, is_source=True)
    start, limits = timer.checker.start_child, []
    monkeypatch.setattr(
        timer.checker,
        "start_child",
        lambda kernel, library, cpu_s: limits.append(cpu_s) or start(kernel, library, cpu_s),
    )
    timer.time_library(library)
    # Each call may last until its deadline.
    assert limits[0] >= timer.budget_s + 5 * timer.checker.deadlines.verify_s
    monkeypatch.undo()
    own = timer.checker.compile_naive(timer.kernel)
    for cpu_s, allowed in ((0, Limits().cpu_s), (99.5, 100)):
        with timer.checker.start_child(timer.kernel, own, cpu_s) as child:
            assert cpu_limit(child) == allowed


def test_bench_varying_machine_refused_with_variation(monkeypatch):
    monkeypatch.setattr(probe, "MAX_VARIATION", -1.0)
    checker = Checker(Dgemm(16))
    with pytest.raises(UnstableMachine, match=r"the same work took from .* ms here: this machine varies"):
        ProgramTimer(checker)
    assert not checker.sandbox.folder.exists()


def test_the_command_prints_a_table(monkeypatch, capsys):
    monkeypatch.setattr(command, "KERNELS", {"dgemm": CalmDgemm, "reduction": CalmReduction})
    files = [str(EXAMPLES / name) for name in ("dgemm_blocked.c", "dgemm_float.c", "reduction_pairwise.c")]
    affinity = os.sched_getaffinity(0)
    status = cli.main(["bench", *files, "--budget", "0.3", "--size", "64"])
    assert os.sched_getaffinity(0) == affinity
    output = capsys.readouterr().out
    assert status == 1 and "; timed on core " in output  # one is wrong on purpose
    assert re.search(r"\ndgemm_float.c: C\[.* and should be ", output)
    rows = {tuple(line.split()[:3]) for line in output.splitlines()}
    assert rows >= {
        ("(naive)", "dgemm", "ok"),
        ("(naive)", "reduction", "ok"),
        ("dgemm_blocked.c", "dgemm", "ok"),
        ("dgemm_float.c", "dgemm", "wrong_result"),
        ("reduction_pairwise.c", "reduction", "ok"),
    }


@pytest.mark.parametrize(
    "words, message",
    [
        (["nowhere.c"], "nowhere.c cannot be read: No such file"),
        (["{other}"], "other.c defines none of dgemm, gemv, reduction; expected exactly one"),
        (["{file}", "--budget", "0"], "bench.budget_s=0.0 must be a number of seconds"),
        (["{file}", "--size", "0"], "Dgemm.timed: m is 0; expected an int from 1"),
        (["{file}", "--cores", "4096"], "cores=[4096]: use some of"),
        (["{file}", "--threads", "4096"], "threads=4096, but this process may run on"),
        (["{file}", "--compiler", "nocc"], "no C compiler: nocc"),
    ],
)
def test_bench_bad_input_reported_before_any_run(words, message, capsys, tmp_path):
    (tmp_path / "other.c").write_text("int main(void) { return 0; }\n")
    names = {"file": EXAMPLES / "dgemm_naive.c", "other": tmp_path / "other.c"}
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *(word.format(**names) for word in words)])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_bench_invalid_options_rejected(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", str(EXAMPLES / "dgemm_naive.c"), "--cores=a"])
    assert "invalid" in capsys.readouterr().err
