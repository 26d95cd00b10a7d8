"""The checks of a weight sync, with a fake engine: a Hugging Face `transformers` model with injected faults.

The real engine: tests/integration/test_engine_pool.py, test_lost_weights.py.
"""

import dataclasses
import logging
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from safetensors.torch import load_file  # noqa: E402

from helpers import tiny_model  # noqa: E402
from helpers.fp8_models import make_rows  # noqa: E402
from helpers.learners import prompt_groups, single_process_learner  # noqa: E402
from torchtune_ext.objective.loss import PolicyLoss  # noqa: E402
from torchtune_ext.policy import from_config  # noqa: E402
from torchtune_ext.policy.builder import build_on_meta, build_policy  # noqa: E402
from torchtune_ext.policy.hf_model import HFModel  # noqa: E402
from torchtune_ext.policy.offload import FrozenOffload  # noqa: E402
from torchtune_ext.policy.streaming import streamed_logprobs  # noqa: E402
from torchtune_ext.sampling.engine import Completion, EngineConfig, SamplingConfig  # noqa: E402
from torchtune_ext.sampling.types import CanaryAnswer, PublishReport  # noqa: E402
from torchtune_ext.sampling.weight_buffer import checksum  # noqa: E402
from torchtune_ext.training.export import export_adapter  # noqa: E402
from torchtune_ext.training.mismatch import MismatchError, MismatchGate  # noqa: E402
from torchtune_ext.training.precision import Precision, PrecisionConfig  # noqa: E402
from torchtune_ext.training.publish import CANARY_PROMPTS, SEED_PERIOD, VALUES_PER_TENSOR, Publisher  # noqa: E402
from torchtune_ext.training.trained_weights import (  # noqa: E402
    AdapterConfig,
    FullWeights,
    measure_rounding,
    select_trained_weights,
)

PROMPTS = [[1, 2, 3, 4], [5, 6, 7], [8] * 9]
SAMPLING = SamplingConfig(max_tokens=40, seed=7, early_stop_logprob=-3.0)


class FakeEngine:
    """A fake engine whose name, versions, checksums and weights tests can change."""

    name = "the engine"
    reported_version = None  # version of the tokens; None: the published version
    dropped_tensors = ()

    def __init__(self):
        self.model, self.sums, self.requests, self.ignores_weights = tiny_model.build(0), {}, [], False
        self.temperature = 1.0
        self.reports_raw_logprobs = False  # without the temperature

    def publish(self, tensors, version, adapter, before_load):
        published = {name: tensor.clone() for name, tensor in tensors}
        before_load()
        self.sums = {name: checksum(t) for name, t in published.items() if name not in self.dropped_tensors}
        if not self.ignores_weights:
            self.model.load_state_dict({name: tensor.float() for name, tensor in published.items()}, strict=False)
        self.version = version
        sums = {name: checksum(tensor) for name, tensor in published.items()}
        return PublishReport(sum(t.numel() * t.element_size() for t in published.values()), sums, 0.5, 0.25, 0.125)

    def sample_canary(self, prompts, samples, sampling):
        self.requests.append((prompts, samples, sampling))
        generator = torch.Generator().manual_seed(sampling.seed)
        return [CanaryAnswer(self.name, [self._sample(p, samples, sampling, generator) for p in prompts], [self.sums])]

    @torch.no_grad()
    def _sample(self, prompt, samples, sampling, generator):
        """Samples all completions of a prompt in parallel, token by token."""
        ids, logprobs = torch.tensor([prompt] * samples), []
        for _ in range(sampling.max_tokens):
            logits = self.model(ids).logits[:, -1]
            sampled_ids = torch.multinomial((logits / self.temperature).softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, sampled_ids], dim=1)
            reported = logits if self.reports_raw_logprobs else logits / self.temperature
            logprobs.append(reported.log_softmax(-1).gather(1, sampled_ids))
        version = self.version if self.reported_version is None else self.reported_version
        versions = np.full(sampling.max_tokens, version, np.int32)
        return [
            Completion(tokens.numpy().astype(np.int32), logprobs_R.numpy(), versions, "length", 0)
            for tokens, logprobs_R in zip(ids[:, len(prompt) :], torch.cat(logprobs, dim=1), strict=True)
        ]


@pytest.fixture(scope="module")
def hf_model(tmp_path_factory):
    return HFModel(tiny_model.save(tiny_model.build(0), tmp_path_factory.mktemp("model")))


