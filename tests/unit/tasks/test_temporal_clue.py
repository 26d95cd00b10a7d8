"""Temporal Clue: generated puzzles have one set of answers and no clue too many; files; sizes; the command."""

import argparse
import json
import os
import pickle
import random
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool

import pytest

from helpers.clue_reader import DATA, Translator, all_nights, check_by_trying, holds, needs_public, read
from torchtune_ext.cli.cli import main
from torchtune_ext.tasks.temporal_clue import TemporalClue, cli
from torchtune_ext.tasks.temporal_clue.clues import HasMotive, Murder, Place, draw_clues
from torchtune_ext.tasks.temporal_clue.files import generate_puzzles, read_puzzles, write_jsonl
from torchtune_ext.tasks.temporal_clue.puzzle import Puzzle, all_facts, make_puzzle, select_minimal
from torchtune_ext.tasks.temporal_clue.scenario import draw_scenario
from torchtune_ext.tasks.temporal_clue.size import NAMED_SIZES, Size, parse_size
from torchtune_ext.tasks.temporal_clue.solver import Solver
from torchtune_ext.tasks.temporal_clue.task import right_answers

try:
    import ortools
except ImportError:
    ortools = None
needs_ortools = pytest.mark.skipif(ortools is None, reason="needs OR-Tools: it makes puzzles")


# ---- the puzzles


@needs_ortools
@pytest.mark.parametrize(
    "size, count",
    [
        ("small", 60),
        ("{suspects: 2, weapons: 2, rooms: [2, 3], clues: [direct]}", 30),
        ("{suspects: 3, weapons: [2, 3], rooms: [3, 4], motives: [0, 3], bonus: 2}", 15),
        ("2", 30),
        ("{suspects: 2, weapons: 2, rooms: 2, times: 2, motives: 2, whole_world: true, bonus: 1}", 15),
        ("{suspects: 3, weapons: 2, rooms: 2, times: 2, motives: 2, bonus: 1}", 4),
        ("{suspects: 2, weapons: 2, rooms: 2, times: 3}", 2),
    ],
)
def test_clue_puzzles_have_unique_answers_and_minimal_clues(size, count):
    size = parse_size(size)
    for index in range(count):
        puzzle = make_puzzle(11, index, size)
        r = read(puzzle.prompt)
        assert len(r.clues) == puzzle.num_clues
        translate = Translator(r)
        stated = [translate.clue(clue) for clue in r.clues]
        questions = [translate.question(words, puzzle.solution[letter])[0] for letter, words in r.questions.items()]
        assert not set(stated) & set(questions)  # no question which a clue answers word for word
        nights = check_by_trying(puzzle.prompt, puzzle.solution, minimal=True, whole=size.whole_world)
        assert nights > 4


@needs_ortools
def test_clue_big_puzzles_are_solvable_with_minimal_clues():
    """The same for sizes beyond trying: a solver that is given the text of the puzzle alone."""
    for index in range(3):
        puzzle = make_puzzle(5, index, Size(6, 5, 8, 4, 4, bonus=3))
        r = read(puzzle.prompt)
        translate = Translator(r)
        clues = [translate.clue(clue) for clue in r.clues]
        facts = [translate.question(question, puzzle.solution[letter])[0] for letter, question in r.questions.items()]
        solver = Solver(translate.scenario)
        goal = solver.difference_literal(facts)
        assert solver.find_world(clues, goal) is None
        for drop in range(len(clues)):
            world = solver.find_world(clues[:drop] + clues[drop + 1 :], goal)
            assert world is not None
            assert not clues[drop].holds(world) and not all(fact.holds(world) for fact in facts)


