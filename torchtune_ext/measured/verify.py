"""Verify a compiled candidate on random sizes and inputs that were unknown at compile time."""

import math
from collections.abc import Iterator

import numpy as np

from torchtune_ext.measured.child import Child, ChildFailed, lay_out
from torchtune_ext.measured.kernel import UNIT_ROUNDOFF, Arrays, Kernel, Size, input_parameters, output_parameters

INPUT_KINDS = ("normal", "biased", "wide", "denormal")
MAX_EXACT_WORK = 1 << 20  # elements + operations up to which the reference is computed in long double
MAX_DRAWN_WORK = 1 << 16  # limit of elements + operations of a random size, which is called many times
MAX_EXPONENT = 250  # limit of the binary exponents of "wide" inputs: products neither overflow nor underflow
# The dimensions are mostly odd or prime, around vector widths.
SMALL_DIMENSIONS = (1, 2, 3, 5, 7, 8, 9, 11, 13, 15, 16, 17, 19, 23, 29, 31, 33)
_LONG_ROUNDOFF = float(np.finfo(np.longdouble).eps) / 2


def draw_array(shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> np.ndarray:
    """Draws the content of one array."""
    # Rounding errors of random signs cancel: a float32 sum of two million numbers can be within the
    # bound γ_n. So "biased" draws positive numbers k 2^-22 + j 2^-30 in [1, 2) with 0 < j < 64,
    # which float32 rounds down to k 2^-22. The mean of j is at least 32, so the losses add up to
    # 2^-26 of the result or more: above γ_n for every n below 2^27. That mean differs between
    # calls, so a program cannot add a constant for it. A program could estimate the mean from a few
    # thousand numbers, within γ_n of a long sum. But doubles add such numbers without rounding, so
    # the bound of `Reduction` is 0 for them.
    if kind == "biased":
        low = rng.integers(rng.integers(1, 48), 64, shape, np.uint8) * 2.0**-30
        return rng.integers(1 << 22, 1 << 23, shape, np.uint32) * 2.0**-22 + low
    # float32 cannot represent these exponents.
    if kind == "wide":
        return np.ldexp(
            rng.uniform(1, 2, shape) * rng.choice([-1.0, 1.0], shape), rng.integers(-MAX_EXPONENT, MAX_EXPONENT, shape)
        )
    # Programs that flush denormal numbers to zero fail here.
    if kind == "denormal":
        return np.ldexp(rng.integers(1, 1 << 52, shape).astype(np.float64), -1074) * rng.choice([-1.0, 1.0], shape)
    return rng.standard_normal(shape)


def draw_inputs(kernel: Kernel, size: Size, kind: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draws all inputs."""
    shapes, parameters = kernel.shapes(size), input_parameters(kernel)
    # The product of two denormal numbers is 0, so one array is "denormal", the others "biased".
    chosen = parameters[rng.integers(len(parameters))].name
    kinds = {p.name: "biased" if kind == "denormal" and p.name != chosen else kind for p in parameters}
    return {p.name: draw_array(shapes[p.name], kinds[p.name], rng) for p in parameters}


def perturb_one(inputs: Arrays, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns the inputs with one element of one array multiplied by -0.5."""
    changed = dict(inputs)
    name = list(inputs)[rng.integers(len(inputs))]
    changed[name] = inputs[name].copy()
    place = rng.integers(changed[name].size)
    changed[name].flat[place] = changed[name].flat[place] * -0.5
    return changed


def draw_size(kernel: Kernel, rng: np.random.Generator, small: bool) -> dict[str, int]:
    """Draws a size that is cheap to compute exactly, at most the timed size in every dimension."""
    while True:
        size = {}
        for name in kernel.size_names:
            top = kernel.timed[name]
            # The logarithm is uniform, so that all magnitudes are equally likely.
            drawn = rng.choice(SMALL_DIMENSIONS) if small else math.exp(rng.uniform(0, math.log(top + 1)))
            size[name] = max(1, min(top, int(drawn)))
        if estimate_work(kernel, size) <= MAX_DRAWN_WORK:
            return size


def estimate_work(kernel: Kernel, size: Size) -> int:
    """Returns the approximate cost of a reference of this size: operations + array elements."""
    return kernel.operations(size) + sum(math.prod(shape) for shape in kernel.shapes(size).values())


def draw_sizes(kernel: Kernel, rng: np.random.Generator) -> Iterator[dict[str, int]]:
    """Yields the sizes of one verification: all ones, 4 small, 3 random, and the timed size."""
    yield dict.fromkeys(kernel.size_names, 1)
    for _ in range(4):
        yield draw_size(kernel, rng, small=True)
    for _ in range(3):
        yield draw_size(kernel, rng, small=False)
    yield dict(kernel.timed)


def compute_expected(kernel: Kernel, size: Size, inputs: Arrays) -> tuple[Arrays, Arrays]:
    """Computes the reference outputs, and the allowed error of each element."""
    exact = estimate_work(kernel, size) <= MAX_EXACT_WORK
    kind = np.longdouble if exact else np.float64
    precise = {name: np.asarray(value, kind) for name, value in inputs.items()}
    # `bound` holds for a float64 result in any order of operations: γ_n times the sum of absolute
    # values, where γ_n = n u / (1 - n u) and u = 2^-53. The reference has its own error. In long
    # double, its roundings are u_long / u as large (x87: 2^-11, quadruple precision: 2^-60), so it
    # lies within bound * u_long / u of the exact result. The factor 2 leaves the same margin again
    # for the roundings of the bound and of the comparison. A float64 reference may be as inaccurate
    # as the candidate, hence twice the bound.
    slack = (1 if exact else 2) * (1 + 2 * _LONG_ROUNDOFF / UNIT_ROUNDOFF)
    references, bounds = kernel.reference(size, precise), kernel.bound(size, precise)
    with np.errstate(all="ignore"):
        return references, {name: np.multiply(bound, slack, out=bound) for name, bound in bounds.items()}


def find_wrong_output(kernel: Kernel, expected: tuple[Arrays, Arrays], outputs: Arrays) -> str:
    """Compares outputs with the values of `compute_expected`, element by element.

    Returns:
        A description of the element with the largest relative error, or "" if all are right.
    """
    references, bounds = expected
    for parameter in output_parameters(kernel):
        output, reference, allowed = (arrays[parameter.name] for arrays in (outputs, references, bounds))
        with np.errstate(all="ignore"):
            error = output - reference
            np.abs(error, out=error)
            # NaN <= x is False, so NaN never passes.
            if (error <= allowed).all():
                continue
            # An error of 0 is not divided: with a bound of 0, 0 / 0 would be NaN.
            units = np.divide(error, allowed, out=error, where=error > 0)
        # argmax returns the first NaN, if any.
        index = np.unravel_index(int(np.argmax(units)), units.shape)
        where, got = f"{parameter.name}[{', '.join(map(str, index))}]", float(output[index])
        if math.isnan(got):
            return f"{where} was not written, or is NaN; it should be {float(reference[index])!r}"
        factor = f", {units[index]:.3g} times the allowed error" if np.isfinite(units[index]) else ""
        return f"{where} is {got!r} and should be {float(reference[index])!r}{factor}"
    return ""


def verify(child: Child, kernel: Kernel, rng: np.random.Generator, deadline_s: float) -> None:
    """Calls the candidate on random sizes and inputs, and checks every result.

    Raises:
        ChildFailed: a result is wrong, the process fails, or all calls exceed `deadline_s`.
    """
    spent_s = computed_s = 0.0
    for number, size in enumerate(draw_sizes(kernel, rng)):
        # Every size but the timed one has an ordinary kind ("normal", "biased") and an extreme.
        kinds = ["biased"] if size == kernel.timed else [INPUT_KINDS[number % 2], INPUT_KINDS[2 + number % 2]]
        for kind in kinds:
            where = f"({size_text(size)}, {kind} inputs)"
            first = draw_inputs(kernel, size, kind, rng)
            changed = perturb_one(first, rng)
            expected = compute_expected(kernel, size, first)
            # A program may cache its answer by address, by size or by part of the content. So the
            # second inputs differ in one element at the same addresses, and the first inputs are
            # repeated at new addresses. This also detects results of an earlier call. `lay_out`
            # aligns arrays to the ends of their pages, then to the starts.
            for at_end, inputs in ((True, first), (None, changed), (False, first)):
                if at_end is not None:
                    child.map_arrays(lay_out(kernel, size, child.arena_bytes, at_end, rng))
                left_s = deadline_s - spent_s
                if left_s <= 0:
                    note = f"its calls took more than {deadline_s:g} s; the next size was {size_text(size)}"
                    raise ChildFailed("timeout", note, computed_s)
                try:
                    call = child.call(size, inputs, left_s)
                except ChildFailed as failed:
                    raise ChildFailed(failed.outcome, f"{failed} {where}", failed.cpu_s) from None
                # Drawing inputs and comparing outputs do not count toward the program's deadline.
                spent_s += call.seconds
                computed_s += call.cpu_s
                right = expected if inputs is first else compute_expected(kernel, size, inputs)
                if wrong := find_wrong_output(kernel, right, call.outputs):
                    raise ChildFailed("wrong_result", f"{wrong} {where}")


def size_text(size: Size) -> str:
    """Returns "m = 3, n = 5"."""
    return ", ".join(f"{name} = {value}" for name, value in size.items())
