"""On-policy distillation: a second model, the teacher, scores the tokens that the policy sampled.

log p_teacher - log p_old is an advantage for every token (`PolicyLoss.teacher_coef`). Its mean is
the negative reverse KL on the policy's own samples (arXiv 2306.13649, 2306.08543). The teacher runs
in a separate engine and uses no memory of the trainer, or it is the policy itself with another
prompt (`SelfTeacher`). Rollouts are stored with the teacher's log-probs, so a replay needs no
teacher.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading.outcomes import Ungraded
from torchtune_ext.pipeline.groups import Group, Sample
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.run.errors import UsageError, wrap_user_errors
from torchtune_ext.sampling.engine import Engine
from torchtune_ext.sampling.types import EngineConfig
from torchtune_ext.settings.sections import config_section
from torchtune_ext.tasks.grade_functions import import_named

log = logging.getLogger(__name__)

BATCHED_TOKENS = 2048  # tokens per engine step; with a vocabulary of 150,000, their float32 log-probs take 1.2 GB


@config_section("teacher")
class TeacherConfig:
    """The keys of `teacher:`."""

    model_dir: str | None = Field(
        default=None, description="Hugging Face format, with the policy's tokenizer; null: no separate model"
    )
    engine: dict[str, Any] = Field(default_factory=dict, description="values that differ from `engine:`, e.g. devices")
    self: bool = Field(
        default=False, description="true: the teacher is the policy, with the prompt of `teacher.prompt`"
    )
    prompt: str | None = Field(
        default=None, description="with self: function (group, sample) -> messages, e.g. my_task.with_solution"
    )

    def engine_config(self, policy: EngineConfig) -> EngineConfig:
        """Returns the settings of the teacher's engine.

        They equal the settings of the policy's engine, except for placement, context length,
        batched tokens and the keys of `teacher.engine`.

        Raises:
            UsageError: a key is unknown, a value is invalid, or the context is too short.
        """
        own = {
            "address": None,
            "devices": None,
            "count": None,
            "sleep": False,
            # A complete sample of the policy, and the one token that vLLM always samples.
            "max_model_len": policy.max_model_len + 1,
            # An engine step computes log-probs over the full vocabulary for each of its tokens.
            # vLLM reserves no memory for them when it sizes the KV cache.
            "max_num_batched_tokens": policy.max_num_batched_tokens or BATCHED_TOKENS,
        }
        try:
            engine = replace(policy, **own | self.engine)
        except UsageError as error:
            raise UsageError(re.sub(r"\bengine(?=[.:]\w|:`)", "teacher.engine", str(error))) from None
        if engine.max_model_len <= policy.max_model_len:
            raise UsageError(
                f"teacher.engine.max_model_len={engine.max_model_len} must be above engine.max_model_len="
                f"{policy.max_model_len}: the teacher's context holds a complete sample and one more token"
            )
        return engine


class Teacher:
    """Scores sampled groups with its own engine.

    Args:
        hf_model: the teacher's model.
        config: settings of the teacher's engine.
        run_dir: the folder for the engine's log.
    """

    def __init__(self, hf_model: HFModel, config: EngineConfig, run_dir: Path):
        self.hf_model = hf_model
        self.engine = Engine(str(hf_model.path), config, str(run_dir), name="teacher's engine")

    def start(self) -> None:
        """Starts the engine without waiting until it is ready."""
        self.engine.start()

    def wait_ready(self) -> float:
        """Waits until the engine is ready.

        Returns:
            The seconds that the start took.

        Raises:
            EngineFailed: the engine did not start.
        """
        seconds = self.engine.wait_ready()
        # A server at `address` may still hold weights that an earlier run published to it.
        self.engine.require_unmodified_server()
        return seconds

    def close(self) -> None:
        self.engine.close()

    def prompt_ids(self, group: Group, sample: Sample) -> np.ndarray | None:
        """Returns the teacher's prompt of a sample; None: the policy's own prompt."""
        return None

    def score_groups(self, groups: Sequence[Group]) -> list[Group]:
        """Returns the groups with the teacher's log-probs of each graded sample.

        Raises:
            EngineFailed: the engine failed.
        """
        # Samples without a score are not trained on. Each would cost a complete prefill, because
        # the prefix cache holds no log-probs.
        samples = [(group, s) for group in groups for s in group.samples if s.score is not None]
        samples = [(group, s) for group, s in samples if len(s.completion.tokens)]
        scored, texts, too_long = [], [], set()
        for group, s in samples:
            prompt, other_prompt = len(group.prompt_tokens), self.prompt_ids(group, s)
            ids = np.concatenate([group.prompt_tokens, s.completion.tokens])
            turn_paths = s.completion.turn_paths(prompt)
            for i, path in enumerate(turn_paths):
                end, last = len(path), path[-1]
                if any(len(other) > end and other[end - 1] == last for other in turn_paths[i + 1 :]):
                    continue  # a later path contains this one
                own = path >= prompt  # tokens of the completion, not of the prompt
                context = ids[path[~own]] if other_prompt is None else other_prompt
                text = np.concatenate([context, ids[path[own]]])
                # vLLM samples one more token when it scores a text.
                if other_prompt is not None and len(text) >= self.engine.config.max_model_len:
                    too_long.add(id(s))
                    continue
                scored.append((s, path[own] - prompt))
                texts.append(text)
        if too_long:
            log.warning("teacher: %d samples are not trained on: the prompt of teacher.prompt and the completion exceed "
                        "engine.max_model_len=%d. Raise it, or shorten the prompt", len(too_long),
                        self.engine.config.max_model_len)  # fmt: skip
        logprobs = {id(s): np.zeros(len(s.completion.tokens), np.float32) for _, s in samples}
        for (s, places), row in zip(scored, self.engine.score(texts), strict=True):
            # `row` has no value for the first token of a text, because that token has no context.
            count = min(len(places), len(row))
            logprobs[id(s)][places[-count:]] = row[-count:]

        def with_teacher(sample: Sample) -> Sample:
            if id(sample) in too_long:
                return replace(sample, outcome=Ungraded("infra_failed", "the teacher's prompt is too long"))
            return replace(sample, teacher_logprobs=logprobs.get(id(sample)))

        return [replace(group, samples=tuple(map(with_teacher, group.samples))) for group in groups]


class SelfTeacher(Teacher):
    """The policy as its own teacher: the run's engine scores each sample after another prompt.

    The teacher has the current weights and more information, such as a solution or the grader's
    feedback (OPSD, arXiv 2601.18734; SDFT, 2601.19897; SDPO, 2601.20802).

    Args:
        engine: the run's engine; None if only `prompt_ids` is called.
        tokenizer: renders the messages of the prompt.
        prompt: dotted path of the function (group, sample) -> messages.

    Raises:
        UsageError: the function is not found.
    """

    def __init__(self, engine: Engine | None, tokenizer: ChatTokenizer, prompt: str):
        self._tokenizer, self._key = tokenizer, f"teacher.prompt={prompt}"
        self._make_prompt = import_named(prompt, "teacher.prompt", "function", "my_task.with_solution")
        if engine:
            self.engine = engine

    def start(self) -> None:
        """Does nothing, like `wait_ready` and `close`: the run starts and closes its engine."""

    def wait_ready(self) -> float:
        return 0.0

    def close(self) -> None:
        pass

    def prompt_ids(self, group: Group, sample: Sample) -> np.ndarray:
        """Returns the prompt that the user's function makes for a sample.

        Raises:
            UserCodeError: the function raises an error, or its messages cannot be rendered.
        """
        with wrap_user_errors(f"{self._key}, called for a sample of problem {group.problem.id!r},"):
            messages = self._make_prompt(group, sample)
            return np.array(self._tokenizer.prompt_ids(messages, group.problem.tools), np.int32)
