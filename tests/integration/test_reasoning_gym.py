"""The real generators: each makes and grades, is the same in every process, and keeps its held-out questions to itself."""

import json
import os
import pickle
import re
import subprocess
import sys
import time

import pytest

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed, which needs gcc")

from reasoning_gym.factory import DATASETS, has_curriculum

from torchtune_ext.tasks.problem_stream import ProblemStream
from torchtune_ext.tasks.reasoning_gym import (
    CURRICULUM_WINDOW,
    EXTRA_RULES,
    HASH_ORDERED,
    REFUSED_GENERATORS,
    ReasoningGym,
    ReasoningGymCurriculum,
    extract_answer,
    is_held_out,
)
from torchtune_ext.tasks.task import Score

SUMS = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}}
# The first of these take seconds for a question, the last one needs a file that its package leaves out.
SLOW = ("futoshiki", "knight_swap", "puzzle24", "zebra_puzzles", "rubiks_cube", "arc_agi", "rearc", "composite")
ROUNDED = "power_function", "coin_flip"

QUESTIONS = """
import json, sys, warnings
warnings.filterwarnings("ignore")
from torchtune_ext.tasks.reasoning_gym import ReasoningGym
made = {}
for name in json.loads(sys.argv[1]):
    task = ReasoningGym(name, seed=3)
    made[name] = [[(p := task[i]).messages[-1]["content"], str(p.answer)] for i in (0, 1, 70, 10**6)]
json.dump(made, sys.stdout)
"""


