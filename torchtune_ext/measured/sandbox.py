"""The layers that keep a compiler and a candidate's code away from the rest of the machine.

The floor is `sandbox.c` (limits, Landlock, seccomp) and a clean environment, which need no namespaces or privileges.
Where namespaces are allowed, bubblewrap goes around them. docs/measured.md says what this protects from, and what not.
"""

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torchtune_ext.run.errors import RunFailure
from torchtune_ext.run.processes import Closing, closed_on_error
from torchtune_ext.run.reaper import ProcessReaper

MIN_LANDLOCK_ABI = 1  # the first version keeps files away; 3 adds truncation, 4 TCP, 6 signals and abstract sockets
# Ids that systemd keeps for users who exist for a moment. The children of root become one of them.
TRANSIENT_UIDS = range(61184, 65520)
PROBE_TIMEOUT_S = 20.0  # seconds that a probe may take
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin")  # where compilers, their headers and libraries are
SYSTEM_FILES = ("/etc/ld.so.cache",)
# RLIMIT_NPROC counts all threads of a user. For an ordinary user it is set this far above those that run.
EXTRA_THREADS = 256


class SandboxError(RunFailure):
    """The sandbox itself failed. It says nothing about the candidate."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One thing that stands between a candidate and the machine."""

    name: str
    support: str  # what the machine has, "" if it has none
    cost_if_missing: str  # what it costs if the layer is missing
    fix: str  # how a machine gets it
    is_required: bool = False  # it belongs to the floor: without it no program is run


@dataclass(frozen=True, slots=True)
class Limits:
    """What a child may use."""

    memory_bytes: int = 2 << 30  # address space, beside the arrays
    processes: int = 16  # threads and processes at a time; for an ordinary user: see MORE_THREADS
    cpu_s: int = 30  # CPU seconds of all threads of a process
    file_bytes: int = 1 << 20  # size of one file, and of what it says


