"""Machines that cannot lock programs in, and what is left when somebody says `sandbox: none`."""

import logging
import os
import socket

import pytest
from as_user import in_a_fork
from locked_in import ATTEMPTS, attempt, build
from without_syscalls import forget_landlock

from torchtune_ext.host import doctor
from torchtune_ext.measured import sandbox as sandboxes
from torchtune_ext.measured.check import Checker
from torchtune_ext.measured.child import ChildFailed
from torchtune_ext.measured.compiler import Compiler
from torchtune_ext.measured.kernels import Dgemm, Reduction
from torchtune_ext.measured.sandbox import Limits, Sandbox, SandboxError

WRONG = "void reduction(int n, const double *x, double *total) { *total = 0; }"
CRASH = "void reduction(int n, const double *x, double *total) { *(volatile int *)8 = 1; }"
HANG = "void reduction(int n, const double *x, double *total) { for (volatile int i = 0;; i++); }"


@pytest.fixture(scope="module", autouse=True)
def usable():
    try:
        Checker(Reduction(1000), namespaces=False).close()
    except (ValueError, SandboxError) as error:
        pytest.skip(str(error))


def refused(and_seccomp: bool) -> str:
    forget_landlock(and_seccomp)
    with pytest.raises(SandboxError) as caught:
        Checker(Reduction(1000))
    return str(caught.value)


@pytest.mark.parametrize("and_seccomp", [False, True])
def test_a_machine_below_the_floor_is_refused(and_seccomp):
    words = in_a_fork(refused, and_seccomp)
    assert "no landlock: a program can read and write every file that its user can" in words
    assert ("no seccomp: " in words) == and_seccomp
    assert words.endswith("say sandbox: none")


def checked(and_seccomp: bool) -> list[str]:
    forget_landlock(and_seccomp)
    with Checker(Reduction(1000), sandbox="none") as checker:
        checker.deadlines = type(checker.deadlines)(verify_s=2.0)
        return [checker.check_source(source).outcome for source in (checker.kernel.naive, WRONG, CRASH, HANG, "int x")]


@pytest.mark.parametrize("and_seccomp", [False, True])
def test_without_a_sandbox_programs_are_checked_on_such_a_machine(and_seccomp):
    assert in_a_fork(checked, and_seccomp) == ["ok", "wrong_result", "runtime_error", "timeout", "compile_error"]


def with_namespaces() -> list[str]:
    forget_landlock()
    with Checker(Reduction(1000), sandbox="none", namespaces=True) as checker:
        assert checker.sandbox.namespaces
        return [checker.check_source(checker.kernel.naive).outcome]


def test_namespaces_can_still_be_asked_for():
    try:
        Checker(Reduction(1000), namespaces=True).close()
    except SandboxError as error:
        pytest.skip(str(error))
    assert in_a_fork(with_namespaces) == ["ok"]


def lines_of_the_doctor() -> str:
    forget_landlock()
    return doctor.table(list(doctor.check_sandbox()))


def test_the_doctor_names_the_way_out():
    text = in_a_fork(lines_of_the_doctor)
    assert "missing, so that no program is measured" in text and "say sandbox: none" in text


@pytest.fixture
def none():
    with Sandbox(Compiler.find().path, floor=False) as made:
        yield made


def test_limits_and_a_clean_environment_are_left(none, monkeypatch):
    assert not none.namespaces
    monkeypatch.setenv("TORCHTUNE_EXT_TEST_SECRET", "1")
    library = build(Compiler.find().path, ATTEMPTS, none.new_folder() / "attempts.so", "-pthread")
    assert attempt(none, library, "knows_secret") == 0
    assert attempt(none, library, "open_files") == 6
    assert attempt(none, library, "much_memory") != 0
    with pytest.raises(ChildFailed, match="SIGXCPU"):
        attempt(none, library, "endless", limits=Limits(cpu_s=1))
    # The rest is not: it is what the warning says.
    assert attempt(none, library, "read_secret") == 0
    assert attempt(none, library, "call_fork") == 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert attempt(none, library, "connect_tcp", server.getsockname()[1]) == 0


def test_programs_of_root_are_still_of_another_user(none):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    library = build(Compiler.find().path, ATTEMPTS, none.new_folder() / "attempts.so", "-pthread")
    assert library.parent.stat().st_uid in sandboxes.PASSING_USERS
    assert attempt(none, library, "signal_parent", os.getpid()) != 0


def test_the_warning_comes_once(caplog):
    sandboxes._warn_of_no_sandbox.cache_clear()
    with caplog.at_level(logging.WARNING):
        for kernel in (Reduction(1000), Dgemm(16)):
            Checker(kernel, sandbox="none", screened=False).close()
    warnings = [record.getMessage() for record in caplog.records if "sandbox: none" in record.getMessage()]
    assert len(warnings) == 1 and "people whom you trust" in warnings[0]


def test_nothing_is_left(none):
    none.close()
    assert not none.folder.exists()
