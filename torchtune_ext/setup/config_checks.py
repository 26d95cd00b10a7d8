"""Refuses settings that would fail late or train wrongly without an error, before anything is loaded."""

from collections.abc import Mapping
from typing import Any

from torchtune_ext.objective.loss import LossRequirements, PolicyLoss, loss_requirements
from torchtune_ext.pipeline.advantages import AdvantageConfig
from torchtune_ext.pipeline.staleness import StalenessScheduler
from torchtune_ext.run.errors import UsageError
from torchtune_ext.sampling.types import SamplingConfig
from torchtune_ext.setup.config_records import GRPOConfig, TeacherConfig

# What the loss of an update is a mean over (pipeline/packing.py), in words.
AGGREGATIONS = {"token": "token mean", "sequence": "sequence mean", "constant": "sum over a constant"}


def check_settings(cfg: GRPOConfig, loss: Any) -> None:
    """Raises ValueError for settings of a GRPO recipe that do not go together. `loss` was built from `cfg.loss`."""
    if cfg.updates_per_step > cfg.prompts_per_step:
        raise UsageError(
            f"updates_per_step={cfg.updates_per_step} of prompts_per_step={cfg.prompts_per_step}: each update takes whole "
            f"groups, so some would have none; set updates_per_step={cfg.prompts_per_step} or less"
        )
    check_needs(cfg.loss, loss_requirements(loss))
    check_teacher(cfg.teacher, cfg.sampling, loss_requirements(loss), replay=cfg.replay is not None)
    check_sampling(cfg.sampling, cfg.samples_per_prompt, cfg.advantage)
    if wrong := [step for step in cfg.profile if not 1 <= step <= cfg.max_steps]:
        raise UsageError(
            f"profile={cfg.profile} names step {wrong[0]}, but the steps are 1 to max_steps={cfg.max_steps}"
        )
    # The scheduler refuses a staleness and prefetch_steps that do not fit together.
    StalenessScheduler(cfg.prompts_per_step, cfg.max_steps, cfg.staleness, cfg.prefetch_steps)
    if cfg.staleness and cfg.engine.sleep:
        raise UsageError(
            f"staleness={cfg.staleness} with engine.sleep=true: an engine that gives its memory back while the trainer works "
            "cannot sample meanwhile; give it GPUs of its own (engine.devices), or set staleness=0"
        )
    if cfg.staleness and cfg.refill_rounds:
        raise UsageError(
            f"refill_rounds={cfg.refill_rounds} with staleness={cfg.staleness}: the next step is sampled before it is "
            "known which groups of this one have a signal; set refill_rounds=0 and raise prompts_per_step instead"
        )
    uncorrected = cfg.staleness and isinstance(loss, PolicyLoss) and loss.importance == "none" and loss.old != "sampler"
    if uncorrected and "importance" not in cfg.loss:
        raise UsageError(
            f"staleness={cfg.staleness}, but nothing in this objective corrects for samples of an older policy: use "
            "preset=decoupled_ppo or preset=grpo, or set loss.importance (full, tis, ...). To train without a correction, say "
            "so: loss.importance=none"
        )
    cfg.schedule.require_fits(cfg.max_steps * cfg.updates_per_step)


def check_sampling(sampling: SamplingConfig, samples_per_prompt: int, advantage: AdvantageConfig) -> None:
    """Raises ValueError for settings of sampling that do not fit training."""
    # Training needs samples of the policy itself, not of a part of its distribution, and enough of them to compare.
    if 1 < advantage.pass_k >= samples_per_prompt:
        raise UsageError(
            f"advantage.pass_k={advantage.pass_k} compares the best of so many samples with others: samples_per_prompt="
            f"{samples_per_prompt} must be larger"
        )
    if sampling.temperature <= 0:
        raise UsageError(f"sampling.temperature={sampling.temperature} leaves nothing to learn from; use 1.0")
    if sampling.top_p < 1 or sampling.top_k:
        raise UsageError(
            f"sampling.top_p={sampling.top_p}, top_k={sampling.top_k}: the engine would renormalize over a part of the "
            "vocabulary, and its log-probs would not be the policy's; use top_p=1 and top_k=0"
        )
    if sampling.seed is not None:
        raise UsageError(f"sampling.seed={sampling.seed}: a run draws its own seeds for every step; set `seed`")


def check_teacher(teacher: TeacherConfig, sampling: SamplingConfig, needs: LossRequirements, replay: bool) -> None:
    """Raises ValueError if only one of teacher and loss is set for the other, or the temperature does not fit both."""
    if teacher.model_dir is None and needs.teacher_logprobs and not replay:
        raise UsageError(
            "the loss asks a teacher, and there is none: set teacher.model_dir to a model, or loss.teacher_coef=0"
        )
    if teacher.model_dir is not None and not needs.teacher_logprobs:
        raise UsageError(
            f"teacher.model_dir={teacher.model_dir}, but nothing in this objective asks a teacher: set preset=distill, or "
            "loss.teacher_coef=1.0 beside the rewards"
        )
    if teacher.model_dir is not None and sampling.temperature != 1.0:
        raise UsageError(
            f"sampling.temperature={sampling.temperature} with a teacher, whose log-probs are those of temperature 1: they "
            "could not be compared; set sampling.temperature=1.0"
        )


def check_needs(settings: Mapping[str, Any], needs: LossRequirements) -> None:
    """Raises ValueError if `loss:` of the YAML sets something that the loss does not ask for."""
    # A loss of the user gets the reference or the stored tokens only if its class asks for them. Otherwise the setting
    # would have no effect.
    for key, need, attribute in (
        ("kl_coef", needs.reference_logprobs, "needs_reference"),
        ("top_k", needs.top_k, "top_k"),
    ):
        if settings.get(key) and not need:
            raise UsageError(
                f"loss.{key}={settings.get(key)}, but the loss {settings.get('_component_')} does not ask for it: give the class "
                f"the attribute `{attribute}` (docs/objectives.md), or leave the setting out"
            )
