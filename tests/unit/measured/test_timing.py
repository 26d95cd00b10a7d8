"""What a timing decides with: the interval of a median, what counts as quiet, whose cores are whose."""

import math
import multiprocessing
import os
import threading
import time
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.as_user import as_user
from torchtune_ext.measured import machine
from torchtune_ext.measured.kernels import Dgemm
from torchtune_ext.measured.machine import avoid_cores, choose_cores, lock_cores, usable_cores
from torchtune_ext.measured.probe import (
    CHUNK_SAMPLES,
    HISTORY_S,
    MEMORY_TOLERANCE,
    REGISTERS_TOLERANCE,
    Probe,
    ProbeSample,
    QuietBaseline,
)
from torchtune_ext.measured.timing import ProgramTimer, Timing, _Block, median_interval


def chance_outside(n: int, k: int) -> float:
    """How likely the median lies outside of the k-th smallest to the k-th largest of n samples, by the binomial sum."""
    return 2 * sum(math.comb(n, i) for i in range(k)) / 2**n


@pytest.mark.parametrize("n", range(1, 60))
def test_median_interval_is_narrowest_with_required_coverage(n):
    samples = np.random.default_rng(n).permutation(n).astype(float).tolist()  # the rank is the value
    low, high = median_interval(samples)
    k = int(low) + 1
    assert high == n - k  # as far from one end as from the other
    if n >= 6:
        assert chance_outside(n, k) <= 0.05 < chance_outside(n, k + 1)
    else:
        assert (low, high) == (0, n - 1)


@pytest.mark.parametrize("n", [1100, 5001])
def test_the_interval_of_many_samples(n):
    low, high = median_interval([float(rank) for rank in range(n)])
    k = int(low) + 1
    # The normal distribution: 1.96 standard deviations of the number of samples below the median, half a sample apart at most.
    assert high == n - k and abs(k - (n / 2 - 1.96 * math.sqrt(n) / 2)) <= 1


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=40))
def test_the_interval_holds_the_median_of_the_samples(samples):
    low, high = median_interval(samples)
    assert low <= median(samples) <= high


