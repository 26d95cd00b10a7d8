"""Imports by dotted path if the user's file has the name of another module."""

import sys

import pytest

from torchtune_ext.run.catalog import config_path, import_object


def test_file_that_another_module_hides_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("random", "own_grader"):
        (tmp_path / f"{name}.py").write_text(
            "def near(text, answer): return 1.0\ndef choice(text, answer): return 1.0\n"
        )
    hidden = rf"random is .*random\.py, which hides random\.py in {tmp_path}\. Fix: rename yours"
    with pytest.raises(ValueError, match=f"task.grader: random has no 'near'; {hidden}"):
        import_object("random.near", "task.grader")
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "near.py").touch()
    with pytest.raises(ValueError, match=r"json has no 'near'; json is .*json/__init__\.py, which hides json in "):
        import_object("json.near.near", "task.grader")
    assert caplog.messages == []
    for _ in range(2):
        import_object("random.choice", "task.grader")  # Python's module, although the user's file also has `choice`
        import_object("own_grader.near", "task.grader")
    assert len(caplog.messages) == 1 and "task.grader: random is " in caplog.messages[0]


def test_module_that_exits_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit('need a key')\n")
    with pytest.raises(
        ValueError, match=r"task.grader: importing leaves raised SystemExit: need a key \(leaves.py:2\)"
    ):
        import_object("leaves.near", "task.grader")


def test_config_in_pipe_is_refused():
    with pytest.raises(
        ValueError,
        match=r"--config /dev/null: not a regular file",
    ):
        config_path("/dev/null")
