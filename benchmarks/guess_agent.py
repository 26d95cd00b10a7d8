"""Agent that plays `tiny_guess` from outside, by the openai package, for the comparison with the environment.

    tune run warmup_sft --config warmup/tiny_guess
    PYTHONPATH=benchmarks tune run grpo_full --config grpo/tiny_guess task._component_=guess_agent.GuessAgent \
        evaluation.task._component_=guess_agent.GuessAgent agent.max_turns=4 seed=0 output_dir=runs/tiny_guess/agent

The sampling seeds of the two ways are equal, and so are rollouts and weights, to the last bit.
"""

from typing import Any

import openai

from torchtune_ext.tasks.guess_number import GuessNumber, GuessNumberEnvironment
from torchtune_ext.tasks.task import AgentClient, Problem, Score

HTTP = openai.DefaultHttpxClient()  # a client of its own for each game would load the certificates each time


class GuessAgent:
    """The problems of GuessNumber, for an agent that owns the loop."""

    def __init__(self, **options: Any) -> None:
        self.problems = GuessNumber(**options)

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, index: int) -> Problem:
        return self.problems[index]

    def run_agent(self, problem: Problem, client: AgentClient) -> Score:
        connection = openai.OpenAI(base_url=client.base_url, api_key=client.api_key, http_client=HTTP)
        policy = connection.chat.completions
        messages, rewards, game = list(problem.messages), {}, GuessNumberEnvironment(problem.answer["number"])
        parts: dict[str, float] = {"accuracy": 0.0, "failed": 0.0}
        done = False
        while not done:
            try:
                response = policy.create(model=client.model, messages=messages)
            except openai.RateLimitError:  # agent.max_turns
                break
            (choice,) = response.choices
            if choice.finish_reason != "stop":
                break
            reply = game.step({"role": "assistant", "content": choice.message.content})
            rewards[response.id], parts, done = reply.reward, reply.parts, reply.done
            messages += [{"role": "assistant", "content": choice.message.content}, *reply.messages]
        return Score(sum(rewards.values()), parts, response_rewards=rewards)
