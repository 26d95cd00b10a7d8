"""Build the component that `_component_` names in YAML, and report invalid arguments."""

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from torchtune_ext.run import errors
from torchtune_ext.run.catalog import import_object, recipe_files
from torchtune_ext.run.errors import UsageError, UsageFileError, UserCodeError, closest_match
from torchtune_ext.run.renames import outdated_imports
from torchtune_ext.settings.yaml_types import kind_of, require_type


class Component(dict[str, Any]):
    """A config mapping that names a class or function (`_component_`) and its arguments.

    Args:
        section: the mapping.
        key: its config key, for messages.
    """

    def __init__(self, section: Mapping[str, Any], key: str = ""):
        super().__init__(section)
        self.key = key

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(cls._validate)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"_component_": {"type": "string", "description": "dotted path of a class or function"}},
        }

    @classmethod
    def _validate(cls, value: Any) -> "Component":
        if not isinstance(value, Mapping) or value.get("_component_") is None:
            raise PydanticCustomError("component", "needs a `_component_`, the dotted path of a class or function")
        return value if isinstance(value, Component) else cls(value)

    def instantiate(self, **extra: Any) -> Any:
        """Build the component with the other keys of the section as arguments.

        `_component_` is a dotted path, or a bare name that the recipe itself defines, for example
        in a user's copy.

        Args:
            extra: further keyword arguments, which the recipe passes.

        Raises:
            UsageError: the component is unknown or refuses the arguments. The message names the key
                and the closest known argument.
            UserCodeError: the component raised an error. The message names the file and line.
        """
        component, path, arguments = self.resolve_call(**extra)
        try:
            return component(**arguments, **extra)
        except (Exception, SystemExit) as error:
            # A message about an argument is enough. For other errors the user needs the line.
            message = _explain_refusal(component, path, self.key, arguments, error)
            if message is not None:
                raise (UsageFileError if isinstance(error, UsageFileError) else UsageError)(message) from error
            raise UserCodeError(f"`{self.key}:` {path} raised {errors.describe_error(error)}") from error

    def resolve_call(self, **extra: Any) -> tuple[Callable[..., Any], str, dict[str, Any]]:
        """Return the call that `instantiate` would make, with the same errors.

        Returns:
            The component, its dotted path, and its arguments from the section.
        """
        name, where = self.key, f"`{self.key}:`" if self.key else repr(self)
        if self.get("_component_") is None:
            raise UsageError(f"{where} needs a `_component_`, the dotted path of a class or function")
        # A copy prevents components from changing the settings.
        arguments = deepcopy(dict(self))
        if isinstance(given := arguments.pop("_component_"), dict):
            words = " ".join(f"{name}.{key}={value}" for key, value in given.items())
            raise UsageError(f"{where} a component on the command line cannot be a mapping. Fix: write {words}")
        path = str(given)
        if not all(part.isidentifier() for part in path.split(".")):
            raise UsageError(
                f"{where} _component_={path} is not a dotted path. Fix: write my_task.Sums for the class Sums in my_task.py"
            )
        component = _in_recipe(path) if "." not in path else import_object(path, f"{where} _component_={path}")
        if component is None:
            raise UsageError(
                f"{where} {path!r} is not defined in the recipe. Fix: give a dotted path, or define it there"
            )
        if not callable(component):
            raise UsageError(f"{where} _component_={path} is {kind_of(component)}. Fix: name a class or a function")
        _require_arguments(component, path, name, arguments, extra)
        for key, parameter in argument_parameters(component).items():
            if key in arguments and type(value := arguments[key]) is not type(parameter.default):
                require_type(f"{name}.{key}", value, parameter.annotation, parameter.default)
        return component, path, arguments

    def argument_names(self) -> list[str]:
        """Return the names of the component's arguments; an empty list for an unknown component."""
        path = str(self.get("_component_"))
        try:
            return list(argument_parameters(import_object(path, "") if "." in path else _in_recipe(path)))
        except UsageError:
            return []


