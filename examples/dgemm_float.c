/* Wrong on purpose: it computes in single precision. The figures look right, and to seven digits they are, so that a loose
   tolerance accepts them. The bound of the operation in double precision does not: the outcome is wrong_result. */
void dgemm(int m, int n, int k, const double *A, const double *B, double *C) {
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            float sum = 0;
            for (int l = 0; l < k; l++)
                sum += (float)A[i * k + l] * (float)B[l * n + j];
            C[i * n + j] = sum;
        }
}
