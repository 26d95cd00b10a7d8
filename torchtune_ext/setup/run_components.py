"""Build the components of a GRPO run from its settings and check that they are consistent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torchtune.modules import TransformerDecoder

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading import check_grading, find_answer_errors, open_graders
from torchtune_ext.pipeline.groups import Group, Sample
from torchtune_ext.pipeline.rollout import GroupStream
from torchtune_ext.pipeline.source import GroupSource, RolloutSource, make_prompt_check
from torchtune_ext.pipeline.staleness import StalenessScheduler, resolve_prefetch_steps
from torchtune_ext.policy.builder import build_on_meta
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.policy.lora import adapter_names
from torchtune_ext.policy.streaming import streamed_logprobs
from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.folder import RunFolder
from torchtune_ext.sampling import prestart
from torchtune_ext.sampling.engine import Engine, SamplingConfig, find_backend
from torchtune_ext.sampling.engine_args import engine_configs, engine_threads
from torchtune_ext.sampling.types import Completion, EngineConfig
from torchtune_ext.settings.config import named_paths, settings_snapshot
from torchtune_ext.setup.checks import (
    check_agents,
    check_engine,
    check_loss,
    check_optimizer,
    check_prompts,
    check_task,
    check_tokenizer,
    find_eval_overlap,
    max_positions,
    measure_optimizer_state,
    require_row_capacity,
)
from torchtune_ext.setup.config_checks import check_environment_loss, check_settings
from torchtune_ext.setup.config_sections import RolloutConfig, RunSettings, TeacherConfig
from torchtune_ext.setup.machine_checks import (
    disk_need,
    require_disjoint_gpus,
    require_disk,
    require_gpus,
    training_gpus,
)
from torchtune_ext.tasks.problem_stream import ProblemStream, UsableProblems
from torchtune_ext.tasks.task import AgentTask, Score, Task
from torchtune_ext.training.distributed import Ranks
from torchtune_ext.training.export import describe_prompt_format
from torchtune_ext.training.learner import Learner
from torchtune_ext.training.manifest import Identity, identify
from torchtune_ext.training.mismatch import MismatchGate
from torchtune_ext.training.precision import Precision, chosen_dtype
from torchtune_ext.training.publish import NoPublisher, Publisher, WeightPublisher, make_canary_groups
from torchtune_ext.training.teacher import BATCHED_TOKENS, SelfTeacher, Teacher
from torchtune_ext.training.trained_weights import FullWeights, LoRAWeights, measure_rounding, select_trained_weights

if TYPE_CHECKING:
    from torchtune_ext.training.replay import ReplaySource


@dataclass(frozen=True, slots=True)
class RunComponents:
    """Checked components of a run. Before a method is called, no process and no weights exist."""

    cfg: RunSettings
    ranks: Ranks
    hf_model: HFModel  # the model directory
    meta_model: TransformerDecoder  # on the meta device: names and shapes, no weights
    trained_weights: FullWeights | LoRAWeights
    precision: Precision  # includes the engine's settings
    tokenizer: ChatTokenizer
    task: Task
    eval_task: Task | None
    loss: Any
    sampling: SamplingConfig  # its stop tokens include the end-of-turn tokens
    staleness_scheduler: StalenessScheduler  # selects the groups to prefetch
    problems: ProblemStream
    eval_problems: UsableProblems
    train_eval_overlap: list[str]  # ids of held-out problems in the training task
    canary_prompts: list[Group]  # fixed prompts, without samples
    replay: "ReplaySource | None"
    teacher_model: HFModel | None  # the teacher's model directory

    @property
    def engine_config(self) -> EngineConfig:
        """The engine's settings, with the defaults that depend on model and precision."""
        return self.precision.engine

    def run_preflight_checks(self) -> None:
        """Try the graders, and check the GPUs and the disk of this machine.

        Raises:
            UsageError: the graders fail, the engine's GPUs are missing or are also the trainer's,
                or the disk has no space for a checkpoint.
        """
        # Check before the run folder is touched, so a run that cannot start leaves no files.
        self.check_grading()
        cfg, engine = self.cfg, self.engine_config
        if not self.replay:
            find_backend(engine.backend)
            require_gpus(engine)
            require_disjoint_gpus(engine, training_gpus() if self.ranks.device.type == "cuda" else [])
            if self.teacher_model:
                self.check_teacher_engine()
        else:
            # `tune run` has prestarted an engine unless it found `replay` on the command line.
            prestart.discard_prestarted()
        sizes = {name: p.numel() for name, p in self.meta_model.named_parameters()}
        adapters = adapter_names(self.meta_model)
        total = sum(sizes.values())
        trained = sum(size for name, size in sizes.items() if not adapters or name in adapters)
        state = measure_optimizer_state(cfg.optimizer.instantiate)
        require_disk(disk_need(cfg, total, trained, self.precision.dtype, state), cfg.output_dir)

    def check_teacher_engine(self) -> None:
        """Check the backend and the GPUs of the teacher's engine. Raises UsageError if one is invalid."""
        engine = self.teacher_engine_config()
        try:
            find_backend(engine.backend)
            require_gpus(engine)
            engine_configs(engine)
        except UsageError as error:
            raise UsageError(f"teacher.{error}" if str(error).startswith("engine.") else str(error)) from None

    def check_grading(self) -> None:
        """Grade the tasks' own solutions, or run their agents once, in temporary processes. Raises UsageError if one fails."""
        if not self.replay:
            self.eval_problems.load()
            tasks = [self.task, self.eval_task]
            check_grading(tasks, self.cfg.grader, parts=self.cfg.advantage.parts)
            check_agents(tasks, self.tokenizer, self.sampling, self.engine_config.max_model_len, self.cfg.agent)

    def checkpoint_identity(self, run: str) -> Identity:
        """Return the identity that checkpoints of this run store."""
        return identify(run, self.hf_model, self.meta_model, self.trained_weights.spec)

    @property
    def prompt_format_note(self) -> str:
        """The prompts' tokenizer and template if they differ from model_dir's, else ""."""
        return describe_prompt_format(self.hf_model, self.tokenizer)

    def make_exporter(self, model: nn.Module) -> Callable[..., None]:
        """Return the function that exports the model into a checkpoint (`Checkpoints.save`)."""
        return self.trained_weights.make_exporter(model, self.hf_model, self.precision.dtype, self.tokenizer)

    def open_folder(self) -> RunFolder:
        """Lock the run folder and start or resume the run. Files of an earlier run move to `old-N`."""
        folder = RunFolder(self.cfg.output_dir)
        resumes = folder.should_resume(self.cfg.resume_from_checkpoint)
        folder.start_run(settings_snapshot(self.cfg), resumes, inputs=named_paths(self.cfg), writes_checkpoints=True)
        return folder

    def open_graders(self) -> list[Any]:
        """Start the graders of the task and the held-out task."""
        # If groups are prefetched, grading runs during training.
        cfg, prefetches = self.cfg, self.staleness_scheduler.prefetch_steps > 0
        tasks = [self.task, self.eval_task]
        return open_graders(tasks, cfg.grader, during_training=prefetches, folder=cfg.output_dir, agent=cfg.agent)

    def teacher_engine_config(self) -> EngineConfig:
        """Return the settings of the teacher's engine.

        Raises:
            UsageError: they are invalid, or name a GPU of the trainer or the engine.
        """
        cfg = self.cfg
        dtype = str(self.precision.dtype).removeprefix("torch.")
        policy_engine = cfg.engine.with_trainer_defaults(dtype, self.engine_config.threads)
        engine = cfg.teacher.engine_config(policy_engine)
        if self.ranks.device.type == "cuda" and engine.address is None:
            taken = [*training_gpus(), *self.engine_config.device_names]
            # A teacher with a bounded KV cache may share the GPU of trainer and engine.
            shares = engine.devices is None and self.engine_config.devices is None and engine.kv_cache_bytes
            is_disjoint = engine.device_names and not set(engine.device_names) & set(taken)
            if not shares and not is_disjoint:
                raise UsageError(
                    f"teacher.engine.devices={engine.devices!r}: the teacher needs a GPU that neither trains nor "
                    f"samples (in use: {', '.join(taken)}). Fix: name a free GPU, or let all share one with "
                    "engine.devices=null and teacher.engine.kv_cache_bytes"
                )
        return engine

    def make_teacher(self, engine: Engine | None = None) -> Teacher | None:
        """Return the teacher, not started; None without a teacher.

        Args:
            engine: the run's engine, for `teacher.self`.
        """
        if self.cfg.teacher.self:
            return SelfTeacher(engine, self.tokenizer, str(self.cfg.teacher.prompt))
        if self.teacher_model is None:
            return None
        return Teacher(self.teacher_model, self.teacher_engine_config(), Path(self.cfg.output_dir) / "teacher")

    def make_source(self, engine: Engine | None, graders: Sequence[Any], config: RolloutConfig) -> GroupSource:
        """Return the source of the groups of each step.

        The graders check the reference answers of held-out problems now, and of other problems
        before they are used.

        Args:
            engine: the engine; None on ranks without an engine.
            graders: the graders of the task and the held-out task.
            config: the `rollouts` section.
        """
        cfg = self.cfg
        for grader, problems in zip(graders, (self.problems, self.eval_problems), strict=False):
            problems.check_answers(partial(find_answer_errors, grader))
        return self.replay or RolloutSource(
            self.staleness_scheduler,
            GroupStream(engine, self.tokenizer, graders[0]) if engine else None,
            self.problems,
            num_samples=cfg.samples_per_prompt,
            sampling=self.sampling,
            seed=cfg.seed,
            deadline_s=config.deadline_s,
        )

    def _logprobs_fn(self, learner: Learner) -> Callable[..., Any]:
        build, device = self.cfg.model.instantiate, self.ranks.device
        return partial(streamed_logprobs, make_model=build, device=device, temperature=learner.temperature)

    def make_mismatch_gate(self, learner: Learner) -> MismatchGate:
        """Return the check that trainer and engine have the same policy."""
        model, logprobs_fn = learner.policy.model, self._logprobs_fn(learner)
        return MismatchGate(
            self.cfg.max_mismatch,
            measure_rounding=partial(measure_rounding, self.trained_weights, self.precision, model, logprobs_fn),
            precision=self.precision.coarsest_name,
            replay=self.replay is not None,
            test_distribution=self.replay is None and not self.precision.is_mixed,
            temperature=learner.temperature,
        )

    def make_publisher(self, engine: Engine | None, learner: Learner, mismatch_gate: MismatchGate) -> WeightPublisher:
        """Return the publisher, which checks a canary after each weight sync."""
        if self.replay:
            return NoPublisher()
        offload = None
        # FSDP2 allocates sharded weights itself, so they stay on the device.
        if self.engine_config.sleep and self.trained_weights.spec and self.ranks.world_size == 1:
            # Other runs do not import this module.
            from torchtune_ext.policy.offload import FrozenOffload

            offload = FrozenOffload(learner.policy.model)
        return Publisher(
            engine,
            learner,
            self.trained_weights,
            self.precision,
            self.hf_model,
            mismatch_gate,
            self._logprobs_fn(learner),
            self.canary_prompts,
            self.sampling,
            offload,
        )


