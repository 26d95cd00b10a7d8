"""Chooses a few samples of a step for people who watch the run, as rows of a table whose columns never change.

A service that shows tables refuses a column which holds numbers in one row and text in another, so everything here has the
type of its field, and what a grader names as it likes (parts of a reward) is one text.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from torchtune_ext.groups import Group, Sample
from torchtune_ext.telemetry.excerpts import by_reward, cut_text, rewards_of, spaced

MAX_PROMPT, MAX_COMPLETION, MAX_NOTE = 2048, 4096, 1024  # characters
MAX_SAMPLES = 4  # of a group, evenly spaced over the reward, best and worst among them
_MARK = 48  # characters that `cut_text` may add to say what it left out


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One sample with its prompt and what became of it. Its fields are the columns of the table."""

    step: int
    chosen: str  # why its group is shown: "best" or "worst" mean reward, "widest" reward spread, or "not graded"
    problem: str  # id of the problem
    prompt: str  # as the model read it, cut to MAX_PROMPT characters
    completion: str  # the text, cut to MAX_COMPLETION characters; of a conversation with the reward of each turn
    reward: float | None  # None: it was not graded
    parts: str  # the named components of the reward, as JSON
    advantage: float | None
    note: str  # the grader's remark, or why there is no reward
    outcome: str  # "scored", "policy_failed", ... (`grading.Outcome`)
    finish: str  # why the engine stopped: "stop", "length"; or how a conversation ended (`grading.environments`)
    tokens: int  # that were sampled
    version: int | None  # of the policy that sampled the first token; None: there is no token


def sample_rows(
    step: int, groups: Sequence[Group], number: int, spell: Callable[[Sequence[int]], str] | None = None
) -> list[SampleRow]:
    """Returns the rows of `number` groups, the samples of each from the best to the worst.

    Args:
        step: the step of the groups.
        groups: all groups of the step, with rewards and advantages.
        number: of groups that are taken. They differ, so a step with fewer groups has fewer rows.
        spell: the text of a prompt's tokens, with what a chat template adds. None: its messages stand there.
    """
    return [
        _row(step, chosen, group, sample, spell)
        for chosen, group in chosen_groups(groups, number)
        for sample in spaced(by_reward(group), MAX_SAMPLES)
    ]


def chosen_groups(groups: Sequence[Group], number: int) -> list[tuple[str, Group]]:
    """Returns (kind, group) for `number` groups: of the highest mean reward, of the lowest, of the widest spread, and again.

    Groups of which no sample was graded are taken only where there is no other, since their notes say why.
    """
    rated = [(rewards, group) for group in groups if (rewards := rewards_of(group))]
    if not rated:
        return [("not graded", group) for group in groups[:number]]
    orders = {
        "best": sorted(rated, key=lambda pair: -fmean(pair[0])),
        "worst": sorted(rated, key=lambda pair: fmean(pair[0])),
        "widest": sorted(rated, key=lambda pair: min(pair[0]) - max(pair[0])),
    }
    kinds, picks = list(orders), []
    for place in range(min(number, len(rated))):
        kind = kinds[place % len(kinds)]
        taken = {id(group) for _, group in picks}
        picks.append((kind, next(group for _, group in orders[kind] if id(group) not in taken)))
    return picks


def clean(text: str) -> str:
    """Replaces what is no Unicode text: halves of a surrogate pair, which no encoder takes, and NUL, at which some stop."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def _row(
    step: int, chosen: str, group: Group, sample: Sample, spell: Callable[[Sequence[int]], str] | None
) -> SampleRow:
    completion, outcome, score = sample.completion, sample.outcome, sample.score
    if spell is not None:
        prompt = spell(group.prompt_tokens)
    else:
        prompt = "\n\n".join(f"{message['role']}: {message['content']}" for message in group.problem.messages)
    note = (score.note if score else "") or (outcome.cause if outcome else "")
    return SampleRow(
        step=step,
        chosen=chosen,
        problem=clean(str(group.problem.id)),
        prompt=_cut(prompt, MAX_PROMPT),
        completion=_cut(_text(sample), MAX_COMPLETION),
        reward=_finite(score.reward) if score else None,
        parts=clean(json.dumps({name: _finite(v) for name, v in score.parts.items()})) if score else "{}",
        advantage=_finite(sample.advantage),
        note=_cut(note, MAX_NOTE),
        outcome=outcome.kind if outcome else "not graded",
        finish=str(completion.finish_reason),
        tokens=len(completion.sampled),
        version=int(completion.versions[0]) if len(completion.versions) else None,
    )


def _text(sample: Sample) -> str:
    """Returns the text of a sample; of a conversation each turn behind its role and what the environment gave for it."""
    heads = [f"{m['role']}{'' if reward is None else f' (reward {reward:g})'}" for m, reward in sample.rated_messages]
    lines = [f"{head}: {m['content']}" for head, m in zip(heads, sample.messages, strict=True)]
    return "\n".join(lines) or sample.text


def _cut(text: str, most: int) -> str:
    text = clean(str(text))
    return text if len(text) <= most else cut_text(text, most - _MARK)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
