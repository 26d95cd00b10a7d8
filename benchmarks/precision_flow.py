"""One FP8 precision flow against two: trainer/engine mismatch and learning curves.

    python benchmarks/precision_flow.py --out runs/precision_flow --jobs 2 [--parts mismatch curves] [--seeds 0 1 2]

Makes the model of `warmup/tiny_fp8` and measures with it on a CPU, where FP8 is emulated: exact FP8 values and scales, sums
in float32. The result shows rounding, not the sums of a tensor core, and half a million parameters are not eight billion.

**mismatch**: the engine samples answers to short (level 3) and long sums (level 9), and answers without a stop token of 200
tokens, which show whether the mismatch grows along an answer; once in bfloat16 and once in FP8. Trainers in bfloat16 and in
FP8 score identical tokens. d = trainer - engine log-prob of a sampled token.

    k3 = mean(exp(d) - 1 - d)         estimates KL(engine || trainer), nats a token
    ESS = (sum w)^2 / (n sum w^2)     of the answers, w = exp(sum of d over an answer)

± is a standard error over questions, since answers of a question are not independent. Differences use the same tokens. The last
table compares the trainer with itself: its FP8 forward without gradient against its forward with gradient, where every log-prob
must be equal (otherwise the exit status is 1), and against answers in separate rows, where sums have another order.

**curves**: `grpo/tiny_fp8` with bf16, fp8_rollout and fp8_unified, three seeds each, on short and on long answers. Held
equal: the initial model, the questions of a seed and their sampling seeds, and the rest of the config. Completed runs are read,
not repeated.
"""

import argparse
import itertools
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import precision_flow_curves as curves
import torch
from objectives import tune

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading import Grader
from torchtune_ext.objective.loss import PolicyLoss, Tokens
from torchtune_ext.pipeline.advantages import AdvantageConfig, assign_advantages
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.pipeline.packing import pack
from torchtune_ext.pipeline.rollout import collect_in_order, sample_groups
from torchtune_ext.policy import from_config
from torchtune_ext.policy.builder import build_on_meta, build_policy
from torchtune_ext.policy.fp8.linear import Fp8Config
from torchtune_ext.policy.hf_model import HFModel, named_hf_tensors
from torchtune_ext.policy.logprobs import PackedPolicy
from torchtune_ext.policy.sharding import gather_full
from torchtune_ext.sampling.engine import Engine, EngineConfig, SamplingConfig
from torchtune_ext.tasks.arithmetic import Arithmetic
from torchtune_ext.training.buckets import completion_positions
from torchtune_ext.training.distributed import Ranks
from torchtune_ext.training.learner import Learner
from torchtune_ext.training.precision import Precision, PrecisionConfig

CPU = torch.device("cpu")
LEVELS = {3: "short", 9: "long"}
ANSWERS = {"short": (3, 48), "long": (9, 48), "run-on": (9, 200)}  # level and maximum tokens
TRAINERS = {"bf16": None, "fp8": Fp8Config()}
PAIRS = [  # (engine, trainer, trainer): the first is expected to be farther away
    ("fp8", "bf16", "fp8"),
    ("bf16", "fp8", "bf16"),
]
SAMPLES = 8  # answers per question
SMALL = 1e-5  # loss scale; with a floor meant for activations its gradients would become 0
PLACES = (0, 1, 8, 16, 64, 128)  # first place of each bucket of tokens


def sample_answers(
    model_dir: Path, flow: str, policy: PackedPolicy, questions: int, out: Path
) -> dict[str, list[Group]]:
    """Sample answers by kind, with a real engine that holds the policy's weights in the precision of `flow`."""
    source, tokenizer = HFModel(model_dir), ChatTokenizer(str(model_dir))
    make = partial(from_config, str(model_dir))
    engine = EngineConfig(dtype="bfloat16", max_model_len=256, kv_cache_bytes=128 << 20)
    precision = Precision(PrecisionConfig(flow=flow), build_on_meta(make), source, "bfloat16", engine, CPU)
    answers = {}
    with Engine(str(model_dir), precision.engine, str(out / f"engine_{flow}")) as engine:
        engine.start()
        engine.wait_ready()
        engine.publish(precision.convert_for_engine(partial(named_hf_tensors, policy.model, source)), 0)
        stops = tuple(tokenizer.stop_token_ids)
        for kind, (level, tokens) in ANSWERS.items():
            task = Arithmetic(seed=17, count=questions, level=level, split="heldout")
            grader = Grader(task, 1, 10.0)
            try:
                sampling = SamplingConfig(tokens, seed=level, stop_token_ids=() if kind == "run-on" else stops)
                problems = [task[i] for i in range(questions)]
                groups = collect_in_order(sample_groups(problems, SAMPLES, sampling, engine, tokenizer, grader))
                answers[kind] = [replace(g, samples=tuple(replace(s, in_loss=True) for s in g.samples)) for g in groups]
            finally:
                grader.close()
    return answers


