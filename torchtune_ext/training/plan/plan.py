"""What a run takes of a machine, and what of that is not there."""

from dataclasses import dataclass
from functools import cached_property

from torchtune_ext.policy.memory import GIB, Sizes, trainer_rows
from torchtune_ext.sampling.records import EngineConfig
from torchtune_ext.training.plan.disk import DiskNeed, disk_need, file_in_memory
from torchtune_ext.training.plan.engine import CONTEXT, GRAPHS, NCCL, EngineNeed, engine_need
from torchtune_ext.training.plan.machine import Machine
from torchtune_ext.training.state import CheckpointConfig

COLUMNS = (1, 2, 4, 8)  # numbers of training devices that the table shows in any case
# PyTorch's allocator keeps blocks that are free but too small for what comes next, since rows differ in length.
FRAGMENTATION = 0.05
# Allowance for a rank, a process of the engine, and its client: Python, PyTorch, libraries. CUDA maps as much again.
PROCESS = GIB


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
    def engine_gpus(self) -> int:
        """GPUs that only the engine uses."""
        return self.engine.tensor_parallel_size if self.engine_place == "own" else 0


@dataclass(frozen=True)
class Plan:
    """A run on a machine, with so many training devices."""

    settings: Settings
    machine: Machine
    trainers: int

    def device(self, trainers: int) -> dict[str, int]:
        """Returns the bytes of each training GPU by name, allowances among them, for another number of them. On a CPU these are
        the bytes of all ranks together."""
        made = self.settings
        rows = trainer_rows(made.sizes, made.row_tokens, trainers, made.activation_checkpointing, made.optimizer_bytes)
        if not self.machine.gpus:
            return {name: bytes_ * trainers for name, bytes_ in rows.items()}
        rows |= {
            f"fragmentation, {FRAGMENTATION:.0%} (allowance)": int(FRAGMENTATION * sum(rows.values())),
            "CUDA context (allowance)": CONTEXT,
            "NCCL (allowance)": NCCL if trainers > 1 else 0,
        }
        return rows | {"engine on the same GPU, beyond what is free then": self._beside(rows, trainers)}

    def total(self, trainers: int | None = None) -> int:
        """Returns the bytes of each training GPU, or of the ranks of a CPU together."""
        return sum(self.device(trainers or self.trainers).values())

    @cached_property
    def engine(self) -> EngineNeed | None:
        """What an engine of our own takes of each of its devices."""
        made = self.settings
        if made.engine_place in ("none", "server"):
            return None
        adapters = 0 if made.publishes_all else made.sizes.dtype.itemsize * made.sizes.trained
        return engine_need(made.sizes, made.engine, self.machine.gpu_bytes, adapters)

    @cached_property
    def host(self) -> dict[str, int]:
        """Bytes of main memory by name, of all processes of the machine."""
        made, sizes, gpus = self.settings, self.settings.sizes, self.machine.gpus
        published = sizes.engine_bytes if made.publishes_all else sizes.dtype.itemsize * sizes.trained
        processes = self.trainers * (2 if gpus else 1)
        if self.engine is not None:
            processes += 1 + made.engine.tensor_parallel_size * (2 if gpus else 1)
        # Files of weights are mapped, not read as a whole: what Linux keeps of them it gives back when memory is short.
        return {
            "processes of ranks and engine (allowance)": processes * PROCESS,
            "published weights in shared memory": published * (made.engine_place != "none"),
            "weights of the engine while it sleeps": sizes.engine_bytes * (made.engine_place == "sleeps" and gpus > 0),
            "reference and weights swapped out, float32": 8 * sizes.total * (made.reference and not sizes.frozen),
            "largest tensor on each rank, while weights are read": self.trainers * sizes.largest * (2 if gpus else 4),
            "a file of a checkpoint while it is put together": file_in_memory(sizes),
        }

    @property
    def main_memory(self) -> int:
        """Bytes of main memory: where there are no GPUs, trainer and engine are in it, too."""
        host = sum(self.host.values())
        if self.machine.gpus:
            return host
        return host + self.total() + (self.engine.total if self.engine else 0)

    @cached_property
    def disk(self) -> DiskNeed:
        """What the checkpoints take."""
        made = self.settings
        return disk_need(
            made.sizes,
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
        """How many GPUs the run needs."""
        place = self.settings.engine_place
        beside = self.settings.engine.tensor_parallel_size if place in ("sleeps", "shared") else 0
        return max(self.trainers + self.settings.engine_gpus, beside)

    @property
    def training_fits(self) -> bool:
        """Says whether the training GPUs are large enough."""
        return not self.machine.gpus or self.total() <= self.machine.gpu_bytes

    @property
    def engine_fits(self) -> bool:
        """Says whether the engine has room, for itself and for the longest request."""
        need = self.engine
        return need is None or (need.fits and (not self.machine.gpus or need.total <= self.machine.gpu_bytes))

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
        # Of the GPUs here, an engine on GPUs of its own may see others than the trainer.
        apart = self.machine.here and self.settings.engine_place == "own"
        enough = not self.machine.gpus or (self.trainers if apart else self.gpus) <= self.machine.gpus
        return enough and self.training_fits and self.engine_fits and self.host_fits and self.disk_fits

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


def trainers_of(machine: Machine, settings: Settings, world_size: int | None = None, visible: str | None = None) -> int:
    """Returns how many devices train.

    Args:
        world_size: the ranks that torchrun has started; None: it has not.
        visible: CUDA_VISIBLE_DEVICES of this process.

    Raises:
        ValueError: the engine leaves no GPU to train.
    """
    if world_size is not None:
        return world_size
    if not machine.gpus:
        return 1
    taken = settings.engine_gpus
    if machine.here and taken:
        # The trainer may see its own GPUs alone, and the engine others.
        mine = visible.split(",") if visible else [str(i) for i in range(machine.gpus)]
        taken = len({name.strip() for name in settings.engine.devices.split(",")} & {name.strip() for name in mine})
    if taken >= machine.gpus:
        raise ValueError(
            f"{machine.name}: the engine has {taken} of its own (engine.devices={settings.engine.devices}); none is left to "
            f"train; ask for {taken + 1} or more, or let both share one by engine.devices=null engine.sleep=true"
        )
    return machine.gpus - taken
