"""The fixed kernel: always the same work, whose time says how the machine is just now, and what it can do at best."""

from collections.abc import Mapping

import numpy as np

from torchtune_ext.measured.kernel import Arrays, Parameter, Size

CHAINS = 10  # sums that do not wait for each other, enough for two units with a latency of four or five cycles
# Numbers of its own memory: 8 MB, so that a neighbor shows who uses the cache that cores share, or the memory.
NUMBERS = 1 << 20
REGISTERS: Size = {"rounds": 400_000, "n": 0}  # about half a millisecond
MEMORY: Size = {"rounds": 0, "n": NUMBERS}  # about a fifth of a millisecond
EMPTY: Size = {"rounds": 0, "n": 0}


class Fixed:
    """`rounds` times multiply and add in registers, then the sum of n numbers of its own. No candidate is asked for it."""

    name = "fixed"
    question = ""
    size_names = ("rounds", "n")
    parameters = (Parameter("y", is_output=True),)
    forbidden = ()
    timed: Size = REGISTERS
    naive = """\
#define CHAINS @CHAINS@
#define NUMBERS @NUMBERS@
#if defined(__AVX512F__)
#define WIDTH 8
#elif defined(__AVX__)
#define WIDTH 4
#else
#define WIDTH 2
#endif
typedef double lanes __attribute__((vector_size(8 * WIDTH)));
static double memory[NUMBERS] __attribute__((aligned(64)));

void fixed(int rounds, int n, double *y) {
    static int filled;
    lanes sums[CHAINS], factor, term;
    for (int j = 0; j < WIDTH; j++)
        factor[j] = 0.999999, term[j] = 1e-6;
    for (int i = 0; i < CHAINS; i++)
        sums[i] = term * (double)(i + 1);
    for (int r = 0; r < rounds; r++)
        for (int i = 0; i < CHAINS; i++)
            sums[i] = sums[i] * factor + term;
    for (; filled < NUMBERS; filled++)  /* a page that nobody has written would be read from one that all share */
        memory[filled] = 1;
    lanes read[4] = {{0}};
    for (int j = 0; j + 4 * WIDTH <= n; j += 4 * WIDTH)
        for (int i = 0; i < 4; i++)
            read[i] += *(const lanes *)(memory + j + i * WIDTH);
    double total = 0;
    for (int i = 0; i < CHAINS; i++)
        for (int l = 0; l < WIDTH; l++)
            total += sums[i][l] * 1e-300;
    for (int i = 0; i < 4; i++)
        for (int l = 0; l < WIDTH; l++)
            total += read[i][l];
    y[0] = total;
    y[1] = WIDTH;
}
""".replace("@CHAINS@", str(CHAINS)).replace("@NUMBERS@", str(NUMBERS))

    def operations(self, size: Size) -> int:
        """For vectors of 1 number; times y[1] for those of this machine. What it reads is not counted."""
        return 2 * CHAINS * size["rounds"]

    def shapes(self, size: Size) -> Mapping[str, tuple[int, ...]]:
        return {"y": (2,)}

    def reference(self, size: Size, inputs: Arrays) -> dict[str, np.ndarray]:
        raise NotImplementedError("the fixed kernel is ours, and is not verified")

    bound = reference
