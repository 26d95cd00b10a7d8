"""The start-up hook, the catalog of recipes and configs, and the command `torchtune-ext`."""

import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchtune_ext.cli import cli, plugin
from torchtune_ext.run.catalog import config_files, config_path, package_folder, recipe_files, recipe_for_name
from torchtune_ext.settings.command_line import check_arguments

PACKAGE_PARENT = Path(plugin.__file__).resolve().parents[2]


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return root


def python(code: str, *paths: Path) -> subprocess.CompletedProcess:
    """Run code without site-packages, so without the real torchtune and torchao; `paths` come first."""
    text = f"import sys; sys.path[:0] = {[str(path) for path in (*paths, PACKAGE_PARENT)]!r}\n" + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-S", "-c", text], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def repository(tmp_path):
    """Two recipes and four configs."""
    return write(
        tmp_path,
        {
            "recipes/__init__.py": "",
            "recipes/grpo_full.py": "x = 1\n",
            "recipes/grpo_lora.py": "x = 1\nSUPPORTS_DISTRIBUTED = False\n",
            "configs/__init__.py": "",
            "configs/grpo/tiny.yaml": "seed: 0\n",
            "configs/grpo/tiny_lora.yaml": "seed: 1\n",
            "configs/grpo/deep/lora/er.yaml": "seed: 2\n",
            "configs/sweeps/seeds.yaml": "seed: [1, 2]\n",
        },
    )


def test_catalog_assigns_configs_to_recipes(repository):
    full, lora = recipe_files(repository / "recipes", repository / "configs")
    assert (full.name, lora.name) == ("grpo_full", "grpo_lora")
    assert list(full.configs) == ["grpo/deep/lora/er", "grpo/tiny"]  # the end of the name counts
    assert list(lora.configs) == ["grpo/tiny_lora"]
    assert full.configs["grpo/tiny"].read_text() == "seed: 0\n" and full.configs["grpo/tiny"].is_absolute()
    assert (full.supports_distributed, lora.supports_distributed) == (True, False)
    assert recipe_for_name("sweeps/seeds") is None


def test_only_recipes_that_train_run_under_torchrun():
    several = {
        each.name: each.supports_distributed
        for each in recipe_files(package_folder("recipes"), package_folder("configs"))
    }
    assert several == {"evaluate": False, "grpo_async": True, "grpo_full": True, "grpo_lora": True, "warmup_sft": True}


def test_a_recipe_may_have_several_names(repository):
    (repository / "recipes/grpo_lora.py").unlink()
    (repository / "recipes/grpo_full.py").rename(repository / "recipes/grpo.py")
    (repository / "recipes/grpo.py").write_text('x = 1\nTUNE_NAMES = ("grpo_lora", "grpo_full")\n')
    full, lora = recipe_files(repository / "recipes", repository / "configs")
    assert (full.name, lora.name) == ("grpo_full", "grpo_lora")
    assert full.path == lora.path == repository / "recipes/grpo.py"
    assert list(full.configs) == ["grpo/deep/lora/er", "grpo/tiny"] and list(lora.configs) == ["grpo/tiny_lora"]


def test_register_adds_our_recipes_first_and_once(repository, monkeypatch):
    monkeypatch.setattr("torchtune_ext.run.catalog.package_folder", lambda name: repository / name)
    entries = [SimpleNamespace(name="theirs")]
    registry = SimpleNamespace(
        get_all_recipes=lambda: entries,
        Config=lambda name, file_path: (name, file_path),
        Recipe=lambda name, path, configs, distributed: SimpleNamespace(name=name, path=path, configs=configs),
    )
    plugin.register_recipes(registry)
    plugin.register_recipes(registry)
    assert [entry.name for entry in entries] == ["grpo_full", "grpo_lora", "theirs"]
    assert entries[1].configs == [("grpo/tiny_lora", str(repository / "configs/grpo/tiny_lora.yaml"))]


def test_installed_folders_are_those_of_the_package():
    assert (package_folder("recipes") / "__init__.py").is_file()
    assert package_folder("configs").is_dir() and package_folder("kernels").is_dir()


def test_config_names_become_paths(repository, monkeypatch):
    monkeypatch.setattr("torchtune_ext.run.catalog.package_folder", lambda name: repository / name)
    monkeypatch.chdir(repository)
    tiny = str(repository / "configs/grpo/tiny.yaml")
    argv = ["recipe", "--config", "grpo/tiny", "seed=3"]
    check_arguments(argv)
    assert argv == ["recipe", "--config", tiny, "seed=3"]
    argv = ["recipe", "--config=grpo/tiny"]
    check_arguments(argv)
    assert argv == ["recipe", f"--config={tiny}"]
    assert config_path("configs/grpo/tiny.yaml") == "configs/grpo/tiny.yaml"  # a file comes before a name
    with pytest.raises(ValueError, match=r"--config grpo/tinny: .*did you mean grpo/tiny"):
        config_path("grpo/tinny")


