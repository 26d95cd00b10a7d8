"""The process that calls a candidate: what lies around its arrays, what it may not do, and what its lies are worth."""

import os
import resource
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.locked_in import SIZE, Attempt, build, loaded
from torchtune_ext.measured.child import ALIGNMENT_BYTES, PAGE_BYTES, POISON, Child, ChildFailed, arena_size, lay_out
from torchtune_ext.measured.compiler import Compiler
from torchtune_ext.measured.kernel import Parameter
from torchtune_ext.measured.kernels import KERNELS
from torchtune_ext.measured.sandbox import Limits, Sandbox, SandboxError

PROGRAMS = """
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
static void burn(double seconds) {
    struct timespec now, start;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &start);
    do clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    while (now.tv_sec - start.tv_sec + 1e-9 * (now.tv_nsec - start.tv_nsec) < seconds);
}
static void doze(double seconds) { struct timespec t = {0, (long)(1e9 * seconds)}; nanosleep(&t, NULL); }
struct message { uint32_t kind, count; uint64_t number, words[24]; };
static void say(uint64_t number) { struct message m = {0, 0, number}; for (int f = 3; f < 1024; f++) write(f, &m, sizeof m); }

void add_one(int n, const double *in, double *out) { for (int i = 0; i < n; i++) out[i] = in[i] + 1; }
void nothing(int n, const double *in, double *out) { }
void after_out(int n, const double *in, double *out) { add_one(n, in, out); out[n] = 0; }
void before_out(int n, const double *in, double *out) { add_one(n, in, out); out[-1] = 0; }
void far_after_in(int n, const double *in, double *out) { out[0] = in[n]; }
void far_before_in(int n, const double *in, double *out) { out[0] = in[-1]; }
void write_in(int n, const double *in, double *out) { ((double *)in)[0] = 1; }
void unprotect_in(int n, const double *in, double *out) {
    long page = (long)in & -4096;
    out[0] = mprotect((void *)page, 4096, PROT_READ | PROT_WRITE) == 0 ? 0 : errno;
}
void write_files(int n, const double *in, double *out) {  /* how many files can be written */
    out[0] = 0;
    for (int f = 3; f < 1024; f++) {
        void *p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, f, 0);
        out[0] += p != MAP_FAILED;
    }
}
void seen_before(int n, const double *in, double *out) { uint64_t w; memcpy(&w, out, 8); double was = w == 0x7FF80BAD0BAD0BADull; out[0] = was; }
void quit(int n, const double *in, double *out) { exit(n == 5 ? 0 : n); }
void crash(int n, const double *in, double *out) { *(volatile int *)8 = 1; }
void give_up(int n, const double *in, double *out) { fprintf(stderr, "no\\033[31m way"); abort(); }
void hang_up(int n, const double *in, double *out) { for (int f = 3; f < 1024; f++) close(f); for (;;) doze(0.5); }
void hang(int n, const double *in, double *out) { for (;;) doze(0.5); }
void chat(int n, const double *in, double *out) { say(77); doze(1); }
void burn_10ms(int n, const double *in, double *out) { burn(0.01); }
/* Answers before it works, and reads the next request by itself, so that nobody sees two answers. */
void answer_early(int n, const double *in, double *out) {
    int talk = 3;
    struct stat s;
    while (fstat(talk, &s) != 0 || !S_ISSOCK(s.st_mode)) talk++;
    struct message m = {0, 0, 2}; /* the first was for the places */
    for (;;) {
        write(talk, &m, sizeof m);
        burn(0.02);
        add_one(n, in, out);
        if (read(talk, &m, sizeof m) != sizeof m) _exit(0);
        n = m.words[0], in = (double *)m.words[1], out = (double *)m.words[2];
    }
}
static void *work_on(void *seconds) { burn(*(double *)seconds); return NULL; }
void leave_thread(int n, const double *in, double *out) {
    static double seconds; seconds = 0.05;
    pthread_t thread; pthread_create(&thread, NULL, work_on, &seconds);
    add_one(n, in, out);
}
static void *work_forever(void *x) { for (;;) burn(1); }
void leave_thread_forever(int n, const double *in, double *out) { pthread_t t; pthread_create(&t, NULL, work_forever, NULL); burn(1e-3); add_one(n, in, out); }
static void *doze_and_work(void *x) { for (;;) { doze(2e-5); burn(1e-4); } }
void wake_often(int n, const double *in, double *out) { pthread_t t; static int first = 1; if (first) pthread_create(&t, NULL, doze_and_work, NULL); first = 0; add_one(n, in, out); }
void compete(int n, const double *in, double *out) {
    static double seconds; seconds = 0.1;
    pthread_t t; pthread_create(&t, NULL, work_on, &seconds); burn(0.1); pthread_join(t, NULL); add_one(n, in, out);
}
static void *work_later(void *x) { doze(0.05); burn(0.03); return NULL; }
void work_between(int n, const double *in, double *out) { pthread_t t; static int first = 1; if (first) pthread_create(&t, NULL, work_later, NULL); first = 0; add_one(n, in, out); }
"""
ARRAYS = (Parameter("in"), Parameter("out", is_output=True))


