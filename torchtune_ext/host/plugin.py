"""Makes the stock `tune` know recipes/ and configs/.

`install` runs at every interpreter start (torchtune_ext_tune.pth), so this file imports nothing but `sys`: it puts a
finder on `sys.meta_path`. The finder acts twice, and only in a process that imports torchtune:

    before `torchtune` is executed                   torchao_compat.apply: torchao 0.16 to 0.18 become usable
    after `torchtune._recipe_registry` is executed   register: our recipes and configs, with absolute paths
"""

import sys


def register(registry) -> None:
    """Append our recipes to the module `torchtune._recipe_registry`; a name that is there already is left as it is."""
    from torchtune_ext.host.catalog import folder, recipe_files

    entries = registry.get_all_recipes()
    known = {entry.name for entry in entries}
    for recipe in recipe_files(folder("recipes"), folder("configs")):
        if recipe.name not in known:
            configs = [registry.Config(name=name, file_path=str(path)) for name, path in recipe.configs.items()]
            entries.append(registry.Recipe(recipe.name, str(recipe.path), configs, recipe.supports_distributed))


def make_torchao_usable(_torchtune) -> None:
    from torchtune_ext.host.torchao_compat import apply

    apply()


class TorchtuneFinder:
    """Finds nothing itself: it adds a call before or after two of torchtune's modules are executed."""

    before = {"torchtune": make_torchao_usable}
    after = {"torchtune._recipe_registry": register}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in cls.before and name not in cls.after:
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not cls)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_with_calls(module):
            cls.call(cls.before.get(name), module)
            execute(module)
            cls.call(cls.after.get(name), module)

        spec.loader.exec_module = execute_with_calls
        return spec

    @staticmethod
    def call(function, module) -> None:
        """Run one of our calls. torchtune stays usable whatever is wrong with us, so an error becomes a warning."""
        if function is None:
            return
        try:
            function(module)
        except Exception as error:
            import warnings

            warnings.warn(
                f"torchtune-ext: {function.__name__} failed ({error!r}); run `torchtune-ext doctor`", stacklevel=2
            )


def installed() -> bool:
    return TorchtuneFinder in sys.meta_path


def install() -> None:
    """Put the finder on `sys.meta_path`, once. It acts only when this runs before torchtune is imported."""
    if not installed():
        sys.meta_path.insert(0, TorchtuneFinder)


def resolve_config(argv: list[str]) -> None:
    """Replace a name of a config of ours after `--config` by its path, in place. ValueError when nothing has it."""
    from torchtune_ext.host.catalog import config_path

    for i, word in enumerate(argv):
        if word == "--config" and i + 1 < len(argv):
            argv[i + 1] = config_path(argv[i + 1])
        elif word.startswith("--config="):
            argv[i] = "--config=" + config_path(word.removeprefix("--config="))


def parse(recipe_main):
    """`torchtune.config.parse` for our recipes: `--config` may also name a config of this package.

    `tune run` resolves such names itself; this decorator does it where `tune` is not involved (`python -m
    torchtune_ext.recipes.grpo --config grpo/tiny`, torchrun) or where start-up files are not read.
    """
    import functools

    from torchtune import config

    parsed = config.parse(recipe_main)

    @functools.wraps(recipe_main)
    def wrapper(*args, **kwargs):
        resolve_config(sys.argv)
        return parsed(*args, **kwargs)

    return wrapper
