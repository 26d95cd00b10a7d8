"""Computes the three GEMMs of a linear layer on FP8 blocks: y = x W^T and its two gradients.

With x [M, K] (M tokens), W [N, K] and dy [M, N], each GEMM contracts a different axis, which
determines its blocks (fp8_quantize.py)::

    FProp   y  = x W^T       over K, in-features     x   rows 1x128        W   tiles 128x128
    DGrad   dx = dy W        over N, out-features    dy  rows 1x128        W^T tiles: the bits of FProp, transposed
    WGrad   dW = dy^T x      over M, tokens          dy  columns 128x1     x   columns 128x1

After transposition, all three are a product A B^T. The operands are contiguous along the contracted
axis. A has 1x128 blocks, and B has 128x128 or 1x128 blocks. Each backend in `BACKENDS` computes
this product.
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

from torchtune_ext.kernels.fp8_quantize import COLUMN_BLOCK, ROW_BLOCK, TILE_BLOCK, Fp8Blocks, column_major, dequantize
from torchtune_ext.run.errors import UsageError

# GEMM -> blocks of the two operands, as the caller passes them.
GEMM_BLOCKS = {
    "fprop": (ROW_BLOCK, TILE_BLOCK),
    "dgrad": (ROW_BLOCK, TILE_BLOCK),
    "wgrad": (COLUMN_BLOCK, COLUMN_BLOCK),
}
# Size of the largest tile of torchao's kernels, which read one scale per row and column of a tile.
SCALE_SLACK = 256


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend that `auto` chooses for a GEMM, and the reason."""

    backend: str
    reason: str  # why the preceding backends cannot run


def fprop(x: Fp8Blocks, w: Fp8Blocks, out_dtype: torch.dtype = torch.bfloat16, backend: str = "auto") -> Tensor:
    """Computes y [M, N] = x W^T from the rows of x [M, K] and the tiles of w [N, K].

    Raises:
        UsageError: the blocks, shapes or devices do not match, or the backend cannot run this GEMM.
    """
    return _run("fprop", x, w, out_dtype, backend)


def dgrad(dy: Fp8Blocks, w: Fp8Blocks, out_dtype: torch.dtype = torch.bfloat16, backend: str = "auto") -> Tensor:
    """Computes dx [M, K] = dy W from the rows of dy [M, N] and the tiles of w [N, K].

    Raises the errors of `fprop`.
    """
    return _run("dgrad", dy, w, out_dtype, backend)


def wgrad(dy: Fp8Blocks, x: Fp8Blocks, out_dtype: torch.dtype = torch.float32, backend: str = "auto") -> Tensor:
    """Computes dW [N, K] = dy^T x from the columns of dy [M, N] and of x [M, K].

    Raises the errors of `fprop`.
    """
    # Zero tokens pad the last block of both operands. They do not change the sum over tokens.
    return _run("wgrad", dy, x, out_dtype, backend)


def choose_backend(gemm: str, first: Fp8Blocks, second: Fp8Blocks, out_dtype: torch.dtype) -> BackendChoice:
    """Returns the backend that `auto` uses for a GEMM ("fprop", "dgrad" or "wgrad")."""
    # Backends that cannot run for the same reason share one clause of the text.
    names_by_reason: dict[str, list[str]] = {}
    for name in BACKENDS:
        reason = unsupported_reason(name, gemm, first, second, out_dtype)
        if reason is None:
            reasons = [f"not {', '.join(names)}: {reason}" for reason, names in names_by_reason.items()]
            return BackendChoice(name, "; ".join(reasons) or "the first that can run")
        names_by_reason.setdefault(reason, []).append(name)
    raise AssertionError("the reference runs everywhere")


def unsupported_reason(
    backend: str, gemm: str, first: Fp8Blocks, second: Fp8Blocks, out_dtype: torch.dtype
) -> str | None:
    """Returns why `backend` cannot run `gemm`, and what to install; None if it can.

    Raises:
        UsageError: the backend or GEMM is unknown, or the operands do not match.
    """
    if backend not in BACKENDS:
        raise UsageError(f"FP8 backend={backend!r} is unknown; choose auto or one of {', '.join(BACKENDS)}")
    return BACKENDS[backend].unsupported_reason(*_operands(gemm, first, second), out_dtype)


def _run(gemm: str, first: Fp8Blocks, second: Fp8Blocks, out_dtype: torch.dtype, backend: str) -> Tensor:
    a, b = _operands(gemm, first, second)
    if backend == "auto":
        backend = choose_backend(gemm, first, second, out_dtype).backend
    elif reason := unsupported_reason(backend, gemm, first, second, out_dtype):
        raise UsageError(f"FP8 backend={backend!r} cannot run {gemm}: {reason}; or use backend='auto'")
    # An operand may be empty: a rank without data has no tokens.
    if 0 in (*a.shape, *b.shape):
        return a.values.new_zeros(a.shape[0], b.shape[0], dtype=out_dtype)
    return BACKENDS[backend].run(a, b, out_dtype)


