"""Throughput of agents at the endpoint against environments and against vLLM's own OpenAI server.

    python benchmarks/endpoint.py [--model models/SmolLM2-135M-Instruct] [--agents 16] [--sets 6] [--passes 6]

All play the same conversations of up to four responses. With "environments" the rollout stage owns the loop, with "endpoint"
agent processes own it, by the openai package, and "vllm" are the same processes at a server of vLLM. Each way is a process with
an engine of its own. The three take turns, one pass each, since the speed of a shared machine changes within minutes, and are
started anew for each set: with equal work, two engines may differ by some percent as long as they live. Each pass has new
problems, and the first pass of a process warms up.
The seeds of the requests are equal, and the script compares the tokens of "environments" and "endpoint". CPU seconds of the
agents are apart from the rest: on few cores the agents take their time from the engine.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading.agents import AgentConfig, AgentPool
from torchtune_ext.grading.environments import EnvironmentPool
from torchtune_ext.pipeline.rollout import sample_groups
from torchtune_ext.sampling.backend import derive_seed
from torchtune_ext.sampling.engine import Engine, EngineConfig, SamplingConfig
from torchtune_ext.sampling.server_command import server_command
from torchtune_ext.tasks.task import AgentClient, EnvironmentReply, Problem, Score

WAYS = ("environments", "endpoint", "vllm")
RESPONSES, MAX_TOKENS = 4, 48
PORT, START_S = 8471, 300.0
GO_ON = {"role": "user", "content": "Now write another one."}
TOPICS = ("the sea", "a dog", "winter", "bread", "a train", "the moon", "music", "a river")
CONFIG = EngineConfig(max_model_len=512, dtype="float32", kv_cache_bytes=1 << 29, threads=1)
# Arguments of our servers that vLLM's own server does not need.
OURS_ONLY = ("--skip-tokenizer-init", "--worker-extension-cls", "--weight-transfer-config", "--middleware")


def question(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"Write {number % 9 + 3} words about {TOPICS[number % 8]}."}


# Returns sampled tokens of a pass, and a digest of them.
Play = Callable[[list[Problem], int], tuple[int, str]]


class Talk:
    """Asks for another response until there are enough."""

    def __init__(self) -> None:
        self.responses = 0

    def step(self, message) -> EnvironmentReply:
        self.responses += 1
        return EnvironmentReply([GO_ON], reward=1.0, done=self.responses == RESPONSES)


class Talks:
    """The conversation, as an environment and as an agent."""

    max_turns = RESPONSES
    http = None  # one HTTP client per process: a new one loads certificates for 20 ms

    def environment(self, problem, seed):
        return Talk()

    def run_agent(self, problem, client):
        import openai

        self.http = self.http or openai.DefaultHttpxClient(timeout=600)
        policy = openai.OpenAI(base_url=client.base_url, api_key=client.api_key, http_client=self.http)
        messages, tokens = list(problem.messages), 0
        for turn in range(RESPONSES):
            # Training needs the log-probs; our endpoint always records them. It derives the same seeds itself.
            seed = derive_seed(problem.answer, turn, 0) if turn else problem.answer
            response = policy.chat.completions.create(
                model=client.model, messages=messages, max_tokens=MAX_TOKENS, logprobs=True, seed=seed
            )
            (choice,), tokens = response.choices, tokens + response.usage.completion_tokens
            if choice.finish_reason != "stop":
                break
            messages += [{"role": "assistant", "content": choice.message.content}, GO_ON]
        return Score(float(tokens))


def ours(way: str, model: str, agents: int, stack: ExitStack) -> tuple[Play, set[int]]:
    engine = stack.enter_context(Engine(model, CONFIG, stack.enter_context(tempfile.TemporaryDirectory())))
    engine.start()
    engine.wait_ready()
    known = worker_pids()
    pool = EnvironmentPool(Talks(), agents) if way == "environments" else AgentPool(Talks(), AgentConfig(), agents)
    stack.callback(pool.close)
    tokenizer = ChatTokenizer(model)
    sampling = SamplingConfig(max_tokens=MAX_TOKENS).with_default_stops([tokenizer.eos_id])

    def play(problems: list[Problem], seed: int) -> tuple[int, str]:
        digest, tokens, groups = hashlib.sha256(), 0, {}
        for number, group in sample_groups(problems, 1, replace(sampling, seed=seed), engine, tokenizer, pool):
            groups[number] = group
        for _, group in sorted(groups.items()):
            (sample,) = group.samples
            assert sample.score is not None, sample.outcome
            digest.update(np.concatenate([group.prompt_tokens, sample.completion.tokens]).tobytes())
            tokens += len(sample.completion.sampled_indices)
        return tokens, digest.hexdigest()[:12]

    return play, worker_pids() - known if way == "endpoint" else set()


def vllm(model: str, agents: int, stack: ExitStack) -> tuple[Play, set[int]]:
    words, environment = server_command(model, CONFIG, port=PORT)
    command, skip = [], False
    for word in words:
        skip = word in OURS_ONLY or (skip and not word.startswith("--"))
        command += [] if skip else [word]
    log = stack.enter_context(tempfile.NamedTemporaryFile("w+"))  # noqa: SIM115 (the stack closes it)
    server = subprocess.Popen([*command, "--served-model-name", "policy"], env=environment, stdout=log, stderr=log)
    stack.callback(server.wait)
    stack.callback(server.terminate)
    end = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5).close()
            break
        except OSError:
            if server.poll() is not None or time.monotonic() > end:
                sys.exit(f"vLLM's server did not start:\n{Path(log.name).read_text()[-2000:]}")
            time.sleep(0.5)
    known = worker_pids()
    pool = AgentPool(Talks(), AgentConfig(), agents)
    stack.callback(pool.close)
    client = AgentClient(f"http://127.0.0.1:{PORT}/v1", environment["VLLM_API_KEY"])

    def play(problems: list[Problem], seed: int) -> tuple[int, str]:
        futures = [pool.submit(problem, client) for problem in problems]
        return int(sum(future.result()[1].reward for future in futures)), ""

    return play, worker_pids() - known


def worker_pids() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def cpu_s(agents: set[int]) -> tuple[float, float]:
    """Return the CPU seconds of the agents' processes, and of all others of this process."""
    seconds = [0.0, 0.0]
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        seconds[process.pid not in agents] += sum(process.cpu_times()[:2])
    return seconds[0], seconds[1]


