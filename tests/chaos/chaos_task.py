"""The task of the chaos runs: a user task that records its calls in a journal.

From the journal, `chaos.py` derives the phase of a run. Each line is appended in one write: seconds of the monotonic
clock, process id, event.
"""

import hashlib
import json
import os
import time
import urllib.request

from torchtune_ext.tasks.task import AgentClient, Problem, Score


def note(event: str) -> None:
    """Append a line to the journal. Only rank 0 writes, since the other ranks follow it."""
    if os.environ.get("RANK", "0") != "0":
        return
    journal = os.open(os.environ["CHAOS_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(journal, f"{time.monotonic():.4f} {os.getpid()} {event}\n".encode())
    finally:
        os.close(journal)


class Letters:
    """The reward is a hash of the text, so every group has reward variance. Grading a text takes `seconds`."""

    def __init__(self, count: int = 64, name: str = "problem", seconds: float = 0.03):
        self.count, self.name, self.seconds = count, name, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < self.count:
            raise IndexError(index)
        note(self.name)
        text = f"Write about {index}. " + "Go on. " * (index % 5)
        return Problem(f"letters-{index}", ({"role": "user", "content": text},), index)

    def grade(self, problem: Problem, text: str) -> Score:
        note("grade")
        time.sleep(self.seconds)
        value = hashlib.sha256(f"{problem.answer}/{text}".encode()).digest()[0] / 255
        return Score(value, {"hash": value})


class LettersAgent(Letters):
    """The same rewards, from an agent that requests two responses in its own loop (`chaos.py --agents`)."""

    def run_agent(self, problem: Problem, client: AgentClient) -> Score:
        messages, texts = list(problem.messages), []
        for _ in range(2):
            body = json.dumps({"messages": messages, "max_tokens": 12}).encode()
            headers = {"authorization": f"Bearer {client.api_key}"}
            request = urllib.request.Request(f"{client.base_url}/chat/completions", body, headers)
            with urllib.request.urlopen(request) as response:
                message = json.load(response)["choices"][0]["message"]
            texts.append(message["content"])
            messages += [message, {"role": "user", "content": "Go on."}]
        return self.grade(problem, "\n".join(texts))
