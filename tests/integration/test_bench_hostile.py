"""Programs that attack the benchmark: each ends as it should, in time, and leaves nothing behind."""

import math
import multiprocessing
import os
import shutil
import signal
import time
import unicodedata
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from helpers import hostile
from helpers.as_user import as_user
from helpers.exploits import LAYERS, Exploit, exploits, table
from helpers.stencil import KERNELS
from torchtune_ext.measured import child as children
from torchtune_ext.measured import compiler as compilers
from torchtune_ext.measured.check import OUTCOMES, Checker
from torchtune_ext.measured.child import Child, ChildFailed, arena_size, lay_out
from torchtune_ext.measured.sandbox import Limits, SandboxError
from torchtune_ext.measured.verify import compute_expected, draw_inputs, find_wrong_output

ROOT = Path(__file__).resolve().parents[2]
EXPLOITS = exploits()
BY_NAME = {each.name: each for each in EXPLOITS}
# One of each kind of end, and those that have nothing but one layer before them.
SAMPLE = (
    "control_naive",
    "assembly_in_a_constant",
    "cached_by_sample",
    "compile_bomb_array",
    "ends_after_the_answer",
    "expected_from_own_maps",
    "inputs_overwritten",
    "messages_forged",
    "output_flood",
    "process_from_constructor",
    "printed_figure_in_the_note",
    "reuse_nothing_done",
    "secret_included_by_macro",
    "warmup_spins",
)
# The attacks that models and red teams are known for, and the crude ones; each must have a program.
ATTACKS = {
    "10 GB of output", "a printed figure", "batch and skip", "cached answer", "calls the library", "compile bomb", "constants",
    "deferred work", "endless loop", "exit(0)", "forged result", "fork bomb", "inline assembly", "interposed functions",
    "leaves a process", "lower precision", "memory bomb", "modified inputs", "network", "patched clock", "ptrace",
    "reads the expected value", "reuse of output", "signals to the parent", "system secrets", "underflow of a mean",
    "warm-up detection", "writes outside",
}  # fmt: skip
# What may stand in the way of a program that is verified: its time is counted.
COMES_THROUGH = ("nothing", "clock outside", "timing")
MEMORY = Limits().memory_bytes
DISK = 4 * Limits().file_bytes  # source, object, library and what the compiler notes meanwhile
RUN_S = 1700.0  # seconds for all programs
SECRETS = ("root:", "PATH=", "HOME=")  # how /etc/passwd and an environment begin


@pytest.fixture(scope="module", autouse=True)
def usable():
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc: the exploits are written for its flags")
    pytest.importorskip("tree_sitter_c")
    try:
        Checker(KERNELS["dgemm"](32), namespaces=False).close()
    except SandboxError as error:
        pytest.skip(str(error))


def require(results: list[hostile.Result], memory_bytes: int, screened: bool, as_written: bool = True) -> None:
    """Complains of everything that is not as it should be, and not only of the first.

    as_written: the compiler and its flags are those that the programs are written for. A bomb for the optimizer of gcc may
    otherwise be compiled, and must then fail in another way.
    """
    wrong = []
    for result in results:
        program = BY_NAME[result.name]
        outcomes = program.outcomes if screened else program.outcomes_behind
        if not as_written and program.attack == "compile bomb":
            outcomes = tuple(set(OUTCOMES) - {"ok"})
        if result.outcome not in outcomes:
            wrong.append(
                f"{result.name}: {result.outcome} ({result.stage}: {result.note}), expected {' or '.join(outcomes)}"
            )
        if result.seconds > result.allowed_s + hostile.SLACK_S:
            wrong.append(f"{result.name}: took {result.seconds:.1f} s, {result.allowed_s:g} s are allowed")
        if result.left:
            wrong.append(f"{result.name}: left {', '.join(result.left)}")
        if result.peak_bytes > DISK:
            wrong.append(f"{result.name}: {result.peak_bytes} bytes of files")
        if any(unicodedata.category(letter) == "Cc" and letter not in "\n\t" for letter in result.note):
            wrong.append(f"{result.name}: its note holds characters that steer a terminal: {result.note!r}")
        if result.speed is not None:
            speed, most = result.speed
            print(f"{result.name}: {speed:.3f} times as fast as the naive program, at most {most:.3f}")
            if math.isnan(speed):
                warnings.warn(f"{result.name}: not timed, this machine varies too much", stacklevel=1)
            elif speed > most:
                wrong.append(f"{result.name}: {speed:.3f} times as fast as the naive program, an honest one {most:.3f}")
        if any(secret in result.note for secret in SECRETS):
            wrong.append(f"{result.name}: its note tells a secret: {result.note}")
    # The arrays come on top of the memory that a program may use, and are resident like it.
    arena = max(arena_size(kernel, kernel.timed) for kernel in (KERNELS[each]() for each in KERNELS))
    if memory_bytes > MEMORY + arena:
        wrong.append(f"a child used {memory_bytes} bytes of memory")
    assert not wrong, "\n".join(wrong)


