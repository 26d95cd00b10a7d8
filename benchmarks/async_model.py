"""The model behind benchmarks/async_simulator.py: discrete events around the ledger of torchtune_ext/buffer.py. What it assumes
stands in the opening of that file; tests/unit/pipeline/test_pool_model.py has runs that are computed by hand."""

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256

import numpy as np

from torchtune_ext.buffer import Ledger
from torchtune_ext.sampling.pool import least, pays

BANDWIDTH = 0.7 * 3.35e12  # bytes a second of a GPU, H800
MEMORY = 0.8 * 80e9  # bytes of a GPU for weights and keys and values
ROUTINGS = ("sample", "least", "hash", "round_robin")


@dataclass(frozen=True, slots=True)
class Model:
    """What a token costs."""

    parameters: float
    kv_bytes: float  # of a token: 2 x layers x heads of keys x 128 x 2 bytes
    flops: float  # that a device of the trainer computes in a second (AReaL, Fig. 6, with dynamic batching)


@dataclass(frozen=True, slots=True)
class Pool:
    """What is between the ledger and the engines.

    Args:
        routing: which engine a group goes to. "least": to the one of which the fewest tokens are expected, and what waits
            moves, as in a run. "hash": to one that its number draws. "round_robin": to the next one. "sample": samples go one
            by one, each to the engine with the fewest, and wait in no engine's queue; the best that can be, were prompts free.
        gpus: devices of one engine.
        publication_s: seconds in which an engine samples nothing to take new weights.
        failures_per_hour: of one engine.
        restart_s: seconds until a lost engine serves again, with the current weights.
        failures: (time, engine) of the failures instead; None: they are drawn.
        seed: of what is drawn.
    """

    routing: str = "sample"
    gpus: int = 1
    publication_s: float = 0.5
    failures_per_hour: float = 0.0
    restart_s: float = 180.0
    failures: Sequence[tuple[float, int]] | None = None
    seed: int = 0

    def __post_init__(self):
        if self.routing not in ROUTINGS:
            raise ValueError(f"--routing {self.routing}: use one of {', '.join(ROUTINGS)}")


