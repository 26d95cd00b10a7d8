"""A second model that says how likely it would have been to write what the policy has sampled: on-policy distillation.

The policy samples, the teacher scores the very tokens, and log p_teacher - log p_old is an advantage for every token
(`PolicyLoss.teacher_coef`): minus the reverse KL, estimated where the policy goes (arXiv 2306.13649, 2306.08543). The teacher
is in an engine of its own, so the trainer's memory holds nothing of it, and its log-probs go into the rollouts, so that a
replay needs no teacher.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from torchtune_ext.groups import Group, Sample
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.run.errors import Mistake, nearest
from torchtune_ext.sampling.engine import Engine
from torchtune_ext.sampling.records import EngineConfig

BATCHED_TOKENS = 2048  # of a step of the engine: 1.2 GB of float32 with a vocabulary of 150,000


@dataclass(frozen=True, slots=True)
class TeacherConfig:
    """The node `teacher:` of a recipe."""

    model_dir: str | None = None  # Hugging Face format, with the policy's tokenizer; null: no teacher
    engine: dict[str, Any] = field(default_factory=dict)  # what its engine has otherwise than `engine:`, as devices

    def engine_config(self, policy: EngineConfig) -> EngineConfig:
        """Returns the settings of the teacher's engine: those of the policy's that do not say where it is or what is published.

        Raises:
            ValueError: a key that an engine does not have, a value that it does not take, or too short a context.
        """
        names = [spec.name for spec in fields(EngineConfig)]
        for name in self.engine:
            if name not in names:
                near = nearest(str(name), names)
                hint = f"; did you mean {near!r}?" if near else ", or behind extra_args an argument of vLLM itself"
                raise Mistake(f"unknown key 'teacher.engine.{name}'{hint}")
        own = {
            "address": None,
            "devices": None,
            "count": None,
            "sleep": False,
            # An answer as long as the policy's context, and the one token that vLLM wants to sample.
            "max_model_len": policy.max_model_len + 1,
            # The log-probs of an engine's step are whole rows of the vocabulary, which the size of the KV cache leaves out.
            "max_num_batched_tokens": policy.max_num_batched_tokens or BATCHED_TOKENS,
        }
        engine = replace(policy, **own | self.engine)
        if engine.max_model_len <= policy.max_model_len:
            raise Mistake(
                f"teacher.engine.max_model_len={engine.max_model_len} must be above engine.max_model_len="
                f"{policy.max_model_len}: it holds a whole sample and one token more"
            )
        return engine


class Teacher:
    """Scores sampled groups. It has the settings of a started engine, whose life is its own.

    Args:
        source: its model directory.
        config: of its engine.
        run_dir: folder that takes the engine's log.
    """

    def __init__(self, source: HFModel, config: EngineConfig, run_dir: Path):
        self.source = source
        self.engine = Engine(str(source.path), config, str(run_dir))

    def start(self) -> None:
        """Begins to bring the engine up, and returns."""
        self.engine.start()

    def wait_ready(self) -> float:
        """Waits until it can score, and returns the seconds that its start took. Raises EngineFailed."""
        seconds = self.engine.wait_ready()
        self.engine.require_own_model()  # a server may hold what a run has published there
        return seconds

    def close(self) -> None:
        self.engine.close()

    def scored(self, groups: Sequence[Group]) -> list[Group]:
        """Returns the groups with the teacher's log-prob of every token of each sample that was graded. Raises EngineFailed."""
        # Samples without a grade are not trained on, and each one costs a whole prefill: the prefix cache holds no log-probs.
        samples = [(group, s) for group in groups for s in group.samples if s.score is not None]
        samples = [(group, s) for group, s in samples if len(s.completion.tokens)]
        paths, texts = [], []
        for group, s in samples:
            prompt, ids = len(group.prompt_tokens), np.concatenate([group.prompt_tokens, s.completion.tokens])
            # Without branches the last path holds all others, and one prefill scores them all.
            for path in list(s.completion.paths(prompt))[0 if s.completion.kept else -1 :]:
                paths.append((s, path - prompt))
                texts.append(ids[path])
        logprobs = {id(s): np.zeros(len(s.completion.tokens), np.float32) for _, s in samples}
        for (s, path), row in zip(paths, self.engine.score(texts), strict=True):
            own = path >= 0  # of the completion, not of the prompt
            logprobs[id(s)][path[own]] = row[own[1:]]

        def with_teacher(sample: Sample) -> Sample:
            return replace(sample, teacher_logprobs=logprobs.get(id(sample)))

        return [replace(group, samples=tuple(map(with_teacher, group.samples))) for group in groups]
