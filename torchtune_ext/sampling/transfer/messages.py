"""What a trainer and a server say to each other about weights: vLLM's messages, and how tensors lie in a chunk of bytes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from torchtune_ext.sampling.weight_buffer import ALIGNMENT

CHUNK_BYTES = 64 << 20  # of one broadcast by gloo; a larger tensor is a chunk of its own


@dataclass(kw_only=True)
class GlooInit:
    """How a server's workers find the group: the fields of vLLM's `NCCLWeightTransferInitInfo`, and what gloo needs besides."""

    master_address: str  # of the sender, as the server sees it
    master_port: int
    rank_offset: int  # rank of the server's first worker; the sender has rank 0
    world_size: int  # the sender and all workers of all servers
    group: str  # a name that nobody guesses, for this group alone
    chunk_bytes: int = CHUNK_BYTES
    deadline_s: float = 300.0  # seconds until a worker gives up a group or an update that does not come


@dataclass(kw_only=True)
class Update:
    """What one update holds, tensor by tensor: the fields of vLLM's `NCCLWeightTransferUpdateInfo`."""

    names: list[str]  # Hugging Face names
    dtype_names: list[str]  # torch's names of them: "bfloat16", ...
    shapes: list[list[int]]

    def __post_init__(self):
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError(
                f"an update with {len(self.names)} names, {len(self.dtype_names)} dtypes and {len(self.shapes)} shapes"
            )
        if not self.names or len(set(self.names)) != len(self.names):
            raise ValueError("an update holds no tensors, or two of one name")
        for name, dtype, shape in zip(self.names, self.dtype_names, self.shapes, strict=True):
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise ValueError(f"the update holds {name} in {dtype!r}, which is no dtype of torch")
            if not all(isinstance(size, int) and size >= 0 for size in shape):
                raise ValueError(f"the update holds {name} in the shape {shape}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in its chunk."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the chunk, a multiple of ALIGNMENT
    end: int

    def of(self, chunk: torch.Tensor) -> torch.Tensor:
        """Returns the tensor as a view of its chunk [bytes], uint8."""
        return chunk[self.begin : self.end].view(self.dtype).view(self.shape)


def chunks(update: Update, limit: int) -> Iterator[list[Place]]:
    """Yields the tensors of each broadcast. Both ends compute them by themselves, from the same message.

    Tensors lie as in a `WeightBuffer`, each at a multiple of ALIGNMENT, so that the sender broadcasts its memory as it is.
    Args: limit: bytes; a chunk ends with the tensor that reaches them.
    """
    places: list[Place] = []
    begin = 0
    for name, dtype_name, shape in zip(update.names, update.dtype_names, update.shapes, strict=True):
        dtype = getattr(torch, dtype_name)
        end = begin + math.prod(shape) * dtype.itemsize
        places.append(Place(name, dtype, tuple(shape), begin, end))
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        if end >= limit:
            yield places
            places, begin = [], 0
    if places:
        yield places


def update_of(manifest: dict[str, list]) -> Update:
    """Returns the message for what lies in a `WeightBuffer`. Args: manifest: of the buffer."""
    return Update(names=manifest["names"], dtype_names=manifest["dtypes"], shapes=manifest["shapes"])


def check_layout(places: Sequence[Place], offsets: Sequence[int]) -> None:
    """Raises ValueError when memory is laid out otherwise than `chunks` says. Args: offsets: bytes, of the same tensors."""
    for place, offset in zip(places, offsets, strict=True):
        if offset - offsets[0] != place.begin:
            raise ValueError(f"{place.name} lies at byte {offset}, which is not where a receiver looks for it")
