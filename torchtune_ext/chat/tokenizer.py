"""Converts messages to token ids, and masks the ids that the policy generates.

After this module, training uses ids and never text. A prompt is tokenized once, here, and a
completion is the ids that the engine sampled. Re-encoding decoded text can give different ids ("ab"
may have been sampled as "a", "b"), and log-probs belong to ids.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any

from torchtune_ext.chat.templates import CHATML, SAMPLE_QUESTION, ChatTemplate, Message, Tool
from torchtune_ext.run.errors import UsageError, UsageFileError
from torchtune_ext.run.json_files import read_json_object, require_no_lfs_pointer

__all__ = ["CHATML", "ChatTokenizer"]

HISTORY_MODES = ("sampled", "template")
_OPEN_THOUGHT = re.compile(r"<think>\s*\Z")
# In tokens: enough for "<think>" and white space even if every character is a token.
_LONGEST_OPENING = 16
# Marks that graders and environments read. In some models, these are special tokens.
_READABLE_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


class ChatTokenizer:
    """The tokenizer and the chat template of a model directory.

    Args:
        path: a Hugging Face model directory. Nothing is downloaded.
        template: None for the template of the directory, the name of one of its templates, "chatml"
            for the built-in template, the path of a Jinja file, or the Jinja text itself.
        template_options: more variables of the template, for example {"enable_thinking": False}.
        history: the context of a later turn. "sampled": everything sampled before it, thoughts
            included. "template": the part of older turns that the template keeps (`context_ids`).

    Raises:
        UsageFileError: the directory or its tokenizer is missing or unreadable.
        UsageError: `history` is unknown, or the template is missing or unusable.
    """

    def __init__(
        self,
        path: str | Path,
        template: str | None = None,
        template_options: dict[str, Any] | None = None,
        history: str = "sampled",
    ):
        if history not in HISTORY_MODES:
            raise UsageError(
                f"tokenizer.history={history!r}: unknown. Fix: use 'sampled', where a turn follows all that was sampled "
                "before it, or 'template', where it follows what the template keeps of older turns. Both train a turn in the "
                "context in which it was sampled; dropping thoughts only in training would change the context of the "
                "sampled tokens"
            )
        self.path, self.history = Path(path), history
        self._tokenizer = _load_tokenizer(self.path)
        name, source = self._find_template(template)
        self.template = ChatTemplate(source, name, dict(self._tokenizer.special_tokens_map), template_options)
        # Some tokenizers mark tokens as special without naming them in the map of special tokens.
        self._special_ids = set(self._tokenizer.all_special_ids)
        self._special_ids |= {i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        names = self._tokenizer.convert_ids_to_tokens
        self._hidden_token_ids = {i for i in self._special_ids if names(i) not in _READABLE_TOKENS}
        # Ids may have gaps, so the number of tokens can be smaller.
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        self.stop_token_ids = self._find_stop_token_ids()
        self.eos_id: int = self.stop_token_ids[0]
        pad_id = self._tokenizer.pad_token_id
        self.pad_id: int = self.eos_id if pad_id is None else pad_id

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Returns the engine's prompt: ids [P] of the messages and the generation prompt."""
        return self.encode(self.template.render(messages, tools, generation_prompt=True))

    def turn_boundary_ids(
        self,
        messages: Sequence[Message],
        end: int,
        tools: Sequence[Tool] = (),
        problem: Sequence[Message] = SAMPLE_QUESTION,
    ) -> list[int]:
        """Returns the ids to append to a sampled turn.

        They hold the rest of the turn's end, `messages`, and the next generation prompt.

        Args:
            messages: the environment's reply.
            end: the last sampled token id.
            problem: the messages before the first turn.

        Raises:
            UsageError: the template cannot render `messages` after an assistant turn.
        """
        return self._continuation_ids(self.template.turn_boundary(messages, tools, problem), end)

    def content_spans(
        self,
        context: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        problem: Sequence[Message] = SAMPLE_QUESTION,
    ) -> list[tuple[int, int]]:
        """Returns the spans [start, stop) of a context that hold content of its last messages and nothing else.

        Args:
            context: ids of a context that ends with `messages` and the generation prompt.
            messages: the environment's reply.
            problem: the messages before the first turn.

        Returns:
            The spans; none if the template does not write the content as it is.
        """
        text, contents = self.template.content_spans(messages, tools, problem)
        ids, offsets = self._encode_pieces(text, [])
        # A token may begin or end with white space around the content.
        pieces = [(begin, text[begin:end]) for begin, end in offsets]
        cores = [(begin + piece.find(core), core) for begin, piece in pieces for core in [piece.strip() or piece]]
        first, spans = len(context) - len(ids), []
        for start, stop in contents:
            inside = [t for t, (begin, core) in enumerate(cores) if core and start <= begin <= stop - len(core)]
            # In another conversation, a template may write the reply in another way.
            if inside and list(context[first + inside[0] :]) == ids[inside[0] :]:
                spans.append((first + inside[0], first + inside[-1] + 1))
        return spans

    def context_ids(
        self,
        problem: Sequence[Message],
        messages: Sequence[Message],
        turns: Sequence[Sequence[int]],
        tools: Sequence[Tool] = (),
    ) -> list[int]:
        """Returns the ids of the next turn's context as the template renders it.

        The text that the template keeps of a turn has the turn's sampled ids.

        Args:
            problem: the messages before the first turn.
            messages: the turns and the environment's replies, ending with a reply.
            turns: the sampled ids of each turn.

        Raises:
            UsageError: the template cannot render the messages, or drops a whole turn.
        """
        first, *others = self.template.split_at_turns(problem, messages, tools)
        texts = [message["content"] for message in messages if message["role"] == "assistant"]
        ids: list[int] = []
        text, end = first, None
        for content, turn, after in zip(texts, turns, others, strict=True):
            # A template drops the start of a turn (its thought), never its end: the suffix is kept.
            kept = len(commonprefix([content[::-1], text[::-1]]))
            # The content may begin with the prompt's "<think>", which was not sampled.
            turn_text = self.decode(turn)
            dropped = max(0, len(turn_text) - kept)
            start = bisect_left(range(len(turn)), dropped, key=lambda n: len(self.decode(turn[:n]))) if dropped else 0
            while True:
                rest = turn_text[len(self.decode(turn[:start])) :]
                # A split between two tokens may be inside a character, so the split moves until the
                # rest decodes to itself. Some tokenizers omit the space before a text.
                if self.decode(turn[start:]).lstrip(" ") == rest.lstrip(" "):
                    break
                start += 1
            # Kept text before the split, such as the rest of a split token, is re-encoded.
            ids += [*self._continuation_ids(text[: len(text) - len(rest)], end), *turn[start:]]
            text, end = after, turn[-1]
        return ids + self._continuation_ids(text, end)

    def _continuation_ids(self, text: str, end: int | None) -> list[int]:
        """Returns the ids of a text after a turn that ends with token `end` (None: no turn)."""
        ids = self.encode(text)
        # The template's text begins with the token that ends a turn, possibly after white space and
        # other special tokens. If the policy sampled this token, the ids up to it exist already. An
        # end token after any other text comes from a message, not from the template.
        head = next((i for i, token in enumerate(ids) if token in self.stop_token_ids), -1)
        ended = head >= 0 and ids[head] == end and not self.decode(ids[:head]).strip()
        return ids[head + 1 :] if ended else ids

    def thought_prefix(self, prompt_ids: Sequence[int]) -> str:
        """Returns the "<think>" and white space at the end of a prompt, else ""."""
        # The policy samples only the rest of this thought. With this prefix, the text of a
        # completion is the whole turn, as from a model that samples "<think>" itself.
        opened = _OPEN_THOUGHT.search(self.decode(prompt_ids[-_LONGEST_OPENING:]))
        return opened[0] if opened else ""

    def conversation_ids(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), add_generation_prompt: bool = False
    ) -> tuple[list[int], list[bool]]:
        """Returns the ids [T] of a conversation, and the mask [T] of the policy's tokens.

        Every turn is rendered as the newest message, so a template drops no older thinking.

        Args:
            add_generation_prompt: True appends the generation prompt to the conversation.

        Raises:
            UsageError: an assistant turn cannot be located, or the template drops a part of it.
        """
        conversation = self.template.render_conversation(messages, tools, add_generation_prompt)
        ids, offsets = self._encode_pieces(conversation.text, [])
        # The engine samples after the ids of the prompt alone. If the turn after it would change
        # them (such as by a token across the seam), the text is split at the seam and each piece is
        # encoded separately.
        seams = sorted({turn.sampled_start for turn in conversation.turns})
        text = conversation.text
        prompts = [[token for token, (_, end) in zip(ids, offsets, strict=True) if end <= seam] for seam in seams]
        cuts = [seam for seam, prompt in zip(seams, prompts, strict=True) if prompt != self.encode(text[:seam])]
        if cuts:
            ids, offsets = self._encode_pieces(text, cuts)
        mask = [False] * len(ids)
        for turn in conversation.turns:
            # The engine stops at the token that ends the turn. Text after it was not sampled.
            inside = [t for t, (begin, _) in enumerate(offsets) if turn.sampled_start <= begin < turn.end]
            stops = [t for t in inside if ids[t] in self.stop_token_ids]
            for t in inside:
                mask[t] = not stops or t <= stops[-1]
        return ids, mask

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text. Special tokens in the text become their ids; none is added.

        Raises:
            UsageError: the text holds half of a surrogate pair.
        """
        # `verbose=False`: instead of transformers' warning about a long text, a run has its own.
        try:
            return self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        except TypeError:
            # JSON may hold half of a surrogate pair. The tokenizer's error does not name it.
            if half := re.search("[\ud800-\udfff]", text):
                near = text[max(0, half.start() - 30) : half.end()]
                raise UsageError(
                    f"half of a surrogate pair at the end of {near!r}. Fix: write the whole character, or remove it"
                ) from None
            raise

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of sampled ids; its only special tokens mark thoughts and tool calls."""
        return self.decode_all([i for i in ids if int(i) not in self._hidden_token_ids])

    def decode_all(self, ids: Sequence[int]) -> str:
        """Returns the text of all ids, including special tokens, as the model reads it."""
        return self._tokenizer.decode(
            list(map(int, ids)), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def tokens_from_id(self, first: int) -> list[str]:
        """Returns the tokens whose id is at least `first`, in the order of their ids."""
        vocabulary = self._tokenizer.get_vocab()
        return sorted((token for token, i in vocabulary.items() if i >= first), key=vocabulary.get)

    def _encode_pieces(self, text: str, cuts: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """Encodes each piece of a text between the cuts separately.

        Returns:
            The ids [T], and the (start, end) characters of each id.
        """
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            piece = text[start:end]
            encoding = self._tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ids += encoding["input_ids"]
            offsets += [(start + a, start + b) for a, b in encoding["offset_mapping"]]
        return ids, offsets

    def _find_template(self, template: str | None) -> tuple[str, str]:
        model_templates = self._tokenizer.chat_template
        # A directory may hold several templates.
        named = model_templates if isinstance(model_templates, dict) else {"default": model_templates}
        if template is None:
            source = named.get("default")
            if model_templates and source is None:
                raise UsageError(
                    f"{str(self.path)!r} holds the chat templates {', '.join(named)} and no `default`. Fix: set "
                    "tokenizer.template to one of these names"
                )
            if not source:
                raise UsageError(
                    f"no chat template in {str(self.path)!r} (chat_template.jinja, or `chat_template` in "
                    "tokenizer_config.json). Fix: set `template` to a Jinja file, or to 'chatml' for the built-in template"
                )
            return str(self.path), source
        if named.get(template):
            return f"{self.path}: {template}", named[template]
        if template == "chatml":
            return "chatml", CHATML
        if "{%" in template or "{{" in template:
            return "given as text", template
        if not Path(template).is_file():
            raise UsageError(
                f"template={template!r}: not a file, 'chatml' or a Jinja text. Fix: set it to one of these"
            )
        return template, Path(template).read_text(encoding="utf-8")

    def _find_stop_token_ids(self) -> tuple[int, ...]:
        """Returns the end tokens of the tokenizer, generation config, config and template."""
        # The tokenizer's token comes first (`eos_id`). Files hold null, a number or a list.
        ids: list[int | None] = [self._tokenizer.eos_token_id]
        for name in ("generation_config.json", "config.json"):
            file = self.path / name
            given = read_json_object(file).get("eos_token_id") if file.is_file() else None
            given = given if isinstance(given, list) else [given]
            if invalid_ids := [
                i for i in given if i is not None and (not isinstance(i, int) or isinstance(i, bool) or i < 0)
            ]:
                raise UsageError(
                    f"{file}: eos_token_id={invalid_ids[0]!r}; expected the id of a token, a list of ids, or null. Fix: "
                    "write the id that tokenizer.json gives to the token that ends a turn"
                )
            ids += given
        stop_ids = tuple(dict.fromkeys(i for i in [*ids, self._turn_end_id()] if i is not None))
        if not stop_ids:
            raise UsageError(
                f"{str(self.path)!r} has no end token: no `eos_token` in tokenizer_config.json, no `eos_token_id` in "
                f"generation_config.json, and template {self.template.name!r} does not end a turn with a special token. "
                "Fix: add one of these"
            )
        return stop_ids

    def _turn_end_id(self) -> int | None:
        """Returns the last special token of an assistant turn, or None if it ends without one."""
        try:
            conversation = self.template.render_conversation(
                [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
            )
        except ValueError:
            # The template renders only prompts. `conversation_ids` would raise the reason.
            return None
        turn = conversation.turns[-1]
        ends = [i for i in self.encode(conversation.text[turn.sampled_start : turn.end]) if i in self._special_ids]
        return ends[-1] if ends else None


def _load_tokenizer(path: Path):
    """Loads the fast tokenizer of a directory.

    Raises:
        UsageFileError: the directory or its tokenizer is missing or unreadable.
    """
    if not path.is_dir():
        raise UsageFileError(f"path={str(path)!r} is not a directory. Fix: set it to a downloaded Hugging Face model")
    # PreTrainedTokenizerFast imports in 0.5 s without torch, AutoTokenizer in 2.4 s.
    if (path / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast as Loader
    elif (path / "vocab.json").is_file() or (path / "tokenizer.model").is_file():
        from transformers import AutoTokenizer as Loader
    else:
        raise UsageFileError(
            f"no tokenizer.json in {str(path)!r}. Fix: set it to a Hugging Face model directory with its tokenizer"
        )
    try:
        return Loader.from_pretrained(path, local_files_only=True)
    except Exception as error:  # tokenizers raises bare exceptions
        # The error rarely names a file, so all candidates are read to find the broken one.
        for file in sorted(path.iterdir()):
            require_no_lfs_pointer(file)
        for file in sorted(path.glob("*token*.json")):
            read_json_object(file)
        raise UsageFileError(
            f"the tokenizer in {str(path)!r} cannot be loaded ({type(error).__name__}: {error}). Fix: download its files again"
        ) from error
