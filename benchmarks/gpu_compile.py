"""Static GPU figures without a GPU: compiled and counted, never run.

    PYTHONPATH=.venv/triton python benchmarks/gpu_compile.py    # `make test` fills that folder; with CUDA it is not needed

1. The Triton kernels are compiled ahead of time for Hopper (sm_90a). ptxas reports registers and shared memory per program, and
   register spills; these figures give the number of programs that fit on a multiprocessor at once.
2. The block masks of FlexAttention for rows of 16,384 tokens, as in the shipped configs: computed tiles of
   128 x 128 over the tiles that the allowed pairs would fill, and tiles of a causal mask over computed tiles.
3. The floating-point operations of forward and backward on such a row: the matrix products of the real model on torch's meta
   device, counted by its FlopCounterMode, and attention by its tiles. Next to them are the lower bounds in seconds on an H100
   and an H200: for the operations at peak bfloat16 rate, and for the bytes of weights, gradients and AdamW at peak memory
   bandwidth, on one GPU that would hold them all.
4. Every place where one update of a small model reads a value of the device (`item`, `tolist`, `cpu`, ...): on a GPU each read
   is a synchronization.

Without triton, the script skips the first table and says so.
"""

import json
import re
import subprocess
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import step
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from torchtune.modules import TransformerDecoder

from torchtune_ext.kernels.packed_attention import TILE_SIZE, block_mask, pad_ends
from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.pipeline.packing import Row, RowCostModel, pack
from torchtune_ext.policy import from_config
from torchtune_ext.policy.builder import build_on_meta, build_policy
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.policy.hub import hub_model_config
from torchtune_ext.policy.logprobs import PackedPolicy
from torchtune_ext.training.distributed import Ranks
from torchtune_ext.training.learner import Learner

# Of a multiprocessor of Hopper: registers, bytes of shared memory, threads, programs.
REGISTERS, SHARED, THREADS, PROGRAMS = 65536, 227 << 10, 2048, 32
GPUS = {"H100": (989e12, 3.35e12), "H200": (989e12, 4.8e12)}  # operations/s in bfloat16 without sparsity, bytes/s
# Tokens of prompt and completion.
SHAPES = {"short": (300, 100), "long prompt": (1200, 150), "long answer": (200, 2000)}
ROW_TOKENS = 16384
# Bytes of a parameter in float32: its gradient is written and read, itself and both moments are read and written.
ADAMW = 4 * (2 + 2 + 4)
# Tensor methods that return a Python number and synchronize with the device.
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


def table(title: str, *rows: tuple) -> None:
    print(f"\n### {title}\n")
    for i, row in enumerate(rows):
        print(f"| {' | '.join(map(str, row))} |" + (f"\n{'|---' * len(row)}|" if i == 0 else ""), flush=True)


def compiled_kernels() -> Iterator[tuple]:
    """Return one row for each variant of a kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from torchtune_ext.kernels import fp8_quantize_triton as kernels

    ptxas = next(Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas"))
    types = {"x_ptr": "*bf16", "w_ptr": "*bf16", "values_ptr": "*fp8e4nv", "scales_ptr": "*fp32"}
    types |= dict.fromkeys(("M", "K", "N", "leading", "stride_m", "stride_n"), "i32")
    forms = {
        "rows": (kernels.activation_kernel, kernels.NUM_WARPS, {"COLUMNS": False, "WIDTH": kernels.BLOCK_SIZE}),
        "columns": (
            kernels.activation_kernel,
            kernels.COLUMNS_WARPS,
            {"COLUMNS": True, "WIDTH": kernels.COLUMNS_WIDTH},
        ),
        "weight": (kernels.weight_kernel, kernels.NUM_WARPS, {}),
    }
    for form, (kernel, warps, shape) in forms.items():
        constants = {"stride_k": 1} | shape
        constants |= {"FLOOR_BITS": kernels._bits(1e-12), "MAX": 448.0, "SIZE": kernels.BLOCK_SIZE}
        source = ASTSource(
            kernel,
            {name: types.get(name, "constexpr") for name in kernel.arg_names},
            {name: value for name, value in constants.items() if name in kernel.arg_names},
            {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in types},
        )
        program = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(program.asm["ptx"])
            file.flush()
            command = [ptxas, "-v", "--gpu-name", "sm_90a", file.name, "-o", "/dev/null"]
            log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        registers = int(re.search(r"Used (\d+) registers", log)[1])
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
        shared, threads = program.metadata.shared, 32 * warps
        fit = min(REGISTERS // (registers * threads), SHARED // max(1, shared), THREADS // threads, PROGRAMS)
        yield form, registers, spilled, f"{shared / 1024:.1f}", fit, f"{fit * threads / THREADS:.0%}"


def rows_of(prompt: int, completion: int) -> list[Row]:
    groups = step.make_groups(prompt, completion, ROW_TOKENS)
    return pack(groups, ROW_TOKENS, cost_model=RowCostModel(tile=TILE_SIZE))[0]


def tiles(row: Row) -> int:
    """Return the tiles that FlexAttention computes for a row."""
    mask = block_mask(pad_ends(row.ends_T))
    return int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())


def block_masks() -> Iterator[tuple]:
    for name, (prompt, completion) in SHAPES.items():
        (row, *_) = rows_of(prompt, completion)
        tokens, computed = row.tokens_T.numel(), tiles(row)
        needed = int((row.positions_T + 1).sum())
        side = -(-tokens // TILE_SIZE)
        yield (
            f"{name}, {prompt}/{completion} x {step.SAMPLES}", f"{tokens:,}", f"{computed:,}",
            f"{computed * TILE_SIZE**2 / needed:.2f}", f"{side * (side + 1) / 2 / computed:.1f}",
        )  # fmt: skip


def step_of(name: str, checkpointing: bool) -> Iterator[tuple]:
    """Return operations and bytes of forward and backward on one row, and of an update, on one GPU with the whole model."""
    model = meta_model(name)
    parameters = sum(p.numel() for p in model.parameters())
    for shape, (prompt, completion) in SHAPES.items():
        row = rows_of(prompt, completion)[0]
        operations, attention = operations_of(model, row, checkpointing)
        seconds = [f"{operations / peak:.2f}" for peak, _ in GPUS.values()]
        moved = parameters * (2 * (2 + checkpointing) + ADAMW)
        seconds += [f"{moved / bandwidth:.2f}" for _, bandwidth in GPUS.values()]
        yield (
            name + (", checkpointing" if checkpointing else ""), shape, f"{row.tokens_T.numel():,}", f"{operations / 1e12:.0f}",
            f"{attention / operations:.0%}", f"{moved / 1e9:.0f}", *seconds,
        )  # fmt: skip


def meta_model(name: str) -> TransformerDecoder:
    """Return a published model in bfloat16 on the meta device."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hub_model_config(name)))
        return build_on_meta(partial(from_config, folder)).to(torch.bfloat16)


