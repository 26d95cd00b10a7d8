"""The part of a run's rollouts that a page of the report carries.

All samples would make the page too large to mail. So it holds some steps, some groups of each and some samples of each
group, long texts without their middle, and says how many there were.
"""

import base64
import gzip
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from torchtune_ext.grading.outcomes import Ungraded
from torchtune_ext.pipeline.groups import Group, Sample, run_length_encode
from torchtune_ext.pipeline.rollout_store import read_rollouts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExcerptLimits:
    """How much of the rollouts a page carries; the curves are always whole."""

    max_steps: int = 80  # evenly spaced, first and last among them
    groups_per_step: int = 12  # those with a signal first, evenly spaced over the spread of their rewards
    samples_per_group: int = 16  # evenly spaced over the reward, best and worst among them
    max_characters: int = 16_000  # longer texts lose their middle
    max_mib: float = 16.0  # all rollouts in the page together


DEFAULT_LIMITS = ExcerptLimits()


@dataclass(slots=True)
class Excerpts:
    """What a page carries of the rollouts."""

    blobs: dict[int, str] = field(default_factory=dict)  # step -> its groups, as `pack` makes them
    index: list[dict[str, Any]] = field(default_factory=list)  # what each of these steps holds


def collect_excerpts(
    paths: Mapping[int, Path], limits: ExcerptLimits, tokenizers: Iterable[str | Path] = ()
) -> Excerpts:
    """Packs groups of some steps out of `paths`, the file of each step.

    Args:
        tokenizers: folders that may hold the tokenizer of the run; the first that has one is taken.
    """
    excerpts = Excerpts()
    steps = evenly_spaced(sorted(paths), limits.max_steps)
    bytes_left, tokenizer = limits.max_mib * 2**20, find_tokenizer(tokenizers)
    for number, step in enumerate(steps):
        groups = read_groups(paths[step])
        if not groups:
            continue
        records = [_group_record(each, limits, tokenizer) for each in choose_groups(groups, limits.groups_per_step)]
        # Each step may take an equal part of what is left, so later steps use what this one leaves.
        blob, budget = encode_json(records), bytes_left / (len(steps) - number)
        # The last groups go first: those without a signal, then those with the narrowest spread. Compression makes the
        # size of a group unknown, so the number is guessed and tried. One group stays, whatever its size.
        while len(blob) > budget and len(records) > 1:
            records = records[: max(1, min(len(records) - 1, int(len(records) * budget / len(blob))))]
            blob = encode_json(records)
        bytes_left -= len(blob)
        excerpts.blobs[step] = blob
        excerpts.index.append(
            {
                "step": step,
                "groups": len(groups),
                "signals": sum(group.has_nonzero_advantage for group in groups),
                "ids": [record["id"] for record in records],
            }
        )
    return excerpts


