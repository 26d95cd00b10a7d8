"""Checks the words of `tune run RECIPE --config CONFIG key=value ...`; torchtune's own errors say little about them."""

import os
import re
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchtune_ext.run.catalog import (
    config_files,
    config_name,
    config_path,
    package_folder,
    recipe_files,
    recipe_for_config,
)
from torchtune_ext.run.errors import USAGE_ERROR_STATUS, UsageError, closest_match, wrap_user_errors
from torchtune_ext.run.process_env import describe_exit
from torchtune_ext.settings.components import require_present_imports

# Words of torchrun that a run may need. `tune run` takes them before the recipe.
TORCHRUN_OPTIONS = (
    "nproc_per_node nnodes node_rank rdzv_endpoint rdzv_backend rdzv_id master_addr master_port standalone".split()
)


def prepare(args: Namespace, recipes: Sequence[Any]) -> None:
    """Checks the words of `tune run`, and rewrites them, in place, as torchtune understands them.

    Args:
        args: the words as torchtune's parser read them: `recipe`, and `recipe_args` behind it.
        recipes: the entries of torchtune's registry, ours among them.

    Raises:
        ValueError: no such recipe, a config of another one, or several machines that would not find each other.
    """
    words = args.recipe_args
    # torchtune understands `--config X` but not `--config=X`, and counts the words of sys.argv, too.
    for line in (words, sys.argv):
        for i, word in enumerate(list(line)):
            if word.startswith("--config=") and "--config" not in line:
                line[i : i + 1] = ["--config", word.removeprefix("--config=")]
    known = {entry.name: entry for entry in recipes}
    if args.recipe not in known:
        args.recipe = _resolve_user_recipe(str(args.recipe), list(known))
    elif not Path(known[args.recipe].file_path).is_absolute():
        # A recipe of torchtune's own has a relative path. Its configs are not ours to check, but ours do not fit it.
        given = words[words.index("--config") + 1] if "--config" in words[:-1] else ""
        if Path(given).is_file() and "samples_per_prompt" in Path(given).read_text(errors="replace"):
            raise UsageError(
                f"--config {given} is written for GRPO, and {args.recipe} is a recipe of torchtune; run grpo_full"
            )
        return
    elif "--config" not in words[:-1] and not {"-h", "--help"} & set(words):
        # A tiny one starts on any machine.
        examples = sorted((config.name for config in known[args.recipe].configs), key=lambda name: "tiny" not in name)
        raise UsageError(
            f"which config? For instance: tune run {args.recipe} --config {examples[0] if examples else 'my_config.yaml'}; "
            "`tune ls` lists them"
        )
    elif "--config" in words[:-1]:
        # The recipe is one of ours, and torchtune's own configs do not fit it.
        given = words[words.index("--config") + 1]
        theirs = [entry.name for entry in recipes for config in entry.configs if config.name == given]
        if theirs and given not in config_files(package_folder("configs")) and not Path(given).is_file():
            ours = ", ".join(config.name for config in known[args.recipe].configs[:3])
            raise UsageError(
                f"--config {given} is a config of torchtune's {theirs[0]}; {args.recipe} takes {ours}, ... (`tune ls`), or a "
                "YAML file of your own"
            )
    if not re.fullmatch(r"\d+|auto|cpu|gpu|xpu", str(args.nproc_per_node)):
        raise UsageError(
            f"--nproc_per_node {args.nproc_per_node} must be a number of processes, one for each GPU that trains"
        )
    require_rendezvous(args, sys.argv)


def require_rendezvous(args: Namespace, argv: Sequence[str]) -> None:
    """Raises ValueError if `argv`, which torchtune's parser read as `args`, does not say how several machines meet."""
    # The number of machines may be a range, "1:4".
    if str(args.nnodes).rpartition(":")[2] == "1":
        return
    page = "see docs/several_machines.md"
    # Without it torchtune adds --standalone, whatever --master_addr and --rdzv_backend say.
    if not args.rdzv_endpoint:
        raise UsageError(
            f"--nnodes {args.nnodes} without --rdzv_endpoint: torchtune would wait on each machine for itself. Add "
            f"--rdzv_endpoint HOST:29500 on all of them, where HOST is the machine that gets --node_rank 0; {page}"
        )
    # In `args`, a missing number looks like torchrun's default of 0.
    numbered = any(word.partition("=")[0] in ("--node_rank", "--node-rank") for word in argv)
    # torchrun reads its arguments from variables PET_..., too.
    first = args.rdzv_endpoint.rpartition(":")[0] or args.rdzv_endpoint
    if args.rdzv_backend == "static" and not numbered and "PET_NODE_RANK" not in os.environ:
        raise UsageError(
            f"--nnodes {args.nnodes} without --node_rank: each machine needs its number, 0 on {first}, which gets rank 0 and "
            f"the engine, 1 on the next; {page}"
        )


def _resolve_user_recipe(given: str, known: Sequence[str]) -> str:
    """Returns a user's recipe, a path or a dotted name, as torchtune takes it. Raises ValueError if it cannot be run."""
    path, here = Path(given), Path.cwd()
    if path.suffix != ".py":
        file = here / f"{given.replace('.', '/')}.py"
        if file.is_file():
            require_present_imports(file)
        if file.is_file() or _importable(given):
            return given
        near = closest_match(given, sorted(known, key=len))
        hint = f"did you mean {near}?" if near else "`tune ls` lists them."
        raise UsageError(f"{given} is no recipe; {hint} A recipe of your own is written with its ending: my_grpo.py")
    if not path.is_file():
        raise UsageError(
            f"{given}: no such file, seen from {here}; `tune cp grpo_full {path.name}` makes a copy to edit"
        )
    with wrap_user_errors(f"importing {given}"):
        compile(path.read_bytes(), given, "exec", dont_inherit=True)
    require_present_imports(path)
    inside = Path(os.path.abspath(path))
    if not inside.is_relative_to(here):
        raise UsageError(f"{given} is not below {here}: torchtune runs recipes from there; go to {inside.parent} first")
    return str(inside.relative_to(here))


