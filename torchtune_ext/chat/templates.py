"""Renders messages with a chat template, and finds the characters that the assistant wrote.

A template may mark these characters by `{% generation %}...{% endgeneration %}`. Most published
templates do not, and some rewrite earlier turns: Qwen3 drops the thinking of every turn but the
newest. A model trained on such text would see turns that it never sampled. For templates without
marks, every assistant turn is rendered as the newest message, the form in which it was sampled, and
the pieces are joined.
"""

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from os.path import commonprefix
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from torchtune_ext.run.errors import UsageError

Message = dict[str, Any]
Tool = Mapping[str, Any]  # the JSON schema of a function

# ChatML with as few tokens as possible, for the models that the SFT warm-up creates from scratch:
# four tokens around a message (<|im_start|>, role, newline, <|im_end|>), no default system message,
# no newline after a turn.
CHATML = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message.content + '<|im_end|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Private-use characters, which do not occur in vocabularies or in real messages.
_PLACEHOLDER = "\ue0f1\ue0f2"
_TAG_HINT = (
    "Fix: put {% generation %} and {% endgeneration %} around what the assistant writes (its text and the token that "
    "ends its turn) in a copy of the template, and set `template` to the copy; docs/how_to/dataset.md has an example."
)

# The arguments of `render_jinja_template`, and the variables that it passes to every template.
_RENDERER_ARGUMENTS = {
    *inspect.signature(render_jinja_template).parameters,
    "messages",
    "self",
    "compiled_template",
} - {"kwargs"}
# Some templates (Mistral's) reject a tool message without an id of nine letters or digits.
_CALL_ID = "000000000"
SAMPLE_QUESTION = ({"role": "user", "content": "x"},)


class _EmptyToolCalls(tuple):
    """An empty sequence of tool calls that is truthy, so a template renders its shortest turn."""

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """The span of one assistant turn in a rendered conversation, in characters.

    start <= sampled_start <= end.
    """

    start: int  # first character after the header of the turn (position of `{% generation %}`)
    sampled_start: int  # first character after the generation prompt
    end: int  # one past the last character of the turn (position of `{% endgeneration %}`)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation rendered for training."""

    text: str  # the whole text, before tokenization
    turns: tuple[TurnSpan, ...]  # one span per assistant message, in order


