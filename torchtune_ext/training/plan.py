"""The plan of a run: what it takes of a machine's GPUs, main memory and disk, whether that is there, and what to change if not.

`dry_run=True` of a recipe prints it. What is taken comes from shapes and settings. Where no shape says it (a CUDA context, what
NCCL and the allocator keep), an allowance stands, and the table calls it so.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torchtune_ext.policy.memory import GIB, Sizes, trainer_rows
from torchtune_ext.run.errors import Mistake
from torchtune_ext.sampling.records import CANARY_REQUESTS, EngineConfig
from torchtune_ext.sampling.server_command import CPU_KV_CACHE, device_shares, transfer_of
from torchtune_ext.training.export import SHARD_BYTES
from torchtune_ext.training.start import DiskNeed, disk_need

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

NAMES, FIGURE = 56, 9  # characters of a row's name and of a figure
MOST_GPUS = 128  # more are not tried
UTILIZATIONS = [share / 100 for share in range(90, 5, -5)]  # of gpu_memory_utilization
SHOWN = 3  # changes that a verdict names


@dataclass(frozen=True, slots=True)
class Machine:
    """What a run may take: one machine, or several that are alike."""

    gpus: int  # how many GPUs each node has; 0: the run computes on the CPU
    gpu_bytes: int  # memory of each of them, as CUDA reports it
    host_bytes: int | None  # main memory of a node that is free; None: not known
    name: str  # how the user calls it, "4 x 80 GB" for instance
    here: bool  # whether it is this machine, so that its disk and main memory count, too
    nodes: int = 1  # how many there are
    serving: "Machine | None" = None  # GPUs elsewhere for vLLM's servers; None: what samples is on `gpus`, too

    def __str__(self) -> str:
        if self.gpus:
            return f"{self.name} ({self.gpu_bytes / GIB:.1f} GiB each)"
        return self.name if self.host_bytes is None else f"{self.name} ({self.host_bytes / GIB:.1f} GiB)"


@dataclass(frozen=True, slots=True)
class EngineNeed:
    """What the engine takes of each device."""

    rows: dict[str, int]  # bytes by name
    tokens: int  # how many tokens the KV cache of one engine holds, on all its devices together

    @property
    def total(self) -> int:
        """Bytes on each device."""
        return sum(self.rows.values())


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
    rows = {"weights": sizes.engine_bytes // gpus, "adapters": adapter_bytes}
    name, kv = "KV cache (engine.kv_cache_bytes)", config.kv_cache_bytes or CPU_KV_CACHE
    if gpu_bytes:
        tokens = config.max_num_batched_tokens or STEP_TOKENS
        sampled = min((config.max_num_seqs or REQUESTS_GPU) + CANARY_REQUESTS, tokens)
        # The widest moment of a layer holds gate, up and their product, and two residuals.
        rows |= {
            "activations of a step and its sampler": SAMPLER_BYTES * sampled * sizes.vocab
            + tokens * size * (3 * sizes.mlp // gpus + 2 * sizes.width),
            "CUDA context (allowance)": CONTEXT,
            "NCCL (allowance)": NCCL if gpus > 1 else 0,
            "CUDA graphs (allowance)": 0 if config.extra_args.get("enforce_eager") else GRAPHS,
        }
        if config.kv_cache_bytes is None:
            name = f"KV cache (what gpu_memory_utilization={config.gpu_memory_utilization:g} leaves)"
            kv = max(0, int(config.gpu_memory_utilization * gpu_bytes) - sum(rows.values()))
    return EngineNeed(rows | {name: kv}, int(kv / (sizes.keys * share * cached)))


@dataclass(frozen=True)
class Plan:
    """A run on a machine."""

    cfg: Any  # settings of the recipe
    sizes: Sizes  # of the model
    engine: EngineConfig | None  # as the run starts it; None: it replays, without one
    machine: Machine  # what the run is compared with
    trainers: int = 1  # devices that train
    optimizer_bytes: float = 8.0  # what the optimizer keeps for one trained value
    reference: bool = False  # whether the loss asks a reference policy
    publishes_all: bool = True  # whether whole weights ever go to the engine, and not only adapters
    prompt_tokens: int | None = None  # tokens of the longest of some prompts; None: not known

    # Who computes where. Engines of our own are all on the first node; ranks and servers are spread over the nodes.
    @property
    def place(self) -> str:
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
        """How many engines, or servers, sample: one for each address, or each share of `engine.devices`, or as counted.

        Raises:
            ValueError: the GPUs cannot be divided so.
        """
        if self.engine is None:
            return 0
        return len(self.engine.addresses or device_shares(self.engine)) or self.engine.count or 1

    @property
    def sampling_gpus(self) -> int:
        """GPUs that only engines use, or servers."""
        return self.engines * self.engine.tensor_parallel_size if self.place in ("own", "server") else 0

    @property
    def serves_elsewhere(self) -> bool:
        """Says whether servers sample on GPUs that `machine.gpus` does not count. A machine that is asked for has them, too,
        unless it names others for them."""
        return self.place == "server" and (self.machine.here or self.machine.serving is not None)

    @property
    def first_engines(self) -> int:
        """How many engines are on the first node, which has most of them."""
        return self.on_node(self.engines) if self.place == "server" else self.engines

    @property
    def first_sampling_gpus(self) -> int:
        """GPUs of the first node that only sample."""
        if self.place not in ("own", "server") or self.serves_elsewhere:
            return 0
        return self.first_engines * self.engine.tensor_parallel_size

    @property
    def gpus(self) -> int:
        """How many GPUs the run needs, without those of servers elsewhere."""
        beside = self.engine.tensor_parallel_size if self.place in ("sleeps", "shared") else 0
        return max(self.trainers + (0 if self.serves_elsewhere else self.sampling_gpus), beside)

    def on_node(self, devices: int) -> int:
        """Returns how many of so many devices are on the first node."""
        return -(-devices // self.machine.nodes)

    def with_trainers(self, ranks: int | None = None, visible: str | None = None) -> "Plan":
        """Returns the plan with as many devices that train as there are: as many on each node, since one command starts them.

        Args:
            ranks: those that torchrun has started; None: it has not.
            visible: CUDA_VISIBLE_DEVICES of this process.

        Raises:
            ValueError: the engine leaves no GPU to train, or the GPUs that serve have no server.
        """
        machine, engine, sampling = self.machine, self.engine, self.first_sampling_gpus
        if machine.serving is not None and self.place != "server":
            raise Mistake(
                f"{machine.name}: GPUs that serve elsewhere need engine.address, the addresses of the servers on them; it is "
                "null"
            )
        if ranks or not machine.gpus:
            return replace(self, trainers=ranks or 1)
        if machine.here and sampling:
            # The trainer may see its own GPUs alone, and the engine others.
            mine = visible.split(",") if visible else [str(i) for i in range(machine.gpus)]
            sampling = len(set(engine.device_names) & {name.strip() for name in mine})
        if sampling < machine.gpus:
            return replace(self, trainers=machine.nodes * (machine.gpus - sampling))
        if self.place == "server":
            each = " of each node" if machine.nodes > 1 else ""
            raise Mistake(
                f"{machine.name}: the servers (engine.address={engine.address}) take {sampling} GPUs{each}; none is left "
                "to train; name GPUs elsewhere for them, as in 8x80+4x80"
            )
        raise Mistake(
            f"{machine.name}: the engine has {sampling} of its own (engine.devices={engine.devices}); none is left to "
            f"train; ask for {sampling + 1} or more, or let both share one by engine.devices=null engine.sleep=true"
        )

    # What each part takes, in bytes by name.
    @cached_property
    def device(self) -> dict[str, int]:
        """Bytes of each training GPU, allowances among them. Only rank 0's has a sender. On a CPU these are the bytes of all
        ranks of a node together."""
        cfg = self.cfg
        rows = trainer_rows(
            self.sizes,
            cfg.row_tokens,
            self.trainers,
            cfg.activation_checkpointing,
            self.optimizer_bytes,
            cfg.ranks.shard_within,
        )
        if not self.machine.gpus:
            return {name: bytes_ * self.on_node(self.trainers) for name, bytes_ in rows.items()}
        rows |= {
            f"fragmentation, {FRAGMENTATION:.0%} (allowance)": int(FRAGMENTATION * sum(rows.values())),
            "CUDA context (allowance)": CONTEXT,
            "NCCL (allowance)": NCCL if self.trainers > 1 else 0,
            "sender of weights, on rank 0's GPU alone (allowance)": self._sender,
        }
        return rows | {"engine on the same GPU, beyond what is free then": self._beside(rows)}

    @property
    def total(self) -> int:
        """Bytes of each training GPU, of rank 0's if they differ, or of the ranks of a node's CPU together."""
        return sum(self.device.values())

    @property
    def engine_gpu_bytes(self) -> int:
        """Memory of each GPU that samples, in bytes; 0: it samples on the CPU."""
        return (self.machine.serving or self.machine).gpu_bytes

    @cached_property
    def need(self) -> EngineNeed | None:
        """What each engine takes of each of its devices; None: there is none, or it is a server on GPUs of unknown size."""
        machine = self.machine
        if self.place == "none" or (self.place == "server" and (machine.here or not machine.gpus)):
            return None
        adapters = 0 if self.publishes_all else self.published_bytes
        return engine_need(self.sizes, self.engine, self.engine_gpu_bytes, adapters)

    @property
    def published_bytes(self) -> int:
        """Bytes of what is published to an engine."""
        return self.sizes.engine_bytes if self.publishes_all else self.sizes.dtype.itemsize * self.sizes.trained

    @cached_property
    def host(self) -> dict[str, int]:
        """Bytes of main memory by name, of all processes of the machine, or of its first node."""
        sizes, gpus, ranks = self.sizes, self.machine.gpus, self.on_node(self.trainers)
        shards = min(self.cfg.ranks.shard_within or self.trainers, self.trainers)
        processes = ranks * (2 if gpus else 1)
        if self.need is not None and not self.serves_elsewhere:
            processes += self.first_engines * (1 + self.engine.tensor_parallel_size * (2 if gpus else 1))
        # Each rank swaps its part of its copy of the weights.
        swaps = self.reference and not sizes.frozen
        # A file of a checkpoint is its tensors, and safetensors' copy of them.
        file = min(SHARD_BYTES, sizes.trained * 4 if sizes.frozen else sizes.total * sizes.dtype.itemsize)
        # Files of weights are mapped, not read as a whole: what Linux keeps of them it gives back when memory is short.
        return {
            "processes of ranks and engine (allowance)": processes * PROCESS,
            "published weights in shared memory": self.published_bytes * (self.place != "none"),
            "weights of the engine while it sleeps": sizes.engine_bytes * (self.place == "sleeps" and gpus > 0),
            "reference and weights swapped out, float32": 8 * sizes.total * ranks // shards * swaps,
            "largest tensor on each rank, while weights are read": ranks * sizes.largest * (2 if gpus else 4),
            "a file of a checkpoint while it is put together": 2 * file,
        }

    @property
    def main_memory(self) -> int:
        """Bytes of main memory of the first node: where there are no GPUs, trainer and engine are in it, too."""
        host = sum(self.host.values())
        if self.machine.gpus:
            return host
        return host + self.total + (self.engines * self.need.total if self.need else 0)

    @cached_property
    def disk(self) -> DiskNeed:
        """What the checkpoints take."""
        cfg, sizes = self.cfg, self.sizes
        return disk_need(
            sizes.total,
            sizes.trained,
            sizes.dtype,
            cfg.checkpoints,
            cfg.output_dir,
            cfg.max_steps,
            cfg.evaluation.task is not None and not cfg.replay,
            self.optimizer_bytes,
            cfg.adapters.save_merged,
            cfg.resume_from_checkpoint,
        )

    @cached_property
    def shortages(self) -> dict[str, str]:
        """What is missing, a phrase for each kind of it. Disk and main memory of another machine are not known."""
        machine, need, short = self.machine, self.need, {}
        serving, alone = machine.serving, self.engines == 1
        # Of the GPUs here, an engine on GPUs of its own may see others than the trainer.
        sampling = 0 if machine.here else self.first_sampling_gpus
        shared = self.engine.tensor_parallel_size if self.place in ("sleeps", "shared") else 0
        if serving and self.engines > serving.nodes * (serving.gpus // self.engine.tensor_parallel_size):
            short["gpus"] = f"its {self.servers} need {self.sampling_gpus} GPUs, where {serving} serve"
        elif machine.gpus < max(self.on_node(self.trainers) + sampling, shared) and machine.gpus:
            short["gpus"] = f"it needs {self.gpus} GPUs{' on nodes alike' if machine.nodes > 1 else ''}: {roles(self)}"
        if machine.gpus and self.total > machine.gpu_bytes:
            short["training"] = f"training takes {three(self.total / GIB)} GiB of each GPU"
        if need is not None and need.tokens < self.engine.max_model_len:
            # vLLM does not start without room for one request of the greatest length.
            less = f"fewer than engine.max_model_len={self.engine.max_model_len}"
            short["engine"] = (
                f"{'the' if alone else 'each'} engine's KV cache would hold {need.tokens:,} tokens, {less}"
            )
        elif need is not None and machine.gpus and need.total > self.engine_gpu_bytes:
            short["engine"] = f"{'the' if alone else 'each'} engine takes {three(need.total / GIB)} GiB of each GPU"
        if machine.host_bytes is not None and self.main_memory > machine.host_bytes:
            free = three(machine.host_bytes / GIB)
            short["host"] = f"it takes {three(self.main_memory / GIB)} GiB of main memory, where {free} are free"
        if machine.here and self.disk.total > self.disk.free:
            free = three(self.disk.free / GIB)
            short["disk"] = f"checkpoints take {three(self.disk.total / GIB)} GiB of disk, where {free} are free"
        return short

    @property
    def fits(self) -> bool:
        """Says whether the run has what it needs."""
        return not self.shortages

    @property
    def servers(self) -> str:
        """Which engines sample: "2 servers of 2"."""
        kind = "server" if self.place == "server" else "engine"
        return f"{self.engines} {kind}{'s' if self.engines > 1 else ''} of {self.engine.tensor_parallel_size}"

    @property
    def _sender(self) -> int:
        """Bytes of the process beside rank 0 that sends weights to servers by NCCL: a CUDA context, the buffers of NCCL, and
        what vLLM has in its hands at once. Other ways take nothing of a GPU.

        vLLM packs tensors until they have more than PACKED bytes. While one pack is on its way, the tensors of the next are put
        together into a copy. Weights also travel while the trainer computes, to a server that comes back.
        """
        engine, published = self.engine, self.published_bytes
        # "auto" is gloo where no GPU is, as here perhaps, but not on the machine of the plan.
        if self.place != "server" or engine.transfer not in ("nccl", "auto") or transfer_of(engine) == "shm":
            return 0
        pack = min(published, PACKED + self.sizes.dtype.itemsize * self.sizes.largest)
        return CONTEXT + NCCL + min(3 * pack, published + pack)

    def _beside(self, rows: dict[str, int]) -> int:
        """Returns by how much an engine on the same GPU raises the peak of the trainer, whose rows are given."""
        if self.need is None or self.place not in ("shared", "sleeps"):
            return 0
        if self.place == "shared":
            return self.need.total
        # The two peaks are not at the same time. While the engine is awake, the trainer holds its weights and moments alone; an
        # engine that sleeps keeps its context and its graphs.
        kept = ("frozen weights, as they are held", "weights, float32 master", "state of the optimizer")
        resting = int((1 + FRAGMENTATION) * sum(rows[name] for name in kept)) + CONTEXT
        return max(self.need.total - (sum(rows.values()) - resting), CONTEXT + GRAPHS)


def changes_that_help(plan: Plan) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the changes after which less is missing, in words, with what is still missing, the cheapest first."""
    for words, changed in _changes(plan):
        if changed.shortages.keys() < plan.shortages.keys():
            yield words, changed.shortages


