"""What the screen refuses, and above all what it lets pass: honest programs in every style."""

import shutil
import subprocess
import time

import pytest

pytest.importorskip("tree_sitter_c")

from torchtune_ext.measured.kernel import prototype
from torchtune_ext.measured.kernels import KERNELS, Dgemm
from torchtune_ext.measured.screen import screen

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

DGEMM = Dgemm()

HONEST = {
    "intrinsics": """\
#include <immintrin.h>
void dgemm(int m, int n, int k, const double *A, const double *B, double *C) {
    for (int i = 0; i < m; i++) {
        int j = 0;
#ifdef __AVX2__
        for (; j + 4 <= n; j += 4) {
            __m256d sum = _mm256_setzero_pd();
            for (int l = 0; l < k; l++)
                sum = _mm256_fmadd_pd(_mm256_set1_pd(A[i * k + l]), _mm256_loadu_pd(&B[l * n + j]), sum);
            _mm256_storeu_pd(&C[i * n + j], sum);
        }
#endif
        _mm_prefetch((const char *)&A[i * k], _MM_HINT_T0);
        for (; j < n; j++) { double s = 0; for (int l = 0; l < k; l++) s += A[i*k+l]*B[l*n+j]; C[i*n+j] = s; }
    }
}
""",
    "openmp": """\
#include <omp.h>
#include <stdio.h>
void dgemm(int m, int n, int k, const double *A, const double *B, double *C) {
    int threads = omp_get_max_threads();
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double sum = 0;
            #pragma omp simd reduction(+ : sum)
            for (int l = 0; l < k; l++) sum += A[i * k + l] * B[l * n + j];
            C[i * n + j] = sum;
        }
}
""",
    "helpers, restrict, variable arrays": """\
#include <stdlib.h>
#include <string.h>
typedef double row[restrict];
static inline __attribute__((always_inline, hot)) void my_gemv(int n, const double *restrict a, double *restrict out) {
    double packed[n] __attribute__((aligned(64)));
    memcpy(packed, a, n * sizeof *packed);
    for (int i = 0; i < n; i++) out[i] += packed[i];
}
void dgemm(int m, int n, int k, const double *A, const double *B, double *C) {
    double (*b)[n] = (double (*)[n])B;
    double *copy = aligned_alloc(64, ((size_t)k * 8 + 63) / 64 * 64);
    if (!copy) abort();
    for (int i = 0; i < m; i++) { my_gemv(n, b[0], C); __builtin_prefetch(&A[i], 0, 3); }
    free(copy);
}
""",
    "macros": """\
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define STEP(i) c##i += a##i * B[l * n + j];
#define BLOCK 64
#pragma GCC optimize("O3", "unroll-loops")
#pragma GCC target("avx2,fma")
_Static_assert(sizeof(double) == 8, "doubles");
void dgemm(int m, int n, int k, const double *A, const double *B, double *C) {
    const double a0 = *A; double c0 = 0;
    for (int j = 0; j < MIN(n, BLOCK); j++)
        for (int l = 0; l < k; l++) { STEP(0) }
    C[0] = c0;
}
""",
    "names that the system has too": """\
#include <math.h>
#include <complex.h>
#include <assert.h>
struct point { double time, read; };
static double stride_of(int strassen, double memory) { return strassen * memory; }
static double sign(double sigma) { return copysign(1.0, sigma); }
void dgemm(int m, int n, int k, const double *A, const double *B, double *C) {
    double time = 0, (*read)(double) = sign;
    int link[4] = {0}, section = 1, weak = 2, cleanup = 3;
    struct point p = {.time = 1}, *q = &p;
    double complex z = 1.0 * I;
    assert(m > 0);
    for (int clock = 0; clock < m; clock++) time += read(clock) + link[0] + q->time + p.read + creal(z);
    C[0] = time + stride_of(section, weak) + cleanup + INFINITY;
}
""",
    "gnu extensions": """\
typedef double v4 __attribute__((vector_size(32), aligned(8)));
void dgemm(int m, int n, int k, const double *__restrict__ A, const double *__restrict B, double *C) {
    __typeof__(*A) sum = 0;
    C = __builtin_assume_aligned(C, 64);
    if (__builtin_expect(m == 0, 0)) return;
    v4 x = {0}; x += *(const v4 *)A;
    sum = ({ double t = x[0]; t * 2; });
    switch (n) { case 1 ... 3: goto done; default: break; }
#pragma GCC ivdep
#pragma GCC unroll 8
    for (int i = 0; i < m; i++) C[i] = sum;
done:;
}
""",
    "comments and strings": """\
#include <stdio.h>
/* system("rm -rf /"); fork(); asm("syscall"); # 1 line of it
 * #include <unistd.h> */
void dgemm(int m, int n, int k, const double *A, const double *B, double *C) {
    // system(), mmap() and __asm__ would be faster: matrix R"
    if (m < 0) fprintf(stderr, "system(fork) /* R\\" asm # lines");
    C[0] = 'R' "x"[0];
}
""",
}

