"""From a text to a verdict: every outcome, compilers, threads, and whose fault it is."""

import os
import platform
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.as_user import as_user
from torchtune_ext.measured import check as checks
from torchtune_ext.measured import compiler as compilers
from torchtune_ext.measured.check import OUTCOMES, STAGES, Checker, Deadlines
from torchtune_ext.measured.compiler import CommandResult, Compiler
from torchtune_ext.measured.kernels import KERNELS, Dgemm, Reduction
from torchtune_ext.measured.results import Result
from torchtune_ext.measured.sandbox import SandboxError
from torchtune_ext.measured.verify import draw_sizes

SUM = "void reduction(int n, const double *x, double *total) {{ {} }}"
HONEST = SUM.format("double s = 0; for (int i = 0; i < n; i++) s += x[i]; *total = s;")


def checker(**arguments) -> Checker:
    try:
        return Checker(arguments.pop("kernel", Reduction()), **arguments)
    except (ValueError, SandboxError) as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def bare():
    with checker(namespaces=False) as instance:
        yield instance


@pytest.fixture(scope="module")
def unscreened():
    with checker(namespaces=False, with_screen=False) as instance:
        yield instance


def fenced(source: str) -> str:
    return f"Here it is:\n\n```c\n{source}\n```\nIt is fast."


def test_ok(bare):
    verdict = bare.check(fenced(HONEST))
    assert (verdict.outcome, verdict.stage, verdict.note) == ("ok", "verify", "")
    assert list(verdict.seconds) == list(STAGES) and all(0 <= value < 60 for value in verdict.seconds.values())


