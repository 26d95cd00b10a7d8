"""Check the arguments of `tune run RECIPE --config CONFIG key=value ...`.

torchtune's own errors give little detail about invalid arguments.
"""

import os
import re
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchtune_ext.run.catalog import (
    config_files,
    config_name,
    config_path,
    recipe_files,
    recipe_for_config,
)
from torchtune_ext.run.errors import USAGE_ERROR_STATUS, UsageError, closest_match, wrap_user_errors
from torchtune_ext.run.process_env import describe_exit
from torchtune_ext.settings.components import require_present_imports

# Options of torchrun that a run may need. `tune run` takes them before the recipe.
TORCHRUN_OPTIONS = (
    "nproc_per_node nnodes node_rank rdzv_endpoint rdzv_backend rdzv_id master_addr master_port standalone".split()
)


def prepare(args: Namespace, recipes: Sequence[Any]) -> None:
    """Check the arguments of `tune run` and rewrite them in place into torchtune's form.

    Args:
        args: the arguments as torchtune's parser read them: `recipe` and `recipe_args`.
        recipes: the entries of torchtune's registry, including ours.

    Raises:
        UsageError: the recipe is unknown, the config is written for another recipe, or the
            rendezvous of several machines is not configured.
    """
    arguments = args.recipe_args
    # torchtune accepts `--config X` but not `--config=X`, and also reads sys.argv.
    for line in (arguments, sys.argv):
        for i, word in enumerate(list(line)):
            if word.startswith("--config=") and "--config" not in line:
                line[i : i + 1] = ["--config", word.removeprefix("--config=")]
    known = {entry.name: entry for entry in recipes}
    if args.recipe not in known:
        args.recipe = _resolve_user_recipe(str(args.recipe), list(known))
    elif not Path(known[args.recipe].file_path).is_absolute():
        # torchtune's own recipes have relative paths. Their configs are not checked here, except
        # that a GRPO config does not fit them.
        given = arguments[arguments.index("--config") + 1] if "--config" in arguments[:-1] else ""
        if Path(given).is_file() and "samples_per_prompt" in Path(given).read_text(errors="replace"):
            raise UsageError(
                f"--config {given} is a GRPO config, but {args.recipe} is a torchtune recipe. Fix: run grpo_full"
            )
        return
    elif "--config" not in arguments[:-1] and not {"-h", "--help"} & set(arguments):
        # A tiny config starts on any machine, so it is listed first.
        examples = sorted((config.name for config in known[args.recipe].configs), key=lambda name: "tiny" not in name)
        raise UsageError(
            f"--config is missing. Fix: tune run {args.recipe} --config {examples[0] if examples else 'my_config.yaml'} "
            "(`tune ls` lists the configs)"
        )
    elif "--config" in arguments[:-1]:
        # torchtune's own configs do not fit our recipes.
        given = arguments[arguments.index("--config") + 1]
        torchtune_recipes = [entry.name for entry in recipes for config in entry.configs if config.name == given]
        if torchtune_recipes and given not in config_files() and not Path(given).is_file():
            examples = ", ".join(config.name for config in known[args.recipe].configs[:3])
            raise UsageError(
                f"--config {given} is a config of torchtune's {torchtune_recipes[0]}; {args.recipe} takes {examples}, ... "
                "(`tune ls`), or your own YAML file"
            )
    if not re.fullmatch(r"\d+|auto|cpu|gpu|xpu", str(args.nproc_per_node)):
        raise UsageError(
            f"--nproc_per_node {args.nproc_per_node} must be a number of processes, one for each GPU that trains"
        )
    require_rendezvous(args, sys.argv)


