"""Watches over the ranks of a run: a rank that gives no sign of life is named, and ends the run after a deadline.

Every rank writes a beat into the rendezvous store again and again, and reads the beats of the others. A rank that sends no more
was stopped, swapped out or ended, or its machine is dead, and the others would wait for it for hours. So the lowest of them
reports it, and after `deadline_s` the run ends. A rank that beats but does not come to a collective is left to the time limit
of the process group.

The main thread of a rank that waits is inside gloo or NCCL, where no exception of ours can reach it. So the watch runs
in threads of its own, and ends the process itself. `Judge` decides only from the beats. `Watch` has the threads and
the store, and ends the process.
"""

import atexit
import json
import logging
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import NoReturn

import torch.distributed as dist

from torchtune_ext.run.errors import LOST_RANK_STATUS

log = logging.getLogger(__name__)

JOIN_S = 2.0  # seconds that the end waits for a thread, which may be waiting for a store that does not answer
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep


@dataclass(frozen=True, slots=True)
class Limits:
    """The times of the watch, in seconds.

    Args:
        deadline_s: silence of a rank after which the run ends (`ranks.deadline_s` of the recipes).
        beat_s: time between two beats.
        notice_s: silence before the first log line about it, and between two lines; at most half of `deadline_s`.
    """

    deadline_s: float = 300.0
    beat_s: float = 2.0
    notice_s: float = 60.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "notice_s", min(self.notice_s, self.deadline_s / 2))
        object.__setattr__(self, "beat_s", min(self.beat_s, self.notice_s / 4))


@dataclass(frozen=True, slots=True)
class Beat:
    """One sign of life of a rank, which says what the rank does."""

    count: int  # grows with every beat, so that a reader does not need the writer's clock
    host: str
    pid: int
    phase: str  # "train, step 3"; "" before the recipe has named a phase
    place: str  # where the main thread is, in our code or the user's: "grpo.py:214 in pack"

    def doing(self) -> str:
        """Returns a text with what the rank does, for messages."""
        return ", ".join(part for part in (self.phase, f"at {self.place}" if self.place else "") if part) or "starting"


@dataclass(slots=True)
class _Heard:
    """What this rank knows of one rank. The times are seconds during which this rank was awake."""

    beat: Beat | None = None
    silent: float = 0.0  # seconds since the last new beat
    reported: float = 0.0  # the value of `silent` when it was last reported


class Judge:
    """Decides from the beats of all ranks which rank is silent.

    It has no clock. Its caller tells it how many seconds have passed, without the time in which this process was
    stopped. So no other rank is blamed for that time.
    """

    def __init__(self, rank: int, world_size: int, limits: Limits):
        self.rank, self.limits = rank, limits
        self._ranks = {rank: _Heard() for rank in range(world_size)}

    def look(self, seconds: float, beats: Mapping[int, Beat]) -> tuple[list[str], str | None]:
        """Returns what this rank has to log, and why the run must end (None: it goes on).

        Args:
            seconds: time since the last look during which this process was awake.
            beats: the newest beat of each rank that has ever sent one.
        """
        notes, limits = [], self.limits
        for rank, heard in self._ranks.items():
            beat = beats.get(rank)
            if rank == self.rank or (beat is not None and beat != heard.beat):
                if heard.reported:
                    notes.append(f"rank {rank} is back after {heard.silent:.0f} s")
                heard.silent = heard.reported = 0.0
            else:
                heard.silent += seconds
            heard.beat = beat
        if lost := [_silence(rank, each) for rank, each in self._ranks.items() if each.silent >= limits.deadline_s]:
            return notes, (
                f"{'; '.join(lost)}. That is longer than ranks.deadline_s={limits.deadline_s:g}, so the run ends. If the "
                "rank was stopped, swapped out or killed, or its machine is gone, mend that; if it needs so long, raise "
                "ranks.deadline_s. Then go on from the last checkpoint with resume_from_checkpoint=True"
            )
        for rank, heard in self._ranks.items():
            if heard.silent >= limits.notice_s and heard.silent - heard.reported >= limits.notice_s:
                heard.reported = heard.silent
                notes.append(f"{_silence(rank, heard)}; the others wait; {self.end()}")
        return notes if self.speaks() else [], None

    def speaks(self) -> bool:
        """Tells whether this is the lowest rank that is alive, so that only one rank speaks."""
        recent = self.limits.notice_s / 2
        return self.rank == min(rank for rank, heard in self._ranks.items() if heard.silent < recent)

    def all_doing(self) -> str:
        """Returns a text with what every rank did last, for messages."""
        beats = {rank: heard.beat for rank, heard in self._ranks.items()}
        return "; ".join(f"rank {rank}: {beat.doing() if beat else 'never heard of'}" for rank, beat in beats.items())

    def end(self) -> str:
        """Returns the part of a message that says when the run ends."""
        return f"the run ends after {self.limits.deadline_s:g} s (ranks.deadline_s)"


def _silence(rank: int, heard: _Heard) -> str:
    if heard.beat is None:
        return f"rank {rank} has not arrived after {heard.silent:.0f} s"
    who = f"rank {rank} (host {heard.beat.host}, pid {heard.beat.pid})"
    return f"{who} gives no sign of life for {heard.silent:.0f} s (last: {heard.beat.doing()})"


