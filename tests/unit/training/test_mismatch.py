"""The gate detects each fault and names its cause. A table of logits simulates the engine."""

import math
import re
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from torch.distributions import Categorical

from helpers.records import make_sample
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.pipeline.packing import pack
from torchtune_ext.policy.logprobs import LabelLogprobs
from torchtune_ext.tasks.task import Problem
from torchtune_ext.training.mismatch import (
    MAX_RECENT_TOKENS,
    MIN_TOKENS,
    MismatchError,
    MismatchGate,
    UpdateEffect,
    measure_update_effect,
)

VOCAB, TOKENS, SAMPLES = 50, 40, 20


class Table:
    """Logits per label. The trainer scores labels at a temperature; the engine may report others."""

    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(SAMPLES * TOKENS, VOCAB, generator=generator, dtype=torch.float64) * 2
        self.labels = torch.multinomial(self.logits.softmax(-1), 1, generator=generator)[:, 0]

    def score(self, temperature, logits=None):
        logits = self.logits if logits is None else logits
        return (logits / temperature).log_softmax(-1).gather(1, self.labels[:, None])[:, 0]

    def rows(self, reported, prompt=0):
        samples = [
            make_sample(self.labels[i : i + TOKENS].numpy(), reported[i : i + TOKENS].numpy(), in_loss=True)
            for i in range(0, SAMPLES * TOKENS, TOKENS)
        ]
        return pack([Group(Problem("p", (), None), prompt + np.arange(3, dtype=np.int32), tuple(samples))], 10_000)[0]


def mismatch(rows, scores, version=None):
    """Measures the mismatch with a gate that never fails."""
    return MismatchGate(math.inf, test_distribution=False).check(rows, scores, "now", version)


def check(reported, table, temperature=1.0, limit=1e-3, before=None):
    """Checks `reported`. `before`: the trainer's log-probs under the weights before the last update."""

    scores = [LabelLogprobs(table.score(temperature), Categorical(logits=table.logits / temperature).entropy())]
    rows, applied = table.rows(reported), []
    if before is not None:
        applied = [measure_update_effect(rows, [table.score(temperature)], [before], "the engine has the old weights")]
    gate = MismatchGate(limit, temperature=temperature)
    return gate.check(rows, scores, "before step 0", effects=applied)


