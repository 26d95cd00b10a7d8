/* The same sums in another order. With j innermost, B and C are read along their rows, and the compiler makes vectors of
   the loop by itself. Blocks keep a piece of B in the cache until all rows of A have used it. No line knows a processor. */
enum { ROWS_OF_B = 64, COLUMNS = 256 };

static int least(int a, int b) { return a < b ? a : b; }

void dgemm(int m, int n, int k, const double *A, const double *B, double *C) {
    /* The output holds anything when a function is called, so zeros are written first. */
    for (int i = 0; i < m * n; i++)
        C[i] = 0;
    for (int l0 = 0; l0 < k; l0 += ROWS_OF_B)
        for (int j0 = 0; j0 < n; j0 += COLUMNS)
            for (int i = 0; i < m; i++) {
                double *restrict c = C + i * n;
                for (int l = l0; l < least(l0 + ROWS_OF_B, k); l++) {
                    double a = A[i * k + l];
                    const double *restrict b = B + l * n;
                    for (int j = j0; j < least(j0 + COLUMNS, n); j++)
                        c[j] += a * b[j];
                }
            }
}
