"""StalenessScheduler: thousands of schedules in simulated time, and each rule by hand."""

import heapq
import itertools
import json
import random
from collections.abc import Callable
from functools import cache

import pytest

from torchtune_ext.pipeline.staleness import StalenessScheduler

SCHEDULES = 2500  # of each kind
# Seconds per group, from constant to heavy tails without a mean.
LENGTHS: list[Callable[[random.Random], float]] = [
    lambda rng: 1.0,
    lambda rng: rng.uniform(0.0, 2.0),
    lambda rng: rng.lognormvariate(0.0, 2.0),
    lambda rng: rng.paretovariate(0.7),
]


class Both:
    """Calls two schedulers and asserts equal results."""

    def __init__(self, *schedulers: StalenessScheduler):
        self.schedulers = schedulers

    def __getattr__(self, name: str):
        def call_both(*args):
            first, second = (getattr(scheduler, name)(*args) for scheduler in self.schedulers)
            assert first == second, name
            return first

        return call_both


class Schedule:
    """One run in simulated time: groups of random lengths, and a trainer of varying speed.

    It tracks submissions and training itself, and compares them with every result of the scheduler.
    """

    def __init__(self, seed: int, requeues: bool = False, resumes: bool = False):
        self.rng = rng = random.Random(seed)
        self.requeues, self.resumes = requeues, resumes
        self.batch, self.steps, self.staleness = rng.randint(1, 6), rng.randint(1, 7), rng.randint(0, 4)
        self.prefetch_steps = rng.randint(0, self.staleness)
        self.scheduler = self.new_scheduler()
        self.length, self.pause = rng.choice(LENGTHS), rng.choice((0.0, 0.5, 5.0))
        self.skip_probability = rng.choice((0.0, 0.5))  # that the caller skips a submission

        self.now, self.version, self.training = 0.0, 0, False
        # (time, number of the group that finishes, or -1 if the trainer ends a step)
        self.events: list[tuple[float, int]] = []
        self.submitted_at: dict[int, int] = {}  # number -> version at which it was submitted last
        self.running: set[int] = set()
        self.finished: set[int] = set()
        self.trained: set[int] = set()

    def new_scheduler(self) -> StalenessScheduler:
        return StalenessScheduler(self.batch, self.steps, self.staleness, self.prefetch_steps)

    def play(self) -> None:
        total = self.batch * self.steps
        while len(self.trained) < total:
            if self.requeues and self.running and self.rng.random() < 0.05:
                self.requeue_running(self.scheduler, self.rng.choice(sorted(self.running)))
            for _ in range(2):  # sometimes twice in a row
                if self.resumes and self.rng.random() < 0.05:
                    self.resume()
            if not self.events or self.rng.random() >= self.skip_probability:
                self.submit()
            if not self.training:
                self.take()
            self.next_event()
        assert self.trained == set(range(total)) and not self.running and not self.finished
        if isinstance(self.scheduler, StalenessScheduler):
            assert (self.scheduler.num_taken, self.scheduler.num_dropped) == (total, 0)

    def submit(self) -> None:
        for number in self.scheduler.schedule():
            assert 0 <= number < self.batch * self.steps
            assert number not in self.trained and number not in self.finished and number not in self.running
            # AReaL, Eq. 3, with prefetch_steps. Numbers have no gaps, so this group is the (number + 1)-th.
            assert number in self.submitted_at or number == len(self.submitted_at)
            assert number // self.batch <= self.version + self.prefetch_steps
            self.submitted_at[number] = self.version
            self.running.add(number)
            heapq.heappush(self.events, (self.now + self.length(self.rng), number))

    def take(self) -> None:
        waits_for = self.scheduler.awaited_groups()
        assert not self.finished.intersection(waits_for) and not self.trained.intersection(waits_for)
        batch = self.scheduler.next_batch()
        if batch is None:
            assert waits_for  # each is running, or will be at the next submission
            return
        assert list(batch) == sorted(batch) and len(batch) == self.batch and self.finished.issuperset(batch)
        assert batch == {number: self.version - self.submitted_at[number] for number in batch}
        assert max(batch.values()) <= self.staleness
        self.finished.difference_update(batch)
        self.trained.update(batch)
        if self.prefetch_steps == 0:
            step = len(self.trained) // self.batch - 1
            assert list(batch) == list(range(step * self.batch, (step + 1) * self.batch))
        # The trained groups have the lowest numbers, except within a window.
        oldest = next(number for number in itertools.count() if number not in self.trained)
        assert max(batch) - oldest < max(1, int(0.3 * (self.prefetch_steps + 1) * self.batch + 1e-9))
        self.training = True
        heapq.heappush(self.events, (self.now + self.rng.expovariate(1.0) * self.pause, -1))

    def next_event(self) -> None:
        if not self.events:  # the last running group was requeued, or nothing was submitted
            self.submit()
        assert self.events, "nothing runs and nothing may be submitted"
        self.now, number = heapq.heappop(self.events)
        if number < 0:
            self.training, self.version = False, self.version + 1
            assert self.scheduler.on_publish(self.version) == []  # no group becomes too stale
        else:
            self.running.remove(number)
            self.finished.add(number)
            self.scheduler.mark_finished(number)

    def requeue_running(self, scheduler: StalenessScheduler, *numbers: int) -> None:
        for number in numbers:
            scheduler.requeue(number)
        self.running.difference_update(numbers)
        self.events = [event for event in self.events if event[1] not in numbers]
        heapq.heapify(self.events)

    def resume(self) -> None:
        """Resumes in a new scheduler, and in the old one without its running groups: both must stay equal."""
        old = self.scheduler.schedulers[0] if isinstance(self.scheduler, Both) else self.scheduler
        state = json.dumps(old.state_dict())
        self.requeue_running(old, *self.running)
        new = self.new_scheduler()
        new.load_state_dict(json.loads(state))
        assert json.dumps(new.state_dict()) == json.dumps(old.state_dict()) == state
        self.scheduler = Both(new, old)
        assert self.scheduler.on_publish(self.version) == []


