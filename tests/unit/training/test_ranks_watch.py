"""The watch over ranks: what it says and when it ends a run, decided from beats alone; and its threads."""

import logging
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist
from waiting import wait_until

from torchtune_ext.telemetry.summary import Stopwatch
from torchtune_ext.training import distributed
from torchtune_ext.training.distributed import Ranks, RanksConfig, init_ranks
from torchtune_ext.training.watch import Beat, Judge, Limits, Watch, main_place


class World:
    """Ranks that beat once a second unless told otherwise, as one of them sees it."""

    def __init__(self, rank=0, world_size=3, **limits):
        self.judge = Judge(rank, world_size, Limits(**limits))
        self.beats = {r: Beat(0, "host", 100 + r, "train, step 3", "a.py:1 in f") for r in range(world_size)}
        self.notes, self.fatal = [], None

    def change(self, rank, **values):
        fields = {name: getattr(self.beats[rank], name) for name in Beat.__slots__}
        self.beats[rank] = Beat(**fields | values)

    def pass_time(self, seconds, silent=()):
        for _ in range(seconds):
            for rank in self.beats:
                if rank not in silent:
                    self.change(rank, count=self.beats[rank].count + 1)
            notes, fatal = self.judge.look(1.0, self.beats)
            self.notes += notes
            self.fatal = self.fatal or fatal


def test_all_well_says_nothing():
    world = World()
    world.pass_time(1000)
    assert world.notes == [] and world.fatal is None


def test_a_silent_rank_is_named_each_minute_and_ends_the_run():
    world = World()
    world.pass_time(5)
    world.pass_time(61, silent=[1])
    assert world.notes == [
        "rank 1 (host host, pid 101) gives no sign of life for 60 s (last: train, step 3, at a.py:1 in f); the others wait; "
        "the run ends after 300 s (ranks.deadline_s)"
    ]
    world.pass_time(180, silent=[1])
    assert len(world.notes) == 4 and world.fatal is None
    world.pass_time(60, silent=[1])
    for part in ("rank 1 (host host, pid 101)", "for 300 s", "train, step 3", "ranks.deadline_s=300", "resume_from_ch"):
        assert part in world.fatal


def test_a_rank_that_comes_back_is_welcomed_and_forgiven():
    world = World()
    world.pass_time(5)
    world.pass_time(299, silent=[2])
    world.pass_time(400)
    assert world.notes[-1] == "rank 2 is back after 299 s" and len(world.notes) == 5
    assert world.fatal is None


def test_only_the_lowest_living_rank_speaks_but_all_end():
    first, second = World(rank=1), World(rank=2)
    for world in (first, second):
        world.pass_time(5)
        world.pass_time(300, silent=[0])
    assert len(first.notes) == 4 and second.notes == []
    assert first.fatal and second.fatal and first.judge.speaks() and not second.judge.speaks()


def test_a_rank_that_never_comes():
    world = World()
    del world.beats[2]
    world.pass_time(61)
    assert "rank 2 has not arrived after 60 s" in world.notes[0]
    world.pass_time(240)
    assert "rank 2 has not arrived after 300 s" in world.fatal


@pytest.mark.parametrize("wrong", [-1.0, float("nan")])
def test_a_deadline_that_is_none(wrong):
    with pytest.raises(ValueError, match="ranks.deadline_s="):
        RanksConfig(wrong)


def test_a_short_deadline_is_announced_before_it_ends_the_run():
    world = World(deadline_s=10)
    world.pass_time(5)
    world.pass_time(9, silent=[1])
    assert "for 5 s" in world.notes[0] and world.fatal is None


def test_one_rank_costs_nothing(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    before = threading.active_count()
    ranks = init_ranks("cpu")
    assert ranks.watch is None and threading.active_count() == before
    assert ranks.any(True) is True and ranks.any(False) is False and ranks.broadcast([1]) == [1]
    with ranks.phase("sample", 3):
        pass


def test_without_an_address_the_missing_variable_is_named(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(ValueError, match="MASTER_PORT is not set"):
        distributed.make_watch(0, 2, Limits())


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def watch_of(server, rank, agent_holds_store=False, **limits):
    """A watch whose end is a list instead of the end of this process."""
    connect = lambda: dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=5), wait_for_workers=False)  # noqa: E731
    limits = Limits(**{"beat_s": 0.05, "notice_s": 0.4, "deadline_s": 1.0} | limits)
    return Watch(rank, 2, limits, connect, "the store", agent_holds_store)


def test_watches_tell_each_other_what_they_do_and_end_at_once(server, caplog):
    caplog.set_level(logging.INFO)
    watches = [watch_of(server, rank, deadline_s=60.0, notice_s=30.0).start() for rank in (0, 1)]
    with watches[1].phase("sample, step 3"):
        wait_until(lambda: "rank 1: sample, step 3" in watches[0]._judge.all_doing())
    wait_until(lambda: "rank 1: sample, step 3" not in watches[0]._judge.all_doing())
    assert "waiting.py" in watches[0]._judge.all_doing(), "the place of the main thread"
    begin = time.monotonic()
    for watch in watches:
        watch.close()
        watch.close()
    assert time.monotonic() - begin < 20.0  # no limit was waited for
    assert not any(thread.name.startswith("ranks-") for thread in threading.enumerate())
    assert caplog.text == ""


@pytest.mark.parametrize("agent_holds_store", [True, False])
def test_a_store_that_does_not_answer(server, caplog, monkeypatch, agent_holds_store):
    """Its holder is stopped. A run whose torchrun has been stopped goes on; otherwise a machine is lost."""
    ends = []
    monkeypatch.setattr("torchtune_ext.training.watch.end_process", ends.append)
    watch = watch_of(server, 0, agent_holds_store)
    other = watch_of(server, 1, deadline_s=60.0, notice_s=30.0)
    silent, answered_again = threading.Event(), threading.Event()
    exchange = watch._exchange

    def stoppable(*args):
        if silent.is_set():
            answered_again.wait(60)
        exchange(*args)

    monkeypatch.setattr(watch, "_exchange", stoppable)
    other.start(), watch.start()
    wait_until(lambda: len(watch._answer[1]) == 2)
    silent.set()
    wait_until(lambda: "no answer from the store" in caplog.text)
    if agent_holds_store:
        wait_until(lambda: caplog.text.count("no answer from the store") == 4)  # beyond the deadline
        assert not ends and "the ranks go on" in caplog.text
    else:
        wait_until(lambda: ends)
        assert "no answer from the store" in ends[0] and "rank 1: " in ends[0]
    assert "rank 1 gives" not in caplog.text, "nobody is blamed for the store's silence"
    answered_again.set()
    watch.close(), other.close()


def test_a_stopwatch_tells_the_phase_that_it_times():
    watch = Watch(0, 2, Limits(), lambda: None, "the store", False)
    stopwatch = Stopwatch(partial(Ranks(0, 2, "cpu", watch).phase, step=3))
    with stopwatch("sample"):
        assert watch._phase == "sample, step 3"
        with stopwatch("grade"):
            assert watch._phase == "sample, step 3", "ranks in one phase may be in different details of it"
    assert watch._phase == "" and set(stopwatch.seconds) == {"sample", "sample/grade"}


def test_the_place_is_in_code_of_the_user():
    found = []
    other = threading.Thread(target=lambda: found.append(main_place()))
    other.start()
    other.join()
    assert found[0].startswith("test_ranks_watch.py:") and found[0].endswith("the_place_is_in_code_of_the_user")
