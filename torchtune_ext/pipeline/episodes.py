"""A conversation in progress: turns of the policy and answers of its environment, until one of them ends it.

The prompt of the next turn is all that was sampled, followed by what the template writes around the answer
(`between_turns_ids`). So the policy is trained on the tokens and contexts that were sampled, and the engine finds all
but the answer in its prefix cache. With `history: template` the prompt is what the template leaves of older turns, in
the ids that were sampled (`context_ids`). It branches from the path before it where the two differ.
"""

from collections.abc import Sequence

import numpy as np

from torchtune_ext.grading.environments import EnvironmentSlot
from torchtune_ext.grading.outcomes import Ungraded, check_outcome
from torchtune_ext.pipeline.groups import Sample
from torchtune_ext.sampling.types import Completion
from torchtune_ext.tasks.task import Message, Score, Turn


class Episode:
    """One conversation so far.

    Args:
        prompt: the ids behind which the first turn is sampled.
        opened: how the text of the first turn begins (`ChatTokenizer.opened_thought`).
    """

    def __init__(self, prompt: Sequence[int] = (), thought_prefix: str = "") -> None:
        self.slot: EnvironmentSlot | None = None  # the place of its environment; None before the first turn is there
        self._context, self._thought_prefix = (
            np.asarray(prompt, dtype=np.int32),
            thought_prefix,
        )  # those of the last turn
        self._turns: list[Completion] = []  # the turns
        self._kept_prefix_lens = [len(prompt)]  # for each turn, how many ids of the path before it are in its context
        self._has_branches = False  # whether a turn keeps less than all
        self._answers: list[np.ndarray] = []  # ids between turns that are in no earlier path
        self._messages: list[Message] = []
        self._rewards: list[float] = []
        self._score = Score(0.0)  # the sum over all answers

    @property
    def num_turns(self) -> int:
        """How many turns the policy has sampled."""
        return len(self._turns)

    @property
    def num_tokens(self) -> int:
        """How many tokens the policy has sampled."""
        return sum(len(part.tokens) for part in self._turns)

    @property
    def path(self) -> list[int]:
        """The ids of the last turn's context and of the turn itself."""
        return [*self._context.tolist(), *self._turns[-1].tokens.tolist()]

    @property
    def sampled_ids(self) -> list[list[int]]:
        """The ids of each turn."""
        return [part.tokens.tolist() for part in self._turns]

    @property
    def messages(self) -> list[Message]:
        """The messages after the prompt."""
        return self._messages

    @property
    def last_message(self) -> Message:
        """The last sampled turn, until it is answered."""
        return self._messages[-1]

    def add_turn(self, completion: Completion, text: str) -> None:
        """Adds a turn of the policy."""
        self._turns.append(completion)
        self._messages.append({"role": "assistant", "content": self._thought_prefix + text})

    def add_answer(self, turn: Turn) -> None:
        """Adds the environment's answer to the last turn."""
        self._rewards.append(turn.reward)
        self._messages += turn.messages
        score = self._score
        self._score = Score(
            score.reward + turn.reward, {**score.parts, **turn.parts}, turn.note or score.note, score.facts
        )

    def packed_size(self, context: Sequence[int]) -> int:
        """Returns how many tokens the conversation has with this context for a next turn, in all branches."""
        # All branches count, because a packed row has to hold them together.
        so_far = self._kept_prefix_lens[0] + self.num_tokens + sum(map(len, self._answers))
        return so_far + len(context) - self._common_prefix_len(context)

    def set_next_context(self, context: Sequence[int], thought_prefix: str) -> None:
        """Sets the context of the next turn, and how its text begins."""
        kept = self._common_prefix_len(context)
        self._has_branches |= kept < len(self.path)
        self._context, self._thought_prefix = np.asarray(context, dtype=np.int32), thought_prefix
        self._kept_prefix_lens.append(kept)
        self._answers.append(self._context[kept:])

    def _common_prefix_len(self, context: Sequence[int]) -> int:
        """Returns how many ids of the last path a context begins with."""
        path = self.path
        length = min(len(path), len(context))
        others = np.flatnonzero(np.not_equal(path[:length], context[:length]))
        return int(others[0]) if len(others) else length

    def to_sample(self, ending: str, failure: Ungraded | None = None) -> Sample:
        """Returns the conversation as a sample.

        Args:
            ending: a word of the table in `grading/environments.py`, or the reason why the engine cut the last turn.
            failure: why there is no score, if the environment failed.
        """
        parts, answers = self._turns, self._answers
        # The ids between turns were not sampled. They get the version of the turn before, so that no further version
        # appears.
        quiet = [np.zeros(len(ids), np.float32) for ids in answers]
        versions = [np.full(len(ids), part.versions[-1]) for part, ids in zip(parts, answers, strict=False)]
        starts = np.cumsum([0] + [len(part.tokens) + len(ids) for part, ids in zip(parts, answers, strict=False)])
        return Sample(
            Completion(
                tokens=self._interleave([part.tokens for part in parts], answers),
                logprobs=self._interleave([part.logprobs for part in parts], quiet),
                versions=self._interleave([part.versions for part in parts], versions),
                finish_reason=ending,
                cached_prompt_tokens=parts[0].cached_prompt_tokens,
                turns=tuple(
                    (int(start), int(start) + len(part.tokens)) for start, part in zip(starts, parts, strict=True)
                ),
                kept_prefix_lens=tuple(self._kept_prefix_lens) if self._has_branches else (),
            ),
            text="\n".join(f"{message['role']}: {message['content']}" for message in self._messages),
            outcome=failure or check_outcome(self._score, self.to_sample),
            messages=tuple(self._messages),
            turn_rewards=tuple(self._rewards),
        )

    @staticmethod
    def _interleave(turns: Sequence[np.ndarray], between: Sequence[np.ndarray]) -> np.ndarray:
        # `between` is as long as `turns`, if there are ids behind the last one, too, or shorter by one.
        return np.concatenate([turn for i, part in enumerate(turns) for turn in (part, *between[i : i + 1])])