@pytest.mark.parametrize("resumes", [False, True], ids=["uninterrupted", "resumed"])
@pytest.mark.parametrize("requeues", [False, True], ids=["all finish", "some requeued"])
def test_scheduler_random_schedules_keep_staleness_bound(requeues, resumes):
    for seed in range(SCHEDULES):
        try:
            Schedule(seed, requeues, resumes).play()
        except Exception as error:
            raise AssertionError(f"schedule {seed}") from error


@pytest.mark.parametrize("staleness", [1, 2, 4, 16])
def test_scheduler_short_run_submits_only_its_groups(staleness):
    """No group beyond max_steps is submitted, with any prefetch_steps."""
    for steps in range(staleness + 1):
        scheduler = StalenessScheduler(3, steps, staleness, staleness)
        assert scheduler.schedule() == list(range(3 * steps))
        for number in range(3 * steps):
            scheduler.mark_finished(number)
        for step in range(steps):
            assert list(scheduler.next_batch()) == [3 * step, 3 * step + 1, 3 * step + 2]
            assert scheduler.on_publish(step + 1) == scheduler.schedule() == []


def mark_finished(scheduler: StalenessScheduler, *numbers: int) -> StalenessScheduler:
    for number in numbers:
        scheduler.mark_finished(number)
    return scheduler


def scheduler_with_straggler() -> StalenessScheduler:
    """A scheduler at step 1, batch size 10, bound 1: only group 15 is unfinished, and its deadline is step 1."""
    scheduler = StalenessScheduler(10, 5, staleness=1)
    assert scheduler.schedule() == list(range(20))
    mark_finished(scheduler, *range(5), *range(6, 11))
    # Group 5 may be overtaken, because it can be trained at step 1 as well. The window of 6 reaches to group 10.
    assert list(scheduler.next_batch()) == [*range(5), *range(6, 11)]
    assert scheduler.on_publish(1) == [] and scheduler.schedule() == list(range(20, 30))
    return mark_finished(scheduler, 5, *range(11, 15), *range(16, 30))


def test_scheduler_overtaking_stops_at_staleness_bound():
    scheduler = scheduler_with_straggler()
    assert scheduler.next_batch() is None and scheduler.awaited_groups() == [15]
    mark_finished(scheduler, 15)
    assert scheduler.next_batch() == dict.fromkeys([5, *range(11, 20)], 1)


@cache
def is_feasible(deadlines: tuple[int, ...], step: int, batch: int) -> bool:
    """Whether some order trains every group by its deadline, by brute force.

    `deadlines` are the sorted last steps of the groups; each step from `step` on trains `batch` groups.
    """
    if not deadlines or deadlines[0] < step:
        return not deadlines
    choices = set(itertools.combinations(deadlines, min(batch, len(deadlines))))
    return any(is_feasible(_without(deadlines, choice), step + 1, batch) for choice in choices)


def _without(deadlines: tuple[int, ...], choice: tuple[int, ...]) -> tuple[int, ...]:
    left = list(deadlines)
    for step in choice:
        left.remove(step)
    return tuple(left)


