"""Single-player games of TextArena, such as TowerOfHanoi-v0, FrozenLake-v0 and Sudoku-v0.

task:
  _component_: torchtune_ext.tasks.textarena.TextArena
  game: TowerOfHanoi-v0
  options: {num_disks: 2}
"""

from collections.abc import Mapping
from typing import Any

from torchtune_ext.run.errors import UsageError, closest_match, wrap_user_errors
from torchtune_ext.tasks.answers import strip_thinking
from torchtune_ext.tasks.games import GameTask, imported
from torchtune_ext.tasks.task import EnvironmentReply, Message


class TextArena(GameTask):
    """Task of a single-player game of TextArena.

    Some games (Wordle, Hangman, ...) require the word lists of NLTK.

    Args:
        game: name in TextArena.
        options: options of the game, which override the defaults of its name.
        max_turns: largest number of assistant turns. An unfinished game has reward 0.
        count: number of problems; None: endless.
        first, seed: as in `GameTask`.
        system: a system message before the game's first message.

    Raises:
        UsageError: textarena is not installed, the game is unknown, or it needs several players.
    """

    def __init__(
        self,
        game: str,
        options: Mapping[str, Any] | None = None,
        max_turns: int = 100,
        count: int | None = None,
        first: int = 0,
        seed: int = 0,
        system: str | None = None,
    ) -> None:
        known = imported("textarena.envs.registration", "textarena==0.7.4").ENV_REGISTRY
        if game not in known:
            near = closest_match(game, known)
            raise UsageError(
                f"game={game!r}: not one of TextArena's {len(known)} games{f'; did you mean {near!r}?' if near else ''}"
            )
        self.options, self.system = dict(options or {}), system
        super().__init__(game, None, count, first, seed, max_turns)

    def make_game(self, row: Mapping[str, Any], seed: int) -> tuple["TextArenaEnvironment", list[Message]]:
        import textarena

        with wrap_user_errors(
            f"textarena: {self.name}", "only single-player games are supported, with their word lists installed"
        ):
            game = textarena.make(self.name, **self.options)
            game.reset(num_players=1, seed=seed)
        environment = TextArenaEnvironment(game)
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return environment, before + environment.read_observation()


class TextArenaEnvironment:
    """One game of TextArena."""

    def __init__(self, game: Any) -> None:
        # A game's wrappers parse text to an action, but their observations repeat the whole game.
        # So actions go to the wrapped game, and observations come from the unwrapped one.
        from textarena import Wrapper

        self.game, self.unwrapped = game, game
        while isinstance(self.unwrapped, Wrapper):
            self.unwrapped = self.unwrapped.env

    def step(self, message: Message) -> EnvironmentReply:
        # Some games raise an error for an unreadable move. As an environment failure, the
        # episode would not be trained on.
        try:
            done, _ = self.game.step(strip_thinking(message["content"]))
            if not done:
                return EnvironmentReply(self.read_observation())
            # TextArena returns the rewards when a game is closed.
            rewards, info = self.game.close()
        except Exception as error:  # noqa: BLE001 (the game's code, on a text of the policy)
            return EnvironmentReply(done=True, parts={"invalid_move": 1.0}, note=f"{type(error).__name__}: {error}")
        parts, note = {"invalid_move": float(info[0]["invalid_move"])}, str(info[0].get("reason", ""))
        # A few games swap the arguments when they reject a move. Then the reward holds the reason.
        if isinstance(rewards[0], str):
            return EnvironmentReply(done=True, parts=parts, note=rewards[0])
        return EnvironmentReply(reward=rewards[0], done=True, parts=parts, note=note)

    def read_observation(self) -> list[Message]:
        """Returns the game's output since the last call, without the policy's own moves."""
        _, shown = self.unwrapped.get_observation()
        # A few games swap the arguments for the policy's move: `kind` is a string.
        text = "\n\n".join(text for _, text, kind in shown if getattr(kind, "name", "PLAYER_ACTION") != "PLAYER_ACTION")
        return [{"role": "user", "content": text}]
