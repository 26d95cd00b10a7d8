"""Adapts the number of in-flight requests so that the KV cache is full but nothing is preempted.

A low limit leaves the hardware idle. A high limit fills the cache, and vLLM preempts requests and
recomputes them later. The right limit changes with the lengths of prompts and completions as the
policy learns. `ConcurrencyController` measures it with the replica's counters, and `Throttle` is a
semaphore with that limit.
"""

import asyncio
import math
from collections import deque

from torchtune_ext.sampling.types import Priority

# Largest growth of the limit in one round: the first rounds have seen only the first prompts.
MAX_GROWTH = 4.0
SHRINK_FACTOR = 0.85  # new limit / running requests at a preemption
TARGET_KV_USAGE = 0.92  # target fraction of the KV cache in use
MIN_TARGET_KV_USAGE = 0.7  # lowest target, after many preemptions
TARGET_DECREMENT = 0.04  # decrease of the target after a preemption
TARGET_INCREMENT = 0.0005  # increase of the target after a round without a preemption
HISTORY_ROUNDS = 4  # the limit follows from the worst of this many rounds
# HEADROOM / sqrt(requests) is the fraction of the cache kept free for the growth of requests: the
# relative usage of many requests fluctuates less.
HEADROOM = 1.2
HEADROOM_MIN, HEADROOM_MAX = 0.05, 0.2
TOLERANCE = 0.05  # smaller relative changes of the limit are ignored


