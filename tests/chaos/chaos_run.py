"""One run of the recipe for `chaos.py`: started as a user starts it, observed from outside, found in /proc, and at the end
compared with an undisturbed run and checked for leftovers."""

import hashlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from helpers import tiny_runs
from torchtune_ext.pipeline.rollout_store import read_rollouts, rollout_paths

CONFIG = """
output_dir: ???
model_dir: model
device: cpu
dtype: float32
model: {_component_: torchtune_ext.policy.from_config, model_dir: "${model_dir}"}
tokenizer: {_component_: torchtune_ext.chat.ChatTokenizer, path: "${model_dir}"}
task: {_component_: chaos_task.Letters}
evaluation:
  every: 2
  task: {_component_: chaos_task.Letters, count: 4, name: held-out}
preset: grpo
optimizer: {_component_: chaos_optimizer.AdamW, lr: 1.0e-3}
max_steps: 4
prompts_per_step: 4
samples_per_prompt: 4
updates_per_step: 2
row_tokens: 256
max_mismatch: 1.0e-4
sampling: {max_tokens: 40}
grader: {timeout_s: 4}
engine:
  dtype: float32
  max_model_len: 128
  kv_cache_bytes: 16777216
  start_deadline_s: 60
  probe_interval_s: 1
  probe_deadline_s: 5
checkpoints: {every: 1, keep_last: 2, stop_grace_s: 25}
ranks: {deadline_s: 30}
"""
STEPS, UPDATES, GRADER_TIMEOUT_S = 4, 2, 4.0  # as above: max_steps, updates_per_step
RESUME = "resume_from_checkpoint=True"
ROLES = {
    "client_process": "client",  # and its fork, the engine process
    "run/worker_process.py": "grader",
    "reaper.py": "reaper",
    "grpo.py": "rank",
}
FAILED = ("infra_failed", "timed_out")  # outcomes of a text without a grade


def make_workspace(folder: Path, agents: bool = False) -> None:
    """Write the run folder: a model, the config, and the task (`agents`: with an agent) and optimizer that keep the journal."""
    folder.mkdir(parents=True)
    tiny_runs.write_tiny_model(folder / "model")
    # An agent waits for the restart of an engine, so its time limit is longer than that of a grader.
    config = CONFIG.replace("chaos_task.Letters", "chaos_task.LettersAgent") + "agent: {timeout_s: 120}\n"
    (folder / "run.yaml").write_text(config if agents else CONFIG)
    for name in ("chaos_task.py", "chaos_optimizer.py"):
        shutil.copyfile(Path(__file__).with_name(name), folder / name)


@dataclass(frozen=True, slots=True)
class Process:
    """A descendant process of a run."""

    pid: int
    role: str  # "core", "client", "grader", "reaper", "rank", "" for others
    rank: int  # of a rank


