"""The task itself: what it refuses, what it asks, and that all it has learned is a function of the groups that it was told of."""

import json
import logging
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("tree_sitter_c")

from helpers.calm_kernels import CalmReduction
from helpers.records import make_sample
from torchtune_ext.grading import Ungraded
from torchtune_ext.measured.machine import machine_fingerprint
from torchtune_ext.measured.matmul import Matmul
from torchtune_ext.measured.matmul.archive import ARCHIVE_FILE, Archive, ArchiveEntry
from torchtune_ext.measured.matmul.rewards import failure_reward
from torchtune_ext.measured.matmul.stages import WINDOW_VISITS
from torchtune_ext.measured.results import Result
from torchtune_ext.measured.techniques import TECHNIQUES
from torchtune_ext.measured.timing import Timing
from torchtune_ext.pipeline.groups import Group, group_from_record, group_to_json, outcomes_for_task
from torchtune_ext.setup.header import problems_text

HERE, ELSEWHERE = machine_fingerprint(), "another machine"
SIZE = {"m": 64, "n": 64, "k": 64}
NAME = "dgemm-64-64-64"
ORDER, BLOCKS = ("loop_order",), ("blocking", "loop_order")


class Faulty:
    def __init__(self, size):
        raise RuntimeError("no such size")


class Sleeper(CalmReduction):
    """Nothing can be compared with its own program."""

    naive = "void reduction(int n, const double *x, double *total) { while (n) { *total = x[--n]; if (n > 3) break; } }"


def program(number):
    return f"void dgemm(int m, int n, int k, const double *A, const double *B, double *C) {{ /* {number} */ }}\n"


def fenced(number):
    return f"```c\n{program(number)}```"


def entry(number, ratio=2.0, techniques=ORDER, machine=HERE, size=SIZE, kernel="dgemm", found=1):
    return ArchiveEntry(machine, kernel, size, techniques, program(number), ratio, 0.02, ratio, found)


def result(outcome="ok", ratio=2.0, techniques=ORDER, spread=0.02, machine=HERE):
    timing = Timing(1e-4, 0.0, 30, 3 * ratio, ratio, spread, ratio / 64, 0.0, True, False)
    return Result("dgemm", outcome, "time", "", timing if outcome == "ok" else None, {}, machine, False, techniques)


def visit(task, *results, index=0, cursor=0):
    """A group of the problem that is asked now, with these results; None: the sample could not be graded. "noisy" is right."""
    problem = task.ask(index, cursor)
    kinds = [one if isinstance(one, str) else "scored" if one else "infra_failed" for one in results]
    return problem, [
        (fenced(place), task.score(problem, one) if kind == "scored" else None, kind)
        for place, (one, kind) in enumerate(zip(results, kinds, strict=True))
    ]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"reward": "fast"}, "task.reward='fast': unknown. Fix: choose one of published, log_speedup, peak_share"),
        ({"prompt": "none"}, "task.prompt='none': unknown. Fix: choose one of long, short"),
        ({"show": 1.5}, "task.show=1.5: expected a fraction of the prompts, from 0 to 1"),
        ({"show": math.nan}, "task.show=nan: expected a fraction"),
        ({"show": "half"}, "task.show='half': expected a fraction"),
        (
            {"show": 0.1, "prompt": "short"},
            "task.show=0.1: short prompts cannot show a program. Fix: set prompt=long, or show=0",
        ),
        ({"stages": ["foo"]}, r"task.stages=\['foo'\]: list some of none, loop_order, .*, or null"),
        ({"stages": []}, r"task.stages=\[\]: list some of none"),
        ({"stages": ["none", "none"]}, r"task.stages=\['none', 'none'\]: list some of .*, each once"),
        ({"stages": "none"}, "task.stages='none': list some of none"),
        ({"stages": 3}, "task.stages=3: list some of none"),
        ({"kernels": {}}, r"task.kernels=\{\}: map each kernel to its sizes, as \{dgemm: "),
        ({"kernels": ["dgemm"]}, r"task.kernels=\['dgemm'\]: map each kernel to its sizes"),
        ({"kernels": {"dgemm": []}}, r"task.kernels.dgemm=\[\]: expected a size"),
        ({"kernels": {"dgemm": 0}}, "task.kernels.dgemm=0: expected a whole number, 1 or more"),
        ({"kernels": {"dgemm": [64, True]}}, "task.kernels.dgemm=True: expected a whole number"),
        ({"kernels": {"dgemm": 64.0}}, "task.kernels.dgemm=64.0: expected a whole number"),
        ({"kernels": {"dgemm": "64"}}, "task.kernels.dgemm='64': expected a whole number"),
        ({"kernels": {"dgemm": None}}, "task.kernels.dgemm=None: expected a whole number"),
        ({"kernels": {"dgemm": 2**31}}, "task.kernels.dgemm=2147483648: Dgemm.timed: .*; expected an int from 1 to"),
        ({"kernels": {"dgemm": [64, 64]}}, "task.kernels: dgemm-64-64-64 is listed twice"),
        (
            {"kernels": {"sort": 64}},
            "task.kernels: unknown kernel 'sort'; use dgemm, gemv, reduction, or the",
        ),
        ({"kernels": {"no.such": 64}}, "task.kernels='no.such': module 'no' not found"),
        (
            {"kernels": {"helpers.calm_kernels.None_": 64}},
            "task.kernels='helpers.calm_kernels.None_': helpers.calm_kernels has no 'None_'",
        ),
        (
            {"kernels": {"math.pi": 64}},
            "task.kernels.math.pi=64: 'float' object is not callable; .* a class that takes a",
        ),
        ({"kernels": {f"{__name__}.Faulty": 64}}, f"task.kernels.{__name__}.Faulty=64: no such size"),
        ({"kernels": {"collections.Counter": 64}}, "task.kernels.collections.Counter=64: .*a class that takes a size"),
        ({"kernels": {f"{__name__}.Sleeper": 64}, "stages": ["none"]}, "naive"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value)[:40],
)
def test_matmul_bad_argument_reports_value_and_fix(settings, message):
    with pytest.raises(ValueError, match=message):
        Matmul(**settings)


