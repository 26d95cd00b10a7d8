"""Latency of multi-turn episodes here and in TRL, and a check that the trained tokens are the sampled tokens.

    pip install --no-deps --target runs/trl trl==1.16.0
    PYTHONPATH=runs/trl python benchmarks/turns_trl.py --out runs/turns_trl [--repeats 3] [--steps 5]

Both play the same class, a number to guess, in TRL's convention (`environment_factory` there, `ToolClass` here), with the same
tiny model, which was warmed up on such games, under TRL's template of Qwen2.5, at temperature 1, in float32 and two threads. A
step plays 8 prompts 8 times and makes one update, too small to change the policy noticeably. A run is a separate process, the
systems alternate, and the first step of a run warms up. A row is a run, and a figure the mean of its other steps.

The benchmark measures what a user gets on this machine. Ours is `grpo_full`: vLLM generates in its own process, an episode
continues as soon as its game has answered, and zero-variance groups are not trained on. TRL generates with transformers, since
it does not support this vLLM version: a turn of all episodes is one batch, as long as its longest turn, and all groups are
trained on. A rollout lasts until its last episode is over; the rest of a step is training and, here, weight sync.

The limits differ. Here the limit is 32 tokens per turn. In TRL it is 320 tokens per episode, including the game's replies, and
a turn may use all remaining tokens. A call in the last of 6 turns is executed here; TRL ignores it.

In TRL, tokens differ if the ids under the loss mask are not the ids of its generation, in order, or if an episode is not the
context in which its turns were sampled. Here the rollout store holds the ids of the engine, so the check covers their context:
a token differs if its log-prob in the engine is more than 1e-3 from its log-prob in transformers.
"""

import argparse
import importlib.util
import json
import os
import re
import sys
import time
from collections import defaultdict
from itertools import zip_longest
from pathlib import Path
from statistics import mean
from unittest import mock

import numpy as np
import torch
from real_step import run
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from turns_trl_game import GuessingTask, Number, make_rows

from torchtune_ext.chat.templates import ChatTemplate
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.pipeline.rollout_store import read_rollouts, rollout_paths
from torchtune_ext.policy.scratch import ModelShape, make_tokenizer, write_model
from torchtune_ext.telemetry.metrics import read_metrics

PROMPTS, SAMPLES, TURNS = 8, 8, 6  # of a step; of a prompt; of an episode at most
TOKENS, EPISODE_TOKENS = 32, 320  # at most, of a turn here and of an episode in TRL
LEARNING_RATE, TOLERANCE = 1e-8, 1e-3
Pair = tuple[int, int]  # id, whether it was sampled
METRICS = {"rollout": "time/sample", "turns": "episode/turns", "won": "reward/mean", "labels": "pack/labels"}
SHAPE = ModelShape(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=192
)


# -- ours -------------------------------------------------------------------------------------------------------------------


def tune(recipe: str, folder: Path, model: Path, rows: list[dict], task: str, rate: float, settings: dict) -> None:
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    game = {"environment": "turns_trl_game.Number", "rows": str(folder / "rows.jsonl"), "max_turns": TURNS}
    config = {
        "output_dir": str(folder),
        "model_dir": str(model),
        "device": "cpu",
        "dtype": "float32",
        "task": {"_component_": task} | game,
        "model": {"_component_": "torchtune_ext.policy.from_config", "model_dir": str(model)},
        "tokenizer": {"_component_": "torchtune_ext.chat.ChatTokenizer"},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": rate},
        "row_tokens": 4096,
    }
    (folder / "config.yaml").write_text(json.dumps(config | settings))  # JSON is YAML
    run([sys.executable, "-m", "torchtune_ext", "run", recipe, "--config", str(folder / "config.yaml")], folder)


