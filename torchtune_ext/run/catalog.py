"""Find the recipes and configs of the package, and import objects by dotted path."""

import importlib
import logging
import os
import pkgutil
import re
import sys
from ast import literal_eval
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torchtune_ext.run.errors import UsageError, UserCodeError, closest_match, describe_error
from torchtune_ext.run.renames import current_name

log = logging.getLogger(__name__)

# A config is a YAML file below configs/. Its name is its path without the suffix. Its folder, and
# in grpo/ also the last part of its name before a GPU size ("_24G"), determine its recipe.
FOLDER_RECIPES = {"grpo": "grpo_full", "warmup": "warmup_sft", "eval": "evaluate"}
# For example, grpo/tiny_lora is a config of grpo_lora.
SUFFIX_RECIPES = {"lora": "grpo_lora", "qlora": "grpo_lora", "async": "grpo_async"}
# Recipes are read as text, because importing a recipe imports torch. A recipe has the name of its
# file, unless a line such as `TUNE_NAMES = ("one", "two")` sets other names.
NAMES_PREFIX = "TUNE_NAMES = "
SINGLE_DEVICE_LINE = "SUPPORTS_DISTRIBUTED = False"
NOT_REGULAR_HINT = "not a regular file (a pipe, device or socket). Fix: write its content to a file"


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """A recipe under one of its names, with its configs."""

    name: str  # the argument of `tune run`
    path: Path  # absolute
    configs: dict[str, Path]  # config name ("grpo/tiny") -> absolute path
    supports_distributed: bool  # whether torchrun may start it


def package_folder(name: str) -> Path:
    """Return the folder of the package `torchtune_ext.<name>` without importing it."""
    from importlib.util import find_spec

    # An install maps the folder into the package. Without one it is next to the package.
    spec = find_spec(f"torchtune_ext.{name}")
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(__file__).resolve().parents[2] / name


def config_files(configs: Path | None = None) -> dict[str, Path]:
    """Return the YAML files below a folder (None: ours) by config name, sorted by name."""
    configs = configs or package_folder("configs")
    files = {path.relative_to(configs).with_suffix("").as_posix(): path for path in configs.rglob("*.yaml")}
    return dict(sorted(files.items()))


def list_or_print(files: Mapping[str, Path], chosen: Path | None) -> int:
    """Print the chosen YAML file, or the name and the first comment of each. Return status 0."""
    if chosen is not None:
        print(chosen.read_text(encoding="utf-8"), end="")
        return 0
    width = max(map(len, files))
    for name, path in files.items():
        first = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        print(f"{name:<{width}}  {first}")
    return 0


def recipe_for_name(name: str) -> str | None:
    """Return the recipe of a config name; None for a preset or a sweep."""
    first = name.split("/")[0]
    if first in ("", "presets", "sweeps"):
        return None
    recipe = FOLDER_RECIPES.get(first, first)
    return (
        SUFFIX_RECIPES.get(re.sub(r"_\d+G$", "", name).rpartition("_")[2], recipe) if recipe == "grpo_full" else recipe
    )


def config_name(path: Path) -> str:
    """Return the name of one of our configs, such as "grpo/tiny"; "" for another file."""
    return next((name for name, file in config_files().items() if file == path), "")


def recipe_for_config(config: str) -> str | None:
    """Return the recipe of one of our configs, given by name or file; None for another file."""
    return recipe_for_name(config_name(Path(config_path(config))))


