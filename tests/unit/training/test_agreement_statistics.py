"""Statistics of the mismatch gate: standard errors over contexts, likelihood of a canary's tokens."""

import math
from contextlib import nullcontext
from dataclasses import astuple, replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.distributions import Categorical

from helpers.records import make_sample
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.pipeline.packing import context_hashes, pack
from torchtune_ext.tasks.task import Problem
from torchtune_ext.training.buckets import STALENESS_0_BUCKET
from torchtune_ext.training.estimates import fit_slope, students_t_quantile
from torchtune_ext.training.mismatch import (
    SHARPER_LOGIT_SCALE,
    MismatchError,
    MismatchGate,
    PairedLogprobs,
    log_likelihood_ratios,
)

VOCAB = 50


def test_fit_repeated_contexts_equals_one_token_per_context():
    """Twenty samples of the same contexts are as much evidence as one; one context is not evidence."""
    generator = np.random.default_rng(0)
    x, y, contexts_N = generator.standard_normal(12), generator.standard_normal(12), np.arange(12)
    one, many = fit_slope(y, x, contexts_N), fit_slope(np.tile(y, 20), np.tile(x, 20), np.tile(contexts_N, 20))
    assert astuple(many) == pytest.approx(astuple(one)) and many.margin == pytest.approx(one.margin)
    without = [fit_slope(np.delete(y, i), np.delete(x, i), np.arange(11)).value for i in range(12)]
    assert one.error == pytest.approx(np.linalg.norm(np.array(without) - one.value)) and one.min_value == pytest.approx(
        min(without)
    )
    assert fit_slope(y, x, np.zeros(12, int)).margin == math.inf


def test_students_t_quantiles_match_table():
    """Quantiles at the tail probability of five normal deviations, 2.87e-7 (incomplete beta function)."""
    table = {2: 1320.71, 5: 31.847, 10: 11.166, 15: 8.267, 31: 6.268, 100: 5.344, 1e6: 5.0}
    for freedom, quantile in table.items():
        assert 0.9999 * quantile < students_t_quantile(freedom) < (2.7 if freedom == 2 else 1.1) * quantile


@pytest.mark.parametrize("contexts_seen, stops", [(6, False), (600, True)])
def test_mismatch_samples_from_one_state_count_once(contexts_seen, stops):
    """All sixteen samples of each context have its likely token, which the engine rounds up by 4%.

    No sample has the rare token that would bring the mean of exp(d) to 1. This may happen for a few
    contexts, but not for hundreds.
    """
    d = np.random.default_rng(0).normal(-0.036, 0.012, contexts_seen).repeat(16)
    trainer, buckets = np.full(len(d), math.log(0.95)), np.full((2, len(d)), STALENESS_0_BUCKET)
    tokens = PairedLogprobs(trainer, trainer - d, np.full(len(d), 0.2), np.arange(contexts_seen).repeat(16), buckets)
    with pytest.raises(MismatchError, match="mean of exp") if stops else nullcontext():
        MismatchGate(1.0).check_tokens(tokens, (), "step 1", 0)


def canaries(transform, rounding=0.06, seed=0):
    """Canaries with different seeds. `transform` changes the sampled log-probs but not the reported ones."""
    generator, gate = torch.Generator().manual_seed(seed), MismatchGate(10.0)
    for number in range(60):
        logits = torch.randn(256, VOCAB, generator=generator, dtype=torch.float64) * 2
        trainer, engine = (
            (logits + rounding * torch.randn(logits.shape, generator=generator)).log_softmax(-1) for _ in "12"
        )
        labels = torch.multinomial(transform(engine.exp()), 1, generator=generator)
        distributions = trainer, engine, (trainer * SHARPER_LOGIT_SCALE).log_softmax(-1)
        trainer_L, engine_L, sharper_L = (logprobs.gather(1, labels)[:, 0] for logprobs in distributions)
        log_ratios = log_likelihood_ratios(trainer_L, engine_L, Categorical(logits=trainer).entropy(), sharper_L)
        yield partial(gate.update_likelihood_ratio, log_ratios, f"canary {number}", "the engine", number)


