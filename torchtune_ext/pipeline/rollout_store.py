"""Stores the rollouts of a run as one gzip file of JSON lines per step.

To read a file: `zcat rollouts/step_000012.jsonl.gz | jq .`

The first line is a header. Every other line is a group (`group_to_json`): problem, prompt ids, and
samples with token ids, text, log-probs, reward, outcome and advantage.
"""

import gzip
import json
import logging
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from torchtune_ext.pipeline.groups import Group, group_from_record, group_to_json
from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.files import write_atomic

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
ROLLOUT_FOLDER = "rollouts"
_GZIP_LEVEL = 1  # a tenth of the time of level 6; files are 20% larger
_FILE_NAME = re.compile(r"step_(\d+)\.jsonl\.gz")


class RolloutStore:
    """Writes the groups of each step to `run_dir/rollouts/`.

    Args:
        run_dir: run folder.
        resume_step: first step that the resumed run writes again; files from this step on are
            removed. None for a new run.
        show: called with every step and its groups (`MetricLogger.show`).

    Raises:
        UsageError: a new run finds the rollouts of an earlier run.
    """

    def __init__(
        self,
        run_dir: str | Path,
        resume_step: int | None = None,
        show: Callable[[int, Sequence[Group]], None] | None = None,
    ):
        self.folder = Path(run_dir) / ROLLOUT_FOLDER
        self._show = show
        self._missing: list[int] = []  # steps whose file could not be written
        for step, path in rollout_paths(run_dir).items():
            if resume_step is None:
                raise UsageError(
                    f"{path} belongs to an earlier run. Fix: call RunFolder.start_run to move it, or pass resume_step"
                )
            # The resumed run samples these steps again.
            if step >= resume_step:
                path.unlink()

    def write(self, step: int, groups: Sequence[Group]) -> Path | None:
        """Writes the groups of `step` atomically. Returns the file, or None if writing failed."""
        if self._show is not None:
            self._show(step, groups)
        path = self.folder / f"step_{step:06d}.jsonl.gz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Without fsync, no step waits for the disk. After a power cut the file may be empty,
            # which `read_rollouts` reports.
            write_atomic(path, encode_rollouts(step, groups), sync=False)
        except OSError as error:
            # Rollouts are only a record, so a failed write does not stop the run. One warning is
            # enough, because `close` reports the number of missing steps.
            if not self._missing:
                log.warning(
                    "rollouts: cannot write %s: %s. Training continues and the next step retries; free disk space",
                    path,
                    error,
                )
            self._missing.append(step)
            return None
        return path

    def close(self) -> None:
        """Logs which steps are missing because their files could not be written."""
        if self._missing:
            first, last = self._missing[0], self._missing[-1]
            log.warning("rollouts: %d steps between %d and %d are missing in %s: they could not be written",
                        len(self._missing), first, last, self.folder)  # fmt: skip
            self._missing.clear()


def rollout_paths(run_dir: str | Path) -> dict[int, Path]:
    """Returns step -> file of every stored step, in ascending order."""
    matches = (
        (_FILE_NAME.fullmatch(path.name), path) for path in (Path(run_dir) / ROLLOUT_FOLDER).glob("step_*.jsonl.gz")
    )
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def encode_rollouts(step: int, groups: Sequence[Group]) -> bytes:
    """Returns the bytes of one file. Equal groups give equal bytes."""
    # With the number of groups a reader detects a file that is truncated at the end of a line.
    header = json.dumps({"format": FORMAT_VERSION, "step": step, "groups": len(groups)})
    lines = [header, *(group_to_json(group) for group in groups), ""]
    return gzip.compress("\n".join(lines).encode(), _GZIP_LEVEL, mtime=0)


def read_rollouts(path: str | Path) -> list[Group]:
    """Reads the groups of a file (`group_from_record` says what JSON does not preserve).

    Raises:
        FileNotFoundError: the file is missing.
        UsageError: the file is damaged, truncated, or has another format.
    """
    path = Path(path)
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
            header, *groups = map(json.loads, file)
    except (EOFError, gzip.BadGzipFile, zlib.error, ValueError) as error:
        raise UsageError(f"{path}: damaged or truncated ({error}). Fix: delete the file") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT_VERSION:
        raise UsageError(
            f"{path}: not a rollout file of format {FORMAT_VERSION}. Fix: read it with the version that wrote it"
        )
    count = header["groups"]
    if len(groups) != count:
        raise UsageError(f"{path}: damaged or truncated ({len(groups)} groups of {count}). Fix: delete the file")
    return [group_from_record(record) for record in groups]
