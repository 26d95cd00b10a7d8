"""The run folder: one owner, one run, and earlier runs set aside completely, even if killed."""

import errno
import fcntl
import json
import logging
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.checkpoint_runs import fork
from torchtune_ext.run import files
from torchtune_ext.run.files import finalize_folder, make_empty_folder, partial_path
from torchtune_ext.run.folder import STARTUP_FILES, RunFolder, read_record
from torchtune_ext.telemetry.metrics import MetricLogger, read_metrics
from torchtune_ext.telemetry.report import build_report

LEFT = ("metrics.jsonl", "rollouts/step_000001.jsonl.gz", "checkpoints/step_000002/recipe.json", "engine.log", "fp8.txt",
        "tensorboard/events", "evaluation.json", "report.html", "start/config.json")  # fmt: skip


def leave_a_run(folder, text="one", left=LEFT):
    """Write all files of recipes with `text` as content, and files that stay in place."""
    with RunFolder(folder) as owned:
        run = owned.start_run({"text": text}, resuming=False)
    for name in (*left, "model/config.json", "wandb/run/x", "notes.txt"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return run


def tree(folder):
    """Return path -> text of every file, except the lock and earlier runs."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"]
    return {
        str(p.relative_to(folder)): p.read_text() for p in files if not str(p.relative_to(folder)).startswith("old-")
    }


def test_an_earlier_run_is_set_aside_whole(tmp_path, caplog):
    first = leave_a_run(tmp_path, "one")
    first_tree = tree(tmp_path)
    second = leave_a_run(tmp_path, "two")
    assert [m for m in caplog.messages if "old-1" in m] == caplog.messages and len(caplog.messages) == 1
    with RunFolder(tmp_path) as folder:
        third = folder.start_run({}, resuming=False)
    assert len({first.id, second.id, third.id}) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model", "notes.txt", "old-1", "old-2", "run.json", "run.lock", "wandb",
    ]  # fmt: skip
    stayed = {"model/config.json", "wandb/run/x", "notes.txt"}
    assert tree(tmp_path / "old-1") == {name: text for name, text in first_tree.items() if name not in stayed}
    assert set(tree(tmp_path / "old-2")) == {"run.json", *LEFT}
    assert set(tree(tmp_path / "old-2").values()) - {"two"} == {(tmp_path / "old-2" / "run.json").read_text()}


def test_an_earlier_run_is_a_run_folder_itself(tmp_path):
    for text in ("one", "two"):
        with RunFolder(tmp_path / "x") as folder:
            run = folder.start_run({"lr": text}, resuming=False)
            with MetricLogger(folder.path, (), run) as metrics:
                metrics.log(1, {"reward/mean": 0.5})
                metrics.log(2, {"reward/mean": 0.5})
    old = tmp_path / "x" / "old-1"
    assert build_report(old).steps == 2
    was = json.loads((old / "run.json").read_text())
    with RunFolder(old) as folder:
        run = folder.start_run({"lr": "three"}, resuming=True)
        assert json.loads((old / "run.json").read_text())["config"] == {"lr": "one"}  # not accepted yet
        folder.write_record()
        with MetricLogger(folder.path, (), run, resume_step=2) as metrics:
            metrics.log(2, {"reward/mean": 0.75})
    assert (run.id, run.name, run.started) == (was["id"], "x", was["started"])
    assert json.loads((old / "run.json").read_text())["config"] == {"lr": "three"}
    assert [line["reward/mean"] for line in read_metrics(old / "metrics.jsonl")] == [0.5, 0.75]
    assert [line["reward/mean"] for line in read_metrics(tmp_path / "x" / "metrics.jsonl")] == [0.5, 0.5]


def test_run_folder_without_run_keeps_existing_files(tmp_path, caplog):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "checkpoints").mkdir()  # prepared by the user, perhaps as a link to a larger disk
    (tmp_path / "log.txt").write_text("mine")
    with RunFolder(tmp_path) as folder:
        folder.start_run({}, resuming=False)
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "log.txt", "run.json", "run.lock", "wandb"]
    assert caplog.messages == []


OTHERS = {
    "checkpoints/w.bin": "", "teacher/__init__.py": "", "profile/n.txt": "", "report.html": "", "engine_2.log": "",
    "run.json": '{"my": "settings"}', "run.json of a tracker": '{"id": "7", "status": "ok"}', "engine.log": "mine",
    "run.lock": "4711", "start/train.py": "", "run.json as a list": '["id"]',
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_folder_of_another_program_is_refused(tmp_path, name):
    path = tmp_path / name.split(" ")[0]
    path.parent.mkdir(exist_ok=True)
    path.write_text(OTHERS[name])
    top = path.relative_to(tmp_path).parts[0]
    with pytest.raises(ValueError, match=f"holds {top}, .*output_dir"):
        RunFolder(tmp_path)
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == [path] and path.read_text() == OTHERS[name]


def test_working_directory_with_earlier_run_is_not_moved(tmp_path, monkeypatch):
    leave_a_run(tmp_path)
    before = tree(tmp_path)
    (tmp_path / "below").mkdir()
    for cwd, output_dir in ((tmp_path, "."), (tmp_path / "below", ".."), (tmp_path, tmp_path)):
        monkeypatch.chdir(cwd)
        with (
            RunFolder(output_dir) as folder,
            pytest.raises(ValueError, match="is or contains the working directory"),
        ):
            folder.start_run({}, resuming=False)
    assert tree(tmp_path) == before and not (tmp_path / "old-1").exists()


@pytest.mark.parametrize("read", ["checkpoints/step_000002", "rollouts/../checkpoints", "start", "metrics.jsonl"])
def test_run_folder_inputs_of_new_run_stay_put(tmp_path, read, monkeypatch):
    leave_a_run(tmp_path / "run")
    before = tree(tmp_path)
    monkeypatch.chdir(tmp_path)
    for folder, path in (("run", f"run/{read}"), (tmp_path / "run", f"run/{read}"), ("run", tmp_path / "run" / read)):
        with RunFolder(folder) as owned, pytest.raises(ValueError) as caught:
            owned.start_run({}, resuming=False, inputs=["elsewhere", path])
        assert f"output_dir={folder}" in str(caught.value) and str(path) in str(caught.value)
    assert tree(tmp_path) == before
    with RunFolder("run") as owned:  # a warm-up's model stays, and a resumed run sets nothing aside
        owned.start_run({}, resuming=True, inputs=[f"run/{read}"])
        owned.start_run({}, resuming=False, inputs=["run/model", "run-2/start", "run"])


def test_run_folder_link_targets_stay_put(tmp_path):
    (tmp_path / "big" / "step_000002").mkdir(parents=True)
    RunFolder(tmp_path / "run").close()
    (tmp_path / "run" / "checkpoints").symlink_to("../big")
    with RunFolder(tmp_path / "run") as folder, pytest.raises(ValueError, match="checkpoints is a link"):
        folder.start_run({}, resuming=False)
    assert sorted(os.listdir(tmp_path / "run")) == ["checkpoints", "run.lock"]


# ---------------------------------------------------------------- two starters

HOLD = """
import sys
from torchtune_ext.run.folder import RunFolder
folder = RunFolder(sys.argv[1])
folder.start_run({"who": "holder"}, resuming=False)
print("held", flush=True)
sys.stdin.read()
"""


def holder(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_run_folder_second_process_sees_lock_holder(tmp_path):
    first = holder(tmp_path)
    try:
        before = (tmp_path / "run.json").read_text()
        second = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], capture_output=True, text=True, timeout=60)
        assert second.returncode == 1 and second.stdout == ""
        last = second.stderr.splitlines()[-1]
        assert last.startswith(
            f"torchtune_ext.run.errors.UsageError: output_dir={tmp_path} is in use by another run: process {first.pid} on "
        )
        assert socket.gethostname() in last and "since 2" in last and "another output_dir, or stop that run" in last
        with pytest.raises(ValueError, match=f"process {first.pid} on "):
            RunFolder(tmp_path)
        assert (tmp_path / "run.json").read_text() == before and not (tmp_path / "old-1").exists()
    finally:
        first.kill()
        first.wait(timeout=30)
    assert str(first.pid) in (tmp_path / "run.lock").read_text()  # a stale lock does not block
    RunFolder(tmp_path).close()


def test_closing_and_forked_children_free_the_folder(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(ValueError, match=f"process {os.getpid()} on "):
        RunFolder(tmp_path)
    read, write = os.pipe()
    up, say_up = os.pipe()
    child = os.fork()
    if child == 0:  # outlives the folder's owner
        os.close(write)
        os.write(say_up, b"x")
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    os.read(up, 1)
    try:
        os.close(folder._lock)  # as at the end of this process
        folder._lock = None
        RunFolder(tmp_path).close()
    finally:
        os.close(write)
        os.waitpid(child, 0)
    RunFolder(tmp_path).close()
    folder = RunFolder(tmp_path)
    assert not os.get_inheritable(folder._lock)
    folder.close()


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = RunFolder(tmp_path)
    assert len(caplog.messages) == 1 and "no locks (" in caplog.messages[0] and str(tmp_path) in caplog.messages[0]
    folder.start_run({}, resuming=False)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EIO])
def test_file_system_without_folder_flush_is_warning(tmp_path, monkeypatch, caplog, code):
    def refuse(descriptor, fsync=os.fsync):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(files, "_warned_devices", set())
    with RunFolder(tmp_path) as folder:
        if code == errno.EIO:
            with pytest.raises(OSError, match="Input/output error"):
                folder.start_run({}, resuming=False, writes_checkpoints=True)
            return
        folder.start_run({}, resuming=False, writes_checkpoints=True)
        make_empty_folder(partial_path(tmp_path / "checkpoints" / "step_000001"))
        finalize_folder(tmp_path / "checkpoints" / "step_000001")
    assert len(caplog.messages) == 1 and "cannot flush a folder" in caplog.messages[0]
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "run.json", "run.lock"]


def test_refused_folder_rename_stops_saving_runs(tmp_path, monkeypatch):
    def refuse(path, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "rename", refuse)
    with RunFolder(tmp_path) as folder:
        folder.start_run({}, resuming=False)
        says = f"output_dir={tmp_path}: the file system cannot rename a folder, .*: Operation not permitted. .* another file system"
        with pytest.raises(OSError, match=says):
            folder.start_run({}, resuming=False, writes_checkpoints=True)


# ---------------------------------------------------------------- killed while setting aside


def killed(folder, rename, errors):
    """Start a run in a process that is killed after its n-th rename. Return its status as `os.waitpid`."""

    def begin():
        count = 0

        def counted(function):
            def call(*args, **kwargs):
                nonlocal count
                count += 1
                result = function(*args, **kwargs)
                if count == rename:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return call

        os.rename, os.replace = counted(os.rename), counted(os.replace)
        RunFolder(folder).start_run({"text": "two"}, resuming=False, writes_checkpoints=True)

    return os.waitpid(fork(begin, errors), 0)[1]


def test_run_folder_killed_at_any_rename_keeps_files(tmp_path):
    renames = len(LEFT) + 3  # the rename test, each leftover and its run.json, and the new run.json
    for k in range(1, renames + 2):
        folder = tmp_path / str(k)
        first, before = leave_a_run(folder), tree(folder)
        status, errors = killed(folder, k, tmp_path / "errors"), tmp_path / "errors"
        assert status == (signal.SIGKILL if k <= renames else 0), errors.read_text()  # so every rename was tested
        with RunFolder(folder) as owned:
            assert owned.should_resume(True) == (k == 1)  # nothing has moved yet
            run = owned.start_run({"text": "three"}, resuming=False)
        assert run.id != first.id and json.loads((folder / "run.json").read_text())["id"] == run.id
        for name, text in before.items():
            places = [folder / name, *(old / name for old in folder.glob("old-*"))]
            kept = [path.read_text() for path in places if path.exists()]
            # The startup files of a failed start do not count as a run, and the next start overwrites them.
            assert text in kept or name in STARTUP_FILES, (k, name)


# ---------------------------------------------------------------- resuming


def test_run_folder_resume_keeps_id_and_removes_leftovers(tmp_path):
    first = leave_a_run(tmp_path)
    leftovers = [
        ".run.json.7.tmp",
        "rollouts/.step_000002.jsonl.gz.7.tmp",
        "checkpoints/step_000002/.manifest.json.7.tmp",
    ]
    for name in leftovers:
        (tmp_path / name).write_text("half")
    for name in (".mine.tmp", ".notes.txt.7.tmp", ".partial_data"):
        (tmp_path / name).write_text("not ours")
    before = tree(tmp_path)
    with RunFolder(tmp_path) as folder:
        run = folder.start_run({"text": "new"}, resuming=True)
    assert (run.id, run.started, run.config) == (first.id, first.started, {"text": "new"})
    after = tree(tmp_path)
    assert {name: text for name, text in before.items() if name not in (*leftovers, "run.json")} == {
        name: text for name, text in after.items() if name != "run.json"
    }


@pytest.mark.parametrize("damage", [None, "", '{"id": "ab', "[]", '{"id": 3}'])
def test_run_folder_missing_run_file_is_reported(tmp_path, damage):
    leave_a_run(tmp_path)
    (tmp_path / "run.json").unlink() if damage is None else (tmp_path / "run.json").write_text(damage)
    before, says = tree(tmp_path), r"run\.json is missing" if damage is None else r"run\.json has no id"
    with pytest.raises(ValueError, match=says), RunFolder(tmp_path) as folder:
        folder.start_run({}, resuming=True)
    assert tree(tmp_path) == before


def test_run_file_of_newer_version_is_accepted(tmp_path):
    first = leave_a_run(tmp_path)
    record = tmp_path / "run.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"gpus": 8}))
    with RunFolder(tmp_path) as folder:
        assert folder.start_run({}, resuming=True).id == first.id
    (tmp_path / "run.lock").unlink()
    with pytest.raises(ValueError, match=r"run\.json has the unknown key 'gpus'"):
        RunFolder(tmp_path)


def test_checkpoints_without_run_file_name_the_fix(tmp_path):
    (tmp_path / "checkpoints/step_000002").mkdir(parents=True)
    (tmp_path / "checkpoints/step_000002/manifest.json").touch()
    with pytest.raises(ValueError, match=r'run\.json is missing.* write \{"id": "\.\.\."\} to it'):
        RunFolder(tmp_path)
    (tmp_path / "run.json").write_text('{"id": "ab"}')
    with RunFolder(tmp_path) as folder:
        assert folder.start_run({}, resuming=True).id == "ab"


# ---------------------------------------------------------------- a folder that cannot be used


@pytest.mark.parametrize("target", ["nowhere", "run"])
def test_run_folder_dangling_link_is_refused(tmp_path, target):
    (tmp_path / "run").symlink_to(target)
    for path in (tmp_path / "run", tmp_path / "run" / "a"):
        with pytest.raises(ValueError, match=f"output_dir={path}: {tmp_path / 'run'} is a dangling link"):
            RunFolder(path)


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises((OSError, ValueError), match=f"output_dir={path}: .* not a folder. Fix: choose another"):
            RunFolder(path)
    assert (tmp_path / "file").read_text() == "x"


AS_NOBODY = """
import os, sys
from torchtune_ext.run.folder import RunFolder
if os.getuid() == 0:
    os.setuid(65534)
for path in sys.argv[1:]:
    try:
        RunFolder(path).start_run({}, resuming=False)
        print("taken")
    except OSError as error:
        print(error)
"""


def test_a_folder_without_permission(tmp_path):
    parent = Path("/tmp") / f"test-folder-{os.getpid()}"  # other users cannot enter pytest's folders
    (parent / "run").mkdir(parents=True)
    try:
        parent.chmod(0o555)
        (parent / "run").chmod(0o555)
        command = [sys.executable, "-c", AS_NOBODY, str(parent / "run"), str(parent / "new")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        lines = done.stdout.splitlines()
        assert [line.split(" cannot")[0] for line in lines] == [
            f"output_dir={parent}/run",
            f"output_dir={parent}/new",
        ], done
        assert all("Permission denied. Fix: choose another output_dir, or" in line for line in lines)
    finally:
        (parent / "run").rmdir()
        parent.rmdir()


def test_a_full_disk(tmp_path):
    first = leave_a_run(tmp_path)
    before = tree(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = RunFolder(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, limits[1]))
    try:
        with pytest.raises(OSError, match=f"output_dir={tmp_path} .*written"):
            folder.start_run({}, resuming=True)
            folder.write_record()
        folder.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        with pytest.raises(OSError, match=f"output_dir={tmp_path} cannot be created or written: .*free disk space"):
            RunFolder(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert tree(tmp_path) == before
    with RunFolder(tmp_path) as folder:  # the failed starts released the lock
        assert folder.start_run({}, resuming=True).id == first.id


def test_run_folder_writes_nothing_before_begin(tmp_path, caplog):
    leave_a_run(tmp_path)
    before = tree(tmp_path)
    with caplog.at_level(logging.WARNING), RunFolder(tmp_path):
        pass
    assert tree(tmp_path) == before and caplog.messages == []


def test_run_folder_failed_starts_do_not_accumulate(tmp_path):
    """A start that fails during the engine start leaves startup files and an empty metrics file."""
    for _ in range(3):
        with RunFolder(tmp_path) as folder:
            run = folder.start_run({}, resuming=False)
            (tmp_path / "engine.log").write_text("no such model")
            (tmp_path / "metrics.jsonl").touch()
    assert read_record(tmp_path)["id"] == run.id and not list(tmp_path.glob("old-*"))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with RunFolder(tmp_path) as folder:
        folder.start_run({}, resuming=False)
    assert sorted(path.name for path in (tmp_path / "old-1").iterdir()) == ["engine.log", "metrics.jsonl", "run.json"]


@pytest.mark.parametrize("moment", [1, 2])
def test_replace_folder_ctrl_c_never_leaves_place_empty(tmp_path, monkeypatch, moment):
    """Python handles Ctrl-C after a rename: the folder always exists, and KeyboardInterrupt is raised."""
    place, rename, made = tmp_path / "model", Path.rename, []
    for folder, text in ((place, "old"), (partial_path(place), "new")):
        folder.mkdir()
        (folder / "weights").write_text(text)

    def interrupted(path, target):
        rename(path, target)
        made.append(target)
        if len(made) == moment:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        finalize_folder(place)
    assert (place / "weights").read_text() == {1: "old", 2: "new"}[moment]
