"""Environments whose turns script their behavior: reply, reward, raise, hang, kill the process. This module has few imports,
since each environment process imports it."""

import os
import random
import signal
import threading
import time
from pathlib import Path

from torchtune_ext.tasks.task import EnvironmentReply

AGAIN = {"role": "user", "content": "go"}


class Scripted:
    """A task whose environments execute the verb at the start of a turn."""

    max_turns = 3

    def __init__(self, folder="."):
        self.folder = str(folder)

    def environment(self, problem, seed):
        return Script(self.folder, seed)


class Script:
    def __init__(self, folder, seed):
        self.seed, self.drawn = seed, random.random()
        self.file = Path(folder) / f"alive-{os.getpid()}"
        self.file.touch()

    def step(self, message):
        # A killed environment leaves its file.
        alive = sum(Path(f"/proc/{file.name[6:]}").exists() for file in self.file.parent.glob("alive-*"))
        verb, _, rest = message["content"].partition(" ")
        return getattr(self, verb)(rest) or EnvironmentReply([AGAIN], parts={"alive": alive, "drawn": self.drawn})

    def close(self):
        self.file.unlink()

    def more(self, rest):
        return EnvironmentReply([AGAIN], reward=float(rest or 0), note=f"note {rest}")

    def win(self, rest):
        return EnvironmentReply(reward=1.0, done=True, parts={"seed": self.seed % 1000, "drawn": self.drawn})

    def look(self, rest):
        time.sleep(0.02)

    def raises(self, rest):
        raise KeyError("lost")

    def hangs(self, rest):
        time.sleep(60)

    def dies(self, rest):
        os.kill(os.getpid(), signal.SIGKILL)

    def dies_later(self, rest):
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return EnvironmentReply([AGAIN])

    def hurries(self, rest):
        return EnvironmentReply([{"role": "assistant", "content": "win"}])

    def is_silent(self, rest):
        return EnvironmentReply([])

    def uses_a_tool(self, rest):
        return EnvironmentReply([{"role": "tool", "content": "3"}])

    def says_a_number(self, rest):
        return EnvironmentReply([{"role": "user", "content": 3}])

    def breaks_a_letter(self, rest):
        return EnvironmentReply([{"role": "user", "content": "\ud83d"}])

    def remembers(self, rest):
        return EnvironmentReply([AGAIN | {"distance": 1 + 2j}], done=True)

    def overpays(self, rest):
        return EnvironmentReply([AGAIN], reward=float("nan"))

    def answers_text(self, rest):
        return "go"


class Sticky(Scripted):
    """A task whose environments hang in `close`."""

    def environment(self, problem, seed):
        script = super().environment(problem, seed)
        script.close = lambda: time.sleep(60)
        return script
