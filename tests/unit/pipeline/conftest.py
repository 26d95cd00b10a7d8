"""Rollout sources with real scheduler, stream and graders, and a scripted engine."""

import pytest

from helpers.letter_tokens import LetterTokenizer
from helpers.manual_engine import SAMPLES, SEED, ManualEngine
from helpers.scripted_task import NumberedTask
from torchtune_ext.grading import Grader
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
