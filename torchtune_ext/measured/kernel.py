"""What a measured problem is: a C function to write, how to know that its result is right, and how much work it does."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from torchtune_ext.run.errors import UsageError

Size = Mapping[str, int]  # the int arguments of the function, by name
Arrays = Mapping[str, np.ndarray]

UNIT_ROUNDOFF = 2.0**-53  # u of IEEE double precision: the largest relative error of one rounding
SMALLEST_DENORMAL = (
    2.0**-1074
)  # the smallest denormal number: the largest error of one product that underflows is half of it


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
    naive: str  # C source of a program that is right, simple and slow

    # These are properties only to a type checker: a class may have attributes of a narrower type.
    @property
    def size_names(self) -> tuple[str, ...]:
        """Names of the int arguments, in order."""
        ...

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The array arguments, in order."""
        ...

    @property
    def timed(self) -> Size:
        """The size at which the function is timed; a good program needs about 1 ms or more."""
        ...

    @property
    def forbidden(self) -> tuple[str, ...]:
        """Names that a program must not use, besides those that no program may use."""
        ...

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


MAX_DIMENSION = (1 << 31) - 1  # of an int
MAX_ARGUMENTS = 8  # ints and arrays together (sandbox.c)


def validate_kernel(kernel: Kernel) -> None:
    """Checks without a compiler that everything is there, and fits together for a size of all ones.

    Raises:
        ValueError: it names the class, the attribute, and what is wrong with it.
    """
    where = type(kernel).__name__
    try:
        fault = _kernel_fault(kernel)
    except Exception as error:
        # The class is somebody's own, and may lack anything and raise anything.
        raise UsageError(
            f"{where} is no kernel: {type(error).__name__}: {error} (see Kernel in measured/kernel.py)"
        ) from error
    if fault:
        raise UsageError(f"{where}{fault} (see Kernel in measured/kernel.py)")


def _kernel_fault(kernel: Kernel) -> str:
    """Returns what is wrong with a kernel, to stand behind the name of its class; "" if nothing is."""
    for name in ("name", "question", "naive"):
        if not isinstance(getattr(kernel, name), str):
            return f".{name}: is missing, or is no text"
    if not all(isinstance(each, str) for each in kernel.forbidden):
        return ".forbidden: must be names, as in fnmatch"
    words = [*kernel.size_names, *(parameter.name for parameter in kernel.parameters)]
    are_names = all(word.isidentifier() and word.isascii() for word in (kernel.name, *words))
    if not are_names or len(set(words)) < len(words) or len(words) > MAX_ARGUMENTS:
        return f": name, size_names and parameters must be names of C, at most {MAX_ARGUMENTS} arguments and each once"
    if not (kernel.size_names and input_parameters(kernel) and output_parameters(kernel)):
        return ".parameters: needs an input and an output, and size_names at least one name"
    if set(kernel.timed) != set(kernel.size_names):
        return f".timed: {dict(kernel.timed)} must have {kernel.size_names}"
    for name, value in kernel.timed.items():
        if type(value) is not int or not 1 <= value <= MAX_DIMENSION:
            return f".timed: {name} is {value!r}, and must be an int from 1 to {MAX_DIMENSION}"
    ones = dict.fromkeys(kernel.size_names, 1)
    names = {parameter.name for parameter in kernel.parameters}
    for size in (ones, kernel.timed):
        if not kernel.operations(size) >= 0:
            return f".operations: is {kernel.operations(size)} for {dict(size)}"
        shapes = kernel.shapes(size)
        if set(shapes) != names or not all(side >= 1 for shape in shapes.values() for side in shape):
            return f".shapes: is {shapes} for {dict(size)}, and the parameters are {sorted(names)}"
    shapes = kernel.shapes(ones)
    inputs = {parameter.name: np.ones(shapes[parameter.name]) for parameter in input_parameters(kernel)}
    for method in ("reference", "bound"):
        arrays = getattr(kernel, method)(ones, inputs)
        for parameter in output_parameters(kernel):
            array = arrays[parameter.name]
            if np.shape(array) != shapes[parameter.name]:
                return f".{method}: has no array {parameter.name} of shape {shapes[parameter.name]} for {ones}"
            # Every result would pass against a bound of infinity.
            if method == "bound" and not (np.isfinite(array).all() and (array >= 0).all()):
                return f".bound: {parameter.name} must be finite and not below 0, and is {array} for {ones}"
    return ""


def gamma(operations: int) -> float:
    """Returns γ_n = n u / (1 - n u): the relative error that n roundings can add up to (Higham 2002, lemma 3.1)."""
    return operations * UNIT_ROUNDOFF / (1 - operations * UNIT_ROUNDOFF)


def prototype(kernel: Kernel) -> str:
    """Returns the declaration of the function: "void dgemm(int m, ..., const double *A, ..., double *C)"."""
    ints = [f"int {name}" for name in kernel.size_names]
    arrays = [f"{'' if p.is_output else 'const '}double *{p.name}" for p in kernel.parameters]
    return f"void {kernel.name}({', '.join(ints + arrays)})"


def input_parameters(kernel: Kernel) -> list[Parameter]:
    return [parameter for parameter in kernel.parameters if not parameter.is_output]


def output_parameters(kernel: Kernel) -> list[Parameter]:
    return [parameter for parameter in kernel.parameters if parameter.is_output]
