"""`torchtune-ext archive`: prints the fastest programs of a run, and writes them as files."""

import argparse
import os
import re
import sys
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
        path, archive = _read(Path(args.run))
        if args.best < 1:
            raise Mistake(f"--best {args.best}: ask for at least 1 program")
        machine = _machine(archive, args.machine)
        here = [cell for cell in archive.cells() if cell.machine == machine]
        kernels = sorted({cell.kernel for cell in here})
        fastest = {kernel: archive.best(args.best, machine, kernel) for kernel in kernels}
        index = None if args.out is None else _write(fastest, Path(args.out), path)
    except (OSError, ValueError) as error:
        print(f"torchtune-ext archive: {_line(str(error))}", file=sys.stderr)
        return 2
    try:
        print(f"{len(here)} cells hold a program, timed on {_line(machine)}")
        print(f"the fastest {args.best} of each kernel, by the lower end of the interval:")
        for kernel, entries in fastest.items():
            rows = [[str(number), *_cells(entry)] for number, entry in enumerate(entries, 1)]
            print(f"\n{_line(kernel)}\n{columns([HEAD, *rows])}")
        if index is not None:
            print(f"\n{index}: {sum(map(len, fastest.values()))} programs beside it")
        sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads on, as with `| head`. Python would complain once more when it empties its buffer at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _read(run: Path) -> tuple[Path, Archive]:
    """Reads the archive of a run (its folder, or the file), and says which file it is."""
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


def _write(fastest: dict[str, list[Entry]], folder: Path, archive: Path) -> Path:
    """Writes each program into a file of its own, and an index of them, whose path it returns. Files that are there stay."""
    files: dict[Path, Entry] = {}
    for entries in fastest.values():
        for number, entry in enumerate(entries, 1):
            size = "x".join(str(length) for _, length in entry.size)
            # A kernel of one's own may have any name.
            path = folder / f"{re.sub(r'[^A-Za-z0-9]+', '_', entry.kernel)[:60]}_{size[:60]}_{number:02}.c"
            while path in files:  # "my.axpy" and "my_axpy"
                path = path.with_stem(path.stem + "_")
            files[path] = entry
    index = folder / INDEX
    there = next((path for path in (index, *files) if os.path.lexists(path)), None)
    if there is not None:
        raise Mistake(f"{there} is there already and stays; name another folder with --out")
    with explained(f"cannot write into {folder}", "Free disk space, or name another folder with --out"):
        folder.mkdir(parents=True, exist_ok=True)
        texts = {path: _comment(entry) + entry.source for path, entry in files.items()}
        # The index comes last: where it is, all programs are.
        for path, text in (*texts.items(), (index, _index(files, archive))):
            # "x" overwrites no file that has appeared since we looked. A text may hold half characters, which no file can.
            with open(path, "xb") as file:
                file.write(text.encode("utf-8", "replace"))
    return index


def _cells(entry: Entry) -> list[str]:
    """The columns behind the first one of HEAD."""
    return [
        _line(size_in_words(entry.size)),
        _line(techniques_in_words(entry.techniques)),
        f"{entry.ratio:.2f}",
        f"{entry.low:.2f} to {entry.high:.2f}",
        f"{entry.gflops:.3g}",
        str(entry.found),
    ]


def _comment(entry: Entry) -> str:
    """The head of a file. Text from elsewhere stays one line of a comment, whatever it holds."""
    lines = (
        f"{entry.kernel}, {size_in_words(entry.size)}, found at step {entry.found}",
        f"{entry.ratio:.2f} times as fast as the naive program (± {entry.spread:.1%}: {entry.low:.2f} to {entry.high:.2f}), "
        f"{entry.gflops:.3g} GFLOPS when it was found: measure it again before you report that",
        f"timed on {entry.machine}",
        f"techniques: {techniques_in_words(entry.techniques)}",
    )
    # A backslash at the end of a line would take the next one into the comment, and so would its trigraph.
    return "".join(f"// {_line(line).replace(chr(92), '/').replace('??/', '///')}\n" for line in lines)


def _index(files: dict[Path, Entry], archive: Path) -> str:
    lines = [
        f"# The fastest programs of {_line(str(archive))}",
        "",
        f"Timed on {_line(next(iter(files.values())).machine)}. Speeds are times that of the naive program. Each was the best",
        "of many measurements, so a part of it is luck: measure it again before you report it.",
        "",
        f"| file | kernel | {' | '.join(HEAD[1:])} |",
        "|---" * (len(HEAD) + 1) + "|",
    ]
    for path, entry in files.items():
        cells = [_line(cell).replace("|", "/") for cell in (entry.kernel, *_cells(entry))]
        lines.append(f"| [{path.name}]({path.name}) | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _line(text: str) -> str:
    """Text from a file as one line that a terminal, a comment and a table can bear."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