@needs_ortools
def test_clue_meaning_agrees_between_reader_record_and_solver():
    """In every possible night (the solver: in some of them), for every kind of clue."""
    kinds = set()
    for index in range(25):
        r = read(make_puzzle(8, index, Size((2, 3), 2, 2, 2, (0, 3), whole_world=True)).prompt)
        translate = Translator(r)
        clues = {clue: translate.clue(clue) for clue in r.clues if clue[0] not in kinds or clue[0] in ("or", "iff")}
        solver = Solver(translate.scenario)
        anything = solver.model.new_bool_var("")
        for number, night in enumerate(all_nights(r)):
            world = translate.world(night)
            truth = {clue: holds(r, night, clue) for clue in clues}
            assert truth == {clue: record.holds(world) for clue, record in clues.items()}
            if number % 400 == 0:
                facts = [Place(piece, t, room) for piece, way in enumerate(world.places) for t, room in enumerate(way)]
                facts += [HasMotive(suspect, motive) for suspect, motive in enumerate(world.motives)]
                facts += [Murder(fact, getattr(world, fact)) for fact in ("murderer", "weapon", "room", "time")]
                assert solver.find_world(facts, anything) == world
                for clue, record in clues.items():
                    assert (solver.find_world([*facts, record], anything) is not None) == truth[clue], clue
        kinds |= {clue[0] for clue in clues}
    assert {"place", "or", "iff", "same room", "together", "beside", "moved", "carried", "motive"} <= kinds


def drop_redundant(solver: Solver, clues: list, facts: list) -> list:
    """The definition of a minimal set: a clue is dropped if the others still determine the facts."""
    goal = solver.difference_literal(facts)
    for clue in list(clues):
        others = [other for other in clues if other is not clue]
        if solver.find_world(others, goal) is None:
            clues = others
    return clues


@needs_ortools
def test_clue_both_reduction_methods_keep_same_clues():
    for seed in range(12):
        rng = random.Random(seed)
        size = Size((2, 3), (2, 3), (2, 4), (1, 3), (0, 3))
        scenario = draw_scenario(rng, size.draw(rng))
        clues, facts = draw_clues(rng, scenario, size.clues), all_facts(scenario)
        assert all(clue.holds(scenario.truth) for clue in [*clues, *facts])
        few, worlds = select_minimal(Solver(scenario), clues, facts)
        assert few == drop_redundant(Solver(scenario), clues, facts)
        assert len(few) < len(clues)
        assert select_minimal(Solver(scenario), clues, facts, worlds) == (few, [])
        answers = facts[:3]  # as in a puzzle whose clues determine only the answers, from known worlds
        fewer, _ = select_minimal(Solver(scenario), few, answers, worlds)
        assert fewer == drop_redundant(Solver(scenario), few, answers)


@needs_ortools
def test_clue_kinds_all_appear_and_excluded_kind_never():
    size = Size(4, 3, 5, 4, 3)
    kinds = {clue[0] for index in range(12) for clue in read(make_puzzle(1, index, size).prompt).clues}
    assert {"place", "or", "iff", "same room", "together", "beside", "moved", "carried", "motive"} <= kinds
    plain = Size(4, 3, 5, 4, 3, clues=("direct", "beside"))
    kinds = {clue[0] for index in range(12) for clue in read(make_puzzle(1, index, plain).prompt).clues}
    allowed = {"place", "beside", "motive", "murdered by", "murdered with", "murdered in", "murdered at"}
    assert "beside" in kinds and kinds <= allowed


@needs_ortools
def test_clue_puzzle_counts_match_requested_size():
    size = Size((2, 4), 3, (5, 6), (1, 3), (0, 4), bonus=(0, 2))
    counts = set()
    for index in range(40):
        r = read(make_puzzle(2, index, size).prompt)
        assert 2 <= len(r.suspects) <= 4 and len(r.weapons) == 3 and 5 <= len(r.rooms) <= 6 and len(r.times) <= 3
        assert len(r.questions) - r.main <= 2 and 1 <= r.main <= 5
        assert sum(r.motives.values()) in (0, len(r.suspects))
        counts |= {("suspects", len(r.suspects)), ("rooms", len(r.rooms)), ("times", len(r.times))}
    assert len(counts) == 3 + 2 + 3


