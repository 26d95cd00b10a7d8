"""The task of the warm-up: each program depends on its index alone, its stage permits it, and it is what is said of it."""

from collections import Counter

import pytest

pytest.importorskip("tree_sitter_c")

from torchtune_ext.measured.kernels import Dgemm
from torchtune_ext.measured.matmul import Programs
from torchtune_ext.measured.matmul.programs import ProgramFamily
from torchtune_ext.measured.matmul.prompts import short_messages
from torchtune_ext.measured.matmul.stages import STAGES

ONE_THREAD = [stage for stage in STAGES if stage != "threads"]
BAD = [
    ({"sizes": 0}, "kernels.dgemm=0: expected a whole number, 1 or more"),
    ({"sizes": []}, r"kernels.dgemm=\[\]: expected a size"),
    ({"stages": []}, r"stages=\[\]: expected a subset of none, loop_order"),
    ({"stages": ["all", "none"]}, "in this order and without repetition"),
    ({"stages": ["none", "none"]}, "in this order and without repetition"),
    ({"stages": ["fast"]}, "expected a subset of none, loop_order"),
    ({"new": 1.5}, "new=1.5: expected a fraction"),
    ({"broken": -1}, "broken=-1: expected a fraction"),
    ({"weights": {"plane": 1}}, "unknown writer plane; expected plain, tiled"),
    ({"weights": {"plain": -1}}, "must not be negative, nor all 0"),
    # Who only copies panels writes nothing that the first stage permits.
    (
        {"weights": dict.fromkeys(["plain", "tiled", "unrolled", "registers", "vectors"], 0)},
        "of 1000 programs none permits none",
    ),
]


def stage_of(problem) -> str:
    return problem.messages[0]["content"].split()[-1]


def program_of(task, problem):
    """What is known of the program of a problem: its outcome and its techniques."""
    return task._draw_problem(int(problem.id.rpartition("/")[2]))[1]


@pytest.mark.parametrize("arguments, message", BAD)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Programs(**arguments)


def test_programs_problem_is_function_of_index():
    first, task, other = (Programs([192, 256], seed=seed) for seed in (3, 3, 4))
    forwards = [first[index] for index in range(40)]
    assert [task[index] for index in reversed(range(40))] == forwards[::-1]
    assert len({problem.id for problem in forwards}) == 40
    assert [other[index].answer for index in range(40)] != [each.answer for each in forwards]
    for index in (-1, len(task)):
        with pytest.raises(IndexError):
            task[index]


@pytest.mark.parametrize("stages", [list(STAGES), ONE_THREAD, ["none", "blocking"]], ids=len)
def test_programs_stage_permits_its_requested_programs(stages):
    task = Programs(stages=stages)
    counts = Counter()
    for problem in (task[index] for index in range(400)):
        program, stage = program_of(task, problem), stage_of(problem)
        assert task.solution(problem) == program.answer
        assert program.techniques <= STAGES[stage] and stage in stages
        assert "threads" in stages or "#pragma omp" not in problem.answer
        counts[stage] += 1
    # 400 draws of 1 / len(stages): five deviations of at most 10.
    assert all(abs(counts[stage] - 400 / len(stages)) < 50 for stage in stages)


@pytest.mark.parametrize("new", [0.0, 0.5, 1.0])
def test_programs_share_new_to_stage_matches_setting(new):
    task = Programs(stages=["blocking", "all"], new=new)
    problems = [problem for problem in (task[index] for index in range(600)) if stage_of(problem) == "all"]
    share = sum(not program_of(task, each).techniques <= STAGES["blocking"] for each in problems) / len(problems)
    # The others are any of the family without OpenMP, and some of these are new as well.
    drawn = [
        program
        for program in map(ProgramFamily(seed=1).__getitem__, range(2000))
        if "#pragma omp" not in program.source
    ]
    natural = sum(not program.techniques <= STAGES["blocking"] for program in drawn) / len(drawn)
    # Five deviations of a share among 240 or more: 5 * sqrt(1/4 / 240) = 0.16.
    assert len(problems) >= 240 and abs(share - (new + (1 - new) * natural)) < 0.16


def test_programs_sizes_and_prompt_match_kernel():
    task = Programs([192, 256])
    questions = {task[index].messages[0]["content"] for index in range(300)}
    assert questions == {short_messages(Dgemm(size), stage)[0]["content"] for size in (192, 256) for stage in STAGES}


def test_weights_choose_the_writers():
    only = dict.fromkeys(["tiled", "unrolled", "registers", "vectors", "packed"], 0)
    family = ProgramFamily(broken=0.0, weights=only)
    assert all(
        family[index].techniques <= {"loop_order", "threads", "vectorization", "blocking"} for index in range(50)
    )
    assert all(ProgramFamily()[index] == ProgramFamily(weights={"plain": 4})[index] for index in range(50))


def test_programs_grade_raises_not_implemented():
    task = Programs()
    with pytest.raises(NotImplementedError, match="torchtune_ext.measured.matmul.Matmul"):
        task.grade(task[0], task.solution(task[0]))
