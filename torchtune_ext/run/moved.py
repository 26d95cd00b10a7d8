"""The modules that moved since an earlier version, so that a message can name the new one."""

import ast
from collections.abc import Iterator

PACKAGE = "torchtune_ext."
STAGES = ("groups", "episodes", "advantages", "evaluation", "buffer", "rollout", "source", "packing")
# Old name -> new name below the package, of modules and of names that have left their module. No old name exists today.
MOVED = {
    **{name: f"pipeline.{name}" for name in STAGES},
    **{name: f"training.{name}" for name in ("replay", "teacher")},
    **{f"host.{name}": f"setup.{name}" for name in ("parts", "opening", "nodes", "dry_run")},
    **{f"training.{name}": f"setup.{name}" for name in ("checks", "settings", "start", "plan")},
    **{f"host.{name}": f"cli.{name}" for name in ("plugin", "cli", "doctor", "gguf", "serve", "engine_install")},
    **{
        f"training.settings.{name}": f"training.precision.{name}"
        for name in ("chosen_dtype", "computes_in_bfloat16", "dtype_note")
    },
    "host.knobs": "cli.config",
    "host.on_ray": "cluster.on_ray",
    "measured.ray_connect": "cluster.connection",
    "sweep.cli": "cli.sweep",
}


def new_name(name: str) -> str | None:
    """Returns the present dotted name of a module or of a part of it, or None if it did not move."""
    below = name.removeprefix(PACKAGE)
    if below == name:
        return None
    parts = below.split(".")
    # The longest old name counts: a function may have left a module that moved elsewhere.
    for end in range(len(parts), 0, -1):
        if new := MOVED.get(".".join(parts[:end])):
            return ".".join([PACKAGE + new, *parts[end:]])
    return None


def moved_imports(source: bytes) -> str:
    """Returns "torchtune_ext.OLD moved to torchtune_ext.NEW, ..." for the imports of a Python file; "" if none moved."""
    names = dict.fromkeys(_imports(ast.parse(source)))
    return ", ".join(f"{name} moved to {new}" for name in names if (new := new_name(name)))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                # A name that moved with its module needs no word of its own.
                whole = new_name(node.module)
                yield node.module if whole and new_name(name) == f"{whole}.{alias.name}" else name
