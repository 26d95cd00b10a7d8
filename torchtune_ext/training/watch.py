"""The watch over the ranks of a run: who gives no sign of life, who is waited for, and what that rank does.

Every rank writes a beat into the rendezvous store again and again, and reads those of the others. Two things are told
apart:

    silent    a rank whose beats do not come any more: stopped, swapped out, ended, or its machine is dead. The others would
              wait for it for ever, so the lowest of them says it, and after `deadline_s` the run ends
    busy      a rank that beats, but has begun fewer collectives than the others, which wait for it: rank 0 while it
              samples, or a rank that hangs in a loop. Rank 0 may be busy for long, so this is a note, and an end only
              after `wait_s`

The main thread of a rank that waits is inside gloo or NCCL, where no exception of ours reaches it. So the watch lives in
threads of its own, and ends the process itself. `Judge` decides from beats alone; `Watch` holds the threads, the store and
the end.
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
from dataclasses import asdict, dataclass, field
from typing import NoReturn

import torch.distributed as dist

log = logging.getLogger(__name__)

LOST_RANK_STATUS = 76  # exit status of a rank that ends because another one is lost or never comes
JOIN_S = 2.0  # a thread that talks to a store without an answer is not waited for any longer at the end
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds of the watch.

    Args:
        deadline_s: a rank silent for longer ends the run (the recipes' `rank_deadline_s`).
        beat_s: between two beats.
        notice_s: of silence or waiting before the first line about it, and between two lines; at most half of `deadline_s`.
        long_s: a wait for a rank that has work of its own is worth a warning after so long.
        wait_s: the longest wait for a rank that is alive but busy; then the run ends.
    """

    deadline_s: float = 300.0
    beat_s: float = 2.0
    notice_s: float = 60.0
    long_s: float = 1800.0
    wait_s: float = 4 * 3600.0

    def __post_init__(self) -> None:
        if not 0 < self.deadline_s < float("inf"):
            raise ValueError(
                f"rank_deadline_s={self.deadline_s} must be a number greater than 0: the seconds that a rank may give no "
                "sign of life"
            )
        object.__setattr__(self, "notice_s", min(self.notice_s, self.deadline_s / 2))
        object.__setattr__(self, "beat_s", min(self.beat_s, self.notice_s / 4))


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank says of itself."""

    count: int  # grows with every beat; a reader needs no clock of the writer
    host: str
    pid: int
    phase: str  # "train, step 3"; "" before the recipe has named one
    place: str  # of the main thread in code of ours or the user's: "grpo.py:214 in pack"
    collectives: int  # begun by this rank so far

    def doing(self) -> str:
        return ", ".join(part for part in (self.phase, f"at {self.place}" if self.place else "") if part) or "starting"


@dataclass(slots=True)
class _Heard:
    """What a reader knows of one rank; seconds are the reader's own waking time."""

    beat: Beat | None = None
    silent: float = 0.0  # since the last new beat
    told: float = 0.0  # of that silence, when it was last said
    waits: float = 0.0  # since it began a collective that another rank has not begun


@dataclass(slots=True)
class Verdict:
    """What is to be said, and why the run must end (None: it goes on)."""

    notes: list[tuple[int, str]] = field(default_factory=list)  # logging level, text
    fatal: str | None = None
    speaker: bool = True  # this rank is the one that tells the whole story


