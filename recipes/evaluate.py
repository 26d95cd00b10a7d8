"""Evaluates a model on a task. Prints accuracy and pass@k with intervals, and writes both.

tune run evaluate --config eval/tiny model_dir=...

The results go to `output_dir`/evaluation.json, the samples to `output_dir`/rollouts.
"""

import json
import math
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from omegaconf import DictConfig
from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtune_ext.cli.plugin import parse
from torchtune_ext.grading import Grader, GraderConfig, check_grading, find_answer_errors, open_graders
from torchtune_ext.grading.agents import AgentConfig
from torchtune_ext.pipeline.evaluation import Accuracy, compute_accuracy
from torchtune_ext.pipeline.rollout import sample_held_out
from torchtune_ext.pipeline.rollout_store import RolloutStore
from torchtune_ext.pipeline.source import RolloutConfig, make_prompt_check
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.files import explain_os_errors, write_atomic
from torchtune_ext.run.folder import RunFolder
from torchtune_ext.run.output import format_labels, print_text
from torchtune_ext.run.stop import StopSignals
from torchtune_ext.sampling.engine import Engine, EngineConfig, SamplingConfig
from torchtune_ext.sampling.engine_args import engine_threads, on_cpu
from torchtune_ext.settings.components import Component
from torchtune_ext.settings.config import load_config, named_paths, settings_snapshot
from torchtune_ext.settings.sections import FORBID_UNKNOWN_KEYS, Seed
from torchtune_ext.setup.checks import (
    check_agents,
    check_engine,
    check_prompts,
    check_task,
    check_tokenizer,
)
from torchtune_ext.setup.header import print_engine_ready
from torchtune_ext.setup.machine_checks import require_gpus
from torchtune_ext.tasks.problem_stream import UsableProblems
from torchtune_ext.telemetry.progress import Progress
from torchtune_ext.training.precision import chosen_dtype
from torchtune_ext.training.recipe_runner import close_all, run_recipe

# The recipe runs one process. The engine uses several GPUs by `engine.tensor_parallel_size`. `tune`
# searches the source for the next line, so keep its form.
SUPPORTS_DISTRIBUTED = False


@dataclass(config=FORBID_UNKNOWN_KEYS, kw_only=True)
class Config:
    """Every config key of the recipe."""

    output_dir: str = Field(description="folder of the results and the samples")
    model_dir: str = Field(description="weights and tokenizer, Hugging Face format")
    tokenizer: Component = Field(description="messages -> token ids")
    task: Component = Field(description="problems, all evaluated")
    engine: EngineConfig = Field(default=EngineConfig(), description="vLLM engines: memory, GPUs, deadlines")
    sampling: SamplingConfig = Field(description="sampling parameters of completions")
    samples_per_problem: int = Field(default=1, ge=1, description="samples per problem at sampling.temperature")
    greedy: bool = Field(default=True, description="also draw one greedy sample per problem")
    pass_at: list[int] = Field(default_factory=lambda: [1], description="k of pass@k, at most samples_per_problem")
    grader: GraderConfig = Field(default=GraderConfig(), description="grader processes and their time limit")
    agent: AgentConfig = Field(default=AgentConfig(), description="limits, failures and address of a task's agents")
    rollouts: RolloutConfig = Field(default=RolloutConfig(), description="timeout of rollouts")
    seed: Seed = Field(default=0, description="seed of sampling")


