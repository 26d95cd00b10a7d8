"""Scores packed rows in any precision, layer by layer.

The policy has only one dtype, and a second model may not fit into memory.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torchtune.modules import TiedLinear, TransformerDecoder

from torchtune_ext.kernels.linear_logprob import linear_logprob
from torchtune_ext.kernels.packed_attention import packed_mask, use_packed_attention
from torchtune_ext.pipeline.packing import Row
from torchtune_ext.policy.builder import build_on_meta, init_rope
from torchtune_ext.policy.families import hf_name
from torchtune_ext.policy.fp8 import Fp8Config
from torchtune_ext.policy.lora import adapted_modules, share_rope

if TYPE_CHECKING:
    from torchtune_ext.policy.fp8.plan import Fp8Plan


@torch.no_grad()
def streamed_logprobs(
    rows: Sequence[Row],
    weights: Iterable[tuple[str, Tensor]],
    make_model: Callable[[], TransformerDecoder],
    dtype: torch.dtype,
    device: torch.device,
    temperature: float = 1.0,
    fp8_plan: "Fp8Plan | None" = None,
) -> list[Tensor]:
    """Computes the log-probs of the labels of each row.

    Args:
        rows: packed rows of this rank.
        weights: pairs (torchtune's name, unsharded merged tensor), in the order of the model's
            modules, of any dtype.
        make_model: the builder of the policy; its adapters are ignored.
        dtype: the compute dtype.
        device: the compute device.
        temperature: sampling temperature.
        fp8_plan: names the linear layers that compute in FP8 blocks, here with the reference GEMM.

    Returns:
        For each row, float32 [L] on the CPU.
    """
    model = build_on_meta(make_model)
    # The weights are merged, so plain layers replace adapted layers.
    for name, module in adapted_modules(model).items():
        model.set_submodule(name, nn.Linear(module.in_dim, module.out_dim, module.use_bias, device="meta"))
    if fp8_plan is not None:
        from torchtune_ext.policy.fp8.linear import Fp8BlockLinear

        for name, module in model.named_modules():
            if (
                isinstance(module, nn.Linear)
                and hf_name(f"{name}.weight").removesuffix(".weight") in fp8_plan.fp8_layer_names
            ):
                module.__class__ = Fp8BlockLinear
                # torch's annotation allows only tensors and modules as attributes of a module.
                module.fp8 = Fp8Config(backend="reference")  # pyright: ignore[reportArgumentType]
    windows = use_packed_attention(model)
    share_rope(model)
    init_rope(model, device)

    rows = [row.to(device) for row in rows]
    masks = [packed_mask(row.ends_T, row.positions_T, windows, row.max_path_len) for row in rows]
    hidden, table_VD = [], None
    for owner, tensors in groupby(weights, key=lambda named: _owner_module(named[0])):
        own = {name.removeprefix(f"{owner}."): tensor.to(device, dtype) for name, tensor in tensors}
        if owner == "tok_embeddings":
            hidden = [functional_call(model.tok_embeddings, own, (row.tokens_T[None],)) for row in rows]
            if isinstance(model.output, TiedLinear):
                table_VD = own["weight"]
        elif owner == "output":
            table_VD = own["weight"]
        else:
            module = model.get_submodule(owner)
            for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
                kwargs = {} if owner == "norm" else {"mask": mask, "input_pos": row.positions_T[None]}
                hidden[i] = functional_call(module, own, (hidden[i],), kwargs)
        # This frees the weights before the next layer's weights arrive.
        del own
    assert table_VD is not None  # every model has an output layer or tied embeddings
    scaling = temperature, getattr(model, "logit_softcap", None)
    return [
        linear_logprob(h[0].index_select(0, row.hidden_index_L), table_VD, row.labels_L, *scaling)[0].cpu()
        for h, row in zip(hidden, rows, strict=True)
    ]


def _owner_module(name: str) -> str:
    """The top-level module that owns a weight: "layers.3", "norm"."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == "layers" else 1])
