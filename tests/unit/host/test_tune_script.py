"""The command `tune` is torchtune's again after Ray, which has one of that name, was installed or removed."""

import os
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata

import pytest

from torchtune_ext.host import doctor
from torchtune_ext.host.doctor import is_torchtunes, mend

# What pip 25 writes for ray 2.60's entry point `tune = ray.tune.cli.scripts:cli`.
RAYS = """\
#!{python}
# -*- coding: utf-8 -*-
import re
import sys
from ray.tune.cli.scripts import cli
if __name__ == '__main__':
    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])
    sys.exit(cli())
"""


@pytest.fixture
def environment(tmp_path):
    """A virtual environment, in a folder with a space, that borrows all packages; with our command and Ray's `tune`."""
    folder = tmp_path / "an environment"
    venv.create(folder, symlinks=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    paths = [path for path in sys.path if path.endswith("site-packages")]
    (site / "zzz_borrowed.pth").write_text("\n".join([*paths, str(doctor.__file__).rpartition("/torchtune_ext/")[0]]))
    (folder / "bin" / "torchtune-ext").write_text("")
    write_rays(folder)
    return folder


def write_rays(folder):
    (folder / "bin" / "tune").write_text(RAYS.format(python=folder / "bin" / "python"))
    (folder / "bin" / "tune").chmod(0o755)


def run(*command):
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean, check=False)


def mended(folder):
    done = run(folder / "bin" / "python", "-m", "torchtune_ext", "doctor", "--mend-tune")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rays_script_is_replaced_and_a_missing_one_is_written(environment):
    script = environment / "bin" / "tune"
    assert not is_torchtunes(script)
    assert mended(environment) == f"{script} is now torchtune's\n"
    assert is_torchtunes(script)
    before = script.stat()
    assert mended(environment) == f"{script} is torchtune's\n"
    assert script.stat() == before, "what is right is left alone"
    # This is what `pip uninstall ray` does: the file is in Ray's list of files, whoever wrote it last.
    script.unlink()
    assert mended(environment) == f"{script} is now torchtune's\n"
    done = run(script, "--help")
    assert done.returncode == 0 and "validate" in done.stdout, done.stderr
    assert sorted(path.name for path in script.parent.glob(".tune*")) == []


def test_a_short_path_needs_no_shell(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/env/bin/python")
    assert mend(tmp_path / "tune")
    assert (tmp_path / "tune").read_text().startswith("#!/env/bin/python\nimport sys\n")


def test_where_pip_installs_for_the_user_alone(tmp_path, monkeypatch):
    for scheme in ("env", "user"):
        (tmp_path / scheme).mkdir()
    known = {sysconfig.get_default_scheme(): tmp_path / "env", "posix_user": tmp_path / "user"}
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(known[scheme]))
    assert doctor.own_tune() == tmp_path / "env" / "tune"
    (tmp_path / "user" / "torchtune-ext").touch()
    assert doctor.own_tune() == tmp_path / "user" / "tune"


def test_rays_entry_point_is_still_the_one_that_is_known():
    try:
        points = metadata.distribution("ray").entry_points
    except metadata.PackageNotFoundError:
        pytest.skip("Ray is not installed")
    assert [point.value for point in points if point.name == "tune"] == ["ray.tune.cli.scripts:cli"]
