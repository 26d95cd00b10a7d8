"""The three GEMMs of a linear layer on FP8 blocks: y = x W^T and its two gradients.

With x [M, K] (M tokens), W [N, K] and dy [M, N], each contracts another axis, which decides the blocks (fp8_quantize.py)::

    FProp   y  = x W^T       over K, in-features     x   rows 1x128        W   tiles 128x128
    DGrad   dx = dy W        over N, out-features    dy  rows 1x128        W^T tiles: FProp's own bits, transposed
    WGrad   dW = dy^T x      over M, tokens          dy  columns 128x1     x   columns 128x1

After transposing, all three are one product A B^T whose operands lie contiguous along the contracted axis, A in 1x128
blocks and B in 128x128 or 1x128 blocks. A backend is one function that computes it:

* `reference`: torch on any device. Dequantizes to float32 and multiplies in float32. What the others are held against.
* `scaled_mm`: torch.nn.functional.scaled_mm, that is cuBLASLt. Hopper only, CUDA 12.9 or later.
* `deep_gemm`: DeepGEMM, from the package `deep_gemm` or from the copy inside a GPU build of vLLM. Hopper only.
* `torchao`: the Triton GEMMs of torchao's prototype of block-wise training. Needs triton; the slowest on a GPU.

On a GPU the products of 128 are summed in the tensor core's own accumulator before float32 takes over, so the fast
backends agree with the reference to a tolerance, not in bits.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtune_ext.kernels.fp8_quantize import COLUMNS, ROWS, TILES, Fp8Blocks, column_major, dequantize

GEMMS = {  # blocks of the two operands as the caller gives them
    "fprop": (ROWS, TILES),
    "dgrad": (ROWS, TILES),
    "wgrad": (COLUMNS, COLUMNS),
}
SLACK = 256  # the largest tile of torchao's kernels, which read a scale for each of its rows and columns


@dataclass(frozen=True, slots=True)
class Choice:
    """Which backend runs a GEMM, and why: what spoke against those before it."""

    backend: str
    reason: str


def fprop(x: Fp8Blocks, w: Fp8Blocks, out_dtype: torch.dtype = torch.bfloat16, backend: str = "auto") -> Tensor:
    """y [M, N] = x W^T, from the rows of x [M, K] and the tiles of w [N, K]."""
    return _run("fprop", x, w, out_dtype, backend)


def dgrad(dy: Fp8Blocks, w: Fp8Blocks, out_dtype: torch.dtype = torch.bfloat16, backend: str = "auto") -> Tensor:
    """dx [M, K] = dy W, from the rows of dy [M, N] and the same tiles of w [N, K] that FProp used."""
    return _run("dgrad", dy, w, out_dtype, backend)


def wgrad(dy: Fp8Blocks, x: Fp8Blocks, out_dtype: torch.dtype = torch.float32, backend: str = "auto") -> Tensor:
    """dW [N, K] = dy^T x, from the columns of dy [M, N] and of x [M, K]; zero tokens pad both to whole blocks."""
    return _run("wgrad", dy, x, out_dtype, backend)


def choose_backend(gemm: str, first: Fp8Blocks, second: Fp8Blocks, out_dtype: torch.dtype) -> Choice:
    """What `backend="auto"` takes for `gemm` ("fprop", "dgrad" or "wgrad") on these operands."""
    against: dict[str, list[str]] = {}
    for name in BACKENDS:
        why = objection(name, gemm, first, second, out_dtype)
        if why is None:
            reasons = [f"not {', '.join(names)}: {why}" for why, names in against.items()]
            return Choice(name, "; ".join(reasons) or "the first that can run")
        against.setdefault(why, []).append(name)
    raise AssertionError("the reference runs everywhere")


def objection(backend: str, gemm: str, first: Fp8Blocks, second: Fp8Blocks, out_dtype: torch.dtype) -> str | None:
    """Why `backend` cannot run `gemm` on these operands, and what to install; None: it can."""
    if backend not in BACKENDS:
        raise ValueError(f"FP8 backend {backend!r} does not exist: choose auto or one of {', '.join(BACKENDS)}")
    return BACKENDS[backend].objection(*_operands(gemm, first, second), out_dtype)


def _run(gemm: str, first: Fp8Blocks, second: Fp8Blocks, out_dtype: torch.dtype, backend: str) -> Tensor:
    a, b = _operands(gemm, first, second)
    if backend == "auto":
        backend = choose_backend(gemm, first, second, out_dtype).backend
    elif why := objection(backend, gemm, first, second, out_dtype):
        raise ValueError(f"FP8 backend {backend!r} cannot run {gemm}: {why}; or take backend='auto'")
    if 0 in (*a.shape, *b.shape):  # no tokens: what a rank without data has
        return a.values.new_zeros(a.shape[0], b.shape[0], dtype=out_dtype)
    return BACKENDS[backend].run(a, b, out_dtype)


def _operands(gemm: str, first: Fp8Blocks, second: Fp8Blocks) -> tuple[Fp8Blocks, Fp8Blocks]:
    """A and B of A B^T."""
    if gemm not in GEMMS:
        raise ValueError(f"gemm {gemm!r} does not exist: choose one of {', '.join(GEMMS)}")
    if (first.block, second.block) != GEMMS[gemm]:
        raise ValueError(
            f"{gemm} takes blocks {GEMMS[gemm]}, got {(first.block, second.block)}: activations and gradients come "
            "from quantize_rows (fprop, dgrad) or quantize_columns (wgrad), weights from quantize_weight"
        )
    a = first.T if gemm == "wgrad" else first
    b = second if gemm == "fprop" else second.T
    if a.shape[1] != b.shape[1] or a.values.device != b.values.device:
        raise ValueError(
            f"{gemm} cannot contract {first.shape} on {first.values.device} with {second.shape} on "
            f"{second.values.device}: both must come from one linear layer and one device"
        )
    return a, b


def _reference(a: Fp8Blocks, b: Fp8Blocks, out_dtype: torch.dtype) -> Tensor:
    if torch.compiler.is_compiling():  # a graph can neither ask for the precision nor set it: the caller's holds
        return _product(a, b, out_dtype)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # TensorFloat-32 would keep 10 bits, and the oracle be wrong
    try:
        return _product(a, b, out_dtype)
    finally:
        torch.set_float32_matmul_precision(precision)


def _product(a: Fp8Blocks, b: Fp8Blocks, out_dtype: torch.dtype) -> Tensor:
    return (dequantize(a) @ dequantize(b).T).to(out_dtype)


def _scaled_mm(a: Fp8Blocks, b: Fp8Blocks, out_dtype: torch.dtype) -> Tensor:
    if b.block == TILES:  # [K / 128 rounded up to 4, N / 128], contiguous along K: cuBLASLt's layout for 128x128
        scale_b = column_major(F.pad(b.scales, (0, -b.scales.shape[1] % 4)).T)
        recipe_b = F.ScalingType.BlockWise128x128
    else:
        scale_b, recipe_b = column_major(b.scales), F.ScalingType.BlockWise1x128
    return F.scaled_mm(
        _contiguous(a.values),
        _contiguous(b.values).T,
        column_major(a.scales),
        F.ScalingType.BlockWise1x128,
        scale_b,
        recipe_b,
        output_dtype=out_dtype,
    )


def _deep_gemm(a: Fp8Blocks, b: Fp8Blocks, out_dtype: torch.dtype) -> Tensor:
    gemm = _deep_gemm_module().fp8_gemm_nt
    shape = a.shape[0], b.shape[0]
    lhs = _contiguous(a.values), a.scales  # contiguous across the blocks: what its TMA loads, if M is a multiple of 4
    if b.block == TILES:
        out = a.values.new_empty(shape, dtype=torch.bfloat16)
        gemm(lhs, (_contiguous(b.values), _contiguous(b.scales)), out, disable_ue8m0_cast=True)
        return out
    out = a.values.new_zeros(shape, dtype=torch.float32)  # this kernel adds to what is there
    gemm(lhs, (_contiguous(b.values), b.scales), out, c=out, recipe=(1, 1, 128), disable_ue8m0_cast=True)
    return out.to(out_dtype)


def _torchao(a: Fp8Blocks, b: Fp8Blocks, out_dtype: torch.dtype) -> Tensor:
    kernels = _torchao_module()
    gemm = kernels.triton_fp8_gemm_1x128_128x1 if b.block == ROWS else kernels.triton_fp8_gemm_1x128_128x128
    scale_a = _with_slack(a.scales, column_major=True)
    scale_b = _with_slack(b.scales, column_major=b.block == ROWS)
    return gemm(_contiguous(a.values), _contiguous(b.values).T, scale_a, scale_b.T, out_dtype=out_dtype)


def _with_slack(scales: Tensor, column_major: bool) -> Tensor:
    """A copy in memory that goes on: torchao's kernels read scales past a ragged end without a mask."""
    rows, columns = scales.shape
    memory = scales.new_zeros(scales.numel() + SLACK + columns)
    return memory.as_strided(scales.shape, (1, rows) if column_major else (columns, 1)).copy_(scales)


