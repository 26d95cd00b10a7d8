"""What a program is worth: the published tiers, and a reward that survives normalization by group.

The published reward (arXiv 2602.12049) is the measured GFLOPS of a program that is right, and a fixed penalty by kind of
failure. GRPO divides what a sample is above its group's mean by the deviation of the group. One program of hundreds of
GFLOPS makes that deviation so large that little is left of the distances between the others: the model is hardly told any
more that a wrong number is nearer to a right one than text that does not compile (benchmarks/matmul_rewards.py). The other
two kinds keep the order of outcomes and of speeds with distances of one size: failures lie evenly between -1 and 0, a
success is the logarithm of its speed-up over the naive program, or its share of the measured peak.
"""

import math

from torchtune_ext.measured.results import Timing

PUBLISHED = {
    "format": -100.0,
    "forbidden": -100.0,
    "compile_error": -40.0,
    "timeout": -30.0,
    "runtime_error": -20.0,
    "wrong_result": -10.0,
}
"""The published penalties (arXiv 2602.12049, as reviews quote them), from the worst to what is nearest to a right program."""

FAILURES = tuple(PUBLISHED)

# What is slower than the naive program still is right, and must stay above every failure: the worst success has 0. Programs
# down to a 16th of the naive speed are told apart; slower ones are of no use to anybody. So a doubling is worth 1/4, one step
# and a half of those between failures: with much less, being right would drown being fast.
SLOWEST = 2.0**-4
KINDS = ("published", "log_speedup", "peak_share")


def reward(outcome: str, timing: Timing | None = None, kind: str = "log_speedup") -> float | None:
    """Returns the reward of a program, or None if it is not to be graded.

    Args:
        outcome: what the checker says, one of `check.OUTCOMES`, or "noisy": right, but no figure of its speed can be believed.
            That is the machine's fault, so the sample is not graded and stays out of the baseline of its group.
        timing: its speed; needed if the outcome is "ok".
        kind: "published": GFLOPS, or a penalty from -100 to -10. "log_speedup": from -1 (format) in even steps to -1/6
            (wrong result), 0 for 1/16 of the naive speed, 1 for the naive speed, and 1/4 more for each doubling.
            "peak_share": the same failures, and the share of the peak, from 0 to about 1.
    """
    if outcome == "noisy":
        return None
    if outcome != "ok":
        return PUBLISHED[outcome] if kind == "published" else failure(outcome)
    if kind == "published":
        return timing.gflops
    if kind == "peak_share":
        return timing.peak_share
    return max(0.0, 1.0 + math.log2(timing.ratio) / -math.log2(SLOWEST))


def failure(outcome: str) -> float:
    """Returns the reward of a failure: even steps from -1, the worst, to -1/6."""
    return (FAILURES.index(outcome) - len(FAILURES)) / len(FAILURES)
