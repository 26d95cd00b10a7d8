"""Groups on their way to the engine: their seeds, and what one of them shares with the others."""

from torchtune_ext.sampling.calls import group_seeds


def test_the_seeds_of_a_group_are_those_that_it_always_had():
    """Whoever changes one of these numbers changes what every run samples."""
    seeds = group_seeds(5, 2, 4)
    assert (seeds[0], seeds[3]) == (3160902694392483888, 200444618565484860)
    assert group_seeds(5, 2, 1) == seeds[:1] and group_seeds(None, 2, 3) == [None] * 3
    assert len({seed for group in range(100) for seed in group_seeds(5, group, 16)}) == 1600