def build_components(cfg: RunSettings, ranks: Ranks) -> RunComponents:
    """Build and check the components of a run, without weights or processes.

    Args:
        cfg: the typed settings of a GRPO recipe (`load_config`).
        ranks: the ranks of the run.

    Raises:
        UsageError: settings or components are inconsistent; the message names key, value and fix.
    """
    hf_model, meta_model, trained_weights, precision = build_model_components(cfg, ranks.device, ranks.shards)
    tokenizer, task = cfg.tokenizer.instantiate(), cfg.task.instantiate()
    eval_task = cfg.evaluation.task.instantiate() if cfg.evaluation.task else None
    loss, sampling = cfg.loss.instantiate(), cfg.sampling.with_default_stops(tokenizer.stop_token_ids)
    check_settings(cfg, loss)
    cfg.logging.require_login()
    check_task(task, "task")
    if eval_task is not None:
        check_task(eval_task, "evaluation.task", require_finite=True)
    adapters = adapter_names(meta_model)
    trained_dims = {param.ndim for name, param in meta_model.named_parameters() if not adapters or name in adapters}
    check_optimizer(cfg.optimizer.instantiate, trained_dims, ranks.device.type)
    check_loss(loss)
    check_engine(hf_model, precision.engine, meta_model)
    require_row_capacity(cfg.row_tokens, precision.engine)
    check_tokenizer(tokenizer, hf_model, meta_model.tok_embeddings.num_embeddings, sampling.stop_token_ids)
    check_prompts({"task": task, "evaluation.task": eval_task}, tokenizer, sampling, precision.engine, hf_model)
    check_environment_loss(loss, task, tokenizer)
    # A replay does not evaluate.
    overlap = [] if cfg.replay else find_eval_overlap(task, eval_task)
    # A problem whose prompt is too long is skipped, like a problem that the task cannot load.
    prompt_check = make_prompt_check(tokenizer, precision.engine.max_model_len, sampling.max_tokens)
    problems = ProblemStream(task, cfg.seed, check=prompt_check)
    # Made before a checkpoint is loaded, because an adaptive task gives other problems later.
    canary = make_canary_groups(problems, tokenizer)
    hf_model.require_fits(meta_model, new_params=adapters)
    replay = None
    if cfg.replay:
        from torchtune_ext.training.replay import ReplaySource

        identity = identify("", hf_model, meta_model, trained_weights.spec)
        replay = ReplaySource(cfg.replay, settings_snapshot(cfg), identity, problems, tokenizer)
    teacher_model = None
    if cfg.teacher.model_dir and not cfg.replay:
        teacher_model = load_teacher_model(cfg.teacher, cfg.engine, tokenizer)
    if cfg.teacher.self and not cfg.replay:
        check_self_teacher(cfg.teacher, task, tokenizer, canary[0], sampling, precision.engine)
    return RunComponents(
        cfg=cfg,
        ranks=ranks,
        hf_model=hf_model,
        meta_model=meta_model,
        trained_weights=trained_weights,
        precision=precision,
        tokenizer=tokenizer,
        task=task,
        eval_task=eval_task,
        loss=loss,
        sampling=sampling,
        staleness_scheduler=StalenessScheduler(cfg.prompts_per_step, cfg.max_steps, cfg.staleness, cfg.prefetch_steps),
        problems=problems,
        eval_problems=UsableProblems(eval_task, check=prompt_check),
        train_eval_overlap=overlap,
        canary_prompts=canary,
        replay=replay,
        teacher_model=teacher_model,
    )


