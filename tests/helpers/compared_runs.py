"""Several runs in a folder, and a sweep, for the comparisons of `torchtune-ext report`."""

import json
import math

import numpy as np

from helpers.records import make_sample
from helpers.report_runs import HOSTILE
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.pipeline.rollout_store import RolloutStore
from torchtune_ext.tasks.task import Problem, Score
from torchtune_ext.telemetry.metrics import MetricLogger


def settings(lr=1e-6, seed=0, **more):
    return {
        "max_steps": 60, "seed": seed, "optimizer": {"lr": lr}, "preset": "dapo",
        "evaluation": {"task": {"_component_": "tasks.TemporalClue", "seed": 3}}, **more,
    }  # fmt: skip


def make_one(folder, config=None, steps=60, level=0.7, every=20, name=None, rollouts=True, hostile=False, **values):
    """Write a run that learns up to `level`. `values`: additional metrics, each a number or a function of the step."""
    folder.mkdir(parents=True, exist_ok=True)
    config = settings() if config is None else config
    config = {**config, "output_dir": str(folder)}
    record = {
        "id": folder.name,
        "name": name or folder.name,
        "config": config,
        "process": {"versions": {"torch": "2.13.0"}},
    }
    (folder / "run.json").write_text(json.dumps(record))
    rng = np.random.default_rng([config.get("seed") or 0, round(1e9 * level)])
    with MetricLogger(folder, sinks=()) as metrics:
        store = RolloutStore(folder)
        for step in range(steps + 1):
            reached = level * (1 - math.exp(-4 * step / 60))
            line = {}
            if step:
                line = {
                    "reward/mean": reached + rng.normal(0, 0.02), "reward/std": 0.3, "length/mean": 30 - 10 * reached + rng.normal(0, 0.5),
                    "length/tokens": 1000, "length/truncated": 0.05, "loss/total": rng.normal(0, 0.01), "loss/entropy": 1 - 0.7 * reached,
                    "optim/grad_norm": 0.5, "optim/lr": config["optimizer"]["lr"], "mismatch/mean_abs": 3e-7 * (1 + rng.random()), "time/step": 2.0,
                    "time/sample": 1.2, "time/train": 0.8, "pack/rho": 4.0, "groups/used": 10.0, "groups/no_signal": 2.0,
                    "speed/sampled_tokens_s": 500.0, "memory/rss_gib": 1.0,
                }  # fmt: skip
            if every and step % every == 0:
                line |= {"eval/reward_sampled": reached, "eval/low": reached - 0.05, "eval/high": reached + 0.05,
                         "eval/reward_greedy": reached + 0.01}  # fmt: skip
            line |= {key: value(step) if callable(value) else value for key, value in values.items()}
            metrics.log(step, line)
            if rollouts and step and step % 20 == 0:
                store.write(step, [_group(step, number, reached, rng, hostile) for number in range(3)])
    return folder


def make_sweep(folder, rates=(1e-5, 3e-5, 1e-4, 3e-4, 1e-3), failed=2, clips=(0.2, 0.3)):
    """Write a sweep over learning rates, with the best in the middle, and over clip bounds with little effect."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = []
    for i, rate in enumerate(rates):
        for j, clip in enumerate(clips):
            level = 0.75 - 0.12 * abs(math.log10(rate / 1e-4)) + 0.01 * j
            name, state = f"run{i}{j}", "finished"
            parameters = {"optimizer.lr": rate, "loss.clip_high": clip}
            make_one(folder / name, settings(rate, loss={"clip_high": clip}), level=level)
            runs.append({"id": name, "parameters": parameters, "state": state,
                         "value": level * (1 - math.exp(-4)), "cause": "", "seconds": 71.2})  # fmt: skip
    for number in range(failed):
        runs.append({"id": f"bad{number}", "parameters": {"optimizer.lr": 0.1, "loss.clip_high": 0.2},
                     "state": "failed", "value": None, "cause": f"loss is not finite {HOSTILE}", "seconds": 3.0})  # fmt: skip
    record = {
        "format": 1, "name": "tiny_lr", "method": "grid", "metric": {"name": "eval/reward_sampled", "goal": "maximize"},
        "command": ["tune", "run", "grpo_full"], "parameters": {"optimizer.lr": {"values": list(rates)}, "loss.clip_high": {"values": list(clips)}},
        "runs": runs,
    }  # fmt: skip
    (folder / "sweep.json").write_text(json.dumps(record))
    return folder


def _group(step, number, level, rng, hostile):
    samples = []
    for i in range(4):
        reward = round(float(np.clip(level + 0.2 * (i - 1.5) + rng.normal(0, 0.05), 0, 1)), 3)
        text = f"{HOSTILE} {i}" if hostile else f"Miss Scarlet, the library, the rope: guess {i} of step {step}"
        samples.append(
            make_sample(rng.integers(0, 9, 12), -rng.gamma(0.4, 1.0, 12), text=text, advantage=reward - level,
                    outcome=Score(reward, {"accuracy": reward}, ""), in_loss=True)
        )  # fmt: skip
    question = HOSTILE if hostile else f"Who did it, where and with what? Puzzle {number} of step {step}."
    problem = Problem(f"clue-{step}-{number}", ({"role": "user", "content": question},), {"A": "rope"})
    return Group(problem, np.arange(11, dtype=np.int32), tuple(samples))
