"""The rollouts of a run, one gzip file of JSON lines a step: `zcat rollouts/step_000012.jsonl.gz | jq .` reads it.

The first line is a header, each other line a group (`group_json`): problem, prompt ids, and its samples with ids, text,
log-probs, reward, outcome and advantage.
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
_GZIP_LEVEL = 1  # a tenth of the time of level 6, for files that are a fifth larger
_FILE_NAME = re.compile(r"step_(\d+)\.jsonl\.gz")


class RolloutStore:
    """Writes the groups of each step to `run_dir/rollouts/`.

    Args:
        run_dir: folder of the run.
        resume_step: first step that will be written again: files at or after it are removed; None: a fresh run.
        show: is given each step with its groups, to show some of them (`Metrics.show`).

    Raises:
        ValueError: an earlier run left its rollouts where a fresh one begins.
    """

    def __init__(
        self,
        run_dir: str | Path,
        resume_step: int | None = None,
        show: Callable[[int, Sequence[Group]], None] | None = None,
    ):
        self.folder = Path(run_dir) / ROLLOUT_FOLDER
        self._show = show
        self._missing: list[int] = []  # steps that the disk refused
        for step, path in rollout_paths(run_dir).items():
            if resume_step is None:
                raise UsageError(
                    f"{path} belongs to an earlier run: RunFolder.begin sets it aside, resume_step goes on"
                )
            # The resumed run samples these steps again.
            if step >= resume_step:
                path.unlink()

    def write(self, step: int, groups: Sequence[Group]) -> Path | None:
        """Writes the groups of `step`, all or nothing. Returns the file, or None where the disk refuses it."""
        if self._show is not None:
            self._show(step, groups)
        path = self.folder / f"step_{step:06d}.jsonl.gz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # No step waits for the disk. After a power cut the file may be empty, which `read_rollouts` reports.
            write_atomic(path, encode_rollouts(step, groups), sync=False)
        except OSError as error:
            # Rollouts are a record, not worth the run. One warning is enough: `close` counts the missing steps.
            if not self._missing:
                log.warning(
                    "cannot write %s: %s. The run goes on, and each step tries again; free disk space", path, error
                )
            self._missing.append(step)
            return None
        return path

    def close(self) -> None:
        """Says which steps are missing because the disk refused them."""
        if self._missing:
            first, last = self._missing[0], self._missing[-1]
            log.warning("%s lacks %d steps from %d to %d: they could not be written",
                        self.folder, len(self._missing), first, last)  # fmt: skip
            self._missing.clear()


def rollout_paths(run_dir: str | Path) -> dict[int, Path]:
    """The file of each step that is stored, in the order of the steps."""
    matches = (
        (_FILE_NAME.fullmatch(path.name), path) for path in (Path(run_dir) / ROLLOUT_FOLDER).glob("step_*.jsonl.gz")
    )
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def encode_rollouts(step: int, groups: Sequence[Group]) -> bytes:
    """The bytes of one file. The same groups give the same bytes."""
    # The number of groups shows a reader whether the file was cut at the end of a line.
    header = json.dumps({"format": FORMAT_VERSION, "step": step, "groups": len(groups)})
    lines = [header, *(group_to_json(group) for group in groups), ""]
    return gzip.compress("\n".join(lines).encode(), _GZIP_LEVEL, mtime=0)


def read_rollouts(path: str | Path) -> list[Group]:
    """Reads the groups of a file (`group_of` says what JSON makes of them).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, cut off, or of another format.
    """
    path = Path(path)
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
            header, *groups = map(json.loads, file)
    except (EOFError, gzip.BadGzipFile, zlib.error, ValueError) as error:
        raise UsageError(f"{path}: damaged or cut off ({error}); delete the file") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT_VERSION:
        raise UsageError(
            f"{path}: not a rollout file of format {FORMAT_VERSION}: read it with the version that wrote it"
        )
    count = header["groups"]
    if len(groups) != count:
        raise UsageError(f"{path}: damaged or cut off ({len(groups)} groups of {count}); delete the file")
    return [group_from_record(record) for record in groups]
