"""GroupStream with a scripted engine and real graders in their own processes."""

import sys
import threading
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest

from helpers.letter_tokens import LetterTokenizer, completion
from helpers.loop_engine import LoopEngine, ManualRequest, loop_thread, sample_index, settle
from helpers.manual_engine import wait_for_groups
from helpers.waiting import wait_until
from torchtune_ext.grading import Grader
from torchtune_ext.pipeline import rollout
from torchtune_ext.pipeline.rollout import GroupStream, collect_in_order, sample_groups
from torchtune_ext.sampling.engine import EngineFailed, SamplingConfig
from torchtune_ext.tasks.task import Problem, Score
from torchtune_ext.telemetry.step_metrics import Timer

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # The graders need not import PyTorch with this module.
PROBLEMS = [Problem(str(i), ({"role": "user", "content": f"{i}?"},), i) for i in range(3)]
SAMPLING = SamplingConfig(max_tokens=8, seed=5)


class Told(LoopEngine):
    """A scripted engine: `script` runs once all problems are submitted, then the test completes requests."""

    def __init__(self):
        super().__init__(max_model_len=10)
        self.prompts, self.requests, self.script = [], {}, []

    def schedule(self, work, priority):
        super().schedule(work, priority)
        if len(self.futures) == len(PROBLEMS):
            self.play()
        return self.futures[-1]

    async def generate(self, request, affinity_key=None):
        p, s = request.seed_index, sample_index(request)
        assert p == len(self.prompts) - (s > 0)
        self.prompts[p:] = [request.prompt]
        self.requests[p, s] = ManualRequest()
        return await self.requests[p, s].wait()

    def play(self):
        for drawn in self.script:
            self.draw(*drawn)

    def draw(self, p, s, text):
        self.requests[p, s].complete(completion(text))


class Slow:
    """Rewards the length of a text. A text that is a path waits until the file exists."""

    def grade(self, problem, text):
        while text.startswith("/") and not Path(text).exists():
            time.sleep(0.01)
        return Score(float(len(text)), {})


@pytest.fixture(scope="module")
def grader():
    with Grader(Slow(), workers=2, timeout_s=20.0) as grader:
        grader.grade([(PROBLEMS[0], "x")])  # wait until the workers have started
        yield grader


@pytest.fixture
def engine():
    return Told()


class Seen(list):
    """A progress sink that records the rewards."""

    def add(self, count, tokens):
        pass

    def add_reward(self, reward):
        self.append(reward)


def stream_of(engine, grader, watcher=None):
    return sample_groups(PROBLEMS, 2, SAMPLING, engine, LetterTokenizer(), grader, watcher)


def rewards(group):
    return [sample.score.reward for sample in group.samples]


def test_stream_yields_complete_groups_while_others_sample(engine, grader):
    engine.script = [(0, 1, "b"), (2, 1, "ccc"), (1, 0, "x"), (2, 0, "cc")]
    arrivals = Seen()
    stream = stream_of(engine, grader, arrivals)
    index, group = next(stream)
    assert (index, group.problem, rewards(group)) == (2, PROBLEMS[2], [2.0, 3.0])
    assert engine.prompts[2] == group.prompt_tokens.tolist() == [ord("2"), ord("?")]
    engine.draw(0, 0, "bbbbb")
    index, group = next(stream)
    assert (index, rewards(group), [sample.text for sample in group.samples]) == (0, [5.0, 1.0], ["bbbbb", "b"])
    assert not any(sample.advantage or sample.in_loss for sample in group.samples)
    engine.draw(1, 1, "")
    assert [index for index, _ in stream] == [1]
    assert sorted(arrivals) == [0.0, 1.0, 1.0, 2.0, 3.0, 5.0]


def test_batch_follows_problem_order(engine, grader):
    engine.script = [(p, s, "x" * (2 * p + s)) for p in (2, 0, 1) for s in (1, 0)]
    groups = collect_in_order(stream_of(engine, grader))
    assert [rewards(group) for group in groups] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


