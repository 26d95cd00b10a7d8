"""Run recipes as a user does, on a random model and a task whose reward always varies."""

import re
import subprocess
import time
from pathlib import Path

import pytest

from helpers import tiny_runs
from helpers.forked_runs import forked
from helpers.servers import Server, free_port
from helpers.tiny_runs import command, metrics, write_tiny_model
from torchtune_ext.sampling.server_command import KEY_VARIABLE
from torchtune_ext.sampling.types import EngineConfig

__all__ = [
    "KL",
    "TALKS",
    "command",
    "environment",
    "make_workspace",
    "metrics",
    "run",
    "start_server",
    "wait_for_steps",
]

SERVER_KEY = "key-of-the-servers-that-runs-share"

TASK = '''
import hashlib
import os
import signal
import subprocess
import time
from torchtune_ext.tasks.task import Problem, Score, EnvironmentReply

class Letters:
    """Asks for nothing in particular and rewards what the text hashes to: signal in every group, whatever the model."""

    def __init__(self, count=64):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        return Problem(f"letters-{index}", ({"role": "user", "content": f"Write about {index}. " + "Go on. " * (index % 5)},), index)

    def grade(self, problem, text):
        value = hashlib.sha256(f"{problem.answer}/{text}".encode()).digest()[0] / 255
        return Score(value, {"hash": value})

    def solution(self, problem):
        return "x"


def with_feedback(group, sample):
    """The prompt of a self-teacher."""
    (message,) = group.problem.messages
    return [{**message, "content": f"{message['content']} {sample.score.reward:.3f}"}]


class Seldom(Letters):
    """Of four problems one has a signal."""

    def grade(self, problem, text):
        return super().grade(problem, text) if problem.answer % 4 == 0 else Score(1.0, {})


class Generous(Letters):
    def grade(self, problem, text):
        return Score(1.0, {})


class Talks(Letters):
    """Answers three turns, the last one without asking further, and rewards what the turns hash to."""

    max_turns = 4

    def environment(self, problem, seed):
        return Talk(seed)


class Talk:
    def __init__(self, seed):
        self.seed, self.turns = seed, 0

    def step(self, message):
        self.turns += 1
        value = hashlib.sha256(f"{self.seed}/{message['content']}".encode()).digest()[0] / 255
        if self.turns == 3:
            return EnvironmentReply(reward=value, done=True)
        return EnvironmentReply([{"role": "user", "content": f"Go on. {self.turns}"}], reward=value)


class SeedlessTalks(Talks):
    def environment(self, problem, seed):
        return Talk(0)


class TalkAgent(Letters):
    """Plays SeedlessTalks from outside, by the openai package."""

    def run_agent(self, problem, client):
        import openai

        openai_client = openai.OpenAI(base_url=client.base_url, api_key=client.api_key)
        messages, rewards, talk = list(problem.messages), {}, Talk(0)
        while True:
            response = openai_client.chat.completions.create(model=client.model, messages=messages)
            (choice,) = response.choices
            if choice.finish_reason != "stop":
                break
            reply = talk.step({"role": "assistant", "content": choice.message.content})
            rewards[response.id] = reply.reward
            if reply.done:
                break
            messages += [choice.message.model_dump(exclude_none=True), *reply.messages]
        return Score(sum(rewards.values()), response_rewards=rewards)


class WildAgent(TalkAgent):
    """Two of four samples return a reward, the others go wrong."""

    def run_agent(self, problem, client):
        way = int(hashlib.sha256(client.api_key.encode()).digest()[0]) % 6 if problem.answer else 0
        if way == 1:
            raise KeyError("lost")
        if way == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if way == 3:
            subprocess.Popen(["sleep", "600"])
            time.sleep(600)
        if way == 4:
            return 1.0  # without a response
        score = super().run_agent(problem, client)
        return "no number" if way == 5 else score


class Wild(Talks):
    """Of six samples each but the first goes wrong in its own way, in the second turn."""

    def environment(self, problem, seed):
        return WildTalk(seed)


class WildTalk(Talk):
    def step(self, message):
        turn = super().step(message)
        way = hashlib.sha256(message["content"].encode()).digest()[1] % 6 if self.turns == 2 else 0
        if way == 1:
            raise KeyError("lost")
        if way == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if way == 3:
            time.sleep(600)
        if way == 4:
            return EnvironmentReply(reward=1.0, done=True)
        if way == 5:
            subprocess.Popen(["sleep", "600"])
            if os.fork() == 0:
                time.sleep(600)
        return turn
'''
# A run of conversations. A random model rarely samples an end of turn, so here a fifth of all tokens end a turn.
TALKS = ["task._component_=letters.Talks", "evaluation.task._component_=letters.Talks", "grader.workers=8"]
TALKS += [f"sampling.stop_token_ids={[*range(2, 320, 5)]}"]
CREDITED_TALKS = [*TALKS, "advantage.credit=turn"]

