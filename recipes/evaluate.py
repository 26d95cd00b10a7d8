"""Accuracy of a model on a task: sample, grade, count. Prints pass@k with intervals and writes them to `output_dir`.

tune run evaluate --config eval/tiny model_dir=...
"""

import json
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig

from torchtune_ext.config import build, instantiate, load_config
from torchtune_ext.evaluation import Accuracy, accuracy
from torchtune_ext.grading import Grader
from torchtune_ext.plugin import parse
from torchtune_ext.rollout import sample_groups
from torchtune_ext.sampling.engine import Engine, EngineConfig, SamplingConfig
from torchtune_ext.telemetry.progress import Progress
from torchtune_ext.telemetry.rollouts import RolloutStore

SUPPORTS_DISTRIBUTED = False  # one engine; it spreads over GPUs by engine.tensor_parallel_size


@dataclass
class Config:
    """Every knob of the recipe."""

    output_dir: str = MISSING  # folder for the table and the samples
    model_dir: str = MISSING  # weights and tokenizer, Hugging Face format
    tokenizer: Any = MISSING  # messages -> ids
    task: Any = MISSING  # problems, all of them used
    engine: dict[str, Any] = field(default_factory=dict)  # fields of EngineConfig
    sampling: dict[str, Any] = field(default_factory=dict)  # fields of SamplingConfig: max_tokens, temperature, ...
    samples_per_problem: int = 1  # at sampling.temperature
    greedy: bool = True  # also one greedy sample per problem
    pass_at: list[int] = field(default_factory=lambda: [1])  # k of pass@k, at most samples_per_problem
    grader_workers: int = 1  # processes that grade
    grader_timeout_s: float = 10.0  # seconds for one text
    seed: int = 0  # of sampling


def evaluate(cfg: Config) -> dict[str, Accuracy]:
    for k in cfg.pass_at:
        if not 1 <= k <= cfg.samples_per_problem:
            raise ValueError(f"pass_at holds {k}; each k must lie in 1..samples_per_problem={cfg.samples_per_problem}")
    tokenizer, task = instantiate(cfg.tokenizer), instantiate(cfg.task)
    stops = tuple(tokenizer.stop_token_ids)
    sampling = build(SamplingConfig, cfg.sampling, "sampling", stop_token_ids=stops, seed=cfg.seed)
    engine = Engine(cfg.model_dir, build(EngineConfig, cfg.engine, "engine"), cfg.output_dir)
    grader = Grader(task, cfg.grader_workers, cfg.grader_timeout_s)
    problems = [task[i] for i in range(len(task))]
    ways = {f"temperature {sampling.temperature:g}": (sampling, cfg.samples_per_problem)}
    if cfg.greedy:
        ways["greedy"] = (replace(sampling, temperature=0.0), 1)
    found, progress, store = {}, Progress(), RolloutStore(cfg.output_dir)
    try:
        engine.start()
        engine.wait_ready()
        for i, (name, (config, n)) in enumerate(ways.items()):
            with progress.sampling(len(problems) * n, name) as bar:
                groups = sample_groups(problems, n, config, engine, tokenizer, grader, bar)
            store.write(i, groups)
            found[name] = accuracy(groups, list(cfg.pass_at))
    finally:
        engine.close()
        grader.close()
    return found


def table(found: dict[str, Accuracy]) -> str:
    ks = sorted({k for a in found.values() for k in a.pass_at})
    head = ["sampling", "problems", "accuracy", "95% interval", *(f"pass@{k}" for k in ks)]
    rows = [
        [
            name,
            str(a.problems),
            f"{a.mean:.4f}",
            f"{a.low:.4f} - {a.high:.4f}",
            *(f"{a.pass_at[k]:.4f}" if k in a.pass_at else "-" for k in ks),
        ]
        for name, a in found.items()
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join("  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in [head, *rows])


@parse
def recipe_main(cfg: DictConfig) -> None:
    cfg = load_config(Config, cfg)
    found = evaluate(cfg)
    print(table(found))
    file = Path(cfg.output_dir) / "evaluation.json"
    file.write_text(json.dumps({"model_dir": cfg.model_dir, **{n: asdict(a) for n, a in found.items()}}, indent=1))
    print(f"written to {file}")


if __name__ == "__main__":
    sys.exit(recipe_main())