def require_rendezvous(args: Namespace, argv: Sequence[str]) -> None:
    """Raise UsageError if a run on several machines has no rendezvous endpoint or node rank.

    Args:
        args: the arguments as torchtune's parser read them.
        argv: the same arguments as the user typed them.
    """
    # `--nnodes` may be a range, "1:4".
    if str(args.nnodes).rpartition(":")[2] == "1":
        return
    page = "see docs/how_to/multi_gpu.md"
    # Without --rdzv_endpoint, torchtune adds --standalone and ignores other options.
    if not args.rdzv_endpoint:
        raise UsageError(
            f"--nnodes {args.nnodes} without --rdzv_endpoint: each machine would wait alone (torchtune adds "
            "--standalone). Fix: add --rdzv_endpoint HOST:29500 on all machines, where HOST is the machine with "
            f"--node_rank 0; {page}"
        )
    # In `args`, a missing --node_rank looks like torchrun's default of 0.
    has_node_rank = any(word.partition("=")[0] in ("--node_rank", "--node-rank") for word in argv)
    # torchrun also reads its arguments from PET_... environment variables.
    first = args.rdzv_endpoint.rpartition(":")[0] or args.rdzv_endpoint
    if args.rdzv_backend == "static" and not has_node_rank and "PET_NODE_RANK" not in os.environ:
        raise UsageError(
            f"--nnodes {args.nnodes} without --node_rank. Fix: set --node_rank on each machine: 0 on {first}, which runs "
            f"rank 0 and the engine, 1 on the next; {page}"
        )


def _resolve_user_recipe(given: str, known: Sequence[str]) -> str:
    """Return a user's recipe, given as a path or dotted name, in the form that torchtune takes.

    Raises:
        UsageError: the recipe cannot be run.
    """
    path, cwd = Path(given), Path.cwd()
    if path.suffix != ".py":
        file = cwd / f"{given.replace('.', '/')}.py"
        if file.is_file():
            require_present_imports(file)
        if file.is_file() or _importable(given):
            return given
        near = closest_match(given, sorted(known, key=len))
        hint = f"did you mean {near}?" if near else "`tune ls` lists them."
        raise UsageError(f"unknown recipe {given}; {hint} Give your own recipe with its suffix: my_grpo.py")
    if not path.is_file():
        raise UsageError(
            f"{given}: file not found, relative to {cwd}; `tune cp grpo_full {path.name}` makes a copy to edit"
        )
    with wrap_user_errors(f"importing {given}"):
        compile(path.read_bytes(), given, "exec", dont_inherit=True)
    require_present_imports(path)
    absolute = Path(os.path.abspath(path))
    if not absolute.is_relative_to(cwd):
        raise UsageError(f"{given} is not below {cwd}, where torchtune looks for recipes. Fix: cd {absolute.parent}")
    return str(absolute.relative_to(cwd))


def _importable(name: str) -> bool:
    with suppress(ImportError, ValueError):  # `find_spec` imports the parent packages, which may fail
        return find_spec(name) is not None
    return False


@contextmanager
def shorten_rank_failures() -> Iterator[None]:
    """Name the first failed rank and exit with its status, in place of torchrun's traceback."""
    try:
        yield
    except Exception as error:
        # The ranks have printed why they failed. torchrun's errors are recognized by attribute.
        failures, stopped_by = getattr(error, "failures", None), getattr(error, "sigval", None)
        if stopped_by is not None:
            sys.exit(128 + int(stopped_by))
        if not isinstance(failures, dict) or not failures:
            raise

        # torchrun sends SIGTERM to the other ranks, and SIGKILL 30 s later to ranks that still run.
        # If two ranks ended within 5 s, the killed rank caused the exit of the other rank.
        first_failure_time = min(failure.timestamp for failure in failures.values())

        def order(item: tuple[int, Any]) -> tuple:
            code = item[1].exitcode
            return code == -signal.SIGTERM, item[1].timestamp > first_failure_time + 5, code > 0, item[1].timestamp

        rank, first = min(failures.items(), key=order)
        status = first.exitcode if first.exitcode > 0 else 128 - first.exitcode
        # A rank that ends with USAGE_ERROR_STATUS has already printed a message for the user.
        if status != USAGE_ERROR_STATUS:
            print(f"{describe_exit(first.exitcode, f'rank {rank}')}; its output is above", file=sys.stderr)
        sys.exit(status)


def check_arguments(argv: list[str], recipe: str | None = None) -> None:
    """Check the arguments after a recipe, and replace the name of one of our configs by its path.

    Args:
        argv: the program name and the arguments after it; changed in place.
        recipe: the file of the recipe; None: any recipe.

    Raises:
        UsageError: an argument is not a `key=value` override, or the config is missing, is written
            for another recipe, or is not a YAML mapping.
    """
    words, settings = iter(argv[1:]), []
    for word in words:
        if word == "--config":
            next(words, None)
        elif not word.startswith(("--config=", "-h", "--help")):
            settings.append(word)
    for word in settings:
        _check_override(word)
    for i, word in enumerate(argv):
        # The form is "--config FILE" or "--config=FILE".
        prefix = "--config=" if word.startswith("--config=") else ""
        if prefix or (i and argv[i - 1] == "--config"):
            config = _resolve_config(word.removeprefix(prefix), recipe)
            argv[i] = f"{prefix}{config}"
            _require_same_containers(config, settings)


