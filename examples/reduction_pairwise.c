/* Halves are summed apart and then added, down to short runs, which are summed in eight chains. The error grows with the
   logarithm of n and not with n, and the chains do not wait for each other: more exact than a loop, and faster. The
   checker's bound allows every order of the additions, this one too. */
enum { RUN = 1024, CHAINS = 8 };

static double sum_of(const double *x, int n) {
    if (n > RUN) {
        int half = n / 2 / CHAINS * CHAINS;
        return sum_of(x, half) + sum_of(x + half, n - half);
    }
    double sums[CHAINS] = {0};
    int i = 0;
    for (; i + CHAINS <= n; i += CHAINS)
        for (int c = 0; c < CHAINS; c++)
            sums[c] += x[i + c];
    for (; i < n; i++)
        sums[i % CHAINS] += x[i];
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

void reduction(int n, const double *x, double *total) { *total = sum_of(x, n); }
