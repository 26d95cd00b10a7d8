"""The header of a run describes its objective, problems, device and files."""

import re
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from torchtune_ext.pipeline.advantages import AdvantageConfig
from torchtune_ext.pipeline.staleness import StalenessScheduler
from torchtune_ext.recipes import grpo
from torchtune_ext.run.catalog import config_files, package_folder
from torchtune_ext.sampling.types import EngineConfig
from torchtune_ext.settings.config import load_config
from torchtune_ext.setup.header import (
    advantage_text,
    device_text,
    objective_text,
    parameters_text,
    print_engine_ready,
    print_run_header,
    problems_text,
)
from torchtune_ext.tasks.jsonl import Jsonl
from torchtune_ext.training.checkpoints import CheckpointConfig
from torchtune_ext.training.distributed import Ranks
from torchtune_ext.training.trained_weights import FullWeights

CONFIGS = config_files(package_folder("configs"))


class Mine:
    """A user's loss without `__str__`."""


def settings(config="grpo/tiny_arithmetic", **own):
    return load_config(grpo.Config, OmegaConf.merge(OmegaConf.load(CONFIGS[config]), OmegaConf.create(own)))


def line(cfg):
    return objective_text(
        cfg.loss.instantiate(), advantage_text(cfg.advantage, None), cfg.aggregation, cfg.refill_rounds, cfg.preset
    )


def test_a_preset_changes_all_of_tinys_objective():
    text = line(settings("grpo/tiny", preset="atr_grpo"))
    assert text.startswith(
        "KL3 <= 0.02 (clip 0.187/0.214) per token, TIS <= 2, advantage (baseline mean, scale group_std), seq"
    )
    assert text.endswith("; preset atr_grpo")


@pytest.mark.parametrize(
    "own, words",
    [
        ({}, "clip 0.2/0.2 per token, TIS <= 2, advantage (baseline mean, scale group_std), sequence mean; preset grpo"),
        ({"loss": {"clip_high": 0.28}}, "clip 0.2/0.28 per token"),
        ({"loss": {"clip_high": 0.2}}, "; preset grpo"),  # the preset's value
        ({"loss": {"kl_coef": 0.1}}, "0.1 KL to the reference (k3), advantage"),
        ({"loss": {"dual_clip": 3.0}}, "dual clip 3, TIS <= 2"),
        ({"loss": {"importance": "mis"}}, "MIS in [0, 3]"),
        ({"preset": "dppo"}, "TV <= 0.2 per token, ratio to the behavior policy, 0.002 KL to the old policy (k2)"),
        ({"preset": "gmpo"}, "clip 0.33/0.492 in the geometric mean, advantage"),
        ({"preset": "exact_kl"}, "KL <= 0.02 over the top 16 per token"),
        ({"preset": "sapo"}, "soft gate 1/1.05 per token"),
        ({"preset": "cispo"}, "CISPO weight in [0, 5] per token"),
        ({"preset": "rloo"}, "no constraint per token, TIS <= 2, advantage (baseline leave_one_out, scale none), sum over a constant"),
        ({"preset": "dapo"}, "truncated samples: penalize by 0.5 over the last 20%, token mean, up to 3 refills"),
        ({"preset": "dapo", "refill_rounds": 0}, "token mean; preset dapo"),
        ({"preset": "pass_at_k", "advantage": {"pass_k": 2}}, "best of 2, sequence mean; preset pass_at_k"),
        ({"advantage": {"scale": "none"}}, "advantage (baseline mean, scale none), sequence mean; preset grpo"),
        ({"loss": {"_component_": f"{__name__}.Mine"}}, "Mine, advantage (baseline mean, scale group_std), sequence mean; preset grpo"),
        ({"preset": None, "loss": {"_component_": "torchtune_ext.objective.loss.PolicyLoss"}},
         "clip 0.2/0.2 per token, advantage (baseline mean, scale group_std), sequence mean; no preset"),
    ],
)  # fmt: skip
def test_header_describes_algorithm_settings(own, words):
    text = line(settings(**own))
    assert words in text
    assert text.endswith(words.partition("; ")[2])


def test_header_reports_machines_and_weight_copies():
    cpu, hosts = torch.device("cpu"), ("a",) * 8 + ("b",) * 8
    assert device_text(Ranks(0, 4, cpu, hosts=("a",) * 4)) == "4 processes on cpu"
    assert device_text(Ranks(0, 16, cpu, hosts=hosts, shard_within=8)) == (
        "16 processes on 2 machines (8 on a, 8 on b), each on cpu; 2 copies of the weights, each on 8 ranks"
    )


def opened(cfg, every=40, processes=1):
    """What `print_run_header` reads: these settings, and a model of two layers."""
    model = nn.Sequential(nn.Linear(1000, 999), nn.Linear(1000, 500))
    task = cfg.evaluation.task.instantiate() if cfg.evaluation.task else None
    cfg.checkpoints = CheckpointConfig(every=every)
    return SimpleNamespace(
        cfg=cfg,
        loss=cfg.loss.instantiate(),
        trained_weights=FullWeights(),
        precision=Flow(EngineConfig(address=cfg.engine.address)),
        engine_config=EngineConfig(address=cfg.engine.address),
        replay=None,
        teacher_model=None,
        meta_model=model,
        hf_model=SimpleNamespace(path=Path("models/q"), config={"model_type": "qwen2", "num_hidden_layers": 4}),
        ranks=Ranks(0, processes, torch.device("cpu")),
        task=cfg.task.instantiate(),
        eval_task=task,
        train_eval_overlap=[],
        staleness_scheduler=StalenessScheduler(cfg.prompts_per_step, cfg.max_steps, cfg.staleness, cfg.prefetch_steps),
    )