def test_quiet_level_is_quietest_recent_chunk_lower_quartile():
    quiet = QuietBaseline()
    for place in range(4 * CHUNK_SAMPLES):  # somebody disturbs, except for a third of the second chunk
        quiet.add(1.0 if CHUNK_SAMPLES <= place < CHUNK_SAMPLES + CHUNK_SAMPLES // 3 else 3.0, now=float(place))
    assert quiet.level == 1.0 and quiet.is_above(1.06, 0.05) and not quiet.is_above(1.04, 0.05)
    for place in range(CHUNK_SAMPLES):  # an hour later the machine runs at another clock
        quiet.add(2.0, now=HISTORY_S + 4 * CHUNK_SAMPLES + place)
    assert quiet.level == 2.0


def test_quiet_level_ignores_neighbor_starting_later():
    quiet = QuietBaseline()
    for _ in range(4):
        quiet.add(1.0, now=0.0)
    quiet.end_chunk(now=0.0)
    for place in range(3 * CHUNK_SAMPLES):
        quiet.add(1.5, now=float(place))
        assert quiet.is_above(1.5, 0.05)
    quiet = QuietBaseline()
    quiet.end_chunk()
    quiet.add(2.0)
    assert quiet.level == 2.0  # where nothing was seen nothing is settled


def timed_by_blocks(are_calm: str) -> Timing:
    """A timing whose blocks are calm ("c", 1 ms a call) or disturbed, the reference as well ("d", 2 ms)."""
    timer = object.__new__(ProgramTimer)  # without a process
    timer.kernel, timer.budget_s = Dgemm(16), 0.1
    timer.probe = SimpleNamespace(take_sample=lambda: None, peak_gflops=1e9, roofline_s=lambda kernel: 1e-9)
    timer._run_calls = lambda child, most: []
    blocks = [
        _Block([1e-3, 1e-3, 1e-3] if each == "c" else [2e-3] * 3, 1e-3, each == "d", each == "d") for each in are_calm
    ]

    def block(child, look):
        if len(blocks) == 1:
            time.sleep(timer.budget_s)
        return blocks.pop(0), look

    timer._run_block = block
    return timer._time_blocks(None)


@pytest.mark.parametrize(
    ("are_calm", "calls", "disturbed", "is_noisy"),
    [
        ("ccccccdddd", 18, 0, False),  # the sixth calm one is enough
        ("dddddddcccd", 33, 8 / 11, True),  # three of eleven may be chance, or chosen
        ("dcc", 6, 0, False),  # there was no time for more
        ("d", 3, 1, True),
    ],
)
def test_timing_few_calm_blocks_are_not_selected(are_calm, calls, disturbed, is_noisy):
    timing = timed_by_blocks(are_calm)
    assert (timing.calls, timing.disturbed_fraction, timing.is_noisy) == (calls, pytest.approx(disturbed), is_noisy)


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=70))
def test_quiet_level_was_observed_and_in_fastest_quarter(times):
    quiet = QuietBaseline()
    for number, seconds in enumerate(times):
        quiet.add(seconds, now=float(number))
    assert quiet.level in times and quiet.level <= sorted(times)[len(times) // 4 if len(times) < CHUNK_SAMPLES else -1]


def test_probe_components_detect_different_neighbors():
    probe = object.__new__(Probe)  # without a process
    probe.registers, probe.memory = QuietBaseline(), QuietBaseline()
    for quiet in (probe.registers, probe.memory):
        quiet.add(1.0)
    calm = ProbeSample((1.0,) * 3, (1.0,) * 3)
    shared_core = ProbeSample((1.01 + REGISTERS_TOLERANCE,) * 3, (1.0,) * 3)
    shared_memory = ProbeSample((1.0,) * 3, (1.01 + MEMORY_TOLERANCE,) * 3)
    one_call = ProbeSample((9.0, 1.0, 1.0), (1.0, 1.0, 9.0))
    assert not probe.is_disturbed(calm, calm) and not probe.is_disturbed(calm, one_call)
    assert probe.is_disturbed(shared_core, shared_core) and probe.is_disturbed(shared_memory, shared_memory)


def test_choose_cores_prefers_cores_unused_by_engines(monkeypatch):
    monkeypatch.setattr(machine, "usable_cores", lambda: frozenset({0, 1, 2, 3}))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(machine, "engine_cores", lambda: {17: frozenset({1, 3})})
    assert choose_cores(None, 1) == [2] and choose_cores(None, 2) == [0, 2]
    assert choose_cores(None, 3) == [1, 2, 3]  # there are not enough: they are shared
    assert choose_cores([2, 0], 2) == [0, 2]
    with pytest.raises(ValueError, match=r"cores=\[1, 2\]: \[1\] .*\(process 17\).*\[0, 2\]"):
        choose_cores([1, 2], 2)
    for wrong in ([7], []):
        with pytest.raises(ValueError, match=r"use some of \[0, 1, 2, 3\]"):
            choose_cores(wrong, 1)
    for other in ([1, 2, 3], [2], [2, 2]):
        with pytest.raises(ValueError, match="threads=2 needs 2 different cores"):
            choose_cores(other, 2)
    with pytest.raises(ValueError, match="threads=5, .* 4 cores"):
        choose_cores(None, 5)
    monkeypatch.setattr(machine, "engine_cores", lambda: {17: frozenset({0, 1, 2, 3})})
    assert choose_cores([1], 1) == [1] and choose_cores(None, 1) == [3]  # such an engine has no core of its own


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_threads_avoid_timed_cores_and_are_restored():
    ready, end = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (ready.set(), end.wait(60)))
    other.start()
    ready.wait(60)
    threads = [threading.get_native_id(), other.native_id]
    before = [os.sched_getaffinity(thread) for thread in threads]
    core = max(usable_cores())
    try:
        with avoid_cores([core]):
            assert all(os.sched_getaffinity(thread) == usable_cores() - {core} for thread in threads)
            assert core in usable_cores()
            with avoid_cores([core]):
                pass
            assert all(os.sched_getaffinity(thread) == usable_cores() - {core} for thread in threads)
        assert [os.sched_getaffinity(thread) for thread in threads] == before
        with avoid_cores(sorted(usable_cores())):  # there are no others
            assert [os.sched_getaffinity(thread) for thread in threads] == before
            with avoid_cores([core]):
                pass
        assert [os.sched_getaffinity(thread) for thread in threads] == before
    finally:
        end.set()
        other.join()


def hold(core, held, let_go):
    with lock_cores([core], 10):
        held.set()
        let_go.wait(30)


def test_core_lock_allows_one_timing_at_a_time():
    spawn = multiprocessing.get_context("spawn")
    held, let_go = spawn.Event(), spawn.Event()
    core = 900_000 + os.getpid() % 10_000  # a core that nobody has
    other = spawn.Process(target=hold, args=(core, held, let_go))
    other.start()
    try:
        assert held.wait(60)
        with (
            pytest.raises(TimeoutError, match=f"core {core} was still used for timing after 0.1 s"),
            lock_cores([core], 0.1),
        ):
            pass
        with lock_cores([core + 1], 0.1):
            pass  # another core is free
        other.kill()  # the kernel takes the lock away from the dead
        other.join(30)
        with lock_cores([core, core + 1], 10):
            pass
    finally:
        other.kill()


def test_core_lock_is_shared_by_all_users():
    core = 900_000 + os.getpid() % 10_000
    with lock_cores([core], 0.1):
        as_user(refused, core)
    as_user(locked, core)
    locked(core)


def refused(core: int) -> None:
    with pytest.raises(TimeoutError), lock_cores([core], 0.0):
        pass


def locked(core: int) -> None:
    with lock_cores([core], 0.1):
        refused(core)


def test_stolen_ticks_are_read_for_given_cores():
    before = machine.stolen_ticks([0])
    assert before >= 0 and machine.stolen_ticks([]) == 0 and machine.stolen_ticks([0]) >= before
    assert str(os.cpu_count()) in machine.machine_fingerprint()
