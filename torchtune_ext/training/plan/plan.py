"""What a run takes of a machine, and what of that is not there."""

from dataclasses import dataclass
from functools import cached_property

from torchtune_ext.policy.memory import GIB, Sizes, trainer_rows
from torchtune_ext.run.errors import Mistake
from torchtune_ext.sampling.records import CANARY_REQUESTS, EngineConfig
from torchtune_ext.sampling.server_command import CPU_KV_CACHE, device_shares, transfer_of
from torchtune_ext.training.export import SHARD_BYTES
from torchtune_ext.training.plan.machine import Machine
from torchtune_ext.training.start import DiskNeed, disk_need, missing_device
from torchtune_ext.training.state import CheckpointConfig

# PyTorch's allocator keeps blocks that are free but too small for what comes next, since rows differ in length.
FRAGMENTATION = 0.05
# Allowance for a rank, a process of the engine, and its client: Python, PyTorch, libraries. CUDA maps as much again.
PROCESS = GIB
CONTEXT = GIB // 2  # allowance for a CUDA context with its kernels: it is not in any tensor
NCCL = GIB // 2  # allowance for the buffers of NCCL's channels, where several GPUs talk
GRAPHS = GIB  # allowance for captured CUDA graphs; vLLM measures them at its start and takes them out of the KV cache
STEP_TOKENS = 2048  # tokens of a vLLM step where `engine.max_num_batched_tokens` is null
REQUESTS_GPU, REQUESTS_CPU = 1024, 256  # requests in a step where `engine.max_num_seqs` is null
# vLLM tries the sampler with all its options before it sizes the KV cache: logits in float32 (4 bytes), sorted (4) with their
# places as int64 (8), and probabilities (4).
SAMPLER_BYTES = 20
PACKED = GIB  # vLLM's DEFAULT_PACKED_BUFFER_SIZE_BYTES, and DEFAULT_PACKED_NUM_BUFFERS is 2


@dataclass(frozen=True)
class Settings:
    """The settings of a run that decide what it takes.

    Args:
        sizes: of the model.
        engine: as the run starts it; None: it replays, without one.
        checkpoints: how often they are written, and how many are kept.
        output_dir: folder of the run.
        resumes: whether the run goes on with what is in it.
        max_model_len: tokens of a prompt and a completion at most.
        max_steps: steps of the run.
        row_tokens: tokens of a packed row.
        max_tokens: tokens of a completion at most.
        prompt_tokens: tokens of the longest of some prompts; None: not known.
        activation_checkpointing: whether layers are computed again in the backward.
        optimizer_bytes: what the optimizer keeps for one trained value.
        evaluated: whether there are held-out problems.
        reference: whether the loss asks a reference policy.
        publishes_all: whether whole weights ever go to the engine, and not adapters alone.
        save_merged: whether checkpoints of adapters hold the merged model, too.
        shard_within: training devices that share the states, each group of so many holding all of them; None: all share them.
    """

    sizes: Sizes
    engine: EngineConfig | None
    checkpoints: CheckpointConfig
    output_dir: str
    max_model_len: int
    max_steps: int
    row_tokens: int
    max_tokens: int
    prompt_tokens: int | None = None
    activation_checkpointing: bool = False
    optimizer_bytes: float = 8.0
    evaluated: bool = False
    reference: bool = False
    publishes_all: bool = True
    save_merged: bool = False
    resumes: bool = False
    shard_within: int | None = None

    @property
    def engine_place(self) -> str:
        """Says where the engine is: on GPUs of its "own", "shared" with the trainer, there and "sleeps" while it trains, a
        "server" elsewhere, or "none"."""
        if self.engine is None:
            return "none"
        if self.engine.address is not None:
            return "server"
        if self.engine.sleep:
            return "sleeps"
        return "shared" if self.engine.devices is None else "own"

    @property
    def engines(self) -> int:
        """How many engines, or servers, sample."""
        return 0 if self.engine is None else engine_count(self.engine)

    @property
    def published_bytes(self) -> int:
        """Bytes of what is published to an engine."""
        sizes = self.sizes
        return sizes.engine_bytes if self.publishes_all else sizes.dtype.itemsize * sizes.trained

    @property
    def engine_gpus(self) -> int:
        """GPUs that only engines use, or servers."""
        return self.engines * self.engine.tensor_parallel_size if self.engine_place in ("own", "server") else 0


