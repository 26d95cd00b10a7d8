"""Rollout sources with real scheduler, stream and graders, and endpoints; both with a scripted engine."""

import openai
import pytest

from helpers.letter_tokens import LetterTokenizer
from helpers.manual_engine import SAMPLES, SEED, ManualEngine
from helpers.scripted_engine import ScriptedEngine
from helpers.scripted_task import NumberedTask
from helpers.tiny_runs import write_tiny_model
from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading import Grader
from torchtune_ext.grading.agents import AgentConfig
from torchtune_ext.pipeline.endpoint import Endpoint
from torchtune_ext.pipeline.rollout import GroupStream
from torchtune_ext.pipeline.source import RolloutSource
from torchtune_ext.pipeline.staleness import StalenessScheduler
from torchtune_ext.sampling.engine import SamplingConfig
from torchtune_ext.tasks.problem_stream import ProblemStream


@pytest.fixture(scope="module")
def numbered_grader():
    with Grader(NumberedTask(), workers=2, timeout_s=90.0) as grader:
        yield grader


@pytest.fixture
def make_source(numbered_grader):
    """Makes a rollout source of 2 groups per step for 10 steps, and its engine."""
    sources = []

    def make_source(
        staleness=0,
        prefetch_steps=None,
        completes_immediately=True,
        batch=2,
        deadline_s=30.0,
        cursor=0,
        grader=numbered_grader,
        task=None,
    ):
        engine, problems = ManualEngine(completes_immediately), ProblemStream(task or NumberedTask(), SEED)
        problems.cursor = cursor
        stream = GroupStream(engine, LetterTokenizer(), grader)
        sampling, scheduler = SamplingConfig(max_tokens=8), StalenessScheduler(batch, 10, staleness, prefetch_steps)
        sources.append(RolloutSource(scheduler, stream, problems, SAMPLES, sampling, SEED, deadline_s))
        return sources[-1], engine

    yield make_source
    for source in sources:
        source.close()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return ChatTokenizer(folder)


@pytest.fixture
def engine(tokenizer):
    engine = ScriptedEngine(tokenizer)
    yield engine
    engine.thread.stop()


@pytest.fixture
def open_episode(engine, tokenizer):
    """Opens an episode at an endpoint with the given settings; returns it and an openai client."""
    endpoints, responses = [], []

    def open_episode(max_retries=0, **config):
        endpoint = Endpoint(engine, tokenizer, AgentConfig(**config))
        endpoints.append(endpoint)
        episode = engine.open(endpoint, responses.append)
        episode.endpoint = endpoint
        return episode, openai.OpenAI(base_url=endpoint.url, api_key=episode.key, max_retries=max_retries)

    yield open_episode
    for endpoint in endpoints:
        endpoint.close()
