"""Weights to the sampler, in memory, and the proof that it samples with them."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter

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
from torchtune_ext.training.trainable import FullWeights, LoRAWeights

log = logging.getLogger(__name__)

# The first tokens of an answer prove most, since under the same seeds they come again after an update. The faults of
# benchmarks/results/gate.md were found on 70 to 200 tokens in all; 32 requests of 8 tokens are 256.
CANARY_SAMPLES, CANARY_TOKENS = 16, 8
CANARY_PROMPTS = CANARY_REQUESTS // CANARY_SAMPLES
# Values of a tensor, evenly spaced, that are compared with those of the publication before.
SAMPLED_VALUES = 4096
# The share of changed values below which a user in mixed precision is warned.
FEW_CHANGED = 0.2
# With the seed of the publication before most tokens come again, and two policies can be compared on them. With another
# one they are a new sample, which adds evidence to the likelihood test. Then answers are longer.
SEED_PERIOD, NEW_SEED_TOKENS = 10, 32


class Publisher:
    """Sends the policy's weights to the engine and lets a canary prove that they arrived.

    The canary samples a few tokens from fixed prompts, with new seeds at every `SAME_SEED`-th version. Besides log-probs like
    the trainer's it asks:

    1. every token is labelled with the version that was just published;
    2. every tensor that the engine took has the checksum of the one that was sent, on each of its workers;
    3. where a change (the update, an adapter) moves log-probs by more than the noise, the engine's moved with it;
    4. the tokens are as likely as the engine reports.

    Args:
        engine: on rank 0; None on the others, which take part in the gathers and in the canary.
        trained: what is sent of the policy.
        precision: in which weights are sent.
        source: names of the weights in the engine.
        agreement: the gate that the canary has to pass.
        scored: log-probs with other weights and in another precision than the policy's (`streamed_logprobs`).
        canary: prompts of the canary, as groups without samples.
        sampling: of the run; the canary's is the same but for its length and its seed.
    """

    def __init__(
        self,
        engine: Engine | None,
        learner: Learner,
        trainable: FullWeights | LoRAWeights,
        precision: Precision,
        hf_model: HFModel,
        gate: MismatchGate,
        logprobs_fn: Callable[..., list[Tensor]],
        canary: Sequence[Group],
        sampling: SamplingConfig,
    ):
        self._engine, self._learner, self._ranks = engine, learner, learner.ranks
        self._trainable, self._precision, self._hf_model = trainable, precision, hf_model
        self._gate, self._logprobs_fn, self._groups = gate, logprobs_fn, list(canary)
        self._sampling = replace(sampling, early_stop_logprob=None)
        self._sent_checksums: dict[str, dict[str, int]] = {"model": {}, "adapter": {}}  # checksums by name, on rank 0
        # Of what was sent last: the number of values and some of them, by name, on rank 0.
        self._values: dict[str, tuple[int, Tensor]] = {}
        self._weights_differ, self._warned = trainable.weights_differ(precision), False
        self._previous_logprobs: dict[
            int, float
        ] = {}  # context -> log-prob under the policy of the last publication, all ranks

    def publish(self, version: int) -> dict[str, float]:
        """Makes the engine sample with the current weights under `version`. A collective.

        Returns, on rank 0, the size of the publication, the seconds of its parts, and what the canary found.
        Raises Disagreement, with the likely cause, if the engine does not run these weights.
        """
        # An engine that shares the trainer's GPU wakes up now and needs the memory.
        torch.cuda.empty_cache()
        publication, began = self._send(version), perf_counter()
        canary = self._check_canary(version)
        seconds = {"time/publish/canary": perf_counter() - began}
        return publication | seconds | canary if self._engine is not None else {}

    def _send(self, version: int) -> dict[str, float]:
        """Gathers the weights and gives them to the engine. Returns sizes and seconds, on rank 0."""
        size = gather_s = copy_s = pause_s = 0.0
        values: dict[str, tuple[int, Tensor]] = {}

        def timed_gather(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            nonlocal gather_s
            began = perf_counter()
            for name, tensor in tensors:
                flat = tensor.detach().reshape(-1)
                # A CPU cannot compare numbers in FP8, but it can compare their bytes.
                some = flat[:: max(1, len(flat) // SAMPLED_VALUES)].clone()
                values[name] = len(flat), (some.view(torch.uint8) if some.element_size() == 1 else some).cpu()
                # The clock stands still while the engine has the tensor: that is the time of copying.
                gather_s += perf_counter() - began
                yield name, tensor
                began = perf_counter()
            gather_s += perf_counter() - began

        for tensors, adapter in self._trainable.weight_streams(
            self._learner.policy.model, self._hf_model, self._precision
        ):
            if self._engine is None:
                # Rank 0 gathers each weight, and the others have to take part.
                for _ in tensors:
                    pass
                continue
            report = self._engine.publish(timed_gather(tensors), version, adapter)
            self._sent_checksums["model" if adapter is None else "adapter"] = report.checksums
            size, copy_s, pause_s = size + report.bytes, copy_s + report.copy_s, pause_s + report.pause_s
        # The engine pulls the tensors while it copies, so its seconds contain those of gathering.
        seconds = {"gather": gather_s, "copy": copy_s - gather_s, "pause": pause_s}
        changed, self._values = self._changed_share(self._values, values), values
        return {"publish/bytes": size} | changed | {f"time/publish/{part}": value for part, value in seconds.items()}

    def _check_canary(self, version: int) -> dict[str, float]:
        """Judges the canary of every engine, and returns the worst metrics. Raises Disagreement."""
        # Weights that did not arrive can hide below the limit of the gate: with a small learning rate an update moves
        # log-probs by less than rounding does. Versions and checksums show them all the same.
        when = f"after publishing version {version}"
        answers, arrival_error = self._sample_canary(version)
        if arrival_error:
            raise MismatchError(f"{when}: weights: {arrival_error}")
        # Each engine is judged by itself, because a mean over all would hide one that was forgotten.
        worst, shares, pairs = 0.0, {}, []
        for name, rows in answers:
            whose = when if len(answers) == 1 else f"{when}, {name}"
            logprobs = self._learner.logprobs(rows)
            # The effect of a change is that of the values which the engine holds, which may be coarser than ours.
            if self._weights_differ:
                logprobs_fn = partial(self._logprobs_fn, dtype=torch.float32)
                sent_logprobs = logprobs_fn(
                    rows, self._trainable.engine_weights(self._learner.policy.model, self._precision)
                )
            else:
                logprobs_fn, sent_logprobs = None, [ours.logprobs_L for ours in logprobs]
            applied = self._trainable.measure_effects(self._learner, rows, sent_logprobs, logprobs_fn, self._precision)
            applied["update"] = self._measure_update(rows, sent_logprobs)
            mismatch = self._gate.check(
                rows, logprobs, whose, effects=list(applied.values()), describe_nonfinite=self._describe_nonfinite
            )
            if self._weights_differ:
                sent_rows = [replace(ours, logprobs_L=new) for ours, new in zip(logprobs, sent_logprobs, strict=True)]
                self._gate.check_sharpness(rows, sent_rows, whose)
            sharper = self._learner.logprobs(rows, self._learner.temperature / SHARPER_LOGIT_SCALE)
            self._gate.check_likelihood(rows, logprobs, sharper, whose, name, version // SEED_PERIOD)
            worst = max(worst, mismatch.mean_abs)
            pairs += zip(rows, sent_logprobs, strict=True)
            for change, share in applied.items():
                if share.resolved:
                    key = f"canary/{change}_applied"
                    shares[key] = min(shares.get(key, share.slope), share.slope)
        self._store_logprobs(pairs)
        return {"canary/mean_abs": worst, "canary/limit": self._gate.limit} | shares

    def _sample_canary(self, version: int) -> tuple[list[tuple[str, list[Row]]], str | None]:
        """This rank's share of the rows that each engine sampled, and a message if one has other weights."""
        engines, wrong = [], None
        if self._engine is not None:
            prompts = [group.prompt_tokens.tolist() for group in self._groups]
            tokens = min(CANARY_TOKENS if version % SEED_PERIOD else NEW_SEED_TOKENS, self._sampling.max_tokens)
            sampling = replace(self._sampling, max_tokens=tokens, seed=version // SEED_PERIOD)
            for answer in self._engine.canary(prompts, CANARY_SAMPLES, sampling):
                wrong = wrong or self._find_version_error(answer, version) or self._find_checksum_error(answer)
                groups = [
                    replace(group, samples=tuple(Sample(completion, in_loss=True) for completion in completions))
                    for group, completions in zip(self._groups, answer.completions, strict=True)
                ]
                longest = sum(len(g.prompt_tokens) + CANARY_SAMPLES * tokens for g in groups)
                engines.append((answer.engine, pack(groups, longest, layout=self._learner.layout)[0]))
        engines, wrong = self._ranks.broadcast((engines, wrong))
        return [(name, self._ranks.local_slice(rows)) for name, rows in engines], wrong

    @staticmethod
    def _find_version_error(answer: CanaryAnswer, version: int) -> str | None:
        labels = {int(label) for group in answer.completions for c in group for label in c.versions}
        if labels <= {version}:
            return None
        return f"{answer.engine} labels what it samples with version {sorted(labels)}: the publication did not reach it"

    def _find_checksum_error(self, answer: CanaryAnswer) -> str | None:
        sent = {name: value for part in self._sent_checksums.values() for name, value in part.items()}
        messages = [
            describe_differences(sent, taken, answer.engine, worker) for worker, taken in enumerate(answer.checksums)
        ]
        return next(filter(None, messages), None)

    def _measure_update(self, rows: list[Row], new_logprobs: list[Tensor]) -> UpdateEffect:
        """Whether the engine shows the newest update, on tokens that the canary before it sampled, too."""
        old_logprobs = [
            torch.tensor([self._previous_logprobs.get(c, torch.nan) for c in context_hashes(row)[1].tolist()])
            for row in rows
        ]
        return measure_update_effect(
            rows, new_logprobs, old_logprobs, "the engine has the weights that were sent and samples as before them"
        )

    def _store_logprobs(self, pairs: Iterable[tuple[Row, Tensor]]) -> None:
        """Keeps the log-probs of the present policy for the next publication."""
        # All ranks keep all of them, since a context may go to another rank next time.
        here = {
            c: p for row, ours in pairs for c, p in zip(context_hashes(row)[1].tolist(), ours.tolist(), strict=True)
        }
        self._previous_logprobs = {c: p for part in all_gather(here) for c, p in part.items()}

    def _describe_nonfinite(self) -> str:
        """The policy's weights that are NaN or infinite, for a message. A collective."""
        # A sharded parameter is looked at where its shards are, so that no rank waits for another.
        local = {
            name: p.to_local() if isinstance(p, DTensor) else p
            for name, p in self._learner.policy.model.named_parameters()
        }
        here = {hf_name(name): int((~p.isfinite()).sum()) for name, p in local.items()}
        return "".join(f"; {n} values of {name}" for part in all_gather(here) for name, n in part.items() if n)

    def _changed_share(
        self, old_values: dict[str, tuple[int, Tensor]], new_values: dict[str, tuple[int, Tensor]]
    ) -> dict[str, float]:
        """Which share of the values differs from the publication before; empty at the first one."""
        if not old_values:
            return {}
        # In a dtype coarser than the trainer's the engine cannot hold the smaller part of an update. Tensors in which
        # nothing changed are frozen, or as good as frozen, and do not count.
        shares = {
            n: (old_values[n][1] != some).float().mean().item()
            for n, (_, some) in new_values.items()
            if n in old_values
        }
        moved = sum(new_values[name][0] for name, share in shares.items() if share)
        share = sum(new_values[name][0] * share for name, share in shares.items()) / max(1, moved)
        if self._precision.is_mixed and 0 < share < FEW_CHANGED and not self._warned:
            self._warned = True
            fp8 = self._precision.engine_fp8 is not None
            log.warning(
                "publish/changed_share %.2g: in %s, which the engine holds, so few of the values differ from those of the "
                "publication before. The trainer computes with the whole update, so it moves away from the policy that samples "
                "until half a step of that dtype is gathered. Set %s; this is not said again",
                share,
                "FP8" if fp8 else str(self._precision.engine_dtype)[6:],
                "precision=fp8_unified"
                if fp8
                else "engine.dtype=float32, or dtype=bfloat16, in which both round alike",
            )
        return {"publish/changed_share": share}


def make_canary_groups(problems: ProblemStream, tokenizer: ChatTokenizer) -> list[Group]:
    """The same few prompts for every publication of a run, as groups without samples."""
    chosen = problems.first_problems(CANARY_PROMPTS)
    prompts = [tokenizer.prompt_ids(problem.messages, problem.tools) for problem in chosen]
    return [Group(p, np.asarray(ids, dtype=np.int32), ()) for p, ids in zip(chosen, prompts, strict=True)]
