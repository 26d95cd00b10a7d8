"""A tokenizer without a model: the token of a letter is its code point."""

import numpy as np

from torchtune_ext.sampling.types import Completion


class LetterTokenizer:
    """Subset of `ChatTokenizer` for sampling and grading. The prompt is the first message."""

    history = "sampled"

    def prompt_ids(self, messages, tools=()):
        return [ord(letter) for letter in messages[0]["content"]]

    def content_spans(self, context, messages, tools=(), problem=()):
        return []

    def thought_prefix(self, prompt):
        return ""

    def decode(self, ids):
        return "".join(map(chr, ids))


def completion(text: str) -> Completion:
    """Return a completion with this text, sampled by version 0."""
    ids = np.array([ord(letter) for letter in text], np.int32)
    return Completion(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), "stop", 0)
