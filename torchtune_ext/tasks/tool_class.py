'''Environments in TRL's convention: a plain class whose methods are the policy's tools.

class Shop:
    def reset(self, budget, **row):      # starts an episode; gets the row's fields
        self.left = budget
        return f"You have {budget} coins."

    def buy(self, item: str, count: int = 1) -> str:
        """Buys something.

Args:
            item: what to buy.
            count: how many of it.
        """
        ...

    def get_reward(self) -> float:       # the reward of the episode
        ...

task:
  _component_: torchtune_ext.tasks.tool_class.ToolClass
  environment: my_shop.Shop
  rows: rows.jsonl
'''

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torchtune_ext.run.errors import UsageError, wrap_user_errors
from torchtune_ext.tasks.games import GameTask, prompt_messages
from torchtune_ext.tasks.grade_functions import import_named
from torchtune_ext.tasks.task import EnvironmentReply, Message
from torchtune_ext.tasks.tool_calls import ToolCall, parse_tool_calls

RESERVED_METHODS = ("reset", "get_reward")  # public methods that are not tools


class ToolClass(GameTask):
    """Task of an environment class whose methods are tools.

    A turn without a tool call ends an episode. Results and errors of a turn's calls become
    messages with the role "tool". The reward comes with the last turn.

    Args:
        environment: dotted path of the class. Its public methods except `reset` and `get_reward`
            are the tools. Each has type hints and a Google-style docstring, from which transformers
            derives the JSON schema. Methods may be async.
        rows: a file or the rows themselves. `prompt`, messages or a string, is the first input of
            the policy; a string that `reset` returns is appended to it. `reset` gets all fields.
            None: `reset` returns the prompt, which it draws from `random`.
        max_turns: largest number of assistant turns.
        system: a system message before the prompt. {tools} in it stands for the schemas as JSON,
            for chat templates without tools.
        count, first, seed: as in `GameTask`.

    Raises:
        UsageError: the class or a row's prompt is invalid.
    """

    def __init__(
        self,
        environment: str,
        rows: str | Sequence[Mapping[str, Any]] | None = None,
        max_turns: int = 10,
        system: str | None = None,
        count: int | None = None,
        first: int = 0,
        seed: int = 0,
    ) -> None:
        self.environment_class, self.system = import_named(environment, "environment", "class", "my_shop.Shop"), system
        schemas = _tool_schemas(self.environment_class, f"environment={environment!r}")
        # If the system message shows the tools, the chat template must not show them again.
        if system is not None and "{tools}" in system:
            self.system, schemas = system.replace("{tools}", json.dumps(schemas)), []
        super().__init__(self.environment_class.__name__, rows, count, first, seed, max_turns, schemas)

    def make_game(self, row: Mapping[str, Any], seed: int) -> tuple["ToolEnvironment", list[Message]]:
        messages = prompt_messages(row)
        with wrap_user_errors(f"{self.name}.reset({', '.join(f'{field}=...' for field in row)})"):
            game = self.environment_class()
            messages[-1]["content"] += _run_if_async(game.reset(**row)) or ""
        if not messages[-1]["content"]:
            raise UsageError(
                f"{self.name}: the prompt is empty. Fix: let `reset` return a string, or give each row a field `prompt`"
            )
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return ToolEnvironment(game, self.max_turns), before + messages


class ToolEnvironment:
    """One episode: calls the tools of an instance of the class."""

    def __init__(self, game: Any, max_turns: int) -> None:
        self.game, self.turns_left, self.calls, self.errors = game, max_turns, 0, 0

    def step(self, message: Message) -> EnvironmentReply:
        self.turns_left -= 1
        try:
            calls = parse_tool_calls(message["content"])
        except ValueError as error:
            self.calls += 1
            results = [{"role": "tool", "content": self._error_result(error)}]
        else:
            results = [{"role": "tool", "name": call.name, "content": self._run_call(call)} for call in calls]
        # The run ends an episode after `max_turns`, so the reward must come with that turn.
        is_last = not results or not self.turns_left
        reward = _run_if_async(self.game.get_reward()) if is_last else 0.0
        return EnvironmentReply(results, reward, not results, {"tool_calls": self.calls, "tool_errors": self.errors})

    def _run_call(self, call: ToolCall) -> str:
        self.calls += 1
        names = _tool_names(type(self.game))
        if call.name not in names:
            return self._error_result(f"unknown tool {call.name}; the tools are {', '.join(names)}")
        try:
            return str(_run_if_async(getattr(self.game, call.name)(**call.arguments)))
        except Exception as error:  # noqa: BLE001 (the policy reads the error)
            return self._error_result(error)

    def _error_result(self, error: Exception | str) -> str:
        self.errors += 1
        return str({"error": str(error) or type(error).__name__})


def _tool_names(factory: type) -> list[str]:
    methods = [name for name, _ in inspect.getmembers(factory, inspect.isfunction)]
    return [name for name in methods if not name.startswith("_") and name not in RESERVED_METHODS]


def _tool_schemas(factory: Any, setting: str) -> list[dict[str, Any]]:
    """Checks the class, and returns the JSON schemas of its tools."""
    # Imported late, because a worker process does not need it.
    from transformers.utils import chat_template_utils as schema

    if not inspect.isclass(factory):
        raise UsageError(
            f"{setting} is a {type(factory).__name__}; expected a class with the methods reset and get_reward"
        )
    if missing := [name for name in RESERVED_METHODS if not hasattr(factory, name)]:
        raise UsageError(f"{setting} has no method {missing[0]}; expected reset(**row) and get_reward()")
    with wrap_user_errors(f"{setting}: {factory.__name__}()"):
        instance = factory()
    schemas = []
    for name in _tool_names(factory):
        try:
            # The schema of a bound method has no `self`.
            schemas.append(schema.get_json_schema(getattr(instance, name)))
        except (schema.DocstringParsingException, schema.TypeHintParsingException) as error:
            raise UsageError(
                f"{setting}: {name} is not usable as a tool: {error}. Fix: give it type hints and a docstring with `Args:`, or "
                "start its name with _ if it is not a tool"
            ) from error
    if not schemas:
        raise UsageError(f"{setting} has no tool. Fix: write a public method with type hints and a docstring")
    return schemas


def _run_if_async(value: Any) -> Any:
    """Returns the result of a method call, which may be a coroutine."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value
