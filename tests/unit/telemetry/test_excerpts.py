"""Which rollouts a page carries: groups with a signal first, a good and a bad sample, tokens as text where they can be."""

import base64
import gzip
import json

import numpy as np

from helpers.records import make_guess_conversation, make_sample
from helpers.report_runs import byte_tokenizer
from torchtune_ext.grading import Ungraded
from torchtune_ext.pipeline.episodes import Episode
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.pipeline.rollout_store import RolloutStore, rollout_paths
from torchtune_ext.tasks.task import EnvironmentReply, Problem, Score
from torchtune_ext.telemetry.excerpts import ExcerptLimits, collect_excerpts, sample_record


def group(name, rewards, texts=None, advantages=None, tokens=None):
    """A group whose samples have these rewards; None: the sample could not be graded."""
    known = [reward for reward in rewards if reward is not None]
    mean, samples = float(np.mean(known)) if known else 0.0, []
    for i, reward in enumerate(rewards):
        score = None if reward is None else Score(reward, {})
        outcome = score or Ungraded("infra_failed", "broke")
        advantage = 0.0 if reward is None else advantages[i] if advantages else reward - mean
        text = texts[i] if texts else f"{name} {i}"
        samples.append(
            make_sample(
                tokens[i] if tokens else [i, 7],
                text=text,
                outcome=outcome,
                advantage=advantage,
                in_loss=bool(advantage),
            )
        )
    problem = Problem(name, ({"role": "user", "content": f"say {name}"},), "")
    return Group(problem, np.arange(3, dtype=np.int32), tuple(samples))


def stored(folder, steps):
    store = RolloutStore(folder)
    for step, groups in steps.items():
        store.write(step, groups)
    return rollout_paths(folder)


def unpacked(blob):
    return json.loads(gzip.decompress(base64.b64decode(blob)))


def test_excerpts_prefer_nonzero_variance_groups_and_keep_others(tmp_path):
    silent = [group(f"silent-{n}", [0.5, 0.5]) for n in range(9)]
    loud = [group(f"loud-{n}", [0.5 - n / 20, 0.5 + n / 20]) for n in range(1, 10)]
    paths = stored(tmp_path, {1: silent + loud, 2: silent[:4] + loud[:2], 3: loud, 4: silent})

    def ids(number):
        excerpts = collect_excerpts(paths, ExcerptLimits(groups_per_step=number))
        assert [entry["signals"] for entry in excerpts.index] == [9, 2, 9, 0]
        return [
            [name for name, _, _ in (g["id"].partition("-") for g in unpacked(blob))]
            for blob in excerpts.blobs.values()
        ]

    assert ids(12) == [["loud"] * 9 + ["silent"] * 3, ["loud"] * 2 + ["silent"] * 4, ["loud"] * 9, ["silent"] * 9]
    assert ids(6) == [["loud"] * 5 + ["silent"], ["loud"] * 2 + ["silent"] * 4, ["loud"] * 6, ["silent"] * 6]
    assert ids(1) == [["loud"], ["loud"], ["loud"], ["silent"]]
    whole = unpacked(collect_excerpts(paths, ExcerptLimits(groups_per_step=4)).blobs[3])
    spreads = [g["spread"] for g in whole]
    assert spreads == sorted(spreads, reverse=True) and whole[0]["id"] == "loud-9" and whole[-1]["id"] == "loud-1"


def leave_a_tokenizer(folder, *texts):
    """One of bytes, of some words in `texts`, and of a special token."""
    tokenizer = byte_tokenizer(texts, size=280)
    tokenizer.add_special_tokens(["<|end|>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def test_excerpts_show_decoded_prompt_with_available_tokenizer(tmp_path, caplog):
    tokenizer = leave_a_tokenizer(tmp_path / "model", "the cat sat on the mat, the end")
    excerpts = collect_excerpts(
        stored(tmp_path, {1: [group("g", [0.0, 1.0])]}), ExcerptLimits(), [tmp_path / "nowhere", tmp_path / "model"]
    )
    (shown,) = unpacked(excerpts.blobs[1])
    assert shown["read"] == tokenizer.decode([0, 1, 2], skip_special_tokens=False) and caplog.records == []


def conversations(**rest):
    """A group of two conversations about the same number, one of which ran out of turns."""
    won, lost = (
        make_guess_conversation(advantage=0.5, in_loss=True, **rest),
        make_guess_conversation("max_turns", advantage=-0.5, in_loss=True, **rest),
    )
    return Group(Problem("game", ({"role": "user", "content": "40-70"},), 58), np.arange(3), (won, lost))


def test_excerpts_episode_is_shown_by_turns(tmp_path):
    (shown,) = unpacked(collect_excerpts(stored(tmp_path, {1: [conversations()]}), ExcerptLimits()).blobs[1])
    sample = shown["samples"][0]
    assert [(m["role"], m["content"], m["reward"]) for m in sample["messages"]] == [
        ("assistant", "55", 0.0), ("user", "higher", None), ("assistant", "62", 0.0), ("user", "lower", None),
        ("assistant", "58", 1.0),
    ]  # fmt: skip
    assert sample["turns"] == [[0, 3], [6, 9], [12, 15]]
    assert [each["finish"] for each in shown["samples"]] == ["completed", "max_turns"]


def test_excerpts_environment_tokens_excluded_from_sampled_values(tmp_path):
    excerpts = collect_excerpts(stored(tmp_path, {1: [conversations()]}), ExcerptLimits())
    sample = unpacked(excerpts.blobs[1])[0]["samples"][0]
    assert (sample["count"], sample["total"]) == (9, 15)
    assert sample["logprob"] == -2.0, "of -1, -2 and -3, not of the zeros between the turns"
    assert sample["versions"] == [[0, 3], [1, 3], [2, 3]]


def test_excerpts_single_turn_truncated_episode_is_shown(tmp_path):
    episode = Episode()
    episode.add_turn(make_sample([1, 2], [-1, -3], finish_reason="length").completion, "It is")
    cut = Group(Problem("game", (), 58), np.arange(3), (episode.to_sample("length"),))
    (shown,) = unpacked(collect_excerpts(stored(tmp_path, {1: [cut]}), ExcerptLimits()).blobs[1])[0]["samples"]
    assert shown["messages"] == [{"role": "assistant", "content": "It is", "reward": None}]
    assert (shown["turns"], shown["finish"], shown["reward"], shown["logprob"]) == ([[0, 2]], "length", 0.0, -2.0)


def test_excerpts_long_episode_truncated_per_message():
    episode = Episode()
    for turn in range(9):
        if turn:
            episode.set_next_context([*episode.path, 3], "")
        episode.add_turn(make_sample([1, 2]).completion, "t" * 1000)
        episode.add_reply(EnvironmentReply([{"role": "user", "content": "yes"}]))
    shown = sample_record(episode.to_sample("max_turns"), 3600)["messages"]
    assert [m["content"] for m in shown[1::2]] == ["yes"] * 9
    assert all(200 < len(m["content"]) < 250 and "800 characters left out" in m["content"] for m in shown[::2])


def test_excerpts_without_tokenizer_show_only_messages(tmp_path, caplog):
    paths = stored(tmp_path, {1: [group("g", [0.0, 1.0])]})
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "tokenizer.json").write_text("{")

    def read(*tokenizers):
        return unpacked(collect_excerpts(paths, ExcerptLimits(), tokenizers).blobs[1])[0]["read"]

    assert read() is None and not caplog.messages
    assert read(tmp_path / "damaged") is None and "cannot be read" in caplog.text
