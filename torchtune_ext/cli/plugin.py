"""Adds recipes/ and configs/ to the stock `tune`, by import hooks on torchtune's modules:

    before `torchtune`                   prepare_process, which also starts the engine's process
    after `torchtune._recipe_registry`   register_recipes adds our recipes and configs
    after `torchtune._cli.run`           wrap_tune_run adds short errors and --help to `tune run`

A process that does not import torchtune is not changed.
"""

# torchtune_ext_tune.pth runs `install` at every start of the interpreter. So this file imports only
# `sys` at the top, and other modules inside functions.
import sys

TYPE_CHECKING = False  # as in `typing`, without importing it
if TYPE_CHECKING:
    from collections.abc import Callable


def register_recipes(registry) -> None:
    """Adds our recipes to `torchtune._recipe_registry`, except for names that it already has."""
    from torchtune_ext.run.catalog import recipe_files

    # This is the registry's own list, so additions to it persist.
    entries = registry.get_all_recipes()
    known, ours = {entry.name for entry in entries}, []
    for each in recipe_files():
        if each.name not in known:
            configs = [registry.Config(name=name, file_path=str(path)) for name, path in each.configs.items()]
            ours.append(registry.Recipe(each.name, str(each.path), configs, each.supports_distributed))
    entries[:0] = ours


def prepare_process(_torchtune) -> None:
    """Filters logs, and starts the engine's process for `tune run`, before torchtune executes."""
    import logging

    # torchao logs that it skips its C++ extensions, which are unused here.
    skipped = "Skipping import of cpp extensions"
    logging.getLogger("torchao").addFilter(lambda record: skipped not in record.getMessage())
    # Other programs that import torchtune keep their own handling of Ctrl-C and of threads.
    if sys.argv[0].rpartition("/")[2] in ("tune", "torchtune-ext", "__main__.py"):
        import os

        from torchtune_ext.run.terminal import replace_unencodable

        replace_unencodable()
        sys.excepthook = interrupt_excepthook
        # With this count an idle OpenMP thread spins for microseconds, then sleeps. Longer spinning
        # would take the core from the engine, or from a thread that others wait for. Sleeping at
        # once (OMP_WAIT_POLICY=passive) would make every small operation wait for a wake-up. OpenMP
        # reads the variable when torch is imported.
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
        # The engine's process imports vLLM while this one imports torchtune.
        if sys.argv[1:2] == ["run"]:
            from torchtune_ext.sampling import prestart

            prestart.prestart_client(sys.argv[2:])


def wrap_tune_run(cli) -> None:
    """Wraps `tune run`: usage errors take one line, and --help lists config keys."""
    import atexit
    import gc

    from torchtune_ext.cli.config import is_recipe, print_help
    from torchtune_ext.run.errors import report_errors
    from torchtune_ext.settings.command_line import prepare, shorten_rank_failures

    run = cli.Run._run_cmd

    def run_with_help(self, args):
        # torchtune would answer --help after a recipe with "--config is missing".
        with report_errors():
            if {"-h", "--help"} & set(args.recipe_args) and is_recipe(args.recipe):
                print_help(args.recipe)
                return
            prepare(args, cli.get_all_recipes())
            from torchtune_ext.settings.config import warn_if_setting_missing

            warn_if_setting_missing(args.recipe, args.recipe_args)
        # At exit the interpreter would search half a million objects for cycles, for a second.
        atexit.register(gc.freeze)
        with shorten_rank_failures():
            run(self, args)

    cli.Run._run_cmd = run_with_help


def interrupt_excepthook(kind, error, trace) -> None:
    """Shows an error as Python does, but Ctrl-C in one line (a `sys.excepthook`)."""
    if issubclass(kind, KeyboardInterrupt):
        print("Stopped by Ctrl-C before the run started", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


class TorchtuneFinder:
    """Calls hooks before and after modules of torchtune; other finders find the modules."""

    # `ClassVar` would need an import at every start of the interpreter.
    pre_hooks = {"torchtune": prepare_process}  # noqa: RUF012
    post_hooks = {"torchtune._recipe_registry": register_recipes, "torchtune._cli.run": wrap_tune_run}  # noqa: RUF012

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """Returns another finder's spec of a module, with our hooks around its execution."""
        if name not in cls.pre_hooks and name not in cls.post_hooks:
            return None
        # Exclude this finder, which would recurse without end.
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not cls)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        # Each spec has its own loader, so this wrapper executes no other module.
        execute = spec.loader.exec_module

        def execute_with_calls(module):
            cls.run_hook(cls.pre_hooks.get(name), module)
            execute(module)
            cls.run_hook(cls.post_hooks.get(name), module)

        spec.loader.exec_module = execute_with_calls
        return spec

    @staticmethod
    def run_hook(function, module) -> None:
        if function is None:
            return
        # An error in a hook becomes a warning, so that torchtune stays usable.
        try:
            function(module)
        except Exception as error:  # noqa: BLE001 (it becomes a warning)
            import warnings

            warnings.warn(
                f"torchtune-ext: {function.__name__} failed ({error!r}); run `torchtune-ext doctor`", stacklevel=2
            )


def is_installed() -> bool:
    """Returns whether the finder is on `sys.meta_path`."""
    return TorchtuneFinder in sys.meta_path


def install() -> None:
    """Puts the finder on `sys.meta_path`, once. It has no effect after torchtune is imported."""
    if not is_installed():
        # Python takes the first finder that knows a module, so this finder goes first.
        sys.meta_path.insert(0, TorchtuneFinder)


def parse(recipe_main) -> "Callable[[], None]":
    """Wraps a recipe's main function like `torchtune.config.parse`; `--config` finds our configs.

    A usage error ends the recipe with one message and exit status 2 (`errors.report_errors`).
    """
    import functools

    from torchtune import config

    from torchtune_ext.run.errors import report_errors
    from torchtune_ext.run.terminal import replace_unencodable, style_warnings
    from torchtune_ext.settings.command_line import check_arguments

    replace_unencodable()
    style_warnings()
    parsed = config.parse(recipe_main)

    @functools.wraps(recipe_main)
    def wrapper(*args, **kwargs):
        with report_errors():
            # `tune run` replaces the names of configs by paths. Without it (`python -m`, torchrun),
            # or if Python reads no start-up files, this call does.
            check_arguments(sys.argv, recipe_main.__globals__.get("__file__"))
            return parsed(*args, **kwargs)

    return wrapper
