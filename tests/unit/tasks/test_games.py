"""Doors to environments of other projects, on the packages themselves: schemas, calls, rewards, the same game in both places."""

import pickle
import random

import pytest

from torchtune_ext.grading.environments import check_reply
from torchtune_ext.tasks.task import EnvironmentReply
from torchtune_ext.tasks.tool_class import ToolClass

SHOP = '''
import random

class Shop:
    def reset(self, budget=3, **row):
        self.left, self.items, self.price = budget, [], random.randint(1, 10**6)
        return f" You have {budget} coins. Today is {self.price}."

    def buy(self, item: str, count: int = 1) -> str:
        """Buys something.

        Args:
            item: what to buy.
            count: how many of it.
        """
        if count > self.left:
            raise RuntimeError("too few coins")
        self.left -= count
        self.items += [item] * count
        return f"{self.left} left"

    async def look(self) -> list:
        """Says what was bought."""
        return self.items

    def get_reward(self) -> float:
        return float(len(self.items))


class Unhinted(Shop):
    def sell(self, item):
        """Sells something.

        Args:
            item: what to sell.
        """

class Undocumented(Shop):
    def sell(self, item: str): pass

class Toolless:
    def reset(self): pass
    def get_reward(self): pass

class Free:
    def reset(self): pass

class Restless(Shop):
    drawn = random.Random()
    def reset(self, **row):
        super().reset(**row)
        return str(self.drawn.random())

class Silent(Shop):
    def reset(self, **row): pass

class Broken(Shop):
    def reset(self, budget): raise KeyError(budget)
'''
ROWS = [{"prompt": "Buy.", "budget": 3}, {"prompt": [{"role": "user", "content": "Buy more."}], "budget": 9}]


@pytest.fixture
def shop(tmp_path, monkeypatch):
    (tmp_path / "my_shop.py").write_text(SHOP)
    monkeypatch.syspath_prepend(tmp_path)


def call(name, **arguments):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'.replace("'", '"')


def say(game, text):
    return game.step({"role": "assistant", "content": text})


def test_the_tools_of_a_class(shop):
    task = ToolClass("my_shop.Shop", ROWS, system="Be brief.", max_turns=4)
    problem = task[0]
    assert task[0] == problem and len(task) == 2
    system, user = problem.messages
    assert system == {"role": "system", "content": "Be brief."}
    assert user["content"].startswith("Buy. You have 3 coins. Today is ")
    assert task[1].messages[1]["content"].startswith("Buy more. You have 9")
    buy, look = (tool["function"] for tool in problem.tools)
    assert buy["name"] == "buy" and buy["parameters"]["required"] == ["item"] and look["name"] == "look"
    game = pickle.loads(pickle.dumps(task)).environment(problem, 0)
    turn = say(game, "Well. " + call("buy", item="egg", count=2))
    assert turn.messages == [{"role": "tool", "name": "buy", "content": "1 left"}] and not turn.done
    turn = say(game, call("look") + call("buy", item="egg", count=2) + call("buy", number=1) + call("bye"))
    assert [message["content"] for message in turn.messages] == [
        "['egg', 'egg']",
        "{'error': 'too few coins'}",
        "{'error': \"Shop.buy() got an unexpected keyword argument 'number'\"}",
        "{'error': 'unknown tool bye; the tools are buy, look'}",
    ]
    turn = say(game, "<tool_call>buy")
    assert "not JSON" in turn.messages[0]["content"] and (turn.done, turn.reward) == (False, 0.0)
    turn = say(game, "I have two eggs.")
    assert (turn.messages, turn.done, turn.reward) == ([], True, 2.0)
    assert turn.parts == {"tool_calls": 6, "tool_errors": 4}


def test_tool_class_last_turn_gives_the_reward(shop):
    task = ToolClass("my_shop.Shop", ROWS, max_turns=1)
    turn = say(task.environment(task[0], 0), call("buy", item="egg"))
    assert (turn.done, turn.reward) == (False, 1.0)  # ended as "max_turns"


