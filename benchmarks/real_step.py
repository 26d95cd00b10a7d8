"""Latency of a full GRPO step with a pretrained model, by phase, against TRL.

    python benchmarks/real_step.py --out runs/real_step [--against trl] [--dtypes bfloat16 float32] [--turns 2] [--steps 3]
    PYTHONPATH=runs/trl python benchmarks/real_step.py ...      # TRL's folder, see step.py

A step samples, grades, makes two updates and, here, publishes. Both systems have the same model (`make pretrained`), prompts,
reward, learning rate, numbers of prompts, samples and updates, and exactly 16 tokens a sample. Ours is `tune run grpo_full`
with its engine, gate and canary. TRL generates with transformers, since it does not support this vLLM version; in bfloat16 its
weights are bfloat16, too, which is its fastest mode, while ours keeps float32 masters. Each turn is a separate process, and the
systems alternate. The first step of a process warms up; a figure is the median of the others. TRL's "backward" is the step
minus its other phases. "GiB" is the peak resident memory of one process, sampled every half second.

"matmul share" is the FLOP rate of forward and backward (6 FLOPs per layer weight and token, and per output-layer weight and
label) over the rate of a product of two 2048 x 2048 matrices in the same process, with the same threads and dtype.
"""

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from unittest import mock

import psutil
import torch

from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.recipes import grpo
from torchtune_ext.telemetry.metrics import read_metrics

SHAPES = {"short": (16, 8, 12), "long": (4, 16, 300)}  # prompts, samples of each, words of a prompt
TOKENS = 16  # of a sample
UNUSED = 3  # <repo_name>, which no answer contains, ends a sample: so every sample has 16 tokens, as the table shows
WORDS = "river stone cloud lamp paper green seven bright table ocean music tiger window garden silver north".split()
PHASES = ("sample", "log-probs", "backward", "optimizer", "publish")


def prompt(number: int, words: int) -> str:
    text = " ".join(WORDS[(number * 7 + i * i + 3 * i) % len(WORDS)] for i in range(words))
    return f"Continue these words: {text}"


def score(problem, text: str) -> float:
    """Return the fraction of the 26 letters that the text contains."""
    return len({letter for letter in text.lower() if letter.isalpha()}) / 26


# -- ours -------------------------------------------------------------------------------------------------------------------


@grpo.parse
def recipe_main(cfg) -> None:
    """The recipe, followed by the rate of a matrix product in the same process."""
    grpo.run_recipe(grpo.partial(grpo.GRPORecipe, grpo.load_config(grpo.Config, cfg)))
    gc.collect()
    rate = matmul_rate(cfg.dtype)
    (Path(cfg.output_dir) / "matmul").write_text(f"{rate}")


def matmul_rate(dtype: str) -> float:
    """Return the FLOP/s of a matrix product."""
    a, b, out = (torch.randn(2048, 2048, dtype=getattr(torch, dtype)) for _ in range(3))
    seconds = []
    for _ in range(12):
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        seconds.append(time.perf_counter() - began)
    return 2 * 2048**3 / median(seconds[2:])


