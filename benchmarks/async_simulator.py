"""How fast is a run that samples ahead, how old are the groups that it trains on, and what do routing and failures of engines
cost, on 8 to 1,024 devices?

    python benchmarks/async_simulator.py                      # a table: devices x staleness
    python benchmarks/async_simulator.py --pool               # a table: devices x routing x failures an hour
    python benchmarks/async_simulator.py --rollouts runs/x    # with the lengths that a run has stored
    python benchmarks/async_simulator.py --check              # what AReaL measured beside what this predicts

Discrete events around the ledger of torchtune_ext/buffer.py, which is imported: it decides what is submitted and what is
trained on. The rest is a model of the machines (async_model.py), with these assumptions.

- Engines. A quarter of the devices train, three quarters sample, one engine each (AReaL, App. B), or `--gpus-per-engine`
  together: these read as many times faster, and what they say to each other takes no time. A decoding step of n requests
  takes `overhead + (weights + n * context * KV bytes of a token) / bandwidth` seconds, where `context` is the mean number of
  tokens of a running request. The bandwidth is 0.7 of the data sheet's. As many requests run as fit into 0.8 of the memory
  beside the weights. To compute prompts takes no time, so what a prompt costs that two engines compute is not seen.
- Routing. "least": a group goes to the engine of which the fewest tokens are expected, and what waits moves once another
  one has room, by the rule of the runs. "hash" and "round_robin" look at no load, and nothing moves. "sample": each sample
  goes to the engine that has the fewest; those without a place wait in one queue. That is the table without `--pool`, and
  no run does it.
- Trainer. A token costs 8 FLOPs a parameter (forward and backward, and a forward for the proximal policy). AReaL's own
  Figure 6 says how many each device computes in a second. It does not fail.
- Publication. Interrupted engines load the weights (`--publication` seconds) and compute the contexts of their requests
  again, with 2 FLOPs a parameter at the trainer's rate. Engines that are not interrupted begin nothing new, finish what they
  have, and then load the weights. Either way the trainer goes on.
- Failures. Each engine that serves fails `--failures` times an hour, at random. What it had sampled of unfinished requests
  is lost, and others sample it again from the beginning. `--restart` seconds later it serves again.
- Lengths. Lognormal, cut off at the longest, independent of prompt and version.

What is calibrated: `overhead`, one number, so that the throughput at staleness 0 is AReaL's 27.1 k tokens/s on 8 devices.
Nothing else is fitted, and nothing at all to the other figures. Of pools nothing is: routing, the seconds of a publication and
of a restart, and the failures are assumed, and no run on several GPUs of ours stands behind them.

Where the predictions differ. From staleness 4 on the modelled trainer is busy all the time, so its rate is that of Figure 6,
which AReaL measured in larger runs; a trainer of two devices may well reach less. AReaL does not say how long its samples
are, and the gain by interruption depends on that: it is none where the trainer is the bottleneck. AReaL's figures there must be
of generation alone: with 7B it gives 130 k tokens/s on 32 devices, of which 8 train 54 k at the rate of Figure 6. The rates
of this table are of tokens that are trained on, so these two gains are not predicted yet.
"""

import argparse
import itertools
from dataclasses import replace

import numpy as np
from async_model import ROUTINGS, Model, Pool, Setup, simulate

from torchtune_ext.telemetry.rollouts import read_rollouts, rollout_paths

MODELS = {
    "1.5B": Model(1.54e9, 2 * 28 * 2 * 128 * 2, 427.4e12),
    "7B": Model(7.6e9, 2 * 28 * 4 * 128 * 2, 454.7e12),
    "32B": Model(32.8e9, 2 * 64 * 8 * 128 * 2, 454.7e12),
}


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


def ahead(setup: Setup, devices: list[int], depth: int) -> None:
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


def pools(setup: Setup, devices: list[int], routings: list[str], failures: list[float], steps: int) -> None:
    """Prints what pools on so many devices come to, each with the same batch."""
    groups, samples, pool = setup.prompts, setup.lengths_NG.shape[1], setup.pool
    print(
        f"{groups} groups of {samples} a step, {setup.lengths_NG.mean():.0f} tokens a sample, staleness {setup.staleness}, "
        f"{steps} steps; engines of {pool.gpus}, {pool.publication_s:g} s for a publication, {pool.restart_s:g} s for a restart"
    )
    print(
        "devices  engines  failures/h      routing  k tokens/s  of best  trainer busy  group p90 s  failures  lost work"
    )
    for count in devices:
        trainers = max(1, count // 4)
        base = replace(setup, samplers=count - trainers, trainers=trainers)
        best = simulate(replace(base, pool=replace(pool, routing="sample")), steps).rate
        for hourly, routing in itertools.product(failures, routings):
            cell = replace(base, pool=replace(pool, routing=routing, failures_per_hour=hourly))
            found = simulate(cell, steps)
            print(
                f"{count:7d}  {cell.engines:7d}  {hourly:10g}  {routing:>11s}  {found.rate / 1e3:10.1f}  "
                f"{found.rate / best:7.2f}  {found.training:12.2f}  {found.group_p90_s:11.0f}  {found.failures:8d}  "
                f"{found.lost:9.2%}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what AReaL measured")
    parser.add_argument(
        "--pool", action="store_true", help="routing and failures of the engines, in place of staleness"
    )
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, default=["least", "round_robin", "hash"])
    parser.add_argument("--failures", type=float, nargs="+", default=[0.0, 1.0], help="of an engine in an hour")
    parser.add_argument("--restart", type=float, default=180.0, help="seconds until a lost engine serves again")
    parser.add_argument("--publication", type=float, default=0.5, help="seconds in which an engine takes new weights")
    parser.add_argument("--gpus-per-engine", type=int, default=1)
    parser.add_argument("--staleness", type=int, default=1, help="of --pool")
    parser.add_argument("--steps", type=int, default=24, help="of --pool, the first and last few of them not counted")
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
    pool = Pool(gpus=args.gpus_per_engine, publication_s=args.publication, restart_s=args.restart)
    setup = Setup(MODELS[args.model], lengths, args.prompts, 1, 1, args.overhead, 0, 0, pool=pool)
    if args.pool:
        setup = replace(setup, staleness=args.staleness, depth=args.staleness)
        pools(setup, args.devices, args.routing, args.failures, args.steps)
    else:
        ahead(setup, args.devices, args.depth)


if __name__ == "__main__":
    main()