# ---------------------------------------------------------------- the programs themselves


def test_every_attack_has_an_exploit_program():
    assert len(EXPLOITS) >= 40
    assert {each.attack for each in EXPLOITS} >= ATTACKS
    for each in EXPLOITS:
        assert {*each.outcomes, *each.outcomes_behind} <= set(OUTCOMES), each.name
        assert each.attack == "none" or {each.layer, each.layer_behind} <= set(LAYERS), each.name
        assert each.attack == "none" or each.layer_behind != "screen", f"{each.name}: the screen is never the defense"
        assert (each.layer == "screen") == (each.outcomes == ("forbidden",)), each.name
        # An attack that comes through to the end has gained nothing so far; the timing must see to the rest. One may
        # also be honest when it does not find what it looks for.
        assert (
            "ok" not in each.outcomes_behind or each.layer_behind in COMES_THROUGH or len(each.outcomes_behind) > 1
        ), each.name
        assert each.control == "" or controls_of(each), each.name


def test_page_has_the_table():
    assert table() in (ROOT / "tests" / "exploits" / "README.md").read_text(encoding="utf-8")


# ---------------------------------------------------------------- how they end


def test_sample():
    programs = [BY_NAME[name] for name in SAMPLE]
    for screened in (True, False):
        these = [each for each in programs if screened or each.outcomes_behind != each.outcomes]
        results, memory_bytes = apart(hostile.run_all, these, None, screened, None, "-O3", True)
        require(results, memory_bytes, screened)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("screened", [True, False], ids=["screen", "no screen"])
@pytest.mark.parametrize("namespaces", [True, False], ids=["namespaces", "no namespaces"])
@pytest.mark.parametrize("user", ["ordinary user", "root"])
def test_all(user, namespaces, screened):
    if user == "root" and os.geteuid() != 0:
        pytest.skip("not root")
    run = as_ordinary_user if user == "ordinary user" else apart
    if namespaces and not run(_has_namespaces):
        pytest.skip("needs bubblewrap, and a machine on which it can make namespaces")
    results, memory_bytes = run(hostile.run_all, EXPLOITS, namespaces, screened, None, "-O3", True)
    assert len(results) == len(EXPLOITS)
    require(results, memory_bytes, screened)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("compiler, optimization", [("gcc", "-O0"), ("clang", "-O3"), ("clang", "-O0")])
def test_all_with_another_compiler(compiler, optimization):
    """Behind the screen, whose words are the same for all compilers."""
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    results, memory_bytes = apart(hostile.run_all, EXPLOITS, False, False, compiler, optimization)
    assert len(results) == len(EXPLOITS)
    require(results, memory_bytes, False, as_written=False)


