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

    def __init__(self, *ledgers: StalenessScheduler):
        self.ledgers = ledgers

    def __getattr__(self, name: str):
        def ask(*args):
            first, second = (getattr(ledger, name)(*args) for ledger in self.ledgers)
            assert first == second, name
            return first

        return ask


class Schedule:
    """One run in simulated time: groups of random lengths, and a trainer of varying speed.

    It tracks submissions and training itself, and compares them with every result of the scheduler.
    """

    def __init__(self, seed: int, losses: bool = False, resumes: bool = False):
        self.rng = rng = random.Random(seed)
        self.losses, self.resumes = losses, resumes
        self.batch, self.steps, self.staleness = rng.randint(1, 6), rng.randint(1, 7), rng.randint(0, 4)
        self.depth = rng.randint(0, self.staleness)
        self.ledger = self.new_ledger()
        self.length, self.pause = rng.choice(LENGTHS), rng.choice((0.0, 0.5, 5.0))
        self.patience = rng.choice((0.0, 0.5))  # how often the caller skips a submission

        self.now, self.version, self.training = 0.0, 0, False
        # (time, number of the group that finishes, or -1 if the trainer ends a step)
        self.events: list[tuple[float, int]] = []
        self.at: dict[int, int] = {}  # number -> version at which it was submitted last
        self.running: set[int] = set()
        self.finished: set[int] = set()
        self.trained: set[int] = set()

    def new_ledger(self) -> StalenessScheduler:
        return StalenessScheduler(self.batch, self.steps, self.staleness, self.depth)

    def play(self) -> None:
        total = self.batch * self.steps
        while len(self.trained) < total:
            if self.losses and self.running and self.rng.random() < 0.05:
                self.lose(self.ledger, self.rng.choice(sorted(self.running)))
            for _ in range(2):  # sometimes twice in a row
                if self.resumes and self.rng.random() < 0.05:
                    self.resume()
            if not self.events or self.rng.random() >= self.patience:
                self.submit()
            if not self.training:
                self.take()
            self.next_event()
        assert self.trained == set(range(total)) and not self.running and not self.finished
        if isinstance(self.ledger, StalenessScheduler):
            assert (self.ledger.num_taken, self.ledger.num_dropped) == (total, 0)

    def submit(self) -> None:
        for number in self.ledger.schedule():
            assert 0 <= number < self.batch * self.steps
            assert number not in self.trained and number not in self.finished and number not in self.running
            # AReaL, Eq. 3, with prefetch_steps. Numbers have no gaps, so this group is the (number + 1)-th.
            assert number in self.at or number == len(self.at)
            assert number // self.batch <= self.version + self.depth
            self.at[number] = self.version
            self.running.add(number)
            heapq.heappush(self.events, (self.now + self.length(self.rng), number))

    def take(self) -> None:
        waits_for = self.ledger.awaited_groups()
        assert not self.finished.intersection(waits_for) and not self.trained.intersection(waits_for)
        batch = self.ledger.next_batch()
        if batch is None:
            assert waits_for  # each is running, or will be at the next submission
            return
        assert list(batch) == sorted(batch) and len(batch) == self.batch and self.finished.issuperset(batch)
        assert batch == {number: self.version - self.at[number] for number in batch}
        assert max(batch.values()) <= self.staleness
        self.finished.difference_update(batch)
        self.trained.update(batch)
        if self.depth == 0:
            step = len(self.trained) // self.batch - 1
            assert list(batch) == list(range(step * self.batch, (step + 1) * self.batch))
        # The trained groups have the lowest numbers, except within a window.
        oldest = next(number for number in itertools.count() if number not in self.trained)
        assert max(batch) - oldest < max(1, int(0.3 * (self.depth + 1) * self.batch + 1e-9))
        self.training = True
        heapq.heappush(self.events, (self.now + self.rng.expovariate(1.0) * self.pause, -1))

    def next_event(self) -> None:
        if not self.events:  # it was requeued, or the caller did not submit
            self.submit()
        assert self.events, "nothing runs and nothing may be submitted"
        self.now, number = heapq.heappop(self.events)
        if number < 0:
            self.training, self.version = False, self.version + 1
            assert self.ledger.on_publish(self.version) == []  # no group becomes too old
        else:
            self.running.remove(number)
            self.finished.add(number)
            self.ledger.mark_finished(number)

    def lose(self, ledger: StalenessScheduler, *numbers: int) -> None:
        for number in numbers:
            ledger.requeue(number)
        self.running.difference_update(numbers)
        self.events = [event for event in self.events if event[1] not in numbers]
        heapq.heapify(self.events)

    def resume(self) -> None:
        """Resumes in a new scheduler, and in the old one without its running groups: both must stay equal."""
        old = self.ledger.ledgers[0] if isinstance(self.ledger, Both) else self.ledger
        state = json.dumps(old.state_dict())
        self.lose(old, *self.running)
        new = self.new_ledger()
        new.load_state_dict(json.loads(state))
        assert json.dumps(new.state_dict()) == json.dumps(old.state_dict()) == state
        self.ledger = Both(new, old)
        assert self.ledger.on_publish(self.version) == []