@pytest.fixture(scope="module", params=["bare", "wrapped"])
def sandbox(request):
    try:
        instance = Sandbox(Compiler.find().path, request.param == "wrapped")
    except (ValueError, SandboxError) as error:
        pytest.skip(str(error))
    with instance:
        yield instance


@pytest.fixture(scope="module")
def library(sandbox):
    return build(Compiler.find().path, PROGRAMS, sandbox.new_folder() / "programs.so", "-pthread")


@pytest.fixture
def run(sandbox, library):
    def once(name: str, calls: int = 1, at_end: bool = True, deadline_s: float = 10.0, pause_s: float = 0.0):
        kernel = Attempt(name, ARRAYS)
        with loaded(sandbox, library, kernel, at_end=at_end) as (child, _):
            done = []
            for number in range(calls):
                done.append(child.call(SIZE, {"in": np.arange(5.0) + number}, deadline_s))
                time.sleep(pause_s)
            return done

    return once


def failure(run, name: str, **arguments) -> tuple[str, str]:
    with pytest.raises(ChildFailed) as caught:
        run(name, **arguments)
    return caught.value.outcome, str(caught.value)


def test_results_are_read(run):
    for number, call in enumerate(run("add_one", calls=3)):
        np.testing.assert_array_equal(call.outputs["out"], np.arange(5.0) + number + 1)
        assert 0 < call.seconds < 5 and 0 <= call.cpu_s < 5


def test_child_work_between_calls_detected_at_next_call(sandbox, library):
    kernel = Attempt("work_between", ARRAYS)
    with loaded(sandbox, library, kernel) as (child, _):
        child.call(SIZE, {"in": np.arange(5.0)}, 10.0)
        deadline = time.monotonic() + 20
        while child.unrequested_cpu_s() < 0.03 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert child.unrequested_cpu_s() >= 0.03
        assert child.call(SIZE, {"in": np.arange(5.0)}, 10.0).seconds >= 0.03  # it is counted, too
        assert child.unrequested_cpu_s() == 0


def test_child_competing_threads_count_as_own_cpu_time(run):
    (call,) = run("compete")
    assert call.cpu_s >= 0.2
    # They share a core with whoever else is there, so others can have had no more of it than what is left.
    assert call.waited_s <= call.seconds - call.cpu_s + 1e-3


def test_outputs_are_poisoned_before_each_call(run):
    for call in run("nothing", calls=2):
        assert (call.outputs["out"].view(np.uint64) == POISON.view(np.uint64)).all()
    assert [call.outputs["out"][0] for call in run("seen_before", calls=3)] == [1, 1, 1]


@pytest.mark.parametrize(
    "name, at_end, outcome, words",
    [
        ("after_out", False, "runtime_error", "wrote after the array out"),
        ("before_out", True, "runtime_error", "wrote before the array out"),
        ("before_out", False, "runtime_error", "SIGSEGV"),
        ("far_before_in", False, "runtime_error", "SIGSEGV"),
        ("write_in", True, "runtime_error", "wrote to an input"),
        ("quit", True, "runtime_error", "ended the process by itself"),
        ("crash", True, "runtime_error", "SIGSEGV"),
        ("give_up", True, "runtime_error", "SIGABRT"),
        ("chat", True, "runtime_error", "unsolicited answer"),
    ],
)
def test_failures(run, name, at_end, outcome, words):
    kind, note = failure(run, name, at_end=at_end)
    assert kind == outcome and words in note


def test_child_write_past_array_end_is_detected(sandbox, library):
    """An array that ends where its page ends: 512 numbers."""
    for name in ("after_out", "far_after_in"):
        kernel = Attempt(name, ARRAYS)
        arena_bytes = arena_size(kernel, kernel.timed)
        with pytest.raises(ChildFailed, match="SIGSEGV"), loaded(sandbox, library, kernel) as (child, _):
            child.map_arrays(lay_out(kernel, {"n": 512}, arena_bytes, True, np.random.default_rng(0)))
            child.call({"n": 512}, {"in": np.zeros(512)}, 10.0)


def test_inputs_cannot_be_made_writable(run):
    assert run("unprotect_in")[0].outputs["out"][0] == 13  # EACCES
    assert run("write_files")[0].outputs["out"][0] == 1  # the outputs alone


def test_deadlines(run):
    start = time.monotonic()
    assert failure(run, "hang", deadline_s=0.2) == ("timeout", "a call did not end within 0.2 s")
    assert time.monotonic() - start < 20


def test_a_thread_that_never_sleeps(run):
    outcome, note = failure(run, "leave_thread_forever", deadline_s=0.3)
    assert outcome == "timeout" and "threads still work" in note


def test_child_closed_connection_is_runtime_error(run, monkeypatch):
    monkeypatch.setattr("torchtune_ext.measured.child.KILL_TIMEOUT_S", 0.3)
    outcome, note = failure(run, "hang_up")
    assert outcome == "runtime_error" and "closed its connection" in note


