"""The coordinator of the benchmark service, with the real compiler, the real sandbox and real processes.

Programs are small and budgets short: what is tested is who is measured when, and whose fault it is, and no speed.
"""

import itertools
import os
import pickle
import shutil
import threading
import time
from concurrent.futures import CancelledError, wait
from dataclasses import replace
from functools import partial

import psutil
import pytest

from helpers.calm_kernels import HONEST, SUM, CalmDgemm, CalmReduction, Faulty, fenced

pytest.importorskip("tree_sitter_c")

from torchtune_ext.measured import bench as benches
from torchtune_ext.measured import probe, timing
from torchtune_ext.measured.bench import Bench, BenchError, Result, check_program, is_deterministic, time_program
from torchtune_ext.measured.check import OUTCOMES, STAGES, Checker, Deadlines
from torchtune_ext.measured.machine import lock_cores, machine_fingerprint
from torchtune_ext.measured.results import NOISY
from torchtune_ext.measured.sandbox import SandboxError
from torchtune_ext.measured.timing import Timing

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

SHORT = Deadlines(screen_s=5.0, compile_s=10.0, load_s=2.0, verify_s=1.0)
HANGS = SUM.format("for (volatile int i = 0;; i++);")
NUMBERS = itertools.count()
# Right where it is verified, and wrong from the sixth call at the timed size on.
LATE = """
static int calls;
void reduction(int n, const double *x, double *total) {
    double s = 0;
    for (int i = 0; i < n; i++) s += x[i];
    if (n == 20011) calls++;
    *total = calls > 5 ? s + 1 : s;
}
"""