def score_groups(
    policy: PackedPolicy, groups: list[Group], alone: bool = False, gradient: bool = False
) -> list[np.ndarray]:
    """Return the log-probs of the sampled tokens of each question, in the order of its answers.

    Args:
        alone: put each answer in its own row, without packing.
        gradient: use the forward that saves activations for a backward.
    """
    logprobs = []
    for group in groups:
        parts = [Group(group.problem, group.prompt_tokens, (s,)) for s in group.samples] if alone else [group]
        rows = [row for part in parts for row in pack([part], 4096)[0]]
        if gradient:
            values = [policy(row).logprobs_L.detach() for row in rows]
        else:
            learner = Learner(policy, PolicyLoss(), Ranks(0, 1, CPU))
            values = [scores.logprobs_L for scores in learner.logprobs(rows)]
        logprobs.append(torch.cat(values).double().numpy())
    return logprobs


def engine_logprobs(groups: list[Group]) -> list[np.ndarray]:
    return [pack([group], 4096)[0][0].logprobs_L.double().numpy() for group in groups]


def by_question(values: list[np.ndarray]) -> tuple[float, float]:
    """Return the mean over tokens, and its standard error over questions (linearized ratio)."""
    sums, sizes = np.array([v.sum() for v in values]), np.array([len(v) for v in values])
    mean = sums.sum() / sizes.sum()
    rest = sums - mean * sizes
    return mean, math.sqrt(len(values) / (len(values) - 1) * (rest**2).sum()) / sizes.sum()


def k3(d: np.ndarray) -> np.ndarray:
    return np.expm1(d) - d


def ess(d: list[np.ndarray], groups: list[Group]) -> float:
    """Return the effective sample size as a fraction of the answers."""
    sums = [part.sum() for q, g in zip(d, groups, strict=True) for part in np.split(q, np.cumsum(_lengths(g))[:-1])]
    w = np.exp(np.array(sums) - max(sums))
    return w.sum() ** 2 / (len(w) * (w**2).sum())


def _lengths(group: Group) -> list[int]:
    return [len(sample.completion.tokens) for sample in group.samples]


def format_error(mean_and_error: tuple[float, float], unit: float = 1.0) -> str:
    mean, error = mean_and_error
    return f"{mean / unit:.2f} ± {error / unit:.2f}"


