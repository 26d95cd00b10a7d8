"""How a run ends: exit status and messages, and that every component is closed."""

import os
import re
import signal
import subprocess
import sys
import time
import traceback
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from torchtune_ext.recipes import grpo
from torchtune_ext.run import errors
from torchtune_ext.run.stop import StopSignals
from torchtune_ext.sampling.types import EngineFailed
from torchtune_ext.telemetry.sinks import LoggingConfig
from torchtune_ext.training import collectives, recipe_runner
from torchtune_ext.training.mismatch import MismatchError


class Recipe:
    """A fake recipe that runs given actions and records its calls."""

    def __init__(self, work):
        self.work, self.calls = work, []
        self.stop = StopSignals(grace_s=5.0, status_message=self.status_message)

    def setup(self):
        self.calls.append("setup")

    def train(self):
        self.calls.append("train")
        self.work(self)

    def status_message(self):
        return "It stood at step 3"

    def cleanup(self):
        self.calls.append("cleanup")
        self.status = self.stop.exit_status


def run(work):
    recipes = []

    def make():
        recipes.append(Recipe(work))
        return recipes[0]

    try:
        recipe_runner.run_recipe(make)
    except BaseException as error:
        # `errors.report_errors` sets this exit status.
        assert recipes[0].status == (error.code if isinstance(error, SystemExit) else errors.exit_status_of(error) or 1)
        raise
    else:
        assert recipes[0].status == 0
    finally:
        assert recipes[0].calls == ["setup", "train", "cleanup"]


def stopped_and_failing(error):
    def work(recipe):
        recipe.stop.defer_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
        while not recipe.stop.stop_requested:
            time.sleep(0.01)
        raise error

    return work


@pytest.mark.parametrize(("rank", "printed"), [("0", True), ("1", False)])
def test_recipe_runner_slow_start_prints_elapsed_time(rank, printed, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(recipe_runner, "Progress", partial(recipe_runner.Progress, log_every_s=0.05))
    monkeypatch.setattr(Recipe, "setup", lambda recipe: recipe.calls.append("setup") or time.sleep(0.3))
    run(lambda recipe: None)
    assert ("start: not ready after 0 s\n" in capsys.readouterr().err) == printed


def test_recipe_runner_error_during_sigterm_is_raised():
    with pytest.raises(OSError, match="No space left"):
        run(stopped_and_failing(OSError("step_000012 was not saved: No space left on device")))


def raising(error):
    def work(recipe):
        raise error

    return work


def test_recipe_runner_cleanup_receives_exit_status():
    """Sinks report the status to W&B, which marks a run without a status as successful."""
    run(lambda recipe: None)
    run(raising(recipe_runner.RunAlreadyComplete("nothing to do")))
    for error in (RuntimeError("x"), ValueError("not on purpose of ours"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            run(raising(error))
    for end in (SystemExit(1), SystemExit("words")):
        with pytest.raises(SystemExit):
            recipe_runner.run_recipe(partial(Recipe, raising(end)))

    def mistaken(recipe):
        LoggingConfig(samples=-1)

    with pytest.raises(ValueError, match="logging.samples=-1") as caught:
        run(mistaken)
    assert errors.exit_status_of(caught.value) == 2


def test_recipe_runner_interrupt_wrapped_by_library_is_stop(capsys):
    """As pydantic does while its classes are built: "SchemaError: ... Stopped: stopped by Ctrl-C"."""

    def work(recipe):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except BaseException as interrupt:
            raise ValueError("error building a serializer") from interrupt

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored after a shell's "&"
    try:
        with pytest.raises(SystemExit) as end:
            run(work)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert end.value.code == 130 and "Stopped by Ctrl-C. It stood at step 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Connection closed by peer"),
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Application timeout caused pair closure"
        ),
        ConnectionResetError("Connection reset by peer"),
        torch.distributed.DistBackendError("NCCL error"),
        collectives.MainRankFailure("Connection to rank 0"),
    ],
)
def test_a_broken_connection_to_a_stopped_neighbor_is(monkeypatch, capsys, caplog, error):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as end:
        run(stopped_and_failing(error))
    assert end.value.code == 143
    assert "Stopped by SIGTERM. It stood at step 3" in capsys.readouterr().err
    assert str(error) in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        errors.RunFailure("loss is nan"),
        MismatchError("the engine samples from another policy"),
        EngineFailed("the engine did not start"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        errors.UsageError("loss has shape (3,)"),
    ],
)
def test_own_error_while_sigterm_waits_is_raised(monkeypatch, error):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(type(error), match=re.escape(str(error))):
        run(stopped_and_failing(error))


@pytest.mark.parametrize("words", ["Timed out waiting 600000ms for recv", "Application timeout caused pair closure"])
def test_recipe_runner_missing_rank_is_named(monkeypatch, words):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(errors.RunFailure) as caught:
        run(raising(errors.RunFailure(f"step_000002 was not saved: RuntimeError: {words}")))
    assert "did not reach this collective within ranks.deadline_s" in caught.value.__notes__[0]


def test_recipe_runner_rank_missing_at_the_end(monkeypatch):
    """All steps are done and saved when a rank is lost: the error also says so."""

    def close():
        raise RuntimeError("Timed out waiting 600000ms for recv operation to complete")

    monkeypatch.setattr(recipe_runner, "close_ranks", close)
    with pytest.raises(RuntimeError, match="Timed out") as caught:
        recipe_runner.run_recipe(partial(Recipe, lambda recipe: None))
    note, progress = caught.value.__notes__
    assert "did not reach this collective within ranks.deadline_s" in note and progress == "It stood at step 3"


