"""How fast is a run that samples ahead, and how old are the groups that it trains on, on 8 to 1,024 devices?

    python benchmarks/async_simulator.py                      # a table: devices x staleness
    python benchmarks/async_simulator.py --rollouts runs/x    # with the lengths that a run has stored
    python benchmarks/async_simulator.py --check              # what AReaL measured beside what this predicts

Discrete events around the ledger of torchtune_ext/buffer.py, which is imported: it decides what is submitted and what is
trained on. The rest is a model of the machines, with these assumptions.

- Engines. A quarter of the devices train, three quarters sample, one engine each (AReaL, App. B). A decoding step of n
  requests takes `overhead + (weights + n * context * KV bytes of a token) / bandwidth` seconds, where `context` is the mean
  number of tokens of a running request. The bandwidth is 0.7 of the data sheet's. As many requests run as fit into 0.8 of
  the memory beside the weights. A sample goes to the engine that has the fewest; those without a place wait in one queue.
  To compute prompts takes no time.
- Trainer. A token costs 8 FLOPs a parameter (forward and backward, and a forward for the proximal policy). AReaL's own Figure 6
  says how many each device computes in a second.
- Publication. Interrupted engines load the weights and compute the contexts of their requests again, with 2 FLOPs a
  parameter at the trainer's rate. Engines that are not interrupted begin nothing new, finish what they have, and then load
  the weights. Either way the trainer goes on.
- Lengths. Lognormal, cut off at the longest, independent of prompt and version.

What is calibrated: `overhead`, one number, so that the throughput at staleness 0 is AReaL's 27.1 k tokens/s on 8 devices.
Nothing else is fitted, and nothing at all to the other figures.

Where the predictions differ. From staleness 4 on the modelled trainer is busy all the time, so its rate is that of Figure 6,
which AReaL measured in larger runs; a trainer of two devices may well reach less. AReaL does not say how long its samples
are, and the gain by interruption depends on that: it is none where the trainer is the bottleneck. AReaL's figures there must be
of generation alone: with 7B it gives 130 k tokens/s on 32 devices, of which 8 train 54 k at the rate of Figure 6. The rates
of this table are of tokens that are trained on, so these two gains are not predicted yet.
"""

import argparse
import heapq
import itertools
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from torchtune_ext.buffer import Ledger
from torchtune_ext.telemetry.rollouts import read_rollouts, rollout_paths

BANDWIDTH = 0.7 * 3.35e12  # bytes a second, H800
MEMORY = 0.8 * 80e9  # bytes
LOAD_S = 0.5  # to load new weights


@dataclass(frozen=True, slots=True)
class Model:
    """What a token costs."""

    parameters: float
    kv_bytes: int  # of a token: 2 x layers x heads of keys x 128 x 2 bytes
    flops: float  # that a device of the trainer computes in a second (AReaL, Fig. 6, with dynamic batching)


MODELS = {"1.5B": Model(1.54e9, 2 * 28 * 2 * 128 * 2, 427.4e12), "7B": Model(7.6e9, 2 * 28 * 4 * 128 * 2, 454.7e12)}


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

    @cached_property
    def context(self) -> float:
        """Returns the mean tokens of a running request: at a random moment of a sample that is chosen by its length."""
        lengths = self.lengths_NG.astype(float)
        return self.prompt_tokens + float((lengths**2).mean() / lengths.mean()) / 2

    @cached_property
    def places(self) -> int:
        """Returns how many requests an engine holds."""
        return max(1, int((MEMORY - 2 * self.model.parameters) / (self.context * self.model.kv_bytes)))

    def step_s(self, requests: int) -> float:
        """Returns the seconds of a decoding step."""
        read = 2 * self.model.parameters + requests * self.context * self.model.kv_bytes
        return self.overhead + read / BANDWIDTH

    def train_s(self, tokens: int, samples: int) -> float:
        """Returns the seconds of a step of the trainer on so many sampled tokens."""
        flops = 8 * self.model.parameters * (tokens + samples * self.prompt_tokens)
        return flops / (self.trainers * self.model.flops)

    def recompute_s(self, requests: int) -> float:
        """Returns the seconds in which an engine computes the contexts of its requests again."""
        return 2 * self.model.parameters * requests * self.context / self.model.flops