@pytest.mark.parametrize("resumes", [False, True], ids=["one go", "resumed"])
@pytest.mark.parametrize("losses", [False, True], ids=["all finish", "some are lost"])
def test_random_schedules(losses, resumes):
    for seed in range(SCHEDULES):
        try:
            Schedule(seed, losses, resumes).play()
        except Exception as error:
            raise AssertionError(f"schedule {seed}") from error


@pytest.mark.parametrize("staleness", [1, 2, 4, 16])
def test_fewer_steps_than_the_bound(staleness):
    """No group beyond max_steps is submitted, whatever prefetch_steps is."""
    for steps in range(staleness + 1):
        ledger = StalenessScheduler(3, steps, staleness, staleness)
        assert ledger.schedule() == list(range(3 * steps))
        for number in range(3 * steps):
            ledger.mark_finished(number)
        for step in range(steps):
            assert list(ledger.next_batch()) == [3 * step, 3 * step + 1, 3 * step + 2]
            assert ledger.on_publish(step + 1) == ledger.schedule() == []


def finished(ledger: StalenessScheduler, *numbers: int) -> StalenessScheduler:
    for number in numbers:
        ledger.mark_finished(number)
    return ledger


def at_risk() -> StalenessScheduler:
    """A scheduler at step 1, batch size 10, bound 1: only group 15, submitted at version 0, is unfinished."""
    ledger = StalenessScheduler(10, 5, staleness=1)
    assert ledger.schedule() == list(range(20))
    finished(ledger, *range(5), *range(6, 11))
    # Group 5 may be overtaken, because it can be trained at step 1 as well. The window of 6 reaches to group 10.
    assert list(ledger.next_batch()) == [*range(5), *range(6, 11)]
    assert ledger.on_publish(1) == [] and ledger.schedule() == list(range(20, 30))
    return finished(ledger, 5, *range(11, 15), *range(16, 30))


def test_scheduler_overtaking_stops_at_staleness_bound():
    ledger = at_risk()
    assert ledger.next_batch() is None and ledger.awaited_groups() == [15]
    finished(ledger, 15)
    assert ledger.next_batch() == dict.fromkeys([5, *range(11, 20)], 1)


@cache
def servable(due: tuple[int, ...], step: int, batch: int) -> bool:
    """Whether any choice of `batch` groups per step from `step` on trains all in time, by brute force."""
    if not due or due[0] < step:
        return not due
    choices = set(itertools.combinations(due, min(batch, len(due))))
    return any(servable(_without(due, choice), step + 1, batch) for choice in choices)


def _without(due: tuple[int, ...], choice: tuple[int, ...]) -> tuple[int, ...]:
    left = list(due)
    for one in choice:
        left.remove(one)
    return tuple(left)


