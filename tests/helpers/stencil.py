"""A kernel with large results and little work, for a program that computes during the copy of its results."""

from collections.abc import Mapping

import numpy as np

from torchtune_ext.measured.kernel import SMALLEST_DENORMAL, Arrays, Parameter, Size, gamma
from torchtune_ext.measured.kernels import KERNELS as SHIPPED


class Stencil:
    """One Jacobi step of the heat equation on a grid of h x w points, whose border is copied. 6 operations per inner point."""

    name = "stencil"
    question = (
        "one step of a five-point stencil on a grid of h rows and w columns: inside, "
        "v[i][j] = 0.5 * u[i][j] + 0.125 * (u[i-1][j] + u[i+1][j] + u[i][j-1] + u[i][j+1]); on the border, v = u"
    )
    size_names = ("h", "w")
    parameters = (Parameter("u"), Parameter("v", is_output=True))
    forbidden = ()
    naive = """\
void stencil(int h, int w, const double *u, double *v) {
    for (int i = 0; i < h; i++)
        for (int j = 0; j < w; j++)
            if (i == 0 || i == h - 1 || j == 0 || j == w - 1)
                v[i * w + j] = u[i * w + j];
            else
                v[i * w + j] = 0.5 * u[i * w + j] + 0.125 * (u[(i - 1) * w + j] + u[(i + 1) * w + j]
                                                             + u[i * w + j - 1] + u[i * w + j + 1]);
}
"""

    def __init__(self, size: int = 1280) -> None:
        self.timed = {"h": size, "w": size}

    def operations(self, size: Size) -> int:
        return 6 * max(0, size["h"] - 2) * max(0, size["w"] - 2)

    def shapes(self, size: Size) -> Mapping[str, tuple[int, ...]]:
        return {"u": (size["h"], size["w"]), "v": (size["h"], size["w"])}

    def reference(self, size: Size, inputs: Arrays) -> dict[str, np.ndarray]:
        return {"v": _jacobi(inputs["u"])}

    def bound(self, size: Size, inputs: Arrays) -> dict[str, np.ndarray]:
        # Five products and four additions: no input passes through more than 5 roundings. The border has no rounding.
        bound = _jacobi(np.abs(inputs["u"]))
        bound *= gamma(5)
        bound += 5 * SMALLEST_DENORMAL
        bound[[0, -1]] = bound[:, [0, -1]] = 0.0
        return {"v": bound}


def _jacobi(u: np.ndarray) -> np.ndarray:
    sides = u[:-2, 1:-1] + u[2:, 1:-1]
    sides += u[1:-1, :-2]
    sides += u[1:-1, 2:]
    sides /= 8
    v = u.copy()
    v[1:-1, 1:-1] /= 2
    v[1:-1, 1:-1] += sides
    return v


KERNELS = {**SHIPPED, "stencil": Stencil}
