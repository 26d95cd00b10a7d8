"""`torchtune-ext archive`: prints the fastest programs of a run, and writes them as files."""

import argparse
import os
import re
import sys
from collections.abc import Set
from pathlib import Path

from torchtune_ext.measured.matmul.archive import FILE, Archive, Entry, size_in_words, techniques_in_words
from torchtune_ext.run.errors import Mistake
from torchtune_ext.run.files import explained
from torchtune_ext.run.output import columns

HEAD = ("#", "size", "techniques", "x naive", "95% interval", "GFLOPS", "step")
INDEX = "index.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=f"folder of a run that has timed programs, or its {FILE}")
    parser.add_argument("--best", metavar="N", type=int, default=10, help="so many programs of each kernel (10)")
    parser.add_argument("--machine", metavar="NAME", help="the one they were timed on, or a part of its name")
    parser.add_argument("--out", metavar="DIR", help="write each program as a file into this folder, and an index")


def main(args: argparse.Namespace) -> int:
    """Returns 0, or 2 after a line that says why there is nothing to print, or why it cannot be written."""
    try:
        path, archive = read_archive(Path(args.run))
        if args.best < 1:
            raise Mistake(f"--best {args.best}: ask for at least 1 program")
        machine = _machine(archive, args.machine)
        fastest = {kernel: archive.best(args.best, machine, kernel) for kernel in _kernels(archive, machine)}
        index = None if args.out is None else write_programs(fastest, Path(args.out), path)
    except (OSError, ValueError) as error:
        print(f"torchtune-ext archive: {_line(str(error))}", file=sys.stderr)
        return 2
    try:
        filled = sum(cell.machine == machine for cell in archive.cells())
        print(f"{filled} cells hold a program, timed on {_line(machine)}")
        print(f"the fastest {args.best} of each kernel, by the lower end of the interval:")
        for kernel, entries in fastest.items():
            rows = [_cells(number, entry) for number, entry in enumerate(entries, 1)]
            print(f"\n{_line(kernel)}\n{columns([HEAD, *rows])}")
        if index is not None:
            print(f"\n{index}: {sum(map(len, fastest.values()))} programs beside it")
        sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads on, as with `| head`. Python would complain once more when it empties its buffer at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def read_archive(run: Path) -> tuple[Path, Archive]:
    """Reads the archive of a run, and says which file it is.

    Args:
        run: its folder, or the file.

    Raises:
        OSError, ValueError: there is none, it cannot be read, is damaged, or holds no program. The message has the fix.
    """
    path = run / FILE if run.is_dir() else run
    try:
        archive = Archive.load(path)
    except FileNotFoundError:
        if path == run:
            raise Mistake(f"{run}: no such file or folder; name the folder of a run, or its {FILE}") from None
        raise Mistake(
            f"{path}: no such file; a run writes it at the end of its first step, if its task times programs"
        ) from None
    except OSError as error:
        raise Mistake(f"{path} cannot be read: {error.strerror or error}; mend that, or name another file") from error
    if not len(archive):
        raise Mistake(f"{path}: holds no program yet; let the run go on until one is right")
    return path, archive


def write_programs(fastest: dict[str, list[Entry]], folder: Path, archive: Path) -> Path:
    """Writes each program into a file of its own, and an index of them. Returns the path of the index.

    Args:
        fastest: kernel -> its programs, the fastest first.
        folder: it is made where it is missing. Other files in it stay as they are.
        archive: where the programs come from, for the reader.

    Raises:
        FileExistsError: one of the files is there. Nothing was written.
        OSError: one cannot be written.
    """
    files: dict[Path, tuple[int, Entry]] = {}
    for entries in fastest.values():
        for number, entry in enumerate(entries, 1):
            files[folder / _file_name(entry, number, {path.name for path in files})] = (number, entry)
    index = folder / INDEX
    there = next((path for path in (index, *files) if os.path.lexists(path)), None)
    if there is not None:
        raise Mistake(f"{there} is there already and stays; name another folder with --out")
    with explained(f"cannot write into {folder}", "Free disk space, or name another folder with --out"):
        folder.mkdir(parents=True, exist_ok=True)
        for path, (_, entry) in files.items():
            _write_new(path, _comment(entry) + entry.source)
        # The index comes last: where it is, all programs are.
        _write_new(index, _index(files, archive))
    return index


