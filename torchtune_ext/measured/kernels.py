"""The shipped kernels: matrix-matrix product, matrix-vector product, and sum.

The bounds hold for every order of the additions, with and without fused multiply-add (Higham,
Accuracy and Stability of Numerical Algorithms, 2002, sections 3.1 and 3.5).
"""

from collections.abc import Mapping

import numpy as np

from torchtune_ext.measured.kernel import SMALLEST_DENORMAL, Arrays, Parameter, Size, gamma

BLAS_NAMES = ("cblas_*", "*gemm_", "*gemv_", "*gemm", "*gemv", "openblas_*", "mkl_*", "LAPACKE_*")


class Dgemm:
    """C = A B for an m x k matrix A and a k x n matrix B, with 2 m n k operations as in BLAS."""

    name = "dgemm"
    question = (
        "the matrix product C = A B, where A has m rows and k columns, B k rows and n columns, C m rows and n columns"
    )
    size_names = ("m", "n", "k")
    parameters = (Parameter("A"), Parameter("B"), Parameter("C", is_output=True))
    forbidden = (*tuple(name for name in BLAS_NAMES if name != "*gemm"), "cblas_dgemm")
    naive = """\
void dgemm(int m, int n, int k, const double *A, const double *B, double *C) {
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double sum = 0;
            for (int l = 0; l < k; l++)
                sum += A[i * k + l] * B[l * n + j];
            C[i * n + j] = sum;
        }
}
"""

    def __init__(self, size: int = 256) -> None:
        self.timed = {"m": size, "n": size, "k": size}

    def operations(self, size: Size) -> int:
        return 2 * size["m"] * size["n"] * size["k"]

    def shapes(self, size: Size) -> Mapping[str, tuple[int, ...]]:
        m, n, k = size["m"], size["n"], size["k"]
        return {"A": (m, k), "B": (k, n), "C": (m, n)}

    def reference(self, size: Size, inputs: Arrays) -> dict[str, np.ndarray]:
        return {"C": inputs["A"] @ inputs["B"]}

    def bound(self, size: Size, inputs: Arrays) -> dict[str, np.ndarray]:
        k = size["k"]
        # Each path from an input to the result has at most k roundings, so the error is at most γ_k
        # times the sum over absolute values. A product that underflows adds half of the smallest
        # denormal number.
        return {"C": gamma(k) * (np.abs(inputs["A"]) @ np.abs(inputs["B"])) + k * SMALLEST_DENORMAL}


class Gemv:
    """y = A x for an m x n matrix A. 2 m n operations on 8 m n bytes make it memory-bound."""

    name = "gemv"
    question = "the product y = A x of a matrix A, which has m rows and n columns, and a vector x of n numbers"
    size_names = ("m", "n")
    parameters = (Parameter("A"), Parameter("x"), Parameter("y", is_output=True))
    forbidden = (*tuple(name for name in BLAS_NAMES if name != "*gemv"), "cblas_dgemv")
    naive = """\
void gemv(int m, int n, const double *A, const double *x, double *y) {
    for (int i = 0; i < m; i++) {
        double sum = 0;
        for (int j = 0; j < n; j++)
            sum += A[i * n + j] * x[j];
        y[i] = sum;
    }
}
"""

    def __init__(self, size: int = 1536) -> None:
        self.timed = {"m": size, "n": size}

    def operations(self, size: Size) -> int:
        return 2 * size["m"] * size["n"]

    def shapes(self, size: Size) -> Mapping[str, tuple[int, ...]]:
        return {"A": (size["m"], size["n"]), "x": (size["n"],), "y": (size["m"],)}

    def reference(self, size: Size, inputs: Arrays) -> dict[str, np.ndarray]:
        return {"y": inputs["A"] @ inputs["x"]}

    def bound(self, size: Size, inputs: Arrays) -> dict[str, np.ndarray]:
        n = size["n"]
        return {"y": gamma(n) * (np.abs(inputs["A"]) @ np.abs(inputs["x"])) + n * SMALLEST_DENORMAL}


class Reduction:
    """The sum of n numbers. n - 1 operations on 8 n bytes make it memory-bound."""

    name = "reduction"
    question = "the sum of the n numbers of x, which it writes to total[0]"
    size_names = ("n",)
    parameters = (Parameter("x"), Parameter("total", is_output=True))
    forbidden = ("*asum*",)
    naive = """\
void reduction(int n, const double *x, double *total) {
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += x[i];
    *total = sum;
}
"""

    def __init__(self, size: int = 2_000_003) -> None:
        self.timed = {"n": size}

    def operations(self, size: Size) -> int:
        return max(1, size["n"] - 1)

    def shapes(self, size: Size) -> Mapping[str, tuple[int, ...]]:
        return {"x": (size["n"],), "total": (1,)}

    def reference(self, size: Size, inputs: Arrays) -> dict[str, np.ndarray]:
        return {"total": inputs["x"].sum(keepdims=True)}

    def bound(self, size: Size, inputs: Arrays) -> dict[str, np.ndarray]:
        total = np.abs(inputs["x"]).sum(keepdims=True)
        return {"total": 0 * total if _is_exact_sum(inputs["x"], total[0]) else gamma(size["n"] - 1) * total}


def _is_exact_sum(x: np.ndarray, total: float) -> bool:
    """Returns whether the sum is exact in every order of additions.

    It is exact if all numbers are multiples of q and their absolute sum is below 2^53 q: then a
    double holds every partial sum. γ_n of a long sum is wide, and would permit single precision.
    """
    exponent = int(np.frexp(total * (1 + 1e-6))[1])  # total < 2^exponent, even if `total` was rounded down
    if not -900 < exponent < 900:
        return False  # 1/q or x/q might overflow a double
    per_unit = 2.0 ** (53 - exponent)
    for part in (x[:1000], x):  # the first numbers of most inputs already fail
        units = part * per_unit
        if (units != np.rint(units)).any():
            return False
    return True


KERNELS = {kernel.name: kernel for kernel in (Dgemm, Gemv, Reduction)}
