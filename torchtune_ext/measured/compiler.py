"""Compiles a candidate to a shared library, locked in."""

import os
import select
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtune_ext.measured import commands
from torchtune_ext.measured.cgroups import NO_GROUP
from torchtune_ext.measured.commands import Finished
from torchtune_ext.measured.kernel import Kernel, prototype
from torchtune_ext.measured.sandbox import Limits, Sandbox, SandboxError, clean_environment

NAMES = ("gcc", "clang", "cc")
INSTALL = "install one: apt-get install gcc (Debian, Ubuntu), dnf install gcc (Fedora), apk add gcc musl-dev (Alpine)"
OPTIMIZATIONS = ("-O0", "-O1", "-O2", "-O3")
MAX_OUTPUT_BYTES = 8 << 20  # of preprocessed text, or of messages
LIMITS = Limits(memory_bytes=2 << 30, processes=32, cpu_s=30, file_bytes=64 << 20)
SOURCE, HEADER, LIBRARY = "candidate.c", "kernel.h", "candidate.so"


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
        raise ValueError(f"no C compiler: {', '.join(tried)} not found on PATH; {INSTALL}")


def _version_of(path: str) -> str:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"compiler: {path} is none, since {path} --version fails; name gcc or clang") from error


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
        done = commands.run(locked_in, environment, str(folder), deadline_s, MAX_OUTPUT_BYTES, (started,), group)
        os.set_blocking(ready, False)
        # Whatever else it says may be the candidate's words.
        if not select.select([ready], [], [], 0)[0] or not os.read(ready, 1):
            raise SandboxError(f"a compiler could not be locked in: {done.cause or done.errors.strip()[-1000:]}")
        return done
    except OSError as error:
        raise SandboxError(f"a compiler could not be started: {error}") from error
    finally:
        group.close()
        os.close(ready)
        os.close(started)
