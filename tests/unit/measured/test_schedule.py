"""When checks and timings begin: with any number of workers, arrivals and durations, and nothing is lost."""

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from torchtune_ext.measured.bench import CHECK_STAGE, TIME_STAGE, StageScheduler

# Of each program: when it comes, how long its check takes, and how long its timings, each of which is alone or is not.
PROGRAMS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 5), st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=2)),
    max_size=20,
)


class Played:
    """Plays a service in turns of the loop, and requires the rules whenever something begins."""

    def __init__(self, workers):
        self.workers, self.turns, self.running, self.begun, self.done = workers, StageScheduler(workers), [], [], 0

    async def run(self, stage, rounds, is_alone=False, name=None):
        async with self.turns.acquire(stage, is_alone):
            self.running.append((stage, is_alone))
            self.begun.append((stage, name))
            stages = [each for each, _ in self.running]
            assert stages.count(CHECK_STAGE) <= self.workers and stages.count(TIME_STAGE) <= 1
            assert not any(alone for _, alone in self.running) or len(self.running) == 1
            assert +self.turns.running == Counter(stages)
            for _ in range(rounds):
                await asyncio.sleep(0)
            self.running.remove((stage, is_alone))

    async def program(self, arrival, rounds, timings):
        for _ in range(arrival):
            await asyncio.sleep(0)
        await self.run(CHECK_STAGE, rounds)
        for its, is_alone in timings:
            await self.run(TIME_STAGE, its, is_alone)
        self.done += 1


@given(st.integers(1, 4), PROGRAMS)
def test_schedule_runs_every_program_within_rules(workers, programs):
    async def play():
        played = Played(workers)
        async with asyncio.timeout(20):
            await asyncio.gather(*(played.program(*each) for each in programs))
        assert played.done == len(programs)
        assert not +played.turns.running

    asyncio.run(play())


def test_schedule_exclusive_timing_waits_only_for_earlier_work():
    async def play():
        played = Played(2)
        checks = [asyncio.create_task(played.run(CHECK_STAGE, 3, name=number)) for number in range(4)]
        await asyncio.sleep(0)
        alone = asyncio.create_task(played.run(TIME_STAGE, 3, True, "alone"))
        await asyncio.sleep(0)
        checks += [asyncio.create_task(played.run(CHECK_STAGE, 0, name=number)) for number in range(4, 100)]
        await asyncio.gather(*checks, alone)
        assert [name for _, name in played.begun] == [0, 1, 2, 3, "alone", *range(4, 100)]

    asyncio.run(play())


def test_schedule_separate_cores_never_block_each_other():
    async def play():
        played = Played(1)
        timing = asyncio.create_task(played.run(TIME_STAGE, 100, name="timing"))
        await asyncio.gather(*(played.run(CHECK_STAGE, 1) for _ in range(5)))
        assert not timing.done() and len(played.begun) == 6
        await timing

    asyncio.run(play())


def test_schedule_cancelled_waiters_are_skipped():
    async def play():
        played = Played(1)
        first = asyncio.create_task(played.run(CHECK_STAGE, 5))
        await asyncio.sleep(0)
        waiting = [
            asyncio.create_task(played.run(*each))
            for each in ((TIME_STAGE, 0, True), (CHECK_STAGE, 0), (CHECK_STAGE, 0))
        ]
        await asyncio.sleep(0)
        for each in waiting[:2]:
            each.cancel()
        await asyncio.gather(first, *waiting, return_exceptions=True)
        assert len(played.begun) == 2 and not +played.turns.running

    asyncio.run(play())