def test_recipe_runner_stop_agreed_by_ranks_exits_cleanly(capsys):
    def work(recipe):
        recipe.stop.defer_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
        assert recipe.stop.agree_to_stop(lambda mine: mine)
        recipe.stop.raise_stopped()

    with pytest.raises(SystemExit) as end:
        run(work)
    assert end.value.code == 143 and "Stopped by SIGTERM. It stood at step 3" in capsys.readouterr().err


def test_recipe_runner_unjoinable_thread_does_not_block_exit():
    """Ctrl-C during Thread.start leaves a thread that its executor does not know."""
    script = """
import os, signal, threading
from torchtune_ext.run.stop import StopSignals
from torchtune_ext.training import recipe_runner

class Recipe:
    def __init__(self):
        self.stop = StopSignals(5.0, self.status_message)
    def setup(self): ...
    def train(self):
        threading.Thread(target=threading.Event().wait).start()
        signal.raise_signal(signal.SIGTERM)
    def status_message(self): return "It stood at step 3"
    def cleanup(self): ...

recipe_runner.EXIT_S = 0.5
recipe_runner.run_recipe(Recipe)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 143 and "It stood at step 3" in done.stderr


def test_recipe_runner_components_are_closed_one_by_one(caplog):
    closed = []

    class Part:
        def __init__(self, name, fails=False):
            self.name, self.fails = name, fails

        def close(self):
            closed.append(self.name)
            if self.fails:
                raise TimeoutError("it did not answer")

    recipe_runner.close_all(Part("first"), Part("second", fails=True), None, Part("third"))
    assert closed == ["first", "second", "third"]
    assert "Part was not closed properly" in caplog.text and "it did not answer" in caplog.text


def test_recipe_runner_finished_run_prints_status_message(capsys):
    run(lambda recipe: None)
    assert capsys.readouterr().out.endswith("It stood at step 3\n")


def test_recipe_runner_error_is_followed_by_status_message():
    with pytest.raises(OSError) as caught:
        run(stopped_and_failing(OSError("No space left")))
    assert "".join(traceback.format_exception(caught.value)).endswith("OSError: No space left\nIt stood at step 3\n")


def test_an_error_of_the_setup_is_not():
    """If set-up fails, the progress is not printed, because no step has run."""

    class Refused(Recipe):
        def setup(self):
            super().setup()
            raise ValueError("max_steps=-1")

    recipe = Refused(None)
    with pytest.raises(ValueError) as caught:
        recipe_runner.run_recipe(lambda: recipe)
    assert recipe.calls == ["setup", "cleanup"] and not hasattr(caught.value, "__notes__")


def test_recipe_runner_nothing_to_do_exits_without_error(capsys):
    class Idle(Recipe):
        def setup(self):
            super().setup()
            raise recipe_runner.RunAlreadyComplete("step 40 >= max_steps=3: nothing to do")

    recipe = Idle(None)
    recipe_runner.run_recipe(lambda: recipe)
    assert recipe.calls == ["setup", "cleanup"]
    assert capsys.readouterr().out == "step 40 >= max_steps=3: nothing to do\n"


def test_recipe_runner_signal_before_cleanup_still_cleans_up():
    recipe = Recipe(lambda recipe: None)
    begin = recipe.stop.begin_cleanup

    def interrupted():
        recipe.stop.begin_cleanup = begin
        os.kill(os.getpid(), signal.SIGINT)
        begin()

    recipe.stop.begin_cleanup = interrupted
    with pytest.raises(BaseException) as caught:  # `RunStopped` would end all tests
        recipe_runner.run_recipe(lambda: recipe)
    assert isinstance(caught.value, SystemExit) and caught.value.code == 130
    assert recipe.calls == ["setup", "train", "cleanup"]


@pytest.mark.parametrize("is_main", [True, False])
def test_other_ranks_wait_until_engine_has_started(is_main, monkeypatch):
    """With `engine.sleep` the engine measures its GPUs in `Engine.start`, so no rank may load weights before."""
    order, recipe = [], object.__new__(grpo.GRPORecipe)
    call_on_main = (lambda make: make()) if is_main else (lambda make: order.append("waits for rank 0"))
    ranks = SimpleNamespace(rank=int(not is_main), is_main=is_main, call_on_main=call_on_main)
    monkeypatch.setattr(grpo, "init_ranks", lambda *args, **options: ranks)
    for name in ("build_components", "StepProfiler", "print_run_header"):
        monkeypatch.setattr(grpo, name, MagicMock())
    for name in ("_open_run_folder", "_setup_engine", "_setup_data", "open_logs"):
        monkeypatch.setattr(recipe, name, lambda *args, name=name: order.append(name), raising=False)
    monkeypatch.setattr(recipe, "_setup_model", lambda *args: 1 / 0, raising=False)
    recipe.cfg = MagicMock(staleness=0, prefetch_steps=None, replay=None, seed=0)
    with pytest.raises(ZeroDivisionError):
        recipe.setup()
    start = ["open_logs", "_setup_engine"] if is_main else ["waits for rank 0"]
    assert order == ["_open_run_folder", *start, "_setup_data"]
