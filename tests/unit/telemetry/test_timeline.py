"""The timeline of a run: what every reader of Chrome's format needs, whole after a kill, and no danger to the run."""

import os
import signal
import subprocess
import sys
from concurrent.futures import Future

import pytest
from full_disk import full_disk
from letter_tokens import LetterTokenizer, completion
from tables import every_row
from traces import as_chrome_reads, events_of, phases, require_valid, spans

from torchtune_ext.grading import Grader
from torchtune_ext.rollout import GroupStream, in_order, sample_groups
from torchtune_ext.run.folder import CONTENTS
from torchtune_ext.sampling.engine import SamplingConfig
from torchtune_ext.tasks.task import Problem, Score
from torchtune_ext.telemetry import summary, timeline
from torchtune_ext.telemetry.summary import Stopwatch
from torchtune_ext.telemetry.timeline import Timeline

BEGAN = 1_700_000_000.0  # what the wall clock says when the monotonic one says 100


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test moves it."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

        def time(self):
            return BEGAN + self.now - 100.0

    clock = Clock()
    monkeypatch.setattr(summary, "time", clock)
    monkeypatch.setattr(timeline, "time", clock)
    return clock


@pytest.fixture
def line(tmp_path, clock):
    """A timeline of step 7."""
    return Timeline(tmp_path, lambda: 7)


def group(line, clock, number, *seconds, kind="group"):
    """A group that is so long with the engine, with the graders and in the buffer."""
    line.begin((kind, number), problem=f"p{number}")
    for track, wait in zip(("graders", "buffer", None), seconds, strict=True):
        clock.now += wait
        if track is not None:
            line.move((kind, number), track)
    line.end((kind, number))


def complete(events):
    """X events as (name, cat, begin, seconds), by their begin since the clock's."""
    found = [
        (e["name"], e["cat"], e["ts"] / 1e6 - BEGAN, e["dur"] / 1e6, e["args"]["step"])
        for e in events
        if e["ph"] == "X"
    ]
    return sorted(found, key=lambda e: (e[2], -e[3]))


def test_phases_and_details_are_drawn_when_they_were(line, clock):
    watch = Stopwatch(timeline=line)
    with watch("train"):
        clock.now += 1.0
        with watch("backward"):
            clock.now += 2.0
        clock.now += 0.5
    with watch("log"):
        line.flush()
        clock.now += 0.25
    line.close()
    events = events_of(line.path)
    require_valid(events)
    assert complete(events) == [
        ("train", "phase", 0.0, 3.5, 7),
        ("backward", "detail", 1.0, 2.0, 7),
        ("log", "phase", 3.5, 0.25, 7),
    ]


def test_many_waits_for_groups_are_drawn_as_one(line, clock):
    watch = Stopwatch(timeline=line)
    for _ in range(2):
        with watch("sample"):
            for _ in range(50):
                with watch("generate"):
                    clock.now += 0.5
                clock.now += 0.001
            with watch("grade"):
                clock.now += 1.0
            clock.now += 1.0
    line.flush()
    events = events_of(line.path)
    require_valid(events)
    assert [name for name, *_ in complete(events)] == ["sample", "generate", "grade"] * 2
    assert [round(seconds, 3) for *_, seconds, _ in complete(events)] == [27.05, 25.049, 1.0] * 2
    assert sum(watch.seconds[f"sample/{part}"] for part in ("generate", "grade")) == pytest.approx(52.0)


def test_a_group_is_with_the_engine_then_with_the_graders_then_in_the_buffer(line, clock):
    group(line, clock, 3, 2.0, 0.5, 4.0)
    line.flush()
    found = [(track, begin - BEGAN, end - BEGAN, args) for track, begin, end, args in spans(events_of(line.path))]
    assert found == [
        ("engine", 0.0, 2.0, {"group": 3, "step": 7, "problem": "p3"}),
        ("graders", 2.0, 2.5, {"group": 3, "step": 7}),
        ("buffer", 2.5, 6.5, {"group": 3, "step": 7}),
    ]


def test_what_nobody_took_is_told_at_the_end(line, clock):
    line.flush()
    line.begin(("group", 1), problem="one")
    clock.now += 3.0
    line.close()
    ((track, begin, end, args),) = spans(events_of(line.path))
    assert (track, end - begin, args) == ("engine", 3.0, {"group": 1, "cancelled": True, "problem": "one"})


