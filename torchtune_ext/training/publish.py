"""Publishes the weights to the engine in memory, and verifies that its replicas sample with them."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.pipeline.groups import Group, Sample
from torchtune_ext.pipeline.packing import Row, context_hashes, pack
from torchtune_ext.policy.families import hf_name
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.sampling.engine import Engine, SamplingConfig
from torchtune_ext.sampling.types import CANARY_REQUESTS, CanaryAnswer
from torchtune_ext.sampling.weight_buffer import describe_differences
from torchtune_ext.tasks.problem_stream import ProblemStream
from torchtune_ext.training.collectives import all_gather
from torchtune_ext.training.learner import Learner
from torchtune_ext.training.mismatch import (
    SHARPER_LOGIT_SCALE,
    MismatchError,
    MismatchGate,
    UpdateEffect,
    measure_update_effect,
)
from torchtune_ext.training.precision import Precision
from torchtune_ext.training.trained_weights import FullWeights, LoRAWeights

if TYPE_CHECKING:
    from torchtune_ext.policy.offload import FrozenOffload

log = logging.getLogger(__name__)

# The first tokens of a completion are most informative, because with the same seeds they recur
# after an update. The faults of benchmarks/results/gate.md were found on 70 to 200 tokens in total;
# 32 requests of 8 tokens are 256.
CANARY_SAMPLES, CANARY_TOKENS = 16, 8
CANARY_PROMPTS = CANARY_REQUESTS // CANARY_SAMPLES
# Number of evenly spaced values per tensor to compare with the previous weight sync.
VALUES_PER_TENSOR = 4096
# Fraction of changed values below which the publisher warns in mixed precision.
MIN_CHANGED_FRACTION = 0.2
# With the seed of the previous weight sync most tokens recur, and two policies can be compared on
# them. With a new seed the tokens are a new sample, which adds evidence to the likelihood test, so
# completions are longer.
SEED_PERIOD, NEW_SEED_TOKENS = 10, 32


class WeightPublisher(Protocol):
    """Publishes the policy's weights: a `Publisher`, or a `NoPublisher` in a replay."""

    def publish(self, version: int) -> dict[str, float]: ...

    def onload(self) -> None: ...


class NoPublisher:
    """The publisher of a run without an engine."""

    def publish(self, version: int) -> dict[str, float]:
        """Publishes nothing, and returns no metrics."""
        return {}

    def onload(self) -> None:
        """Does nothing: no engine shares the GPU."""


