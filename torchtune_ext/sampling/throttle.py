"""Decides how many requests may be in flight: so many that the KV cache is full and nothing is preempted.

Too few leave the hardware idle. Too many fill the cache, and vLLM throws requests out and computes them again later.
The right number changes with the lengths of prompts and completions as the policy learns. `Controller` measures it by
the engine's counters, and `Throttle` is a semaphore of that size.
"""

import asyncio
import math
from collections import deque

from torchtune_ext.sampling.types import Priority

# The limit grows at most by this factor in one round: the first rounds have seen only the first prompts.
MAX_GROWTH = 4.0
SHRINK_FACTOR = 0.85  # the next limit, as a share of the requests that ran when one was preempted
TARGET_KV_USAGE = 0.92  # share of the KV cache to use
MIN_TARGET_KV_USAGE = 0.7  # the lowest target, after many preemptions
TARGET_DECREMENT = 0.04  # what a preemption takes from the target
TARGET_INCREMENT = 0.0005  # what a round without a preemption gives back
MEMORY_ROUNDS = 4  # rounds whose worst decides
# Divided by the square root of the number of requests, this is the share of the cache that stays free for their growth:
# the use of many requests fluctuates less.
HEADROOM = 1.2
HEADROOM_MIN, HEADROOM_MAX = 0.05, 0.2
TOLERANCE = 0.05  # changes of the limit by a smaller share are not made


