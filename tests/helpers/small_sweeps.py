"""Sweeps of `swept_program.py`. As a program: small_sweeps.py FILE FOLDER JOBS runs or resumes a sweep."""

import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("swept_program.py")
METRIC = "metric: {name: eval/reward_sampled, goal: maximize}\n"


def write(path: Path, text: str, method: str = "grid") -> Path:
    """Write a sweep's file; `text` has its parameters and other keys."""
    path.write_text(f"method: {method}\n{METRIC}{text}")
    return path


def runner(file: Path, folder: Path, jobs: int = 1, *further: str, seed: int = 0):
    """Return a runner and its initialized sweep folder."""
    from torchtune_ext.sweep.runner import SweepFolder, SweepRunner
    from torchtune_ext.sweep.spec import read_sweep

    sweep = read_sweep(file)
    place = SweepFolder(folder, sweep, further, seed)
    place.acquire()
    instance = SweepRunner(
        place,
        jobs,
        lambda point: [sys.executable, str(PROGRAM), *(f"{key}={value}" for key, value in point.items()), *further],
    )
    return instance, place


if __name__ == "__main__":
    ended = runner(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))[0].run()
    sys.exit(0 if ended else 1)