def test_tool_class_without_rows_generates_seeded_games(shop):
    task, state = ToolClass("my_shop.Shop", seed=1), random.getstate()
    questions = [task[i].messages[0]["content"] for i in range(3)]
    assert random.getstate() == state and len(set(questions)) == 3 and task[10**6]
    random.seed(5)
    drawn = random.random()
    random.seed(5)
    assert task.environment(task[2], 7).game.price == int(questions[2].split()[-1][:-1])
    assert random.random() == drawn  # what is drawn in play comes from the seed of the conversation
    assert ToolClass("my_shop.Shop", seed=2)[0].messages != task[0].messages
    assert ToolClass("my_shop.Shop", seed=1, first=2, count=1)[0] == task[2]


def test_tool_class_tools_without_template_enter_system_message(shop):
    problem = ToolClass("my_shop.Shop", ROWS, system="Tools: {tools}")[0]
    assert not problem.tools and '"name": "buy"' in problem.messages[0]["content"]


def test_another_game_than_the_prompts_is_refused(shop):
    task = ToolClass("my_shop.Restless")
    with pytest.raises(RuntimeError, match="with '0.*`random`"):
        task.environment(task[0], 0)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"environment": "my_shop.Shap"}, "has no 'Shap'; did you mean 'Shop'?"),
        ({"environment": "Shop"}, "write FILE.CLASS, environment=my_shop.Shop for the class Shop of my_shop.py"),
        ({"environment": "my_shop.random"}, "is a module; expected a class with the methods reset and get_reward"),
        ({"environment": "my_shop.Free"}, "has no method get_reward; expected reset(**row) and get_reward()"),
        ({"environment": "my_shop.Toolless"}, "has no tool. Fix: write a public method"),
        ({"environment": "my_shop.Unhinted"}, "sell is not usable as a tool: Argument item is missing a type hint"),
        ({"environment": "my_shop.Undocumented"}, "sell is not usable as a tool: Cannot generate JSON schema for sell"),
        (
            {"environment": "my_shop.Shop", "rows": ROWS, "count": 3},
            "rows: too few rows (2) for first=0, count=3. Fix: lower them",
        ),
        ({"environment": "my_shop.Shop", "rows": ROWS, "first": 2}, "rows: too few rows (2) for first=2"),
        ({"environment": "my_shop.Shop", "first": -1}, "first=-1, count=None: out of range; expected first >= 0"),
        ({"environment": "my_shop.Silent"}, "Silent: the prompt is empty. Fix: let `reset` return a string"),
        ({"environment": "my_shop.Broken", "rows": ROWS}, "Broken.reset(prompt=..., budget=...) raised TypeError"),
    ],
)
def test_tool_class_errors_are_named(shop, arguments, words):
    with pytest.raises(ValueError, match=".*") as error:
        _ = ToolClass(**arguments)[0]
    assert words in str(error.value)


# ---- skyrl-gym

GSM8K = [{"prompt": [{"role": "user", "content": "2+2?"}], "reward_spec": {"ground_truth": "4"}}]


def test_a_game_of_skyrl_gym():
    pytest.importorskip("skyrl_gym", reason="skyrl-gym is not installed")
    from torchtune_ext.tasks.skyrl_gym import SkyRLGym

    task = SkyRLGym("gsm8k_multi_turn", GSM8K, max_turns=3)
    problem = task[0]
    assert problem.messages == tuple(GSM8K[0]["prompt"])
    game = pickle.loads(pickle.dumps(task)).environment(problem, 0)
    turn = say(game, "5")
    assert "#### ANSWER" in turn.messages[0]["content"] and (turn.reward, turn.done) == (0.0, False)
    turn = say(game, "#### 5")
    assert "Now provide only" in turn.messages[0]["content"] and turn.reward == pytest.approx(0.2 / 3)
    turn = say(game, "#### 4")
    assert (turn.messages, turn.reward, turn.done, turn.parts) == ([], 1.0, True, {"steps": 3})
    game.close()
    # One of the user's is named by its module.
    own = SkyRLGym("skyrl_gym.envs.gsm8k.env:GSM8kEnv", GSM8K)
    assert say(own.environment(own[0], 0), "#### 4").reward == 1.0
    with pytest.raises(ValueError, match="environment='gsm9k': .*gsm8k, .*module:Class"):
        SkyRLGym("gsm9k", GSM8K)
    with pytest.raises(ValueError, match="skyrl_gym: gsm8k raised AssertionError: reward_spec field is required"):
        _ = SkyRLGym("gsm8k", [{"prompt": "2+2?"}])[0]