def operations_of(model: TransformerDecoder, row: Row, checkpointing: bool = False) -> tuple[float, float]:
    """Return the FLOPs of forward and backward on a row: the total, and the part of attention."""
    policy = PackedPolicy(model)
    # Operations of a pair of query and key in the forward.
    attention = sum(4 * layer.attn.num_heads * layer.attn.head_dim for layer in model.layers)
    mask = torch.ones(1, row.tokens_T.numel(), row.tokens_T.numel(), dtype=torch.bool, device="meta")
    with (
        mock.patch("torchtune_ext.policy.logprobs.packed_mask", lambda *_: mask),
        FlopCounterMode(display=False) as counter,
    ):
        output = policy(row.to(torch.device("meta")))
        forward = count_matmuls(counter)
        output.logprobs_L.sum().backward()
    again = forward if checkpointing else 0  # layers are computed once more; the head is not, and counts little
    pairs = tiles(row) * TILE_SIZE**2 * attention * (3.5 + checkpointing)
    return count_matmuls(counter) + again + pairs, pairs


def count_matmuls(counter: FlopCounterMode) -> int:
    """Return the FLOPs of the linear layers. Attention, over a dense mask in place of the tiles, is batched."""
    counts = counter.get_flop_counts()["Global"]
    return counts[torch.ops.aten.mm] + counts.get(torch.ops.aten.addmm, 0)


@contextmanager
def count_calls(where: Counter) -> Iterator[None]:
    """Inside the block, count every read of a tensor value by the source line of this project that causes it."""

    def watching(name: str):
        theirs = getattr(Tensor, name)

        def ours(tensor: Tensor, *args, **kwargs):
            frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_stack()[:-1]]
            mine = [frame for frame in frames if {"torchtune_ext", "kernels"} & set(frame[0].parts)]
            if mine:
                file, line = mine[-1]
                where[f"{'/'.join(file.parts[-2:])}:{line} `{name}`"] += 1
            return theirs(tensor, *args, **kwargs)

        return mock.patch.object(Tensor, name, ours)

    with ExitStack() as stack:
        for name in READS:
            stack.enter_context(watching(name))
        yield


def synchronizations() -> Iterator[tuple]:
    """Return the source lines where one update on three rows, with clipping and step, reads values."""
    with tempfile.TemporaryDirectory() as folder:
        source = HFModel(step.make_model(Path(folder), step.SMALL))
        policy = build_policy(partial(from_config, folder), source, torch.device("cpu"), torch.float32)
        optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=1e-5, fused=True)
        learner = Learner(
            policy,
            PolicyLoss(),
            Ranks(0, 1, torch.device("cpu")),
            optimizer=optimizer,
            max_grad_norm=1.0,
        )
        rows = pack(step.make_groups(60, 40, 3000), 1000, cost_model=learner.cost_model)[0][:3]
        where: Counter = Counter()
        with count_calls(where):
            learner.step(learner.forward_backward(rows)[1], str)
    yield from where.items()


def main() -> None:
    print("Compiled and counted, never run: no figure here was measured on a GPU.")
    if find_spec("triton") is None:
        print("\nKernels skipped: triton is not installed. Fix: set PYTHONPATH as in the docstring of this script.")
    else:
        head = (
            "kernel",
            "registers",
            "spilled bytes",
            "shared memory, KiB",
            "programs per multiprocessor",
            "occupancy",
        )
        table("Triton kernels for sm_90a", head, *compiled_kernels())
    head = "rows", "tokens", "computed tiles", "computed / allowed", "causal / computed"
    table(f"Block masks, tiles of {TILE_SIZE} x {TILE_SIZE}", head, *block_masks())
    head = "model", "rows", "tokens", "TFLOP", "attention share", "GB moved"
    head += tuple(f"{gpu}: s for {what}" for what in ("TFLOP", "GB") for gpu in GPUS)
    steps = [row for name in ("Qwen2.5-7B", "Qwen3-8B") for again in (False, True) for row in step_of(name, again)]
    table("A row forward and backward, and an update", head, *steps)
    table("Reads of the device in an update on three rows", ("where", "times"), *synchronizations())


if __name__ == "__main__":
    main()
