"""Compiles a candidate to a shared library, locked in. A hostile source may make the compiler hang, flood its output or leave
children behind."""

import os
import select
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtune_ext.measured.cgroups import NO_GROUP, Group
from torchtune_ext.measured.kernel import Kernel, prototype
from torchtune_ext.measured.sandbox import Limits, Sandbox, SandboxError, clean_environment
from torchtune_ext.run.errors import Mistake

NAMES = ("gcc", "clang", "cc")
INSTALL = "install one: apt-get install gcc (Debian, Ubuntu), dnf install gcc (Fedora), apk add gcc musl-dev (Alpine)"
OPTIMIZATIONS = ("-O0", "-O1", "-O2", "-O3")
MAX_OUTPUT_BYTES = 8 << 20  # of preprocessed text, or of messages
LIMITS = Limits(memory_bytes=2 << 30, processes=32, cpu_s=30, file_bytes=64 << 20)
SOURCE, HEADER, LIBRARY = "candidate.c", "kernel.h", "candidate.so"
END_S = 2.0  # seconds until killed processes are gone


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler of this machine."""

    path: str
    version: str  # the first line of --version, part of the key of the cache

    @classmethod
    def find(cls, name: str | None = None) -> "Compiler":
        """Finds gcc or clang.

        Raises:
            ValueError: there is none, or it does not tell its version.
        """
        tried = [name] if name else list(NAMES)
        for word in tried:
            path = shutil.which(word)
            if path is not None:
                real = os.path.realpath(path)
                return cls(real, _version_of(real))
        raise Mistake(f"no C compiler: {', '.join(tried)} not found on PATH; {INSTALL}")


def _version_of(path: str) -> str:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError, UnicodeDecodeError) as error:
        raise Mistake(f"compiler: {path} is none, since {path} --version fails; name gcc or clang") from error


def flags_of(kernel: Kernel, optimization: str, threads: int) -> list[str]:
    """Returns the flags a candidate is compiled with. A library that lacks the function is an error of the linker."""
    flags = ["-std=gnu17", optimization, "-march=native", "-fPIC", "-shared", "-pipe"]
    if threads > 1:
        flags.append("-fopenmp")
    return [*flags, f"-Wl,--require-defined={kernel.name}", "-Wl,-z,defs"]


def write_source(kernel: Kernel, source: str, folder: Path) -> None:
    """Writes the candidate and the header, which holds the declaration that its function must match."""
    (folder / SOURCE).write_text(source, encoding="utf-8", errors="replace")
    (folder / HEADER).write_text(prototype(kernel) + ";\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended."""

    status: int | None  # exit status, negative for a signal; None: it was killed at its deadline, or for its output
    output: str
    errors: str
    cause: str  # why it was killed, "" if it was not
    timed_out: bool  # it was killed at its deadline
    seconds: float


def preprocess(sandbox: Sandbox, compiler: Compiler, flags: Sequence[str], folder: Path, deadline_s: float) -> Finished:
    """Returns the source with its macros and headers expanded, and with marks of the lines they come from."""
    words = [flag for flag in flags if flag != "-shared" and not flag.startswith("-Wl")]
    return _run(sandbox, [compiler.path, *words, "-E", "-include", HEADER, SOURCE], folder, deadline_s)


def compile_library(
    sandbox: Sandbox, compiler: Compiler, flags: Sequence[str], folder: Path, deadline_s: float
) -> Finished:
    """Compiles the candidate in `folder` to `LIBRARY`."""
    # A note has little room. Without -w, warnings would stand before the error.
    words = [*flags, "-include", HEADER, "-w", "-fmax-errors=5", "-fdiagnostics-color=never"]
    if "clang" in compiler.version:
        words = [word.replace("-fmax-errors", "-ferror-limit") for word in words]
    return _run(sandbox, [compiler.path, *words, SOURCE, "-o", LIBRARY, "-lm"], folder, deadline_s)


def _run(sandbox: Sandbox, command: Sequence[str], folder: Path, deadline_s: float) -> Finished:
    environment = {**clean_environment(), "TMPDIR": str(folder)}
    ready, started = os.pipe()
    group = NO_GROUP
    try:
        group = sandbox.new_group(LIMITS)
        locked_in = sandbox.run_compiler(command, folder, LIMITS, started, group)
        done = run(locked_in, environment, str(folder), deadline_s, MAX_OUTPUT_BYTES, (started,), group)
        os.set_blocking(ready, False)
        # Anything else that it prints may be the candidate's words.
        if not select.select([ready], [], [], 0)[0] or not os.read(ready, 1):
            raise SandboxError(f"a compiler could not be locked in: {done.cause or done.errors.strip()[-1000:]}")
        return done
    except OSError as error:
        raise SandboxError(f"a compiler could not be started: {error}") from error
    finally:
        group.close()
        os.close(ready)
        os.close(started)


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    deadline_s: float,
    max_bytes: int,
    pass_fds: Sequence[int] = (),
    group: Group = NO_GROUP,
) -> Finished:
    """Runs the command and kills its process group when it has not ended in time or says too much.

    `group` is that in which the command puts itself. It goes with the command.

    Raises:
        OSError: it cannot be started.
    """
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
        cwd=folder,
        pass_fds=pass_fds,
        start_new_session=True,
    )
    parts: dict[str, list[bytes]] = {"output": [], "errors": []}
    timed_out, cause = False, ""
    with process.stdout, process.stderr, selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, "output")
        selector.register(process.stderr, selectors.EVENT_READ, "errors")
        try:
            timed_out = not _read(selector, parts, start + deadline_s, max_bytes)
            if not timed_out and selector.get_map():
                cause = f"it wrote more than {max_bytes} bytes"
            elif not timed_out:
                process.wait(max(0.1, start + deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            # Also after a good end: what it left behind shares its process group.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
            group.close()
            # The killed processes are gone when all other ends are closed.
            _read(selector, {"output": [], "errors": []}, time.monotonic() + END_S, max_bytes=1 << 30)
    if timed_out:
        cause = f"it did not end within {deadline_s:g} s"
    output, errors = (b"".join(parts[name]).decode(errors="replace") for name in ("output", "errors"))
    return Finished(None if cause else process.returncode, output, errors, cause, timed_out, time.monotonic() - start)


def _read(selector: selectors.BaseSelector, parts: dict[str, list[bytes]], end: float, max_bytes: int) -> bool:
    """Reads until all ends are closed or `max_bytes` have come. Returns whether that was before `end`."""
    size = 0
    while selector.get_map():
        ready = selector.select(max(0.0, end - time.monotonic()))
        if not ready and time.monotonic() >= end:
            return False
        for key, _ in ready:
            data = os.read(key.fd, 1 << 16)
            size += len(data)
            parts[key.data].append(data)
            if not data:
                selector.unregister(key.fileobj)
        if size > max_bytes:
            return True
    return True