BODY = "void dgemm(int m, int n, int k, const double *A, const double *B, double *C) { %s }\n"
FORBIDDEN = {
    "header": ("#include <unistd.h>\n", "line 1: includes unistd.h"),
    "header of a header": ("#include <sys/time.h>\n", "includes time.h"),
    "header behind a macro": ("#define H <dlfcn.h>\n#include H\n", "line 2: includes dlfcn.h"),
    "file of the system": ('\n#include "/etc/passwd"\n', "line 2: includes a file by its path"),
    "file above": ("# include <../../etc/passwd>\n", "includes a file by its path"),
    "its own file": ("#ifndef X\n#define X\n#include __FILE__\n#endif\n", "line 3: includes candidate.c"),
    "call": ("\n" + BODY % 'extern int system(const char *); system("ls");', "line 2: calls system()"),
    "without a declaration": (BODY % 'system ("ls");', "line 1: calls system()"),
    "behind a macro": ("#define GO(x) sys##x\n\n" + BODY % 'GO(tem)("ls");', "line 3: calls system()"),
    "address": (BODY % "int (*run)(const char *) = (void *)system;", "uses system"),
    "in parentheses": (BODY % "(fork)();", "fork"),
    "typeof": (BODY % "__typeof__(fork) *p;", "fork"),
    "builtin": (BODY % "__builtin_execl(0);", "__builtin_execl"),
    "local name in another block": (BODY % "{ int fork = 0; } fork();", "calls fork()"),
    "extern variable": ("extern char system; " + BODY % "((int (*)(const char *))&system)(0);", "system"),
    "clock": (BODY % "struct timespec { long a, b; } t; clock_gettime(1, &t);", "reads a clock"),
    "cycle counter": ("#include <immintrin.h>\n" + BODY % "*C = __rdtsc();", "reads a clock"),
    "builtin of the cycle counter": (BODY % "*C = __builtin_ia32_rdtsc();", "reads a clock"),
    "threads": (BODY % "pthread_t t; pthread_create(&t, 0, 0, 0);", "makes threads without OpenMP"),
    "environment": ("extern char **environ; " + BODY % "", "environ"),
    "BLAS": (BODY % "cblas_dgemm(1);", "which the problem does not allow"),
    "BLAS of Fortran": (BODY % "dgemm_(1);", "which the problem does not allow"),
    "assembly": (BODY % '__asm__ volatile("syscall");', "assembly"),
    "assembly of the file": ('asm(".globl x");\n', "line 1: holds assembly"),
    "name of assembly": ('int harmless(void) __asm__("fork");\n', "assembly"),
    "register": (BODY % 'register long x __asm("rax");', "assembly"),
    "constructor": ("__attribute__((constructor)) static void f(void) {}\n", "attribute constructor"),
    "constructor with underscores": ("static void __attribute__ ((__constructor__(101))) f(void) {}\n", "constructor"),
    "constructor behind the name": ("static void f(void) __attribute((unused, constructor));\n", "constructor"),
    "constructor of C23": ("[[gnu::constructor]] static void f(void) {}\n", "constructor"),
    "constructor in digraphs": ("<:<:gnu::destructor:>:> static void f(void) <%%>\n", "destructor"),
    "section": ('__attribute__((section(".init_array"))) void *p = 0;\n', "section"),
    "ifunc": ('void f(void) __attribute__((ifunc("g")));\n', "ifunc"),
    "redefined malloc": ("void *malloc(unsigned long n) { return 0; }\n", "defines malloc"),
    "redefined memcpy": ("void *(memcpy)(void *a, const void *b, unsigned long n) { return a; }\n", "defines memcpy"),
    "redefined clock": ("int clock_gettime(int id, void *t) { return 0; }\n", "defines clock_gettime"),
    "variable in the place of a function": ("void *(*free)(void *) = 0;\n", "defines free"),
    "renamed": ("#pragma redefine_extname harmless system\n", "#pragma redefine_extname"),
    "renamed by a string": ('_Pragma("redefine_extname harmless system")\n', "#pragma redefine_extname"),
    "another file's lines": ('# 1 "/usr/include/stdlib.h" 1 3\n' + BODY % "fork();", "lines are those of another file"),
    "another line": ('/* x\n */ # line 7 "/usr/include/stdlib.h"\n', "lines are those of another file"),
    "comment in a directive": ('# /* y */ line 7 "/usr/include/stdlib.h"\n', "lines are those of another file"),
    "continued line": ('#\\\nline 7 "/usr/include/stdlib.h"\n', "lines are those of another file"),
    "raw string": ('const char *s = R"(")"; int x = sizeof(fork()); const char *t = R"(")";\n', "raw string"),
    "comment in a pragma": ('#pragma x "/*"\nint y = sizeof(fork());\n/* */\n', "calls fork()"),
    "behind text that is no C": ("int 3x = = ;; } ) @\n" + BODY % "fork();", "calls fork()"),
}  # fmt: skip