def _contiguous(values: Tensor) -> Tensor:
    return values if values.is_contiguous() else values.clone(memory_format=torch.contiguous_format)


def _no_objection(a: Fp8Blocks, b: Fp8Blocks, out_dtype: torch.dtype) -> None:
    return None


def _against_scaled_mm(a: Fp8Blocks, b: Fp8Blocks, out_dtype: torch.dtype) -> str | None:
    if objection := _against_device(a, only_hopper=True):
        return objection
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm; install torch 2.10 or later"
    if torch.version.cuda is None or tuple(map(int, torch.version.cuda.split(".")[:2])) < (12, 9):
        return f"torch is built for CUDA {torch.version.cuda}; install one built for CUDA 12.9 or later"
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it cannot return {out_dtype}; ask for bfloat16 or float32"
    return None


def _against_deep_gemm(a: Fp8Blocks, b: Fp8Blocks, out_dtype: torch.dtype) -> str | None:
    if objection := _against_device(a, only_hopper=True):
        return objection
    if b.block == TILES and out_dtype != torch.bfloat16:
        return f"its (1x128)x(128x128) kernel returns bfloat16, not {out_dtype}; ask for bfloat16"
    if isinstance(module := _deep_gemm_module(), Exception):
        return (
            f"DeepGEMM cannot be imported ({module!r}); it compiles at run time and needs nvcc (CUDA_HOME); install "
            "sgl-deep-gemm, or a GPU build of vLLM, which has a copy"
        )
    return None


