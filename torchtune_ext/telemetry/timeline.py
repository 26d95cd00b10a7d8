"""What engine, graders and trainer did when: `RUN/trace.json`, which ui.perfetto.dev and chrome://tracing open.

The format is Chrome's ("Trace Event Format", JSON Array Format, which may lack its last bracket, so that appending is enough).
Times are in microseconds since 1970, by one clock for all threads. What the file holds:

    ph       name                    what it is
    X        sample, backward, ...   a phase of the trainer (cat "phase"), or a detail of one (cat "detail"); they nest
    b and e  engine                  a group from its submission to its last completion
    b and e  graders                 from there to its last grade
    b and e  buffer                  from there until it is taken for a step; evaluations have none
    i        start                   a process begins or goes on with the run

`args` of a group are its number as `group`, `refill`, `evaluation` or `greedy`, and the `step` that took it, or `cancelled`
where none did; with the engine also its `problem` (the id), `tokens` (of all completions) and `versions` (lowest and highest
that sampled one of them). The `id2` of b and e is local to the process: so Perfetto draws them below it, in as few lanes as
hold them without overlap, and each name in lanes of its own.

A step of 64 groups, with their problems, adds about 52 KB.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import torch

from torchtune_ext.groups import GroupKey, GroupTimes
from torchtune_ext.run.errors import Mistake
from torchtune_ext.telemetry.metrics import append_whole

log = logging.getLogger(__name__)

FILE = "trace.json"
TRACKS = ("engine", "graders", "buffer")  # where a group can be, in this order
MERGED_S = 0.01  # Two waits for groups with less between them are drawn as one.
_PLACE = {"pid": 1, "tid": 1}  # Chrome's format wants a process and a thread, whatever they mean.
_LONGEST_ID = 80  # characters of a problem's id
_TAIL = 1 << 16  # bytes at the end of the file, among which is a line break


@dataclass(slots=True)
class _Stay:
    """A group that is on its way, and when it came to each track, in seconds of `time.monotonic`."""

    facts: dict[str, Any]
    since: list[tuple[str, float]]


class Timeline(GroupTimes):
    """Collects what happens, from several threads, and appends it to `run_dir/trace.json` at each `flush`.

    The events of a group are written at the first `flush` after it has been taken, those of a phase after it is over. So a
    killed run leaves nothing half told, and lacks what had not been flushed. A run that goes on appends; what a kill has torn
    off at the end of the file is cut away first. Nothing is written before the first `flush`.

    Args:
        run_dir: folder of the run.
        step: returns the step that the run is at.
    """

    def __init__(self, run_dir: str | Path, step: Callable[[], int]):
        self.path = Path(run_dir) / FILE
        self.step, self._lock, self._ids = step, Lock(), count()
        self._began = time.monotonic()
        self._epoch = time.time() - self._began  # when the monotonic clock was 0, in seconds since 1970
        self._open: dict[GroupKey, _Stay] = {}
        self._phases: list[list] = []  # name, begin, end, step
        self._lines: list[str] = []
        self._flushed = self._refused = False

    def phase(self, name: str, begin: float, end: float) -> None:
        """Notes a phase of the trainer, or with a slash a detail of one, which is over.

        Args:
            begin, end: in seconds of `time.monotonic`.
        """
        with self._lock:
            last = self._phases[-1] if self._phases else None
            if last is not None and last[0] == name and begin - last[2] < MERGED_S:
                last[2] = end
            else:
                self._phases.append([name, begin, end, self.step()])

    def begin(self, key: GroupKey, track: str = TRACKS[0], **facts: Any) -> None:
        with self._lock:
            self._open[key] = _Stay(facts, [(track, time.monotonic())])

    def move(self, key: GroupKey, track: str, **facts: Any) -> None:
        with self._lock:
            if (stay := self._open.get(key)) is not None:
                stay.facts |= facts
                stay.since.append((track, time.monotonic()))

    def end(self, key: GroupKey, **facts: Any) -> None:
        with self._lock:
            if (stay := self._open.pop(key, None)) is not None:
                stay.facts |= facts
                self._lines += self._group(key, stay, time.monotonic())

    def flush(self) -> None:
        """Appends what is over to the file.

        The timeline is a record, not worth the run. So a disk that refuses is a warning, and the next flush tries again,
        without the events of this one.
        """
        with self._lock:
            lines = self._lines + [self._phase(*phase) for phase in self._phases]
            self._lines, self._phases = [], []
        try:
            self._append(lines)
        except OSError as error:
            if not self._refused:
                log.warning("cannot write %s: %s. The run goes on without it; free disk space", self.path, error)
            self._refused = True
            return
        if self._refused:
            log.warning("%s is written again; it has a gap", self.path)
        self._flushed, self._refused = True, False

    def close(self) -> None:
        """Writes what is left, if there was a `flush` before: a run that failed before its first one leaves no file."""
        for key in list(self._open):
            self.end(key, cancelled=True)
        if self._flushed:
            self.flush()

    def _event(self, ph: str, name: str, at: float, **fields: Any) -> str:
        event = {"ph": ph, "name": name, "ts": self._us(at)} | _PLACE | fields
        return json.dumps(event, separators=(",", ":"))

    def _us(self, at: float) -> int:
        """Returns microseconds since 1970. Rounding down keeps the order, so that what nests still does."""
        return int((self._epoch + at) * 1e6)

    def _phase(self, name: str, begin: float, end: float, step: int) -> str:
        cat, last = ("detail" if "/" in name else "phase"), name.rpartition("/")[2]
        return self._event("X", last, begin, cat=cat, dur=self._us(end) - self._us(begin), args={"step": step})

    def _group(self, key: GroupKey, stay: _Stay, now: float) -> list[str]:
        """Returns a line for each track where the group has been: begin and end in one, so that a cut leaves both or none."""
        number, common = str(next(self._ids)), {key[0]: key[1]}
        common |= {"cancelled": True} if stay.facts.pop("cancelled", False) else {"step": self.step()}
        facts = stay.facts | {"problem": str(stay.facts.get("problem", ""))[:_LONGEST_ID]}
        lines = []
        for (track, since), until in zip(stay.since, [*(at for _, at in stay.since[1:]), now], strict=True):
            args = common | facts if track == TRACKS[0] else common
            same = {"cat": track, "id2": {"local": number}}
            lines.append(
                self._event("b", track, since, **same, args=args) + "," + self._event("e", track, until, **same)
            )
        return lines

    def _append(self, lines: list[str]) -> None:
        """Makes one write. What did not fit as a whole is taken back, so that the file stays valid."""
        with open(self.path, "ab+", buffering=0) as file:
            if not self._flushed:
                _cut_torn_line(file)
                lines = [self._event("i", "start", self._began, s="p", args={"step": self.step()}), *lines]
            size = file.seek(0, os.SEEK_END)
            if not size:
                names = ("process_name", self.path.absolute().parent.name), ("thread_name", "trainer")
                lines = [self._event("M", name, self._began, args={"name": value}) for name, value in names] + lines
            data = ("" if size else "[\n") + "".join(f"{line},\n" for line in lines)
            append_whole(file.fileno(), data.encode())


def read_trace(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yields the events of a `trace.json`. A torn last line, which a killed run may leave, is left out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged elsewhere.
    """
    with open(path, "rb") as file:
        if file.readline() != b"[\n":
            raise Mistake(f"{path}: not a timeline of a run (its first line is not a bracket)")
        for number, line in enumerate(file, 2):
            # What follows the last line break is a line in which the run was killed.
            if not line.endswith(b"\n"):
                return
            try:
                yield from json.loads(b"[%b]" % line.rstrip().removesuffix(b","))
            except ValueError as error:
                raise Mistake(f"{path}, line {number}: not an event ({error})") from error


