"""What the service begins next: a program on paper, with any number of workers, arrivals and ends in any order."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtune_ext.measured import bench
from torchtune_ext.measured.bench import CHECK, TIME, Schedule

EVENTS = st.lists(st.tuples(st.sampled_from(["submit", "check ends", "timing ends"]), st.integers(0, 9)), max_size=120)


class Played:
    """Plays a service: every second program is right and is timed, every fifth attempt fails and is made again, every timing of a
    seventh program is disturbed once."""

    def __init__(self, workers: int, is_shared: bool) -> None:
        self.schedule = Schedule(workers, is_shared)
        self.running: list[tuple[str, int]] = []
        self.begun: list[tuple[str, int]] = []
        self.failed: Counter[tuple[str, int]] = Counter()
        self.disturbed: list[int] = []
        self.done: list[int] = []
        self.submitted = 0

    def begin(self) -> None:
        while (begun := self.schedule.next()) is not None:
            self.running.append(begun)
            self.begun.append(begun)
            self.require_rules()

    def require_rules(self) -> None:
        stages = [stage for stage, _ in self.running]
        assert stages.count(CHECK) <= self.schedule.workers and stages.count(TIME) <= 1
        timed_again = any(stage == TIME and job in self.disturbed for stage, job in self.running)
        # A check disturbs a timing on its cores, and one that was disturbed before is to be alone.
        assert not (self.schedule.is_shared or timed_again) or len(set(stages)) <= 1

    def submit(self) -> None:
        self.schedule.checks.append(self.submitted)
        self.submitted += 1

    def end(self, stage: str, which: int) -> None:
        those = [each for each in self.running if each[0] == stage]
        if not those:
            return
        ended = those[which % len(those)]
        self.running.remove(ended)
        self.schedule.ended(*ended)
        job = ended[1]
        if job % 5 == 0 and self.failed[ended] < 2:
            self.failed[ended] += 1
            (self.schedule.checks if stage == CHECK else self.schedule.timings).appendleft(job)
        elif stage == CHECK and job % 2 == 0:
            self.schedule.timings.append(job)
        elif stage == TIME and job % 7 == 0 and job not in self.disturbed:
            self.disturbed.append(job)
            self.schedule.again.append(job)
        else:
            self.done.append(job)

    def play(self, events) -> None:
        for event, which in events:
            if event == "submit":
                self.submit()
            else:
                self.end(CHECK if event == "check ends" else TIME, which)
            self.begin()


@given(st.integers(1, 4), st.booleans(), EVENTS)
def test_nothing_is_lost_and_no_rule_is_broken(workers, is_shared, events):
    played = Played(workers, is_shared)
    played.play(events)
    for _ in range(10 * played.submitted):
        if not played.running:
            break
        played.end(played.running[0][0], 0)
        played.begin()
    assert sorted(played.done) == list(range(played.submitted)) and not played.running
    timed = [job for stage, job in played.begun if stage == TIME]
    assert set(timed) == {job for job in range(played.submitted) if job % 2 == 0}


@given(st.integers(1, 4), EVENTS)
def test_cores_of_their_own_never_wait_for_each_other(workers, events):
    played = Played(workers, is_shared=False)
    played.play(events)
    waiting = played.schedule
    alone = bool(played.disturbed) and (waiting.again or waiting.timing in played.disturbed)
    assert alone or not waiting.checks or len(waiting.checking) == workers
    assert not waiting.timings or waiting.timing is not None


@pytest.mark.parametrize("workers", [1, 3])
def test_checks_go_first_but_not_for_ever(workers):
    played = Played(workers, is_shared=True)
    played.submit()
    played.begin()
    played.end(CHECK, 0)  # it fails twice
    played.begin()
    played.end(CHECK, 0)
    played.begin()
    played.end(CHECK, 0)  # now it waits for its timing
    for _ in range(3 * bench.PATIENCE):
        played.submit()  # there is always a check that waits
        played.submit()
        played.begin()
        if ("time", 0) in played.running:
            break
        played.end(CHECK, 0)
        played.begin()
    between = len(played.begun) - 1 - 3
    assert played.begun[-1] == (TIME, 0) and bench.PATIENCE <= between <= bench.PATIENCE + workers
    played.end(TIME, 0)
    played.begin()
    assert played.running and {stage for stage, _ in played.running} == {CHECK}


def test_a_disturbed_timing_waits_until_it_is_alone_but_not_for_ever():
    schedule = Schedule(1, is_shared=False)
    schedule.again.append("disturbed")
    for number in range(bench.PATIENCE):
        schedule.checks.append(number)
        schedule.checks.append(-1)
        assert schedule.next() == (CHECK, number) and schedule.next() is None
        schedule.ended(CHECK, number)
        schedule.checks.clear()
    schedule.checks.append("later")
    assert schedule.next() == (TIME, "disturbed") and schedule.next() is None
    schedule.ended(TIME, "disturbed")
    assert schedule.next() == (CHECK, "later")
    # Others are timed beside checks meanwhile.
    schedule.again.append("disturbed")
    schedule.timings.append("other")
    assert schedule.next() == (TIME, "other") and schedule.next() is None