@pytest.fixture
def make_publisher(hf_model):
    """A function: settings of the engine -> (engine, policy's model, publisher) after a first weight sync."""

    def make(limit=0.001, prompts=PROMPTS, **settings):
        config, device = EngineConfig(**{"dtype": "float32"} | settings), torch.device("cpu")
        policy = build_policy(partial(from_config, str(hf_model.path)), hf_model, device, torch.float32)
        model = build_on_meta(partial(from_config, str(hf_model.path)))
        precision = Precision(PrecisionConfig(), model, hf_model, "float32", config, device, None)
        learner, engine = single_process_learner(policy, PolicyLoss()), FakeEngine()
        logprobs_fn = partial(
            streamed_logprobs, make_model=partial(from_config, str(hf_model.path)), device=device, temperature=1.0
        )
        noise = partial(measure_rounding, FullWeights(), precision, policy.model, logprobs_fn)
        gate = MismatchGate(limit, noise, precision.coarsest_name, test_distribution=not precision.is_mixed)
        publisher = Publisher(
            engine, learner, FullWeights(), precision, hf_model, gate, logprobs_fn, prompt_groups(prompts), SAMPLING
        )
        return engine, policy.model, publisher

    return make


@torch.no_grad()
def update(model, size, seed=0, names=("",)):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if any(part in name for part in names):
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=size)


def test_publish_reports_canary_metrics_and_sampling(make_publisher):
    engine, model, publisher = make_publisher()
    first = publisher.publish(3)
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert first["publish/bytes"] == size
    # The engine reports the seconds. Its copy time includes gathering, which the publisher subtracts.
    assert first["time/publish/pause"] == 0.25
    assert first["time/publish/copy"] + first["time/publish/gather"] == pytest.approx(0.5)
    assert first["canary/mean_abs"] < 1e-5 and first["canary/limit"] == 0.001
    assert not {"canary/update_applied", "publish/changed_share"} & set(first)  # there is no previous weight sync
    assert first["time/publish/canary"] > 0

    update(model, 1e-2)
    second = publisher.publish(4)
    assert second["canary/update_applied"] == pytest.approx(1.0, abs=0.01)
    assert second["publish/changed_share"] > 0.99
    for prompts, samples, sampling in engine.requests:
        assert (prompts, samples) == (PROMPTS, 16)
        assert sampling == dataclasses.replace(SAMPLING, max_tokens=8, seed=0, early_stop_logprob=None)


def test_publish_canary_length_follows_max_tokens(hf_model, make_publisher):
    engine, _, publisher = make_publisher()
    short = Publisher(
        engine, publisher._learner, FullWeights(), publisher._precision, hf_model, publisher._gate, publisher._logprobs_fn,
        prompt_groups(PROMPTS),
        dataclasses.replace(SAMPLING, max_tokens=3),
    )  # fmt: skip
    assert short.publish(1)["canary/mean_abs"] < 1e-5
    assert engine.requests[-1][2].max_tokens == 3


@pytest.mark.parametrize("temperature", [0.8, 0.9, 1.1])
def test_canary_two_prompts_detect_temperature_in_bfloat16(make_publisher, temperature):
    """The trainer computes in float32 and publishes bfloat16: the canary compares published weights."""
    engine, model, publisher = make_publisher(limit=5.0, dtype="bfloat16", prompts=PROMPTS[:CANARY_PROMPTS])
    update(model, 0.2)
    publisher.publish(4)
    engine.temperature = temperature
    match = f"after publishing version 5: on 256 .* temperature: the engine's temperature is about {temperature}"
    with pytest.raises(MismatchError, match=match):
        publisher.publish(5)


@pytest.mark.parametrize("temperature, other", [(0.7, "sharper"), (1.4, "flatter")])
def test_canary_detects_unreported_sampling_temperature(make_publisher, temperature, other):
    """An engine that reports log-probs without its temperature agrees with the trainer on every token."""
    engine, model, publisher = make_publisher(prompts=PROMPTS[:CANARY_PROMPTS])
    update(model, 0.2)
    engine.reports_raw_logprobs = True
    for version in (0, 1):
        publisher.publish(version)
    engine.temperature = temperature
    with pytest.raises(
        MismatchError, match=f"a {other} distribution makes the canary's tokens 1e\\+07 times as likely"
    ):
        publisher.publish(SEED_PERIOD)
    # New seeds have longer completions.
    assert [(sampling.seed, sampling.max_tokens) for *_, sampling in engine.requests] == [(0, 32), (0, 8), (1, 32)]


def test_publish_nan_weights_are_named_in_error(make_publisher):
    engine, model, publisher = make_publisher()
    publisher.publish(0)
    engine.ignores_weights = True
    with torch.no_grad():
        model.layers[1].mlp.w1.weight[3, 2] = torch.nan
    match = "version 1: log-probs of 384 .* not finite: .* NaN or infinite; 1 values of model.layers.1.mlp.gate_proj.weight$"
    with pytest.raises(MismatchError, match=match):
        publisher.publish(1)


