"""Calls into the engine's thread, and the origin of their TimeoutError."""

import asyncio
import concurrent.futures
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from helpers.waiting import start_thread
from torchtune_ext.sampling import engine
from torchtune_ext.sampling.engine import EngineFailed, LoopThread


def test_loop_thread_result_arriving_at_timeout_is_returned(monkeypatch):
    future, thread = concurrent.futures.Future(), LoopThread("test")

    def gives_up(futures, timeout):
        future.set_result("the result")
        return SimpleNamespace(done=set())

    waits = iter([gives_up, concurrent.futures.wait])
    monkeypatch.setattr(engine, "wait", lambda futures, timeout: next(waits)(futures, timeout))
    assert thread.result(future, timeout=0.0) == "the result"


def test_a_timeout_of_the_work_itself_comes_out():
    thread = LoopThread("test")
    thread.start()

    async def work():
        raise TimeoutError("of the work")

    try:
        with pytest.raises(TimeoutError, match="of the work"):
            thread.call(work())
    finally:
        thread.stop()


def test_loop_thread_work_submitted_during_stop_is_ended(complaints, recwarn):
    thread = LoopThread("test")
    thread.start()
    held = threading.Event()

    async def hold():
        held.set()
        time.sleep(0.3)

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            asyncio.ensure_future(asyncio.sleep(60))  # noqa: RUF006

    thread.schedule(work())
    thread.schedule(hold())
    held.wait(5)
    thread.schedule(work())  # its first step comes after the end
    thread.stop()
    assert not complaints()
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]


def test_loop_thread_stop_cancels_running_work():
    """Waiters for scheduled work get an error, even if the work ignores its cancellation."""
    thread = LoopThread("test")
    thread.start()

    async def stubborn():
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass

    futures = [thread.schedule(asyncio.sleep(60)), thread.schedule(stubborn())]
    waits = [start_thread(lambda future=future: thread.result(future)) for future in futures]
    thread.stop()
    assert all(future.cancelled() for future in futures)
    for waiter, outcome in waits:
        waiter.join(5)
        assert isinstance(outcome[0], EngineFailed), "the caller still waits"


def test_loop_thread_stop_tolerates_concurrent_submissions():
    """All scheduled work is canceled, even while another thread schedules more."""
    thread, kept = LoopThread("test"), [concurrent.futures.Future() for _ in range(3000)]
    thread._futures.update(kept)

    def submit():
        for _ in range(10_000):
            kept.append(concurrent.futures.Future())
            thread._futures.add(kept[-1])

    submitter, outcome = start_thread(submit)
    while submitter.is_alive():
        thread.stop()
    assert outcome == [None]
