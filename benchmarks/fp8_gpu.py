"""FP8 on one Hopper GPU: quantizers against the copy bandwidth; GEMMs, linear layers and a transformer block against bfloat16.

    python benchmarks/fp8_gpu.py [--tokens 8192 32768] [--models qwen3_8b qwen2_5_32b] [--parts quantize gemm linear block]
    python benchmarks/fp8_gpu.py --smoke        # every part once, tiny, on a CPU: tries the script, measures nothing

Prints Markdown tables and ends within about eight minutes (`--minutes`). The row of a failed case gives the reason. The exit
status is 1 after a failure (other than lack of memory or time), and if the error of a backend is too large.

Requirements:

* `pip install -e .`, the package without an engine: it brings torch 2.13.0, which the package index has for CUDA 13 and with
  triton (`scaled_mm` needs torch 2.10 or later, built for CUDA 12.9 or later). A bare checkout works, too, with torch,
  torchtune 0.6.1 and torchao 0.15.
* Optional, for DeepGEMM: nvcc (CUDA_HOME), which compiles each new shape at its first call, and one of these builds:
  the copy inside a GPU build of vLLM (0.32 for torch 2.13: `pip install -e ".[vllm]"`; 0.26 for torch 2.11), or
  `pip install --no-deps sgl-deep-gemm apache-tvm-ffi`. Of sgl-deep-gemm, 0.1.5.post1 with apache-tvm-ffi 0.1.11 has the symbols
  of torch 2.11 for CUDA 13; later releases need a newer torch, and no release was tested with 2.13.

Method: medians of CUDA events after a warm-up, on random data. The compared versions take turns, so bfloat16 and FP8 run at
the same temperature and clock rates. Before each measurement the L2 cache is overwritten, and the launches are queued while the
GPU waits. A row says "host-bound" if the GPU began before all launches were queued: it may then measure Python. An operation of
a GEMM is a product or a sum: 2 M N K operations.
"""

import argparse
import contextlib
import gc
import importlib.metadata
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from fp8_gpu_cases import (  # before torchtune_ext, which it finds in a bare checkout
    MODELS,
    Model,
    Timer,
    build_block,
    convert_to_fp8,
    gemm_sides,
    memory,
    relative_error,
    step,
)
from torch import Tensor, nn

from torchtune_ext.kernels import fp8_gemm
from torchtune_ext.kernels.fp8_quantize import (
    Fp8Blocks,
    quantize_columns,
    quantize_rows,
    quantize_weight,
)
from torchtune_ext.policy.fp8.linear import Fp8Config

ERROR = 2**-7  # relative, in the norm: a fifth of the quantization error; the error of a tensor core's sums is lower
QUEUE_MS = 20.0  # time for the host to queue a block, forward and backward
SHARES = {"quantize": 1, "gemm": 4, "linear": 2, "block": 3}  # of the time that is left
AIMS = {  # wanted, of what
    "gemm": (1.6, "FProp and DGrad: times a bfloat16 matmul, operands quantized before"),
    "linear": (1.35, "linear layer, forward and backward: times bfloat16"),
    "quantize": (0.8, "quantization: share of the bandwidth of a copy of as many bytes"),
}


