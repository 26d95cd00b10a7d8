"""The plan of a run: machines, engine memory, checkpoints, verdict and fixes."""

import json
from copy import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from helpers.adapters import ATTENTION
from helpers.checkpoint_runs import TrainedModel, checkpoints_in, make_source
from helpers.public_configs import write_config
from torchtune_ext.policy import from_config
from torchtune_ext.policy.builder import build_on_meta
from torchtune_ext.policy.hub import hub_model_config
from torchtune_ext.policy.memory import GIB, ModelSizes, trainer_memory
from torchtune_ext.recipes import grpo
from torchtune_ext.run.catalog import config_files, package_folder
from torchtune_ext.sampling.types import EngineConfig
from torchtune_ext.settings.config import load_config
from torchtune_ext.setup.dry_run import parse_machine
from torchtune_ext.setup.machine_checks import disk_need, format_bytes
from torchtune_ext.setup.plan import (
    CHECK_ROW,
    CUDA_CONTEXT_BYTES,
    CUDA_GRAPH_BYTES,
    NCCL_BYTES,
    Machine,
    RunPlan,
    estimate_engine_bytes,
    float32_check_bytes,
    kv_cache_tokens,
    plan_table,
    verdict,
)
from torchtune_ext.training.checkpoints import CheckpointConfig

OWN = EngineConfig(max_model_len=16384, gpu_memory_utilization=0.9, devices="4")
SHARED = EngineConfig(max_model_len=2048, max_num_batched_tokens=2048, sleep=True)  # one GPU, in turns
OFFLOADED_ROW = "frozen weights while the engine is awake"


@pytest.fixture(scope="module")
def seven(tmp_path_factory):
    path = write_config(tmp_path_factory.mktemp("public"), "Qwen2.5-7B-Instruct")
    return ModelSizes(build_on_meta(partial(from_config, str(path))), torch.bfloat16)


def lora_sizes(folder, name):
    (folder / "config.json").write_text(json.dumps(hub_model_config(name)))
    adapters = {"lora_attn_modules": ATTENTION, "apply_lora_to_mlp": True, "lora_rank": 32}
    return ModelSizes(build_on_meta(partial(from_config, str(folder), **adapters)), torch.bfloat16)


@pytest.fixture(scope="module")
def seven_lora(tmp_path_factory):
    return lora_sizes(tmp_path_factory.mktemp("lora"), "Qwen2.5-7B-Instruct")


CONFIG = load_config(grpo.Config, OmegaConf.load(config_files(package_folder("configs"))["grpo/qwen2_5_7B_full"]))


def planned(
    sizes,
    machine,
    engine=OWN,
    trainers=None,
    shard_within=None,
    reference=False,
    publishes_all=True,
    optimizer_bytes=8.0,
    **changes,
):
    """Return the plan of the config with other settings; `trainers`: ranks that torchrun has started."""
    settings = dict(output_dir="runs/x", max_steps=100, row_tokens=16384, activation_checkpointing=True)
    settings |= dict(
        sampling=replace(CONFIG.sampling, max_tokens=4096),
        checkpoints=CheckpointConfig(every=10),
        ranks=replace(CONFIG.ranks, shard_within=shard_within),
        engine=engine or OWN,
        replay=None if engine else "runs/earlier",
    )
    machine = parse_machine(machine) if isinstance(machine, str) else machine
    cfg = replace(CONFIG, **settings | changes)
    plan = RunPlan(
        cfg,
        sizes,
        machine,
        reference=reference,
        publishes_full_weights=publishes_all,
        engine_loads_adapters=not publishes_all,
        optimizer_bytes=optimizer_bytes,
    )
    return plan.with_trainers(trainers)