def test_scheduler_refuses_overtaking_only_beyond_staleness_bound():
    """The random schedules test the other direction: allowed batches keep the bound."""
    refused, rng = 0, random.Random(0)
    while refused < 200:
        size, staleness = rng.randint(3, 5), rng.randint(1, 2)
        ledger = StalenessScheduler(size, 9, staleness, rng.randint(1, staleness))
        for version in range(8):
            ledger.on_publish(version)
            ledger.schedule()
            while True:
                due = {number: at + staleness for number, at in (ledger.running | ledger.finished).items()}
                end = min([*ledger.running, ledger.next_number]) + ledger.window
                batches = list(itertools.combinations([number for number in ledger.finished if number < end], size))
                if ledger.next_batch() is not None:
                    break
                for batch in batches:
                    left = sorted(step for number, step in due.items() if number not in batch)
                    assert not servable(tuple(left), version + 1, size)
                refused += bool(batches)
                ledger.mark_finished(rng.choice(sorted(ledger.running)))


def test_scheduler_failed_group_due_at_resubmission_version():
    """Its earliest submission is at the present version, so the bound lets other groups overtake it."""
    ledger = at_risk()
    ledger.requeue(15)
    assert list(ledger.next_batch()) == [5, *range(11, 15), *range(16, 21)]
    assert ledger.schedule() == [15] and ledger.on_publish(2) == []
    finished(ledger, 15)
    assert ledger.next_batch() == {15: 1} | dict.fromkeys(range(21, 30), 1)


def test_a_batch_is_the_oldest_that_are_finished():
    ledger = StalenessScheduler(2, 9, staleness=4, prefetch_steps=4)  # a window of 3
    assert ledger.schedule() == list(range(10))
    finished(ledger, 9, 3, 5)
    assert ledger.next_batch() is None and ledger.awaited_groups() == [0, 1]
    finished(ledger, 2, 1, 4)
    assert list(ledger.next_batch()) == [1, 2]
    assert ledger.awaited_groups() == [0] and ledger.next_batch() is None  # 3 is a window from 0
    finished(ledger, 0)
    assert list(ledger.next_batch()) == [0, 3]


def test_scheduler_without_staleness_idles_during_training():
    ledger = StalenessScheduler(4, 3)
    for step in range(3):
        numbers = list(range(4 * step, 4 * step + 4))
        assert ledger.schedule() == numbers
        finished(ledger, *numbers[1:])
        assert ledger.next_batch() is None and ledger.awaited_groups() == numbers[:1]
        finished(ledger, numbers[0])
        assert ledger.next_batch() == dict.fromkeys(numbers, 0)
        assert ledger.schedule() == [] and ledger.on_publish(step + 1) == []


@pytest.mark.parametrize("jump", ["of the version", "of the bound"])
def test_scheduler_too_stale_groups_are_dropped_and_replaced(jump):
    """A version that jumps, or a smaller bound after a resume: each group is trained once, within the bound."""
    dropped = 0
    for seed in range(500):
        rng = random.Random(seed)
        batch, steps, staleness = rng.randint(1, 4), rng.randint(1, 8), rng.randint(0, 4)
        ledger, version = StalenessScheduler(batch, steps, staleness, staleness), 0
        at: dict[int, int] = {}  # number -> version at which it was submitted last
        trained: list[int] = []
        drops = 0
        while len(trained) < batch * steps:
            at.update(dict.fromkeys(ledger.schedule(), version))
            # However far the version jumps, the trainer can consume all groups in flight in time.
            assert len(ledger.running) + len(ledger.finished) <= (staleness + 1) * batch
            while not (numbers := ledger.next_batch()):
                ledger.mark_finished(rng.choice(sorted(ledger.running)))
            assert numbers == {number: version - at[number] for number in numbers}
            assert max(numbers.values()) <= staleness
            trained += numbers
            version += 1
            if jump == "of the version":
                version += rng.choice((0, 0, 1, 7))
            elif staleness and rng.random() < 0.3:
                state, staleness = ledger.state_dict(), staleness - 1
                ledger = StalenessScheduler(batch, steps, staleness, staleness)
                ledger.load_state_dict(state)
            late = [n for n in [*ledger.running, *ledger.finished] if version - at[n] > staleness]
            assert ledger.on_publish(version) == sorted(late)
            assert ledger.to_resubmit.issuperset(late) and ledger.running.keys().isdisjoint(late)
            drops += len(late)
            assert (ledger.num_dropped, ledger.num_taken) == (drops, len(trained))
        assert sorted(trained) == list(range(batch * steps))
        dropped += drops
    assert dropped > 100


