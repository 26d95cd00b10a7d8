"""The agent of with_openai.py on the OpenAI Agents SDK (pip install openai-agents).

tune run grpo_full --config my.yaml task.grader=null task.agent=with_openai_agents.run
"""

import agents
import openai


@agents.function_tool
def multiply(a: int, b: int) -> int:
    """Multiplies two integers."""
    return a * b


async def run(problem, client):
    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as policy:
        model = agents.OpenAIChatCompletionsModel(client.model, policy)
        agent = agents.Agent("multiplier", tools=[multiply], model=model)
        try:
            result = await agents.Runner.run(agent, list(problem.messages), max_turns=3)
        # Unknown tools, too many turns, and limits of the run.
        except (agents.AgentsException, openai.BadRequestError, openai.RateLimitError):
            return 0.0
    return float(str(problem.answer) in str(result.final_output))