# -- machines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gpus, engine, world_size, visible, trainers",
    [
        ("5x80", OWN, None, None, 4),
        ("8x80", replace(OWN, tensor_parallel_size=2, devices="6,7"), None, None, 6),
        ("8x80", replace(OWN, devices="4,5,6,7"), None, None, 4),  # four engines
        ("8x80", replace(OWN, tensor_parallel_size=2, devices="4,5,6,7"), None, None, 4),  # two
        ("8x80", replace(OWN, devices=None, address="http://127.0.0.1:8000"), None, None, 7),
        ("16x80", replace(OWN, devices=None, address="http://a:1,http://b:1", tensor_parallel_size=2), None, None, 12),
        ("1x80", replace(OWN, devices=None, sleep=True), None, None, 1),
        ("5x80", OWN, 3, None, 3),  # the ranks of torchrun
        (4, OWN, None, "0,1,2,3", 4),  # this machine: the trainer does not see the engine's GPU
        (5, OWN, None, None, 4),
        (2, OWN, None, "3,4", 1),
    ],
)
def test_how_many_train(seven, gpus, engine, world_size, visible, trainers):
    machine = parse_machine(gpus) if isinstance(gpus, str) else Machine(gpus, 80 * GIB, None, f"{gpus} GPUs", True)
    plan = planned(seven, machine, engine, trainers=1)
    assert plan.with_trainers(world_size, visible).trainers == trainers


def test_plan_machine_without_trainer_gpu_is_refused(seven):
    with pytest.raises(ValueError, match="1 x 80 GB: .* 1 GPU .* 2 GPUs or more"):
        planned(seven, "1x80")


# -- the engine ---------------------------------------------------------------------------------------------------------


def cached(sizes, config, gpu_bytes):
    """Return the bytes of the KV cache per device, and its tokens per engine."""
    kv_bytes = estimate_engine_bytes(sizes, config, gpu_bytes)["KV cache"]
    return kv_bytes, kv_cache_tokens(sizes, config, kv_bytes)


def test_plan_kv_cache_is_memory_left_by_engine(seven):
    memory = int(78.8 * GIB)
    rows, (kv, tokens) = estimate_engine_bytes(seven, OWN, memory), cached(seven, OWN, memory)
    # Qwen2.5 7B: 28 layers, 4 key/value heads of 128, in bfloat16.
    token = 2 * 28 * 4 * 128 * 2
    assert sum(rows.values()) == int(0.9 * memory) and tokens == kv // token
    assert rows["weights"] == 2 * 7_615_616_512
    assert "activations of a step and sampling" in rows
    two = replace(OWN, tensor_parallel_size=2)
    halves, (half_kv, more) = estimate_engine_bytes(seven, two, memory), cached(seven, two, memory)
    assert halves["weights"] == rows["weights"] // 2
    assert more == half_kv // (token // 2) > 2 * tokens
    # Each of four GPUs holds one of two heads.
    few_heads = copy(seven)
    few_heads.kv_heads = 2
    kv, tokens = cached(few_heads, replace(OWN, tensor_parallel_size=4), memory)
    assert tokens == kv // (token // 2)
    small = replace(OWN, extra_args={"kv_cache_dtype": "fp8", "enforce_eager": True})
    kv, tokens = cached(seven, small, memory)
    allowance = "CUDA context, NCCL, graphs (allowance)"
    assert tokens == kv // (token // 2)
    assert (
        estimate_engine_bytes(seven, small, memory)[allowance]
        == rows[allowance] - CUDA_GRAPH_BYTES
        == CUDA_CONTEXT_BYTES
    )
    other_rows = estimate_engine_bytes(seven, replace(OWN, kv_cache_bytes=GIB), memory)
    assert other_rows["KV cache"] == GIB and sum(other_rows.values()) < sum(rows.values())


def test_plan_engine_without_room_for_longest_request_fails(seven):
    tight = planned(seven, "5x19", trainers=4)
    assert "fewer than engine.max_model_len=16384" in verdict(tight)
    assert "\n    a lower engine.max_model_len" in verdict(tight)


def test_plan_engines_have_own_cache_and_share_weights(seven):
    one, four = planned(seven, "5x80"), planned(seven, "8x80", replace(OWN, devices="4,5,6,7"))
    pairs = planned(seven, "8x80", replace(OWN, devices="4,5,6,7", tensor_parallel_size=2))
    assert (four.engines, pairs.engines) == (4, 2) and four.engine_rows == one.engine_rows
    pair = planned(seven, "8x80", replace(OWN, devices="6,7", tensor_parallel_size=2))
    assert pairs.engine_rows == pair.engine_rows
    names = ("published weights in shared memory", "processes of ranks and engine (allowance)")
    # Three more engines, each with a client and a process, whose memory CUDA maps again.
    assert [four.host_rows[name] - one.host_rows[name] for name in names] == [0, 3 * 3 * GIB]
    assert "4 sample (4 engines, tensor_parallel_size=1)" in plan_table(
        four, "x"
    ) and "each replica takes 70.9 GiB of each GPU" in verdict(four)
    assert f"the KV cache of each of 4 holds {four.cached_tokens:,} tokens" in plan_table(four, "x")


