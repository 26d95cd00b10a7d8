"""GRPO: generate, grade, pack, train, publish, repeat. Runs on one device, or on N under torchrun.

    tune run grpo_full --config grpo/tiny
    tune run grpo_lora --config grpo/tiny_lora
    tune run grpo_async --config grpo/tiny_async
    CUDA_VISIBLE_DEVICES=0,1,2 tune run --nproc_per_node 3 grpo_full --config grpo/qwen2_5_7B_full

`tune` lists this one file under three names. The config selects full weights or LoRA adapters, the
precision, and synchronous or asynchronous training.

Data flow of a step:
    list[Group]       generate_rollouts: prompts with G graded completions each, on rank 0
    list[Group]       compute_advantages: reward - baseline -> one advantage per completion
    list[list[Row]]   pack: for each update, rows of T tokens with L labels; completions share a prompt
    LabelLogprobs     Learner.forward_backward: log-probs and entropies [L], then the scalar loss
    weights           Learner.step, then a weight sync to the engine

`loss:` names the class of the loss, which may be defined in this file. To change the algorithm, run
`tune cp -n grpo_full my_grpo.py`, edit the copy, and run `tune run my_grpo.py --config ...`. Rank 0
owns the engine, the graders and the files. Every rank trains on its share of the packed rows.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from omegaconf import DictConfig
from pydantic import Field, PositiveFloat
from pydantic.dataclasses import dataclass

from torchtune_ext.cli.plugin import parse
from torchtune_ext.grading import Grader
from torchtune_ext.pipeline.advantages import AdvantageStats, assign_advantages, select_groups
from torchtune_ext.pipeline.groups import Group, outcomes_for_task
from torchtune_ext.pipeline.packing import Row, pack_updates
from torchtune_ext.pipeline.rollout import sample_held_out
from torchtune_ext.pipeline.rollout_store import RolloutStore
from torchtune_ext.pipeline.staleness import resolve_prefetch_steps
from torchtune_ext.policy.builder import build_policy
from torchtune_ext.run.stop import StopSignals
from torchtune_ext.sampling.engine import Engine
from torchtune_ext.settings.components import Component
from torchtune_ext.settings.config import load_config
from torchtune_ext.settings.sections import FORBID_UNKNOWN_KEYS, Seed
from torchtune_ext.setup import config_sections
from torchtune_ext.setup.header import print_engine_ready, print_run_header
from torchtune_ext.setup.run_components import build_components
from torchtune_ext.telemetry import step_metrics
from torchtune_ext.telemetry.metrics import MetricLogger
from torchtune_ext.telemetry.profile import StepProfiler
from torchtune_ext.telemetry.progress import Progress
from torchtune_ext.training.checkpoints import Checkpoints, RunState, find_resume_checkpoint, status_message
from torchtune_ext.training.distributed import init_ranks
from torchtune_ext.training.learner import Learner, make_schedule, mean_over_updates
from torchtune_ext.training.recipe_runner import close_all, run_recipe

if TYPE_CHECKING:
    from torchtune_ext.training.teacher import Teacher

TUNE_NAMES = ("grpo_full", "grpo_lora", "grpo_async")


@dataclass(config=FORBID_UNKNOWN_KEYS, kw_only=True)
class Config:
    """Every config key of the recipe."""

    output_dir: str = Field(description="run folder: metrics, rollouts, checkpoints")
    model_dir: str = Field(description="starting weights and tokenizer, Hugging Face format")
    model: Component = Field(
        description="torchtune model builder that fits model_dir; a LoRA builder trains adapters only"
    )
    adapters: config_sections.AdapterConfig = Field(
        default=config_sections.AdapterConfig(), description="how LoRA adapters are published and saved"
    )
    tokenizer: Component = Field(description="messages -> token ids")
    task: Component = Field(description="training problems and their reward function")
    evaluation: config_sections.EvaluationConfig = Field(
        default=config_sections.EvaluationConfig(), description="held-out evaluation"
    )
    grader: config_sections.GraderConfig = Field(
        default=config_sections.GraderConfig(), description="grader processes and their time limit"
    )
    agent: config_sections.AgentConfig = Field(
        default=config_sections.AgentConfig(), description="limits, failures and address of a task's agents"
    )
    preset: str | None = Field(
        default="grpo", description="published method: its loss, advantage, aggregation, ...; your keys override it"
    )
    loss: Component = Field(description="policy loss per token; `preset` sets it")
    teacher: config_sections.TeacherConfig = Field(
        default=config_sections.TeacherConfig(), description="model that scores completions for distillation"
    )
    optimizer: Component = Field(description="torch optimizer")
    engine: config_sections.EngineConfig = Field(
        default=config_sections.EngineConfig(), description="vLLM engines: memory, GPUs, deadlines"
    )
    sampling: config_sections.SamplingConfig = Field(description="sampling parameters of completions")
    seed: Seed = Field(default=0, description="seed of sampling, torch and the problem order")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="device of the trainer")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description="dtype of forward and backward; auto: bfloat16 with FP8 or native support, else float32; trained weights: "
        "float32",
    )
    precision: config_sections.PrecisionConfig = Field(
        default=config_sections.PrecisionConfig(), description="precision of linear layers in trainer and engine"
    )
    max_steps: int = Field(ge=1, description="training steps")
    prompts_per_step: int = Field(default=32, ge=1, description="groups per step")
    samples_per_prompt: int = Field(default=16, ge=2, description="completions per group")
    staleness: int = Field(
        default=0, description="maximum staleness of a group, in policy versions; 0: sampling and training alternate"
    )
    prefetch_steps: int | None = Field(
        default=None, description="steps sampled in advance, at most staleness; null: 1, or 0 if staleness is 0"
    )
    rollouts: config_sections.RolloutConfig = Field(
        default=config_sections.RolloutConfig(), description="timeout of rollouts"
    )
    replay: str | None = Field(
        default=None, description="run folder; train on its stored rollouts instead of sampling with an engine"
    )
    refill_rounds: int = Field(
        default=0, ge=0, description="maximum extra sampling rounds per step to replace zero-variance groups"
    )
    updates_per_step: int = Field(
        default=1, ge=1, description="optimizer updates per iteration of a step, each on its share of the groups"
    )
    iterations_per_step: int = Field(
        default=1, ge=1, description="passes of a step over its updates; each pass trains on all samples of the step"
    )
    row_tokens: int = Field(default=16384, description="maximum tokens per packed row, at least engine.max_model_len")
    advantage: config_sections.AdvantageConfig = Field(
        default=config_sections.AdvantageConfig(), description="rewards of a group -> advantages"
    )
    aggregation: Literal["sequence", "token", "constant"] = Field(
        default="sequence", description="loss: mean over completions, mean over tokens, or sum divided by a constant"
    )
    schedule: config_sections.ScheduleConfig = Field(
        default=config_sections.ScheduleConfig(), description="learning-rate schedule"
    )
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="maximum gradient norm; null: no clipping")
    activation_checkpointing: bool = Field(default=False, description="recompute activations in the backward")
    compile: bool = Field(default=False, description="torch.compile each layer")
    max_mismatch: PositiveFloat | Literal["auto"] = Field(
        default="auto",
        description="mean |trainer - engine log-prob| (nats) that stops the run; auto: 2 x rounding noise, >= 0.001 "
        "(replay: 0.05), + margin",
    )
    checkpoints: config_sections.CheckpointConfig = Field(
        default=config_sections.CheckpointConfig(), description="checkpoint interval and retention"
    )
    resume_from_checkpoint: bool = Field(default=False, description="resume from the newest checkpoint in output_dir")
    ranks: config_sections.RanksConfig = Field(
        default=config_sections.RanksConfig(), description="sharding and timeouts of several ranks"
    )
    logging: config_sections.LoggingConfig = Field(
        default=config_sections.LoggingConfig(), description="metric sinks in addition to the run folder"
    )
    profile: list[int] = Field(default_factory=list, description="steps that torch.profiler traces, e.g. [3, 4]")
    dry_run: bool | str | None = Field(
        default=False, description='true: check config and memory, then exit; "4x80": plan for 4 GPUs of 80 GB'
    )


def group_relative_advantages(rewards_G: np.ndarray) -> np.ndarray:
    """Computes the advantages of a group from its rewards, both [G], as in GRPO (arXiv 2402.03300).

    The rewards are not all equal: `assign_advantages` handles zero-variance groups. If the config
    changes `advantage.baseline`, `scale` or `pass_k`, the formulas of `AdvantageConfig` apply
    instead.
    """
    baseline, scale = rewards_G.mean(), rewards_G.std()
    return (rewards_G - baseline) / scale


class GRPORecipe:
    # Only rank 0 sets these. `graders` holds the graders of the task and of the held-out task. A
    # replay needs no engine.
    engine: Engine | None = None
    teacher: "Teacher | None" = None
    graders: Sequence[Grader] = ()

    def __init__(self, cfg: Config):
        self.cfg = cfg
        # After a stop signal, the recipe finishes and saves the current step. The second argument
        # returns the last message of the run.
        self.stop = StopSignals(
            cfg.checkpoints.stop_grace_s,
            lambda: status_message(self.step, cfg.max_steps, getattr(self, "checkpoints", None)),
        )
        # The running step, or the last one. Its updates make the policy version of the same number.
        self.step = 0
        self.last_eval: float | None = None

    def setup(self) -> None:
        """Checks the config, opens the run folder, builds the learner while the engine starts."""
        cfg = self.cfg
        # In asynchronous training the engine needs CPU threads while torch computes, so torch gets
        # fewer.
        prefetching = resolve_prefetch_steps(cfg.staleness, cfg.prefetch_steps) > 0 and not cfg.replay
        self.ranks = init_ranks(
            cfg.device,
            cfg.ranks,
            concurrent_engine=prefetching,
            output_dir=cfg.output_dir,
            shares_gpu=bool(cfg.engine.sleep),
        )
        # This seeds adapter initialization and dropout. Sampling requests have their own seeds.
        torch.manual_seed(cfg.seed)

        # Config errors are reported here, before the run folder is locked or changed.
        self.components = components = build_components(cfg, self.ranks)
        self.loss, self.sampling, self.problems = components.loss, components.sampling, components.problems
        if self.ranks.is_main:
            components.run_preflight_checks()
        self.profile = StepProfiler(cfg.profile, cfg.output_dir, self.ranks.rank)
        resume = self._open_run_folder(cfg.checkpoints)
        if self.ranks.is_main:
            print_run_header(components, group_relative_advantages)
            if not resume:
                self.open_logs()
        # The engine loads in its own process while this process builds the policy. With
        # `engine.sleep` it has measured its GPUs before any rank allocates memory there.
        self.ranks.call_on_main(lambda: self._setup_engine(components.engine_config))
        self._setup_data(cfg.rollouts)
        self._setup_model(cfg.model, cfg.optimizer, cfg.schedule)

        # A resumed run truncates its metrics and rollouts to the checkpoint, so load the checkpoint
        # first: if it is damaged, the logs stay complete.
        if resume:
            self.load_checkpoint(resume)
            if self.ranks.is_main:
                self.open_logs()

        # Only rank 0 has an engine. The other ranks sleep until it is ready. Without this call they
        # would busy-wait in the collectives of the first weight sync.
        startup_seconds = self.ranks.call_on_main(
            lambda: [engine.wait_ready() for engine in (self.engine, self.teacher) if engine]
        )
        if self.engine:
            print_engine_ready(max(startup_seconds))
            components.precision.write_fp8_report(cfg.output_dir, self.policy)
        self.progress = Progress(cfg.max_steps, self.ranks.rank)
        # The mismatch gate stops a run if the engine samples from another policy than the trainer
        # updates. Every weight sync must pass it, too.
        self.mismatch_gate = components.make_mismatch_gate(self.learner)
        self.publisher = components.make_publisher(self.engine, self.learner, self.mismatch_gate)

    def _open_run_folder(self, config: config_sections.CheckpointConfig) -> Path | None:
        """Locks the run folder. Returns the checkpoint to resume from, or None for a new run."""
        cfg, components = self.cfg, self.components
        folder = run_identity = None
        if self.ranks.is_main:
            self.folder = folder = components.open_folder()
            # A checkpoint records its run, base weights and adapter, so that loading a checkpoint
            # of another run fails with an error that names the difference.
            run_identity = components.checkpoint_identity(folder.run.id)
        self.checkpoints = Checkpoints(
            f"{cfg.output_dir}/checkpoints", run_identity, config, components.prompt_format_note
        )
        return find_resume_checkpoint(self.checkpoints, folder, cfg.resume_from_checkpoint, cfg.max_steps)

    def _setup_engine(self, config: config_sections.EngineConfig) -> None:
        """Starts the engine and the teacher's engine on rank 0. A replay starts no engine."""
        if self.components.replay:
            return
        self.engine = Engine(self.cfg.model_dir, config, self.cfg.output_dir)
        self.teacher = self.components.make_teacher(self.engine)
        self.engine.start()
        if self.teacher:
            self.teacher.start()

    def _setup_data(self, config: config_sections.RolloutConfig) -> None:
        """Starts the graders and builds the rollout source."""
        if self.engine:
            self.graders = self.components.open_graders()
        # The rollout source samples in advance as far as `staleness` and `prefetch_steps` allow, or
        # replays stored rollouts.
        self.source = self.components.make_source(self.engine, self.graders, config)

    def _setup_model(self, model: Component, optimizer: Component, schedule: config_sections.ScheduleConfig) -> None:
        """Builds the policy from the weights in model_dir, its optimizer and its learner."""
        cfg = self.cfg
        self.timer = step_metrics.Timer()
        self.policy = build_policy(
            model.instantiate,
            self.components.hf_model,
            device=self.ranks.device,
            compute_dtype=self.components.precision.dtype,
            world_size=self.ranks.world_size,
            shard_within=self.ranks.shard_within,
            activation_checkpointing=cfg.activation_checkpointing,
            compile_layers=cfg.compile,
            seed=cfg.seed,
            fp8=self.components.precision.trainer_fp8,
        )
        # Master weights are float32 in every precision: bfloat16 would round away the larger part
        # of an update at lr 1e-5.
        self.optimizer = optimizer.instantiate(params=self.policy.trainable_parameters())
        self.learner = Learner(
            self.policy,
            self.loss,
            self.ranks,
            # Trainer log-probs must match the sampling distribution, so the temperature divides the
            # trainer's logits, too.
            temperature=self.sampling.temperature,
            optimizer=self.optimizer,
            schedule=make_schedule(schedule, cfg.max_steps * cfg.updates_per_step * cfg.iterations_per_step),
            max_grad_norm=cfg.max_grad_norm,
            timer=self.timer,
        )

    def open_logs(self) -> None:
        """Opens metrics and rollouts on rank 0. A resumed run truncates both to its checkpoint."""
        first_step = self.step + 1 if self.step else None
        self.folder.write_record()
        self.metric_logger = MetricLogger(
            self.cfg.output_dir, self.cfg.logging, self.folder.run, first_step, status=lambda: self.stop.exit_status
        )
        self.rollouts = RolloutStore(self.cfg.output_dir, resume_step=first_step, show=self.metric_logger.show)

    def train(self) -> None:
        """Generates, grades, packs, trains and publishes in a loop. Change the algorithm here."""
        cfg, timer = self.cfg, self.timer
        # The engine has loaded model_dir. After a resume, with an adapter or in FP8 the policy
        # differs from these files, so publish it before sampling.
        with self.progress.phase("first weight sync: not finished"):
            self.publisher.publish(self.step)
        self.source.on_publish(self.step)
        if self.step == 0:
            with timer("eval"):
                self.log(self.evaluate())

        self.stop.defer_sigterm()  # from here on, SIGTERM takes effect at the end of a step
        timer.lap()  # start timing the first step
        while self.step < cfg.max_steps:
            self.step += 1
            self.profile.start_trace(self.step)
            self.last_eval = None  # a checkpoint records the held-out reward of its own weights only

            # The rollout source returns complete, graded groups. With staleness 0 the policy of
            # this step sampled all of them. Otherwise no token is older than `staleness` versions.
            # Advantages are computed per group.
            with timer("sample"):
                groups, metrics = self.generate_rollouts()
                groups, rollout_metrics = self.record_rollouts(groups)

            # The completions in a row share one copy of their prompt. The rows of all ranks take
            # about the same compute.
            with timer("pack"):
                updates, pack_metrics = self.pack(groups)

            # One or more optimizer updates on these rows produce the policy version of this step.
            with timer("train"):
                self.publisher.onload()  # frozen weights, if adapters share the GPU with the engine
                metrics |= rollout_metrics | pack_metrics | self.update(updates)

            # The engine loads the new weights in memory, and the canary verifies that it samples
            # with them. Then the source submits groups of later steps, as far as `staleness` and
            # `prefetch_steps` allow.
            with timer("publish"):
                metrics |= self.publisher.publish(self.step)
                self.source.on_publish(self.step)

            last = self.step == cfg.max_steps
            if last or self.step % cfg.evaluation.every == 0:
                with timer("eval"):
                    metrics |= self.evaluate()
            # Metrics are written before the checkpoint, so that a run that resumes from it has
            # them. The timing metrics follow, because they include the seconds of the save.
            self.log(metrics | step_metrics.memory_metrics())

            # The ranks agree on whether to stop, because SIGTERM may not reach all ranks in the
            # same step.
            stopping = self.stop.agree_to_stop(self.ranks.any)
            if last or stopping or self.step % cfg.checkpoints.every == 0:
                self.save_checkpoint()
            self.log(step_metrics.timing_metrics(metrics, timer.lap(), cfg.iterations_per_step))
            self.profile.close()
            if stopping and not last:
                self.stop.raise_stopped()

    def generate_rollouts(self) -> tuple[list[Group], dict[str, float]]:
        """Returns graded groups with advantages, and metrics; both are empty except on rank 0."""
        cfg = self.cfg
        if not self.ranks.is_main:
            return [], {}
        groups, metrics = [], {}
        num_missing = cfg.prompts_per_step
        for refill_round in range(1 + cfg.refill_rounds):
            with self.progress.sampling_bar(num_missing * cfg.samples_per_prompt) as bar:
                if refill_round:
                    new_groups, source_metrics = self.source.refill(num_missing, refill_round, self.timer, bar)
                else:
                    new_groups, source_metrics = self.source.take(num_missing, self.timer, bar)
            if self.teacher:
                with self.timer("teacher"):
                    new_groups = self.teacher.score_groups(new_groups)
            groups, stats = self.compute_advantages(groups + new_groups)
            metrics |= source_metrics | stats.metrics()
            # A refill replaces the zero-variance groups.
            num_missing = cfg.prompts_per_step - stats.num_nonzero_groups
            if num_missing <= 0:
                break
        return groups, metrics

    def compute_advantages(self, groups: list[Group]) -> tuple[list[Group], AdvantageStats]:
        """Sets the advantages of each group. Returns the groups and their counts."""
        # A zero-variance group has no policy gradient. It is trained on only if the loss has a term
        # that does not depend on the advantage (a KL penalty, an entropy bonus).
        return assign_advantages(
            groups,
            self.cfg.advantage,
            self.sampling.max_tokens,
            train_all=self.learner.loss_requirements.train_zero_advantage,
            formula=group_relative_advantages,
        )

    def record_rollouts(self, groups: list[Group]) -> tuple[list[Group], dict[str, float]]:
        """Stores all groups. Returns the groups to train on, and metrics.

        Ranks other than 0 store nothing and return empty values.
        """
        if not self.ranks.is_main:
            return [], {}
        # Groups that a refill has replaced are stored, with `in_loss=False`, but not trained on.
        # The rollout metrics describe what was sampled, so they include these groups unchanged.
        trained_groups, stored_groups = select_groups(groups, self.cfg.prompts_per_step)
        with self.timer("store"):
            self.rollouts.write(self.step, stored_groups)
        # An adaptive task chooses its next problems from these outcomes.
        metrics = step_metrics.rollout_metrics(groups) | self.problems.observe(
            self.step, outcomes_for_task(stored_groups), self.folder.path
        )
        if self.engine:
            self.engine.sleep()  # frees GPU memory if engine and trainer share a GPU
            metrics |= step_metrics.engine_metrics(self.engine.stats())
        return trained_groups, metrics

    def pack(self, groups: list[Group]) -> tuple[list[list[Row]], dict[str, float]]:
        """Returns this rank's rows for every update of the step, and packing metrics on rank 0."""
        cfg, updates, metrics = self.cfg, [], {}
        if self.ranks.is_main:
            updates, stats = pack_updates(
                groups,
                cfg.updates_per_step,
                cfg.row_tokens,
                aggregation=cfg.aggregation,
                aggregation_constant=self.sampling.max_tokens,
                pad_id=self.components.tokenizer.pad_id,
                cost_model=self.learner.cost_model,
            )
            metrics = stats.metrics()
        # FSDP all-gathers the weights layer by layer on all ranks, so every rank needs the same
        # number of rows. Some rows may be empty.
        return self.ranks.scatter(updates), metrics

    def update(self, updates: list[list[Row]]) -> dict[str, float]:
        """Runs the optimizer updates of this step on this rank's rows. Returns metrics."""
        # The policy still has the version of the previous step.
        cfg, version = self.cfg, self.step - 1
        # The learning-rate schedule counts planned updates. An update that is skipped because all
        # groups had zero variance counts, too. After a resume with another `updates_per_step` or
        # `iterations_per_step`, earlier steps count with the new value.
        self.learner.update_index = version * cfg.updates_per_step * cfg.iterations_per_step
        # The proximal policy is the policy before the first update of this step. The first update
        # gets its log-probs from its own forward pass. Later updates start from a changed policy,
        # so their proximal log-probs are computed here, before any update.
        proximal_logprobs = self.learner.proximal_logprobs(updates, cfg.iterations_per_step)
        reference_logprobs = self.learner.reference_logprobs(updates)

        mismatch_metrics, update_metrics = {}, []
        with self.progress.training_bar(sum(map(len, updates)) * cfg.iterations_per_step) as bar:
            # Every iteration makes the same updates in the same order.
            for i in [*range(len(updates))] * cfg.iterations_per_step:
                # `logprobs` are the proximal policy's in every iteration.
                logprobs, metrics = self.learner.forward_backward(
                    updates[i],
                    proximal=proximal_logprobs[i],
                    reference=reference_logprobs[i],
                    version=version,
                    on_row=lambda row: bar.add(1, row.num_labels),
                )
                proximal_logprobs[i] = logprobs
                if not update_metrics:
                    # The mismatch gate checks before the first update of the step, so that no
                    # update is made on log-probs of another policy.
                    mismatch_metrics = self.mismatch_gate.check(
                        updates[i], logprobs, f"step {self.step}, before its first update", version
                    ).metrics("mismatch")
                # If the gradient is not finite, the error names the checkpoint to resume from.
                advice = partial(self.checkpoints.failed_update_advice, self.step)
                update_metrics.append(self.learner.step(metrics, advice=advice))
        return mismatch_metrics | mean_over_updates(update_metrics)

    def evaluate(self) -> dict[str, float]:
        """Evaluates the held-out problems, sampled and greedy; returns {} without an engine."""
        if self.components.eval_task is None or not self.engine:
            return {}
        _, eval_grader = self.graders
        metrics = step_metrics.evaluation_metrics(
            *sample_held_out(
                self.components.eval_problems.problems,
                self.cfg.evaluation.samples,
                # All evaluations share one seed, which reduces the sampling noise between two
                # evaluations.
                replace(self.sampling, seed=self.cfg.seed),
                self.engine,
                self.components.tokenizer,
                eval_grader,
                make_progress=self.progress.sampling_bar,
                timer=self.timer,
                deadline_s=self.cfg.rollouts.deadline_s,
            ),
            skipped=self.components.eval_problems.num_skipped,
            first=self.step == 0,
        )
        # The next checkpoint records this reward, which selects the best checkpoint.
        self.last_eval = metrics.get("eval/reward_sampled")
        return metrics

    def log(self, metrics: dict[str, float]) -> None:
        if self.ranks.is_main:
            with self.timer("log"):
                self.metric_logger.log(self.step, metrics)
                self.progress.log_step(self.step, metrics)

    def save_checkpoint(self) -> None:
        """Saves weights, optimizer, random state and recipe state. Call it on all ranks."""
        # `source` holds the graded groups of later steps, and `throttle` holds the engine's
        # concurrency limit. With both, a resumed run makes the same steps as an uninterrupted run.
        state = RunState(
            step=self.step,
            cursor=self.problems.cursor,
            throttle=self.engine.state_dict() if self.engine else {},
            source=self.source.state_dict(),
            task=self.problems.state_dict(),
            loss=self.learner.loss_state,
        )
        with self.stop.protect_save(), self.timer("save"):
            hash_seconds = self.checkpoints.save(
                self.step,
                self.policy.model,
                self.optimizer,
                self.components.make_exporter(self.policy.model),
                asdict(state),
                self.last_eval,
            )
            self.timer.seconds["save/hash"] = hash_seconds

    def load_checkpoint(self, path: Path) -> None:
        state = RunState.from_recipe_state(self.checkpoints.load(path, self.policy.model, self.optimizer))
        self.step = state.step
        # A finite task continues after the problems that were already used.
        self.problems.cursor = state.cursor
        self.problems.load_state_dict(state.task)
        self.learner.loss_state.update(state.loss)
        self.source.load_state_dict(state.source, self.step)
        if self.engine:
            self.engine.load_state_dict(state.throttle)

    def cleanup(self) -> None:
        # A run that stops early may not have created all of these. The folder's lock is released
        # last.
        names = ("source", "rollouts", "metric_logger", "profile", "engine", "teacher")
        close_all(*(getattr(self, name, None) for name in names), *self.graders, getattr(self, "folder", None))


@parse
def recipe_main(cfg: DictConfig) -> None:
    settings = load_config(Config, cfg)
    # A dry run exits here: status 0 if the run would start and fit in memory, else status 2.
    if settings.dry_run:
        from torchtune_ext.setup.dry_run import dry_run

        dry_run(settings)
    run_recipe(partial(GRPORecipe, settings))


if __name__ == "__main__":
    sys.exit(recipe_main())
