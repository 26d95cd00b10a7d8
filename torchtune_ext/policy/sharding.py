"""Writes and gathers parameters that may be sharded (FSDP2), quantized (NF4), or both."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4


@torch.no_grad()
def fill_param(param: Tensor, full: Tensor) -> None:
    """Writes an unsharded tensor into a parameter; each rank keeps its shard.

    Args:
        param: the parameter.
        full: the unsharded tensor, equal on every rank.
    """
    # to_local() would copy an NF4 tensor, and a write into the copy would not reach the parameter.
    local = param._local_tensor if isinstance(param, DTensor) else param
    full = full.to(local.device, local.dtype)
    if isinstance(local, NF4Tensor):
        # The unsharded tensor is quantized before sharding, so that the bits do not depend on the
        # number of ranks.
        part = to_nf4(full, local.block_size, local.scaler_block_size)
        if isinstance(param, DTensor):
            dim = _sharded_dim(param)
            part = torch.chunk(part, param.device_mesh.size(dim), dim=0)[param.device_mesh.get_local_rank(dim)]
        assert isinstance(part, NF4Tensor)
        # copy_ would leave the unsharded inner tensors on the meta device.
        for name in part.__tensor_flatten__()[0]:
            setattr(local, name, getattr(part, name))
    elif isinstance(param, DTensor):
        local.copy_(distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None).to_local())
    else:
        local.copy_(full)


@torch.no_grad()
def gather_full(param: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the unsharded, dequantized tensor. It is a collective if the parameter is sharded.

    Args:
        param: the parameter.
        dtype: dtype of the result; None: the parameter's.
    """
    if not isinstance(param, DTensor):
        return dequantize_nf4(param.detach()).to(dtype=dtype)
    # Each rank dequantizes or rounds its shard, then the values are gathered, as fewer bytes.
    local = param._local_tensor
    if not isinstance(local, NF4Tensor):
        rounded = param.detach().to(dtype=dtype)
        assert isinstance(rounded, DTensor)  # torch annotates a plain tensor
        return rounded.full_tensor()
    local_values = dequantize_nf4(local).to(dtype=dtype)
    dim = _sharded_dim(param)
    parts = [torch.empty_like(local_values) for _ in range(param.device_mesh.size(dim))]
    dist.all_gather(parts, local_values, group=param.device_mesh.get_group(dim))
    return torch.cat(parts)


def _sharded_dim(param: DTensor) -> int:
    """The mesh dimension along which a parameter is sharded. Others (HSDP) have replicas."""
    return next(dim for dim, placement in enumerate(param.placements) if placement.is_shard())


def dequantize_nf4(tensor: Tensor) -> Tensor:
    """Dequantizes an NF4 tensor to its dtype. Returns other tensors unchanged."""
    return tensor.get_original_weight().to(tensor.dtype) if isinstance(tensor, NF4Tensor) else tensor