def test_servers_of_several_machines_are_counted(seven):
    engine = replace(OWN, devices=None, tensor_parallel_size=2, address="http://a:1,http://b:1")
    both = planned(seven, "16x80", engine)
    assert (both.trainers, both.gpus) == (12, 16)
    text = verdict(both)
    assert both.fits and "GPUs: 12 train, 4 serve (2 servers, tensor_parallel_size=2)" in plan_table(both, "x")
    assert "each server takes 70.9 GiB" in text
    names = ("processes of ranks and engine (allowance)", "largest tensor on each rank, while weights are read")
    assert [both.host_rows[name] for name in names] == [(12 * 2 + 2 * (1 + 2 * 2)) * GIB, 12 * 2 * seven.largest_param]


def test_plan_too_few_gpus_does_not_fit(seven):
    plan = planned(seven, "8x80", replace(OWN, devices="6,7"), trainers=7)
    assert not plan.fits and "it needs 9 GPUs: 7 train, 2 sample" in verdict(plan)
    idle = planned(seven, "8x80", replace(OWN, devices="6,7"), trainers=4)
    assert idle.fits and "GPUs: 4 train, 2 sample (2 engines, tensor_parallel_size=1), 2 idle" in plan_table(idle, "x")


def test_plan_nccl_server_reserves_sender_memory_on_rank0(seven):
    name, largest = "weight sender, only on rank 0's GPU (allowance)", 2 * seven.largest_param
    server = replace(OWN, devices=None, address="http://a:1")
    # A context, NCCL's buffers, and up to three packs of more than 1 GiB.
    need = 2 * CUDA_CONTEXT_BYTES + 3 * (GIB + largest)
    there, here = "http://a:1", "http://127.0.0.1:1"
    expectations = [
        ("nccl", there, need),
        ("auto", there, need),
        ("nccl", here, need),
        ("auto", here, 0),
        ("gloo", there, 0),
    ]
    for transfer, address, expected in expectations:
        plan = planned(seven, "8x80", replace(server, transfer=transfer, address=address))
        assert plan.device_rows.get(name, 0) == expected, (transfer, address)
    assert name not in planned(seven, "5x80").device_rows | planned(seven, "4x80", None).device_rows
    by_nccl, by_gloo = (planned(seven, "8x80", replace(server, transfer=way)) for way in ("nccl", "gloo"))
    assert by_nccl.device_bytes == by_gloo.device_bytes + need and name in plan_table(by_nccl, "x")


# -- sharding inside a machine ---------------------------------------------------------------------------------------------


def test_states_are_sharded_within_so_many_devices(seven):
    rows = partial(trainer_memory, seven, 16384, activation_checkpointing=True)
    assert rows(world_size=16, shard_within=8) == rows(world_size=8)
    assert rows(world_size=16, shard_within=16) == rows(world_size=16) == rows(world_size=16, shard_within=None)
    # 16 bytes per parameter: float32 master, gradient and two moments.
    states = ("weights, float32 master", "gradients, float32", "optimizer state")
    assert sum(rows(world_size=16, shard_within=4)[name] for name in states) == 16 * seven.total_params // 4
    # Fewer devices than that hold all states together.
    assert rows(world_size=2, shard_within=8) == rows(world_size=2)


def test_plan_sharding_within_machine_uses_more_memory(seven):
    server = replace(OWN, devices=None, address="http://a:1")
    inside, all_ = (planned(seven, "32x40", server, shard_within=within) for within in (2, None))
    assert inside.device_bytes > all_.device_bytes and not inside.fits and all_.fits


@pytest.mark.parametrize(
    "machine, trainers, within, copies",
    [
        ("8x80", 4, None, 1),
        ("8x80", 4, 2, 2),  # two copies of the weights on the machine
        ("8x80", 4, 8, 1),  # fewer ranks than share a copy
    ],
)
def test_plan_main_memory_includes_swapped_weights(seven, machine, trainers, within, copies):
    plan = planned(seven, machine, trainers=trainers, shard_within=within, reference=True)
    # Master weights and reference, 4 bytes each.
    assert plan.host_rows["reference and weights swapped out, float32"] == 8 * seven.total_params * copies