def load_teacher_model(teacher: TeacherConfig, engine: EngineConfig, tokenizer: ChatTokenizer) -> HFModel:
    """Load the teacher's model directory.

    Args:
        teacher: the `teacher` section.
        engine: the policy's engine settings.
        tokenizer: the policy's tokenizer.

    Raises:
        UsageError: the directory has no model that can score the policy's tokens.
    """
    # The checks are shared with the policy's model, so their messages name the policy's keys.
    try:
        model = HFModel(str(teacher.model_dir))
        if (longest := max_positions(model)) <= engine.max_model_len:
            raise UsageError(
                f"teacher.model_dir={teacher.model_dir} has {longest} positions; expected more than "
                f"engine.max_model_len={engine.max_model_len}. Fix: set engine.max_model_len={longest - 1}"
            )
        check_engine(model, teacher.engine_config(engine))
        model.require_readable()
    except UsageError as error:
        message = f"teacher.{error}" if str(error).startswith(("model_dir", "engine.")) else str(error)
        raise type(error)(message) from None
    # The teacher scores the policy's token ids, so both need the same tokenizer.
    try:
        check_tokenizer(tokenizer, model)
    except UsageError:
        raise UsageError(
            f"teacher.model_dir={teacher.model_dir} has a different tokenizer from the policy, so it would score other tokens. "
            "Fix: use a teacher of the policy's family"
        ) from None
    return model


