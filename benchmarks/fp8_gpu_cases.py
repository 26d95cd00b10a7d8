"""Cases of fp8_gpu.py: widths of models, a timer, and the two sides of each comparison."""

import copy
import importlib.util
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

if importlib.util.find_spec("torchtune_ext") is None:  # a bare checkout: kernels/ is found as where it is installed
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    import torchtune_ext

    torchtune_ext.__path__.append(sys.path.pop())

from torchtune.models.qwen2 import qwen2

from torchtune_ext.kernels import fp8_gemm
from torchtune_ext.kernels.fp8_quantize import (
    BLOCK_SIZE,
    Fp8Blocks,
    quantize_columns,
    quantize_rows,
    quantize_weight,
)
from torchtune_ext.policy.decoder import decoder
from torchtune_ext.policy.fp8.linear import Fp8BlockLinear, Fp8Config, fp8_linear

HEAD_DIM = 128
WARM_UP = 3
CYCLES_A_MS = 2_000_000  # of a GPU at 2 GHz, the fastest an H200 runs
CUT = 512


@dataclass(frozen=True, slots=True)
class Model:
    """The widths of a decoder's layers; heads have 128 features."""

    build: Callable[..., nn.Module]
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    bias: bool  # of q, k and v

    def linears(self) -> dict[tuple[int, int], tuple[str, bool]]:
        """(out, in) -> names of the layers of this shape, and whether the first has a bias."""
        q, kv = self.heads * HEAD_DIM, self.kv_heads * HEAD_DIM
        shapes = {"q": (q, self.hidden), "k": (kv, self.hidden), "v": (kv, self.hidden), "o": (self.hidden, q)}
        shapes |= dict.fromkeys(("gate", "up"), (self.mlp, self.hidden)) | {"down": (self.hidden, self.mlp)}
        grouped = defaultdict(list)
        for name, shape in shapes.items():
            grouped[shape].append(name)
        return {shape: (", ".join(names), self.bias and names[0] in "qkv") for shape, names in grouped.items()}


MODELS = {
    "qwen3_8b": Model(
        partial(decoder, head_dim=128, qk_norm="head"), hidden=4096, heads=32, kv_heads=8, mlp=12288, bias=False
    ),
    "qwen2_5_32b": Model(qwen2, hidden=5120, heads=40, kv_heads=8, mlp=27648, bias=True),
}


