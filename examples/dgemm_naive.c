/* The definition of the matrix product, one element of C after the other. It is right, and it is slow: the inner loop
   walks down a column of B, so that each step touches another line of the cache and uses one number of it. Measure every
   other program against this one. */
void dgemm(int m, int n, int k, const double *A, const double *B, double *C) {
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double sum = 0;
            for (int l = 0; l < k; l++)
                sum += A[i * k + l] * B[l * n + j];
            C[i * n + j] = sum;
        }
}
