"""Generate short programs for C = A B in the style of hand-optimized code.

Each writer draws from a random generator and returns the techniques of its program. The style is
terse, since a model of a million parameters has to write it. Loops run over i (rows of C), j
(columns) and l (the sum); block loops have capital names.
"""

import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

SIGNATURE = "void dgemm(int m,int n,int k,const double*A,const double*B,double*C){\n"
ZERO_OUTPUT = "for(int i=0;i<m*n;i++)C[i]=0;\n"
MIN_MACRO = "#define M(a,b)(a<b?a:b)\n"
PARALLEL, SIMD = "#pragma omp parallel for\n", "#pragma omp simd\n"
SIMD_SUM = "#pragma omp simd reduction(+:s)\n"
LOOP_BOUNDS = {"i": "m", "j": "n", "l": "k"}
LOOP_ORDERS = ("ijl", "ilj", "jil", "jli", "lij", "lji")
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
UNROLL_STEPS = (2, 4, 8)


class Draft(NamedTuple):
    """A correct program and its techniques."""

    source: str
    techniques: set[str]


Writer = Callable[[random.Random], Draft]


def loop_header(name: str, end: str, start: str = "0", step: int = 1) -> str:
    """Returns "for(int i=0;i<m;i++)"."""
    return f"for(int {name}={start};{name}<{end};{name}{'++' if step == 1 else f'+={step}'})"


def vector_type(lanes: int) -> str:
    """Returns the definition of v, a vector type of doubles without alignment requirement."""
    return f"typedef double v __attribute__((vector_size({8 * lanes}),aligned(8)));\n"


def draw_parallel(rng: random.Random, is_allowed: bool, techniques: set[str]) -> str:
    """Draws whether the next loop is parallel, and returns its pragma."""
    if not is_allowed or rng.random() > 0.25:
        return ""
    techniques.add("threads")
    return PARALLEL


def draw_hint(rng: random.Random, techniques: set[str], simd: str = SIMD) -> str:
    """Draws a compiler hint for an inner loop, and returns its pragma."""
    kind = rng.choices(["", "simd", "unroll"], [6, 3 if simd else 0, 2])[0]
    if kind == "simd":
        techniques.add("vectorization")
        return simd
    if kind == "unroll":
        techniques.add("blocking")
        return f"#pragma GCC unroll {rng.choice(UNROLL_STEPS)}\n"
    return ""


def plain(rng: random.Random) -> Draft:
    """Three loops in any order."""
    order = rng.choice(LOOP_ORDERS)
    techniques = {"loop_order"} if order != "ijl" else set()
    # Threads that share the loop over l would race on the elements of C.
    outer = draw_parallel(rng, order[0] != "l", techniques)
    loops = [loop_header(name, LOOP_BOUNDS[name]) + "\n" for name in order]
    if order[2] == "l":
        return _innermost_sum(rng, order, loops, outer, techniques)
    hint = draw_hint(rng, techniques)
    body = f"{loops[0]}{loops[1]}{hint}{loops[2]}C[i*n+j]+=A[i*k+l]*B[l*n+j];\n"
    # With l in the middle, one factor is invariant in the inner loop and may be read before it.
    if order[1] == "l" and rng.random() < 0.4:
        body = f"{loops[0]}{loops[1][:-1]}{{double a=A[i*k+l];\n{hint}{loops[2][:-1]}C[i*n+j]+=a*B[l*n+j];}}\n"
        body = body if order[2] == "j" else body.replace("A[i*k+l]", "B[l*n+j]").replace("a*B[l*n+j]", "A[i*k+l]*a")
    return Draft(f"{SIGNATURE}{ZERO_OUTPUT}{outer}{body}}}\n", techniques)


def _innermost_sum(rng: random.Random, order: str, loops: list[str], outer: str, techniques: set[str]) -> Draft:
    """A program that completes each element of C in turn: as a sum, by pointers, or in C itself."""
    form = rng.choice(["sum", "sum", "pointers", "memory"])
    hint = draw_hint(rng, techniques, SIMD_SUM if form != "memory" else "")
    begin, step, end = {
        "sum": ("double s=0;", "s+=A[i*k+l]*B[l*n+j];", "\nC[i*n+j]=s;"),
        "pointers": ("const double*a=A+i*k,*b=B+j;double s=0;", "s+=a[l]*b[l*n];", "\nC[i*n+j]=s;"),
        "memory": ("C[i*n+j]=0;", "C[i*n+j]+=A[i*k+l]*B[l*n+j];", ""),
    }[form]
    body = f"{loops[0]}{loops[1][:-1]}{{{begin}\n{hint}{loops[2][:-1]}{step}{end}}}\n"
    return Draft(f"{SIGNATURE}{outer}{body}}}\n", techniques)


