"""The fixed kernel: always the same work, whose time says how the machine is just now, and what it can do at best."""

from collections.abc import Mapping

import numpy as np

from torchtune_ext.tasks.measured.kernel import Arrays, Parameter, Size

ROUNDS, NUMBERS = 200_000, 1 << 20  # about a millisecond each of multiplying and adding, and of reading 8 MB
CHAINS = 10  # sums that do not wait for each other, enough for two units with a latency of four or five cycles


class Fixed:
    """`rounds` times multiply and add in registers, then the sum of n numbers. No candidate is asked for it."""

    name = "fixed"
    question = ""
    size_names = ("rounds", "n")
    parameters = (Parameter("x"), Parameter("y", is_output=True))
    forbidden = ()
    timed: Size = {"rounds": ROUNDS, "n": NUMBERS}
    naive = """\
#if defined(__AVX512F__)
#define WIDTH 8
#elif defined(__AVX__)
#define WIDTH 4
#else
#define WIDTH 2
#endif
typedef double lanes __attribute__((vector_size(8 * WIDTH)));
typedef double loose __attribute__((vector_size(8 * WIDTH), aligned(8)));
#define CHAINS 10

void fixed(int rounds, int n, const double *x, double *y) {
    lanes sums[CHAINS], factor, term;
    for (int j = 0; j < WIDTH; j++)
        factor[j] = 0.999999, term[j] = 1e-6;
    for (int i = 0; i < CHAINS; i++)
        sums[i] = term * (double)(i + 1);
    for (int r = 0; r < rounds; r++)
        for (int i = 0; i < CHAINS; i++)
            sums[i] = sums[i] * factor + term;
    lanes read[4] = {{0}};
    int j = 0;
    for (; j + 4 * WIDTH <= n; j += 4 * WIDTH)
        for (int i = 0; i < 4; i++)
            read[i] += *(const loose *)(x + j + i * WIDTH);
    double total = 0;
    for (; j < n; j++)
        total += x[j];
    for (int i = 0; i < CHAINS; i++)
        for (int l = 0; l < WIDTH; l++)
            total += sums[i][l] * 1e-300;
    for (int i = 0; i < 4; i++)
        for (int l = 0; l < WIDTH; l++)
            total += read[i][l];
    y[0] = total;
    y[1] = WIDTH;
}
"""

    def operations(self, size: Size) -> int:
        """For vectors of 1 number; times y[1] for those of this machine."""
        return 2 * CHAINS * size["rounds"] + size["n"]

    def shapes(self, size: Size) -> Mapping[str, tuple[int, ...]]:
        return {"x": (size["n"],), "y": (2,)}

    def reference(self, size: Size, inputs: Arrays) -> dict[str, np.ndarray]:
        raise NotImplementedError("the fixed kernel is ours, and is not verified")

    bound = reference
