"""Latency of a training step on packed rows against other ways to compute the same step.

    python benchmarks/step.py [--against repeated dense trl trl_labels] [--shapes 300/100 1200/150 60/200] [--repeats 5]
    python benchmarks/step.py --device cuda      # in bfloat16, with FlexAttention

A step is forward and backward of GRPO's loss (clip 0.2, equal weight per label) over as many groups of 16 completions as a row
of `--row-tokens` holds. A shape is the tokens of a prompt / the mean tokens of a completion, whose lengths vary by a quarter.
Generation, packing, padding and the optimizer are not included. "packed" is the project's own step. The alternatives:

* repeated: the same model and code, each completion in its own sequence after a copy of its prompt, without padding. On a CPU
  each sequence is one causal attention call.
* dense: the packed rows with a boolean mask [T, T] for attention, as in OpenPipe's deductive-reasoning.
* trl: `GRPOTrainer.training_step` of TRL with its metrics, a group in a batch, without gradient checkpointing. Sequences are
  padded to the longest. On a CPU it computes the log-probs of prompts and padding, too; on a GPU only those of labels.
* trl_labels: the same, with log-probs of labels only on a CPU, too.

TRL is not a dependency of the project. Without TRL, its rows are skipped. To install it, next to accelerate and datasets::

    pip install --no-deps --target runs/trl trl==1.16.0
    PYTHONPATH=runs/trl python benchmarks/step.py

Before the timing, every way computes the gradient of the small model on the same groups on the CPU in float64. It must equal
the gradient of the packed rows up to 1e-6; otherwise the script exits with an error. Then the ways alternate in one process, so
that noise of the machine affects all of them. A ratio is a ratio of medians; its bounds are the ratios of single turns.
"""

import argparse
import gc
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np
import step_trl
import torch
from tokenizers import Tokenizer, models
from torch import Tensor, nn

from torchtune_ext.kernels.packed_attention import dense_mask, packed_mask
from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.pipeline.groups import Group, Sample
from torchtune_ext.pipeline.packing import pack
from torchtune_ext.policy import from_config
from torchtune_ext.policy.builder import build_policy
from torchtune_ext.policy.hf_model import HFModel, clean_name
from torchtune_ext.policy.scratch import SPECIAL_TOKENS, ModelShape, write_model
from torchtune_ext.policy.sharding import gather_full
from torchtune_ext.sampling.types import Completion
from torchtune_ext.tasks.task import Problem
from torchtune_ext.training.distributed import Ranks
from torchtune_ext.training.learner import Learner

SAMPLES = 16  # completions of a prompt
SPREAD = 0.25  # a completion has (1 - SPREAD) to (1 + SPREAD) times the mean number of tokens
CPU = torch.device("cpu")
SMALL = ModelShape(hidden_size=256, num_hidden_layers=3, intermediate_size=688, max_position_embeddings=4096)
# The sizes of Qwen2.5-0.5B.
LARGE = replace(
    SMALL, hidden_size=896, num_hidden_layers=24, num_attention_heads=14, intermediate_size=4864, vocab_size=151936
)
# The relative difference of two gradients stays below these. Float64 is the check (norms and positions are computed in float32
# there, too). The others are rounding: of float32 at most 1e-5, as everywhere in the tests; a gradient in bfloat16 is 3.5% away
# from float32's (results/precision_flow.md), and two of them up to twice as far from each other.
BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 0.1}


@dataclass(frozen=True, slots=True)
class Case:
    """Shared inputs of all ways of a comparison."""

    model: Path  # a directory in Hugging Face format
    groups: list[Group]
    row_tokens: int
    device: torch.device
    dtype: torch.dtype  # dtype of the computation; weights are in float32, or all in float64


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute the step."""

    model: nn.Module
    hf_name: Callable[[str, Tensor], tuple[str, Tensor]]  # of a parameter, with the layout that Hugging Face gives it
    tokens: int  # tokens through the layers, padding included
    step: Callable[[], object]  # adds the gradient of the loss to that of the parameters

    def gradient(self) -> dict[str, Tensor]:
        """Take the step once, clear the gradient and return it."""
        self.step()
        grads = dict(
            self.hf_name(clean_name(name), gather_full(p.grad).double().cpu())
            for name, p in self.model.named_parameters()
        )
        self.model.zero_grad(set_to_none=True)
        return grads

    def seconds(self) -> float:
        """Take the step once and clear the gradient. Return the seconds of the step."""
        started = clock()
        self.step()
        seconds = clock() - started
        self.model.zero_grad(set_to_none=True)
        return seconds


def clock() -> float:
    """Return the clock in seconds, after a synchronization of the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def shape(text: str) -> tuple[int, int]:
    """Parse "300/100": tokens of a prompt and mean tokens of a completion."""
    prompt, completion = map(int, text.split("/"))
    return prompt, completion


def make_model(folder: Path, shape: ModelShape) -> Path:
    """Write a random model whose vocabulary has exactly the size of `shape`."""
    words = [*SPECIAL_TOKENS, *(f"w{i}" for i in range(shape.vocab_size - len(SPECIAL_TOKENS)))]
    write_model(folder, Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)})), shape, seed=0)
    return folder