def test_mismatch_gate_passes_matching_logprobs_and_measures():
    table = Table()
    noise = torch.randn(SAMPLES * TOKENS, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 1e-4
    result = check(table.score(0.7) + noise, table, temperature=0.7)
    assert result.mean_abs == pytest.approx(noise.abs().mean().item(), rel=1e-2)
    assert result.max_abs == pytest.approx(noise.abs().max().item(), rel=1e-2)
    assert result.k3 == pytest.approx((noise**2).mean().item() / 2, rel=0.05)
    assert result.metrics("mismatch")["mismatch/k1"] == -result.mean == pytest.approx(noise.mean().item(), rel=1e-2)
    weights = (-noise).exp()
    assert result.ess == pytest.approx((weights.sum() ** 2 / (weights**2).sum()).item() / len(noise), rel=1e-6)
    assert result.tokens == SAMPLES * TOKENS


def test_the_percentile_of_one_to_two_hundred():
    table = Table()
    errors = torch.zeros(SAMPLES * TOKENS, dtype=torch.float64)
    errors[:200] = torch.arange(1, 201) * 1e-2
    (row,) = table.rows(table.score(1.0) + errors)
    result = mismatch([row], [LabelLogprobs(table.score(1.0), torch.zeros(SAMPLES * TOKENS))])
    rest = SAMPLES * TOKENS - 200
    place = round(0.99 * SAMPLES * TOKENS) - rest
    assert place > 1 and result.p99_abs == pytest.approx(place * 1e-2, abs=1e-5)


def test_mismatch_is_reported_by_position_and_staleness():
    table = Table()
    versions, errors = [3, 3, 1, 0], torch.zeros(SAMPLES, TOKENS, dtype=torch.float64)
    errors[:, 0], errors[:, 1:16], errors[:, 16:] = 1e-2, 2e-3, 3e-4
    errors[3::4] *= 10
    row = table.rows(table.score(1.0) + errors.flatten())[0]
    row = replace(row, versions_L=torch.tensor(versions).repeat(SAMPLES // 4).repeat_interleave(TOKENS).int())
    scores = [LabelLogprobs(table.score(1.0), torch.zeros(SAMPLES * TOKENS))]
    buckets = mismatch([row], scores, version=4).by_bucket
    by_place = {"at_0": 1e-2, "at_1_15": 2e-3, "at_16_255": 3e-4}
    mean = errors.mean().item() / 3.25  # of a sample without the tenfold errors of every fourth sample
    by_age = {"staleness_1": mean, "staleness_2_3": mean, "staleness_4_7": 10 * mean}
    # float32 log-probs around -4 are stored to 2.4e-7
    assert buckets == pytest.approx({name: 3.25 * v for name, v in by_place.items()} | by_age, abs=3e-7)
    assert mismatch([row], scores).by_bucket.keys() == by_place.keys()  # a single staleness bucket is omitted


@pytest.mark.parametrize("stale", [True, False])
def test_mismatch_limit_applies_to_current_version_tokens(stale):
    """Half of the samples differ by 0.3. If an earlier version sampled them, this is not a fault."""
    table = Table()
    errors = torch.zeros(SAMPLES, TOKENS, dtype=torch.float64)
    errors[::2] = 0.3
    (row,) = table.rows(table.score(1.0).double() + errors.flatten())
    versions = torch.full((SAMPLES,), 4)
    versions[int(not stale) :: 2] = 3
    row = replace(row, versions_L=versions.repeat_interleave(TOKENS).int())
    scores = [LabelLogprobs(table.score(1.0), torch.zeros(SAMPLES * TOKENS))]
    gate = MismatchGate(1e-3)
    if stale:
        result = gate.check([row], scores, "before step 5", version=4)
        assert result.tokens == SAMPLES * TOKENS and result.mean_abs == pytest.approx(0.15, abs=1e-6)
        assert (
            result.by_bucket["staleness_1"] == pytest.approx(0.3, abs=1e-6) and result.by_bucket["staleness_0"] < 1e-6
        )
    else:
        with pytest.raises(MismatchError, match=f"disagree on {SAMPLES * TOKENS // 2} sampled tokens: mean .* 0.3 "):
            gate.check([row], scores, "before step 5", version=4)


def test_mismatch_batch_without_current_version_warns_once(caplog):
    table = Table()
    (row,) = table.rows(table.score(1.0).double() + 0.3)
    scores = [LabelLogprobs(table.score(1.0), torch.zeros(SAMPLES * TOKENS))]
    gate = MismatchGate(1e-3)
    for step in (5, 6):
        result = gate.check([row], scores, f"step {step}", version=step - 1)
        assert result.mean_abs == pytest.approx(0.3, abs=1e-6)
    (warning,) = caplog.messages
    assert warning.startswith("step 5: no sampled tokens are from the current version 4, so only the canary")


def test_mismatch_warning_without_canary_omits_it(caplog):
    """A replay continues."""
    table = Table()
    (row,) = table.rows(table.score(1.0).double() + 0.3)
    scores = [LabelLogprobs(table.score(1.0), torch.zeros(SAMPLES * TOKENS))]
    gate = MismatchGate(1e-3, replay=True)
    assert gate.check([row], scores, "step 5", version=4).mean_abs == pytest.approx(0.3, abs=1e-6)
    assert not caplog.messages
    with pytest.raises(MismatchError):
        gate.check([row], scores, "step 5")


@pytest.mark.parametrize("tokens", [MIN_TOKENS - 1, MIN_TOKENS])
def test_mismatch_few_current_version_tokens_pass_gate(tokens, caplog):
    """The tail of a completion across a weight sync: in bfloat16 one of its tokens may differ by 0.06."""
    table = Table()
    (row,) = table.rows(table.score(1.0).double() + 0.3)
    versions = torch.full_like(row.versions_L, 3)
    versions[:tokens] = 4
    scores = [LabelLogprobs(table.score(1.0), torch.zeros(SAMPLES * TOKENS))]
    gate, row = MismatchGate(0.05), replace(row, versions_L=versions)
    if tokens < MIN_TOKENS:
        gate.check([row], scores, "step 5", version=4)
        assert f"{tokens} sampled tokens are from the current version 4, so only the canary" in caplog.text
    else:
        with pytest.raises(MismatchError, match=f"on {tokens} sampled tokens"):
            gate.check([row], scores, "step 5", version=4)


@pytest.mark.parametrize(("sampled", "scored"), [(1.0, 0.7), (0.7, 1.0), (1.3, 1.0), (1.0, 0.9)])
def test_temperature(sampled, scored):
    table = Table()
    with pytest.raises(MismatchError, match=f"trainer and .*: temperature: .*, the trainer .* at {scored:g}") as error:
        check(table.score(sampled), table, temperature=scored)
    assert temperature_in(error) == pytest.approx(sampled, rel=0.2)


def temperature_in(error):
    """The estimate is a first-order one, so it is closer to 1 than a distant temperature."""
    return float(re.search(r"is about ([\d.]+)", str(error.value))[1])


def test_top_p():
    table = Table()
    kept = torch.full((SAMPLES * TOKENS,), 0.9, dtype=torch.float64)  # the remaining mass, renormalized to one
    with pytest.raises(MismatchError, match="top-p / top-k"):
        check(table.score(1.0) - kept.log(), table)


@pytest.mark.parametrize("carried_by", [8, SAMPLES * TOKENS])
def test_mismatch_within_standard_error_passes_gate(carried_by):
    """The mean of both is 0.06 nats, three times the rounding.

    Eight tokens with large rounding errors may be chance, as in a healthy run of SmolLM2 in bfloat16
    whose canary had 72 tokens. The same error on every token is a fault.
    """
    table, d = Table(), torch.zeros(SAMPLES * TOKENS, dtype=torch.float64)
    d[:carried_by] = 0.06 * len(d) / carried_by
    (row,), scores = table.rows(table.score(1.0) + d), [LabelLogprobs(table.score(1.0), torch.zeros(len(d)))]
    gate = MismatchGate("auto", lambda rows: 0.02)
    if carried_by == len(d):
        with pytest.raises(MismatchError, match=r"mean \|d log-prob\| 0.06 .*max_mismatch=0.04"):
            gate.check([row], scores, "step 1")
    else:
        result = gate.check([row], scores, "step 1")
        assert result.mean_abs == pytest.approx(0.06, rel=1e-4)


def test_small_steps_are_judged_together():
    """One token in ten is off by 0.6 nats: among 800 tokens this may be chance, among 2,400 it is not.

    Three samples of the same prompt are as much evidence as one.
    """
    table, d = Table(), torch.zeros(SAMPLES * TOKENS, dtype=torch.float64)
    d[5::10] = 0.6
    scores = [LabelLogprobs(table.score(1.0), torch.zeros(len(d)))]
    new, same = (MismatchGate("auto", lambda rows: 0.02, test_distribution=False) for _ in "12")
    for step in (1, 2, 3):
        same.check(table.rows(table.score(1.0) + d), scores, f"step {step}", version=0)
    for step in (1, 2):
        new.check(table.rows(table.score(1.0) + d, step), scores, f"step {step}", version=0)
    with pytest.raises(
        MismatchError,
        match=r"step 3: .* on 2400 sampled tokens of the latest steps: mean \|d log-prob\| 0.06 \+- 0.0038",
    ):
        new.check(table.rows(table.score(1.0) + d, 3), scores, "step 3", version=0)


@pytest.mark.parametrize(("distance", "noise"), [(0.04, None), (0.09, 0.05), (0.11, 0.05)])
def test_mismatch_replay_measures_rounding_on_demand(distance, noise):
    """A model with large bfloat16 rounding differs from its rollouts as much as in the sampling run."""
    table = Table()
    (row,) = table.rows(table.score(1.0) + distance)
    scores = [LabelLogprobs(table.score(1.0), torch.zeros(SAMPLES * TOKENS))]
    noises = iter([noise] if noise else [])
    gate = MismatchGate("auto", lambda rows: next(noises), replay=True, test_distribution=False)
    if distance > 2 * (noise or 1):
        with pytest.raises(MismatchError, match=r"max_mismatch=0.1 .*replay"):
            gate.check([row], scores, "step 2", version=0)
    else:
        gate.check([row], scores, "step 2", version=0)
        assert gate.limit == 2 * (noise or 0.025)


def gate_of(noise, **options):
    """A gate with "auto" whose rounding is `noise`. Each call is a step, or a canary without version."""
    table = Table()
    gate = MismatchGate("auto", lambda rows: noise, test_distribution=False, **options)

    def scores(rows):
        return [LabelLogprobs(table.score(1.0)[: row.num_labels], torch.zeros(row.num_labels)) for row in rows]

    prompts = count()

    def require(*rows_of_d, version=0):
        rows = []
        for d in rows_of_d:
            labels, logprobs = table.labels[: len(d)].numpy(), (table.score(1.0)[: len(d)] + d).numpy()
            prompt = np.arange(3, dtype=np.int32) + next(prompts)
            group = Group(Problem("p", (), None), prompt, (make_sample(labels, logprobs, in_loss=True),))
            rows += pack([group], len(d) + 3)[0]
        return gate.check(rows, scores(rows), "now", version=version)

    return require


@pytest.mark.parametrize(
    ("noise", "tokens", "wrong", "nats"), [(0.0, 512, 16, 5.0), (0.0, 72, 18, 10.0), (0.03, 512, 20, 5.0)]
)
def test_mismatch_concentrated_in_few_tokens_fails_gate(noise, tokens, wrong, nats):
    """Outliers also enlarge the standard error, so the margin of chance has an upper bound."""
    d = torch.zeros(tokens, dtype=torch.float64)
    d[:wrong] = nats
    with pytest.raises(MismatchError):
        gate_of(noise)(d, version=None)


def test_a_large_step_is_judged_as_a_whole():
    """The last samples may have larger rounding errors: all are of one prompt."""
    d = torch.full((800,), 0.02, dtype=torch.float64)
    assert gate_of(0.02)(*[d] * 7, *[2.5 * d] * 5).tokens == 9600


def test_old_tokens_leave_the_latest_ones():
    d, require = torch.zeros(800, dtype=torch.float64), gate_of(0.02)
    for _ in range(MAX_RECENT_TOKENS // 800 + 1):
        require(d)
    d[::10] = 0.6
    for _ in range(MAX_RECENT_TOKENS // 800 // 2):
        require(d)
    with pytest.raises(MismatchError, match=f"on {MAX_RECENT_TOKENS} sampled tokens of the latest steps"):
        for _ in range(MAX_RECENT_TOKENS // 800):
            require(d)


def test_mismatch_small_batch_is_deferred_to_later_checks(caplog):
    d, require = torch.full((16,), 0.16, dtype=torch.float64), gate_of(0.02)
    require(d)
    assert not caplog.messages
    with pytest.raises(MismatchError, match="on 32 sampled tokens of the latest steps"):
        require(d)
    with pytest.raises(MismatchError, match="on 16 sampled tokens:"):
        gate_of(0.02)(d, version=None)


@pytest.mark.parametrize("tokens", [16, SAMPLES * TOKENS])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_mismatch_non_finite_logprob_fails_gate(tokens, value):
    d = torch.zeros(tokens, dtype=torch.float64)
    d[3] = value
    match = (
        rf"log-probs of {tokens} sampled .* not finite: 0 of the trainer's, 1 of the engine's. .*weights or activations"
    )
    with pytest.raises(MismatchError, match=match):
        gate_of(0.02)(d)


def test_a_number_judges_few_tokens_too():
    table = Table()
    samples = [make_sample(table.labels[:3].numpy(), (table.score(1.0)[:3] + 0.2).numpy(), in_loss=True)]
    rows = pack([Group(Problem("p", (), None), np.arange(3, dtype=np.int32), tuple(samples))], 64)[0]
    scores = [LabelLogprobs(table.score(1.0)[:3], torch.zeros(3))]
    with pytest.raises(MismatchError, match="on 3 sampled tokens"):
        MismatchGate(0.05, replay=True).check(rows, scores, "step 1", version=0)


def test_mismatch_step_without_current_version_tokens_passes_gate():
    table, d = Table(), torch.zeros(SAMPLES * TOKENS, dtype=torch.float64)
    d[::10] = 0.6
    (row,), scores = table.rows(table.score(1.0) + d), [LabelLogprobs(table.score(1.0), torch.zeros(len(d)))]
    noises = iter([0.02, 0.04])
    gate = MismatchGate("auto", lambda rows: next(noises), test_distribution=False)
    for step in (1, 2, 3):  # the third is above the limit of all steps, and within its own limit
        gate.check([row], scores, f"step {step}", version=0)
    gate._limit = 0.0
    assert gate.check([row], scores, "step 4", version=1).tokens == len(d)


def test_an_engine_of_nonsense_is_not_called_truncated():
    """As seen on an H100: confident in tokens that the trainer rates below uniform probability."""
    table = Table()
    with pytest.raises(MismatchError, match="model: .*uses a different forward pass"):
        check(table.score(1.0) + 11.93, table)


def test_template():
    table = Table()
    reported = table.score(1.0)
    reported[::TOKENS] -= 3.0
    with pytest.raises(MismatchError, match="prompt or chat template"):
        check(reported, table)


def test_dtype():
    table = Table()
    noise = torch.randn(SAMPLES * TOKENS, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.02
    with pytest.raises(MismatchError, match="precision: small errors of both signs"):
        check(table.score(1.0) + noise, table)


def test_other_weights():
    table = Table()
    with pytest.raises(MismatchError, match="model: .*uses a different forward pass"):
        check(table.score(1.0, Table(seed=1).logits), table)


def test_mismatch_without_labels_is_zero():
    rows, _ = pack([], 16)
    assert mismatch(rows, [LabelLogprobs(torch.empty(0), torch.empty(0))]).tokens == 0


def draws(seed, *scales):
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(SAMPLES * TOKENS, generator=generator, dtype=torch.float64) for scale in scales]


@pytest.mark.parametrize("limit", [1e-3, 1.0])
def test_update_effect_distinguishes_old_weights_from_rounding(limit):
    """Errors are small and of both signs in both cases: the update's effect decides, also below the limit."""
    table = Table()
    update, noise = draws(1, 0.1, 0.01)
    before = table.score(1.0) - update
    with pytest.raises(MismatchError, match="weights: .*old weights; .* fraction -?0.0.* 800 sampled"):
        check(before + noise, table, limit=limit, before=before)
    if limit < 0.01:
        with pytest.raises(MismatchError, match="precision: small errors of both signs"):
            check(table.score(1.0) + noise, table, limit=limit, before=before)
    else:
        check(table.score(1.0) + noise, table, limit=limit, before=before)


def test_update_effect_below_noise_is_not_judged():
    table = Table()
    update, noise = draws(1, 0.01, 0.02)
    before = table.score(1.0) - update
    with pytest.raises(MismatchError, match="precision: small errors of both signs"):
        check(before + noise, table, before=before)
    assert check(before + noise, table, limit=0.1, before=before).mean_abs < 0.03
    assert check(before, table, limit=0.1, before=torch.full_like(before, torch.nan)).tokens == SAMPLES * TOKENS
    assert check(before, table, limit=0.1, before=table.score(1.0)).tokens == SAMPLES * TOKENS  # lr 0: no effect


def test_update_effect_excludes_tokens_without_logprobs():
    table = Table()
    update, noise = draws(2, 0.1, 0.001)
    before = table.score(1.0) - update
    engine_logprobs = table.score(1.0) + noise
    for known in (1, 2, 16, 64, 300):
        old, reported = before.clone(), engine_logprobs.clone()
        old[known:], reported[known:] = torch.nan, before[known:]  # would be a slope of 0
        share = measure_update_effect(table.rows(reported), [table.score(1.0)], [old], "")
        assert share.tokens == known and share.slope == pytest.approx(1.0, abs=0.05)
        assert share.is_reliable == (known > 2) and not share.is_missing


@pytest.mark.parametrize("has_it", [True, False])
@pytest.mark.parametrize("engine", [0.0, 1.0, 3.0])  # noise of the engine, relative to the trainer's noise
def test_update_effect_heavy_tails_cause_no_wrong_verdict(engine, has_it):
    """Noise and effect of some tokens are a hundred times larger, and the engine may be more or less exact.

    Every conclusion is right, and a large effect leads to a conclusion.
    """
    generator, draws = torch.Generator().manual_seed(0), 200
    table = Table()
    row = table.rows(table.score(1.0))[0]
    for strength in (0.0, 0.3, 1.0, 3.0, 30.0):
        resolved = 0
        for width in (0.7, 1.2):
            for _ in range(draws):
                scale = torch.exp(width * torch.randn(SAMPLES * TOKENS, generator=generator, dtype=torch.float64))
                e, new, old, change = (
                    scale * torch.randn(len(scale), generator=generator, dtype=torch.float64) for _ in "1234"
                )
                noisy_row = replace(row, logprobs_L=has_it * strength * change + engine * e)
                share = measure_update_effect([noisy_row], [strength * change + new], [old], "")
                resolved += share.is_reliable
                assert not share.is_reliable or (share.slope > 0.5) == has_it, (strength, share)
        assert resolved > draws / 2 if strength == 30 else resolved == 0 or strength > 1


def test_update_effect_ignores_one_float32_grid_step():
    """An update too small for float32 moves three contexts by one step of the grid, in the trainer alone."""
    contexts_N = np.repeat(np.arange(16), 16)
    step = 2.0**-23 * (contexts_N < 3)
    share = UpdateEffect.estimate(step, np.zeros(256), contexts_N, "")
    assert share.slope == share.margin == 0 and not share.is_reliable and not share.is_missing
    assert UpdateEffect.estimate(1e4 * step, np.zeros(256), contexts_N, "").is_missing


def test_the_limit_is_twice_the_rounding(capsys):
    """The limit is measured on the first tokens, and again on tokens above it.

    The latter get their own limit if it is higher, because some tokens have larger rounding errors.
    They do not raise the limit of later tokens to theirs.
    """
    table, calls = Table(), []

    def rounding(rows):
        calls.append(len(rows))
        return [0.04, 0.06, 0.04][len(calls) - 1]

    scores = [LabelLogprobs(table.score(0.7), torch.zeros(SAMPLES * TOKENS))]
    gate = MismatchGate("auto", rounding, "bfloat16")

    def off_by(mean_abs):
        (noise,) = draws(1, mean_abs * (torch.pi / 2) ** 0.5)
        return gate.check(table.rows(table.score(0.7) + noise), scores, "step 1")

    off_by(0.057)
    off_by(0.077)
    assert gate.limit == 0.08 and calls == [1]
    off_by(0.115)
    assert gate.limit == 0.1 and len(calls) == 2
    with pytest.raises(MismatchError, match="max_mismatch=0.0933.*precision: "):
        off_by(0.115)
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first == "rounding:  0.04 nats in bfloat16; max_mismatch 0.08"
    assert second == (
        "rounding:  0.06 nats in bfloat16, measured on this step's rows (limit for these rows 0.12; then as follows); max_mismatch 0.1"
    )


def test_without_rounding_the_limit_is_that_of_float32(capsys):
    table = Table()
    gate = MismatchGate("auto")
    gate.check(table.rows(table.score(1.0)), [LabelLogprobs(table.score(1.0), torch.zeros(SAMPLES * TOKENS))], "step 1")
    assert gate.limit == 0.001 and "negligible in float32; max_mismatch 0.001" in capsys.readouterr().out


class Steps:
    """Steps of a run: labels follow the engine's distribution, and the trainer differs by rounding."""

    def __init__(self, reported_of, rounding=0.06, seed=0):
        self._generator = torch.Generator().manual_seed(seed)
        self._reported_of, self._rounding = reported_of, rounding
        self.gate = MismatchGate(10.0)  # disables the scale test

    def step(self, number):
        logits = torch.randn(SAMPLES * TOKENS, VOCAB, generator=self._generator, dtype=torch.float64) * 2
        reported = self._reported_of(logits.softmax(-1)).log()
        labels = torch.multinomial(reported.exp(), 1, generator=self._generator)
        # Rounding changes logits, so the result is a distribution.
        trainers = (logits + self._rounding * torch.randn(logits.shape, generator=self._generator)).log_softmax(-1)
        table = Table()
        table.labels = labels[:, 0]
        rows = table.rows(reported.gather(1, labels)[:, 0])
        entropy = Categorical(logits=trainers).entropy()
        self.gate.check(rows, [LabelLogprobs(trainers.gather(1, labels)[:, 0], entropy)], f"step {number}", version=0)


def top_p(share):
    def reported(p):
        ordered, order = p.sort(-1, descending=True)
        kept = ordered * ((ordered.cumsum(-1) - ordered) < share)
        return torch.zeros_like(p).scatter(1, order, kept / kept.sum(-1, keepdim=True))

    return reported


@pytest.mark.parametrize("share, steps", [(0.9, 1), (0.95, 2), (0.98, 60)])
def test_a_truncated_distribution_is_seen_through_the_rounding(share, steps):
    """The closer top-p is to 1, the more tokens are needed: a step has 800."""
    run = Steps(top_p(share))
    with pytest.raises(MismatchError, match="mean of exp.*truncated or renormalized"):
        for number in range(steps):
            run.step(number)


@pytest.mark.parametrize("rounding", [0.0, 0.06, 0.3, 1.0])
def test_mismatch_healthy_run_passes_at_any_rounding(rounding):
    """Also at a mean |d| of 0.8 nats, over many steps with all tests."""
    run = Steps(lambda p: p, rounding)
    for number in range(60):
        run.step(number)


@pytest.mark.parametrize("temperature, steps", [(0.7, 1), (0.9, 1), (0.95, 3), (1.05, 3), (1.1, 1)])
def test_a_temperature_is_seen_through_the_rounding(temperature, steps):
    """A mean |d| of 0.06 nats hides its effect on the scale, and the mean weight does not detect it."""
    run = Steps(lambda p: (p.log() / temperature).softmax(-1), rounding=0.1)
    with pytest.raises(MismatchError, match="temperature: .*trainer .* at 1") as error:
        for number in range(steps):
            run.step(number)
    assert temperature_in(error) == pytest.approx(temperature, rel=0.12)