def test_plan_cpu_engine_uses_requested_cache_size(seven):
    rows = estimate_engine_bytes(seven, EngineConfig(dtype="bfloat16", kv_cache_bytes=1 << 28), 0)
    assert rows["KV cache"] == 1 << 28 and len(rows) == 3
    assert estimate_engine_bytes(seven, EngineConfig(), 0)["KV cache"] == GIB  # the default on a CPU


def test_plan_sleeping_engine_shares_gpu_with_trainer(seven):
    engine = replace(OWN, devices=None, gpu_memory_utilization=0.2)
    beside = planned(seven, "1x192", engine)
    turns = planned(seven, "1x192", replace(engine, sleep=True))
    alone = beside.device_bytes - beside.engine_bytes
    # The trainer's peak with the sleeping engine is higher than the engine with the trainer's weights and moments.
    assert turns.device_bytes == alone + CUDA_CONTEXT_BYTES + CUDA_GRAPH_BYTES < beside.device_bytes
    awake = planned(seven, "1x192", replace(engine, sleep=True, gpu_memory_utilization=0.9))
    # The float32 check runs while the engine is awake: the output table and a layer, and logits of 32 x 32 labels.
    check = 4 * (152064 * 3584 + seven.layer_params) + 8 * 32 * 32 * 152064
    resting = 1.05 * ((4 + 8) * seven.total_params + seven.rope_bytes) + CUDA_CONTEXT_BYTES
    assert awake.device_bytes == pytest.approx(awake.engine_bytes + check + resting, abs=1e6)
    assert awake.host_rows[OFFLOADED_ROW] == 0 and CHECK_ROW not in awake.device_rows


@pytest.mark.parametrize("machine, offloads", [("1x80", True), ("2x80", False)])
def test_plan_offloads_frozen_weights_of_one_rank(seven_lora, machine, offloads):
    engine = replace(SHARED, gpu_memory_utilization=0.9)
    plan = planned(seven_lora, machine, engine, trainers=int(machine[0]), row_tokens=4096, publishes_all=False)
    rows, frozen = plan.device_rows, seven_lora.frozen_bytes
    assert plan.offloads == offloads and plan.host_rows[OFFLOADED_ROW] == frozen * offloads
    held = rows["weights, float32 master"] + rows["optimizer state"] + rows["RoPE table, float32"]
    awake = CUDA_CONTEXT_BYTES + int(1.05 * held) + plan.engine_bytes
    if not offloads:  # FSDP2 keeps its shards, and the check runs beside the engine
        awake += NCCL_BYTES + frozen // 2 + float32_check_bytes(seven_lora, plan.machine.gpu_bytes)
    assert plan.device_bytes == pytest.approx(awake, abs=1e6)


def test_plan_engines_and_trainers_share_four_gpus(seven, monkeypatch):
    engine = replace(OWN, devices="0,1,2,3", sleep=True, gpu_memory_utilization=0.5)
    plan, one = planned(seven, "4x80", engine), planned(seven, "4x80", replace(engine, devices=None), trainers=4)
    assert plan.fits and plan.trainers == plan.gpus == plan.shared_gpus == plan.engines == 4
    assert "GPUs: 4 train and sample\n" in plan_table(plan, "Qwen2.5-7B")
    # A GPU holds as much as with one engine, but all engines keep their weights in main memory.
    assert (plan.update_bytes, plan.awake_bytes) == (one.update_bytes, one.awake_bytes)
    asleep = "weights of sleeping engines"
    assert plan.host_rows[asleep] == 4 * one.host_rows[asleep] == 4 * seven.engine_bytes
    states = 1.05 * (12 * seven.total_params / 4 + seven.rope_bytes) + CUDA_CONTEXT_BYTES + NCCL_BYTES
    awake = plan.engine_bytes + states + float32_check_bytes(seven, plan.machine.gpu_bytes)
    assert plan.awake_bytes == pytest.approx(awake, abs=1e6)
    # A second replica per engine is a GPU more.
    wide = planned(seven, "4x80", replace(engine, tensor_parallel_size=2))
    assert wide.engines == 2 and wide.shared_gpus == 4
    few = planned(seven, "4x80", replace(engine, devices="0,1,2,3,4,5"), trainers=4)
    assert "it needs 6 GPUs: 4 train, 6 sample" in verdict(few)
    # The trainer may see fewer of this machine's GPUs than the engines.
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=900 * GIB))
    here = Machine(4, 80 * GIB, 900 * GIB, "the GPUs here", is_local=True)
    assert "gpus" not in planned(seven, here, replace(engine, devices="0,1,2,3,4,5"), trainers=4).shortages


