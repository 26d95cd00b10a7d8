"""Small real runs: a random model of 0.1 million parameters and the command of a user."""

import os
import sys
from pathlib import Path

from torchtune_ext.policy.scratch import ModelShape, make_tokenizer, write_model
from torchtune_ext.telemetry.metrics import read_metrics

# These metrics differ between two runs of the same seed. The counters of the engine and of the benchmark service depend
# on request timing, and restart at 0 when a run resumes.
VOLATILE_PREFIXES = ("time/", "speed/", "memory/", "engine/", "engines/", "bench/")


def write_tiny_model(folder: Path, **larger: int) -> None:
    """Write a random Qwen2 with its tokenizer in Hugging Face format. `larger`: overridden fields of `ModelShape`."""
    text = ["Write about something. Go on. " * 3 + "The quick brown fox jumps over the lazy dog.\n"] * 8
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    sizes |= {"num_key_value_heads": 1, "max_position_embeddings": 256, "vocab_size": 400, **larger}
    shape = ModelShape(**sizes)
    write_model(folder, make_tokenizer(text, ["x"], [], 400), shape, seed=3)


def command(recipe: str, *args: str, ranks: int = 1, config: str = "run.yaml") -> list[str]:
    launch = ["--nproc_per_node", str(ranks)] if ranks > 1 else []
    return [sys.executable, "-m", "torchtune_ext", "run", *launch, recipe, "--config", config, *args]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """Return the metrics of a run, one record per step, without the timing metrics."""
    return [
        {k: v for k, v in line.items() if not k.startswith(VOLATILE_PREFIXES)}
        for line in read_metrics(run_dir / "metrics.jsonl")
    ]