@dataclass
class Flow:
    engine: EngineConfig

    def __str__(self):
        return "in float32"


def printed(say, *args):
    with redirect_stdout(StringIO()) as out:
        say(*args)
    return out.getvalue().splitlines()


def lines(cfg, **own):
    return printed(print_run_header, opened(cfg, **own))


def test_header_summarizes_planned_run():
    output = lines(settings("grpo/tiny"), processes=2)
    labels, texts = [line[:11].strip() for line in output], [line[11:] for line in output]
    assert labels == ["model:", "device:", "objective:", "problems:", "files:", "engine:"]
    assert texts[0] == "models/q: qwen2 of 4 layers, 1.5 million parameters; trains all weights"
    assert texts[1] == "2 processes on cpu; in float32"
    assert texts[3] == (
        "TemporalClue, endless; 128 prompts per step, 8 samples each; held out: TemporalClue, 256, every 40 steps"
    )
    assert texts[4] == "runs/tiny/grpo; a checkpoint every 40 steps; graders print into grader.log"
    assert texts[5] == "starting, its log: runs/tiny/grpo/engine.log"
    assert printed(print_engine_ready, 9.4) == ["engine:    ready after 9 s, from its own start"]
    output = lines(settings("grpo/tiny", evaluation={"every": 1}), every=1)
    assert output[3].endswith("TemporalClue, 256, every step")
    assert output[4].endswith("runs/tiny/grpo; a checkpoint every step; graders print into grader.log")


def test_header_reports_server_and_missing_evaluation():
    cfg = settings("grpo/tiny", engine={"address": "http://there:8000"}, evaluation={"task": None})
    output = lines(cfg)
    assert output[3].endswith("; no held-out problems")
    assert output[5] == "engine:    connecting to http://there:8000"


def test_header_reports_overlapping_or_repeated_problems():
    cfg = settings("grpo/tiny")
    few, held_out = range(80), range(20)
    assert problems_text(cfg, few, held_out, ["w-3", "w-9"]) == (
        "range, 80; 128 prompts per step, 8 samples each, so some repeat; held out: range, 20, 2 of them ALSO TRAINED "
        "ON (e.g. w-3), every 40 steps"
    )


def test_header_names_user_rows_and_grader(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": 2}\n')
    (tmp_path / "paying.py").write_text("def always(problem, text):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    task = Jsonl(path=str(tmp_path / "rows.jsonl"), grader="paying.always")
    cfg = SimpleNamespace(prompts_per_step=1, samples_per_prompt=8, evaluation=SimpleNamespace(every=40))
    assert problems_text(cfg, task, None) == (
        "Jsonl rows by paying.always (paying.py:1), 1; 1 prompts per step, 8 samples each; no held-out problems"
    )


def test_counts_have_few_digits():
    assert [parameters_text(n) for n in (1234, 923_456, 1_543_714_304, 72_700_000)] == [
        "1,234",
        "0.9 million",
        "1.54 billion",
        "72.7 million",
    ]


def test_header_reports_checkpoints_without_evaluation_score():
    cfg = settings("grpo/tiny")
    assert len(lines(cfg)) == 6
    output = lines(cfg, every=50)
    assert output[6].startswith("warning:   checkpoints.every=50 but evaluation.every=40: ")
    assert "every 200 steps" in output[6]
    assert len(lines(cfg, every=10_000)) == 6


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({}, "; asynchronous: staleness 1, prefetch_steps 1"),
        ({"staleness": 4}, "; asynchronous: staleness 4, prefetch_steps 1"),
        ({"staleness": 4, "prefetch_steps": 2}, "; asynchronous: staleness 4, prefetch_steps 2"),
        ({"staleness": 0}, "engine.log"),
    ],
)
def test_header_reports_asynchronous_sampling(own, words):
    assert lines(settings("grpo/tiny_async", **own))[5].endswith(words)


def median_formula(rewards_G):
    return rewards_G - np.median(rewards_G)


def shipped_formula(rewards_G):
    baseline, scale = rewards_G.mean(), rewards_G.std()
    return (rewards_G - baseline) / scale


def test_header_names_changed_advantage_formula():
    plain, pass_at_2 = AdvantageConfig(), AdvantageConfig(pass_k=2)
    assert advantage_text(plain, shipped_formula) == str(plain)
    assert re.fullmatch(
        r"advantage test_header.median_formula \(test_header.py:\d+\)", advantage_text(plain, median_formula)
    )
    parts = AdvantageConfig(parts={"near": 1.0, "short": 0.2})
    assert advantage_text(parts, median_formula).endswith("), of 1 near + 0.2 short")
    text = advantage_text(pass_at_2, median_formula)
    assert text.startswith(str(pass_at_2)) and "median_formula (test_header.py" in text and "is not used" in text