CASES = {
    "no code": ("I cannot do that.", "format", "extract", "no closed block"),
    "much code": (fenced("/*" + "x" * 300_000 + "*/"), "format", "extract", "300"),
    "a shell": (fenced('#include <stdlib.h>\nvoid reduction(int n, const double *x, double *t) { system("ls"); }'), "forbidden", "screen", "system"),
    "syntax": (fenced(SUM.format("return")), "compile_error", "compile", "candidate.c"),
    "another signature": (fenced("double reduction(int n, double *x) { return x[0]; }"), "compile_error", "compile", "conflicting types"),
    "another name": (fenced(HONEST.replace("reduction", "sum")), "compile_error", "compile", "reduction"),
    "undefined": (fenced("double f(double);" + SUM.format("*total = f(*x);")), "compile_error", "compile", "undefined reference"),
    "no header": (fenced('#include <no_such_header.h>\n' + HONEST), None, None, "no_such_header"),
    "float": (fenced(HONEST.replace("double s", "float s")), "wrong_result", "verify", "and should be"),
    "nothing": (fenced(SUM.format("")), "wrong_result", "verify", "was not written"),
    "beyond the end": (fenced(HONEST.replace("i < n", "i <= n").replace("x[i];", "x[i < n ? i : i + 4096];")), "runtime_error", "verify", "SIGSEGV"),
    "beside the output": (fenced(HONEST.replace("*total = s", "*total = s, total[-1] = 0")), "runtime_error", "verify", "before the array total"),
    "no end": (fenced(SUM.format("for (volatile int i = 0;; i++);")), "timeout", "verify", "did not end"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_outcomes(bare, monkeypatch, case):
    monkeypatch.setattr(bare, "deadlines", Deadlines(verify_s=1.0 if case == "no end" else 20.0))
    text, outcome, stage, words = CASES[case]
    verdict = bare.check(text)
    assert verdict.outcome == outcome or (outcome is None and verdict.outcome in ("forbidden", "compile_error")), (
        verdict
    )
    assert verdict.stage == stage or stage is None
    assert words in verdict.note and verdict.outcome in OUTCOMES


def test_checker_oversized_kernel_arrays_raise_named_error(monkeypatch):
    def check_source(self, source):
        raise MemoryError("Unable to allocate 931. GiB")

    monkeypatch.setattr(Checker, "check_source", check_source)
    with pytest.raises(SandboxError, match="no room for the arrays of reduction: Unable to allocate 931"):
        Checker(Reduction())


def test_a_note_obeys_no_terminal(bare):
    verdict = bare.check_source('#error "\x1b[2J red \x07"')
    assert verdict.outcome == "compile_error" and "red" in verdict.note
    assert all(letter.isprintable() or letter == "\n" for letter in verdict.note)
    assert bare.check_source("\ud800\0" + HONEST).outcome in ("compile_error", "ok")


def test_folders_are_removed(bare):
    for text in (fenced(HONEST), fenced("x"), "x"):
        bare.check(text)
    assert sorted(os.listdir(bare.sandbox.folder)) == ["sandbox"]


def test_checker_correct_program_returns_library(bare):
    verdict, library = bare.check_with_library(fenced(HONEST))
    assert verdict.outcome == "ok" and library.startswith(b"\x7fELF")
    verdict, library = bare.check_with_library("x")
    assert verdict.outcome == "format" and library == b""


def test_checker_each_check_draws_other_sizes(bare, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        checks, "verify", lambda child, kernel, rng, deadline_s: drawn.append(list(draw_sizes(kernel, rng)))
    )
    assert [bare.check_source(HONEST).outcome for _ in range(2)] == ["ok", "ok"]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_naive_programs_are_right_with_every_compiler(bare, compiler, name):
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    # It checks the kernel's own program.
    with Checker(KERNELS[name](96), Compiler.find(compiler), "-O0", namespaces=False) as instance:
        assert compiler in instance.compiler.path


def test_openmp(bare):
    source = """
#include <omp.h>
void reduction(int n, const double *x, double *total) {
    double s = 0;
    int used = 0;
    #pragma omp parallel for reduction(+ : s) reduction(max : used)
    for (int i = 0; i < n; i++) { s += x[i]; used = omp_get_num_threads(); }
    *total = n == 1 && used < 1 ? 0 : s + 0 * used;
    if (used != 2) *total = used;
}
"""
    with checker(threads=2, compiler=Compiler.find("gcc"), namespaces=False) as two:
        assert two.check_source(source).outcome == "ok"
    verdict = bare.check_source(source.replace("#include <omp.h>", "int omp_get_num_threads(void);"))
    assert verdict.outcome == "compile_error" and "omp_get_num_threads" in verdict.note


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the register that flushes denormals is set in another way here"
)
def test_flushing_denormals_is_refused(unscreened):
    source = "#include <immintrin.h>\n" + HONEST.replace(
        "double s = 0;", "double s = 0; _mm_setcsr(_mm_getcsr() | 0x8040);"
    )
    verdict = unscreened.check_source(source)
    assert verdict.outcome == "wrong_result" and "denormal" in verdict.note


def test_loading_belongs_to_verifying(unscreened, monkeypatch):
    monkeypatch.setattr(unscreened, "deadlines", Deadlines(load_s=0.5))
    slow = "#include <unistd.h>\n__attribute__((constructor)) static void linger(void) { for (;;) sleep(1); }\n"
    verdict = unscreened.check_source(slow + HONEST)
    assert (verdict.outcome, verdict.stage) == ("timeout", "verify") and "loading" in verdict.note


def test_a_compiler_that_does_not_end_is_stopped(unscreened, monkeypatch):
    """Thirty macros that double: a file of 2^30 words."""
    monkeypatch.setattr(unscreened, "deadlines", Deadlines(compile_s=1.0))
    lines = ["#define X0 1,", *(f"#define X{i + 1} X{i} X{i}" for i in range(30)), "int x[] = {X30};", HONEST]
    verdict = unscreened.check_source("\n".join(lines))
    assert verdict.stage == "compile" and verdict.outcome in ("timeout", "compile_error")
    assert verdict.seconds["compile"] < 10


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/self/environ", "/proc/1/environ"])
@pytest.mark.parametrize("line", ['#include "{}"', '__asm__(".incbin \\"{}\\"");'])
def test_checker_compiler_cannot_read_host_files(unscreened, path, line):
    verdict = unscreened.check_source(line.format(path) + "\n" + HONEST)
    assert verdict.outcome == "compile_error"
    assert "root:" not in verdict.note and "PATH=" not in verdict.note


def test_several_at_a_time(bare):
    texts = [fenced(HONEST), "x", fenced(SUM.format("")), fenced("y")] * 3
    with ThreadPoolExecutor(4) as pool:
        outcomes = [verdict.outcome for verdict in pool.map(bare.check, texts)]
    assert outcomes == ["ok", "format", "wrong_result", "compile_error"] * 3


def _as_user(namespaces: bool) -> list[Result]:
    with Checker(Reduction(), namespaces=namespaces) as instance:
        return [instance.check_source(source) for source in (HONEST, SUM.format(""))]


@pytest.mark.parametrize("namespaces", [False, True])
def test_as_root_and_as_an_ordinary_user(namespaces):
    checker(namespaces=namespaces).close()
    for run in (as_user, lambda function, *arguments: function(*arguments)):
        assert [verdict.outcome for verdict in run(_as_user, namespaces)] == ["ok", "wrong_result"]


# ---------------------------------------------------------------- whose fault


def test_checker_machine_failure_is_not_a_verdict(monkeypatch):
    with checker(namespaces=False) as instance:
        instance.sandbox.disabled_layers = ["--without", "nothing"]
        with pytest.raises(SandboxError, match="could not be locked in"):
            instance.check_source(HONEST)
        instance.sandbox.disabled_layers = []
        instance.sandbox.program.unlink()
        with pytest.raises(SandboxError, match="could not be started"):
            instance.check_source(HONEST)


class Late(Reduction):
    """Its own program is never in time: it computes, or it waits as if others had the machine."""

    def __init__(self, call: str = "", loading: str = "") -> None:
        super().__init__(100)
        on_loading = f"__attribute__((constructor)) static void linger(void) {{ {loading} }}" if loading else ""
        self.naive = f"#include <unistd.h>\n{on_loading}\n{SUM.format(call)}"


COMPUTES, WAITS = "for (volatile int i = 0;; i++);", "for (;;) sleep(1);"
TIGHT = Deadlines(load_s=0.5, verify_s=0.5)


@pytest.mark.parametrize("where", ["call", "loading"])
def test_a_busy_machine_makes_no_kernel_unsound(bare, where):
    arguments = {"namespaces": False, "with_screen": False, "deadlines": TIGHT}
    words = (
        "too busy to check the kernel's own program .* did not end .* it computed for .* a smaller size than n = 100$"
    )
    for program in (WAITS, COMPUTES):
        with pytest.raises(SandboxError, match=words):
            Checker(Late(**{where: program}), **arguments)


def test_checker_slow_compiler_does_not_blame_kernel(bare, monkeypatch):
    monkeypatch.setattr(compilers, "compile_library", lambda *arguments: CommandResult(None, "", "", "late", True, 1.0))
    with pytest.raises(
        SandboxError, match="too busy to check the kernel's own program of reduction.*the compiler: late"
    ):
        Checker(Reduction(), namespaces=False)
    verdict = bare.check_source(HONEST)
    assert (verdict.outcome, verdict.stage) == ("timeout", "compile")


def test_a_program_cannot_pretend_that_the_machine_failed(unscreened):
    for source in ('#line 1 "bwrap"\n#error x', '#line 1 "sandbox"\n#error x'):
        assert unscreened.check_source(source).outcome == "compile_error"
    for status in (125, 126, 127, 139):
        quits = f"#include <unistd.h>\n__attribute__((constructor)) static void quit(void) {{ _exit({status}); }}\n"
        assert unscreened.check_source(quits + HONEST).outcome == "runtime_error"


def test_techniques_are_permitted_or_forbidden():
    source = """
void dgemm(int m, int n, int k, const double *A, const double *B, double *C) {
    for (int i = 0; i < m * n; i++) C[i] = 0;
    for (int i = 0; i < m; i++)
        for (int l = 0; l < k; l++)
            for (int j = 0; j < n; j++) C[i * n + j] += A[i * k + l] * B[l * n + j];
}
"""
    with Checker(Dgemm(24)) as checker:

        def verdict(source: str, permitted: set[str] | None) -> Result:
            return checker.check_with_library(source, is_source=True, permitted=permitted)[0]

        assert verdict(source, None).techniques == ()  # nobody has asked for them
        assert verdict(source, {"loop_order", "blocking"}).techniques == ("loop_order",)
        result = verdict(source, {"blocking"})
        assert (result.outcome, result.stage) == ("forbidden", "screen")
        assert result.note.startswith("line 4: not permitted here: loops in another order")
        # What does not compile cannot be read either, and its message is the compiler's.
        assert verdict(source.replace(";\n}", "\n}"), {"blocking"}).outcome == "compile_error"
