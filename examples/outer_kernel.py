"""A custom kernel: task.kernels={outer_kernel.Outer: 1024}, with a copy of this file in the working directory.

docs/how_to/measured_programs.md describes the task.
"""

import numpy as np

from torchtune_ext.measured.kernel import SMALLEST_DENORMAL, Parameter, gamma


class Outer:
    """C[i][j] = x[i] y[j]."""

    name = "outer"  # of the function in C, too
    question = "the outer product C[i][j] = x[i] * y[j] of x, which has m numbers, and y, which has n"
    size_names = ("m", "n")
    parameters = (Parameter("x"), Parameter("y"), Parameter("C", is_output=True))
    forbidden = ("cblas_*", "*ger_")  # names, in addition to those that no program may use
    naive = """\
void outer(int m, int n, const double *x, const double *y, double *C) {
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++)
            C[i * n + j] = x[i] * y[j];
}
"""

    def __init__(self, size: int = 1024):
        self.timed = {"m": size, "n": size}

    def operations(self, size):
        return size["m"] * size["n"]

    def shapes(self, size):
        return {"x": (size["m"],), "y": (size["n"],), "C": (size["m"], size["n"])}

    def reference(self, size, inputs):
        return {"C": np.outer(inputs["x"], inputs["y"])}

    def bound(self, size, inputs):
        # One product, so one rounding, and half of the smallest number where it underflows.
        return {"C": gamma(1) * np.abs(np.outer(inputs["x"], inputs["y"])) + SMALLEST_DENORMAL}