def _changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yields what may be changed, in words, and the plan then: first what costs time, then what costs hardware or tokens."""
    cfg, longest = plan.cfg, plan.cfg.engine.max_model_len
    words, lean = [], plan
    if not cfg.activation_checkpointing:
        words, lean = ["activation_checkpointing=True"], _changed(plan, activation_checkpointing=True)
        yield words[0], lean
    if cfg.row_tokens > longest:
        words, lean = [*words, f"row_tokens={longest}"], _changed(lean, row_tokens=longest)
        yield " ".join(words), lean
    if cfg.ranks.shard_within is not None:
        yield "ranks.shard_within=null", _changed(plan, ranks=replace(cfg.ranks, shard_within=None))
    light, few = {"save_optimizer": False}, {"keep_last": 1}
    for change in (light, few, light | few):
        names = " ".join(f"checkpoints.{key}={str(value).lower()}" for key, value in change.items())
        yield names, _changed(plan, checkpoints=replace(cfg.checkpoints, **change))
    if plan.engine is not None:
        yield from _engine_changes(plan)
    also = f", with {' '.join(words)}" if words else ""
    step = plan.machine.nodes
    for ending, base in {"": plan, also: lean}.items():
        for number in range(plan.trainers + step, MOST_GPUS + 1 if plan.machine.gpus else 0, step):
            more = _on_as_many(replace(base, trainers=number))
            if more.total <= more.machine.gpu_bytes:
                yield f"{number} GPUs that train{ending} ({more.gpus} in all)", more
                break
    if not plan.sizes.frozen:
        for title, nf4 in (("adapters (docs/training.md)", False), ("adapters over NF4 (QLoRA)", True)):
            yield f"{title}{also}", replace(lean, sizes=plan.sizes.with_adapters(nf4), publishes_all=False)


def _engine_changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yields what may be changed of the engine."""
    engine, need = plan.engine, plan.need

    def changed(**settings) -> Plan:
        return replace(plan, engine=replace(engine, **settings))

    if engine.kv_cache_bytes is not None:
        yield f"engine.kv_cache_bytes={engine.kv_cache_bytes // 2}", changed(kv_cache_bytes=engine.kv_cache_bytes // 2)
    elif plan.machine.gpus:
        # Beside a trainer the engine may have too much, on GPUs of its own too little.
        beside = plan.place in ("shared", "sleeps")
        shares = [share for share in UTILIZATIONS if (share < engine.gpu_memory_utilization) == beside]
        plans = (
            (f"engine.gpu_memory_utilization={share:g}", changed(gpu_memory_utilization=share)) for share in shares
        )
        yield from [(words, now) for words, now in plans if now.fits or not beside][:1]
    if plan.place == "shared" and plan.machine.gpus:
        yield "engine.sleep=true, with staleness=0", changed(sleep=True, kv_on_publish="recompute")
    if need and plan.cfg.sampling.max_tokens + (plan.prompt_tokens or 0) <= need.tokens < engine.max_model_len:
        yield f"engine.max_model_len={need.tokens}", changed(max_model_len=need.tokens)
    # vLLM deals whole heads out to its GPUs.
    first, heads = engine.tensor_parallel_size + 1, plan.sizes.heads
    for gpus in [gpus for gpus in range(first, heads + 1 if plan.machine.gpus else 0) if heads % gpus == 0]:
        fewer, rest = divmod(plan.sampling_gpus, gpus) if plan.place == "own" else (0, 0)
        names = engine.device_names[: fewer * gpus] or [str(plan.trainers + number) for number in range(gpus)]
        devices = ",".join(names) if plan.place == "own" else engine.devices
        now = _on_as_many(changed(tensor_parallel_size=gpus, devices=devices, count=None))
        if "engine" not in now.shortages:
            where = f"so {fewer} engines in place of {plan.engines}" if fewer and not rest else f"on {gpus} GPUs"
            yield f"engine.tensor_parallel_size={gpus}, {where}", now
            break


def _changed(plan: Plan, **settings) -> Plan:
    return replace(plan, cfg=replace(plan.cfg, **settings))


def _on_as_many(plan: Plan) -> Plan:
    """Returns the plan on a machine of as many GPUs as it needs."""
    return replace(plan, machine=replace(plan.machine, gpus=max(plan.machine.gpus, plan.on_node(plan.gpus))))


def plan_table(plan: Plan, name: str) -> str:
    """Returns the table without the verdict, at most 120 characters wide.

    Args:
        name: of the model.
    """
    sizes, machine, disk, engine = plan.sizes, plan.machine, plan.disk, plan.engine
    count = f"{sizes.total / 1e9:.3f} B" if sizes.total >= 1e8 else f"{sizes.total / 1e6:.3f} M"
    trained = f"{sizes.trained / sizes.total:.2%} of them trained" if sizes.frozen else "all trained"
    lines = [f"{name}: {count} parameters, {trained}"]
    if machine.gpus:
        lines.append(f"GPUs: {roles(plan)}")
    unit, unit_name = (GIB, "GiB") if plan.total >= GIB else (1 << 20, "MiB")

    def add(title: str, rows: Mapping[str, int]) -> None:
        """Adds a title with the sum, and a line for each name whose figure is not zero."""
        figures = {f"{unit_name} {title}": sum(rows.values())} | {f"  {name}": bytes_ for name, bytes_ in rows.items()}
        for name, bytes_ in figures.items():
            if bytes_ / unit >= 0.0005 or not name.startswith(" "):
                lines.append(f"{name:<{NAMES + 2}}{three(bytes_ / unit):>{FIGURE}}")

    first = " of the first node" if machine.nodes > 1 else ""
    add("on each GPU that trains" if machine.gpus else f"of main memory{first} for the trainer", plan.device)
    if plan.need is not None:
        kind = "server" if plan.place == "server" else "engine"
        where = f"on each {kind} GPU (engine.tensor_parallel_size={engine.tensor_parallel_size})"
        add(where if machine.gpus else "of main memory for the engine", plan.need.rows)
        lines += _requests(plan)
    elif plan.place == "server":
        lines.append(f"the engine is the server at {engine.address}; what it needs is not in this table")
    add(f"of main memory{first}, besides", plan.host)
    add(f"of disk for one checkpoint in {plan.cfg.output_dir}", disk.rows)
    free = f"; free there: {three(disk.free / GIB)} GiB" if machine.here else ""
    total = f"{three(disk.total / unit)} {unit_name}"
    lines.append(f"  {disk.kept} at once at most, with the one that is being written: {total}{free}")
    return "\n".join(lines)


def _requests(plan: Plan) -> list[str]:
    """Says how many requests an engine's KV cache holds at once, shared prompts not counted."""
    engine, tokens, max_tokens = plan.engine, plan.need.tokens, plan.cfg.sampling.max_tokens
    most = engine.max_num_seqs or (REQUESTS_GPU if plan.engine_gpu_bytes else REQUESTS_CPU)
    kinds = {f"engine.max_model_len={engine.max_model_len}": engine.max_model_len}
    if plan.prompt_tokens is not None:
        kind = f"a prompt of {plan.prompt_tokens} + sampling.max_tokens={max_tokens}"
        kinds[kind] = plan.prompt_tokens + max_tokens
    whole = f" of each of {plan.engines}" if plan.engines > 1 else ""
    title = f"  the KV cache{whole} holds {tokens:,} tokens, for so many requests at once:"
    return [title, *(f"    {min(tokens // length, most):,} of {kind}" for kind, length in kinds.items())]


def verdict(plan: Plan) -> str:
    """Returns whether the plan fits, in one line, and below it what else it takes, or what is missing and what helps."""
    where = f"{'on' if plan.machine.gpus or not plan.machine.here else 'into'} {plan.machine}"
    if plan.fits:
        return f"fits {where}{_used(plan)}"
    lines = [f"does NOT fit {where}:", *(f"  {missing}" for missing in plan.shortages.values())]
    helpful = list(changes_that_help(plan))[:SHOWN]
    if not helpful:
        return "\n".join([*lines, "no single change of a setting makes it fit"])
    width = max(len(words) for words, _ in helpful)
    lines.append("what helps, the cheapest first:")
    for words, left in helpful:
        lines.append(f"  {words:<{width}}  {'then ' + '; '.join(left.values()) if left else 'then it fits'}")
    return "\n".join(lines)


def _used(plan: Plan) -> str:
    main, disk = (f"{three(bytes_ / GIB)} GiB" for bytes_ in (plan.main_memory, plan.disk.total))
    if not plan.machine.gpus:
        return f": {main} used at most; checkpoints take {disk} of disk"
    text = f": {three(plan.total / GIB)} GiB used at most on {_gpus_that(plan.trainers, 'train')}"
    if plan.place in ("own", "server") and plan.need is not None:
        verb = "serve" if plan.place == "server" else "sample"
        text += f", {three(plan.need.total / GIB)} on {_gpus_that(plan.sampling_gpus, verb)}"
    elif plan.place in ("shared", "sleeps"):
        text += f" and {'samples' if plan.trainers == 1 else 'sample'}"
    words = f"--nproc_per_node {plan.on_node(plan.trainers)}"
    start = f"; start it with {words}" if plan.trainers > 1 else ""
    if plan.machine.nodes > 1:
        start = f"\n  start it on each node with --nnodes {plan.machine.nodes} {words}"
    return f"{text}\n  besides, {main} of main memory and {disk} of disk for checkpoints{start}"


def _gpus_that(gpus: int, verb: str) -> str:
    return f"1 GPU that {verb}s" if gpus == 1 else f"{gpus} GPUs that {verb}"


def roles(plan: Plan) -> str:
    """Returns which GPUs do what: "4 train, 4 sample (4 engines of 1)"."""
    trains = f"{plan.trainers} train{'s' if plan.trainers == 1 else ''}"
    if plan.place == "none":
        return trains
    if not plan.sampling_gpus:
        return f"{trains} and sample{'s' if plan.trainers == 1 else ''}"
    verb = "serve" if plan.place == "server" else "sample"
    samples = f"{plan.sampling_gpus} {verb}{'s' if plan.sampling_gpus == 1 else ''} ({plan.servers})"
    if plan.serves_elsewhere:
        return f"{trains}; elsewhere {samples}"
    idle = plan.machine.nodes * plan.machine.gpus - plan.gpus
    return f"{trains}, {samples}{f', {idle} idle' if idle > 0 and not plan.machine.here else ''}"


def three(value: float) -> str:
    """Returns a number with three digits: 0.123, 1.23, 12.3, 123, 1,234."""
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{decimals}f}"