def preprocess(source: str, folder, kernel=DGEMM) -> str:
    (folder / "candidate.c").write_text(source)
    (folder / "kernel.h").write_text(prototype(kernel) + ";\n")
    command = ["gcc", "-E", "-std=gnu17", "-march=native", "-fopenmp", "-include", "kernel.h", "candidate.c"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60).stdout


@needs_gcc
@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_pass(name, tmp_path):
    assert screen(preprocess(HONEST[name], tmp_path), HONEST[name], DGEMM) == ""


@needs_gcc
@pytest.mark.parametrize("name", KERNELS)
def test_naive_programs_pass(name, tmp_path):
    kernel = KERNELS[name]()
    assert screen(preprocess(kernel.naive, tmp_path, kernel), kernel.naive, kernel) == ""


@needs_gcc
@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden(name, tmp_path):
    source, message = FORBIDDEN[name]
    assert message in screen(preprocess(source, tmp_path), source, DGEMM)


def marked(source: str) -> str:
    return f'# 1 "candidate.c"\n{source}'


@pytest.mark.parametrize(
    "pair", ["()", "{}", "[]", "* ", "- ", ("int f(int a, ", ")"), ("{ int x; ", "x; }"), ("x?", ":1")]
)
def test_screen_deep_nesting_still_detects_forbidden_calls(pair):
    before, after = pair
    text = f"int a = {before * 3_000}1{after * 3_000}; int b = fork();"
    assert "calls fork()" in screen(marked(text), text, DGEMM, deadline_s=60)


def test_it_ends_in_time():
    text = "int a = " + "((((" * 40_000 + "{}}}" * 40_000
    with pytest.raises(TimeoutError, match="too long"):
        screen(marked(text), text, DGEMM, deadline_s=0.02)


@pytest.mark.parametrize(
    "piece", ["#/*", "# 1 ", "# include", "#include <../", "\\\\ ", "#line", '# 1 "', "%:", "/*#", "*/"]
)
def test_no_source_makes_the_patterns_slow(piece):
    start = time.monotonic()
    for source in (piece * 50_000, f"{piece * 50_000}*/ \n", piece + " " * 200_000):
        screen(marked(""), source, DGEMM)
    # A second is a hundred times what it takes; a pattern that tries all pairs of places takes minutes.
    assert time.monotonic() - start < 10


def test_size_of_the_expanded_text_has_a_bound():
    text = "int a[] = {" + "1, " * 400_000 + "};"
    assert "at most 400000 are read" in screen(marked(text), text, DGEMM)
    text = "int a[] = {" + "1, " * 20_000 + "};"
    assert screen(marked(text), text, DGEMM, deadline_s=60) == ""


@pytest.mark.parametrize(
    "text", ["", "\0", "no C at all", "\ud800", "🙂 void", "int f(", '"', "'", "/*", "((((", "}}}}", "# 1 x"]
)
def test_screen_non_c_text_is_left_to_compiler(text):
    assert screen(marked(text), text, DGEMM) == ""


def test_header_alone_is_not_read():
    text = (
        '# 1 "candidate.c"\n# 1 "/usr/include/stdlib.h" 1 3 4\nint system(const char *);\n# 2 "candidate.c" 2\nint x;\n'
    )
    assert screen(text, "#include <stdlib.h>\nint x;\n", DGEMM) == ""
