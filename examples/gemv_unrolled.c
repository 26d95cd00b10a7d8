/* A sum is a chain: each addition waits for the one before, four or five cycles. Four rows at a time are four chains that
   do not wait for each other, and each number of x is loaded once for all of them. Beyond that, memory sets the speed: every
   number of A is used once, and no program can read it faster than it comes. */
void gemv(int m, int n, const double *A, const double *x, double *y) {
    int i = 0;
    for (; i + 4 <= m; i += 4) {
        const double *a = A + i * n, *b = a + n, *c = b + n, *d = c + n;
        double sums[4] = {0};
        for (int j = 0; j < n; j++) {
            sums[0] += a[j] * x[j];
            sums[1] += b[j] * x[j];
            sums[2] += c[j] * x[j];
            sums[3] += d[j] * x[j];
        }
        for (int r = 0; r < 4; r++)
            y[i + r] = sums[r];
    }
    for (; i < m; i++) {
        double sum = 0;
        for (int j = 0; j < n; j++)
            sum += A[i * n + j] * x[j];
        y[i] = sum;
    }
}
