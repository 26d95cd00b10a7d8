"""An asyncio loop whose clock jumps to the next event, so that long waits take no time and are deterministic."""

import asyncio
import selectors
import time


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that never sleeps: it advances the clock instead."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "deadlock: every task waits for another one"
            self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Loop in virtual time. Its tasks must not wait in threads."""

    def __init__(self):
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self):
        return self._jumping.now


def run(work, monkeypatch):
    """Run a coroutine in virtual time, including `time.monotonic`. Return its result; cancel leftover tasks."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        monkeypatch.setattr(time, "monotonic", runner.get_loop().time)
        try:
            return runner.run(work)
        finally:
            monkeypatch.undo()