class Report:
    """Print tables row by row, so that an interrupted run keeps its finished rows, and gather results."""

    def __init__(self, out: Path | None, smoke: bool) -> None:
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
        self.file = out.open("w") if out else None
        self.smoke = smoke
        self.results = {aim: defaultdict(list) for aim in AIMS}  # aim -> backend -> numbers
        self.wrong: list[str] = []  # failed cases, and cases with a large error
        self.deadline = math.inf

    def line(self, text: str = "") -> None:
        print(text, flush=True)
        if self.file:
            print(text, file=self.file, flush=True)

    def table(self, title: str, columns: str, note: str = "") -> None:
        self.line(f"\n### {title}{' (smoke run, not a measurement)' if self.smoke else ''}\n")
        if note:
            self.line(f"{note}\n")
        self.row(*columns.split(" | "))
        self.line("|" + "---|" * len(columns.split(" | ")))

    def row(self, *cells: object) -> None:
        self.line("| " + " | ".join(map(str, cells)) + " |")

    def attempt(self, labels: tuple, case: Callable[[], tuple]) -> None:
        """Print a row of `labels` and the cells of `case`, or the reason for their absence."""
        problem = None
        if time.monotonic() > self.deadline:
            problem = "skipped: the time limit of this part is reached (--minutes)"
        else:
            try:
                cells = case()
            except torch.OutOfMemoryError:
                problem = "out of memory"
            except Exception as error:  # noqa: BLE001 (the table names it)
                text = " ".join(str(error).split()).replace("|", "/")
                problem = f"{type(error).__name__}: {text[:300]}"
                self.wrong.append(f"failed: {', '.join(map(str, labels))}")
        if problem is None:
            self.row(*labels, *cells)
            return
        self.row(*labels, problem)
        gc.collect()
        with contextlib.suppress(Exception):  # after some CUDA errors every call fails
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Run:
    """Shared settings and tools of all parts."""

    report: Report
    timer: Timer
    device: torch.device
    models: dict[str, Model]
    tokens: list[int]
    sequence: int
    backends: dict[str, list[str]]  # GEMM -> those that can run and are fast, or else the reference

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=self.device).mul_(scale)

    def layer_backends(self) -> list[str]:
        """Backends for whole layers; torchao's GEMMs, the slowest, are excluded."""
        names = [name for name in self.backends["fprop"] if all(name in names for names in self.backends.values())]
        return [name for name in names if name not in ("torchao", "reference")] or ["auto"]


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def header(report: Report, timer: Timer, device: torch.device) -> dict[str, list[str]]:
    """Print machine, peak rates and backends. Return GEMM -> backends to measure."""
    name = torch.cuda.get_device_name(device) if timer.cuda else "CPU"
    report.line(f"{name}; torch {torch.__version__}, CUDA {torch.version.cuda}")
    report.line(
        ", ".join(f"{p} {version(p)}" for p in ("triton", "torchao", "sgl-deep-gemm", "apache-tvm-ffi", "vllm"))
    )
    size, width = (4 << 30, 8192) if timer.cuda else (1 << 20, 256)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(width, width, dtype=torch.bfloat16, device=device) for _ in range(2))
    copy_ms, matmul_ms = timer.one(copy=lambda: target.copy_(source), matmul=lambda: a @ b)
    report.table("Ceilings", "what | measured")
    report.row(f"copy of {size >> 20} MiB, bytes read and written", f"{2 * size / copy_ms / 1e6:.0f} GB/s")
    report.row(f"bfloat16 matmul, {width}^3", f"{2 * width**3 / matmul_ms / 1e9:.1f} TFLOP/s")

    report.table("Backends", "backend | GEMM | can run")
    x, w, dy = (torch.randn(256, 256, dtype=torch.bfloat16, device=device) for _ in range(3))
    backends, chosen = defaultdict(list), {}
    for gemm, (quantize, _) in gemm_sides(x, w, dy, "torch").items():
        first, second = quantize()
        a, b = (first.T if gemm == "wgrad" else first), (second if gemm == "fprop" else second.T)
        for name, backend in fp8_gemm.BACKENDS.items():
            objection = backend.unsupported_reason(a, b, torch.bfloat16)
            if objection is None and name != "reference":
                backends[gemm].append(name)
            report.row(name, gemm, "yes" if objection is None else f"no: {' '.join(objection.split())}")
        backends[gemm] = backends[gemm] or ["reference"]
        chosen[gemm] = fp8_gemm.choose_backend(gemm, first, second, torch.bfloat16).backend
    report.line("\n`auto` takes " + ", ".join(f"{backend} for {gemm}" for gemm, backend in chosen.items()))
    return backends


