"""Generates puzzles in several processes, and writes and reads files of puzzles."""

import json
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import repeat
from multiprocessing import get_context, parent_process
from pathlib import Path

from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.files import write_atomic
from torchtune_ext.tasks.examples import read_examples
from torchtune_ext.tasks.temporal_clue.puzzle import Puzzle, make_puzzle
from torchtune_ext.tasks.temporal_clue.size import Size


def generate_puzzles(seed: int, count: int, size: Size, workers: int = 1, first: int = 0) -> Iterator[Puzzle]:
    """Yields the puzzles `first` to `first + count - 1` of `seed`, in order."""
    indices = range(first, first + count)
    if workers <= 1 or count < 2:
        yield from (make_puzzle(seed, index, size) for index in indices)
        return
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_end_with_parent)
    try:
        # Small chunks keep all workers busy until the end.
        chunk = max(1, min(64, count // (8 * workers)))
        yield from pool.map(make_puzzle, repeat(seed), indices, repeat(size), chunksize=chunk)
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    # A worker whose parent was killed would wait for work forever.
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def require_puzzles(path: Path) -> None:
    """Raises UsageError if a file exists and does not hold puzzles."""
    if path.is_file() and path.stat().st_size:
        try:
            _parse_puzzle(*next(read_examples(str(path), None)))
        except (UsageError, StopIteration):
            raise UsageError(f"--out {path} holds something other than puzzles. Fix: name another file") from None


def write_jsonl(path: str | os.PathLike, puzzles: Iterable[Puzzle]) -> int:
    """Writes one puzzle per line atomically, and returns the number of puzzles."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # All puzzles are generated before the file is written: a failure leaves no partial file.
    lines = [json.dumps(asdict(puzzle), ensure_ascii=False) + "\n" for puzzle in puzzles]
    data = "".join(lines).encode()
    if path.exists() and not path.is_file():
        # A pipe or a terminal, such as /dev/stdout, must not be replaced by a file.
        path.write_bytes(data)
    else:
        write_atomic(path.resolve(), data)
    return len(lines)


def read_puzzles(path: str | os.PathLike, first: int = 0, count: int | None = None) -> list[Puzzle]:
    """Reads puzzles `first` to `first + count - 1` from a JSON list or a JSONL file.

    Raises:
        UsageError: a puzzle is invalid. The message names its location, the field and the fix.
    """
    # The public files are JSON lists. `write_jsonl` writes one JSON object per line.
    if Path(path).read_bytes().lstrip().startswith(b"["):
        try:
            items = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{path}: not a JSON list ({error}). Fix: repair it, or write one object per line"
            ) from error
        examples = ((f"{path}, puzzle {number}", item) for number, item in enumerate(items, start=1))
    else:
        examples = read_examples(str(path), None)
    return [_parse_puzzle(where, item) for where, item in examples][first : None if count is None else first + count]


def _parse_puzzle(where: str, item: object) -> Puzzle:
    if not isinstance(item, dict):
        raise UsageError(f"{where}: not an object. Fix: write an object with the fields num_clues, prompt and solution")
    fields = {
        "num_clues": (lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0, "a number, 0 or more"),
        "prompt": (lambda v: isinstance(v, str) and v.strip() != "", "the text of the puzzle"),
        "solution": (_is_solution, 'an object from letters to answers, such as {"A": "Mrs. White"}'),
    }
    for field, (right, what) in fields.items():
        if field not in item or not right(item[field]):
            problem = f"is {item[field]!r:.60}; write" if field in item else "is missing; add"
            raise UsageError(f"{where}: field {field!r} {problem} {what}")
    return Puzzle(item["num_clues"], item["prompt"], item["solution"])


def _is_solution(value: object) -> bool:
    if not isinstance(value, dict) or not value:
        return False
    return all(len(key) == 1 and "A" <= key <= "Z" and isinstance(text, str) and text for key, text in value.items())
