"""Each layer of the sandbox, by programs that try what it forbids, with the other layers taken away."""

import errno
import os
import signal
import socket
import subprocess
import time

import psutil
import pytest

from helpers.as_user import as_user
from helpers.locked_in import ATTEMPTS, Attempt, attempt, build, loaded
from helpers.waiting import wait_until
from torchtune_ext.measured.child import ChildFailed
from torchtune_ext.measured.compiler import Compiler, run_locked_in
from torchtune_ext.measured.sandbox import Limits, Sandbox, SandboxError, clean_environment, exit_cause

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux")
EACCES, EPERM, ENOSYS, ENOENT, ENOMEM = errno.EACCES, errno.EPERM, errno.ENOSYS, errno.ENOENT, errno.ENOMEM


def compiler() -> str:
    try:
        return Compiler.find().path
    except ValueError as error:
        pytest.skip(str(error))


def make(namespaces: bool, without: tuple[str, ...] = ()) -> Sandbox:
    try:
        sandbox = Sandbox(compiler(), namespaces)
    except SandboxError as error:
        pytest.skip(str(error))
    sandbox.disabled_layers = [word for name in without for word in ("--without", name)]
    return sandbox


@pytest.fixture(scope="module")
def bare():
    with make(False) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def wrapped():
    with make(True) as sandbox:
        yield sandbox


@pytest.fixture(scope="module", params=["bare", "wrapped"])
def sandbox(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def landlock_alone():
    with make(False, without=("seccomp",)) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def seccomp_alone():
    with make(False, without=("landlock",)) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def unlocked():
    with make(False, without=("landlock", "seccomp")) as sandbox:
        yield sandbox


def library_in(sandbox: Sandbox):
    library = sandbox.folder / "attempts" / "attempts.so"
    if not library.exists():
        sandbox.new_folder().rename(library.parent)
        build(compiler(), ATTEMPTS, library, "-pthread")
    return library


def tried(sandbox: Sandbox, name: str, n: int = 5, limits: Limits | None = None) -> float:
    return attempt(sandbox, library_in(sandbox), name, n, limits)


def killed_by(sandbox: Sandbox, name: str, n: int = 5, limits: Limits | None = None) -> str:
    with pytest.raises(ChildFailed) as caught:
        tried(sandbox, name, n, limits)
    assert caught.value.outcome == "runtime_error"
    return str(caught.value).split(":")[0]


# ---------------------------------------------------------------- Landlock


@pytest.mark.parametrize(
    "name", ["read_secret", "read_own_environment", "list_root", "create_file", "create_folder", "shared_memory"]
)
def test_landlock_keeps_files_away(landlock_alone, name):
    assert tried(landlock_alone, name) == EACCES
    assert not os.path.exists("/tmp/torchtune-ext-was-here")


@pytest.mark.parametrize("name", ["read_secret", "list_root"])
def test_without_landlock_they_could_be_read(unlocked, name):
    assert tried(unlocked, name) == 0


def test_landlock_keeps_the_memory_of_the_parent_away(landlock_alone):
    assert tried(landlock_alone, "read_parents_memory", os.getpid()) == EACCES


def test_landlock_keeps_tcp_away(landlock_alone):
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert tried(landlock_alone, "connect_tcp", server.getsockname()[1]) == EACCES


def test_without_landlock_tcp_could_be_used(unlocked):
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert tried(unlocked, "connect_tcp", server.getsockname()[1]) == 0


def _signal_as_user() -> tuple[float, float]:
    with make(False, without=("seccomp",)) as locked, make(False, without=("landlock", "seccomp")) as open_:
        return tuple(tried(box, "signal_parent", os.getpid()) for box in (locked, open_))


def test_landlock_keeps_signals_in():
    """As an ordinary user, since a passing user could not send signals to root anyway."""
    assert as_user(_signal_as_user) == (EPERM, 0)


# ---------------------------------------------------------------- seccomp

KILLED = [
    *(
        "make_socket",
        "call_fork",
        "call_vfork",
        "clone_process",
        "call_exec",
        "call_setsid",
        "signal_parent",
        "signal_all",
    ),
    *(
        "signal_thread_of_parent",
        "trace_parent",
        "read_process",
        "make_memfd",
        "call_unshare",
        "call_bpf",
        "call_io_uring",
    ),
    *("call_keyctl",),
]
REFUSED = {
    **{
        "clone3_process": ENOSYS,
        "call_sysinfo": EPERM,
        "change_cores": EPERM,
        "raise_limit": EPERM,
        "new_filter": EPERM,
    },
    **{"create_folder": EPERM, "change_mode": EPERM, "read_limit": 0},
}


@pytest.mark.parametrize("name", KILLED)
def test_seccomp_kills_forbidden_system_calls(seccomp_alone, name):
    assert killed_by(seccomp_alone, name, os.getpid()) == "SIGSYS"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="other numbers of system calls exist on x86-64 only")
