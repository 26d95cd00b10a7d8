"""The interface of a measured problem: a C function, its reference, error bound and operations."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from torchtune_ext.run.errors import UsageError

Size = Mapping[str, int]  # int argument of the function -> value
Arrays = Mapping[str, np.ndarray]

UNIT_ROUNDOFF = 2.0**-53  # u of IEEE double precision: the largest relative error of one rounding
# A product that underflows has an error of at most half the smallest denormal number.
SMALLEST_DENORMAL = 2.0**-1074


@dataclass(frozen=True, slots=True)
class Parameter:
    """An array argument of the function: `double *` for an output, else `const double *`."""

    name: str
    is_output: bool = False


class Kernel(Protocol):
    """A function to write in C. It takes the ints of a size, then the arrays, and returns void.

    Arrays hold doubles in row-major order, are 64-byte aligned, and do not overlap. Every element
    must be read or written: a measured time below that memory traffic is rejected.
    """

    name: str  # also the name of the C function
    question: str  # description of the function for the prompt
    naive: str  # C source of a correct, simple and slow program

    # Declared as properties for the type checker: a class may have attributes of a narrower type.
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
        """The timed size. A fast program should take about 1 ms or more."""
        ...

    @property
    def forbidden(self) -> tuple[str, ...]:
        """fnmatch patterns of forbidden names, in addition to the names that the screen forbids."""
        ...

    def operations(self, size: Size) -> int:
        """Returns the number of floating-point operations, for GFLOPS and the roofline."""
        ...

    def shapes(self, size: Size) -> Mapping[str, tuple[int, ...]]:
        """Returns the shape of each array."""
        ...

    def reference(self, size: Size, inputs: Arrays) -> dict[str, np.ndarray]:
        """Computes the outputs in the dtype of the inputs."""
        ...

    def bound(self, size: Size, inputs: Arrays) -> dict[str, np.ndarray]:
        """Returns an error bound of the float64 result that holds for every order of additions."""
        ...


MAX_DIMENSION = (1 << 31) - 1  # the largest int of C
MAX_ARGUMENTS = 8  # ints and arrays together (sandbox.c)


def validate_kernel(kernel: Kernel) -> None:
    """Checks without a compiler that all attributes exist and are consistent at a size of all ones.

    Raises:
        UsageError: the kernel is invalid. The message names the class, the attribute and the fault.
    """
    where = type(kernel).__name__
    try:
        fault = _kernel_fault(kernel)
    except Exception as error:
        # A user's class may lack any attribute and raise any error.
        raise UsageError(
            f"{where} is not a kernel: {type(error).__name__}: {error} (see Kernel in measured/kernel.py)"
        ) from error
    if fault:
        raise UsageError(f"{where}{fault} (see Kernel in measured/kernel.py)")


def _kernel_fault(kernel: Kernel) -> str:
    """Returns the fault of a kernel, as text after its class name; "" if it is valid."""
    for name in ("name", "question", "naive"):
        if not isinstance(getattr(kernel, name), str):
            return f".{name}: is missing, or is not a string"
    if not all(isinstance(each, str) for each in kernel.forbidden):
        return ".forbidden: must be names or fnmatch patterns"
    words = [*kernel.size_names, *(parameter.name for parameter in kernel.parameters)]
    are_names = all(word.isidentifier() and word.isascii() for word in (kernel.name, *words))
    if not are_names or len(set(words)) < len(words) or len(words) > MAX_ARGUMENTS:
        return f": name, size_names and parameters must be C names, at most {MAX_ARGUMENTS} arguments and each once"
    if not (kernel.size_names and input_parameters(kernel) and output_parameters(kernel)):
        return ".parameters: needs an input and an output, and size_names at least one name"
    if set(kernel.timed) != set(kernel.size_names):
        return f".timed: {dict(kernel.timed)} must have {kernel.size_names}"
    for name, value in kernel.timed.items():
        if type(value) is not int or not 1 <= value <= MAX_DIMENSION:
            return f".timed: {name} is {value!r}; expected an int from 1 to {MAX_DIMENSION}"
    ones = dict.fromkeys(kernel.size_names, 1)
    names = {parameter.name for parameter in kernel.parameters}
    for size in (ones, kernel.timed):
        if not kernel.operations(size) >= 0:
            return f".operations: is {kernel.operations(size)} for {dict(size)}; expected 0 or more"
        shapes = kernel.shapes(size)
        if set(shapes) != names or not all(side >= 1 for shape in shapes.values() for side in shape):
            return f".shapes: is {shapes} for {dict(size)}; expected sides of 1 or more for {sorted(names)}"
    shapes = kernel.shapes(ones)
    inputs = {parameter.name: np.ones(shapes[parameter.name]) for parameter in input_parameters(kernel)}
    for method in ("reference", "bound"):
        arrays = getattr(kernel, method)(ones, inputs)
        for parameter in output_parameters(kernel):
            array = arrays[parameter.name]
            if np.shape(array) != shapes[parameter.name]:
                return f".{method}: has no array {parameter.name} of shape {shapes[parameter.name]} for {ones}"
            # An infinite bound would accept every result.
            if method == "bound" and not (np.isfinite(array).all() and (array >= 0).all()):
                return f".bound: {parameter.name} must be finite and not below 0, but is {array} for {ones}"
    return ""


def gamma(operations: int) -> float:
    """Returns γ_n = n u / (1 - n u), the error bound of n roundings (Higham 2002, lemma 3.1)."""
    return operations * UNIT_ROUNDOFF / (1 - operations * UNIT_ROUNDOFF)


def prototype(kernel: Kernel) -> str:
    """Returns the C declaration: "void dgemm(int m, ..., const double *A, ..., double *C)"."""
    ints = [f"int {name}" for name in kernel.size_names]
    arrays = [f"{'' if p.is_output else 'const '}double *{p.name}" for p in kernel.parameters]
    return f"void {kernel.name}({', '.join(ints + arrays)})"


def input_parameters(kernel: Kernel) -> list[Parameter]:
    return [parameter for parameter in kernel.parameters if not parameter.is_output]


def output_parameters(kernel: Kernel) -> list[Parameter]:
    return [parameter for parameter in kernel.parameters if parameter.is_output]
