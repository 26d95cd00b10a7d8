"""Weights to the sampler, in memory, and the proof that it samples with them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from torchtune_ext.advantages import Group, Sample
from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading import Outcome
from torchtune_ext.packing import Row, pack
from torchtune_ext.policy.logprobs import LabelScores, PackedPolicy
from torchtune_ext.policy.lora import AdapterOff, AdapterSpec, adapter_hf_tensors, base_hf_tensors, merged_hf_tensors
from torchtune_ext.policy.weights import HFModel, named_hf_tensors
from torchtune_ext.sampling.engine import Completion, Engine, PublishReport, SamplingConfig
from torchtune_ext.tasks.task import Problem, Task
from torchtune_ext.training.agreement import Disagreement, applied_share, require_agreement
from torchtune_ext.training.distributed import Ranks
from torchtune_ext.training.precision import Precision
from torchtune_ext.training.step import score

CANARY_PROMPTS, CANARY_SAMPLES, CANARY_TOKENS = 4, 8, 16
RESOLVED = 0.25  # noise of a token over the adapter's effect on it, above which nothing is concluded
ADVICE = {
    "adapter": "publish=adapter: look for a request that does not name the adapter; publish=merged needs none",
    "merged": "publish=merged: weights of the engine's dtype may not hold so small a change; set engine.dtype=float32",
}


class Publisher:
    """Sends the policy's weights to the engine and lets a canary prove that they arrived.

    The canary samples a few tokens from fixed prompts (the same every time, so a prefix cache that was not reset would
    show) and compares the engine's log-probs with the trainer's.

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
        self._sampling = replace(sampling, max_tokens=min(CANARY_TOKENS, sampling.max_tokens), early_stop_logprob=None)

    def publish(self, version: int) -> dict[str, float]:
        """Makes the engine sample with the current weights under `version`. A collective. Returns metrics.

        Raises:
            Disagreement: the engine does not run these weights; says the likely cause.
        """
        report = self._send(version)
        rows = self._canary(version)
        scored, when = self._scored(rows), f"after publishing version {version}"
        found = require_agreement(rows, scored, self._limit, self._temperature, partial(self._scored, rows), when)
        metrics = {"canary/mean_abs": found.mean_abs} | self._check(rows, scored, when)
        if report is None:
            return {}
        self._precision.write_mismatch(found.mean_abs, found.tokens, when)
        sent = {"time/publish_engine": report.copy_s + report.pause_s, "publish/bytes": float(report.bytes)}
        return sent | metrics

    def _send(self, version: int) -> PublishReport | None:
        return self._stream(self._whole(named_hf_tensors), version)

    def _whole(self, gather: Callable) -> Iterable:
        return self._precision.published(partial(gather, self._policy.model, self._names))

    def _stream(self, tensors: Iterable, version: int, adapter: dict | None = None) -> PublishReport | None:
        if self._engine is not None:
            return self._engine.publish(tensors, version, adapter)
        for _ in tensors:  # rank 0 gathers each weight: take part
            pass
        return None

    def _check(self, rows: list[Row], scored: list[LabelScores], when: str) -> dict[str, float]:
        """What else the canary has to show."""
        return {}

    def _canary(self, version: int) -> list[Row]:
        """This rank's share of freshly sampled rows."""
        rows = None
        if self._engine is not None:
            sampling = replace(self._sampling, seed=version)
            completions = self._engine.sample(self._prompts, CANARY_SAMPLES, sampling)
            groups = [_as_group(p, found) for p, found in zip(self._prompts, completions, strict=True)]
            longest = sum(len(g.prompt_tokens) + CANARY_SAMPLES * CANARY_TOKENS for g in groups)
            size = self._row_length or longest
            rows = pack(groups, size, pad_to=self._row_length, num_rows_multiple=self._ranks.world_size)[0]
        return self._ranks.share(self._ranks.broadcast(rows))

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

    def _check(self, rows: list[Row], scored: list[LabelScores], when: str) -> dict[str, float]:
        with AdapterOff(self._policy.model).swapped_in():
            off = self._scored(rows)
        share, noise = applied_share(rows, scored, off)
        if noise > RESOLVED:
            return {}
        if share < 0.5:
            raise Disagreement(
                f"{when}: the engine samples without the adapter, or with an old one: of its effect on the log-probs of "
                f"{sum(row.num_labels for row in rows)} sampled tokens the engine shows {share:.2f}. {ADVICE[self._way]}"
            )
        return {"canary/adapter_applied": share}


def canary_prompts(task: Task, tokenizer: ChatTokenizer) -> list[list[int]]:
    """The same few prompts for every publication of a run."""
    return [tokenizer.prompt_ids(list(task[i].messages)) for i in range(min(CANARY_PROMPTS, len(task)))]


def _as_group(prompt: list[int], completions: Sequence[Completion]) -> Group:
    outcome = Outcome("scored", None, "")
    samples = (
        Sample(c.tokens, c.logprobs, c.versions, "", c.finish_reason, outcome, trained=True) for c in completions
    )
    return Group(Problem("canary", (), None), np.asarray(prompt, dtype=np.int32), tuple(samples))
