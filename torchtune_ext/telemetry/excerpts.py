"""The excerpt of a run's rollouts that the report page contains.

All samples would make the page too large to mail. So it contains some steps, some groups per step
and some samples per group, shortens long texts in the middle, and shows the full counts.
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
    """Limits on the rollouts in a page; curves are always complete."""

    max_steps: int = 80  # evenly spaced, with the first and the last
    groups_per_step: int = 12  # evenly spaced by reward spread; some are zero-variance groups
    samples_per_group: int = 16  # evenly spaced by reward, with the best and the worst
    max_characters: int = 16_000  # longer texts are shortened in the middle
    max_mib: float = 16.0  # of all rollouts in the page


DEFAULT_LIMITS = ExcerptLimits()


@dataclass(slots=True)
class Excerpts:
    """The rollouts in a page."""

    blobs: dict[int, str] = field(default_factory=dict)  # step -> encoded groups
    index: list[dict[str, Any]] = field(default_factory=list)  # one summary per step in `blobs`


def collect_excerpts(
    paths: Mapping[int, Path], limits: ExcerptLimits, tokenizers: Iterable[str | Path] = ()
) -> Excerpts:
    """Packs the groups of some steps.

    Args:
        paths: step -> its file of rollouts.
        limits: of the excerpt.
        tokenizers: folders that may hold the run's tokenizer; the first tokenizer found is used.
    """
    excerpts = Excerpts()
    steps = evenly_spaced(sorted(paths), limits.max_steps)
    bytes_left, tokenizer = limits.max_mib * 2**20, find_tokenizer(tokenizers)
    for number, step in enumerate(steps):
        groups = read_groups(paths[step])
        if not groups:
            continue
        records = [_group_record(each, limits, tokenizer) for each in choose_groups(groups, limits.groups_per_step)]
        # Each step gets an equal share of the bytes that earlier steps leave.
        blob, budget = encode_json(records), bytes_left / (len(steps) - number)
        # The last groups are removed first: zero-variance groups, then groups with the smallest
        # spread. Their number is estimated and checked. One group stays, whatever its size.
        while len(blob) > budget and len(records) > 1:
            records = records[: max(1, min(len(records) - 1, int(len(records) * budget / len(blob))))]
            blob = encode_json(records)
        bytes_left -= len(blob)
        excerpts.blobs[step] = blob
        signals, ids = sum(group.has_nonzero_advantage for group in groups), [record["id"] for record in records]
        excerpts.index.append({"step": step, "groups": len(groups), "signals": signals, "ids": ids})
    return excerpts


def read_groups(path: Path) -> list[Group]:
    """Reads stored rollouts; a damaged file is logged and counts as empty."""
    try:
        return read_rollouts(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("report: omitted the rollouts: %s", error)
        return []


def encode_json(data: Any) -> str:
    """Encodes data as base64 of gzipped JSON, which the page unpacks."""
    # Base64 has no special characters of HTML, so no completion can break out of its element. With
    # mtime=0 the same data give the same text.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, default=asdict)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def round_digits(value: float | None, digits: int = 6) -> float | None:
    """Rounds to `digits` significant digits; six are enough for a screen, and halve the bytes."""
    return value if value is None or isinstance(value, int) else float(f"{value:.{digits}g}")


def elide_text(text: str, limit: int) -> str:
    """Replaces the middle of a text longer than `limit` characters by the number left out."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n[… {len(text) - limit:,} characters left out …]\n{text[-(limit // 2) :]}"


# ---------------------------------------------------------------- selection of groups and samples


def choose_groups(groups: Sequence[Group], number: int) -> list[Group]:
    """Returns at most `number` groups: by falling reward spread, then some zero-variance groups."""
    ranked = sorted(groups, key=_reward_std, reverse=True)
    varied = [group for group in ranked if group.has_nonzero_advantage]
    zero_variance = [group for group in ranked if not group.has_nonzero_advantage]
    # Zero-variance groups show why they teach nothing, so they get at least a sixth of the places.
    num_zero_variance = min(len(zero_variance), max(number - len(varied), number // 6))
    return evenly_spaced(varied, number - num_zero_variance) + evenly_spaced(zero_variance, num_zero_variance)


def finite_rewards(group: Group) -> list[float]:
    """Returns the finite rewards of a group."""
    rewards = [sample.score.reward for sample in group.samples if sample.score is not None]
    return [float(reward) for reward in rewards if math.isfinite(reward)]


def sort_by_reward(group: Group) -> list[Sample]:
    """Returns the samples of a group by falling reward; samples without a reward come last."""
    return sorted(
        group.samples, key=lambda sample: -math.inf if sample.score is None else sample.score.reward, reverse=True
    )


def _reward_std(group: Group) -> float:
    rewards = finite_rewards(group)
    return float(np.std(rewards)) if rewards else 0.0


# ---------------------------------------------------------------- prompts as the model reads them


def find_tokenizer(folders: Iterable[str | Path]) -> "Tokenizer | None":
    """Returns the tokenizer of the first folder that has one, or None. A damaged file is logged."""
    from tokenizers import Tokenizer

    for path in (Path(folder) / "tokenizer.json" for folder in folders):
        try:
            if path.exists():
                return Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 (the library raises nothing narrower for a damaged file)
            log.warning("report: %s cannot be read (%s), so prompts are shown only as messages", path, error)
    return None


# ---------------------------------------------------------------- records of the page


def _group_record(group: Group, limits: ExcerptLimits, tokenizer: "Tokenizer | None") -> dict[str, Any]:
    rewards, answer, characters = finite_rewards(group), group.problem.answer, limits.max_characters
    messages = [
        {"role": m["role"], "content": elide_text(str(m["content"]), characters)} for m in group.problem.messages
    ]
    samples = evenly_spaced(sort_by_reward(group), limits.samples_per_group)
    # Only the tokens show the model's full input: a chat template may add a system prompt.
    read = tokenizer and tokenizer.decode(group.prompt_tokens.tolist(), skip_special_tokens=False)
    return {
        "id": group.problem.id,
        "messages": messages,
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
        "samples": [sample_record(sample, characters) for sample in samples],
    }


def sample_record(sample: Sample, limit: int) -> dict[str, Any]:
    """Returns the data of a sample in the page, with at most about `limit` characters of text.

    `count` is the number of sampled tokens; `total` includes environment tokens. A conversation
    also has its `turns`, as in `Completion`, and its `messages`.
    """
    completion, outcome, score = sample.completion, sample.outcome, sample.score
    sampled_S = completion.sampled_indices
    logprobs_S = completion.logprobs[sampled_S].astype(np.float64)
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
        "logprob": finite_or_none(logprobs_S.mean()) if len(sampled_S) else None,
    }
    if completion.turns:
        # The messages of a long conversation share the limit, and each keeps its beginning and end.
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
    # JSON has neither NaN nor infinity.
    return round_digits(float(value)) if np.isfinite(value) else None


def evenly_spaced(items: Sequence, number: int) -> list:
    """Returns at most `number` evenly spaced items, with the first and (from 2 on) the last."""
    if len(items) <= number:
        return list(items)
    return [items[round(i * (len(items) - 1) / max(1, number - 1))] for i in range(number)]
