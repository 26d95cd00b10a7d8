"""Tasks over files and hub ids: fields, slices, prompts, solutions, graders of one's own, and every mistake with its fix."""

import json
import pickle
import re
import subprocess
import sys

import pytest

pytest.importorskip("math_verify")

from torchtune_ext.tasks.jsonl import Jsonl
from torchtune_ext.tasks.math import DATASETS, PROMPT, Math
from torchtune_ext.tasks.task import Score

ROWS = [
    {"question": "1+1?", "answer": "2", "why": "One and one.", "meta": {"source": "a", "list": [{"truth": 2}]}},
    {"question": "half of 1?", "answer": "\\frac{1}{2}", "why": "Halve it: \\boxed{\\frac{1}{2}}", "meta": {"source": "b", "list": [{"truth": 0.5}]}},
    {"question": "2*3?", "answer": "6", "why": "Twice three.", "meta": {"source": "a", "list": [{"truth": 6}]}},
]  # fmt: skip


def jsonl(folder, rows, name="some.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture
def path(tmp_path):
    return jsonl(tmp_path, ROWS)


@pytest.fixture
def parquet(tmp_path):
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "some.parquet", row_group_size=2)
    return str(tmp_path / "some.parquet")


def closeness(problem, text):
    """A grader of a user's: 1 for the right length, less for others."""
    return 1.0 / (1 + abs(len(text) - problem.answer))


def strict(problem, text):
    return Score(float(text == problem.answer), {"exact": float(text == problem.answer)})


