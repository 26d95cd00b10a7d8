"""Check one candidate: extract -> screen -> compile -> verify."""

import math
import re
import shutil
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torchtune_ext.measured import compiler as compilers
from torchtune_ext.measured.child import Child, ChildFailed, arena_size
from torchtune_ext.measured.compiler import CommandResult, Compiler
from torchtune_ext.measured.kernel import Kernel, validate_kernel
from torchtune_ext.measured.machine import usable_cores
from torchtune_ext.measured.reader import UnreadableProgram
from torchtune_ext.measured.results import BenchConfig, Optimization, Result
from torchtune_ext.measured.sandbox import Limits, Sandbox, SandboxError, exit_cause
from torchtune_ext.measured.screen import screen
from torchtune_ext.measured.techniques import find_techniques, violations
from torchtune_ext.measured.verify import size_text, verify
from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.processes import Closing, closed_on_error
from torchtune_ext.tasks.answers import strip_thinking

OUTCOMES = ("format", "forbidden", "compile_error", "timeout", "runtime_error", "wrong_result", "ok")
STAGES = ("extract", "screen", "compile", "verify")
MAX_SOURCE_CHARS = 200_000  # of a program
MAX_NOTE_CHARS = 1500
KILLED_PREFIX = "SIGKILL"  # prefix of a note if a process was killed, perhaps out of memory
DISK_FULL_TEXT = "No space left on device"  # English, since compilers run with LC_ALL=C
# The messages of gcc and clang when one of their subprocesses was killed.
_KILLED_PATTERN = re.compile(
    r"^\S+: (fatal )?error: (Killed signal terminated program|ld terminated with signal 9|unable to execute command: Killed)",
    re.MULTILINE,
)
C_LANGUAGE_TAGS = ("", "c", "c99", "c11", "c17", "cpp", "c++")  # accepted language tags of a C code fence
# Possessive quantifiers (`*+`): backtracking would try all ways to divide a long line.
_FENCE_PATTERN = re.compile(r"[ \t]*+(`{3,}+|~{3,}+)[ \t]*+([^`\s]*+)(?:\s[^`]*+)?")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Timeouts of the stages, in seconds."""

    screen_s: float = 10.0
    compile_s: float = 20.0
    load_s: float = 5.0  # loading the library
    verify_s: float = 20.0  # all calls of the verification together


class _CandidateRejected(Exception):
    def __init__(self, outcome: str, note: str) -> None:
        super().__init__(note)
        self.outcome = outcome


class Checker(Closing):
    """Checks programs for one kernel, in one sandbox and with one compiler.

    `check` is thread-safe, but the threads share the interpreter lock: use a checker per process.

    Args:
        compiler: the C compiler. None selects the first of gcc and clang on PATH.
        optimization: the compiler flag of candidates and of the kernel's naive program.
        threads: threads that a program may use. OpenMP is enabled from 2 threads.
        cores: the cores that programs run on. None selects all usable cores.
        namespaces: whether to use bubblewrap. None uses it if it works.

    Raises:
        UsageError: the compiler or a core is missing, or the kernel or its program is invalid.
        SandboxError: the sandbox fails, or the machine kills the naive program or is too busy.
    """

    def __init__(
        self,
        kernel: Kernel,
        compiler: Compiler | None = None,
        optimization: Optimization = "-O3",
        threads: int = 1,
        cores: Sequence[int] | None = None,
        namespaces: bool | None = None,
        deadlines: Deadlines | None = None,
        with_screen: bool = True,
    ) -> None:
        validate_kernel(kernel)
        # Constructed only to validate the values.
        BenchConfig(threads=threads, namespaces=namespaces, optimization=optimization)
        usable = usable_cores()
        self.cores = sorted(usable if cores is None else cores)
        if not self.cores or not set(self.cores) <= usable:
            raise UsageError(f"cores: {self.cores} must be some of {sorted(usable)}, the usable cores of this process")
        self.kernel, self.threads = kernel, threads
        self.optimization: Optimization = optimization
        self.deadlines = deadlines or Deadlines()
        self.compiler = compiler or Compiler.find()
        self.flags = compilers.compiler_flags(kernel, optimization, threads)
        self.with_screen = with_screen
        self.sandbox = Sandbox(self.compiler.path, namespaces)
        with closed_on_error(self):
            # If the kernel's naive program fails, the kernel or the machine is at fault.
            try:
                naive_result = self.check_source(kernel.naive)
            except MemoryError as error:
                raise SandboxError(f"no room for the arrays of {kernel.name}: {error}") from error
            if naive_result.note.startswith(KILLED_PREFIX):
                raise SandboxError(f"the program of {kernel.name} was killed while it was checked: {naive_result.note}")
            if naive_result.outcome == "timeout":
                raise SandboxError(
                    f"this machine is too busy to check the kernel's own program of {kernel.name}, or the size is too "
                    f"large: {naive_result.note}. Fix: choose a smaller size than {size_text(kernel.timed)}"
                )
            if naive_result.outcome != "ok":
                raise UsageError(
                    f"{type(kernel).__name__}.naive: the kernel's own program ends with {naive_result.outcome}: "
                    f"{naive_result.note}"
                )

    def close(self) -> None:
        """Removes all folders of the sandbox."""
        self.sandbox.close()

    def check(self, text: str) -> Result:
        """Checks the program in a model's answer.

        Raises:
            SandboxError: the machine failed; the result of the program is unknown.
        """
        return self.check_with_library(text)[0]

    def check_source(self, source: str) -> Result:
        """Checks a bare program, outside of an answer."""
        return self.check_with_library(source, is_source=True)[0]

    def check_with_library(
        self, text: str, is_source: bool = False, permitted: Collection[str] | None = None
    ) -> tuple[Result, bytes]:
        """Checks a program.

        Args:
            text: a model's answer, or a program.
            is_source: whether `text` is the program itself.
            permitted: techniques (`techniques.TECHNIQUES`) that it may use. None permits all.

        Returns:
            The result, and the content of the library, which is empty if the program is not ok.

        Raises:
            SandboxError: the machine failed; the result of the program is unknown.
        """
        seconds: dict[str, float] = {}
        preprocessed, techniques, outcome, note, library = None, (), "ok", "", b""
        folder = self.sandbox.new_folder()
        try:
            with _record_seconds(seconds, "extract"):
                source = text if is_source else extract_code(text)
                if source is None:
                    raise _CandidateRejected("format", "no closed block of C code in the answer")
                if len(source) > MAX_SOURCE_CHARS:
                    raise _CandidateRejected(
                        "format", f"{len(source)} characters of code, at most {MAX_SOURCE_CHARS} are read"
                    )
            with _record_seconds(seconds, "screen"):
                compilers.write_source(self.kernel, source, folder)
                if self.with_screen:
                    preprocessed = self._screen(source, folder)
            with _record_seconds(seconds, "compile"):
                self._compile(folder)
            if permitted is not None and preprocessed is not None:
                # The techniques of a program that does not compile are undefined.
                with _record_seconds(seconds, "screen"):
                    techniques = self._check_techniques(preprocessed, permitted)
            with _record_seconds(seconds, "verify"):
                # The seed is drawn only now, so the inputs are unknown at compile time.
                self._verify(folder / compilers.LIBRARY_FILE, np.random.default_rng())
            library = (folder / compilers.LIBRARY_FILE).read_bytes()
        except _CandidateRejected as failed:
            # A SandboxError propagates: a fault of the machine is not a verdict on the program.
            outcome, note = failed.outcome, _printable(str(failed))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        # The last recorded stage decided the outcome.
        return Result(self.kernel.name, outcome, [*seconds][-1], note, None, seconds, techniques=techniques), library

    def compile_naive(self, kernel: Kernel, optimization: Optimization = "-O3") -> Path:
        """Compiles the kernel's naive program. `close` removes the library.

        Raises:
            SandboxError: the compilation fails.
        """
        folder = self.sandbox.new_folder()
        compilers.write_source(kernel, kernel.naive, folder)
        flags = compilers.compiler_flags(kernel, optimization, self.threads)
        done = compilers.compile_library(self.sandbox, self.compiler, flags, folder, self.deadlines.compile_s)
        if done.status != 0:
            raise SandboxError(
                f"the program of {kernel.name} does not compile: "
                f"{done.cause or done.errors.strip() or exit_cause(done.status)}"
            )
        return folder / compilers.LIBRARY_FILE

    def start_child(self, kernel: Kernel, library: Path, cpu_s: float = 0.0) -> Child:
        """Starts a sandboxed process, loads the library, and reserves arrays of the timed size.

        Args:
            cpu_s: CPU limit in seconds, if it exceeds the default limit.

        Raises:
            SandboxError: the process could not be sandboxed.
            ChildFailed: loading fails or times out.
        """
        arena_bytes = arena_size(kernel, kernel.timed)
        limits = Limits(cpu_s=max(Limits().cpu_s, math.ceil(cpu_s)))
        return Child(
            self.sandbox, library, kernel, arena_bytes, self.cores, self.threads, limits, self.deadlines.load_s
        )

    def _screen(self, source: str, folder: Path) -> str:
        """Returns the preprocessed text. Rejects a forbidden program."""
        deadline_s = self.deadlines.screen_s
        done = compilers.preprocess(self.sandbox, self.compiler, self.flags, folder, deadline_s)
        _require_not_killed(done)
        try:
            reason = screen(done.output, source, self.kernel, max(0.1, deadline_s - done.seconds))
        except TimeoutError as error:
            raise _CandidateRejected("timeout", f"the screen: {error}") from None
        if reason:
            raise _CandidateRejected("forbidden", reason)
        # The screen comes first: an #include of a disallowed file is "forbidden", even if missing.
        if done.status != 0:
            raise _CandidateRejected("compile_error", done.errors.strip())
        return done.output

    def _check_techniques(self, preprocessed: str, permitted: Collection[str]) -> tuple[str, ...]:
        """Returns the techniques of the program. Rejects techniques outside `permitted`."""
        try:
            techniques = find_techniques(preprocessed, self.kernel, openmp=self.threads > 1)
        except UnreadableProgram as error:
            raise _CandidateRejected("forbidden", f"line 1: the program cannot be read: {error}") from None
        if others := violations(techniques, permitted):
            raise _CandidateRejected("forbidden", "\n".join(others))
        return tuple(sorted(use.technique for use in techniques))

    def _compile(self, folder: Path) -> None:
        done = compilers.compile_library(self.sandbox, self.compiler, self.flags, folder, self.deadlines.compile_s)
        _require_not_killed(done)
        if done.status != 0:
            # A candidate may print this text (#error), so the free disk space decides.
            if DISK_FULL_TEXT in done.errors and shutil.disk_usage(folder).free < compilers.COMPILER_LIMITS.file_bytes:
                raise SandboxError(f"the disk of {folder} is full: {done.errors.strip()[-300:]}")
            raise _CandidateRejected("compile_error", done.errors.strip() or exit_cause(done.status))

    def _verify(self, library: Path, rng: np.random.Generator) -> None:
        try:
            with self.start_child(self.kernel, library) as child:
                verify(child, self.kernel, rng, self.deadlines.verify_s)
        except ChildFailed as failed:
            note = f"; it computed for {failed.cpu_s:.2g} s" if failed.outcome == "timeout" else ""
            raise _CandidateRejected(failed.outcome, f"{failed}{note}") from failed


def _printable(text: str) -> str:
    # A note quotes the candidate, which may contain terminal control characters.
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text[:MAX_NOTE_CHARS])


def _require_not_killed(done: CommandResult) -> None:
    """Rejects a program whose compiler was killed, by this process or by the system."""
    # bubblewrap exits with 128 + the number of the signal that killed its child.
    if done.status in (-signal.SIGKILL, 128 + signal.SIGKILL) or (done.status and _KILLED_PATTERN.search(done.errors)):
        raise _CandidateRejected(
            "compile_error", f"{KILLED_PREFIX}: the compiler was killed, perhaps for memory\n{done.errors.strip()}"
        )
    if done.status is None:
        raise _CandidateRejected("timeout" if done.timed_out else "compile_error", f"the compiler: {done.cause}")


@contextmanager
def _record_seconds(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    finally:
        # The times of the two parts of the screen add up. The last stage becomes the last key.
        seconds[stage] = seconds.pop(stage, 0.0) + time.monotonic() - start


def extract_code(text: str) -> str | None:
    """Returns the last closed code block that is fenced as C or without a language, or None.

    Empty blocks and blocks in the model's reasoning are ignored.
    """
    source, fence, language, lines = None, "", "", []
    for line in (line.removesuffix("\r") for line in strip_thinking(text).split("\n")):
        match = _FENCE_PATTERN.fullmatch(line)
        if match is None:
            lines.append(line)
        # A fence with a language always opens a block: a model may leave a block unclosed.
        elif not fence or match[2]:
            fence, language, lines = match[1], match[2].lower(), []
        elif match[1].startswith(fence):
            if language in C_LANGUAGE_TAGS and any(each.strip() for each in lines):
                source = "\n".join(lines) + "\n"
            fence = ""
        else:
            lines.append(line)
    return source