def questions(names, hash_seed):
    env = os.environ | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", QUESTIONS, json.dumps(names)], env=env, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout[done.stdout.index("{") :])


def test_gym_questions_deterministic_and_own_answers_scored():
    names = sorted(set(DATASETS) - set(SLOW) - set(REFUSED_GENERATORS))
    one, other = questions(names, "1"), questions(names, "2")
    differ = {name for name in names if one[name] != other[name]}
    assert "ransom_note" in differ and differ <= set(HASH_ORDERED)
    assert len(names) > 85
    wrong = []
    for name in sorted(set(names) - set(HASH_ORDERED)):
        task = ReasoningGym(name, seed=3)
        problem = pickle.loads(pickle.dumps(task[0]))
        if problem.answer is not None and task.grade(problem, f"so <answer> {problem.answer} </answer>").reward != 1.0:
            wrong.append(name)
        if not isinstance(task.grade(problem, "\\x00 { [ 1/0 __import__('os') <answer>"), Score):
            wrong.append(f"{name} (nonsense)")
    assert not wrong


def same_value(gold, text):
    """Whether a text has the numbers of the right answer, or its letters if that has no numbers."""
    numbers = [[float(n) for n in re.findall(r"-?\d+(?:\.\d*)?(?:e[+-]?\d+)?", each)] for each in (gold, text)]
    letters = [re.sub(r"[\W\d_]", "", each).casefold() for each in (gold, text)]
    return (
        numbers[0] == pytest.approx(numbers[1], rel=1e-12)
        if numbers[0] and len(numbers[0]) == len(numbers[1])
        else letters[0] == letters[1] != ""
    )


def test_generators_garbage_is_never_solved(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    wrong, names = [], sorted(set(DATASETS) - set(SLOW) - set(REFUSED_GENERATORS))
    for name in names:
        task = ReasoningGym(name, seed=5)
        for problem in (task[0], task[1], task[2]):
            texts = {"", "idk", "nan", "nan + nani", "0", "no", "[]", problem.messages[-1]["content"]}
            if (gold := problem.answer) is not None:
                right = [gold, f"so <answer>{gold}</answer>", f"<think>\nIs it <answer>0</answer>?</think>\n{gold}"]
                wrong += [(name, text) for text in right if not task.grade(problem, text).parts["solved"]]
                # Three digits are enough in power_function, four in coin_flip.
                texts |= {gold[:k] for k in range(1, len(gold))[:40]} if name not in ROUNDED else set()
                texts = {text for text in texts if not same_value(gold, text)} | {
                    f"<think>{gold}",
                    f"<think>a</think><think>{gold}",
                }
            wrong += [(name, text) for text in texts if task.grade(problem, text).parts["solved"]]
    assert not wrong and len(names) > 85


@pytest.mark.parametrize(
    ("name", "gold", "right", "wrong"),
    [
        ("coin_flip", "0.3125", ["5/16", "0.31250"], ["0.3124", "0.313", "1/3", "3125"]),
        ("coin_flip", "0.1171875", ["0.1172", "0.11719"], ["0.117", "0.1173", "0.12"]),
        ("coin_flip", "1.52587890625e-05", ["1/65536", "1.526e-05"], ["0", "0.00002"]),
        ("complex_arithmetic", "-6.0 + 15.0i", ["-6 + 15i"], ["nani", "inf", "nan + 15i"]),
        ("decimal_arithmetic", "6.32098837209", ["6.320988372090"], ["6.3209", "6.32098837208", "6.321"]),
        ("gsm_symbolic", "90", ["90", "$90.00", "90."], ["-90", "90 or 91", "not 90", "90!", "90 + 1", "90%"]),
        ("number_format", "569204296.88", ["569,204,296.88"], ["569204296.8", "569204296.889"]),
        ("number_sorting", "['1.0', '20.5']", ['["1", "20.50"]'], ["['1.4', '20.5']", "['1', '21']", "['20.5', '1']"]),
        ("pool_matrix", "5.17 4.5", ["5.1667 4.50"], ["5.18 4.5", "5.2 4.5", "5.17 4.54"]),
        ("word_sorting", "Above, errors", ["Above,errors"], ["Above, errors, more"]),
        ("spell_backward", "retuhc", ["Retuhc"], ["retuhcs", "retuhc a", "retuh"]),
        ("game_of_life_halting", "True", ["true"], ["False", "True False", "yes"]),
        ("fraction_simplification", "$4/5$", ["\\frac{4}{5}", "4/5"], ["4/5 + 1", "4/5 or 3/5"]),
    ],
)
def test_extra_rules_refuse_wrong_answers(name, gold, right, wrong):
    assert all(EXTRA_RULES[name](gold, text) for text in [gold, *right])
    assert not any(EXTRA_RULES[name](gold, text) for text in wrong)


def test_gym_train_and_heldout_splits_never_overlap():
    splits = {}
    for split in ("train", "heldout"):
        texts = {ReasoningGym(SUMS, seed=seed, split=split, first=first)[i].messages[-1]["content"].partition("\n")[0]
                 for seed in (0, 1) for first in (0, 500) for i in range(60)}  # fmt: skip
        assert {is_held_out(text) for text in texts} == {split == "heldout"} and len(texts) > 100
        splits[split] = texts
    assert not splits["train"] & splits["heldout"]


def test_answer_in_takes_last_pair_in_linear_time():
    assert extract_answer("<answer>0</answer> <answer>1 <answer> 2\n</answer> 3</answer> <answer>4") == "2"
    assert extract_answer(" 1 </answer> <answer>") == "1 </answer> <answer>"
    begin = time.process_time()
    for text in ("<answer>" * (1 << 14), "</answer>" * (1 << 14), "<answer></answer>" * (1 << 13)):
        extract_answer(text)
    assert time.process_time() - begin < 1.0


def test_strict_and_partial_reward():
    strict, partial = ReasoningGym(SUMS), ReasoningGym(SUMS, reward="credit")
    problem, answer = strict[0], strict[0].answer
    long = f"The answer is {answer}"
    assert strict.grade(problem, f" {answer}\n").reward == 1.0
    assert strict.grade(problem, long).reward == 0.0
    score = partial.grade(problem, long)
    assert score.reward == len(answer) / len(long) and score.parts == {"solved": 0.0, "credit": score.reward}
    assert strict.grade(problem, f"{long} <answer>0</answer> <answer>{answer}</answer>").reward == 1.0
    assert strict.solution(problem) == answer


def test_several_generators_come_by_their_weights():
    task = ReasoningGym({**SUMS, "gcd": {"weight": 3}}, count=400)
    names = [problem.example["generator"] for problem in map(task.__getitem__, range(400))]
    assert 260 < names.count("gcd") < 340 and task.grade(task[0], "x").parts.keys() == {
        "solved",
        "credit",
        f"solved_{names[0]}",
    }
    assert task[7] == ReasoningGym({**SUMS, "gcd": {"weight": 3}}, first=7)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"generators": "chain_sums"}, "unknown generator 'chain_sums' of reasoning-gym; did you mean 'chain_sum'?"),
        ({"generators": {"gcd": {"min_number": 2}}}, "gcd: unknown option 'min_number'; did you mean 'min_numbers'?"),
        ({"generators": {"gcd": {"min_numbers": 9}}}, "gcd rejects its options {'min_numbers': 9}: "),
        ({"generators": {"gcd": {"weight": 0}}}, "gcd.weight=0: expected a number above 0"),
        ({"generators": []}, "generators is empty"),
        ({"generators": {"gcd": 5}}, "gcd=5: expected a mapping of options"),
        ({"generators": "n_queens"}, "n_queens executes an answer as Python"),
        ({"generators": "codeio"}, "codeio runs programs of its dataset"),
        ({"generators": "gcd", "reward": "partly"}, "reward='partly': unknown. Fix: choose one of solved, credit"),
        ({"generators": "gcd", "split": "test"}, "split='test': unknown. Fix: choose one of train, heldout"),
        ({"generators": "ransom_note"}, "set PYTHONHASHSEED=0 before the command"),
    ],
)
def test_gym_invalid_arguments_raise_value_error(arguments, message, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match=".*") as error:
        ReasoningGym(**arguments)
    assert message in str(error.value)


