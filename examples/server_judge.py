"""A comparative judge for `task.group_grader`: a model on a server, as of `vllm serve MODEL --served-model-name judge`.

task.group_grader=server_judge.ranked, with a copy of this file in the working directory (docs/how_to/reward_function.md).
"""

import json
import urllib.request

SERVER = "http://localhost:8000/v1/chat/completions"  # any server with OpenAI's interface


def ask(question):
    message = {"role": "user", "content": question}
    body = json.dumps({"model": "judge", "temperature": 0, "messages": [message]}).encode()
    request = urllib.request.Request(SERVER, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


def ranked(problem, texts):
    """From 1 for the text that the judge names first to 0 for the last."""
    listed = "\n\n".join(f"[{number}]\n{text}" for number, text in enumerate(texts))
    said = ask(
        f"Question:\n{problem.messages[-1]['content']}\n\nAnswers:\n\n{listed}\n\n"
        "Write the numbers of all answers as a JSON list, the best answer first, and nothing else."
    )
    order = json.loads(said)
    if sorted(order) != list(range(len(texts))):
        raise ValueError(f"the judge said {said!r:.200}")  # no reward for this prompt; the log has the sentence
    return [1 - order.index(number) / max(1, len(texts) - 1) for number in range(len(texts))]