def tiled(rng: random.Random) -> Draft:
    """Blocks in one to three dimensions."""
    inner, techniques = rng.choice(LOOP_ORDERS), {"blocking"}
    if inner != "ijl":
        techniques.add("loop_order")
    blocks = {name: rng.choice(BLOCK_SIZES) for name in rng.sample("ijl", rng.randint(1, 3))}
    outer = "".join(loop_header(name.upper(), LOOP_BOUNDS[name], "0", size) + "\n" for name, size in blocks.items())
    parallel = draw_parallel(rng, next(iter(blocks)) != "l", techniques)
    ends = {
        name: f"M({name.upper()}+{blocks[name]},{LOOP_BOUNDS[name]})" if name in blocks else LOOP_BOUNDS[name]
        for name in "ijl"
    }
    loops = [loop_header(name, ends[name], name.upper() if name in blocks else "0") for name in inner]
    if inner[2] == "l":
        hint = draw_hint(rng, techniques, SIMD_SUM)
        body = f"{loops[0]}\n{loops[1]}{{double s=0;\n{hint}{loops[2]}s+=A[i*k+l]*B[l*n+j];\nC[i*n+j]+=s;}}\n"
    else:
        hint = draw_hint(rng, techniques)
        body = f"{loops[0]}\n{loops[1]}\n{hint}{loops[2]}\nC[i*n+j]+=A[i*k+l]*B[l*n+j];\n"
    return Draft(f"{MIN_MACRO}{SIGNATURE}{ZERO_OUTPUT}{parallel}{outer}{body}}}\n", techniques)


def unrolled(rng: random.Random) -> Draft:
    """An unrolled loop, and a remainder loop."""
    steps, techniques = rng.choice(UNROLL_STEPS), {"blocking"}
    parallel = draw_parallel(rng, True, techniques)
    if rng.random() < 0.5:
        techniques.add("loop_order")
        written = "".join(f"c[j+{u}]+=a*b[j+{u}];" for u in range(steps)).replace("+0]", "]")
        body = (
            f"{parallel}{loop_header('i', 'm')}\n{loop_header('l', 'k')}"
            "{double a=A[i*k+l],*c=C+i*n;const double*b=B+l*n;int j=0;\n"
            f"for(;j+{steps}<=n;j+={steps}){{{written}}}\nfor(;j<n;j++)c[j]+=a*b[j];}}\n"
        )
        return Draft(f"{SIGNATURE}{ZERO_OUTPUT}{body}}}\n", techniques)
    sums = "stuvwxyz"[: steps if rng.random() < 0.6 else 1]
    terms = [f"a[{u}]*b[{u}*n]" for u in range(steps)]
    written = "".join(f"{sums[u % len(sums)]}+={term.replace('0*n', '0')};" for u, term in enumerate(terms))
    body = (
        f"{parallel}{loop_header('i', 'm')}\n{loop_header('j', 'n')}{{const double*a=A+i*k,*b=B+j;int l=0;"
        f"double {','.join(f'{name}=0' for name in sums)};\n"
        f"for(;l+{steps}<=k;l+={steps}){{{written}a+={steps};b+={steps}*n;}}\n"
        f"for(;l<k;l++){{s+=*a++**b;b+=n;}}\nC[i*n+j]={'+'.join(sums)};}}\n"
    )
    return Draft(f"{SIGNATURE}{body}}}\n", techniques)


def registers(rng: random.Random) -> Draft:
    """A tile of sums in registers, as a helper that the compiler specializes for the full size."""
    rows, columns = rng.choice([(2, 4), (2, 8), (4, 4), (4, 8), (6, 8), (8, 4), (8, 8), (4, 16)])
    techniques, order = {"blocking"}, rng.choice(["ij", "ji"])
    if order == "ji":
        techniques.add("loop_order")
    parallel = draw_parallel(rng, True, techniques)
    steps = {"i": rows, "j": columns}
    helper = (
        f"static inline void t(int h,int w,int n,int k,const double*A,const double*B,double*C){{"
        f"double s[{rows}][{columns}]={{0}};\n"
        f"{loop_header('l', 'k')}{loop_header('r', 'h')}{loop_header('c', 'w')}s[r][c]+=A[r*k+l]*B[l*n+c];\n"
        f"{loop_header('r', 'h')}{loop_header('c', 'w')}C[r*n+c]=s[r][c];}}\n"
    )
    at = "n,k,A+i*k,B+j,C+i*n+j)"
    body = (
        "".join(loop_header(name, LOOP_BOUNDS[name], "0", steps[name]) + "\n" for name in order)
        + f"i+{rows}<=m&&j+{columns}<=n?t({rows},{columns},{at}:t(M({rows},m-i),M({columns},n-j),{at};\n"
    )
    return Draft(f"{MIN_MACRO}{helper}{SIGNATURE}{parallel}{body}}}\n", techniques)


