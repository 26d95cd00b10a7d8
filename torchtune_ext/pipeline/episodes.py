"""Tracks an episode in progress: turns of the policy and replies of its environment.

The prompt of the next turn is the token path so far, followed by the template's tokens for the
environment's reply (`turn_boundary_ids`). Turns are never re-tokenized, so the policy is trained
on the sampled tokens and contexts, and the engine finds the path in its prefix cache. With
`history: template`, the prompt contains what the chat template keeps of older turns, as sampled ids
(`context_ids`). Where it differs from the path so far, the path branches.
"""

from collections.abc import Sequence

import numpy as np

from torchtune_ext.grading.outcomes import Ungraded, check_outcome
from torchtune_ext.pipeline.groups import Sample
from torchtune_ext.sampling.types import Completion
from torchtune_ext.tasks.task import EnvironmentReply, Message, Score


class Episode:
    """One episode in progress.

    Args:
        prompt: token ids of the prompt of the first turn.
        thought_prefix: start of the first turn's text (`ChatTokenizer.thought_prefix`).
    """

    def __init__(self, prompt: Sequence[int] = (), thought_prefix: str = "") -> None:
        self.has_environment = False  # whether it has an environment process
        # The context and text prefix of the last turn.
        self._context, self._thought_prefix = np.asarray(prompt, dtype=np.int32), thought_prefix
        self._turns: list[Completion] = []
        self._kept_prefix_lens = [len(prompt)]  # per turn, how many ids of the path its context keeps
        self._has_branches = False  # whether any turn keeps only a part of the path
        self._reply_ids: list[np.ndarray] = []  # new ids between two turns, which the policy did not sample
        self._content_spans: list[tuple[int, int]] = []  # the environment's content in the tokens after the prompt
        self._messages: list[Message] = []
        self._rewards: list[float] = []
        self._score = Score(0.0)  # the sum of the rewards so far

    @property
    def num_turns(self) -> int:
        """The number of sampled turns."""
        return len(self._turns)

    @property
    def waits_for_engine(self) -> bool:
        """Whether the next turn is missing. Otherwise the reply to the last turn is missing."""
        return len(self._turns) == len(self._rewards)

    @property
    def num_tokens(self) -> int:
        """The number of sampled tokens."""
        return sum(len(turn.tokens) for turn in self._turns)

    @property
    def path(self) -> list[int]:
        """The token ids of the last turn's context, followed by the last turn."""
        return [*self._context.tolist(), *self._turns[-1].tokens.tolist()]

    @property
    def sampled_ids(self) -> list[list[int]]:
        """The token ids of each turn."""
        return [turn.tokens.tolist() for turn in self._turns]

    @property
    def messages(self) -> list[Message]:
        """The messages after the prompt."""
        return self._messages

    @property
    def last_message(self) -> Message:
        """The last message: the last sampled turn until the environment replies."""
        return self._messages[-1]

    def add_turn(self, completion: Completion, text: str) -> None:
        """Adds a turn of the policy."""
        self._turns.append(completion)
        self._messages.append({"role": "assistant", "content": self._thought_prefix + text})

    def add_reply(self, reply: EnvironmentReply) -> None:
        """Adds the environment's reply to the last turn."""
        self._rewards.append(reply.reward)
        self._messages += reply.messages
        reward, parts = self._score.reward + reply.reward, {**self._score.parts, **reply.parts}
        self._score = Score(reward, parts, reply.note or self._score.note)

    def packed_size(self, context: Sequence[int]) -> int:
        """Returns the packed tokens of the episode with this context for the next turn."""
        # All branches count, because one packed row must hold them all.
        so_far = self._kept_prefix_lens[0] + self.num_tokens + sum(map(len, self._reply_ids))
        return so_far + len(context) - self._common_prefix_len(context)

    def set_next_context(
        self, context: Sequence[int], thought_prefix: str, content: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Sets the context of the next turn, the start of its text and the spans of the reply's content."""
        kept = self._common_prefix_len(context)
        shift = self.num_tokens + sum(map(len, self._reply_ids)) - kept
        self._content_spans += [(max(start, kept) + shift, stop + shift) for start, stop in content if stop > kept]
        self._has_branches |= kept < len(self.path)
        self._context, self._thought_prefix = np.asarray(context, dtype=np.int32), thought_prefix
        self._kept_prefix_lens.append(kept)
        self._reply_ids.append(self._context[kept:])

    def _common_prefix_len(self, context: Sequence[int]) -> int:
        """Returns the length of the common prefix of a context and the path."""
        path = self.path
        length = min(len(path), len(context))
        differing = np.flatnonzero(np.not_equal(path[:length], context[:length]))
        return int(differing[0]) if len(differing) else length

    def to_sample(self, finish_reason: str, failure: Ungraded | None = None) -> Sample:
        """Returns the episode as a sample.

        Args:
            finish_reason: an entry of `FINISH_REASONS`, or the engine's finish reason of a
                truncated last turn.
            failure: the reason for a missing score, if the environment failed.
        """
        turns, reply_ids = self._turns, self._reply_ids
        # The ids between turns were not sampled. They get the version of the preceding turn, so
        # that no additional version appears.
        zero_logprobs = [np.zeros(len(ids), np.float32) for ids in reply_ids]
        versions = [np.full(len(ids), turn.versions[-1]) for turn, ids in zip(turns, reply_ids, strict=False)]
        starts = np.cumsum([0] + [len(turn.tokens) + len(ids) for turn, ids in zip(turns, reply_ids, strict=False)])
        return Sample(
            Completion(
                tokens=self._interleave([turn.tokens for turn in turns], reply_ids),
                logprobs=self._interleave([turn.logprobs for turn in turns], zero_logprobs),
                versions=self._interleave([turn.versions for turn in turns], versions),
                finish_reason=finish_reason,
                cached_prompt_tokens=turns[0].cached_prompt_tokens,
                turns=tuple(
                    (int(start), int(start) + len(turn.tokens)) for start, turn in zip(starts, turns, strict=True)
                ),
                kept_prefix_lens=tuple(self._kept_prefix_lens) if self._has_branches else (),
                content_spans=tuple(self._content_spans),
            ),
            text="\n".join(f"{message['role']}: {message['content']}" for message in self._messages),
            outcome=failure or check_outcome(self._score, "the environment"),
            messages=tuple(self._messages),
            turn_rewards=tuple(self._rewards),
        )

    @staticmethod
    def _interleave(turns: Sequence[np.ndarray], between: Sequence[np.ndarray]) -> np.ndarray:
        # `between` is as long as `turns` if ids follow the last turn, else shorter by one.
        return np.concatenate([ids for i, turn in enumerate(turns) for ids in (turn, *between[i : i + 1])])
