"""The agent of with_openai.py on LangGraph (pip install langgraph langchain-openai).

tune run grpo_full --config my.yaml task.grader=null task.agent=with_langgraph.run
"""

import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent


@tool
def multiply(a: int, b: int) -> int:
    """Multiplies two integers."""
    return a * b


def run(problem, client):
    policy = ChatOpenAI(model=client.model, base_url=client.base_url, api_key=client.api_key)
    agent = create_react_agent(policy, [multiply])
    try:
        state = agent.invoke({"messages": list(problem.messages)}, {"recursion_limit": 6})
    except (GraphRecursionError, openai.BadRequestError, openai.RateLimitError):  # limits, also of the run
        return 0.0
    return float(str(problem.answer) in str(state["messages"][-1].content))