def _cut_torn_line(file: BinaryIO) -> None:
    """Cuts a file behind its last line break. No line is longer than what is read here."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - _TAIL))
    tail = file.read()
    file.truncate(end - len(tail) + tail.rfind(b"\n") + 1)


class Profile:
    """Writes what this process computes in the steps that the recipe's `profile` names: `profile/step_000003_rank_0.json.gz`,
    which https://ui.perfetto.dev and chrome://tracing show. What is computed is the same; the step takes longer."""

    def __init__(self, steps: Sequence[int], folder: str, rank: int):
        self._steps, self._folder, self._rank = set(steps), Path(folder) / "profile", rank
        self._open: tuple[torch.profiler.profile, int] | None = None

    def begin(self, step: int) -> None:
        if step in self._steps:
            profiler = torch.profiler.profile()  # of all devices that torch was built for
            profiler.start()
            self._open = profiler, step

    def close(self) -> None:
        """Writes the trace of a step that has begun. Where that cannot be done, as on a full disk, a warning says so."""
        if self._open is not None:
            (profiler, step), self._open = self._open, None
            profiler.stop()
            try:
                self._folder.mkdir(exist_ok=True)
                profiler.export_chrome_trace(str(self._folder / f"step_{step:06d}_rank_{self._rank}.json.gz"))
            except (OSError, RuntimeError) as error:
                log.warning("profile: the trace of step %d was not written, and the run goes on: %s", step, error)
