"""Latency of a training step on conversations against one sequence per turn.

    python benchmarks/turns.py [--turns 1 4 16 64 128] [--thoughts 0] [--repeats 5]

A conversation of T turns is one completion here: environment tokens are inputs, and no token is computed twice. With a separate
sample per turn, whose prompt is the whole earlier conversation, the number of tokens grows with the square of T. Both variants
compute the same loss (clip 0.2, equal weight per label) over a group of 4 conversations with turns of 24 tokens and replies of
16, after a prompt of 64. With `--thoughts`, each turn begins with that many tokens that no later context contains
(`tokenizer.history: template`): the rest of a turn is in the row a second time, as the beginning of a branch.

Before the timing, both variants compute the gradient in float64, which must be equal up to 1e-6. Then they alternate in one
process. A ratio is a ratio of medians; its bounds are the ratios of single turns.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from step import CPU, SMALL, SPECIAL_TOKENS, Variant, differences, make_model

from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.pipeline.groups import Group, Sample
from torchtune_ext.pipeline.packing import pack
from torchtune_ext.policy import from_config
from torchtune_ext.policy.builder import build_policy
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.sampling.types import Completion
from torchtune_ext.tasks.task import Problem
from torchtune_ext.training.distributed import Ranks
from torchtune_ext.training.learner import Learner

SAMPLES, PROMPT, TURN, ANSWER = 4, 64, 24, 16  # conversations, tokens, tokens, tokens


def conversations(turns: int, thoughts: int) -> Group:
    rng = np.random.default_rng(0)

    def draw(count: int) -> np.ndarray:
        return rng.integers(len(SPECIAL_TOKENS), SMALL.vocab_size, count, dtype=np.int32)

    def sample() -> Sample:
        tokens, kept, spans = draw(TURN), [PROMPT], [(0, TURN)]
        for _ in range(turns - 1):
            left = tokens[thoughts - TURN :] if thoughts else tokens[:0]
            kept.append(kept[-1] + spans[-1][0] - (spans[-2][1] if len(spans) > 1 else 0))  # the context before
            tokens = np.concatenate([tokens, left, draw(ANSWER), draw(TURN)])
            spans.append((len(tokens) - TURN, len(tokens)))
        zeros, kept = np.zeros(len(tokens), np.int32), tuple(kept) if thoughts else ()
        completion = Completion(
            tokens, zeros.astype(np.float32), zeros, "completed", turns=tuple(spans), kept_prefix_lens=kept
        )
        return Sample(completion, advantage=rng.normal(), in_loss=True)

    return Group(Problem("game", (), None), draw(PROMPT), tuple(sample() for _ in range(SAMPLES)))


def split_turns(group: Group) -> list[Group]:
    """Return the same labels, each turn after its own prompt."""
    groups = []
    for sample in group.samples:
        whole, ids = sample.completion, np.concatenate([group.prompt_tokens, sample.completion.tokens])
        for path, (start, stop) in zip(whole.turn_paths(PROMPT), whole.turns, strict=True):
            turn = Completion(whole.tokens[start:stop], whole.logprobs[start:stop], whole.versions[start:stop], "stop")
            groups.append(Group(group.problem, ids[path[:-TURN]], (replace(sample, completion=turn),)))
    return groups


def make_variants(turns: int, thoughts: int, folder: Path, dtype: torch.dtype) -> dict[str, Variant]:
    source, group = HFModel(folder), conversations(turns, thoughts)
    policy = build_policy(lambda: from_config(str(folder)), source, CPU, torch.float32)
    if dtype == torch.float64:
        policy.model.double()
    learner, ways = Learner(policy, PolicyLoss(), Ranks(0, 1, CPU)), {}
    for name, groups in {"packed": [group], "each turn": split_turns(group)}.items():
        rows, stats = pack(groups, 8192, cost_model=learner.cost_model)
        ways[name] = Variant(policy.model, source.to_hf, stats.tokens, lambda rows=rows: learner.forward_backward(rows))
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", nargs="+", type=int, default=[1, 4, 16, 64, 128])
    parser.add_argument("--thoughts", type=int, default=0, help=f"below {TURN}")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}\n")
    columns = "turns", "tokens, packed", "tokens, sequence per turn", "seconds, packed", "seconds, sequence per turn"
    columns += "speedup", "gradient difference, float64"
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(Path(name), replace(SMALL, max_position_embeddings=8192))
        for turns in args.turns:
            exact = differences(make_variants(turns, args.thoughts, folder, torch.float64), torch.float64)["each turn"]
            ways = make_variants(turns, args.thoughts, folder, torch.float32)
            differences(ways, torch.float32)  # this also warms up
            times = [[way.seconds() for way in ways.values()] for _ in range(args.repeats)]
            ours, theirs = map(median, zip(*times, strict=True))
            ratios = [other / own for own, other in times]
            tokens = [f"{way.tokens:,}" for way in ways.values()]
            cells = turns, *tokens, f"{ours:.3f}", f"{theirs:.3f}"
            spread = f"{theirs / ours:.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
            print("| " + " | ".join(map(str, (*cells, spread, f"{exact:.0e}"))) + " |", flush=True)


if __name__ == "__main__":
    main()