@needs_ortools
def test_clue_puzzle_is_pure_function_of_seed_index():
    """The same in other processes, whatever PYTHONHASHSEED is, and whichever puzzles were made before."""
    code = (
        "from torchtune_ext.tasks.temporal_clue.files import *; from torchtune_ext.tasks.temporal_clue.size import *\n"
        "import hashlib; size = Size((2, 4), (2, 3), (2, 5), (1, 4), (0, 4), bonus=(0, 3))\n"
        "print(hashlib.sha256(repr(list(generate_puzzles(3, 12, size))).encode()).hexdigest())"
    )
    root = os.path.join(os.path.dirname(__file__), "..", "..", "..")
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root},
            capture_output=True,
            check=True,
            text=True,
            timeout=120,
        ).stdout
        for seed in ("1", "4242")
    }
    assert len(digests) == 1
    size = Size((2, 4), (2, 3), (2, 5), (1, 4), (0, 4), bonus=(0, 3))
    one, all_of_them = make_puzzle(3, 7, size), list(generate_puzzles(3, 9, size))
    assert one == all_of_them[7]
    assert len({p.prompt for p in all_of_them}) == 9
    assert make_puzzle(4, 7, size) != one


@needs_ortools
def test_clue_two_processes_equal_one():
    size = parse_size("small")
    assert list(generate_puzzles(0, 30, size, workers=2, first=5)) == [
        make_puzzle(0, index, size) for index in range(5, 35)
    ]


# ---- the task


@needs_ortools
def test_task_of_generated_puzzles():
    task = TemporalClue(seed=7, count=20, size={"suspects": [2, 3], "weapons": 2, "rooms": [2, 3], "bonus": 1})
    assert len(task) == 20
    for index in range(20):
        problem = task[index]
        assert problem.id == f"clue-7-{index:06d}"
        assert [m["role"] for m in problem.messages] == ["user"]
        assert task.grade(problem, task.solution(problem)).reward == 1.0
        assert task[index] == problem
    with pytest.raises(IndexError):
        task[20]
    held_out = TemporalClue(seed=7, count=5, size=task.size, first=10)
    assert held_out[0] == task[10]
    assert len(TemporalClue()) > 10**9


@needs_ortools
def test_clue_task_is_picklable_and_accepts_yaml():
    omegaconf = pytest.importorskip("omegaconf")
    node = omegaconf.OmegaConf.create(
        "{suspects: [2, 3], weapons: 2, rooms: 2, clues: [direct, or], whole_world: true}"
    )
    task = TemporalClue(seed=1, size=node)
    assert task.size == Size((2, 3), 2, 2, clues=("direct", "or"), whole_world=True)
    assert pickle.loads(pickle.dumps(task))[3] == task[3]


