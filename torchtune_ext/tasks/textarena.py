"""Games of TextArena for one player: GuessTheNumber-v0, TowerOfHanoi-v0, FrozenLake-v0, Minesweeper-v0, Sudoku-v0, ...

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
from torchtune_ext.tasks.task import Message, Turn


class TextArena(GameTask):
    """The task.

    Games that need word lists of NLTK (Wordle, Hangman, ...) work where those are installed.

    Args:
        game: name in TextArena.
        options: options of the game, which replace those that its name stands for.
        max_turns: largest number of turns of the assistant. Most games end before; one that does not has no reward.
        count: number of problems; None: endless.
        first, seed: as in `Games`.
        system: a message before the game's own.

    Raises:
        ValueError: textarena is not installed, there is no such game, or it is not for one player.
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
                f"game={game!r} is none of TextArena's {len(known)}{f'; did you mean {near!r}?' if near else ''}"
            )
        self.options, self.system = dict(options or {}), system
        super().__init__(game, None, count, first, seed, max_turns)

    def make_game(self, row: Mapping[str, Any], seed: int) -> tuple["TextArenaEnvironment", list[Message]]:
        import textarena

        with wrap_user_errors(
            f"textarena: {self.name}", "only games for one player can be played, with the word lists that they need"
        ):
            game = textarena.make(self.name, **self.options)
            game.reset(num_players=1, seed=seed)
        environment = TextArenaEnvironment(game)
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return environment, before + environment.read_observation()


class TextArenaEnvironment:
    """One game of TextArena."""

    def __init__(self, game: Any) -> None:
        # The wrappers around a game turn a text into an action, but their observations repeat the whole game with every
        # turn. So actions go to the wrapped game, and observations come from the bare one.
        from textarena import Wrapper

        self.game, self.unwrapped = game, game
        while isinstance(self.unwrapped, Wrapper):
            self.unwrapped = self.unwrapped.env

    def step(self, message: Message) -> Turn:
        # Some games raise at a move that they cannot read. As a failure of the environment it would not be trained on.
        try:
            done, _ = self.game.step(strip_thinking(message["content"]))
            if not done:
                return Turn(self.read_observation())
            # TextArena gives out the rewards when a game is closed.
            rewards, info = self.game.close()
        except Exception as error:  # noqa: BLE001 (the game's code, on a text of the policy)
            return Turn(done=True, parts={"invalid_move": 1.0}, note=f"{type(error).__name__}: {error}")
        parts, note = {"invalid_move": float(info[0]["invalid_move"])}, str(info[0].get("reason", ""))
        # A few games interchange the arguments when they refuse a move. Then the reward is the reason.
        if isinstance(rewards[0], str):
            return Turn(done=True, parts=parts, note=rewards[0])
        return Turn(reward=rewards[0], done=True, parts=parts, note=note)

    def read_observation(self) -> list[Message]:
        """Returns what the game has shown since the last call, without what the policy said itself."""
        _, shown = self.unwrapped.get_observation()
        # A few games interchange the arguments when they record what the policy said. Its kind is a text then.
        text = "\n\n".join(text for _, text, kind in shown if getattr(kind, "name", "PLAYER_ACTION") != "PLAYER_ACTION")
        return [{"role": "user", "content": text}]