def ours(folder: Path, model: Path, shape: str, dtype: str, steps: int) -> dict[str, list[float]]:
    prompts, samples, words = SHAPES[shape]
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": prompt(i, words)}) + "\n" for i in range(prompts * steps)))
    settings = {
        "model_dir": model,
        "output_dir": folder,
        "dtype": dtype,
        "task.path": rows,
        "task.grader": "real_step.score",
        "task.answer": None,
        "task.prompt": '"{question}"',
        "task.system": None,
        "evaluation.task": None,
        "max_steps": steps,
        "prompts_per_step": prompts,
        "samples_per_prompt": samples,
        "row_tokens": 4096,
        "engine.max_model_len": 1024,
        "sampling": f"{{max_tokens: {TOKENS}, temperature: 1.0, stop_token_ids: [{UNUSED}]}}",
        "optimizer.lr": 1e-5,
        "schedule": "{}",
        "checkpoints.every": 1000000,
    }
    options = [f"{key}={'null' if value is None else value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "torchtune_ext", "run", __file__, "--config", "grpo/smollm2_jsonl", *options]
    with peaks("sampling.client_process") as (trainer, engine):
        run(command, folder)
    config = json.loads((model / "config.json").read_text())
    series = defaultdict(list)
    table = config["vocab_size"] * config["hidden_size"]
    layers = sum(tensor.numel() for _, tensor in HFModel(model).tensors()) - table
    peak = float((folder / "matmul").read_text())
    lines = defaultdict(dict)
    for line in read_metrics(folder / "metrics.jsonl"):
        lines[line["step"]] |= line
    for number, line in lines.items():
        if number < 2:
            continue
        names = ("time/sample", "time/train/logprobs", "time/train/backward", "time/train/optimizer", "time/publish")
        for phase, name in zip(PHASES, names, strict=True):
            series[phase].append(line.get(name, 0.0))
        series["step"].append(line["time/step"] - line.get("time/save", 0.0))
        flops = 6 * (layers * line["pack/tokens"] + table * line["pack/labels"])
        series["matmul share"].append(flops / line["time/train/backward"] / peak)
        series["reward"].append(line["reward/mean"])
        series["tokens"].append(line["length/mean"])
    series["GiB"] = [trainer[0] / 2**30]
    series["engine GiB"] = [engine[0] / 2**30]
    return series


# -- TRL --------------------------------------------------------------------------------------------------------------------


def trl_main(folder: Path, model: Path, shape: str, dtype: str, steps: int) -> None:
    """Run TRL in this process and write the seconds of each step."""
    with mock.patch("trl.import_utils.is_vllm_available", return_value=False):
        from trl import GRPOConfig, GRPOTrainer
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    prompts, samples, words = SHAPES[shape]
    seconds, series = defaultdict(float), defaultdict(list)

    @contextmanager
    def timed(phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds[phase] += time.perf_counter() - began

    class Trainer(GRPOTrainer):
        def _generate_single_turn(self, *args, **options):
            with timed("sample"):
                return super()._generate_single_turn(*args, **options)

        def _get_per_token_logps_and_entropies(self, *args, **options):
            with nullcontext() if torch.is_grad_enabled() else timed("log-probs"):
                return super()._get_per_token_logps_and_entropies(*args, **options)

    class Steps(TrainerCallback):
        """Two updates are a step."""

        began = time.perf_counter()

        def on_optimizer_step(self, *_, **__):
            seconds["optimizer"] += time.perf_counter() - self.before

        def on_pre_optimizer_step(self, *_, **__):
            self.before = time.perf_counter()

        def on_step_end(self, args, state, *_, **__):
            if state.global_step % 2 == 0:
                now = time.perf_counter()
                seconds["step"], Steps.began = now - Steps.began, now
                seconds["backward"] = seconds["step"] - sum(seconds.get(phase, 0.0) for phase in PHASES)
                for name, value in seconds.items():
                    series[name].append(value)
                seconds.clear()

    def reward(completions, **_):
        return [score(None, completion[0]["content"]) for completion in completions]

    micro = min(16, prompts * samples // 2)
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=prompts * samples // 2 // micro,
        steps_per_generation=prompts * samples // micro,
        num_generations=samples,
        max_completion_length=TOKENS,
        generation_kwargs={"min_new_tokens": TOKENS},
        max_steps=2 * steps,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        loss_type="grpo",
        beta=0.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=2,
        shuffle_dataset=False,
    )
    rows = [{"prompt": [{"role": "user", "content": prompt(i, words)}]} for i in range(prompts * steps)]
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = Trainer(policy, reward, config, Dataset.from_list(rows), processing_class=tokenizer, callbacks=[Steps()])
    trainer.train()
    for line in trainer.state.log_history:
        if "reward" in line:
            series["reward"].append(line["reward"])
            series["tokens"].append(line["completions/mean_length"])
    (folder / "found.json").write_text(json.dumps({name: values[1:] for name, values in series.items()}))


def trl(folder: Path, model: Path, shape: str, dtype: str, steps: int) -> dict[str, list[float]]:
    with peaks("") as (trainer, _):
        run([sys.executable, __file__, "--trl", str(folder), str(model), shape, dtype, str(steps)], folder)
    return json.loads((folder / "found.json").read_text()) | {"GiB": [trainer[0] / 2**30]}


# -- both -------------------------------------------------------------------------------------------------------------------


def run(command: list[str], folder: Path) -> None:
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    with (folder / "log").open("w") as log:
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"status {done.returncode}: {folder / 'log'} says why")


@contextmanager
def peaks(beside: str) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the peak memory, in bytes, of the process started inside and of the process with the argument as command part."""
    own, other, done = [0], [0], threading.Event()

    def look() -> None:
        while not done.wait(0.5):
            for process in psutil.Process().children(recursive=True):
                try:
                    peak = own if not beside or beside not in " ".join(process.cmdline()) else other
                    peak[0] = max(peak[0], process.memory_info().rss)
                except psutil.Error:
                    pass

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield own, other
    finally:
        done.set()
        thread.join()


def main() -> None:
    if sys.argv[1:2] == ["--trl"]:
        folder, model, shape, dtype, steps = sys.argv[2:]
        return trl_main(Path(folder), Path(model), shape, dtype, int(steps))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--against", nargs="*", choices=["trl"], default=[])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    ways = {"ours": ours, "trl": trl} if args.against else {"ours": ours}
    last = ["matmul share", "reward", "tokens", "GiB", "engine GiB"]
    columns = ["shape", "dtype", "implementation", "step, s", *PHASES[:-1], "weight sync", "time / ours", *last]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for shape in args.shapes:
        results = defaultdict(lambda: defaultdict(list))
        for turn in range(args.turns):
            for dtype in args.dtypes:
                for name, way in ways.items():
                    folder = (args.out / f"{shape}_{dtype}_{name}_{turn}").absolute()
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.mkdir(parents=True)
                    for key, values in way(folder, args.model.absolute(), shape, dtype, args.steps).items():
                        results[dtype, name][key] += values
        for (dtype, name), values in results.items():
            row = {key: median(numbers) for key, numbers in values.items()}
            spread = f"{row['step']:.1f} ({min(values['step']):.1f}-{max(values['step']):.1f})"
            cells = [shape, dtype, name, spread, *(f"{row[phase]:.1f}" if phase in row else "" for phase in PHASES)]
            cells.append(f"{row['step'] / median(results[dtype, 'ours']['step']):.2f}")
            cells += [f"{row[key]:.2f}" if key in row else "" for key in last]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(recipe_main() if "--config" in sys.argv else main())