@pytest.mark.parametrize(
    "transform, canaries_needed, shape",
    [
        (lambda p: p ** (1 / 0.7), 1, "sharper"),
        (lambda p: p ** (1 / 0.9), 20, "sharper"),
        (lambda p: p ** (1 / 1.3), 3, "flatter"),
        (lambda p: p * (p > 0.05), 2, "sharper"),
        (lambda p: p * (p >= p.topk(12).values[:, -1:]), 40, "sharper"),
    ],
)
def test_likelihood_check_detects_unreported_sampling_distribution(transform, canaries_needed, shape):
    with pytest.raises(MismatchError, match=f"a {shape} distribution makes .*processed_logprobs"):
        for _, check in zip(range(canaries_needed), canaries(transform), strict=False):
            check()


@pytest.mark.parametrize("rounding", [0.0, 0.06, 1.0])
def test_likelihood_check_passes_tokens_sampled_as_reported(rounding):
    for check in canaries(lambda p: p, rounding):
        check()


def test_canary_with_repeated_seed_adds_no_evidence():
    """Only the first canary of a seed counts; its completions are the longest."""
    once, often, zero = MismatchGate(10.0), MismatchGate(10.0), np.zeros(4)
    for gate, canaries_of_a_seed in ((once, 1), (often, 9)):
        for seed in range(8):
            for number in range(canaries_of_a_seed):
                gate.update_likelihood_ratio(zero - 1 if number else zero + 1.5, "", "", seed)
    assert (once._evidence[""].with_seed == often._evidence[""].with_seed).all()
    with pytest.raises(MismatchError):
        often.update_likelihood_ratio(zero + 4.0, "", "", 8)


def test_context_hashes_equal_only_for_equal_paths():
    def rows(*texts, prompt=(1, 2, 3), size=10_000):
        samples = [make_sample(t, in_loss=True) for t in texts]
        return pack([Group(Problem("p", (), None), np.array(prompt, np.int32), tuple(samples))], size)[0]

    (one,) = rows([5, 6, 7], [5, 9], [6])
    a, b, c, d, e, f = context_hashes(one)[1].tolist()
    assert a == d and len({a, b, c, e, f}) == 5
    assert (
        context_hashes(rows([5, 6, 8])[0])[1].tolist()[:2] == [a, b]
        and context_hashes(rows([5, 6, 8])[0])[1].tolist()[2] != c
    )
    assert set(context_hashes(rows([5, 6, 7], prompt=(1, 2))[0])[1].tolist()).isdisjoint({a, b, c, d, e, f})
    cut = rows([5, 6, 7], [5, 9], [6], size=5)  # the same tokens in other rows
    assert len(cut) == 2 and sorted(c for row in cut for c in context_hashes(row)[1].tolist()) == sorted(
        [a, b, c, d, e, f]
    )
    assert context_hashes(pack([], 16)[0][0])[1].tolist() == []


def test_contexts_of_conversations_include_environment_tokens():
    """The same tokens are the same context, whichever row holds them and whoever wrote them."""

    def rows(*texts, turns=((0, 1), (3, 5)), size=10_000):
        samples = [make_sample(text, in_loss=True) for text in texts]
        samples = [replace(sample, completion=replace(sample.completion, turns=turns)) for sample in samples]
        return pack([Group(Problem("p", (), None), np.array([1, 2], np.int32), tuple(samples))], size)[0]

    ours, again, other = [5, 6, 7, 8, 9], [5, 6, 7, 8, 4], [5, 6, 3, 8, 9]  # another last token; another completion
    (one,) = rows(ours, again, other)
    first, second, third = (context_hashes(one)[1].tolist()[at : at + 3] for at in (0, 3, 6))
    assert first[:2] == second[:2] and first[2] != second[2]
    assert first[0] == third[0] and set(first[1:]).isdisjoint(third)
    split = rows(ours, again, other, size=6)
    assert len(split) == 3 and sorted(c for row in split for c in context_hashes(row)[1].tolist()) == sorted(
        context_hashes(one)[1].tolist()
    )
    whole = context_hashes(rows(ours, turns=())[0])[1].tolist()
    assert first == [whole[0], whole[3], whole[4]]
