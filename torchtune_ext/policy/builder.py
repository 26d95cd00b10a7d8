"""Makes a trainable model from a builder: sharded by FSDP2, and checkpointed and compiled if the settings say so."""

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
    """Builds a model on the meta device, where it has names, shapes and modules, but no weights.

    Raises Mistake if its attention has dropout, which attention over packed rows does not apply.
    """
    with torch.device("meta"):
        model = make_model()
    for layer in model.layers:
        if share := getattr(layer.attn, "attn_dropout", 0.0):
            raise UsageError(
                f"model.attn_dropout={share}: attention over packed rows has no dropout; set it to 0, or leave it out"
            )
    return model


def init_rope(model: TransformerDecoder, device: torch.device) -> None:
    """Computes the buffers of RoPE, which no checkpoint holds."""
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
    """Builds the policy with float32 master weights. If it has adapters (`lora.py`), only these are trained.

    Args:
        make_model: returns the torchtune decoder (called under the meta device).
        device: of this rank.
        compute_dtype: the dtype of parameters in forward and backward; reductions are made in float32.
        world_size: if it is more than one, the default process group must exist.
        activation_checkpointing: recomputes each layer in the backward.
        compile_layers: applies `torch.compile` to each layer.
        seed: draws the first values of adapters.
        fp8: lets linear layers compute in FP8 (`PackedPolicy.fp8` says which); None: none does.
        shard_within: number of consecutive ranks that share a copy of the weights (HSDP); None: all ranks share one.

    Raises ValueError if model and checkpoint do not fit each other, or `fp8` fits neither them nor the device.
    """
    # torchtune's RMSNorm computes in float32 with a scale in bfloat16 on purpose.
    warnings.filterwarnings("ignore", "Mismatch dtype between input and weight", UserWarning)
    # The model is sharded on the meta device, before any weight exists, so that no rank ever holds the whole of it. Its
    # float32 masters cost 2 bytes a parameter more than bfloat16, which would lose updates below 2^-9 of a weight.
    model = build_on_meta(make_model)
    hf_model.require_tied(model)
    adapters = lora.adapter_names(model)
    if adapters:
        lora.freeze_base(model, compute_dtype)
    # This changes the classes of layers, so it comes before compile, checkpointing and FSDP2 wrap them.
    fp8_plan = None
    if fp8:
        # A run without FP8 does not load it.
        from torchtune_ext.policy.fp8.plan import convert_to_fp8

        fp8_plan = convert_to_fp8(model, hf_model, fp8, compute_dtype, device)
    policy = PackedPolicy(model, fp8_plan)
    if compile_layers:
        for layer in model.layers:
            layer.compile()
    if activation_checkpointing:
        training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    # On one device, FSDP2 serves to hand out the float32 masters in the compute dtype.
    if world_size > 1 or (compute_dtype != torch.float32 and not adapters):
        # Adapters round their masters themselves and DoRA's magnitude must not be rounded, so FSDP2 hands them out as
        # they are.
        _shard(model, _mesh(device, world_size, shard_within or world_size), None if adapters else compute_dtype)
    model.to_empty(device=device)
    init_rope(model, device)
    load_weights(model, hf_model, new_params=adapters)
    # DoRA's magnitudes begin as the norms of the loaded weights.
    if adapters:
        lora.init_adapters(model, seed)
    return policy


def _mesh(device: torch.device, world_size: int, shards: int) -> DeviceMesh:
    """How ranks share the weights: all of them one copy, or each row of the mesh a copy of its own."""
    # FSDP2 needs a process group on one device, too.
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
    # The groups that `init_device_mesh` makes have torch's own time limit instead of `ranks.deadline_s`.
    numbers = torch.arange(world_size).view(-1, shards)
    world = torch.distributed.group.WORLD
    assert world is not None  # since it is initialized
    limit = world._get_backend(device).options._timeout
    # Every rank is in one group of each kind, while torch's annotation allows for a rank in none.
    groups: list[Any] = [
        torch.distributed.new_subgroups_by_enumeration(ranks.tolist(), timeout=limit)[0]
        for ranks in (numbers.T, numbers)
    ]
    return DeviceMesh.from_group(groups, device.type, numbers, mesh_dim_names=("copies", "shards"))


def _shard(model: TransformerDecoder, mesh: DeviceMesh, param_dtype: torch.dtype | None) -> None:
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