class Timer:
    """A timer with CUDA events on a GPU and the wall clock on a CPU."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.cuda, self.repeats = device.type == "cuda", repeats
        self.remark = ""  # on the last measurement, for its row
        self.scratch = torch.empty(256 << 20 if self.cuda else 0, dtype=torch.uint8, device=device)

    def settle(self, queue_ms: float) -> None:
        """Flush the operands from L2, and give the host about `queue_ms` to queue the next launches."""
        if self.cuda:
            self.scratch.zero_()
            torch.cuda._sleep(int(queue_ms * CYCLES_A_MS))

    def mark(self) -> torch.cuda.Event | float:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def measure(self, cases: dict[str, tuple[Callable, ...]], queue_ms: float = 2.0) -> dict[str, list[float]]:
        """Return the median milliseconds of each stage of each case.

        Args:
            cases: name -> stages. The first stage is not timed; each stage gets the result of the previous one.
        """
        marks, late = {name: [] for name in cases}, dict.fromkeys(cases, 0)
        for _ in range(WARM_UP + self.repeats):
            for name, (prepare, *stages) in cases.items():
                value = prepare()
                self.settle(queue_ms)
                times = [self.mark()]
                for stage in stages:
                    value = stage(value)
                    times.append(self.mark())
                late[name] += self.cuda and times[0].query()  # the GPU was through with waiting before all was queued
                marks[name].append(times)
                value = None  # its memory is free for the next case
        if self.cuda:
            torch.cuda.synchronize()
        self.remark = " host-bound" if max(late.values()) > self.repeats / 2 else ""

        def between(start, end) -> float:
            return start.elapsed_time(end) if self.cuda else 1e3 * (end - start)

        return {
            name: [median(between(t[i], t[i + 1]) for t in runs[WARM_UP:]) for i in range(len(runs[0]) - 1)]
            for name, runs in marks.items()
        }

    def one(self, **functions: Callable) -> list[float]:
        """Return the median milliseconds of functions without arguments."""
        cases = {name: (lambda: None, lambda _, f=f: f()) for name, f in functions.items()}
        return [times[0] for times in self.measure(cases).values()]


def gemm_sides(x: Tensor, w: Tensor, dy: Tensor, quantizer: str = "auto") -> dict[str, tuple[Callable, Callable]]:
    """Return GEMM -> (function that quantizes both operands, the same product in bfloat16)."""
    return {
        "fprop": (
            lambda: (quantize_rows(x, backend=quantizer), quantize_weight(w, backend=quantizer)),
            lambda: x @ w.T,
        ),
        "dgrad": (
            # As in a layer: the tiles of W^T are in the order in which this product reads them.
            lambda: (quantize_rows(dy, backend=quantizer), quantize_weight(w.T, backend=quantizer).T),
            lambda: dy @ w,
        ),
        "wgrad": (
            lambda: (quantize_columns(dy, backend=quantizer), quantize_columns(x, backend=quantizer)),
            lambda: dy.T @ x,
        ),
    }


def relative_error(gemm: str, backend: str, first: Fp8Blocks, second: Fp8Blocks) -> float:
    """Return ||got - reference|| / ||reference|| of the first CUT rows; the reference is slow."""
    result = getattr(fp8_gemm, gemm)(first, second, torch.bfloat16, backend)[:CUT].float()
    if gemm == "wgrad":  # a row of dW is an out-feature, and sums over all tokens
        values, scales, shape = first.values[:, :CUT], first.scales[:, :CUT], (first.shape[0], result.shape[0])
    else:
        values, scales, shape = first.values[:CUT], first.scales[:CUT], (result.shape[0], first.shape[1])
    cut = Fp8Blocks(values, scales, first.block, shape)
    want = getattr(fp8_gemm, gemm)(cut, second, torch.float32, "reference")
    return ((result - want).norm() / want.norm()).item()


def convert_to_fp8(module: nn.Module, config: Fp8Config) -> nn.Module:
    """Return a copy whose linear layers compute in FP8 (torchtune_ext.policy.fp8.plan.convert)."""
    module = copy.deepcopy(module)
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = Fp8BlockLinear
            layer.fp8 = config
    return module


def step(module: nn.Module, x: Tensor, dy: Tensor) -> tuple[Callable, ...]:
    """Return the stages fresh input, forward, backward. A layer quantizes the same tensor only once."""
    parameters = tuple(module.parameters())
    return (
        x.clone,
        lambda fresh: (fresh, module(fresh)),
        lambda both: torch.autograd.grad(both[1], (both[0], *parameters), dy),
    )


def memory(module: nn.Module, x: Tensor, dy: Tensor) -> list[str]:
    """Return the MiB that the module keeps between forward and backward, and its peak, over the initial memory."""
    if not x.is_cuda:
        return ["-", "-"]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = module(x.clone())  # nothing but the module holds this input
    with torch.no_grad():  # the next layer's input takes the place of the last one that was quantized
        fp8_linear(x.new_ones(1, BLOCK_SIZE), x.new_ones(BLOCK_SIZE, BLOCK_SIZE), None, Fp8Config(backend="reference"))
    kept = torch.cuda.memory_allocated() - before - y.nbytes  # the output is the next module's
    torch.autograd.grad(y, (x, *module.parameters()), dy)
    return [f"{size / 2**20:.0f}" for size in (kept, torch.cuda.max_memory_allocated() - before)]


def build_block(model: Model, sequence: int, device: torch.device) -> nn.Module:
    """Return one decoder layer in bfloat16, on the device, with random weights."""
    widths = {"num_heads": model.heads, "num_kv_heads": model.kv_heads, "embed_dim": model.hidden}
    with torch.device("meta"):
        whole = model.build(128, 1, **widths, intermediate_dim=model.mlp, max_seq_len=sequence)
    block = whole.layers[0].to(torch.bfloat16).to_empty(device=device)
    with device:
        for module in block.modules():
            if hasattr(module, "rope_init"):
                module.rope_init()
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if name.endswith("scale"):  # of an RMSNorm
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02)
    return block