FAKE_TORCHTUNE = {
    "torchtune/__init__.py": "",
    "torchtune/_recipe_registry.py": """
        from collections import namedtuple
        Config = namedtuple("Config", "name file_path")
        Recipe = namedtuple("Recipe", "name file_path configs supports_distributed")
        entries = []
        def get_all_recipes():
            return entries
    """,
}


def test_hook_is_light():
    code = """
        before = set(sys.modules)
        from torchtune_ext.cli.plugin import install
        install()
        print(sorted(set(sys.modules) - before))
    """
    assert python(code).stdout.strip() == "['torchtune_ext', 'torchtune_ext.cli', 'torchtune_ext.cli.plugin']"


def test_hook_registers_when_torchtune_is_imported(tmp_path):
    write(tmp_path, FAKE_TORCHTUNE)
    code = """
        from torchtune_ext.cli import plugin
        plugin.install(); plugin.install()
        assert sys.meta_path.count(plugin.TorchtuneFinder) == 1
        from torchtune import _recipe_registry as registry
        print([entry.name for entry in registry.entries])
    """
    done = python(code, tmp_path)
    expected = [recipe.name for recipe in recipe_files(package_folder("recipes"), package_folder("configs"))]
    assert done.stdout.strip() == str(expected), done.stderr


def test_a_damaged_plugin_leaves_torchtune_usable(tmp_path):
    write(tmp_path, {"torchtune/__init__.py": "", "torchtune/_recipe_registry.py": ""})
    code = """
        from torchtune_ext.cli import plugin
        plugin.install()
        import torchtune._recipe_registry
        print("imported")
    """
    done = python(code, tmp_path)
    assert done.stdout.strip() == "imported"
    assert "register_recipes failed" in done.stderr and "torchtune-ext doctor" in done.stderr


def test_hook_does_nothing_without_torchtune():
    done = python("from torchtune_ext.cli.plugin import install\ninstall()\nimport torchtune")
    assert "No module named 'torchtune'" in done.stderr


def test_start_file_survives_a_missing_package(repo_root):
    line = (repo_root / "torchtune_ext_tune.pth").read_text()
    assert line.startswith("import ") and line.count("\n") == 1  # `site` runs single lines that begin with import
    done = subprocess.run(
        [sys.executable, "-S", "-c", line], capture_output=True, text=True, cwd="/", timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_usage_names_every_subcommand(capsys):
    assert cli.main([]) == 0
    printed = capsys.readouterr().out
    assert all(
        f"  {word} " in printed
        for word in ["doctor", "clue", "report", "ls", "cp", "cat", "run", "validate", "download"]
    )


def test_unknown_subcommand_is_an_error_with_suggestion(capsys):
    assert cli.main(["doktor"]) == 2
    assert "did you mean doctor?" in capsys.readouterr().err


def test_own_subcommand_is_imported_only_when_used(tmp_path):
    write(
        tmp_path,
        {
            "word.py": """
                def add_arguments(parser):
                    parser.add_argument("--n", type=int)
                def main(args):
                    print("n is", args.n)
                    return 3
            """
        },
    )
    code = """
        from torchtune_ext.cli import cli
        cli.OWN_COMMANDS["clue"] = ("word", "help")
        assert "word" not in sys.modules and "torch" not in sys.modules
        assert cli.main(["clue", "--n", "7"]) == 3
        assert "torch" not in sys.modules and "torchtune_ext.cli.doctor" not in sys.modules
    """
    done = python(code, tmp_path)
    assert done.stdout.strip() == "n is 7", done.stderr


def test_tune_arguments_are_passed_through(tmp_path):
    write(tmp_path, FAKE_TORCHTUNE)
    write(
        tmp_path,
        {"torchtune/_cli/__init__.py": "", "torchtune/_cli/tune.py": "import sys\ndef main():\n    print(sys.argv)\n"},
    )
    code = """
        import warnings
        warnings.simplefilter("ignore")
        from torchtune_ext.cli import cli, plugin
        assert cli.main(["run", "--nproc_per_node", "2", "grpo_full", "--config", "grpo/tiny", "seed=1"]) == 0
        assert plugin.is_installed()
        cli.config_path = lambda word: word.upper()
        assert cli.main(["validate", "grpo/tiny"]) == 0
    """
    done = python(code, tmp_path)
    words = ["tune", "run", "--nproc_per_node", "2", "grpo_full", "--config", "grpo/tiny", "seed=1"]
    assert done.stdout.splitlines() == [str(words), str(["tune", "validate", "GRPO/TINY"])], done.stderr


def test_command_without_torchtune_reports_install_command():
    done = python("from torchtune_ext.cli import cli\nsys.exit(cli.main(['ls']))")
    assert done.returncode == 1 and 'pip install "torchtune==0.6.1"' in done.stderr


def test_config_names_are_unique_by_path():
    files = config_files(package_folder("configs"))
    assert all(path.is_file() and path.suffix == ".yaml" for path in files.values())
