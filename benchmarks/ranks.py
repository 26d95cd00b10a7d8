"""CPU cost of ranks that wait for rank 0, and latency of its broadcasts.

    python benchmarks/ranks.py [--ranks 4] [--seconds 20] [--megabytes 1 16 64]
    python benchmarks/ranks.py --device cuda      # as many GPUs as ranks

Rank 0 samples for minutes while the other ranks wait in a broadcast. The first table has the CPU time of each rank during such
a wait, in seconds and as a fraction of a core, including the threads of gloo. On GPUs the wait is repeated over NCCL, the
former backend of control messages (now gloo), and the table adds the fraction of time in which the GPU was busy, as the
driver reports it. The second table has the latency until a message reaches all ranks, and the bandwidth: a step sends its
packed rows in one such message, 64 bytes per trained token and 24 per other token. Each message is sent five times; the
table has the median and the range.

All ranks run on this machine, so the link is its memory: between machines, measure the link itself.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from torchtune_ext.training.distributed import Ranks, close_ranks, init_ranks

TURNS = 5
SETTLE_S = 1.0  # after the start, before a wait is measured: the threads of the process group come up


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0, help="that rank 0 sleeps")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 16, 64])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    # Folder for the results of each rank.
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def busy_gpu(ranks: Ranks) -> float | None:
    """Return the recent utilization of this rank's GPU, or None if the driver does not report it."""
    if ranks.device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(ranks.device) / 100
    except (ModuleNotFoundError, RuntimeError):
        return None


def wait(ranks: Ranks, seconds: float, over: str) -> dict:
    """Return the CPU time and GPU utilization of this rank while rank 0 slept."""
    dist.barrier()
    time.sleep(SETTLE_S)
    ranks.broadcast(None)
    began, used = time.monotonic(), time.process_time()
    if ranks.is_main:
        time.sleep(seconds)
    if over == "gloo":
        ranks.broadcast("continue")
    else:
        word = torch.ones(1, device=ranks.device)
        dist.broadcast(word, src=0)
        word.item()
    took, used = time.monotonic() - began, time.process_time() - used
    # Rank 0 did not wait, so its GPU says nothing.
    busy = None if ranks.is_main else busy_gpu(ranks)
    return {"over": over, "rank": ranks.rank, "seconds": took, "cpu": used, "gpu": busy}


def message(ranks: Ranks, megabytes: float) -> dict:
    """Return the seconds from the start of a broadcast until all ranks have it."""
    payload = {"rows": torch.zeros(int(megabytes * 1e6), dtype=torch.uint8)} if ranks.is_main else None
    seconds = []
    for _ in range(TURNS):
        dist.barrier()
        began = time.monotonic()
        copy = ranks.broadcast(payload)
        dist.barrier()
        seconds.append(time.monotonic() - began)
        assert copy["rows"].numel() == int(megabytes * 1e6)
    return {"megabytes": megabytes, "seconds": seconds}


def rank(args: argparse.Namespace) -> None:
    ranks = init_ranks(args.device)
    ways = ["gloo", "NCCL"] if ranks.device.type == "cuda" else ["gloo"]
    result = {"waits": [wait(ranks, args.seconds, way) for way in ways]}
    result["messages"] = [message(ranks, size) for size in args.megabytes]
    (args.rank_of / f"{ranks.rank}.json").write_text(json.dumps(result))
    close_ranks()


def main() -> None:
    args = parse_args()
    if args.rank_of is not None:
        return rank(args)
    with tempfile.TemporaryDirectory() as folder:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.ranks)]
        command = [sys.executable, *launch, __file__, *sys.argv[1:], "--rank-of", folder]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        results = [json.loads((Path(folder) / f"{r}.json").read_text()) for r in range(args.ranks)]
    print(f"rank 0 sleeps for {args.seconds:g} s, and {args.ranks - 1} others wait in a broadcast, on {args.device}\n")
    print("| backend | rank | CPU time, s | share of a core | GPU busy |\n|---|---|---|---|---|")
    for turn in range(len(results[0]["waits"])):
        for each in (one["waits"][turn] for one in results):
            gpu = "-" if each["gpu"] is None else f"{each['gpu']:.0%}"
            share = f"{each['cpu'] / each['seconds']:.2%}"
            print(f"| {each['over']} | {each['rank']} | {each['cpu']:.3f} | {share} | {gpu} |")
    print("\n| message, MB | median, s | range, s | MB/s |\n|---|---|---|---|")
    for each in results[0]["messages"]:
        s = median(each["seconds"])
        span = f"{min(each['seconds']):.4f} - {max(each['seconds']):.4f}"
        print(f"| {each['megabytes']:g} | {s:.4f} | {span} | {each['megabytes'] / s:,.0f} |")


if __name__ == "__main__":
    main()
