"""Run one agent of a task before anything expensive starts, with fixed texts in place of the policy."""

from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading.agents import AgentConfig, AgentPool, AgentRunTask
from torchtune_ext.grading.environments import TRUNCATED_REASONS
from torchtune_ext.grading.outcomes import Ungraded
from torchtune_ext.grading.self_check import LOG_FILE_NAME, PLACEHOLDER_ANSWER, first_problems
from torchtune_ext.pipeline.endpoint import AgentEpisode, run_agent
from torchtune_ext.pipeline.source import make_prompt_check
from torchtune_ext.run.errors import RunFailure, UsageError
from torchtune_ext.run.output import format_labels, print_text
from torchtune_ext.sampling.backend import EngineRequest, build_requests
from torchtune_ext.sampling.engine import LoopThread
from torchtune_ext.sampling.types import Completion, Priority, SamplingConfig

TIME_LIMIT_S = 20.0
MAX_LOG_CHARS = 1000


class ScriptedEngine:
    """An engine for `Endpoint` that answers every request with `PLACEHOLDER_ANSWER`."""

    def __init__(self, tokenizer: ChatTokenizer, max_model_len: int) -> None:
        self.config = SimpleNamespace(max_model_len=max_model_len)
        self.thread = LoopThread("torchtune-ext-agent-check")
        ids = np.array([*tokenizer.encode(PLACEHOLDER_ANSWER), tokenizer.eos_id], np.int32)
        self._answer = Completion(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), "stop")

    def schedule(self, work: Coroutine[Any, Any, Any]) -> Future:
        return self.thread.schedule(work)

    async def generate(self, request: EngineRequest, affinity_key: object = None) -> Completion:
        return self._answer


def check_agent(
    task: AgentRunTask,
    key: str,
    tokenizer: ChatTokenizer,
    sampling: SamplingConfig,
    max_model_len: int,
    config: AgentConfig,
) -> None:
    """Run the agent of a task on its first problem, for at most `TIME_LIMIT_S` seconds. See `checks.check_agents`."""
    why_unusable = make_prompt_check(tokenizer, max_model_len, sampling.max_tokens)
    problem = next((problem for problem in first_problems(task, key) if not why_unusable(problem)), None)
    if problem is None:
        return
    prompt = tokenizer.prompt_ids(problem.messages, problem.tools)
    (request,) = build_requests(prompt, 1, sampling, 0, Priority.SAMPLE, max_model_len)
    engine: Any = ScriptedEngine(tokenizer, max_model_len)
    config = replace(config, timeout_s=min(config.timeout_s, TIME_LIMIT_S), on_error="ungraded")
    episodes: dict[int, AgentEpisode] = {}
    name = f"{key}: the agent of {type(task).__name__}"
    engine.thread.start()
    try:
        with TemporaryDirectory() as folder, AgentPool(task, config, 1, log := Path(folder) / LOG_FILE_NAME) as pool:
            work = run_agent(
                pool,
                engine,
                tokenizer,
                problem,
                prompt,
                sampling,
                request,
                0,
                Priority.SAMPLE,
                lambda _: None,
                episodes,
            )
            sample = engine.thread.call(work)
            output = log.read_text(errors="replace")[-MAX_LOG_CHARS:].strip() if log.exists() else ""
    except RunFailure as error:
        raise UsageError(f"{name} failed: {error}") from error
    finally:
        engine.thread.stop()
    outcome, reason = sample.outcome, sample.completion.finish_reason
    has_response = bool(episodes[0].session.responses)
    cause = outcome.cause if isinstance(outcome, Ungraded) else "it returns a reward without a request"
    if not has_response and reason != "agent_timeout" and reason not in TRUNCATED_REASONS:
        raise UsageError(
            f"{name} gets no response on problem {problem.id!r}: {cause}. Fix: repair the agent, which requests responses at "
            "`client.base_url` (docs/how_to/agents.md)" + (f"\n--- end of its output ---\n{output}" if output else "")
        )
    # The agent may be right to reject the fixed text, and it may call slow tools.
    if isinstance(outcome, Ungraded) and not (has_response and reason == "agent_timeout"):
        print_text(format_labels([("agent", f"checked with the text {PLACEHOLDER_ANSWER!r}: {cause}")]))
