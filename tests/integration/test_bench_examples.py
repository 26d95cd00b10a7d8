"""The programs of examples/: all are right but one, which is wrong on purpose."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("tree_sitter_c")

from torchtune_ext.measured.check import Checker
from torchtune_ext.measured.kernels import KERNELS
from torchtune_ext.measured.sandbox import SandboxError

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.c"))


@pytest.fixture(scope="module")
def checkers():
    if shutil.which("gcc") is None and shutil.which("clang") is None:
        pytest.skip("needs gcc")
    instances = {}
    try:
        for name in {path.name.partition("_")[0] for path in EXAMPLES}:
            instances[name] = Checker(KERNELS[name]())
    except SandboxError as error:
        pytest.skip(str(error))
    yield instances
    for checker in instances.values():
        checker.close()


def test_there_are_examples_of_each_kernel():
    assert {path.name.partition("_")[0] for path in EXAMPLES} == set(KERNELS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, checkers):
    verdict = checkers[path.name.partition("_")[0]].check_source(path.read_text(encoding="utf-8"))
    assert verdict.outcome == ("wrong_result" if path.stem == "dgemm_float" else "ok"), verdict.note