def test_clue_without_ortools_reports_install_command():
    code = (
        "import sys; sys.modules['ortools'] = None\n"
        "from torchtune_ext.tasks.temporal_clue import TemporalClue\n"
        "from torchtune_ext.tasks.task import Problem\n"
        "task = TemporalClue()\n"
        "assert task.grade(Problem('p', (), {'A': 'Rope'}), 'A. rope').reward == 1.0\n"
        "assert 'torch' not in sys.modules\n"
        "try: task[0]\n"
        "except RuntimeError as error: print(error)"
    )
    env = {**os.environ, "PYTHONPATH": os.path.join(os.path.dirname(__file__), "..", "..", "..")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert "pip install 'torchtune-ext[clue]'" in done.stdout, done.stderr


# ---- files

SAMPLE = [Puzzle(2, f"Who? • {n}\n\nBest of luck, detective.", {"A": "Mrs. White", "B": f"Room {n}"}) for n in range(6)]


def test_round_trip_through_a_file(tmp_path):
    path = tmp_path / "deep" / "puzzles.jsonl"
    assert write_jsonl(path, iter(SAMPLE)) == 6
    assert read_puzzles(path) == SAMPLE
    assert read_puzzles(path, first=2, count=3) == SAMPLE[2:5]
    as_list = tmp_path / "puzzles.json"  # the public files are one list
    as_list.write_text(json.dumps([json.loads(line) for line in path.read_text().splitlines()]))
    assert read_puzzles(as_list, first=2, count=3) == SAMPLE[2:5]
    task = TemporalClue(path=str(path), first=4)
    assert len(task) == 2 and task[1].answer == SAMPLE[5].solution and task[1].id == "clue-file-000005"
    with pytest.raises(ValueError, match=r"puzzles \(6\).*count=7"):
        TemporalClue(path=str(path), count=7)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "puzzles.jsonl"
    write_jsonl(path, SAMPLE[:2])

    def broken():
        yield SAMPLE[3]
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        write_jsonl(path, broken())
    assert read_puzzles(path) == SAMPLE[:2]
    assert os.listdir(tmp_path) == ["puzzles.jsonl"]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", r"bad.jsonl:2: not JSON"),
        ("[1]", r"bad.jsonl:2: a list, not an object"),
        ('{"prompt": "x", "solution": {"A": "b"}}', r"bad.jsonl:2: field 'num_clues' is missing; add a number"),
        (
            '{"num_clues": "3", "prompt": "x", "solution": {"A": "b"}}',
            r"bad.jsonl:2: field 'num_clues' is '3'; write a number",
        ),
        ('{"num_clues": 3, "prompt": "", "solution": {"A": "b"}}', r"bad.jsonl:2: field 'prompt' is ''"),
        ('{"num_clues": 3, "prompt": "x", "solution": {}}', r"bad.jsonl:2: field 'solution' is \{\}; write an object"),
        ('{"num_clues": 3, "prompt": "x", "solution": {"A": 5}}', r"bad.jsonl:2: field 'solution'"),
        ('{"num_clues": 3, "prompt": "x", "solution": {"first": "b"}}', r"bad.jsonl:2: field 'solution'"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    good = json.dumps({"num_clues": 1, "prompt": "x", "solution": {"A": "b"}})
    path.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(ValueError, match=message) as caught:
        TemporalClue(path=str(path))
    assert str(path) in str(caught.value)


def test_a_malformed_list_is_named(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text('[{"num_clues": 1, "prompt": "x", "solution": {"A": "b"}}, {"num_clues": 1}]')
    with pytest.raises(ValueError, match="bad.json, puzzle 2: field 'prompt' is missing"):
        read_puzzles(path)
    path.write_text("[\n{]")
    with pytest.raises(ValueError, match="bad.json: not a JSON list .*line 2"):
        read_puzzles(path)
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match="bad.json': not UTF-8 text"):
        read_puzzles(path)


@needs_public
@needs_ortools
def test_clue_public_and_own_files_share_fields(tmp_path):
    write_jsonl(tmp_path / "ours.jsonl", [make_puzzle(0, 0, NAMED_SIZES["public"])])
    ours = json.loads((tmp_path / "ours.jsonl").read_text())
    public = json.loads((DATA / "val.json").read_text())[0]
    assert list(ours) == list(public)
    assert all(right_answers(ours["solution"], f"{k}. {v}")[k] for k, v in ours["solution"].items())


# ---- sizes and the command


def test_sizes_in_their_spellings():
    assert parse_size("3") == parse_size(3) == NAMED_SIZES["3"]
    assert parse_size("{suspects: [2, 3], rooms: 4, clues: [direct, or], whole_world: true}") == Size(
        (2, 3), 2, 4, clues=("direct", "or"), whole_world=True
    )
    assert parse_size({"like": "2", "rooms": [3, 4]}) == Size(2, 2, (3, 4), 2, 2, bonus=2)
    assert parse_size(Size()) == Size()


@pytest.mark.parametrize(
    "value, message",
    [
        ("{", r"size='{': write a name"),
        ("huge", r"size='huge': write a name \(2, 3, small, public\)"),
        ("{suspects: 11}", r"suspects=11: expected a number from 2 to 10"),
        ("{suspects: x}", r"suspects='x': expected a number"),
        ("{rooms: [5, 3]}", r"rooms=\(5, 3\)"),
        ({"rooms": 1}, r"rooms=1: expected a number from 2 to 17"),
        ({"rooms": [2, 3, 4]}, r"rooms=\(2, 3, 4\)"),
        ({"rooms": 2.5}, r"rooms=2.5"),
        ({"rooms": True}, r"rooms=True"),
        ({"doors": 1}, r"unknown key 'doors'; the keys are suspects"),
        ({"clues": ["or"]}, r"always include 'direct'"),
        ({"clues": ["direct", "xor"]}, r"choose from direct, or, iff"),
        ({"clues": ["direct", {}]}, r"choose from direct, or, iff"),
        ({"clues": None}, r"clues=None"),
        ({"whole_world": "yes"}, r"whole_world='yes'"),
        ({"like": "4"}, r"like='4'"),
        ({"players": 7}, r"players=7: expected a number from 1 to 6"),
        (None, r"size=None"),
    ],
)
def test_a_bad_size_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        parse_size(value)


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.main(parser.parse_args(words))


@needs_ortools
def test_command_writes_a_file(tmp_path, capsys):
    out = tmp_path / "p.jsonl"
    assert command("--seed", "3", "--count", "7", "--size", "small", "--workers", "1", "--out", str(out)) == 0
    assert read_puzzles(out) == list(generate_puzzles(3, 7, parse_size("small")))
    shown = capsys.readouterr()
    assert "7/7" in shown.err and f"7 puzzles -> {out}" in shown.out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--size", "{rooms: 99}"], "rooms=99: expected a number from 2 to 17"),
        (["--count", "0"], "--count 0: expected a number of at least 1"),
    ],
)
def test_command_refuses_wrong_numbers(tmp_path, words, message):
    out = tmp_path / "p.jsonl"
    with pytest.raises(ValueError, match=message):
        command(*words, "--out", str(out))
    assert not out.exists()


