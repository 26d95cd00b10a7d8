"""`torchtune-ext sweep FILE` runs a sweep here.

    torchtune-ext sweep tiny_lr                               one of ours, or the path of a file in W&B's format
    torchtune-ext sweep my_lr.yaml --jobs 2 max_steps=40      two runs at a time, a setting for all runs

The same command goes on with a sweep that was stopped or killed. Its folder is `runs/sweeps/NAME` (sweep/runner.py).
Exit status: 0 at the end, 1 if no run has finished, 2 for bad input, 128 plus the number of the signal that stopped it.
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
    """Declares what `torchtune-ext sweep` takes; `cli` hands on whatever else is there."""
    parser.usage = "torchtune-ext sweep FILE [--jobs N] [--out DIR] [--seed N] [key=value ...]"
    parser.add_argument("file", metavar="FILE", help="a sweep in W&B's format, or the name of one of ours")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (1)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the sweep's folder (runs/sweeps/NAME)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of random points (0)")


def main(args: argparse.Namespace, overrides: Sequence[str] = ()) -> int:
    """Runs the sweep. Returns the exit status.

    Args:
        words: settings for all runs, key=value.

    Raises:
        ValueError: something is wrong that can be seen before the first run.
        OSError: as `SweepFolder.begin` says.
    """
    # The check below reads recipes, which import torchtune.
    plugin.install()
    sweep = read_sweep(find_sweep_file(args.file))
    for word in overrides:
        key = word.partition("=")[0]
        if word.startswith("-"):
            raise UsageError(f"there is no option {key}; see torchtune-ext sweep --help")
        if key in {each.name for each in sweep.parameters}:
            raise UsageError(f"{word}: the sweep says itself what {key} is; change {sweep.path}, or a copy of it")
    if args.jobs < 1:
        raise UsageError(f"--jobs {args.jobs} must be 1 or more")
    folder = SweepFolder(args.out or SWEEPS_FOLDER / sweep.path.stem, sweep, overrides, args.seed)
    # These import torch, which is not needed to say what is wrong with a file.
    import torch

    from torchtune_ext.sweep.check import check_sweep, run_command

    cfg = check_sweep(sweep, next_point(sweep, folder.seed, 0), folder.extra_settings, folder.path)
    folder.acquire()
    on_gpu = getattr(cfg, "device", "auto") != "cpu" and torch.cuda.is_available()
    goal = "maximized" if sweep.maximize else "minimized"
    # Runs on the CPU at the same time share its cores.
    variables = {} if on_gpu else {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // args.jobs))}
    runner = SweepRunner(folder, args.jobs, lambda point: run_command(sweep, point, folder.extra_settings), variables)
    # A sweep that goes on, and one that has ended before, looks like a new one otherwise.
    left = f", {runner.num_unfinished} of them to do" if folder.runs else ""
    what = f"{sweep.method}, {sweep.num_runs} runs{left}, {sweep.metric} {goal}, {args.jobs} at a time"
    print_text(f"sweep {sweep.name}: {what}; files: {folder.path}")
    if not runner.run():
        assert runner.stop_signal is not None
        print_text(f"Stopped with {runner.num_unfinished} of {sweep.num_runs} runs to do; the same command goes on")
        return 128 + runner.stop_signal
    if not any(run.state == "finished" for run in folder.runs):
        print_text("No run has finished, so none is the best")
        return FAILURE_STATUS
    from torchtune_ext.telemetry.comparison import build_comparison

    print_text(build_comparison([folder.path]).summary())
    return 0
