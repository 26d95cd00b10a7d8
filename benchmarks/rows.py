"""Packing efficiency on several ranks: rows of one length, distributed by count, against balanced rows.

python benchmarks/rows.py

The script counts tokens; nothing is trained. Batch, samples, updates and row length come from the shipped configs. Prompt and
answer lengths fit the task that each line names: answers are lognormal (sigma 0.5), truncated at `max_tokens`.

"efficiency" is needed tokens divided by computed tokens: needed are the tokens of prompts and answers with each prompt once,
computed are the positions that the ranks compute or wait for (the longest row of each round, for each rank). A split group
stores its prompt again; "efficiency with repeated prompts" counts it as needed. "relative cost" is the ratio of all rounds
after to before, including the area of the attention masks (as in `balance.Layout.cost`, for a model of this width and the
usual shape).
"""

import argparse
import math
import random
import statistics
import time

from omegaconf import OmegaConf

from torchtune_ext.kernels.packed_attention import TILE_SIZE
from torchtune_ext.pipeline.packing import GroupPart, GroupSize, RowCostModel, RowPlan, balance_rows, partition
from torchtune_ext.run.catalog import package_folder

# config: tokens of a prompt, median tokens of an answer, width of the model
SHAPES = {
    "qwen2_5_0_5B_full": (1000, 200, 896),
    "qwen2_5_3B_gsm8k": (150, 200, 2048),
    "qwen2_5_7B_full": (1000, 500, 3584),
    "qwen2_5_7B_fp8": (200, 1500, 3584),
    "qwen3_8B_fp8": (200, 3000, 4096),
    "qwen2_5_14B_full": (1000, 800, 5120),
    "qwen2_5_32B_qlora": (1000, 50, 5120),
}


def draw(config: str, rng: random.Random) -> list[GroupSize]:
    """Return the groups of one step."""
    cfg, (prompt, answer, _) = OmegaConf.load(package_folder("configs") / f"grpo/{config}.yaml"), SHAPES[config]

    def one() -> int:
        return min(int(answer * math.exp(rng.gauss(0, 0.5))), cfg.sampling.max_tokens) - 1

    answers = range(cfg.samples_per_prompt)
    return [
        GroupSize(int(prompt * rng.uniform(0.8, 1.2)), tuple(one() for _ in answers))
        for _ in range(cfg.prompts_per_step)
    ]


def unbalanced_rows(groups: list[GroupSize], row_tokens: int, ranks: int) -> list[RowPlan]:
    """The former packing: groups split at full rows, best-fit decreasing, rows in that order, empty rows last."""
    pieces: list[GroupPart] = []
    for index, group in enumerate(groups):
        taken: list[int] = []
        for i, length in enumerate(group.completion_input_lens):
            if taken and group.prompt + sum(group.completion_input_lens[j] for j in taken) + length > row_tokens:
                pieces.append(part(index, group, taken))
                taken = []
            taken.append(i)
        pieces.append(part(index, group, taken))
    rows: list[list[GroupPart]] = []
    for piece in sorted(pieces, key=lambda p: -p.tokens):
        fitting = [row for row in rows if tokens(row) + piece.tokens <= row_tokens]
        if fitting:
            max(fitting, key=tokens).append(piece)
        else:
            rows.append([piece])
    return [tuple(row) for row in rows] + [()] * (-len(rows) % ranks)


def part(index: int, group: GroupSize, taken: list[int]) -> GroupPart:
    lengths = [group.completion_input_lens[i] for i in taken]
    pairs = group.prompt**2 / 2 + sum(n * group.prompt + n**2 / 2 for n in lengths)
    return GroupPart(index, tuple(taken), group.prompt + sum(lengths), int(pairs))


def tokens(row: list[GroupPart] | RowPlan) -> int:
    return sum(part.tokens for part in row)


class FullLength(RowCostModel):
    """Return the cost with every row padded to full length, where padding attends to all earlier padding."""

    def row_length(self, row: RowPlan) -> int:
        return self.tile

    def row_cost(self, row: RowPlan) -> float:
        padding = self.tile - tokens(row)
        return self.tile + self.attention_pair_cost * (sum(part.attention_pairs for part in row) + padding**2 / 2)


def measure(config: str, ranks: int, steps: int) -> list[str]:
    cfg, width, rng = (
        OmegaConf.load(package_folder("configs") / f"grpo/{config}.yaml"),
        SHAPES[config][2],
        random.Random(0),
    )
    pair_cost = 1 / (6 * width)  # 2 products of `width` for a pair, 12 * width^2 weights, in each layer
    cost_models = {
        "before": FullLength(ranks, cfg.row_tokens, pair_cost),
        "after": RowCostModel(ranks, TILE_SIZE, pair_cost),
    }
    series: dict[str, list[float]] = {}
    needed, seconds = 0, 0.0

    def add(name: str, value: float) -> None:
        series.setdefault(name, []).append(value)

    for _ in range(steps):
        groups = draw(config, rng)
        needed += sum(group.tokens for group in groups)
        updates = cfg.updates_per_step
        for way, cost_model in cost_models.items():
            begin = time.perf_counter()
            if way == "before":
                plans = [unbalanced_rows(groups[i::updates], cfg.row_tokens, ranks) for i in range(updates)]
            else:
                hands = partition([group.tokens for group in groups], updates)
                plans = [balance_rows([groups[i] for i in hand], cfg.row_tokens, cost_model) for hand in hands]
                seconds += time.perf_counter() - begin
            for rows in plans:
                add(f"{way}/computed", ranks * cost_model.total_round_cost(rows, cost_model.row_length))
                add(f"{way}/cost", cost_model.total_round_cost(rows, cost_model.row_cost))
                add(f"{way}/rounds", len(rows) / ranks)
                add(f"{way}/tokens", sum(map(tokens, rows)))
    whole = {name: sum(values) for name, values in series.items()}
    used = {way: needed / whole[f"{way}/computed"] for way in cost_models}
    prompts_too = whole["after/tokens"] / whole["after/computed"]
    rounds = [f"{statistics.fmean(series[f'{way}/rounds']):.1f}" for way in cost_models]
    ratio = whole["after/cost"] / whole["before/cost"]
    return [
        f"{used['before']:.2f}",
        f"{used['after']:.2f}",
        f"{prompts_too:.2f}",
        *rounds,
        f"{ratio:.2f}",
        f"{1e3 * seconds / steps:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 6, 8])
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    print(
        "| config | prompt / answer | ranks | efficiency before | efficiency after | efficiency with repeated prompts | "
        "rounds before | rounds after | relative cost | ms/step |"
    )
    print("|" + "---|" * 10)
    for config, (prompt, answer, _) in SHAPES.items():
        for ranks in args.ranks:
            print(
                "| "
                + " | ".join([config, f"{prompt} / {answer}", str(ranks), *measure(config, ranks, args.steps)])
                + " |"
            )


if __name__ == "__main__":
    main()
