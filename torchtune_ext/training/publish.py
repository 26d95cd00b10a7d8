"""Weights to the sampler, in memory, and the proof that it samples with them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from torchtune_ext.advantages import Group, Sample
from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading import Outcome
from torchtune_ext.packing import Row, contexts, pack
from torchtune_ext.policy.logprobs import LabelScores, PackedPolicy
from torchtune_ext.policy.lora import AdapterOff, AdapterSpec, adapter_hf_tensors, base_hf_tensors, merged_hf_tensors
from torchtune_ext.policy.weights import HFModel, named_hf_tensors
from torchtune_ext.sampling.engine import Completion, Engine, PublishReport, SamplingConfig
from torchtune_ext.sampling.weights import checksum
from torchtune_ext.tasks.task import Problem, Task
from torchtune_ext.training.agreement import Applied, Disagreement, applied_share, require_agreement
from torchtune_ext.training.distributed import Ranks
from torchtune_ext.training.outcome import gathered
from torchtune_ext.training.precision import Precision
from torchtune_ext.training.step import score

CANARY_PROMPTS, CANARY_SAMPLES, CANARY_TOKENS = 4, 8, 16
CANARY_SEED = 0  # the same every time, so that most tokens come again and two policies can be compared on them
ADVICE = {
    "adapter": "publish=adapter: look for a request that does not name the adapter; publish=merged needs none",
    "merged": "publish=merged: weights of the engine's dtype may not hold so small a change; set engine.dtype=float32",
}


class Publisher:
    """Sends the policy's weights to the engine and lets a canary prove that they arrived.

    The canary samples a few tokens from fixed prompts with fixed seeds (so a prefix cache that was not reset would show).
    Weights that did not arrive hide below `limit`: an update of a small learning rate moves log-probs by less than rounding
    does. So three things are asked for besides the engine's log-probs being the trainer's:

    1. every token is labelled with the version that was just published;
    2. every tensor that the engine has taken has the checksum of the one that was sent, on each of its workers;
    3. where the update moves log-probs by more than the noise, the engine's moved with the trainer's (`applied_share`).

    Args:
        engine: on rank 0; None on the others, which take part in the gathers and in scoring.
        precision: in which weights are sent.
        limit: mean |d log-prob| above which a publication counts as failed.
        row_length: length of packed rows where it is fixed (compiled kernels); None: as long as needed.
    """

    def __init__(
        self,
        engine: Engine | None,
        policy: PackedPolicy,
        names: HFModel,
        precision: Precision,
        ranks: Ranks,
        canary_prompts: Sequence[list[int]],
        sampling: SamplingConfig,
        limit: float,
        row_length: int | None = None,
    ):
        self._engine, self._policy, self._names, self._ranks = engine, policy, names, ranks
        self._precision = precision
        self._prompts, self._limit, self._row_length = list(canary_prompts), limit, row_length
        self._temperature = sampling.temperature
        tokens = min(CANARY_TOKENS, sampling.max_tokens)
        self._sampling = replace(sampling, max_tokens=tokens, seed=CANARY_SEED, early_stop_logprob=None)
        self._sent: dict[str, dict[str, int]] = {"model": {}, "adapter": {}}  # checksums by name, on rank 0
        self._before: dict[int, float] = {}  # context -> log-prob under the policy of the last publication, all ranks

    def publish(self, version: int) -> dict[str, float]:
        """Makes the engine sample with the current weights under `version`. A collective. Returns metrics.

        Raises:
            Disagreement: the engine does not run these weights; says the likely cause.
        """
        report, when = self._send(version), f"after publishing version {version}"
        rows, wrong = self._canary(version)
        if wrong:
            raise Disagreement(f"{when}: weights: {wrong}")
        scored = self._scored(rows)
        applied, rescore = self._applied(rows, scored), partial(self._scored, rows)
        found = require_agreement(
            rows, scored, self._limit, self._temperature, rescore, when, applied=list(applied.values())
        )
        self._remember(rows, scored)
        if report is None:
            return {}
        self._precision.write_mismatch(found.mean_abs, found.tokens, when)
        sent = {"time/publish_engine": report.copy_s + report.pause_s, "publish/bytes": float(report.bytes)}
        shares = {f"canary/{name}_applied": change.slope for name, change in applied.items() if change.resolved}
        return sent | {"canary/mean_abs": found.mean_abs} | shares

    def _send(self, version: int) -> PublishReport | None:
        return self._stream(self._whole(named_hf_tensors), version)

    def _whole(self, gather: Callable) -> Iterable:
        return self._precision.published(partial(gather, self._policy.model, self._names))

    def _stream(self, tensors: Iterable, version: int, adapter: dict | None = None) -> PublishReport | None:
        if self._engine is not None:
            sent = self._sent["model" if adapter is None else "adapter"] = {}
            return self._engine.publish(_summed(tensors, sent), version, adapter)
        for _ in tensors:  # rank 0 gathers each weight: take part
            pass
        return None

    def _canary(self, version: int) -> tuple[list[Row], str | None]:
        """This rank's share of freshly sampled rows, and what shows already that other weights sampled them."""
        rows = wrong = None
        if self._engine is not None:
            completions = self._engine.sample(self._prompts, CANARY_SAMPLES, self._sampling)
            wrong = self._wrong_version(completions, version) or self._wrong_tensors()
            groups = [_as_group(p, found) for p, found in zip(self._prompts, completions, strict=True)]
            longest = sum(len(g.prompt_tokens) + CANARY_SAMPLES * CANARY_TOKENS for g in groups)
            size = self._row_length or longest
            rows = pack(groups, size, pad_to=self._row_length, num_rows_multiple=self._ranks.world_size)[0]
        rows, wrong = self._ranks.broadcast((rows, wrong))
        return self._ranks.share(rows), wrong

    @staticmethod
    def _wrong_version(completions: list[list[Completion]], version: int) -> str | None:
        labels = {int(label) for group in completions for c in group for label in c.versions}
        if labels <= {version}:
            return None
        return f"the engine labels what it samples with version {sorted(labels)}: the publication did not reach it"

    def _wrong_tensors(self) -> str | None:
        sent = {name: value for part in self._sent.values() for name, value in part.items()}
        for worker, taken in enumerate(self._engine.checksums()):
            wrong = sorted(name for name in sent.keys() | taken.keys() if sent.get(name) != taken.get(name))
            if wrong:
                lost = sum(name not in taken for name in wrong)
                return (
                    f"{len(wrong)} of the {len(sent)} tensors in the engine (worker {worker}) are not those that were sent, "
                    f"{lost} of them lost, the others old or damaged, e.g. {', '.join(wrong[:3])}"
                )
        return None

    def _applied(self, rows: list[Row], scored: list[LabelScores]) -> dict[str, Applied]:
        """What the sampled tokens say of changes that the engine has to show, by name; the gravest comes first."""
        before = [torch.tensor([self._before.get(c, torch.nan) for c in contexts(row)]) for row in rows]
        otherwise = "the engine samples with the weights of the publication before"
        return {"update": applied_share(rows, scored, before, otherwise)}

    def _remember(self, rows: list[Row], scored: list[LabelScores]) -> None:
        """Keeps what the policy of now says, to be what the policy before said at the next publication."""
        pairs = zip(rows, scored, strict=True)
        known = {c: p for row, scores in pairs for c, p in zip(contexts(row), scores.logprobs_L.tolist(), strict=True)}
        self._before = {c: p for part in gathered(known) for c, p in part.items()}

    def _scored(self, rows: list[Row], temperature: float | None = None) -> list[LabelScores]:
        return score(self._policy, rows, temperature or self._temperature, self._ranks.device)