# ---------------------------------------------------------------------------------------------------------------------


def _machine(archive: Archive, name: str | None) -> str:
    machines = archive.machines()
    matches = [machine for machine in machines if name == machine]
    matches = matches or [machine for machine in machines if name is None or name in machine]
    if len(matches) == 1:
        return matches[0]
    names = "; ".join(matches or machines)
    if name is not None:
        which = "several machines have" if matches else "no machine has"
        raise Mistake(f"--machine {name!r}: {which} this in its name; choose of: {names}")
    raise Mistake(f"{len(machines)} machines, whose speeds cannot be compared; name one with --machine: {names}")


def _kernels(archive: Archive, machine: str) -> list[str]:
    return sorted({cell.kernel for cell in archive.cells() if cell.machine == machine})


def _cells(number: int, entry: Entry) -> list[str]:
    return [
        str(number),
        _line(size_in_words(entry.size)),
        _line(techniques_in_words(entry.techniques)),
        f"{entry.ratio:.2f}",
        f"{entry.low:.2f} to {entry.high:.2f}",
        f"{entry.gflops:.3g}",
        str(entry.found),
    ]


def _file_name(entry: Entry, number: int, taken: Set[str]) -> str:
    """Makes "dgemm_256x256x256_01.c"; a kernel of one's own may have any name."""
    size = "x".join(str(length) for _, length in entry.size)
    stem = f"{re.sub(r'[^A-Za-z0-9]+', '_', entry.kernel)[:60]}_{size[:60]}_{number:02}"
    while f"{stem}.c" in taken:  # "my.axpy" and "my_axpy"
        stem += "_"
    return f"{stem}.c"


def _comment(entry: Entry) -> str:
    """The head of a file. Text from elsewhere stays one line of a comment, whatever it holds."""
    lines = (
        f"{entry.kernel}, {size_in_words(entry.size)}, found at step {entry.found}",
        f"{_speed(entry)} when it was found: measure it again before you report that",
        f"timed on {entry.machine}",
        f"techniques: {techniques_in_words(entry.techniques)}",
    )
    # A backslash at the end of a line would take the next one into the comment, and so would its trigraph.
    return "".join(f"// {_line(line).replace(chr(92), '/').replace('??/', '///')}\n" for line in lines)


def _speed(entry: Entry) -> str:
    return (
        f"{entry.ratio:.2f} times as fast as the naive program (± {entry.spread:.1%}: "
        f"{entry.low:.2f} to {entry.high:.2f}), {entry.gflops:.3g} GFLOPS"
    )


def _index(files: dict[Path, tuple[int, Entry]], archive: Path) -> str:
    lines = [
        f"# The fastest programs of {_line(str(archive))}",
        "",
        f"Timed on {_line(next(iter(files.values()))[1].machine)}. Speeds are times that of the naive program. Each was the",
        "best of many measurements, so a part of it is luck: measure it again before you report it.",
        "",
        f"| file | kernel | {' | '.join(HEAD[1:])} |",
        "|---" * (len(HEAD) + 1) + "|",
    ]
    for path, (number, entry) in files.items():
        cells = [_line(cell).replace("|", "/") for cell in (entry.kernel, *_cells(number, entry)[1:])]
        lines.append(f"| [{path.name}]({path.name}) | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _write_new(path: Path, text: str) -> None:
    # "x" does not overwrite a file that has appeared since we looked. A text may hold half characters, which no file can.
    with open(path, "xb") as file:
        file.write(text.encode("utf-8", "replace"))


def _line(text: str) -> str:
    """Text from a file as one line that a terminal, a comment and a table can bear."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