def check_self_teacher(
    teacher: TeacherConfig,
    task: Task,
    tokenizer: ChatTokenizer,
    group: Group,
    sampling: SamplingConfig,
    engine: EngineConfig,
) -> None:
    """Try the prompt of `teacher.self` on a problem, with an empty sample whose reward is 0.

    Raises:
        UsageError: the task has an agent, the function of `teacher.prompt` was not found, or its
            prompt leaves no room for a completion.
        UserCodeError: the function raised an error.
    """
    if isinstance(task, AgentTask):
        raise UsageError(
            "teacher.self=true does not support a task with an agent, which writes its own prompts. Fix: use a task "
            "with a grader or an environment, or set teacher.model_dir"
        )
    none = np.empty(0, np.int32)
    sample = Sample(Completion(none, none.astype(np.float32), none, "stop"), outcome=Score(0.0))
    ids = SelfTeacher(None, tokenizer, str(teacher.prompt)).prompt_ids(replace(group, samples=(sample,)), sample)
    # vLLM samples one more token when it scores a text.
    if (needed := len(ids) + sampling.max_tokens + 1) > engine.max_model_len:
        raise UsageError(
            f"engine.max_model_len={engine.max_model_len}: the teacher's prompt of problem {group.problem.id!r} has "
            f"{len(ids)} tokens, and sampling.max_tokens={sampling.max_tokens}. Fix: set engine.max_model_len={needed} "
            "or more, or shorten the prompt of teacher.prompt"
        )


