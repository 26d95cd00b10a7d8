"""Folders of processes that were killed are removed, and those of living ones and of others are not."""

import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
from as_user import USER, as_user
from killed import killed_while_it_has

from torchtune_ext.measured import sandbox as sandboxes
from torchtune_ext.measured.compiler import Compiler
from torchtune_ext.measured.owned import Owned
from torchtune_ext.measured.sandbox import Sandbox, SandboxError


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """Another harness that starts meanwhile on this machine should not remove what these tests leave behind."""
    monkeypatch.setattr(sandboxes, "PREFIX", f"torchtune-ext-test-{os.getpid()}-")


def sandbox() -> Sandbox:
    try:
        return Sandbox(Compiler.find().path, namespaces=False)
    except (ValueError, SandboxError) as error:
        pytest.skip(str(error))


def test_the_folder_of_a_killed_harness_is_removed_at_the_next_start():
    def make():
        made = sandbox()
        (made.new_folder() / "candidate.c").write_text("int x;")
        return made, made.folder

    with sandbox() as living:
        path = killed_while_it_has(make)
        assert (path / "sandbox").exists()
        with sandbox():
            assert not path.exists()
            assert living.program.exists()


def test_an_ordinary_user_removes_its_own_and_not_that_of_another():
    if os.geteuid() != 0:
        pytest.skip("needs a second user")
    make = as_made_by_nobody
    path = killed_while_it_has(make)
    try:
        assert path.stat().st_uid == USER
        with sandbox():
            assert path.exists()
        as_user(_start_and_close)
        assert not path.exists()
    finally:
        if path.exists():
            path.rmdir()


def as_made_by_nobody():
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    owned = Owned(Path(tempfile.gettempdir()), sandboxes.PREFIX, shutil.rmtree)
    return owned, owned.path


def _start_and_close() -> None:
    sandbox().close()


def left_alone(path: Path) -> None:
    """In the place of what removes a folder."""


def left_behind(folder: Path) -> list[Path]:
    """Which folders the next one that is made removes."""
    found = []
    owned = Owned(folder, "x-", found.append)
    left = [*found]
    owned.close()
    owned.path.rmdir()
    return left


def test_a_folder_of_a_living_process_and_a_link_are_left_alone(tmp_path):
    owned = Owned(tmp_path, "x-", left_alone)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "x-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "x-file").touch()
    assert left_behind(tmp_path) == []
    owned.close()
    assert left_behind(tmp_path) == [owned.path]
    # Two that clean up at the same time do not meet in one folder.
    met = []
    Owned(tmp_path, "x-", lambda path: met.append((path, left_behind(tmp_path))))
    assert met == [(owned.path, [])]


def test_a_folder_is_owned_by_those_who_were_forked_too(tmp_path):
    owned = Owned(tmp_path, "x-", left_alone)
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    try:
        owned.close()
        assert left_behind(tmp_path) == []
    finally:
        os.close(writer)
        os.waitpid(process, 0)
        os.close(reader)
    assert left_behind(tmp_path) == [owned.path]


def test_nobody_loses_a_folder_that_is_just_being_made(tmp_path):
    """Four who make folders, beside one who removes all that look left behind."""
    stop, lost = threading.Event(), []

    def remove():
        while not stop.is_set():
            Owned(tmp_path, "x-", Path.rmdir).close()

    def make():
        for _ in range(200):
            owned = Owned(tmp_path, "x-", Path.rmdir)
            if not owned.path.exists():
                lost.append(owned.path)
            owned.close()

    cleaner = threading.Thread(target=remove)
    makers = [threading.Thread(target=make) for _ in range(4)]
    for thread in [cleaner, *makers]:
        thread.start()
    for thread in makers:
        thread.join()
    stop.set()
    cleaner.join()
    assert not lost and list(tmp_path.iterdir()) == []