def test_a_finished_group_that_nobody_took_is_told_as_such_in_the_buffer_too(line, clock):
    line.flush()
    line.begin(("group", 1), "buffer")
    clock.now += 3.0
    line.close()
    assert [(track, args) for track, _, _, args in spans(events_of(line.path))] == [
        ("buffer", {"group": 1, "cancelled": True})
    ]


def test_a_cancelled_group_is_over_whatever_still_comes_of_it(line):
    line.begin(("group", 1), problem="one")
    line.end(("group", 1), cancelled=True)
    line.move(("group", 1), "graders")
    line.end(("group", 1))
    line.flush()
    assert [track for track, *_ in spans(events_of(line.path))] == ["engine"]


class Lengths:
    def grade(self, problem, text):
        return Score(float(len(text)), {})


class AtOnce:
    """An engine that answers as it is asked, with tokens of versions 2 and 3."""

    def submit(self, prompt, n, sampling, on_completion, group, priority, home=None):
        future = Future()
        for sample in range(n):
            found = completion("x" * (sample + 1))
            found.versions[:] = 2 + sample % 2
            on_completion(sample, found)
        future.set_result([])
        return future


def test_real_streams_and_graders_tell_of_their_groups(tmp_path):
    """With threads and processes as in a run; only the engine is of a few lines."""
    problems = [Problem(f"p{i}", ({"role": "user", "content": f"{i}"},), i) for i in range(20)]
    sampling, line = SamplingConfig(max_tokens=8), Timeline(tmp_path, lambda: 4)
    with Grader(Lengths(), workers=2, timeout_s=60.0) as grader:
        stream = GroupStream(AtOnce(), LetterTokenizer(), grader, times=line)
        for number, problem in enumerate(problems):
            stream.submit(number, problem, 3, sampling, number)
        got = [stream.next(within_s=60.0)[0] for _ in problems[:-1]]
        for number in got:
            line.end(("group", number))
        (rest,) = set(range(20)) - set(got)
        stream.cancel(rest)
        stream.close()
        in_order(sample_groups(problems[:5], 2, sampling, AtOnce(), LetterTokenizer(), grader, times=line))
    line.flush()
    events = events_of(line.path)
    require_valid(events)
    found = spans(events)
    trained = [s for s in found if "group" in s[3] and s[3]["group"] != rest]
    assert sorted((s[3]["group"], s[0]) for s in trained) == sorted(
        (number, track) for number in got for track in ("engine", "graders", "buffer")
    )
    for number in got:
        (engine, graders, buffer) = [s for s in trained if s[3]["group"] == number]
        assert engine[2] == graders[1] and graders[2] == buffer[1] and engine[1] <= engine[2] <= graders[2] <= buffer[2]
        told = {"group": number, "step": 4, "problem": f"p{number}", "tokens": 6, "versions": [2, 3]}
        assert engine[3] == told and graders[3] == buffer[3] == {"group": number, "step": 4}
    given_up = [s for s in found if s[3].get("group") == rest]
    assert given_up[0][0] == "engine" and all(s[3]["cancelled"] and "step" not in s[3] for s in given_up)
    held_out = [(s[3]["evaluation"], s[0]) for s in found if "evaluation" in s[3]]
    assert sorted(held_out) == [(number, track) for number in range(5) for track in ("engine", "graders")]


def test_readers_of_chromes_format_take_the_open_file(line, clock):
    group(line, clock, 1, 1.0, 1.0, 1.0)
    line.flush()
    group(line, clock, 2, 1.0, 1.0, 1.0)
    line.flush()
    assert as_chrome_reads(line.path) == events_of(line.path)
    names = {(e["name"], e["args"]["name"]) for e in events_of(line.path) if e["ph"] == "M"}
    assert names == {("process_name", line.path.parent.name), ("thread_name", "trainer")}