def test_scheduler_smaller_staleness_prefetches_fewer_groups():
    ledger = StalenessScheduler(2, 9, staleness=4, prefetch_steps=4)
    ledger.schedule()
    finished(ledger, 1, 5)
    state = ledger.state_dict()
    ledger = StalenessScheduler(2, 9, staleness=1)
    ledger.load_state_dict(state)
    assert ledger.on_publish(0) == []
    assert ledger.schedule() == [0, 2, 3]  # of the running groups, as many as the new prefetch_steps allows
    finished(ledger, 0)
    assert ledger.next_batch() == {0: 0, 1: 0}
    assert ledger.on_publish(1) == [] and ledger.schedule() == [4]
    finished(ledger, 2, 3)
    assert ledger.next_batch() == {2: 1, 3: 1}
    assert ledger.on_publish(2) == [5] and ledger.num_dropped == 1, "it was finished by the version of the beginning"
    assert ledger.schedule() == [5, 6, 7]
    finished(ledger, 4, 5)
    assert ledger.next_batch() == {4: 1, 5: 0}


def test_scheduler_shortened_run_submits_only_needed_groups():
    ledger = StalenessScheduler(2, 9, staleness=4, prefetch_steps=4)
    ledger.schedule()
    state = ledger.state_dict()
    ledger = StalenessScheduler(2, 1, staleness=4, prefetch_steps=4)
    ledger.load_state_dict(state)
    assert ledger.schedule() == [0, 1]
    finished(ledger, 0, 1)
    assert ledger.next_batch() == {0: 0, 1: 0} and ledger.schedule() == []


def test_scheduler_finished_group_can_be_resubmitted():
    ledger = StalenessScheduler(2, 2, staleness=1)
    ledger.schedule()
    finished(ledger, 0, 1)
    ledger.requeue(1)
    assert ledger.next_batch() is None and ledger.schedule() == [1]


def test_scheduler_default_prefetch_steps():
    assert [StalenessScheduler(2, 3, staleness).prefetch_steps for staleness in (0, 1, 2, 8)] == [0, 1, 1, 1]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"staleness": -1}, "staleness=-1 must be a whole number of at least 0"),
        ({"staleness": 0.5}, "staleness=0.5 must be a whole number"),
        ({"staleness": True}, "staleness=True must be a whole number"),
        ({"staleness": 1, "prefetch_steps": -1}, "prefetch_steps=-1 must be a whole number of at least 0"),
        ({"staleness": 2, "prefetch_steps": 1.0}, "prefetch_steps=1.0 must be a whole number"),
        (
            {"prefetch_steps": 1},
            "prefetch_steps=1 is above staleness=0: .* set prefetch_steps to at most 0, or staleness to at least 1",
        ),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        StalenessScheduler(**{"prompts_per_step": 2, "max_steps": 3} | options)


def test_a_state_of_another_run_is_refused():
    state = StalenessScheduler(4, 3).state_dict()
    with pytest.raises(ValueError, match="prompts_per_step=2, .* set prompts_per_step=4"):
        StalenessScheduler(2, 6).load_state_dict(state)


def test_a_version_that_goes_back_is_refused():
    ledger = StalenessScheduler(2, 9, staleness=1)
    ledger.on_publish(3)
    with pytest.raises(ValueError, match="version=2 .*version=3"):
        ledger.on_publish(2)


def test_scheduler_invalid_calls_raise():
    ledger = StalenessScheduler(1, 1)
    ledger.schedule()
    finished(ledger, 0)
    with pytest.raises(KeyError):
        ledger.mark_finished(0)  # it is already finished
    ledger.next_batch()
    with pytest.raises(KeyError):
        ledger.requeue(0)  # it is already taken
    with pytest.raises(AssertionError, match="all 1 groups of the run have been taken"):
        ledger.next_batch()
