"""Writes short programs for the other kernels: matrix times vector, a stencil, a sum."""

import random
from collections.abc import Mapping

from torchtune_ext.measured.matmul.writers import (
    LEAST,
    PARALLEL,
    SIMD_SUM,
    STEPS,
    Draft,
    Writer,
    draft,
    hinted,
    loop,
    threaded,
    vector_type,
)

GEMV_HEAD = "void gemv(int m,int n,const double*A,const double*x,double*y){\n"
STENCIL_HEAD = "void stencil(int h,int w,const double*u,double*v){\n"
REDUCTION_HEAD = "void reduction(int n,const double*x,double*total){\n"
POINT = "v[i*w+j]=.5*u[i*w+j]+.125*(u[i*w-w+j]+u[i*w+w+j]+u[i*w+j-1]+u[i*w+j+1]);\n"


def gemv_plain(rng: random.Random) -> Draft:
    techniques: set[str] = set()
    if rng.random() < 0.4:
        techniques.add("loop_order")
        hint = hinted(rng, techniques)
        body = f"{loop('i', 'm')}y[i]=0;\n{loop('j', 'n')}\n{hint}{loop('i', 'm')}y[i]+=A[i*n+j]*x[j];\n"
        return draft(f"{GEMV_HEAD}{body}}}\n", techniques, "by columns")
    parallel, hint = threaded(rng, True, techniques), hinted(rng, techniques, SIMD_SUM)
    body = f"{parallel}{loop('i', 'm')}{{double s=0;\n{hint}{loop('j', 'n')}s+=A[i*n+j]*x[j];\ny[i]=s;}}\n"
    return draft(f"{GEMV_HEAD}{body}}}\n", techniques, "by rows")


def gemv_blocked(rng: random.Random) -> Draft:
    techniques, size = {"blocking"}, rng.choice([64, 128, 256, 512])
    hint = hinted(rng, techniques, SIMD_SUM)
    body = f"{loop('i', 'm')}y[i]=0;\n{loop('J', 'n', '0', size)}\n{loop('i', 'm')}{{double s=0;\n"
    body += f"{hint}{loop('j', f'M(J+{size},n)', 'J')}s+=A[i*n+j]*x[j];\ny[i]+=s;}}\n"
    return draft(f"{LEAST}{GEMV_HEAD}{body}}}\n", techniques, f"blocks of {size} columns")


def gemv_chains(rng: random.Random) -> Draft:
    techniques, steps = {"unrolling", "register_accumulation"}, rng.choice(STEPS)
    parallel, sums = threaded(rng, True, techniques), "stuvabcd"[:steps]
    written = "".join(f"{name}+=r[j+{u}]*x[j+{u}];" for u, name in enumerate(sums)).replace("+0]", "]")
    body = (
        f"{parallel}{loop('i', 'm')}{{const double*r=A+i*n;double {','.join(f'{name}=0' for name in sums)};int j=0;\n"
        f"for(;j+{steps}<=n;j+={steps}){{{written}}}\nfor(;j<n;j++)s+=r[j]*x[j];\ny[i]={'+'.join(sums)};}}\n"
    )
    return draft(f"{GEMV_HEAD}{body}}}\n", techniques, f"{steps} sums of a row")


def gemv_rows(rng: random.Random) -> Draft:
    techniques, rows = {"register_accumulation"}, rng.choice(STEPS)
    body = (
        f"int i=0;\nfor(;i+{rows}<=m;i+={rows}){{double s[{rows}]={{0}};\n"
        f"{loop('j', 'n')}{loop('r', str(rows))}s[r]+=A[(i+r)*n+j]*x[j];\n{loop('r', str(rows))}y[i+r]=s[r];}}\n"
        f"for(;i<m;i++){{double s=0;\n{loop('j', 'n')}s+=A[i*n+j]*x[j];\ny[i]=s;}}\n"
    )
    return draft(f"{GEMV_HEAD}{body}}}\n", techniques, f"{rows} rows at a time")


def gemv_vectors(rng: random.Random) -> Draft:
    techniques, lanes = {"vectorization"}, rng.choice([2, 4, 8])
    parallel = threaded(rng, True, techniques)
    lanes_sum = "+".join(f"s[{lane}]" for lane in range(lanes))
    body = (
        f"{parallel}{loop('i', 'm')}{{v s={{0}};double t=0;int j=0;\n"
        f"for(;j+{lanes}<=n;j+={lanes})s+=*(v*)(A+i*n+j)**(v*)(x+j);\nfor(;j<n;j++)t+=A[i*n+j]*x[j];\n"
        f"y[i]=t+{lanes_sum};}}\n"
    )
    return draft(f"{vector_type(lanes)}{GEMV_HEAD}{body}}}\n", techniques, f"a sum of {lanes} lanes")