@dataclass(frozen=True, slots=True)
class Result:
    """What one run comes to, in the steps between its beginning and its end."""

    rate: float  # trained tokens a second
    training: float  # share of the time in which the trainer works
    decoding: float  # tokens of all engines, as a share of what they decode with every place taken
    mean_age: float  # versions
    max_age: int


class Engine:
    """Decodes its requests at one common pace: a heap of the decoding steps at which they end."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.steps = 0.0  # decoding steps until `since`
        self.since = 0.0  # seconds; in the future while new weights are loaded
        self.running: list[tuple[float, int]] = []  # (step at which it ends, number of its group)
        self.draining = False

    def advance(self, now: float) -> None:
        if now > self.since:
            self.steps += (now - self.since) / self.setup.step_s(len(self.running))
            self.since = now

    def next_end(self) -> float:
        """Returns the time at which the next request ends."""
        left = max(0.0, self.running[0][0] - self.steps)
        return self.since + left * self.setup.step_s(len(self.running))

    def load_weights(self, now: float) -> None:
        self.advance(now)
        self.since = max(self.since, now) + LOAD_S + self.setup.recompute_s(len(self.running))
        self.draining = False


class Simulation:
    """A run of so many steps."""

    def __init__(self, setup: Setup, steps: int):
        self.setup, self.steps = setup, steps
        self.ledger = Ledger(setup.prompts, steps, setup.staleness, setup.depth)
        self.engines = [Engine(setup) for _ in range(setup.samplers)]
        self.now, self.version, self.training = 0.0, 0, False
        self.waiting: list[tuple[int, int]] = []  # (number of the group, tokens), the last one first
        self.left: dict[int, int] = {}  # samples of a group that are not finished
        self.loads = [(0, index) for index in range(setup.samplers)]  # a heap; entries that are out of date are skipped
        self.events: list[tuple[float, int, int]] = []  # time, tie, engine or -1: a step of the trainer ends
        self.due: dict[int, int] = {}  # engine -> tie of its event that counts
        self.ties = itertools.count()
        self.ages: list[dict[int, int]] = []
        self.ends: list[tuple[float, float, int]] = []  # of each step: time, seconds of training, tokens

    def run(self) -> Result:
        self.submit()
        while len(self.ends) < self.steps:
            if not self.training:
                self.take()
            self.now, tie, index = heapq.heappop(self.events)
            if index < 0:
                self.publish()
            elif self.due.get(index) == tie:
                self.end_of(index)
        # The pipe is not full at the beginning, and nothing is sampled ahead of the end.
        first, last = self.setup.depth + 2, self.steps - self.setup.depth - 1
        seconds = self.ends[last][0] - self.ends[first][0]
        between = self.ends[first + 1 : last + 1]
        tokens = sum(tokens for _, _, tokens in between)
        ages = [age for batch in self.ages[first + 1 : last + 1] for age in batch.values()]
        full = self.setup.samplers * self.setup.places / self.setup.step_s(self.setup.places)
        training = sum(seconds for _, seconds, _ in between) / seconds
        return Result(tokens / seconds, training, tokens / seconds / full, float(np.mean(ages)), max(ages))

    def submit(self) -> None:
        fresh = [(number, int(tokens)) for number in self.ledger.submit() for tokens in self.samples(number)]
        self.left.update((number, self.setup.lengths_NG.shape[1]) for number, _ in fresh)
        self.waiting = fresh[::-1] + self.waiting
        self.admit()

    def samples(self, number: int) -> np.ndarray:
        return self.setup.lengths_NG[number % len(self.setup.lengths_NG)]

    def admit(self) -> None:
        """Gives waiting samples to engines, each to the one with the fewest."""
        touched = set()
        while self.waiting and self.loads:
            load, index = self.loads[0]
            engine = self.engines[index]
            if load != len(engine.running) or engine.draining:
                heapq.heappop(self.loads)
                continue
            if load >= self.setup.places:
                break
            number, tokens = self.waiting.pop()
            engine.advance(self.now)
            heapq.heappush(engine.running, (engine.steps + tokens, number))
            heapq.heapreplace(self.loads, (load + 1, index))
            touched.add(index)
        for index in touched:
            self.schedule(index)

    def schedule(self, index: int) -> None:
        """Plans the end of the engine's next request; an earlier plan no longer counts."""
        self.due.pop(index, None)
        if self.engines[index].running:
            self.due[index] = next(self.ties)
            heapq.heappush(self.events, (self.engines[index].next_end(), self.due[index], index))

    def end_of(self, index: int) -> None:
        engine = self.engines[index]
        engine.advance(self.now)
        _, number = heapq.heappop(engine.running)
        self.left[number] -= 1
        if not self.left[number]:
            del self.left[number]
            self.ledger.finish(number)
        if engine.draining and not engine.running:
            engine.load_weights(self.now)
        heapq.heappush(self.loads, (len(engine.running), index))
        self.schedule(index)
        self.admit()

    def take(self) -> None:
        batch = self.ledger.take()
        if batch is None:
            return
        self.ages.append(batch)
        tokens = sum(int(self.samples(number).sum()) for number in batch)
        seconds = self.setup.train_s(tokens, len(batch) * self.setup.lengths_NG.shape[1])
        self.training = True
        self.ends.append((self.now + seconds, seconds, tokens))
        heapq.heappush(self.events, (self.now + seconds, next(self.ties), -1))

    def publish(self) -> None:
        self.training, self.version = False, self.version + 1
        assert not self.ledger.advance(self.version)
        for index, engine in enumerate(self.engines):
            if self.setup.interrupt or not engine.running:
                engine.load_weights(self.now)
                heapq.heappush(self.loads, (len(engine.running), index))
                self.schedule(index)
            else:
                engine.draining = True
        self.submit()


