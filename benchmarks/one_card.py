"""Answer the open questions about one GPU in at most 680 s: one command, one table.

    python benchmarks/one_card.py --out OUT                # on a GPU
    python benchmarks/one_card.py --out OUT --device cpu   # every item that can run without a GPU, tiny: tries the script
    python benchmarks/one_card.py --list

Each item runs in a process of its own, which is killed with all its children at the item's limit. Every line is written at
once to OUT/table.md, and output to OUT/item_N.log. Before it measures, an item states what the figure should be: floating-point
operations over the rate of a matmul in bfloat16, and bytes over the bandwidth. Both rates are constants for an H200, follow
from clocks and widths for other GPUs, and are measured on a CPU.

Models have published sizes and random weights, which are made once in `--scratch`. Items of whole runs use a shipped config
with a task whose reward is random. Items with "(stack)" need the packages of the installation page; the others need only torch,
torchtune and the project. Items 4, 5 and 11 use a part of the GPU as large as a 24 GB card: another process holds the rest.

The order is by importance: what does not fit into `--seconds` is left out at the end.
"""

import argparse
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
from one_card_items import HERE, ITEMS, Bench


def end(process: psutil.Popen) -> None:
    """Kill a process and all its descendants, also those in other process groups."""
    for each in [*process.children(recursive=True), process]:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def run_item(number: int, bench: Bench, limit_s: float) -> bool:
    """Run an item in its own process; return whether it succeeded."""
    item, command = ITEMS[number], [sys.executable, str(HERE / "one_card.py"), "--child", str(number)]
    command += ["--device", bench.device, "--out", str(bench.out), "--scratch", str(bench.scratch)]
    bench.say(f"**{item.title}**", f"limit {limit_s:.0f} s{', needs the pinned stack' * item.stack}")
    log = bench.out / f"item_{number}.log"
    started = time.monotonic()
    with log.open("w") as file:
        process = psutil.Popen(command, cwd=HERE, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        timer = threading.Timer(limit_s, end, [process])
        timer.start()
        status = process.wait()
        timer.cancel()
    took = time.monotonic() - started
    if status == 0:
        bench.say("ended", f"after {took:.0f} s")
        return True
    tail = [line for line in log.read_text(errors="replace").splitlines() if line.strip() and not line.startswith("|")]
    reason = "killed at its limit" if took >= limit_s else f"exit status {status}"
    bench.say(
        "FAILED", f"{reason} after {took:.0f} s; {log.name}: {tail[-1][:160].replace('|', '/') if tail else 'empty'}"
    )
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/one_card"))
    parser.add_argument(
        "--scratch", type=Path, default=Path("/tmp/one_card"), help="folder of models and runs, about 25 GB"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--items", type=int, nargs="+", choices=list(ITEMS), default=list(ITEMS))
    parser.add_argument(
        "--seconds", type=float, default=680.0, help="start no item after this time, and kill the last one"
    )
    parser.add_argument("--list", action="store_true", help="print the items and exit")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.list:
        for number, item in ITEMS.items():
            print(f"{number:>2}  {item.seconds:>4} s  {item.title}{' (stack)' * item.stack}")
        return
    out, scratch = args.out.resolve(), args.scratch.resolve()
    out.mkdir(parents=True, exist_ok=True)
    scratch.mkdir(parents=True, exist_ok=True)
    if args.child is not None:
        ITEMS[args.child].measure(Bench(args.child, args.device, out, scratch))
        return
    (out / "table.md").write_text("| item | what | figure |\n|---|---|---|\n")
    stop, succeeded = time.monotonic() + args.seconds, []
    for number in args.items:
        # A CPU compiles and samples more slowly.
        limit_s = min(ITEMS[number].seconds * (4 if args.device == "cpu" else 1), stop - time.monotonic())
        bench = Bench(number, args.device, out, scratch)
        if limit_s < 5:
            bench.say(f"**{ITEMS[number].title}**", "left out: no time is left")
            succeeded.append(False)
        else:
            succeeded.append(run_item(number, bench, limit_s))
    sys.exit(0 if all(succeeded) else 1)


if __name__ == "__main__":
    main()
