"""What a checker cannot work with is refused in one line, before a compiler is started."""

import math
import re
import shutil

import numpy as np
import pytest

from torchtune_ext.measured import check
from torchtune_ext.measured.check import Checker
from torchtune_ext.measured.compiler import Compiler
from torchtune_ext.measured.kernel import Parameter, validate_kernel
from torchtune_ext.measured.kernels import KERNELS, Dgemm, Reduction

HONEST = Compiler("/usr/bin/gcc", "gcc")  # nobody starts it in these tests


@pytest.fixture
def nothing_starts(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the sandbox was made before the arguments were read")

    monkeypatch.setattr(check, "Sandbox", refuse)


def refused(words: str, **arguments) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        Checker(**{"kernel": Reduction(), "compiler": HONEST, **arguments})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_kernels_that_are_shipped_are_sound(name):
    validate_kernel(KERNELS[name]())


@pytest.mark.parametrize(
    "attribute", ["operations", "shapes", "reference", "bound", "naive", "question", "forbidden", "name"]
)
def test_a_kernel_that_lacks_something(nothing_starts, attribute):
    Lacking = type("Lacking", (Dgemm,), {attribute: None})
    is_text = attribute in ("name", "question", "naive")
    words = f"Lacking.{attribute}: is missing" if is_text else "Lacking is not a kernel: TypeError: 'NoneType' object"
    refused(words, kernel=Lacking(64))


NAMES = ": name, size_names and parameters must be C names, at most 8 arguments and each once"
KERNEL_FAULTS = {
    "no name of C": ({"name": "d gemm"}, NAMES),
    "no output": ({"parameters": (Parameter("A"), Parameter("B"))}, ".parameters: needs an input and an output"),
    "another parameter": ({"parameters": (Parameter("X"), Parameter("C", True))}, ".shapes: is {'A': (1, 1), "),
    "much": ({"parameters": (*Dgemm.parameters, *map(Parameter, "DEF"))}, NAMES),
    "no work": ({"operations": lambda self, size: -1}, ".operations: is -1"),
    "no result": ({"reference": lambda self, size, inputs: {}}, " is not a kernel: KeyError: 'C'"),
    "a result of another shape": ({"reference": lambda self, size, inputs: {"C": np.ones(3)}}, ".reference: has no array C of shape (1, 1)"),
    "no bound": ({"bound": lambda self, size, inputs: {"C": 0.0}}, ".bound: has no array C of shape (1, 1)"),
    "a bound of infinity": ({"bound": lambda self, size, inputs: {"C": np.full((1, 1), np.inf)}}, ".bound: C must be finite"),
    "a bound below 0": ({"bound": lambda self, size, inputs: {"C": np.full((1, 1), -1.0)}}, ".bound: C must be finite"),
    "a reference that fails": ({"reference": lambda self, size, inputs: inputs["q"]}, " is not a kernel: KeyError: 'q'"),
    "work of nothing": ({"operations": lambda self, size: None}, " is not a kernel: TypeError: '>=' not supported"),
    "shapes of numbers": ({"shapes": lambda self, size: {"A": 1, "B": 1, "C": 1}}, " is not a kernel: TypeError: 'int' object"),
    "words for parameters": ({"parameters": ("A", "B", "C")}, " is not a kernel: AttributeError: 'str' object"),
    "one name twice": ({"size_names": ("m", "m", "k")}, NAMES),
    "no size": ({"size_names": ()}, ".parameters: needs an input and an output, and size_names at least one name"),
    "numbers forbidden": ({"forbidden": (1,)}, ".forbidden: must be names"),
    "another size": ({"size_names": ("m", "n")}, ".timed: {'m': 64, 'n': 64, 'k': 64} must have ('m', 'n')"),
}  # fmt: skip


@pytest.mark.parametrize("case", KERNEL_FAULTS)
def test_a_kernel_that_contradicts_itself(nothing_starts, case):
    attributes, words = KERNEL_FAULTS[case]
    refused(f"Odd{words}", kernel=type("Odd", (Dgemm,), attributes)(64))


@pytest.mark.parametrize("name", sorted(KERNELS))
@pytest.mark.parametrize("size", [0, -3, 2.5, 1 << 31])
def test_kernel_zero_size_is_refused(nothing_starts, name, size):
    kernel = KERNELS[name](size)
    refused(
        f"{type(kernel).__name__}.timed: {kernel.size_names[0]} is {size}; expected an int from 1 to 2147483647",
        kernel=kernel,
    )


def test_bench_invalid_numeric_arguments_are_refused(nothing_starts):
    refused("bench.threads=0 must be", threads=0)
    refused("threads=nan must be a whole number", threads=math.nan)


def test_bench_nonexistent_cores_are_rejected(nothing_starts):
    refused("cores: [100000] must be some of", cores=[100_000])
    refused("cores: [] must be some of", cores=[])


def test_no_compiler(nothing_starts, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    refused("no C compiler: gcc, clang, cc not found on PATH; install one: apt-get install gcc", compiler=None)
    with pytest.raises(ValueError, match="no C compiler: icc not found"):
        Compiler.find("icc")


@pytest.mark.parametrize("text", ["#!/bin/sh\nexit 1\n", "#!/bin/sh\n", "not a program", "#!/no/such/shell\n"])
def test_bench_invalid_compiler_is_rejected(tmp_path, text):
    program = tmp_path / "gcc"
    program.write_text(text)
    program.chmod(0o755)
    with pytest.raises(ValueError, match="compiler=.*/gcc: `.*/gcc --version` fails.*Fix: set compiler=gcc"):
        Compiler.find(str(program))


@pytest.mark.parametrize(
    "naive, words",
    [
        ("void dgemm(int m, int n, int k, const double *A, const double *B, double *C) {}", "wrong_result"),
        ("void dgemm(", "compile_error"),
        ("int x;", "compile_error"),
    ],
)
def test_a_kernel_whose_own_program_fails_is_refused(naive, words):
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    Broken = type("Broken", (Dgemm,), {"naive": naive})
    with pytest.raises(ValueError, match=f"Broken.naive: the kernel's own program ends with {words}"):
        Checker(Broken(64), namespaces=False)
