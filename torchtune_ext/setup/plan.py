"""The plan of a run, which `dry_run=True` prints: what it takes of a machine, whether it fits, and what helps if not.

The figures follow from shapes and settings. What no shape says (a CUDA context, NCCL) is called an allowance.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchtune_ext.policy.memory import GIB, ModelSizes, trainer_memory
from torchtune_ext.run.errors import UsageError
from torchtune_ext.sampling.engine_args import CPU_KV_CACHE_BYTES, device_shares, resolve_transfer
from torchtune_ext.sampling.types import CANARY_REQUESTS, EngineConfig
from torchtune_ext.setup.config_records import GRPOConfig
from torchtune_ext.setup.machine_checks import disk_need, format_bytes
from torchtune_ext.training.export import SHARD_BYTES

# PyTorch's allocator keeps blocks that are free but too small for what comes next, since rows differ in length.
FRAGMENTATION_SHARE = 0.05
# Allowance for a rank, a process of the engine, and its client: Python, PyTorch, libraries. CUDA maps as much again.
PROCESS_BYTES = GIB
# Allowance for a CUDA context with its kernels, which is in no tensor.
CUDA_CONTEXT_BYTES = GIB // 2
# Allowance for the buffers of NCCL's channels, where several GPUs talk.
NCCL_BYTES = GIB // 2
# Allowance for captured CUDA graphs. vLLM measures them at its start and takes them out of the KV cache.
CUDA_GRAPH_BYTES = GIB
DEFAULT_STEP_TOKENS = 2048  # tokens of a vLLM step where `engine.max_num_batched_tokens` is null
DEFAULT_STEP_REQUESTS = 1024  # requests in a step where `engine.max_num_seqs` is null
# vLLM tries the sampler with all its options before it sizes the KV cache: logits in float32 (4 bytes), sorted (4) with
# their places as int64 (8), and probabilities (4).
SAMPLER_BYTES = 20
PACKED_BUFFER_BYTES = GIB  # vLLM's DEFAULT_PACKED_BUFFER_SIZE_BYTES

NAME_WIDTH, FIGURE_WIDTH = 58, 12  # characters of a row's name and of a figure
# What helps against each kind of shortage, the cheapest first. Another dry run says how much.
SHORTAGE_FIXES = {
    "gpus": ("fewer ranks or engines, or more GPUs",),
    "training": (
        "activation_checkpointing=true",
        "row_tokens=engine.max_model_len",
        "engine.sleep=true, where an engine is on the same GPU",
        "more GPUs that train",
        "adapters (docs/training.md)",
    ),
    "engine": (
        "another engine.gpu_memory_utilization or engine.kv_cache_bytes",
        "a lower engine.max_model_len",
        "a higher engine.tensor_parallel_size",
    ),
    "host": ("fewer ranks", "adapters (docs/training.md)"),
    "disk": ("checkpoints.save_optimizer=false", "checkpoints.keep_last=1"),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """What a run may take. Several machines that are alike count as one with the GPUs of all."""

    gpus: int  # 0: the run computes on the CPU
    gpu_bytes: int  # memory of each of them, as CUDA reports it
    host_bytes: int | None  # main memory that is free; None: not known
    name: str  # how the user calls it, "4 x 80 GB" for instance
    is_local: bool  # whether it is this machine, so that its disk and main memory count, too

    def __str__(self) -> str:
        size = self.gpu_bytes if self.gpus else self.host_bytes
        return self.name if size is None else f"{self.name} ({format_bytes(size)}{' each' if self.gpus else ''})"


@dataclass
class RunPlan:
    """A run on a machine. Raises ValueError if the GPUs of the engines cannot be divided so."""

    cfg: GRPOConfig  # settings of the recipe, with those of the engine as the run starts it
    sizes: ModelSizes  # of the model
    machine: Machine  # what the run is compared with
    trainers: int = 1  # devices that train
    reference: bool = False  # whether the loss asks a reference policy
    publishes_full_weights: bool = True  # whether whole weights ever go to the engine, and not only adapters

    def __post_init__(self):
        machine, sizes, itemsize = self.machine, self.sizes, self.sizes.dtype.itemsize
        self.engine: Any = None if self.cfg.replay else self.cfg.engine  # None: the run has no engine
        self._place_engines()
        self.published_bytes = sizes.engine_bytes if self.publishes_full_weights else itemsize * sizes.trained_params
        # Bytes by name of each device that samples. They stay empty for a server whose GPUs are not known.
        self.engine_rows: dict[str, int] = {}
        if self.engine_placement != "none" and (
            self.engine_placement != "server" or (machine.gpus and not machine.is_local)
        ):
            adapter_bytes = 0 if self.publishes_full_weights else self.published_bytes
            self.engine_rows = estimate_engine_bytes(sizes, self.engine, machine.gpu_bytes, adapter_bytes)
            self.cached_tokens = kv_cache_tokens(sizes, self.engine, self.engine_rows["KV cache"])
        self.device_rows = self._device_rows()
        self.host_rows = self._host_rows()
        self.device_bytes, self.engine_bytes = sum(self.device_rows.values()), sum(self.engine_rows.values())
        self.host_bytes = sum(self.host_rows.values())
        # On a CPU, trainer and engines take main memory.
        if not machine.gpus:
            self.host_bytes += self.device_bytes + self.engines * self.engine_bytes
        self.disk = disk_need(self.cfg, sizes.total_params, sizes.trained_params, sizes.dtype)
        self.shortages = self._shortages()
        self.fits = not self.shortages

    def _place_engines(self) -> None:
        machine, engine = self.machine, self.engine
        # `place`: the engine has GPUs of its "own"; they are "shared" with the trainer; they are shared, and the engine
        # "sleeps" while the trainer computes; or it is a "server".
        self.engine_placement, self.engines, gpus = "none", 0, 0
        if engine is not None:
            own = "shared" if engine.devices is None else "own"
            self.engine_placement = "server" if engine.address is not None else "sleeps" if engine.sleep else own
            # One for each address, or each share of `engine.devices`, or as counted.
            self.engines = len(engine.addresses or device_shares(engine)) or engine.count or 1
            gpus = engine.tensor_parallel_size
        # The GPUs that only sample, and those that an engine shares with the trainer.
        self.sampling_gpus = self.engines * gpus if self.engine_placement in ("own", "server") else 0
        self.shared_gpus = gpus if self.engine_placement in ("shared", "sleeps") else 0
        # Servers of a run on this machine sample on GPUs that `machine.gpus` does not count.
        self.remote_servers = self.engine_placement == "server" and machine.is_local
        # GPUs that the run needs, without those of servers elsewhere.
        self.gpus = max(self.trainers + (0 if self.remote_servers else self.sampling_gpus), self.shared_gpus)

    def with_trainers(self, ranks: int | None = None, visible: str | None = None) -> "RunPlan":
        """The plan with as many training devices as there are. Raises ValueError if sampling leaves no GPU to train.

        Args:
            ranks: number that torchrun has started; None: it has not.
            visible: CUDA_VISIBLE_DEVICES of this process.
        """
        machine, engine = self.machine, self.engine
        sampling = 0 if self.remote_servers else self.sampling_gpus
        if ranks or not machine.gpus:
            return replace(self, trainers=ranks or 1)
        if machine.is_local and sampling:
            # The trainer may see other GPUs than the engine. Only those that both see are lost to training.
            mine = visible.split(",") if visible else [str(i) for i in range(machine.gpus)]
            sampling = len(set(engine.device_names) & {name.strip() for name in mine})
        if sampling < machine.gpus:
            return replace(self, trainers=machine.gpus - sampling)
        raise UsageError(
            f"{machine.name}: {self.servers_text()} take {sampling} GPU{'s' if sampling > 1 else ''}; none is left to train: ask "
            f"for {sampling + 1} or more, or let engine and trainer share them by engine.devices=null engine.sleep=true"
        )

    def _device_rows(self) -> dict[str, int]:
        """Bytes by name of each training GPU, or of all ranks on a CPU together."""
        cfg, ranks = self.cfg, self.trainers
        rows = trainer_memory(
            self.sizes, cfg.row_tokens, ranks, cfg.activation_checkpointing, shard_within=cfg.ranks.shard_within
        )
        if not self.machine.gpus:
            return {name: bytes_ * self.trainers for name, bytes_ in rows.items()}
        fragments = int(FRAGMENTATION_SHARE * sum(rows.values()))
        rows["CUDA context, NCCL, fragmentation (allowance)"] = (
            CUDA_CONTEXT_BYTES + (NCCL_BYTES if ranks > 1 else 0) + fragments
        )
        # `transfer_of` resolves "auto" for this machine, which may have no GPU where the machine of the plan has some.
        # There "auto" is NCCL, unless it is shared memory.
        if (
            self.engine_placement == "server"
            and self.engine.transfer in ("nccl", "auto")
            and resolve_transfer(self.engine) != "shm"
        ):
            # vLLM packs tensors until they have more than PACKED bytes. While one pack is on its way, the tensors of
            # the next are put together into a copy, which makes three packs at most.
            pack = min(self.published_bytes, PACKED_BUFFER_BYTES + self.sizes.dtype.itemsize * self.sizes.largest_param)
            rows["sender of weights, only on rank 0's GPU (allowance)"] = CUDA_CONTEXT_BYTES + NCCL_BYTES + 3 * pack
        if self.engine_placement == "shared":
            rows["engine on the same GPU"] = sum(self.engine_rows.values())
        elif self.engine_placement == "sleeps":
            # The two peaks are not at the same time. While the engine is awake, the trainer holds only its weights and
            # moments. An engine that sleeps keeps its context and its graphs.
            kept = ("frozen weights, as they are held", "weights, float32 master", "state of the optimizer")
            free = (
                sum(rows.values())
                - int((1 + FRAGMENTATION_SHARE) * sum(rows[name] for name in kept))
                - CUDA_CONTEXT_BYTES
            )
            beyond = max(sum(self.engine_rows.values()) - free, CUDA_CONTEXT_BYTES + CUDA_GRAPH_BYTES)
            rows["awake engine on the same GPU, above the memory that the trainer frees"] = beyond
        return rows

    def _host_rows(self) -> dict[str, int]:
        """Bytes of main memory by name, of all processes."""
        sizes, ranks, on_gpus = self.sizes, self.trainers, self.machine.gpus > 0
        # A process on a GPU counts twice, since CUDA maps as much again as Python and PyTorch take.
        processes = ranks * (1 + on_gpus)
        if self.engine_rows:
            processes += self.engines * (1 + self.engine.tensor_parallel_size * (1 + on_gpus))
        # Each rank keeps its shard of the reference, and of its own weights while they are swapped out, both in
        # float32: 8 bytes for a weight.
        shards = min(self.cfg.ranks.shard_within or self.trainers, self.trainers)
        swapped = 8 * sizes.total_params * ranks // shards if self.reference and not sizes.has_frozen_params else 0
        # While a file of a checkpoint is written, its tensors and safetensors' copy of them are in memory.
        file = min(
            SHARD_BYTES,
            sizes.trained_params * 4 if sizes.has_frozen_params else sizes.total_params * sizes.dtype.itemsize,
        )
        # Files of weights do not count: they are mapped, and Linux drops their pages when memory is short.
        return {
            "processes of ranks and engine (allowance)": processes * PROCESS_BYTES,
            "published weights in shared memory": self.published_bytes if self.engine else 0,
            "weights of the engine while it sleeps": sizes.engine_bytes
            if self.engine_placement == "sleeps" and on_gpus
            else 0,
            "reference and weights swapped out, float32": swapped,
            "largest tensor on each rank, while weights are read": ranks * sizes.largest_param * (2 if on_gpus else 4),
            "a file of a checkpoint while it is put together": 2 * file,
        }

    def demands(self) -> dict[str, tuple[str, str, int, int | None]]:
        """What the run takes, by kind: who, of what, how many bytes, and of how many (None: not known)."""
        machine, gpu, takes = self.machine, "of each GPU", {}
        if machine.gpus:
            takes["training"] = ("training takes", gpu, self.device_bytes, machine.gpu_bytes)
            if self.engine_rows:
                who = "each server takes" if self.engine_placement == "server" else "each engine takes"
                takes["engine"] = (who, gpu, self.engine_bytes, machine.gpu_bytes)
        takes["host"] = ("the run takes", "of main memory", self.host_bytes, machine.host_bytes)
        takes["disk"] = (
            "checkpoints take",
            "of disk",
            self.disk.total_bytes,
            self.disk.free if machine.is_local else None,
        )
        return takes

    def _shortages(self) -> dict[str, str]:
        """What is missing, by kind, in words."""
        machine, engine, short = self.machine, self.engine, {}
        # On this machine an engine may see other GPUs than the trainer, so its own do not count against these.
        needed = max(self.trainers + (0 if machine.is_local else self.sampling_gpus), self.shared_gpus)
        if 0 < machine.gpus < needed:
            short["gpus"] = f"it needs {self.gpus} GPUs: {self.roles_text()}"
        for kind, (who, what, bytes_, most) in self.demands().items():
            if most is not None and bytes_ > most:
                short[kind] = f"{who} {format_bytes(bytes_)} {what}, where {format_bytes(most)} are free"
        if self.engine_rows and self.cached_tokens < engine.max_model_len:
            # vLLM refuses to start without room for one request of the greatest length.
            short["engine"] = (
                f"each engine's KV cache would hold {self.cached_tokens:,} tokens, fewer than "
                f"engine.max_model_len={engine.max_model_len}"
            )
        return short

    def servers_text(self) -> str:
        """Which engines sample: "2 servers of 2"."""
        kind = "server" if self.engine_placement == "server" else "engine"
        return f"{self.engines} {kind}{'s' if self.engines > 1 else ''} of {self.engine.tensor_parallel_size}"

    def roles_text(self) -> str:
        """Which GPUs do what: "4 train, 4 sample (4 engines of 1)"."""
        trains = f"{self.trainers} train{'s' if self.trainers == 1 else ''}"
        if self.shared_gpus:
            return f"{trains} and sample{'s' if self.trainers == 1 else ''}"
        if not self.sampling_gpus:
            return trains
        verb = f"{'serve' if self.engine_placement == 'server' else 'sample'}{'s' if self.sampling_gpus == 1 else ''}"
        samples = f"{self.sampling_gpus} {verb} ({self.servers_text()})"
        if self.remote_servers:
            return f"{trains}; elsewhere {samples}"
        idle = 0 if self.machine.is_local else self.machine.gpus - self.gpus
        return f"{trains}, {samples}{f', {idle} idle' if idle > 0 else ''}"


def estimate_engine_bytes(
    sizes: ModelSizes, config: EngineConfig, gpu_bytes: int, adapter_bytes: int = 0
) -> dict[str, int]:
    """Estimates what one engine or server takes of each of its devices, in bytes by name.

    Args:
        gpu_bytes: memory of each GPU; 0: the engine computes on the CPU.
        adapter_bytes: of adapters that are published without the other weights.
    """
    gpus, size = config.tensor_parallel_size, 4 if config.dtype == "float32" else 2
    rows = {"weights": sizes.engine_bytes // gpus, "adapters": adapter_bytes}
    if not gpu_bytes:
        return rows | {"KV cache": config.kv_cache_bytes or CPU_KV_CACHE_BYTES}
    tokens = config.max_num_batched_tokens or DEFAULT_STEP_TOKENS
    # Each request samples one token of a step, so there are no more of them than tokens.
    sampled = min((config.max_num_seqs or DEFAULT_STEP_REQUESTS) + CANARY_REQUESTS, tokens)
    # A layer takes most while it holds gate, up and their product, and two residuals.
    activations = tokens * size * (3 * sizes.mlp // gpus + 2 * sizes.width)
    rows["activations of a step and its sampler"] = SAMPLER_BYTES * sampled * sizes.vocab + activations
    graphs = 0 if config.extra_args.get("enforce_eager") else CUDA_GRAPH_BYTES
    rows["CUDA context, NCCL, graphs (allowance)"] = CUDA_CONTEXT_BYTES + (NCCL_BYTES if gpus > 1 else 0) + graphs
    # vLLM gives what its share of the GPU leaves over to the KV cache.
    left = int(config.gpu_memory_utilization * gpu_bytes) - sum(rows.values())
    return rows | {"KV cache": config.kv_cache_bytes or max(0, left)}


def kv_cache_tokens(sizes: ModelSizes, config: EngineConfig, kv_bytes: int) -> int:
    """How many tokens the KV cache of one engine holds, with `kv_bytes` on each of its devices."""
    size = 4 if config.dtype == "float32" else 2
    if str(config.extra_args.get("kv_cache_dtype", "")).startswith("fp8"):
        size = 1
    # Where there are fewer heads of keys and values than GPUs, several GPUs hold the same head.
    share = -(-sizes.kv_heads // config.tensor_parallel_size) / sizes.kv_heads
    return int(kv_bytes / (sizes.kv_values_per_token * share * size))


def plan_table(plan: RunPlan, name: str) -> str:
    """The table without the verdict, at most 120 characters wide. `name` is the model's."""
    sizes, machine, disk, engine = plan.sizes, plan.machine, plan.disk, plan.engine
    count = f"{sizes.total_params / 1e9:.3f} B" if sizes.total_params >= 1e8 else f"{sizes.total_params / 1e6:.3f} M"
    trained = (
        f"{sizes.trained_params / sizes.total_params:.2%} of them trained" if sizes.has_frozen_params else "all trained"
    )
    lines = [f"{name}: {count} parameters, {trained}"]
    if machine.gpus:
        lines.append(f"GPUs: {plan.roles_text()}")

    def add(title: str, rows: Mapping[str, int]) -> None:
        # A row of zero bytes would only make the table longer.
        figures = {title: sum(rows.values())} | {f"  {name}": bytes_ for name, bytes_ in rows.items() if bytes_}
        lines.extend(f"{name:<{NAME_WIDTH}}{format_bytes(bytes_):>{FIGURE_WIDTH}}" for name, bytes_ in figures.items())

    add("each GPU that trains" if machine.gpus else "main memory for the trainer", plan.device_rows)
    if plan.engine_rows:
        kind = "server" if plan.engine_placement == "server" else "engine"
        where = f"each {kind} GPU (engine.tensor_parallel_size={engine.tensor_parallel_size})"
        add(where if machine.gpus else "main memory for the engine", plan.engine_rows)
        each = f" of each of {plan.engines}" if plan.engines > 1 else ""
        requests = plan.cached_tokens // engine.max_model_len
        lines.append(
            f"  the KV cache{each} holds {plan.cached_tokens:,} tokens: {requests:,} requests of engine.max_model_len"
        )
    elif plan.engine_placement == "server":
        lines.append(f"the engine is the server at {engine.address}; what it needs is not in this table")
    add("main memory, besides", plan.host_rows)
    add(f"disk for one checkpoint in {plan.cfg.output_dir}", disk.rows)
    free = f"; free there: {format_bytes(disk.free)}" if machine.is_local else ""
    lines.append(
        f"  {disk.max_checkpoints} at once at most, with the one that is being written: {format_bytes(disk.total_bytes)}{free}"
    )
    return "\n".join(lines)


def verdict(plan: RunPlan) -> str:
    """Whether the plan fits, in one line, and below it what it takes, or what is missing and what helps."""
    where = f"{'on' if plan.machine.gpus or not plan.machine.is_local else 'into'} {plan.machine}"
    if plan.fits:
        takes = [f"  {who} {format_bytes(bytes_)} {what}" for who, what, bytes_, _ in plan.demands().values()]
        if plan.trainers > 1:
            takes.append(f"  start it with --nproc_per_node {plan.trainers}")
        return "\n".join([f"fits {where}:", *takes])
    lines = [f"does NOT fit {where}:"]
    for kind, missing in plan.shortages.items():
        lines += [f"  {missing}; what helps, the cheapest first:", *(f"    {each}" for each in SHORTAGE_FIXES[kind])]
    return "\n".join(lines)
