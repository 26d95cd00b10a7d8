"""Verification: its bounds against exact arithmetic, its inputs, and what it refuses."""

import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_ext.measured.child import CallResult, ChildFailed, arena_size
from torchtune_ext.measured.kernel import UNIT_ROUNDOFF, Arrays, Size, gamma
from torchtune_ext.measured.kernels import KERNELS, Dgemm, Reduction
from torchtune_ext.measured.verify import (
    INPUT_KINDS,
    MAX_EXACT_WORK,
    SMALL_DIMENSIONS,
    compute_expected,
    draw_array,
    draw_inputs,
    draw_sizes,
    estimate_work,
    find_wrong_output,
    perturb_one,
    verify,
)

NAMES = sorted(KERNELS)
SEEDS = st.integers(0, 2**32)
# long double has more digits than double, so that a difference of a few units in the last place can be told.
precise = pytest.mark.skipif(np.finfo(np.longdouble).eps >= 2.0**-60, reason="long double is no wider than double here")


def numbers(array: np.ndarray) -> list[Fraction]:
    return [Fraction(float(value)) for value in array.ravel()]


def exact_terms(name: str, size: Size, inputs: Arrays) -> list[list[tuple[Fraction, Fraction]]]:
    """For each output number the exact pairs whose products it is the sum of."""
    one = Fraction(1)
    if name == "dgemm":
        a, b = inputs["A"], inputs["B"]
        pairs = [(a[i], b[:, j]) for i in range(size["m"]) for j in range(size["n"])]
        return [list(zip(numbers(row), numbers(column), strict=True)) for row, column in pairs]
    if name == "gemv":
        return [list(zip(numbers(row), numbers(inputs["x"]), strict=True)) for row in inputs["A"]]
    if name == "reduction":
        return [[(value, one) for value in numbers(inputs["x"])]]
    u, (h, w) = inputs["u"], inputs["u"].shape
    terms = []
    for i in range(h):
        for j in range(w):
            if i in (0, h - 1) or j in (0, w - 1):
                terms.append([(Fraction(float(u[i, j])), one)])
            else:
                sides = [
                    (Fraction(float(v)), Fraction(1, 8)) for v in (u[i - 1, j], u[i + 1, j], u[i, j - 1], u[i, j + 1])
                ]
                terms.append([(Fraction(float(u[i, j])), Fraction(1, 2)), *sides])
    return terms


def rounded(value: Fraction) -> float:
    """The nearest double, as IEEE 754 rounds: Python divides integers exactly."""
    return value.numerator / value.denominator


def honest(pairs: list[tuple[Fraction, Fraction]], order: str, rng: np.random.Generator) -> float:
    """Sums products in float64: in one of the orders in which programs do it, with and without fused multiply-add."""
    if order == "shuffled":
        pairs = [pairs[i] for i in rng.permutation(len(pairs))]
    if order == "fused":
        total = 0.0
        for a, b in reversed(pairs):
            total = rounded(a * b + Fraction(total))
        return total
    products = [rounded(a * b) for a, b in pairs]
    if order == "lanes":  # as vectors do: four sums side by side
        products = [sum(products[lane::4]) for lane in range(4)]
    if order == "pairwise":
        while len(products) > 1:
            products = [sum(products[i : i + 2]) for i in range(0, len(products), 2)]
    return float(sum(products[1:], products[0]))


