"""Machines that cannot lock programs in are refused, and say what they lack."""

import pytest

from helpers.as_user import in_a_fork
from helpers.without_syscalls import forget_landlock
from torchtune_ext.cli import doctor
from torchtune_ext.measured.check import Checker
from torchtune_ext.measured.kernels import Reduction
from torchtune_ext.measured.sandbox import SandboxError


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
def test_sandbox_unsupported_kernel_is_refused(and_seccomp):
    words = in_a_fork(refused, and_seccomp)
    assert "no landlock: a program can read and write every file that its user can" in words
    assert ("no seccomp: " in words) == and_seccomp
    assert "use Linux 5.13 or later" in words


def lines_of_the_doctor() -> str:
    forget_landlock()
    return doctor.format_table(list(doctor.check_sandbox()))


def test_doctor_names_missing_sandbox_features():
    text = in_a_fork(lines_of_the_doctor)
    assert "missing, so no program is measured" in text and "use Linux 5.13 or later" in text
