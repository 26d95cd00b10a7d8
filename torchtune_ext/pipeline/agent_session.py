"""The requests and responses of one agent episode, as token ids.

An agent sends the whole history with every request. If the history extends a response of this
episode, the context of the new request is the sampled ids of that response and the template's
tokens for the new messages, so no turn is re-tokenized. Any other history is rendered anew, and the
episode becomes a tree (`Completion.parents`).
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading import Outcome, Ungraded
from torchtune_ext.pipeline.groups import Group, Sample
from torchtune_ext.sampling.types import Completion
from torchtune_ext.tasks.task import Message, Score


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """One response of the policy to a request of the agent."""

    id: str
    new_messages: tuple[Message, ...]  # messages of the request that no earlier response contains, and the raw turn
    context: np.ndarray  # [C] int32, the ids that the engine was given
    content: Sequence[tuple[int, int]]  # spans of `context` with the content of the new messages
    completion: Completion
    is_trained: bool
    # What the template needs to continue the path without its sampled text: the request that was
    # rendered as a whole, the messages and turns after it, and the sampled ids of these turns.
    root: tuple[Message, ...]
    root_ids: list[int]
    history: tuple[Message, ...]
    sampled: tuple[list[int], ...]

    @property
    def path(self) -> np.ndarray:
        """The context followed by the response, [C + R] int32."""
        return np.concatenate([self.context, self.completion.tokens])


@dataclass(frozen=True, slots=True)
class Context:
    """The token ids of a request, and the response that it extends."""

    ids: list[int]
    new_messages: tuple[Message, ...]
    extended: Response | None  # None: rendered as a whole
    # Spans of `ids` with the content of the new messages; none if it is rendered as a whole, because such a
    # history may repeat earlier messages.
    content: Sequence[tuple[int, int]] = ()


class AgentSession:
    """One episode of an agent."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self.responses: list[Response] = []
        self._by_history: dict[bytes, Response] = {}  # by digest of the messages and the tools
        # Paths of the trained responses that no other response continues.
        self._paths: list[np.ndarray] = []
        self._packed_tokens = 0  # of the tree: prompt and `build_tree(...).tokens`

    def find_context(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Context:
        """Returns the context of a request.

        Raises:
            UsageError: the chat template cannot render the messages.
        """
        tokenizer, digests = self._tokenizer, _history_digests(messages, tools)
        rendered = tuple(map(_for_template, messages))
        for length in range(len(messages), 0, -1):
            known = self._by_history.get(digests[length - 1])
            new = rendered[length:]
            # A turn that the policy did not sample can only be rendered.
            if known is None or any(message["role"] == "assistant" for message in new):
                continue
            if tokenizer.history == "sampled":
                path = known.path.tolist()
                ids = path + tokenizer.turn_boundary_ids(new, path[-1], tools, known.root)
            else:
                ids = tokenizer.context_ids(known.root, [*known.history, *new], known.sampled, tools)
            return Context(ids, new, known, tokenizer.content_spans(ids, new, tools, known.root))
        return Context(tokenizer.prompt_ids(rendered, tools), rendered, None)

    def num_turns(self, context: Context) -> int:
        """The number of sampled turns on the path of a context."""
        return len(context.extended.sampled) if context.extended else 0

    def packed_size(self, contexts: Sequence[Sequence[int]]) -> int:
        """Returns the packed tokens of the episode with further contexts: of requests in flight and of a new one."""
        paths, used = list(self._paths), self._packed_tokens
        for context in contexts:
            paths.append(ids := np.asarray(context, np.int32))
            used += _new_tokens(ids, paths[:-1])
        return used

    def finish(self, lost: Collection[str]) -> None:
        """Drops what only further requests need, and the responses with these ids."""
        self._by_history, self._paths = {}, []
        self.responses = [response for response in self.responses if response.id not in lost]

    def add(
        self,
        request_id: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        context: Context,
        completion: Completion,
        raw_text: str,
        message: Message,
        is_trained: bool,
    ) -> Response:
        """Adds a response.

        Args:
            messages, tools: of the request.
            context: as `find_context` returned it.
            raw_text: the whole text of the response, with its thoughts.
            message: the message that the agent gets.
            is_trained: False serves the response without training on it.
        """
        turn, known = {"role": "assistant", "content": raw_text}, context.extended
        response = Response(
            request_id,
            (*context.new_messages, turn),
            np.asarray(context.ids, np.int32),
            context.content,
            completion,
            is_trained,
            known.root if known else context.new_messages,
            known.root_ids if known else context.ids,
            (*(known.history + context.new_messages if known else ()), turn),
            (*(known.sampled if known else ()), completion.tokens.tolist()),
        )
        self.responses.append(response)
        if is_trained:
            path = response.path
            # As in `build_tree`, contexts share prefixes, and each response is stored as a whole.
            self._packed_tokens += _new_tokens(response.context, self._paths) + len(completion.tokens)
            self._paths = [other for other in self._paths if common_prefix_len(path, other) < len(other)] + [path]
        self._by_history[_history_digests([*messages, message], tools)[-1]] = response
        return response

    @property
    def num_tokens(self) -> int:
        """The number of sampled tokens that are trained on."""
        return sum(len(response.completion.tokens) for response in self.trained)

    @property
    def trained(self) -> list[Response]:
        """The responses that are trained on, in the order in which they were sampled."""
        return [response for response in self.responses if response.is_trained]

    def to_completion(self, prompt: np.ndarray, finish_reason: str) -> Completion:
        """Returns the trained responses as one tree below the prompt of the group.

        Args:
            prompt: [P] int32, a prefix of the first trained response's context.
            finish_reason: why the episode ended.
        """
        return build_tree(
            prompt,
            [(response.context, response.completion) for response in self.trained],
            finish_reason,
            [response.content for response in self.trained],
        )


def shared_prompt(prompt: np.ndarray, sessions: Sequence[AgentSession]) -> np.ndarray:
    """Returns the longest common prefix of the first contexts of a group's episodes, [P] int32.

    `prompt` is the result if no episode has a trained response.
    """
    contexts = [session.trained[0].context for session in sessions if session.trained]
    if contexts:
        prompt = contexts[0][: min(common_prefix_len(contexts[0], context) for context in contexts)]
    return prompt


def share_prefix(group: Group, sessions: Sequence[AgentSession]) -> Group:
    """Returns the group with the prompt that its episodes share, and their completions after it."""
    # Agents write their own first request, so it is known only now.
    prompt = shared_prompt(group.prompt_tokens, sessions)
    samples = tuple(
        replace(sample, completion=session.to_completion(prompt, sample.completion.finish_reason))
        for sample, session in zip(group.samples, sessions, strict=True)
    )
    return replace(group, prompt_tokens=prompt, samples=samples)


def agent_sample(
    session: AgentSession, prompt: Sequence[int], finish_reason: str, outcome: Outcome, max_tokens: int
) -> Sample:
    """Returns an episode as a sample. Its completion follows the episode's own first context.

    Args:
        prompt: ids of the problem's own messages, which the sample's messages omit.
        finish_reason: why the episode ended.
        outcome: what the agent returned.
        max_tokens: limit of the run for one response, `sampling.max_tokens`.
    """
    if finish_reason == "completed" and session.trained:
        # The agent ended after a truncated response. A lower limit of the agent's own truncates nothing.
        last = session.trained[-1].completion
        if last.finish_reason != "stop" and (last.finish_reason != "length" or len(last.tokens) >= max_tokens):
            finish_reason = last.finish_reason
    if isinstance(outcome, Score) and (unknown := outcome.response_rewards.keys() - {r.id for r in session.responses}):
        cause = f"the agent failed: response_rewards has {min(unknown)!r}, which is not the id of a response it got"
        finish_reason, outcome = "agent_failed", Ungraded("infra_failed", cause)
    messages: list[Message] = []
    for response in session.trained:
        if not np.array_equal(response.context, prompt):
            # Other assistant messages, as in a history that the agent has edited, have no reward.
            messages += [m | {"sampled": "no"} if m["role"] == "assistant" else m for m in response.new_messages[:-1]]
        messages.append(response.new_messages[-1])
    rewards = ()
    if isinstance(outcome, Score) and session.trained:
        # The last response gets what the rewards of single responses leave of the reward.
        given = [outcome.response_rewards.get(response.id, 0.0) for response in session.trained]
        rewards = (*given[:-1], given[-1] + outcome.reward - sum(given))
    return Sample(
        session.to_completion(session.trained[0].context if session.trained else np.empty(0, np.int32), finish_reason),
        text="\n".join(f"{message['role']}: {message['content']}" for message in messages),
        outcome=outcome,
        messages=tuple(messages),
        turn_rewards=rewards,
    )


def build_tree(
    prompt: np.ndarray,
    responses: Sequence[tuple[np.ndarray, Completion]],
    finish_reason: str,
    contents: Sequence[Sequence[tuple[int, int]]] = (),
) -> Completion:
    """Stores responses, each after the context that was really sent, with shared prefixes stored once.

    Args:
        prompt: [P] int32.
        responses: (context, completion) in the order in which they were sampled.
        finish_reason: why the episode ended.
        contents: for each response, the spans of its context with the environment's content.
    """
    # By turn, without paths that a later turn continues: whatever extends them extends that turn, too.
    ends: dict[int, np.ndarray] = {}
    turns, kept_lens, parents, path_lens, content_spans = [], [], [], [], []
    tokens, logprobs, versions = [np.empty(0, np.int32)], [np.empty(0, np.float32)], [np.empty(0, np.int32)]
    length = 0
    for (context, completion), content in zip(responses, contents or [()] * len(responses), strict=True):
        # The longest common prefix; of equal ones the latest, which is the previous turn if nothing
        # branches.
        kept, parent = max(((common_prefix_len(context, path), turn) for turn, path in ends.items()), default=(0, -1))
        if (kept_prompt := common_prefix_len(context, prompt)) >= kept:
            parent, kept = -1, kept_prompt
        between = context[kept:]
        # Ids of the context were not sampled. They get the version of the preceding turn, so that no
        # additional version appears.
        version = versions[-1][-1] if turns else completion.versions[0]
        tokens += [between, completion.tokens]
        logprobs += [np.zeros(len(between), np.float32), completion.logprobs]
        versions += [np.full(len(between), version, np.int32), completion.versions]
        # A token that an earlier turn stores is content of that turn, or none.
        shift = length - kept
        content_spans += [(max(begin, kept) + shift, stop + shift) for begin, stop in content if stop > kept]
        start = length + len(between)
        length = start + len(completion.tokens)
        if parent >= 0 and kept == path_lens[parent]:
            ends.pop(parent, None)
        ends[len(turns)] = np.concatenate([context, completion.tokens])
        path_lens.append(len(context) + len(completion.tokens))
        turns.append((start, length))
        kept_lens.append(kept)
        parents.append(parent)
    whole = [len(prompt), *path_lens]
    is_path = parents == list(range(-1, len(parents) - 1)) and kept_lens == whole[: len(kept_lens)]
    return Completion(
        tokens=np.concatenate(tokens),
        logprobs=np.concatenate(logprobs),
        versions=np.concatenate(versions),
        finish_reason=finish_reason,
        cached_prompt_tokens=responses[0][1].cached_prompt_tokens if responses else 0,
        turns=tuple(turns),
        kept_prefix_lens=() if is_path else tuple(kept_lens),
        parents=() if is_path else tuple(parents),
        content_spans=tuple(content_spans),
    )


def common_prefix_len(first: np.ndarray, second: np.ndarray) -> int:
    """Returns the number of ids that two sequences begin with."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if len(differing) else length


def _new_tokens(path: np.ndarray, paths: Sequence[np.ndarray]) -> int:
    return len(path) - max((common_prefix_len(path, other) for other in paths), default=0)


def message_text(content: Any) -> str:
    """Returns the text of a message's `content`: a string, None, or OpenAI's list of text parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


def _for_template(message: Message) -> dict[str, Any]:
    """Returns a message of the API as chat templates expect it: text, and arguments as objects."""
    rendered: dict[str, Any] = {key: message[key] for key in ("role", "name", "tool_call_id") if message.get(key)}
    rendered["content"] = message_text(message.get("content"))
    calls: Any = message.get("tool_calls")
    return rendered | ({"tool_calls": [call | {"function": _function(call)} for call in calls]} if calls else {})


def _function(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        pass  # the template renders the text
    return {"name": function["name"], "arguments": arguments}


def _canonical(message: Message) -> str:
    """Returns a key that ignores the order of keys, and what clients change in the policy's messages.

    That is thoughts, names, ids of calls, and white space around texts.
    """
    calls: Any = message.get("tool_calls") or ()
    calls, name, text = [_function(call) for call in calls], message.get("name"), message_text(message.get("content"))
    name, text = (None, text.strip()) if message["role"] == "assistant" else (name, text)
    return json.dumps([message["role"], name, text, calls], sort_keys=True)


def _history_digests(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Returns the digest of the history that ends with each message."""
    digest, digests = hashlib.sha256(json.dumps(list(tools), sort_keys=True).encode()), []
    for message in messages:
        digest.update(_canonical(message).encode() + b"\0")
        digests.append(digest.digest())
    return digests