@pytest.mark.parametrize(
    "fault, message",
    [
        (
            dict(reported_version=2),
            r"after publishing version 4: weights: the engine reports version \[2\] for its tokens",
        ),
        (
            dict(dropped_tensors=("model.norm.weight",)),
            r"1 of the \d+ tensors in the engine \(worker 0\) .*: 1 missing",
        ),
        # The limit of the magnitude is far above this update, so only its effect on the tokens shows the fault.
        (
            dict(ignores_weights=True),
            r"4: .*weights: the engine has the new weights but samples with the old ones.* fraction -?0\.0",
        ),
    ],
)
def test_publish_failed_weight_sync_raises_mismatch(make_publisher, fault, message):
    engine, model, publisher = make_publisher(limit=5.0)
    publisher.publish(3)
    update(model, 1e-2)
    for name, value in fault.items():
        setattr(engine, name, value)
    with pytest.raises(MismatchError, match=message):
        publisher.publish(4)


def test_publish_too_small_update_is_not_measured(make_publisher):
    engine, model, publisher = make_publisher()
    publisher.publish(3)
    engine.ignores_weights = True
    update(model, 1e-9)
    assert "canary/update_applied" not in publisher.publish(4)


def test_publish_checks_each_replica_separately(make_publisher, monkeypatch):
    engine, _model, publisher = make_publisher(limit=0.1)
    other, sample_canary = FakeEngine(), engine.sample_canary
    other.name = "the other"

    def both(*arguments):
        other.version, other.sums = engine.version, engine.sums
        return sample_canary(*arguments) + other.sample_canary(*arguments)

    monkeypatch.setattr(engine, "sample_canary", both)
    update(other.model, 1e-4)
    assert 1e-5 < publisher.publish(1)["canary/mean_abs"] < 0.1  # the worse engine's value
    update(other.model, 3e-2)
    with pytest.raises(MismatchError, match="after publishing version 2, the other: trainer and engine disagree"):
        publisher.publish(2)


def test_publish_logs_lowest_update_applied_of_replicas(make_publisher, monkeypatch):
    engine, model, publisher = make_publisher(limit=5.0)
    other, sample_canary = FakeEngine(), engine.sample_canary

    def both(*arguments):
        before, now = other.model.state_dict(), engine.model.state_dict()
        other.model.load_state_dict({name: before[name] + 0.8 * (now[name] - before[name]) for name in now})
        other.version, other.sums = engine.version, engine.sums
        return other.sample_canary(*arguments) + sample_canary(*arguments)

    monkeypatch.setattr(engine, "sample_canary", both)
    publisher.publish(1)
    update(model, 1e-2)
    assert publisher.publish(2)["canary/update_applied"] == pytest.approx(0.8, abs=0.03)


def rounded_share(before, after):
    """The fraction of values, over all changed tensors, whose change bfloat16 represents."""
    pairs = [(a.bfloat16() != b.bfloat16()).flatten() for a, b in zip(before, after, strict=True)]
    changed_values = torch.cat([changed for changed in pairs if changed.any()])
    return changed_values.double().mean().item()


def test_publish_logs_update_share_kept_by_engine_dtype(make_publisher, caplog):
    _engine, model, publisher = make_publisher(limit=5.0, dtype="bfloat16")
    before = [p.detach().clone() for p in model.parameters()]
    publisher.publish(1)
    update(model, 2e-5, names=("layers",))
    with caplog.at_level(logging.WARNING):
        share = publisher.publish(2)["publish/changed_share"]
        # Tensors of 8,192 values or more are subsampled; tensors of the layers have 64 to 8,192.
        assert share == pytest.approx(rounded_share(before, list(model.parameters())), rel=0.1) and share < 0.2
        update(model, 2e-5, seed=1, names=("layers",))
        publisher.publish(3)
    (message,) = [record.getMessage() for record in caplog.records if "changed_share" in record.getMessage()]
    assert "of the engine's values, in bfloat16, differs" in message
    assert "Fix: set engine.dtype=float32, or dtype=bfloat16" in message


