"""The gate finds what it is told to find, and names the cause. The sampler is played by a table of logits."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from torchtune_ext.advantages import Group, Sample
from torchtune_ext.grading import Outcome
from torchtune_ext.packing import pack
from torchtune_ext.policy.logprobs import LabelScores
from torchtune_ext.tasks.task import Problem
from torchtune_ext.training.agreement import Disagreement, mismatch, require_agreement

VOCAB, TOKENS, SAMPLES = 50, 40, 20


class Table:
    """Logits per label; the trainer scores them at a temperature, the sampler reports something that may differ."""

    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(SAMPLES * TOKENS, VOCAB, generator=generator, dtype=torch.float64) * 2
        self.labels = torch.multinomial(self.logits.softmax(-1), 1, generator=generator)[:, 0]

    def score(self, temperature, logits=None):
        logits = self.logits if logits is None else logits
        return (logits / temperature).log_softmax(-1).gather(1, self.labels[:, None])[:, 0]

    def rows(self, reported):
        samples = [
            Sample(
                tokens=self.labels[i : i + TOKENS].numpy().astype(np.int32),
                logprobs=reported[i : i + TOKENS].numpy().astype(np.float32),
                versions=np.zeros(TOKENS, np.int32),
                text="",
                finish_reason="stop",
                outcome=Outcome("scored", None, ""),
                trained=True,
            )
            for i in range(0, SAMPLES * TOKENS, TOKENS)
        ]
        return pack([Group(Problem("p", (), None), np.arange(3, dtype=np.int32), tuple(samples))], 10_000)[0]


def check(reported, table, temperature=1.0, limit=1e-3):
    def scores(t):
        return [LabelScores(table.score(t), torch.zeros(SAMPLES * TOKENS))]

    return require_agreement(table.rows(reported), scores(temperature), limit, temperature, scores, "before step 0")


def test_agreement_passes_and_measures():
    table = Table()
    noise = torch.randn(SAMPLES * TOKENS, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 1e-4
    found = check(table.score(0.7) + noise, table, temperature=0.7)
    assert found.mean_abs == pytest.approx(noise.abs().mean().item(), rel=1e-2)
    assert found.max_abs == pytest.approx(noise.abs().max().item(), rel=1e-2)
    assert found.k3 == pytest.approx((noise**2).mean().item() / 2, rel=0.05)
    assert found.k1 == -found.mean == pytest.approx(noise.mean().item(), rel=1e-2)
    weights = (-noise).exp()
    assert found.ess == pytest.approx((weights.sum() ** 2 / (weights**2).sum()).item() / len(noise), rel=1e-6)
    assert found.tokens == SAMPLES * TOKENS


def test_mismatch_by_place_and_age():
    table = Table()
    versions, errors = [3, 3, 1, 0], torch.zeros(SAMPLES, TOKENS, dtype=torch.float64)
    errors[:, 0], errors[:, 1:16], errors[:, 16:] = 1e-2, 2e-3, 3e-4
    errors[3::4] *= 10
    row = table.rows(table.score(1.0) + errors.flatten())[0]
    row = replace(row, versions_L=torch.tensor(versions).repeat(SAMPLES // 4).repeat_interleave(TOKENS).int())
    scores = [LabelScores(table.score(1.0), torch.zeros(SAMPLES * TOKENS))]
    found = mismatch([row], scores, version=4).by_bucket
    by_place = {"at_0": 1e-2, "at_1_15": 2e-3, "at_16_255": 3e-4}
    mean = errors.mean().item() / 3.25  # of a sample whose errors are not enlarged; every fourth is, tenfold
    by_age = {"age_1": mean, "age_2_3": mean, "age_4_7": 10 * mean}
    # float32 log-probs around -4 are stored to 2.4e-7
    assert found == pytest.approx({name: 3.25 * v for name, v in by_place.items()} | by_age, abs=3e-7)
    assert mismatch([row], scores).by_bucket.keys() == by_place.keys()  # one age only: nothing to compare


@pytest.mark.parametrize(("sampled", "scored"), [(1.0, 0.7), (0.7, 1.0), (1.3, 1.0)])
def test_temperature(sampled, scored):
    table = Table()
    with pytest.raises(
        Disagreement, match=f"temperature: .* of temperature {sampled:g}, the trainer scores at {scored:g}"
    ):
        check(table.score(sampled), table, temperature=scored)


def test_top_p():
    table = Table()
    kept = torch.full((SAMPLES * TOKENS,), 0.9, dtype=torch.float64)  # what is left of the mass, renormalised to one
    with pytest.raises(Disagreement, match="top-p / top-k"):
        check(table.score(1.0) - kept.log(), table)


def test_template():
    table = Table()
    reported = table.score(1.0)
    reported[::TOKENS] -= 3.0
    with pytest.raises(Disagreement, match="prompt or chat template"):
        check(reported, table)


def test_dtype():
    table = Table()
    noise = torch.randn(SAMPLES * TOKENS, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.02
    with pytest.raises(Disagreement, match="dtype: small errors of both signs"):
        check(table.score(1.0) + noise, table)


def test_other_weights():
    table = Table()
    with pytest.raises(Disagreement, match="weights: .*runs other weights"):
        check(table.score(1.0, Table(seed=1).logits), table)


def test_nan_is_a_disagreement():
    table = Table()
    reported = table.score(1.0)
    reported[5] = float("nan")
    with pytest.raises(Disagreement):
        check(reported, table)


def test_no_labels_is_agreement():
    rows, _ = pack([], 16)
    assert mismatch(rows, [LabelScores(torch.empty(0), torch.empty(0))]).tokens == 0