def stencil_asks(rng: random.Random) -> Draft:
    order, techniques = rng.choice(["ij", "ji"]), set()
    if order == "ji":
        techniques.add("loop_order")
    parallel, hint = threaded(rng, True, techniques), hinted(rng, techniques, "")
    ends = {"i": "h", "j": "w"}
    loops = f"{parallel}{loop(order[0], ends[order[0]])}\n{hint}{loop(order[1], ends[order[1]])}\n"
    body = f"{loops}if(i==0||i==h-1||j==0||j==w-1)v[i*w+j]=u[i*w+j];\nelse {POINT}"
    return draft(f"{STENCIL_HEAD}{body}}}\n", techniques, f"loops {order}, each point asks for the border")


def stencil_split(rng: random.Random) -> Draft:
    techniques: set[str] = set()
    size = rng.choice([0, 64, 128, 256])
    border = (
        "for(int j=0;j<w;j++)v[j]=u[j],v[h*w-w+j]=u[h*w-w+j];\n"
        "for(int i=1;i<h-1;i++)v[i*w]=u[i*w],v[i*w+w-1]=u[i*w+w-1];\n"
    )
    parallel, hint = threaded(rng, True, techniques), hinted(rng, techniques)
    if not size:
        inside = f"{parallel}{loop('i', 'h-1', '1')}\n{hint}{loop('j', 'w-1', '1')}\n{POINT}"
        return draft(f"{STENCIL_HEAD}{border}{inside}}}\n", techniques, "the border apart")
    techniques.add("blocking")
    inside = f"{parallel}{loop('J', 'w-1', '1', size)}\n{loop('i', 'h-1', '1')}\n{hint}{loop('j', f'M(J+{size},w-1)', 'J')}\n"
    return draft(
        f"{LEAST}{STENCIL_HEAD}{border}{inside}{POINT}}}\n", techniques, f"the border apart, blocks of {size} columns"
    )


def reduction_plain(rng: random.Random) -> Draft:
    techniques: set[str] = set()
    hint = hinted(rng, techniques, SIMD_SUM)
    if not techniques and rng.random() < 0.3:
        hint = PARALLEL.replace("for\n", "for reduction(+:s)\n")
        techniques.add("threads")
    body = f"double s=0;\n{hint}{loop('i', 'n')}s+=x[i];\n*total=s;\n"
    return draft(f"{REDUCTION_HEAD}{body}}}\n", techniques, "one sum")


def reduction_chains(rng: random.Random) -> Draft:
    techniques, chains = {"register_accumulation"}, rng.choice([2, 4, 8, 16, 32])
    body = (
        f"double s[{chains}]={{0}};int i=0;\nfor(;i+{chains}<=n;i+={chains}){loop('c', str(chains))}s[c]+=x[i+c];\n"
        f"for(;i<n;i++)s[0]+=x[i];\n{loop('c', str(chains), '1')}s[0]+=s[c];\n*total=s[0];\n"
    )
    return draft(f"{REDUCTION_HEAD}{body}}}\n", techniques, f"{chains} sums")


def reduction_vectors(rng: random.Random) -> Draft:
    lanes = rng.choice([2, 4, 8])
    body = (
        f"v s={{0}};int i=0;double t=0;\nfor(;i+{lanes}<=n;i+={lanes})s+=*(v*)(x+i);\nfor(;i<n;i++)t+=x[i];\n"
        f"{loop('c', str(lanes))}t+=s[c];\n*total=t;\n"
    )
    return draft(f"{vector_type(lanes)}{REDUCTION_HEAD}{body}}}\n", {"vectorization"}, f"a sum of {lanes} lanes")


def reduction_blocked(rng: random.Random) -> Draft:
    size, techniques = rng.choice([256, 1024, 4096]), {"blocking"}
    hint = hinted(rng, techniques, SIMD_SUM)
    body = f"double t=0;\n{loop('I', 'n', '0', size)}{{double s=0;\n{hint}{loop('i', f'M(I+{size},n)', 'I')}s+=x[i];\nt+=s;}}\n"
    return draft(f"{LEAST}{REDUCTION_HEAD}{body}*total=t;\n}}\n", techniques, f"sums of {size} numbers")


GEMV: Mapping[Writer, int] = {gemv_plain: 3, gemv_blocked: 1, gemv_chains: 2, gemv_rows: 1, gemv_vectors: 1}
STENCIL: Mapping[Writer, int] = {stencil_asks: 1, stencil_split: 2}
REDUCTION: Mapping[Writer, int] = {
    reduction_plain: 2,
    reduction_chains: 2,
    reduction_vectors: 1,
    reduction_blocked: 1,
}
