"""`torchtune-ext sweeps` lists the sweeps that come with the program; `torchtune-ext sweeps tiny_lr` prints one."""

import argparse

from torchtune_ext.sweep.file import sweep_file, sweep_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="print this one; `tune cp sweeps/NAME my_sweep.yaml` copies it")


def main(args: argparse.Namespace) -> int:
    """Lists the sweeps, or prints one of them. Raises ValueError for an unknown name."""
    if args.name:
        print(sweep_file(args.name).read_text(encoding="utf-8"), end="")
        return 0
    files = sweep_files()
    width = max(map(len, files))
    for name, path in files.items():
        first = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        print(f"{name:<{width}}  {first}")
    return 0