class Judge:
    """Decides from the beats of all ranks. Has no clock of its own: time in which the reader slept, too, blames nobody."""

    def __init__(self, rank: int, world_size: int, limits: Limits):
        self.rank, self.limits = rank, limits
        self._ranks = {rank: _Heard() for rank in range(world_size)}
        self._waits_told = 0.0

    def look(self, seconds: float, beats: Mapping[int, Beat]) -> Verdict:
        """Args: seconds: since the last look, awake; beats: the newest of each rank that was ever heard."""
        verdict = Verdict()
        for rank, heard in self._ranks.items():
            beat = beats.get(rank)
            if rank == self.rank or (beat is not None and (heard.beat is None or beat.count != heard.beat.count)):
                if heard.told and self._speaks():
                    verdict.notes.append((logging.WARNING, f"rank {rank} is back after {heard.silent:.0f} s"))
                heard.silent = heard.told = 0.0
            else:
                heard.silent += seconds
            self._count_wait(heard, beat, beats, seconds)
            heard.beat = beat
        verdict.speaker = self._speaks()
        self._judge_silence(verdict)
        if not any(heard.silent >= self.limits.notice_s for heard in self._ranks.values()):
            self._judge_waits(verdict)
        return verdict

    def all_doing(self) -> str:
        """What every rank did last, for messages."""
        return "; ".join(f"rank {rank}: {_doing(heard.beat)}" for rank, heard in self._ranks.items())

    def _count_wait(self, heard: _Heard, beat: Beat | None, beats: Mapping[int, Beat], seconds: float) -> None:
        ahead = beat is not None and any(beat.collectives > other.collectives for other in beats.values())
        stands = ahead and heard.beat is not None and heard.beat.collectives == beat.collectives
        heard.waits = heard.waits + seconds if stands else 0.0

    def _speaks(self) -> bool:
        """Whether this is the lowest rank that is alive, so that one rank speaks and not all."""
        recent = self.limits.notice_s / 2
        return self.rank == min(rank for rank, heard in self._ranks.items() if heard.silent < recent)

    def _judge_silence(self, verdict: Verdict) -> None:
        limits = self.limits
        lost = [_lost(rank, heard) for rank, heard in self._ranks.items() if heard.silent >= limits.deadline_s]
        if lost:
            verdict.fatal = (
                f"{'; '.join(lost)}. That is longer than rank_deadline_s={limits.deadline_s:g}, so the run ends. If the "
                "rank was stopped, swapped out or killed, or its machine is gone, mend that; if it needs so long, raise "
                "rank_deadline_s. Then go on from the last checkpoint with resume_from_checkpoint=True"
            )
            return
        for rank, heard in self._ranks.items():
            if heard.silent >= limits.notice_s and heard.silent - heard.told >= limits.notice_s:
                heard.told = heard.silent
                if verdict.speaker:
                    verdict.notes.append((logging.WARNING, f"{_silence(rank, heard)}; the others wait; {self.end()}"))

    def end(self) -> str:
        return f"the run ends after {self.limits.deadline_s:g} s (rank_deadline_s)"

    def _judge_waits(self, verdict: Verdict) -> None:
        limits = self.limits
        waiting = {rank: heard for rank, heard in self._ranks.items() if heard.waits}
        longest = max((heard.waits for heard in waiting.values()), default=0.0)
        if longest < limits.notice_s:
            self._waits_told = 0.0
            return
        most = max(heard.beat.collectives for heard in waiting.values())
        behind = {rank: h.beat for rank, h in self._ranks.items() if h.beat is not None and h.beat.collectives < most}
        who = f"{_name(waiting)} in a collective for {longest:.0f} s ({next(iter(waiting.values())).beat.doing()})"
        whom = "; ".join(f"rank {rank} ({beat.host}, pid {beat.pid}): {beat.doing()}" for rank, beat in behind.items())
        if longest >= limits.wait_s:
            verdict.speaker = self.rank == min(waiting)
            verdict.fatal = (
                f"{who}, longer than {limits.wait_s:g} s. Alive, but not there, is {whom}. See what that rank does there, then "
                "go on from the last checkpoint with resume_from_checkpoint=True"
            )
        elif longest - self._waits_told >= limits.notice_s:
            self._waits_told = longest
            # work that only this rank does is no alarm; a phase that all of them are in is one that none should be late in
            shared = {heard.beat.phase for heard in waiting.values()} & {beat.phase for beat in behind.values()} - {""}
            level = logging.WARNING if shared or longest >= limits.long_s else logging.INFO
            if self.rank == min(waiting):
                text = f"{who}, alive but not there yet is {whom}; the run ends after {limits.wait_s:g} s of waiting"
                verdict.notes.append((level, text))


def _doing(beat: Beat | None) -> str:
    return "never heard of" if beat is None else beat.doing()


def _name(ranks: Mapping[int, object]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names} waits" if len(ranks) == 1 else f"ranks {names} wait"


def _silence(rank: int, heard: _Heard) -> str:
    if heard.beat is None:
        return f"rank {rank} has not arrived after {heard.silent:.0f} s"
    return f"rank {rank} gives no sign of life for {heard.silent:.0f} s (last: {heard.beat.doing()})"


def _lost(rank: int, heard: _Heard) -> str:
    if heard.beat is None:
        return f"rank {rank} did not arrive within {heard.silent:.0f} s"
    at = f"host {heard.beat.host}, pid {heard.beat.pid}"
    return (
        f"rank {rank} ({at}) gave no sign of life for {heard.silent:.0f} s; the last that it did: {heard.beat.doing()}"
    )