class ConcurrencyController:
    """Computes the limit of in-flight requests from the replica's counters.

    It uses no clock and no I/O: the same observations give the same limits.
    """

    def __init__(self, ceiling: int, limit: int | None = None):
        """Creates a controller.

        Args:
            ceiling: Most requests of an engine step (`max_num_seqs`).
            limit: First limit; None: `set_initial_limit` sets it.
        """
        self.ceiling = ceiling
        self.limit = min(limit or 1, ceiling)
        self.is_measured = limit is not None  # until then `set_initial_limit` sets the limit
        self.lowest_initial_limit: int | None = None  # lowest limit that `set_initial_limit` has set
        self.target = TARGET_KV_USAGE
        # Per round: its requests, and the fraction of the cache that one request used.
        self.costs: deque[tuple[int, float]] = deque(maxlen=HISTORY_ROUNDS)
        self.effective_limit = self.limit  # lower than `limit` while the cache is nearly full
        self.is_draining = False  # after a preemption, until the in-flight requests fit the new limit
        self.start_round()

    def start_round(self) -> None:
        """Resets the observations. Call it also when no request is in flight any more."""
        # New requests use little cache, so the usage at one moment is not informative. A round ends
        # after `limit` completions. By then every slot has held both short and long sequences, so
        # the peak usage of the round is representative.
        self.finished = 0  # completions in this round
        self.peak = 0.0  # highest fraction of the KV cache in use
        self.in_flight = 0  # most requests running at one time
        self.limit_reached = False  # whether requests had to wait for the limit
        self.cache_was_full = False  # whether requests waited in the replica because the cache was full

    def set_initial_limit(
        self, cache_tokens: int, prompt_tokens: int, max_tokens: int, samples: int, block: int
    ) -> None:
        """Sets the first limit for completions of the longest possible length.

        Args:
            cache_tokens: Capacity of the KV cache in tokens.
            prompt_tokens: Length of the prompt.
            max_tokens: Longest completion.
            samples: Requests that share the prompt.
            block: Tokens per KV-cache block.
        """
        if not self.is_measured:
            # Only full blocks of the prompt are shared.
            shared_tokens = prompt_tokens // block * block
            unshared_tokens = -(-(prompt_tokens - shared_tokens + max_tokens) // block) * block
            # The next group's prompt also takes space, before the end of this group.
            free_tokens = TARGET_KV_USAGE * cache_tokens - shared_tokens
            tokens_per_request = unshared_tokens + shared_tokens / samples
            limit = max(1, min(self.ceiling, int(free_tokens / tokens_per_request)))
            # Until a limit is measured, the lowest limit of all groups is used.
            if self.lowest_initial_limit is None or limit < self.lowest_initial_limit:
                self.lowest_initial_limit = self.limit = self.effective_limit = limit
                self.start_round()

    def observe(self, usage: float, running: int, waiting: int, preempted: int, blocked: bool) -> None:
        """Updates the limit after one engine step.

        Args:
            usage: Fraction of the KV cache in use.
            running: Requests in the step.
            waiting: Requests in the replica's queue.
            preempted: Requests preempted in the step.
            blocked: Whether requests wait for the throttle.
        """
        if not running:
            return  # a step after a pause, or after the last request
        if running + waiting <= self.limit:
            self.is_draining = False
        self.peak = max(self.peak, usage)
        self.in_flight = max(self.in_flight, running)
        self.limit_reached = self.limit_reached or blocked
        self.cache_was_full = self.cache_was_full or (waiting > 0 and usage >= self.target)
        # A preemption shows that the limit was too high, so the limit falls at once. The target
        # falls a little and recovers slowly, so that the same limit is not tried again soon. Until
        # the requests in flight fit the new limit, further preemptions have the same cause.
        if preempted and not self.is_draining:
            self.target = max(MIN_TARGET_KV_USAGE, self.target - TARGET_DECREMENT)
            self.costs.append((running, 1.0 / running))
            self.limit = max(1, min(self.limit, math.floor(running * SHRINK_FACTOR)))
            self.is_measured = self.is_draining = True
        if self.is_draining:
            self.start_round()
        # Many long completions may coincide by chance, so a nearly full cache gets no new requests.
        free = min(HEADROOM_MAX, max(HEADROOM_MIN, HEADROOM / math.sqrt(max(running, 1))))
        self.effective_limit = min(self.limit, max(1, running + waiting)) if usage >= 1.0 - free else self.limit

    def on_finished(self) -> None:
        """Records one finished request."""
        self.finished += 1
        if self.finished >= self.limit and self.in_flight:
            self._end_round()

    def _end_round(self) -> None:
        self.is_measured = True
        self.target = min(TARGET_KV_USAGE, self.target + TARGET_INCREMENT)
        self.costs.append((self.in_flight, self.peak / self.in_flight))
        # If n requests used at most a fraction u of the cache, about n * target / u requests use
        # the fraction `target`. Rounds with far fewer requests are ignored: their requests share
        # fewer prompts, and their usage fluctuates more.
        cost = max(cost for in_flight, cost in self.costs if 2 * in_flight >= self.in_flight)
        requests = math.floor(self.target / max(cost, 1e-9))
        limit = max(1, min(requests, self.ceiling, math.floor(self.limit * MAX_GROWTH)))
        grow = limit > self.limit * (1 + TOLERANCE) and self.limit_reached and not self.cache_was_full
        shrink = limit < self.limit * (1 - TOLERANCE) and self.peak > self.target
        if grow or shrink:
            self.limit = self.effective_limit = limit
        self.start_round()

    def state_dict(self) -> dict[str, float | int | bool]:
        """Returns the state for a resumed run."""
        return {"limit": self.limit, "is_measured": self.is_measured, "target": self.target}

    def load_state_dict(self, state: dict[str, float | int | bool]) -> None:
        """Restores an earlier run's `state_dict`."""
        self.limit = max(1, min(int(state["limit"]), self.ceiling))
        # "known" is the key of an earlier commit.
        self.is_measured = bool(state["is_measured"] if "is_measured" in state else state["known"])
        self.target = min(TARGET_KV_USAGE, max(MIN_TARGET_KV_USAGE, float(state["target"])))
        self.effective_limit = self.limit
        self.start_round()


class Throttle:
    """A semaphore whose limit may change while in use. All calls come from one asyncio loop."""

    def __init__(self, controller: ConcurrencyController, fixed: int | None = None):
        """Creates a semaphore.

        Args:
            controller: Sets the limit.
            fixed: Fixed limit, which overrides the controller.
        """
        self.controller, self.fixed = controller, fixed
        self.num_held = 0
        # Waiters by priority. Equal priorities are served in order, so that the samples of a group
        # reach the replica together and share their prompt.
        self._queues: dict[Priority, deque[asyncio.Future[None]]] = {priority: deque() for priority in Priority}

    @property
    def has_waiters(self) -> bool:
        return any(self._queues.values())

    @property
    def effective_limit(self) -> int:
        """Current number of slots."""
        return self.fixed or self.controller.effective_limit

    @property
    def limit(self) -> int:
        """Number of slots, without the temporary reduction for a nearly full cache."""
        return self.fixed or self.controller.limit

    def admit(self, everyone: bool = False) -> None:
        """Admits waiters while slots are free. Held slots are never revoked.

        Args:
            everyone: Whether to admit all waiters, because the replica does not serve.
        """
        limit = math.inf if everyone else self.effective_limit
        for queue in self._queues.values():
            while queue and self.num_held < limit:
                waiter = queue.popleft()
                if not waiter.done():
                    self.num_held += 1
                    waiter.set_result(None)

    async def acquire(self, priority: Priority) -> None:
        """Waits for a slot, without a timeout."""
        # The canary bypasses the queue: its few requests fit into the free part of the KV cache.
        if priority is Priority.CANARY or (self.num_held < self.effective_limit and not self.has_waiters):
            self.num_held += 1
            return
        waiter, queue = asyncio.get_running_loop().create_future(), self._queues[priority]
        queue.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release()  # the slot was granted before the cancellation
            elif waiter in queue:
                queue.remove(waiter)
            raise

    def release(self) -> None:
        """Releases a slot."""
        self.num_held -= 1
        self.admit()