class ChatTemplate:
    """A Jinja chat template with its special tokens.

    Args:
        name: the name of the template in error messages.
        special_tokens: variables of the template, {"bos_token": ..., "eos_token": ...}.
        options: more variables of the template, for example {"enable_thinking": False}.

    Raises:
        UsageError: an option has the name of a renderer argument, or is not JSON.
    """

    def __init__(self, source: str, name: str, special_tokens: dict[str, str], options: dict[str, Any] | None = None):
        self.source = source
        self.name = name
        self.has_tags = bool(_GENERATION_TAG.search(source))
        self.options = options or {}
        self._variables = {**special_tokens, **self.options}
        self._frame_cache: dict[str, tuple[str, str]] = {}
        if reserved_names := sorted(_RENDERER_ARGUMENTS & set(self.options)):
            raise UsageError(
                f"tokenizer.template_options.{reserved_names[0]}: `{reserved_names[0]}` is an argument of the "
                "renderer, not a variable of the template. Fix: remove it"
            )
        try:
            # A saved model stores the options in its template.
            json.dumps(self.options, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"tokenizer.template_options={self.options!r}: not JSON ({error}). Fix: use strings, finite numbers, true, "
                "false, null, lists and mappings"
            ) from None

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), generation_prompt: bool = False) -> str:
        """Renders `messages` to text.

        Raises:
            UsageError: the template rejects the messages.
        """
        return self._render(messages, tools, generation_prompt, tags=False)[0]

    def render_conversation(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), generation_prompt: bool = False
    ) -> Conversation:
        """Renders a conversation for training, with the span of each assistant turn.

        Raises:
            UsageError: a turn cannot be located, or the template drops a part of it.
        """
        messages = list(messages)
        if self.has_tags:
            text, spans = self._render(messages, tools, generation_prompt, tags=True)
            # A template with tags may still skip or empty a turn, which training would miss.
            num_assistant = sum(message["role"] == "assistant" for message in messages)
            self._require(
                len(spans) == num_assistant and all(start != end for start, end in spans),
                f"a {{% generation %}} block with text in it for each of the {num_assistant} assistant messages, "
                f"found {sum(end > start for start, end in spans)}",
            )
        else:
            text, spans = self._render_by_turn(messages, tools, generation_prompt)
        # A turn's block may begin inside the generation prompt, which the policy does not sample.
        prompt = self._frame_texts(messages)[0]
        return Conversation(text, tuple(TurnSpan(a, min(_prompt_end(text, a, prompt), b), b) for a, b in spans))

    def turn_boundary(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), problem: Sequence[Message] = SAMPLE_QUESTION
    ) -> str:
        """Returns the text between two assistant turns.

        It holds the end of the first turn, `messages`, and the next generation prompt.

        Args:
            messages: the messages between the two turns.
            problem: the messages before the first turn, which a template may read for every turn.

        Raises:
            UsageError: the template rejects the messages, or omits the turn before them.
        """
        # A placeholder stands for the earlier turn. So sampled text is never rendered again, and
        # the template's changes to older turns do not affect the result.
        mark = _unused_placeholder(problem)
        base = [*problem, {"role": "assistant", "content": mark}]
        _, is_found, after = self.render([*base, *messages], tools, generation_prompt=True).partition(mark)
        self._require(is_found, "an assistant's turn before further messages")
        return after

    def content_spans(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), problem: Sequence[Message] = SAMPLE_QUESTION
    ) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of `turn_boundary`, and the [start, stop) characters of the messages' content in it.

        The spans omit white space around a content. They are empty if the template writes a content
        between two placeholders in another way, so that the content cannot be located.
        """
        text = self.turn_boundary(messages, tools, problem)
        mark = _unused_placeholder([*problem, *messages])
        # A template may strip white space around a content, so it stays outside the placeholders.
        marked = [
            message | {"content": content.replace(content.strip(), f"{mark}{content.strip()}{mark}", 1)}
            if (content := message["content"]).strip()
            else message
            for message in messages
        ]
        try:
            pieces = self.turn_boundary(marked, tools, problem).split(mark)
        except UsageError:
            return text, []  # the template accepts the content, but no placeholder in it
        # The pieces alternate between the template's text and a content.
        ends = list(accumulate(map(len, pieces)))
        return text, list(zip(ends[::2], ends[1::2], strict=False)) if "".join(pieces) == text else []

    def split_at_turns(
        self, problem: Sequence[Message], messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> list[str]:
        """Renders a conversation with the generation prompt, split after each assistant turn.

        Args:
            problem: the messages before the first turn.
            messages: the assistant's turns and the replies.

        Raises:
            UsageError: the template rejects the messages, or drops a whole turn.
        """
        mark = _unused_placeholder([*problem, *messages])
        turns = [message["role"] == "assistant" for message in messages]
        marked = [
            message | {"content": message["content"] + mark} if turn else message
            for message, turn in zip(messages, turns, strict=True)
        ]
        pieces = self.render([*problem, *marked], tools, generation_prompt=True).split(mark)
        self._require(
            len(pieces) == 1 + sum(turns),
            f"the end of each of the assistant's {sum(turns)} turns before further messages",
        )
        return pieces

    def _render(self, messages, tools, generation_prompt, tags) -> tuple[str, list[tuple[int, int]]]:
        messages = [{"tool_call_id": _CALL_ID, **m} if m.get("role") == "tool" else m for m in messages]
        try:
            texts: Any  # one for each conversation
            spans: Any  # [begin, end) of the generated text of each conversation
            texts, spans = render_jinja_template(
                conversations=[messages],
                # Some templates write their section about tools even for an empty list.
                tools=list(tools) if tools else None,
                chat_template=self.source,
                return_assistant_tokens_mask=tags,
                add_generation_prompt=generation_prompt,
                **self._variables,
            )
        except (TemplateError, TypeError, AttributeError, KeyError) as error:
            roles = [message.get("role") for message in messages]
            raise UsageError(
                f"chat template {self.name!r} cannot render messages with roles {roles}: {type(error).__name__}: "
                f"{error}. Fix: change the messages, or set `template` to your own template."
            ) from error
        return texts[0], [(begin, end) for begin, end in spans[0]] if tags else []

    def _render_by_turn(self, messages, tools, generation_prompt) -> tuple[str, list[tuple[int, int]]]:
        """Joins the assistant turns, each rendered as the newest message, and the text between."""
        header = self._frame_texts(messages)[1]
        pieces: list[str] = []
        spans: list[tuple[int, int]] = []
        length, previous = 0, -1
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            between = self._render_between(messages, previous, index, tools, False)
            before, after = self.render(messages[:index], tools), self.render(messages[: index + 1], tools)
            # The turn can be extracted only if the template leaves the text before it unchanged.
            turn = after[len(before) :]
            self._require(
                after.startswith(before) and turn.startswith(header),
                f"the turn of message {index} (assistant) after the text of the messages before it, beginning with "
                f"{header!r}; the template writes {after[-200:]!r}",
            )
            _require_content_kept(self.name, index, message, turn)
            spans.append((length + len(between) + len(header), length + len(between) + len(turn)))
            pieces += [between, turn]
            length, previous = spans[-1][1], index
        return "".join(pieces) + self._render_between(
            messages, previous, len(messages), tools, generation_prompt
        ), spans

    def _render_between(self, messages, previous: int, index: int, tools, generation_prompt: bool) -> str:
        """Returns the text between assistant message `previous` (-1: start) and message `index`."""
        if index == previous + 1 and not generation_prompt:
            return ""
        later = self.render(messages[:index], tools, generation_prompt)
        if previous < 0:
            return later
        earlier = self.render(messages[: previous + 1], tools)
        if later.startswith(earlier):
            return later[len(earlier) :]
        # The template rewrites earlier turns, so the two texts differ before the end of the turn. A
        # placeholder for the turn's content locates that end in both texts.
        marked = {key: value for key, value in messages[previous].items() if key != "reasoning_content"}
        marked["content"] = _PLACEHOLDER
        past = [*messages[:previous], marked]
        later = self.render([*past, *messages[previous + 1 : index]], tools, generation_prompt).rpartition(_PLACEHOLDER)
        earlier = self.render(past, tools).rpartition(_PLACEHOLDER)
        self._require(
            later[2].startswith(earlier[2]),
            f"the end of the turn of message {previous} (assistant): {earlier[2]!r} after its text",
        )
        return later[2][len(earlier[2]) :]

    def _frame_texts(self, conversation: Sequence[Message]) -> tuple[str, str]:
        """Returns the generation prompt, and the header: its prefix that starts *every* turn."""
        # Both may depend on the system prompt: SmolLM3 reads /no_think in it.
        system = list(takewhile(lambda message: message["role"] == "system", conversation))
        if (frame := self._frame_cache.get(str(system))) is not None:
            return frame
        # Qwen2.5 writes the newline after "assistant" together with the content. So its shortest
        # turn has no newline, and the header is shorter than the prompt. Hence three forms: plain,
        # with a thought, and with tool calls only.
        messages = [*system, *SAMPLE_QUESTION]
        before, prompt = self.render(messages), self.render(messages, generation_prompt=True)
        self._require(
            prompt.startswith(before), "a generation prompt after the user's message (variable `add_generation_prompt`)"
        )
        prompt = prompt[len(before) :]
        forms = [self.render([*messages, {"role": "assistant", "content": "x"}])]
        for extra in ({"content": "<think>\nx\n</think>\n\ny"}, {"content": "", "tool_calls": _EmptyToolCalls()}):
            try:
                forms.append(self.render([*messages, {"role": "assistant", **extra}]))
            except ValueError:
                # This template does not have this form.
                continue
        self._require(
            all(form.startswith(before) for form in forms), "the assistant's turn after an unchanged user message"
        )
        frame = prompt, commonprefix([prompt, *(form[len(before) :] for form in forms)])
        return self._frame_cache.setdefault(str(system), frame)

    def _require(self, found: object, looked_for: str) -> None:
        if not found:
            raise UsageError(f"chat template {self.name!r} does not write {looked_for}. {_TAG_HINT}")


def _unused_placeholder(messages: Sequence[Message]) -> str:
    """Returns a placeholder that no message contains: a policy may sample any text."""
    mark = _PLACEHOLDER
    while any(mark in str(message.get("content")) for message in messages):
        mark += _PLACEHOLDER
    return mark


def _prompt_end(text: str, start: int, prompt: str) -> int:
    """Returns the end of the generation prompt that covers or touches `start`, else `start`."""
    begins = range(start - min(len(prompt), start), start + 1)
    return next((begin + len(prompt) for begin in begins if text.startswith(prompt, begin)), start)


def _require_content_kept(name: str, index: int, message: Message, turn: str) -> None:
    """Raises UsageError if the turn lacks text of the message, which could not be trained on."""
    content = message.get("content")
    # Templates may strip white space.
    if isinstance(content, str) and "".join(content.split()) not in "".join(turn.split()):
        raise UsageError(
            f"chat template {name!r} drops part of the content of message {index} (assistant), even where it is the "
            f"newest message; its turn is {turn[-200:]!r}. {_TAG_HINT}"
        )