def simulate(setup: Setup) -> Result:
    return Simulation(setup, 2 * setup.depth + 13).run()


def draw_lengths(mean: float, sigma: float, longest: int, samples: int, groups: int = 4096) -> np.ndarray:
    """Draws lognormal lengths of that mean before they are cut off at the longest, as [groups, samples] of tokens."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, (groups, samples))
    return np.clip(drawn, 1, longest).astype(np.int64)


def stored_lengths(run_dir: str) -> np.ndarray:
    """Reads the lengths of all rollouts of a run, as [groups, samples] of tokens.

    Raises:
        ValueError: the run has stored none.
    """
    groups = [group for path in rollout_paths(run_dir).values() for group in read_rollouts(path)]
    if not groups:
        raise ValueError(f"--rollouts {run_dir} has no stored rollouts: name the output_dir of a run that kept them")
    return np.array([[len(sample.completion.tokens) for sample in group.samples] for group in groups])


def calibrated(setup: Setup, rate: float) -> float:
    """Finds the overhead with which `setup` trains on `rate` tokens a second, by bisection."""
    low, high = 0.0, 0.2
    if simulate(replace(setup, overhead=low)).rate < rate:
        raise ValueError(
            f"even without overhead this trains on fewer than {rate:.0f} tokens/s: the assumptions are wrong"
        )
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if simulate(replace(setup, overhead=middle)).rate > rate else (low, middle)
    return (low + high) / 2


LENGTHS = ((2500, 0.8), (3500, 0.8), (5000, 0.8), (3500, 1.1))  # mean and sigma before the cut
MEASURED = {0: 27.1, 1: 47.8, 4: 49.0, 16: 52.0}  # k tokens/s on 8 devices (AReaL, 64 prompts x 16, context 8k)


def eight_devices(mean: float, sigma: float) -> Setup:
    """AReaL's small setting at staleness 0, not calibrated."""
    return Setup(MODELS["1.5B"], draw_lengths(mean, sigma, 8192 - 512, 16), 64, 6, 2, 0.0, 0, 0)


