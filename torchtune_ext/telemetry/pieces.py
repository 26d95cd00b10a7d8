"""This module finds the piece of text that each token id stands for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtune_ext.run.errors import FileMistake

_BROKEN = "\ufffd"  # A decoder writes this for bytes that are no character yet.
_LONGEST = 6  # ids that one character may be made of


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


def cut_text(text: str, limit: int) -> str:
    """Leaves out the middle of a text that has more than `limit` characters, and says how many."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n[… {len(text) - limit:,} characters left out …]\n{text[-(limit // 2) :]}"
