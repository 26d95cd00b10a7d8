"""Bars and the table of steps."""

import io
import re
import threading
import time

import pytest

from helpers.waiting import wait_until
from torchtune_ext.telemetry import progress as progress_module
from torchtune_ext.telemetry.progress import Progress, ProgressBar


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_lines_in_a_log_are_sparse(capsys):
    clock = Clock()
    with ProgressBar("sample", 100, "sample", None, log_every_s=30, clock=clock) as bar:
        for i in range(100):
            clock.now = float(i)
            bar.add(1, 50)
            bar.add_reward(0.25)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0] == "sample: 31 of 100 samples after 30 s, reward 0.250, length 50, 52 tok/s"


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda progress: progress.phase("start: not ready"), r"start: not ready after \d s"),
        (lambda progress: progress.sampling_bar(8, "evaluate"), r"evaluate: 0 of 8 samples after \d s"),
    ],
)
def test_silent_phase_prints_elapsed_time_until_closed(make, line, capfd):
    printed = []
    with make(Progress(bars=False, log_every_s=0.05)):
        wait_until(lambda: printed.append(capfd.readouterr().err) or "".join(printed).count("\n") >= 3)
    wait_until(lambda: all(thread.name != "progress" for thread in threading.enumerate()))
    lines = ("".join(printed) + capfd.readouterr().err).splitlines()
    assert len(lines) >= 3 and all(re.fullmatch(line, each) for each in lines), lines


@pytest.mark.parametrize(("variables", "bars"), [({}, True), ({"JPY_PARENT_PID": "1"}, False)])
def test_notebook_terminal_gets_lines_not_bars(variables, bars, monkeypatch, capsys):
    monkeypatch.setattr(progress_module, "terminal_width", lambda stream: 80)
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with Progress().sampling_bar(8) as bar:
        bar.add()
    assert ("\r" in capsys.readouterr().err) == bars


def test_a_bar_shows_reward_length_and_speed():
    clock, file = Clock(), io.StringIO()
    with ProgressBar("sample", 4, "sample", file, clock=clock) as bar:
        clock.now = 2.0
        time.sleep(0.15)  # tqdm draws ten times a second at most
        bar.add_reward(0.5)
        time.sleep(0.15)
        bar.add(4, tokens=400)
    assert bar.status_text() == "reward 0.500, length 100, 200 tok/s"
    assert "4/4" in file.getvalue() and "200 tok/s" in file.getvalue()


def test_progress_bar_shows_throughput_before_any_episode_ends():
    clock = Clock()
    with ProgressBar("sample", 4, "sample", io.StringIO(), clock=clock) as bar:
        clock.now = 2.0
        bar.add(0, tokens=50)
        assert bar.status_text() == "25 tok/s"
        bar.add(1)
        assert bar.status_text() == "length 50, 25 tok/s"


def test_summary_reads_as_a_table():
    file = io.StringIO()
    progress = Progress(total_steps=200, bars=False, file=file)
    progress.log_step(1, {"reward/mean": 0.25, "length/mean": 83.4})
    assert not file.getvalue(), "the step is not over"
    progress.log_step(
        1, {"speed/sampled_tokens_s": 4100.2, "time/step": 61.2, "time/sample": 31.2, "time/publish": 4.0}
    )
    values = {"reward/mean": -0.125, "eval/reward_greedy": 0.5, "mismatch/mean_abs": 0.00612}
    progress.log_step(200, values | {"time/step": 7.0})
    header, first, second = file.getvalue().splitlines()
    assert len(header) == len(first) == len(second)
    for title, value in (
        ("step", "1/200"),
        ("reward", "0.2500"),
        ("length", "83"),
        ("tok/s", "4,100"),
        ("seconds", "61.2"),
        ("sample", "31.2"),
        ("publish", "4.0"),
    ):
        end = header.index(title) + len(title)
        assert first[:end].split()[-1] == value
    assert second.split() == ["200/200", "-0.1250", "-", "50.0%", *"---", "6.1e-03", "-", "-", "7.0", *"---"]


def test_progress_initial_evaluation_is_printed_at_once():
    file = io.StringIO()
    progress = Progress(total_steps=200, bars=False, file=file)
    progress.log_step(0, {"eval/reward_sampled": 0.25})
    assert file.getvalue().splitlines()[1].split()[:4] == ["0/200", "-", "-", "25.0%"]
    progress.log_step(0, {"eval/reward_sampled": 0.25, "eval/solved_sampled": 0.125})
    assert file.getvalue().splitlines()[2].split()[3] == "0.250", "the mean of partial rewards is no share"


def test_other_ranks_print_no_table(capsys):
    progress = Progress(rank=1, bars=True)
    progress.log_step(1, {"reward/mean": 0.5})
    with progress.training_bar(3) as bar:
        bar.add()
    assert capsys.readouterr() == ("", "")


STEP = {"time/step": 1.0, "groups/used": 0.0, "groups/no_signal": 32.0}


@pytest.mark.parametrize(
    ("rewards", "words", "advice"),
    [
        ({"reward/mean": 0.1, "reward/std": 1e-17}, "all rewards are 0.1", "too hard .*run an SFT warm-up on it first"),
        (
            {"reward/mean": 0.5, "reward/std": 0.5},
            "no group has a nonzero advantage",
            "raise samples_per_prompt or samp",
        ),
        ({}, "no text was graded", "Repair the grader"),
    ],
)
def test_progress_zero_variance_step_warns_first_and_fifth(rewards, words, advice, caplog):
    file = io.StringIO()
    progress = Progress(total_steps=200, bars=False, file=file)
    for step in range(1, 9):
        progress.log_step(step, STEP | rewards)
        assert file.getvalue().splitlines()[-1].endswith(f"  no signal: {words}")
        assert len(caplog.messages) == 1 + (step >= 5), "said twice"
    for number, message in zip(("1 step", "5 steps"), caplog.messages, strict=True):
        start = f"rewards: {number} with only zero-variance groups (32 in step {number[0]}), so the rewards gave no gradient: "
        assert message.startswith(f"{start}{words}. ") and re.search(advice, message)
    progress.log_step(9, STEP | rewards | {"groups/used": 3.0})
    assert "no signal" not in file.getvalue().splitlines()[-1]
    for step in range(10, 15):
        progress.log_step(step, STEP | rewards)
    assert len(caplog.messages) == 3, "there was a signal between"
    caplog.clear()
    Progress(bars=False, file=file).log_step(1, STEP | rewards | {"loss/kl_teacher": 0.5})
    assert not caplog.messages, "a teacher needs no rewards"


def test_progress_mostly_truncated_samples_warned_once(caplog):
    progress = Progress(total_steps=200, bars=False, file=io.StringIO())
    for step, share in enumerate((0.5, 0.83, 0.9), start=1):
        progress.log_step(step, {"time/step": 1.0, "length/truncated": share})
        assert len(caplog.messages) == (step >= 2)
    assert caplog.messages[0].startswith("sampling: 83% of the samples were truncated at sampling.max_tokens")


def test_progress_evaluation_is_not_a_zero_variance_step(caplog):
    file = io.StringIO()
    progress = Progress(total_steps=200, bars=False, file=file)
    for _ in range(6):
        progress.log_step(0, {"eval/reward_sampled": 0.25})
    assert "no signal" not in file.getvalue() and not caplog.messages