def test_rows_of_chats_are_prompts_as_they_are(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    path = jsonl(tmp_path, [{"messages": chat, "answer": 2}])
    assert Jsonl(strict, path=path, question="messages")[0].messages == tuple(chat)
    task = Jsonl(strict, path=path, question="messages", system="You add.")
    assert task[0].messages == ({"role": "system", "content": "You add."}, *chat) and task[0].answer == 2
    with pytest.raises(ValueError, match="prompt='Say {question}': .*chat messages"):
        Jsonl(strict, path=path, question="messages", prompt="Say {question}")
    # CSV holds them as text.
    path = jsonl(tmp_path, [{"messages": json.dumps(chat), "answer": 2}])
    assert Jsonl(strict, path=path, question="messages")[0].messages == tuple(chat)
    path = jsonl(tmp_path, [{"messages": str(chat), "answer": 2}])
    with pytest.raises(ValueError, match="some.jsonl:1: 'messages' .*JSON"):
        Jsonl(strict, path=path, question="messages")
    for content in (None, [{"type": "text", "text": "1+1?"}]):
        with pytest.raises(ValueError, match="some.jsonl:1: .*'messages' .*content"):
            Jsonl(
                strict,
                path=jsonl(tmp_path, [{"messages": [{"role": "user", "content": content}]}]),
                question="messages",
            )
    with pytest.raises(ValueError, match="some.jsonl:1: .*'messages' .*'assistant'"):
        Jsonl(strict, path=jsonl(tmp_path, [{"messages": [*chat, {"role": "assistant"}]}]), question="messages")


def test_rows_of_csv_are_texts(tmp_path):
    (tmp_path / "some.csv").write_text('question,answer\r\n"1, or 2?",2\r\n"a ""word"" of\nlines",x\r\n', newline="")
    task = Jsonl(strict, path=str(tmp_path / "some.csv"))
    assert [(task[i].messages[0]["content"], task[i].answer) for i in (0, 1)] == [
        ("1, or 2?", "2"),
        ('a "word" of\nlines', "x"),
    ]
    (tmp_path / "EXCEL.CSV").write_text("question,answer,,\r\n1+1?,2,,\r\n", encoding="utf-8-sig", newline="")
    (tmp_path / "some.tsv").write_text("question\tanswer\n1+1?\t2\n")
    for name in ("EXCEL.CSV", "some.tsv"):
        assert Jsonl(strict, path=str(tmp_path / name))[0].answer == "2"
    (tmp_path / "long.csv").write_text(f"question,answer\n{'1' * 200_000},2\n")
    assert len(Jsonl(strict, path=str(tmp_path / "long.csv"))[0].messages[0]["content"]) == 200_000
    (tmp_path / "rows.jsonl.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(ValueError, match=r"rows.jsonl.gz': a compressed file"):
        Jsonl(strict, path=str(tmp_path / "rows.jsonl.gz"))
    for row in ("1, or 2?,2", "1+1?"):
        (tmp_path / "odd.csv").write_text(f"question,answer\n{row}\n")
        with pytest.raises(ValueError, match="odd.csv, row 1: .*values"):
            Jsonl(strict, path=str(tmp_path / "odd.csv"))
    with pytest.raises(ValueError, match="some.csv, row 1: missing field 'prompt'"):
        Jsonl(strict, path=str(tmp_path / "some.csv"), question="prompt")


def test_math_rows_become_problems(path):
    task = Math(path=path, solution="why")
    assert len(task) == 3 and [task[i].id for i in range(3)] == ["some-000000", "some-000001", "some-000002"]
    assert task[1].answer == "\\frac{1}{2}" and task[1] == task[1]
    assert task[0].messages == ({"role": "user", "content": PROMPT.replace("{question}", "1+1?")},)
    assert task[0].messages[0]["content"].endswith("put your final answer within \\boxed{}.")
    for index in range(3):
        assert task.grade(task[index], task.solution(task[index])).reward == 1.0
        assert task.grade(task[index], task.solution(task[(index + 1) % 3])).reward == 0.0
    assert task.solution(task[1]) == ROWS[1]["why"]  # it ends in the box already
    with pytest.raises(IndexError):
        task[3]


def test_parquet_is_read_as_jsonl_is(path, parquet):
    one, other = Math(path=path, solution="why"), Math(path=parquet, solution="why")
    assert [one[i] for i in range(3)] == [other[i] for i in range(3)]
    assert [one.solution(one[i]) for i in range(3)] == [other.solution(other[i]) for i in range(3)]


def test_parquet_is_read_without_unneeded_columns(parquet, monkeypatch):
    from pyarrow.parquet import ParquetFile

    read, batches = [], ParquetFile.iter_batches
    monkeypatch.setattr(
        ParquetFile, "iter_batches", lambda file, columns: read.append(columns) or batches(file, columns=columns)
    )
    Jsonl(strict, path=parquet, prompt="{question} {other}", fields=())
    with pytest.raises(ValueError, match="unknown placeholder {why}"):
        Jsonl(strict, path=parquet, prompt="{question} {why}", fields=())
    assert [sorted(columns) for columns in read] == [["answer", "question"], ["answer", "question", "why"]]


def test_math_train_and_held_out_questions_are_disjoint(path):
    train, held_out = Math(path=path, count=2), Math(path=path, first=2)
    assert [train[0].id, train[1].id, held_out[0].id] == ["some-000000", "some-000001", "some-000002"]
    assert held_out.solution(held_out[0]) == "The answer is $\\boxed{6}$."
    with pytest.raises(ValueError, match=r"\(3\) .*first=2, count=2"):
        Math(path=path, first=2, count=2)
    with pytest.raises(ValueError, match="first=-1, count=None"):
        Math(path=path, first=-1)


@pytest.mark.parametrize("kind", ["path", "parquet"])
def test_math_nested_fields_and_templates_are_read(kind, request):
    file = request.getfixturevalue(kind)
    task = Math(path=file, question="From {meta.source}: {question} \\boxed{}", answer="meta.list.0.truth")
    assert task[1].messages[0]["content"].startswith("From b: half of 1? \\boxed{}")
    assert [task[i].answer for i in range(3)] == ["2", "0.5", "6"]


def test_templates_and_lists_that_name_no_field(path):
    with pytest.raises(ValueError, match=r"'\{ question \}': "):
        Jsonl(strict, path=path, question="{ question }")
    with pytest.raises(ValueError, match=r"fields='why': a string; expected a list. Fix: fields=\[why\]"):
        Jsonl(strict, path=path, fields="why")


def test_prompts(path):
    task = Math(path=path, prompt="Q: {question}\nA:", system="Use \\boxed{}.")
    assert [m["role"] for m in task[0].messages] == ["system", "user"]
    assert task[0].messages[1]["content"] == "Q: 1+1?\nA:"
    with pytest.raises(ValueError, match=r"prompt='Solve it': .*\{question\}"):
        Math(path=path, prompt="Solve it")


def test_math_unmarked_answers_accepted_unless_prompt_requires_mark(path):
    for options, reward in (
        ({}, 0.0),
        ({"unmarked": "last_number"}, 1.0),
        ({"prompt": "{question}"}, 1.0),
        ({"prompt": "{question}", "system": "End with #### and the answer."}, 0.0),
        ({"prompt": "{question} End with 'The answer is'."}, 0.0),
        ({"prompt": "{question}", "unmarked": "none"}, 0.0),
    ):
        task = Math(path=path, **options)
        assert task.grade(task[0], "So there are 2.").reward == reward, options
        assert task.grade(task[0], "The answer is 2.").reward == task.grade(task[0], "\\boxed{2}").reward == 1.0


def test_a_task_denies_the_formula_of_the_question(path):
    task = Math(path=path)
    assert task.grade(task[2], "\\boxed{2*3}").reward == 0.0 and task.grade(task[2], "\\boxed{2+4}").reward == 1.0


def test_math_solution_includes_thinking_when_required(path):
    for options in ({"require_thinking": True}, {"format": "think", "format_reward": 0.2}):
        task = Math(path=path, solution="why", **options)
        assert task.solution(task[0]) == "<think>\nOne and one.\n</think>\n\nThe answer is $\\boxed{2}$."
        assert task.grade(task[0], task.solution(task[0])).reward == 1.0
        assert task.grade(task[0], "\\boxed{2}").reward < 1.0


def test_gsm8k(tmp_path):
    worked = "Half is 48/2 = <<48/2=24>>24.\nTogether 48+24 = <<48+24=72>>72.\n#### 1,072"
    task = Math("gsm8k", path=jsonl(tmp_path, [{"question": " How many? ", "answer": worked}], "train.jsonl"))
    assert task[0].id == "gsm8k-train-000000" and task[0].answer == "1072"
    assert task.solution(task[0]) == "Half is 48/2 = 24.\nTogether 48+24 = 72.\n\nThe answer is $\\boxed{1072}$."
    for text, reward in (
        ("#### 1072", 1.0),
        ("\\boxed{1,072}", 1.0),
        ("The answer is $1,072.", 1.0),
        ("\\boxed{72}", 0.0),
    ):
        assert task.grade(task[0], text).reward == reward


def test_answers_of_any_type_reach_the_grader(path):
    task = Jsonl(closeness, path=path, answer="meta.list.0.truth")
    assert task.grade(task[0], "ab") == 1.0 and task.solution(task[0]) == "2"
    task = Jsonl(strict, path=path, answer="meta")
    assert task[0].answer == {"source": "a", "list": [{"truth": 2}]}


def test_math_grading_process_gets_no_rows_or_imports(path):
    task = Math(path=path)
    assert b"half of 1" not in pickle.dumps(task)
    code = (
        "import sys\nfrom torchtune_ext.tasks.math import Math\nfrom torchtune_ext.tasks.answers import MathGrader\n"
        "assert MathGrader()('0.5', '\\\\boxed{1/2}').reward == 1.0\n"
        "print(sorted({'datasets', 'pyarrow', 'torch', 'transformers', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n" and done.stderr == ""  # nor does math-verify warn that its time-outs are off


# ---- mistakes


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"question": "a", "answer": ' + "9" * 5000 + "}\n", r"bad.jsonl:1: not JSON \(Exceeds the limit"),
        ('{"question": "a", "answer": 1}\n{"question": \n', r"bad.jsonl:2: not JSON \(Expecting value\). Fix: write one object per line"),
        ('{"question": "a", "answer": 1}\n\n[1]\n', "bad.jsonl:3: a list, not an object"),
        ('{"question": "a", "answer": 1, "answer": 2}', "bad.jsonl:1: duplicate field 'answer'"),
        ('{"question": "a", "answer": {"x": 1, "x": 2}}', "bad.jsonl:1: duplicate field 'x'"),
        ("", "has no example"),
        ('{"question": "", "answer": 1}', "bad.jsonl:1: 'question' is ''. Fix: write the text"),
        ('{"question": 3, "answer": 1}', "bad.jsonl:1: 'question' is 3. Fix: write the text"),
        ('{"question": "a", "answer": 1}\n{"question": "a", "final_answer": 1}', "bad.jsonl:2: missing field 'answer'; fields: final_answer, question"),
        ('{"question": "a", "answer": null}', "bad: 1 of 1 reference answers cannot be used: bad-000000 is None, neither"),
        ('{"question": "a", "answer": 1}\n' + '{"question": "a", "answer": ""}\n' * 5, "bad: 5 of 6 reference answers cannot be used: bad-000001 is '', which holds no answer; bad-000002"),
    ],
)  # fmt: skip
def test_math_invalid_file_rows_are_named(tmp_path, text, message):
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        Math(path=str(tmp_path / "bad.jsonl"))


def test_files_that_cannot_be_read(tmp_path, parquet):
    (tmp_path / "latin.jsonl").write_bytes('{"question": "é"}'.encode("latin-1"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing else")
    (tmp_path / "cut.PARQUET").write_bytes((tmp_path / "some.parquet").read_bytes()[:-20])
    (tmp_path / "rows.xlsx").write_bytes(b"PK\x03\x04\xff")
    for name, message in (
        ("latin.jsonl", "not UTF-8 text .*Fix: save it as UTF-8 with the ending .parquet, .csv, .tsv or .jsonl"),
        ("rows.xlsx", "not UTF-8 text .*Fix: save it as UTF-8 with the ending .parquet, .csv, .tsv or .jsonl"),
        ("broken.parquet", r"not a readable parquet file \("),
        ("cut.PARQUET", r"not a readable parquet file \("),
        ("none.jsonl", "file not found in"),
    ):
        with pytest.raises(ValueError, match=f"{name}'.*{message}"):
            Math(path=str(tmp_path / name))
    with pytest.raises(ValueError, match="some.parquet, example 1: missing field 'anser'; fields: answer, "):
        Math(path=parquet, answer="anser")


def test_two_columns_of_one_name_are_refused(tmp_path):
    import pyarrow
    from pyarrow.parquet import write_table

    columns = [pyarrow.array(["a"]), pyarrow.array(["1"]), pyarrow.array(["2"])]
    write_table(pyarrow.Table.from_arrays(columns, ["question", "answer", "answer"]), tmp_path / "two.parquet")
    (tmp_path / "two.csv").write_text("question,answer,answer\na,1,2\n")
    for name in ("two.parquet", "two.csv"):
        with pytest.raises(ValueError, match=f"{name}: duplicate field 'answer'"):
            Jsonl(strict, path=str(tmp_path / name))


def test_a_field_in_the_prompt_is_refused(tmp_path):
    path = jsonl(tmp_path, [{"question": "1+1?", "answer": 2, "unit": "m"}])
    for prompt, message in (
        ("{question} In {unit}.", "unknown placeholder {unit}; .* as in question='{question} {unit}'"),
        ("{question} {{unit}}", "unknown placeholder {unit}"),
        ("{question} Not {answer}!", "unknown placeholder {answer}; .*Fix: remove the answer"),
    ):
        with pytest.raises(ValueError, match=message):
            Jsonl(strict, path=path, prompt=prompt)
    for prompt in (r"{question} Write \boxed{answer}.", "{question} {other}", "{question} 9^{answer}", "{question} {}"):
        assert Jsonl(strict, path=path, prompt=prompt)[0].messages[0]["content"].endswith(prompt[-3:])
    assert Jsonl(strict, path=path, question="{question} In {unit}.")[0].messages[0]["content"] == "1+1? In m."


def test_a_hub_that_cannot_be_reached(monkeypatch, tmp_path):
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(
        ValueError,
        match=r"hub='no-one/nothing', split='train' .*\(.+\).*path:",
    ):
        Jsonl(strict, hub="no-one/nothing")
    with pytest.raises(ValueError, match="hub='openai/gsm8k', config='main', split='test'"):
        Math("gsm8k", split="test")


def test_math_loads_hub_style_dataset_folder(tmp_path):
    """`load_dataset` takes a folder for an id as well: the real library, without a network."""
    (tmp_path / "sums").mkdir()
    jsonl(tmp_path / "sums", [{**row, "answer": "x"} for row in ROWS], "train.jsonl")
    jsonl(tmp_path / "sums", ROWS, "test.jsonl")
    task = Math(hub=str(tmp_path / "sums"), split="test", count=2)
    assert [(task[i].id, task[i].answer) for i in range(2)] == [
        ("sums-test-000000", "2"),
        ("sums-test-000001", "\\frac{1}{2}"),
    ]
    with pytest.raises(ValueError, match="split='valid' cannot be loaded"):
        Math(hub=str(tmp_path / "sums"), split="valid")
    with pytest.raises(ValueError, match="sums train, example 0: missing field 'problem'; fields: "):
        Math(hub=str(tmp_path / "sums"), split="train", question="problem")


def test_math_conflicting_arguments_raise(path):
    for options, message in (
        ({}, "path and hub are both missing"),
        ({"dataset": "math5000"}, "dataset='math5000': unknown. Fix: choose one of gsm8k, math500"),
        ({"path": path, "hub": "a/b"}, "give one of the two"),
        ({"dataset": "svamp", "hub": "a/b"}, "give one of the two"),
        ({"path": path, "format": "xml"}, "format='xml': unknown. Fix: choose one of box, think"),
    ):
        with pytest.raises(ValueError, match=message):
            Math(**options)


def test_datasets_read_local_copies(tmp_path):
    rows = {
        "math500": {"problem": "a", "solution": "so \\boxed{3}", "answer": "3"},
        "deepmath": {"question": "a", "final_answer": "3", "difficulty": 5.0},
        "dapo_math_17k": {"prompt": f"{DATASETS['dapo_math_17k'].remove_texts[0]}\n\na\n\n{DATASETS['dapo_math_17k'].remove_texts[1]}", "solution": "3"},
        "aime2024": {"problem": "a", "solution": "so 3", "answer": "003"},
        "aime2025": {"problem": "a", "answer": 3},
        "svamp": {"Body": "a", "Question": "", "Answer": 3.0},
        "gsm8k": {"question": "a", "answer": "so\n#### 3"},
    }  # fmt: skip
    for dataset, row in rows.items():
        task = Math(dataset, jsonl(tmp_path, [row], f"{dataset}.jsonl"), prompt="{question}")
        assert task[0].messages[0]["content"] == "a" and task.grade(task[0], "\\boxed{3}").reward == 1.0, dataset
        assert task.grade(task[0], task.solution(task[0])).reward == 1.0
    years = [
        {"problem": f"in {y}", "solution": "", "answer": "3", "url": f"wiki/{y}_AIME_I_Problems/Problem_1"}
        for y in (2022, 2023)
    ]
    task = Math("aime2023", jsonl(tmp_path, years, "validation.jsonl"))
    assert len(task) == 1 and "in 2023" in task[0].messages[0]["content"]


def test_right_answers_that_cannot_be_read_are_counted(tmp_path, caplog):
    rows = [{"question": "a", "answer": answer} for answer in ("3", "see \\frac{1} on page 7", "\\frac12")]
    with caplog.at_level("WARNING"):
        Math(path=jsonl(tmp_path, rows))
    assert (
        "some: 1 of the first 3 reference answers cannot be parsed as mathematics and are compared as text: some-000001"
        in caplog.text
    )


def test_the_examples_of_the_page_run(repo_root, capsys):
    blocks = re.findall(
        r"```python\n(.*?)```", (repo_root / "docs" / "how_to" / "mathematics.md").read_text(), re.DOTALL
    )
    for block in blocks:
        exec(block, {})
    assert capsys.readouterr().out.startswith("Score(reward=1.0,")