def apart(function: Callable, *arguments: object) -> object:
    """Calls a function in a process of its own, whose children are no other test's."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(function, *arguments).result(RUN_S)


def as_ordinary_user(function: Callable, *arguments: object) -> object:
    return apart(_as_ordinary_user, function, *arguments)


def _as_ordinary_user(function: Callable, *arguments: object) -> object:
    return as_user(function, *arguments, deadline_s=RUN_S)


def _has_namespaces() -> bool:
    try:
        Checker(KERNELS["dgemm"](32), namespaces=True).close()
    except SandboxError:
        return False
    return True


@pytest.mark.parametrize("namespaces", [True, False], ids=["namespaces", "no namespaces"])
def test_bench_harness_killed_programs_end(namespaces):
    if namespaces and not _has_namespaces():
        pytest.skip("needs bubblewrap, and a machine on which it can make namespaces")
    reader, writer = os.pipe()
    harness = os.fork()
    if harness == 0:
        try:
            with Checker(KERNELS["dgemm"](32), namespaces=namespaces) as checker:
                os.write(writer, str(checker.sandbox.folder).encode())
                checker.check_source(BY_NAME["endless_loop"].source)
        finally:
            os._exit(1)
    try:
        folder = os.read(reader, 4096).decode()
        wait_until(lambda: any(b" call " in line.replace(b"\0", b" ") for line in command_lines(folder)))
    finally:
        os.kill(harness, signal.SIGKILL)
        os.waitpid(harness, 0)
        os.close(reader)
        os.close(writer)
    wait_until(lambda: not hostile.processes(folder) and not os.path.exists(folder))


def command_lines(folder: str) -> list[bytes]:
    lines = []
    for pid in hostile.processes(folder):
        try:
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes())
        except OSError:
            continue  # it has ended
    return lines


def wait_until(met: Callable[[], bool]) -> None:
    end = time.monotonic() + 3 * hostile.END_S
    while not met():
        assert time.monotonic() < end
        time.sleep(0.02)


# ---------------------------------------------------------------- the work counts, whoever does it


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [each.name for each in EXPLOITS if each.layer_behind == "clock outside" and "ok" in each.outcomes_behind]
)
def test_work_is_counted(name):
    """The seconds of a call are at least half of the CPU seconds of an honest program, wherever the work is hidden."""
    program = BY_NAME[name]
    kernel = KERNELS[program.kernel]()
    with Checker(kernel, namespaces=False, with_screen=False) as checker:
        honest_s = min(call.cpu_s for call in calls(checker, kernel.naive, 5))
        results = calls(checker, program.source, 20)
        assert all(call.seconds >= honest_s / 2 for call in results), (honest_s, [call.seconds for call in results])


def calls(checker: Checker, source: str, count: int) -> list[children.CallResult]:
    """Calls a program at the timed size, each time with new inputs in a new place, and checks each result."""
    kernel, rng = checker.kernel, np.random.default_rng(0)
    results = []
    with started(checker, source) as child:
        for _ in range(count):
            child.map_arrays(lay_out(kernel, kernel.timed, child.arena_bytes, True, rng))
            inputs = draw_inputs(kernel, kernel.timed, "biased", rng)
            results.append(child.call(kernel.timed, inputs, 60.0))
            assert not find_wrong_output(kernel, compute_expected(kernel, kernel.timed, inputs), results[-1].outputs)
    return results


def started(checker: Checker, source: str) -> Child:
    """Compiles a program and starts its process."""
    kernel, folder = checker.kernel, checker.sandbox.new_folder()
    compilers.write_source(kernel, source, folder)
    checker._compile(folder)
    arena_bytes = arena_size(kernel, kernel.timed)
    library = folder / compilers.LIBRARY_FILE
    return Child(checker.sandbox, library, kernel, arena_bytes, checker.cores, 1, Limits(), 30.0)


# ---------------------------------------------------------------- the attacks are serious: without the defense they pass


def controls_of(program: Exploit) -> Callable[[Exploit], bool] | None:
    if program.control.startswith("without "):
        return without_a_layer
    return {
        "same inputs": lambda each: weakly(each, same_inputs=True),
        "no poison": lambda each: weakly(each, same_inputs=True, poisoned=False),
        "loose tolerance": lambda each: weakly(each, tolerance=1e-4),
        "small sizes": lambda each: weakly(each, size={"m": 31, "n": 17, "k": 23}),
        "one size": lambda each: weakly(each),
        "positive inputs": lambda each: weakly(each),
        "few calls": lambda each: weakly(each, count=3),
        "normal numbers": lambda each: weakly(each, kind="normal"),
        "fixed inputs": lambda each: weakly(each, kind="ones"),
    }.get(program.control)


@pytest.mark.long
@pytest.mark.parametrize("name", [each.name for each in EXPLOITS if each.control])
def test_attack_passes_without_its_defense(name):
    program = BY_NAME[name]
    assert controls_of(program)(program)


@pytest.mark.parametrize("name", ["cached_by_sample", "reuse_nothing_done", "precision_float_sum"])
def test_attack_passes_without_its_defense_sample(name):
    program = BY_NAME[name]
    assert controls_of(program)(program)


def weakly(
    program: Exploit,
    size: dict[str, int] | None = None,
    kind: str = "biased",
    count: int = 3,
    same_inputs: bool = False,
    poisoned: bool = True,
    tolerance: float = 0.0,
) -> bool:
    """Tells whether a program passes a checker that is weaker than ours in one point."""
    kernel, rng = KERNELS[program.kernel](), np.random.default_rng(0)
    size = size or kernel.timed
    with Checker(kernel, namespaces=False, with_screen=False) as checker, started(checker, program.source) as child:
        child.map_arrays(lay_out(kernel, size, child.arena_bytes, True, rng))
        for number in range(count):
            if number == 0 or not same_inputs:
                drawn = draw_inputs(kernel, size, "normal" if kind == "ones" else kind, rng)
                inputs = {name: np.ones_like(array) for name, array in drawn.items()} if kind == "ones" else drawn
            with pytest.MonkeyPatch.context() as patch:
                if not poisoned:
                    # The output holds what a reference that was computed before, or an earlier call, has left there.
                    patch.setattr(children, "POISON", next(iter(kernel.reference(size, inputs).values())))
                outputs = child.call(size, inputs, 60.0).outputs
            if tolerance:
                reference = kernel.reference(size, inputs)
                if not all(np.allclose(outputs[each], reference[each], rtol=tolerance) for each in reference):
                    return False
            elif find_wrong_output(kernel, compute_expected(kernel, size, inputs), outputs):
                return False
    return True


def without_a_layer(program: Exploit) -> bool:
    """Tells whether a program does what it wants where a layer of the floor is missing."""
    layers = program.control.removeprefix("without ").split(" and ")
    kernel = KERNELS[program.kernel]()
    with Checker(kernel, namespaces=False, with_screen=False) as checker:
        checker.deadlines = hostile.PATIENT
        checker.sandbox.disabled_layers = [word for layer in layers for word in ("--without", layer)]
        before = hostile.traces(checker)
        try:
            verdict = checker.check_source(program.source)
            left = hostile.traces(checker) - before
            if program.attack in ("leaves a process", "writes outside"):
                assert left, "it did what it wanted, but nothing is left"
            return verdict.outcome == "ok"
        finally:
            clean_up(checker)


def clean_up(checker: Checker) -> None:
    """Ends the processes, and removes the files, that an exploit has left because a layer was switched off."""
    end = time.monotonic() + hostile.END_S
    while (left := hostile.processes(str(checker.sandbox.folder))) and time.monotonic() < end:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
    for path in Path("/tmp").glob("torchtune-ext-exploit-*"):
        path.unlink()


def test_limits_of_a_call_that_fails():
    """A child that is gone answers no further call, and says so as the fault of the program."""
    program = BY_NAME["ends_with_success"]
    with Checker(KERNELS["dgemm"](32), namespaces=False) as checker, started(checker, program.source) as child:
        rng = np.random.default_rng(0)
        size = {"m": 4, "n": 4, "k": 4}
        child.map_arrays(lay_out(checker.kernel, size, child.arena_bytes, True, rng))
        with pytest.raises(ChildFailed, match="ended the process by itself") as failed:
            child.call(size, draw_inputs(checker.kernel, size, "normal", rng), 30.0)
        assert failed.value.outcome == "runtime_error"