def test_scheduler_refuses_overtaking_only_beyond_staleness_bound():
    """The random schedules test the other direction: allowed batches keep the bound."""
    refused, rng = 0, random.Random(0)
    while refused < 200:
        size, staleness = rng.randint(3, 5), rng.randint(1, 2)
        scheduler = StalenessScheduler(size, 9, staleness, rng.randint(1, staleness))
        for version in range(8):
            scheduler.on_publish(version)
            scheduler.schedule()
            while True:
                deadlines = {number: at + staleness for number, at in (scheduler.running | scheduler.finished).items()}
                end = min([*scheduler.running, scheduler.next_number]) + scheduler.window
                batches = list(itertools.combinations([number for number in scheduler.finished if number < end], size))
                if scheduler.next_batch() is not None:
                    break
                for batch in batches:
                    left = sorted(step for number, step in deadlines.items() if number not in batch)
                    assert not is_feasible(tuple(left), version + 1, size)
                refused += bool(batches)
                scheduler.mark_finished(rng.choice(sorted(scheduler.running)))


def test_scheduler_requeued_group_gets_later_deadline():
    """The deadline of a requeued group is `staleness` steps after its resubmission, so others may overtake it."""
    scheduler = scheduler_with_straggler()
    scheduler.requeue(15)
    assert list(scheduler.next_batch()) == [5, *range(11, 15), *range(16, 21)]
    assert scheduler.schedule() == [15] and scheduler.on_publish(2) == []
    mark_finished(scheduler, 15)
    assert scheduler.next_batch() == {15: 1} | dict.fromkeys(range(21, 30), 1)


def test_scheduler_batch_takes_oldest_finished_groups():
    scheduler = StalenessScheduler(2, 9, staleness=4, prefetch_steps=4)  # a window of 3
    assert scheduler.schedule() == list(range(10))
    mark_finished(scheduler, 9, 3, 5)
    assert scheduler.next_batch() is None and scheduler.awaited_groups() == [0, 1]
    mark_finished(scheduler, 2, 1, 4)
    assert list(scheduler.next_batch()) == [1, 2]
    # 3 - 0 >= window, so 3 may not overtake 0.
    assert scheduler.awaited_groups() == [0] and scheduler.next_batch() is None
    mark_finished(scheduler, 0)
    assert list(scheduler.next_batch()) == [0, 3]


def test_scheduler_without_staleness_idles_during_training():
    scheduler = StalenessScheduler(4, 3)
    for step in range(3):
        numbers = list(range(4 * step, 4 * step + 4))
        assert scheduler.schedule() == numbers
        mark_finished(scheduler, *numbers[1:])
        assert scheduler.next_batch() is None and scheduler.awaited_groups() == numbers[:1]
        mark_finished(scheduler, numbers[0])
        assert scheduler.next_batch() == dict.fromkeys(numbers, 0)
        assert scheduler.schedule() == [] and scheduler.on_publish(step + 1) == []


@pytest.mark.parametrize("jump", ["version", "staleness"])
def test_scheduler_too_stale_groups_are_dropped_and_replaced(jump):
    """A version that jumps, or a smaller bound after a resume: each group is trained once, within the bound."""
    dropped = 0
    for seed in range(500):
        rng = random.Random(seed)
        batch, steps, staleness = rng.randint(1, 4), rng.randint(1, 8), rng.randint(0, 4)
        scheduler, version = StalenessScheduler(batch, steps, staleness, staleness), 0
        at: dict[int, int] = {}  # number -> version at which it was submitted last
        trained: list[int] = []
        drops = 0
        while len(trained) < batch * steps:
            at.update(dict.fromkeys(scheduler.schedule(), version))
            # However far the version jumps, the trainer can consume all groups in flight in time.
            assert len(scheduler.running) + len(scheduler.finished) <= (staleness + 1) * batch
            while not (numbers := scheduler.next_batch()):
                scheduler.mark_finished(rng.choice(sorted(scheduler.running)))
            assert numbers == {number: version - at[number] for number in numbers}
            assert max(numbers.values()) <= staleness
            trained += numbers
            version += 1
            if jump == "version":
                version += rng.choice((0, 0, 1, 7))
            elif staleness and rng.random() < 0.3:
                state, staleness = scheduler.state_dict(), staleness - 1
                scheduler = StalenessScheduler(batch, steps, staleness, staleness)
                scheduler.load_state_dict(state)
            stale = [n for n in [*scheduler.running, *scheduler.finished] if version - at[n] > staleness]
            assert scheduler.on_publish(version) == sorted(stale)
            assert scheduler.to_resubmit.issuperset(stale) and scheduler.running.keys().isdisjoint(stale)
            drops += len(stale)
            assert (scheduler.num_dropped, scheduler.num_taken) == (drops, len(trained))
        assert sorted(trained) == list(range(batch * steps))
        dropped += drops
    assert dropped > 100


