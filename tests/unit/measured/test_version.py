"""Which code measures."""

import shutil
from pathlib import Path

import torchtune_ext
from torchtune_ext.measured.results import code_version


def test_another_source_is_another_version(tmp_path, monkeypatch):
    copy = tmp_path / "torchtune_ext"
    shutil.copytree(Path(torchtune_ext.__file__).parent / "measured", copy / "measured")
    here = code_version()
    monkeypatch.setattr(torchtune_ext, "__file__", str(copy / "__init__.py"))
    assert code_version() == here
    source = copy / "measured" / "timing.py"
    source.write_text(source.read_text() + "\n")
    assert code_version() != here
    assert code_version().partition(" ")[0] == here.partition(" ")[0] == torchtune_ext.__version__