def _operands(gemm: str, first: Fp8Blocks, second: Fp8Blocks) -> tuple[Fp8Blocks, Fp8Blocks]:
    """Returns the operands A and B of the product A B^T."""
    if gemm not in GEMM_BLOCKS:
        raise UsageError(f"gemm={gemm!r} is unknown; choose one of {', '.join(GEMM_BLOCKS)}")
    if (first.block, second.block) != GEMM_BLOCKS[gemm]:
        raise UsageError(
            f"{gemm} expects blocks {GEMM_BLOCKS[gemm]}, got {(first.block, second.block)}: quantize activations and "
            "gradients by quantize_rows (fprop, dgrad) or quantize_columns (wgrad), weights by quantize_weight"
        )
    # Transposition turns WGrad's columns into rows and keeps DGrad's tiles. Both results are views.
    a = first.T if gemm == "wgrad" else first
    b = second if gemm == "fprop" else second.T
    if a.shape[1] != b.shape[1] or a.values.device != b.values.device:
        raise UsageError(
            f"{gemm} cannot contract {first.shape} on {first.values.device} with {second.shape} on "
            f"{second.values.device}: both must come from one linear layer and one device"
        )
    return a, b


def _reference(a: Fp8Blocks, b: Fp8Blocks, out_dtype: torch.dtype) -> Tensor:
    # A compiled graph can neither read nor set the matmul precision, so it uses the caller's
    # setting.
    if torch.compiler.is_compiling():
        return _product(a, b, out_dtype)
    precision = torch.get_float32_matmul_precision()
    # TensorFloat-32 keeps only 10 mantissa bits, which is not precise enough for a reference.
    torch.set_float32_matmul_precision("highest")
    try:
        return _product(a, b, out_dtype)
    finally:
        torch.set_float32_matmul_precision(precision)


def _product(a: Fp8Blocks, b: Fp8Blocks, out_dtype: torch.dtype) -> Tensor:
    return (dequantize(a) @ dequantize(b).T).to(out_dtype)


def _scaled_mm(a: Fp8Blocks, b: Fp8Blocks, out_dtype: torch.dtype) -> Tensor:
    # For 128x128 blocks, cuBLASLt expects scales [K / 128 rounded up to a multiple of 4, N / 128],
    # contiguous along K.
    if b.block == TILE_BLOCK:
        scale_b = column_major(F.pad(b.scales, (0, -b.scales.shape[1] % 4)).T)
        recipe_b = F.ScalingType.BlockWise128x128
    else:
        scale_b, recipe_b = column_major(b.scales), F.ScalingType.BlockWise1x128
    # cuBLASLt expects a row-major first operand and a column-major second operand.
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
    module = _deep_gemm_module()
    assert not isinstance(module, Exception)  # else `_deep_gemm_unsupported` returns a reason
    gemm = module.fp8_gemm_nt
    shape = a.shape[0], b.shape[0]
    # The scales are contiguous across the blocks. DeepGEMM loads this layout by TMA if M is a
    # multiple of 4.
    lhs = _contiguous(a.values), a.scales
    # ue8m0 scales are powers of two. These scales are arbitrary float32, so both calls disable the
    # cast (DeepGEMM on Hopper never casts).
    if b.block == TILE_BLOCK:
        out = a.values.new_empty(shape, dtype=torch.bfloat16)
        gemm(lhs, (_contiguous(b.values), _contiguous(b.scales)), out, disable_ue8m0_cast=True)
        return out
    # This kernel accumulates into `out`, so `out` starts with zeros.
    out = a.values.new_zeros(shape, dtype=torch.float32)
    # `recipe` holds the block sizes: rows of A, rows of B, and the contracted axis.
    gemm(lhs, (_contiguous(b.values), b.scales), out, c=out, recipe=(1, 1, 128), disable_ue8m0_cast=True)
    return out.to(out_dtype)


def _torchao(a: Fp8Blocks, b: Fp8Blocks, out_dtype: torch.dtype) -> Tensor:
    kernels = _torchao_module()
    assert not isinstance(kernels, Exception)  # else `_torchao_unsupported` returns a reason
    gemm = kernels.triton_fp8_gemm_1x128_128x1 if b.block == ROW_BLOCK else kernels.triton_fp8_gemm_1x128_128x128
    scale_a = _pad_scales(a.scales, column_major=True)
    scale_b = _pad_scales(b.scales, column_major=b.block == ROW_BLOCK)
    return gemm(_contiguous(a.values), _contiguous(b.values).T, scale_a, scale_b.T, out_dtype=out_dtype)


def _pad_scales(scales: Tensor, column_major: bool) -> Tensor:
    # torchao's kernels read past the end of the last tile, by up to SCALE_SLACK - 1 numbers if the
    # scales are column-major, else by one row. So copy the scales into a larger buffer.
    rows, columns = scales.shape
    memory = scales.new_zeros(scales.numel() + SCALE_SLACK + columns)
    return memory.as_strided(scales.shape, (1, rows) if column_major else (columns, 1)).copy_(scales)