def _against_torchao(a: Fp8Blocks, b: Fp8Blocks, out_dtype: torch.dtype) -> str | None:
    if objection := _against_device(a, only_hopper=False):
        return objection
    if isinstance(module := _torchao_module(), Exception):
        return (
            f"its kernels cannot be imported ({module!r}); install torchao 0.15 or later and a triton that fits torch"
        )
    return None


def _against_device(a: Fp8Blocks, only_hopper: bool) -> str | None:
    device = a.values.device
    if device.type != "cuda":
        return f"it needs a CUDA device, the operands are on {device}"
    capability = torch.cuda.get_device_capability(device)
    if (capability[0] != 9) if only_hopper else (capability < (8, 9)):
        wanted = "9.0 (Hopper)" if only_hopper else "8.9 or later"
        return f"it needs compute capability {wanted}, {device} has {capability[0]}.{capability[1]}"
    return None


@functools.cache
def _deep_gemm_module() -> ModuleType | Exception:
    """The installed package, else vLLM's copy."""
    return _imported("deep_gemm" if importlib.util.find_spec("deep_gemm") else "vllm.third_party.deep_gemm")


@functools.cache
def _torchao_module() -> ModuleType | Exception:
    return _imported("torchao.prototype.blockwise_fp8_training.kernels")


def _imported(name: str) -> ModuleType | Exception:
    """The module, or why there is none; asked for again before every GEMM, so the callers keep either."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        # Not an ImportError alone: DeepGEMM asserts that there is a CUDA_HOME, torchao raises ValueError.
        return error


@dataclass(frozen=True, slots=True)
class _Backend:
    run: Callable[[Fp8Blocks, Fp8Blocks, torch.dtype], Tensor]  # (A, B, dtype of the result) -> A B^T
    objection: Callable[[Fp8Blocks, Fp8Blocks, torch.dtype], str | None]  # why it cannot run and what to install


# In the order in which `auto` asks. scaled_mm before deep_gemm: nothing to install, no compiler at run time.
BACKENDS = {
    "scaled_mm": _Backend(_scaled_mm, _against_scaled_mm),
    "deep_gemm": _Backend(_deep_gemm, _against_deep_gemm),
    "torchao": _Backend(_torchao, _against_torchao),
    "reference": _Backend(_reference, _no_objection),
}