def _check_override(word: str) -> None:
    """Raise UsageError if an argument is not key=value or torchtune cannot read its value."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    option = word.lstrip("-").partition("=")[0].replace("-", "_")
    if word.startswith("--") and option in TORCHRUN_OPTIONS:
        raise UsageError(
            f"{word}: expected before the recipe, as an option of torchrun: tune run --{option} ... grpo_full --config ..."
        )
    if word.startswith("--"):
        raise UsageError(f"{word}: expected key=value without dashes: {word.lstrip('-') or 'max_steps=3'}")
    # torchtune removes a key with ~key.
    if word.startswith("~"):
        return
    if "=" not in word or word.startswith("="):
        raise UsageError(
            f"{word!r} is not key=value. Fix: write no spaces around the = (max_steps=3), and quote a value with spaces"
        )
    if word.count("=") > 1:
        raise UsageError(
            f"{word}: torchtune accepts one = in an argument. Fix: set {word.partition('=')[0]} in the YAML file"
        )
    try:
        OmegaConf.from_dotlist([word])
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        problem = " ".join(str(getattr(error, "problem", None) or error).split())[:200]
        raise UsageError(
            f"{word}: the value is not valid YAML ({problem}). Fix: quote it, or set it in the file"
        ) from None


def _require_same_containers(config: str, settings: Sequence[str]) -> None:
    """Raise UsageError if an override and the config mix a list and a mapping (no merge)."""
    from omegaconf import OmegaConf

    loaded = OmegaConf.load(config)
    for word in settings:
        if word.startswith("~"):
            continue
        try:
            OmegaConf.merge(loaded, OmegaConf.from_dotlist([word]))
        except TypeError:
            key = word.partition("=")[0]
            has = "mapping" if OmegaConf.is_dict(OmegaConf.select(loaded, key)) else "list"
            fix = f"{key}.NAME=VALUE for one of its keys" if has == "mapping" else f"{key}=[...]"
            raise UsageError(f"{word}: {config} has a {has} at this key; expected a {has}. Fix: {fix}") from None


def _resolve_config(given: str, recipe: str | None) -> str:
    path = Path(config_path(given))
    known = {entry.name: entry for entry in recipe_files()}
    files = {entry.path.resolve(): entry.name for entry in known.values()}
    # A copied recipe accepts any config, because the user may have adapted it.
    running = files.get(Path(recipe).resolve()) if recipe else None
    _require_keys(given, path)
    config_recipe, name = recipe_for_config(given), config_name(path) or given
    # Compare files, because several recipe names may share one file.
    if running and config_recipe in known and known[config_recipe].path != known[running].path:
        raise UsageError(
            f"--config {name} is written for {config_recipe}, not for this recipe: tune run {config_recipe} --config {name}"
        )
    return str(path)


def _require_keys(given: str, path: Path) -> None:
    """Raise UsageError if a file is not a YAML mapping."""
    import yaml
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        loaded = OmegaConf.load(path)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{given}:{mark.line + 1}, column {mark.column + 1}" if mark is not None else given
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UsageError(f"{where}: not valid YAML ({problem}). Fix: correct this line or the line before it") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{given}: not UTF-8 at byte {error.start}. Fix: save the file as UTF-8") from None
    except (OSError, OmegaConfBaseException) as error:
        raise UsageError(f"{given}: not a recipe config ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(loaded, DictConfig) or not len(loaded):
        raise UsageError(
            f"{given} has no keys. Fix: write `key: value` lines, or copy a config: tune cp grpo/tiny {path.name}"
        )
    if non_text_keys := [key for key in loaded if not isinstance(key, str)]:
        raise UsageError(
            f"{given}: YAML reads the key {non_text_keys[0]!r} as {type(non_text_keys[0]).__name__}; expected "
            "text. Fix: quote or remove it"
        )
    if "config" in loaded:
        raise UsageError(f"{given}: the key 'config' is reserved by torchtune for the file. Fix: rename or remove it")
