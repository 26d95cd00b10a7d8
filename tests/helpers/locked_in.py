"""Small C programs in the sandbox, for tests of its layers and of the process that calls a candidate."""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from torchtune_ext.measured.child import ArrayPlacement, Child, arena_size, lay_out
from torchtune_ext.measured.kernel import Parameter
from torchtune_ext.measured.sandbox import Limits, Sandbox

ATTEMPTS = Path(__file__).with_name("attempts.c")
SIZE = {"n": 5}


class Attempt:
    """A function `void NAME(int n, double *out)`, or with more arrays."""

    size_names = ("n",)
    forbidden = ()
    question = naive = ""

    def __init__(self, name: str, parameters: Sequence[Parameter] = (Parameter("out", is_output=True),)) -> None:
        self.name, self.parameters, self.timed = name, tuple(parameters), {"n": 3000}

    def shapes(self, size: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        return {parameter.name: (size["n"],) for parameter in self.parameters}


def build(compiler: str, source: str | Path, library: Path, *words: str) -> Path:
    """Compile a test program outside the sandbox to a world-readable library."""
    text = source.read_text() if isinstance(source, Path) else source
    command = [compiler, "-w", "-O1", "-std=gnu17", "-fPIC", "-shared", "-x", "c", "-", "-o", str(library), *words]
    subprocess.run(command, input=text, text=True, check=True, capture_output=True)
    library.chmod(0o755)
    return library


@contextmanager
def loaded(
    sandbox: Sandbox,
    library: Path,
    kernel: Attempt,
    limits: Limits | None = None,
    at_end: bool = True,
    threads: int = 1,
    seed: int = 0,
) -> Iterator[tuple[Child, tuple[ArrayPlacement, ...]]]:
    """Yield a child that has loaded the library, with arrays of `SIZE` in map_arrays."""
    arena_bytes = arena_size(kernel, kernel.timed)
    with Child(sandbox, library, kernel, arena_bytes, [0], threads, limits or Limits(), 5.0) as child:
        places = lay_out(kernel, SIZE, arena_bytes, at_end, np.random.default_rng(seed))
        child.map_arrays(places)
        yield child, places


def attempt(sandbox: Sandbox, library: Path, name: str, n: int = 5, limits: Limits | None = None) -> float:
    """Call one function of attempts.c with `n` and return its output. The array has room for 5 numbers."""
    kernel = Attempt(name)
    with loaded(sandbox, library, kernel, limits) as (child, _):
        return float(child.call({"n": n}, {}, 10.0).outputs["out"][0])
