"""Groups of processes: where they can be made, what they limit, and that nobody gets out of them."""

import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from killed import killed_while_it_has
from locked_in import SIZE, Attempt, build, loaded

from torchtune_ext.measured import cgroups
from torchtune_ext.measured.cgroups import CONTROLLERS, Cgroups, Place, find, find_in
from torchtune_ext.measured.child import Child, ChildFailed, arena_size, lay_out
from torchtune_ext.measured.compiler import Compiler
from torchtune_ext.measured.sandbox import Limits, Sandbox, SandboxError

UNIFIED = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """Another harness that starts meanwhile on this machine should not remove what these tests leave behind."""
    monkeypatch.setattr(cgroups, "PREFIX", f"torchtune-ext-test-{os.getpid()}-")


@pytest.fixture
def groups():
    if not find():
        pytest.skip("this user may make no cgroups here")
    made = Cgroups(find())
    yield made
    made.close()


def limited(groups: Cgroups, name: str) -> None:
    if not any(name in place.controllers for place in find()):
        pytest.skip(f"no cgroup limits {name} here")


def member(group: cgroups.Group, script: str, **arguments) -> subprocess.Popen:
    """Starts a shell that makes itself a member, and then runs a script in it."""
    join = "; ".join(f"echo 0 > {file}" for file in group.files)
    return subprocess.Popen(["sh", "-c", f"{join}; {script}"], **arguments)


def gcc() -> str:
    try:
        return Compiler.find().path
    except ValueError as error:
        pytest.skip(str(error))


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(met) -> None:
    end = time.monotonic() + 20
    while not met():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---------------------------------------------------------------- where groups can be made