def recipe_files(recipes: Path | None = None, configs: Path | None = None) -> list[RecipeFile]:
    """Return the recipes in a folder (None: ours), sorted by name, once for each of their names."""
    files, entries = config_files(configs), []
    for path in (recipes or package_folder("recipes")).glob("[!_]*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        named = next((line.removeprefix(NAMES_PREFIX) for line in lines if line.startswith(NAMES_PREFIX)), None)
        for recipe in literal_eval(named) if named else [path.stem]:
            recipe_configs = {config: file for config, file in files.items() if recipe_for_name(config) == recipe}
            entries.append(RecipeFile(recipe, path, recipe_configs, SINGLE_DEVICE_LINE not in lines))
    return sorted(entries, key=lambda recipe: recipe.name)


def config_path(given: str) -> str:
    """Return the file for `--config GIVEN`, a file or the name of one of our configs.

    Raises:
        UsageError: `given` is neither, or is not a regular file.
    """
    if os.path.isfile(given):
        return given
    if os.path.exists(given) and not os.path.isdir(given):
        raise UsageError(f"--config {given}: {NOT_REGULAR_HINT}")
    known = config_files()
    if given in known:
        return str(known[given])
    from difflib import get_close_matches

    # An argument with a suffix is a file, so no similar names are searched.
    bare = given.removesuffix(".yaml")
    named = [] if given.endswith((".yaml", ".yml")) else get_close_matches(given, known, n=3, cutoff=0.5)
    near = [bare] if bare in known else named
    if not near:
        raise UsageError(
            f"--config {given}: file not found, relative to {Path.cwd()}, and not one of our configs (`tune ls`)"
        )
    raise UsageError(
        f"--config {given}: neither a file nor one of our configs; did you mean {', '.join(near)}? (`tune ls`)"
    )


def import_object(path: str, where: str) -> Any:
    """Import the object at a dotted path: its longest module prefix, then attributes.

    Args:
        path: the dotted path.
        where: the beginning of error messages.

    Raises:
        UsageError: a module or an attribute of the path was not found.
        UserCodeError: importing a module raised an error.
    """
    if new := current_name(path):
        raise UsageError(f"{where}: {path} moved to {new}")
    # `tune` leaves the working directory, with a user's file, out of `sys.path`.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    parts = path.split(".")
    target, depth = None, 0
    for depth in range(1, len(parts)):
        module = ".".join(parts[:depth])
        try:
            target = importlib.import_module(module)
        except ModuleNotFoundError as error:
            # Unless this module or a parent is missing, one of its imports fails.
            if error.name is None or not (module + ".").startswith(error.name + "."):
                raise UserCodeError(f"{where}: importing {module} raised {describe_error(error)}") from error
            if target is None:
                raise UsageError(f"{where}: {_no_module_message(parts[0])}") from None
            # The remaining parts of the path are attributes of the last module.
            depth -= 1
            break
        # Some modules call sys.exit if a key or a package is missing.
        except (Exception, SystemExit) as error:
            raise UserCodeError(f"{where}: importing {module} raised {describe_error(error)}") from error
    for i, part in enumerate(parts[depth:], depth):
        if not hasattr(target, part):
            # Submodules become attributes only after an import, but the user may mean a submodule.
            inside = [module.name for module in pkgutil.iter_modules(getattr(target, "__path__", None) or [])]
            near = closest_match(
                part, [attribute for attribute in [*dir(target), *inside] if not attribute.startswith("_")]
            )
            hint = _shadowing_hint(parts[0]) or (f"; did you mean {near!r}?" if near else "")
            raise UsageError(f"{where}: {'.'.join(parts[:i])} has no {part!r}{hint}")
        target = getattr(target, part)
    if hidden := _shadowing_hint(parts[0]):
        _warn_once(where + hidden.replace(";", ":", 1))
    return target


@cache  # a path is imported several times; one warning is enough
def _warn_once(text: str) -> None:
    log.warning(text)


def _shadowing_hint(name: str) -> str:
    """Return the end of a message if another module hides a user's file; "" otherwise."""
    module, cwd = sys.modules[name], Path.cwd()
    user_module = next(
        (path for path in (cwd / f"{name}.py", cwd / name) if path.is_file() or any(path.glob("*.py"))), None
    )
    file = getattr(module, "__file__", None)
    places: list[str] = [file] if file else list(getattr(module, "__path__", []))
    if user_module is None or any(Path(place).resolve().is_relative_to(user_module.resolve()) for place in places):
        return ""
    place = places[0] if places else "built into Python"
    return f"; {name} is {place}, which hides {user_module.name} in {cwd}. Fix: rename yours"


def _no_module_message(name: str) -> str:
    near = closest_match(name, sorted(path.stem for path in Path.cwd().glob("*.py")))
    hint = f"; did you mean {near!r}?" if near else ""
    return f"module {name!r} not found, neither installed nor as {name}.py in {Path.cwd()}{hint}"
