"""On-policy distillation: a second model, the teacher, scores the tokens that the policy has sampled.

log p_teacher - log p_old is an advantage for every token (`PolicyLoss.teacher_coef`), whose mean is minus the reverse
KL on the policy's own samples (arXiv 2306.13649, 2306.08543). The teacher is in an engine of its own, and takes none of
the trainer's memory. Its log-probs are stored with the rollouts, so a replay needs no teacher.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from torchtune_ext.pipeline.groups import Group, Sample
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.run.errors import UsageError
from torchtune_ext.sampling.engine import Engine
from torchtune_ext.sampling.types import EngineConfig
from torchtune_ext.settings.records import config_record

BATCHED_TOKENS = 2048  # of a step of the engine: 1.2 GB of float32 with a vocabulary of 150,000


@config_record("teacher")
class TeacherConfig:
    """The keys of `teacher:`."""

    model_dir: str | None = Field(
        default=None, description="Hugging Face format, with the policy's tokenizer; null: no teacher"
    )
    engine: dict[str, Any] = Field(default_factory=dict, description="values that differ from `engine:`, e.g. devices")

    def engine_config(self, policy: EngineConfig) -> EngineConfig:
        """Returns the settings of the teacher's engine: those of the policy's engine, except where it runs.

        Raises:
            ValueError: an unknown key, a value that an engine does not take, or too short a context.
        """
        own = {
            "address": None,
            "devices": None,
            "count": None,
            "sleep": False,
            # A whole sample of the policy, and the one token that vLLM insists on sampling.
            "max_model_len": policy.max_model_len + 1,
            # A step of the engine makes log-probs over the whole vocabulary for each of its tokens, and vLLM leaves no
            # memory for them when it sizes the KV cache.
            "max_num_batched_tokens": policy.max_num_batched_tokens or BATCHED_TOKENS,
        }
        try:
            engine = replace(policy, **own | self.engine)
        except UsageError as error:
            raise UsageError(re.sub(r"\bengine(?=[.:]\w|:`)", "teacher.engine", str(error))) from None
        if engine.max_model_len <= policy.max_model_len:
            raise UsageError(
                f"teacher.engine.max_model_len={engine.max_model_len} must be above engine.max_model_len="
                f"{policy.max_model_len}: it holds a whole sample and one token more"
            )
        return engine


class Teacher:
    """Scores sampled groups with an engine that it owns.

    Args:
        source: the model of the teacher.
        config: the settings of its engine.
        run_dir: the folder for the engine's log.
    """

    def __init__(self, hf_model: HFModel, config: EngineConfig, run_dir: Path):
        self.hf_model = hf_model
        self.engine = Engine(str(hf_model.path), config, str(run_dir), name="teacher's engine")

    def start(self) -> None:
        """Begins to start the engine, and returns at once."""
        self.engine.start()

    def wait_ready(self) -> float:
        """Waits until it can score, and returns the seconds that its start took. Raises EngineFailed."""
        seconds = self.engine.wait_ready()
        # An engine behind an address may still hold weights that a run has published there.
        self.engine.require_unmodified_server()
        return seconds

    def close(self) -> None:
        self.engine.close()

    def score_groups(self, groups: Sequence[Group]) -> list[Group]:
        """Returns the groups with the teacher's log-probs of each graded sample. Raises EngineFailed."""
        # Samples without a grade are not trained on, and each one costs a whole prefill, because the prefix cache holds
        # no log-probs.
        samples = [(group, s) for group in groups for s in group.samples if s.score is not None]
        samples = [(group, s) for group, s in samples if len(s.completion.tokens)]
        paths, texts = [], []
        for group, s in samples:
            prompt, ids = len(group.prompt_tokens), np.concatenate([group.prompt_tokens, s.completion.tokens])
            # Without branches the last path holds all others, and one prefill scores them all.
            for path in list(s.completion.turn_paths(prompt))[0 if s.completion.kept_prefix_lens else -1 :]:
                paths.append((s, path - prompt))
                texts.append(ids[path])
        logprobs = {id(s): np.zeros(len(s.completion.tokens), np.float32) for _, s in samples}
        for (s, path), row in zip(paths, self.engine.score(texts), strict=True):
            # `row` has no value for the first token of a path, which follows nothing.
            own = path[1:] >= 0  # of the completion, not of the prompt
            logprobs[id(s)][path[1:][own]] = row[own]

        def with_teacher(sample: Sample) -> Sample:
            return replace(sample, teacher_logprobs=logprobs.get(id(sample)))

        return [replace(group, samples=tuple(map(with_teacher, group.samples))) for group in groups]