def warm_up(folder: Path, start: Path) -> Path:
    """Make the model. Its tokenizer has whole words, like the tokenizer of a large model."""
    template = (Path(importlib.util.find_spec("trl").origin).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    rows, render = make_rows(1200, seed=0), ChatTemplate(template, "qwen2_5", {}).render
    task = GuessingTask("turns_trl_game.Number", rows, count=16)
    text = "".join(render([*problem.messages, *task.solution(problem)], problem.tools) for problem in task)
    tokenizer = make_tokenizer(re.findall(r"\s*\S+", text), [], map(str, range(1, 14)), vocab_size=1024)
    write_model(start, tokenizer, SHAPE, seed=0)
    (start / "chat_template.jinja").write_text(template)
    settings = {"num_problems": len(rows), "batch_problems": 8}
    tune("warmup_sft", folder, start, rows, "turns_trl_game.GuessingTask", 5e-3, settings)
    return folder / "model"


def ours(folder: Path, model: Path, steps: int) -> dict[str, list[float]]:
    settings = {
        "tokenizer": {"_component_": "torchtune_ext.chat.ChatTokenizer", "path": str(model)},
        "evaluation": {"task": None},
        "grader": {"workers": 16},
        "max_steps": steps,
        "prompts_per_step": PROMPTS,
        "samples_per_prompt": SAMPLES,
        "sampling": {"max_tokens": TOKENS, "temperature": 1.0},
        "engine": {"max_model_len": 1024, "kv_cache_bytes": 1 << 28},
        "checkpoints": {"every": 1_000_000},
    }
    task, rows = "torchtune_ext.tasks.tool_class.ToolClass", make_rows(PROMPTS * steps, seed=1)
    tune("grpo_full", folder, model, rows, task, LEARNING_RATE, settings)
    lines, series = {line["step"]: line for line in read_metrics(folder / "metrics.jsonl")}, defaultdict(list)
    for step, path in rollout_paths(folder).items():
        gaps = gaps_to_transformers(list(read_rollouts(path)), model)
        for name, key in METRICS.items():
            series[name].append(lines[step][key])
        series["step"].append(lines[step]["time/step"] - lines[step].get("time/save", 0.0))
        series["sampled"].append(len(gaps))
        series["differ"].append(int((gaps > TOLERANCE).sum()))
    return series


def gaps_to_transformers(groups: list[Group], model_dir: Path) -> np.ndarray:
    """Return |engine - transformers| log-prob of each sampled token, in nats."""
    model, gaps = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), []
    for group in groups:
        for sample in group.samples:
            completion, prompt = sample.completion, group.prompt_tokens
            ids = torch.from_numpy(np.concatenate([prompt, completion.tokens])).long()
            with torch.no_grad():
                logprobs_TV = model(ids[None]).logits[0, :-1].log_softmax(-1)
            logprobs = logprobs_TV.gather(1, ids[1:, None])[len(prompt) - 1 :, 0].numpy()
            gaps.append(np.abs(completion.logprobs - logprobs)[completion.sampled_indices])
    return np.concatenate(gaps)


# -- TRL --------------------------------------------------------------------------------------------------------------------


def trl_main(folder: Path, model: Path, steps: int) -> None:
    """Run TRL in this process and write the results."""
    with mock.patch("trl.import_utils.is_vllm_available", return_value=False):
        from trl import GRPOConfig, GRPOTrainer
    from datasets import Dataset

    series, batch_sizes, episodes = defaultdict(list), [], []  # of each step; of each turn of it; of it, so far

    class Trainer(GRPOTrainer):
        def _generate(self, *args, **options):
            episodes.clear(), batch_sizes.clear()
            began = time.perf_counter()
            result = super()._generate(*args, **options)
            series["rollout"].append(time.perf_counter() - began)
            return result

        def _generate_single_turn(self, prompt_ids, *args, **options):
            turns, logprobs = super()._generate_single_turn(prompt_ids, *args, **options)
            follow(episodes, prompt_ids, turns)
            batch_sizes.append(len(turns))
            return turns, logprobs

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            series["won"].append(mean(game.get_reward() for game in self.environments))
            series["turns"].append(sum(batch_sizes) / len(episodes))
            series["sampled"].append(sum(is_sampled for episode in episodes for _, is_sampled in episode))
            series["labels"].append(int((batch["completion_mask"] * batch["tool_mask"]).sum()))
            series["differ"].append(differing(episodes, batch))
            return batch

    class Steps(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.began = time.perf_counter()

        def on_step_end(self, *_, **__):
            series["step"].append(time.perf_counter() - self.began)

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=16,
        gradient_accumulation_steps=PROMPTS * SAMPLES // 16,
        num_generations=SAMPLES,
        max_completion_length=EPISODE_TOKENS,
        max_tool_calling_iterations=TURNS - 1,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        loss_type="grpo",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
    )
    rows = Dataset.from_list(make_rows(PROMPTS * steps, seed=1))
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    # AutoTokenizer would apply Qwen's pre-tokenizer and return other ids.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    trainer = Trainer(
        policy, [], config, rows, processing_class=tokenizer, environment_factory=Number, callbacks=[Steps()]
    )
    trainer.train()
    (folder / "found.json").write_text(json.dumps(series))