# How many engines there are, what each takes of each of its devices, and how much room that leaves for keys and values.
@dataclass(frozen=True, slots=True)
class EngineNeed:
    """What the engine takes of each device.

    Args:
        rows: bytes by name, without the KV cache.
        kv_bytes: of the KV cache; negative where the rest alone is too much.
        tokens: how many tokens the KV cache of one engine holds, on all its devices together.
        max_model_len: tokens of the longest request.
        requests: in one step at most, canary aside.
    """

    rows: dict[str, int]
    kv_bytes: int
    tokens: int
    max_model_len: int
    requests: int

    @property
    def total(self) -> int:
        """Bytes on each device."""
        return sum(self.rows.values()) + max(self.kv_bytes, 0)

    @property
    def fits(self) -> bool:
        """Says whether the KV cache holds a request of the greatest length, without which vLLM does not start."""
        return self.tokens >= self.max_model_len

    def in_flight(self, tokens: int) -> int:
        """Returns how many requests of so many tokens the KV cache holds at once, shared prompts not counted."""
        return min(self.tokens // tokens, self.requests)


@dataclass(frozen=True)
class Plan:
    """A run on a machine, with so many training devices."""

    settings: Settings
    machine: Machine
    trainers: int

    def device(self, trainers: int) -> dict[str, int]:
        """Returns the bytes of each training GPU by name, allowances among them, for another number of them. Only
        rank 0's has a sender. On a CPU these are the bytes of all ranks of a node together."""
        made = self.settings
        rows = trainer_rows(
            made.sizes,
            made.row_tokens,
            trainers,
            made.activation_checkpointing,
            made.optimizer_bytes,
            made.shard_within,
        )
        if not self.machine.gpus:
            return {name: bytes_ * self.on_node(trainers) for name, bytes_ in rows.items()}
        rows |= {
            f"fragmentation, {FRAGMENTATION:.0%} (allowance)": int(FRAGMENTATION * sum(rows.values())),
            "CUDA context (allowance)": CONTEXT,
            "NCCL (allowance)": NCCL if trainers > 1 else 0,
            "sender of weights, on rank 0's GPU alone (allowance)": self._sender,
        }
        return rows | {"engine on the same GPU, beyond what is free then": self._beside(rows, trainers)}

    def on_node(self, trainers: int) -> int:
        """Returns how many of so many training devices are on one node."""
        return -(-trainers // self.machine.nodes)

    def total(self, trainers: int | None = None) -> int:
        """Returns the bytes of each training GPU, of rank 0's if they differ, or of the ranks of a node's CPU together."""
        return sum(self.device(trainers or self.trainers).values())

    @cached_property
    def engine(self) -> EngineNeed | None:
        """What each engine takes of each of its devices; None: there is none, or it is a server on GPUs of unknown size."""
        made, machine = self.settings, self.machine
        if made.engine_place == "none" or (made.engine_place == "server" and (machine.here or not machine.gpus)):
            return None
        adapters = 0 if made.publishes_all else made.sizes.dtype.itemsize * made.sizes.trained
        return engine_need(made.sizes, made.engine, self.engine_gpu_bytes, adapters)

    @property
    def engine_gpu_bytes(self) -> int:
        """Memory of each GPU that samples, in bytes; 0: it samples on the CPU."""
        return (self.machine.serving or self.machine).gpu_bytes

    @property
    def serves_elsewhere(self) -> bool:
        """Says whether servers sample on GPUs that `machine.gpus` does not count. A machine that is asked for has them, too,
        unless it names others for them."""
        return serves_elsewhere(self.machine, self.settings)

    @cached_property
    def host(self) -> dict[str, int]:
        """Bytes of main memory by name, of all processes of the machine, or of its first node."""
        made, sizes, gpus = self.settings, self.settings.sizes, self.machine.gpus
        ranks = self.on_node(self.trainers)
        shards = min(made.shard_within or self.trainers, self.trainers)
        processes = ranks * (2 if gpus else 1)
        if self.engine is not None and not self.serves_elsewhere:
            engines = on_one_node(self.machine, made)
            processes += engines * (1 + made.engine.tensor_parallel_size * (2 if gpus else 1))
        # Each rank swaps its part of its copy of the weights.
        swaps = made.reference and not sizes.frozen
        # Files of weights are mapped, not read as a whole: what Linux keeps of them it gives back when memory is short.
        return {
            "processes of ranks and engine (allowance)": processes * PROCESS,
            "published weights in shared memory": made.published_bytes * (made.engine_place != "none"),
            "weights of the engine while it sleeps": sizes.engine_bytes * (made.engine_place == "sleeps" and gpus > 0),
            "reference and weights swapped out, float32": 8 * sizes.total * ranks // shards * swaps,
            "largest tensor on each rank, while weights are read": ranks * sizes.largest * (2 if gpus else 4),
            "a file of a checkpoint while it is put together": file_in_memory(sizes),
        }

    @property
    def main_memory(self) -> int:
        """Bytes of main memory of the first node: where there are no GPUs, trainer and engine are in it, too."""
        host = sum(self.host.values())
        if self.machine.gpus:
            return host
        return host + self.total() + (self.settings.engines * self.engine.total if self.engine else 0)

    @cached_property
    def disk(self) -> DiskNeed:
        """What the checkpoints take."""
        made = self.settings
        return disk_need(
            made.sizes.total,
            made.sizes.trained,
            made.sizes.dtype,
            made.checkpoints,
            made.output_dir,
            made.max_steps,
            made.evaluated,
            made.optimizer_bytes,
            made.save_merged,
            made.resumes,
        )

    @property
    def gpus(self) -> int:
        """How many GPUs the run needs, without those of servers elsewhere."""
        place = self.settings.engine_place
        beside = self.settings.engine.tensor_parallel_size if place in ("sleeps", "shared") else 0
        return max(self.trainers + (0 if self.serves_elsewhere else self.settings.engine_gpus), beside)

    @property
    def gpus_fit(self) -> bool:
        """Says whether the machine has as many GPUs on each node."""
        machine, made = self.machine, self.settings
        if not machine.gpus:
            return True
        ranks = self.on_node(self.trainers)
        if machine.here:
            # Of the GPUs here, an engine on GPUs of its own may see others than the trainer.
            return (ranks if made.engine_place == "own" else -(-self.gpus // machine.nodes)) <= machine.gpus
        return (
            self.gpus <= machine.all_gpus and ranks + sampling_gpus(machine, made) <= machine.gpus and self.servers_fit
        )

    @property
    def servers_fit(self) -> bool:
        """Says whether the GPUs that serve elsewhere, as far as they are known, are enough for all servers."""
        serving, made = self.machine.serving, self.settings
        if serving is None or made.engine_place != "server":
            return True
        return made.engines <= serving.nodes * (serving.gpus // made.engine.tensor_parallel_size)

    @property
    def training_fits(self) -> bool:
        """Says whether the training GPUs are large enough."""
        return not self.machine.gpus or self.total() <= self.machine.gpu_bytes

    @property
    def engine_fits(self) -> bool:
        """Says whether the engine has room, for itself and for the longest request."""
        need = self.engine
        return need is None or (need.fits and (not self.machine.gpus or need.total <= self.engine_gpu_bytes))

    @property
    def host_fits(self) -> bool:
        """Says whether there is enough main memory, as far as its size is known."""
        return self.machine.host_bytes is None or self.main_memory <= self.machine.host_bytes

    @property
    def disk_fits(self) -> bool:
        """Says whether the checkpoints have room. The disk of another machine is not known."""
        return not self.machine.here or self.disk.total <= self.disk.free

    @property
    def fits(self) -> bool:
        """Says whether the run has what it needs."""
        return self.gpus_fit and self.training_fits and self.engine_fits and self.host_fits and self.disk_fits

    @property
    def _sender(self) -> int:
        """Bytes of the process that sends weights to servers, where it does so from a GPU."""
        made = self.settings
        if made.engine is None or not sends_from_gpu(made.engine):
            return 0
        return sender_bytes(made.published_bytes, made.sizes.dtype.itemsize * made.sizes.largest)

    def _beside(self, rows: dict[str, int], trainers: int) -> int:
        """Returns by how much an engine on the same GPU raises the peak of the trainer, whose rows are given."""
        place, need = self.settings.engine_place, self.engine
        if need is None or place not in ("shared", "sleeps"):
            return 0
        if place == "shared":
            return need.total
        # The two peaks are not at the same time. While the engine is awake, the trainer holds its weights and moments alone; an
        # engine that sleeps keeps its context and its graphs.
        kept = ("frozen weights, as they are held", "weights, float32 master", "state of the optimizer")
        resting = int((1 + FRAGMENTATION) * sum(rows[name] for name in kept)) + CONTEXT
        return max(need.total - (sum(rows.values()) - resting), CONTEXT + GRAPHS)


def serves_elsewhere(machine: Machine, settings: Settings) -> bool:
    """Says whether servers sample on GPUs that `machine.gpus` does not count."""
    return settings.engine_place == "server" and (machine.here or machine.serving is not None)


def on_one_node(machine: Machine, settings: Settings) -> int:
    """Returns how many engines are on the node that has most of them. Those of our own are all on the first node; servers are
    spread over the nodes."""
    return -(-settings.engines // machine.nodes) if settings.engine_place == "server" else settings.engines


def sampling_gpus(machine: Machine, settings: Settings) -> int:
    """Returns how many GPUs of the node with most engines only sample."""
    if settings.engine_place not in ("own", "server") or serves_elsewhere(machine, settings):
        return 0
    return on_one_node(machine, settings) * settings.engine.tensor_parallel_size


def trainers_of(machine: Machine, settings: Settings, world_size: int | None = None, visible: str | None = None) -> int:
    """Returns how many devices train: as many on each node, since the same command starts them.

    Args:
        world_size: the ranks that torchrun has started; None: it has not.
        visible: CUDA_VISIBLE_DEVICES of this process.

    Raises:
        ValueError: the engine leaves no GPU to train, or the GPUs that serve have no server.
    """
    if machine.serving is not None and settings.engine_place != "server":
        raise Mistake(
            f"{machine.name}: GPUs that serve elsewhere need engine.address, the addresses of the servers on them; it is null"
        )
    return world_size or (_free(machine, settings, visible) if machine.gpus else 1)


def _free(machine: Machine, settings: Settings, visible: str | None) -> int:
    """Returns how many GPUs are left to train."""
    taken, each = sampling_gpus(machine, settings), " of each node" if machine.nodes > 1 else ""
    if machine.here and taken:
        # The trainer may see its own GPUs alone, and the engine others.
        mine = visible.split(",") if visible else [str(i) for i in range(machine.gpus)]
        taken = len({name.strip() for name in settings.engine.devices.split(",")} & {name.strip() for name in mine})
    if taken < machine.gpus:
        return machine.nodes * (machine.gpus - taken)
    if settings.engine_place == "server":
        raise Mistake(
            f"{machine.name}: the servers (engine.address={settings.engine.address}) take {taken} GPUs{each}; none is left "
            "to train; name GPUs elsewhere for them, as in 8x80+4x80"
        )
    raise Mistake(
        f"{machine.name}: the engine has {taken} of its own (engine.devices={settings.engine.devices}); none is left to "
        f"train; ask for {taken + 1} or more, or let both share one by engine.devices=null engine.sleep=true"
    )


def missing_devices(machine: Machine, settings: Settings) -> list[str]:
    """Returns what is wrong with the numbers of the engine's GPUs on a machine that is asked for; here the start looks."""
    if settings.engine_place != "own" or machine.here or not machine.gpus:
        return []
    name = f"each node of {machine.name}" if machine.nodes > 1 else machine.name
    problem = missing_device(settings.engine, machine.gpus, name)
    return [problem] if problem else []


def file_in_memory(sizes: Sizes) -> int:
    """Returns the bytes of main memory in which a file of a checkpoint is put together: the tensors, and safetensors' copy of
    them."""
    whole = sizes.trained * 4 if sizes.frozen else sizes.total * sizes.dtype.itemsize
    return 2 * min(SHARD_BYTES, whole)


def engine_count(config: EngineConfig) -> int:
    """Returns how many engines sample: `engine.devices`, divided among engines of `engine.tensor_parallel_size` GPUs, one for
    each address of a server, or, on a CPU, `engine.count`.

    Raises:
        ValueError: the GPUs cannot be divided so.
    """
    if config.addresses:
        return len(config.addresses)
    return len(device_shares(config)) or config.count or 1


def engine_need(sizes: Sizes, config: EngineConfig, gpu_bytes: int, adapter_bytes: int = 0) -> EngineNeed:
    """Estimates what one engine takes, of our own or a server that `torchtune-ext serve` starts with the same settings.

    Args:
        gpu_bytes: memory of each GPU; 0: the engine computes on the CPU.
        adapter_bytes: of adapters that are published alone.
    """
    gpus = config.tensor_parallel_size
    size = 4 if config.dtype == "float32" else 2
    # Heads of keys and values that do not suffice for all GPUs are held twice.
    share = max(1, -(-sizes.kv_heads // gpus)) / sizes.kv_heads
    cached = 1 if str(config.extra_args.get("kv_cache_dtype", "")).startswith("fp8") else size
    token_bytes = sizes.keys * share * cached
    requests = config.max_num_seqs or (REQUESTS_GPU if gpu_bytes else REQUESTS_CPU)
    rows = {"weights": sizes.engine_bytes // gpus, "adapters": adapter_bytes}
    if not gpu_bytes:
        kv = config.kv_cache_bytes or CPU_KV_CACHE
        return EngineNeed(rows, kv, int(kv / token_bytes), config.max_model_len, requests)
    tokens = config.max_num_batched_tokens or STEP_TOKENS
    sampled = min(requests + CANARY_REQUESTS, tokens)
    # The widest moment of a layer holds gate, up and their product, and two residuals.
    rows |= {
        "activations of a step and its sampler": SAMPLER_BYTES * sampled * sizes.vocab
        + tokens * size * (3 * sizes.mlp // gpus + 2 * sizes.width),
        "CUDA context (allowance)": CONTEXT,
        "NCCL (allowance)": NCCL if gpus > 1 else 0,
        "CUDA graphs (allowance)": 0 if config.extra_args.get("enforce_eager") else GRAPHS,
    }
    kv = config.kv_cache_bytes or int(config.gpu_memory_utilization * gpu_bytes) - sum(rows.values())
    return EngineNeed(rows, kv, max(0, int(kv / token_bytes)), config.max_model_len, requests)


# What the sender of weights takes of a GPU. It is a process beside rank 0, on the first GPU that rank 0 sees.
def sends_from_gpu(config: EngineConfig) -> bool:
    """Says whether a trainer on GPUs sends weights to servers by NCCL; gloo and shared memory take nothing of a GPU."""
    if config.address is None:
        return False
    # "auto" is gloo where no GPU is, as here perhaps, but not on the machine of the plan.
    return config.transfer == "nccl" or (config.transfer == "auto" and transfer_of(config) != "shm")


def sender_bytes(published: int, largest: int) -> int:
    """Returns the bytes of the sender: a CUDA context, the buffers of NCCL, and what vLLM has in its hands at once.

    vLLM packs tensors until they have more than PACKED bytes. While one pack is on its way, the tensors of the next are put
    together into a copy. Weights are sent between two steps, but also while the trainer computes, to a server that comes back.

    Args:
        published: bytes of all weights that are sent.
        largest: bytes of the largest tensor.
    """
    pack = min(published, PACKED + largest)
    return CONTEXT + NCCL + min(3 * pack, published + pack)
