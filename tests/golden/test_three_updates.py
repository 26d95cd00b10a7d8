"""Three updates of a fixed model on fixed samples, end to end from groups to weights, against golden values.

The golden values do not prove correctness (other tests compare with references). They detect unintended numerical changes.
After an intended change, `PYTHONPATH=tests python tests/golden/test_three_updates.py` regenerates them.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torchtune.models.qwen2 import qwen2

from helpers.learners import single_process_learner
from helpers.records import make_sample
from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.pipeline.advantages import AdvantageConfig, assign_advantages
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.pipeline.packing import pack_updates
from torchtune_ext.policy.logprobs import PackedPolicy
from torchtune_ext.tasks.task import Problem, Score

FILE = Path(__file__).with_name("three_updates.json")
VOCABULARY = 50


def values(count: int, seed: int, low: float, high: float) -> np.ndarray:
    """Numbers that are the same in every version of every library: a linear congruential sequence."""
    state, numbers = seed, []
    for _ in range(count):
        state = (1664525 * state + 1013904223) % 2**32
        numbers.append(low + (high - low) * state / 2**32)
    return np.array(numbers)


def fixed_model():
    model = qwen2(VOCABULARY, 2, 4, 2, 32, 48, 64, tie_word_embeddings=True)
    with torch.no_grad():
        for seed, (name, param) in enumerate(sorted(model.named_parameters())):
            if param.dim() > 1:
                param.copy_(torch.tensor(values(param.numel(), seed, -0.3, 0.3)).view(param.shape))
            elif name.endswith("bias"):
                param.zero_()
    return model


def fixed_groups():
    groups = []
    # (prompt tokens, tokens of each completion)
    for g, (prompt, lengths) in enumerate([(7, [5, 1, 9]), (4, [12, 11]), (2, [1, 6, 3, 2])]):
        samples = []
        for s, n in enumerate(lengths):
            tokens = values(n, 100 * g + s, 0, VOCABULARY).astype(np.int32)
            logprobs = values(n, 7 + 100 * g + s, -5, -3).astype(np.float32)
            outcome = Score(float(s % 3) / 2, {})
            samples.append(make_sample(tokens, logprobs, outcome=outcome))
        prompt_tokens = values(prompt, 50 + g, 0, VOCABULARY).astype(np.int32)
        groups.append(Group(Problem(f"g{g}", (), None), prompt_tokens, tuple(samples)))
    return groups


def three_updates(**loss) -> list[dict[str, float]]:
    policy = PackedPolicy(fixed_model())
    groups, _ = assign_advantages(fixed_groups(), AdvantageConfig())
    updates, _ = pack_updates(groups, 3, 40)
    loss = PolicyLoss(**{"importance": "tis", **loss})
    learner = single_process_learner(policy, loss, temperature=0.9)
    proximal_logprobs = [learner.logprobs(rows) for rows in updates]
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.05)
    results = []
    for rows, proximal in zip(updates, proximal_logprobs, strict=True):
        _, metrics = learner.forward_backward(rows, proximal, proximal if loss.needs_reference else None)
        norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        results.append({"loss": metrics.pop("loss/total"), "grad_norm": norm, **metrics})
    return results


CASES = {
    "plain": {},
    "kl and entropy": {"kl_coef": 0.1, "entropy_coef": 0.01, "clip_high": 0.28},
    "kl3": {"constraint": "kl3"},
    "sequence": {"level": "sequence", "importance": "sequence_tis", "clip_low": 3e-4, "clip_high": 4e-4},
}


@pytest.mark.parametrize("case", CASES)
def test_three_updates_match_golden_values(case):
    golden = json.loads(FILE.read_text())[case]
    for result, expected in zip(three_updates(**CASES[case]), golden, strict=True):
        assert result.keys() == expected.keys()
        for name in expected:
            # The order of float32 sums over 50 tokens and 20,000 weights depends on the processor.
            assert result[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


if __name__ == "__main__":
    FILE.write_text(json.dumps({case: three_updates(**options) for case, options in CASES.items()}, indent=1) + "\n")