class Sandbox(Closing):
    """Makes the command lines of locked-in children.

    Its folder is removed by `close`, or when this process is killed.

    Args:
        compiler: path of a C compiler.
        namespaces: whether bubblewrap is used; None: wherever it works.

    Raises:
        SandboxError: a layer of the floor is missing, or bubblewrap was asked for and does not work.
    """

    def __init__(self, compiler: str, namespaces: bool | None = None) -> None:
        self._reaper = ProcessReaper()
        self._lock = threading.Lock()  # several threads may compile
        self._groups: set[int] = set()  # that the janitor kills when this process is killed
        self.folder = Path(self._reaper.folder)
        with closed_on_error(self):
            # Root's children are other users. They may pass through the folder, but not list it.
            self.folder.chmod(0o711)
            self.program = compile_sandbox(compiler, self.folder)
            self.layers = probe(self.program)
            layers = {layer.name: layer.support for layer in self.layers}
            if bad := [layer for layer in self.layers if layer.is_required and not layer.support]:
                lost = "; ".join(f"no {layer.name}: {layer.cost_if_missing}" for layer in bad)
                fixes = "; ".join(layer.fix for layer in bad)
                raise SandboxError(f"this machine cannot lock programs in ({lost}): {fixes}")
            self.disabled_layers: list[str] = []  # layers that a test takes away, to see that they are needed
            if namespaces and not layers["namespaces"]:
                raise SandboxError("namespaces: true, but bubblewrap is missing or cannot make them here")
            self.namespaces = bool(layers["namespaces"]) if namespaces is None else namespaces
            self.uses_transient_users = bool(layers["another user"])

    def close(self) -> None:
        """Removes the folder and all that is in it."""
        self._reaper.close()

    @contextmanager
    def kill_with_parent(self, group: int) -> Iterator[None]:
        """Within the block, the process group is killed if this process is."""
        with self._lock:
            self._groups.add(group)
            self._reaper.set_groups([*self._groups])
        try:
            yield
        finally:
            with self._lock:
                self._groups.discard(group)
                # 0 tells the janitor that there is none.
                self._reaper.set_groups([*self._groups] or [0])

    def new_folder(self) -> Path:
        """Makes a folder for one candidate, which only the user who works on the candidate can read."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        if self.uses_transient_users:
            user = secrets.choice(TRANSIENT_UIDS)
            os.chown(folder, user, user)
        return folder

    def compiler_command(self, command: Sequence[str], folder: Path, limits: Limits, started: int) -> list[str]:
        """Returns the command line of a compiler that may read the system's folders and write only below `folder`.

        The sandbox writes a byte to the file descriptor `started` when it is locked in, before the compiler runs.
        """
        read = [*SYSTEM_FOLDERS, *SYSTEM_FILES, *_compiler_prefix(command[0])]
        words = [
            "--started",
            str(started),
            *_repeat_option("--read", read),
            *_repeat_option("--write", [str(folder), "/dev/null"]),
        ]
        visible = [*_repeat_option("--bind", [str(folder)], 2), "--dev-bind", "/dev/null", "/dev/null"]
        return [*self._sandbox_command("exec", words, folder, limits, 0, read, visible), "--", *command]

    def function_command(
        self,
        library: Path,
        function: str,
        arena_bytes: int,
        files: Sequence[int],
        cores: Sequence[int],
        limits: Limits,
    ) -> list[str]:
        """Returns the command line that calls `function`. `files`: descriptors of socket, inputs and outputs."""
        # The process may open no file but the library: the system's libraries that it may need are loaded before.
        words = ["--cores", ",".join(map(str, cores)), "--read", str(library)]
        visible = _repeat_option("--ro-bind", [str(library)], 2)
        locked_in = self._sandbox_command("call", words, library.parent, limits, arena_bytes, SYSTEM_FOLDERS, visible)
        return [*locked_in, "--", str(library), function, str(arena_bytes), *map(str, files)]

    def _sandbox_command(
        self,
        mode: str,
        words: Sequence[str],
        folder: Path,
        limits: Limits,
        more_bytes: int,
        read: Sequence[str],
        visible: Sequence[str],
    ) -> list[str]:
        """The command line up to `--`. `read` and `visible` are the paths that exist inside namespaces."""
        words = ["--memory", str(limits.memory_bytes + more_bytes), "--seconds", str(limits.cpu_s), *words]
        words += ["--file", str(limits.file_bytes), *self.disabled_layers]
        words += [
            "--processes",
            str(limits.processes if self.uses_transient_users else _count_user_threads() + EXTRA_THREADS),
        ]
        owner = folder.stat().st_uid
        # The child becomes the owner of its folder, who must not be root or a real user.
        if self.uses_transient_users and owner not in TRANSIENT_UIDS:
            raise SandboxError(f"{folder} does not belong to a passing user: make it with new_folder")
        enter = ["--user", str(owner)] if self.uses_transient_users else []
        if not self.namespaces:
            return [str(self.program), mode, *enter, *words]
        # In a user namespace, root cannot become another user, so the change comes before bubblewrap.
        before = [str(self.program), "enter", *enter, "--"] if enter else []
        return [*before, *_bubblewrap_command(read, self.program), *visible, "--", str(self.program), mode, *words]


def clean_environment(threads: int = 1) -> dict[str, str]:
    """Returns the environment of a child, in which no key, path or name of ours is left."""
    return {
        "PATH": "/usr/bin:/bin",
        "LC_ALL": "C",
        "OMP_NUM_THREADS": str(threads),
        "OMP_DYNAMIC": "false",
        # libgomp's threads spin after a parallel region. A call lasts until they sleep, so it would take longer.
        "GOMP_SPINCOUNT": "1000",
        "KMP_BLOCKTIME": "0",
    }


def compile_sandbox(compiler: str, folder: Path) -> Path:
    """Compiles sandbox.c into `folder`. Raises SandboxError if the compiler fails."""
    program = folder / "sandbox"
    command = [compiler, "-O1", "-std=gnu11", str(Path(__file__).with_name("sandbox.c")), "-o", str(program), "-ldl"]
    done = _run_command(command)
    # A program that is no compiler may exit with 0 and make nothing.
    if done.returncode != 0 or not program.exists():
        raise SandboxError(
            f"{compiler} cannot compile the sandbox: {done.stderr.strip()[-1000:] or exit_cause(done.returncode)}"
        )
    program.chmod(0o755)
    return program


def probe(program: Path) -> list[Layer]:
    """Finds out which layers this machine has. Raises SandboxError at a timeout."""
    answers = dict(line.split() for line in _run_command([str(program), "probe"]).stdout.splitlines())
    version = int(answers.get("landlock", -1))
    change = [str(program), "enter", "--user", str(TRANSIENT_UIDS[0]), "--"]
    # A container may forbid root to change the user, or bubblewrap to make namespaces, so both are tried.
    other_users = os.geteuid() == 0 and _succeeds([*change, "/bin/true"])
    bwrap = [*(change if other_users else []), *_bubblewrap_command(SYSTEM_FOLDERS, program), "--"]
    namespaces = shutil.which("bwrap") is not None and _succeeds([*bwrap, str(program), "probe"])
    return [
        Layer("limits", "memory, CPU seconds, file size, threads, open files", "", ""),
        Layer(
            "landlock",
            f"version {version}" if version >= MIN_LANDLOCK_ABI else "",
            "a program can read and write every file that its user can",
            "use Linux 5.13 or later with landlock in /sys/kernel/security/lsm",
            is_required=True,
        ),
        Layer(
            "seccomp",
            "filter" if answers.get("seccomp") == "1" else "",
            "a program can start processes, use the network and debug other processes",
            "use a kernel with CONFIG_SECCOMP_FILTER, in a container whose profile allows seccomp",
            is_required=True,
        ),
        Layer(
            "another user",
            "a passing one for each program" if other_users else "",
            "a program's threads are counted with those of the user, so that one which starts many can starve others",
            "start as root",
        ),
        Layer(
            "namespaces",
            "bubblewrap" if namespaces else "",
            "files and processes of the machine are kept away by rules, and not invisible",
            "install bubblewrap where user namespaces are allowed",
        ),
    ]


def probe_layers(compiler: str) -> list[Layer]:
    """As `probe`, but leaves nothing behind. Raises SandboxError if the sandbox cannot be compiled."""
    with tempfile.TemporaryDirectory() as folder:
        # As in `Sandbox`: another user must be able to pass.
        os.chmod(folder, 0o711)
        return probe(compile_sandbox(compiler, Path(folder)))


def _run_command(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise SandboxError(f"{' '.join(command[:2])} did not end within {PROBE_TIMEOUT_S:g} s") from error


def _succeeds(command: Sequence[str]) -> bool:
    try:
        return _run_command(command).returncode == 0
    except (OSError, SandboxError):
        return False


def _bubblewrap_command(read: Sequence[str], program: Path) -> list[str]:
    """The command line that makes namespaces in which only these paths exist. Further paths may follow."""
    words = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-all",
        "--die-with-parent",
        "--new-session",
        "--cap-drop",
        "ALL",
    ]
    for path in [*read, str(program)]:
        # Where /lib is a link to usr/lib, it can be a link inside too, which costs less than another mount.
        if os.path.islink(path) and any(Path(path).resolve().is_relative_to(other) for other in read if other != path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            words += ["--ro-bind", path, path]
    return words


def _repeat_option(option: str, values: Sequence[str], times: int = 1) -> list[str]:
    """Puts the option before each value, repeated `times` times (a path outside and inside)."""
    return [word for value in values for word in (option, *[value] * times)]


def _compiler_prefix(compiler: str) -> list[str]:
    """The folder above the compiler's own, unless it is one of the system's."""
    # A compiler keeps its other programs, headers and libraries there.
    prefix = Path(compiler).resolve().parent.parent
    return [] if str(prefix) in ("/", *SYSTEM_FOLDERS) or str(prefix).startswith("/usr/") else [str(prefix)]


def _count_user_threads() -> int:
    user, count = os.getuid(), 0
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            # A process may have ended, or be hidden.
            with suppress(OSError):
                if process.stat().st_uid == user:
                    count += len(os.listdir(process / "task"))
    return count


def exit_cause(status: int | None) -> str:
    """Says in words how a child ended, from the exit status of `subprocess`."""
    assert status is not None
    if status >= 0:
        return f"it ended with exit status {status}"
    name = signal.Signals(-status).name if -status in signal.valid_signals() else f"signal {-status}"
    known: Mapping[str, str] = {
        "SIGSEGV": "it used memory outside of its arrays, or wrote to an input",
        "SIGSYS": "it made a system call that a computation has no use for",
        "SIGXCPU": "it used up its CPU seconds",
        "SIGXFSZ": "it wrote too large a file",
        "SIGFPE": "it divided an integer by zero",
        "SIGILL": "it used an instruction that this machine lacks",
        "SIGBUS": "it used an address that is not aligned, or memory that is not there",
        "SIGABRT": "it aborted",
        "SIGKILL": "it was killed, perhaps for memory",
    }
    return f"{name}: {known[name]}" if name in known else name