def test_plan_sharded_adapters_name_one_rank(seven_lora):
    """Only one rank offloads, so the frozen weights of two ranks stay on their GPUs."""
    engine = replace(SHARED, devices="0,1", gpu_memory_utilization=0.8, max_num_seqs=64)
    plan = planned(seven_lora, "2x24", engine, trainers=2, row_tokens=4096, publishes_all=False)
    fix = "one rank, because only one rank moves its frozen weights to main memory"
    assert plan.shortages.keys() == {"awake"} and fix in plan.fixes("awake")
    assert planned(seven_lora, "2x24", engine, row_tokens=4096, publishes_all=False).fits


def test_plan_of_two_cards_offloads_on_one(seven_lora):
    """`tune run` without torchrun starts one rank, and only one rank offloads."""
    engine = replace(
        SHARED, gpu_memory_utilization=0.8, max_num_seqs=64, max_model_len=2048, max_num_batched_tokens=2048
    )
    plan = planned(seven_lora, "2x24", engine, row_tokens=4096, publishes_all=False)
    assert plan.fits and plan.offloads and plan.trainers == 1


def test_plan_offloaded_check_is_counted_while_engine_sleeps(seven_lora):
    """The row grows until the update needs more than the check of the canary."""
    engine = replace(SHARED, gpu_memory_utilization=0.75)
    short, long = (
        planned(seven_lora, "1x24", engine, row_tokens=tokens, publishes_all=False) for tokens in (2048, 16384)
    )
    assert long.device_rows[CHECK_ROW] == 0 < short.device_rows[CHECK_ROW]
    states = 12 * seven_lora.trained_params + seven_lora.rope_bytes
    check = seven_lora.frozen_bytes + 1.05 * states + CUDA_CONTEXT_BYTES + float32_check_bytes(seven_lora, 24 * GIB)
    assert short.device_bytes == pytest.approx(check + CUDA_CONTEXT_BYTES + CUDA_GRAPH_BYTES, abs=1e6)


def test_plan_offload_without_main_memory_is_refused(seven_lora, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=900 * GIB))
    here = Machine(1, int(23.6 * GIB), 32 * GIB, "the GPU of this machine", is_local=True)
    engine = replace(SHARED, gpu_memory_utilization=0.8, max_num_seqs=64)
    plan = planned(seven_lora, here, engine, row_tokens=4096, publishes_all=False)
    text = verdict(plan)
    assert plan.shortages.keys() == {"host"} and "the run takes 35.1 GiB of main memory, but 32.0 GiB are free" in text
    assert "cheapest first:\n    engine.sleep=2\n    another GPU for the engine instead of engine.sleep\n" in text
    dropped = planned(seven_lora, here, replace(engine, sleep=2), row_tokens=4096, publishes_all=False)
    assert dropped.fits and plan.host_bytes - dropped.host_bytes == seven_lora.engine_bytes
    assert "engine.sleep=2" not in dropped.fixes("host")
    assert planned(seven_lora, replace(here, host_bytes=36 * GIB), engine, row_tokens=4096, publishes_all=False).fits


@pytest.mark.parametrize(
    "name, machine, utilization, seqs, row_tokens",
    [
        ("Qwen2.5-1.5B-Instruct", "1x16", 0.83, None, 16384),
        ("Qwen2.5-3B-Instruct", "1x24", 0.84, None, 16384),
        ("Qwen2.5-7B-Instruct", "1x24", 0.83, 64, 4096),
        ("Qwen2.5-7B-Instruct", "1x48", 0.86, None, 16384),
    ],
)
def test_plan_lora_fits_consumer_gpus_with_margin(tmp_path, name, machine, utilization, seqs, row_tokens):
    engine = replace(SHARED, gpu_memory_utilization=utilization, max_num_seqs=seqs, max_model_len=2048)
    sizes = lora_sizes(tmp_path, name)
    plan = planned(sizes, machine, engine, row_tokens=row_tokens, publishes_all=False)
    assert plan.fits and plan.device_bytes <= 0.9 * plan.machine.gpu_bytes
    assert plan.cached_tokens > 20 * engine.max_model_len
    # With two percent more the margin is lost, so these are the figures of a plan and not a loose bound.
    more = replace(engine, gpu_memory_utilization=utilization + 0.02)
    wider = planned(sizes, machine, more, row_tokens=row_tokens, publishes_all=False)
    assert wider.device_bytes > 0.9 * wider.machine.gpu_bytes


