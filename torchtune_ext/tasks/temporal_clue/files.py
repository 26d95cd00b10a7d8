"""Makes many puzzles in several processes, writes them to a file, and reads them from one.

A public file is a JSON list; ours has one JSON object a line. Both hold the same fields, those of `Puzzle`.
"""

import json
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import repeat
from multiprocessing import get_context, parent_process
from pathlib import Path

from torchtune_ext.run.errors import Mistake
from torchtune_ext.tasks.temporal_clue.puzzle import Puzzle, make_puzzle
from torchtune_ext.tasks.temporal_clue.size import Size


def generate(seed: int, count: int, size: Size, workers: int = 1, first: int = 0) -> Iterator[Puzzle]:
    """Yields the puzzles `first` to `first + count - 1` of `seed`, in order, made by `workers` processes."""
    indices = range(first, first + count)
    if workers <= 1 or count < 2:
        yield from (make_puzzle(seed, index, size) for index in indices)
        return
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_end_with_parent)
    try:
        chunk = max(1, min(64, count // (8 * workers)))
        yield from pool.map(make_puzzle, repeat(seed), indices, repeat(size), chunksize=chunk)
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Makes a worker end when its parent is killed. Without this it would wait for work for ever."""

    def watch() -> None:
        parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def write_jsonl(path: str | os.PathLike, puzzles: Iterable[Puzzle]) -> int:
    """Writes one puzzle a line, and returns their number. If anything fails, no file is left."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    count = 0
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            for puzzle in puzzles:
                file.write(json.dumps(asdict(puzzle), ensure_ascii=False) + "\n")
                count += 1
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return count


def read_puzzles(path: str | os.PathLike, first: int = 0, count: int | None = None) -> list[Puzzle]:
    """Reads puzzles from a JSON list or from a file with one JSON object a line. `first` and `count` select a slice.

    Raises:
        ValueError: the file cannot be used. The message names the file, the line (or the number of the puzzle in a
            list), the field and the fix.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Mistake(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error
    stop = None if count is None else first + count
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
        except json.JSONDecodeError as error:
            where = f"{path}, line {error.lineno}"
            raise Mistake(f"{where}: not JSON ({error.msg}); fix the list, or write one object a line") from error
        return [_checked(f"{path}, puzzle {n}", item) for n, item in enumerate(items, start=1)][first:stop]
    puzzles = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                item = json.loads(line)
            except json.JSONDecodeError as error:
                raise Mistake(f"{path}, line {number}: not JSON ({error.msg}); write one object a line") from error
            puzzles.append(_checked(f"{path}, line {number}", item))
    return puzzles[first:stop]


def _checked(where: str, item: object) -> Puzzle:
    if not isinstance(item, dict):
        raise Mistake(f"{where}: not an object; write one with the fields num_clues, prompt and solution")
    fields = {
        "num_clues": (lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0, "a number, 0 or more"),
        "prompt": (lambda v: isinstance(v, str) and v.strip() != "", "the text of the puzzle"),
        "solution": (_is_solution, 'an object from letters to answers, such as {"A": "Mrs. White"}'),
    }
    for field, (right, what) in fields.items():
        if field not in item:
            raise Mistake(f"{where}: field {field!r} is missing; add {what}")
        if not right(item[field]):
            raise Mistake(f"{where}: field {field!r} is {item[field]!r:.60}; write {what}")
    return Puzzle(item["num_clues"], item["prompt"], item["solution"])


def _is_solution(value: object) -> bool:
    if not isinstance(value, dict) or not value:
        return False
    letters = all(len(key) == 1 and "A" <= key <= "Z" for key in value)
    return letters and all(isinstance(answer, str) and answer for answer in value.values())