def bench(**arguments) -> Bench:
    try:
        return Bench(**{"workers": 1, "budget_s": 0.2, "namespaces": False, "deadlines": SHORT, **arguments})
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def service():
    with bench(workers=2) as instance:
        yield instance


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """A folder whose files say what the machine does wrong."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def lonely(faults):
    """A service with one process that checks. Both of its processes know the kernel that fails."""
    with bench() as instance:
        assert outcome(instance.submit(Faulty(faults), variant())).outcome == "ok"
        yield instance


def outcome(future, seconds: float = 200.0) -> Result:
    """Other tests of this machine may time on the same cores, one after the other."""
    return future.result(timeout=seconds)


def variant(source: str = HONEST) -> str:
    """A program of which no other text holds the same."""
    return fenced(f"/* {next(NUMBERS)} */ {source}")


def repeated(caplog) -> int:
    """How often the log says that the machine has failed and a step is tried again."""
    return caplog.text.count("of a program is repeated")


# ---------------------------------------------------------------- results


def test_results_are_those_of_the_stages(service, caplog):
    # Of no other test: all texts without code are one, and its result may be known.
    kernel = CalmReduction(20_012)
    futures = {
        "ok": service.submit(kernel, fenced(HONEST)),
        "format": service.submit(kernel, "I cannot do that."),
        "forbidden": service.submit(kernel, fenced("#include <stdlib.h>\n" + SUM.format('system("ls");'))),
        "compile_error": service.submit(kernel, fenced(SUM.format("return"))),
        "wrong_result": service.submit(kernel, fenced(SUM.format("*total = 0;"))),
        "runtime_error": service.submit(kernel, fenced(SUM.format("*total = x[-100000];"))),
        "timeout": service.submit(kernel, fenced(HANGS)),
    }
    results = {word: outcome(future) for word, future in futures.items()}
    assert {word: each.outcome for word, each in results.items()} == {word: word for word in results}
    stages = {word: each.stage for word, each in results.items()}
    assert stages == {
        "ok": "time", "format": "extract", "forbidden": "screen", "compile_error": "compile", "wrong_result": "verify",
        "runtime_error": "verify", "timeout": "verify",
    }  # fmt: skip
    for word, each in results.items():
        assert pickle.loads(pickle.dumps(each)) == each and not each.is_cached and each.kernel == "reduction"
        assert (each.note == "") == (word == "ok") == (each.timing is not None)
        assert str(os.cpu_count()) in each.fingerprint
    assert list(results["ok"].seconds) == [*STAGES, "wait", "time"] and results["ok"].timing.calls >= 3
    assert not repeated(caplog)


def test_bench_program_wrong_during_timing_is_wrong_result(service, caplog):
    result = outcome(service.submit(CalmReduction(), fenced(LATE)))
    assert (result.outcome, result.stage, result.timing) == ("wrong_result", "time", None)
    assert "in a timed call" in result.note and not repeated(caplog)


def test_optimization_level_applies_to_candidate_and_naive_program():
    """Both are wrong where the compiler optimizes."""

    class Unoptimized(CalmReduction):
        naive = "#ifndef __OPTIMIZE__\n" + HONEST + "\n#else\n" + SUM.format("*total = 0;") + "\n#endif"

    with bench(optimization="-O0") as slow:
        result = outcome(slow.submit(Unoptimized(), fenced(Unoptimized.naive)))
    assert result.outcome == "ok" and result.fingerprint == f"{machine_fingerprint()}, -O0"
    with bench() as fast:
        result = outcome(fast.submit(CalmReduction(), fenced(Unoptimized.naive)))
    assert result.outcome == "wrong_result" and result.fingerprint == f"{machine_fingerprint()}, -O3"


def test_bench_kernels_stay_separate_and_may_be_custom(service):
    class Doubled(CalmReduction):
        """Defined here, so that no process can import it."""

        def reference(self, size, inputs):
            return {"total": 2 * inputs["x"].sum(keepdims=True)}

        def bound(self, size, inputs):
            return {name: 2 * value for name, value in super().bound(size, inputs).items()}

        naive = HONEST.replace("= s", "= 2 * s")

    both = [
        service.submit(kernel, fenced(HONEST.replace("x[i]", "x[i + 0]"))) for kernel in (CalmReduction(), Doubled())
    ]
    assert [outcome(each).outcome for each in both] == ["ok", "wrong_result"]
    assert outcome(service.submit(Doubled(), fenced(Doubled.naive))).outcome == "ok"
    sizes = [service.submit(CalmDgemm(size), fenced(CalmDgemm.naive)) for size in (8, 16)]
    assert [outcome(each).outcome for each in sizes] == ["ok", "ok"] and not outcome(sizes[1]).is_cached


# ---------------------------------------------------------------- cached, joined, canceled


def test_equal_programs_are_measured_once(service):
    text = variant()
    same = [service.submit(CalmReduction(), words + text) for words in ("", "Well. ", "Let me see. ")]
    results = [outcome(each) for each in same]
    again = service.submit(CalmReduction(), text)
    assert outcome(again).is_cached
    assert [each.is_cached for each in results] == [False, True, True]
    assert len({each.timing for each in results}) == 1


def test_bench_caches_only_reproducible_results():
    timing = Timing(1e-4, 0.0, 30, 3.0, 2.0, 0.02, 0.5, 0.0, True, False)
    again = {word: is_deterministic(Result("dgemm", word, "verify")) for word in (*OUTCOMES, NOISY)}
    assert {word for word, kept in again.items() if not kept} == {"timeout", "noisy"}
    assert is_deterministic(Result("dgemm", "ok", "time", timing=timing))
    assert not is_deterministic(Result("dgemm", "ok", "time", timing=replace(timing, disturbed_fraction=0.5)))
    assert not is_deterministic(
        Result("dgemm", "runtime_error", "verify", "SIGKILL: it was killed, perhaps for memory")
    )


def test_memory_of_results_has_a_bound(service, monkeypatch):
    outcome(service.submit(CalmReduction(), variant(SUM.format("*total = 0;"))))
    oldest, count = next(iter(service._cache)), len(service._cache)
    monkeypatch.setattr(benches, "MAX_RESULTS", count)
    outcome(service.submit(CalmReduction(), variant(SUM.format("*total = 0;"))))
    assert oldest not in service._cache and len(service._cache) == count


def test_bench_cancelled_request_leaves_other_requests_running(service):
    text = variant()
    first, other = service.submit(CalmReduction(), text), service.submit(CalmReduction(), text)
    assert first.cancel()
    with pytest.raises(CancelledError):
        first.result(1)
    assert outcome(other).outcome == "ok"


# ---------------------------------------------------------------- what the machine does wrong


@pytest.mark.parametrize("fault", ["check-kill", "check-full", "time-kill", "time-full", "time-orphan"])
def test_bench_machine_failure_is_retried(fault, lonely, faults, caplog):
    (faults / fault).touch()
    others = [lonely.submit(Faulty(faults), variant()) for _ in range(2)]
    assert [outcome(each).outcome for each in others] == ["ok", "ok"]
    assert not list(faults.iterdir()) and repeated(caplog) == 1


def test_the_machine_may_fail_three_times(lonely, faults, caplog):
    text = variant()
    (faults / "time-full-always").touch()
    message = r"the time of a program for reduction failed \(attempt 3\): OSError: .*No space left"
    with pytest.raises(BenchError, match=message):
        outcome(lonely.submit(Faulty(faults), text))
    (faults / "time-full-always").rename(faults / "check-kill-always")
    with pytest.raises(BenchError, match=r"\(attempt 3\): the check process died: signal SIGKILL"):
        outcome(lonely.submit(Faulty(faults), text))
    assert repeated(caplog) == 4
    (faults / "check-kill-always").unlink()
    assert outcome(lonely.submit(Faulty(faults), text)).outcome == "ok"  # a failure is not kept


def test_bench_kernel_error_is_reported_at_once(lonely, faults, caplog):
    (faults / "check-bug").touch()
    with pytest.raises(BenchError, match=r"failed: ZeroDivisionError: a bug of the kernel \(calm_kernels.py:\d+\)"):
        outcome(lonely.submit(Faulty(faults), variant()))
    assert not repeated(caplog)


def test_bench_hung_process_affects_only_its_text(faults, monkeypatch, caplog):
    with bench(workers=2) as two:
        monkeypatch.setitem(two._timeouts, benches.CHECK_STAGE, 12.0)
        (faults / "check-hang").touch()
        hanging = two.submit(Faulty(faults), variant())
        while (faults / "check-hang").exists():
            time.sleep(0.01)
        others = [two.submit(Faulty(faults), variant(SUM.format("*total = 0;"))) for _ in range(3)]
        wait(others, timeout=200)
        # They passed it, or the machine is so busy that they took as long as its deadline.
        assert not hanging.done() or repeated(caplog) == 1
        assert outcome(hanging).outcome == "ok" and repeated(caplog) == 1


# ---------------------------------------------------------------- timing


def test_bench_checks_and_timings_take_turns_on_core():
    core = max(os.sched_getaffinity(0))
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        one = bench(workers=2)
    finally:
        os.sched_setaffinity(0, usable)
    with one:
        texts = [variant() for _ in range(3)] + [fenced(SUM.format(f"*total = {i};")) for i in range(6)]
        futures = [one.submit(CalmReduction(), text) for text in texts]
        moments = []
        while not all(each.done() for each in futures):
            moments.append(dict(one._scheduler.running))
            time.sleep(0.002)
    assert all(not (each.get("check") and each.get("time")) for each in moments)
    assert any(each.get("time") for each in moments) and any(each.get("check") == 2 for each in moments)


def test_bench_checks_avoid_timed_cores(service):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    timed = set(service.timed_cores)
    # Two at once, since a process that has checked nothing yet is on no cores in particular.
    for submitted in [service.submit(CalmReduction(), variant()) for _ in range(2)]:
        outcome(submitted)
    for pool in service._pools.values():
        for pid in pool.pids():
            for thread in os.listdir(f"/proc/{pid}/task"):
                assert not os.sched_getaffinity(int(thread)) & timed


def test_bench_core_wait_is_excluded_from_time_limit():
    """Whoever times on the cores lets go after a second; the clock of the program starts then."""
    usable = os.sched_getaffinity(0)
    with bench() as one:
        timed, cores = one.timed_cores, tuple(usable)
    make = partial(Checker, namespaces=False)
    sent = pickle.dumps(CalmReduction())
    released = []
    free = threading.Event()

    def hold():
        with lock_cores(timed, 200):
            free.set()
            time.sleep(1.0)
            released.append(time.monotonic())

    patched = (probe.MAX_VARIATION, probe.Probe.is_disturbed, benches.wait_until_idle)
    limits, looked = (timing.MAX_WAIT_FRACTION, timing.stolen_ticks), []
    try:
        checked, library = check_program(make, cores, "key", sent, fenced(HONEST))
        assert checked.outcome == "ok"
        time_program(make, cores, timed, 0.2, "key", sent, "reduction", library)  # makes the timer
        benches.wait_until_idle = lambda *arguments: looked.append(time.monotonic())
        holder = threading.Thread(target=hold)
        holder.start()
        free.wait(200)
        result = time_program(make, cores, timed, 0.2, "key", sent, "reduction", library)
        holder.join()
        assert result.outcome == "ok" and result.seconds["wait"] > 0.9
        # An engine may have begun while this waited for the cores.
        assert released[0] <= looked[0]
    finally:
        benches.CHECKERS.close()
        benches.TIMERS.close()
        probe.MAX_VARIATION, probe.Probe.is_disturbed, benches.wait_until_idle = patched
        timing.MAX_WAIT_FRACTION, timing.stolen_ticks = limits
        os.sched_setaffinity(0, usable)


class Varying(CalmReduction):
    """On a machine that varies."""

    def __reduce__(self):
        return varying, (self.size,)


def varying(size: int) -> Varying:
    benches.wait_until_idle = lambda *arguments: 0.0
    probe.MAX_VARIATION, probe.CALM_TRIES = -1.0, 1
    return Varying(size)


def test_bench_untimeable_machine_yields_noisy_outcome(service):
    results = [outcome(service.submit(Varying(), fenced(HONEST))) for _ in range(2)]
    for each in results:
        assert (each.outcome, each.stage, each.timing) == ("noisy", "time", None)
        assert "this machine varies" in each.note and not each.is_cached


# ---------------------------------------------------------------- the end, and bad input


def test_bench_close_leaves_no_processes_or_files():
    me = psutil.Process()
    before = {child.pid for child in me.children(recursive=True)}
    files = me.num_fds()
    one = bench(workers=2)
    done = one.submit(CalmReduction(), fenced(HONEST))
    outcome(done)
    left = [one.submit(CalmReduction(), fenced(HANGS)), *(one.submit(CalmReduction(), variant()) for _ in range(5))]
    left[5].cancel()
    time.sleep(0.3)
    one.close()
    one.close()
    for each in left[:5]:
        with pytest.raises(BenchError, match="the Bench is closed"):
            each.result(timeout=0)
    with pytest.raises(BenchError, match="the Bench is closed"):
        one.submit(CalmReduction(), fenced(HONEST))
    deadline = time.monotonic() + 5
    while {child.pid for child in me.children(recursive=True)} - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert {child.pid for child in me.children(recursive=True)} <= before
    assert not any(pool.folder.exists() for pool in one._pools.values()) and me.num_fds() == files


def test_a_callback_may_submit_more(service):
    second = []
    first = service.submit(CalmReduction(), "nothing")
    first.add_done_callback(
        lambda future: second.append(service.submit(CalmReduction(), "nothing either, or is there?"))
    )
    outcome(first)
    deadline = time.monotonic() + 10
    while not second and time.monotonic() < deadline:
        time.sleep(0.01)
    assert outcome(second[0]).outcome == "format"


def test_kernels_that_cannot_be_sent_are_named(service):
    kernel = CalmReduction()
    kernel.__dict__["lock"] = threading.Lock()
    kernel.__class__ = type("Locked", (CalmReduction,), {"__reduce__": object.__reduce__})
    with pytest.raises(ValueError, match="kernel Locked cannot be pickled: TypeError: .*lock"):
        service.submit(kernel, fenced(HONEST))


def test_bench_kernel_with_wrong_naive_program_raises(service):
    class Broken(CalmReduction):
        naive = SUM.format("*total = 0;")

    with pytest.raises(BenchError, match="wrong_result"):
        outcome(service.submit(Broken(), fenced(HONEST)))
