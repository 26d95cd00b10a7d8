"""The family of programs: deterministic, short, and each is what it says: by the reader here, by the compiler in `long`."""

import re
import shutil
from collections import Counter
from statistics import median

import pytest

pytest.importorskip("tree_sitter_c")

from helpers.labelled_programs import preprocessed, techniques
from torchtune_ext.measured.check import OUTCOMES, Checker, extract_code
from torchtune_ext.measured.kernels import Dgemm
from torchtune_ext.measured.matmul.programs import FAULTS, ProgramFamily, apply_fault, is_applicable
from torchtune_ext.measured.sandbox import SandboxError
from torchtune_ext.measured.techniques import TECHNIQUES

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


def distinct(count: int, broken: float = 0.0):
    """The first programs of a family that differ."""
    family, programs = ProgramFamily(broken=broken), {}
    for index in range(20 * count):
        program = family[index]
        programs.setdefault(program.answer, program)
        if len(programs) == count:
            break
    return list(programs.values())


@pytest.fixture(scope="module")
def checker():
    try:
        instance = Checker(Dgemm(96))
    except (ValueError, SandboxError) as error:
        pytest.skip(str(error))
    with instance:
        yield instance


def require(checker: Checker, program) -> None:
    verdict = checker.check(program.answer)
    assert verdict.outcome == program.outcome, f"{program.outcome}: {verdict.note}\n{program.source}"


def test_family_program_is_function_of_index():
    forwards = [ProgramFamily(3)[index] for index in range(60)]
    family = ProgramFamily(3)
    assert [family[index] for index in reversed(range(60))] == forwards[::-1]
    assert [ProgramFamily(4)[index] for index in range(60)] != forwards


def test_bad_arguments():
    with pytest.raises(ValueError, match="broken=1.5"):
        ProgramFamily(broken=1.5)


def test_the_share_of_broken_programs():
    outcomes = Counter(ProgramFamily(broken=0.4)[index].outcome for index in range(1000))
    # 1000 coins of 0.4 lie within five deviations of 15.5 of 400 but once in two million draws, and these are always the same.
    assert abs(1000 - outcomes["ok"] - 400) < 78
    assert set(outcomes) == set(OUTCOMES) - {"timeout"}
    assert {ProgramFamily(broken=0.0)[index].outcome for index in range(100)} == {"ok"}


def test_family_program_is_extracted_from_its_answer():
    for program in distinct(60, broken=0.5):
        assert extract_code(program.answer) == (None if program.outcome == "format" else program.source)


def test_dgemm_is_short_and_varied():
    programs = distinct(300)
    assert len(programs) == 300
    lengths = [len(program.source) for program in programs]
    assert max(lengths) <= 640 and median(lengths) <= 340
    assert frozenset().union(*(program.techniques for program in programs)) == set(TECHNIQUES)
    assert len({program.techniques for program in programs}) >= 20


@needs_gcc
def test_technique_reader_finds_all_inserted_techniques():
    for program in distinct(25):
        assert techniques(preprocessed(program.source), Dgemm()) == program.techniques, program.source


def test_family_sample_programs_have_declared_outcomes(checker):
    for program in [*distinct(2), *distinct(3, broken=1.0)]:
        require(checker, program)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.outcome} {fault.description} {fault.pattern[:12]}")
def test_every_fault_fits_and_changes_something(fault):
    hits = [program for program in distinct(60) if is_applicable(fault, program.source)]
    assert hits
    for program in hits:
        broken = apply_fault(fault, program.source)
        assert broken != program.source and not re.search(r"\\\d", broken)


@pytest.mark.long
@needs_gcc
def test_all_techniques_of_many_programs():
    for program in distinct(400):
        assert techniques(preprocessed(program.source), Dgemm()) == program.techniques, program.source


@pytest.mark.long
def test_good_programs_pass_the_checker(checker):
    for program in distinct(150):
        require(checker, program)


@pytest.mark.long
def test_family_broken_programs_have_declared_outcomes(checker):
    for program in distinct(150, broken=1.0):
        require(checker, program)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.outcome} {fault.description} {fault.pattern[:12]}")
def test_injected_fault_has_its_declared_outcome(fault, checker):
    hits = [program for program in distinct(60) if is_applicable(fault, program.source)]
    for program in hits[:: max(1, len(hits) // 6)]:
        verdict = checker.check_source(apply_fault(fault, program.source))
        assert verdict.outcome == fault.outcome, f"{fault.description}: {verdict.note}\n{program.source}"
