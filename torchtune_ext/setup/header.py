"""Print the header of a run: model, device, objective, problems, files and engine."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from torchtune_ext.pipeline.advantages import default_formula
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.policy.lora import adapter_names
from torchtune_ext.run.output import ENGINE_READY_PREFIX, format_labels, print_text
from torchtune_ext.sampling.engine_args import engine_configs, log_name
from torchtune_ext.setup.config_checks import AGGREGATIONS
from torchtune_ext.setup.config_sections import AdvantageConfig, RunSettings
from torchtune_ext.setup.run_components import RunComponents
from torchtune_ext.tasks.grade_functions import describe_function
from torchtune_ext.tasks.problem_stream import SHUFFLE_LIMIT
from torchtune_ext.tasks.task import EpisodeTask, SelfGradingTask, Task
from torchtune_ext.training.distributed import Ranks
from torchtune_ext.training.precision import dtype_note
from torchtune_ext.training.trained_weights import FullWeights, LoRAWeights


def print_run_header(components: RunComponents, formula: Callable[[np.ndarray], np.ndarray] | None = None) -> None:
    """Print the header of a GRPO run before its engine starts. `formula`: as in `advantage_text`."""
    cfg, output = components.cfg, components.cfg.output_dir
    # Only our own graders write grader.log. A self-grading task starts other processes.
    texts = [task for task in (components.task, components.eval_task) if task and not isinstance(task, SelfGradingTask)]
    grader_log_text = "; graders print into grader.log" if texts and not components.replay else ""
    interval = _interval_text(cfg.checkpoints.every) if cfg.checkpoints.every < cfg.max_steps else "at the end"
    note = dtype_note(cfg.dtype, components.ranks.device.type)
    advantage = advantage_text(cfg.advantage, formula)
    objective = objective_text(components.loss, advantage, cfg.aggregation, cfg.refill_rounds, cfg.preset)
    lines = [
        ("model", model_text(components.hf_model, components.meta_model, components.trained_weights)),
        ("device", f"{device_text(components.ranks)}; {components.precision}{note}"),
        ("objective", objective),
        ("problems", problems_text(cfg, components.task, components.eval_task, components.train_eval_overlap)),
        ("files", f"{output}; a checkpoint {interval}{grader_log_text}"),
    ]
    if components.replay:
        lines.append(("replay", str(components.replay)))
    else:
        engine = components.engine_config
        count, log = len(engine_configs(engine)), f"{output}/{log_name(engine)}"
        text = f"starting, its log: {log}" if count == 1 else f"starting {count} replicas, their logs: {log}"
        text += f"; {engine.threads} threads" if (engine.threads or 1) > 1 else ""
        text = f"connecting to {engine.address}" if engine.address else text
        if cfg.staleness:
            prefetches = components.staleness_scheduler.prefetch_steps
            text += f"; asynchronous: staleness {cfg.staleness}, prefetch_steps {prefetches}"
        lines.append(("engine", text))
        if cfg.teacher.self:
            lines.append(("teacher", f"the policy, with the prompt of {cfg.teacher.prompt}"))
        if components.teacher_model:
            log = f"{output}/teacher/{log_name(engine)}"
            lines.append(("teacher", f"{components.teacher_model.path}, in a separate engine, its log: {log}"))
    evaluated = components.eval_task is not None and not components.replay
    # The best checkpoint is chosen by held-out reward, which only evaluation steps have.
    every, evaluates = cfg.checkpoints.every, cfg.evaluation.every
    if evaluated and every < cfg.max_steps and every % evaluates:
        warning = (
            f"checkpoints.every={every} but evaluation.every={evaluates}: only a checkpoint in a step with an evaluation "
            f"has a held-out reward, here every {math.lcm(every, evaluates)} steps and at the last. Fix: set "
            "checkpoints.every to a multiple of evaluation.every"
        )
        lines.append(("warning", warning))
    print_text(format_labels(lines))


def print_engine_ready(seconds: float) -> None:
    """Print that the engine is ready, `seconds` after its start."""
    print_text(f"{ENGINE_READY_PREFIX} {seconds:.0f} s, from its own start")


def model_text(hf_model: HFModel, model: nn.Module, trained_weights: FullWeights | LoRAWeights | str) -> str:
    """Return e.g. "models/Q7: qwen2 of 28 layers, 7.62 billion parameters; trains all weights"."""
    # Adapters are counted separately, so the first number is the usual size of the model.
    adapters, sizes = adapter_names(model), {name: param.numel() for name, param in model.named_parameters()}
    whole = sum(size for name, size in sizes.items() if name not in adapters)
    text = (
        f"{hf_model.path}: {hf_model.config['model_type']} of {hf_model.config.get('num_hidden_layers')} layers, "
        f"{parameters_text(whole)}"
    )
    part = f" ({parameters_text(sum(sizes[name] for name in adapters))})" if adapters else ""
    return f"{text} parameters; trains {trained_weights}{part}"


def parameters_text(number: int) -> str:
    """Format a number of parameters: "7.62 billion"."""
    if number >= 1e9:
        return f"{number / 1e9:.3g} billion"
    if number >= 1e6:
        return f"{number / 1e6:.3g} million"
    return f"{number / 1e6:.1f} million" if number >= 1e5 else f"{number:,}"


def device_text(ranks: Ranks) -> str:
    """Return e.g. "16 processes on 2 machines (8 on a, 8 on b), each on NVIDIA H100 80GB HBM3"."""
    device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else str(ranks.device)
    processes = "1 process" if ranks.world_size == 1 else f"{ranks.world_size} processes"
    where, hosts = "on", list(dict.fromkeys(ranks.hosts))
    if hosts[1:]:
        counts = ", ".join(f"{ranks.hosts.count(host)} on {host}" for host in hosts)
        where = f"on {len(hosts)} machines ({counts}), each on"
    copies, shards = ranks.world_size // ranks.shards, ranks.shards
    text = f"; {copies} copies of the weights, each on {shards} rank{'s' * (shards > 1)}" if copies > 1 else ""
    return f"{processes} {where} {device}{text}"


def problems_text(cfg: RunSettings, task: Task, held_out: Task | None, overlap: Sequence[str] = ()) -> str:
    """Return e.g. "Math, 7,473; 32 prompts per step, 16 samples each; held out: ..."."""
    # A task that generates problems has a length above this limit.
    number = f"{len(task):,}" if len(task) <= SHUFFLE_LIMIT else "endless"
    text = (
        f"{_task_text(task)}, {number}; {cfg.prompts_per_step} prompts per step, {cfg.samples_per_prompt} samples each"
    )
    text += ", so some repeat" if len(task) < cfg.prompts_per_step else ""
    if isinstance(task, EpisodeTask):
        text += f", episodes of up to {task.max_turns} turns, {cfg.grader.workers} at a time"
    if held_out is None:
        return f"{text}; no held-out problems"
    shared = f", {len(overlap):,} of them ALSO TRAINED ON (e.g. {overlap[0]})" if overlap else ""
    return (
        f"{text}; held out: {_task_text(held_out)}, {len(held_out):,}{shared}, {_interval_text(cfg.evaluation.every)}"
    )


def _interval_text(steps: int) -> str:
    return f"every {steps} steps" if steps > 1 else "every step"


def _task_text(task: Task) -> str:
    """Return a task and its grading function: "Jsonl rows by my_reward.near (my_reward.py:5)"."""
    # A user's function is an instance attribute, and the method of our tasks a class attribute.
    attributes = getattr(task, "__dict__", {})
    grade_function = attributes.get("grade") or attributes.get("grade_group")
    name = getattr(task, "name", None)
    words = f"{type(task).__name__} {name}" if isinstance(name, str) else type(task).__name__
    return f"{words} by {describe_function(grade_function)}" if grade_function else words


def advantage_text(config: AdvantageConfig, formula: Callable[[np.ndarray], np.ndarray] | None) -> str:
    """Return the text of the advantage.

    Args:
        config: the `advantage:` section.
        formula: a recipe's rewards [G] -> advantages [G], named if a copy of the recipe has changed
            it. None: the default.
    """
    rewards_G = np.array([0.0, 1.0, 1.0, 3.0])
    if formula is None or np.allclose(formula(rewards_G), default_formula(rewards_G)):
        return str(config)
    name = describe_function(formula)
    if config.uses_formula:
        return config.describe(name)
    return f"{config} ({name} is not used: it needs baseline=mean, scale=group_std, pass_k=1)"


def objective_text(loss: Any, advantage: str, aggregation: str, refill_rounds: int, preset: str | None) -> str:
    """Return the text of the objective, e.g. "clip 0.2/0.28 per token, ..., token mean; preset dapo"."""
    # The user may have overridden keys of the preset, so both are written.
    parts = [_loss_text(loss), advantage, AGGREGATIONS[aggregation]]
    if refill_rounds:
        parts.append(f"up to {refill_rounds} refills")
    return f"{', '.join(parts)}; {'no preset' if preset is None else f'preset {preset}'}"


def _loss_text(loss: Any) -> str:
    # A user's loss without a `__str__` is shown by the name of its class or function.
    return getattr(loss, "__name__", type(loss).__name__) if type(loss).__str__ is object.__str__ else str(loss)