class ConcurrencyController:
    """Follows the engine's counters. It has no clock and no I/O: the same observations give the same limits."""

    def __init__(self, ceiling: int, limit: int | None = None):
        """Args: ceiling: most requests of an engine step (`max_num_seqs`); limit: the first; None: `expect` sets it."""
        self.ceiling = ceiling
        self.limit = min(limit or 1, ceiling)
        self.is_measured = limit is not None  # whether the limit was measured; until then `expect` sets it
        self.expected: int | None = None  # the lowest limit that `expect` has set
        self.target = TARGET_KV_USAGE
        # Each round leaves its requests and the share of the cache that one of them took.
        self.costs: deque[tuple[int, float]] = deque(maxlen=MEMORY_ROUNDS)
        self.current_limit = self.limit  # the limit of this moment: lower while the brake is on
        self.is_draining = False  # after a preemption, until no more requests are in flight than the new limit
        self.start_round()

    def start_round(self) -> None:
        """Forgets the observations of this round. To be called, too, when no request is in flight any more."""
        # Requests that have just begun use little, so the use at one moment says nothing. A round has as many
        # completions as the limit allows requests, so each of them was new once and finished once, and its highest use
        # counts.
        self.finished = 0  # completions in this round
        self.peak = 0.0  # highest KV-cache use
        self.in_flight = 0  # most requests running at one time
        self.limit_reached = False  # whether requests had to wait for the limit
        self.cache_was_full = False  # whether requests waited inside the engine because the cache was full

    def set_initial_limit(
        self, cache_tokens: int, prompt_tokens: int, max_tokens: int, samples: int, block: int
    ) -> None:
        """Sets a first limit, as if every completion took its longest possible length.

        Args: cache_tokens: size of the KV cache; samples: requests that share the prompt; block: tokens of its blocks.
        """
        if not self.is_measured:
            # Whole blocks are shared; the rest of the prompt is not.
            shared = prompt_tokens // block * block
            own = -(-(prompt_tokens - shared + max_tokens) // block) * block
            # The next group's prompt is in the cache, too, when its first samples come while others still run.
            room = TARGET_KV_USAGE * cache_tokens - shared
            limit = max(1, min(self.ceiling, int(room / (own + shared / samples))))
            # Until a limit is measured, the lowest one of all groups counts.
            if self.expected is None or limit < self.expected:
                self.expected = self.limit = self.current_limit = limit
                self.start_round()

    def observe(self, usage: float, running: int, waiting: int, preempted: int, blocked: bool) -> None:
        """Takes one step of the engine.

        Args: usage: share of the KV cache in use; running, waiting: requests in the step and in the engine's queue;
        preempted: requests thrown out in it; blocked: whether requests wait for this throttle.
        """
        # After a pause, or when the last requests left in this step, there is nothing to learn.
        if not running:
            return
        if running + waiting <= self.limit:
            self.is_draining = False
        self.peak = max(self.peak, usage)
        self.in_flight = max(self.in_flight, running)
        self.limit_reached = self.limit_reached or blocked
        self.cache_was_full = self.cache_was_full or (waiting > 0 and usage >= self.target)
        # A preemption shows that the limit was too high: it falls at once. The target falls a little and comes back
        # slowly, so that the same limit is not tried again soon. While requests above the new limit are still in
        # flight, further preemptions follow from the same excess and teach nothing.
        if preempted and not self.is_draining:
            self.target = max(MIN_TARGET_KV_USAGE, self.target - TARGET_DECREMENT)
            self.costs.append((running, 1.0 / running))
            self.limit = max(1, min(self.limit, math.floor(running * SHRINK_FACTOR)))
            self.is_measured = self.is_draining = True
        if self.is_draining:
            self.start_round()
        # The brake: chance may bring many long completions together, so a nearly full cache gets no new requests.
        free = min(HEADROOM_MAX, max(HEADROOM_MIN, HEADROOM / math.sqrt(max(running, 1))))
        self.current_limit = min(self.limit, max(1, running + waiting)) if usage >= 1.0 - free else self.limit

    def on_finished(self) -> None:
        """Notes that one request has finished."""
        self.finished += 1
        if self.finished >= self.limit and self.in_flight:
            self._end_round()

    def _end_round(self) -> None:
        self.is_measured = True
        self.target = min(TARGET_KV_USAGE, self.target + TARGET_INCREMENT)
        self.costs.append((self.in_flight, self.peak / self.in_flight))
        # If n requests used at most a share u of the cache, about n * target / u use the share `target`. Rounds with
        # far fewer requests say little about the present ones: they share fewer prompts, and chance weighs more.
        cost = max(cost for in_flight, cost in self.costs if 2 * in_flight >= self.in_flight)
        requests = math.floor(self.target / max(cost, 1e-9))
        limit = max(1, min(requests, self.ceiling, math.floor(self.limit * MAX_GROWTH)))
        grow = limit > self.limit * (1 + TOLERANCE) and self.limit_reached and not self.cache_was_full
        shrink = limit < self.limit * (1 - TOLERANCE) and self.peak > self.target
        if grow or shrink:
            self.limit = self.current_limit = limit
        self.start_round()

    def state_dict(self) -> dict[str, float | int | bool]:
        """What a resumed run needs to go on with this limit."""
        return {"limit": self.limit, "known": self.is_measured, "target": self.target}

    def load_state_dict(self, state: dict[str, float | int | bool]) -> None:
        """Goes on from an earlier run's `state_dict`."""
        self.limit = max(1, min(int(state["limit"]), self.ceiling))
        self.is_measured = bool(state["known"])
        self.target = min(TARGET_KV_USAGE, max(MIN_TARGET_KV_USAGE, float(state["target"])))
        self.current_limit = self.limit
        self.start_round()


class Throttle:
    """A semaphore whose size may change while it is in use. All calls come from one asyncio loop."""

    def __init__(self, controller: ConcurrencyController, fixed: int | None = None):
        """Args: controller: says how many places there are; fixed: their number, whatever the controller says."""
        self.controller, self.fixed = controller, fixed
        self.num_held = 0
        # Those who wait, by priority: futures of whether a place was given. Equals are served in order, so that the
        # samples of a group go to the engine together and share their prompt.
        self._queues: dict[Priority, deque[asyncio.Future[bool]]] = {priority: deque() for priority in Priority}

    @property
    def has_waiters(self) -> bool:
        """Whether somebody waits."""
        return any(self._queues.values())

    @property
    def size(self) -> int:
        """The number of places in this moment."""
        return self.fixed or self.controller.current_limit

    @property
    def limit(self) -> int:
        """The same without the brake of a moment."""
        return self.fixed or self.controller.limit

    def admit(self) -> None:
        """Lets those in for whom there are places. Nobody who holds one loses it."""
        size = self.size
        for queue in self._queues.values():
            while queue and self.num_held < size:
                turn = queue.popleft()
                if not turn.done():
                    self.num_held += 1
                    turn.set_result(True)

    async def acquire(self, priority: Priority) -> bool:
        """Waits for a place, without a limit. Returns whether there was one: False after `withdraw`."""
        # The canary does not wait: its requests are few and fit into the free part of the KV cache.
        if priority is Priority.CANARY or (self.num_held < self.size and not self.has_waiters):
            self.num_held += 1
            return True
        turn, queue = asyncio.get_running_loop().create_future(), self._queues[priority]
        queue.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.release()  # the place was given in the same moment
            elif turn in queue:
                queue.remove(turn)
            raise

    def withdraw(self) -> None:
        """Sends away all who wait."""
        for queue in self._queues.values():
            while queue:
                turn = queue.popleft()
                if not turn.done():
                    turn.set_result(False)

    def release(self) -> None:
        """Gives a place back."""
        self.num_held -= 1
        self.admit()
