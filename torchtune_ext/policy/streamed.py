"""Scores packed rows in any precision, with weights that come one after the other.

A policy computes in the one dtype that it was built for, and a model in float32 may not fit beside it. So here each layer runs
as soon as its weights are there, for all rows, and they are dropped again.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import embedding

from torchtune_ext.kernels.linear_logprob import linear_logprob
from torchtune_ext.kernels.packed_attention import packed_mask, use_packed_attention
from torchtune_ext.packing import Row
from torchtune_ext.policy.families import from_config
from torchtune_ext.policy.fp8.plan import Fp8Config, convert
from torchtune_ext.policy.hf_model import HFModel


@torch.no_grad()
def streamed_logprobs(
    rows: Sequence[Row],
    weights: Iterable[tuple[str, Tensor]],
    source: HFModel,
    dtype: torch.dtype,
    device: torch.device,
    temperature: float = 1.0,
    fp8: Fp8Config | None = None,
) -> list[Tensor]:
    """Returns the log-probs of the labels of each row, float32 [L] on the CPU.

    Args:
        weights: (torchtune's name, whole tensor) of a model without adapters, in the order of its modules, of any dtype.
        source: has the config of the model.
        dtype: the one to compute in.
        fp8: lets linear layers compute in FP8 blocks.
    """
    with torch.device("meta"):
        model = from_config(
            str(source.path), max_seq_len=1 + max((int(row.positions_T.max()) for row in rows), default=0)
        )
    if fp8 is not None:
        convert(model, source, fp8, dtype, device)
    use_packed_attention(model)
    with device:
        for module in model.modules():
            # No checkpoint holds the buffers of RoPE.
            if hasattr(module, "rope_init"):
                module.rope_init()

    rows = [row.to(device) for row in rows]
    masks = [packed_mask(row) for row in rows]
    hidden, table_VD = [], None
    for owner, tensors in groupby(weights, key=lambda named: _owner(named[0])):
        own = {name.removeprefix(f"{owner}."): tensor.to(device, dtype) for name, tensor in tensors}
        if owner == "tok_embeddings":
            table_VD = own["weight"]
            hidden = [embedding(row.tokens_T, table_VD)[None] for row in rows]
        elif owner == "output":
            table_VD = own["weight"]
        else:
            module = model.get_submodule(owner)
            for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
                more = {} if owner == "norm" else {"mask": mask, "input_pos": row.positions_T[None]}
                hidden[i] = functional_call(module, own, (hidden[i],), more)
    return [
        linear_logprob(h[0].index_select(0, row.sources_L), table_VD, row.labels_L, temperature)[0].cpu()
        for h, row in zip(hidden, rows, strict=True)
    ]


def _owner(name: str) -> str:
    """Returns the module that runs at once with all its weights: "layers.3", "norm"."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == "layers" else 1])