def part_quantize(run: Run) -> None:
    run.report.table("Quantizers", "model | what | matrix | backend | ms | GB/s | of a copy of as many bytes")
    kinds = ("triton", "torch") if run.timer.cuda else ("torch",)

    def case(quantize: Callable, shape: tuple[int, int], kind: str) -> tuple:
        x = run.random(*shape)
        forms = quantize(x, backend=kind)
        forms = (forms,) if isinstance(forms, Fp8Blocks) else forms
        moved = x.nbytes + sum(form.values.nbytes + form.scales.nbytes for form in forms)
        del forms
        source = torch.empty(moved // 2, dtype=torch.uint8, device=run.device)  # read, and as much written
        target = torch.empty_like(source)
        copy_ms, ms = run.timer.one(copy=lambda: target.copy_(source), quantize=lambda: quantize(x, backend=kind))
        run.report.results["quantize"][kind].append(copy_ms / ms)
        return f"{ms:.3f}", f"{moved / ms / 1e6:.0f}", f"{copy_ms / ms:.0%}{run.timer.remark}"

    for name, model in run.models.items():
        widths = sorted({width for shape in model.linears() for width in shape})
        work = [
            (quantize, (tokens, width))
            for tokens in run.tokens
            for width in widths
            for quantize in (quantize_rows, quantize_columns)
        ]
        for quantize, shape in [*work, *((quantize_weight, shape) for shape in model.linears())]:
            what = quantize.__name__.removeprefix("quantize_").replace("_", " ")
            for kind in kinds:
                labels = name, what, f"{shape[0]} x {shape[1]}", kind
                run.report.attempt(labels, lambda q=quantize, s=shape, k=kind: case(q, s, k))


def part_gemm(run: Run) -> None:
    run.report.table(
        "GEMMs: times bfloat16 without and with the quantization of both operands",
        "model | layers | out x in | tokens | GEMM | backend | ms | TFLOP/s | bfloat16 | without | with | error",
    )

    def case(shape: tuple[int, int], tokens: int, gemm: str, backend: str) -> tuple:
        (N, K), function, dtype = shape, getattr(fp8_gemm, gemm), torch.bfloat16
        x, w, dy = run.random(tokens, K), run.random(N, K, scale=0.02), run.random(tokens, N, scale=1e-3)
        quantize, plain = gemm_sides(x, w, dy)[gemm]
        operands = quantize()
        error, flag = relative_error(gemm, backend, *operands), ""
        if not error <= ERROR:  # nor NaN
            flag = " TOO LARGE"
            run.report.wrong.append(
                f"error above {ERROR:.1e}: {backend}, {gemm}, {N} x {K}, {tokens} tokens: {error:.1e}"
            )
        plain_ms, ms, whole_ms = run.timer.one(
            plain=plain,
            fp8=lambda: function(*operands, dtype, backend),
            whole=lambda: function(*quantize(), dtype, backend),
        )
        flops = 2 * tokens * N * K
        if gemm != "wgrad" and not flag:
            run.report.results["gemm"][backend].append(plain_ms / ms)
        rates = (f"{flops / some / 1e9:.0f}" for some in (ms, plain_ms))
        ratios = f"{plain_ms / ms:.2f}x", f"{plain_ms / whole_ms:.2f}x{run.timer.remark}"
        return f"{ms:.3f}", *rates, *ratios, f"{error:.1e}{flag}"

    work = [
        (name, layers, shape, tokens, gemm, backend)
        for tokens in run.tokens
        for name, model in run.models.items()
        for shape, (layers, _) in model.linears().items()
        for gemm, backends in run.backends.items()
        for backend in backends
        if backend != "torchao" or tokens == run.tokens[0]
    ]
    # torchao comes last: it autotunes each shape, which takes seconds.
    work.sort(key=lambda row: row[-1] == "torchao")
    for name, layers, shape, *rest in work:
        labels = name, layers, f"{shape[0]} x {shape[1]}", *rest
        run.report.attempt(labels, lambda s=shape, r=rest: case(s, *r))


def compare(run: Run, module: nn.Module, x: Tensor, config: Fp8Config, compiled: bool = False) -> tuple[float, tuple]:
    """Compare a module in FP8 with itself in bfloat16. Return the ratio and the cells for COLUMNS."""
    x.requires_grad_()
    versions = {"bf16": module, "fp8": convert_to_fp8(module, config)}
    if compiled:
        torch.compiler.reset()
        how = "inductor" if run.timer.cuda else "aot_eager"  # the CPU's compiler would take a minute
        versions = {name: torch.compile(version, dynamic=False, backend=how) for name, version in versions.items()}
    with torch.no_grad():
        dy = torch.randn_like(module(x)).mul_(1e-3)
    times = run.timer.measure({name: step(version, x, dy) for name, version in versions.items()}, QUEUE_MS)
    linears = sum(layer.weight.numel() for layer in module.modules() if isinstance(layer, nn.Linear))
    flops = 6 * x.numel() // x.shape[-1] * linears  # three GEMMs
    sizes = zip(*(memory(version, x, dy) for version in versions.values()), strict=True)
    ratio = sum(times["bf16"]) / sum(times["fp8"])
    milliseconds = (f"{stage:.3f}" for name in versions for stage in times[name])
    rates = f"{ratio:.2f}x{run.timer.remark}", f"{flops / sum(times['fp8']) / 1e9:.0f}"
    return ratio, (*milliseconds, *rates, *(" / ".join(pair) for pair in sizes))


COLUMNS = (
    "bfloat16 forward, ms | backward | FP8 forward, ms | backward | times bfloat16 | TFLOP/s: its GEMMs, in all its time | "
    "MiB kept, bfloat16 / FP8 | peak MiB, bfloat16 / FP8"
)


def part_linear(run: Run) -> None:
    run.report.table("Linear layers", f"model | layers | out x in | tokens | backend | saved | {COLUMNS}")

    def case(shape: tuple[int, int], bias: bool, tokens: int, config: Fp8Config) -> tuple:
        N, K = shape
        layer = nn.Linear(K, N, bias=bias, device=run.device, dtype=torch.bfloat16)
        ratio, cells = compare(run, layer, run.random(tokens, K), config)
        run.report.results["linear"][f"{config.backend}, {config.save_activations} saved"].append(ratio)
        return cells

    for tokens in run.tokens:
        for name, model in run.models.items():
            for shape, (layers, bias) in model.linears().items():
                for backend in run.layer_backends():
                    for saved in ("fp8", "full"):
                        labels = name, layers, f"{shape[0]} x {shape[1]}", tokens, backend, saved
                        config = Fp8Config(backend=backend, save_activations=saved)
                        run.report.attempt(labels, lambda s=shape, b=bias, t=tokens, c=config: case(s, b, t, c))


def part_block(run: Run) -> None:
    run.report.table("A transformer block, causal attention", f"model | sequences | mode | backend | {COLUMNS}")

    def case(model: Model, count: int, length: int, backend: str, compiled: bool) -> tuple:
        block = build_block(model, length, run.device)
        x = run.random(count, length, model.hidden)
        return compare(run, block, x, Fp8Config(backend=backend), compiled)[1]

    for tokens in run.tokens:
        length = min(tokens, run.sequence)
        count = tokens // length
        for name, model in run.models.items():
            modes = [(backend, False) for backend in run.layer_backends()]
            if tokens == run.tokens[0]:  # compiling takes its time
                modes.append(("auto", True))
            for backend, compiled in modes:
                labels = name, f"{count} x {length}", "compiled" if compiled else "eager", backend
                values = (model, count, length, backend, compiled)
                run.report.attempt(labels, lambda values=values: case(*values))


PARTS = {"quantize": part_quantize, "gemm": part_gemm, "linear": part_linear, "block": part_block}


def aims(report: Report) -> None:
    """Print the backend with the best median for each aim."""
    report.table("Aims", "aim | wanted | measured, median | worst | reached | backend | measurements")
    for aim, (goal, what) in AIMS.items():
        results = report.results[aim]
        if not results:
            report.row(what, f"{goal:g}", "not measured")
            continue
        best = max(results, key=lambda backend: median(results[backend]))
        middle, worst = median(results[best]), min(results[best])
        reached = "yes" if worst >= goal else "in the median" if middle >= goal else "no"
        report.row(what, f"{goal:g}", f"{middle:.2f}", f"{worst:.2f}", reached, best, len(results[best]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=20, help="repeats of each measurement after the warm-up")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens per sequence in the block")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit; later cases are skipped and marked")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    parser.add_argument("--smoke", action="store_true", help="tiny, once, on the CPU: tests the script")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        sys.exit("no CUDA device found; expected a Hopper GPU. Fix: add --smoke to test the script on a CPU")
    torch.manual_seed(0)
    end = time.monotonic() + 60 * args.minutes
    device = torch.device("cpu" if args.smoke else "cuda")
    models, tokens, sequence = {name: MODELS[name] for name in args.models}, sorted(set(args.tokens)), args.sequence
    if args.smoke:
        models = {name: replace(model, hidden=256, heads=2, kv_heads=1, mlp=384) for name, model in models.items()}
        tokens, sequence = [200, 256], 128
    report, timer = Report(args.out, args.smoke), Timer(device, 1 if args.smoke else args.repeats)
    run = Run(report, timer, device, models, tokens, sequence, header(report, timer, device))
    parts = [part for part in PARTS if part in args.parts]
    for number, part in enumerate(parts):
        share = SHARES[part] / sum(SHARES[other] for other in parts[number:])
        report.deadline = time.monotonic() + share * (end - time.monotonic())
        PARTS[part](run)
    aims(report)
    for wrong in report.wrong:
        report.line(f"\n{wrong}")
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
