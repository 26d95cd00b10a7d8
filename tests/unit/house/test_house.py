"""The rules of the house, held by reading the source: who may import whom, and how long things may get."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# A module (or folder) of torchtune_ext may import only what stands before it. `kernels` is the top-level folder.
ORDER = [
    "__init__",
    "run",
    "tasks",
    "chat",
    "sampling",
    "grading",
    "groups",
    "advantages",
    "evaluation",
    "buffer",
    "rollout",
    "source",
    "packing",
    "kernels",
    "policy",
    "objective",
    "measured",
    "training",
    "telemetry",
    "replay",
    "cluster",
    "host",
    "sweep",
    "__main__",
]
# And the recipes.
OMEGACONF_ALLOWED = {
    "host.command_line",
    "host.components",
    "host.config",
    "host.on_ray",
    "host.opening",
    "host.dry_run",
    "host.serve",
    "sweep.check",
}
MAX_FILE, MAX_FUNCTION, MAX_KNOBS = 600, 80, 40  # lines, lines, names
MAX_RECIPE = 300  # statements: comments and blank lines cost nothing, and squeezing a line gains nothing
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root|Users/\w+|home/\w+|opt/(wheels|pypi))/")


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


LIBRARY = python_files("torchtune_ext", "kernels")
RECIPES = sorted((ROOT / "recipes").glob("[!_]*.py"))
TESTS = python_files("tests")
WRITTEN = [*LIBRARY, *RECIPES, *python_files("scripts", "benchmarks"), ROOT / "setup.py", *TESTS]


def name_of(path: Path) -> str:
    """File -> dotted name below torchtune_ext: "tasks.task", "kernels.packed_attention", "__init__"."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "torchtune_ext":
        parts = parts[1:]
    if parts[-1] == "__init__" and len(parts) > 1:
        parts = parts[:-1]
    return ".".join(parts)


