"""Seeds of groups, and the requests of a group."""

from torchtune_ext.pipeline.source import sampling_seed
from torchtune_ext.sampling.backend import group_seeds


def test_group_seeds_are_stable():
    """A change of these numbers changes the samples of every run."""
    seeds = group_seeds(5, 2, 4)
    assert (seeds[0], seeds[3]) == (3160902694392483888, 200444618565484860)
    assert group_seeds(5, 2, 1) == seeds[:1] and group_seeds(None, 2, 3) == [None] * 3
    assert len({seed for group in range(100) for seed in group_seeds(5, group, 16)}) == 1600


def test_all_bits_of_a_seed_count():
    """No two steps or refills of two runs share seeds."""
    seeds = [0, 5, 2**24, 5 + 2**24, 2**40, 2**63]
    steps = {sampling_seed(seed, step, refill) for seed in seeds for step in range(1, 1001) for refill in range(8)}
    assert len(steps) == len(seeds) * 1000 * 8
    engines = {seed for of_run in seeds for seed in group_seeds(sampling_seed(of_run, 1), 0, 16)}
    assert len(engines) == len(seeds) * 16
