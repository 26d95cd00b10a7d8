"""Reject settings that would fail late or train incorrectly, before anything is loaded."""

from collections.abc import Mapping
from typing import Any

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.objective.loss import LossRequirements, PolicyLoss, loss_requirements
from torchtune_ext.pipeline.advantages import AdvantageConfig
from torchtune_ext.pipeline.staleness import StalenessScheduler
from torchtune_ext.run.errors import UsageError
from torchtune_ext.sampling.types import SamplingConfig
from torchtune_ext.setup.config_sections import RunSettings, TeacherConfig
from torchtune_ext.tasks.task import AgentTask, EpisodeTask

# Descriptions of the loss aggregation of an update (pipeline/packing.py).
AGGREGATIONS = {"token": "token mean", "sequence": "sequence mean", "constant": "sum over a constant"}


def check_settings(cfg: RunSettings, loss: Any) -> None:
    """Raise UsageError for inconsistent settings of a GRPO recipe.

    Args:
        cfg: the settings.
        loss: the loss, built from `cfg.loss`.
    """
    if cfg.updates_per_step > cfg.prompts_per_step:
        raise UsageError(
            f"updates_per_step={cfg.updates_per_step} is more than prompts_per_step={cfg.prompts_per_step}: each update needs "
            f"at least one group. Fix: set updates_per_step={cfg.prompts_per_step} or less"
        )
    if cfg.advantage.combine == "normalize_then_sum" and not cfg.advantage.parts:
        raise UsageError(
            "advantage.parts is missing, but advantage.combine=normalize_then_sum (preset: gdpo) normalizes reward parts. Fix: "
            "set advantage.parts, as in advantage.parts.correct=1.0 advantage.parts.short=0.5, or combine=sum_then_normalize"
        )
    needs = loss_requirements(loss)
    check_needs(cfg.loss, needs)
    check_teacher(cfg.teacher, cfg.sampling, needs, replay=cfg.replay is not None)
    check_sampling(cfg.sampling, cfg.samples_per_prompt, cfg.advantage)
    if invalid_steps := [step for step in cfg.profile if not 1 <= step <= cfg.max_steps]:
        raise UsageError(
            f"profile={cfg.profile} names step {invalid_steps[0]}; expected steps from 1 to max_steps={cfg.max_steps}"
        )
    # The scheduler refuses a staleness and prefetch_steps that do not fit together.
    StalenessScheduler(cfg.prompts_per_step, cfg.max_steps, cfg.staleness, cfg.prefetch_steps)
    sleep = str(cfg.engine.sleep).lower()
    if cfg.staleness and cfg.engine.sleep:
        raise UsageError(
            f"staleness={cfg.staleness} with engine.sleep={sleep}: a sleeping engine frees its memory during training, so it "
            "cannot prefetch. Fix: give it its own GPUs (engine.devices), or set staleness=0"
        )
    if cfg.engine.sleep and cfg.engine.address is not None:
        raise UsageError(
            f"engine.sleep={sleep} with engine.address={cfg.engine.address}: a server does not share the trainer's GPU and "
            "cannot sleep. Fix: set engine.sleep=false"
        )
    if cfg.staleness and cfg.refill_rounds:
        raise UsageError(
            f"refill_rounds={cfg.refill_rounds} with staleness={cfg.staleness}: the next step is sampled before the "
            "zero-variance groups of this step are known. Fix: set refill_rounds=0 and raise prompts_per_step instead"
        )
    uncorrected = cfg.staleness and isinstance(loss, PolicyLoss) and loss.importance == "none" and loss.old != "sampler"
    if uncorrected and "importance" not in cfg.loss:
        methods = "full, tis, ..." if loss.level == "token" else "sequence_tis, sequence_mis, geometric_mask"
        raise UsageError(
            f"staleness={cfg.staleness}, but this objective has no correction for off-policy samples. Fix: use "
            f"preset=decoupled_ppo or preset=grpo, or set loss.importance ({methods}). To train without a correction, set "
            "loss.importance=none"
        )
    if cfg.advantage.rewards == "shuffled" and getattr(loss, "reward_coef", 1.0) == 0:
        raise UsageError(
            "advantage.rewards=shuffled with loss.reward_coef=0, which trains without rewards, so the placebo would be the "
            "same run. Fix: set advantage.rewards=graded, or loss.reward_coef=1"
        )
    # Copies of earlier recipes have no `iterations_per_step`.
    cfg.schedule.require_fits(cfg.max_steps * cfg.updates_per_step * getattr(cfg, "iterations_per_step", 1))


