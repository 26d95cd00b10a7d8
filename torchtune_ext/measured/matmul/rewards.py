"""Rewards of programs: the published tiers, and two rewards that suit group normalization.

The published reward (arXiv 2602.12049) is the GFLOPS of a correct program, or a fixed penalty per
failure. GRPO divides by the standard deviation of a group. One program of hundreds of GFLOPS makes
it so large that the differences between the others vanish (benchmarks/matmul_rewards.py). The other
two rewards keep the order with even steps.
"""

import math

from torchtune_ext.measured.results import Timing

PUBLISHED_PENALTIES = {
    "format": -100.0,
    "forbidden": -100.0,
    "compile_error": -40.0,
    "timeout": -30.0,
    "runtime_error": -20.0,
    "wrong_result": -10.0,
}
"""The published penalties (arXiv 2602.12049, as quoted in reviews), from the worst to the mildest failure."""

FAILURES = tuple(PUBLISHED_PENALTIES)

# A correct program must rank above every failure, so the slowest one has reward 0. Differences
# below 1/16 of the naive speed do not matter. So a doubling is worth 1/4, one and a half steps
# between failures. With a much smaller value, correctness would dominate speed.
MIN_SPEEDUP = 2.0**-4
REWARD_KINDS = ("published", "log_speedup", "peak_share")


def program_reward(outcome: str, timing: Timing | None = None, kind: str = "log_speedup") -> float | None:
    """Returns the reward of a program, or None for a noisy timing.

    Args:
        outcome: one of `check.OUTCOMES`, or "noisy": correct, but its speed could not be measured.
        timing: the measured speed, required if the outcome is "ok".
        kind: "published": GFLOPS, or a penalty from -100 to -10. "log_speedup": from -1 (format) in
            even steps to -1/6 (wrong result), 0 for 1/16 of the naive speed, 1 for the naive speed,
            and 1/4 more for each doubling. "peak_share": the same failures, or the fraction of the
            roofline, from 0 to about 1.
    """
    # The machine is at fault, not the program: the sample stays out of the baseline.
    if outcome == "noisy":
        return None
    if outcome != "ok":
        return PUBLISHED_PENALTIES[outcome] if kind == "published" else failure_reward(outcome)
    assert timing is not None  # an "ok" program has a timing
    if kind == "log_speedup":
        return max(0.0, 1.0 + math.log2(timing.speedup) / -math.log2(MIN_SPEEDUP))
    return timing.gflops if kind == "published" else timing.roofline_fraction


def failure_reward(outcome: str) -> float:
    """Returns the reward of a failure, in even steps from -1 (the worst) to -1/6."""
    return (FAILURES.index(outcome) - len(FAILURES)) / len(FAILURES)
