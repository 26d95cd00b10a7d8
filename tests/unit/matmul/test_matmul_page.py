"""The long prompt word for word, and what docs/how_to/measured_programs.md shows: a custom kernel."""

import importlib
import re
import shutil

import pytest
from omegaconf import OmegaConf

from helpers.nodes import component

pytest.importorskip("tree_sitter_c")

from torchtune_ext.measured.check import Checker
from torchtune_ext.measured.kernels import Dgemm
from torchtune_ext.measured.matmul.prompts import messages
from torchtune_ext.measured.sandbox import SandboxError

PROMPT = """\
Write a function in C, as fast as you can make it. It computes the matrix product C = A B, where A has m rows and k columns, B k rows and n columns, C m rows and n columns.

```c
void dgemm(int m, int n, int k, const double *A, const double *B, double *C);
```

Its speed is measured at m = 256, n = 256, k = 256, and its result must be right in double precision for every size from 1. Arrays are stored by rows, begin at an address that 64 divides, and do not overlap. C holds anything before the call. No library may do the work, and no assembly.

These techniques are permitted: loops in another order than that of the definition; several steps of a dimension at a time: blocks (tiles), unrolled loops, several sums in local variables. These are not: vector types, intrinsics, or #pragma omp simd; threads: #pragma omp parallel; copies of panels of an input.

Answer with the whole program in one block of C code, ```c ... ```."""


@pytest.fixture(scope="module")
def page(repo_root):
    return (repo_root / "docs" / "how_to" / "measured_programs.md").read_text(encoding="utf-8")


def test_matmul_long_prompt_word_for_word():
    assert messages(Dgemm(), "blocking")[0]["content"] == PROMPT


def test_matmul_page_command_prints_prompt(page, capsys):
    (code,) = re.findall(r"^python -c '(.*)'$", page, re.M)
    exec(code, {})
    assert capsys.readouterr().out.startswith("Write a function in C, as fast as you can make it.")


def test_matmul_page_custom_kernel_works(repo_root, page, tmp_path, monkeypatch):
    (node,) = [block for block in re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S) if "outer_kernel" in block]
    shutil.copy(repo_root / "examples" / "outer_kernel.py", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    node = OmegaConf.create(node)
    node.task.stages = ["none", "all"]
    task = component(node.task).instantiate()
    (kernel,), problem = task.kernels, task[0]
    assert problem.id == "outer-1024-1024/none" and kernel.question in problem.messages[0]["content"]
    assert task.permitted(problem) == frozenset()
    columns = (
        "void outer(int m, int n, const double *x, const double *y, double *C) {\n"
        "for (int j = 0; j < n; j++) for (int i = 0; i < m; i++) C[i * n + j] = x[i] * y[j];\n}\n"
    )
    single = kernel.naive.replace("x[i] * y[j]", "(float)x[i] * (float)y[j]")
    try:
        with Checker(kernel) as checker:
            verdicts = []
            for source in (kernel.naive, columns, single):
                verdict, _ = checker.check_with_library(source, is_source=True, permitted=task.permitted(problem))
                verdicts.append(verdict)
    except SandboxError as error:
        pytest.skip(str(error))
    assert [verdict.outcome for verdict in verdicts] == ["ok", "forbidden", "wrong_result"], verdicts
    assert "loops in another order" in verdicts[1].note
