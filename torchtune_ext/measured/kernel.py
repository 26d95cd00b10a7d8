"""What a measured problem is: a C function to write, how to know that its result is right, and how much work it does."""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol

import numpy as np

from torchtune_ext.run.errors import Mistake

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


MAX_SIZE = (1 << 31) - 1  # of an int
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
            raise Mistake(f"{where}.{attribute}: {words} (see Kernel in measured/kernel.py)")

    def called(method: str, *arguments: object) -> Any:
        try:
            return getattr(kernel, method)(*arguments)
        except Exception as error:
            raise Mistake(f"{where}.{method}: raises {type(error).__name__}: {error} for {arguments[0]}") from error

    for name, kind in _KINDS.items():
        require(isinstance(getattr(kernel, name, None), kind), name, f"is missing, or is no {kind.__name__}")
    for name in _METHODS:
        require(callable(getattr(kernel, name, None)), name, "is missing, or is no method")
    require(_is_name(kernel.name), "name", f"{kernel.name!r} is no name of a C function")
    for name, kind in (("size_names", str), ("parameters", Parameter), ("forbidden", str)):
        require(all(isinstance(each, kind) for each in getattr(kernel, name)), name, f"has what is no {kind.__name__}")
    words = [*kernel.size_names, *(parameter.name for parameter in kernel.parameters)]
    for word in words:
        require(
            _is_name(word) and words.count(word) == 1, "parameters", f"{word!r} is no name, or that of two arguments"
        )
    require(bool(kernel.size_names), "size_names", "needs at least one name")
    require(set(kernel.timed) == set(kernel.size_names), "timed", f"{dict(kernel.timed)} must have {kernel.size_names}")
    for name, value in kernel.timed.items():
        is_size = type(value) is int and 1 <= value <= MAX_SIZE
        require(is_size, "timed", f"{name} is {value!r}, and must be an int from 1 to {MAX_SIZE}")
    count = len(words)
    require(count <= MAX_ARGUMENTS, "parameters", f"{count} arguments with those of a size, at most {MAX_ARGUMENTS}")
    require(bool(inputs_of(kernel)) and bool(outputs_of(kernel)), "parameters", "needs an input and an output")
    ones = dict.fromkeys(kernel.size_names, 1)
    names = {parameter.name for parameter in kernel.parameters}
    for size in (ones, kernel.timed):
        operations = called("operations", size)
        require(isinstance(operations, Real) and operations >= 0, "operations", f"is {operations} for {dict(size)}")
        shapes = called("shapes", size)
        require(isinstance(shapes, Mapping), "shapes", f"is no Mapping for {dict(size)}")
        require(set(shapes) == names, "shapes", f"has {sorted(shapes)}, and the parameters are {sorted(names)}")
        for name, shape in shapes.items():
            fits = isinstance(shape, tuple) and all(isinstance(each, Integral) and each >= 1 for each in shape)
            require(fits, "shapes", f"{name} is {shape} for {dict(size)}")
    shapes = kernel.shapes(ones)
    inputs = {parameter.name: np.ones(shapes[parameter.name]) for parameter in inputs_of(kernel)}
    for method in ("reference", "bound"):
        arrays = called(method, ones, inputs)
        for parameter in outputs_of(kernel):
            array = arrays.get(parameter.name) if isinstance(arrays, Mapping) else None
            fits = isinstance(array, np.ndarray) and array.shape == shapes[parameter.name]
            require(fits, method, f"has no array {parameter.name} of shape {shapes[parameter.name]} for {ones}")
            # Every result would pass against a bound of infinity.
            is_bound = method != "bound" or bool(np.isfinite(array).all() and (array >= 0).all())
            require(is_bound, method, f"{parameter.name} must be finite and not below 0, and is {array} for {ones}")


def _is_name(word: str) -> bool:
    return word.isidentifier() and word.isascii()


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
