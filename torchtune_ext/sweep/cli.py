"""`torchtune-ext sweep FILE` runs a sweep here, and `torchtune-ext sweeps` lists those that come with the program.

    torchtune-ext sweeps                                      the names of ours
    torchtune-ext sweep tiny_lr                               one of ours, or the path of a file in W&B's format
    torchtune-ext sweep my_lr.yaml --jobs 2 max_steps=40      two runs at a time, a setting for all runs
    torchtune-ext sweep my_lr.yaml --resume                   goes on with one that was stopped or killed

Everything is in one folder, `runs/sweeps/NAME`: `sweep.json`, a folder for each run, and `report.html` at the end.
Exit status: 0 at the end, 1 if no run has finished, 2 for bad input, 128 and the number of the signal that stopped the sweep.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from torchtune_ext.host import plugin
from torchtune_ext.run.errors import FAILED, Mistake, nearest
from torchtune_ext.run.output import say
from torchtune_ext.sweep.file import Sweep, read_sweep, sweep_file
from torchtune_ext.sweep.record import SweepFolder
from torchtune_ext.sweep.search import draw
from torchtune_ext.sweep.space import Point, grid

FOLDER = Path("runs", "sweeps")
TRIED = 200  # points at most that are tried before the start; a point takes 0.05 s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what `torchtune-ext sweep` takes; `cli` hands on whatever else is there."""
    parser.usage = "torchtune-ext sweep FILE [--jobs N] [--resume] [--out DIR] [--seed N] [key=value ...]"
    parser.add_argument("file", metavar="FILE", help="a sweep in W&B's format, or the name of one of ours")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (1)")
    parser.add_argument("--resume", action="store_true", help="go on with a sweep that was stopped or killed")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the sweep's folder (runs/sweeps/NAME)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of random points (0)")


def main(args: argparse.Namespace, words: Sequence[str] = ()) -> int:
    """Runs the sweep. Returns the exit status.

    Args:
        words: settings for all runs, key=value.

    Raises:
        ValueError: something is wrong that can be seen before the first run.
        ImportError, OSError: as `read_sweep` and `SweepFolder` say.
    """
    # It reads recipes, which import torchtune.
    plugin.install()
    sweep = read_sweep(sweep_file(args.file))
    _check_words(sweep, words)
    if args.jobs < 1:
        raise Mistake(f"--jobs {args.jobs} must be 1 or more")
    folder = SweepFolder(args.out or FOLDER / sweep.path.stem, sweep, words, args.seed, args.resume)
    try:
        return _run(args, sweep, folder)
    finally:
        folder.close()


def _run(args: argparse.Namespace, sweep: Sweep, folder: SweepFolder) -> int:
    # These import torch, which is not needed to say what is wrong with a file.
    from torchtune_ext.sweep.check import check, cores, words_of
    from torchtune_ext.sweep.runner import Runner, table

    tries = _tries(sweep, folder.seed)
    notes, usual, on_gpu = check(sweep, tries, folder.words, folder.path)
    if sweep.method != "bayes" and len(tries) < sweep.runs:
        notes.append(
            f"of {sweep.runs} points {len(tries)} were tried on the recipe: what is wrong with others fails their runs"
        )
    variables = {}
    if on_gpu and args.jobs > 1:
        notes.append(
            f"--jobs {args.jobs}: the runs share the same GPUs and their memory; with --jobs 1 each has them alone"
        )
    elif not on_gpu:
        variables["OMP_NUM_THREADS"] = str(max(1, cores() // args.jobs))
        if args.jobs > cores():
            notes.append(f"--jobs {args.jobs}: this machine has {cores()} cores, so runs wait for each other")
    runner = Runner(folder, args.jobs, lambda point: words_of(sweep, point, folder.words), variables)
    runner.plan()
    for note in notes:
        say(note)
    goal = "maximized" if sweep.metric.maximize else "minimized"
    say(
        f"sweep {sweep.name}: {sweep.method}, {sweep.runs} runs, {sweep.metric.name} {goal}, {args.jobs} at a time; "
        f"files: {folder.path}"
    )
    ended = runner.run()
    say(f"\n{table(sweep, folder.runs, usual)}\n")
    if not ended:
        further = f" --out {args.out}" if args.out else ""
        say(
            f"Stopped with {runner.left} of {sweep.runs} runs to do: torchtune-ext sweep {args.file} --resume{further} goes on"
        )
        return 128 + runner.stopped_by
    if any(run.value is not None for run in folder.runs):
        from torchtune_ext.telemetry.comparison import build_comparison

        page = build_comparison([folder.path])
        say(f"{page.verdict}\nreport: {page.path}")
    else:
        say(f"No run has a {sweep.metric.name}, so none is the best.")
    return 0 if any(run.state == "finished" for run in folder.runs) else FAILED


def _check_words(sweep: Sweep, words: Sequence[str]) -> None:
    swept = {each.name: each for each in sweep.parameters}
    for word in words:
        key, equals, _ = word.partition("=")
        if word.startswith("-"):
            near = nearest(key.lstrip("-"), ["jobs", "resume", "out", "seed"])
            raise Mistake(
                f"there is no option {key}; {f'did you mean --{near}?' if near else 'see torchtune-ext sweep --help'}"
            )
        if not equals:
            raise Mistake(f"{word!r} is no setting: write key=value, max_steps=20 for instance")
        if key in swept:
            raise Mistake(f"{word}: the sweep says itself what {key} is; change {sweep.path}, or a copy of it")


def _tries(sweep: Sweep, seed: int) -> list[Point]:
    """Returns points whose settings are tried before the start: all that are known, and the ends of what will be drawn. If
    there are more than TRIED points, these are some of them that together have each value of each parameter."""
    if sweep.method == "bayes":
        first, _ = draw(sweep.parameters, seed, 0)
        drawn = [each for each in sweep.parameters if not each.fixed]
        values = {each.name: each.given.get("values", [each.at(0.0), each.at(1.0)]) for each in drawn}
        return [first, *({**first, name: value} for name, some in values.items() for value in some)]
    if sweep.method == "grid":
        points = grid(list(sweep.parameters))[: sweep.runs]
    else:
        points = [draw(sweep.parameters, seed, number)[0] for number in range(sweep.runs)]
    if len(points) <= TRIED:
        return points
    pairs: set[tuple[str, str]] = set()
    chosen = []
    for point in points:
        values = {(name, str(value)) for name, value in point.items()}
        if not values <= pairs and len(chosen) < TRIED:
            chosen.append(point)
            pairs |= values
    return chosen
