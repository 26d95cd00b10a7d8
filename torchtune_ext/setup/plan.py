"""Plan the memory and disk of a run, compare it with a machine, and suggest fixes (`dry_run=True`).

The numbers follow from shapes and settings. Memory without a shape (a CUDA context, NCCL) is
estimated as an allowance.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchtune_ext.kernels.linear_logprob import chunk_elements
from torchtune_ext.policy.memory import FROZEN_ROW, GIB, ModelSizes, trainer_memory
from torchtune_ext.run.errors import UsageError
from torchtune_ext.sampling.engine_args import (
    CPU_KV_CACHE_BYTES,
    default_max_num_seqs,
    engine_device_groups,
    resolve_transfer,
)
from torchtune_ext.sampling.types import CANARY_REQUESTS, EngineConfig
from torchtune_ext.setup.config_sections import RunSettings
from torchtune_ext.setup.machine_checks import ADAMW_BYTES, disk_need, format_bytes
from torchtune_ext.training.export import SHARD_BYTES
from torchtune_ext.training.publish import NEW_SEED_TOKENS

# PyTorch's allocator keeps free blocks that are too small for the next tensors, because rows
# differ in length. Frozen weights are allocated before them and in one piece.
FRAGMENTATION_SHARE = 0.05
# Allowances:
PROCESS_BYTES = GIB  # of each rank, engine process and engine client; CUDA maps the same amount again
CUDA_CONTEXT_BYTES = GIB // 2  # a CUDA context with its kernels, which no tensor accounts for
NCCL_BYTES = GIB // 2  # NCCL's channel buffers with several GPUs
CUDA_GRAPH_BYTES = GIB  # captured CUDA graphs, which vLLM measures at startup to reduce the KV cache
DEFAULT_STEP_TOKENS = 2048  # tokens of a vLLM step if `engine.max_num_batched_tokens` is null
# vLLM profiles sampling with all options before it sizes the KV cache: logits in float32
# (4 bytes), sorted logits (4), their indices as int64 (8), and probabilities (4).
SAMPLER_BYTES = 20
PACKED_BUFFER_BYTES = GIB  # vLLM's DEFAULT_PACKED_BUFFER_SIZE_BYTES

SHARED_ENGINE_ROW = "engine on the same GPU"
ASLEEP_ROW = "weights of sleeping engines"
CHECK_ROW = "float32 check of a weight sync, beyond the freed memory"
NAME_WIDTH, FIGURE_WIDTH = 58, 12  # column widths of the table, in characters


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources of a run. Several identical machines count as one with all their GPUs."""

    gpus: int  # 0: the run uses the CPU
    gpu_bytes: int  # memory of each GPU, as CUDA reports it
    host_bytes: int | None  # free main memory; None: unknown
    name: str  # for messages: "4 x 80 GB"
    is_local: bool  # True: this machine, so its disk and main memory are checked as well

    def __str__(self) -> str:
        size = self.gpu_bytes if self.gpus else self.host_bytes
        return self.name if size is None else f"{self.name} ({format_bytes(size)}{' each' if self.gpus else ''})"


