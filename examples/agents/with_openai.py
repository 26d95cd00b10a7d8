"""An agent on the openai package: its own loop, with a tool.

    tune run grpo_full --config my.yaml task.grader=null task.agent=with_openai.run

All agents of this folder but with_verifiers.py answer the same questions, such as "What is 482 * 731?", with the
same tool.
"""

import json

import openai

MULTIPLY = {
    "name": "multiply",
    "description": "Multiplies two integers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def multiply(a: int, b: int) -> int:
    return int(a) * int(b)


def run(problem, client):
    policy = openai.OpenAI(base_url=client.base_url, api_key=client.api_key)
    messages = list(problem.messages)
    for _ in range(3):
        try:
            response = policy.chat.completions.create(
                model=client.model, messages=messages, tools=[{"type": "function", "function": MULTIPLY}]
            )
        except (openai.BadRequestError, openai.RateLimitError):  # a limit of the run, such as engine.max_model_len
            return 0.0
        message = response.choices[0].message
        if not message.tool_calls:
            return float(str(problem.answer) in (message.content or ""))
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            try:
                result = str(multiply(**json.loads(call.function.arguments)))
            except (TypeError, ValueError, OverflowError) as error:  # the policy reads it
                result = str(error)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0