def small_case(name: str, seed: int, kind: str) -> tuple[object, dict[str, int], dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    kernel = KERNELS[name]()
    top = 60 if name == "reduction" else 6
    size = {key: int(rng.integers(1, top + 1)) for key in kernel.size_names}
    return kernel, size, draw_inputs(kernel, size, kind, rng)


@pytest.mark.parametrize("order", ["forward", "shuffled", "fused", "lanes", "pairwise"])
@pytest.mark.parametrize("name", NAMES)
@given(seed=SEEDS, kind=st.sampled_from(INPUT_KINDS))
@settings(max_examples=15)
def test_verify_honest_summation_orders_stay_within_bound(name, order, seed, kind):
    kernel, size, inputs = small_case(name, seed, kind)
    rng = np.random.default_rng(seed)
    terms = exact_terms(name, size, inputs)
    (output, bound), *_ = kernel.bound(size, inputs).items()
    results = np.array([honest(pairs, order, rng) for pairs in terms]).reshape(bound.shape)
    for pairs, result, allowed in zip(terms, results.ravel(), bound.ravel(), strict=True):
        exact = sum(a * b for a, b in pairs)
        # The bound is itself computed in float64, by fewer than 100 roundings.
        assert abs(Fraction(float(result)) - exact) <= Fraction(float(allowed)) * (1 + 100 * Fraction(UNIT_ROUNDOFF))
    assert not find_wrong_output(kernel, compute_expected(kernel, size, inputs), {output: results})


@precise
@pytest.mark.parametrize("name", NAMES)
@given(seed=SEEDS, sign=st.sampled_from([-1, 1]))
@settings(max_examples=40)
def test_verify_four_ulps_beyond_bound_are_refused(name, seed, sign):
    """All products are positive here, so that the bound is n roundings of the result itself."""
    kernel, size, inputs = small_case(name, seed, "biased")
    terms = exact_terms(name, size, inputs)
    (output, bound), *_ = kernel.bound(size, inputs).items()
    exact = np.array([rounded(sum(a * b for a, b in pairs)) for pairs in terms]).reshape(bound.shape)
    assert not find_wrong_output(kernel, compute_expected(kernel, size, inputs), {output: exact})
    place = np.unravel_index(np.random.default_rng(seed).integers(exact.size), exact.shape)
    wrong = exact.copy()
    wrong[place] = exact[place] + sign * (bound[place] + 4 * np.spacing(exact[place]))
    words = find_wrong_output(kernel, compute_expected(kernel, size, inputs), {output: wrong})
    where, got, right = re.match(r"(\w+)\[.*\] is (\S+) and should be ([^\s,]+)", words).groups()
    assert where == output
    assert float(got) == wrong[place] and float(right) == pytest.approx(exact[place], rel=1e-15)


def test_verify_bound_scales_with_length_and_values():
    """It grows with the length of the sum, and shrinks with the numbers."""
    kernel = Reduction()
    bounds = [kernel.bound({"n": n}, {"x": np.full(n, 1e-3)})["total"][0] for n in (10, 1000)]
    assert bounds[0] == pytest.approx(9 * UNIT_ROUNDOFF * 1e-2) and bounds[1] == pytest.approx(999 * UNIT_ROUNDOFF)
    assert kernel.bound({"n": 1}, {"x": np.ones(1)})["total"][0] == 0
    assert gamma(1) > UNIT_ROUNDOFF


# ---------------------------------------------------------------- lower precision


def test_verify_biased_inputs_reveal_single_precision():
    """The sum of two million numbers that were rounded to float32: within γ_n where errors cancel."""
    kernel = Reduction()
    rng = np.random.default_rng(0)
    ok = {}
    for kind in ("normal", "biased"):
        inputs = draw_inputs(kernel, kernel.timed, kind, rng)
        total = inputs["x"].astype(np.float32).astype(np.float64).sum(keepdims=True)
        ok[kind] = not find_wrong_output(kernel, compute_expected(kernel, kernel.timed, inputs), {"total": total})
    assert ok == {"normal": True, "biased": False}


@pytest.mark.parametrize("name", NAMES)
def test_single_precision_is_refused_at_the_timed_size(name):
    kernel = KERNELS[name]()
    inputs = draw_inputs(kernel, kernel.timed, "biased", np.random.default_rng(1))
    singles = {key: value.astype(np.float32).astype(np.float64) for key, value in inputs.items()}
    expected = compute_expected(kernel, kernel.timed, inputs)
    assert not find_wrong_output(kernel, expected, kernel.reference(kernel.timed, inputs))
    words = find_wrong_output(kernel, expected, kernel.reference(kernel.timed, singles))
    factor = re.search(r", (\S+) times the allowed error$", words)
    # The sum has no factor: its numbers add up exactly, so no error is allowed.
    assert words and (factor is None or float(factor[1]) > 10)


@given(SEEDS)
@settings(max_examples=20)
def test_biased_inputs_round_down_in_single_precision(seed):
    values = draw_array((50,), "biased", np.random.default_rng(seed))
    assert ((values >= 1) & (values < 2)).all()
    lost = values - values.astype(np.float32).astype(np.float64)
    assert (lost >= 2.0**-30).all() and (lost < 2.0**-24).all()
    assert np.mean(draw_array((20_000,), "biased", np.random.default_rng(seed)) * 2**22 % 1) > 0.12


# ---------------------------------------------------------------- what is no number


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", NAMES)
def test_verify_non_numbers_never_pass(name, bad):
    kernel, size, inputs = small_case(name, 3, "normal")
    outputs = kernel.reference(size, inputs)
    (output,) = outputs
    outputs[output].flat[-1] = bad
    words = find_wrong_output(kernel, compute_expected(kernel, size, inputs), outputs)
    assert ("is NaN" if np.isnan(bad) else f"is {bad} and") in words and "times" not in words


@pytest.mark.parametrize("name", NAMES)
def test_flushed_denormals_are_refused(name):
    kernel, size, inputs = small_case(name, 5, "denormal")
    assert not find_wrong_output(kernel, compute_expected(kernel, size, inputs), kernel.reference(size, inputs))
    flushed = {key: np.where(np.abs(value) < 2.0**-1022, 0.0, value) for key, value in inputs.items()}
    assert find_wrong_output(kernel, compute_expected(kernel, size, inputs), kernel.reference(size, flushed))


# ---------------------------------------------------------------- what is drawn


@pytest.mark.parametrize("name", NAMES)
@given(seed=SEEDS)
@settings(max_examples=20)
def test_sizes_fit_and_cover_the_edges(name, seed):
    kernel = KERNELS[name]()
    drawn = list(draw_sizes(kernel, np.random.default_rng(seed)))
    assert drawn[0] == dict.fromkeys(kernel.size_names, 1) and drawn[-1] == dict(kernel.timed)
    for size in drawn:
        assert list(size) == list(kernel.size_names)
        assert all(1 <= value <= kernel.timed[key] for key, value in size.items())
    assert all(value in SMALL_DIMENSIONS for size in drawn[1:5] for value in size.values())
    assert all(estimate_work(kernel, size) <= MAX_EXACT_WORK for size in drawn[:-1])


def test_sizes_cannot_be_foreseen():
    drawn = {str(list(draw_sizes(Dgemm(), np.random.default_rng(seed)))) for seed in range(20)}
    assert len(drawn) == 20


@pytest.mark.parametrize("kind", INPUT_KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_no_kind_of_inputs_overflows(name, kind):
    kernel, size, inputs = small_case(name, 11, kind)
    for value in kernel.reference(size, inputs).values():
        assert np.isfinite(value).all()
    if kind == "denormal":
        assert sum((np.abs(value) < 2.0**-1022).all() for value in inputs.values()) == 1
        assert all((value != 0).all() for value in inputs.values())


@given(SEEDS, st.sampled_from(NAMES), st.sampled_from(INPUT_KINDS))
@settings(max_examples=40)
def test_one_number_is_changed(seed, name, kind):
    _kernel, _size, inputs = small_case(name, seed, kind)
    changed = perturb_one(inputs, np.random.default_rng(seed))
    assert sum(int((changed[key] != inputs[key]).sum()) for key in inputs) == 1


# ---------------------------------------------------------------- the calls


class Program:
    """Stands for a child: calls a function of Python."""

    def __init__(self, kernel, function):
        self.kernel, self.function, self.arena_bytes = kernel, function, arena_size(kernel, kernel.timed)
        self.calls, self.places = [], ()

    def map_arrays(self, places):
        self.places = places

    def call(self, size, inputs, deadline_s):
        self.calls.append((dict(size), tuple(place.start for place in self.places), inputs, deadline_s))
        return CallResult(1e-3, 1e-3, 0.0, self.function(size, inputs))


@pytest.mark.parametrize("name", NAMES)
def test_verify_sizes_use_new_content_and_placement(name):
    kernel = KERNELS[name]()
    program = Program(kernel, kernel.reference)
    verify(program, kernel, np.random.default_rng(2), 60.0)
    assert len(program.calls) % 3 == 0
    for number in range(0, len(program.calls), 3):
        (size, place, first, _), (size2, place2, second, _), (size3, place3, third, _) = program.calls[
            number : number + 3
        ]
        assert size == size2 == size3 and place == place2 != place3
        assert any((first[key] != second[key]).any() for key in first)
        # The first once more: the newest result that lies around is another one.
        assert all((first[key] == third[key]).all() for key in first)
    timed = [call for call in program.calls if call[0] == dict(kernel.timed)]
    assert len(timed) == 3 and all(((value >= 1) & (value < 2)).all() for value in timed[0][2].values())
    left = [call[3] for call in program.calls]
    assert left == sorted(left, reverse=True) and left[0] <= 60


def remembers(key):
    """An answer that is kept by `key(size, inputs)`."""

    def make(kernel):
        known = {}

        def function(size, inputs):
            word = key(size, inputs)
            if word not in known:
                known[word] = kernel.reference(size, inputs)
            return known[word]

        return function

    return make


CHEATS = {
    "by size": remembers(lambda size, inputs: str(size)),
    "by a few numbers": remembers(lambda size, inputs: str([(v.shape, v.flat[0]) for v in inputs.values()])),
    "by a rounded sum": remembers(lambda size, inputs: str([(v.shape, round(v.sum(), -3)) for v in inputs.values()])),
    "zeros": lambda kernel: lambda size, inputs: {k: 0 * v for k, v in kernel.reference(size, inputs).items()},
    "small sizes only": lambda kernel: (
        lambda size, inputs: {
            k: v if estimate_work(kernel, size) < 1000 else v * (1 + 1e-6)
            for k, v in kernel.reference(size, inputs).items()
        }
    ),
}


@pytest.mark.parametrize("cheat", CHEATS)
@pytest.mark.parametrize("name", NAMES)
def test_verify_fake_computation_is_wrong_result(name, cheat):
    kernel = KERNELS[name]()
    for seed in range(5):
        with pytest.raises(ChildFailed) as caught:
            verify(Program(kernel, CHEATS[cheat](kernel)), kernel, np.random.default_rng(seed), 60.0)
        assert caught.value.outcome == "wrong_result"
        assert "inputs)" in str(caught.value)


def test_verify_enforces_its_deadline():
    kernel = Reduction()
    with pytest.raises(ChildFailed, match="more than 0 s") as caught:
        verify(Program(kernel, kernel.reference), kernel, np.random.default_rng(0), 0.0)
    assert caught.value.outcome == "timeout"