@dataclass
class RunPlan:
    """The memory plan of a run on a machine.

    Raises:
        UsageError: the GPUs of `engine.devices` cannot be divided among the engines.
    """

    cfg: RunSettings  # settings of the recipe, with resolved engine settings
    sizes: ModelSizes  # sizes of the model
    machine: Machine  # the machine that the run is compared with
    trainers: int = 1  # number of training devices
    reference: bool = False  # whether the loss uses a reference policy
    publishes_full_weights: bool = True  # True: the engine receives full weights, not only adapters
    engine_loads_adapters: bool = False  # True: the engine holds adapters next to the base weights
    optimizer_bytes: float = ADAMW_BYTES  # bytes of optimizer state per trained value

    def __post_init__(self):
        machine, sizes, itemsize = self.machine, self.sizes, self.sizes.dtype.itemsize
        self.engine: Any = None if self.cfg.replay else self.cfg.engine  # None: the run has no engine (a replay)
        self._place_engines()
        self.published_bytes = sizes.engine_bytes if self.publishes_full_weights else itemsize * sizes.trained_params
        # Bytes of each sampling device, by content. Empty for a server with unknown GPUs.
        self.engine_rows: dict[str, int] = {}
        if self.engine_placement != "none" and (
            self.engine_placement != "server" or (machine.gpus and not machine.is_local)
        ):
            adapter_bytes = itemsize * sizes.trained_params if self.engine_loads_adapters else 0
            self.engine_rows = estimate_engine_bytes(sizes, self.engine, machine.gpu_bytes, adapter_bytes)
            self.cached_tokens = kv_cache_tokens(sizes, self.engine, self.engine_rows["KV cache"])
        # Bytes of each training GPU, by content: in an update, and while the engine is awake.
        self.awake_rows: dict[str, int] = {}
        self.device_rows = self._device_rows()
        self.host_rows = self._host_rows()
        self.update_bytes, self.awake_bytes = sum(self.device_rows.values()), sum(self.awake_rows.values())
        self.device_bytes = max(self.update_bytes, self.awake_bytes)
        self.engine_bytes = sum(self.engine_rows.values())
        self.host_bytes = sum(self.host_rows.values())
        # On a CPU, trainer and engines take main memory.
        if not machine.gpus:
            self.host_bytes += self.device_bytes + self.engines * self.engine_bytes
        self.disk = disk_need(self.cfg, sizes.total_params, sizes.trained_params, sizes.dtype, self.optimizer_bytes)
        self.shortages = self._shortages()
        self.fits = not self.shortages

    def _place_engines(self) -> None:
        machine, engine = self.machine, self.engine
        # "own": the engine has its own GPUs. "shared": trainer and engine share GPUs. "sleeps":
        # they share GPUs, and the engine sleeps during training. "server": the engine is a server.
        self.engine_placement, self.engines, gpus = "none", 0, 0
        if engine is not None:
            own = "shared" if engine.devices is None else "own"
            self.engine_placement = "server" if engine.address is not None else "sleeps" if engine.sleep else own
            # One replica per address, per share of `engine.devices`, or `engine.count`.
            self.engines = len(engine.addresses or engine_device_groups(engine)) or engine.count or 1
            gpus = self.engines * engine.tensor_parallel_size
        # One rank with adapters moves its frozen weights to main memory while the engine is awake.
        self.offloads = bool(
            self.engine_placement == "sleeps" and machine.gpus and self.trainers == 1 and self.sizes.has_frozen_params
        )
        # GPUs that only sample, and GPUs that engines share with the trainer.
        self.sampling_gpus = gpus if self.engine_placement in ("own", "server") else 0
        self.shared_gpus = gpus if self.engine_placement in ("shared", "sleeps") else 0
        # For a run on this machine, servers use GPUs that `machine.gpus` does not count.
        self.remote_servers = self.engine_placement == "server" and machine.is_local
        # GPUs that the run needs, without the GPUs of remote servers.
        self.gpus = max(self.trainers + (0 if self.remote_servers else self.sampling_gpus), self.shared_gpus)

    def with_trainers(self, ranks: int | None = None, visible: str | None = None) -> "RunPlan":
        """Return the plan with all available training devices.

        Args:
            ranks: the number of ranks that torchrun has started; None: without torchrun.
            visible: CUDA_VISIBLE_DEVICES of this process.

        Raises:
            UsageError: sampling leaves no GPU for training.
        """
        machine, engine = self.machine, self.engine
        sampling = 0 if self.remote_servers else self.sampling_gpus
        if ranks or not machine.gpus:
            return replace(self, trainers=ranks or 1)
        # Only one rank offloads its frozen weights, and `tune run` without torchrun starts one.
        if (one := replace(self, trainers=1)).offloads and one.fits:
            return one
        if machine.is_local and sampling:
            # Only GPUs that both trainer and engine see are unavailable for training.
            visible_gpus = visible.split(",") if visible else [str(i) for i in range(machine.gpus)]
            sampling = len(set(engine.device_names) & {name.strip() for name in visible_gpus})
        if sampling < machine.gpus:
            return replace(self, trainers=machine.gpus - sampling)
        raise UsageError(
            f"{machine.name}: sampling needs {sampling} GPU{'s' if sampling > 1 else ''} ({self.servers_text()}), which leaves "
            f"no GPU for training. Fix: plan for {sampling + 1} GPUs or more, or let engine and trainer share GPUs with "
            "engine.devices=null engine.sleep=true"
        )

    def _device_rows(self) -> dict[str, int]:
        """Return the bytes of each training GPU, by content; on a CPU, the bytes of all ranks."""
        cfg, ranks, recompute = self.cfg, self.trainers, self.cfg.activation_checkpointing
        shards, gpu_bytes = cfg.ranks.shard_within, self.machine.gpu_bytes
        rows = trainer_memory(
            self.sizes, cfg.row_tokens, ranks, recompute, self.optimizer_bytes, shards, gpu_bytes=gpu_bytes
        )
        if not self.machine.gpus:
            return {name: bytes_ * ranks for name, bytes_ in rows.items()}
        context = CUDA_CONTEXT_BYTES + (NCCL_BYTES if ranks > 1 else 0)
        fragments = int(FRAGMENTATION_SHARE * (sum(rows.values()) - rows[FROZEN_ROW]))
        rows["CUDA context, NCCL, fragmentation (allowance)"] = context + fragments
        # `resolve_transfer` resolves "auto" for this machine, which may have no GPU although the
        # planned machine has GPUs. On those, "auto" is NCCL, unless it is shared memory.
        by_nccl = self.engine_placement == "server" and self.engine.transfer in ("nccl", "auto")
        if by_nccl and resolve_transfer(self.engine) != "shm":
            # vLLM packs tensors until they exceed PACKED_BUFFER_BYTES. While one pack is being
            # sent, the tensors of the next pack are concatenated into a copy: three packs at most.
            pack = min(self.published_bytes, PACKED_BUFFER_BYTES + self.sizes.dtype.itemsize * self.sizes.largest_param)
            rows["weight sender, only on rank 0's GPU (allowance)"] = CUDA_CONTEXT_BYTES + NCCL_BYTES + 3 * pack
        if self.engine_placement == "shared":
            rows[SHARED_ENGINE_ROW] = sum(self.engine_rows.values())
        elif self.engine_placement == "sleeps":
            # While the engine is awake, the trainer holds only its weights and moments.
            resident = ["weights, float32 master", "optimizer state", "RoPE table, float32"]
            if not self.offloads:
                resident.append(FROZEN_ROW)
            held = int(sum(rows[name] * (1 + FRAGMENTATION_SHARE * (name != FROZEN_ROW)) for name in resident))
            check = float32_check_bytes(self.sizes, self.machine.gpu_bytes)
            self.awake_rows = {
                "engine": sum(self.engine_rows.values()),
                "weights and optimizer state": held,
                "CUDA context, NCCL (allowance)": context,
            }
            if self.offloads:
                # Offloaded weights return before the canary is checked, while the engine sleeps.
                free = sum(rows.values()) - held - rows[FROZEN_ROW] - context
                rows[CHECK_ROW] = max(0, check - free)
            else:
                self.awake_rows["float32 check of a weight sync"] = check
            rows["sleeping engine: CUDA context, graphs (allowance)"] = CUDA_CONTEXT_BYTES + CUDA_GRAPH_BYTES
        return rows

    def _host_rows(self) -> dict[str, int]:
        """Return the main memory of all processes in bytes, by content."""
        sizes, ranks, on_gpus = self.sizes, self.trainers, self.machine.gpus > 0
        # A process with a GPU counts twice, because CUDA maps as much memory as Python and PyTorch.
        processes = ranks * (1 + on_gpus)
        if self.engine_rows:
            processes += self.engines * (1 + self.engine.tensor_parallel_size * (1 + on_gpus))
        # Each rank keeps its shard of the reference and of its swapped-out weights, in float32.
        shards = min(self.cfg.ranks.shard_within or self.trainers, self.trainers)
        swapped = 8 * sizes.total_params * ranks // shards if self.reference and not sizes.has_frozen_params else 0
        # While a checkpoint file is written, its tensors and safetensors' copy are in memory.
        saved = 4 * sizes.trained_params if sizes.has_frozen_params else sizes.total_params * sizes.dtype.itemsize
        file = min(SHARD_BYTES, saved)
        kept = self.engines if on_gpus and self.engine_placement == "sleeps" and self.engine.sleep != 2 else 0
        # Weight files do not count: they are memory-mapped, and Linux drops their pages if needed.
        return {
            "processes of ranks and engine (allowance)": processes * PROCESS_BYTES,
            "published weights in shared memory": self.published_bytes if self.engine else 0,
            ASLEEP_ROW: kept * sizes.engine_bytes,
            "frozen weights while the engine is awake": sizes.frozen_bytes if self.offloads else 0,
            "reference and weights swapped out, float32": swapped,
            "largest tensor on each rank, while weights are read": ranks * sizes.largest_param * (2 if on_gpus else 4),
            "a checkpoint file while it is written": 2 * file,
        }

    def demands(self) -> dict[str, tuple[str, str, int, int | None]]:
        """Return the demands by kind: subject, resource, bytes, available bytes (None: unknown)."""
        machine, gpu, demands = self.machine, "of each GPU", {}
        if machine.gpus:
            subject = "an update takes" if self.awake_rows else "training takes"
            demands["training"] = (subject, gpu, self.update_bytes, machine.gpu_bytes)
            if self.awake_rows:
                demands["awake"] = ("sampling takes", gpu, self.awake_bytes, machine.gpu_bytes)
            elif self.engine_rows:
                subject = "each server takes" if self.engine_placement == "server" else "each replica takes"
                demands["engine"] = (subject, gpu, self.engine_bytes, machine.gpu_bytes)
        demands["host"] = ("the run takes", "of main memory", self.host_bytes, machine.host_bytes)
        free = self.disk.free if machine.is_local else None
        demands["disk"] = ("checkpoints take", "of disk", self.disk.total_bytes, free)
        return demands

    def _shortages(self) -> dict[str, str]:
        """Describe the shortages, by kind."""
        machine, engine, short = self.machine, self.engine, {}
        # On this machine an engine may see other GPUs than the trainer, which do not count here.
        needed = self.trainers + (0 if machine.is_local else self.sampling_gpus)
        if not (machine.is_local and self.engine and self.engine.devices is not None):
            needed = max(needed, self.shared_gpus)
        if 0 < machine.gpus < needed:
            short["gpus"] = f"it needs {self.gpus} GPUs: {self.roles_text()}"
        for kind, (subject, resource, bytes_, available) in self.demands().items():
            if available is not None and bytes_ > available:
                short[kind] = f"{subject} {format_bytes(bytes_)} {resource}, but {format_bytes(available)} are free"
        if self.engine_rows and self.cached_tokens < engine.max_model_len:
            # vLLM refuses to start if the KV cache cannot hold one request of maximum length.
            short["engine"] = (
                f"the KV cache of each replica would hold {self.cached_tokens:,} tokens, fewer than "
                f"engine.max_model_len={engine.max_model_len}"
            )
        return short

    def fixes(self, kind: str) -> list[str]:
        """Return the fixes for a kind of shortage that the config does not have yet, cheapest first."""
        # Another dry run shows the effect of a fix.
        cfg, on_gpus, frozen = self.cfg, self.machine.gpus > 0, self.sizes.has_frozen_params
        shared = on_gpus and self.engine_placement == "shared"
        longest = cfg.engine.max_model_len
        kv_keys = f"{'engine.gpu_memory_utilization or ' * on_gpus}engine.kv_cache_bytes"
        on_cpu = not on_gpus and bool(self.engine_rows) and self.engine_placement != "server"
        engine = {f"a lower {kv_keys}": shared or on_cpu}
        own = {"another GPU for the engine (engine.devices)": shared or bool(self.awake_rows)}
        trainer = {
            "activation_checkpointing=true": not cfg.activation_checkpointing,
            f"row_tokens={longest}, which is engine.max_model_len": cfg.row_tokens > longest,
            "engine.sleep=true": shared and not cfg.staleness,
        }
        # The engine's fix comes first if the engine takes the largest part of a shared GPU.
        leads = max(self.device_rows, key=self.device_rows.__getitem__) == SHARED_ENGINE_ROW
        adapters = {"adapters (docs/how_to/adapters.md)": not frozen}
        takes_nf4 = frozen and not self.sizes.largest_nf4 and "quantize_base" in cfg.model.argument_names()
        quantize = {"model.quantize_base=true": takes_nf4}
        trainer |= quantize
        memory = engine | trainer | own if leads else trainer | own | engine
        fixes = {
            "gpus": {"fewer ranks or engines, or more GPUs": True},
            "training": memory | {"more GPUs for training": True} | adapters,
            # A KV cache that is too small does not get smaller, nor larger if the GPU is full.
            "awake": {f"a lower {kv_keys}": "engine" not in self.shortages}
            | own
            | {"a higher engine.tensor_parallel_size": self.machine.gpus > 1}
            | {"one rank, because only one rank moves its frozen weights to main memory": frozen and self.trainers > 1}
            # Offloaded weights do not count while the engine is awake.
            | ({} if self.offloads else {"more GPUs for training": True} | adapters | quantize),
            "engine": {
                f"a higher {kv_keys}": "awake" not in self.shortages,
                "a lower engine.max_num_seqs or engine.max_num_batched_tokens": on_gpus,
                "a lower engine.max_model_len": not self.engine_rows or self.cached_tokens > 0,
                "a higher engine.tensor_parallel_size": self.machine.gpus > 1,
            },
            "host": ({} if on_gpus else memory)
            | {"engine.sleep=2": self.host_rows[ASLEEP_ROW] > 0}
            | {"another GPU for the engine instead of engine.sleep": self.offloads}
            | {"fewer ranks": self.trainers > 1}
            | adapters
            | {"more memory": True},
            "disk": {
                "checkpoints.save_optimizer=false": cfg.checkpoints.save_optimizer,
                "checkpoints.keep_last=1": cfg.checkpoints.keep_last > 1,
                "output_dir on a larger disk": True,
            },
        }
        return [fix for fix, missing in fixes[kind].items() if missing]

    def servers_text(self) -> str:
        """Return e.g. "2 servers, tensor_parallel_size=2"."""
        kind, size = "server" if self.engine_placement == "server" else "engine", self.engine.tensor_parallel_size
        return f"{self.engines} {kind}{'s' if self.engines > 1 else ''}, tensor_parallel_size={size}"

    def roles_text(self) -> str:
        """Return e.g. "4 train, 4 sample (4 engines, tensor_parallel_size=1)"."""
        trains = f"{self.trainers} train{'s' if self.trainers == 1 else ''}"
        if self.shared_gpus > self.trainers:
            return f"{trains}, {self.shared_gpus} sample"
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
    """Estimate the memory of one replica or server on each of its devices.

    Args:
        sizes: sizes of the model.
        config: settings of the engine.
        gpu_bytes: memory of each GPU; 0: the engine uses the CPU.
        adapter_bytes: bytes of adapters next to the base weights.

    Returns:
        Bytes by content.
    """
    gpus, size = config.tensor_parallel_size, 4 if config.dtype == "float32" else 2
    rows = {"weights": sizes.engine_bytes // gpus, "adapters": adapter_bytes}
    if not gpu_bytes:
        return rows | {"KV cache": config.kv_cache_bytes or CPU_KV_CACHE_BYTES}
    tokens = config.max_num_batched_tokens or DEFAULT_STEP_TOKENS
    # Each request samples one token of a step, so the number of tokens bounds the requests.
    sampled = min((config.max_num_seqs or default_max_num_seqs(gpu_bytes)) + CANARY_REQUESTS, tokens)
    # The peak of a layer holds gate, up, their product, and two residuals.
    activations = tokens * size * (3 * sizes.mlp // gpus + 2 * sizes.width)
    rows["activations of a step and sampling"] = SAMPLER_BYTES * sampled * sizes.vocab + activations
    graphs = 0 if config.extra_args.get("enforce_eager") else CUDA_GRAPH_BYTES
    rows["CUDA context, NCCL, graphs (allowance)"] = CUDA_CONTEXT_BYTES + (NCCL_BYTES if gpus > 1 else 0) + graphs
    # vLLM uses the rest of its share of the GPU for the KV cache.
    left = int(config.gpu_memory_utilization * gpu_bytes) - sum(rows.values())
    return rows | {"KV cache": config.kv_cache_bytes or max(0, left)}


def float32_check_bytes(sizes: ModelSizes, gpu_bytes: int) -> int:
    """Estimate the memory of the canary's check in float32: a layer, the output table, and logits."""
    weights = sizes.vocab * sizes.width + sizes.layer_params
    return 4 * weights + 8 * min(chunk_elements(gpu_bytes), CANARY_REQUESTS * NEW_SEED_TOKENS * sizes.vocab)


def kv_cache_tokens(sizes: ModelSizes, config: EngineConfig, kv_bytes: int) -> int:
    """Return the tokens that the KV cache of one replica holds, with `kv_bytes` per device."""
    size = 4 if config.dtype == "float32" else 2
    if str(config.extra_args.get("kv_cache_dtype", "")).startswith("fp8"):
        size = 1
    # With fewer key/value heads than GPUs, several GPUs hold the same head.
    share = -(-sizes.kv_heads // config.tensor_parallel_size) / sizes.kv_heads
    return int(kv_bytes / (sizes.kv_values_per_token * share * size))


def plan_table(plan: RunPlan, name: str) -> str:
    """Format the table without the verdict, at most 120 columns. `name` is the model name."""
    sizes, machine, disk, engine = plan.sizes, plan.machine, plan.disk, plan.engine
    total = sizes.total_params
    count = f"{total / 1e9:.3f} B" if total >= 1e8 else f"{total / 1e6:.3f} M"
    trained = f"{sizes.trained_params / total:.2%} of them trained" if sizes.has_frozen_params else "all trained"
    lines = [f"{name}: {count} parameters, {trained}"]
    if machine.gpus:
        lines.append(f"GPUs: {plan.roles_text()}")

    def add(title: str, rows: Mapping[str, int]) -> None:
        # Omit rows of zero bytes.
        figures = {title: sum(rows.values())} | {f"  {name}": bytes_ for name, bytes_ in rows.items() if bytes_}
        lines.extend(f"{name:<{NAME_WIDTH}}{format_bytes(bytes_):>{FIGURE_WIDTH}}" for name, bytes_ in figures.items())

    during = ", during an update" if plan.awake_rows else ""
    add(f"each GPU that trains{during}" if machine.gpus else "main memory for the trainer", plan.device_rows)
    if plan.awake_rows:
        add("the same GPU while the engine is awake", plan.awake_rows)
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
        lines.append(f"the engine is the server at {engine.address}; its memory is not in this table")
    add("main memory for processes and buffers", plan.host_rows)
    add(f"disk for one checkpoint in {plan.cfg.output_dir}", disk.rows)
    free = f"; free there: {format_bytes(disk.free)}" if machine.is_local else ""
    lines.append(
        f"  at most {disk.max_checkpoints} at once, including the one being written: {format_bytes(disk.total_bytes)}{free}"
    )
    return "\n".join(lines)


def verdict(plan: RunPlan) -> str:
    """Format whether the plan fits, with its demands, or its shortages and their fixes."""
    where = f"{'on' if plan.machine.gpus or not plan.machine.is_local else 'into'} {plan.machine}"
    if plan.fits:
        lines = [f"fits {where}:"]
        for subject, resource, bytes_, available in plan.demands().values():
            left = "" if available is None else f", {format_bytes(available - bytes_)} stay free"
            lines.append(f"  {subject} {format_bytes(bytes_)} {resource}{left}")
        if plan.trainers > 1:
            lines.append(f"  start it with --nproc_per_node {plan.trainers}")
        return "\n".join(lines)
    lines = [f"does NOT fit {where}:"]
    for kind, missing in plan.shortages.items():
        lines += [f"  {missing}; settings that need less, cheapest first:", *(f"    {fix}" for fix in plan.fixes(kind))]
    return "\n".join(lines)
