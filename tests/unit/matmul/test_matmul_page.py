"""What docs/measured.md shows is what happens: the prompt word for word, and a kernel of one's own."""

import importlib
import re

import pytest
from omegaconf import OmegaConf

from helpers.nodes import component

pytest.importorskip("tree_sitter_c")

from torchtune_ext.measured.check import Checker
from torchtune_ext.measured.kernels import Dgemm
from torchtune_ext.measured.matmul.prompts import messages
from torchtune_ext.measured.sandbox import SandboxError


@pytest.fixture(scope="module")
def page(repo_root):
    return (repo_root / "docs" / "measured.md").read_text(encoding="utf-8")


def test_matmul_page_prompt_equals_actual_prompt(page):
    (shown,) = re.findall(r"^````\n(.*?)\n````$", page, re.M | re.S)
    assert shown == messages(Dgemm(), "blocking")[0]["content"]


def test_matmul_page_custom_kernel_works(page, tmp_path, monkeypatch):
    (module,) = re.findall(r"^```python\n(# my_kernel.py.*?)^```$", page, re.M | re.S)
    (node,) = [block for block in re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S) if "my_kernel" in block]
    (tmp_path / "my_kernel.py").write_text(module)
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
