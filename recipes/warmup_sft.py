"""Supervised fine-tuning (SFT) warm-up on a task's solutions, which gives GRPO its first rewards.

    tune run warmup_sft --config warmup/tiny    # a new small Qwen2 model with its own tokenizer

With `model_dir`, the recipe trains an existing model instead. It shares packing, log-probs and
updates with the GRPO recipe. The loss is the negative log-likelihood of the solutions. The recipe
writes a Hugging Face model directory to `output_dir`/model.
"""

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from omegaconf import DictConfig
from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.cli.plugin import parse
from torchtune_ext.objective.loss import NLLLoss
from torchtune_ext.pipeline.groups import Group, Sample
from torchtune_ext.pipeline.packing import pack
from torchtune_ext.policy.builder import build_on_meta, build_policy
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.policy.scratch import ModelShape, make_tokenizer, write_model
from torchtune_ext.run.errors import UsageError, describe_error
from torchtune_ext.run.folder import RunFolder
from torchtune_ext.run.output import format_labels, print_text
from torchtune_ext.run.stop import StopSignals
from torchtune_ext.sampling.types import Completion
from torchtune_ext.settings.components import Component
from torchtune_ext.settings.config import load_config, named_paths, settings_snapshot
from torchtune_ext.settings.sections import FORBID_UNKNOWN_KEYS, Seed
from torchtune_ext.setup.checks import check_optimizer, check_task, check_tokenizer, measure_prompts
from torchtune_ext.setup.header import device_text, model_text
from torchtune_ext.tasks.problem_stream import UsableProblems, problem_index
from torchtune_ext.tasks.task import Message, Problem, solution_messages
from torchtune_ext.telemetry.metrics import LoggingConfig, MetricLogger
from torchtune_ext.telemetry.progress import Progress
from torchtune_ext.telemetry.step_metrics import Timer, memory_metrics, timing_metrics
from torchtune_ext.training.distributed import init_ranks
from torchtune_ext.training.export import describe_prompt_format, require_replaceable, save_model
from torchtune_ext.training.learner import Learner, ScheduleConfig, make_schedule
from torchtune_ext.training.precision import DTYPES, chosen_dtype, dtype_note
from torchtune_ext.training.recipe_runner import close_all, run_recipe


@dataclass(config=FORBID_UNKNOWN_KEYS, kw_only=True)
class Config:
    """Every config key of the recipe."""

    output_dir: str = Field(description="run folder; the model is saved in output_dir/model")
    model_dir: str | None = Field(default=None, description="model to train further; null: a new model of `shape`")
    shape: ModelShape = Field(default=ModelShape(), description="dimensions of a new model")
    model: Component = Field(description="torchtune model builder")
    tokenizer: Component = Field(description="messages -> token ids")
    task: Component = Field(description="problems with solutions")
    optimizer: Component = Field(description="torch optimizer")
    num_problems: int = Field(ge=1, description="training problems, the first of the task")
    epochs: float = Field(default=1.0, gt=0, description="passes over the problems")
    batch_problems: int = Field(default=64, ge=1, description="problems per optimizer update")
    train_on_prompt: bool = Field(default=False, description="include prompt tokens in the loss, for a new model")
    row_tokens: int = Field(default=4096, ge=1, description="maximum tokens per packed row")
    tokenizer_problems: int = Field(
        default=1000, ge=1, description="problems whose text trains the tokenizer of a new model"
    )
    schedule: ScheduleConfig = Field(
        default=ScheduleConfig(decay="cosine", warmup=20), description="learning-rate schedule"
    )
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="maximum gradient norm; null: no clipping")
    seed: Seed = Field(default=0, description="seed of new weights and problem order")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="device of the trainer")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto", description="dtype of forward and backward, and of the saved weights"
    )
    activation_checkpointing: bool = Field(default=False, description="recompute activations in the backward")
    compile: bool = Field(default=False, description="torch.compile each layer")
    log_every: int = Field(default=10, ge=1, description="optimizer updates between records of metrics.jsonl")
    logging: LoggingConfig = Field(default=LoggingConfig(), description="metric sinks in addition to the run folder")