def test_changed_share_counts_all_values_of_a_tensor(make_publisher):
    """A large tensor is subsampled evenly."""
    _, _, publisher = make_publisher(dtype="bfloat16")
    large, small = torch.zeros(VALUES_PER_TENSOR), torch.zeros(10)
    before = {"large": (50 * VALUES_PER_TENSOR, large), "small": (10, small)}
    after = {
        "large": (50 * VALUES_PER_TENSOR, large + (torch.arange(VALUES_PER_TENSOR) < VALUES_PER_TENSOR // 4)),
        "small": (10, small + 1),
    }
    share = publisher._changed_share(before, after)["publish/changed_share"]
    assert share == pytest.approx((50 * VALUES_PER_TENSOR / 4 + 10) / (50 * VALUES_PER_TENSOR + 10))


def test_publish_representable_update_does_not_warn(make_publisher, caplog):
    _engine, model, publisher = make_publisher(limit=5.0, dtype="bfloat16")
    publisher.publish(1)
    update(model, 1e-2)
    with caplog.at_level(logging.WARNING):
        assert publisher.publish(2)["publish/changed_share"] > 0.5
        assert publisher.publish(3)["publish/changed_share"] == 0.0  # an update of size 0 changes nothing
    assert not [record for record in caplog.records if "changed_share" in record.getMessage()]


class RestingEngine(FakeEngine):
    """Sleeps in turns with a trainer whose frozen weights are offloaded. `events` holds the order."""

    def __init__(self, offload):
        super().__init__()
        self.events, self.asleep = [], True
        self._offload = offload

    def publish(self, tensors, version, adapter, before_load):
        def record():
            self.events.append("copied")
            before_load()
            assert self._offload is None or self._offload.is_on_host, "the engine wakes beside the frozen weights"
            self.asleep = False
            self.events.append("wake")

        return super().publish(tensors, version, adapter, record)

    def sample_canary(self, prompts, samples, sampling):
        assert not self.asleep
        self.events.append("draw")
        return super().sample_canary(prompts, samples, sampling)

    def sleep(self):
        self.asleep = True
        self.events.append("sleep")


def train_adapters(hf_model, offloads, dora=False):
    """Train three steps of merged adapters. Return the engine, the publisher, the metrics and the weights."""
    arguments = {"lora_attn_modules": ["q_proj", "v_proj"], "lora_rank": 4, "use_dora": dora}
    make, device = partial(from_config, str(hf_model.path), **arguments), torch.device("cpu")
    policy, meta = build_policy(make, hf_model, device, torch.float32), build_on_meta(make)
    trained = select_trained_weights(meta, hf_model, arguments, AdapterConfig(publish="merged"))
    precision = Precision(
        PrecisionConfig(), meta, hf_model, "float32", EngineConfig(dtype="float32", sleep=True), device, trained.spec
    )
    offload = FrozenOffload(policy.model) if offloads else None
    learner, engine = single_process_learner(policy, PolicyLoss()), RestingEngine(offload)
    gate, logprobs_fn = MismatchGate(0.001), partial(streamed_logprobs, make_model=make, device=device)
    check = gate.check
    gate.check = lambda *args, **kwargs: (engine.events.append("check"), check(*args, **kwargs))[1]
    publisher = Publisher(
        engine, learner, trained, precision, hf_model, gate, logprobs_fn, prompt_groups(PROMPTS), SAMPLING, offload
    )
    row, metrics = make_rows()[0], []
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=1e-2)
    for version in range(4):
        line = publisher.publish(version)
        metrics.append({name: value for name, value in line.items() if not name.startswith("time/")})
        publisher.onload()
        engine.events.append("update")
        policy(row).logprobs_L.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine, publisher, metrics, [param.detach().clone() for param in policy.model.parameters()]


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_publish_with_offload_alternates_and_trains_identically(hf_model, dora):
    engine, _, metrics, weights = train_adapters(hf_model, offloads=True, dora=dora)
    assert engine.events == 4 * ["copied", "wake", "draw", "sleep", "check", "sleep", "update"]
    together, _, expected_metrics, expected = train_adapters(hf_model, offloads=False, dora=dora)
    assert together.events == 4 * ["copied", "wake", "draw", "check", "update"]
    assert metrics == expected_metrics and "canary/adapter_applied" in metrics[-1]
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def test_update_without_onload_is_refused(hf_model):
    _, publisher, *_ = train_adapters(hf_model, offloads=True)
    publisher.publish(4)
    with pytest.raises(RuntimeError, match=r"publisher.onload\(\) before the update"):
        publisher._learner.logprobs(make_rows())
    publisher.publish(5)  # as if the update were skipped
    publisher.onload()
    publisher._learner.logprobs(make_rows())


def test_canary_failure_while_offloaded_leaves_readable_weights(hf_model, tmp_path):
    engine, publisher, *_ = train_adapters(hf_model, offloads=True)
    engine.dropped_tensors = ("model.norm.weight",)
    with pytest.raises(MismatchError, match="version 4: weights: 1 of the"):
        publisher.publish(4)
    assert publisher._offload.is_on_host
    model, trained = publisher._learner.policy.model, publisher._trained_weights
    export_adapter(tmp_path, model, hf_model, trained.spec, merged_dtype=torch.float32)
    assert len(load_file(tmp_path / "merged" / "model-00001-of-00001.safetensors")) > 20
    publisher.onload()
    assert not publisher._offload.is_on_host
