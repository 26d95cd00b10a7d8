"""benchmarks/async_model.py, the model of scale: runs of two engines that are computed by hand, and what must hold of any."""

from dataclasses import replace

import numpy as np
import pytest
from async_model import Model, Pool, Setup, Simulation, simulate

# One engine decodes a token of each request in a second, and the trainer takes a second for a token: reading weights and keys
# takes a millionth of that.
SECONDS = Model(parameters=1e6, kv_bytes=1.0, flops=8e6)
CLOSE = 1e-4


def setup(lengths, pool, engines=2, places=1, staleness=0):
    return Setup(
        model=SECONDS,
        lengths_NG=np.array(lengths),
        prompts=len(lengths),
        samplers=engines * pool.gpus,
        trainers=1,
        overhead=1.0,
        staleness=staleness,
        depth=staleness,
        prompt_tokens=0,
        max_requests=places,
        pool=pool,
    )


def run(case, steps=13):
    """A simulation that has run, and what it comes to."""
    simulation = Simulation(case, steps)
    return simulation, simulation.run()


@pytest.mark.parametrize(("routing", "sampling_s"), [("least", 9), ("sample", 9), ("round_robin", 14)])
def test_four_groups_on_two_engines_by_hand(routing, sampling_s):
    """Groups of one sample with 9, 1, 5 and 2 tokens; an engine holds one request.

    round_robin: engine 0 does 9 and then 5 tokens, engine 1 does 1 and 2: 14 s.
    least: they are dealt alike, but engine 1 has nothing to do after 3 s, and takes the 5 tokens that wait: it ends at 8 s, the
        other one at 9 s.
    sample: they wait in one queue, so engine 1 takes the 5 tokens after 1 s and the 2 after 6 s, and ends at 8 s, the other one
        at 9 s.

    Then the trainer takes 17 s for 17 tokens, and the engines half a second for the weights.
    """
    simulation, found = run(setup([[9], [1], [5], [2]], Pool(routing)))
    step_s = sampling_s + 17 + 0.5
    assert found.rate == pytest.approx(17 / step_s, rel=CLOSE)
    assert found.training == pytest.approx(17 / step_s, rel=CLOSE)
    ends = [end for end, _, _ in simulation.ends]
    assert ends == pytest.approx([sampling_s + 17 + step_s * i for i in range(13)], rel=CLOSE)
    times = {"round_robin": [1, 3, 9, 14], "least": [1, 3, 8, 9], "sample": [1, 6, 8, 9]}[routing]
    assert sorted(simulation.group_s[:4]) == pytest.approx(times, rel=CLOSE)
    assert (found.failures, found.lost, found.max_age) == (0, 0.0, 0)


def test_a_group_that_has_begun_moves_only_when_the_loads_are_far_apart():
    """Engine 0 gets a group of 2 and 4 tokens, engine 1 one of 1 and 1, and what waits of the first one has begun there.

    Engine 1 is idle after 2 s. 4 tokens wait then, of a share of 2 as every sample: with the move the load of engine 1 is 2, and
    that of engine 0 is one running request and one that waits, 4, so it is not far from 2 x 2. It stays: 6 s.
    """
    _, stays = run(setup([[2, 4], [1, 1]], Pool("least")))
    assert stays.rate == pytest.approx(8 / (6 + 8 + 0.5), rel=CLOSE)
    # With two places nothing waits.
    _, free = run(setup([[2, 4], [1, 1]], Pool("least"), places=2))
    assert free.rate == pytest.approx(8 / (4 + 8 + 0.5), rel=CLOSE)


def test_a_failure_by_hand():
    """Groups of one sample with 10 and 6 tokens, an engine each, and engine 0 dies after 4 s, for 5 s.

    4 tokens are lost. The sample begins anew on engine 1, beside the other one, and ends at 14 s. The trainer takes 16 s, until
    30 s, and the engines half a second for the weights. The second step is whole again: 10 s and 16 s.
    """
    pool = Pool("least", restart_s=5.0, failures=((4.0, 0),))
    simulation, found = run(setup([[10], [6]], pool, places=4))
    assert [end for end, _, _ in simulation.ends][:3] == pytest.approx([30, 56.5, 83], rel=CLOSE)
    assert found.failures == 1 and simulation.lost == pytest.approx(4, rel=CLOSE)
    assert found.lost == pytest.approx(4 / (4 + 13 * 16), rel=CLOSE)