def test_time_is_read_outside(run):
    assert 0.01 <= run("burn_10ms")[0].seconds < 5


def test_child_early_answer_gains_no_speed(run):
    """Either the copy is made too early, or the work is in the time."""
    for number, call in enumerate(run("answer_early", calls=4)):
        assert call.seconds >= 0.02 or not (call.outputs["out"] == np.arange(5.0) + number + 1).all()


def test_child_unrequested_reply_is_refused(run):
    assert failure(run, "chat", calls=2)[0] == "runtime_error"


def test_child_outliving_threads_count_toward_call_time(run):
    first, second = run("leave_thread", calls=2, pause_s=0.2)
    assert first.seconds + second.seconds >= 0.05 and first.cpu_s + second.cpu_s >= 0.05


def test_child_repeatedly_waking_thread_times_out(sandbox, library):
    """It wakes up while a large result is copied, each time, so that the copy is never one of a sleeping process.

    16 MB take half a millisecond or more, and it sleeps for less than a fifth of that.
    """
    kernel = Attempt("wake_often", ARRAYS)
    kernel.timed = size = {"n": 2_000_000}
    arena_bytes = arena_size(kernel, size)
    start = time.monotonic()
    with pytest.raises(ChildFailed) as caught, loaded(sandbox, library, kernel) as (child, _):
        child.map_arrays(lay_out(kernel, size, arena_bytes, True, np.random.default_rng(0)))
        for _ in range(20):
            child.call(size, {"in": np.zeros(2_000_000)}, 0.5)
    assert caught.value.outcome == "timeout" and "threads still work" in str(caught.value)
    assert time.monotonic() - start < 30


def test_work_between_calls_is_added_to_the_next(run):
    first, second = run("work_between", calls=2, pause_s=0.3)
    assert first.seconds < second.seconds and second.seconds >= 0.03


def test_child_close_leaves_no_open_files(sandbox, library):
    def one():
        with loaded(sandbox, library, Attempt("add_one", ARRAYS)) as (child, _):
            child.call(SIZE, {"in": np.zeros(5)}, 10.0)

    one()
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(5):
        one()
    # What an earlier test has left to the garbage collector may close meanwhile.
    assert set(os.listdir("/proc/self/fd")) <= before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # it lives


def test_a_library_that_cannot_be_loaded(sandbox, library):
    with pytest.raises(ChildFailed, match="undefined symbol"), loaded(sandbox, library, Attempt("absent", ARRAYS)):
        pass


def test_loading_has_a_deadline(sandbox):
    source = "#include <unistd.h>\n__attribute__((constructor)) static void linger(void) { for (;;) sleep(1); } void f(void) {}"
    slow = build(Compiler.find().path, source, sandbox.new_folder() / "slow.so")
    kernel = Attempt("f", ARRAYS)
    with pytest.raises(ChildFailed, match="loading the library did not end within 0.2 s") as caught:
        Child(sandbox, slow, kernel, arena_size(kernel, kernel.timed), [0], 1, Limits(), 0.2)
    assert caught.value.outcome == "timeout"


@given(st.sampled_from(sorted(KERNELS)), st.data(), st.booleans(), st.integers(0, 2**32))
def test_arena_arrays_are_separate_and_in_bounds(name, data, at_end, seed):
    kernel = KERNELS[name]()
    size = {key: data.draw(st.integers(1, top), key) for key, top in kernel.timed.items()}
    arena_bytes = arena_size(kernel, kernel.timed)
    places = lay_out(kernel, size, arena_bytes, at_end, np.random.default_rng(seed))
    assert [place.name for place in places] == [parameter.name for parameter in kernel.parameters]
    end = 0
    for place in sorted(places, key=lambda place: place.first_page):
        # At least one page that cannot be touched lies before each array and after the last.
        assert (
            place.first_page >= end + PAGE_BYTES
            and place.first_page % PAGE_BYTES == 0
            and place.pages_bytes % PAGE_BYTES == 0
        )
        assert place.start % ALIGNMENT_BYTES == 0
        end = place.first_page + place.pages_bytes
        assert place.first_page <= place.start and place.start + place.nbytes <= end
        # The nearest page that cannot be touched is less than a line away: at the start, or behind the end.
        assert end - (place.start + place.nbytes) < ALIGNMENT_BYTES if at_end else place.start == place.first_page
    assert end + PAGE_BYTES <= arena_bytes


def test_child_failed_arena_allocation_leaks_no_descriptor(monkeypatch):
    from torchtune_ext.measured import child

    rooms = iter([child.mmap.mmap])

    def room(*size):
        try:
            return next(rooms)(*size)
        except StopIteration:
            raise OSError("Cannot allocate memory") from None

    monkeypatch.setattr(child, "mmap", SimpleNamespace(mmap=room, PAGESIZE=PAGE_BYTES))
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(SandboxError, match="no room for .*: Cannot allocate memory"):
        Child(None, None, Attempt("add_one", ARRAYS), PAGE_BYTES, [0], 1, Limits(), 1.0)
    assert set(os.listdir("/proc/self/fd")) <= before
