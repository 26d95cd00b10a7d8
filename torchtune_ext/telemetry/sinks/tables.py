"""The tables of samples that trackers show."""

from collections.abc import Sequence
from typing import Any

from torchtune_ext.pipeline.groups import Group
from torchtune_ext.telemetry.excerpts import choose_groups, elide_text, evenly_spaced, sample_record, sort_by_reward

TABLE_KEY = "samples/step_{:06d}"  # a key for each step: W&B shows only the newest table of a key
COLUMNS = ["step", "problem", "prompt", "completion", "reward", "advantage", "outcome", "finish", "note"]
MAX_PROMPT_CHARS, MAX_COMPLETION_CHARS = 2048, 4096
MAX_SAMPLES = 4  # per group, evenly spaced by reward, with the best and the worst


def sample_rows(step: int, groups: Sequence[Group], number: int) -> list[list[Any]]:
    """Returns table rows with `COLUMNS`: samples of `number` groups, best to worst per group."""
    rows = []
    for group in choose_groups(groups, number):
        prompt = "\n\n".join(f"{message['role']}: {message['content']}" for message in group.problem.messages)
        for sample in evenly_spaced(sort_by_reward(group), MAX_SAMPLES):
            # W&B rejects a column with mixed types, so a numeric id becomes text.
            facts = sample_record(sample, MAX_COMPLETION_CHARS)
            texts = str(group.problem.id), elide_text(prompt, MAX_PROMPT_CHARS), facts["text"]
            numbers = facts["reward"], facts["advantage"]
            notes = facts["outcome"], facts["finish"], clean_text(facts["note"] or facts["cause"])
            rows.append([step, *map(clean_text, texts), *numbers, *notes])
    return rows


def clean_text(text: str) -> str:
    """Replaces NUL and lone surrogates, which UTF-8 cannot encode."""
    # Some programs stop reading at NUL.
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
