"""An environment of verifiers, as a program in its own environment (it needs an older openai).

    python -m venv verifiers && verifiers/bin/pip install verifiers==0.4.0 uv
    tune run grpo_full --config my.yaml task.grader=null 'task.command=[verifiers/bin/python,with_verifiers.py,my-taskset]'

A row names its task by `index`: {"question": "-", "answer": null, "index": 0}.
"""

import asyncio
import json
import os
import sys

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment


async def play(taskset: str, index: int) -> float:
    os.environ["PATH"] = f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}"  # the harness starts uv
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 4}
    env = load_environment(vf.SingleAgentEnvConfig(taskset={"id": taskset}, agent=agent))
    (task,) = env.taskset.include(idx=[str(index)])
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext(os.environ["OPENAI_MODEL"], client))
    if not episode.ok:
        raise RuntimeError(f"the episode failed: {episode.errors or [trace.errors for trace in episode.traces]}")
    return sum(trace.reward for trace in episode.traces)


if __name__ == "__main__":
    print(asyncio.run(play(sys.argv[1], json.load(sys.stdin)["example"]["index"])))
