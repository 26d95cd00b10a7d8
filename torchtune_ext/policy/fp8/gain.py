"""Says in the receipt of a run what FP8 gains: bytes are counted from shapes, time is measured on the device at hand."""

import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtune_ext.kernels.fp8_quantize import LINE_BYTES, TILE_BYTES
from torchtune_ext.policy.fp8.linear import Fp8Config, fp8_linear
from torchtune_ext.policy.fp8.plan import Fp8Receipt
from torchtune_ext.policy.hf_model import clean_name
from torchtune_ext.policy.lora import adapter_names

# Tokens with which a CPU, where FP8 is emulated, is measured: enough to say that it is slower.
CPU_TOKENS = 128
REPEATS = 5


def engine_memory(model: nn.Module, receipt: Fp8Receipt) -> str:
    """Says what the weights of an engine take, with FP8 and without."""
    adapters = adapter_names(model)
    total = sum(p.numel() for name, p in model.named_parameters() if clean_name(name) not in adapters)
    size = receipt.dtype.itemsize
    before, after = size * total, size * total - (size - TILE_BYTES) * receipt.parameters
    unit, name = (1 << 30, "GiB") if before >= 1 << 30 else (1 << 20, "MiB")
    return f"weights of {after / unit:.2f} {name} in place of {before / unit:.2f}"


def trainer_gain(receipt: Fp8Receipt, frozen: bool, tokens: int, device: torch.device) -> list[str]:
    """Says what to expect of the layers in FP8, and what they do against the dtype around them.

    Forward and backward are measured one after the other, quantization included.

    Args:
        frozen: whether their weights have no gradient, as below adapters.
        tokens: the length of the row that is measured; on a CPU it is at most `CPU_TOKENS`.
    """
    # This share of the GEMMs' time is saved at best: FP8 halves the time of those that are in it.
    halved = len(receipt.config.gemms(frozen)) / (2 if frozen else 3) / 2
    dtype = str(receipt.dtype)[6:]
    expected = (
        f"expected at most {1 / (1 - halved):.2f}x the speed of {dtype} in these layers, "
        f"{1 / (1 - receipt.share * halved):.2f}x in all linear layers"
    )
    if device.type == "cpu":
        tokens = min(tokens, CPU_TOKENS)
        expected += "; on a CPU it is emulated, and slower"
    where = f"with {tokens} tokens on {_name(device)}"
    try:
        measured = f"measured {_measured(receipt, frozen, tokens, device):.2f}x in these layers {where}, not compiled"
    except torch.OutOfMemoryError:
        measured = f"not measured, there is no memory for another layer {where}"
    lines = [expected, measured]
    if "wgrad" in receipt.config.gemms(frozen) and receipt.config.save_activations == "fp8":
        lines.append(
            f"inputs kept for the backward take {LINE_BYTES:.2f} bytes a number in place of {receipt.dtype.itemsize}"
        )
    return lines


def _measured(receipt: Fp8Receipt, frozen: bool, tokens: int, device: torch.device) -> float:
    counts = Counter(layer.shape for layer in receipt.layers if layer.reason is None)
    # The run's own draws stay as they are.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        times = {shape: _times(shape, tokens, receipt.config, receipt.dtype, not frozen, device) for shape in counts}
    plain, fp8 = (sum(times[shape][i] * count for shape, count in counts.items()) for i in (0, 1))
    return plain / fp8


def _times(
    shape: tuple[int, int], tokens: int, config: Fp8Config, dtype: torch.dtype, trains: bool, device: torch.device
) -> tuple[float, float]:
    """Returns the median seconds of forward and backward of one layer, plain and in FP8, which are taken in turns."""
    weight = (torch.randn(shape, device=device) * shape[1] ** -0.5).to(dtype).requires_grad_(trains)
    x = torch.randn(tokens, shape[1], device=device, dtype=dtype)
    dy = torch.randn(tokens, shape[0], device=device, dtype=dtype)

    def seconds(forward: Callable[[Tensor], Tensor]) -> float:
        _synchronize(device)
        start = time.perf_counter()
        # The input is a new tensor, whose blocks no layer has kept.
        forward(x.detach().requires_grad_()).backward(dy)
        _synchronize(device)
        return time.perf_counter() - start

    ways = (lambda x: F.linear(x, weight), lambda x: fp8_linear(x, weight, None, config))
    # The first round loads kernels.
    rounds = [[seconds(way) for way in ways] for _ in range(1 + REPEATS)][1:]
    return tuple(statistics.median(column) for column in zip(*rounds, strict=True))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