class WarmupRecipe:
    def __init__(self, cfg: Config):
        self.cfg = cfg
        # A stopped warm-up saves nothing, so it needs no grace period.
        self.stop = StopSignals(grace_s=0.0, status_message=self.status_message)
        self.folder: RunFolder | None = None
        self.metrics: MetricLogger | None = None
        self.finished_updates = 0
        self.saved_model_dir: Path | None = None  # set after the model is saved

    def setup(self) -> None:
        cfg = self.cfg
        self.ranks = init_ranks(cfg.device, output_dir=cfg.output_dir)
        torch.manual_seed(cfg.seed)
        self.check_config()

        # The config is valid. This locks the folder and moves an earlier run in it aside.
        run = None
        if self.ranks.is_main:
            self.folder = RunFolder(cfg.output_dir)
            run = self.folder.start_run(
                settings_snapshot(cfg), resuming=False, inputs=named_paths(cfg), writes_checkpoints=True
            )
        self.start_dir = Path(cfg.model_dir or f"{cfg.output_dir}/start")
        if cfg.model_dir is None and self.ranks.is_main:
            self.make_model(self.start_dir, cfg.shape)
        # The other ranks wait here until rank 0 has written the files.
        self.ranks.broadcast(None)
        self.hf_model = HFModel(self.start_dir)
        self.tokenizer: ChatTokenizer = cfg.tokenizer.instantiate(path=str(self.start_dir))
        if cfg.model_dir is None:
            measure_prompts(self.task, self.tokenizer, "task")
        self.policy = build_policy(
            self.model_section(str(self.start_dir)).instantiate,
            self.hf_model,
            self.ranks.device,
            self.dtype,
            self.ranks.world_size,
            cfg.activation_checkpointing,
            cfg.compile,
        )
        optimizer = cfg.optimizer.instantiate(params=self.policy.trainable_parameters())
        self.timer = Timer()
        self.learner = Learner(
            self.policy,
            NLLLoss(),
            self.ranks,
            optimizer=optimizer,
            schedule=make_schedule(cfg.schedule, self.num_updates),
            max_grad_norm=cfg.max_grad_norm,
            timer=self.timer,
        )
        if self.ranks.is_main:
            print_text(
                format_labels(
                    [
                        ("model", model_text(self.hf_model, self.policy.model, "all weights")),
                        ("device", f"{device_text(self.ranks)}; in {self.dtype_text()}"),
                        ("problems", f"{type(self.task).__name__}, {cfg.num_problems:,}; {self.num_updates:,} updates"),
                        ("files", f"{cfg.output_dir}; the model goes to {cfg.output_dir}/model"),
                    ]
                )
            )
        self.metrics = MetricLogger(
            cfg.output_dir, cfg.logging, run, status=lambda: self.stop.exit_status, rank=self.ranks.rank
        )
        self.progress = Progress(self.num_updates, self.ranks.rank)

    def check_config(self) -> None:
        """Builds the cheap components and reports config errors before any file changes."""
        cfg = self.cfg
        self.dtype = DTYPES[chosen_dtype(cfg.dtype, self.ranks.device.type)]
        self.task = cfg.task.instantiate()
        check_task(self.task, "task", needs_solutions=True, grades=False)
        if cfg.num_problems > len(self.task):
            raise UsageError(
                f"num_problems={cfg.num_problems}, but the task has {len(self.task)} problems. Fix: set num_problems to at "
                "most that number"
            )
        self.num_updates = max(1, round(cfg.num_problems * cfg.epochs / cfg.batch_problems))
        if self.ranks.is_main:
            require_replaceable(Path(cfg.output_dir, "model"), named_paths(cfg), setting="tokenizer_problems")
        cfg.schedule.require_fits(self.num_updates)
        cfg.logging.require_login()
        check_optimizer(cfg.optimizer.instantiate, device=self.ranks.device.type)
        # A new model has no files yet, so only the names of components and arguments can be
        # checked.
        if cfg.model_dir is None:
            self.model_section("start").resolve_call()
            cfg.tokenizer.resolve_call(path="start")
        else:
            hf_model, model = HFModel(cfg.model_dir), build_on_meta(self.model_section(cfg.model_dir).instantiate)
            tokenizer = cfg.tokenizer.instantiate(path=cfg.model_dir)
            check_tokenizer(tokenizer, hf_model, model.tok_embeddings.num_embeddings)
            measure_prompts(self.task, tokenizer, "task")
            hf_model.require_fits(model)

    def dtype_text(self) -> str:
        # str(dtype) starts with "torch.", which has 6 characters.
        return f"{str(self.dtype)[6:]}{dtype_note(self.cfg.dtype, self.ranks.device.type)}"

    def model_section(self, folder: str) -> Component:
        # `policy.from_config` reads the dimensions from config.json. torchtune's builders hard-code
        # them.
        node = self.cfg.model
        reads_config = self.cfg.model_dir is None or node.get("_component_") == "torchtune_ext.policy.from_config"
        return Component({"model_dir": folder, **node} if reads_config else node, "model")

    def make_model(self, folder: Path, shape: ModelShape) -> None:
        """Writes a model with random weights and a tokenizer trained on the task's text."""
        cfg = self.cfg
        problems = UsableProblems(self.task, limit=min(cfg.tokenizer_problems, cfg.num_problems)).problems
        messages = [message for problem in problems for message in (*problem.messages, *self.solution(problem))]
        prompts = [message["content"] for message in messages if message["role"] != "assistant"]
        solutions = [message["content"] for message in messages if message["role"] == "assistant"]
        # Each value of an answer, such as a name or a room, becomes one token.
        answers = {str(value) for p in problems for value in (p.answer.values() if isinstance(p.answer, dict) else [])}
        tokenizer = make_tokenizer(prompts, solutions, answers, shape.vocab_size)
        write_model(folder, tokenizer, shape, cfg.seed)

    def train(self) -> None:
        cfg = self.cfg
        assert self.metrics is not None  # since `setup`
        with self.progress.phase("tokenization: not finished"):
            groups = self.build_groups()
        with self.progress.training_bar(self.num_updates, "warm-up", "update") as bar:
            for update in range(self.num_updates):
                self.timer.lap()
                # Every rank packs the whole batch into the same rows, and trains on its share of
                # the rows.
                at = range(update * cfg.batch_problems, (update + 1) * cfg.batch_problems)
                # Each epoch shuffles the problems differently.
                batch = [groups[problem_index(i, len(groups), cfg.seed)] for i in at]
                with self.timer("pack"):
                    cost_model = self.learner.cost_model
                    rows, stats = pack(batch, cfg.row_tokens, pad_id=self.tokenizer.pad_id, cost_model=cost_model)
                with self.timer("train"):
                    _, values = self.learner.forward_backward(self.ranks.local_slice(rows))
                    values = self.learner.step(values, advice=lambda: "lower the learning rate")
                bar.add(1, stats.tokens)
                self.finished_updates = update + 1
                if (update + 1) % cfg.log_every == 0 or update + 1 == self.num_updates:
                    values |= stats.metrics() | memory_metrics()
                    self.metrics.log(update + 1, values | timing_metrics(values, self.timer.lap()))
        self.saved_model_dir = self.save()

    def build_groups(self) -> list[Group]:
        """Returns the problems with their solutions. Logs and skips unusable problems."""
        # The keys are object ids, because a problem may hold unhashable values.
        groups = {}

        def check_problem(problem: Problem) -> str:
            try:
                groups[id(problem)] = group = self.build_group(problem)
            except Exception as error:  # noqa: BLE001 (the task's code, or the template's; the error is named)
                return f"its solution cannot be encoded: {describe_error(error)}"
            # The last token is only a label, so it takes no place in a row.
            length = len(group.prompt_tokens) + len(group.samples[0].completion.tokens) - 1
            return (
                f"its text has {length} tokens, more than row_tokens={self.cfg.row_tokens}"
                if length > self.cfg.row_tokens
                else ""
            )

        return [
            groups[id(problem)]
            for problem in UsableProblems(self.task, check_problem, limit=self.cfg.num_problems).problems
        ]

    def solution(self, problem: Problem) -> list[Message]:
        return solution_messages(self.task.solution(problem))

    def build_group(self, problem: Problem) -> Group:
        """Returns a problem with its solution, including the end-of-turn token, as the only sample."""
        ids, mask = self.tokenizer.conversation_ids([*problem.messages, *self.solution(problem)], problem.tools)
        # The prompt has at least one token, because no token predicts the first token of a text.
        first = 1 if self.cfg.train_on_prompt else mask.index(True)
        # A template may write a newline after the last turn. The policy never samples it.
        last = len(mask) - mask[::-1].index(True)
        tokens = np.asarray(ids[first:last], dtype=np.int32)
        # Only assistant turns are trained on. Each row of `edges` is the [start, stop) of a run of
        # True.
        edges = np.flatnonzero(np.diff([False, *mask[first:last], False])).reshape(-1, 2).tolist()
        # No engine sampled these tokens, so log-probs and versions are placeholders. NLLLoss
        # ignores them.
        completion = Completion(
            tokens=tokens,
            logprobs=np.zeros(len(tokens), np.float32),
            versions=np.zeros(len(tokens), np.int32),
            finish_reason="stop",
            turns=() if self.cfg.train_on_prompt else tuple((start, stop) for start, stop in edges),
        )
        sample = Sample(completion, advantage=1.0, in_loss=True)
        return Group(problem, np.asarray(ids[:first], dtype=np.int32), (sample,))

    def save(self) -> Path:
        folder = Path(self.cfg.output_dir) / "model"
        return save_model(folder, self.policy.model, self.hf_model, self.dtype, self.tokenizer)

    def status_message(self) -> str:
        if self.saved_model_dir is not None:
            train = shlex.quote(f"model_dir={self.saved_model_dir}")
            lines = [("model", f"{self.saved_model_dir}, in Hugging Face format: train it with {train}")]
            if prompts := describe_prompt_format(self.hf_model, self.tokenizer):
                lines.append(
                    ("prompts", f"made with {prompts}, not with the files of {self.start_dir}; saved with the model")
                )
            return format_labels(lines)
        return (
            f"The run was at update {self.finished_updates}, and a warm-up saves nothing before its end, so the next start "
            "begins from scratch"
        )

    def cleanup(self) -> None:
        close_all(self.metrics, self.folder)


@parse
def recipe_main(cfg: DictConfig) -> None:
    run_recipe(partial(WarmupRecipe, load_config(Config, cfg)))


if __name__ == "__main__":
    sys.exit(recipe_main())
