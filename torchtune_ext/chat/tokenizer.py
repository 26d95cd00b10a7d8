"""Messages -> token ids, and which of them the policy generates.

This is where text ends. A prompt becomes ids once, here; from then on a completion is the ids that the engine sampled.
`decode` is for graders and people: its text never becomes training ids again, because encoding a decoded text can give
other ids than were sampled ("ab" may have been sampled as "a", "b"), and log-probs belong to ids.

Which tokens are generated? After the generation prompt (`<|im_start|>assistant\\n`) the engine samples the turn's
text and then the token that ends the turn (`<|im_end|>`), where it stops. These `conversation_ids` marks: the end token
is trained; the newline that templates write behind it is not, nor is any part of the generation prompt. With
`sampled_only=False` the mask covers exactly the template's generation block, as `apply_chat_template` counts it; for
Qwen's templates that is also the newline behind the turn (and, for Qwen2.5, the one before it).
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtune_ext.chat.templates import CHATML, ChatTemplate, Message

__all__ = ["CHATML", "ChatTokenizer"]

_OPEN_THOUGHT = re.compile(r"<think>\s*\Z")
_LONGEST_OPENING = 16  # tokens of "<think>" and white space, when every character is one
_THOUGHT_MARKS = ("<think>", "</think>")


class ChatTokenizer:
    """The tokenizer and the chat template of a model directory.

    path: a Hugging Face model directory (tokenizer.json, and where present tokenizer_config.json, chat_template.jinja,
    generation_config.json, config.json). Nothing is downloaded.
    template: None for the directory's own; "chatml" for the built-in one; the path of a Jinja file; or the Jinja text.
    template_options: further variables of the template, for instance {"enable_thinking": False}.

    Raises ValueError when a file or the template is missing or unusable.
    """

    def __init__(self, path: str | Path, template: str | None = None, template_options: dict[str, Any] | None = None):
        self.path = Path(path)
        self._tokenizer = _load_tokenizer(self.path)
        name, source = self._find_template(template)
        self.template = ChatTemplate(source, name, dict(self._tokenizer.special_tokens_map), template_options)
        self._special_ids = set(self._tokenizer.all_special_ids)
        self._special_ids |= {i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        names = self._tokenizer.convert_ids_to_tokens
        self._unread_ids = {i for i in self._special_ids if names(i) not in _THOUGHT_MARKS}
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        self.stop_token_ids = self._find_stop_token_ids()
        self.eos_id: int = self.stop_token_ids[0]
        pad_id = self._tokenizer.pad_token_id
        self.pad_id: int = self.eos_id if pad_id is None else pad_id

    def prompt_ids(self, messages: Sequence[Message], tools: list | None = None) -> list[int]:
        """[P] ids of the messages followed by the generation prompt: what the engine completes."""
        return self.encode(self.template.render(messages, tools, generation_prompt=True))

    def opened_thought(self, prompt_ids: Sequence[int]) -> str:
        """The "<think>" (with the white space behind it) in which a prompt ends, else "".

        The policy continues this thought and samples its end alone. With it in front, a completion's text is the whole
        turn, as from a model that samples "<think>" itself.
        """
        opened = _OPEN_THOUGHT.search(self.decode(prompt_ids[-_LONGEST_OPENING:]))
        return opened[0] if opened else ""

    def conversation_ids(
        self,
        messages: Sequence[Message],
        tools: list | None = None,
        add_generation_prompt: bool = False,
        sampled_only: bool = True,
    ) -> tuple[list[int], list[bool]]:
        """([T] ids, [T] mask) of a conversation; the mask is True on the tokens that the policy generates.

        Every assistant turn stands in the form in which it was the newest message (so thinking is kept), whatever the
        template does with older ones. sampled_only=False widens the mask to the template's whole generation block.
        Raises ValueError when the template does not let an assistant turn be found, or loses part of one.
        """
        conversation = self.template.conversation(messages, tools, add_generation_prompt)
        ids, offsets = self._encode_cut(conversation.text, [])
        mask = [False] * len(ids)
        if not sampled_only:
            for turn in conversation.turns:
                for t, (begin, end) in enumerate(offsets):
                    mask[t] |= begin < turn.end and end > turn.start
            return ids, mask
        seams = {turn.sampled for turn in conversation.turns}
        cuts = [seam for seam in sorted(seams) if any(begin < seam < end for begin, end in offsets)]
        if cuts:  # a token over the seam of prompt and turn could not have been sampled
            ids, offsets = self._encode_cut(conversation.text, cuts)
            mask = [False] * len(ids)
        for turn in conversation.turns:
            inside = [t for t, (begin, _) in enumerate(offsets) if turn.sampled <= begin < turn.end]
            stops = [t for t in inside if ids[t] in self.stop_token_ids]
            for t in inside:
                mask[t] = not stops or t <= stops[-1]
        return ids, mask

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens written in it become their ids, and none is added."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, without special tokens, but with the marks of thoughts, which some models call special.

        For graders and people, never for training.
        """
        return self._tokenizer.decode(
            [int(i) for i in ids if int(i) not in self._unread_ids],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )

    def _encode_cut(self, text: str, cuts: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """(ids, character spans) of a text whose pieces between the cuts are encoded each by itself."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            encoding = self._tokenizer(text[start:end], add_special_tokens=False, return_offsets_mapping=True)
            ids += encoding["input_ids"]
            offsets += [(start + a, start + b) for a, b in encoding["offset_mapping"]]
        return ids, offsets

    def _find_template(self, template: str | None) -> tuple[str, str]:
        if template is None:
            source = self._tokenizer.get_chat_template() if self._tokenizer.chat_template else None
            if source is None:
                raise ValueError(
                    f"no chat template in {str(self.path)!r} (chat_template.jinja, or `chat_template` in "
                    "tokenizer_config.json); set `template` to a Jinja file, or to 'chatml' for the built-in one"
                )
            return str(self.path), source
        if template == "chatml":
            return "chatml", CHATML
        if "{%" in template or "{{" in template:
            return "given as text", template
        if not Path(template).is_file():
            raise ValueError(f"template={template!r} is neither a file nor 'chatml' nor a Jinja text; give one of them")
        return template, Path(template).read_text(encoding="utf-8")

    def _find_stop_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's eos, those of generation_config.json (or config.json), and the token that ends a turn."""
        found: list[int | None] = [self._tokenizer.eos_token_id]
        for name in ("generation_config.json", "config.json"):
            file = self.path / name
            given = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
            found += given if isinstance(given, list) else [given]
        stop_ids = tuple(dict.fromkeys(i for i in [*found, self._turn_end_id()] if i is not None))
        if not stop_ids:
            raise ValueError(
                f"{str(self.path)!r} names no end token: no `eos_token` in tokenizer_config.json, no `eos_token_id` in "
                f"generation_config.json, and template {self.template.name!r} ends no turn with one; add one"
            )
        return stop_ids

    def _turn_end_id(self) -> int | None:
        """The last special token of an assistant turn; None where the template has no such turn or token."""
        try:
            conversation = self.template.conversation(
                [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
            )
        except ValueError:
            return None  # a template for prompts alone; `conversation_ids` raises with the reason
        turn = conversation.turns[-1]
        ends = [i for i in self.encode(conversation.text[turn.sampled : turn.end]) if i in self._special_ids]
        return ends[-1] if ends else None


def _load_tokenizer(path: Path):
    """The fast tokenizer of a directory. Importing this class alone takes 0.5 s and no torch (AutoTokenizer: 2.4 s)."""
    if not path.is_dir():
        raise ValueError(f"path={str(path)!r} is not a directory; give a downloaded Hugging Face model directory")
    if (path / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    if (path / "vocab.json").is_file() or (path / "tokenizer.model").is_file():
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, local_files_only=True, use_fast=True)
    raise ValueError(f"no tokenizer.json in {str(path)!r}; give a Hugging Face model directory with its tokenizer")
