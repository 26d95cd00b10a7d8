"""What docs/how_to/measured_programs.md says of the rewards after normalization by group, by the code that training uses."""

import math

import matmul_rewards as figures
import pytest
from matmul_rewards import DISTANCES, FASTEST, NAIVE, SIZE, SLOW, advantages, distance, rewards

*_, RIGHT = DISTANCES


def far(kind, name, fastest=FASTEST):
    worse, better = DISTANCES[name]
    of = rewards(kind, fastest)
    return of[better] - of[worse]


def floor(kind, name, fastest=FASTEST):
    of = rewards(kind, fastest).values()
    return far(kind, name, fastest) / ((max(of) - min(of)) / 2)


@pytest.mark.parametrize("name", DISTANCES)
@pytest.mark.parametrize("fastest", [64.0, FASTEST, 1000.0])
def test_published_distances_vanish_and_the_others_do_not(name, fastest):
    """One of N rewards that lies d above the mean of the others makes a deviation of at least d sqrt(N - 1) / N: what the others
    differ by among themselves only adds to it. And no deviation is larger than half of the range (Popoviciu)."""
    least = (fastest - NAIVE) * math.sqrt(SIZE - 1) / SIZE  # the others are at NAIVE at best
    most = far("published", name) / least
    assert 0 < distance("published", name, fastest) <= most
    for kind in ("log_speedup", "peak_share"):
        assert distance(kind, name, fastest) >= floor(kind, name, fastest)
    # At 549 GFLOPS the bounds alone tell the rewards apart for a right program: 0.09 at most, 0.58 and 0.22 at least.
    if name == RIGHT and fastest == FASTEST:
        assert most < 0.1 < 0.2 < min(floor(kind, name) for kind in ("log_speedup", "peak_share"))


def test_matmul_slow_correct_program_advantage_by_reward_kind():
    """Published, it lies below the mean of its group: all failures together take away less than 549 GFLOPS bring."""
    assert advantages("published", NAIVE)[SLOW] > 0.9
    assert sum(rewards("published", FASTEST)[o] * n for o, n in figures.SHARES.items()) + FASTEST > SIZE * NAIVE
    assert advantages("published", FASTEST)[SLOW] < 0
    assert advantages("log_speedup", FASTEST)[SLOW] > 1 and advantages("peak_share", FASTEST)[SLOW] > 0.5


def test_the_page_has_these_figures(repo_root):
    page = (repo_root / "docs" / "how_to" / "measured_programs.md").read_text(encoding="utf-8")
    words = {"published": "a fifth", "log_speedup": "two thirds", "peak_share": "five sixths"}
    for (kind, word), share in zip(words.items(), (1 / 5, 2 / 3, 5 / 6), strict=True):
        assert word in page
        for name in DISTANCES:
            assert distance(kind, name, FASTEST) / distance(kind, name, NAIVE) == pytest.approx(share, abs=0.03)


def test_tables_and_picture(tmp_path):
    assert len(figures.outcomes_table().splitlines()) == 2 + len(figures.SHARES) + 1
    assert len(figures.distances_table().splitlines()) == 2 + 3 * len(DISTANCES)
    figures.draw(tmp_path / "rewards.png")
    assert (tmp_path / "rewards.png").read_bytes().startswith(b"\x89PNG")