@pytest.mark.parametrize("name", ["x32_call", "call_of_32_bits"])
def test_seccomp_is_not_deceived_by_other_numbers(seccomp_alone, name):
    assert killed_by(seccomp_alone, name) == "SIGSYS"


@pytest.mark.parametrize("name", REFUSED)
def test_seccomp_refuses_the_rest(seccomp_alone, name):
    assert tried(seccomp_alone, name) == REFUSED[name]


@pytest.mark.parametrize("name", ["make_socket", "call_fork", "call_vfork", "call_sysinfo"])
def test_without_seccomp_they_would_work(unlocked, name):
    assert tried(unlocked, name) == 0


# ---------------------------------------------------------------- limits


def test_memory(bare):
    assert tried(bare, "much_memory") in (ENOMEM, EPERM)
    assert tried(bare, "much_memory", limits=Limits(memory_bytes=4 << 30)) == 0


def test_cpu_seconds(bare):
    assert killed_by(bare, "endless", limits=Limits(cpu_s=1)) == "SIGXCPU"
    assert killed_by(bare, "endless_deaf", limits=Limits(cpu_s=1)) == "SIGKILL"


def test_size_of_files(bare):
    assert killed_by(bare, "much_output", limits=Limits(file_bytes=1 << 20)) == "SIGXFSZ"


def test_stack(bare):
    assert killed_by(bare, "deep_recursion") == "SIGSEGV"


def test_threads(sandbox):
    if os.geteuid() != 0:
        pytest.skip("an ordinary user's own threads are counted, too: see the next test")
    assert 2 < tried(sandbox, "many_threads") <= Limits().processes


def _threads_as_user(namespaces: bool) -> float:
    with make(namespaces) as sandbox:
        return tried(sandbox, "many_threads")


@pytest.mark.parametrize("namespaces", [False, True])
def test_threads_of_an_ordinary_user(namespaces):
    make(namespaces).close()  # skips where it does not work
    assert 100 < as_user(_threads_as_user, namespaces) <= 400


# ---------------------------------------------------------------- what it sees


def test_sandbox_programs_run_as_separate_users(sandbox):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with loaded(sandbox, library_in(sandbox), Attempt("own_number")) as (child, _):
        user = os.stat(f"/proc/{child.pid}").st_uid
    assert user in range(61184, 65520)
    assert user == library_in(sandbox).parent.stat().st_uid
    assert len({sandbox.new_folder().stat().st_uid for _ in range(5)}) > 1


def test_sandbox_environment_excludes_host_variables(sandbox, monkeypatch):
    monkeypatch.setenv("TORCHTUNE_EXT_TEST_SECRET", "1")
    assert tried(sandbox, "knows_secret") == 0
    # bubblewrap sets PWD.
    assert tried(sandbox, "environment_size") - len(clean_environment()) in (0, 1)


def test_sandbox_child_has_only_expected_open_files(sandbox):
    with open(os.devnull) as ours:
        os.set_inheritable(ours.fileno(), True)
        assert tried(sandbox, "open_files") == 6


def test_namespaces_hide_files_and_processes(wrapped, bare):
    assert tried(wrapped, "see_secret") == ENOENT
    assert tried(bare, "see_secret") == 0
    assert tried(wrapped, "own_number") < 10


# ---------------------------------------------------------------- commands

