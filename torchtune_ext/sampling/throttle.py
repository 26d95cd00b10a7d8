"""How many requests may be in flight: as many as the KV cache holds, so that it is full and nothing is preempted.

Too few requests leave the hardware idle. Too many fill the KV cache: vLLM then throws requests out and computes them
again later, and the ones that wait inside the engine gain nothing over waiting outside. The right number depends on the
lengths of prompts and completions, which change as the policy learns, so it is measured.

`Controller` is the pure part: it sees the engine's counters, step by step, and says how many. `Throttle` is the
semaphore of that size.

The rule. Requests that have just begun use little, so the use at one moment says nothing; but over a *round* (as many
completions as the limit allows requests, so every one of them was new once and finished once) the highest use does. If
`n` requests used at most a share `u` of the cache, then about `n * target / u` use the share `target`. Growth is bounded by
`MAX_GROWTH` a round, since the first rounds have seen only the first prompts. A preemption shows a limit that was too
high: the limit falls at once, and the target falls a little and comes back slowly, so that the same limit is not tried again.
"""

import asyncio
import math
from collections import deque

MAX_GROWTH = 4.0  # of the limit, in one round
SHRINK = 0.85  # of the requests that ran when one was preempted
TARGET = 0.92  # share of the KV cache to use
TARGET_MIN = 0.7  # after many preemptions
TARGET_DOWN = 0.04  # a preemption costs
TARGET_UP = 0.004  # a round without gives back
TOLERANCE = 0.05  # smaller changes of the limit are not made


class Controller:
    """Follows the engine's counters. No clock, no I/O: the same observations give the same limits."""

    def __init__(self, ceiling: int, limit: int | None = None):
        """Args: ceiling: most requests the engine takes into one step (`max_num_seqs`); limit: to start with, None:
        from the first `expect`."""
        self.ceiling = ceiling
        self.limit = min(limit or 1, ceiling)
        self.known = limit is not None  # False: the limit is a placeholder until `expect`
        self.target = TARGET
        self._start_round()

    def _start_round(self) -> None:
        self.finished = 0  # completions in this round
        self.peak = 0.0  # highest KV-cache use
        self.in_flight = 0  # most requests running at one time
        self.binding = False  # whether requests had to wait for the limit
        self.crowded = False  # whether requests waited inside the engine because the cache was full

    def expect(self, cache_tokens: int, request_tokens: int) -> None:
        """Sets a first limit, on the safe side: every request takes its longest possible length and shares nothing.

        Args: cache_tokens: size of the KV cache; request_tokens: prompt + max_tokens of the longest request.
        """
        if not self.known:
            self.limit = min(self.ceiling, max(1, cache_tokens // request_tokens))
            self.known = True
            self._start_round()

    def step(self, usage: float, running: int, waiting: int, preempted: int, blocked: bool) -> None:
        """One step of the engine.

        Args: usage: share of the KV cache in use; running, waiting: requests in the step and in the engine's queue;
        preempted: requests thrown out in it; blocked: whether requests wait for this throttle.
        """
        if not running and not preempted:
            return
        self.peak = max(self.peak, usage)
        self.in_flight = max(self.in_flight, running)
        self.binding = self.binding or blocked
        self.crowded = self.crowded or (waiting > 0 and usage >= self.target)
        if preempted:
            self.target = max(TARGET_MIN, self.target - TARGET_DOWN)
            self.limit = max(1, min(self.limit, math.floor(running * SHRINK)))
            self.known = True
            self._start_round()

    def done(self) -> None:
        """One request has finished."""
        self.finished += 1
        if self.finished >= self.limit and self.in_flight:
            self._end_round()

    def _end_round(self) -> None:
        self.target = min(TARGET, self.target + TARGET_UP)
        wanted = self.in_flight * self.target / max(self.peak, 1e-6)
        wanted = max(1, min(math.floor(wanted), self.ceiling, math.floor(self.limit * MAX_GROWTH)))
        grow = wanted > self.limit * (1 + TOLERANCE) and self.binding and not self.crowded
        shrink = wanted < self.limit * (1 - TOLERANCE) and self.peak > self.target
        if grow or shrink:
            self.limit = wanted
        self._start_round()

    def state_dict(self) -> dict[str, float | int | bool]:
        """What a resumed run needs to go on with the limit that this one had found."""
        return {"limit": self.limit, "known": self.known, "target": self.target}

    def load_state_dict(self, state: dict[str, float | int | bool]) -> None:
        self.limit = max(1, min(int(state["limit"]), self.ceiling))
        self.known = bool(state["known"])
        self.target = min(TARGET, max(TARGET_MIN, float(state["target"])))
        self._start_round()


class Throttle:
    """A semaphore whose size may change while it is in use. First come, first served, so that the samples of a group
    go to the engine together and share their prompt. Used from one asyncio loop."""

    def __init__(self, size: int):
        self.size = size
        self.held = 0
        self._queue: deque[asyncio.Future] = deque()

    @property
    def blocked(self) -> bool:
        """Whether somebody waits."""
        return bool(self._queue)

    def resize(self, size: int) -> None:
        """Takes effect at once for those who wait; those who hold a place keep it."""
        self.size = size
        self._admit()

    async def acquire(self) -> None:
        """Waits for a place. The caller bounds the wait (every request in front has its own supervision)."""
        if self.held < self.size and not self._queue:
            self.held += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # the place was given in the same moment
            elif turn in self._queue:
                self._queue.remove(turn)
            raise

    def release(self) -> None:
        self.held -= 1
        self._admit()

    def _admit(self) -> None:
        while self._queue and self.held < self.size:
            turn = self._queue.popleft()
            if not turn.done():
                self.held += 1
                turn.set_result(None)
