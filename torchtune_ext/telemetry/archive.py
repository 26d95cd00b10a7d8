"""What the report shows of an archive: a picture for each problem and machine, and how many cells were filled when.

A picture has a row for each set of techniques and a column for each band of speed; a cell of it is a cell of the archive.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtune_ext.telemetry.pieces import cut_text

FILE = "archive.jsonl"
MAX_CHARACTERS = 16_000  # of a program
MAX_TOGETHER = 4_000_000  # characters of all programs in a page
MAX_BANDS = 16  # of a picture; where the speeds lie farther apart, bands without a program are left out


def pictures_of(path: Path) -> list[dict[str, Any]]:
    """Returns what the page needs, JSON-able: a dict for each problem and machine.

    Returns:
        `kernel`, `size`, `machine`: the problem, for people. `rows`: the sets of techniques, in words, those with few
        techniques first. `bands`: the columns, floor(log2(times as fast as the naive program)), ascending. `cells`: `row` and
        `column`, the speed `ratio`, the ends `low` and `high` of its interval, `gflops`, `found`, `source`.

    Raises:
        ImportError: a package is missing that programs are read with.
        OSError, ValueError: the file cannot be read, or is damaged.
    """
    # Only the archive of a run needs these packages; a report of other runs does without.
    from torchtune_ext.measured.matmul.archive import Archive, size_in_words, techniques_in_words

    elites = Archive.load(path).cells()
    limit = min(MAX_CHARACTERS, MAX_TOGETHER // max(1, len(elites)))
    problems = defaultdict(list)
    for cell, entry in elites.items():
        problems[cell.kernel, cell.size, cell.machine].append((cell, entry))
    pictures = []
    for (kernel, size, machine), found in sorted(problems.items()):
        rows = sorted({cell.techniques for cell, _ in found}, key=lambda techniques: (len(techniques), techniques))
        bands = _bands({cell.band for cell, _ in found})
        cells = [
            {
                "row": rows.index(cell.techniques),
                "column": bands.index(cell.band),
                "ratio": entry.ratio,
                "low": entry.low,
                "high": entry.high,
                "gflops": entry.gflops,
                "found": entry.found,
                "source": cut_text(entry.source, limit),
            }
            for cell, entry in found
        ]
        words = [techniques_in_words(techniques) for techniques in rows]
        problem = {"kernel": kernel, "size": size_in_words(size), "machine": machine}
        pictures.append({**problem, "rows": words, "bands": bands, "cells": cells})
    return pictures


def filled(pictures: Sequence[dict[str, Any]], steps: Sequence[int]) -> list[int]:
    """Counts, for each step, the cells whose program had been found by then. Of a cell whose program was replaced, only the
    later one is known."""
    found = sorted(cell["found"] for picture in pictures for cell in picture["cells"])
    return [bisect_right(found, step) for step in steps]


def _bands(used: set[int]) -> list[int]:
    lowest, highest = min(used), max(used)
    return list(range(lowest, highest + 1)) if highest - lowest < MAX_BANDS else sorted(used)