SPY = """
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
static int try(const char *path, int flags) { errno = 0; return open(path, flags, 0600) < 0 ? errno : 0; }
int main(int count, char **words) {
    printf("passwd %d\\n", try("/etc/passwd", O_RDONLY));
    printf("environ %d\\n", try("/proc/self/environ", O_RDONLY));
    printf("usr %d\\n", try("/usr/bin/env", O_RDONLY));
    printf("writes_usr %d\\n", try("/usr/torchtune-ext-was-here", O_WRONLY | O_CREAT));
    printf("writes_tmp %d\\n", try("/tmp/torchtune-ext-was-here", O_WRONLY | O_CREAT));
    printf("writes_own %d\\n", try("mine", O_WRONLY | O_CREAT));
    printf("user %d\\n", getuid());
    if (fork() == 0) _exit(0);
    printf("child %d\\n", wait(NULL) > 0);
    printf("secret %d\\n", getenv("TORCHTUNE_EXT_TEST_SECRET") != NULL);
    fflush(stdout);
    if (count > 1) { int socket(int, int, int); socket(2, 1, 0); }
    return 7;
}
"""


def spied(sandbox: Sandbox, *words: str) -> tuple[int | None, dict[str, int]]:
    folder = sandbox.new_folder()
    program = folder / "spy"
    subprocess.run([compiler(), "-w", "-x", "c", "-", "-o", str(program)], input=SPY, text=True, check=True)
    program.chmod(0o755)
    done = run_locked_in(sandbox, [str(program), *words], folder, 10.0)
    return done.status, {name: int(value) for name, value in map(str.split, done.output.splitlines())}


def test_sandbox_compiler_writes_only_its_own_folder(sandbox, monkeypatch):
    monkeypatch.setenv("TORCHTUNE_EXT_TEST_SECRET", "1")
    status, report = spied(sandbox)
    assert status == 7
    assert report["passwd"] in (EACCES, ENOENT) and report["environ"] in (EACCES, ENOENT)
    assert report["writes_usr"] in (EACCES, errno.EROFS) and report["writes_tmp"] in (EACCES, ENOENT)
    assert (report["usr"], report["writes_own"], report["child"], report["secret"]) == (0, 0, 1, 0)
    assert os.geteuid() != 0 or report["user"] in range(61184, 65520)


def test_a_compiler_has_no_network(sandbox):
    status, _ = spied(sandbox, "network")
    assert status in (-signal.SIGSYS, 128 + signal.SIGSYS)


# ---------------------------------------------------------------- its own life


def _gone(pid: int) -> bool:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_sandbox_closed_child_leaves_no_process(sandbox):
    with loaded(sandbox, library_in(sandbox), Attempt("own_number")) as (child, _):
        pid = child.pid
        assert os.path.exists(f"/proc/{pid}")
    # It has ended, but it may be a moment until bubblewrap has waited for it.
    assert _gone(pid)


def test_sandbox_child_ends_with_its_parent(sandbox):
    library = library_in(sandbox)
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            with loaded(sandbox, library, Attempt("own_number")) as (child, _):
                os.write(writer, str(child.pid).encode())
                time.sleep(60)
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader) as file:
        pid = int(os.read(file.fileno(), 100))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert _gone(pid)


def test_sandbox_compiler_processes_and_folder_end_with_harness():
    make(False).close()  # skips where it does not work
    reader, writer = os.pipe()
    harness = os.fork()
    if harness == 0:
        try:
            with make(False) as sandbox:
                os.write(writer, str(sandbox.folder).encode())
                run_locked_in(sandbox, ["/bin/sh", "-c", "sleep 98.76; true"], sandbox.new_folder(), 60.0)
        finally:
            os._exit(1)
    folder = os.read(reader, 4096).decode()
    wait_until(lambda: sleepers())
    os.kill(harness, signal.SIGKILL)
    os.waitpid(harness, 0)
    wait_until(lambda: not sleepers() and not os.path.exists(folder))


def sleepers() -> list[int]:
    pids = []
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"] == ["sleep", "98.76"]:
            pids.append(process.pid)
    return pids


def test_sandbox_unconfined_program_never_runs(bare, monkeypatch):
    """The sandbox's own failure is no failure of the candidate."""
    library = library_in(bare)
    monkeypatch.setattr(bare, "disabled_layers", ["--without", "nothing"])
    with pytest.raises(SandboxError, match="could not be locked in"):
        attempt(bare, library, "own_number")


def test_exit_cause_describes_signals_and_statuses():
    assert exit_cause(-signal.SIGSEGV).startswith("SIGSEGV: ")
    assert exit_cause(-signal.SIGUSR1) == "SIGUSR1"
    assert exit_cause(3) == "it ended with exit status 3"
