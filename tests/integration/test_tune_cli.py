"""The package as users get it: built, installed into an environment of its own, and driven through the stock `tune`.

The environments borrow every other package from the one that runs the tests.
"""

import os
import shutil
import subprocess
import sysconfig
import textwrap
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROBE_RECIPE = """
    import os
    import sys

    from torchtune_ext.cli.plugin import parse


    @parse
    def recipe_main(cfg):
        print(f"probe rank={os.environ.get('RANK', '-')} seed={cfg.seed} layers={cfg.model.num_layers}", flush=True)


    if __name__ == "__main__":
        sys.exit(recipe_main())
"""
PROBE_CONFIG = """\
seed: 1
model:
  _component_: torchtune.models.qwen2.qwen2_0_5b
  num_layers: 2
"""
GOOD_CONFIG = "model:\n  _component_: torchtune.models.qwen2.qwen2_0_5b\n"
SOURCES = (
    *("torchtune_ext", "recipes", "configs", "kernels"),
    *("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"),
    *("torchtune_ext_tune.pth", "torchtune_ext_tune.start"),
)


class Environment:
    """A virtual environment with our package installed from a copy of the sources that has one recipe more."""

    def __init__(self, root: Path, sources: Path, *how: str):
        self.root = root
        venv.create(root / "env")
        self.python = root / "env" / "bin" / "python"
        self.site = next((root / "env" / "lib").glob("python*/site-packages"))
        (self.site / "zzz_borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        install = ["-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed"]
        done = self.run(*install, *how, str(sources))
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess:
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        command = [str(self.python), *words]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=self.root, env=clean | variables, timeout=240, check=False
        )

    def tune(self, *words: str) -> str:
        """What `tune WORDS` prints; this is what the script `tune` runs."""
        done = self.run("-m", "torchtune._cli.tune", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory, repo_root) -> Path:
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (repo_root / name).is_dir():
            shutil.copytree(repo_root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(repo_root / name, copy / name)
    (copy / "recipes" / "probe.py").write_text(textwrap.dedent(PROBE_RECIPE))
    (copy / "configs" / "probe" / "deep").mkdir(parents=True)
    (copy / "configs" / "probe" / "deep" / "tiny.yaml").write_text(PROBE_CONFIG)
    (copy / "configs" / "probe" / "good.yaml").write_text(GOOD_CONFIG)
    return copy


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, sources) -> Environment:
    return Environment(tmp_path_factory.mktemp("wheel"), sources)


@pytest.fixture(scope="module")
def editable(tmp_path_factory, sources) -> Environment:
    return Environment(tmp_path_factory.mktemp("editable"), sources, "-e")


WHERE_IS_WHAT = """
import importlib.util, sys
from pathlib import Path
import torchtune_ext.kernels, torchtune_ext.configs
from torchtune_ext.run import catalog; from torchtune_ext.cli import plugin
print(plugin.is_installed())
print(Path(importlib.util.find_spec("torchtune_ext.recipes").origin).parent)
for recipe in catalog.recipe_files(catalog.package_folder("recipes"), catalog.package_folder("configs")):
    print(recipe.name, *recipe.configs)
"""


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_install_is_complete(kind, request, sources):
    environment = request.getfixturevalue(kind)
    for name in ("torchtune_ext_tune.pth", "torchtune_ext_tune.start"):
        assert (environment.site / name).read_bytes() == (sources / name).read_bytes()
    done = environment.run("-c", WHERE_IS_WHAT)
    assert done.returncode == 0, done.stderr
    hook, recipes, *listed = done.stdout.splitlines()
    assert hook == "True"
    home = environment.site / "torchtune_ext" if kind == "wheel" else sources
    assert Path(recipes) == home / "recipes"
    assert "probe probe/deep/tiny probe/good" in listed
    shipped = {path.relative_to(home / "configs") for path in (home / "configs").rglob("*.yaml")}
    assert shipped == {path.relative_to(sources / "configs") for path in (sources / "configs").rglob("*.yaml")}