@pytest.mark.parametrize("machine, requests", [("1x24", 256), ("1x69", 256), ("1x80", 1024)])
def test_plan_default_requests_follow_gpu_size(seven, machine, requests):
    named = "activations of a step and sampling"
    memory = parse_machine(machine).gpu_bytes
    rows = (estimate_engine_bytes(seven, replace(SHARED, max_num_seqs=seqs), memory) for seqs in (None, requests))
    assert next(rows)[named] == next(rows)[named]


def test_plan_optimizer_state_has_measured_size(seven):
    usual, small = planned(seven, "5x80"), planned(seven, "5x80", optimizer_bytes=2.0)
    assert small.device_rows["optimizer state"] * 4 == usual.device_rows["optimizer state"]
    assert small.disk.rows["optimizer state"] * 4 == usual.disk.rows["optimizer state"]


# -- disk ---------------------------------------------------------------------------------------------------------------


def needed(sizes, folder, steps, evaluated, **config):
    evaluation = CONFIG.evaluation if evaluated else replace(CONFIG.evaluation, task=None)
    settings = dict(
        output_dir=str(folder), max_steps=steps, evaluation=evaluation, checkpoints=CheckpointConfig(**config)
    )
    return disk_need(replace(CONFIG, **settings), sizes.total_params, sizes.trained_params, sizes.dtype)


@pytest.mark.parametrize("save_optimizer", [True, False])
def test_plan_checkpoint_bytes_match_written_bytes(tmp_path, save_optimizer):
    source = make_source(tmp_path / "model")
    trained = TrainedModel(source)
    trained.train(1, seed=0)
    trained.save(checkpoints_in(tmp_path / "c", save_optimizer=save_optimizer), 1)
    folder = tmp_path / "c" / "step_000001"
    sizes = ModelSizes(build_on_meta(partial(from_config, str(source.path))), torch.float32)
    need = needed(sizes, tmp_path, 200, True, save_optimizer=save_optimizer)
    tensors = [*folder.glob("*.safetensors"), *(folder / "state").glob("*.distcp")]
    written = sum(path.stat().st_size for path in tensors)
    # DCP adds headers: it stores each tensor as a zip file with some KB of names and padding.
    files = 26 * (3 if save_optimizer else 1)
    assert need.checkpoint_bytes <= written <= need.checkpoint_bytes + files * 4096
    assert need.checkpoint_bytes == 4 * sizes.total_params * (4 if save_optimizer else 2)


def test_how_many_checkpoints_are_there_at_once(seven, tmp_path):
    def kept(steps=100, evaluated=True, **config):
        return needed(seven, tmp_path / "none/yet", steps, evaluated, **config).max_checkpoints

    assert kept(every=10) == 4  # the last two, the best, and the checkpoint being written
    assert kept(every=10, evaluated=False) == 3 and kept(every=10, keep_last=5) == 7
    assert kept(every=1000) == 1 and kept(every=60) == 2
    whole = needed(seven, tmp_path, 100, True, every=10)
    assert whole.checkpoint_bytes / GIB == pytest.approx(99.3, abs=0.1)  # 14 bytes for 7.6 billion values


# -- verdict and fixes ------------------------------------------------------------------------------------------


def test_plan_verdict_fit_is_one_line_with_requirements(seven):
    plan = planned(seven, "5x80")
    assert plan.fits and verdict(plan).splitlines() == [
        "fits on 5 x 80 GB (78.8 GiB each):",
        f"  training takes {format_bytes(plan.device_bytes)} of each GPU, 28.3 GiB stay free",
        "  each replica takes 70.9 GiB of each GPU, 7.9 GiB stay free",
        f"  the run takes {format_bytes(plan.host_bytes)} of main memory",
        "  checkpoints take 397.2 GiB of disk",
        "  start it with --nproc_per_node 4",
    ]