def read_groups(path: Path) -> list[Group]:
    """Reads stored rollouts. A damaged file has none: the rest of the report is still worth having."""
    try:
        return read_rollouts(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("left out of the report: %s", error)
        return []


def encode_json(data: Any) -> str:
    """Makes the text that the page unpacks: base64 of gzipped JSON."""
    # No character of base64 has a meaning in HTML, so no completion can break out of its element. Without a time in the
    # header, the same data give the same text.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, default=asdict)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def round_digits(value: float | None, digits: int = 6) -> float | None:
    """Rounds to so many significant digits. Six are more than a screen shows, and half the bytes."""
    return value if value is None or isinstance(value, int) else float(f"{value:.{digits}g}")


def elide_text(text: str, limit: int) -> str:
    """Leaves out the middle of a text that has more than `limit` characters, and says how many."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n[… {len(text) - limit:,} characters left out …]\n{text[-(limit // 2) :]}"


# ---------------------------------------------------------------- which groups, and what they are like


def choose_groups(groups: Sequence[Group], number: int) -> list[Group]:
    """Takes at most `number` groups: those with a signal from the widest to the narrowest spread, then some without."""
    ranked = sorted(groups, key=_reward_std, reverse=True)
    varied = [group for group in ranked if group.has_nonzero_advantage]
    zero_variance = [group for group in ranked if not group.has_nonzero_advantage]
    # Groups without a signal show why nothing is learned from them, so they get a sixth of the places even where groups
    # with a signal would fill all.
    num_zero_variance = min(len(zero_variance), max(number - len(varied), number // 6))
    return evenly_spaced(varied, number - num_zero_variance) + evenly_spaced(zero_variance, num_zero_variance)


def finite_rewards(group: Group) -> list[float]:
    """The rewards of the samples that have a finite one."""
    rewards = [sample.score.reward for sample in group.samples if sample.score is not None]
    return [float(reward) for reward in rewards if math.isfinite(reward)]


def sort_by_reward(group: Group) -> list[Sample]:
    """The samples of a group, those with the highest reward first, those without one last."""
    return sorted(
        group.samples, key=lambda sample: -math.inf if sample.score is None else sample.score.reward, reverse=True
    )


def _reward_std(group: Group) -> float:
    rewards = finite_rewards(group)
    return float(np.std(rewards)) if rewards else 0.0


# ---------------------------------------------------------------- prompts as the model reads them


def find_tokenizer(folders: Iterable[str | Path]) -> "Tokenizer | None":
    """Returns the tokenizer of the first of these model folders that has one. A damaged one is only logged."""
    from tokenizers import Tokenizer

    for path in (Path(folder) / "tokenizer.json" for folder in folders):
        try:
            if path.exists():
                return Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 (the library raises nothing narrower for a damaged file)
            log.warning("%s cannot be read (%s): prompts are shown as messages alone", path, error)
    return None


# ---------------------------------------------------------------- records of the page


def _group_record(group: Group, limits: ExcerptLimits, tokenizer: "Tokenizer | None") -> dict[str, Any]:
    rewards, answer, characters = finite_rewards(group), group.problem.answer, limits.max_characters
    # A chat template adds to the messages, for instance a system line. Only the tokens show what the model read.
    read = tokenizer and tokenizer.decode(group.prompt_tokens.tolist(), skip_special_tokens=False)
    return {
        "id": group.problem.id,
        "messages": [
            {"role": m["role"], "content": elide_text(str(m["content"]), characters)} for m in group.problem.messages
        ],
        "answer": answer if isinstance(answer, str) else json.dumps(answer, default=repr),
        "read": read and elide_text(read, characters),
        "prompt_tokens": len(group.prompt_tokens),
        "count": len(group.samples),
        "trained": sum(sample.in_loss for sample in group.samples),
        "signal": group.has_nonzero_advantage,
        "failed": sum(sample.score is None for sample in group.samples),
        "mean": round_digits(fmean(rewards)) if rewards else None,
        "spread": round_digits(_reward_std(group)),
        "rewards": [round_digits(reward) for reward in rewards],
        "samples": [
            sample_record(sample, characters)
            for sample in evenly_spaced(sort_by_reward(group), limits.samples_per_group)
        ],
    }


def sample_record(sample: Sample, limit: int) -> dict[str, Any]:
    """Returns all that is shown of a sample but its tokens; its text has at most about `limit` characters.

    `count` is the number of sampled tokens; `total` also counts what an environment answered. A conversation has its
    `turns`, as in `Completion`, and its `messages`.
    """
    completion, outcome, score = sample.completion, sample.outcome, sample.score
    sampled_S = completion.sampled_indices
    facts = {
        "text": elide_text(sample.text, limit),
        "count": len(sampled_S),
        "total": len(completion.tokens),
        "reward": None if score is None else finite_or_none(score.reward),
        "parts": {} if score is None else {k: finite_or_none(v) for k, v in score.parts.items()},
        "note": "" if score is None else elide_text(score.note, 2000),
        "outcome": "not graded" if outcome is None else outcome.kind,
        "cause": elide_text(outcome.cause, 2000) if isinstance(outcome, Ungraded) else "",
        "advantage": finite_or_none(sample.advantage),
        "trained": bool(sample.in_loss),
        "finish": completion.finish_reason,
        "versions": run_length_encode(completion.versions[sampled_S]),
        "logprob": finite_or_none(np.mean(completion.logprobs[sampled_S], dtype=np.float64))
        if len(sampled_S)
        else None,
    }
    if completion.turns:
        # A long conversation divides the limit among its messages, so that each keeps its beginning and end.
        share = limit if len(sample.text) <= limit else limit // len(sample.messages)
        facts["turns"] = completion.turns
        facts["messages"] = [
            {
                "role": message["role"],
                "content": elide_text(str(message["content"]), share),
                "reward": None if reward is None else finite_or_none(reward),
            }
            for message, reward in sample.rated_messages
        ]
    return facts


def finite_or_none(value: float) -> float | None:
    # JSON has no NaN and no infinity.
    return round_digits(float(value)) if np.isfinite(value) else None


def evenly_spaced(items: Sequence, number: int) -> list:
    """At most `number` of `items`, evenly spaced, first and last among them (only the first when `number` is 1)."""
    if len(items) <= number:
        return list(items)
    return [items[round(i * (len(items) - 1) / max(1, number - 1))] for i in range(number)]