@pytest.mark.parametrize("routing", ["least", "hash", "round_robin", "sample"])
def test_the_last_engine_comes_back_and_goes_on(routing):
    """One engine, dead from 3 to 23 s: 10 tokens are sampled from 23 to 33 s, with 3 tokens lost."""
    pool = Pool(routing, restart_s=20.0, failures=((3.0, 0), (4.0, 0)))
    simulation, found = run(setup([[10]], pool, engines=1))
    assert simulation.ends[0][0] == pytest.approx(33 + 10, rel=CLOSE)
    assert found.failures == 1 and simulation.lost == pytest.approx(3, rel=CLOSE)


def test_the_seconds_of_a_publication_and_of_engines_of_two_devices_count():
    slow, fast = (run(setup([[4], [4]], Pool("least", publication_s=s)))[1] for s in (10.0, 0.0))
    assert slow.rate == pytest.approx(8 / (4 + 8 + 10), rel=CLOSE) and fast.rate == pytest.approx(8 / 12, rel=CLOSE)
    pairs = setup([[4], [4]], Pool("least", gpus=2))
    assert pairs.engines == 2 and pairs.samplers == 4
    # With a weight of 2 bytes a parameter, what is not overhead takes half the time.
    alone = replace(pairs, pool=Pool("least"))
    assert alone.step_s(0) - 1 == pytest.approx(2 * (pairs.step_s(0) - 1))


def lognormal(groups, samples):
    drawn = np.random.default_rng(0).lognormal(3.0, 1.0, (groups, samples))
    return np.clip(drawn, 1, 400).astype(int)


@pytest.mark.parametrize("staleness", [0, 1])
def test_nobody_is_faster_than_the_trainer_and_what_moves_is_faster_than_what_does_not(staleness):
    case = replace(setup(lognormal(48, 4), Pool(), engines=6, places=4, staleness=staleness), trainers=40)
    found = {
        routing: simulate(replace(case, pool=Pool(routing))) for routing in ("least", "hash", "round_robin", "sample")
    }
    assert all(result.training <= 1 and result.max_age <= staleness for result in found.values())
    assert found["least"].rate > max(found["hash"].rate, found["round_robin"].rate)
    if not staleness:
        # Of what was submitted at once, no queue is shorter than the one that all share, but for one sample.
        assert found["sample"].rate > 0.95 * found["least"].rate
        assert found["least"].group_p90_s < min(found["hash"].group_p90_s, found["round_robin"].group_p90_s)


@pytest.mark.parametrize("routing", ["least", "hash", "round_robin", "sample"])
def test_failures_cost_work_and_lose_no_group(routing):
    """Every group is finished, whatever fails, and as many engines are lost as their rate says."""
    case = setup(lognormal(48, 4), Pool(routing, failures_per_hour=2.0, restart_s=60.0), engines=6, places=4)
    simulation, found = run(case, steps=20)
    assert len(simulation.ends) == 20 and simulation.sampled == 20 * case.lengths_NG.sum()
    # Six engines for so many hours: a Poisson number, of which five deviations are allowed. While one is down it cannot fail.
    hours = simulation.now / 3600
    expected = 6 * 2.0 * hours * (1 - 60 / (60 + 1800))
    assert abs(found.failures - expected) < 5 * expected**0.5 and found.failures > 0
    assert 0 < found.lost < 0.2
    calm = simulate(replace(case, pool=Pool(routing)), 20)
    assert calm.lost == 0 and found.rate < calm.rate


def test_an_unknown_routing_is_refused():
    with pytest.raises(ValueError, match="--routing best: use one of sample, least, hash, round_robin"):
        Pool("best")