def processes(mark: str) -> list[Process]:
    """Return every live process whose environment contains the mark, by process id. Zombies do not count."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes()
                if (
                    f"CHAOS_MARK={mark}".encode() not in environ
                    or (entry / "stat").read_text().rsplit(")")[-1][1] == "Z"
                ):
                    continue
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
                name = (entry / "comm").read_text().strip()
            except OSError:
                continue  # it has exited, or is not readable
            role = next((role for text, role in ROLES.items() if text in words), "")
            role = "core" if name == "vllm-engine" else role
            rank = next((int(v[5:]) for v in environ.decode(errors="replace").split("\0") if v.startswith("RANK=")), 0)
            members.append(Process(int(entry.name), role, rank))
    return sorted(members, key=lambda p: p.pid)


class Round:
    """Shared state of the runs of a round: the folder, the mark in their environment, and a temporary folder."""

    def __init__(self, workspace: Path, folder: Path):
        self.workspace, self.folder, self.mark = workspace, folder, uuid.uuid4().hex
        self.output_dir = folder / "run"
        self.runs: list[Run] = []
        self.temp = Path(tempfile.mkdtemp(prefix="ch", dir="/tmp"))  # a short path: the engine puts sockets there
        self.shared: set[str] = set()  # files in /dev/shm that processes of the round had open
        self._over = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        threading.Thread(target=self._note_shared, daemon=True).start()

    def start(self, *args: str, ranks: int = 1, piped: bool = False) -> "Run":
        self.runs.append(Run(self, len(self.runs), args, ranks, piped))
        return self.runs[-1]

    def left_running(self, patience_s: float = 15.0) -> list[Process]:
        """Return the processes of this round that are still alive after `patience_s`."""
        give_up_at = time.monotonic() + patience_s
        while (left := processes(self.mark)) and time.monotonic() < give_up_at:
            time.sleep(0.05)
        return left

    def _note_shared(self) -> None:
        """Poll for shared memory files of this round, since other programs create and leave files, too."""
        while not self._over.wait(0.5):
            for process in processes(self.mark):
                try:
                    maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
                except OSError:
                    continue  # it has ended meanwhile
                self.shared |= set(re.findall(r"/dev/shm/([^\s/]+)", maps))

    def end(self) -> None:
        """Kill the remaining processes and remove the temporary folder."""
        self._over.set()
        for process in processes(self.mark):
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        shutil.rmtree(self.temp, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Moment:
    """Progress of a run, observed from outside."""

    phase: str
    step: int  # the current step; 0 before the first

    def __str__(self) -> str:
        return f"{self.phase}, step {self.step}" if self.step else self.phase


class Run:
    """A started run, with its output in a file."""

    def __init__(self, home: Round, number: int, args: tuple[str, ...], ranks: int, piped: bool):
        self.home, self.ranks = home, ranks
        self.log, self.journal = home.folder / f"output_{number}.txt", home.folder / f"journal_{number}.txt"
        self.journal.touch()
        environ = {"CHAOS_MARK": home.mark, "CHAOS_JOURNAL": str(self.journal), "TMPDIR": str(home.temp)}
        command = tiny_runs.command("grpo_full", f"output_dir={home.output_dir}", *args, ranks=ranks)
        self.started = time.monotonic()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, cwd=home.workspace, env={**tiny_runs.environment(), **environ}, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE if piped else log, stderr=log,
            )  # fmt: skip
        self.pid, self.watch = self.process.pid, Watch(home.output_dir, self.journal)
        self.reader_leaves = threading.Event()
        if piped:
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Read stdout until it ends, or until `reader_leaves` is set, which is one of the faults."""
        with self.process.stdout as pipe, open(self.log, "ab") as log:
            while not self.reader_leaves.is_set():
                if select.select([pipe], [], [], 0.05)[0]:
                    if not (data := os.read(pipe.fileno(), 65536)):
                        return
                    log.write(data)
                    log.flush()

    def wait(self, seconds: float) -> int | None:
        """Return the exit status as in a shell (128 + signal), or None if the run is alive after `seconds`."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return code if code >= 0 else 128 - code

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def of(self, role: str) -> list[Process]:
        return [p for p in processes(self.home.mark) if p.role == role]

    def trainer(self, rank: int = 0) -> int:
        """Return the process id of a rank; without torchrun, of the command. Raise LookupError before the rank starts."""
        if self.ranks == 1:
            return self.pid
        pids = [p.pid for p in self.of("rank") if p.rank == rank]
        if not pids:
            raise LookupError(f"rank {rank} is not there")
        return pids[0]


@dataclass
class Watch:
    """Derives the phase of a run from its journal and the files in its folder."""

    output_dir: Path
    journal: Path
    updates: int = 0  # optimizer updates of this run
    last: str = ""  # the last event
    last_pid: int = 0
    scene: str = ""  # "sampling", "evaluation" or "training": the phase of the events
    first_step: int = 0  # step after which this run began (the checkpoint that it resumed)
    every: int = 1  # steps between checkpoints
    _read: int = field(default=0, repr=False)

    def follow(self) -> None:
        """Read new lines of the journal."""
        with open(self.journal, "rb") as file:
            file.seek(self._read)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._read += len(data)
        for line in data.decode().splitlines():
            _, pid, event = line.split()
            self.last, self.last_pid = event, int(pid)
            if event == "update":
                self.updates += 1
            if event != "grade":
                self.scene = {"problem": "sampling", "held-out": "evaluation", "update": "training"}[event]

    def logged(self) -> int:
        """Return the last step in metrics.jsonl, or -1."""
        try:
            lines = (self.output_dir / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
            return json.loads(lines[-1])["step"] if lines else -1
        except FileNotFoundError:
            return -1

    def saved(self) -> list[int]:
        """Return the steps of the complete checkpoints."""
        try:
            names = os.listdir(self.output_dir / "checkpoints")
        except FileNotFoundError:
            return []
        return sorted(int(name[5:]) for name in names if name.startswith("step_") and name[5:].isdigit())

    def moment(self) -> Moment:
        self.follow()
        if self.scene == "" or (self.scene == "sampling" and not self._begun()):
            return Moment("engine" if (self.output_dir / "engine.log").exists() else "imports", 0)
        step, part = divmod(self.updates, UPDATES)
        step += self.first_step
        if self.scene == "training" and part:
            return Moment("training", step + 1)
        if self.scene == "sampling":
            if (self.output_dir / "rollouts" / f"step_{step + 1:06d}.jsonl.gz").exists():
                return Moment("training", step + 1)
            return Moment("grading" if self.last == "grade" else "sampling", step + 1)
        if self.logged() < step:
            return Moment("publishing" if self.scene == "training" else "evaluation", step)
        if step == 0:
            return Moment("between", 0)
        saved = self.saved()
        if step not in saved and (step % self.every == 0 or step == STEPS):
            return Moment("checkpoint", step)
        one_more = len(saved) > 3 or (len(saved) == 3 and step == 3)  # kept are the last two and the best
        hidden = list((self.output_dir / "checkpoints").glob(".*"))
        return Moment("pruning" if one_more or hidden else "between", step)

    def _begun(self) -> bool:
        """Whether the first weight sync is complete: earlier, the canary takes problems and solutions are graded."""
        return self.logged() >= self.first_step


def differences(run: Path, reference: Path) -> list[str]:
    """Return the differences to the reference in final weights, metrics and rollouts. Empty: bit-identical."""
    return [*_weights(run, reference), *_metrics(run, reference), *_rollouts(run, reference)]


def lost_sample(run: Path, reference: Path) -> tuple[int | None, list[str]]:
    """Find the training sample without a grade, which a fault may cause by design.

    Returns: the step of that sample or None, and the differences: earlier steps must equal the reference, and in that step
    all samples must be equal; later steps were trained on other rewards.
    """
    mine, theirs = rollout_paths(run), rollout_paths(reference)
    wrong = [] if mine.keys() == theirs.keys() else [f"rollouts of the steps {sorted(mine)}, not {sorted(theirs)}"]
    for step in sorted(mine.keys() & theirs.keys()):
        pairs = list(zip(_samples(mine[step]), _samples(theirs[step]), strict=True))
        failed = sum(a.outcome.kind in FAILED for a, _ in pairs)
        if failed:
            if failed > 1:
                wrong.append(f"step {step}: {failed} samples without a grade; one fault costs one")
            if not all(_same(a, b) for a, b in pairs):
                wrong.append(f"step {step}: other samples than in the reference")
            metrics = zip(tiny_runs.metrics(run), tiny_runs.metrics(reference), strict=True)
            wrong += [f"metrics of step {a['step']}" for a, b in metrics if a["step"] < step and a != b]
            return step, wrong
        if mine[step].read_bytes() != theirs[step].read_bytes():
            wrong.append(f"rollouts of step {step}")
    return None, wrong


def _samples(path: Path) -> list:
    return [sample for group in read_rollouts(path) for sample in group.samples]


def _same(sample, reference) -> bool:
    """Whether a sample equals its reference. A failed agent may have ended after some of its turns."""
    length = len(sample.completion.tokens) if sample.outcome.kind in FAILED else None
    tokens = reference.completion.tokens[:length].tolist()
    return reference.text.startswith(sample.text) and sample.completion.tokens.tolist() == tokens


def last_checkpoint(run: Path) -> Path:
    return run / "checkpoints" / f"step_{STEPS:06d}"


def _weights(run: Path, reference: Path) -> list[str]:
    if not last_checkpoint(run).is_dir():
        return [f"{last_checkpoint(run)}: not found"]
    wrong = []
    for file in sorted(last_checkpoint(reference).glob("*.safetensors")):
        if not (last_checkpoint(run) / file.name).is_file():
            wrong.append(f"the last checkpoint has no {file.name}")
            continue
        want, result = load_file(file), load_file(last_checkpoint(run) / file.name)
        if want.keys() != result.keys():
            wrong.append(f"{file.name} has other tensors")
        wrong += [f"weights {n} differ" for n in want.keys() & result.keys() if not torch.equal(want[n], result[n])][:1]
    return wrong


def _metrics(run: Path, reference: Path) -> list[str]:
    mine, theirs = tiny_runs.metrics(run), tiny_runs.metrics(reference)
    steps = [line["step"] for line in mine]
    if steps != [line["step"] for line in theirs]:
        return [f"metrics of the steps {steps}"]
    wrong = []
    for a, b in zip(mine, theirs, strict=True):
        names = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
        if names:
            wrong.append(f"metrics of step {a['step']}: {names[0]} is {a.get(names[0])}, not {b.get(names[0])}")
    return wrong


def _rollouts(run: Path, reference: Path) -> list[str]:
    mine, theirs = rollout_paths(run), rollout_paths(reference)
    missing = [f"no rollouts of step {step}" for step in theirs.keys() - mine.keys()]
    same = mine.keys() & theirs.keys()
    return missing + [f"rollouts of step {s}" for s in sorted(same) if mine[s].read_bytes() != theirs[s].read_bytes()]


def left_in(run: Path) -> list[str]:
    """Return the half-written files and folders in the folder of a run."""
    paths = [path for path in run.rglob("*") if path.name.startswith(".") or path.name.endswith(".tmp")]
    mine = [path for path in paths if path.name != ".metadata"]  # torch writes it in every checkpoint
    return [f"left over: {path.relative_to(run)}" for path in mine]


def left_outside(temp: Path, shared: set[str]) -> list[str]:
    """Return the temporary folders of engines, and the named shared memory files that still exist."""
    files = [Path("/dev/shm") / name for name in sorted(shared)]
    return [f"left over: {path}" for path in [*temp.glob("tte-*"), *(file for file in files if file.exists())]]


def digests(folder: Path) -> dict[str, str]:
    """Return relative path -> SHA-256 of every file below a folder except the lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