def test_stream_slow_grade_delays_only_its_group(engine, grader, tmp_path):
    """If the other groups waited for it, its grading would time out."""
    slow = str(tmp_path / "go on")
    engine.script = [(0, 0, slow), *((p, s, "quick") for p in (1, 2) for s in (0, 1))]
    stream = stream_of(engine, grader)
    assert {index for index, _ in islice(stream, 2)} == {1, 2}
    Path(slow).touch()
    engine.draw(0, 1, "a")
    index, group = next(stream)
    assert (index, rewards(group)) == (0, [float(len(slow)), 1.0])


def test_stream_close_cancels_pending_requests(engine, grader):
    engine.script = [(0, 0, "a"), *((p, s, "a") for p in (1, 2) for s in (0, 1))]
    stream = stream_of(engine, grader)
    assert {index for index, _ in islice(stream, 2)} == {1, 2}
    stream.close()
    assert [future.cancelled() for future in engine.futures] == [True, False, False]


def test_stream_request_refused_by_engine_raises_at_once(engine, grader):
    wrong = [Problem("long", ({"role": "user", "content": "far too long"},), 0)]
    with pytest.raises(ValueError, match="exceeds engine.max_model_len"):
        next(sample_groups([PROBLEMS[0], *wrong], 2, SAMPLING, engine, LetterTokenizer(), grader))
    assert engine.futures[0].cancelled(), "the group before it is sampled for nobody"


def test_groups_that_were_whole_come_before_the_error(engine, grader):
    engine.script = [(1, 0, "a"), (1, 1, "a"), (0, 0, "a")]
    stream = stream_of(engine, grader)
    assert next(stream)[0] == 1
    engine.requests[0, 1].fail(EngineFailed("beyond help"))
    with pytest.raises(EngineFailed, match="beyond help"):
        next(stream)


def test_stream_ends_when_engine_closes(engine, grader):
    engine.script = [(0, 0, "a")]
    stream = stream_of(engine, grader)
    engine.play = lambda: [Told.play(engine), *(future.cancel() for future in engine.futures)]
    with pytest.raises(EngineFailed, match="closed"):
        next(stream)


def test_stream_ends_when_grader_closes(engine):
    engine.script = [(0, 0, "/no such file"), (0, 1, "a")]
    grader = Grader(Slow(), timeout_s=20.0)
    stream = stream_of(engine, grader)
    draw = engine.draw
    engine.draw = lambda *args: (draw(*args), grader.close())
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)
    assert [future.cancelled() for future in engine.futures] == [False, True, True]


def test_work_on_completions_counts_while_the_engine_samples(engine, grader):
    """Otherwise the tokens/s of "generate" would count only the waits."""
    engine.script = [(p, s, "x") for p in range(3) for s in (0, 1)]
    watch, slow = Timer(), LetterTokenizer()
    slow.decode = lambda ids: time.sleep(0.02) or "x"
    stream = sample_groups(PROBLEMS, 2, SAMPLING, engine, slow, grader, None, watch)
    collect_in_order(stream)
    assert watch.seconds["generate"] >= 6 * 0.02


def test_an_evaluation_is_given_up_after_silence(engine, grader, monkeypatch):
    """Each completion restarts the deadline. Time outside of a wait does not count."""
    engine.script = [(p, s, "x") for p in (0, 1) for s in (0, 1)]
    stream = sample_groups(PROBLEMS, 2, SAMPLING, engine, LetterTokenizer(), grader, deadline_s=0.5)
    now = time.monotonic()
    monkeypatch.setattr(rollout, "time", SimpleNamespace(monotonic=lambda: now))  # the duration of grading varies
    assert {next(stream)[0], next(stream)[0]} == {0, 1}
    monkeypatch.undo()
    time.sleep(0.6)
    begun = time.monotonic()
    with pytest.raises(
        TimeoutError,
        match=rf"rollouts\.deadline_s=0\.5\), waiting for 1 group: problem '{PROBLEMS[2].id}': submitted",
    ):
        next(stream)
    assert time.monotonic() - begun > 0.5
    assert engine.futures[2].cancelled(), "what nobody waits for any more is ended"


def test_no_problems_no_groups(engine, grader):
    assert collect_in_order(sample_groups([], 2, SAMPLING, engine, LetterTokenizer(), grader)) == []


@pytest.fixture
def arrivals():
    return Seen()