@dataclass(frozen=True)
class Setup:
    """One cell of a table."""

    model: Model
    lengths_NG: np.ndarray  # tokens of each sample of each group; the groups repeat when the run is longer
    prompts: int  # groups a step
    samplers: int  # devices that sample
    trainers: int  # devices that train
    overhead: float  # seconds of a decoding step that do not depend on the requests
    staleness: int
    depth: int
    interrupt: bool = True
    prompt_tokens: int = 512
    max_requests: int = 1 << 30  # of an engine at once, beside what its memory allows
    pool: Pool = field(default_factory=Pool)

    @property
    def engines(self) -> int:
        """Returns how many there are."""
        return max(1, self.samplers // self.pool.gpus)

    @cached_property
    def share(self) -> float:
        """Returns the tokens that are expected of a sample: the mean, and its part of the prompt."""
        return float(self.lengths_NG.mean()) + self.prompt_tokens / self.lengths_NG.shape[1]

    @cached_property
    def context(self) -> float:
        """Returns the mean tokens of a running request: at a random moment of a sample that is chosen by its length."""
        lengths = self.lengths_NG.astype(float)
        return self.prompt_tokens + float((lengths**2).mean() / lengths.mean()) / 2

    @cached_property
    def places(self) -> int:
        """Returns how many requests an engine holds."""
        fitting = (self.pool.gpus * MEMORY - 2 * self.model.parameters) / (self.context * self.model.kv_bytes)
        return max(1, min(self.max_requests, int(fitting)))

    def step_s(self, requests: int) -> float:
        """Returns the seconds of a decoding step."""
        read = 2 * self.model.parameters + requests * self.context * self.model.kv_bytes
        return self.overhead + read / (self.pool.gpus * BANDWIDTH)

    def train_s(self, tokens: int, samples: int) -> float:
        """Returns the seconds of a step of the trainer on so many sampled tokens."""
        flops = 8 * self.model.parameters * (tokens + samples * self.prompt_tokens)
        return flops / (self.trainers * self.model.flops)

    def recompute_s(self, requests: int) -> float:
        """Returns the seconds in which an engine computes the contexts of its requests again."""
        return 2 * self.model.parameters * requests * self.context / (self.pool.gpus * self.model.flops)


@dataclass(frozen=True, slots=True)
class Result:
    """What one run comes to, between its beginning and its end; failures, lost work and groups are those of the whole run."""

    rate: float  # trained tokens a second
    training: float  # share of the time in which the trainer works
    decoding: float  # tokens of all engines, as a share of what they decode with every place taken
    mean_age: float  # versions
    max_age: int
    failures: int
    lost: float  # share of the sampled tokens that were lost with an engine, and sampled again
    group_p90_s: float  # seconds from the submission of a group to its last sample, of nine groups in ten


class Engine:
    """Decodes its requests at one common pace: a heap of the decoding steps at which they end."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.steps = 0.0  # decoding steps until `since`
        self.since = 0.0  # seconds; in the future while new weights are loaded
        self.running: list[tuple[float, int, int]] = []  # (step at which it ends, number of its group, its tokens)
        self.waiting: deque[tuple[int, int]] = deque()  # (number of the group, tokens)
        self.draining = False
        self.down = False

    @property
    def load(self) -> float:
        """Returns the tokens that are expected of it."""
        return self.setup.share * (len(self.running) + len(self.waiting))

    @property
    def has_room(self) -> bool:
        """Says whether it would begin a request at once."""
        return not (self.waiting or self.draining or self.down) and len(self.running) < self.setup.places

    def advance(self, now: float) -> None:
        if now > self.since:
            self.steps += (now - self.since) / self.setup.step_s(len(self.running))
            self.since = now

    def begin(self, now: float, request: tuple[int, int]) -> None:
        self.advance(now)
        number, tokens = request
        heapq.heappush(self.running, (self.steps + tokens, number, tokens))

    def next_end(self) -> float:
        """Returns the time at which the next request ends."""
        left = max(0.0, self.running[0][0] - self.steps)
        return self.since + left * self.setup.step_s(len(self.running))

    def load_weights(self, now: float) -> None:
        self.advance(now)
        pause = self.setup.pool.publication_s + self.setup.recompute_s(len(self.running))
        self.since = max(self.since, now) + pause
        self.draining = False

    def fail(self, now: float) -> tuple[float, list[tuple[int, int]]]:
        """Ends this life. Returns the tokens that are lost, and the requests, of which each begins anew."""
        self.advance(now)
        lost = sum(tokens - max(0.0, end - self.steps) for end, _, tokens in self.running)
        requests = [(number, tokens) for _, number, tokens in sorted(self.running)] + list(self.waiting)
        self.running, self.waiting, self.draining, self.down = [], deque(), False, True
        return lost, requests


class Simulation:
    """A run of so many steps."""

    def __init__(self, setup: Setup, steps: int):
        self.setup, self.steps = setup, steps
        self.ledger = Ledger(setup.prompts, steps, setup.staleness, setup.depth)
        self.engines = [Engine(setup) for _ in range(setup.engines)]
        self.now, self.version, self.training = 0.0, 0, False
        self.queue: deque[tuple[int, int]] = deque()  # of "sample": what waits for any engine
        self.left: dict[int, int] = {}  # samples of a group that are not finished
        self.begun: dict[int, float] = {}  # group -> time of its submission
        self.group_s: list[float] = []
        self.loads = [(0, index) for index in range(setup.engines)]  # a heap; entries that are out of date are skipped
        self.events: list[tuple[float, int, str, int]] = []  # time, tie, what, engine
        self.due: dict[int, int] = {}  # engine -> tie of the end of a request that counts
        self.ties = itertools.count()
        self.ages: list[dict[int, int]] = []
        self.ends: list[tuple[float, float, int]] = []  # of each step: time, seconds of training, tokens
        self.sampled = self.lost = 0.0  # tokens
        self.failures = 0
        self.rng = np.random.default_rng(setup.pool.seed)
        for index in range(setup.engines):
            self.plan_failure(index)
        for time, index in setup.pool.failures or ():
            self.plan(time, "fail", index)

    def run(self) -> Result:
        self.submit()
        while len(self.ends) < self.steps:
            if not self.training:
                self.take()
            self.now, tie, what, index = heapq.heappop(self.events)
            if what == "trained":
                self.publish()
            elif what == "fail":
                self.fail(index)
            elif what == "back":
                self.back(index)
            elif self.due.get(index) == tie:
                self.end_of(index)
        # The pipe is not full at the beginning, and nothing is sampled ahead of the end.
        first, last = self.setup.depth + 2, self.steps - self.setup.depth - 1
        seconds = self.ends[last][0] - self.ends[first][0]
        between = self.ends[first + 1 : last + 1]
        rate = sum(tokens for _, _, tokens in between) / seconds
        ages = [age for batch in self.ages[first + 1 : last + 1] for age in batch.values()]
        full = self.setup.engines * self.setup.places / self.setup.step_s(self.setup.places)
        return Result(
            rate=rate,
            training=sum(seconds for _, seconds, _ in between) / seconds,
            decoding=rate / full,
            mean_age=float(np.mean(ages)),
            max_age=max(ages),
            failures=self.failures,
            lost=self.lost / (self.lost + self.sampled),
            group_p90_s=float(np.quantile(self.group_s, 0.9)),
        )

    def plan(self, time: float, what: str, index: int = -1) -> int:
        tie = next(self.ties)
        heapq.heappush(self.events, (time, tie, what, index))
        return tie

    def samples(self, number: int) -> np.ndarray:
        return self.setup.lengths_NG[number % len(self.setup.lengths_NG)]

    # -- routing ------------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        for number in self.ledger.submit():
            requests = [(number, int(tokens)) for tokens in self.samples(number)]
            self.left[number], self.begun[number] = len(requests), self.now
            self.give(number, requests)
        self.admit(range(len(self.engines)))

    def give(self, number: int, requests: Sequence[tuple[int, int]]) -> None:
        """Puts requests of a group where they wait."""
        routing, engines = self.setup.pool.routing, self.engines
        if routing == "sample":
            self.queue.extend(requests)
            return
        if routing == "least":
            up = [engine for engine in engines if not engine.down] or engines
            home = up[least([engine.load for engine in up])]
        else:
            # What a prompt's text would give: a number that has nothing to do with those of other prompts.
            first = int.from_bytes(sha256(str(number).encode()).digest()[:8]) if routing == "hash" else number
            order = [engines[(first + offset) % len(engines)] for offset in range(len(engines))]
            home = next((engine for engine in order if not engine.down), order[0])
        home.waiting.extend(requests)

    def admit(self, touched: Sequence[int]) -> None:
        """Begins what waits at these engines and has a place."""
        if self.setup.pool.routing == "sample":
            self.admit_anywhere()
            return
        for index in touched:
            self.begin(index)
        if self.setup.pool.routing == "least":
            for index in touched:
                while self.engines[index].has_room and self.level(self.engines[index]):
                    self.begin(index)

    def begin(self, index: int) -> None:
        """Begins what waits at one engine."""
        engine, before = self.engines[index], len(self.engines[index].waiting)
        while engine.waiting and not (engine.draining or engine.down) and len(engine.running) < self.setup.places:
            engine.begin(self.now, engine.waiting.popleft())
        if len(engine.waiting) < before:
            self.schedule(index)

    def level(self, target: Engine) -> bool:
        """Gives an engine that has nothing to do what waits for another one, where that pays, as in a run."""
        for source in sorted((each for each in self.engines if each.waiting), key=lambda each: -each.load):
            running = {number for _, number, _ in source.running}
            waiting: dict[int, int] = {}
            for number, _ in source.waiting:
                waiting[number] = waiting.get(number, 0) + 1
            for number, count in waiting.items():
                tokens = count * self.setup.share
                if pays(source.load, target.load, tokens, self.setup.prompt_tokens, begun=number in running):
                    target.waiting.extend(each for each in source.waiting if each[0] == number)
                    source.waiting = deque(each for each in source.waiting if each[0] != number)
                    return True
        return False

    def admit_anywhere(self) -> None:
        """Gives waiting samples to engines, each to the one with the fewest."""
        touched = set()
        while self.queue and self.loads:
            load, index = self.loads[0]
            engine = self.engines[index]
            if load != len(engine.running) or engine.draining or engine.down:
                heapq.heappop(self.loads)
                continue
            if load >= self.setup.places:
                break
            engine.begin(self.now, self.queue.popleft())
            heapq.heapreplace(self.loads, (load + 1, index))
            touched.add(index)
        for index in touched:
            self.schedule(index)

    # -- what happens -------------------------------------------------------------------------------------------------

    def schedule(self, index: int) -> None:
        """Plans the end of the engine's next request; an earlier plan no longer counts."""
        self.due.pop(index, None)
        if self.engines[index].running:
            self.due[index] = self.plan(self.engines[index].next_end(), "done", index)

    def end_of(self, index: int) -> None:
        engine = self.engines[index]
        engine.advance(self.now)
        _, number, tokens = heapq.heappop(engine.running)
        self.sampled += tokens
        self.left[number] -= 1
        if not self.left[number]:
            del self.left[number]
            self.group_s.append(self.now - self.begun.pop(number))
            self.ledger.finish(number)
        if engine.draining and not engine.running:
            engine.load_weights(self.now)
        heapq.heappush(self.loads, (len(engine.running), index))
        self.schedule(index)
        self.admit([index])

    def plan_failure(self, index: int) -> None:
        rate = self.setup.pool.failures_per_hour
        if rate > 0 and self.setup.pool.failures is None:
            self.plan(self.now + self.rng.exponential(3600 / rate), "fail", index)

    def fail(self, index: int) -> None:
        """An engine is lost. What it had begun is begun anew by others, with the same seeds, so with the same lengths."""
        if self.engines[index].down:
            return
        lost, requests = self.engines[index].fail(self.now)
        self.failures, self.lost = self.failures + 1, self.lost + lost
        self.due.pop(index, None)
        self.plan(self.now + self.setup.pool.restart_s, "back", index)
        for number, group in itertools.groupby(sorted(requests, key=lambda request: request[0]), lambda each: each[0]):
            self.give(number, list(group))
        self.admit(range(len(self.engines)))

    def back(self, index: int) -> None:
        """A lost engine serves again. It has taken the current weights by itself."""
        self.engines[index].down, self.engines[index].since = False, self.now
        heapq.heappush(self.loads, (0, index))
        self.plan_failure(index)
        self.admit([index])

    def take(self) -> None:
        batch = self.ledger.take()
        if batch is None:
            return
        self.ages.append(batch)
        tokens = sum(int(self.samples(number).sum()) for number in batch)
        seconds = self.setup.train_s(tokens, len(batch) * self.setup.lengths_NG.shape[1])
        self.training = True
        self.ends.append((self.now + seconds, seconds, tokens))
        self.plan(self.now + seconds, "trained")

    def publish(self) -> None:
        self.training, self.version = False, self.version + 1
        assert not self.ledger.advance(self.version)
        for index, engine in enumerate(self.engines):
            if engine.down:
                continue
            if self.setup.interrupt or not engine.running:
                engine.load_weights(self.now)
                heapq.heappush(self.loads, (len(engine.running), index))
                self.schedule(index)
            else:
                engine.draining = True
        self.submit()


def simulate(setup: Setup, steps: int | None = None) -> Result:
    """Runs a setup, for as many steps as its depth asks for where nobody says how many."""
    return Simulation(setup, steps or 2 * setup.depth + 13).run()
