"""Imports a recipe, one of ours by its name or a user's by its file, for what it says of itself."""

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from torchtune_ext.run.catalog import folder, recipe_files


def recipe_module(recipe: str, said: str) -> ModuleType:
    """Returns the module of a recipe: ours by its name, or another by its file or its dotted name.

    Args:
        recipe: the name, the file or the module.
        said: what stands before `recipe` in messages.

    Raises:
        ValueError: there is no such recipe.
    """
    ours = {each.name: each.path.stem for each in recipe_files(folder("recipes"), folder("configs"))}
    name = f"torchtune_ext.recipes.{ours[recipe]}" if recipe in ours else recipe
    if not name.endswith(".py"):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{said}{name} is no recipe ({error}); your own is written with its ending: my_grpo.py"
            ) from error
    # It need not be on the path of Python.
    spec = spec_from_file_location("recipe_of_a_user", name)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    try:
        spec.loader.exec_module(module)
    except FileNotFoundError:
        raise ValueError(f"{said}{name}: no such file, seen from {Path.cwd()}") from None
    return module