V1 = """\
20 1 0:2 / / rw - rootfs rootfs rw
41 20 0:30 / {0}/memory rw,relatime - cgroup cgroup rw,memory
42 20 0:31 / {0}/pids rw,relatime shared:4 - cgroup cgroup rw,pids
43 20 0:32 / {0}/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct
44 20 0:33 / {0}/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2 = "41 20 0:30 {1} {0} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


def group_at(folder: Path, enabled: str = "", memory: str | None = "max") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.subtree_control").write_text(enabled)
    (folder / "cgroup.procs").touch()
    if memory is not None:
        (folder / "memory.max").write_text(memory)
    return folder


def test_version_1_needs_a_group_in_two_hierarchies(tmp_path):
    (tmp_path / "memory/mine").mkdir(parents=True)
    (tmp_path / "pids").mkdir()
    group_at(tmp_path / "unified", "hugetlb", None)
    places = find_in(V1.format(tmp_path), "4:memory:/mine\n8:pids:/\n2:cpu,cpuacct:/\n0::/\n")
    # The one that keeps members from starting others comes first.
    assert places == (Place(tmp_path / "pids", 1, ("pids",)), Place(tmp_path / "memory/mine", 1, ("memory",)))


def test_version_2_makes_them_beside_our_own_group(tmp_path):
    slice_ = group_at(tmp_path / "app.slice", "cpu memory pids")
    group_at(slice_ / "run.scope")
    places = find_in(V2.format(tmp_path, "/"), "0::/app.slice/run.scope\n")
    assert places == (Place(slice_, 2, CONTROLLERS),)


def test_version_2_makes_them_at_the_root_inside_of_it(tmp_path):
    group_at(tmp_path, "memory pids", None)
    assert find_in(V2.format(tmp_path, "/"), "0::/\n") == (Place(tmp_path, 2, CONTROLLERS),)


@pytest.mark.parametrize(
    "case", ["not enabled", "a limit of our own", "outside of the namespace", "no right", "elsewhere mounted"]
)
def test_version_2_where_they_cannot_be_made(tmp_path, case, monkeypatch):
    slice_ = group_at(tmp_path / "app.slice", "cpu" if case == "not enabled" else "memory pids")
    group_at(slice_ / "run.scope", memory="1000000" if case == "a limit of our own" else "max")
    if case == "no right":
        monkeypatch.setattr(os, "access", lambda path, _: Path(path) != slice_ / "cgroup.procs")
    path = "/../app.slice/run.scope" if case == "outside of the namespace" else "/app.slice/run.scope"
    assert find_in(V2.format(tmp_path, "/docker/1" if case == "elsewhere mounted" else "/"), f"0::{path}\n") == ()


def test_without_any_place_groups_do_nothing():
    none = Cgroups(())
    group = none.new(1, 1)
    assert group.files == []
    group.close()
    none.close()


# ---------------------------------------------------------------- what they do


def test_members_are_killed_together_wherever_they_went(groups):
    group = groups.new(64 << 20, 16)
    script = "setsid sleep 100 & (setsid sh -c 'sleep 100 & sleep 100' &) ; echo $!; sleep 100"
    shell = member(group, script, stdout=subprocess.PIPE, start_new_session=True, text=True)
    other = int(shell.stdout.readline())
    wait_until(lambda: len(Path(group.files[0]).read_text().split()) >= 5)
    members = [int(pid) for pid in Path(group.files[0]).read_text().split()]
    assert other in members and shell.pid in members
    group.close()
    wait_until(lambda: all(map(has_ended, members)))
    assert not any(folder.exists() for _, folder in group.places)
    shell.wait()
    shell.stdout.close()


def test_processes_are_counted_together(groups):
    limited(groups, "pids")
    group = groups.new(64 << 20, 4)
    with member(group, "for i in 1 2 3 4 5 6 7 8; do sleep 5 & done; wait", stderr=subprocess.PIPE, text=True) as shell:
        assert "fork" in shell.stderr.readline().lower()
        group.close()


def test_a_bomb_of_forks_is_removed(groups, tmp_path):
    """All of its processes start others without end, so that there are always new ones while they are killed."""
    limited(groups, "pids")
    source = "#include <unistd.h>\nint main(void) { for (;;) fork(); }"
    subprocess.run([gcc(), "-w", "-x", "c", "-", "-o", tmp_path / "bomb"], input=source, text=True, check=True)
    group = groups.new(64 << 20, 40)
    with member(group, f"exec {tmp_path}/bomb"):
        wait_until(lambda: len(Path(group.files[0]).read_text().split()) >= 30)
        start = time.monotonic()
        group.close()
        assert time.monotonic() - start < cgroups.END_S
        assert not any(folder.exists() for _, folder in group.places)


def test_groups_of_a_killed_harness_are_emptied_and_removed(groups):
    def make():
        made = Cgroups(find())
        group = made.new(64 << 20, 16)
        member(group, "setsid sleep 100 & sleep 100")
        wait_until(lambda: len(Path(group.files[0]).read_text().split()) >= 3)
        return made, Path(group.files[0]).parent

    living = groups.new(64 << 20, 16)
    path = killed_while_it_has(make)
    members = [int(pid) for pid in (path / "cgroup.procs").read_text().split()]
    assert len(members) >= 3 and not any(map(has_ended, members))
    next_one = Cgroups(find())
    wait_until(lambda: all(map(has_ended, members)))
    assert not path.parent.exists()
    assert all(folder.exists() for _, folder in living.places)
    next_one.close()


@pytest.mark.parametrize("point", UNIFIED)
def test_version_2_kills_and_removes(point):
    """Also where the limits belong to version 1, as on a machine with both."""
    if not (point / "cgroup.controllers").exists() or not os.access(point, os.W_OK):
        pytest.skip("no hierarchy of version 2 that this user may change")
    made = Cgroups([Place(point, 2, ())])
    group = made.new(64 << 20, 16)
    with member(group, "setsid sleep 100 & sleep 100"):
        wait_until(lambda: len(Path(group.files[0]).read_text().split()) >= 3)
        members = [int(pid) for pid in Path(group.files[0]).read_text().split()]
        group.close()
    assert all(map(has_ended, members))
    made.close()
    assert not list(point.glob(cgroups.PREFIX + "*")) or find()[0].folder == point


# ---------------------------------------------------------------- in the sandbox

PROGRAMS = """
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
void nothing(int n, double *out) { memset(out, 0, 8 * n); }
/* Processes that each hold n MB until all do. */
void bomb(int n, double *out) {
    int full[2]; char word;
    pipe(full);
    fcntl(full[0], F_SETFL, O_NONBLOCK);
    for (int i = 0; i < 4; i++)
        if (fork() == 0) {
            for (int f = 3; f < 99; f++) if (f != full[1]) close(f);  /* else nobody sees that the parent has ended */
            char *p = mmap(0, (size_t)n << 20, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (p == MAP_FAILED) _exit(1);
            memset(p, 1, (size_t)n << 20);
            write(full[1], "1", 1);
            for (;;) pause();
        }
    for (out[0] = 0; out[0] < 4; usleep(1000)) {
        out[0] += read(full[0], &word, 1) == 1;
        if (waitpid(-1, NULL, WNOHANG) > 0) abort();
    }
}
void forks(int n, double *out) { out[0] = 0; while (out[0] < 300 && fork() > 0) out[0]++; if (out[0] < 1) pause(); }
"""


@pytest.fixture(params=["bare", "wrapped"])
def sandbox(request):
    try:
        made = Sandbox(Compiler.find().path, request.param == "wrapped")
    except (ValueError, SandboxError) as error:
        pytest.skip(str(error))
    with made:
        if not next(layer for layer in made.layers if layer.name == "cgroup").support:
            pytest.skip("this user may make no cgroups here")
        made.library = build(Compiler.find().path, PROGRAMS, made.new_folder() / "programs.so")
        yield made


def test_a_child_is_in_a_group_of_its_own_that_goes_with_it(sandbox):
    def all_groups() -> list[Path]:
        return [path for _, own in sandbox._cgroups._own for path in own.path.glob("*/")]

    with loaded(sandbox, sandbox.library, Attempt("nothing")) as (child, _):
        membership = Path(f"/proc/{child.pid}/cgroup").read_text()
        assert membership.count("/" + cgroups.PREFIX) == len(find())
        assert len(all_groups()) == len(find())
    assert all_groups() == []


def outcome(sandbox: Sandbox, name: str, n: int, limits: Limits) -> float | str:
    kernel = Attempt(name)
    arena_bytes = arena_size(kernel, kernel.timed)
    try:
        with Child(sandbox, sandbox.library, kernel, arena_bytes, [0], 1, limits, 5.0) as child:
            child.place(lay_out(kernel, SIZE, arena_bytes, True, np.random.default_rng(0)))
            return float(child.call({"n": n}, {}, 20.0).outputs["out"][0])
    except ChildFailed as failed:
        return failed.outcome


def test_processes_below_the_limit_of_each_are_stopped_together(sandbox):
    """Seccomp would not let them be started at all, so it is taken away."""
    limited(None, "memory")
    sandbox.without = ["--without", "seccomp"]
    limits = Limits(memory_bytes=256 << 20)
    assert outcome(sandbox, "bomb", 30, limits) == 4
    # Each is far from 256 MB; all four are above it.
    assert outcome(sandbox, "bomb", 100, limits) == "runtime_error"
    assert outcome(sandbox, "bomb", 100, Limits(memory_bytes=1 << 30)) == 4


def test_a_bomb_in_a_child_is_counted(sandbox):
    limited(None, "pids")
    sandbox.without = ["--without", "seccomp"]
    found = outcome(sandbox, "forks", 5, Limits(processes=16))
    assert 0 < found <= 16