@pytest.fixture
def stream(engine, grader, arrivals):
    """A stream with groups 0 and 1 in flight, of two completions each."""
    stream = GroupStream(engine, LetterTokenizer(), grader, arrivals)
    for number in (0, 1):
        stream.submit(number, PROBLEMS[number], 2, SAMPLING, seed_index=number)
    yield stream
    stream.close()


def test_stream_grades_without_a_waiting_caller(engine, stream, arrivals):
    for p, s in ((0, 0), (0, 1), (1, 0)):
        engine.draw(p, s, "x" * (p + s))
    wait_until(lambda: sorted(arrivals) == [0.0, 1.0, 1.0])
    assert "0 of 2 texts are not graded" in stream.describe_pending(
        0
    ) and "not finished 1 of 2 completions" in stream.describe_pending(1)
    wait_for_groups(stream, 0)
    assert stream.wait_next(timeout_s=0.0) == 0 and rewards(stream.pop(0)) == [0.0, 1.0]
    assert stream.wait_next(timeout_s=0.0) is None


def test_stream_ignores_late_results_of_cancelled_group(engine, stream, arrivals):
    engine.draw(0, 0, "xxx")
    wait_until(lambda: "not finished 1 of 2" in stream.describe_pending(0))
    assert stream.cancel(0) == 3 and engine.futures[0].cancelled()
    stream.submit(0, PROBLEMS[0], 2, SAMPLING, seed_index=2)
    for p, s, text in ((0, 1, "late"), (2, 0, "a"), (2, 1, "bb"), (1, 0, ""), (1, 1, "")):
        engine.draw(p, s, text)
    assert {stream.wait_next(timeout_s=20.0) for _ in range(2)} == {0, 1}
    assert [rewards(stream.pop(number)) for number in (0, 1)] == [[1.0, 2.0], [0.0, 0.0]]
    assert stream.wait_next(timeout_s=0.0) is None and not stream.is_generating()


def test_stream_group_cancelled_before_start_requests_nothing(grader):
    class Unsettled(Told):
        def schedule(self, work, priority):
            return loop_thread().schedule(work)

    engine, busy = Unsettled(), threading.Event()

    async def block():
        busy.wait(20.0)

    stream = GroupStream(engine, LetterTokenizer(), grader)
    loop_thread().schedule(block())
    stream.submit(0, PROBLEMS[0], 2, SAMPLING, seed_index=0)
    assert stream.is_generating() and stream.cancel(0) == 0
    busy.set()
    settle()
    assert not engine.requests and stream.wait_next(timeout_s=0.0) is None
    stream.close()


def test_stream_finished_group_can_be_cancelled_until_taken(engine, stream, arrivals):
    for p, s in ((0, 0), (0, 1), (1, 0), (1, 1)):
        engine.draw(p, s, "xx")
    wait_until(lambda: len(arrivals) == 4)
    assert stream.cancel(0) == 4
    assert stream.wait_next(timeout_s=20.0) == 1 and stream.wait_next(timeout_s=0.0) is None
    assert stream.cancel(1) == 4 and not stream.finished


class SeenWhole(Seen):
    """A progress sink that also records the lengths of the completions."""

    def __init__(self):
        super().__init__()
        self.lengths = []

    def add(self, count, tokens):
        self.lengths.append(tokens)


def test_stream_progress_includes_earlier_arrivals_of_own_groups(engine, stream, arrivals):
    stream.submit(2, PROBLEMS[2], 2, SAMPLING, seed_index=2)
    for p, s, text in ((0, 0, "a"), (0, 1, "bb"), (1, 1, "ccc"), (2, 0, "dddd")):
        engine.draw(p, s, text)
    wait_until(lambda: len(arrivals) == 4)
    wait_for_groups(stream, 0)
    assert stream.wait_next(timeout_s=0.0) == 0
    watcher = SeenWhole()
    with stream.report_progress(watcher, max_number=2):
        assert sorted(watcher.lengths) == sorted(watcher) == [1, 2, 3]
        engine.draw(2, 1, "eeeee")
        engine.draw(1, 0, "ffffff")
        assert sorted({stream.wait_next(timeout_s=20.0) for _ in range(2)}) == [1, 2]
    assert watcher.lengths[3:] == watcher[3:] == [6] and len(arrivals) == 4
