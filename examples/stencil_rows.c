/* The border is no business of the inner loop: without a question in it, and with `restrict`, which promises that the rows do
   not overlap, the compiler makes vectors of it. Three rows of the grid fit into the cache, so each number comes from
   memory once. */
#include <string.h>

static void inside(int w, const double *restrict above, const double *restrict u, const double *restrict below,
                   double *restrict v) {
    for (int j = 1; j < w - 1; j++)
        v[j] = 0.5 * u[j] + 0.125 * ((above[j] + below[j]) + (u[j - 1] + u[j + 1]));
}

void stencil(int h, int w, const double *u, double *v) {
    for (int i = 0; i < h; i++) {
        const double *row = u + (long)i * w;
        double *out = v + (long)i * w;
        if (i == 0 || i == h - 1) {
            memcpy(out, row, sizeof(double) * w);
            continue;
        }
        inside(w, row - w, row, row + w, out);
        out[0] = row[0];
        out[w - 1] = row[w - 1];
    }
}