def measure(way: str, model: str, agents: int, passes: int, first: int) -> None:
    """Warm up, and then measure a pass for each line of the standard input."""
    with ExitStack() as stack:
        play, pids = vllm(model, agents, stack) if way == "vllm" else ours(way, model, agents, stack)
        for number in range(first, first + passes + 1):
            problems = [
                Problem(str(n), (question(n),), derive_seed(number, n - number * agents, 0))
                for n in range(number * agents, (number + 1) * agents)
            ]
            if number > first and not sys.stdin.readline():
                return  # the other end is gone
            began, used = time.perf_counter(), cpu_s(pids)
            tokens, digest = play(problems, number)
            seconds, (of_agents, others) = time.perf_counter() - began, np.subtract(cpu_s(pids), used)
            line = {"tokens": tokens, "seconds": seconds, "agents": of_agents, "others": others, "digest": digest}
            print("PASS", json.dumps(line), flush=True)


def next_pass(process: subprocess.Popen) -> dict:
    for line in process.stdout:
        if line.startswith("PASS"):
            return json.loads(line.removeprefix("PASS"))
    sys.exit(f"{' '.join(process.args)} ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--agents", type=int, default=16, help="episodes at a time")
    parser.add_argument("--sets", type=int, default=6, help="processes of each way")
    parser.add_argument("--passes", type=int, default=6, help="of each process")
    parser.add_argument("--way", choices=WAYS, help="measure this way in this process (internal)")
    parser.add_argument("--first", type=int, default=0, help="number of its first pass (internal)")
    args = parser.parse_args()
    if args.way:
        return measure(args.way, args.model, args.agents, args.passes, args.first)
    passes: dict[str, list[dict]] = {way: [] for way in WAYS}
    words = ["--model", args.model, "--agents", str(args.agents), "--passes", str(args.passes)]
    for number in range(args.sets):
        order = (*WAYS[number % 3 :], *WAYS[: number % 3])
        with ExitStack() as stack:
            processes = {}
            for way in order:
                first = str(number * (args.passes + 1))
                command = [sys.executable, __file__, "--way", way, "--first", first, *words]
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                processes[way] = stack.enter_context(process)
                next_pass(process)
            for turn in range(args.passes):
                for way in (*order[turn % 3 :], *order[: turn % 3]):
                    processes[way].stdin.write("\n")
                    processes[way].stdin.flush()
                    passes[way].append(next_pass(processes[way]))
                    print(way, passes[way][-1], file=sys.stderr, flush=True)
    same = [each["digest"] for each in passes["environments"]] == [each["digest"] for each in passes["endpoint"]]
    print(f"{args.model}, {args.agents} agents; environments and endpoint sample equal tokens: {same}\n")
    columns = (
        "way",
        "tokens/s (range of the sets)",
        "endpoint relative to it, 95% interval over sets",
        "tokens/CPU second without agents",
        "CPU s of agents in a pass",
    )
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    tokens, seconds, agents, others = (
        {way: np.array([each[name] for each in passes[way]]).reshape(args.sets, -1).sum(axis=1) for way in WAYS}
        for name in ("tokens", "seconds", "agents", "others")
    )
    # Sets are drawn for all ways together: the passes of a set have equal problems and follow each other.
    drawn = np.random.default_rng(0).integers(args.sets, size=(10_000, args.sets))
    rates = {way: tokens[way][drawn].sum(axis=1) / seconds[way][drawn].sum(axis=1) for way in WAYS}
    for way in WAYS:
        rate, each = tokens[way].sum() / seconds[way].sum(), tokens[way] / seconds[way]
        ratio = tokens["endpoint"].sum() / seconds["endpoint"].sum() / rate
        low, high = np.quantile(rates["endpoint"] / rates[way], (0.025, 0.975))
        cells = (
            way,
            f"{rate:.1f} ({each.min():.1f}-{each.max():.1f})",
            f"{ratio:.2f}" if way == "endpoint" else f"{ratio:.2f} ({low:.2f}-{high:.2f})",
            f"{tokens[way].sum() / others[way].sum():.1f}",
            f"{agents[way].mean() / args.passes:.1f}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
