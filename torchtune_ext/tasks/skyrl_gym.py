"""Environments of skyrl-gym (SkyRL): built-in environments, and your subclasses of `BaseTextEnv`.

task:
  _component_: torchtune_ext.tasks.skyrl_gym.SkyRLGym
  environment: gsm8k_multi_turn
  rows: train.parquet          # SkyRL's format: `prompt`, and fields such as `reward_spec`
"""

from collections.abc import Mapping, Sequence
from numbers import Real
from types import SimpleNamespace
from typing import Any

from torchtune_ext.run.errors import UsageError, wrap_user_errors
from torchtune_ext.tasks.answers import strip_thinking
from torchtune_ext.tasks.games import GameTask, imported, prompt_messages
from torchtune_ext.tasks.task import EnvironmentReply, Message


class SkyRLGym(GameTask):
    """Task of an environment of skyrl-gym.

    Args:
        environment: name in skyrl-gym, or "module:Class" for your own environment.
        rows: a file or the rows themselves, which the environment gets as its `extras`. `prompt`
            holds messages or a string.
        max_turns: largest number of assistant turns; a row may have its own for the environment.
        options: options of the environment (`env_config`).
        count, first, seed: as in `GameTask`.

    Raises:
        UsageError: skyrl-gym or the environment is missing, or `rows` cannot be read.
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
                f"environment={environment!r}: unknown; skyrl-gym has {', '.join(sorted(registry))}. Fix: use one of these, or "
                "module:Class for your own"
            )
        self.environment_name, self.options = environment, dict(options or {})
        super().__init__(environment.rpartition(":")[2], rows, count, first, seed, max_turns)

    def make_game(self, row: Mapping[str, Any], seed: int) -> tuple["SkyRLEnvironment", list[Message]]:
        from skyrl_gym.envs.registration import EnvSpec, make

        # An unregistered class is its own entry point.
        name = self.environment_name
        kind = EnvSpec(name, name) if ":" in name else name
        with wrap_user_errors(f"skyrl_gym: {name}"):
            # A row may have its own `max_turns`.
            game = make(kind, env_config=SimpleNamespace(**self.options), extras={"max_turns": self.max_turns, **row})
            return SkyRLEnvironment(game), game.init(prompt_messages(row))[0]


class SkyRLEnvironment:
    """One episode with an environment of skyrl-gym."""

    def __init__(self, game: Any) -> None:
        self.game = game

    def step(self, message: Message) -> EnvironmentReply:
        # The environment's rewritten turn (`postprocessed_action`) is not used, because the policy
        # is trained on the ids that it sampled.
        step = self.game.step(strip_thinking(message["content"]))
        # The parts of a score must be numbers; metrics may have any type.
        found = self.game.get_metrics()
        metrics: dict[str, Any] = {name: value for name, value in found.items() if isinstance(value, Real)}
        return EnvironmentReply(step["observations"], step["reward"], step["done"], metrics)

    def close(self) -> None:
        self.game.close()
