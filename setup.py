"""What setup.cfg cannot say: where the packages lie, and that two start-up files stand at the top of every wheel.

`torchtune_ext_tune.pth` (and its `.start` twin, which Python 3.15 reads instead) makes the stock command `tune` know
our recipes. Both files have to lie directly in site-packages, in a normal and in an editable install.
"""

import base64
import hashlib
import shutil
import zipfile
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.editable_wheel import editable_wheel

START_FILES = ("torchtune_ext_tune.pth", "torchtune_ext_tune.start")
FOLDERS = ("recipes", "configs", "kernels")  # top-level folders that are installed as torchtune_ext.<folder>


def add_start_files(wheel: Path) -> None:
    """Write `wheel` again with the start-up files at its top, listed in its RECORD."""
    with zipfile.ZipFile(wheel) as old:
        members = [(info, old.read(info)) for info in old.infolist()]
    rows = ""
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        for name in START_FILES:
            data = Path(name).read_bytes()
            new.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows += f"{name},sha256={digest},{len(data)}\n"
        for info, data in members:
            if info.filename.endswith(".dist-info/RECORD"):
                data = rows.encode() + data
            new.writestr(info, data)


def newest_wheel(folder: str) -> Path:
    return max(Path(folder).glob("*.whl"), key=lambda path: path.stat().st_mtime_ns)


class BdistWheel(bdist_wheel):
    def run(self):
        # The wheel shall hold no file that was deleted since the last one was built.
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()
        add_start_files(newest_wheel(self.dist_dir))


class EditableWheel(editable_wheel):
    def run(self):
        super().run()
        add_start_files(newest_wheel(self.dist_dir))


setup(
    packages=[
        *find_packages(include=["torchtune_ext", "torchtune_ext.*"]),
        *(f"torchtune_ext.{folder}" for folder in FOLDERS),
    ],
    package_dir={f"torchtune_ext.{folder}": folder for folder in FOLDERS},
    cmdclass={"bdist_wheel": BdistWheel, "editable_wheel": EditableWheel},
)
