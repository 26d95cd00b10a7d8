"""`torchtune-ext clue` writes a file of puzzles, such as the files in the configs of real models.

torchtune-ext clue --size public --count 3000 --out data/temporal-clue/train.jsonl
torchtune-ext clue --size public --seed 1 --count 64 --out data/temporal-clue/val.jsonl
torchtune-ext clue --seed 7 --count 1000 --size '{suspects: [2, 3], weapons: 2}' --out puzzles.jsonl
"""

import argparse
import os
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from tqdm import tqdm

from torchtune_ext.run.errors import RunFailure, UsageError, UsageFileError
from torchtune_ext.tasks.temporal_clue.files import generate_puzzles, require_puzzles, write_jsonl
from torchtune_ext.tasks.temporal_clue.size import NAMED_SIZES, parse_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torchtune-ext clue`."""
    parser.add_argument("--seed", type=int, default=0, help="seed of the puzzles (default 0)")
    parser.add_argument("--count", type=int, default=100, help="number of puzzles (default 100)")
    parser.add_argument("--first", type=int, default=0, help="index of the first puzzle (default 0)")
    sizes = f"a name ({', '.join(NAMED_SIZES)}) or numbers in YAML, {{suspects: [2, 3], rooms: 3, clues: [direct, or]}}"
    parser.add_argument("--size", default="small", help=f"{sizes} (default small)")
    parser.add_argument("--out", required=True, help="output file, one JSON object per line; written atomically")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=cores, help="number of processes (default: all cores)")


def main(args: argparse.Namespace) -> int:
    """Writes the file.

    Raises:
        UsageError: an argument is invalid.
        UsageFileError: the file cannot be written.
        RunFailure: a worker process crashed.
    """
    size = parse_size(args.size)
    for name, least in (("count", 1), ("first", 0), ("workers", 1)):
        if getattr(args, name) < least:
            raise UsageError(f"--{name} {getattr(args, name)}: expected a number of at least {least}")
    require_puzzles(Path(args.out))
    puzzles = generate_puzzles(args.seed, args.count, size, min(args.workers, args.count), args.first)
    try:
        with tqdm(puzzles, total=args.count, unit="puzzle", smoothing=0.05) as bar:
            count = write_jsonl(args.out, bar)
    except OSError as error:
        raise UsageFileError(str(error)) from error
    except BrokenProcessPool as error:
        raise RunFailure(
            f"a process that generates puzzles crashed, possibly out of memory: {error}. Fix: lower --workers"
        ) from error
    print(f"{count} puzzles -> {args.out}")
    return 0
