"""The part of a run's rollouts that a page of the report carries, and what can be said of it in words.

A page that can be mailed cannot hold all samples. So some steps are taken, of each some groups, of each some samples, and of
long samples the beginning and the end; the page says how many there were.
"""

import base64
import gzip
import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from torchtune_ext.groups import Group, Sample, run_lengths
from torchtune_ext.run.errors import FileMistake, Mistake
from torchtune_ext.telemetry.findings import Silent
from torchtune_ext.telemetry.rollouts import read_rollouts

log = logging.getLogger(__name__)

_BROKEN = "\ufffd"  # A decoder writes this for bytes that are no character yet.
_LONGEST = 6  # ids that one character may be made of
_SAME = 0.01  # Rewards that are nearer than this share of the run's range count as equal.


@dataclass(frozen=True, slots=True)
class Limits:
    """This says how much of the rollouts a page carries; the curves are always whole."""

    max_steps: int = 80  # This many steps have rollouts, evenly spaced, first and last among them.
    groups_per_step: int = 12  # Those with a signal go first, evenly spaced over the reward spread.
    samples_per_group: int = 16  # They are evenly spaced over the reward, best and worst among them.
    max_tokens: int = 2000  # The middle of a sample that is longer is left out.
    max_mib: float = 16.0  # All rollouts in the page together take no more.

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < (0 if name == "max_mib" else 1):
                raise Mistake(f"{name}={value}: must be positive")


@dataclass(slots=True)
class Excerpts:
    """What a page carries of the rollouts."""

    blobs: dict[int, str] = field(default_factory=dict)  # step -> its groups, as `pack` makes them
    index: list[dict[str, Any]] = field(default_factory=list)  # what each of these steps holds
    pieces: dict[int, str] = field(default_factory=dict)  # id -> its text, of all ids in the page; empty: not known
    silent: Silent | None = None  # what the latest groups without a signal are like


def excerpts_of(
    paths: Mapping[int, Path], limits: Limits, tokenizers: Iterable[str | Path] = (), latest: int = 0
) -> Excerpts:
    """Packs groups of some steps. What one step leaves of the budget, others use.

    Args:
        paths: the file of the stored rollouts of each step.
        limits: how much is taken.
        tokenizers: folders that may hold the tokenizer of the run. The first one that spells a stored sample as the run
            did is taken; one that does not would show other words than those that were sampled.
        latest: steps from this one on are "the latest" for `Excerpts.silent`.
    """
    excerpts = Excerpts()
    steps = spaced(sorted(paths), limits.max_steps) if limits.max_mib > 0 else []
    left, ids, silent, rewards = limits.max_mib * 2**20, set(), [], []
    pieces: TokenPieces | None = None
    for number, step in enumerate(steps):
        groups = groups_of(paths[step])
        if not groups:
            continue
        samples = [sample for group in groups for sample in group.samples if sample.text.strip()]
        if tokenizers and samples:
            pieces, tokenizers = _speller(tokenizers, max(samples, key=lambda s: len(s.completion.tokens))), ()
        records, blob = _fit(groups, limits, pieces, left / (len(steps) - number))
        left -= len(blob)
        excerpts.blobs[step] = blob
        signals = sum(group.has_signal for group in groups)
        excerpts.index.append(
            {"step": step, "groups": len(groups), "signals": signals, "ids": [r["id"] for r in records]}
        )
        ids.update(token for record in records for sample in record["samples"] for token in sample["ids"])
        rewards += [reward for group in groups for reward in rewards_of(group)]
        if step >= latest:
            silent += [group for group in groups if not group.has_signal]
    if pieces is not None:
        excerpts.pieces = {token: pieces.one(token) for token in sorted(ids)}
    if rewards:
        excerpts.silent = _causes(silent, min(rewards), max(rewards))
    return excerpts