def test_header_names_the_optimization_level():
    cfg = SimpleNamespace(prompts_per_step=1, samples_per_prompt=8)
    text = problems_text(cfg, Matmul(bench={"optimization": "-O0"}), None)
    assert text.startswith("Matmul compiled with -O0, 1; 1 prompts per step")


def test_archive_separates_optimization_levels(tmp_path):
    task, machines = Matmul({"dgemm": 64}), [f"{HERE}, -O0", f"{HERE}, -O3"]
    for step, machine in enumerate(machines):
        task.observe(step, [visit(task, result(ratio=4.0 - step, machine=machine))], tmp_path)
    assert [one.machine for one in task.archive] == machines


def test_matmul_problems_cover_kernels_sizes_and_custom_kernels():
    task = Matmul({"dgemm": [64, 96], "helpers.calm_kernels.CalmReduction": 500}, prompt="short")
    assert [task[i].id for i in range(len(task))] == ["dgemm-64-64-64/all", "dgemm-96-96-96/all", "reduction-500/all"]
    assert task[2].messages[-1]["content"] == "reduction 500 all"
    assert isinstance(task.kernel(task[2]), CalmReduction) and task.kernel(task[2]) is task.kernels[2]
    assert task.solution(task[2]) == f"```c\n{CalmReduction.naive}```"
    with pytest.raises(IndexError):
        task[3]


def test_matmul_permitted_techniques_follow_stage():
    task = Matmul({"dgemm": 64}, stages=["none", "blocking"])
    assert task.permitted(task[0]) == frozenset()
    assert Matmul({"dgemm": 64}).permitted(Matmul({"dgemm": 64})[0]) == frozenset(TECHNIQUES)


def test_matmul_incomparable_kernel_has_no_permitted_techniques():
    task = Matmul({f"{__name__}.Sleeper": 64})
    assert task.permitted(task[0]) is None


@pytest.mark.parametrize(("kind", "worth"), [("log_speedup", 1.0), ("peak_share", 1 / 64), ("published", 3.0)])
def test_matmul_score_is_reward_with_measurements(kind, worth):
    task = Matmul({"dgemm": 64}, reward=kind)
    score = task.score(task[0], result(ratio=1.0))
    assert score.reward == pytest.approx(worth) and score.parts["speedup"] == 1.0 and score.parts["outcome_ok"] == 1.0
    assert score.facts == {"machine": HERE, "techniques": "loop_order"}
    wrong = task.score(task[0], result("wrong_result"))
    assert (
        wrong.reward == (-10.0 if kind == "published" else failure_reward("wrong_result"))
        and "speedup" not in wrong.parts
    )


# Programs that are shown -----------------------------------------------------------------------------------------------