def follow(episodes: list[list[Pair]], prompts: list[list[int]], turns: list[list[int]]) -> None:
    """Add a turn to each unfinished episode. Episodes keep their order; a prompt starts with the whole episode."""
    episodes += [[] for _ in prompts] if not episodes else []
    going = iter(episodes)
    for prompt, turn in zip(prompts, turns, strict=True):
        episode = next(each for each in going if [token for token, _ in each] == prompt[: len(each)])
        episode += [(token, 0) for token in prompt[len(episode) :]] + [(token, 1) for token in turn]


def differing(episodes: list[list[Pair]], batch: dict[str, torch.Tensor]) -> int:
    """Count ids that differ in the loss, are missing or added there, or have a label but were not sampled."""
    ids, is_read = (torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], 1) for name in ("ids", "mask"))
    is_label, count = torch.cat([torch.zeros_like(batch["prompt_ids"]), batch["tool_mask"]], 1), 0
    for episode, row, read, label in zip(episodes, ids, is_read.bool(), is_label, strict=True):
        trained = zip(row[read].tolist(), label[read].tolist(), strict=True)
        count += sum(one != other for one, other in zip_longest(episode, trained))
    return count


def trl(folder: Path, model: Path, steps: int) -> dict[str, list[float]]:
    folder.mkdir(parents=True)
    run([sys.executable, __file__, "--trl", str(folder), str(model), str(steps)], folder)
    return json.loads((folder / "found.json").read_text())


# -- both -------------------------------------------------------------------------------------------------------------------


def cells(series: dict[str, list[float]]) -> dict[str, str]:
    """Return the table row of a run. Its first step counts only for differing tokens."""
    later = {name: values[1:] for name, values in series.items()}
    step, rollout, sampled = (mean(later[name]) for name in ("step", "rollout", "sampled"))
    return {
        "turns": f"{mean(later['turns']):.2f}",
        "won": f"{mean(later['won']):.0%}",
        "step, s": f"{step:.2f} ({min(later['step']):.2f}-{max(later['step']):.2f})",
        "rollout, s": f"{rollout:.2f}",
        "rest, s": f"{step - rollout:.2f}",
        "ms/episode": f"{1000 * step / PROMPTS / SAMPLES:.0f}",
        "sampled tokens/s of rollout": f"{sampled / rollout:,.0f}",
        "sampled tokens/step": f"{sampled:,.0f}",
        "trained tokens/step": f"{mean(later['labels']):,.0f}",
        "differing tokens": f"{sum(series['differ'])} of {sum(series['sampled']):,}",
    }


def main() -> None:
    if sys.argv[1:2] == ["--trl"]:
        folder, model, steps = sys.argv[2:]
        return trl_main(Path(folder), Path(model), int(steps))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "2"
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"--out={args.out}: not empty; expected a new folder")

    out = args.out.absolute()
    model = warm_up(out / "warmup", out / "start")
    for repeat in range(args.repeats):
        results = {way.__name__: way(out / f"{way.__name__}_{repeat}", model, args.steps) for way in (ours, trl)}
        base = mean(results["ours"]["step"][1:])
        for way, values in results.items():
            row = {"run": way} | cells(values) | {"time / ours": f"{mean(values['step'][1:]) / base:.1f}"}
            if repeat == 0 and way == "ours":
                print(f"| {' | '.join(row)} |\n{'|---' * len(row)}|")
            print("| " + " | ".join(row.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
