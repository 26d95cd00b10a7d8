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
from torchtune_ext.pipeline.packing import Row, contexts, pack
from torchtune_ext.policy.families import hf_name
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.sampling.engine import Engine, SamplingConfig
from torchtune_ext.sampling.records import CANARY_REQUESTS, CanaryAnswer
from torchtune_ext.sampling.weight_buffer import differences
from torchtune_ext.tasks.order import ProblemStream
from torchtune_ext.training.agreement import SHARPER, Agreement, Applied, Disagreement, applied_share
from torchtune_ext.training.collectives import gathered
from torchtune_ext.training.learner import Learner
from torchtune_ext.training.precision import Precision
from torchtune_ext.training.trained import Adapters, AllWeights

log = logging.getLogger(__name__)

# The first tokens of an answer prove most, since under the same seeds they come again after an update. The faults of
# benchmarks/results/gate.md were found on 70 to 200 tokens in all; 32 requests of 8 tokens are 256.
CANARY_SAMPLES, CANARY_TOKENS = 16, 8
CANARY_PROMPTS = CANARY_REQUESTS // CANARY_SAMPLES
# Values of a tensor, evenly spaced, that are compared with those of the publication before.
LOOKED_AT = 4096
# The share of changed values below which a user in mixed precision is warned.
FEW_CHANGED = 0.2
# With the seed of the publication before most tokens come again, and two policies can be compared on them. With another
# one they are a new sample, which adds evidence to the likelihood test. Then answers are longer.
SAME_SEED, NEW_TOKENS = 10, 32


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
        trained: AllWeights | Adapters,
        precision: Precision,
        source: HFModel,
        agreement: Agreement,
        scored: Callable[..., list[Tensor]],
        canary: Sequence[Group],
        sampling: SamplingConfig,
    ):
        self._engine, self._learner, self._ranks = engine, learner, learner.ranks
        self._trained, self._precision, self._source = trained, precision, source
        self._agreement, self._scored, self._groups = agreement, scored, list(canary)
        self._sampling = replace(sampling, early_stop_logprob=None)
        self._sent: dict[str, dict[str, int]] = {"model": {}, "adapter": {}}  # checksums by name, on rank 0
        # Of what was sent last: the number of values and some of them, by name, on rank 0.
        self._values: dict[str, tuple[int, Tensor]] = {}
        self._rounded, self._warned = trained.rounded(precision), False
        self._before: dict[int, float] = {}  # context -> log-prob under the policy of the last publication, all ranks

    def publish(self, version: int) -> dict[str, float]:
        """Makes the engine sample with the current weights under `version`. A collective.

        Returns, on rank 0, the size of the publication, the seconds of its parts, and what the canary found.
        Raises Disagreement, with the likely cause, if the engine does not run these weights.
        """
        # An engine that shares the trainer's GPU wakes up now and needs the memory.
        torch.cuda.empty_cache()
        publication, began = self._send(version), perf_counter()
        canary = self._prove(version)
        seconds = {"time/publish/canary": perf_counter() - began}
        return publication | seconds | canary if self._engine is not None else {}

    def _send(self, version: int) -> dict[str, float]:
        """Gathers the weights and gives them to the engine. Returns sizes and seconds, on rank 0."""
        size = gather_s = copy_s = pause_s = 0.0
        values: dict[str, tuple[int, Tensor]] = {}

        def gathered_in_time(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            nonlocal gather_s
            began = perf_counter()
            for name, tensor in tensors:
                flat = tensor.detach().reshape(-1)
                # A CPU cannot compare numbers in FP8, but it can compare their bytes.
                some = flat[:: max(1, len(flat) // LOOKED_AT)].clone()
                values[name] = len(flat), (some.view(torch.uint8) if some.element_size() == 1 else some).cpu()
                # The clock stands still while the engine has the tensor: that is the time of copying.
                gather_s += perf_counter() - began
                yield name, tensor
                began = perf_counter()
            gather_s += perf_counter() - began

        for tensors, adapter in self._trained.sent(self._learner.policy.model, self._source, self._precision):
            if self._engine is None:
                # Rank 0 gathers each weight, and the others have to take part.
                for _ in tensors:
                    pass
                continue
            report = self._engine.publish(gathered_in_time(tensors), version, adapter)
            self._sent["model" if adapter is None else "adapter"] = report.sums
            size, copy_s, pause_s = size + report.bytes, copy_s + report.copy_s, pause_s + report.pause_s
        # The engine pulls the tensors while it copies, so its seconds contain those of gathering.
        seconds = {"gather": gather_s, "copy": copy_s - gather_s, "pause": pause_s}
        changed, self._values = self._changed_share(self._values, values), values
        return {"publish/bytes": size} | changed | {f"time/publish/{part}": value for part, value in seconds.items()}

    def _prove(self, version: int) -> dict[str, float]:
        """Judges the canary of every engine, and returns the worst metrics. Raises Disagreement."""
        # Weights that did not arrive can hide below the limit of the gate: with a small learning rate an update moves
        # log-probs by less than rounding does. Versions and checksums show them all the same.
        when = f"after publishing version {version}"
        answers, wrong = self._canary(version)
        if wrong:
            raise Disagreement(f"{when}: weights: {wrong}")
        # Each engine is judged by itself, because a mean over all would hide one that was forgotten.
        worst, shares, pairs = 0.0, {}, []
        for name, rows in answers:
            whose = when if len(answers) == 1 else f"{when}, {name}"
            logprobs = self._learner.logprobs(rows)
            # The effect of a change is that of the values which the engine holds, which may be coarser than ours.
            if self._rounded:
                scored = partial(self._scored, dtype=torch.float32)
                now = scored(rows, self._trained.as_sent(self._learner.policy.model, self._precision))
            else:
                scored, now = None, [ours.logprobs_L for ours in logprobs]
            applied = self._trained.applied(self._learner, rows, now, scored, self._precision)
            applied["update"] = self._update_applied(rows, now)
            mismatch = self._agreement.require(
                rows, logprobs, whose, applied=list(applied.values()), not_finite=self._not_finite
            )
            if self._rounded:
                sent = [replace(ours, logprobs_L=new) for ours, new in zip(logprobs, now, strict=True)]
                self._agreement.require_sharpness(rows, sent, whose)
            sharper = self._learner.logprobs(rows, self._learner.temperature / SHARPER)
            self._agreement.require_likelihood(rows, logprobs, sharper, whose, name, version // SAME_SEED)
            worst = max(worst, mismatch.mean_abs)
            pairs += zip(rows, now, strict=True)
            for change, share in applied.items():
                if share.resolved:
                    key = f"canary/{change}_applied"
                    shares[key] = min(shares.get(key, share.slope), share.slope)
        self._remember(pairs)
        return {"canary/mean_abs": worst, "canary/limit": self._agreement.limit} | shares

    def _canary(self, version: int) -> tuple[list[tuple[str, list[Row]]], str | None]:
        """This rank's share of the rows that each engine sampled, and a message if one has other weights."""
        engines, wrong = [], None
        if self._engine is not None:
            prompts = [group.prompt_tokens.tolist() for group in self._groups]
            tokens = min(CANARY_TOKENS if version % SAME_SEED else NEW_TOKENS, self._sampling.max_tokens)
            sampling = replace(self._sampling, max_tokens=tokens, seed=version // SAME_SEED)
            for answer in self._engine.canary(prompts, CANARY_SAMPLES, sampling):
                wrong = wrong or self._wrong_version(answer, version) or self._wrong_tensors(answer)
                groups = [
                    replace(group, samples=tuple(Sample(completion, trained=True) for completion in completions))
                    for group, completions in zip(self._groups, answer.completions, strict=True)
                ]
                longest = sum(len(g.prompt_tokens) + CANARY_SAMPLES * tokens for g in groups)
                engines.append((answer.engine, pack(groups, longest, layout=self._learner.layout)[0]))
        engines, wrong = self._ranks.broadcast((engines, wrong))
        return [(name, self._ranks.share(rows)) for name, rows in engines], wrong

    @staticmethod
    def _wrong_version(answer: CanaryAnswer, version: int) -> str | None:
        labels = {int(label) for group in answer.completions for c in group for label in c.versions}
        if labels <= {version}:
            return None
        return f"{answer.engine} labels what it samples with version {sorted(labels)}: the publication did not reach it"

    def _wrong_tensors(self, answer: CanaryAnswer) -> str | None:
        sent = {name: value for part in self._sent.values() for name, value in part.items()}
        messages = [differences(sent, taken, answer.engine, worker) for worker, taken in enumerate(answer.checksums)]
        return next(filter(None, messages), None)

    def _update_applied(self, rows: list[Row], now: list[Tensor]) -> Applied:
        """Whether the engine shows the newest update, on tokens that the canary before it sampled, too."""
        before = [torch.tensor([self._before.get(c, torch.nan) for c in contexts(row)[1].tolist()]) for row in rows]
        return applied_share(rows, now, before, "the engine has the weights that were sent and samples as before them")

    def _remember(self, pairs: Iterable[tuple[Row, Tensor]]) -> None:
        """Keeps the log-probs of the present policy for the next publication."""
        # All ranks keep all of them, since a context may go to another rank next time.
        here = {c: p for row, ours in pairs for c, p in zip(contexts(row)[1].tolist(), ours.tolist(), strict=True)}
        self._before = {c: p for part in gathered(here) for c, p in part.items()}

    def _not_finite(self) -> str:
        """The policy's weights that are NaN or infinite, for a message. A collective."""
        # A sharded parameter is looked at where its shards are, so that no rank waits for another.
        local = {
            name: p.to_local() if isinstance(p, DTensor) else p
            for name, p in self._learner.policy.model.named_parameters()
        }
        here = {hf_name(name): int((~p.isfinite()).sum()) for name, p in local.items()}
        return "".join(f"; {n} values of {name}" for part in gathered(here) for name, n in part.items() if n)

    def _changed_share(
        self, before: dict[str, tuple[int, Tensor]], now: dict[str, tuple[int, Tensor]]
    ) -> dict[str, float]:
        """Which share of the values differs from the publication before; empty at the first one."""
        if not before:
            return {}
        # In a dtype coarser than the trainer's the engine cannot hold the smaller part of an update. Tensors in which
        # nothing changed are frozen, or as good as frozen, and do not count.
        shares = {n: (before[n][1] != some).float().mean().item() for n, (_, some) in now.items() if n in before}
        moved = sum(now[name][0] for name, share in shares.items() if share)
        share = sum(now[name][0] * share for name, share in shares.items()) / max(1, moved)
        if self._precision.mixed and 0 < share < FEW_CHANGED and not self._warned:
            self._warned = True
            fp8 = self._precision.sampler is not None
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


def canary_groups(problems: ProblemStream, tokenizer: ChatTokenizer) -> list[Group]:
    """The same few prompts for every publication of a run, as groups without samples."""
    chosen = problems.first(CANARY_PROMPTS)
    prompts = [tokenizer.prompt_ids(problem.messages, problem.tools) for problem in chosen]
    return [Group(p, np.asarray(ids, dtype=np.int32), ()) for p, ids in zip(chosen, prompts, strict=True)]