def _contiguous(values: Tensor) -> Tensor:
    # `contiguous()` raises for a fake CUDA tensor if torch is built without CUDA. `clone` does not.
    return values if values.is_contiguous() else values.clone(memory_format=torch.contiguous_format)


def _always_supported(a: Fp8Blocks, b: Fp8Blocks, out_dtype: torch.dtype) -> None:
    return None


def _scaled_mm_unsupported(a: Fp8Blocks, b: Fp8Blocks, out_dtype: torch.dtype) -> str | None:
    if reason := _device_unsupported(a, only_hopper=True):
        return reason
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm; install torch 2.10 or later"
    if torch.version.cuda is None or tuple(map(int, torch.version.cuda.split(".")[:2])) < (12, 9):
        return f"torch is built for CUDA {torch.version.cuda}; install one built for CUDA 12.9 or later"
    if a.shape[0] == 1:
        return "cuBLASLt does not support this product for a single token; pass at least two"
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it cannot return {out_dtype}; use bfloat16 or float32"
    return None


def _deep_gemm_unsupported(a: Fp8Blocks, b: Fp8Blocks, out_dtype: torch.dtype) -> str | None:
    if reason := _device_unsupported(a, only_hopper=True):
        return reason
    if b.block == TILE_BLOCK and out_dtype != torch.bfloat16:
        return f"its (1x128)x(128x128) kernel returns bfloat16, not {out_dtype}; use bfloat16"
    if isinstance(module := _deep_gemm_module(), Exception):
        return (
            f"DeepGEMM cannot be imported ({module!r}); it compiles at run time and needs nvcc (CUDA_HOME); a GPU "
            "build of vLLM has a copy"
        )
    return None


def _torchao_unsupported(a: Fp8Blocks, b: Fp8Blocks, out_dtype: torch.dtype) -> str | None:
    if reason := _device_unsupported(a, only_hopper=False):
        return reason
    if isinstance(module := _torchao_module(), Exception):
        return (
            f"its kernels cannot be imported ({module!r}); install torchao 0.15 or later and a triton that fits torch"
        )
    return None


def _device_unsupported(a: Fp8Blocks, only_hopper: bool) -> str | None:
    device = a.values.device
    if device.type != "cuda":
        return f"it needs a CUDA device, the operands are on {device}"
    capability = torch.cuda.get_device_capability(device)
    # E4M3 needs compute capability 8.9 or later. torch supports 128-blocks in cuBLASLt only on
    # Hopper, and `_deep_gemm` calls DeepGEMM's Hopper kernels.
    if (capability[0] != 9) if only_hopper else (capability < (8, 9)):
        versions = "9.0 (Hopper)" if only_hopper else "8.9 or later"
        return f"it needs compute capability {versions}, {device} has {capability[0]}.{capability[1]}"
    return None


# Every GEMM looks up these modules, so the results are cached, including import errors.
@functools.cache
def _deep_gemm_module() -> ModuleType | Exception:
    # A GPU build of vLLM includes a copy.
    return _try_import("deep_gemm" if importlib.util.find_spec("deep_gemm") else "vllm.third_party.deep_gemm")


@functools.cache
def _torchao_module() -> ModuleType | Exception:
    return _try_import("torchao.prototype.blockwise_fp8_training.kernels")


def _try_import(name: str) -> ModuleType | Exception:
    """Returns a module, or the exception of its import."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 (third-party code runs at import)
        # The exception may be of any class: DeepGEMM asserts that CUDA_HOME exists, and torchao
        # raises ValueError.
        return error


@dataclass(frozen=True, slots=True)
class _GemmBackend:
    run: Callable[[Fp8Blocks, Fp8Blocks, torch.dtype], Tensor]  # (A, B, output dtype) -> A B^T
    # (A, B, output dtype) -> why the backend cannot run, and what to install; None if it can.
    unsupported_reason: Callable[[Fp8Blocks, Fp8Blocks, torch.dtype], str | None]


# `auto` uses the first backend in this order that can run. On a GPU, the tensor core sums 128
# products in its accumulator, and only these sums are added in float32. So the fast backends match
# the reference within a tolerance, but not bit for bit.
BACKENDS = {
    # torch.nn.functional.scaled_mm calls cuBLASLt. Unlike DeepGEMM, it needs neither another
    # package nor a compiler at run time, so it comes first.
    "scaled_mm": _GemmBackend(_scaled_mm, _scaled_mm_unsupported),
    # DeepGEMM is imported from the package `deep_gemm` or from the copy in a GPU build of vLLM.
    "deep_gemm": _GemmBackend(_deep_gemm, _deep_gemm_unsupported),
    # The Triton GEMMs of torchao's prototype of block-wise training are the slowest backend on a
    # GPU.
    "torchao": _GemmBackend(_torchao, _torchao_unsupported),
    # The reference runs on any device, in float32. Tests compare the other backends with it.
    "reference": _GemmBackend(_reference, _always_supported),
}
