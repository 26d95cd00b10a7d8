"""Builds the policy: sharded by FSDP2, with optional activation checkpointing and compilation."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtune import training
from torchtune.modules import TransformerDecoder, TransformerSelfAttentionLayer

from torchtune_ext.policy import lora
from torchtune_ext.policy.fp8 import Fp8Config
from torchtune_ext.policy.hf_model import HFModel, load_weights
from torchtune_ext.policy.logprobs import PackedPolicy
from torchtune_ext.run.errors import UsageError


def build_on_meta(make_model: Callable[[], TransformerDecoder]) -> TransformerDecoder:
    """Builds a model on the meta device, with names, shapes and modules, but without weights.

    Raises:
        UsageError: its attention has dropout, which packed attention does not support.
    """
    with torch.device("meta"):
        model = make_model()
    for layer in model.layers:
        if share := getattr(layer.attn, "attn_dropout", 0.0):
            raise UsageError(
                f"model.attn_dropout={share}: packed attention does not support dropout; set it to 0, or leave it out"
            )
    return model


def init_rope(model: TransformerDecoder, device: torch.device) -> None:
    """Computes the RoPE buffers, which checkpoints do not hold."""
    with device:
        for module in model.modules():
            if (rope_init := getattr(module, "rope_init", None)) is not None:
                rope_init()


def build_policy(
    make_model: Callable[[], TransformerDecoder],
    hf_model: HFModel,
    device: torch.device,
    compute_dtype: torch.dtype,
    world_size: int = 1,
    activation_checkpointing: bool = False,
    compile_layers: bool = False,
    seed: int = 0,
    fp8: Fp8Config | None = None,
    shard_within: int | None = None,
) -> PackedPolicy:
    """Builds the policy with float32 master weights. Only adapters (`lora.py`) are trained, if any.

    Args:
        make_model: returns the torchtune decoder; called under the meta device.
        hf_model: the weights in model_dir.
        device: device of this rank.
        compute_dtype: dtype of parameters in forward and backward. Reductions use float32.
        world_size: number of ranks. If above one, the default process group must exist.
        activation_checkpointing: recomputes each layer in the backward.
        compile_layers: applies `torch.compile` to each layer.
        seed: seed of the adapters' initial values.
        fp8: FP8 settings of linear layers (`PackedPolicy.fp8_plan` lists the layers); None: no FP8.
        shard_within: number of consecutive ranks that share a copy of the weights (HSDP); None: all
            ranks share one copy.

    Raises:
        UsageError: model and weights do not match, or they or the device do not support `fp8`.
    """
    # torchtune's RMSNorm intentionally computes in float32 with a scale in bfloat16.
    warnings.filterwarnings("ignore", "Mismatch dtype between input and weight", UserWarning)
    # The model is sharded on the meta device, before any weight exists, so that no rank ever holds
    # all weights. Float32 master weights cost 2 bytes per parameter more than bfloat16, which would
    # round off updates below 2^-9 of a weight.
    model = build_on_meta(make_model)
    hf_model.require_tied(model)
    adapters = lora.adapter_names(model)
    if adapters:
        lora.freeze_base(model, compute_dtype)
    # The conversion changes the classes of layers, so it precedes the wrappers of compile,
    # checkpointing and FSDP2.
    fp8_plan = None
    if fp8:
        # A run without FP8 does not need this import.
        from torchtune_ext.policy.fp8.plan import convert_to_fp8

        fp8_plan = convert_to_fp8(model, hf_model, fp8, compute_dtype, device)
    policy = PackedPolicy(model, fp8_plan)
    if compile_layers:
        for layer in model.layers:
            layer.compile()
    if activation_checkpointing:
        training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    # On one device, FSDP2 casts the float32 master weights to the compute dtype.
    if world_size > 1 or (compute_dtype != torch.float32 and not adapters):
        # Adapters round their master weights themselves, and DoRA's magnitude must not be rounded,
        # so FSDP2 does not cast them.
        _shard(model, _mesh(device, world_size, shard_within or world_size), None if adapters else compute_dtype)
    model.to_empty(device=device)
    init_rope(model, device)
    load_weights(model, hf_model, new_params=adapters)
    # DoRA's initial magnitudes are the norms of the loaded weights.
    if adapters:
        lora.init_adapters(model, seed)
    return policy


def _mesh(device: torch.device, world_size: int, shards: int) -> DeviceMesh:
    """Makes the mesh: all ranks share one copy of the weights, or each row of the mesh has one."""
    # FSDP2 also needs a process group on one device.
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            training.get_distributed_backend(device.type),
            store=torch.distributed.HashStore(),
            rank=0,
            world_size=1,
            device_id=torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else None,
        )
    if shards == world_size:
        return init_device_mesh(device.type, (world_size,))
    # Groups of `init_device_mesh` would have torch's default timeout instead of `ranks.deadline_s`.
    numbers = torch.arange(world_size).view(-1, shards)
    world = torch.distributed.group.WORLD
    assert world is not None  # initialized above
    limit = world._get_backend(device).options._timeout
    # Every rank is in one group of each kind, but torch's annotation allows a rank without a group.
    groups: list[Any] = [
        torch.distributed.new_subgroups_by_enumeration(ranks.tolist(), timeout=limit)[0]
        for ranks in (numbers.T, numbers)
    ]
    return DeviceMesh.from_group(groups, device.type, numbers, mesh_dim_names=("replicate", "shard"))


def _shard(model: TransformerDecoder, mesh: DeviceMesh, param_dtype: torch.dtype | None) -> None:
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