def make_groups(prompt: int, completion: int, row_tokens: int) -> list[Group]:
    """Return as many random groups as fit in a row at the mean completion length."""
    rng = np.random.default_rng(0)

    def draw(length: int) -> np.ndarray:
        # The padding token is excluded: in transformers its embedding gets no gradient.
        return rng.integers(len(SPECIAL_TOKENS), SMALL.vocab_size, length, dtype=np.int32)

    def sample() -> Sample:
        length = rng.integers(round((1 - SPREAD) * completion), round((1 + SPREAD) * completion), endpoint=True)
        sampled = Completion(draw(length), np.zeros(length, np.float32), np.zeros(length, np.int32), "stop")
        return Sample(sampled, advantage=rng.normal(), in_loss=True)

    count = max(1, row_tokens // (prompt + SAMPLES * completion))
    return [
        Group(Problem(f"problem-{number}", (), None), draw(prompt), tuple(sample() for _ in range(SAMPLES)))
        for number in range(count)
    ]


def own_variants(names: list[str], case: Case) -> dict[str, Variant]:
    """Return the ways that use the project's own code. They share one model."""
    source, in_float64 = HFModel(case.model), case.dtype == torch.float64
    compute_dtype = torch.float32 if in_float64 else case.dtype
    policy = build_policy(lambda: from_config(str(case.model)), source, case.device, compute_dtype)
    if in_float64:
        policy.model.double()
    learner = Learner(policy, PolicyLoss(), Ranks(0, 1, case.device))
    packed, _ = pack(case.groups, case.row_tokens, cost_model=learner.cost_model)
    alone = [replace(group, samples=(sample,)) for group in case.groups for sample in group.samples]
    repeated = pack(alone, case.row_tokens, cost_model=learner.cost_model)[0]

    def way(name: str) -> Variant:
        rows = repeated if name == "repeated" else packed
        tokens = sum(row.tokens_T.numel() for row in rows)

        def step() -> None:
            mask = whole_mask if name == "dense" else packed_mask
            with mock.patch("torchtune_ext.policy.logprobs.packed_mask", mask):
                learner.forward_backward(rows)

        return Variant(policy.model, source.to_hf, tokens, step)

    return {name: way(name) for name in names}


def whole_mask(ends_T: Tensor, *_) -> Tensor:
    return dense_mask(ends_T)[None]


def trl_variants(names: list[str], case: Case) -> dict[str, Variant]:
    """Return the ways that use TRL's trainer. They share one model, too."""
    model, tokens, step = step_trl.prepare(case.model, case.groups, case.device, case.dtype)
    steps = {"trl": step, "trl_labels": lambda: step(labels_only=True)}
    return {name: Variant(model, lambda *named: named, tokens, steps[name]) for name in names}


def make_variants(names: list[str], case: Case) -> dict[str, Variant]:
    trl = [name for name in names if name.startswith("trl")]
    ways = own_variants(["packed", *(name for name in names if name not in trl)], case)
    return ways | (trl_variants(trl, case) if trl else {})


def differences(ways: dict[str, Variant], dtype: torch.dtype) -> dict[str, float]:
    """Return the relative difference of each way's gradient to the gradient of the packed rows (norm over all parameters).

    Raises:
        RuntimeError: a difference exceeds rounding.
    """
    want, distances = ways["packed"].gradient(), {"packed": 0.0}
    size = sum(tensor.square().sum() for tensor in want.values()).sqrt().item()
    for name in list(ways)[1:]:
        result = ways[name].gradient()
        distances[name] = sum((result[n] - want[n]).square().sum() for n in want).sqrt().item() / size
        if not distances[name] <= BOUNDS[dtype]:
            raise RuntimeError(
                f"the gradient of {name!r} differs from that of the packed rows by {distances[name]:.1e} in {dtype}, more than "
                f"{BOUNDS[dtype]:.0e}: it computes something else, so its time is not comparable"
            )
    return distances


def measure(prompt: int, completion: int, names: list[str], checked: Path, timed: Path, args: argparse.Namespace):
    """Print the rows of a shape."""
    check = Case(checked, make_groups(prompt, completion, args.row_tokens), args.row_tokens, CPU, torch.float64)
    exact = differences(make_variants(names, check), check.dtype)
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    case = replace(check, model=timed, device=torch.device(args.device), dtype=dtype)
    gc.collect()  # a trainer has reference cycles
    ways = make_variants(names, case)
    rounded = differences(ways, dtype)  # this also warms up
    turns = [{name: way.seconds() for name, way in ways.items()} for _ in range(args.repeats)]
    for name, way in ways.items():
        seconds, ratios = [turn[name] for turn in turns], [turn[name] / turn["packed"] for turn in turns]
        ratio = median(seconds) / median(turn["packed"] for turn in turns)
        cells = (
            f"{prompt}/{completion}, {len(case.groups)} groups",
            name,
            f"{way.tokens:,}",
            f"{median(seconds):.3f} ({min(seconds):.3f}-{max(seconds):.3f})",
            f"{ratio:.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            f"{exact[name]:.0e}, {rounded[name]:.0e}",
        )
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ["repeated", "dense", "trl", "trl_labels"]
    parser.add_argument("--against", nargs="+", choices=known, default=known)
    parser.add_argument("--shapes", nargs="+", type=shape, default=[(300, 100), (1200, 150), (60, 200)])
    parser.add_argument("--row-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device=cuda: no CUDA device found. Fix: omit --device")
    names = args.against
    if importlib.util.find_spec("trl") is None and any(name.startswith("trl") for name in names):
        names = [name for name in names if not name.startswith("trl")]
        print("TRL skipped: not installed. Fix: install it as in the docstring of this script\n")
    print(f"{args.device}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    columns = "shape", "implementation", "tokens", "seconds", "time / packed", "gradient difference: float64, as timed"
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    with tempfile.TemporaryDirectory() as folder:
        small = make_model(Path(folder) / "small", SMALL)
        timed = small if args.device == "cpu" else make_model(Path(folder) / "large", LARGE)
        for prompt, completion in args.shapes:
            measure(prompt, completion, names, small, timed, args)


if __name__ == "__main__":
    main()
