"""The agent of with_openai.py on smolagents (pip install "smolagents[openai]").

tune run grpo_full --config my.yaml task.grader=null task.agent=with_smolagents.run
"""

import openai
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool
from smolagents.utils import AgentError


@tool
def multiply(a: int, b: int) -> int:
    """Multiplies two integers.

    Args:
        a: first factor
        b: second factor
    """
    return a * b


def run(problem, client):
    model = OpenAIModel(client.model, api_base=client.base_url, api_key=client.api_key, retry=False)
    agent = ToolCallingAgent([multiply], model, max_steps=3, verbosity_level=LogLevel.OFF)
    try:
        answer = agent.run(problem.messages[-1]["content"])
    except AgentError as error:
        if not isinstance(error.__cause__, (openai.BadRequestError, openai.RateLimitError)):
            raise
        return 0.0  # a limit of the run, such as engine.max_model_len
    return float(str(problem.answer) in str(answer))
