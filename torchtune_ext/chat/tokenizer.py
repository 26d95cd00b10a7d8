"""Turns messages into token ids, and marks those that the policy generates.

After this module no text is used for training. A prompt becomes ids once, here, and a completion is the ids that the
engine sampled. Encoding a decoded text can give other ids than were sampled ("ab" may have been sampled as "a", "b"),
and log-probs belong to ids.
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
# Tokens: enough for "<think>" and white space even if every character is a token.
_LONGEST_OPENING = 16
# Marks that graders and environments read. In some models they are special tokens.
_READABLE_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


class ChatTokenizer:
    """The tokenizer and the chat template of a model directory.

    Args:
        path: a Hugging Face model directory. Nothing is downloaded.
        template: None for the template of the directory, "chatml" for the built-in one, the path of a Jinja file, or
            the Jinja text itself.
        template_options: more variables of the template, for example {"enable_thinking": False}.
        history: the context of a later turn. "sampled": all that was sampled before it, thoughts included. "template":
            what the template leaves of older turns (`context_ids`).

    Raises:
        ValueError: a file or the template is missing or cannot be used.
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
                f"tokenizer.history={history!r}: use 'sampled', where a turn follows all that was sampled before it, or "
                "'template', where it follows what the template leaves of that. Either way a turn is trained in the context in "
                "which it was sampled; dropping thoughts only in training would judge tokens by a context that they never had"
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
        """Returns the prompt that the engine completes: the ids [P] of the messages and of the generation prompt."""
        return self.encode(self.template.render(messages, tools, generation_prompt=True))

    def turn_boundary_ids(
        self,
        messages: Sequence[Message],
        end: int,
        tools: Sequence[Tool] = (),
        problem: Sequence[Message] = SAMPLE_QUESTION,
    ) -> list[int]:
        """Returns the ids to append to a sampled turn: the rest of its end, `messages`, and the next generation prompt.

        Args:
            messages: the environment's answer.
            end: the last sampled token.
            problem: the messages before the first turn.

        Raises:
            ValueError: the template cannot render `messages` after a turn of the assistant.
        """
        return self._continuation_ids(self.template.turn_boundary(messages, tools, problem), end)

    def context_ids(
        self,
        problem: Sequence[Message],
        messages: Sequence[Message],
        turns: Sequence[Sequence[int]],
        tools: Sequence[Tool] = (),
    ) -> list[int]:
        """Returns the context of the next turn as the template writes it. What it keeps of a turn has its sampled ids.

        Args:
            problem: the messages before the first turn.
            messages: turns and answers, the last one an answer.
            turns: the sampled ids of each turn.

        Raises:
            ValueError: the template cannot render the messages, or leaves nothing of a turn.
        """
        first, *others = self.template.split_at_turns(problem, messages, tools)
        texts = [message["content"] for message in messages if message["role"] == "assistant"]
        ids: list[int] = []
        text, end = first, None
        for content, turn, after in zip(texts, turns, others, strict=True):
            # A template drops a turn's beginning (its thought), never its end. So the common end of both texts is kept.
            kept = len(commonprefix([content[::-1], text[::-1]]))
            # The content may begin with a "<think>" of the prompt, which is in no sampled id.
            own = self.decode(turn)
            dropped = max(0, len(own) - kept)
            start = bisect_left(range(len(turn)), dropped, key=lambda n: len(self.decode(turn[:n]))) if dropped else 0
            while True:
                rest = own[len(self.decode(turn[:start])) :]
                # A cut between two tokens may go through a character, so it moves on until the rest decodes to itself.
                # Some tokenizers leave out the space before a text.
                if self.decode(turn[start:]).lstrip(" ") == rest.lstrip(" "):
                    break
                start += 1
            # Kept text before that place, such as the rest of a token that the template cuts, is encoded anew.
            ids += [*self._continuation_ids(text[: len(text) - len(rest)], end), *turn[start:]]
            text, end = after, turn[-1]
        return ids + self._continuation_ids(text, end)

    def _continuation_ids(self, text: str, end: int | None) -> list[int]:
        """Returns the ids of a text that follows a turn with the last token `end`, or follows nothing (None)."""
        ids = self.encode(text)
        # The template's text begins with the token that ends a turn, maybe behind white space and other special tokens.
        # If the policy sampled that token, all up to it is there already. An end token behind any other text is not the
        # template's, but was written in a message.
        head = next((i for i, token in enumerate(ids) if token in self.stop_token_ids), -1)
        ended = head >= 0 and ids[head] == end and not self.decode(ids[:head]).strip()
        return ids[head + 1 :] if ended else ids

    def thought_prefix(self, prompt_ids: Sequence[int]) -> str:
        """Returns the "<think>" and the white space after it if a prompt ends with them, otherwise ""."""
        # The policy samples only the rest of such a thought. With this text in front, the text of a completion is the
        # whole turn, as from a model that samples "<think>" itself.
        opened = _OPEN_THOUGHT.search(self.decode(prompt_ids[-_LONGEST_OPENING:]))
        return opened[0] if opened else ""

    def conversation_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = False,
        sampled_only: bool = True,
    ) -> tuple[list[int], list[bool]]:
        """Returns the ids [T] and the mask [T] of a conversation. The mask is True on tokens that the policy generates.

        Every turn is rendered as the newest message, so thinking is kept, whatever the template does with older turns.

        Args:
            tools: the tools that the template shows, if any.
            add_generation_prompt: whether the generation prompt follows the conversation.
            sampled_only: False extends the mask to the whole generation block, as `apply_chat_template` counts it.

        Raises:
            ValueError: an assistant turn cannot be found in the text, or the template drops a part of it.
        """
        conversation = self.template.render_conversation(messages, tools, add_generation_prompt)
        ids, offsets = self._encode_pieces(conversation.text, [])
        mask = [False] * len(ids)
        # For the templates of Qwen the block includes the newline after a turn, and for Qwen2.5 also the one before it.
        if not sampled_only:
            for turn in conversation.turns:
                for t, (begin, end) in enumerate(offsets):
                    mask[t] |= begin < turn.end and end > turn.start
            return ids, mask
        # The engine samples behind the ids that a prompt has by itself. If the turn behind it would change them (a
        # token across the seam, for one), the text is cut at the seam, and each piece is encoded by itself.
        seams = sorted({turn.sampled_start for turn in conversation.turns})
        text = conversation.text
        prompts = [[token for token, (_, end) in zip(ids, offsets, strict=True) if end <= seam] for seam in seams]
        cuts = [seam for seam, prompt in zip(seams, prompts, strict=True) if prompt != self.encode(text[:seam])]
        if cuts:
            ids, offsets = self._encode_pieces(text, cuts)
            mask = [False] * len(ids)
        for turn in conversation.turns:
            # The engine stops at the token that ends the turn, so what the template writes behind it was never sampled.
            inside = [t for t, (begin, _) in enumerate(offsets) if turn.sampled_start <= begin < turn.end]
            stops = [t for t in inside if ids[t] in self.stop_token_ids]
            for t in inside:
                mask[t] = not stops or t <= stops[-1]
        return ids, mask

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text. Special tokens written in it become their ids, and none is added."""
        # Without `verbose`, transformers would warn of a text that is too long, for which a run has words of its own.
        try:
            return self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        except TypeError:
            # JSON may hold half of a surrogate pair, which tokenizers refuse without a name.
            if half := re.search("[\ud800-\udfff]", text):
                near = text[max(0, half.start() - 30) : half.end()]
                raise UsageError(f"half of a character at the end of {near!r}; write all of it, or remove it") from None
            raise

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of sampled ids, for graders and people, never for training."""
        # Of special tokens, only the marks of thoughts and tool calls are in it.
        return self._tokenizer.decode(
            [int(i) for i in ids if int(i) not in self._hidden_token_ids],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )

    def decode_all(self, ids: Sequence[int]) -> str:
        """Returns the text of all ids, special tokens among them: what the model reads."""
        return self._tokenizer.decode(
            list(map(int, ids)), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def tokens_from_id(self, first: int) -> list[str]:
        """Returns the tokens with this id or a higher one, in the order of their ids."""
        vocabulary = self._tokenizer.get_vocab()
        return sorted((token for token, i in vocabulary.items() if i >= first), key=vocabulary.get)

    def _encode_pieces(self, text: str, cuts: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """Encodes each piece of a text between the cuts by itself. Returns the ids and their character spans."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            encoding = self._tokenizer(text[start:end], add_special_tokens=False, return_offsets_mapping=True)
            ids += encoding["input_ids"]
            offsets += [(start + a, start + b) for a, b in encoding["offset_mapping"]]
        return ids, offsets

    def _find_template(self, template: str | None) -> tuple[str, str]:
        own = self._tokenizer.chat_template
        named = own if isinstance(own, dict) else {"default": own}  # a folder may hold several templates
        if template is None:
            source = named.get("default")
            if own and source is None:
                raise UsageError(
                    f"{str(self.path)!r} holds the chat templates {', '.join(named)} and no `default`; set tokenizer.template "
                    "to one of these names"
                )
            if not source:
                raise UsageError(
                    f"no chat template in {str(self.path)!r} (chat_template.jinja, or `chat_template` in "
                    "tokenizer_config.json); set `template` to a Jinja file, or to 'chatml' for the built-in one"
                )
            return str(self.path), source
        if named.get(template):
            return f"{self.path}: {template}", named[template]
        if template == "chatml":
            return "chatml", CHATML
        if "{%" in template or "{{" in template:
            return "given as text", template
        if not Path(template).is_file():
            raise UsageError(f"template={template!r} is neither a file nor 'chatml' nor a Jinja text; give one of them")
        return template, Path(template).read_text(encoding="utf-8")

    def _find_stop_token_ids(self) -> tuple[int, ...]:
        """Returns the end tokens: of the tokenizer, of generation_config.json and config.json, and of a turn."""
        # The tokenizer's own comes first, since it becomes `eos_id`. The files may have none, a number or a list.
        ids: list[int | None] = [self._tokenizer.eos_token_id]
        for name in ("generation_config.json", "config.json"):
            file = self.path / name
            given = read_json_object(file).get("eos_token_id") if file.is_file() else None
            given = given if isinstance(given, list) else [given]
            if wrong := [
                i for i in given if i is not None and (not isinstance(i, int) or isinstance(i, bool) or i < 0)
            ]:
                raise UsageError(
                    f"{file} says eos_token_id={wrong[0]!r}; expected the id of a token, a list of ids, or null. Write the id "
                    "that tokenizer.json gives to the token that ends a turn"
                )
            ids += given
        stop_ids = tuple(dict.fromkeys(i for i in [*ids, self._turn_end_id()] if i is not None))
        if not stop_ids:
            raise UsageError(
                f"{str(self.path)!r} names no end token: no `eos_token` in tokenizer_config.json, no `eos_token_id` in "
                f"generation_config.json, and template {self.template.name!r} ends no turn with one; add one"
            )
        return stop_ids

    def _turn_end_id(self) -> int | None:
        """Returns the last special token of an assistant turn, or None if the template has no such turn or token."""
        try:
            conversation = self.template.render_conversation(
                [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
            )
        except ValueError:
            # The template is only for prompts. `conversation_ids` gives the reason if it is called.
            return None
        turn = conversation.turns[-1]
        ends = [i for i in self.encode(conversation.text[turn.sampled_start : turn.end]) if i in self._special_ids]
        return ends[-1] if ends else None


def _load_tokenizer(path: Path):
    """Loads the fast tokenizer of a directory."""
    if not path.is_dir():
        raise UsageFileError(f"path={str(path)!r} is not a directory; give a downloaded Hugging Face model directory")
    # Importing PreTrainedTokenizerFast takes 0.5 s and no torch, AutoTokenizer takes 2.4 s.
    if (path / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast as Loader
    elif (path / "vocab.json").is_file() or (path / "tokenizer.model").is_file():
        from transformers import AutoTokenizer as Loader
    else:
        raise UsageFileError(
            f"no tokenizer.json in {str(path)!r}; give a Hugging Face model directory with its tokenizer"
        )
    try:
        return Loader.from_pretrained(path, local_files_only=True)
    except Exception as error:  # tokenizers raises bare exceptions
        # The error rarely names a file. Only now is the time spent to read them all.
        for file in sorted(path.iterdir()):
            require_no_lfs_pointer(file)
        for file in sorted(path.glob("*token*.json")):
            read_json_object(file)
        raise UsageFileError(
            f"the tokenizer in {str(path)!r} cannot be loaded ({type(error).__name__}: {error}); download its files again"
        ) from error
