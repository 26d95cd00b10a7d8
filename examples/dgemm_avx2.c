/* A tile of 4 x 8 sums stays in registers while a whole row of A meets a whole column block of B: two loads of B serve eight
   multiply-adds. Where the processor lacks AVX2 or FMA, and at the edges, a plain loop computes what remains. */
#ifdef __AVX2__
#include <immintrin.h>
#endif

/* Rows i0 up to i1 and columns j0 up to j1 of C, one element at a time. */
static void plainly(int i0, int i1, int j0, int j1, int n, int k, const double *A, const double *B, double *C) {
    for (int i = i0; i < i1; i++)
        for (int j = j0; j < j1; j++) {
            double sum = 0;
            for (int l = 0; l < k; l++)
                sum += A[i * k + l] * B[l * n + j];
            C[i * n + j] = sum;
        }
}

void dgemm(int m, int n, int k, const double *A, const double *B, double *C) {
    int i = 0, j = 0;
#if defined(__AVX2__) && defined(__FMA__)
    for (j = 0; j + 8 <= n; j += 8)
        for (i = 0; i + 4 <= m; i += 4) {
            __m256d sums[4][2];
            for (int r = 0; r < 4; r++)
                sums[r][0] = sums[r][1] = _mm256_setzero_pd();
            for (int l = 0; l < k; l++) {
                __m256d left = _mm256_loadu_pd(B + l * n + j), right = _mm256_loadu_pd(B + l * n + j + 4);
                for (int r = 0; r < 4; r++) {
                    __m256d a = _mm256_set1_pd(A[(i + r) * k + l]);
                    sums[r][0] = _mm256_fmadd_pd(a, left, sums[r][0]);
                    sums[r][1] = _mm256_fmadd_pd(a, right, sums[r][1]);
                }
            }
            for (int r = 0; r < 4; r++) {
                _mm256_storeu_pd(C + (i + r) * n + j, sums[r][0]);
                _mm256_storeu_pd(C + (i + r) * n + j + 4, sums[r][1]);
            }
        }
    i = m / 4 * 4;
    j = n / 8 * 8;
#endif
    plainly(0, i, j, n, n, k, A, B, C);
    plainly(i, m, 0, n, n, k, A, B, C);
}
