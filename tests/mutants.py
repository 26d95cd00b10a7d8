"""Mutation tests: change the core modules in small ways, one at a time, and list the changes that no test detects.

    python tests/mutants.py --count 100 --seed 1 --out survivors.txt

A mutant replaces one operator, number or condition of a function. The drawing depends on the names of the functions and on
the seed, not on their files, so two trees can be compared. Each mutant runs in a fork of a process that has imported the
libraries; no file is changed. A mutant that no test of HEART_TESTS detects is either equivalent to the original, or shows
a gap in the tests.
"""

import argparse
import ast
import hashlib
import importlib
import importlib.abc
import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEART = [
    "pipeline/packing",
    "pipeline/advantages",
    "pipeline/staleness",
    "training/learner",
    "training/publish",
    "training/mismatch",
    "training/estimates",
    "objective/*",
]
# The fastest first: a mutant's tests end at the first failure.
HEART_TESTS = ["tests/unit/objective"]
HEART_TESTS += [f"tests/unit/pipeline/test_{name}.py" for name in ("advantages", "balance", "staleness", "source")]
HEART_TESTS += [
    f"tests/unit/training/test_{name}.py" for name in ("learner", "mismatch", "agreement_statistics", "publish")
]
HEART_TESTS += ["tests/unit/policy/test_packed_equals_unpacked.py", "tests/golden"]
SECONDS = 600  # A mutant whose tests take longer counts as noticed, since some mutants make a loop endless.

COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
               ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


def mutants_of(tree: ast.Module) -> list[tuple[str, ast.AST, str, object]]:
    """Return (key, node, attribute, new value) of each possible change of a module."""
    changes: list[tuple[str, ast.AST, str, object]] = []

    def visit(node: ast.AST, function: str) -> None:
        def change(attribute: str, value: object, kind: str) -> None:
            number = sum(key.startswith(f"{function}:{kind}:") for key, *_ in changes)
            if function:
                changes.append((f"{function}:{kind}:{number}", node, attribute, value))

        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}" if function else node.name
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            change("ops", [COMPARISONS[type(node.ops[0])](), *node.ops[1:]], "compare")
        if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
            change("op", ARITHMETIC[type(node.op)](), "arithmetic")
        if isinstance(node, ast.BoolOp):
            change("op", ast.Or() if isinstance(node.op, ast.And) else ast.And(), "and-or")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            change("op", ast.UAdd(), "sign")
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            change("test", ast.UnaryOp(ast.Not(), node.test), "condition")
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            change("value", not node.value, "bool")
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            change("value", node.value + 1, "number")
        if isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
            change("id", NAMES[node.id], "name")
        for name, value in ast.iter_fields(node):
            # Messages, types and decorators do not change results.
            if isinstance(node, ast.Raise) or name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, function)

    visit(tree, "")
    return changes


def drawn(count: int, seed: int) -> list[tuple[str, str]]:
    """Return (key, module) of the drawn mutants of the core modules."""
    keys = []
    for pattern in HEART:
        for path in sorted((ROOT / "torchtune_ext").glob(f"{pattern}.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            keys += [(key, module) for key, *_ in mutants_of(ast.parse(path.read_text(encoding="utf-8")))]
    return sorted(keys, key=lambda pair: hashlib.sha256(f"{seed}/{pair[0]}".encode()).digest())[:count]


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Importer of one module with one change."""

    def __init__(self, module: str, key: str):
        self.module, self.key = module, key
        self.path = ROOT / (module.replace(".", "/") + ".py")

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self, origin=str(self.path)) if name == self.module else None

    def exec_module(self, module):
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        ((node, attribute, value),) = [change[1:] for change in mutants_of(tree) if change[0] == self.key]
        setattr(node, attribute, value)
        exec(compile(ast.fix_missing_locations(tree), str(self.path), "exec"), module.__dict__)


def noticed(module: str, key: str, tests: list[str], log: Path) -> str:
    """Run the tests on a mutant. Return "noticed", "endless" or "survived"."""
    import pytest

    child = os.fork()
    if not child:
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        if key:
            sys.meta_path.insert(0, Mutated(module, key))
        os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not long", *tests]))
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return "survived" if status == 0 else "noticed"
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "endless"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="table of the mutants and their results")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="pytest output of the last mutant")
    parser.add_argument("tests", nargs="*", default=HEART_TESTS)
    args = parser.parse_args()
    os.chdir(ROOT)
    # As in tests/conftest.py, which is too late here: OpenMP threads do not survive a fork.
    os.environ["OMP_NUM_THREADS"] = "1"
    for library in ("hypothesis", "torch", "torchtune", "transformers"):  # shared by all forks
        importlib.import_module(library)
    if noticed("", "", args.tests, args.log) != "survived":
        sys.exit("the tests fail without a mutant")
    with args.out.open("w") as out:
        for key, module in drawn(args.count, args.seed):
            start = time.monotonic()
            result = noticed(module, key, args.tests, args.log)
            print(f"{result:8s} {module} {key} {time.monotonic() - start:.0f} s", file=out, flush=True)


if __name__ == "__main__":
    main()
