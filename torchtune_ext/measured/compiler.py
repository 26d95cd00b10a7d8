"""Compile a candidate to a shared library inside the sandbox."""

import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchtune_ext.measured.kernel import Kernel, prototype
from torchtune_ext.measured.sandbox import Limits, Sandbox, SandboxError, clean_environment
from torchtune_ext.run.errors import UsageError

COMPILER_NAMES = ("gcc", "clang", "cc")
INSTALL_HINT = (
    "install one: apt-get install gcc (Debian, Ubuntu), dnf install gcc (Fedora), apk add gcc musl-dev (Alpine)"
)
MAX_OUTPUT_BYTES = 8 << 20  # limit of the preprocessed text, and of the messages
# The output of the compiler is a file, so `file_bytes` limits it too.
COMPILER_LIMITS = Limits(memory_bytes=2 << 30, processes=32, cpu_s=30, file_bytes=64 << 20)
SOURCE_FILE, HEADER_FILE, LIBRARY_FILE = "candidate.c", "kernel.h", "candidate.so"


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler of this machine."""

    path: str
    version: str  # the first line of --version

    @classmethod
    def find(cls, name: str | None = None) -> "Compiler":
        """Finds a compiler by name, or the first of gcc and clang on PATH.

        Raises:
            UsageError: the compiler is not found, or its --version fails.
        """
        tried = [name] if name else list(COMPILER_NAMES)
        if path := next(filter(None, map(shutil.which, tried)), None):
            path = os.path.realpath(path)
            try:
                done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True)
                return cls(path, done.stdout.splitlines()[0])
            except (OSError, subprocess.SubprocessError, IndexError, UnicodeDecodeError) as error:
                raise UsageError(
                    f"compiler={path}: `{path} --version` fails; expected a C compiler. Fix: set compiler=gcc or "
                    "compiler=clang"
                ) from error
        raise UsageError(f"no C compiler: {', '.join(tried)} not found on PATH; {INSTALL_HINT}")


def compiler_flags(kernel: Kernel, optimization: str, threads: int) -> list[str]:
    """Returns the compiler flags of a candidate."""
    flags = ["-std=gnu17", optimization, "-march=native", "-fPIC", "-shared", "-pipe", *["-fopenmp"] * (threads > 1)]
    # These make a missing function, or an undefined reference, an error of the linker.
    return [*flags, f"-Wl,--require-defined={kernel.name}", "-Wl,-z,defs"]


def write_source(kernel: Kernel, source: str, folder: Path) -> None:
    """Writes the candidate and a header that declares its function."""
    # Every compilation includes the header, so a wrong signature is a compile error.
    (folder / SOURCE_FILE).write_text(source, encoding="utf-8", errors="replace")
    (folder / HEADER_FILE).write_text(prototype(kernel) + ";\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command."""

    status: int | None  # exit status, negative for a signal; None: killed for its deadline or its output
    output: str
    errors: str
    cause: str  # why the command was killed; "" if it was not
    timed_out: bool  # whether the deadline killed the command
    seconds: float


def preprocess(
    sandbox: Sandbox, compiler: Compiler, flags: Sequence[str], folder: Path, deadline_s: float
) -> CommandResult:
    """Runs the preprocessor. Line markers in the output give the file and line of the text."""
    words = [flag for flag in flags if flag != "-shared" and not flag.startswith("-Wl")]
    return run_locked_in(
        sandbox, [compiler.path, *words, "-E", "-include", HEADER_FILE, SOURCE_FILE], folder, deadline_s
    )


def compile_library(
    sandbox: Sandbox, compiler: Compiler, flags: Sequence[str], folder: Path, deadline_s: float
) -> CommandResult:
    """Compiles the candidate in `folder` to `LIBRARY_FILE`."""
    # A note is short, and warnings would displace the error. So -w disables them.
    words = [*flags, "-include", HEADER_FILE, "-w", "-fmax-errors=5", "-fdiagnostics-color=never"]
    if "clang" in compiler.version:
        words = [word.replace("-fmax-errors", "-ferror-limit") for word in words]
    return run_locked_in(sandbox, [compiler.path, *words, SOURCE_FILE, "-o", LIBRARY_FILE, "-lm"], folder, deadline_s)


def run_locked_in(sandbox: Sandbox, command: Sequence[str], folder: Path, deadline_s: float) -> CommandResult:
    """Runs a command in the sandbox for at most `deadline_s` seconds.

    Raises:
        SandboxError: the command cannot be started or sandboxed.
    """
    # A hostile source may make the compiler hang, print endlessly or leave processes running. The
    # output goes to size-limited files, so no reader has to drain it while the compiler runs.
    start = time.monotonic()
    timed_out, cause = False, ""
    files: list[int] = []
    try:
        files += os.pipe()
        files += [os.memfd_create(name, os.MFD_CLOEXEC) for name in ("output", "errors")]
        ready, started, *printed = files
        process = subprocess.Popen(
            sandbox.compiler_command(command, folder, COMPILER_LIMITS, started),
            stdin=subprocess.DEVNULL,
            stdout=printed[0],
            stderr=printed[1],
            env={**clean_environment(), "TMPDIR": str(folder)},
            cwd=folder,
            pass_fds=(started,),
            start_new_session=True,
        )
        try:
            # When this process is killed, the kernel kills the compiler, but not its children.
            with sandbox.kill_with_parent(process.pid):
                process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            timed_out, cause = True, f"it did not end within {deadline_s:g} s"
        finally:
            # Remaining children share the process group, so the kill also follows a normal exit.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if any(os.fstat(file).st_size > MAX_OUTPUT_BYTES for file in printed):
            cause = cause or f"it wrote more than {MAX_OUTPUT_BYTES} bytes"
        output, errors = (os.pread(file, MAX_OUTPUT_BYTES, 0).decode(errors="replace") for file in printed)
        # Only this byte proves the sandbox: the candidate may have written the output.
        os.set_blocking(ready, False)
        if not select.select([ready], [], [], 0)[0] or not os.read(ready, 1):
            raise SandboxError(f"a compiler could not be locked in: {cause or errors.strip()[-1000:]}")
    except OSError as error:
        raise SandboxError(f"a compiler could not be started: {error}") from error
    finally:
        for file in files:
            os.close(file)
    return CommandResult(
        None if cause else process.returncode, output, errors, cause, timed_out, time.monotonic() - start
    )