CONFIG = """
output_dir: ???
model_dir: model
device: cpu
dtype: float32
model: {_component_: torchtune_ext.policy.from_config, model_dir: "${model_dir}"}
tokenizer: {_component_: torchtune_ext.chat.ChatTokenizer, path: "${model_dir}"}
task: {_component_: letters.Letters}
evaluation:
  every: 2
  task: {_component_: letters.Letters, count: 4}
preset: grpo
optimizer: {_component_: torch.optim.AdamW, lr: 1.0e-3}
max_steps: 3
prompts_per_step: 4
samples_per_prompt: 4
updates_per_step: 2
row_tokens: 256
max_mismatch: 1.0e-4
sampling: {max_tokens: 12}
engine: {dtype: float32, max_model_len: 128, kv_cache_bytes: 16777216}
checkpoints: {every: 1}
"""


KL = [
    "loss.kl_coef=0.1",
    "refill_rounds=2",
    "advantage.truncated=penalize",
    "evaluation.samples=4",
    "updates_per_step=1",
]


def environment() -> dict[str, str]:
    """Return the environment of a run, with the key of the shared servers."""
    return {**tiny_runs.environment(), KEY_VARIABLE: SERVER_KEY}


def start_server(folder: Path, **engine) -> Server:
    """Start a server of the model of `make_workspace`, which returns the same tokens as an engine of the run.

    A shared server saves the start of an engine, most of the time of a run. Use it in all runs that do not test engines.
    Args: engine: fields of `EngineConfig` in addition to those of `CONFIG`.
    """
    write_tiny_model(folder / "model")
    address = f"http://127.0.0.1:{free_port()}"
    config = EngineConfig(address=address, dtype="float32", max_model_len=128, kv_cache_bytes=1 << 24, **engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, SERVER_KEY)
        return Server(str(folder / "model"), config, folder / "server.log", forks=True)


def make_workspace(folder: Path, **larger: int) -> Path:
    """Write a model, a task and a config into a folder for recipe runs."""
    write_tiny_model(folder / "model", **larger)
    (folder / "letters.py").write_text(TASK)
    (folder / "run.yaml").write_text(CONFIG)
    return folder


def run(
    folder: Path,
    recipe: str,
    *args: str,
    ranks: int = 1,
    ok: bool = True,
    timeout: float = 300,
    config: str = "run.yaml",
    typed: bool = False,
) -> str:
    """Run a recipe to its end and return its output.

    Args: ok: whether it must succeed; typed: run it as a command, not in a fork.
    """
    words = command(recipe, *args, ranks=ranks, config=config)
    if ranks == 1 and not typed:
        status, output = forked(folder, words[3:], environment(), timeout)
    else:
        done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=timeout)
        status, output = done.returncode, done.stdout + done.stderr
    assert (status == 0) == ok, output[-6000:]
    return output


def wait_for_steps(run_dir: Path, steps: int, process: subprocess.Popen, seconds: float = 240) -> None:
    """Wait until `steps` steps of a run have metrics, including the evaluation before the first step."""
    file, deadline = run_dir / "metrics.jsonl", time.monotonic() + seconds
    while not file.exists() or len(set(re.findall(r'^\{"step": (\d+)', file.read_text(), re.MULTILINE))) < steps:
        assert process.poll() is None, f"the run exited with status {process.returncode}"
        assert time.monotonic() < deadline, f"no metrics of {steps} steps within {seconds:g} s"
        time.sleep(0.02)