def _importable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        # `find_spec` imports the packages above the module, which may fail.
        return False


@contextmanager
def shorten_rank_failures() -> Iterator[None]:
    """Surrounds a run under torchrun. In place of torchrun's traceback, names the first rank and ends with its status."""
    try:
        yield
    except Exception as error:
        # The ranks have printed why they ended. The errors of torchrun are known by their attributes.
        failures, stopped_by = getattr(error, "failures", None), getattr(error, "sigval", None)
        if stopped_by is not None:
            sys.exit(128 + int(stopped_by))
        if not isinstance(failures, dict) or not failures:
            raise

        # torchrun ends the other ranks by SIGTERM, and 30 s later those that did not end, such as a stopped one, by
        # SIGKILL. Of two ranks that ended at about the same time, one that was killed took the other along.
        begin = min(failure.timestamp for failure in failures.values())

        def order(item: tuple[int, Any]) -> tuple:
            code = item[1].exitcode
            return code == -signal.SIGTERM, item[1].timestamp > begin + 5, code > 0, item[1].timestamp

        rank, first = min(failures.items(), key=order)
        status = first.exitcode if first.exitcode > 0 else 128 - first.exitcode
        # A rank that ends with STATUS has printed a message for the user, which needs no further word.
        if status != USAGE_ERROR_STATUS:
            print(f"{describe_exit(first.exitcode, f'rank {rank}')}; what it said stands above", file=sys.stderr)
        sys.exit(status)


def check_arguments(argv: list[str], recipe: str | None = None) -> None:
    """Checks the words behind a recipe, the file that runs, and replaces in `argv` a name of our configs by its path.

    Raises:
        ValueError: a word is no setting, or the config does not exist, is for another recipe, or is no YAML with keys.
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
        if word == "--config" and i + 1 < len(argv):
            config = argv[i + 1] = _resolve_config(argv[i + 1], recipe)
            _require_same_containers(config, settings)
        elif word.startswith("--config="):
            config = _resolve_config(word.removeprefix("--config="), recipe)
            argv[i] = f"--config={config}"
            _require_same_containers(config, settings)


def _check_override(word: str) -> None:
    """Raises ValueError for a word that is no key=value, or whose value torchtune cannot read."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    option = word.lstrip("-").partition("=")[0].replace("-", "_")
    if word.startswith("--") and option in TORCHRUN_OPTIONS:
        raise UsageError(
            f"{word}: a word of torchrun stands before the recipe: tune run --{option} ... grpo_full --config ..."
        )
    if word.startswith("--"):
        raise UsageError(f"{word}: a setting is written key=value, without dashes: {word.lstrip('-') or 'max_steps=3'}")
    # torchtune removes a key with ~key.
    if word.startswith("~"):
        return
    if "=" not in word or word.startswith("="):
        raise UsageError(
            f"{word!r} is no setting: write key=value without spaces around the = (max_steps=3), and quote a value with spaces"
        )
    if word.count("=") > 1:
        raise UsageError(f"{word}: torchtune takes one = in a word; set {word.partition('=')[0]} in the YAML file")
    try:
        OmegaConf.from_dotlist([word])
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        problem = " ".join(str(getattr(error, "problem", None) or error).split())[:200]
        raise UsageError(f"{word}: the value is no YAML ({problem}); quote it, or set it in the file") from None


def _require_same_containers(config: str, settings: Sequence[str]) -> None:
    """Raises Mistake for a list where the config has a mapping, or the other way round: OmegaConf cannot merge them."""
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
            raise UsageError(f"{word}: {config} has a {has} there; expected a {has}. Fix: {fix}") from None


def _resolve_config(given: str, recipe: str | None) -> str:
    path = Path(config_path(given))
    known = {each.name: each for each in recipe_files(package_folder("recipes"), package_folder("configs"))}
    files = {each.path.resolve(): each.name for each in known.values()}
    # A copied recipe takes any config, since it may have been changed to fit.
    running = files.get(Path(recipe).resolve()) if recipe else None
    _require_keys(given, path)
    theirs, name = recipe_for_config(given), config_name(path) or given
    # Files are compared, because several recipes may be one program under several names.
    if running and theirs in known and known[theirs].path != known[running].path:
        raise UsageError(
            f"--config {name} is written for {theirs}, not for this recipe: tune run {theirs} --config {name}"
        )
    return str(path)


def _require_keys(given: str, path: Path) -> None:
    """Raises ValueError if a file is no YAML with keys."""
    import yaml
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        loaded = OmegaConf.load(path)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{given}:{mark.line + 1}, column {mark.column + 1}" if mark is not None else given
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UsageError(f"{where}: no YAML ({problem}); mend this line or the one before it") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{given}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    except (OSError, OmegaConfBaseException) as error:
        raise UsageError(f"{given}: no config of a recipe ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(loaded, DictConfig) or not len(loaded):
        raise UsageError(
            f"{given} holds no keys; write `key: value` lines, or copy a config: tune cp grpo/tiny {path.name}"
        )
    if wrong := [key for key in loaded if not isinstance(key, str)]:
        raise UsageError(
            f"{given}: the key {wrong[0]!r} is not text to YAML ({type(wrong[0]).__name__}); quote or remove it"
        )
    if "config" in loaded:
        raise UsageError(f"{given}: the key 'config' is torchtune's own word for the file; rename or remove it")
