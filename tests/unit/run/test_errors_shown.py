"""Which errors are usage errors, which are run failures, and which keep their traceback."""

import json
import types

import pytest

from torchtune_ext.run import errors
from torchtune_ext.run.errors import (
    DeadlineExceeded,
    RunFailure,
    UsageError,
    UsageFileError,
    UserCodeError,
    closest_match,
    describe_error,
    error_location,
    exit_status_of,
    report_errors,
    usage_message,
    wrap_user_errors,
)
from torchtune_ext.sampling.types import EngineFailed
from torchtune_ext.training.learner import ScheduleConfig


def code_of(text: str, name: str, file: str = "<made>") -> dict:
    """Execute source text as a module and return its namespace."""
    module = types.ModuleType(name)
    exec(compile(text, file, "exec"), module.__dict__)
    return module.__dict__


OURS = """
import json
from torchtune_ext.run.errors import UsageError
def on_purpose(kind): raise kind("x")
def by_accident(): return int("x")
def looks_up(): return {}["x"]
def not_there(): return open("/nothing/x")
def by_library(): return json.loads("{")
def again():
    try:
        on_purpose(UsageError)
    except ValueError as error:
        kept = error
    raise kept
def other():
    try:
        by_library()
    except ValueError as error:
        raise UsageError("a file is no JSON") from error
"""


def error_of(function, *arguments) -> BaseException:
    with pytest.raises(BaseException) as caught:
        function(*arguments)
    return caught.value


@pytest.mark.parametrize(
    "kind, status",
    [
        (UsageError, 2),
        (UsageFileError, 2),
        (RunFailure, 1),
        (DeadlineExceeded, 1),
        (EngineFailed, 1),
        (ValueError, None),
        (OSError, None),
        (RuntimeError, None),
        (KeyError, None),
    ],
)
def test_deliberate_error_has_its_exit_status(kind, status):
    assert exit_status_of(error_of(code_of(OURS, "torchtune_ext.made")["on_purpose"], kind)) == status


@pytest.mark.parametrize("name", ["by_accident", "looks_up", "not_there", "by_library"])
def test_unexpected_error_has_no_exit_status(name):
    assert exit_status_of(error_of(code_of(OURS, "torchtune_ext.made")[name])) is None


@pytest.mark.parametrize("name", ["again", "other"])
def test_reraised_error_has_usage_error_status(name):
    assert exit_status_of(error_of(code_of(OURS, "torchtune_ext.made")[name])) == 2


@pytest.mark.parametrize(("name", "status"), [("__main__", 2), ("torchtune_extra", None), ("their_task", None)])
def test_whose_code_counts(name, status):
    assert exit_status_of(error_of(code_of(OURS, name)["on_purpose"], ValueError)) == status


def test_recipe_bug_keeps_its_traceback():
    assert exit_status_of(error_of(code_of(OURS, "__main__")["looks_up"])) is None
    assert exit_status_of(error_of(code_of(OURS, "__main__")["on_purpose"], RuntimeError)) is None


def test_config_check_failure_is_usage_error():
    assert exit_status_of(error_of(ScheduleConfig, "cosin")) == 2


def test_the_place_is_in_the_users_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "theirs.py"
    file.write_text(OURS)
    theirs = code_of(OURS, "theirs", str(file))
    assert error_location(error_of(theirs["looks_up"])) == "theirs.py:6"
    # Frames of a library that their code called are skipped.
    assert error_location(error_of(theirs["by_library"])) == "theirs.py:8"
    assert describe_error(error_of(theirs["looks_up"])) == "KeyError: 'x' (theirs.py:6)"
    ours = code_of(OURS, "torchtune_ext.made", str(file))
    assert error_location(error_of(ours["looks_up"])) is None
    # Callers of their code do not count.
    theirs["call"] = ours["looks_up"]
    exec(compile("def outer(): call()", str(file), "exec"), theirs)
    assert error_location(error_of(theirs["outer"])) is None


def test_blame_converts_user_errors_only(tmp_path):
    file = tmp_path / "theirs.py"
    file.write_text(OURS)
    theirs, ours = code_of(OURS, "theirs", str(file)), code_of(OURS, "torchtune_ext.made")

    def call(function, *arguments):
        with wrap_user_errors("task: Mine()[0]", "mend it"):
            function(*arguments)

    error = error_of(call, theirs["looks_up"])
    assert isinstance(error, UserCodeError) and exit_status_of(error) == 2
    assert str(error) == f"task: Mine()[0] raised KeyError: 'x' ({file}:6). Fix: mend it"
    assert usage_message(error).splitlines()[1] == "(TORCHTUNE_EXT_TRACEBACK=1 shows the traceback)"
    error = error_of(call, ours["on_purpose"], UsageError)
    assert str(error) == usage_message(error) == "x"


def test_shown_error_ends_with_one_message(capsys, monkeypatch):
    monkeypatch.delenv(errors.TRACEBACK_VARIABLE, raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ours = code_of(OURS, "torchtune_ext.made")

    def call(function, *arguments):
        with report_errors():
            function(*arguments)

    for kind, output, status in (
        (UsageError, "error: x\n", 2),
        (RunFailure, "error: x\n", 1),
        (EngineFailed, "error: EngineFailed: x\n", 1),
    ):
        error = error_of(call, ours["on_purpose"], kind)
        assert isinstance(error, SystemExit) and error.code == status
        assert capsys.readouterr().err == output
    assert isinstance(error_of(call, ours["by_library"]), json.JSONDecodeError)
    assert isinstance(error_of(call, ours["on_purpose"], KeyboardInterrupt), KeyboardInterrupt)
    monkeypatch.setenv(errors.TRACEBACK_VARIABLE, "1")
    assert error_of(call, ours["on_purpose"], UsageError).code == 2
    assert "Traceback" in capsys.readouterr().err


def test_another_rank_waits_and_names_itself(capsys, monkeypatch):
    waited, left = [], []
    monkeypatch.setattr(errors.time, "sleep", waited.append)
    monkeypatch.setattr(errors, "exit_process", lambda status, at_once: left.append((status, at_once)))
    monkeypatch.setenv("WORLD_SIZE", "2")
    ours = code_of(OURS, "torchtune_ext.made")
    for rank, text, seconds in (("0", "error: x\n", []), ("1", "error: rank 1: x\n", [errors.OTHER_RANKS_WAIT_S])):
        monkeypatch.setenv("RANK", rank)
        waited.clear()
        with report_errors():
            ours["on_purpose"](UsageError)
        assert capsys.readouterr().err == text and waited == seconds
    assert left == [(2, True), (2, True)]


@pytest.mark.parametrize(
    "name, known, match",
    [
        ("clip_hi", ["clip_low", "clip_high"], "clip_high"),
        ("learning_rate", ["max_steps", "optimizer.lr"], "optimizer.lr"),
        ("loss.epsilon", ["clip_low", "delta"], "clip_low"),
        ("max_step", ["max_steps", "engine.max_num_seqs"], "max_steps"),
        ("temperature", ["seed", "sampling.temperature"], "sampling.temperature"),
        ("DAPO", ["dapo", "dr_grpo"], "dapo"),
        ("zebra", ["clip_low", "optimizer.lr"], None),
    ],
)
def test_the_nearest_name(name, known, match):
    assert closest_match(name, known) == match
