"""What the sender of weights takes of a GPU. It is a process beside rank 0, on the first GPU that rank 0 sees."""

from torchtune_ext.policy.memory import GIB
from torchtune_ext.sampling.records import EngineConfig
from torchtune_ext.sampling.server_command import transfer_of
from torchtune_ext.training.plan.engine import CONTEXT, NCCL

PACKED = GIB  # vLLM's DEFAULT_PACKED_BUFFER_SIZE_BYTES, and DEFAULT_PACKED_NUM_BUFFERS is 2


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
