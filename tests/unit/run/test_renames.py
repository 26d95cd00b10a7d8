"""Old module names: their current names, and the error of a file that imports them."""

from pathlib import Path

import pytest

from torchtune_ext.run.catalog import import_object
from torchtune_ext.run.errors import UsageError, describe_error
from torchtune_ext.run.renames import PACKAGE_PREFIX, RENAMED_MODULES, current_name, outdated_imports
from torchtune_ext.settings.components import import_recipe

ROOT = Path(__file__).resolve().parents[3]


def file_of(name: str) -> Path:
    return ROOT.joinpath("torchtune_ext", *name.split(".")).with_suffix(".py")


@pytest.mark.parametrize("old", RENAMED_MODULES)
def test_renamed_module_exists_only_at_its_new_path(old):
    new = RENAMED_MODULES[old]
    assert not file_of(old).exists()
    module, _, attribute = new.rpartition(".")
    assert file_of(new).is_file() or hasattr(__import__(PACKAGE_PREFIX + module, fromlist=[attribute]), attribute)


@pytest.mark.parametrize(
    "name, now",
    [
        ("torchtune_ext.advantages", "torchtune_ext.pipeline.advantages"),
        ("torchtune_ext.advantages.AdvantageConfig", "torchtune_ext.pipeline.advantages.AdvantageConfig"),
        ("torchtune_ext.training.settings.at_least", "torchtune_ext.setup.config_checks.at_least"),
        ("torchtune_ext.training.settings.chosen_dtype", "torchtune_ext.training.precision.chosen_dtype"),
        ("torchtune_ext.pipeline.advantages", None),
        ("torchtune_ext.training.learner", None),
        ("torchtune_ext", None),
        ("advantages", None),
    ],
)
def test_new_name(name, now):
    assert current_name(name) == now


@pytest.mark.parametrize(
    "source, says",
    [
        ("import torchtune_ext.packing", "torchtune_ext.packing moved to torchtune_ext.pipeline.packing"),
        ("from torchtune_ext import packing", "torchtune_ext.packing moved to torchtune_ext.pipeline.packing"),
        (
            "def f():\n    from torchtune_ext.host import nodes",
            "torchtune_ext.host.nodes moved to torchtune_ext.setup.config_sections",
        ),
        (
            "from torchtune_ext.training.settings import at_least, chosen_dtype, check_settings",
            "torchtune_ext.training.settings moved to torchtune_ext.setup.config_checks, torchtune_ext.training.settings.chosen_dtype "
            "moved to torchtune_ext.training.precision.chosen_dtype",
        ),
        ("from torchtune_ext.pipeline import packing\nimport packing\nfrom . import groups", ""),
    ],
)
def test_moved_imports(source, says):
    assert outdated_imports(source.encode()) == says


def test_recipe_file_with_moved_import_is_refused(tmp_path):
    recipe = tmp_path / "my_grpo.py"
    recipe.write_text("from torchtune_ext.host import nodes\n")
    with pytest.raises(UsageError, match="my_grpo.py: torchtune_ext.host.nodes .*torchtune_ext.setup.config_sections"):
        import_recipe(str(recipe), "")


def test_moved_component_is_refused():
    with pytest.raises(
        UsageError, match="^here: torchtune_ext.replay.Replay moved to torchtune_ext.training.replay.ReplaySource$"
    ):
        import_object("torchtune_ext.replay.Replay", "here")


def test_import_of_renamed_module_names_new_path():
    with pytest.raises(ModuleNotFoundError) as caught:
        import torchtune_ext.groups  # noqa: F401
    assert describe_error(caught.value).startswith(
        "ModuleNotFoundError: torchtune_ext.groups moved to torchtune_ext.pipeline.groups"
    )
