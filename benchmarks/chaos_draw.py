"""What `chaos.py` does in which round: the faults, and how they are drawn from a seed and the number of the round."""

import random
from dataclasses import dataclass

from chaos_run import STEPS

SET_UP = ("imports", "engine")
STEP = ("sampling", "grading", "training", "publishing", "evaluation", "checkpoint", "between")
PHASES = (*SET_UP, *STEP[:-1], "pruning", "between")  # in their order
SPAN_S = {  # how long a phase lasts, about: a fault comes up to so many seconds after its beginning
    "imports": 5.0, "engine": 5.0, "sampling": 0.05, "grading": 0.4, "training": 0.05, "publishing": 0.08,
    "evaluation": 0.25, "checkpoint": 0.05, "between": 0.03, "pruning": 0.002,
}  # fmt: skip
ENGINE = ("engine", "sampling", "grading", "training", "publishing", "evaluation", "checkpoint")
SAVED = ("sampling", "training", "evaluation", "checkpoint")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and what a run promises about it.

    The run "goes on" to status 0; or it "ends" with one of `status` and a message within `within_s`, and goes on when it is
    started again with `resume_from_checkpoint=True`. Faults of the kind "own" have their own play in `chaos_play.py`.
    """

    name: str
    kind: str  # "goes on", "ends" or "own"
    phases: tuple[str, ...]
    status: tuple[int, ...] = (0,)  # as a shell gives it: 128 + signal
    message: str = ""  # regular expression for the output of a run that ends; "": nothing can be said (kill -9)
    within_s: float = 60.0  # from the fault to the end
    ranks: int = 1
    weight: int = 1  # how often it comes up beside the others


STOP = r"Stopped by {signal}.*(resume_from_checkpoint=True|no checkpoint yet: start it again)"
FAULTS = (
    Fault("trainer_kill", "ends", PHASES, (137,), weight=3),
    Fault("trainer_pause", "goes on", ("engine", "sampling", "training", "checkpoint")),
    Fault("core_kill", "goes on", ENGINE, weight=2),
    Fault("core_stop", "goes on", ENGINE, weight=2),
    Fault("client_kill", "goes on", ENGINE),
    Fault("client_stop", "goes on", ENGINE),
    Fault("grader_kill", "goes on", ("grading", "training", "evaluation", "engine")),
    Fault("grader_stop", "goes on", ("grading", "training", "evaluation")),
    Fault("grader_pause", "goes on", ("grading", "sampling", "evaluation", "training")),
    Fault("janitor_kill", "goes on", ("engine", "sampling", "publishing", "evaluation")),
    Fault("janitor_core_kill", "goes on", ("sampling", "training", "grading", "publishing")),
    Fault("rank_kill", "ends", SAVED, (1,), r"(?i)SIGKILL", ranks=2),
    Fault("rank_stop", "ends", SAVED, (1,), r"rank [01] .*no sign of life", ranks=2, within_s=90.0),
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
        (1,),
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
    step: int  # in which the fault comes; 0 in the set-up
    delay_s: float  # after the beginning of the phase
    every: int  # steps between checkpoints
    seed: str  # of whatever else is drawn

    def __str__(self) -> str:
        where = f"{self.phase}, step {self.step}" if self.step else self.phase
        return (
            f"{self.number:4d}  {self.fault.name:18s} {where:22s} +{self.delay_s:.3f} s, checkpoint every {self.every}"
        )


def draw(seed: int, number: int, names: tuple[str, ...] = NAMES) -> Drawn:
    """Round `number` (from 1). Every block of rounds holds each fault as often as its weight says, and each fault goes
    through its phases in turn, so that all come up evenly."""
    chosen, most = [fault for fault in FAULTS if fault.name in names], max(fault.weight for fault in FAULTS)
    # The first pass has every fault once.
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
        step = rng.randint(1, STEPS - 1)  # after the last step there is only the end
    if phase == "checkpoint":
        step = step if every == 1 else rng.choice([2, 4])
    if phase == "pruning":
        step, every = 3, 1  # the first time that there is one too many
    if fault.name in ("fresh_run", "disk_full"):
        step, every = max(step, 2), 1  # with a checkpoint behind it
    return Drawn(number, fault, phase, step, rng.uniform(0, SPAN_S.get(phase, 0)), every, f"{seed}/{number}")
