"""Makes the stock `tune` know recipes/ and configs/, by a finder that adds calls to torchtune's modules:

    before `torchtune` is executed                   begin prepares the process, and begins that of an engine
    after `torchtune._recipe_registry` is executed   register adds our recipes and configs
    after `torchtune._cli.run` is executed           guide makes `tune run` explain mistakes and --help

A process that does not import torchtune is left as it is.
"""

# torchtune_ext_tune.pth runs `install` at every start of the interpreter. So this file imports only `sys` here, and all
# else where it is needed.
import sys

TYPE_CHECKING = False  # what `typing` calls so, without importing it
if TYPE_CHECKING:
    from collections.abc import Callable


def register_recipes(registry) -> None:
    """Adds our recipes to the module `torchtune._recipe_registry`. A name that is there already is left as it is."""
    from torchtune_ext.run.catalog import package_folder, recipe_files

    # This is the registry's own list, so what is added to it stays there.
    entries = registry.get_all_recipes()
    known = {entry.name for entry in entries}
    ours = [
        each for each in recipe_files(package_folder("recipes"), package_folder("configs")) if each.name not in known
    ]
    entries[:0] = [
        registry.Recipe(
            recipe.name,
            str(recipe.path),
            [registry.Config(name=name, file_path=str(path)) for name, path in recipe.configs.items()],
            recipe.supports_distributed,
        )
        for recipe in ours
    ]


def prepare_process(_torchtune) -> None:
    """Runs before torchtune is executed: quiets it, and begins the process of an engine that a recipe will want."""
    import logging

    # torchao says that it skips its C++ extensions, which fit one version of torch. Nothing here uses them.
    skipped = "Skipping import of cpp extensions"
    logging.getLogger("torchao").addFilter(lambda record: skipped not in record.getMessage())
    # A program of the user's that imports torchtune keeps its own handling of Ctrl-C and of threads.
    if sys.argv[0].rpartition("/")[2] in ("tune", "torchtune-ext", "__main__.py"):
        import os

        from torchtune_ext.run.terminal import replace_unencodable

        replace_unencodable()
        sys.excepthook = interrupt_excepthook
        # With this count a thread of OpenMP that waits for work spins for microseconds, then sleeps. Spinning on would
        # take the core from the engine, or from a thread that the others wait for. Sleeping at once
        # (OMP_WAIT_POLICY=passive) would make every small operation wait for a wake-up. OpenMP reads the variable when
        # torch is imported.
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
        # The engine's process imports vLLM while this one imports torchtune.
        if sys.argv[1:2] == ["run"]:
            from torchtune_ext.sampling import prestart

            prestart.prestart_client(sys.argv[2:])


def wrap_tune_run(cli) -> None:
    """Wraps `tune run` (the module `torchtune._cli.run`): it explains mistakes in one line, and --help lists config keys."""
    import atexit
    import gc

    from torchtune_ext.cli.config import is_recipe, print_help
    from torchtune_ext.run.errors import report_errors
    from torchtune_ext.settings.command_line import prepare, shorten_rank_failures

    run = cli.Run._run_cmd

    def run_with_help(self, args):
        # torchtune would answer --help behind a recipe by saying that --config is missing.
        with report_errors():
            if {"-h", "--help"} & set(args.recipe_args) and is_recipe(args.recipe):
                print_help(args.recipe)
                return
            prepare(args, cli.get_all_recipes())
            from torchtune_ext.settings.config import warn_if_setting_missing

            warn_if_setting_missing(args.recipe, args.recipe_args)
        # At its end the interpreter would look through half a million objects for cycles, which takes a second.
        atexit.register(gc.freeze)
        with shorten_rank_failures():
            run(self, args)

    cli.Run._run_cmd = run_with_help


def interrupt_excepthook(kind, error, trace) -> None:
    """An excepthook: shows an error as Python does, but Ctrl-C in one line."""
    if issubclass(kind, KeyboardInterrupt):
        print("Stopped by Ctrl-C before the run had begun", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


class TorchtuneFinder:
    """Adds calls before and after modules of torchtune are executed. It finds no modules itself."""

    # `ClassVar` would need an import at every start of the interpreter.
    pre_hooks = {"torchtune": prepare_process}  # noqa: RUF012
    post_hooks = {"torchtune._recipe_registry": register_recipes, "torchtune._cli.run": wrap_tune_run}  # noqa: RUF012

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """Returns the spec that another finder gives for a module, with our calls around its execution."""
        if name not in cls.pre_hooks and name not in cls.post_hooks:
            return None
        # Without this finder itself, which would ask again without end.
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not cls)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        # Each spec has a loader of its own, so this one executes no other module.
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
        # An error of ours becomes a warning, so that torchtune stays usable.
        try:
            function(module)
        except Exception as error:  # noqa: BLE001 (it becomes a warning)
            import warnings

            warnings.warn(
                f"torchtune-ext: {function.__name__} failed ({error!r}); run `torchtune-ext doctor`", stacklevel=2
            )


def is_installed() -> bool:
    """Tells whether the finder is on `sys.meta_path`."""
    return TorchtuneFinder in sys.meta_path


def install() -> None:
    """Puts the finder on `sys.meta_path`, once. It only has an effect before torchtune is imported."""
    if not is_installed():
        # Python takes the first finder that knows a module, so ours comes before them.
        sys.meta_path.insert(0, TorchtuneFinder)


def parse(recipe_main) -> "Callable[[], None]":
    """Wraps the main function of a recipe as `torchtune.config.parse` does; `--config` may also name our configs.

    A mistake of the user ends the recipe with one message and exit status 2 (`errors.shown`).
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
            # `tune run` replaces the names of configs itself. Without it (`python -m torchtune_ext.recipes.grpo`,
            # torchrun), or where Python reads no start-up files, this does.
            check_arguments(sys.argv, recipe_main.__globals__.get("__file__"))
            return parsed(*args, **kwargs)

    return wrapper