def test_wheel_ships_every_file(wheel, sources):
    """All that lies in the packages, but for byte-code, is in the wheel."""
    for package, folder in [
        ("torchtune_ext", "torchtune_ext"),
        *((f"torchtune_ext/{f}", f) for f in ("recipes", "kernels")),
    ]:
        for path in (sources / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert (wheel.site / package / path.relative_to(sources / folder)).is_file(), (
                    f"{path} is not in the wheel"
                )


@pytest.mark.rest
def test_uninstall_leaves_no_package_files(tmp_path, sources):
    environment = Environment(tmp_path, sources)
    assert environment.run("-m", "pip", "uninstall", "-y", "torchtune-ext").returncode == 0
    assert [path.name for path in environment.site.iterdir()] == ["zzz_borrowed.pth"]


def test_tune_ls(wheel):
    rows = [line.split() for line in wheel.tune("ls").splitlines()]
    assert ["probe", "probe/deep/tiny"] in rows
    assert ["lora_finetune_single_device", "llama2/7B_lora_single_device"] in rows  # torchtune's own are still there


@pytest.mark.rest  # in `make test`: tests/unit/cli/test_plugin.py, and `tune cp` in test_newcomer.py
def test_tune_cat_cp_validate(wheel):
    assert "num_layers: 2" in wheel.tune("cat", "probe/deep/tiny")
    assert "Copied file" in wheel.tune("cp", "probe/good", "./good.yaml")
    assert (wheel.root / "good.yaml").read_text() == GOOD_CONFIG
    assert "well-formed" in wheel.tune("validate", "good.yaml")


def test_tune_run_by_name(editable):
    printed = editable.tune("run", "probe", "--config", "probe/deep/tiny", "seed=7")
    assert "probe rank=- seed=7 layers=2" in printed


def test_tune_run_two_processes(wheel):
    printed = wheel.tune("run", "--nproc_per_node", "2", "probe", "--config", "probe/deep/tiny", "model.num_layers=3")
    assert "probe rank=0 seed=1 layers=3" in printed and "probe rank=1 seed=1 layers=3" in printed


@pytest.mark.rest
def test_tune_run_a_copied_recipe(wheel):
    wheel.tune("cp", "probe", "my_probe.py")
    copied = wheel.root / "my_probe.py"
    copied.write_text(copied.read_text().replace("probe rank", "mine rank"))
    assert "mine rank=- seed=1" in wheel.tune("run", "my_probe.py", "--config", "probe/deep/tiny")


def test_doors_without_the_hook(wheel):
    """`python -S` reads no start-up files: the module, and the recipe itself, work all the same."""
    paths = os.pathsep.join([str(wheel.site), sysconfig.get_path("purelib")])
    without_hook = ("-S", "-c", "from torchtune_ext.cli import plugin; print(plugin.is_installed())")
    assert wheel.run(*without_hook, PYTHONPATH=paths).stdout == "False\n"
    for words in (
        ("-S", "-m", "torchtune_ext", "run", "probe", "--config", "probe/deep/tiny", "seed=8"),
        ("-S", "-m", "torchtune_ext.recipes.probe", "--config", "probe/deep/tiny", "seed=8"),
    ):
        done = wheel.run(*words, PYTHONPATH=paths)
        assert "probe rank=- seed=8" in done.stdout, done.stderr


def test_repository_root_as_working_directory(editable, repo_root):
    """There `recipes` and `kernels` are folders of the working directory; neither we nor transformers mind."""
    code = (
        "import sys; sys.path.insert(0, '')\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "import torchtune_ext.kernels, torchtune_ext.cli.plugin\n"
        "print(is_kernels_available(), torchtune_ext.kernels.__file__)"
    )
    done = subprocess.run(
        [str(editable.python), "-c", code], cwd=repo_root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("False ")


def test_doctor_runs(wheel):
    done = wheel.run("-m", "torchtune_ext", "doctor")
    assert done.returncode in (0, 1), done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("ok    torch ") for line in lines)
    assert any("start-up hook" in line and "probe" in line for line in lines)
