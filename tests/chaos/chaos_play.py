"""The rounds of `chaos.py`: the faults, their drawing from the seed and the number of the round, and the play of a round:
a run, its fault, the expected reaction, and the resumed run."""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from chaos_run import (
    RESUME,
    STEPS,
    UPDATES,
    Moment,
    Round,
    Run,
    differences,
    digests,
    last_checkpoint,
    left_in,
    left_outside,
    lost_sample,
)

RUN_S = 300.0  # deadline of a full run, also on a slow machine
DISK_MB = 24  # size of the small file system, room for a dozen checkpoints
SET_UP = ("imports", "engine")
STEP = ("sampling", "grading", "training", "publishing", "evaluation", "checkpoint", "between")
PHASES = (*SET_UP, *STEP[:-1], "pruning", "between")  # in order
SPAN_S = {  # approximate length of a phase: the maximum delay of a fault after the beginning of the phase
    "imports": 5.0, "engine": 5.0, "sampling": 0.05, "grading": 0.4, "training": 0.05, "publishing": 0.08,
    "evaluation": 0.25, "checkpoint": 0.05, "between": 0.03, "pruning": 0.002,
}  # fmt: skip
ENGINE = ("engine", "sampling", "grading", "training", "publishing", "evaluation", "checkpoint")
SAVED = ("sampling", "training", "evaluation", "checkpoint")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and the expected reaction of a run.

    kind "goes on": the run ends with status 0. kind "ends": it exits with one of `status` and a message within `within_s`, and
    resumes with `resume_from_checkpoint=True`. Faults of the kind "own" have their own play in `Play`.
    """

    name: str
    kind: str  # "goes on", "ends" or "own"
    phases: tuple[str, ...]
    status: tuple[int, ...] = (0,)  # as in a shell: 128 + signal
    message: str = ""  # regular expression for the output of a run that ends; "": no message is possible (kill -9)
    within_s: float = 60.0  # from the fault to the end
    ranks: int = 1
    weight: int = 1  # relative frequency


STOP = r"Stopped by {signal}.*(resume_from_checkpoint=True|no checkpoint yet, so the next start begins at step 1)"
FAULTS = (
    Fault("trainer_kill", "ends", PHASES, (137,), weight=3),
    Fault("trainer_pause", "goes on", ("engine", "sampling", "training", "checkpoint")),
    Fault("engine_kill", "goes on", ENGINE, weight=2),
    Fault("engine_stop", "goes on", ENGINE, weight=2),
    Fault("client_kill", "goes on", ENGINE),
    Fault("client_stop", "goes on", ENGINE),
    Fault("grader_kill", "goes on", ("grading", "training", "evaluation", "engine")),
    Fault("grader_stop", "goes on", ("grading", "training", "evaluation")),
    Fault("grader_pause", "goes on", ("grading", "sampling", "evaluation", "training")),
    Fault("reaper_kill", "goes on", ("engine", "sampling", "publishing", "evaluation")),
    Fault("reaper_engine_kill", "goes on", ("sampling", "training", "grading", "publishing")),
    Fault("rank_kill", "ends", SAVED, (1, 137), r"(?i)SIGKILL", ranks=2),
    Fault("rank_stop", "ends", SAVED, (1,), r"ranks\.deadline_s", ranks=2, within_s=120.0),
    Fault("agent_kill", "ends", ("engine", *SAVED), (137,), ranks=2),
    Fault("sigterm", "ends", (*SET_UP, *STEP), (143,), STOP.format(signal="SIGTERM")),
    Fault("sigint", "ends", (*SET_UP, *STEP), (130,), STOP.format(signal="Ctrl-C")),
    Fault("sighup", "ends", (*SET_UP, *STEP), (129,), STOP.format(signal="SIGHUP")),
    Fault("agent_sigterm", "ends", SAVED, (1, 143), r"SIGTERM", ranks=2),
    Fault("agent_sigint", "ends", SAVED, (1, 130), r"Ctrl-C|SIGINT", ranks=2),
    Fault("agent_sighup", "ends", SAVED, (1, 129), r"SIGHUP", ranks=2),
    Fault(
        "disk_full",
        "own",
        ("sampling", "training", "evaluation", "checkpoint"),
        (2,),
        r"No space left on device",
    ),
    Fault("damage_flip", "own", ("stopped",)),
    Fault("damage_cut", "own", ("stopped",)),
    Fault("damage_empty", "own", ("stopped",)),
    Fault("damage_remove", "own", ("stopped",)),
    Fault("second_starter", "own", ("engine", "sampling", "training", "checkpoint")),
    Fault("fresh_run", "own", SAVED),
    Fault("stdout_closed", "goes on", ("imports", "engine", "sampling", "evaluation", "training")),
)
NAMES = tuple(fault.name for fault in FAULTS)


@dataclass(frozen=True, slots=True)
class Drawn:
    """One round."""

    number: int
    fault: Fault
    phase: str
    step: int  # step of the fault; 0 in the set-up
    delay_s: float  # after the beginning of the phase
    every: int  # steps between checkpoints
    seed: str  # seed of all other draws

    def __str__(self) -> str:
        where = f"{self.phase}, step {self.step}" if self.step else self.phase
        return (
            f"{self.number:4d}  {self.fault.name:18s} {where:22s} +{self.delay_s:.3f} s, checkpoint every {self.every}"
        )


def draw(seed: int, number: int, names: tuple[str, ...] = NAMES) -> Drawn:
    """Draw round `number` (from 1). Every block of rounds contains each fault `weight` times, and each fault cycles
    through its phases, so that all phases occur evenly."""
    chosen, most = [fault for fault in FAULTS if fault.name in names], max(fault.weight for fault in FAULTS)
    # The first pass contains every fault once.
    passes = [[fault for fault in chosen if fault.weight > turn] for turn in range(most)]
    block, place = divmod(number - 1, sum(map(len, passes)))
    order = [f for i, bag in enumerate(passes) for f in random.Random(f"{seed}/{block}/{i}").sample(bag, len(bag))]
    fault = order[place]
    before = block * fault.weight + order[:place].count(fault)
    phases = random.Random(f"{seed}/{fault.name}").sample(fault.phases, len(fault.phases))
    phase, rng = phases[before % len(phases)], random.Random(f"{seed}/round {number}")
    step = 0 if phase in (*SET_UP, "stopped") else rng.randint(1, STEPS)
    if phase == "evaluation":
        step = rng.choice([2, 4])
    every = rng.choice([1, 2])
    if phase == "between":
        step = rng.randint(1, STEPS - 1)  # the last step has no "between"
    if phase == "checkpoint":
        step = step if every == 1 else rng.choice([2, 4])
    if phase == "pruning":
        step, every = 3, 1  # the first step with one checkpoint too many
    if fault.name in ("fresh_run", "disk_full"):
        step, every = max(step, 2), 1  # after a checkpoint
    return Drawn(number, fault, phase, step, rng.uniform(0, SPAN_S.get(phase, 0)), every, f"{seed}/{number}")


class Failed(Exception):
    """A run did not react as expected."""


class Skipped(Exception):
    """This machine does not support the fault."""


@dataclass
class Result:
    """Result of a round."""

    hit: str = ""  # the phase at the fault
    problems: list[str] = field(default_factory=list)  # empty: survived
    skipped: str = ""  # reason for a skipped round
    allowed: str = ""  # a loss by design
    lost: int = 0  # repeated steps
    recovery_s: float = 0.0  # from the fault to the next new line of metrics (or to the end, after the last one)
    message: str = ""  # message of the run


class Play:
    """One round: `run()` plays it, and `result` has its result."""

    def __init__(self, drawn: Drawn, workspace: Path, reference: Path, folder: Path):
        self.drawn, self.fault, self.reference = drawn, drawn.fault, reference
        self.home, self.result, self.rng = Round(workspace, folder), Result(), random.Random(drawn.seed)
        self.struck = 0.0  # time of the fault
        self.newest = 0  # step of the newest checkpoint at the exit of the disturbed run

    def run(self) -> Result:
        own = {
            "disk_full": self.disk_full,
            "second_starter": self.second_starter,
            "fresh_run": self.fresh_run,
        }
        try:
            if self.fault.name.startswith("damage_"):
                self.damage()
            else:
                own.get(self.fault.name, self.plain)()
            self.check_end()
        except Failed as failure:
            self.result.problems.append(str(failure))
        except Skipped as reason:
            self.result.skipped = str(reason)
        finally:
            self.home.end()
        return self.result

    # -- plays --------------------------------------------------------------------------------------------------------

    def plain(self) -> None:
        """Faults that are a signal or a closed pipe."""
        run = self.start(piped=self.fault.name == "stdout_closed")
        self.aim(run)
        self.strike(run)
        if self.fault.kind == "goes on":
            self.goes_on(run)
        else:
            self.ends(run)
            self.resume()

    def disk_full(self) -> None:
        """Fill the disk except a few blocks: permanently, or for a moment."""
        disk, free = self.home.output_dir, self.rng.choice([0, 0, self.rng.randint(1, 1200)])
        disk.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(disk)]
        done = subprocess.run(mount, capture_output=True, text=True)
        if done.returncode:
            raise Skipped(f"no small file system: {done.stderr.strip()}")
        balloon = disk / "balloon"
        try:
            run = self.start()
            self.aim(run)
            self.note_hit(run)
            with open(balloon, "wb") as file:
                while (room := os.statvfs(disk)).f_bavail * room.f_frsize > free * 1024:
                    try:
                        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize - free * 1024)
                        break
                    except OSError:
                        continue  # the run has written meanwhile
            if self.rng.random() < 0.3:
                time.sleep(0.5)
                balloon.unlink()
            code = run.wait(self.fault.within_s)
            balloon.unlink(missing_ok=True)
            self.first_end(run, code, allow_success=True)
            if code:
                self.resume()
        finally:
            shutil.copytree(disk, disk.with_name("copy"))
            subprocess.run(["umount", "--lazy", str(disk)], check=True)
            disk.rmdir()
            disk.with_name("copy").rename(disk)

    def damage(self) -> None:
        """Damage a file of the newest checkpoint: the run must reject it by name, then resume from the previous checkpoint."""
        shutil.copytree(self.reference, self.home.output_dir)
        newest = last_checkpoint(self.home.output_dir)
        victim = self.rng.choice(
            sorted(path for path in newest.rglob("*") if path.is_file() and path.name != "README.md")
        )
        size = victim.stat().st_size
        how = self.fault.name.removeprefix("damage_")
        self.result.hit = f"{how} {victim.relative_to(newest)}"
        if how == "flip":
            data, place = bytearray(victim.read_bytes()), self.rng.randrange(size)
            data[place] ^= 1 << self.rng.randrange(8)
            victim.write_bytes(data)
        elif how == "remove":
            victim.unlink()
        else:
            os.truncate(victim, self.rng.randrange(1, size) if how == "cut" else 0)
        before = digests(self.home.output_dir / "checkpoints")
        self.struck = time.monotonic()
        run = self.start(RESUME)
        code = run.wait(self.fault.within_s)
        self.say(run, re.escape(victim.name))
        if code is None:
            raise Failed(f"a damaged checkpoint was not refused within {self.fault.within_s:g} s")
        if code == 0:
            raise Failed(f"a damaged checkpoint was loaded without an error ({self.result.hit})")
        if victim.name not in run.output():
            self.result.problems.append(f"the message does not name {victim.name}")
        if digests(self.home.output_dir / "checkpoints") != before:
            self.result.problems.append("a refused checkpoint was changed")
        self.newest = STEPS - 1
        step = next(each for each in victim.parents if each.name.startswith("step_"))
        step.rename(step.with_name("damaged"))
        self.resume()

    def second_starter(self) -> None:
        """Start a second run in the folder of a running one."""
        run = self.start()
        self.aim(run)
        os.kill(run.pid, signal.SIGSTOP)  # otherwise it would finish before the second run starts
        self.note_hit(run)
        second = self.home.start(*self.rng.choice([(), (RESUME,)]))
        code = second.wait(self.fault.within_s)
        os.kill(run.pid, signal.SIGCONT)
        self.say(second, rf"\b{run.pid}\b")
        if code is None:
            self.result.problems.append(f"the second starter still runs after {self.fault.within_s:g} s")
            second.process.kill()
        elif code == 0:
            self.result.problems.append("the second starter ended with status 0")
        elif not re.search(rf"\b{run.pid}\b", second.output()) or socket.gethostname() not in second.output():
            self.result.problems.append(f"the second starter does not name process {run.pid} and this host")
        self.goes_on(run)

    def fresh_run(self) -> None:
        """Start a new run in a used folder, kill it and resume it. The earlier run must stay unchanged."""
        shutil.copytree(self.reference, self.home.output_dir)
        before = digests(self.home.output_dir)
        run = self.start()
        self.aim(run)
        os.kill(run.pid, signal.SIGKILL)
        run.wait(10)
        self.note_hit(run)
        self.first_end(run, 137, status=(137,))
        self.resume()
        earlier = digests(self.home.output_dir / "old-1")
        if broken := sorted(name for name in before if earlier.get(name) != before[name]):
            self.result.problems.append(
                f"the earlier run is not whole in old-1: {broken[0]} and {len(broken) - 1} more"
            )

    # -- parts --------------------------------------------------------------------------------------------------------

    def start(self, *args: str, piped: bool = False) -> Run:
        run = self.home.start(f"checkpoints.every={self.drawn.every}", *args, ranks=self.fault.ranks, piped=piped)
        run.watch.every = self.drawn.every
        return run

    def aim(self, run: Run) -> None:
        """Wait for the drawn phase of the drawn step, then for the drawn delay."""
        phase = PHASES.index(self.drawn.phase)
        give_up_at = time.monotonic() + RUN_S
        while True:
            now = run.watch.moment()
            if (now.step, PHASES.index(now.phase)) >= (self.drawn.step, phase) or now.step > self.drawn.step:
                break
            if run.process.poll() is not None:
                raise Failed(f"the run ended with {run.wait(0)} before its fault: {last_line(run)}")
            if time.monotonic() > give_up_at:
                raise Failed(f"the run was still at {now} after {RUN_S:g} s, before its fault")
            time.sleep(0.0005 if now.step == self.drawn.step else 0.005)
        time.sleep(self.drawn.delay_s)

    def note_hit(self, run: Run) -> Moment:
        self.struck = self.struck or time.monotonic()
        moment = run.watch.moment()
        self.result.hit = str(moment)
        return moment

    def strike(self, run: Run) -> None:
        kinds: dict[str, Callable[[Run], None]] = {
            "trainer_kill": lambda run: os.kill(run.pid, signal.SIGKILL),
            "trainer_pause": lambda run: self.pause(run.pid, self.rng.uniform(2, 8)),
            "engine_kill": lambda run: os.kill(self.find(run, "core"), signal.SIGKILL),
            "engine_stop": lambda run: os.kill(self.find(run, "core"), signal.SIGSTOP),
            "client_kill": lambda run: os.kill(self.find(run, "client"), signal.SIGKILL),
            "client_stop": lambda run: os.kill(self.find(run, "client"), signal.SIGSTOP),
            "grader_kill": lambda run: os.kill(self.find(run, "grader"), signal.SIGKILL),
            "grader_stop": lambda run: os.kill(self.find(run, "grader"), signal.SIGSTOP),
            "grader_pause": lambda run: self.pause(self.find(run, "grader"), self.rng.uniform(0.2, 2)),
            "reaper_kill": lambda run: os.kill(self.find(run, "reaper"), signal.SIGKILL),
            "reaper_engine_kill": self.kill_reaper_and_engine,
            "rank_kill": lambda run: os.kill(run.trainer(self.rng.randrange(2)), signal.SIGKILL),
            "rank_stop": lambda run: os.kill(run.trainer(1), signal.SIGSTOP),
            "agent_kill": lambda run: os.kill(run.pid, signal.SIGKILL),
            "sigterm": lambda run: os.kill(run.pid, signal.SIGTERM),
            "sigint": lambda run: os.killpg(run.pid, signal.SIGINT),  # as Ctrl-C does
            "sighup": lambda run: os.killpg(run.pid, signal.SIGHUP),  # as a terminal that is closed does
            "stdout_closed": lambda run: run.reader_leaves.set(),
        }
        self.note_hit(run)
        name = self.fault.name if self.fault.name in kinds else self.fault.name.removeprefix("agent_")
        try:
            kinds[name](run)
        except (LookupError, ProcessLookupError) as missing:
            if run.wait(10) is None:
                raise Failed(f"nothing to disturb: {missing}; {last_line(run)}") from None
            self.result.hit = "after the end"  # on a busy machine; the run must be complete nevertheless
        if self.fault.name in ("trainer_kill", "agent_kill"):
            run.wait(10)
            self.note_hit(run)  # the final state is the moment of the fault

    def find(self, run: Run, role: str) -> int:
        """Return a process of that role; prefer the grading process that holds a text."""
        give_up_at = time.monotonic() + 20
        while not (pids := [p.pid for p in run.of(role)]):
            if time.monotonic() > give_up_at or run.process.poll() is not None:
                raise LookupError(f"no process with role {role!r}")
            time.sleep(0.01)
        self.note_hit(run)
        return run.watch.last_pid if run.watch.last_pid in pids else self.rng.choice(pids)

    def pause(self, pid: int, seconds: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):  # the run has ended
            os.kill(pid, signal.SIGCONT)

    def kill_reaper_and_engine(self, run: Run) -> None:
        os.kill(self.find(run, "reaper"), signal.SIGKILL)
        time.sleep(self.rng.choice([0.0, 0.2]))
        os.kill(self.find(run, "core"), signal.SIGKILL)

    def goes_on(self, run: Run) -> None:
        """Wait for the end of a run that must survive."""
        code = self.recovered(run, run.watch.logged())
        if code is None:
            raise Failed(f"still running {RUN_S:g} s after the fault; it stands at {run.watch.moment()}")
        self.say(run, r"engine: crashed|grad\w+ process|WARNING")
        if code == 0:
            return
        starting = self.result.hit in SET_UP and "the engine did not start" in run.output()
        if not (starting and self.fault.name.startswith(("engine_", "client_", "reaper_engine_"))):
            raise Failed(f"ended with status {code}: {last_line(run)}")
        self.result.allowed = "an engine that fails at its first start ends the run"
        self.first_end(run, code, status=(1,))
        self.resume()

    def ends(self, run: Run) -> None:
        code = run.wait(max(self.struck + self.fault.within_s - time.monotonic(), 0.1))
        self.first_end(run, code, allow_success=True)

    def first_end(self, run: Run, code: int | None, status: tuple[int, ...] = (), allow_success: bool = False) -> None:
        """Check the exit of the disturbed run, and its leftovers."""
        if code is None:
            raise Failed(f"still running {self.fault.within_s:g} s after the fault; it stands at {run.watch.moment()}")
        self.newest = max(run.watch.saved(), default=0)
        if code != 137:  # kill -9 leaves no time for a message
            self.say(run, self.fault.message)
        if code == 0 and allow_success and self.newest == STEPS:
            return  # the fault came too late
        # During imports no signal handler is installed, and a module may turn a signal into its own error.
        early = self.result.hit == "imports"
        expected = (*(status or self.fault.status), *((1,) if early and self.fault.name == "sigint" else ()))
        if code not in expected:
            self.result.problems.append(f"status {code}, not {' or '.join(map(str, expected))}")
        if self.fault.message and not early and not re.search(self.fault.message, run.output()):
            self.result.problems.append(f"no message like {self.fault.message!r}; the last line is: {last_line(run)}")
        self.check_left(run.home.output_dir, partial=self.fault.name == "disk_full")
        due = max(run.watch.logged() - 1, 0) // self.drawn.every * self.drawn.every
        if self.newest < due:
            self.result.problems.append(f"the newest checkpoint is of step {self.newest}, though step {due} was over")

    def check_left(self, folder: Path, partial: bool) -> None:
        """Check for leftover processes, temporary folders, shared memory, and half-written files if `partial`."""
        left = self.home.left_running()
        if left:
            names = ", ".join(f"{p.pid} ({p.role or 'other'})" for p in left)
            raise Failed(f"left running: {names}")
        self.result.problems += left_outside(self.home.temp, self.home.shared)
        self.result.problems += left_in(folder) if partial else []

    def resume(self, *args: str) -> None:
        """Resume the run as its message says, and wait for its end."""
        run = self.start(RESUME, *args)
        run.watch.first_step = self.newest
        code = self.recovered(run, self.newest or -1)
        if code is None:
            raise Failed(f"the resumed run still runs after {RUN_S:g} s; it stands at {run.watch.moment()}")
        if code:
            raise Failed(f"the resumed run ended with status {code}: {last_line(run)}")
        run.watch.follow()
        steps = run.watch.updates / UPDATES
        if steps != STEPS - self.newest:
            self.result.problems.append(f"resumed, it made {steps:g} steps after the checkpoint of step {self.newest}")

    def recovered(self, run: Run, logged: int) -> int | None:
        """Wait for the end of a run, and record the time of its first new log line. Return the exit status."""
        give_up_at = time.monotonic() + RUN_S
        while run.process.poll() is None and time.monotonic() < give_up_at:
            run.watch.follow()
            if not self.result.recovery_s and run.watch.scene and run.watch.logged() > logged:  # not an old line
                self.result.recovery_s = time.monotonic() - self.struck
            time.sleep(0.02)
        self.result.recovery_s = self.result.recovery_s or time.monotonic() - self.struck
        return run.wait(0)

    def check_end(self) -> None:
        """Check the final state of the round."""
        folder = self.home.output_dir
        self.check_left(folder, partial=True)
        updates = 0
        for run in self.home.runs:
            run.watch.follow()
            updates += run.watch.updates
        known = STEPS if self.fault.name.startswith("damage_") else 0  # made by the run whose folder was copied
        self.result.lost = max(0, -(-updates // UPDATES) + known - STEPS)
        if self.fault.name == "sigterm" and self.result.lost and self.result.hit not in SET_UP:
            self.result.problems.append(
                f"{self.result.lost} steps were repeated: SIGTERM must save at the next boundary"
            )
        wrong = differences(folder, self.reference)
        if wrong and self.fault.name in ("grader_kill", "grader_stop"):
            wrong = self.without_grade(folder, wrong)
        unstored = bool(wrong) and all(w.startswith("no rollouts of step") for w in wrong)
        if unstored and self.fault.name == "disk_full" and "cannot write" in self.home.runs[0].output():
            self.result.allowed, wrong = f"{len(wrong)} steps without rollouts, as the run had warned", []
        self.result.problems += wrong

    def without_grade(self, folder: Path, wrong: list[str]) -> list[str]:
        """Allow one missing grade: a crashed grading process loses the grade of its current text, by design."""
        step, wrong_before = lost_sample(folder, self.reference)
        if step is not None:
            self.result.allowed = f"one sample of step {step} without a grade"
            return wrong_before
        if all(re.match(r"metrics of step \d+: eval/", w) for w in wrong):
            self.result.allowed = "one sample of an evaluation without a grade"
            return []
        return wrong

    def say(self, run: Run, pattern: str) -> None:
        """Store the message of the run: the last line that matches the pattern, or else its last line."""
        matches = [line for line in run.output().splitlines() if pattern and re.search(pattern, line)]
        self.result.message = (matches[-1] if matches else last_line(run)).strip()[:300]


def last_line(run: Run) -> str:
    """Return the error of a run, or else the last line of its output."""
    lines = [line.strip() for line in run.output().splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Failed|Exception|DamagedCheckpoint): ", line)]
    return (errors or lines or ["(no output)"])[-1][:300]