def _require_arguments(component: Any, path: str, name: str, arguments: dict[str, Any], extra: dict[str, Any]) -> None:
    """Raise UsageError for unknown or missing arguments of a component."""
    if duplicates := [key for key in arguments if key in extra]:
        raise UsageError(
            f"{name}.{duplicates[0]}={arguments[duplicates[0]]}: the recipe passes this argument to {path}. Fix: leave it out"
        )
    try:
        signature = inspect.signature(component)
    except (TypeError, ValueError):
        # Some classes written in C have no signature.
        return
    takes = [key for key in signature.parameters if key not in extra]
    try:
        signature.bind(**arguments, **extra)
    except TypeError as error:
        known = [key for key in takes if signature.parameters[key].kind is not inspect.Parameter.VAR_KEYWORD]
        if unknown := [key for key in arguments if key not in known]:
            near = closest_match(str(unknown[0]), known)
            hint = f"it takes {', '.join(known) or 'no arguments'}; ~{name}.{unknown[0]} removes the key from a config"
            hint = f"did you mean {near!r}?" if near else hint
            raise UsageError(f"unknown key '{name}.{unknown[0]}': {path} does not take it; {hint}") from None
        required = [key for key in takes if signature.parameters[key].default is inspect.Parameter.empty]
        if needed := [key for key in required if key not in arguments]:
            raise UsageError(
                f"{name}.{needed[0]} has no value, and {path} needs it. Fix: set it in the YAML or as {name}.{needed[0]}=..."
            ) from None
        raise UsageError(
            f"`{name}:` {path} does not take these arguments: {error}; it takes {', '.join(takes)}"
        ) from error


def _explain_refusal(
    component: Any, path: str, name: str, arguments: dict[str, Any], error: BaseException
) -> str | None:
    """Return a message about the argument that a component refuses; None if it is unknown."""
    if errors.is_usage_error(error):
        # Our own components name the argument, but do not know the config section that holds it.
        named = re.match(r"unknown key '(\w+)\.|([A-Za-z_]\w*)(\.\w+)*=", text := str(error))
        if named and ((leading := named[1] or named[2]) in arguments or leading in argument_parameters(component)):
            return re.sub(rf"(?<![\w.]){leading}(?=[.=:])", f"{name}.{leading}", text)
        return text if name in text.partition(" ")[0] else f"`{name}:` {text}"
    if errors.error_location(error):
        return None
    # A library component, such as an optimizer, may quote the value that it refuses.
    text = str(error)
    quoted = [key for key in arguments if re.search(rf"(?<![\w.]){re.escape(str(arguments[key]))}(?![\w.]*\w)", text)]
    if len(quoted) != 1:
        return None
    default = getattr(argument_parameters(component).get(quoted[0]), "default", inspect.Parameter.empty)
    default_text = "" if default is inspect.Parameter.empty else f"; the default is {default!r}"
    value, why = arguments[quoted[0]], errors.describe_error(error)
    return f"{name}.{quoted[0]}={value!r}: {path} rejects this value ({why}){default_text}"


def argument_parameters(component: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a class or function by name; {} if it has no signature."""
    # The names in a string annotation may exist only for type checkers. Then it stays a string.
    for evaluate in (True, False):
        try:
            return dict(inspect.signature(component, eval_str=evaluate).parameters)
        except Exception:  # noqa: BLE001 (evaluating an annotation may raise anything)
            continue
    return {}


def _in_recipe(name: str) -> Any:
    """Return the object with this name in the running recipe, or None."""
    # `tune` runs the recipe as `__main__` without an entry in `sys.modules`: search the call stack.
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__" and name in frame.f_globals:
            return frame.f_globals[name]
        frame = frame.f_back
    return None


def import_recipe(recipe: str, prefix: str) -> ModuleType:
    """Import a recipe.

    Args:
        recipe: the name of one of our recipes, or the file or dotted name of another recipe.
        prefix: the beginning of error messages.

    Raises:
        UsageError: the recipe was not found.
    """
    recipe_modules = {entry.name: entry.path.stem for entry in recipe_files()}
    name = f"torchtune_ext.recipes.{recipe_modules[recipe]}" if recipe in recipe_modules else recipe
    if not name.endswith(".py"):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            raise UsageError(
                f"{prefix}{name}: unknown recipe ({error}). Fix: give your own recipe with its suffix: my_grpo.py"
            ) from error
    if Path(name).is_file():
        require_present_imports(Path(name))
    # The file may be outside Python's import path.
    spec = spec_from_file_location("recipe_of_a_user", name)
    assert spec is not None and spec.loader is not None  # holds for every name that ends in .py
    module = module_from_spec(spec)
    # Dataclasses look up their module in `sys.modules`.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except FileNotFoundError:
        raise UsageError(f"{prefix}{name}: file not found, relative to {Path.cwd()}") from None
    return module


def require_present_imports(recipe: Path) -> None:
    """Raise UsageError if a copied recipe imports modules that have moved since."""
    moved = ""
    with suppress(SyntaxError, ValueError):  # the import itself names the file and the line
        moved = outdated_imports(recipe.read_bytes())
    if moved:
        raise UsageError(f"{recipe.name}: {moved}. Fix: change these imports, or copy the recipe again")
