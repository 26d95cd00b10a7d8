"""What a measured problem is: a C function to write, how to know that its result is right, and how much work it does."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Size = Mapping[str, int]  # the int arguments of the function, by name
Arrays = Mapping[str, np.ndarray]

UNIT_ROUNDOFF = 2.0**-53  # u of IEEE double precision: the largest relative error of one rounding
SMALLEST = 2.0**-1074  # the smallest denormal number: the largest error of one product that underflows is half of it


@dataclass(frozen=True, slots=True)
class Parameter:
    """An array argument of the function: `const double *` if the function only reads it, else `double *`."""

    name: str
    is_output: bool = False


class Kernel(Protocol):
    """A function to write in C. Its arguments are first the ints of a size, then the arrays, and it returns nothing.

    Arrays hold doubles in row-major order, start at an address that 64 divides, and do not overlap. Each of their numbers has
    to be read or written: a speed that leaves no time for that is not believed.
    """

    name: str  # also the name of the C function
    question: str  # what the function computes, in words, for the prompt
    size_names: tuple[str, ...]  # names of the int arguments, in order
    parameters: tuple[Parameter, ...]  # the array arguments, in order
    timed: Size  # the size at which the function is timed; a good program needs about 1 ms or more
    forbidden: tuple[str, ...]  # names that a program must not use, besides those that no program may use
    naive: str  # C source of a program that is right, simple and slow

    def operations(self, size: Size) -> int:
        """Returns how many floating-point operations the function is credited with."""
        ...

    def shapes(self, size: Size) -> Mapping[str, tuple[int, ...]]:
        """Returns the shape of each array."""
        ...

    def reference(self, size: Size, inputs: Arrays) -> dict[str, np.ndarray]:
        """Computes the outputs, in the data type of the inputs."""
        ...

    def bound(self, size: Size, inputs: Arrays) -> dict[str, np.ndarray]:
        """Returns how far a float64 result may be from the exact one, whatever the order of its operations."""
        ...


MAX_ARGUMENTS = 8  # ints and arrays together (sandbox.c)
_KINDS = {
    "name": str,
    "question": str,
    "size_names": tuple,
    "parameters": tuple,
    "timed": Mapping,
    "forbidden": tuple,
    "naive": str,
}
_METHODS = ("operations", "shapes", "reference", "bound")


def require_sound(kernel: Kernel) -> None:
    """Checks what can be seen without a compiler: that everything is there, and fits together for a size of all ones.

    Raises:
        ValueError: it names the class, the attribute, and what is wrong with it.
    """
    where = type(kernel).__name__

    def require(is_so: bool, attribute: str, words: str) -> None:
        if not is_so:
            raise ValueError(f"{where}.{attribute}: {words} (see Kernel in tasks/measured/kernel.py)")

    for name, kind in _KINDS.items():
        require(isinstance(getattr(kernel, name, None), kind), name, f"is missing, or is no {kind.__name__}")
    for name in _METHODS:
        require(callable(getattr(kernel, name, None)), name, "is missing, or is no method")
    require(kernel.name.isidentifier() and kernel.name.isascii(), "name", f"{kernel.name!r} is no name of a C function")
    require(set(kernel.timed) == set(kernel.size_names), "timed", f"{dict(kernel.timed)} must have {kernel.size_names}")
    for name, value in kernel.timed.items():
        require(
            isinstance(value, int) and 1 <= value < 1 << 31, "timed", f"{name} is {value!r}, and must be at least 1"
        )
    count = len(kernel.size_names) + len(kernel.parameters)
    require(count <= MAX_ARGUMENTS, "parameters", f"{count} arguments with those of a size, at most {MAX_ARGUMENTS}")
    require(bool(inputs_of(kernel)) and bool(outputs_of(kernel)), "parameters", "needs an input and an output")
    ones = dict.fromkeys(kernel.size_names, 1)
    names = {parameter.name for parameter in kernel.parameters}
    for size in (ones, kernel.timed):
        require(kernel.operations(size) >= 0, "operations", f"is {kernel.operations(size)} for {dict(size)}")
        shapes = kernel.shapes(size)
        require(set(shapes) == names, "shapes", f"has {sorted(shapes)}, and the parameters are {sorted(names)}")
        for name, shape in shapes.items():
            require(all(each >= 1 for each in shape), "shapes", f"{name} is {shape} for {dict(size)}")
    shapes = kernel.shapes(ones)
    inputs = {parameter.name: np.ones(shapes[parameter.name]) for parameter in inputs_of(kernel)}
    for method in ("reference", "bound"):
        found = getattr(kernel, method)(ones, inputs)
        for parameter in outputs_of(kernel):
            array = found.get(parameter.name)
            fits = isinstance(array, np.ndarray) and array.shape == tuple(shapes[parameter.name])
            require(fits, method, f"has no array {parameter.name} of shape {shapes[parameter.name]} for {ones}")


def gamma(operations: int) -> float:
    """Returns γ_n = n u / (1 - n u): the relative error that n roundings can add up to (Higham 2002, lemma 3.1)."""
    return operations * UNIT_ROUNDOFF / (1 - operations * UNIT_ROUNDOFF)


def prototype(kernel: Kernel) -> str:
    """Returns the declaration of the function: "void dgemm(int m, ..., const double *A, ..., double *C)"."""
    ints = [f"int {name}" for name in kernel.size_names]
    arrays = [f"{'' if p.is_output else 'const '}double *{p.name}" for p in kernel.parameters]
    return f"void {kernel.name}({', '.join(ints + arrays)})"


def inputs_of(kernel: Kernel) -> list[Parameter]:
    return [parameter for parameter in kernel.parameters if not parameter.is_output]


def outputs_of(kernel: Kernel) -> list[Parameter]:
    return [parameter for parameter in kernel.parameters if parameter.is_output]
