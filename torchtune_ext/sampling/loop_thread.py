"""Runs an asyncio loop in a thread of its own, with calls into it that block the caller."""

import asyncio
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from functools import wraps
from typing import Any

from torchtune_ext.run.errors import Failure, Late
from torchtune_ext.sampling.records import EngineFailed


def fetch_error(task: asyncio.Future) -> None:
    """Fetches the error of a task that is done. It is the callback of tasks whose caller may go away before they end (Ctrl-C,
    a deadline) and has said why: asyncio prints an error that nobody fetches, with its traceback."""
    if not task.cancelled():
        task.exception()


def undisturbed(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Awaitable[Any]]:
    """Lets a method of an object with a set `_undisturbed` run to its end also when its caller is cancelled (Ctrl-C in the
    trainer, another request of the batch that failed). A restart or an update that broke off in the middle would leave an
    engine that is paused, half loaded, or never announced, and nobody would notice."""

    @wraps(method)
    async def run(self: Any, *args: Any) -> Any:
        task = asyncio.ensure_future(method(self, *args))
        self._undisturbed.add(task)
        task.add_done_callback(self._undisturbed.discard)
        task.add_done_callback(fetch_error)
        return await asyncio.shield(task)

    return run


async def _attended(work: Coroutine[Any, Any, Any]) -> Any:
    asyncio.current_task().add_done_callback(fetch_error)
    return await work


class LoopThread:
    """Runs coroutines for other threads."""

    def __init__(self, name: str):
        """Args: name: the thread's."""
        self._loop = asyncio.new_event_loop()
        self._futures: weakref.WeakSet[Future] = weakref.WeakSet()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def refuse_itself(self) -> None:
        """Raises RuntimeError in the loop's own thread, which would wait for itself for ever."""
        if threading.current_thread() is self._thread:
            raise Failure("on_completion may not call the engine: it runs in the engine's own thread")

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future:
        """Begins `work` and returns. What has not ended when the thread does is cancelled. Raises EngineFailed when the thread
        does not run."""
        attended = _attended(work)
        try:
            if self._thread.is_alive():
                future = asyncio.run_coroutine_threadsafe(attended, self._loop)
                self._futures.add(future)
                if not self._thread.is_alive():
                    future.cancel()  # the thread ended in this moment, perhaps without a look at the work
                return future
        except RuntimeError:
            pass  # the loop has been closed in this moment
        attended.close()
        work.close()
        raise EngineFailed("the engine is not running: call start() first, and nothing after close()")

    def call(self, work: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        """Runs `work` and waits for its result. The work bounds its own waits; this one ends when the thread does.

        Raises: EngineFailed when the thread does not run; TimeoutError; RuntimeError in the loop's own thread.
        """
        try:
            self.refuse_itself()
        except RuntimeError:
            work.close()
            raise
        return self.result(self.submit(work), timeout)

    def result(self, future: Future, timeout: float | None = None) -> Any:
        """Waits for work that was submitted, and cancels it where the wait ends first. Raises as `call` does."""
        give_up_at = time.monotonic() + (float("inf") if timeout is None else timeout)
        try:
            while True:
                try:
                    return future.result(timeout=0.5)
                except CancelledError:
                    raise EngineFailed("the engine was closed") from None
                except TimeoutError:
                    # The work itself timed out, or it ended just after our own wait had.
                    if future.done():
                        return future.result()
                if not self._thread.is_alive():
                    raise EngineFailed("the engine was closed")
                if time.monotonic() > give_up_at:
                    raise Late(f"the engine's thread did not answer within {timeout:g} s")
        finally:
            # It does nothing when the work is done; else the caller is going away (Ctrl-C).
            future.cancel()

    def stop(self) -> None:
        """Ends the thread, and what still runs in it. Raises TimeoutError."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5.0)
            if self._thread.is_alive():
                raise Late(f"the thread {self._thread.name} did not end")
        # A loop that has stopped no longer tells anybody what became of the work.
        for future in list(self._futures):
            future.cancel()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        give_up_at = time.monotonic() + 2.0
        # What ends may begin more.
        while (rest := asyncio.all_tasks(self._loop)) and time.monotonic() < give_up_at:
            for task in rest:
                # A task may make its first step before that: Python complains of work that never began.
                self._loop.call_soon(task.cancel)
            self._loop.run_until_complete(asyncio.wait(rest, timeout=give_up_at - time.monotonic()))
        self._loop.close()