def mismatch(model_dir: Path, questions: int, out: Path) -> tuple[str, bool]:
    """Return the mismatch tables, and whether the trainer agrees with itself."""
    make, source = partial(from_config, str(model_dir)), HFModel(model_dir)
    policies = {name: build_policy(make, source, CPU, torch.bfloat16, fp8=config) for name, config in TRAINERS.items()}
    answers = {
        engine: sample_answers(model_dir, flow, policies["bf16"], questions, out)
        for engine, flow in (("bf16", "bf16"), ("fp8", "fp8_rollout"))
    }
    d = {
        (kind, engine, name): [
            t - e for t, e in zip(score_groups(policy, groups[kind]), engine_logprobs(groups[kind]), strict=True)
        ]
        for kind in ANSWERS
        for engine, groups in answers.items()
        for name, policy in policies.items()
    }  # fmt: skip
    lines = [
        "| answers | engine | trainer | tokens | mean \\|d\\| / 1e-3 | k3 / 1e-4 | p99 \\|d\\| | max \\|d\\| | ESS |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (kind, engine, name), parts in d.items():
        size = np.abs(np.concatenate(parts))
        absolute, kl = by_question([np.abs(p) for p in parts]), by_question([k3(p) for p in parts])
        lines.append(
            f"| {kind} | {engine} | {name} | {size.size:,} | {format_error(absolute, 1e-3)} | {format_error(kl, 1e-4)} | "
            f"{np.quantile(size, 0.99):.3f} | {size.max():.2f} | {ess(parts, answers[engine][kind]):.3f} |"
        )
    lines += ["", "| answers | engine | larger - smaller | mean \\|d\\| / 1e-3 | k3 / 1e-4 |", "|---|---|---|---|---|"]
    for kind in ANSWERS:
        for engine, far, near in PAIRS:
            pairs = list(zip(d[kind, engine, far], d[kind, engine, near], strict=True))
            absolute, kl = (by_question([f(a) - f(b) for a, b in pairs]) for f in (np.abs, k3))
            lines.append(
                f"| {kind} | {engine} | {far} - {near} | {format_error(absolute, 1e-3)} | {format_error(kl, 1e-4)} |"
            )
    lines += ["", *_by_place(d, answers), "", *_gradients(model_dir, policies, answers["fp8"])]
    lines += ["", *_same_engine(policies["fp8"], answers["fp8"])]
    return "\n".join(lines), "| same rows, with gradient | 0.0 |" in "\n".join(lines)


def _by_place(d: dict, answers: dict) -> list[str]:
    """Does the distance grow along an answer?"""
    names = [f"{a}-{b - 1}" if b - a > 1 else f"{a}" for a, b in itertools.pairwise(PLACES)]
    lines = ["| run-on answers: mean \\|d\\| / 1e-3 at token | " + " | ".join([*names, f"{PLACES[-1]}-"]) + " |"]
    lines.append("|---" * (len(PLACES) + 1) + "|")
    for engine, name in (("bf16", "bf16"), ("fp8", "bf16"), ("fp8", "fp8")):
        where = [
            completion_positions(pack([group], 4096)[0][0].completion_index_L).numpy()
            for group in answers[engine]["run-on"]
        ]
        cells = []
        for low, high in zip(PLACES, [*PLACES[1:], 1 << 30], strict=True):
            inside = [np.abs(q[(w >= low) & (w < high)]) for q, w in zip(d["run-on", engine, name], where, strict=True)]
            cells.append(format_error(by_question(inside), 1e-3))
        lines.append(f"| engine {engine}, trainer {name} | " + " | ".join(cells) + " |")
    return lines


def _gradients(model_dir: Path, policies: dict[str, PackedPolicy], answers: dict[str, list[Group]]) -> list[str]:
    """Compare the gradient of GRPO's loss on these answers with the gradient in float32."""
    source, make = HFModel(model_dir), partial(from_config, str(model_dir))
    exact = build_policy(make, source, CPU, torch.float32)
    forward_alone = build_policy(
        make, source, CPU, torch.bfloat16, fp8=Fp8Config(save_activations="full", backward="full")
    )
    groups = assign_advantages([g for kind in LEVELS.values() for g in answers[kind]], AdvantageConfig(), 48)[0]
    rows = pack(groups, 2048)[0]

    def gradient(policy: PackedPolicy, factor: float = 1.0) -> torch.Tensor:
        def loss(tokens: Tokens) -> tuple[torch.Tensor, dict]:
            return factor * PolicyLoss()(tokens)[0], {}

        policy.model.zero_grad()
        Learner(policy, loss, Ranks(0, 1, CPU)).forward_backward(rows)
        return torch.cat([gather_full(p.grad).flatten().double() / factor for p in policy.model.parameters()])

    want = gradient(exact)
    lines = ["| gradient of | cosine similarity with float32 | relative error |", "|---|---|---|"]
    cases = [(name, policy, 1.0) for name, policy in policies.items()]
    cases += [(f"fp8, loss x {SMALL:g}", policies["fp8"], SMALL), ("fp8 in the forward alone", forward_alone, 1.0)]
    for name, policy, factor in cases:
        result = gradient(policy, factor)
        cosine, error = result @ want / result.norm() / want.norm(), (result - want).norm() / want.norm()
        lines.append(f"| {name} | {cosine:.4f} | {error:.1%} |")
    return lines


def _same_engine(policy: PackedPolicy, answers: dict[str, list[Group]]) -> list[str]:
    groups = [group for groups in answers.values() for group in groups]
    base = score_groups(policy, groups)
    lines = ["| the trainer's FP8 forward against itself | largest \\|d\\| | mean \\|d\\| / 1e-3 |", "|---|---|---|"]
    for name, other in (
        ("same rows, with gradient", score_groups(policy, groups, gradient=True)),
        ("each answer alone in its row", score_groups(policy, groups, alone=True)),
    ):
        size = [np.abs(a - b) for a, b in zip(base, other, strict=True)]
        lines.append(f"| {name} | {max(s.max() for s in size)} | {format_error(by_question(size), 1e-3)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/precision_flow"))
    parser.add_argument("--parts", nargs="+", choices=("mismatch", "curves"), default=["mismatch", "curves"])
    parser.add_argument("--questions", type=int, default=96, help="of each length, for the mismatch")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, with one OpenMP thread each")
    parser.add_argument("--plots", type=Path, default=None, help="folder of the plot (default: --out)")
    parser.add_argument("--grpo", nargs="*", default=[], help="key=value for every GRPO run")
    args = parser.parse_args()
    warm, same = args.out / "warmup", True
    if not (warm / "done").is_file():
        tune(args.out / "warmup.txt", 0, "warmup_sft", "--config", "warmup/tiny_fp8", f"output_dir={warm}")
        (warm / "done").touch()
    if "mismatch" in args.parts:
        text, same = mismatch(warm / "model", args.questions, args.out)
        (args.out / "mismatch.md").write_text(text + "\n")
        print(text, flush=True)
    if "curves" in args.parts:
        threads = 1 if args.jobs > 1 else 0
        runs = curves.train_all(args.out, LEVELS, args.seeds, warm / "model", threads, args.jobs, args.grpo)
        text = curves.report(runs, LEVELS)
        (args.out / "curves.md").write_text(text + "\n")
        print(text)
        curves.draw(runs, LEVELS, (args.plots or args.out) / "precision_flow.png")
        same = same and all(run.done for run in runs)
    sys.exit(not same)


if __name__ == "__main__":
    main()