def test_plan_verdict_shortage_lists_remedies(seven):
    settings = dict(activation_checkpointing=False, row_tokens=4096)
    plan = planned(seven, "2x80", replace(OWN, max_model_len=4096), **settings)
    lines = verdict(plan).splitlines()
    assert lines[0] == "does NOT fit on 2 x 80 GB (78.8 GiB each):" and plan.shortages.keys() == {"training"}
    assert lines[1].startswith("  training takes ") and lines[1].endswith(
        "are free; settings that need less, cheapest first:"
    )
    assert lines[2:] == [
        "    activation_checkpointing=true",
        "    more GPUs for training",
        "    adapters (docs/how_to/adapters.md)",
    ]
    assert not planned(seven, "5x80", replace(OWN, max_model_len=4096), **settings).shortages


def test_plan_verdict_omits_remedies_that_are_set(seven):
    shared = replace(OWN, devices=None, max_model_len=4096)
    everything = planned(seven, "1x40", shared, activation_checkpointing=False, row_tokens=8192)
    lower = "a lower engine.gpu_memory_utilization or engine.kv_cache_bytes"
    assert everything.fixes("training") == [
        "activation_checkpointing=true",
        "row_tokens=4096, which is engine.max_model_len",
        "engine.sleep=true",
        "another GPU for the engine (engine.devices)",
        lower,
        "more GPUs for training",
        "adapters (docs/how_to/adapters.md)",
    ]
    asleep = replace(shared, sleep=True)
    assert "engine.sleep=true" not in planned(seven, "1x40", asleep, row_tokens=4096).fixes("training")
    assert planned(seven, "1x80", shared, row_tokens=4096, staleness=1).fixes("training")[:2] != ["engine.sleep=true"]
    one_kept = CheckpointConfig(keep_last=1, save_optimizer=False)
    assert planned(seven, "1x80", shared, checkpoints=one_kept).fixes("disk") == ["output_dir on a larger disk"]
    assert planned(seven, "CPU 8", shared, trainers=1).fixes("host")[-2:] == [
        "adapters (docs/how_to/adapters.md)",
        "more memory",
    ]


def test_plan_small_disk_is_reported_with_remedies(seven, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=300 * GIB))
    here = Machine(8, 80 * GIB, 2000 * GIB, "the 8 GPUs here", is_local=True)
    plan = planned(seven, here, replace(OWN, devices="7"))
    text = verdict(plan)
    assert "checkpoints take 397.2 GiB of disk, but 300.0 GiB are free" in text
    assert "settings that need less, cheapest first:\n    checkpoints.save_optimizer=false" in text
    other = planned(seven, "8x80", replace(OWN, devices="7"))
    assert other.fits  # the disk of another machine is unknown


def test_too_few_gpus_for_the_ranks_of_torchrun(seven):
    plan = planned(seven, "4x80", trainers=4)
    assert not plan.fits and "it needs 5 GPUs: 4 train, 1 samples (1 engine, tensor_parallel_size=1)" in verdict(plan)


def test_on_a_cpu_all_is_in_main_memory(seven):
    engine = EngineConfig(max_model_len=4096)
    small = planned(seven, "CPU 64", engine, trainers=1)
    assert not small.fits and "GiB of main memory" in verdict(small)
    large = planned(seven, "CPU 512", engine, trainers=1)
    assert large.fits and large.host_bytes > large.device_bytes + large.engine_bytes


@pytest.mark.parametrize("machine", ["5x80", "3x24", "CPU 512"])
def test_tables_are_narrow_and_without_zeros(seven, machine):
    engine = OWN if machine != "CPU 512" else EngineConfig(max_model_len=16384)
    plan = planned(seven, machine, engine)
    text = f"{plan_table(plan, 'Qwen2.5-7B-Instruct')}\n{verdict(plan)}"
    assert all(len(line) <= 120 for line in text.splitlines()), text
    assert " 0.00" not in text and "frozen weights" not in text
    assert "the KV cache holds" in text


def test_plan_server_and_replay_need_no_engine_gpu(seven):
    here = Machine(4, 79 * GIB, 500 * GIB, "the 4 GPUs here", True)
    server = planned(seven, here, replace(OWN, devices=None, address="http://127.0.0.1:8000"))
    assert server.engine_rows == {} and server.trainers == server.gpus == 4
    assert "the engine is the server at http://127.0.0.1:8000" in plan_table(server, "x")
    assert "GPUs: 4 train; elsewhere 1 serves (1 server, tensor_parallel_size=1)" in plan_table(server, "x")
    replay = planned(seven, "4x80", None)
    assert replay.engine_rows == {} and replay.gpus == 4 and replay.host_rows["published weights in shared memory"] == 0