class EvaluateRecipe:
    def __init__(self, cfg: Config):
        self.cfg = cfg
        # A stopped evaluation has nothing to save, so it needs no grace period.
        self.stop = StopSignals(grace_s=0.0, status_message=self.status_message)
        self.folder: RunFolder | None = None
        self.engine: Engine | None = None
        self.grader: Grader | None = None
        self.store: RolloutStore | None = None
        self.results_path: Path | None = None

    def setup(self) -> None:
        cfg = self.cfg
        engine = self.engine = self.build_engine()

        # The config is valid. This locks the folder and moves an earlier run in it aside.
        require_gpus(engine.config)
        self.folder = RunFolder(cfg.output_dir)
        self.run = self.folder.start_run(settings_snapshot(cfg), resuming=False, inputs=named_paths(cfg))
        self.store = RolloutStore(cfg.output_dir)
        print_text(format_labels([("engine", f"starting, its log: {cfg.output_dir}/{engine.log_pattern.name}")]))
        # The engine takes longest to start, so the graders start at the same time.
        engine.start()
        (self.grader,) = open_graders([self.task], cfg.grader, folder=cfg.output_dir, agent=cfg.agent)
        self.usable.check_answers(partial(find_answer_errors, self.grader))
        self.progress = Progress()
        seconds = engine.wait_ready()
        # A server at `engine.address` may still hold weights that a training run published.
        engine.require_unmodified_server()
        print_engine_ready(seconds)

    def build_engine(self) -> Engine:
        """Builds the cheap components and reports config errors before any file changes."""
        cfg = self.cfg
        for k in cfg.pass_at:
            if not 1 <= k <= cfg.samples_per_problem:
                raise UsageError(
                    f"pass_at holds {k}; each k must lie in 1..samples_per_problem={cfg.samples_per_problem}"
                )
        if cfg.sampling.temperature == 0 and cfg.samples_per_problem > 1:
            raise UsageError(
                f"sampling.temperature=0 with samples_per_problem={cfg.samples_per_problem}: greedy samples are "
                "identical. Fix: set samples_per_problem=1, or a sampling.temperature above 0"
            )
        model = HFModel(cfg.model_dir)
        self.tokenizer, self.task = cfg.tokenizer.instantiate(), cfg.task.instantiate()
        self.sampling = cfg.sampling.with_default_stops(self.tokenizer.stop_token_ids)
        if self.sampling.seed is None:
            self.sampling = replace(self.sampling, seed=cfg.seed)
        # Without a trainer, the engine uses the dtype that a trainer on this device would choose.
        dtype = chosen_dtype("auto", "cpu" if on_cpu() else "cuda")
        parameters = sum(math.prod(shape) for _, shape, _ in model.shapes())
        engine = cfg.engine.with_trainer_defaults(dtype, engine_threads(cfg.engine, parameters, concurrent=False))
        check_task(self.task, "task", require_finite=True)
        check_engine(model, engine)
        check_tokenizer(self.tokenizer, model, stop_ids=self.sampling.stop_token_ids)
        check_prompts({"task": self.task}, self.tokenizer, self.sampling, engine, model)
        model.require_readable()
        check_grading([self.task], cfg.grader, samples=cfg.samples_per_problem)
        check_agents([self.task], self.tokenizer, self.sampling, engine.max_model_len, cfg.agent)
        # A problem is skipped and counted if its prompt and sampling.max_tokens exceed
        # max_model_len.
        prompt_check = make_prompt_check(self.tokenizer, engine.max_model_len, self.sampling.max_tokens)
        self.usable = UsableProblems(self.task, prompt_check)
        self.usable.load()
        return Engine(cfg.model_dir, engine, cfg.output_dir)

    def evaluate(self) -> None:
        """Samples and grades every problem, prints the table and writes it."""
        cfg = self.cfg
        assert self.engine is not None and self.grader is not None  # since `setup`
        assert self.store is not None and self.folder is not None
        batches = sample_held_out(
            self.usable.problems,
            cfg.samples_per_problem,
            self.sampling,
            self.engine,
            self.tokenizer,
            self.grader,
            make_progress=self.progress.sampling_bar,
            deadline_s=cfg.rollouts.deadline_s,
            greedy=cfg.greedy,
        )
        # Without `greedy`, sample_held_out returns one batch.
        names, results = [f"temperature {self.sampling.temperature:g}", "greedy"], {}
        for i, (name, groups) in enumerate(zip(names[: len(batches)], batches, strict=True)):
            self.store.write(i, groups)
            # `has_partial_rewards` needs pass@1.
            results[name] = compute_accuracy(groups, sorted({1, *cfg.pass_at}))
        # Print before writing, so that a full disk cannot lose the result.
        print_text(format_table(results))
        file = self.folder.path / "evaluation.json"
        # Use the recorded config, which keeps references to environment variables unresolved: their
        # values may be secret.
        result = {"model_dir": self.run.config["model_dir"], "skipped": self.usable.num_skipped}
        result |= {name: asdict(a) for name, a in results.items()}
        with explain_os_errors(f"cannot write {file}", "Free disk space; the table was printed above"):
            write_atomic(file, (json.dumps(result, indent=1) + "\n").encode())
        self.results_path = file

    def status_message(self) -> str:
        if self.results_path is not None:
            return f"written to {self.results_path}"
        return "An evaluation saves nothing before its end, so the next start begins from scratch"

    def cleanup(self) -> None:
        close_all(self.store, self.engine, self.grader, self.folder)


def format_table(results: dict[str, Accuracy]) -> str:
    ks = sorted({k for a in results.values() for k in a.pass_at})
    # With partial rewards (between 0 and 1) the mean is not an accuracy.
    partial_rewards = any(a.has_partial_rewards for a in results.values())
    head = [
        "sampling",
        "problems",
        "reward" if partial_rewards else "accuracy",
        "95% interval",
        *(f"pass@{k}" for k in ks),
    ]
    rows = [
        [
            name,
            str(a.problems),
            f"{a.mean:.4f}",
            f"{a.low:.4f} - {a.high:.4f}",
            *(f"{a.pass_at[k]:.4f}" if k in a.pass_at else "-" for k in ks),
        ]
        for name, a in results.items()
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join("  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in [head, *rows])


@parse
def recipe_main(cfg: DictConfig) -> None:
    run_recipe(partial(EvaluateRecipe, load_config(Config, cfg)), EvaluateRecipe.evaluate)


if __name__ == "__main__":
    sys.exit(recipe_main())