def check_sampling(sampling: SamplingConfig, samples_per_prompt: int, advantage: AdvantageConfig) -> None:
    """Raise UsageError for sampling settings that are unsuitable for training."""
    # Training needs samples from the full distribution of the policy, and enough of them per group.
    if 1 < advantage.pass_k >= samples_per_prompt:
        raise UsageError(
            f"advantage.pass_k={advantage.pass_k} needs larger groups: samples_per_prompt={samples_per_prompt} must be larger "
            "than pass_k"
        )
    if sampling.temperature <= 0:
        raise UsageError(
            f"sampling.temperature={sampling.temperature} makes all samples of a group equal; expected a number above "
            "0. Fix: use 1.0"
        )
    if sampling.top_p < 1 or sampling.top_k:
        raise UsageError(
            f"sampling.top_p={sampling.top_p}, top_k={sampling.top_k}: the engine would renormalize over a part of the "
            "vocabulary, so its log-probs would differ from the policy's. Fix: use top_p=1 and top_k=0"
        )
    if sampling.seed is not None:
        raise UsageError(
            f"sampling.seed={sampling.seed}: a run derives the seeds of every step from `seed`. Fix: set `seed` instead"
        )


def check_teacher(teacher: TeacherConfig, sampling: SamplingConfig, needs: LossRequirements, replay: bool) -> None:
    """Raise UsageError if teacher, loss and sampling temperature are inconsistent."""
    if teacher.self and (teacher.model_dir is not None or teacher.engine):
        key = "model_dir" if teacher.model_dir is not None else "engine"
        raise UsageError(
            f"teacher.{key}={getattr(teacher, key)} contradicts teacher.self=true: the policy is the teacher, in the run's "
            f"engine. Fix: remove teacher.{key}, or set teacher.self=false"
        )
    if teacher.self and teacher.prompt is None and not replay:
        raise UsageError(
            "teacher.prompt is missing: with teacher.self=true the teacher needs another prompt. Fix: set the dotted path "
            "of a function (group, sample) -> messages, e.g. teacher.prompt=my_task.with_solution"
        )
    if teacher.prompt is not None and not teacher.self:
        raise UsageError(
            f"teacher.prompt={teacher.prompt} needs teacher.self=true: another model scores the policy's own prompt. Fix: "
            "set preset=self_distill or teacher.self=true, or remove teacher.prompt"
        )
    model = "teacher.self=true" if teacher.self else f"teacher.model_dir={teacher.model_dir}"
    has_teacher = teacher.self or teacher.model_dir is not None
    if not has_teacher and needs.teacher_logprobs and not replay:
        raise UsageError(
            "teacher.model_dir is missing, but the loss uses a teacher. Fix: set teacher.model_dir to a model, or "
            "loss.teacher_coef=0"
        )
    if has_teacher and not needs.teacher_logprobs:
        raise UsageError(
            f"{model}, but this objective does not use a teacher. Fix: set preset=distill, or "
            "loss.teacher_coef=1.0 in addition to the rewards"
        )
    if has_teacher and sampling.temperature != 1.0:
        raise UsageError(
            f"sampling.temperature={sampling.temperature} with a teacher: its log-probs are at temperature 1, so they "
            "cannot be compared. Fix: set sampling.temperature=1.0"
        )


def check_environment_loss(loss: Any, task: Any, tokenizer: ChatTokenizer) -> None:
    """Raise UsageError if a loss on the environment's content would have no labels."""
    coef = loss_requirements(loss).environment_coef
    if not coef:
        return
    if not isinstance(task, EpisodeTask | AgentTask):
        raise UsageError(
            f"loss.environment_coef={coef}, but the task {type(task).__name__} has no environment; expected a task with "
            "several turns (docs/how_to/environments.md). Fix: set loss.environment_coef=0"
        )
    reply = [{"role": "user", "content": "one two"}]
    if not tokenizer.content_spans(tokenizer.turn_boundary_ids(reply, tokenizer.eos_id), reply):
        raise UsageError(
            f"loss.environment_coef={coef}: chat template {tokenizer.template.name!r} does not write the content of a reply "
            "as it is, so its tokens are unknown. Fix: set tokenizer.template to another template, or loss.environment_coef=0"
        )


def check_needs(settings: Mapping[str, Any], needs: LossRequirements) -> None:
    """Raise UsageError if a key of `loss:` needs data that the loss does not request."""
    # A user's loss gets the reference or the stored tokens only if its class requests them.
    # Otherwise the setting would have no effect.
    requested = {"kl_coef": (needs.reference_logprobs, "needs_reference"), "top_k": (needs.top_k, "top_k")}
    for key, (need, attribute) in requested.items():
        if settings.get(key) and not need:
            raise UsageError(
                f"loss.{key}={settings.get(key)}, but the loss {settings.get('_component_')} does not request it: "
                f"give the class the attribute `{attribute}` (docs/how_to/algorithms.md), or leave the setting out"
            )