def groups_of(path: Path) -> list[Group]:
    """Reads stored rollouts; of a damaged file there are none."""
    try:
        return read_rollouts(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("left out of the report: %s", error)
        return []


def pack(data: Any) -> str:
    """Makes the text that the page unpacks: base64 of gzipped JSON, which no completion can break out of."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, default=asdict)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def short(value: float | None, digits: int = 6) -> float | None:
    """Rounds to six digits, which are more than a screen shows and half the bytes."""
    return value if value is None or isinstance(value, int) else float(f"{value:.{digits}g}")


def cut_text(text: str, limit: int) -> str:
    """Leaves out the middle of a text that has more than `limit` characters, and says how many."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n[… {len(text) - limit:,} characters left out …]\n{text[-(limit // 2) :]}"


# ---------------------------------------------------------------- which groups, and what they are like


def _fit(
    groups: Sequence[Group], limits: Limits, pieces: "TokenPieces | None", budget: float
) -> tuple[list[dict[str, Any]], str]:
    """Takes as many groups as `budget` bytes hold. If even one is too large it has fewer samples, then fewer tokens."""
    num_groups, num_samples, num_tokens = limits.groups_per_step, limits.samples_per_group, limits.max_tokens
    while True:
        chosen = _chosen(groups, num_groups)
        records = [_group_record(group, num_samples, num_tokens, pieces) for group in chosen]
        blob = pack(records)
        ratio = budget / len(blob)
        if ratio >= 1:
            return records, blob
        if num_groups > 1:
            num_groups = max(1, min(num_groups - 1, int(len(chosen) * ratio)))
        elif num_samples > 2:
            num_samples = max(2, min(num_samples - 1, int(num_samples * ratio)))
        elif num_tokens > 32:
            num_tokens = max(32, num_tokens // 2)
        else:
            return records, blob


def _chosen(groups: Sequence[Group], number: int) -> list[Group]:
    """Takes groups with a signal, from the widest to the narrowest spread, and behind them such as have none: in the places
    that are left, and in a sixth of all at least, since they tell why nothing is learned from them."""
    ranked = sorted(groups, key=_spread, reverse=True)
    signal = [group for group in ranked if group.has_signal]
    silent = [group for group in ranked if not group.has_signal]
    few = min(len(silent), max(number - len(signal), number // 6))
    return spaced(signal, number - few) + spaced(silent, few)


def _causes(groups: Sequence[Group], lowest: float, highest: float) -> Silent:
    """Counts the groups without a signal by why they have none, as the rewards of the whole run tell."""
    counts = Counter()
    near = _SAME * (highest - lowest)
    for group in groups:
        if not (rewards := rewards_of(group)):
            continue
        # Where the whole run knows one reward only, a reward above 0 is taken for success.
        if highest - min(rewards) <= near and highest > min(lowest, 0.0):
            counts["easy"] += 1
        elif max(rewards) - lowest <= near:
            counts["hard"] += 1
        else:
            counts["alike" if len({sample.text for sample in group.samples}) == 1 else "other"] += 1
    return Silent(**counts, highest=highest, lowest=lowest)


def rewards_of(group: Group) -> list[float]:
    """Returns the rewards of the samples that have a finite one."""
    rewards = [sample.score.reward for sample in group.samples if sample.score is not None]
    return [float(reward) for reward in rewards if math.isfinite(reward)]


def by_reward(group: Group) -> list[Sample]:
    """Returns the samples of a group, those with the highest reward first, those without one last."""
    return sorted(
        group.samples, key=lambda sample: -math.inf if sample.score is None else sample.score.reward, reverse=True
    )


def answer_of(group: Group) -> str:
    answer = group.problem.answer
    return answer if isinstance(answer, str) else json.dumps(answer, default=repr)


def _spread(group: Group) -> float:
    rewards = rewards_of(group)
    return float(np.std(rewards)) if rewards else 0.0


# ---------------------------------------------------------------- tokens as text


class TokenPieces:
    """Splits a text along its tokens. Each id is decoded once, behind a fixed ASCII token, because some tokenizers
    drop the space at the start of a text. A character of several tokens is given to the last of them."""

    def __init__(self, tokenizer: Any, anchor: int):
        self._tokenizer, self._anchor = tokenizer, anchor
        self._prefix = len(self._decode([anchor]))
        self._cache: dict[int, str] = {}

    @classmethod
    def from_folder(cls, folder: str | Path) -> "TokenPieces":
        """Reads the tokenizer of a model folder, or a `tokenizer.json`. Raises FileMistake where there is none."""
        from tokenizers import Tokenizer

        path = Path(folder)
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.exists():
            raise FileMistake(f"--tokenizer {folder}: no tokenizer.json there; name a model folder that has one")
        tokenizer = Tokenizer.from_file(str(path))
        return cls(tokenizer, tokenizer.encode("a", add_special_tokens=False).ids[-1])

    def one(self, token: int) -> str:
        """Returns the piece of an id that stands alone."""
        piece = self._cache.get(token)
        if piece is None:
            piece = self._cache[token] = self._piece([token])
        return piece

    def spells(self, ids: Sequence[int], text: str) -> bool:
        """Tells whether this tokenizer makes `text` of `ids`: as a run decodes them, without special tokens. Spaces at the ends
        do not count, nor what a prompt has put before the text ("<think>")."""
        spelled = self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)
        return text.strip().endswith(spelled.strip())

    def split(self, ids: Sequence[int]) -> list[str]:
        """Returns one piece for each id; joined they are the text."""
        pieces: list[str] = []
        held: list[int] = []
        for token in map(int, ids):
            if not held:
                piece = self.one(token)
                if _BROKEN not in piece:
                    pieces.append(piece)
                    continue
            held.append(token)
            piece = self._piece(held)
            if _BROKEN in piece and len(held) < _LONGEST:
                pieces.append("")
            else:
                pieces.append(piece)
                held = []
        if held:
            pieces[-1] = self._piece(held)
        return pieces

    def _piece(self, ids: list[int]) -> str:
        return self._decode([self._anchor, *ids])[self._prefix :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _speller(folders: Iterable[str | Path], sample: Sample) -> TokenPieces | None:
    """Returns the first tokenizer that spells `sample` as the run did."""
    others = []
    for folder in folders:
        try:
            pieces = TokenPieces.from_folder(folder)
        except FileMistake:
            continue
        except Exception as error:  # noqa: BLE001 (the library raises nothing narrower for a damaged file)
            log.warning("%s: its tokenizer cannot be read (%s)", folder, error)
            continue
        if all(pieces.spells(ids, text) for ids, text in _sampled_texts(sample)):
            return pieces
        others.append(str(folder))
    if others:
        log.warning("%s: the tokenizer there is not the one of the stored samples; their tokens are shown as numbers",
                    ", ".join(others))  # fmt: skip
    return None


def _sampled_texts(sample: Sample) -> list[tuple[np.ndarray, str]]:
    """Returns ids as they were sampled with their text: the whole sample, or each turn of a conversation."""
    if not sample.completion.turns:
        return [(sample.completion.tokens, sample.text)]
    texts = [message["content"] for message in sample.messages if message["role"] == "assistant"]
    return [
        (sample.completion.tokens[slice(*turn)], text)
        for turn, text in zip(sample.completion.turns, texts, strict=True)
    ]


# ---------------------------------------------------------------- records of the page


def _group_record(group: Group, num_samples: int, num_tokens: int, pieces: "TokenPieces | None") -> dict[str, Any]:
    rewards = rewards_of(group)
    return {
        "id": group.problem.id,
        "messages": messages_of(group, 8 * num_tokens),
        "answer": answer_of(group),
        # A chat template adds to the messages, a system line of its own for instance.
        "read": pieces and cut_text("".join(pieces.split(group.prompt_tokens)), 8 * num_tokens),
        "prompt_tokens": len(group.prompt_tokens),
        "count": len(group.samples),
        "trained": sum(sample.trained for sample in group.samples),
        "signal": group.has_signal,
        "failed": sum(sample.score is None for sample in group.samples),
        "mean": short(fmean(rewards)) if rewards else None,
        "spread": short(_spread(group)),
        "rewards": [short(reward) for reward in rewards],
        "samples": [_sample_record(sample, num_tokens, pieces) for sample in spaced(by_reward(group), num_samples)],
    }


def messages_of(group: Group, limit: int) -> list[dict[str, str]]:
    return [{"role": m["role"], "content": cut_text(str(m["content"]), limit)} for m in group.problem.messages]


def sample_facts(sample: Sample, limit: int) -> dict[str, Any]:
    """Returns all that is shown of a sample but its tokens; its text has at most about `limit` characters.

    A conversation has its `turns`, as in `Completion`, and its `messages`. What its environment answered is counted in `total`,
    and in nothing else.
    """
    completion, outcome, score = sample.completion, sample.outcome, sample.score
    sampled_S = completion.sampled
    facts = {
        "text": cut_text(sample.text, limit),
        "count": len(sampled_S),
        "total": len(completion.tokens),
        "reward": None if score is None else finite(score.reward),
        "parts": {} if score is None else {k: finite(v) for k, v in score.parts.items()},
        "note": "" if score is None else cut_text(score.note, 2000),
        "outcome": "not graded" if outcome is None else outcome.kind,
        "cause": "" if outcome is None else cut_text(outcome.cause, 2000),
        "advantage": finite(sample.advantage),
        "trained": bool(sample.trained),
        "finish": completion.finish_reason,
        "versions": run_lengths(completion.versions[sampled_S]),
        "logprob": finite(np.mean(completion.logprobs[sampled_S], dtype=np.float64)) if len(sampled_S) else None,
    }
    if completion.turns:
        share = limit if len(sample.text) <= limit else limit // len(sample.messages)
        facts["turns"] = completion.turns
        facts["messages"] = [
            {
                "role": message["role"],
                "content": cut_text(str(message["content"]), share),
                "reward": None if reward is None else finite(reward),
            }
            for message, reward in sample.rated_messages
        ]
    return facts


def _sample_record(sample: Sample, num_tokens: int, pieces: "TokenPieces | None") -> dict[str, Any]:
    completion = sample.completion
    count = len(completion.tokens)
    head = count if count <= num_tokens else num_tokens // 2
    keep = np.r_[0:head, max(head, count - num_tokens // 2) : count] if count > num_tokens else np.arange(count)
    logprobs = np.nan_to_num(completion.logprobs[keep].astype(np.float64), nan=-99.0, posinf=0.0, neginf=-99.0)
    ids = completion.tokens[keep].tolist()
    record = sample_facts(sample, len(sample.text) if count <= num_tokens else 8 * num_tokens) | {
        "ids": ids,
        # They are thousandths of nats, and positive.
        "nats": np.rint(-1000 * logprobs).astype(int).tolist(),
        # Tokens were left out here.
        "gap": head if count > num_tokens else None,
    }
    if pieces is not None:
        spelled = pieces.split(completion.tokens)[:head] + pieces.split(completion.tokens[keep[head:]])
        # The page knows the piece of each id. Only a part of a character, which several ids make together, differs.
        odd = {
            i: piece for i, (token, piece) in enumerate(zip(ids, spelled, strict=True)) if piece != pieces.one(token)
        }
        record |= {"odd": odd} if odd else {}
    return record


def finite(value: float) -> float | None:
    return short(float(value)) if np.isfinite(value) else None


def spaced(items: Sequence, number: int) -> list:
    """Takes at most `number` of `items`, evenly spaced, first and last among them (only the first when `number` is 1)."""
    if len(items) <= number:
        return list(items)
    return [items[round(i * (len(items) - 1) / max(1, number - 1))] for i in range(number)]