def shown(problem):
    """The number of the program that a prompt shows."""
    content = problem.messages[-1]["content"]
    return int(content.split("/* ")[1].split(" */")[0]) if "/* " in content else None


def holding(*entries, machine=HERE, **settings):
    """A task that has found these programs, the last one on a machine."""
    task = Matmul(**{"kernels": {"dgemm": 64}, **settings})
    task.archive, task.machine = Archive(entries), machine
    return task


def test_matmul_shown_program_depends_only_on_cursor():
    entries = [entry(1, 2.0, ORDER), entry(2, 4.0, ORDER), entry(3, 3.0, BLOCKS), entry(4, 1.5, ())]
    task, again = (holding(*entries, show=0.5) for _ in range(2))
    drawn = [shown(task.ask(0, cursor)) for cursor in range(200)]
    # Asked in another order, by another object.
    assert [shown(again.ask(0, cursor)) for cursor in reversed(range(200))] == drawn[::-1]
    assert set(drawn) == {None, 1, 2, 3, 4}
    # 200 draws with probability 1/2: five standard deviations are 35.
    assert abs(sum(number is not None for number in drawn) - 100) <= 35
    assert {task.ask(0, cursor).id for cursor in range(200)} == {f"{NAME}/all", f"{NAME}/all/improve"}
    seeded, silent = holding(*entries, show=0.5, seed=1), holding(*entries)
    assert [shown(seeded.ask(0, cursor)) for cursor in range(200)] != drawn
    assert {shown(silent.ask(0, cursor)) for cursor in range(50)} == {None}


def test_matmul_shown_programs_match_machine_problem_stage():
    other = {"m": 96, "n": 96, "k": 96}
    entries = [
        entry(1, 2.0, ORDER),
        entry(2, 3.0, BLOCKS),
        entry(3, 2.0, (), ELSEWHERE),
        entry(4, 2.0, ORDER, size=other),
    ]
    by_stage = {"none": {None}, "loop_order": {1}, "blocking": {1, 2}}
    for stage, want in by_stage.items():
        task = holding(*entries, kernels={"dgemm": [64, 96]}, stages=[stage], show=1.0)
        assert {shown(task.ask(0, cursor)) for cursor in range(50)} == want
    # Where nothing was measured yet, nothing is shown.
    strange = holding(machine=None, show=1.0)
    assert {shown(strange.ask(0, cursor)) for cursor in range(20)} == {None}


# What is observed ------------------------------------------------------------------------------------------------------


def window(task):
    return task.state_dict()["curriculum"]["problems"].get(NAME, {}).get("window", [])


def test_matmul_visit_counts_graded_samples_of_group(tmp_path):
    task = Matmul({"dgemm": 64}, stages=["none", "all"])
    task.observe(1, [visit(task, result(ratio=4.0), result("wrong_result"), None, None)], tmp_path)
    assert window(task) == [{"correct": 0.5, "speed": 2.0}]
    task.observe(2, [visit(task, result("format"), None)], tmp_path)
    assert window(task)[1:] == [{"correct": 0.0, "speed": None}]
    task.observe(3, [visit(task, None, None)], tmp_path)
    assert len(window(task)) == 2, "nothing is known of a group without a grade"


def test_matmul_noisy_timings_count_as_correct(tmp_path):
    # All that is wrong is graded, and little of what is right: half of the programs are.
    task, busy = Matmul({"dgemm": 64}, stages=["none", "all"]), [result("wrong_result")] * 4 + ["noisy"] * 4
    task.observe(1, [visit(task, *busy)], tmp_path)
    assert window(task) == [{"correct": 0.5, "speed": None}]


def test_matmul_other_stage_groups_only_enter_archive(tmp_path):
    task = Matmul({"dgemm": 64}, stages=["none", "all"])
    late = visit(task, result(ratio=8.0, techniques=()))
    first = [visit(task, result(ratio=2.0), result(ratio=2.0)) for _ in range(WINDOW_VISITS)]
    values = task.observe(1, first, tmp_path)
    assert task.ask(0, 0).id == f"{NAME}/all" and values["stage/moves"] == 1 and values["stage/all"] == 1
    task.observe(2, [late], tmp_path)
    assert window(task) == []
    assert max(one.ratio for one in task.archive) == 8.0
    # Groups of the same stage that reach this step together with those that end it are late as well.
    task = Matmul({"dgemm": 64}, stages=["none", "all"])
    task.observe(1, [visit(task, result()) for _ in range(WINDOW_VISITS + 5)], tmp_path)
    assert task.ask(0, 0).id == f"{NAME}/all" and window(task) == []