class Watch:
    """The watch of this rank. Call `start`, name what the rank does with `phase`, and call `close` at the end.

    Args:
        rank: this rank.
        world_size: number of ranks.
        limits: the times of the watch.
        connect: makes a connection to the rendezvous store. A call on the connection can block as long as the store
            does not answer. So only one thread uses it, and another thread looks at the beats.
        store: a text that says where the store is and who holds it, for messages.
        agent_holds_store: True if the store is in the parent process, with which this rank ends. If such a store does
            not answer, the parent was only stopped (Ctrl-Z reaches torchrun, but not its ranks). The ranks do not need
            it, so the run goes on.
    """

    def __init__(self, rank: int, world_size: int, limits: Limits, connect: Callable[[], dist.Store], store: str,
                 agent_holds_store: bool):  # fmt: skip
        self.rank, self.world_size, self.limits = rank, world_size, limits
        self._connect, self._store, self._agent_holds_store = connect, store, agent_holds_store
        self._judge = Judge(rank, world_size, limits)
        self._phase, self._count, self._host = "", 0, socket.gethostname()
        # The number of the last answer of the store, and the beats in it. Threads may read it, since it is replaced as
        # a whole.
        self._answer: tuple[int, dict[int, Beat]] = (0, {})
        self._error = ""  # the error of the last exchange with the store
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=target, name=name, daemon=True)
                         for target, name in ((self._beat, "ranks-beat"), (self._look, "ranks-look"))]  # fmt: skip

    def start(self) -> "Watch":
        """Starts the threads, and returns this watch."""
        for thread in self._threads:
            thread.start()
        # If a daemon thread is in C code when the interpreter ends, it can abort the process. So the threads end first.
        atexit.register(self.close)
        return self

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names what this rank does inside the block."""
        outer, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = outer

    def close(self) -> None:
        """Tells the other ranks that this rank has ended, and ends the threads. It may be called twice."""
        atexit.unregister(self.close)
        self._stop.set()
        for thread in self._threads:
            thread.join(JOIN_S)

    def _beat(self) -> None:
        """Writes and reads beats until the end. This is the only thread that talks to the store."""
        store, known = None, set()
        while True:
            last = self._stop.is_set()
            try:
                store = store or self._connect()
                if last:
                    self._phase = "ended"
                self._exchange(store, known)
            except RuntimeError as error:
                # torch raises this for errors of the network. The next connection may work.
                store, self._error = None, str(error)
            if last:
                return
            self._stop.wait(self.limits.beat_s)

    def _exchange(self, store: dist.Store, known: set[int]) -> None:
        """Writes the beat of this rank and reads the beats of all ranks that have written one."""
        self._count += 1
        beat = Beat(self._count, self._host, os.getpid(), self._phase, main_place())
        store.set(str(self.rank), json.dumps(asdict(beat)))
        # Only keys that exist are read, because reading a key that is missing would wait for it.
        known.update(rank for rank in range(self.world_size) if rank not in known and store.check([str(rank)]))
        ranks = sorted(known)
        beats = [Beat(**json.loads(text)) for text in store.multi_get([str(rank) for rank in ranks])]
        self._answer = (self._count, dict(zip(ranks, beats, strict=True)))

    def _look(self) -> None:
        """Looks at the beats until the end. It logs what `Judge` decides, and ends the process if it must end."""
        limits, last, unanswered, reported, then = self.limits, 0, 0.0, 0.0, time.monotonic()
        while not self._stop.wait(limits.beat_s):
            now = time.monotonic()
            # If more time has passed, this process was itself stopped, or the machine was too busy. That time does not
            # count, so that no other rank is blamed for it.
            seconds, then = min(now - then, 2 * limits.beat_s), now
            count, beats = self._answer
            unanswered = 0.0 if count != last else unanswered + seconds
            last = count
            if unanswered < 3 * limits.beat_s:
                reported = 0.0
                notes, fatal = self._judge.look(seconds, beats)
                for text in notes:
                    log.warning("%s", text)
                if fatal is not None:
                    self._end(fatal if self._judge.speaks() else fatal.partition(". ")[0])
                continue
            ends = not (self._agent_holds_store and count)
            if unanswered - reported >= limits.notice_s:
                reported = unanswered
                then_what = self._judge.end() if ends else "the ranks go on without their watch"
                log.warning("rank %d: no answer from %s for %.0f s; %s", self.rank, self._store, unanswered, then_what)
            if ends and unanswered >= limits.deadline_s:
                self._end(
                    f"no answer from {self._store} for {unanswered:.0f} s, longer than ranks.deadline_s={limits.deadline_s:g} "
                    f"({self._error or 'no error of the network'}). Last heard: {self._judge.all_doing()}. See whether that "
                    "process and its machine live, then go on from the last checkpoint with resume_from_checkpoint=True"
                )

    def _end(self, why: str) -> None:
        if not self._stop.is_set():
            end_process(f"error: rank {self.rank} ends: {why}.")


def end_process(text: str) -> NoReturn:
    """Prints the text and ends this process with `LOST_RANK_STATUS`, also if the main thread is stuck."""
    # If nobody reads stderr any more, printing may block. The timer ends the process also then.
    timer = threading.Timer(JOIN_S, os._exit, [LOST_RANK_STATUS])
    timer.daemon = True
    timer.start()
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(LOST_RANK_STATUS)


def main_place() -> str:
    """Returns where the main thread is: the innermost line that belongs to no library, or ""."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None:
        path = frame.f_code.co_filename
        library = path.startswith((_STANDARD_LIBRARY, "<")) or "-packages" + os.sep in path
        if f"{os.sep}torchtune_ext{os.sep}" in path or not library:
            return f"{os.path.basename(path)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
