"""Print code metrics: components, dependencies between them, imports of the recipes, `try` and `raise`, comments.

    python tests/graph.py [FOLDER]    # FOLDER: a checkout (default: this one)

A room is a file or folder of torchtune_ext. An arrow is an import of one room by another. An arrow is in a circle if the
imported room imports the other one back, directly or indirectly.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else __file__).resolve()
ROOT = ROOT if ROOT.is_dir() else ROOT.parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for part in ("torchtune_ext", "recipes", "kernels")
    for path in sorted((ROOT / part).rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def imported(tree: ast.AST, whole: bool = True) -> list[str]:
    """Return the modules of this project that a file imports. Args: whole: also imports inside functions."""
    nodes = ast.walk(tree) if whole else [n for n in ast.walk(tree) if n in getattr(tree, "body", [])]
    modules = []
    for node in nodes:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        names = [
            name.replace("torchtune_ext.kernels", "kernels").replace("torchtune_ext.recipes", "recipes")
            for name in names
        ]
        modules += [name for name in names if name in FILES]
    return modules


def room(name: str) -> str:
    parts = name.split(".")
    return parts[1] if parts[0] == "torchtune_ext" and len(parts) > 1 else parts[0]


def loaded(name: str) -> set[str]:
    """Return all modules of this project that an import of this module loads, including parent packages."""
    todo, done = [name], set()
    while todo:
        if (each := todo.pop()) in done:
            continue
        done.add(each)
        above = [".".join(each.split(".")[:i]) for i in range(1, each.count(".") + 1)]
        todo += [*imported(TREES[each], whole=False), *(package for package in above if package in FILES)]
    return done


def reach(arrows: set[tuple[str, str]], start: str) -> set[str]:
    todo, done = [start], set()
    while todo:
        here = todo.pop()
        new = {b for a, b in arrows if a == here} - done
        done |= new
        todo += new
    return done


def main() -> None:
    library = {name: tree for name, tree in TREES.items() if name.startswith("torchtune_ext.")}
    arrows = {(room(a), room(b)) for a, tree in library.items() for b in imported(tree) if b in library}
    arrows = {(a, b) for a, b in arrows if a != b}
    up = sum(a in reach(arrows, b) for a, b in arrows)
    lines = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    print(f"files {len(FILES)}, lines {sum(lines.values()):,}, rooms {len({room(name) for name in library})}")
    print(f"arrows between rooms {len(arrows)}, in circles {up}")
    written = [tree for name, tree in TREES.items() if not name.startswith("recipes")]
    print(
        f"statements of the package and kernels {sum(isinstance(n, ast.stmt) for t in written for n in ast.walk(t)):,}"
    )
    for recipe in ("grpo", "warmup_sft", "evaluate"):
        tree, modules = TREES[f"recipes.{recipe}"], loaded(f"recipes.{recipe}")
        named = [(n.module, len(n.names)) for n in tree.body if isinstance(n, ast.ImportFrom)]
        ours = [(module, count) for module, count in named if module.startswith("torchtune_ext")]
        text = [line.strip() for line in FILES[f"recipes.{recipe}"].read_text().splitlines() if line.strip()]
        print(
            f"{recipe}: imports {sum(count for _, count in ours)} names of ours from {len(ours)} modules; loads "
            f"{len(modules)} modules, {sum(lines[name] for name in modules):,} lines, "
            f"{sum('measured' in name for name in modules)} of measured; "
            f"{sum(isinstance(n, ast.stmt) for n in ast.walk(tree))} statements, "
            f"{sum(line.startswith('#') for line in text) / len(text):.1%} comments, "
            f"{sum(len(line) > 120 for line in FILES[f'recipes.{recipe}'].read_text().splitlines())} lines over 120"
        )
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    statements = sum(isinstance(node, ast.stmt) for node in nodes)
    for kind in (ast.Try, ast.Raise):
        count = sum(isinstance(node, kind) for node in nodes)
        print(f"{kind.__name__.lower()} {count}: one in {statements / count:.0f} statements")
    calls = [n for n in nodes if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "build"]
    print(f"build(XConfig, ...) {sum(bool(n.args) and 'Config' in ast.unparse(n.args[0]) for n in calls)}")


if __name__ == "__main__":
    main()