# ---- TextArena


def test_games_of_textarena():
    pytest.importorskip("textarena", reason="textarena is not installed")
    from torchtune_ext.tasks.textarena import TextArena

    task = TextArena("TowerOfHanoi-v0", {"num_disks": 2})
    problem = task[4]
    game = pickle.loads(pickle.dumps(task)).environment(problem, 0)
    assert "A: [2, 1]" in problem.messages[0]["content"] and "2 disks" in problem.messages[0]["content"]
    turn = say(game, "A B")  # a wrapper of the game puts the brackets
    assert len(turn.messages) == 1 and "A: [2]\nB: [1]" in turn.messages[0]["content"]
    assert "You are playing" not in turn.messages[0]["content"] and "[A B]" not in turn.messages[0]["content"]
    assert not say(game, "[A C]").done
    turn = say(game, "[B C]")
    assert (turn.reward, turn.done, turn.parts) == (1.0, True, {"invalid_move": 0.0})
    assert turn.note == "Congratulations! You solved the Tower of Hanoi puzzle."
    # Guesses of one problem are at one number, whatever the seed of the conversation; those of others are not.
    guess = TextArena("GuessTheNumber-v0", {"max_number": 1000})
    numbers = []
    for index, seed in ((0, 1), (0, 2), (1, 1), (2, 1)):
        random.seed(seed)
        numbers.append(guess.environment(guess[index], seed).unwrapped.game_number)
    assert numbers[0] == numbers[1] and len(set(numbers)) == 3
    turn = [say(guess.environment(guess[0], 0), text) for text in ("nothing", "[0]")]
    assert all("invalid move" in each.messages[0]["content"] for each in turn)
    state = random.getstate()
    assert TextArena("FrozenLake-v0")[3] == TextArena("FrozenLake-v0")[3] and random.getstate() == state
    assert TextArena("FrozenLake-v0")[3].messages != TextArena("FrozenLake-v0")[4].messages
    # Four games answer a refused move with its reason as the reward, and some raise at one.
    for name, text, note in [
        ("Cryptarithm-v0", "hm", "Bad action format"),
        ("Countdown-v0", "[1 1 +]", "Invalid indices"),
        ("ThreeCardMonte-v0", "[7]", "Index out of range"),
        ("ThreeCardMonte-v0", "[" + "9" * 5000 + "]", "ValueError: Exceeds the limit"),
        ("GuessTheNumber-v0", "[" + "9" * 5000 + "]", "ValueError: Exceeds the limit"),
        ("GuessTheNumber-v0", "<think>Perhaps [3]", "Player 0 did not respond with valid '[number]'"),
    ]:
        refused = TextArena(name)
        game, turn = refused.environment(refused[0], 0), EnvironmentReply()
        while not turn.done:
            turn = check_reply(say(game, text))
        assert (turn.reward, turn.parts) == (0.0, {"invalid_move": 1.0}) and note in turn.note, name
    countdown = TextArena("Countdown-v0")  # interchanges the arguments of what the policy said
    assert "invalid move" in say(countdown.environment(countdown[0], 0), "hm").messages[0]["content"]
    with pytest.raises(ValueError, match="game='TowerOfHanoy-v0'.*did you mean 'TowerOfHanoi-v0'"):
        TextArena("TowerOfHanoy-v0")
    with pytest.raises(ValueError, match="textarena: TicTacToe-v0 .*single-player"):
        _ = TextArena("TicTacToe-v0")[0]