def test_scheduler_smaller_staleness_prefetches_fewer_groups():
    scheduler = StalenessScheduler(2, 9, staleness=4, prefetch_steps=4)
    scheduler.schedule()
    mark_finished(scheduler, 1, 5)
    state = scheduler.state_dict()
    scheduler = StalenessScheduler(2, 9, staleness=1)
    scheduler.load_state_dict(state)
    assert scheduler.on_publish(0) == []
    assert scheduler.schedule() == [0, 2, 3]  # of the running groups, as many as the new prefetch_steps allows
    mark_finished(scheduler, 0)
    assert scheduler.next_batch() == {0: 0, 1: 0}
    assert scheduler.on_publish(1) == [] and scheduler.schedule() == [4]
    mark_finished(scheduler, 2, 3)
    assert scheduler.next_batch() == {2: 1, 3: 1}
    assert scheduler.on_publish(2) == [5] and scheduler.num_dropped == 1, "group 5 was submitted at version 0"
    assert scheduler.schedule() == [5, 6, 7]
    mark_finished(scheduler, 4, 5)
    assert scheduler.next_batch() == {4: 1, 5: 0}


def test_scheduler_shortened_run_submits_only_needed_groups():
    scheduler = StalenessScheduler(2, 9, staleness=4, prefetch_steps=4)
    scheduler.schedule()
    state = scheduler.state_dict()
    scheduler = StalenessScheduler(2, 1, staleness=4, prefetch_steps=4)
    scheduler.load_state_dict(state)
    assert scheduler.schedule() == [0, 1]
    mark_finished(scheduler, 0, 1)
    assert scheduler.next_batch() == {0: 0, 1: 0} and scheduler.schedule() == []


def test_scheduler_finished_group_can_be_resubmitted():
    scheduler = StalenessScheduler(2, 2, staleness=1)
    scheduler.schedule()
    mark_finished(scheduler, 0, 1)
    scheduler.requeue(1)
    assert scheduler.next_batch() is None and scheduler.schedule() == [1]


def test_scheduler_default_prefetch_steps():
    assert [StalenessScheduler(2, 3, staleness).prefetch_steps for staleness in (0, 1, 2, 8)] == [0, 1, 1, 1]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"staleness": -1}, "staleness=-1: expected a whole number of at least 0"),
        ({"staleness": 0.5}, "staleness=0.5: expected a whole number"),
        ({"staleness": True}, "staleness=True: expected a whole number"),
        ({"staleness": 1, "prefetch_steps": -1}, "prefetch_steps=-1: expected a whole number of at least 0"),
        ({"staleness": 2, "prefetch_steps": 1.0}, "prefetch_steps=1.0: expected a whole number"),
        (
            {"prefetch_steps": 1},
            r"prefetch_steps=1: .*staleness=0\. Fix: set prefetch_steps=0 or staleness=1",
        ),
    ],
)
def test_scheduler_invalid_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        StalenessScheduler(**{"prompts_per_step": 2, "max_steps": 3} | options)


def test_scheduler_state_of_another_run_is_refused():
    state = StalenessScheduler(4, 3).state_dict()
    with pytest.raises(ValueError, match="prompts_per_step=2: .*Fix: set prompts_per_step=4"):
        StalenessScheduler(2, 6).load_state_dict(state)


def test_scheduler_state_with_old_keys_loads():
    scheduler = StalenessScheduler(2, 3, staleness=1)
    scheduler.schedule()
    state = scheduler.state_dict()
    old_names = {"next_number": "next", "to_resubmit": "again", "num_dropped": "dropped"}
    restored = StalenessScheduler(2, 3, staleness=1)
    restored.load_state_dict({old_names.get(key, key): value for key, value in state.items()} | {"step": 0})
    assert restored.state_dict() == state


def test_scheduler_decreasing_version_is_refused():
    scheduler = StalenessScheduler(2, 9, staleness=1)
    scheduler.on_publish(3)
    with pytest.raises(ValueError, match="version=2: .*version=3"):
        scheduler.on_publish(2)


def test_scheduler_invalid_calls_raise():
    scheduler = StalenessScheduler(1, 1)
    scheduler.schedule()
    mark_finished(scheduler, 0)
    with pytest.raises(KeyError):
        scheduler.mark_finished(0)  # group 0 is already finished
    scheduler.next_batch()
    with pytest.raises(KeyError):
        scheduler.requeue(0)  # group 0 is already taken
    with pytest.raises(AssertionError, match="all 1 groups of the run have been taken"):
        scheduler.next_batch()