def test_clue_command_reports_killed_worker_process(tmp_path, monkeypatch):
    def generate(*settings):
        raise BrokenProcessPool("ended abruptly")
        yield

    monkeypatch.setattr(cli, "generate_puzzles", generate)
    with pytest.raises(RuntimeError, match="out of memory: ended abruptly. Fix: lower --workers"):
        command("--out", str(tmp_path / "p.jsonl"))


@needs_ortools
def test_clue_solver_preserves_ctrl_c_handling():
    """CP-SAT would take SIGINT from Python with its first solve, and the next Ctrl-C would end the process without a word."""
    script = """
import os, signal, time
from torchtune_ext.tasks.temporal_clue import TemporalClue
signal.signal(signal.SIGINT, signal.default_int_handler)
TemporalClue(seed=1, size="small")[0]
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
except KeyboardInterrupt:
    print("heard")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "heard\n", (done.returncode, done.stderr)


@needs_ortools
def test_clue_command_overwrites_only_puzzle_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(["clue", "--count", "1", "--workers", "1", "--out=~/p.jsonl"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]
    puzzle = (tmp_path / "p.jsonl").read_text()
    for name, text in (("list.json", f"[{puzzle}]"), ("rows.jsonl", '{"question": "1+1="}\n'), ("notes", "mine\n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=f"--out {name} holds something other than puzzles"):
            command("--out", name)
        assert (tmp_path / name).read_text() == text


def test_puzzles_go_into_pipe_and_through_link(tmp_path):
    puzzles, (end, write) = [Puzzle(1, "a", {"A": "b"})], os.pipe()
    write_jsonl(f"/dev/fd/{write}", puzzles)
    os.close(write)
    with open(end) as pipe:
        text = pipe.read()
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data/p.jsonl")
    write_jsonl(tmp_path / "link", puzzles)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "data" / "p.jsonl").read_text() == text != ""
