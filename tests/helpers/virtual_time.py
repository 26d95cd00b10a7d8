"""An asyncio loop whose clock jumps to the next event, so that hours of waiting take no time and always go the same way."""

import asyncio
import selectors
import time


class _Jumping(selectors.DefaultSelector):
    """Waits for nothing: where the loop would sleep, its clock jumps."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "nothing will ever happen: everybody waits for somebody"
            self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Nothing that runs in it may wait in a thread."""

    def __init__(self):
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self):
        return self._jumping.now


def run(work, monkeypatch):
    """Runs a coroutine in virtual time, in which `time.monotonic` goes, too. Returns its result; what it left behind is cancelled."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        monkeypatch.setattr(time, "monotonic", runner.get_loop().time)
        try:
            return runner.run(work)
        finally:
            monkeypatch.undo()
