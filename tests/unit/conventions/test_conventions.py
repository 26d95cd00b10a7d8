"""Conventions of the repository, checked in the source: import order, lengths, style."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from torchtune_ext.run.catalog import config_files, recipe_files, recipe_for_name

ROOT = Path(__file__).resolve().parents[3]

# A module (or folder) of torchtune_ext may import only what stands before it. `kernels` is the top-level folder.
ORDER = [
    "__init__",
    "run",
    "kernels",
    "settings",
    "tasks",
    "chat",
    "grading",
    "sampling",
    "pipeline",
    "policy",
    "objective",
    "telemetry",
    "training",
    "setup",
    "cluster",
    "measured",
    "sweep",
    "cli",
    "__main__",
]
# Who may know the settings beside the recipes: all others take plain values. `omegaconf` is the first one's own.
SETTINGS = ("settings", "setup", "cluster", "sweep", "cli")
# What a package needs to declare its config section.
SECTION_IMPORTS = [
    f"torchtune_ext.settings.{name}" for name in ("sections.config_section", "sections.Seconds", "components.Component")
]
MAX_FILE, MAX_FUNCTION, MAX_KEYS = 600, 80, 43  # lines, lines, names
MAX_RECIPE = 300  # statements: comments and blank lines cost nothing, and squeezing a line gains nothing
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root|Users/\w+|home/\w+|opt/(wheels|pypi))/")
TEXTS = {".py", ".yaml", ".md", ".cfg", ".toml", ".sh", ".txt", ".pth", ".start"}
WRITTEN, TESTS, RECIPES = r".*\.py$", r"tests/.*\.py$", r"recipes/[^_]\w*\.py$"
LIBRARY = r"(torchtune_ext|kernels)/.*\.py$"
FOLDERS = ("torchtune_ext", "kernels", "recipes", "configs", "scripts", "tests", "benchmarks", "docs", ".ci")


@dataclass(frozen=True)
class File:
    """A file of the repository, read and parsed once."""

    path: str  # below the root
    text: str

    @cached_property
    def name(self) -> str:
        """The dotted name below torchtune_ext: "tasks.task", "kernels.packed_attention", "__init__"."""
        return ".".join(Path(self.path).with_suffix("").parts).removeprefix("torchtune_ext.").removesuffix(".__init__")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """The first one is the module."""
        return list(ast.walk(ast.parse(self.text)))

    @cached_property
    def imports(self) -> list[tuple[str, str]]:
        """Every dotted name that is imported, anywhere in it, and where that is. `from a import b` gives "a.b"."""
        names = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names += [(alias.name, f"{self.path}:{node.lineno}") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                names += [(f"{module}.{alias.name}", f"{self.path}:{node.lineno}") for alias in node.names]
        return names

    @property
    def is_recipe(self) -> bool:
        return re.match(RECIPES, self.path) is not None


Files = list[File]


@pytest.fixture(scope="module")
def everything() -> Files:
    paths = [path for path in ROOT.iterdir() if path.is_file()]
    paths += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [
        File(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        for path in sorted(paths)
        if path.suffix in TEXTS or path.name in ("Makefile", "run")
    ]


def own_imports(library: Files) -> dict[str, set[str]]:
    """Name of a module -> the modules of ours that it imports, as names below torchtune_ext."""
    graph: dict[str, set[str]] = {file.name: set() for file in library}
    for file in library:
        for name, _ in file.imports:
            if name.split(".")[0] == "torchtune_ext":
                below = name.removeprefix("torchtune_ext").lstrip(".")
                while below and below not in graph:
                    below = below.rpartition(".")[0]
                graph[file.name].add(below or "__init__")
    return graph


def room(name: str) -> str:
    """What has a line in ORDER: a file or folder of the root."""
    return name.split(".")[0]


# ---- the rules: each yields the offenders among the files that it is given


def imports_are_absolute(files: Files) -> Iterator[str]:
    """Recipes are copied."""
    for file in files:
        yield from (f"{place}: {name} is relative" for name, place in file.imports if name.startswith("."))


def imports_go_upwards(library: Files) -> Iterator[str]:
    for name, targets in own_imports(library).items():
        if room(name) not in ORDER:
            yield f"{name}: {room(name)} has no line in ORDER: give it one below all that it imports"
            continue
        for target in targets:
            there = room(target)
            if there in ORDER and there != room(name) and ORDER.index(there) > ORDER.index(room(name)):
                yield f"{name} imports {target}, which stands below it"


def imports_make_no_circle(library: Files) -> Iterator[str]:
    graph = {name: targets - {name, "__init__"} for name, targets in own_imports(library).items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> Iterator[str]:
        if name in trail:
            yield " -> ".join([*trail[trail.index(name) :], name])
        elif name not in done:
            for target in sorted(graph.get(name, ())):
                yield from visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        yield from visit(name, ())


def recipes_are_leaves(files: Files) -> Iterator[str]:
    """The bare folders are other packages when installed."""
    for file in files:
        for name, place in file.imports:
            if name.startswith("torchtune_ext.recipes") or name.split(".")[0] in ("recipes", "configs", "kernels"):
                yield f"{place}: {name}"


def settings_stop_at_the_recipe(library: Files) -> Iterator[str]:
    for file in library:
        for name, place in file.imports:
            of_settings = name.startswith("torchtune_ext.settings") and name not in SECTION_IMPORTS
            if (name.split(".")[0] == "omegaconf" and room(file.name) != SETTINGS[0]) or (
                of_settings and room(file.name) not in SETTINGS
            ):
                yield f"{place}: imports {name}; take plain values"


def what_the_user_can_mend_is_a_mistake(files: Files) -> Iterator[str]:
    """Another ValueError would end a run with a traceback."""
    for file in files:
        for node in file.nodes:
            if isinstance(node, ast.Raise) and ast.unparse(node).startswith("raise ValueError"):
                yield f"{file.path}:{node.lineno}: raise run.errors.UsageError"


def nothing_is_too_long(files: Files) -> Iterator[str]:
    for file in files:
        if file.is_recipe:
            statements = sum(isinstance(node, ast.stmt) for node in file.nodes)
            if statements > MAX_RECIPE:
                yield f"{file.path} has {statements} statements, at most {MAX_RECIPE}"
            if "fmt: skip" in file.text:
                yield f"{file.path}: let the formatter lay it out; lines cost nothing"
        elif len(file.text.splitlines()) > MAX_FILE:
            yield f"{file.path} has {len(file.text.splitlines())} lines, at most {MAX_FILE}"
        for node in file.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > MAX_FUNCTION:
                    yield f"{file.path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION}"


def recipes_describe_their_keys(recipes: Files) -> Iterator[str]:
    for file in recipes:
        classes = [node for node in file.nodes[0].body if isinstance(node, ast.ClassDef) and node.name == "Config"]
        knobs = [node for definition in classes for node in definition.body if isinstance(node, ast.AnnAssign)]
        if len(classes) != 1 or not 0 < len(knobs) <= MAX_KEYS:
            yield f"{file.path} needs one dataclass `Config` at the top, with 1 to {MAX_KEYS} knobs: {len(knobs)}"
        for knob in knobs:
            if "description=" not in ast.unparse(knob):
                yield f"{file.path}:{knob.lineno}: Field(description=...) for {knob.target.id}"


def no_comment_hangs_on_the_end_of_a_wrapped_line(files: Files) -> Iterator[str]:
    """The formatter leaves a trailing comment at a bracket or a piece of an expression, where it says nothing: such a comment
    belongs on a line of its own above. Allowed inside brackets: behind an item and its comma, and behind the opening one."""
    for file in files:
        lines, depth = file.text.splitlines(), 0
        for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
            if token.type == tokenize.OP:
                depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(token.string, 0)
            if token.type == tokenize.COMMENT and not re.match(r"#\s*(fmt|noqa|type):", token.string):
                code = lines[token.start[0] - 1][: token.start[1]].strip()
                hangs = depth and code and not code.endswith((",", "(", "[", "{"))
                if hangs or code[:1] in (")", "]", "}"):
                    yield f"{file.path}:{token.start[0]}: {token.string}"


def no_path_of_one_machine(files: Files) -> Iterator[str]:
    for file in files:
        for number, line in enumerate(file.text.splitlines(), 1):
            if MACHINE_PATH.search(line):
                yield f"{file.path}:{number}: {line.strip()}"


def no_two_tests_have_one_name(tests: Files) -> Iterator[str]:
    """pytest imports them by their bare names."""
    names = [Path(file.path).name for file in tests if Path(file.path).name.startswith("test_")]
    yield from sorted({name for name in names if names.count(name) > 1})


def helpers_are_what_tests_share(tests: Files) -> Iterator[str]:
    """A test that imports another one runs, breaks and moves with it: what both need belongs into tests/helpers."""
    names = {Path(file.path).stem for file in tests if Path(file.path).name.startswith("test_")} | {"conftest"}
    for file in tests:
        yield from (f"{place}: imports {name}" for name, place in file.imports if names & set(name.split(".")))


def kernels_is_not_taken_for_hugging_face_kernels(library: Files) -> Iterator[str]:
    """transformers, started in the repository root, finds our folder; without a version it leaves it alone."""
    yield from (file.path for file in library if file.path == "kernels/__init__.py" and "__version__" in file.text)


# Each rule and the paths that it is for.
RULES = {
    imports_are_absolute: WRITTEN,
    imports_go_upwards: LIBRARY,
    imports_make_no_circle: LIBRARY,
    recipes_are_leaves: f"{LIBRARY}|{RECIPES}",
    settings_stop_at_the_recipe: LIBRARY,
    what_the_user_can_mend_is_a_mistake: f"{LIBRARY}|{RECIPES}",
    nothing_is_too_long: WRITTEN,
    recipes_describe_their_keys: RECIPES,
    no_comment_hangs_on_the_end_of_a_wrapped_line: WRITTEN,
    no_path_of_one_machine: "",
    no_two_tests_have_one_name: TESTS,
    helpers_are_what_tests_share: TESTS,
    kernels_is_not_taken_for_hugging_face_kernels: LIBRARY,
}
IN = "torchtune_ext"
# Offenders against each rule: files, and what is said of them.
PLANTED = [
    (imports_are_absolute, {"recipes/a.py": "from .b import c"}, "recipes/a.py:1: .b.c is relative"),
    (
        imports_go_upwards,
        {f"{IN}/run/a.py": "def f():\n import torchtune_ext.cli.cli", f"{IN}/cli/cli.py": ""},
        "run.a imports cli.cli, which stands below it",
    ),
    (imports_go_upwards, {f"{IN}/parlour/a.py": ""}, "parlour.a: parlour has no line in ORDER"),
    (
        imports_make_no_circle,
        {f"{IN}/run/a.py": "from torchtune_ext.run import b", f"{IN}/run/b.py": "import torchtune_ext.run.a"},
        "run.a -> run.b -> run.a",
    ),
    (recipes_are_leaves, {f"{IN}/a.py": "from torchtune_ext.recipes import grpo"}, f"{IN}/a.py:1: {IN}.recipes.grpo"),
    (
        recipes_are_leaves,
        {"recipes/a.py": "import kernels.packed_attention"},
        "recipes/a.py:1: kernels.packed_attention",
    ),
    (settings_stop_at_the_recipe, {f"{IN}/run/a.py": "from omegaconf import MISSING"}, "imports omegaconf.MISSING"),
    (settings_stop_at_the_recipe, {f"{IN}/setup/opening.py": "import omegaconf"}, "imports omegaconf;"),
    (
        settings_stop_at_the_recipe,
        {f"{IN}/run/a.py": f"from {IN}.settings.config import record"},
        f"imports {IN}.settings.config.record",
    ),
    (
        what_the_user_can_mend_is_a_mistake,
        {"kernels/a.py": "raise ValueError('a=1')"},
        "kernels/a.py:1: raise run.errors",
    ),
    (nothing_is_too_long, {"tests/a.py": "\n" * 601}, "tests/a.py has 601 lines"),
    (nothing_is_too_long, {"tests/a.py": "async def f():" + "\n" * 80 + " pass"}, "tests/a.py:1: f has 81 lines"),
    (nothing_is_too_long, {"recipes/a.py": "a = 1; " * 301}, "recipes/a.py has 301 statements"),
    (nothing_is_too_long, {"recipes/a.py": "a = 1  # fmt: skip"}, "recipes/a.py: let the formatter"),
    (recipes_describe_their_keys, {"recipes/a.py": "class Other:\n a: int  # one"}, "recipes/a.py needs one dataclass"),
    (recipes_describe_their_keys, {"recipes/a.py": "class Config:\n pass"}, "recipes/a.py needs one dataclass"),
    (
        recipes_describe_their_keys,
        {"recipes/a.py": "class Config:\n" + " a: int = Field(description='a')\n" * 44},
        "1 to 43 knobs: 44",
    ),
    (
        recipes_describe_their_keys,
        {"recipes/a.py": "class Config:\n a: int = Field(description='a')\n b: int"},
        "recipes/a.py:3: Field",
    ),
    (no_comment_hangs_on_the_end_of_a_wrapped_line, {"a.py": "f(\n    a + b  # two\n)"}, "a.py:2: # two"),
    (no_comment_hangs_on_the_end_of_a_wrapped_line, {"a.py": "f(\n    a,\n)  # all"}, "a.py:3: # all"),
    (no_path_of_one_machine, {"docs/a.md": "\nsee /" + "root/runs"}, "docs/a.md:2: see /"),
    (no_two_tests_have_one_name, {"tests/a/test_x.py": "", "tests/b/test_x.py": ""}, "test_x.py"),
    (
        helpers_are_what_tests_share,
        {"test_x.py": "", "tests/a.py": "from test_x import f"},
        "tests/a.py:1: imports test_x.f",
    ),
    (helpers_are_what_tests_share, {"tests/a.py": "import conftest"}, "tests/a.py:1: imports conftest"),
    (kernels_is_not_taken_for_hugging_face_kernels, {"kernels/__init__.py": "__version__ = 1"}, "kernels/__init__.py"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule, everything):
    files = [file for file in everything if re.match(RULES[rule], file.path)]
    offenders = list(rule(files))
    assert files and not offenders, "\n".join([rule.__doc__ or "", *offenders])


@pytest.mark.parametrize("rule, texts, words", PLANTED, ids=[f"{rule.__name__}: {words}" for rule, _, words in PLANTED])
def test_an_offender_is_named(rule, texts, words):
    offenders = list(rule([File(path, text) for path, text in texts.items()]))
    assert any(words in offender for offender in offenders), offenders


def test_every_rule_was_seen_to_fail():
    assert {rule for rule, _, _ in PLANTED} == set(RULES)


def test_every_config_belongs_to_a_recipe():
    names = {recipe.name for recipe in recipe_files(ROOT / "recipes", ROOT / "configs")}
    owners = {
        name: recipe_for_name(name)
        for name in config_files(ROOT / "configs")
        if name.split("/")[0] not in ("presets", "sweeps")
    }
    offenders = [f"configs/{name}.yaml belongs to {owner}" for name, owner in owners.items() if owner not in names]
    assert owners and not offenders, "\n".join(offenders)


def test_recipe_imports_exclude_optional_modules():
    """Of a text task nobody needs the benchmark of programs, nor the coordinator of its machines; without FP8, nobody its layers and
    kernels. A number that grows is a reason to look where the new arrow comes from."""
    names = ["grpo", "warmup_sft", "evaluate"]
    code = f"import sys\nfor name in {names}: __import__(f'torchtune_ext.recipes.{{name}}')\nprint(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    modules = [name for name in printed.split() if name.startswith("torchtune_ext.")]
    assert not [name for name in modules if "measured" in name or "fp8." in name or "fp8_" in name]
    assert len(modules) <= 117, f"{len(modules)} modules, one of which is new here: {sorted(modules)}"