def vectors(rng: random.Random) -> Draft:
    """GNU C vectors: along a row of C, or a column of vector sums."""
    lanes, techniques = rng.choice([2, 4, 8]), {"vectorization"}
    parallel = draw_parallel(rng, True, techniques)
    if rng.random() < 0.4:
        techniques.add("loop_order")
        body = (
            f"{parallel}{loop_header('i', 'm')}\n{loop_header('l', 'k')}{{double a=A[i*k+l];int j=0;\n"
            f"for(;j+{lanes}<=n;j+={lanes})*(v*)(C+i*n+j)+=a**(v*)(B+l*n+j);\nfor(;j<n;j++)C[i*n+j]+=a*B[l*n+j];}}\n"
        )
        return Draft(f"{vector_type(lanes)}{SIGNATURE}{ZERO_OUTPUT}{body}}}\n", techniques)
    rows = rng.choice([1, 2, 4, 8])
    edge = (
        f"{loop_header('i', 'm')}\n{loop_header('j', 'n', f'n/{lanes}*{lanes}')}{{double s=0;\n"
        f"{loop_header('l', 'k')}s+=A[i*k+l]*B[l*n+j];\nC[i*n+j]=s;}}\n"
    )
    if rows == 1:
        body = (
            f"{parallel}{loop_header('i', 'm')}\nfor(int j=0;j+{lanes}<=n;j+={lanes}){{v s={{0}};\n"
            f"{loop_header('l', 'k')}s+=A[i*k+l]**(v*)(B+l*n+j);\n*(v*)(C+i*n+j)=s;}}\n"
        )
        return Draft(f"{vector_type(lanes)}{SIGNATURE}{body}{edge}}}\n", techniques)
    techniques.add("blocking")
    helper = (
        f"static inline void t(int h,int n,int k,const double*A,const double*B,double*C){{v s[{rows}]={{0}};\n"
        f"{loop_header('l', 'k')}{loop_header('r', 'h')}s[r]+=A[r*k+l]**(v*)(B+l*n);\n"
        f"{loop_header('r', 'h')}*(v*)(C+r*n)=s[r];}}\n"
    )
    at = "n,k,A+i*k,B+j,C+i*n+j)"
    body = (
        f"{parallel}{loop_header('i', 'm', '0', rows)}\nfor(int j=0;j+{lanes}<=n;j+={lanes})\n"
        f"i+{rows}<=m?t({rows},{at}:t(m-i,{at};\n"
    )
    return Draft(f"{vector_type(lanes)}{helper}{SIGNATURE}{body}{edge}}}\n", techniques)


def packed(rng: random.Random) -> Draft:
    """A packed copy of a part of B, in the order of its use."""
    techniques, kind = {"packing"}, rng.choice(["column", "transposed", "panel", "panel"])
    if kind == "column":
        techniques.add("loop_order")
        parallel = draw_parallel(rng, True, techniques)
        body = f"{parallel}{loop_header('j', 'n')}{{double t[k];\n{loop_header('l', 'k')}t[l]=B[l*n+j];\n"
        hint = draw_hint(rng, techniques, SIMD_SUM)
        body += (
            f"{loop_header('i', 'm')}{{double s=0;\n{hint}{loop_header('l', 'k')}s+=A[i*k+l]*t[l];\nC[i*n+j]=s;}}}}\n"
        )
        return Draft(f"{SIGNATURE}{body}}}\n", techniques)
    if kind == "transposed":
        parallel = draw_parallel(rng, True, techniques)
        hint = draw_hint(rng, techniques, SIMD_SUM)
        body = f"double*t=malloc(8l*n*k);\n{loop_header('l', 'k')}{loop_header('j', 'n')}t[j*k+l]=B[l*n+j];\n"
        body += f"{parallel}{loop_header('i', 'm')}\n{loop_header('j', 'n')}{{double s=0;\n"
        body += f"{hint}{loop_header('l', 'k')}s+=A[i*k+l]*t[j*k+l];\n"
        return Draft(f"#include<stdlib.h>\n{SIGNATURE}{body}C[i*n+j]=s;}}\nfree(t);}}\n", techniques)
    techniques |= {"blocking", "loop_order"}
    size = rng.choice([32, 64, 128])
    parallel, hint = draw_parallel(rng, True, techniques), draw_hint(rng, techniques)
    body = (
        f"{loop_header('L', 'k', '0', size)}\n{loop_header('J', 'n', '0', size)}{{int d=M({size},k-L),w=M({size},n-J);\n"
        f"{loop_header('l', 'd')}{loop_header('j', 'w')}p[l*{size}+j]=B[(L+l)*n+J+j];\n"
        f"{parallel}{loop_header('i', 'm')}\n{loop_header('l', 'd')}{{double a=A[i*k+L+l];\n"
        f"{hint}{loop_header('j', 'w')}C[i*n+J+j]+=a*p[l*{size}+j];}}}}\n"
    )
    buffer = f"static double p[{size * size}];\n"
    return Draft(f"{MIN_MACRO}{buffer}{SIGNATURE}{ZERO_OUTPUT}{body}}}\n", techniques)


WRITERS: Mapping[Writer, int] = {plain: 4, tiled: 4, unrolled: 3, registers: 3, vectors: 3, packed: 2}
"""Writer -> relative frequency."""