def imports_of(path: Path) -> list[tuple[str, int]]:
    """Every dotted name that the file imports, anywhere in it, with the line. `from a import b` gives "a.b"."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{path}:{node.lineno}: relative import; recipes are copied, so imports are absolute"
            )
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def own_imports(path: Path) -> set[str]:
    """Modules of ours that the file imports, as names below torchtune_ext."""
    known = {name_of(file) for file in LIBRARY}
    found = set()
    for name, _ in imports_of(path):
        if name.split(".")[0] == "torchtune_ext":
            below = name.removeprefix("torchtune_ext").lstrip(".")
            while below and below not in known:
                below = below.rpartition(".")[0]
            found.add(below or "__init__")
    return found


def component(name: str) -> str:
    """What has a place in ORDER: a file or folder of the root."""
    return name.split(".")[0]


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_imports_go_upwards(path):
    own = component(name_of(path))
    assert own in ORDER, (
        f"{own} has no place in ORDER (tests/unit/house/test_house.py): put it below all that it imports"
    )
    for target in own_imports(path):
        there = component(target)
        assert there == own or ORDER.index(there) < ORDER.index(own), (
            f"{name_of(path)} imports {target}, which stands below it"
        )


def test_no_import_cycles():
    graph = {name_of(path): own_imports(path) - {name_of(path), "__init__"} for path in LIBRARY}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join([*trail, name])}"
        if name not in done:
            for target in sorted(graph.get(name, ())):
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("path", [*LIBRARY, *RECIPES], ids=name_of)
def test_nobody_imports_recipes_or_the_bare_folders(path):
    for name, line in imports_of(path):
        assert not name.startswith("torchtune_ext.recipes"), f"{path}:{line}: recipes are leaves"
        assert name.split(".")[0] not in ("recipes", "configs", "kernels"), (
            f"{path}:{line}: {name} is another package when installed"
        )


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_omegaconf_stops_at_the_recipe(path):
    if name_of(path) not in OMEGACONF_ALLOWED:
        for name, line in imports_of(path):
            assert name.split(".")[0] != "omegaconf", f"{path}:{line}: pass plain values"
    if name_of(path) not in ("config", "opening", "doctor", "cli"):
        assert "config" not in own_imports(path), f"{path} imports torchtune_ext.host.config, which only recipes use"


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_lengths(path):
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    if path in RECIPES:
        statements = sum(isinstance(node, ast.stmt) for node in nodes)
        assert statements <= MAX_RECIPE, f"{path} has {statements} statements, at most {MAX_RECIPE}"
        assert "fmt: skip" not in text, f"{path}: let the formatter lay it out; lines cost nothing"
    else:
        assert len(text.splitlines()) <= MAX_FILE, f"{path} has {len(text.splitlines())} lines, at most {MAX_FILE}"
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION, (
                f"{path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION}"
            )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_lists_its_knobs(path):
    text = path.read_text(encoding="utf-8")
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "Config"]
    assert len(classes) == 1, f"{path} needs one dataclass `Config` at the top"
    knobs = [node for node in classes[0].body if isinstance(node, ast.AnnAssign)]
    assert 0 < len(knobs) <= MAX_KNOBS, f"{path}: {len(knobs)} knobs, at most {MAX_KNOBS}"
    lines = text.splitlines()
    for knob in knobs:
        stated = lines[knob.lineno - 2 : knob.end_lineno]
        assert any("#" in line for line in stated), f"{path}:{knob.lineno}: say in one line what {knob.target.id} is"


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_comment_hangs_on_the_end_of_a_wrapped_line(path):
    """The formatter leaves a trailing comment at a bracket or a piece of an expression, where it says nothing: such a comment
    belongs on a line of its own above. Allowed inside brackets: behind an item and its comma, and behind the opening one."""
    text = path.read_text(encoding="utf-8")
    lines, depth = text.splitlines(), 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.OP:
            depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(token.string, 0)
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(fmt|noqa|type):", token.string):
            code = lines[token.start[0] - 1][: token.start[1]].strip()
            hangs = depth and code and not code.endswith((",", "(", "[", "{"))
            assert not hangs and code[:1] not in (")", "]", "}"), f"{path}:{token.start[0]}: {token.string}"


def test_every_config_belongs_to_a_recipe():
    from torchtune_ext.run.catalog import config_files, recipe_files, recipe_of

    names = {recipe.name for recipe in recipe_files(ROOT / "recipes", ROOT / "configs")}
    for name, path in config_files(ROOT / "configs").items():
        if name.split("/")[0] not in ("presets", "sweeps"):
            owner = recipe_of(name, path)
            assert owner in names, f"configs/{name}.yaml belongs to {owner}: begin it with `# recipe: NAME`"


def test_no_machine_paths():
    endings = {".py", ".yaml", ".md", ".cfg", ".toml", ".sh", ".txt", ".pth", ".start"}
    folders = ("torchtune_ext", "kernels", "recipes", "configs", "scripts", "tests", "benchmarks", "docs", ".ci")
    paths = [path for path in ROOT.iterdir() if path.is_file()]
    paths += [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    for path in paths:
        if path.suffix in endings or path.name in ("Makefile", "run"):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                assert not MACHINE_PATH.search(line), f"{path}:{number}: path of one machine: {line.strip()}"


def test_test_files_have_unique_names():
    """pytest imports them by their bare names."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names)), sorted(name for name in set(names) if names.count(name) > 1)


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_share_through_helpers_alone(path):
    """A test that imports another one runs, breaks and moves with it: what both need belongs into tests/helpers."""
    tests = {file.stem for file in TESTS if file.name.startswith("test_")} | {"conftest"}
    for name, line in imports_of(path):
        assert not tests & set(name.split(".")), f"{path}:{line}: imports {name}; put what both need into tests/helpers"


def test_kernels_is_not_taken_for_hugging_face_kernels():
    """transformers, started in the repository root, finds our folder; without a version it leaves it alone."""
    assert "__version__" not in (ROOT / "kernels" / "__init__.py").read_text(encoding="utf-8")
