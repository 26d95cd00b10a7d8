"""Latency of weight sync, and the pause of the engine.

    python benchmarks/publish.py [--sizes 2.5M 100M] [--repeats 10] [--device cuda] [--transfer shm gloo]

Random models in the shape of Qwen2, bfloat16, published into an engine that is idle and into one that is sampling.
"copy" is the trainer's copy into shared memory, during which the engine continues to generate; "pause" is the time without
generation, and includes "load". The trainer's checksums are in "copy", the engine's in "load". The first weight sync also
allocates the pages of the shared memory. At the end the same model gets adapters of rank 8 on every linear layer, and the sync
of adapters alternates with the sync of the full model, in an engine with LoRA.

With --transfer the weights go to servers instead, each started with that `engine.transfer`: shm to a server on this machine;
gloo to a server in its own namespaces over a virtual link (as root; otherwise over loopback), without shared memory; nccl from
GPU to GPU. The table also has the bare link: one TCP connection that carries the same number of bytes.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import publish_transfer
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchtune_ext.sampling.engine import Engine, EngineConfig, PublishReport, SamplingConfig
from torchtune_ext.sampling.weight_buffer import checksum

SHAPES = {  # name: vocabulary, width, feed-forward width, layers, heads, key-value heads
    "2.5M": (4096, 256, 512, 2, 4, 2),
    "100M": (32000, 768, 3072, 9, 12, 4),
    "500M": (151936, 896, 4864, 24, 14, 2),
    "7B": (152064, 3584, 18944, 28, 28, 4),
}
RANK = 8


def make_model(size: str, device: str) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    vocabulary, width, inner, layers, heads, kv_heads = SHAPES[size]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        return Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)


def show(name: str, reports: list[PublishReport]) -> None:
    def middle(values: list[float]) -> str:
        return f"{1e3 * np.median(values):7.1f} ms (max {1e3 * max(values):6.1f})"

    print(
        f"  {name:10s} copy {middle([r.copy_s for r in reports])}  pause {middle([r.pause_s for r in reports])}  "
        f"load {middle([r.load_s for r in reports])}",
        flush=True,
    )


def adapter_of(model: Qwen2ForCausalLM) -> tuple[dict[str, torch.Tensor], dict]:
    """Return the PEFT tensors of a random adapter on every linear layer, and their config."""
    tensors, targets = {}, set()
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and "layers" in name:
            stem = "base_model.model." + name.removesuffix(".weight")
            targets.add(stem.rpartition(".")[2])
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, weight.shape[1]).to(weight)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(weight.shape[0], RANK).to(weight) * 0.01
    return tensors, {"r": RANK, "lora_alpha": RANK, "target_modules": sorted(targets)}


def run_adapter(size: str, device: str, repeats: int, folder: Path) -> None:
    model = make_model(size, device)
    tensors, peft = adapter_of(model)
    config = EngineConfig(
        max_model_len=2048, kv_cache_bytes=256 << 20, lora_rank=RANK, lora_targets=tuple(peft["target_modules"])
    )
    with Engine(str(folder / size), config, str(folder)) as engine:
        engine.start()
        engine.wait_ready()
        versions = iter(range(1, 10**6))
        engine.sample([[1, 2, 3]], 1, SamplingConfig(max_tokens=4))
        whole, adapters = [], []
        for _ in range(repeats + 1):
            whole.append(engine.publish(model.named_parameters(), next(versions)))
            adapters.append(engine.publish(tensors.items(), next(versions), peft))
        show("whole", whole[1:])
        show("adapter", adapters[1:])
        share = adapters[0].bytes / whole[0].bytes
        seconds = [np.median([r.copy_s + r.pause_s for r in reports[1:]]) for reports in (adapters, whole)]
        print(
            f"  adapter of rank {RANK}: {share:.1%} of the bytes, {seconds[0] / seconds[1]:.0%} of the seconds",
            flush=True,
        )


def run(size: str, device: str, repeats: int, folder: Path) -> None:
    model = make_model(size, device)
    model.save_pretrained(folder / size)
    parameters = sum(p.numel() for p in model.parameters())
    config = EngineConfig(max_model_len=2048, kv_cache_bytes=256 << 20)
    with Engine(str(folder / size), config, str(folder)) as engine:
        engine.start()
        engine.wait_ready()
        versions = iter(range(1, 10**6))

        def publish() -> PublishReport:
            return engine.publish(model.named_parameters(), next(versions))

        engine.sample([[1, 2, 3]], 1, SamplingConfig(max_tokens=4))
        first = publish()
        print(f"\n{size}: {parameters / 1e6:.1f}M parameters, {first.bytes / 1e6:.0f} MB")
        show("first", [first])
        idle = [publish() for _ in range(repeats)]
        show("idle", idle)
        seconds = []
        for _ in range(repeats):
            started = time.monotonic()
            sums = {name: checksum(tensor) for name, tensor in model.named_parameters()}
            seconds.append(time.monotonic() - started)
        assert engine.checksums() == [sums]
        share = np.median(seconds) / np.median([report.copy_s + report.pause_s for report in idle])
        print(f"  checksums  {1e3 * np.median(seconds):7.1f} ms on each side, {share:.0%} of copy + pause", flush=True)
        groups = [engine.submit([1, 2, 3], 8, SamplingConfig(max_tokens=2000), seed_index=g) for g in range(4)]
        time.sleep(0.5)
        reports = []
        for _ in range(repeats):
            reports.append(publish())
            time.sleep(0.2)
        show("sampling", reports)
        for group in groups:
            group.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=["2.5M", "100M"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the trainer has the model")
    parser.add_argument("--transfer", nargs="+", choices=["shm", "gloo", "nccl"], help="to servers, by these transfers")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for size in args.sizes:
            if args.transfer:
                publish_transfer.compare(make_model(size, args.device), size, args.transfer, args.repeats, Path(folder))
                continue
            run(size, args.device, args.repeats, Path(folder))
            run_adapter(size, args.device, args.repeats, Path(folder))


if __name__ == "__main__":
    main()
