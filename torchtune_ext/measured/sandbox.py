"""The sandbox layers that isolate a compiler and a candidate's code from the machine.

The required base is `sandbox.c` (limits, Landlock, seccomp) with a clean environment, which needs
neither namespaces nor privileges. bubblewrap adds namespaces where they are allowed.
docs/how_to/measured_programs.md describes the protection and its limits.
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

MIN_LANDLOCK_ABI = 1  # version 1 restricts files; 3 adds truncation, 4 TCP, 6 signals and abstract sockets
# systemd's range of dynamic user ids. The children of root switch to one of them.
TRANSIENT_UIDS = range(61184, 65520)
PROBE_TIMEOUT_S = 20.0  # timeout of a probe, in seconds
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin")  # compilers, headers and libraries
SYSTEM_FILES = ("/etc/ld.so.cache",)
# RLIMIT_NPROC counts all threads of a user. Its limit without root: the current count plus this.
EXTRA_THREADS = 256


class SandboxError(RunFailure):
    """The sandbox itself failed; the result of the candidate is unknown."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of isolation between a candidate and the machine."""

    name: str
    support: str  # the support of this machine; "" if the layer is missing
    cost_if_missing: str  # the risk without the layer
    fix: str  # how to enable the layer
    is_required: bool = False  # without a required layer, programs are not run


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of a child."""

    memory_bytes: int = 2 << 30  # address space, in addition to the arrays
    processes: int = 16  # concurrent threads and processes; for a non-root user see EXTRA_THREADS
    cpu_s: int = 30  # CPU seconds of all threads of a process
    file_bytes: int = 1 << 20  # size of one file, and of the output


class Sandbox(Closing):
    """Builds the command lines of sandboxed children.

    `close`, or the end of this process, removes its folder.

    Args:
        namespaces: whether to use bubblewrap. None uses it if it works.

    Raises:
        SandboxError: a required layer is missing, or bubblewrap if `namespaces` is set.
    """

    def __init__(self, compiler: str, namespaces: bool | None = None) -> None:
        self._reaper = ProcessReaper()
        self._lock = threading.Lock()  # several threads may compile
        self._groups: set[int] = set()  # process groups that the reaper kills after this process
        self.folder = Path(self._reaper.folder)
        with closed_on_error(self):
            # Root's children run as other users. They may traverse the folder, but not list it.
            self.folder.chmod(0o711)
            self.program = compile_sandbox(compiler, self.folder)
            self.layers = probe(self.program)
            layers = {layer.name: layer.support for layer in self.layers}
            if bad := [layer for layer in self.layers if layer.is_required and not layer.support]:
                lost = "; ".join(f"no {layer.name}: {layer.cost_if_missing}" for layer in bad)
                fixes = "; ".join(layer.fix for layer in bad)
                raise SandboxError(f"this machine cannot sandbox programs ({lost}). Fix: {fixes}")
            self.disabled_layers: list[str] = []  # layers that a test disables
            if namespaces and not layers["namespaces"]:
                raise SandboxError(
                    "namespaces: true, but bubblewrap is missing or cannot create them here. Fix: install bubblewrap, "
                    "or set namespaces: null"
                )
            self.namespaces = bool(layers["namespaces"]) if namespaces is None else namespaces
            self.uses_transient_users = bool(layers["another user"])

    def close(self) -> None:
        """Removes the folder and its content."""
        self._reaper.close()

    @contextmanager
    def kill_with_parent(self, group: int) -> Iterator[None]:
        """During the block, the process group is killed if this process is killed."""
        with self._lock:
            self._groups.add(group)
            self._reaper.set_process_groups([*self._groups])
        try:
            yield
        finally:
            with self._lock:
                self._groups.discard(group)
                # [0] stands for an empty list of groups.
                self._reaper.set_process_groups([*self._groups] or [0])

    def new_folder(self) -> Path:
        """Creates a folder for one candidate, readable only by the user of its processes."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        if self.uses_transient_users:
            user = secrets.choice(TRANSIENT_UIDS)
            os.chown(folder, user, user)
        return folder

    def compiler_command(self, command: Sequence[str], folder: Path, limits: Limits, started: int) -> list[str]:
        """Returns the command of a compiler that can read system folders and write to `folder`.

        Args:
            started: file descriptor. The sandbox writes a byte to it once all layers are active,
                before the compiler runs.
        """
        read = [*SYSTEM_FOLDERS, *SYSTEM_FILES, *_compiler_prefix(command[0])]
        words = ["--started", str(started), *_repeat_option("--read", read)]
        words += _repeat_option("--write", [str(folder), "/dev/null"])
        visible = [*_repeat_option("--bind", [str(folder)], 2), "--dev-bind", "/dev/null", "/dev/null"]
        return [*self._sandbox_command("exec", words, folder, limits, 0, read, visible), "--", *command]

    def function_command(
        self, library: Path, function: str, arena_bytes: int, files: Sequence[int], cores: Sequence[int], limits: Limits
    ) -> list[str]:
        """Returns the command line of a process that calls `function` of `library`.

        Args:
            arena_bytes: bytes of address space for the arrays.
            files: descriptors of the socket, the inputs and the outputs.

        Raises:
            SandboxError: as root, `new_folder` did not create the folder of the library.
        """
        # The process may open only the library: system libraries are loaded before.
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
        """Returns the command line up to `--`. `read` and `visible` exist inside namespaces."""
        words = ["--memory", str(limits.memory_bytes + more_bytes), "--seconds", str(limits.cpu_s), *words]
        words += ["--file", str(limits.file_bytes), *self.disabled_layers]
        processes = limits.processes if self.uses_transient_users else _count_user_threads() + EXTRA_THREADS
        words += ["--processes", str(processes)]
        owner = folder.stat().st_uid
        # The child switches to the owner of its folder, who must not be root or a real user.
        if self.uses_transient_users and owner not in TRANSIENT_UIDS:
            raise SandboxError(f"{folder} does not belong to a transient user. Fix: create it with new_folder")
        enter = ["--user", str(owner)] if self.uses_transient_users else []
        if not self.namespaces:
            return [str(self.program), mode, *enter, *words]
        # In a user namespace, root cannot switch users, so the switch comes before bubblewrap.
        before = [str(self.program), "enter", *enter, "--"] if enter else []
        return [*before, *_bubblewrap_command(read, self.program), *visible, "--", str(self.program), mode, *words]


