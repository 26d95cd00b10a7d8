"""GRPO: generate, grade, pack, train, publish, repeat. One device, or N under torchrun.

    tune run grpo_full --config grpo/tiny
    tune run grpo_lora --config grpo/tiny_lora
    tune run grpo_async --config grpo/tiny_async
    CUDA_VISIBLE_DEVICES=0,1,2,3 tune run --nproc_per_node 4 grpo_full --config grpo/qwen2_5_7B_full

`tune` knows this one file by three names. The config says what is trained, all weights or adapters, in which precision, and
whether the engine samples ahead while the trainer works.

What flows through a step:
    list[Group]       generate_rollouts: P prompts with G graded completions each, on rank 0
    list[Group]       compute_advantages: reward - baseline -> one advantage per completion
    list[list[Row]]   pack: rows of T tokens with L labels for each update; a prompt is stored once for its completions
    LabelLogprobs     Learner.forward_backward: log-probs and entropies of the labels [L], then the loss, a scalar
    weights           Learner.step, then a weight sync to the engine

The loss is a class that `loss:` names; it may stand in this file. To change the algorithm: `tune cp -n grpo_full my_grpo.py`,
edit, `tune run my_grpo.py --config ...`.
Rank 0 owns the engine, the graders and the files; every rank trains on its share of the packed rows.
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
from torchtune_ext.settings.records import RECORD, Seed
from torchtune_ext.setup import config_records
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


@dataclass(config=RECORD, kw_only=True)
class Config:
    """Every config key of the recipe."""

    output_dir: str = Field(description="run folder: metrics, rollouts, checkpoints")
    model_dir: str = Field(description="starting weights and tokenizer, Hugging Face format")
    model: Component = Field(
        description="torchtune model builder that fits model_dir; a LoRA builder trains adapters only"
    )
    adapters: config_records.AdapterConfig = Field(
        default=config_records.AdapterConfig(), description="publishing and saving of LoRA adapters"
    )
    tokenizer: Component = Field(description="messages -> token ids")
    task: Component = Field(description="training problems and their grader")
    evaluation: config_records.EvaluationConfig = Field(
        default=config_records.EvaluationConfig(), description="held-out evaluation"
    )
    grader: config_records.GraderConfig = Field(
        default=config_records.GraderConfig(), description="grader processes and their time limit"
    )
    preset: str | None = Field(
        default="grpo", description="published method: values of loss, advantage, aggregation, ... not set here"
    )
    loss: Component = Field(description="objective per token")
    teacher: config_records.TeacherConfig = Field(
        default=config_records.TeacherConfig(), description="model that scores completions for distillation"
    )
    optimizer: Component = Field(description="torch optimizer")
    engine: config_records.EngineConfig = Field(
        default=config_records.EngineConfig(), description="vLLM engines: memory, GPUs, deadlines"
    )
    sampling: config_records.SamplingConfig = Field(description="sampling parameters of completions")
    seed: Seed = Field(default=0, description="seed of sampling, torch and the order of a finite task")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="device of the trainer")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description="dtype of forward and backward; auto: bfloat16 where the device computes in it; masters are float32",
    )
    precision: config_records.PrecisionConfig = Field(
        default=config_records.PrecisionConfig(), description="precision flow of linear layers"
    )
    max_steps: int = Field(ge=1, description="training steps")
    prompts_per_step: int = Field(default=32, ge=1, description="groups per step")
    samples_per_prompt: int = Field(default=16, ge=2, description="completions per group")
    staleness: int = Field(default=0, description="policy versions that a completion may lag behind; 0: on-policy")
    prefetch_steps: int | None = Field(
        default=None, description="steps sampled ahead, at most staleness; null: 1, or 0 with staleness 0"
    )
    rollouts: config_records.RolloutConfig = Field(
        default=config_records.RolloutConfig(), description="deadline of rollouts"
    )
    replay: str | None = Field(
        default=None, description="run folder whose stored rollouts are trained on again, without an engine"
    )
    refill_rounds: int = Field(
        default=0, ge=0, description="most further sampling rounds that replace zero-variance groups"
    )
    updates_per_step: int = Field(default=1, ge=1, description="optimizer updates per step")
    row_tokens: int = Field(default=16384, description="tokens of a packed row")
    advantage: config_records.AdvantageConfig = Field(
        default=config_records.AdvantageConfig(), description="rewards of a group -> advantages"
    )
    aggregation: Literal["sequence", "token", "constant"] = Field(
        default="sequence", description="loss: mean over completions, mean over tokens, or sum over a constant"
    )
    schedule: config_records.ScheduleConfig = Field(
        default=config_records.ScheduleConfig(), description="learning-rate schedule"
    )
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="gradient clipping; null: off")
    activation_checkpointing: bool = Field(default=False, description="recompute activations in the backward")
    compile: bool = Field(default=False, description="torch.compile each layer")
    max_mismatch: PositiveFloat | Literal["auto"] = Field(
        default="auto",
        description="mean |trainer - engine log-prob| (nats) that stops the run; auto: from measured rounding",
    )
    checkpoints: config_records.CheckpointConfig = Field(
        default=config_records.CheckpointConfig(), description="checkpoint interval and retention"
    )
    resume_from_checkpoint: bool = Field(default=False, description="resume from the newest checkpoint in output_dir")
    ranks: config_records.RanksConfig = Field(
        default=config_records.RanksConfig(), description="sharding and deadlines of several ranks"
    )
    logging: config_records.LoggingConfig = Field(
        default=config_records.LoggingConfig(), description="metric sinks next to the run folder"
    )
    profile: list[int] = Field(default_factory=list, description="steps that torch.profiler traces, e.g. [3, 4]")
    dry_run: bool | str | None = Field(
        default=False, description='true: check settings and memory, then exit; "4x80": for 4 GPUs of 80 GB'
    )


def group_relative_advantages(rewards_G: np.ndarray) -> np.ndarray:
    """Reward -> baseline -> advantage inside a group of G samples, as in GRPO (arXiv 2402.03300).

    A config with another `advantage.baseline`, `scale`, `pass_k` or `credit` takes the formulas of `AdvantageConfig`.
    """
    baseline, scale = rewards_G.mean(), rewards_G.std()
    return (rewards_G - baseline) / scale


class GRPORecipe:
    # Rank 0 has an engine, except in a replay, and graders of the task and of the held-out task.
    engine: Engine | None = None
    teacher: "Teacher | None" = None
    graders: Sequence[Grader] = ()

    def __init__(self, cfg: Config):
        self.cfg = cfg
        # A signal is noted, and the step that it interrupts is finished and saved; the second argument is what the run
        # says last.
        self.stop = StopSignals(
            cfg.checkpoints.stop_grace_s,
            lambda: status_message(self.step, cfg.max_steps, getattr(self, "checkpoints", None)),
        )
        self.step = self.version = 0
        self.last_eval: float | None = None

    def setup(self) -> None:
        """Checks what can be checked, opens the run's folder, starts the engine, and builds the learner meanwhile."""
        cfg = self.cfg
        # An engine that samples while the trainer works needs a core of its own, so fewer are left to torch.
        prefetching = resolve_prefetch_steps(cfg.staleness, cfg.prefetch_steps) > 0 and not cfg.replay
        self.ranks = init_ranks(cfg.device, cfg.ranks, concurrent_engine=prefetching, output_dir=cfg.output_dir)
        # Adapters begin at random and dropout draws. Samples have seeds of their own, whatever torch has drawn before.
        torch.manual_seed(cfg.seed)

        # What is wrong with the settings is said here, before anything is touched. Then the folder is locked.
        self.components = components = build_components(cfg, self.ranks)
        self.loss, self.sampling, self.problems = components.loss, components.sampling, components.problems
        if self.ranks.is_main:
            components.check_start()
        resume = self._setup_checkpointing(cfg.checkpoints)
        if self.ranks.is_main and not resume:
            self.open_logs()
        # The engine loads in a process of its own while the policy is built here.
        self._setup_engine(components.precision.engine)
        self._setup_data(cfg.rollouts)
        self._setup_model(cfg.model, cfg.optimizer, cfg.schedule)

        # Metrics and rollouts of a resumed run are cut to its checkpoint, once nothing can be wrong with it.
        if resume:
            self.load_checkpoint(resume)
            if self.ranks.is_main:
                self.open_logs()

        # Only rank 0 has an engine. The others sleep until it is ready: in the first publication they would wait
        # busily.
        engines = [each for each in (self.engine, self.teacher) if each]
        waited = self.ranks.call_on_main(lambda: [engine.wait_ready() for engine in engines])
        if self.engine:
            print_engine_ready(max(waited))
            components.precision.write_fp8_report(cfg.output_dir, self.policy)
        self.progress = Progress(cfg.max_steps, self.ranks.rank)
        # The gate stops a run whose engine samples from another policy than the trainer updates; a weight sync has to
        # pass it, too.
        self.mismatch_gate, self.publisher = components.make_publisher(self.engine, self.learner)

    def _setup_checkpointing(self, config: config_records.CheckpointConfig) -> Path | None:
        """Locks the run's folder, and returns the checkpoint to resume from."""
        cfg, components, run_identity = self.cfg, self.components, None
        self.profile = StepProfiler(cfg.profile, cfg.output_dir, self.ranks.rank)
        if self.ranks.is_main:
            self.folder = components.open_folder()
            # A checkpoint knows its run, its weights and its adapter, so that one of another is refused by name.
            run_identity = components.checkpoint_identity(self.folder.run.id)
        self.checkpoints = Checkpoints(f"{cfg.output_dir}/checkpoints", run_identity, config, components.prompt_source)
        folder = self.folder if self.ranks.is_main else None
        resume = find_resume_checkpoint(self.checkpoints, folder, cfg.resume_from_checkpoint, cfg.max_steps)
        if self.ranks.is_main:
            print_run_header(components)
        return resume

    def _setup_engine(self, config: config_records.EngineConfig) -> None:
        """Rank 0: starts the vLLM engines, and the teacher's. A replay trains on stored rollouts and samples nothing."""
        if not self.ranks.is_main or self.components.replay:
            return
        self.engine = Engine(self.cfg.model_dir, config, self.cfg.output_dir)
        self.teacher = self.components.make_teacher()
        self.engine.start()
        if self.teacher:
            self.teacher.start()

    def _setup_data(self, config: config_records.RolloutConfig) -> None:
        """Starts the graders, and what hands out the groups of a step."""
        if self.engine:
            self.graders = self.components.open_graders()
        # Groups are sampled as far ahead as `staleness` and `prefetch_steps` allow, or come from a replay.
        self.source = self.components.make_source(self.engine, self.graders, config)

    def _setup_model(self, model: Component, optimizer: Component, schedule: config_records.ScheduleConfig) -> None:
        """Builds the policy with the weights of model_dir, and the learner that trains it."""
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
        # Masters are float32 in every precision: bfloat16 would lose the larger part of an update at lr 1e-5.
        self.optimizer = optimizer.instantiate(params=self.policy.trainable())
        self.learner = Learner(
            self.policy,
            self.loss,
            self.ranks,
            # Log-probs are those of the distribution that is sampled from, so the temperature divides the trainer's
            # logits, too.
            temperature=self.sampling.temperature,
            optimizer=self.optimizer,
            schedule=make_schedule(schedule, cfg.max_steps * cfg.updates_per_step),
            max_grad_norm=cfg.max_grad_norm,
            timer=self.timer,
        )

    def open_logs(self) -> None:
        """Rank 0: opens metrics and rollouts. Those of a resumed run are cut to the step that it resumes from."""
        first_step = self.step + 1 if self.step else None
        self.folder.write_record()
        self.metrics = MetricLogger(
            self.cfg.output_dir, self.cfg.logging, self.folder.run, first_step, status=lambda: self.stop.exit_status
        )
        self.rollouts = RolloutStore(self.cfg.output_dir, resume_step=first_step, show=self.metrics.show)

    def train(self) -> None:
        """Generate, grade, pack, train, publish, repeat. To change the algorithm, change the line that does it."""
        cfg, timer = self.cfg, self.timer
        # The engine loaded the files of model_dir. After a resume, with an adapter or in FP8 the policy is something
        # else, so it is sent before anything is sampled.
        self.publisher.publish(self.version)
        self.source.prefetch(self.version)
        if self.step == 0:
            with timer("eval"):
                self.log(self.evaluate())

        self.stop.defer_sigterm()  # from here on SIGTERM waits for the end of a step
        timer.lap()  # the seconds of the first step begin here
        while self.step < cfg.max_steps:
            self.step += 1
            self.profile.start_trace(self.step)
            self.last_eval = None  # a checkpoint has the accuracy of its own weights only

            # Groups come finished and graded. With staleness 0 they were all sampled by the policy of this step,
            # otherwise none of their tokens is older than `staleness` versions. Rewards become advantages inside each
            # group.
            with timer("sample"):
                groups, values = self.generate_rollouts()
                groups, rollout_metrics = self.record_rollouts(groups)

            # A prompt stands once in a row for all its completions, and every rank gets rows that cost about the same.
            with timer("pack"):
                updates, pack_metrics = self.pack(groups)

            # One optimizer update or several on the rows; the policy that comes out is the next version.
            with timer("train"):
                values |= rollout_metrics | pack_metrics | self.update(updates)
            self.version += 1

            # The engine takes the new weights in memory, and a canary proves that it samples with them. Then it samples
            # ahead, as far as it may.
            with timer("publish"):
                values |= self.publisher.publish(self.version)
                self.source.prefetch(self.version)

            last = self.step == cfg.max_steps
            if last or self.step % cfg.evaluation.every == 0:
                with timer("eval"):
                    values |= self.evaluate()
            # The numbers of a step are written before its checkpoint, so that a run that goes on from there has them.
            # Its seconds come last: saving takes some of them.
            self.log(values | step_metrics.memory_metrics())

            # The ranks agree on whether to stop: SIGTERM does not reach all of them in the same step.
            stopping = self.stop.agree_to_stop(self.ranks.any)
            if last or stopping or self.step % cfg.checkpoints.every == 0:
                self.save_checkpoint()
            self.log(step_metrics.timing_metrics(values, timer.lap()))
            self.profile.close()
            if stopping and not last:
                self.stop.raise_stopped()

    def generate_rollouts(self) -> tuple[list[Group], dict[str, float]]:
        """Rank 0: graded groups with advantages. Other ranks: nothing."""
        cfg, groups, values, needed = self.cfg, [], {}, self.cfg.prompts_per_step
        if not self.ranks.is_main:
            return [], {}
        for refill_round in range(1 + cfg.refill_rounds):
            with self.progress.sampling_bar(needed * cfg.samples_per_prompt) as bar:
                more, metrics = self.source.take(needed, self.timer, bar, refill_round)
            if self.teacher:
                with self.timer("teacher"):
                    more = self.teacher.score_groups(more)
            groups, stats = self.compute_advantages(groups + more)
            values |= metrics | stats.metrics()
            # Zero-variance groups may be replaced by a further round.
            needed = cfg.prompts_per_step - stats.groups
            if needed <= 0:
                break
        return groups, values

    def compute_advantages(self, groups: list[Group]) -> tuple[list[Group], AdvantageStats]:
        """Rewards become advantages inside each group."""
        # A group whose rewards are all equal says nothing about what is better. It is trained on only where the loss has
        # a term that acts without an advantage (a KL penalty, an entropy bonus).
        return assign_advantages(
            groups,
            self.cfg.advantage,
            self.sampling.max_tokens,
            train_all=self.learner.needs.train_zero_advantage,
            formula=group_relative_advantages,
        )

    def record_rollouts(self, groups: list[Group]) -> tuple[list[Group], dict[str, float]]:
        """Rank 0: stores and measures all groups, and returns the groups of the step. Other ranks: nothing."""
        if not self.ranks.is_main:
            return [], {}
        # What a further round has replaced is stored and measured, but not trained on.
        selected, all_groups = select_groups(groups, self.cfg.prompts_per_step)
        with self.timer("store"):
            self.rollouts.write(self.step, all_groups)
        # Where the task chooses its next problems by what became of these, it does so here.
        values = self.problems.observe(
            self.step, outcomes_for_task(all_groups), self.folder.path
        ) | step_metrics.rollout_metrics(groups)
        if self.engine:
            self.engine.sleep()  # where it shares the trainer's GPU
            values |= step_metrics.engine_metrics(self.engine.stats())
        return selected, values

    def pack(self, groups: list[Group]) -> tuple[list[list[Row]], dict[str, float]]:
        """This rank's rows for every update of the step, and how well they are used."""
        cfg, updates, values = self.cfg, [], {}
        if self.ranks.is_main:
            updates, stats = pack_updates(
                groups,
                cfg.updates_per_step,
                cfg.row_tokens,
                aggregation=cfg.aggregation,
                aggregation_constant=self.sampling.max_tokens,
                pad_id=self.components.tokenizer.pad_id,
                layout=self.learner.layout,
            )
            values = stats.metrics()
        # The ranks gather the weights together, layer by layer, so each gets equally many rows; some may be empty.
        return [self.ranks.local_slice(rows) for rows in self.ranks.broadcast(updates)], values

    def update(self, updates: list[list[Row]]) -> dict[str, float]:
        """Optimizer updates on the rows of this step."""
        # The schedule counts planned updates: an update that was left out because no group had a signal counts, and so do
        # those of earlier steps, as if they had been planned with the present `updates_per_step`.
        self.learner.schedule_step = (self.step - 1) * self.cfg.updates_per_step
        # The proximal policy is the policy of this moment. The first update starts from it, so its own forward pass
        # gives the log-probs; the later ones start from a policy that has moved, so theirs are computed beforehand.
        proximal_logprobs = self.learner.proximal_logprobs(updates)
        reference = self.learner.reference_logprobs(updates)

        mismatch, metrics = {}, []
        with self.progress.training_bar(sum(map(len, updates))) as bar:
            for rows, old, ref in zip(updates, proximal_logprobs, reference, strict=True):
                logprobs, values = self.learner.forward_backward(
                    rows,
                    proximal=old,
                    reference=ref,
                    version=self.version,
                    on_row=lambda row: bar.add(1, row.num_labels),
                )
                if not metrics:
                    # Trainer and engine must agree before the step's first update, so that a wrong one is never made.
                    when = f"step {self.step}, before its first update"
                    mismatch = self.mismatch_gate.check(rows, logprobs, when, self.version).metrics("mismatch")
                metrics.append(
                    self.learner.step(values, advice=partial(self.checkpoints.failed_update_advice, self.step))
                )
        return mismatch | mean_over_updates(metrics)

    def evaluate(self) -> dict[str, float]:
        """Accuracy on all held-out problems, sampled and greedy, by rank 0."""
        if self.components.eval_task is None or not self.engine:
            return {}
        values = step_metrics.evaluation_metrics(
            *sample_held_out(
                self.components.eval_problems.problems,
                self.cfg.evaluation.samples,
                # One seed for all evaluations: two differ by their weights, and less by the luck of the draw.
                replace(self.sampling, seed=self.cfg.seed),
                self.engine,
                self.components.tokenizer,
                self.graders[1],
                make_progress=self.progress.sampling_bar,
                timer=self.timer,
                deadline_s=self.cfg.rollouts.deadline_s,
            ),
            skipped=self.components.eval_problems.num_skipped,
            first=self.step == 0,
        )
        # The next checkpoint carries it: the best one is kept.
        self.last_eval = values.get("eval/accuracy_sampled")
        return values

    def log(self, values: dict[str, float]) -> None:
        if self.ranks.is_main:
            with self.timer("log"):
                self.metrics.log(self.step, values)
                self.progress.log_step(self.step, values)

    def save_checkpoint(self) -> None:
        """All ranks: weights, optimizer and random state, and what the recipe itself has to remember."""
        # What was sampled ahead and graded comes along in `source`, and the number of requests that the engine bears in
        # `throttle`, so that a run that goes on makes the steps that it would have made.
        state = RunState(
            step=self.step,
            version=self.version,
            cursor=self.problems.cursor,
            throttle=self.engine.state_dict() if self.engine else {},
            source=self.source.state_dict(),
            task=self.problems.state_dict(),
        )
        with self.stop.protect_save(), self.timer("save"):
            self.timer.seconds["save/hash"] = self.checkpoints.save(
                self.step,
                self.policy.model,
                self.optimizer,
                self.components.make_exporter(self.policy.model),
                asdict(state),
                self.last_eval,
            )

    def load_checkpoint(self, path: Path) -> None:
        state = RunState.from_recipe_state(self.checkpoints.load(path, self.policy.model, self.optimizer))
        self.step, self.version = state.step, state.version
        # A finite task continues after the problems that were asked.
        self.problems.cursor = state.cursor
        self.problems.load_state_dict(state.task)
        self.source.load_state_dict(state.source, self.step, self.version)
        if self.engine:
            self.engine.load_state_dict(state.throttle)

    def cleanup(self) -> None:
        # A run that is stopped early lacks some. The lock of the folder goes last.
        names = ("source", "rollouts", "metrics", "profile", "engine", "teacher")
        close_all(*(getattr(self, name, None) for name in names), *self.graders, getattr(self, "folder", None))


@parse
def recipe_main(cfg: DictConfig) -> None:
    settings = load_config(Config, cfg)
    # The process ends here, with status 0 if the run would start and fit, and with 2 otherwise.
    if settings.dry_run:
        from torchtune_ext.setup.dry_run import dry_run

        dry_run(settings)
    run_recipe(partial(GRPORecipe, settings))


if __name__ == "__main__":
    sys.exit(recipe_main())
