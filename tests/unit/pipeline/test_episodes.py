"""Episodes: a scripted engine with real environments in their own processes.

With a real engine: tests/integration/test_conversations.py.
"""

import asyncio
import json
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from helpers.letter_tokens import LetterTokenizer
from helpers.loop_engine import LoopEngine, sample_index, settle
from helpers.scripted_environments import Scripted, Sticky
from helpers.waiting import wait_until
from torchtune_ext.grading.environments import FINISH_REASONS, EnvironmentPool
from torchtune_ext.pipeline.groups import group_from_record, group_to_json
from torchtune_ext.pipeline.packing import pack
from torchtune_ext.pipeline.rollout import GroupStream, PendingGroup
from torchtune_ext.run.errors import UsageError
from torchtune_ext.sampling.engine import Priority, SamplingConfig
from torchtune_ext.sampling.types import Completion
from torchtune_ext.tasks.task import Problem

PROBLEM = Problem("p", ({"role": "user", "content": "?"},), answer=None, tools=({"name": "look"},))
SAMPLING = SamplingConfig(max_tokens=20, seed=7)


class TurnLetters(LetterTokenizer):
    """The next turn follows the answers in brackets."""

    def turn_boundary_ids(self, messages, end, tools=(), problem=()):
        assert problem == PROBLEM.messages  # a template may read its system prompt again
        if messages[0]["role"] == "tool":
            raise UsageError("the template has no tools")
        return [*"".join(f"[{message['content']}]" for message in messages).encode()]

    def content_spans(self, context, messages, tools=(), problem=()):
        (message,) = messages
        return [(len(context) - 1 - len(message["content"]), len(context) - 1)]