def build_model_components(
    cfg: RunSettings, device: torch.device, shards: int = 1
) -> tuple[HFModel, TransformerDecoder, FullWeights | LoRAWeights, Precision]:
    """Build the model without weights, the trained parameters and the precision.

    Args:
        cfg: the settings.
        device: the training device.
        shards: the number of shards of the weights.

    Returns:
        The model directory, the model on the meta device, its trained parameters, and the
        precision.

    Raises:
        UsageError: the model, its adapters or its precision are unsupported.
    """
    hf_model, model = HFModel(cfg.model_dir), build_on_meta(cfg.model.instantiate)
    # These and the precision also determine the engine's settings and the published weights.
    trained_weights = select_trained_weights(model, hf_model, section=cfg.model, adapters=cfg.adapters, shards=shards)
    dtype = chosen_dtype(cfg.dtype, device.type, cfg.precision.fp8)
    prefetches = resolve_prefetch_steps(cfg.staleness, cfg.prefetch_steps) > 0
    threads = engine_threads(cfg.engine, sum(p.numel() for p in model.parameters()), concurrent=prefetches)
    engine = cfg.engine.with_trainer_defaults(dtype, threads)
    if cfg.teacher.self:
        # This engine scores texts, too.
        engine = replace(engine, max_num_batched_tokens=engine.max_num_batched_tokens or BATCHED_TOKENS)
    precision = Precision(
        cfg.precision,
        model,
        hf_model,
        dtype=dtype,
        engine=trained_weights.configure_engine(engine),
        device=device,
        adapter=trained_weights.spec,
        publish_mode=trained_weights.publish_mode,
    )
    return hf_model, model, trained_weights, precision