class Publisher:
    """Publishes the policy's weights to the engine, and verifies their arrival with a canary.

    The canary, a check of each weight sync, samples a few tokens from fixed prompts, with new seeds
    every `SEED_PERIOD` versions. It requires that log-probs match the trainer's, and that:

    1. every token has the version that was just published;
    2. every tensor on each worker of each engine replica has the checksum of the published tensor;
    3. if a change (the update, an adapter) moves the trainer's log-probs by more than the noise,
       the engine's log-probs move with them;
    4. the tokens are as likely as the engine reports.

    With `offload`, trainer and engine use the GPU in turns: the frozen weights move to main memory
    before the engine wakes up. The engine samples the canary and sleeps while the trainer checks it.

    Args:
        engine: the engine on rank 0; None on other ranks, which take part in gathering and in the
            canary.
        learner: the learner, whose policy is published.
        trained_weights: the published part of the policy.
        precision: precision of the published weights.
        hf_model: maps weights to their names in the engine.
        gate: the mismatch gate that the canary must pass.
        logprobs_fn: computes log-probs with other weights or another precision than the policy's
            (`streamed_logprobs`).
        canary_groups: prompts of the canary, as groups without samples.
        sampling: sampling settings of the run. The canary changes only length and seed.
        offload: moves the frozen weights to main memory while the engine is awake; None: they stay
            on the device.
    """

    def __init__(
        self,
        engine: Engine | None,
        learner: Learner,
        trained_weights: FullWeights | LoRAWeights,
        precision: Precision,
        hf_model: HFModel,
        gate: MismatchGate,
        logprobs_fn: Callable[..., list[Tensor]],
        canary_groups: Sequence[Group],
        sampling: SamplingConfig,
        offload: "FrozenOffload | None" = None,
    ):
        self._engine, self._learner, self._ranks = engine, learner, learner.ranks
        self._trained_weights, self._precision, self._hf_model = trained_weights, precision, hf_model
        self._gate, self._logprobs_fn, self._canary_groups = gate, logprobs_fn, list(canary_groups)
        self._sampling = replace(sampling, early_stop_logprob=None)
        self._offload = offload
        # Name -> checksum, on rank 0.
        self._published_checksums: dict[str, dict[str, int]] = {"model": {}, "adapter": {}}
        # Name -> number of values, and a subset of the values, of the last weight sync, on rank 0.
        self._value_subsets: dict[str, tuple[int, Tensor]] = {}
        self._weights_differ = trained_weights.weights_differ(precision)
        self._has_warned = False
        # Context -> log-prob under the policy of the last weight sync, of all ranks.
        self._previous_logprobs: dict[int, float] = {}

    def publish(self, version: int) -> dict[str, float]:
        """Publishes the current weights as `version` and runs the canary. A collective.

        Returns:
            On rank 0 the size of the weight sync, the seconds of its stages, and the canary's
            metrics; elsewhere an empty dict.

        Raises:
            MismatchError: an engine replica does not sample with these weights. The message names
                the likely cause.
        """
        metrics = self._send(version)
        canary_started = perf_counter()
        replica_rows = self._sample_canary(version)
        self.onload()
        metrics |= self._check_rows(version, replica_rows)
        if self._offload is not None:
            self._free_memory()  # the next request wakes the engine
        metrics["time/publish/canary"] = perf_counter() - canary_started
        return metrics if self._engine is not None else {}

    def onload(self) -> None:
        """With `offload`, brings the frozen weights back to the GPU while the engine sleeps, for an update."""
        if self._offload is not None and self._offload.is_on_host:
            if self._engine is not None:
                self._engine.sleep()
            self._offload.to_device()

    def _free_memory(self) -> None:
        """Frees GPU memory for an engine that shares the trainer's GPU and wakes up now."""
        if self._offload is not None:
            self._offload.to_host()
        engine = self._precision.engine
        # The sender to servers allocates on this GPU, too.
        if engine.sleep or engine.address is not None:
            torch.cuda.empty_cache()
        # A tensor-parallel engine wakes up on the GPUs of all ranks.
        if engine.sleep:
            self._ranks.any(False)

    def _send(self, version: int) -> dict[str, float]:
        """Gathers the weights and sends them to the engine. Returns metrics on rank 0."""
        size = gather_s = copy_s = pause_s = 0.0
        value_subsets: dict[str, tuple[int, Tensor]] = {}

        def timed_gather(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            nonlocal gather_s
            start_time = perf_counter()
            for name, tensor in tensors:
                flat = tensor.detach().reshape(-1)
                # A CPU cannot compare FP8 numbers, but it can compare their bytes.
                subset = flat[:: max(1, len(flat) // VALUES_PER_TENSOR)].clone()
                subset = subset.view(torch.uint8) if subset.element_size() == 1 else subset
                value_subsets[name] = len(flat), subset.cpu()
                # The timer stops while the engine copies the tensor, because that time is `copy_s`.
                gather_s += perf_counter() - start_time
                yield name, tensor
                start_time = perf_counter()
            gather_s += perf_counter() - start_time

        for tensors, adapter in self._trained_weights.weight_streams(
            self._learner.policy.model, self._hf_model, self._precision
        ):
            if self._engine is None:
                # Rank 0 gathers each weight, so the other ranks must take part.
                for _ in tensors:
                    pass
                self._free_memory()
                continue
            report = self._engine.publish(timed_gather(tensors), version, adapter, self._free_memory)
            self._published_checksums["model" if adapter is None else "adapter"] = report.checksums
            size, copy_s, pause_s = size + report.bytes, copy_s + report.copy_s, pause_s + report.pause_s
        # The engine pulls the tensors while it copies, so its seconds include gathering.
        seconds = {"gather": gather_s, "copy": copy_s - gather_s, "pause": pause_s}
        changed_share = self._changed_share(self._value_subsets, value_subsets)
        self._value_subsets = value_subsets
        return {"publish/bytes": size} | changed_share | {f"time/publish/{name}": s for name, s in seconds.items()}

    def _check_rows(self, version: int, replica_rows: list[tuple[str, list[Row]]]) -> dict[str, float]:
        """Checks the canary rows of every engine replica and returns the worst metrics.

        Raises:
            MismatchError: a check failed.
        """
        prefix = f"after publishing version {version}"
        # Each replica is checked separately, because a mean over all replicas would hide a stale
        # one.
        max_mean_abs = 0.0
        applied_shares: dict[str, float] = {}
        published_pairs = []
        for replica, rows in replica_rows:
            replica_prefix = prefix if len(replica_rows) == 1 else f"{prefix}, {replica}"
            logprobs = self._learner.logprobs(rows)
            # The effect of a change is measured with the engine's values, which may be coarser than
            # the trainer's.
            if self._weights_differ:
                logprobs_fn = partial(self._logprobs_fn, dtype=torch.float32)
                published_logprobs = logprobs_fn(
                    rows, self._trained_weights.engine_weights(self._learner.policy.model, self._precision)
                )
            else:
                logprobs_fn, published_logprobs = None, [scores.logprobs_L for scores in logprobs]
            effects = self._trained_weights.measure_effects(
                self._learner, rows, published_logprobs, logprobs_fn, self._precision
            )
            effects["update"] = self._measure_update(rows, published_logprobs)
            mismatch = self._gate.check(
                rows,
                logprobs,
                replica_prefix,
                effects=list(effects.values()),
                describe_nonfinite=self._describe_nonfinite,
            )
            if self._weights_differ:
                published = [
                    replace(scores, logprobs_L=published_L)
                    for scores, published_L in zip(logprobs, published_logprobs, strict=True)
                ]
                self._gate.check_sharpness(rows, published, replica_prefix)
            sharper = self._learner.logprobs(rows, self._learner.temperature / SHARPER_LOGIT_SCALE)
            self._gate.check_likelihood(rows, logprobs, sharper, replica_prefix, replica, version // SEED_PERIOD)
            max_mean_abs = max(max_mean_abs, mismatch.mean_abs)
            published_pairs += zip(rows, published_logprobs, strict=True)
            for name, effect in effects.items():
                if effect.is_reliable:
                    key = f"canary/{name}_applied"
                    applied_shares[key] = min(applied_shares.get(key, effect.slope), effect.slope)
        self._store_logprobs(published_pairs)
        return {"canary/mean_abs": max_mean_abs, "canary/limit": self._gate.limit} | applied_shares

    def _sample_canary(self, version: int) -> list[tuple[str, list[Row]]]:
        """Samples the canary on every engine replica.

        Returns:
            Name and this rank's share of the packed rows, for each replica.

        Raises:
            MismatchError: a replica has other weights than the published ones.
        """
        replica_rows: list[tuple[str, list[Row]]] = []
        error = None
        if self._engine is not None:
            prompts = [group.prompt_tokens.tolist() for group in self._canary_groups]
            tokens = min(CANARY_TOKENS if version % SEED_PERIOD else NEW_SEED_TOKENS, self._sampling.max_tokens)
            sampling = replace(self._sampling, max_tokens=tokens, seed=version // SEED_PERIOD)
            for answer in self._engine.sample_canary(prompts, CANARY_SAMPLES, sampling):
                error = error or self._find_version_error(answer, version) or self._find_checksum_error(answer)
                groups = [
                    replace(group, samples=tuple(Sample(completion, in_loss=True) for completion in completions))
                    for group, completions in zip(self._canary_groups, answer.completions, strict=True)
                ]
                row_tokens = sum(len(g.prompt_tokens) + CANARY_SAMPLES * tokens for g in groups)
                replica_rows.append((answer.replica, pack(groups, row_tokens, cost_model=self._learner.cost_model)[0]))
        replica_rows, error = self._ranks.broadcast((replica_rows, error))
        # The limit of the gate does not detect every failed weight sync: with a small learning rate
        # an update moves log-probs by less than rounding does. Versions and checksums detect it.
        if error:
            raise MismatchError(f"after publishing version {version}: weights: {error}")
        return [(replica, self._ranks.local_slice(rows)) for replica, rows in replica_rows]

    @staticmethod
    def _find_version_error(answer: CanaryAnswer, version: int) -> str | None:
        versions = {int(v) for group in answer.completions for c in group for v in c.versions}
        if versions <= {version}:
            return None
        return f"{answer.replica} reports version {sorted(versions)} for its tokens: the weight sync did not reach it"

    def _find_checksum_error(self, answer: CanaryAnswer) -> str | None:
        published = {name: value for part in self._published_checksums.values() for name, value in part.items()}
        errors = [
            describe_differences(published, loaded, answer.replica, worker)
            for worker, loaded in enumerate(answer.checksums)
        ]
        return next(filter(None, errors), None)

    def _measure_update(self, rows: list[Row], new_logprobs: list[Tensor]) -> UpdateEffect:
        """Measures whether the engine has the newest update, on tokens of the last two canaries."""
        previous_logprobs = [
            torch.tensor([self._previous_logprobs.get(c, torch.nan) for c in context_hashes(row)[1].tolist()])
            for row in rows
        ]
        return measure_update_effect(
            rows, new_logprobs, previous_logprobs, "the engine has the new weights but samples with the old ones"
        )

    def _store_logprobs(self, published_pairs: Iterable[tuple[Row, Tensor]]) -> None:
        """Stores the log-probs of the current policy for the next weight sync."""
        # Every rank stores all log-probs, because the next canary may assign a context to another
        # rank.
        local = {
            context: logprob
            for row, logprobs_L in published_pairs
            for context, logprob in zip(context_hashes(row)[1].tolist(), logprobs_L.tolist(), strict=True)
        }
        self._previous_logprobs = {context: p for part in all_gather(local) for context, p in part.items()}

    def _describe_nonfinite(self) -> str:
        """Lists the policy's weights that are NaN or infinite, for a message. A collective."""
        # Each rank checks only its own shards, so that no rank waits for another.
        local = {
            name: p.to_local() if isinstance(p, DTensor) else p
            for name, p in self._learner.policy.model.named_parameters()
        }
        counts = {hf_name(name): int((~p.isfinite()).sum()) for name, p in local.items()}
        return "".join(f"; {n} values of {name}" for part in all_gather(counts) for name, n in part.items() if n)

    def _changed_share(
        self, previous: dict[str, tuple[int, Tensor]], current: dict[str, tuple[int, Tensor]]
    ) -> dict[str, float]:
        """The fraction of values that differ from the previous weight sync; {} at the first one."""
        if not previous:
            return {}
        # In a dtype coarser than the trainer's, the engine rounds off small changes. Tensors
        # without any change are frozen, or nearly so, and do not count.
        shares = {
            name: (previous[name][1] != subset).float().mean().item()
            for name, (_, subset) in current.items()
            if name in previous
        }
        num_values = sum(current[name][0] for name, share in shares.items() if share)
        share = sum(current[name][0] * share for name, share in shares.items()) / max(1, num_values)
        if self._precision.is_mixed and 0 < share < MIN_CHANGED_FRACTION and not self._has_warned:
            self._has_warned = True
            fp8 = self._precision.engine_fp8 is not None
            log.warning(
                "publish/changed_share %.2g: only this fraction of the engine's values, in %s, differs from the previous "
                "weight sync. The trainer computes with the complete update, so it diverges from the sampling policy "
                "until changes add up to half an ulp of that dtype. Later steps do not repeat this warning. Fix: set %s",
                share,
                "FP8" if fp8 else str(self._precision.engine_dtype)[6:],
                "precision=fp8_unified"
                if fp8
                else "engine.dtype=float32, or dtype=bfloat16, so that both round in the same way",
            )
        return {"publish/changed_share": share}


def make_canary_groups(problems: ProblemStream, tokenizer: ChatTokenizer) -> list[Group]:
    """Returns the canary prompts, the same for all weight syncs, as groups without samples."""
    canary_problems = problems.first_problems(CANARY_PROMPTS)
    prompts = [tokenizer.prompt_ids(problem.messages, problem.tools) for problem in canary_problems]
    return [Group(p, np.asarray(ids, dtype=np.int32), ()) for p, ids in zip(canary_problems, prompts, strict=True)]
