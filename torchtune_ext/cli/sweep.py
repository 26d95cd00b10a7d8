"""`torchtune-ext sweep FILE` runs a sweep on this machine.

    torchtune-ext sweep tiny_lr                            one of our sweeps, or a file for W&B
    torchtune-ext sweep my_lr.yaml --jobs 2 max_steps=40   2 runs at a time, an override for all

The same command resumes a sweep that was stopped or killed. Its folder is `runs/sweeps/NAME`
(sweep/runner.py). Exit status: 0 if a run finished, 1 if none did, 2 for a usage error, 128 + N if
signal N stopped the sweep.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from torchtune_ext.cli import plugin
from torchtune_ext.run.errors import FAILURE_STATUS, UsageError
from torchtune_ext.run.output import print_text
from torchtune_ext.sweep.runner import SweepFolder, SweepRunner
from torchtune_ext.sweep.search import next_point
from torchtune_ext.sweep.spec import find_sweep_file, read_sweep

SWEEPS_FOLDER = Path("runs", "sweeps")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torchtune-ext sweep`; `cli` passes all others to `main`."""
    parser.usage = "torchtune-ext sweep FILE [--jobs N] [--out DIR] [--seed N] [key=value ...]"
    parser.epilog = "`key=value` overrides a config key in all runs"
    parser.add_argument("file", metavar="FILE", help="a file in W&B's sweep format, or the name of one of our sweeps")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the sweep's folder (default: runs/sweeps/NAME)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of random points (default: 0)")


def main(args: argparse.Namespace, overrides: Sequence[str] = ()) -> int:
    """Runs the sweep. Returns the exit status.

    Args:
        args: the parsed arguments.
        overrides: config overrides (key=value) for all runs.

    Raises:
        UsageError: an argument, the sweep or a config is invalid.
        OSError: the sweep's folder cannot be created or locked (`SweepFolder.acquire`).
    """
    # The check below reads recipes, which import torchtune.
    plugin.install()
    sweep = read_sweep(find_sweep_file(args.file))
    for word in overrides:
        key = word.partition("=")[0]
        if word.startswith("-"):
            raise UsageError(f"{key}: unknown option. Fix: see torchtune-ext sweep --help")
        if key in {each.name for each in sweep.parameters}:
            raise UsageError(f"{word}: the sweep sets {key} itself. Fix: change {sweep.path}, or a copy of it")
    if args.jobs < 1:
        raise UsageError(f"--jobs {args.jobs}: expected 1 or more")
    folder = SweepFolder(args.out or SWEEPS_FOLDER / sweep.path.stem, sweep, overrides, args.seed)
    # These import torch, which the checks above do not need.
    import torch

    from torchtune_ext.sweep.check import check_sweep, run_command

    cfg = check_sweep(sweep, next_point(sweep, folder.seed, 0), folder.extra_settings, folder.path)
    folder.acquire()
    on_gpu = getattr(cfg, "device", "auto") != "cpu" and torch.cuda.is_available()
    goal = "maximized" if sweep.maximize else "minimized"
    # Concurrent runs on the CPU share its cores.
    variables = {} if on_gpu else {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // args.jobs))}
    runner = SweepRunner(folder, args.jobs, lambda point: run_command(sweep, point, folder.extra_settings), variables)
    # Without this count a resumed or a finished sweep would look like a new one.
    left = f", {runner.num_unfinished} left" if folder.runs else ""
    what = f"{sweep.method}, {sweep.num_runs} runs{left}, {sweep.metric} {goal}, {args.jobs} at a time"
    print_text(f"sweep {sweep.name}: {what}; files: {folder.path}")
    if not runner.run():
        assert runner.stop_signal is not None
        print_text(
            f"Stopped with {runner.num_unfinished} of {sweep.num_runs} runs left; the same command resumes the sweep"
        )
        return 128 + runner.stop_signal
    if not any(run.state == "finished" for run in folder.runs):
        print_text("No run finished, so the sweep has no best run")
        return FAILURE_STATUS
    from torchtune_ext.telemetry.comparison import build_comparison

    print_text(build_comparison([folder.path]).summary())
    return 0