def test_a_generator_with_too_few_questions_is_named():
    one = {"count_bits": {"min_n": 5, "max_n": 5}}
    few = [ReasoningGym(one, split=split) for split in ("train", "heldout")]
    with pytest.raises(ValueError, match="generators.count_bits: .*400 .*split="):
        for task in few:
            _ = task[0]


def test_a_curriculum_rises_and_resumes(tmp_path):
    assert has_curriculum("chain_sum")
    task = ReasoningGymCurriculum("chain_sum", raise_at=0.5, seed=2)
    stream = ProblemStream(task, 0)
    first = stream.next_problems(CURRICULUM_WINDOW)
    assert all(problem.id.endswith("-level0") for problem in first)
    solved = [
        (problem, [("", task.grade(problem, problem.answer), ""), ("", task.grade(problem, "x"), "")])
        for problem in first
    ]
    assert stream.observe(1, solved[:-1], tmp_path) == {"curriculum/chain_sum": 0.0}
    assert stream.observe(2, solved[-1:], tmp_path) == {"curriculum/chain_sum": 1.0}
    harder = stream.next_problems(4)
    assert all(problem.id.endswith("-level1") for problem in harder)
    # What was sampled for the level before says nothing about this one.
    assert stream.observe(3, solved, tmp_path) == {"curriculum/chain_sum": 1.0}
    # A grading process has the task of the start, and the sizes of the question come with it.
    assert ReasoningGymCurriculum("chain_sum", seed=2).grade(harder[0], harder[0].answer).reward == 1.0
    assert harder[0].example["options"] != first[0].example["options"]
    again = ReasoningGymCurriculum("chain_sum", raise_at=0.5, seed=2)
    again.load_state_dict(json.loads(json.dumps(task.state_dict())))
    assert [again.ask(i, i) for i in range(8)] == [task.ask(i, i) for i in range(8)]
    assert again.levels == {"chain_sum": 1}
    with pytest.raises(ValueError, match="task.generators: the checkpoint has chain_sum"):
        ReasoningGymCurriculum("gcd").load_state_dict(task.state_dict())