def check() -> None:
    """Prints what AReaL measured beside the predictions, for several lengths, since AReaL does not say how long its are."""
    print("k tokens/s on 8 devices, 1.5B, 64 prompts x 16, context 8k: calibrated at staleness 0, the rest predicted")
    print("  lengths: mean, sigma   overhead " + "".join(f"     staleness {s:<2d}    " for s in MEASURED))
    overheads = []
    for mean, sigma in LENGTHS:
        setup = eight_devices(mean, sigma)
        try:
            overhead = calibrated(setup, 1e3 * MEASURED[0])
        except ValueError as error:
            print(f"  {mean:10d}  {sigma:8.1f}   {error}")
            continue
        overheads.append((mean, sigma, overhead))
        cells = []
        for staleness, measured in MEASURED.items():
            rate = simulate(replace(setup, overhead=overhead, staleness=staleness, depth=staleness)).rate / 1e3
            cells.append(f"{rate:6.1f} / {measured:.1f} = {rate / measured:.2f}")
        print(f"  {mean:10d}  {sigma:8.1f}   {1e3 * overhead:5.1f} ms  " + "  ".join(cells), flush=True)
    print(
        "\ngain by interruption on 4 nodes of 8, 512 prompts x 16, up to 27,648 tokens, staleness 8, the same overhead"
    )
    print("  model  lengths: mean, sigma     gain   measured   trainer busy with and without")
    for name, measured in (("1.5B", 0.12), ("7B", 0.17)):
        for mean, sigma, overhead in overheads:
            lengths = draw_lengths(mean, sigma, 27648, 16)
            setup = Setup(MODELS[name], lengths, 512, 24, 8, overhead, 8, 8)
            on, off = (simulate(replace(setup, interrupt=interrupt)) for interrupt in (True, False))
            gain = on.rate / off.rate - 1
            busy = f"{on.training:.2f}  {off.training:.2f}"
            print(f"  {name:5s}  {mean:13d}  {sigma:5.1f}   {gain:+6.1%}   {measured:+8.0%}   {busy}", flush=True)


def table(setup: Setup, devices: list[int], depth: int) -> None:
    """Prints what runs on so many devices come to, each with the same batch, and with a depth of at most `depth`."""
    groups, samples = setup.prompts, setup.lengths_NG.shape[1]
    print(f"{groups} groups of {samples} a step, {setup.lengths_NG.mean():.0f} tokens a sample")
    print("devices  staleness  interrupted  k tokens/s  of sync  trainer busy  engines  mean age  max")
    for count in devices:
        trainers, base = max(1, count // 4), None
        for staleness, interrupt in ((0, True), *itertools.product((1, 2, 4, 8, 16), (True, False))):
            cell = replace(setup, samplers=count - trainers, trainers=trainers, interrupt=interrupt)
            found = simulate(replace(cell, staleness=staleness, depth=min(depth, staleness)))
            base = base or found.rate
            how = "-" if not staleness else "yes" if interrupt else "no"
            print(
                f"{count:7d}  {staleness:9d}  {how:>11s}  {found.rate / 1e3:10.1f}  {found.rate / base:7.2f}  "
                f"{found.training:12.2f}  {found.decoding:7.2f}  {found.mean_age:8.2f}  {found.max_age:3d}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what AReaL measured")
    parser.add_argument("--rollouts", help="output_dir of a run, for its lengths; without: lognormal")
    parser.add_argument(
        "--lengths", type=float, nargs=2, default=(3500, 0.8), help="mean and sigma before the cut at 27,648"
    )
    parser.add_argument("--model", choices=MODELS, default="7B")
    parser.add_argument("--prompts", type=int, default=512, help="groups a step")
    parser.add_argument("--overhead", type=float, default=0.0046, help="seconds of a decoding step; --check finds it")
    parser.add_argument("--depth", type=int, default=16, help="at most; with 16 it is the staleness, as in AReaL")
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 32, 128, 512, 1024])
    args = parser.parse_args()
    if args.check:
        check()
        return
    lengths = stored_lengths(args.rollouts) if args.rollouts else draw_lengths(*args.lengths, 27648, 16)
    table(Setup(MODELS[args.model], lengths, args.prompts, 1, 1, args.overhead, 0, 0), args.devices, args.depth)


if __name__ == "__main__":
    main()