class Watch:
    """The watch of this rank. `start` it, name what the rank does with `phase`, `close` it.

    Args:
        connect: makes a connection to the rendezvous store. A call of such a connection can block for as long as the store does
            not answer, so it is used by one thread alone, and another one looks.
        store: where the store is and who holds it, for messages.
        agent_holds_store: the store lives in the parent, with which this rank dies. When it does not answer, it is stopped at
            worst (Ctrl-Z reaches torchrun, but not its ranks), and the ranks need it no more: no reason to end the run.
    """

    def __init__(self, rank: int, world_size: int, limits: Limits, connect: Callable[[], dist.Store], store: str,
                 agent_holds_store: bool):  # fmt: skip
        self.rank, self.world_size, self.limits = rank, world_size, limits
        self._connect, self._store, self._agent_holds_store = connect, store, agent_holds_store
        self._judge = Judge(rank, world_size, limits)
        self._phase, self._count, self._host = "", 0, socket.gethostname()
        self._answer: tuple[int, dict[int, Beat]] = (0, {})  # number of the answer, beats; replaced as a whole
        self._error = ""  # of the last exchange with the store
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=target, name=name, daemon=True)
                         for target, name in ((self._beat, "ranks-beat"), (self._look, "ranks-look"))]  # fmt: skip

    def start(self) -> "Watch":
        for thread in self._threads:
            thread.start()
        # a daemon thread that the ending interpreter finds in C code can abort it, so the threads end first, however it ends
        atexit.register(self.close)
        return self

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names what this rank does until the end of the block."""
        outer, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = outer

    def close(self) -> None:
        """Says goodbye and ends the threads. Can be called twice."""
        atexit.unregister(self.close)
        self._stop.set()
        for thread in self._threads:
            thread.join(JOIN_S)

    def _beat(self) -> None:
        """Tells and reads beats until the end. The one thread that talks to the store."""
        store, known = None, set()
        while True:
            last = self._stop.is_set()
            try:
                store = store or self._connect()
                if last:
                    self._phase = "ended"
                self._exchange(store, known)
            except RuntimeError as error:  # torch's errors of the network are such; perhaps the next connection works
                store, self._error = None, str(error)
            if last:
                return
            self._stop.wait(self.limits.beat_s)

    def _exchange(self, store: dist.Store, known: set[int]) -> None:
        self._count += 1
        beat = Beat(self._count, self._host, os.getpid(), self._phase, main_place(), collectives_begun())
        store.set(str(self.rank), json.dumps(asdict(beat)))
        # only keys that exist are read: a read of others would wait for them
        known.update(rank for rank in range(self.world_size) if rank not in known and store.check([str(rank)]))
        ranks = sorted(known)
        beats = [Beat(**json.loads(text)) for text in store.multi_get([str(rank) for rank in ranks])]
        self._answer = (self._count, dict(zip(ranks, beats, strict=True)))

    def _look(self) -> None:
        """Looks at the beats until the end; says what is to be said, ends the process when it has to."""
        limits, seen, unanswered, told, then = self.limits, 0, 0.0, 0.0, time.monotonic()
        while not self._stop.wait(limits.beat_s):
            now = time.monotonic()
            # a longer pause was ours: this process was stopped itself, or the machine was too busy to judge others
            seconds, then = min(now - then, 2 * limits.beat_s), now
            count, beats = self._answer
            unanswered = 0.0 if count != seen else unanswered + seconds
            seen = count
            if unanswered < 3 * limits.beat_s:
                told = 0.0
                self._act(self._judge.look(seconds, beats))
                continue
            ends = not (self._agent_holds_store and count)
            if unanswered - told >= limits.notice_s:
                told = unanswered
                then_what = self._judge.end() if ends else "the ranks go on without their watch"
                log.warning("rank %d: no answer from %s for %.0f s; %s", self.rank, self._store, unanswered, then_what)
            if ends and unanswered >= limits.deadline_s:
                self._act(Verdict(fatal=(
                    f"no answer from {self._store} for {unanswered:.0f} s, longer than rank_deadline_s={limits.deadline_s:g} "
                    f"({self._error or 'no error of the network'}). Last heard: {self._judge.all_doing()}. See whether that "
                    "process and its machine live, then go on from the last checkpoint with resume_from_checkpoint=True"
                )))  # fmt: skip

    def _act(self, verdict: Verdict) -> None:
        for level, text in verdict.notes:
            log.log(level, "%s", text)
        if verdict.fatal is not None and not self._stop.is_set():
            story = verdict.fatal if verdict.speaker else verdict.fatal.partition(". ")[0]
            end_process(f"error: rank {self.rank} ends: {story}.")


def end_process(text: str) -> NoReturn:
    """Ends this process with `LOST_RANK_STATUS` after the text, whatever the main thread is stuck in."""
    # nobody may read stderr any more; that must not keep the process
    timer = threading.Timer(JOIN_S, os._exit, [LOST_RANK_STATUS])
    timer.daemon = True
    timer.start()
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(LOST_RANK_STATUS)


def collectives_begun() -> int:
    """How many collectives this process has begun in the group of all ranks; 0 before there is one."""
    group = dist.group.WORLD
    try:
        return 0 if group is None else group._get_sequence_number_for_group()
    except RuntimeError:  # a backend that does not count: then nobody is said to wait, and silence is still seen
        return 0


def main_place() -> str:
    """Where the main thread is: the innermost line that belongs to no library, "" if there is none."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None:
        path = frame.f_code.co_filename
        if f"{os.sep}torchtune_ext{os.sep}" in path or not _of_library(path):
            return f"{os.path.basename(path)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _of_library(path: str) -> bool:
    return path.startswith((_STANDARD_LIBRARY, "<")) or "-packages" + os.sep in path
