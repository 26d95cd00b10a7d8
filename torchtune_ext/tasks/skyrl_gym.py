"""Environments of skyrl-gym, the gym of SkyRL: its own, and yours that derive from its `BaseTextEnv`.

task:
  _component_: torchtune_ext.tasks.skyrl_gym.SkyRLGym
  environment: gsm8k_multi_turn
  rows: train.parquet          # as SkyRL has them: `prompt`, and what the environment looks for, such as `reward_spec`
"""

from collections.abc import Mapping, Sequence
from numbers import Real
from types import SimpleNamespace
from typing import Any

from torchtune_ext.run.errors import UsageError, wrap_user_errors
from torchtune_ext.tasks.answers import strip_thinking
from torchtune_ext.tasks.games import GameTask, imported, prompt_messages
from torchtune_ext.tasks.task import Message, Turn


class SkyRLGym(GameTask):
    """The task.

    Args:
        environment: name in skyrl-gym, or "module:Class" for one of your own.
        rows: a file or the rows themselves, which the environment gets as its `extras`. `prompt` is messages or a text.
        max_turns: largest number of turns of the assistant. The environment gets it if the row has none.
        options: options of the environment (`env_config`).
        count, first, seed: as in `Games`.

    Raises:
        ValueError: skyrl-gym is not installed, there is no such environment, or `rows` cannot be read.
    """

    def __init__(
        self,
        environment: str,
        rows: str | Sequence[Mapping[str, Any]],
        max_turns: int = 10,
        options: Mapping[str, Any] | None = None,
        count: int | None = None,
        first: int = 0,
        seed: int = 0,
    ) -> None:
        registry = imported("skyrl_gym.envs.registration", "skyrl-gym==0.4.0").registry
        if environment not in registry and ":" not in environment:
            raise UsageError(
                f"environment={environment!r}: skyrl-gym has {', '.join(sorted(registry))}; one of your own is module:Class"
            )
        self.environment_name, self.options = environment, dict(options or {})
        super().__init__(environment.rpartition(":")[2], rows, count, first, seed, max_turns)

    def make_game(self, row: Mapping[str, Any], seed: int) -> tuple["SkyRLEnvironment", list[Message]]:
        from skyrl_gym.envs.registration import EnvSpec, make

        # A class that is not registered is its own entry point.
        kind = (
            EnvSpec(self.environment_name, self.environment_name)
            if ":" in self.environment_name
            else self.environment_name
        )
        with wrap_user_errors(f"skyrl_gym: {self.environment_name}"):
            # A row may have its own `max_turns`.
            game = make(kind, env_config=SimpleNamespace(**self.options), extras={"max_turns": self.max_turns, **row})
            return SkyRLEnvironment(game), game.init(prompt_messages(row))[0]


class SkyRLEnvironment:
    """One conversation with an environment of skyrl-gym."""

    def __init__(self, game: Any) -> None:
        self.game = game

    def step(self, message: Message) -> Turn:
        # What an environment makes of the turn (`postprocessed_action`) is not used, because the policy is trained on
        # what it sampled.
        step = self.game.step(strip_thinking(message["content"]))
        # The parts of a score are numbers. Metrics may be anything.
        metrics: dict[str, Any] = {
            name: value for name, value in self.game.get_metrics().items() if isinstance(value, Real)
        }
        return Turn(step["observations"], step["reward"], step["done"], metrics)

    def close(self) -> None:
        self.game.close()