def clean_environment(threads: int = 1) -> dict[str, str]:
    """Returns the environment of a child, without keys, paths or names of this process."""
    return {
        "PATH": "/usr/bin:/bin",
        "LC_ALL": "C",
        "OMP_NUM_THREADS": str(threads),
        "OMP_DYNAMIC": "false",
        # libgomp's threads spin after a parallel region, and a call lasts until they sleep.
        "GOMP_SPINCOUNT": "1000",
        "KMP_BLOCKTIME": "0",
    }


def compile_sandbox(compiler: str, folder: Path) -> Path:
    """Compiles sandbox.c into `folder`.

    Raises:
        SandboxError: the compiler fails.
    """
    program = folder / "sandbox"
    command = [compiler, "-O1", "-std=gnu11", str(Path(__file__).with_name("sandbox.c")), "-o", str(program), "-ldl"]
    done = _run_command(command)
    # A program that is not a compiler may exit with 0 and write nothing.
    if done.returncode != 0 or not program.exists():
        raise SandboxError(
            f"{compiler} cannot compile the sandbox: {done.stderr.strip()[-1000:] or exit_cause(done.returncode)}"
        )
    program.chmod(0o755)
    return program


def probe(program: Path) -> list[Layer]:
    """Returns all layers with their support on this machine.

    Raises:
        SandboxError: the probe times out.
    """
    answers = dict(line.split() for line in _run_command([str(program), "probe"]).stdout.splitlines())
    version = int(answers.get("landlock", -1))
    change = [str(program), "enter", "--user", str(TRANSIENT_UIDS[0]), "--"]
    # A container may forbid user switching or namespaces, so both are tried.
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
            "a transient user for each program" if other_users else "",
            "a program's threads count toward the user's limit, so a program with many threads can starve others",
            "start as root",
        ),
        Layer(
            "namespaces",
            "bubblewrap" if namespaces else "",
            "files and processes of the machine are blocked by rules, but visible",
            "install bubblewrap where user namespaces are allowed",
        ),
    ]


def probe_layers(compiler: str) -> list[Layer]:
    """Returns the layers of `probe`, with a temporary build of the sandbox.

    Raises:
        SandboxError: the sandbox cannot be compiled, or the probe times out.
    """
    with tempfile.TemporaryDirectory() as folder:
        # As in `Sandbox`, another user must be able to traverse the folder.
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
    """Returns a bubblewrap command for namespaces with only these paths. More may be appended."""
    words = [shutil.which("bwrap") or "bwrap"]
    words += ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    for path in [*read, str(program)]:
        # A link such as /lib -> usr/lib stays a link inside, which costs less than another mount.
        if os.path.islink(path) and any(Path(path).resolve().is_relative_to(other) for other in read if other != path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            words += ["--ro-bind", path, path]
    return words


def _repeat_option(option: str, values: Sequence[str], times: int = 1) -> list[str]:
    """Returns the option with each value, repeated `times` times (path outside and inside)."""
    return [word for value in values for word in (option, *[value] * times)]


def _compiler_prefix(compiler: str) -> list[str]:
    """Returns the installation prefix of the compiler, unless it is a system folder."""
    # The prefix holds the compiler's other programs, headers and libraries.
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
    """Returns a description of an exit status of `subprocess`."""
    assert status is not None
    if status >= 0:
        return f"it ended with exit status {status}"
    name = signal.Signals(-status).name if -status in signal.valid_signals() else f"signal {-status}"
    known: Mapping[str, str] = {
        "SIGSEGV": "it used memory outside of its arrays, or wrote to an input",
        "SIGSYS": "it made a forbidden system call",
        "SIGXCPU": "it used up its CPU seconds",
        "SIGXFSZ": "it wrote too large a file",
        "SIGFPE": "it divided an integer by zero",
        "SIGILL": "it used an instruction that this machine lacks",
        "SIGBUS": "it used an unaligned address or unmapped memory",
        "SIGABRT": "it aborted",
        "SIGKILL": "it was killed, perhaps for memory",
    }
    return f"{name}: {known[name]}" if name in known else name
