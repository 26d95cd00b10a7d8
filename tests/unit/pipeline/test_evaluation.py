"""pass@k against enumeration; intervals against their coverage."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from helpers.records import make_sample
from torchtune_ext.grading import Ungraded
from torchtune_ext.pipeline.evaluation import T_95, Z_95, compute_accuracy, confidence_interval, pass_at_k
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.tasks.problem_stream import ProblemStream, problem_index
from torchtune_ext.tasks.task import Problem, Score
from torchtune_ext.telemetry.step_metrics import evaluation_metrics


def group(rewards):
    empty = np.zeros(1, np.int32)
    samples = tuple(
        make_sample(
            empty,
            outcome=Score(r, {}) if r is not None else Ungraded("infra_failed", "x"),
        )
        for r in rewards
    )
    return Group(Problem("p", (), None), empty, samples)


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_equals_fraction_of_successful_subsets(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(float(Fraction(sum(any(s) for s in subsets), len(subsets))))


def test_accuracy_counts_problems_and_leaves_failed_gradings_out():
    result = compute_accuracy([group([1.0, 0.5]), group([None, 0.0]), group([None])], ks=[1, 2])
    assert result.mean == pytest.approx((0.75 + 0.0) / 2)
    assert result.problems == 2 and result.ungraded == 2
    assert result.pass_at == {1: pytest.approx(0.25)}  # k = 2 needs two graded samples of every problem


def test_accuracy_interval_covers_mean_95_percent():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        result = compute_accuracy([group([float(x)]) for x in rng.random(256) < 0.3])
        covered += result.low <= 0.3 <= result.high
    # binomial(400, 0.95): mean 380, standard deviation 4.4; four of them
    assert 362 <= covered <= 398


@pytest.mark.parametrize(
    "right, ends", [(0, (0.0, 0.2775)), (1, (0.0179, 0.4042)), (5, (0.2366, 0.7634)), (10, (0.7225, 1.0))]
)
def test_interval_of_few_problems_is_wilsons(right, ends):
    """The expected ends come from a table of Wilson's interval for n = 10."""
    result = compute_accuracy([group([1.0])] * right + [group([0.0])] * (10 - right))
    assert (result.low, result.high) == pytest.approx(ends, abs=1e-4)


def test_accuracy_interval_uses_variance_between_problems():
    """Partial rewards give a narrower interval than right or wrong answers; other rewards are unbounded."""
    narrow, wide = (
        compute_accuracy([group([0.4]), group([0.6])] * 20),
        compute_accuracy([group([0.0]), group([1.0])] * 20),
    )
    assert (
        narrow.mean == wide.mean and pytest.approx((narrow.high - narrow.low) / (wide.high - wide.low), abs=0.02) == 0.2
    )
    beyond = compute_accuracy([group([2.0]), group([-1.0])] * 20)
    assert beyond.high - beyond.low == pytest.approx(2 * 1.96 * 1.5 / 39**0.5)
    single = compute_accuracy([group([3.0])])
    assert single.low == single.mean == single.high == 3.0


DRAWS = {
    "eighths": (lambda rng, n: rng.binomial(8, rng.beta(1, 1, n)) / 8, 0.5),
    "shares": (lambda rng, n: rng.beta(5, 5, n), 0.5),
    "unbounded": (lambda rng, n: rng.normal(3.0, 2.0, n), 3.0),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_interval_of_few_problems_covers_the_mean(kind):
    """Also for few problems; with 1.96 the coverage is 0.70 for 2 problems, and 0.88 to 0.90 for 5."""
    draw, mean = DRAWS[kind]
    for count in (2, 3, 5, 12, 30):
        rng = np.random.default_rng(count)
        ends = np.array([confidence_interval(draw(rng, count)) for _ in range(500)])
        # binomial(500, 0.95): mean 475, standard deviation 4.9; four of them
        assert ((ends[:, 0] <= mean) & (mean <= ends[:, 1])).sum() >= 455, count


def test_student_quantiles_match_the_tables():
    # P(|t| <= 12.706) of one degree of freedom is 2/pi atan(12.706); of two, t / sqrt(2 + t^2).
    assert 2 / math.pi * math.atan(T_95[0]) == pytest.approx(0.95, abs=1e-5)
    assert T_95[1] / math.sqrt(2 + T_95[1] ** 2) == pytest.approx(0.95, abs=1e-5)
    assert len(T_95) == 29 and list(T_95) == sorted(T_95, reverse=True) and T_95[28] == 2.045 > Z_95


def test_accuracy_with_ungraded_samples_warns(caplog):
    """Ungraded samples are excluded, which raises the accuracy, here to 1."""
    hung = replace(group([0.0]).samples[0], outcome=Score(0.0, {"timed_out": 1.0}, "no answer within 10 s"))
    assert compute_accuracy([group([1.0])] + [replace(group([0.0]), samples=(hung,))] * 9).mean == pytest.approx(0.1)
    compute_accuracy([group([1.0])] * 99 + [group([None])])
    assert caplog.text == ""
    assert compute_accuracy([group([1.0])] + [group([None])] * 9).ungraded == 9
    assert "the accuracy excludes 9 of 10 samples" in caplog.text


def test_accuracy_without_graded_samples_raises():
    with pytest.raises(ValueError, match="none of 1 samples"):
        compute_accuracy([group([None])])


def test_evaluation_grader_failure_skips_metrics_and_continues(caplog):
    assert evaluation_metrics([group([1.0])], [group([1.0])], first=False)["eval/reward_sampled"] == 1.0
    assert evaluation_metrics([group([1.0])], [group([None])], first=False) == {}
    assert "evaluation: skipped in this step: none of 1 samples could be graded" in caplog.text
    with pytest.raises(ValueError, match="none of 1 samples"):
        evaluation_metrics([group([None])], [group([1.0])])


def test_problem_index_permutes_each_epoch_by_seed():
    first = [problem_index(i, 10, 0) for i in range(10)]
    second = [problem_index(i, 10, 0) for i in range(10, 20)]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first != [problem_index(i, 10, 1) for i in range(10)]
    assert problem_index(12, 1 << 30, 0) == 12


class Counting:
    def __init__(self, length):
        self.length, self.indices = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.indices.append(index)
        return Problem(str(index), (), index)


@pytest.mark.parametrize("length", [10, 1 << 30])
def test_problem_stream_order_is_independent_of_batch_sizes(length):
    task = Counting(length)
    stream = ProblemStream(task, seed=3)
    problems = stream.next_problems(4) + stream.next_problems(4) + stream.next_problems(2) + stream.next_problems(7)
    assert [problem.answer for problem in problems] == [
        problem_index(i, length, 3) for i in range(17)
    ] and stream.cursor == 17
    again = ProblemStream(task, seed=3)
    again.cursor = 8
    assert again.next_problems(9) == problems[8:]