class AdapterPublisher(Publisher):
    """The same for a policy with adapters: `way` "adapter" sends them alone, "merged" the whole model with them merged.

    The canary also proves that the engine applies the adapter and does not go on sampling from the base model, which by
    itself would pass for a small mismatch while the adapter is young.
    """

    def __init__(self, *args, way: str, adapter: AdapterSpec, **kwargs):
        super().__init__(*args, **kwargs)
        self._way, self._adapter, self._base_sent = way, adapter, False

    def _send(self, version: int) -> PublishReport | None:
        if self._way == "merged":
            return self._stream(self._whole(merged_hf_tensors), version)
        if (self._adapter.quantised or self._precision.sampler) and not self._base_sent:
            self._stream(self._whole(base_hf_tensors), version)  # sample with the very values that NF4 or FP8 left
            self._base_sent = True
        tensors = adapter_hf_tensors(self._policy.model, self._names, self._precision.engine_dtype)
        return self._stream(tensors, version, self._adapter.peft_config(str(self._names.path)))

    def _applied(self, rows: list[Row], scored: list[LabelScores]) -> dict[str, Applied]:
        with AdapterOff(self._policy.model).swapped_in():
            off = [scores.logprobs_L for scores in self._scored(rows)]
        otherwise = f"the engine samples without the adapter, or with an old one ({ADVICE[self._way]})"
        return {"adapter": applied_share(rows, scored, off, otherwise)} | super()._applied(rows, scored)


def _summed(tensors: Iterable[tuple[str, Tensor]], sums: dict[str, int]) -> Iterable[tuple[str, Tensor]]:
    """Passes tensors on and keeps the checksum of each."""
    for name, tensor in tensors:
        sums[name] = checksum(tensor)
        yield name, tensor


def canary_prompts(task: Task, tokenizer: ChatTokenizer) -> list[list[int]]:
    """The same few prompts for every publication of a run."""
    return [tokenizer.prompt_ids(list(task[i].messages)) for i in range(min(CANARY_PROMPTS, len(task)))]


def _as_group(prompt: list[int], completions: Sequence[Completion]) -> Group:
    outcome = Outcome("scored", None, "")
    samples = (
        Sample(c.tokens, c.logprobs, c.versions, "", c.finish_reason, outcome, trained=True) for c in completions
    )
    return Group(Problem("canary", (), None), np.asarray(prompt, dtype=np.int32), tuple(samples))