def test_matmul_problems_outside_the_run_are_ignored(tmp_path):
    wide, narrow = (Matmul({"dgemm": sizes}, stages=["none", "all"]) for sizes in ([64, 96], 64))
    narrow.observe(1, [visit(wide, result(), index=1)], tmp_path)
    assert len(narrow.archive) == 0 and narrow.state_dict()["curriculum"]["problems"] == {}


def test_matmul_archive_keeps_timed_programs_in_folder(tmp_path, caplog):
    task = Matmul({"dgemm": 64})
    samples = [result(ratio=4.0), result(ratio=1.0), result("wrong_result"), None, result(ratio=64.0, spread=1.2)]
    values = task.observe(5, [visit(task, *samples)], tmp_path)
    kept = task.archive
    assert [(one.source, one.ratio, one.found) for one in kept] == [(program(1), 1.0, 5), (program(0), 4.0, 5)]
    assert (tmp_path / ARCHIVE_FILE).read_text() == task.archive.dumps()
    assert values == {"archive/cells": 2.0, "archive/best_speedup": 4.0}
    # A folder that cannot be written to costs a warning, not the run.
    with caplog.at_level(logging.WARNING):
        task.observe(6, [visit(task, result(ratio=16.0))], tmp_path / ARCHIVE_FILE)
    assert (
        f"cannot write {tmp_path / ARCHIVE_FILE / ARCHIVE_FILE}" in caplog.text and "The run continues" in caplog.text
    )
    assert len(task.archive) == 3


def drawn_groups(task, rng, cursor):
    """Groups as a run stores them."""
    problem = task.ask(rng.randrange(len(task)), cursor)
    samples = []
    for place in range(4):
        kind = rng.choice(["ok", "ok", "ok", "wrong_result", "noisy"])
        used = rng.sample(sorted(TECHNIQUES), rng.randrange(3))
        one = result(kind, 2.0 ** rng.uniform(-1, 5), tuple(sorted(used)), rng.uniform(0.0, 0.3))
        score = None if kind == "noisy" else task.score(problem, one)
        outcome = Ungraded("noisy", "disturbed") if score is None else score
        samples.append(make_sample([1], text=fenced(f"{cursor}.{place}"), outcome=outcome))
    return Group(problem, np.array([1], np.int32), tuple(samples))


SETTINGS = {"kernels": {"dgemm": [64, 96], "gemv": 64}, "stages": ["none", "blocking", "all"], "show": 0.5}


def test_matmul_stored_groups_reproduce_state_after_checkpoint(tmp_path):
    rng, task = random.Random(0), Matmul(**SETTINGS)
    replayed, resumed = Matmul(**SETTINGS), Matmul(**SETTINGS)
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    moves = 0.0
    for step in range(1, 40):
        groups = [drawn_groups(task, rng, 4 * step + place) for place in range(4)]
        stored = [group_from_record(json.loads(group_to_json(group))) for group in groups]
        values = task.observe(step, outcomes_for_task(groups), folders[0])
        assert replayed.observe(step, outcomes_for_task(stored), folders[1]) == values
        if step % 7 == 0:
            state = json.loads(json.dumps(resumed.state_dict()))
            resumed = Matmul(**SETTINGS)
            resumed.load_state_dict(state)
        assert resumed.observe(step, outcomes_for_task(stored), folders[2]) == values
        moves += values["stage/moves"]
        for index, cursor in ((index, 4 * step + index) for index in range(len(task))):
            assert task.ask(index, cursor) == replayed.ask(index, cursor) == resumed.ask(index, cursor)
    assert moves > 0 and len(task.archive) > 20
    assert len({(folder / ARCHIVE_FILE).read_bytes() for folder in folders}) == 1
    assert task.state_dict() == replayed.state_dict() == resumed.state_dict()


def test_a_state_of_other_stages_is_refused():
    state = json.loads(json.dumps(Matmul(stages=["none", "all"]).state_dict()))
    with pytest.raises(ValueError, match=r"stages=\['none', 'blocking'\], .*checkpoint .*'all'"):
        Matmul(stages=["none", "blocking"]).load_state_dict(state)
    with pytest.raises(ValueError, match="task.stages: none, .*checkpoint .*'all'"):
        Matmul().load_state_dict(state)
    with pytest.raises(ValueError, match=r"task.stages: \['none'\], .*checkpoint .* none"):
        Matmul(stages=["none"]).load_state_dict(Matmul().state_dict())
