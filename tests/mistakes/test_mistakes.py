"""Each usage error is one message with status 2, before any file or process is created.

`python tests/mistakes/table.py` prints the messages for reading.
"""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from table import GROUPS, MISTAKES
from trying import ENGINE_STARTED, Forks, Mistake, attempt, full, make_place, warmup

from helpers.tiny_runs import environment
from torchtune_ext.run.errors import TRACEBACK_VARIABLE
from torchtune_ext.run.folder import RunFolder
from torchtune_ext.sampling.engine_args import on_cpu

LINES = 3  # maximum lines of a message
HERE = [name for name, mistake in MISTAKES.items() if not mistake.cpu_only or on_cpu()]
# The cases that also run as a command; in each `make test` an error in the arguments, and one in the last check.
REAL = [name for name, mistake in MISTAKES.items() if mistake.real]
ENDS, OTHERS = [REAL[0], REAL[-1]], REAL[1:-1]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder in which every run is valid."""
    return make_place(tmp_path_factory.mktemp("mistakes") / "right")


@pytest.fixture(scope="module")
def in_fork():
    forks = Forks()
    yield forks
    forks.close()


def require(mistake: Mistake, result) -> None:
    assert result.status == mistake.status, result
    assert re.search(mistake.says, result.text), f"says: {mistake.says}\nsaid: {result.text}"
    assert len(result.text.splitlines()) <= LINES and "Traceback" not in result.text, result.text
    assert result.changed == [], result


def as_command(words: list[str], folder: Path, log: Path) -> int:
    """Run `torchtune-ext WORDS` as a command and return its exit status."""
    with open(log, "w") as output:
        return subprocess.run(
            [sys.executable, "-m", "torchtune_ext", *words],
            cwd=folder,
            env={**environment(), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=150,
        ).returncode


def test_there_are_enough_of_them():
    assert len(MISTAKES) >= 120 and len(REAL) >= 10
    assert len(MISTAKES) == sum(map(len, GROUPS.values()))


@pytest.mark.parametrize(
    "typed", ["grpo_full --config run.yaml", "grpo_lora --config lora.yaml", "evaluate --config eval.yaml"]
)
def test_engine_starts_without_usage_error(place, in_fork, tmp_path, typed):
    result = attempt(Mistake(f"run {typed}", ""), place, tmp_path / "run", in_fork)
    assert result.status == ENGINE_STARTED and "error:" not in result.text, result
    assert "out/run.json" in result.changed


def test_warmup_succeeds_without_usage_error(place, in_fork, tmp_path):
    result = attempt(Mistake("run warmup_sft --config warm.yaml", ""), place, tmp_path / "run", in_fork)
    assert result.status == 0 and "model:     out/model, in Hugging Face format" in result.text, result


def test_new_model_with_dropping_template_is_refused(place, in_fork, tmp_path):
    # The tokenizer of a new model is made after the folder was locked, so this error leaves files.
    wrong = warmup("tokenizer.template=mine.jinja", "", files={"mine.jinja": "{{ messages[0].role }}"})
    result = attempt(wrong, place, tmp_path / "run", in_fork)
    assert result.status == 2 and "'mine.jinja' omits its message of role 'user'" in result.text, result


@pytest.mark.timeout(1200)  # each case has its own deadline
@pytest.mark.parametrize("name", HERE, ids=HERE)
def test_usage_error_is_one_message(place, in_fork, tmp_path, name):
    require(MISTAKES[name], attempt(MISTAKES[name], place, tmp_path / "run", in_fork))


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [pytest.param(ENDS, id="first and last"), pytest.param(OTHERS, id="the others", marks=pytest.mark.rest)]
)
def test_command_reports_same_usage_error_as_fork(place, tmp_path, names):
    with ThreadPoolExecutor(2) as pool:
        tried = {
            name: pool.submit(attempt, MISTAKES[name], place, tmp_path / str(number), as_command)
            for number, name in enumerate(names)
        }
    for name in names:
        require(MISTAKES[name], tried[name].result())


@pytest.mark.slow
@pytest.mark.rest  # in `make test`: tests/unit/settings/test_command_line.py
def test_torchrun_usage_error_is_printed_once_and_first(place, tmp_path):
    words = "run --nproc_per_node 2 grpo_full --config run.yaml optimizer.lr=fast"
    result = attempt(Mistake(words, ""), place, tmp_path / "run", as_command)
    assert result.status == 2 and result.changed == [], result
    assert result.text.count("error: ") == result.text.count("optimizer.lr='fast'") == 1, result.text
    assert "Traceback" not in result.text and "rank 1:" not in result.text, result.text
    before = result.text.partition("error: ")[0]
    assert "exitcode" not in before and len(before.splitlines()) <= 3, result.text


def test_a_variable_shows_the_traceback(place, in_fork, tmp_path):
    run = partial(in_fork, **{TRACEBACK_VARIABLE: "1"})
    result = attempt(full("optimizer.lr=fast", ""), place, tmp_path / "run", run)
    assert result.status == 2 and "Traceback" in result.text and "in check_optimizer" in result.text, result
    assert result.text.splitlines()[-1].startswith("torchtune_ext.run.errors.UsageError: optimizer.lr='fast'")


def test_unexpected_error_keeps_its_traceback(place, in_fork, tmp_path):
    """A copied recipe with its own bug."""
    source = (Path(__file__).parents[2] / "recipes" / "grpo.py").read_text()
    text = source.replace(
        "        self.components = components = build_components(cfg, self.ranks)\n", "        {}['a bug']\n", 1
    )
    assert text != source
    mistake = Mistake("run my_grpo.py --config run.yaml", "", files={"my_grpo.py": text})
    result = attempt(mistake, place, tmp_path / "run", in_fork)
    assert result.status == 1 and "Traceback" in result.text and result.text.endswith("KeyError: 'a bug'"), result


def test_a_folder_in_use_is_left_alone(place, in_fork, tmp_path):
    mistake = full("", rf"output_dir=out is in use by another run: process {os.getpid()} on .*, since ")
    holders = []

    def hold(folder: Path) -> None:
        holders.append(RunFolder(folder / "out"))

    try:
        require(mistake, attempt(Mistake(mistake.typed, mistake.says, prepare=hold), place, tmp_path / "run", in_fork))
    finally:
        holders[0].close()