class Policy(LoopEngine):
    """A fake engine: `says` maps prompt and index to the text of a completion, or to a finish reason."""

    def __init__(self, says):
        super().__init__(max_model_len=60)
        self.says, self.calls, self.homes, self.version = says, [], [], 0

    async def generate(self, request, affinity_key=None):
        sampling = request.sampling
        self.calls.append(("".join(map(chr, request.prompt)), sampling.seed, request.seed_index, request.priority))
        self.homes.append(affinity_key)
        text, *reason = self.says(self.calls[-1][0], sample_index(request)).split("|")
        ids = np.array([ord(letter) for letter in text], np.int32)
        versions = np.full(len(ids), len(self.calls), np.int32)
        logprobs = np.full(len(ids), -0.5, np.float32)
        return Completion(ids, logprobs, versions, reason[0] if reason else "stop")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with one file per running environment."""
    return tmp_path_factory.mktemp("environments")


@pytest.fixture(scope="module")
def environments(folder):
    with EnvironmentPool(Scripted(folder), workers=2, timeout_s=2.0) as environments:
        yield environments


class Forgetful(TurnLetters):
    """The next turn follows only the prompt and the last answer."""

    history = "template"

    def context_ids(self, problem, messages, turns, tools=()):
        return [*self.prompt_ids(problem), *self.turn_boundary_ids(messages[-1:], 0, problem=problem)]


def play(environments, says, samples=1, groups=1, tokenizer=None):
    """Runs groups of episodes to their end. Returns the groups and the engine."""
    engine = Policy(says)
    stream = GroupStream(engine, tokenizer or TurnLetters(), environments)
    for number in range(groups):
        stream.submit(number, PROBLEM, samples, SAMPLING, seed_index=number)
    for _ in range(groups):
        assert stream.wait_next(timeout_s=60.0) is not None
    stream.close()
    return [stream.pop(number) for number in range(groups)], engine


def test_episode_environment_tokens_are_appended_but_masked(environments):
    (group,), engine = play(environments, lambda prompt, _: {"?": "more 2", "?more 2[go]": "look"}.get(prompt, "win"))
    (sample,) = group.samples
    completion = sample.completion
    assert [prompt for prompt, *_ in engine.calls] == ["?", "?more 2[go]", "?more 2[go]look[go]"]
    assert "".join(map(chr, completion.tokens)) == "more 2[go]look[go]win"
    assert completion.turns == ((0, 6), (10, 14), (18, 21)) and completion.finish_reason == "completed"
    assert (completion.logprobs == np.array([-0.5] * 6 + [0] * 4 + [-0.5] * 4 + [0] * 4 + [-0.5] * 3, np.float32)).all()
    assert completion.sampled_indices.tolist() == [*range(6), *range(10, 14), *range(18, 21)]
    assert completion.content_spans == ((7, 9), (15, 17))  # "go" without its brackets
    assert completion.versions[completion.sampled_indices].tolist() == [1] * 6 + [2] * 4 + [3] * 3
    assert (sample.score.reward, sample.turn_rewards, sample.score.note) == (3.0, (2.0, 0.0, 1.0), "note 2")
    assert sample.text == "assistant: more 2\nuser: go\nassistant: look\nuser: go\nassistant: win"
    record = json.loads(group_to_json(group))
    stored = group_from_record(record)
    assert group_to_json(stored) == group_to_json(group) and stored.samples[0].messages == sample.messages
    assert stored.problem == PROBLEM and stored.samples[0].completion.content_spans == completion.content_spans
    del record["samples"][0]["content"]  # as in a file of an earlier version
    assert group_from_record(record).samples[0].completion.content_spans == ()


def test_episode_branches_fit_into_one_row(environments):
    """Each context is short; the episode ends before all its branches exceed max_model_len."""
    groups, engine = play(environments, lambda prompt, _: "more 0.0000000000000", samples=2, tokenizer=Forgetful())
    assert max(len(prompt) for prompt, *_ in engine.calls) < 20
    for sample in groups[0].samples:
        completion = sample.completion
        assert (
            completion.finish_reason == "context_overflow"
            and len(completion.kept_prefix_lens) == len(completion.turns) > 1
        )
        # The prompt, two turns of 20 tokens and one answer; with another answer and turn it would be 69 tokens.
        assert 1 + len(completion.tokens) == 1 + 20 + 4 + 20
    trained = replace(groups[0], samples=tuple(replace(s, in_loss=True, advantage=1.0) for s in groups[0].samples))
    rows, stats = pack([trained], 60)
    assert stats.labels == sum(len(s.completion.sampled_indices) for s in trained.samples) and len(rows) == 2


def test_pending_group_describes_missing_results():
    group = PendingGroup(0, PROBLEM, TurnLetters(), 5, SAMPLING, 0, Priority.SAMPLE, True)
    turn = Completion(np.ones(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")
    for episode in group.episodes[1:]:
        episode.add_turn(turn, "x")
    # The second and third wait for a process, the fourth for an answer, and the last is finished.
    group.episodes[3].has_environment = True
    group.samples[4] = group.episodes[4].to_sample("max_turns")
    says = "4 of 5 episodes are not finished: 1 wait for the engine, 2 for a free environment process, 1 for the environment's reply"
    assert says in group.pending_text


def test_episode_turns_have_own_seeds_and_priority(environments):
    _, engine = play(environments, lambda prompt, _: "more" if prompt.count("go") < 2 else "win", samples=3, groups=2)
    first, later = [call for call in engine.calls if call[0] == "?"], [call for call in engine.calls if call[0] != "?"]
    assert [call[1:] for call in first] == [(7, 0, Priority.SAMPLE)] * 3 + [(7, 1, Priority.SAMPLE)] * 3
    assert len(later) == 12 == len({(seed, group) for _, seed, group, _ in later})
    assert {priority for *_, priority in later} == {Priority.TURN} and Priority.TURN < Priority.SAMPLE
    assert len(set(map(id, engine.homes))) == 2 and None not in engine.homes


def test_episode_group_shares_environment_and_random_seed(environments):
    groups, _ = play(environments, lambda *_: "win", samples=4, groups=2)
    seeds = [{(s.score.parts["seed"], s.score.parts["drawn"]) for s in group.samples} for group in groups]
    assert [len(each) for each in seeds] == [1, 1] and seeds[0] != seeds[1]


@pytest.mark.parametrize(
    ("says", "ending", "kind", "reward", "cause"),
    [
        ("win", "completed", "scored", 1.0, ""),
        ("more 1", "max_turns", "scored", 3.0, ""),
        ("more 1|length", "length", "scored", 0.0, ""),
        ("more 1|early_stop", "early_stop", "scored", 0.0, ""),
        ("more 00000000000001", "context_overflow", "scored", 2.0, ""),
        ("raises", "environment_failed", "infra_failed", None, "KeyError: 'lost'"),
        ("dies", "environment_failed", "infra_failed", None, "the environment's process crashed: signal SIGKILL"),
        ("hangs", "step_timeout", "timed_out", None, "no answer within 2 s; the process was killed"),
        (
            "hurries",
            "environment_failed",
            "infra_failed",
            None,
            "a message of the assistant, whose turns only the policy",
        ),
        ("is_silent", "environment_failed", "infra_failed", None, "returned no message, and done=False"),
        ("overpays", "environment_failed", "infra_failed", None, "reward=nan, which is not finite"),
        (
            "uses_a_tool",
            "environment_failed",
            "infra_failed",
            None,
            "reply cannot be rendered: the template has no tools",
        ),
        ("says_a_number", "environment_failed", "infra_failed", None, "step returned the message"),
        ("breaks_a_letter", "environment_failed", "infra_failed", None, "surrogates not allowed"),
        ("answers_text", "environment_failed", "infra_failed", None, "returned str; expected an EnvironmentReply"),
    ],
)
def test_episode_finish_reason_names_its_end(environments, says, ending, kind, reward, cause):
    """Each group also contains a winning episode: a failure affects only its own episode."""
    (group,), _ = play(environments, lambda prompt, i: says if i == 0 else "win", samples=2)
    sample, other = group.samples
    assert ending in FINISH_REASONS  # so the fractions of all endings add up to 1
    assert (sample.completion.finish_reason, sample.outcome.kind) == (ending, kind)
    assert (sample.score and sample.score.reward) == reward and (reward is not None or cause in sample.outcome.cause)
    assert (other.completion.finish_reason, other.score.reward) == ("completed", 1.0)


def test_episode_message_keeps_keys_json_lacks(environments):
    (group,), _ = play(environments, lambda prompt, i: "remembers")
    (stored,) = group_from_record(json.loads(group_to_json(group))).samples
    assert stored.messages[-1] == {"role": "user", "content": "go", "distance": "(1+2j)"}


def test_environment_crash_between_turns_fails_only_its_episode(environments):
    def says(prompt, index):
        if index == 0 and prompt == "?":
            return "dies_later"
        if "later" in prompt:
            time.sleep(0.5)
        return "win"

    (group,), _ = play(environments, says, samples=3)
    kinds = [sample.outcome.kind for sample in group.samples]
    assert kinds == ["infra_failed", "scored", "scored"]
    assert "exited between two turns" in group.samples[0].outcome.cause


def test_open_environments_never_exceed_worker_processes(environments, folder):
    groups, _ = play(environments, lambda prompt, _: "look" if prompt.count("go") < 2 else "win", samples=5, groups=3)
    samples = [sample for group in groups for sample in group.samples]
    assert {sample.completion.finish_reason for sample in samples} == {"completed"} and len(samples) == 15
    assert {sample.score.parts["alive"] for sample in samples} <= {1.0, 2.0}
    wait_until(lambda: environments._free.qsize() == 2)


def test_cancelled_group_releases_its_environment_processes(tmp_path):
    """Two hang, two wait for a process; the next group needs both processes."""
    with EnvironmentPool(Scripted(tmp_path), workers=2, timeout_s=2.0) as environments:
        stream = GroupStream(Policy(lambda prompt, _: "hangs"), TurnLetters(), environments)
        stream.submit(0, PROBLEM, 4, SAMPLING, seed_index=0)
        wait_until(lambda: len(list(tmp_path.glob("alive-*"))) == 2)
        stream.cancel(0)
        stream._engine.says = lambda *_: "win"
        stream.submit(1, PROBLEM, 2, SAMPLING, seed_index=1)
        assert stream.wait_next(timeout_s=30.0) == 1
        assert [sample.score.reward for sample in stream.pop(1).samples] == [1.0, 1.0]
        wait_until(lambda: environments._free.qsize() == 2)
        stream.close()


def test_stream_closes_after_environments_have_closed(tmp_path, caplog):
    with EnvironmentPool(Scripted(tmp_path), workers=2, timeout_s=60.0) as environments:
        stream = GroupStream(Policy(lambda prompt, _: "hangs"), TurnLetters(), environments)
        for number in (0, 1):
            stream.submit(number, PROBLEM, 1, SAMPLING, seed_index=number)
        wait_until(lambda: len(list(tmp_path.glob("alive-*"))) == 2)
        environments.close()
        stream.close()
    settle()
    assert not caplog.records
    wait_until(lambda: not any(thread.name.startswith("torchtune-ext-groups") for thread in threading.enumerate()))


def test_environment_hung_close_delays_no_other_episode(tmp_path):
    with EnvironmentPool(Sticky(tmp_path), workers=1, timeout_s=0.5) as environments:
        (group,), _ = play(environments, lambda *_: "win", samples=3)
        assert [sample.score.reward for sample in group.samples] == [1.0] * 3


def test_cancelled_episode_leaves_process_to_next(tmp_path):
    """A group is canceled during its turn. The next episode gets the process after its environment is closed."""
    message = {"role": "assistant", "content": "more 1"}

    async def play(environments, folder):
        async with environments.slot() as process:
            reply = await asyncio.wrap_future(environments.step(process, message, (PROBLEM, 0)))
            await asyncio.sleep(60 if folder else 0)
        return reply

    async def play_two(environments):
        first = asyncio.create_task(play(environments, tmp_path))
        second = asyncio.create_task(play(environments, None))
        while not list(tmp_path.glob("alive-*")):
            await asyncio.sleep(0.01)
        assert not second.done()
        first.cancel()
        reply = await second
        assert first.cancelled()
        return reply

    with EnvironmentPool(Scripted(tmp_path), workers=1, timeout_s=20.0) as environments:
        assert asyncio.run(play_two(environments)).reward == 1.0
