"""Weights to the sampler, in memory, and the proof that it samples with them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from torchtune_ext.advantages import Group, Sample
from torchtune_ext.grading import Outcome
from torchtune_ext.packing import pack
from torchtune_ext.policy.logprobs import PackedPolicy
from torchtune_ext.policy.weights import HFModel, named_hf_tensors
from torchtune_ext.sampling.engine import Engine, SamplingConfig
from torchtune_ext.tasks.task import Problem
from torchtune_ext.training.agreement import require_agreement
from torchtune_ext.training.distributed import Ranks
from torchtune_ext.training.step import score

CANARY_TOKENS = 16


class Publisher:
    """Sends the policy's weights to the engine and lets a canary prove that they arrived.

    The canary samples a few tokens from fixed prompts (the same every time, so a prefix cache that was not reset would
    show) and compares the engine's log-probs with the trainer's.

    Args:
        engine: on rank 0; None on the others, which take part in the gathers and in scoring.
        dtype: in which weights are sent; the engine's.
        limit: mean |d log-prob| above which a publication counts as failed.
        row_length: length of packed rows where it is fixed (compiled kernels); None: as long as needed.
    """

    def __init__(
        self,
        engine: Engine | None,
        policy: PackedPolicy,
        names: HFModel,
        dtype: torch.dtype,
        ranks: Ranks,
        canary_prompts: Sequence[list[int]],
        sampling: SamplingConfig,
        limit: float,
        row_length: int | None = None,
    ):
        self._engine, self._policy, self._names, self._dtype, self._ranks = engine, policy, names, dtype, ranks
        self._prompts, self._limit, self._row_length = list(canary_prompts), limit, row_length
        self._sampling = replace(sampling, max_tokens=min(CANARY_TOKENS, sampling.max_tokens), early_stop_logprob=None)

    def publish(self, version: int) -> dict[str, float]:
        """Makes the engine sample with the current weights under `version`. A collective. Returns metrics.

        Raises:
            Disagreement: the engine does not run these weights; says the likely cause.
        """
        tensors = named_hf_tensors(self._policy.model, self._names, self._dtype)
        if self._engine is None:
            for _ in tensors:  # rank 0 gathers each weight: take part
                pass
            report = None
        else:
            report = self._engine.publish(tensors, version)
        found = self._canary(version)
        if report is None:
            return {}
        return {
            "publish/seconds": report.copy_s + report.pause_s,
            "publish/bytes": float(report.bytes),
            "canary/mean_abs": found.mean_abs,
        }

    def _canary(self, version: int):
        rows = None
        if self._engine is not None:
            sampling = replace(self._sampling, seed=version)
            completions = self._engine.sample(self._prompts, 1, sampling)
            groups = [_as_group(p, c) for p, (c,) in zip(self._prompts, completions, strict=True)]
            longest = sum(len(g.prompt_tokens) + CANARY_TOKENS for g in groups)
            size = self._row_length or longest
            rows = pack(groups, size, pad_to=self._row_length, num_rows_multiple=self._ranks.world_size)[0]
        rows = self._ranks.share(self._ranks.broadcast(rows))
        temperature = self._sampling.temperature

        def scored(at: float) -> list[torch.Tensor]:
            return score(self._policy, rows, at, self._ranks.device)

        return require_agreement(
            rows, scored(temperature), self._limit, temperature, scored, f"after publishing version {version}"
        )


def _as_group(prompt: list[int], completion) -> Group:
    sample = Sample(
        tokens=completion.tokens,
        logprobs=completion.logprobs,
        versions=completion.versions,
        text="",
        finish_reason=completion.finish_reason,
        outcome=Outcome("scored", None, ""),
        trained=True,
    )
    return Group(Problem("canary", (), None), np.asarray(prompt, dtype=np.int32), (sample,))
