"""Builds a model from its config.json, and the policy: sharded by FSDP2, optionally compiled."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtune import training
from torchtune.modules import TransformerDecoder, TransformerSelfAttentionLayer

from torchtune_ext.policy import lora
from torchtune_ext.policy.fp8 import Fp8Config
from torchtune_ext.policy.hf_config import builder_arguments
from torchtune_ext.policy.hf_model import HFModel, load_weights
from torchtune_ext.policy.logprobs import PackedPolicy
from torchtune_ext.run.errors import UsageError

# NF4 has a scale for each block of 64 values, and a second scale for each 256 scales. Both
# divisions must be exact.
NF4_MULTIPLE = 64 * 256


def from_config(
    model_dir: str,
    max_seq_len: int | None = None,
    lora_attn_modules: Sequence[str] = (),
    apply_lora_to_mlp: bool = False,
    apply_lora_to_output: bool = False,
    lora_rank: int = 8,
    lora_alpha: float = 16.0,
    lora_dropout: float = 0.0,
    use_dora: bool = False,
    quantize_base: bool = False,
) -> TransformerDecoder:
    """Builds the torchtune model that `config.json` describes, with adapters if requested.

    Args:
        model_dir: the model directory.
        max_seq_len: maximum sequence length in tokens, and rows of the RoPE table; None: the value
            of config.json.
        lora_attn_modules: attention layers with an adapter: some of q_proj, k_proj, v_proj,
            output_proj.
        apply_lora_to_mlp: adapters on the three layers of the MLP.
        apply_lora_to_output: an adapter on the output layer, if it is not tied to the embeddings.
        lora_rank: rank of the adapters.
        lora_alpha: an adapter's output is scaled by lora_alpha / lora_rank.
        lora_dropout: fraction of an adapter's inputs that is dropped in training.
        use_dora: adapters are DoRA adapters, with a magnitude for each row of a weight.
        quantize_base: frozen weights of adapted layers are stored in NF4 (QLoRA). Llama's builders
            also store frozen layers without adapters in NF4.

    Raises:
        UsageFileError: config.json is missing or damaged.
        UsageError: the family's builder does not support a value of config.json, or the adapters
            are invalid.
    """
    family, arguments = builder_arguments(model_dir)
    if max_seq_len is not None:
        # Beyond its original length, longrope has other frequencies.
        if "magnitude" in arguments.get("rope", ()) and max_seq_len > arguments["max_seq_len"]:
            raise UsageError(
                f"model.max_seq_len={max_seq_len} is above original_max_position_embeddings={arguments['max_seq_len']} in "
                f"{Path(model_dir) / 'config.json'}, the limit of longrope here. Fix: set model.max_seq_len="
                f"{arguments['max_seq_len']} or less"
            )
        arguments["max_seq_len"] = max_seq_len
    switches = {
        "apply_lora_to_mlp": apply_lora_to_mlp,
        "apply_lora_to_output": apply_lora_to_output,
        "use_dora": use_dora,
        "quantize_base": quantize_base,
    }
    if lora_attn_modules:
        numbers = {"lora_rank": lora_rank, "lora_alpha": lora_alpha, "lora_dropout": lora_dropout}
        if lora_rank < 1:
            raise UsageError(f"model.lora_rank={lora_rank} must be at least 1")
        if apply_lora_to_output and arguments.get("tie_word_embeddings"):
            raise UsageError(
                "apply_lora_to_output=True, but this model has no separate output head (tie_word_embeddings=True); set "
                "apply_lora_to_output=False"
            )
        build = partial(family.build_lora, **numbers, **arguments)
        try:
            return build(list(lora_attn_modules), **switches)
        except AssertionError as error:  # raised by torchao
            if not quantize_base:
                raise
            raise _nf4_error(build, list(lora_attn_modules), switches) from error
    if names := [name for name, value in switches.items() if value]:
        raise UsageError(
            f"model.{names[0]}=True without model.lora_attn_modules: the model has no adapters; set "
            f"model.lora_attn_modules=[q_proj, v_proj], for instance, or leave out model.{names[0]}"
        )
    return family.build(**arguments)


def _nf4_error(build: Callable[..., TransformerDecoder], modules: list[str], switches: dict[str, bool]) -> UsageError:
    """Returns the error for weights of `build(modules, **switches)` that NF4 cannot hold."""

    def fits_nf4(modules: list[str], switches: dict[str, bool]) -> bool:
        try:
            with torch.device("meta"):
                build(modules, **switches)
        except AssertionError:
            return False
        return True

    with torch.device("meta"):
        plain = build(modules, **switches | {"quantize_base": False})
    not_nf4_divisible = {
        name.rpartition(".")[2]: tuple(weight.shape)
        for name, module in plain.layers[0].named_modules()
        if (weight := getattr(module, "weight", None)) is not None
        and ".lora_" not in name
        and weight.numel() % NF4_MULTIPLE
    }
    # Some builders also store layers without adapters in NF4, so the suggestion is tried.
    targets = [name for name in modules if name not in not_nf4_divisible]
    adapts_mlp = {"w1", "w2", "w3"} & set(not_nf4_divisible) and switches["apply_lora_to_mlp"]
    fewer_switches = {"apply_lora_to_mlp": False} if adapts_mlp else {}
    advice = "so this model does not support QLoRA: set model.quantize_base=False"
    if targets and fits_nf4(targets, switches | fewer_switches):
        advice = f"set model.lora_attn_modules=[{', '.join(targets)}]"
        if fewer_switches:
            advice += " model.apply_lora_to_mlp=False"
    return UsageError(
        f"model.quantize_base=True: NF4 needs a multiple of {NF4_MULTIPLE} values per weight, which does not hold for "
        f"{', '.join(f'{name} ({rows} x {columns})' for name, (rows, columns) in not_nf4_divisible.items())}; {advice}"
    )


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