@every_row("torn", range(0, 600, 23))
def test_a_run_that_goes_on_cuts_a_torn_end_and_appends(tmp_path, clock, torn):
    first = Timeline(tmp_path, lambda: 1)
    group(first, clock, 1, 1.0, 1.0, 1.0)
    first.flush()
    whole = first.path.read_bytes()
    first.path.write_bytes(whole[: max(0, len(whole) - torn)])

    second = Timeline(tmp_path, lambda: 2)
    clock.now += 5.0
    group(second, clock, 2, 1.0, 1.0, 1.0)
    second.flush()
    events = events_of(second.path)
    assert as_chrome_reads(second.path) == events
    require_valid(events)
    assert [s[3]["group"] for s in spans(events)][-3:] == [2, 2, 2]
    kept = whole[: len(whole) - torn].rpartition(b"\n")[0].count(b'"ph":"b"')
    assert len(spans(events)) == kept + 3
    assert [e["name"] for e in events if e["ph"] == "i"][-1] == "start"


def test_the_timeline_of_a_killed_process_is_read_and_goes_on(tmp_path):
    """It is killed while it writes, again and again; what it was writing at that moment is lost, and nothing else."""
    code = """
import sys
from torchtune_ext.telemetry.timeline import Timeline
line = Timeline(sys.argv[1], lambda: 1)
for number in range(10**9):
    line.begin(("group", number), problem="p")
    line.move(("group", number), "graders")
    line.end(("group", number))
    line.flush()
    if number == 20:
        print(flush=True)
"""
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
        process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    events = events_of(tmp_path / "trace.json")
    require_valid(events)
    numbers = [s[3]["group"] for s in spans(events) if s[0] == "engine"]
    lives = [i for i, number in enumerate(numbers) if number == 0]
    assert len(lives) == 3
    for begin, end in zip(lives, [*lives[1:], len(numbers)], strict=True):
        assert numbers[begin:end] == list(range(end - begin)) and end - begin > 20


def test_a_run_that_fails_before_its_first_flush_leaves_no_file(line, clock):
    group(line, clock, 1, 1.0, 1.0, 1.0)
    line.close()
    assert not line.path.exists()


def test_a_disk_that_refuses_is_a_warning_and_the_file_stays_valid(line, clock, caplog):
    group(line, clock, 1, 1.0, 1.0, 1.0)
    line.flush()
    with full_disk(line.path.stat().st_size + 100):
        for number in (2, 3):
            group(line, clock, number, 1.0, 1.0, 1.0)
            line.flush()
            require_valid(events_of(line.path))
    group(line, clock, 4, 1.0, 1.0, 1.0)
    line.flush()
    events = events_of(line.path)
    require_valid(events)
    assert [s[3]["group"] for s in spans(events) if s[0] == "buffer"] == [1, 4]
    assert len(caplog.messages) == 2
    assert "cannot write" in caplog.messages[0] and "free disk space" in caplog.messages[0]
    assert "written again" in caplog.messages[1]


def test_damage_is_named(line, clock):
    group(line, clock, 1, 1.0, 1.0, 1.0)
    line.flush()
    whole = line.path.read_bytes()
    line.path.write_bytes(whole.replace(b'"ph":"b"', b'"ph:"b"', 1))
    with pytest.raises(ValueError, match=r"trace\.json, line \d+: not an event"):
        events_of(line.path)
    line.path.write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match="not a timeline"):
        events_of(line.path)


def test_a_step_of_64_groups_takes_as_much_of_the_disk_as_the_docs_say(line, clock):
    """52 KB, give or take the digits of numbers and the letters of problems."""
    for step in range(20):
        for number in range(64):
            line.begin(("group", 64 * step + number), problem=f"problem-{number}")
        for track, facts in (("graders", {"tokens": 12345, "versions": [step, step + 1]}), ("buffer", {})):
            for number in range(64):
                clock.now += 0.1
                line.move(("group", 64 * step + number), track, **facts)
        for number in range(64):
            line.end(("group", 64 * step + number))
        for i in range(16):
            line.phase(f"phase{i}/detail", clock.now + i, clock.now + i + 0.9)
        line.flush()
    assert 47e3 < line.path.stat().st_size / 20 < 57e3


def test_phases_are_found_by_name(line, clock):
    line.phase("train", 100.0, 103.0)
    line.flush()
    assert phases(events_of(line.path), "train") == {7: [(BEGAN, BEGAN + 3.0)]}


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    profile = timeline.Profile([2], str(tmp_path), rank=0)
    (tmp_path / "profile").touch()  # where its folder would be
    for step in (1, 2, 3):
        profile.begin(step)
        profile.close()
    assert len(caplog.messages) == 1 and "the trace of step 2 was not written" in caplog.text
    assert "profile" in CONTENTS  # what the next run in this folder sets aside
