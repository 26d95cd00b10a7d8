"""What `chaos.py` looks for after a fault: did the run become what an undisturbed one is, and is nothing left?"""

import hashlib
from pathlib import Path

import tiny_runs
import torch
from chaos_run import STEPS
from safetensors.torch import load_file

from torchtune_ext.telemetry.rollouts import read_rollouts, rollout_paths

FAILED = ("infra_failed", "timed_out")


def differences(run: Path, reference: Path) -> list[str]:
    """What is not as in the reference: last weights, metrics, stored rollouts. Empty: bit for bit the same."""
    return [*_weights(run, reference), *_metrics(run, reference), *_rollouts(run, reference)]


def lost_sample(run: Path, reference: Path) -> tuple[int | None, list[str]]:
    """For a fault that may cost one sample of training its grade, by design.

    Returns: the step of that sample (None: none was lost) and what is wrong: before that step everything has to be as in
    the reference, and in it everything that was sampled; later steps learnt something else.
    """
    mine, theirs = rollout_paths(run), rollout_paths(reference)
    wrong = [] if mine.keys() == theirs.keys() else [f"rollouts of the steps {sorted(mine)}, not {sorted(theirs)}"]
    for step in sorted(mine.keys() & theirs.keys()):
        pairs = list(zip(_samples(mine[step]), _samples(theirs[step]), strict=True))
        failed = sum(a.outcome.kind in FAILED for a, _ in pairs)
        if failed:
            if failed > 1:
                wrong.append(f"step {step}: {failed} samples without a grade; one fault costs one")
            if any(a.text != b.text or a.completion.tokens.tolist() != b.completion.tokens.tolist() for a, b in pairs):
                wrong.append(f"step {step}: other samples than in the reference")
            metrics = zip(tiny_runs.metrics(run), tiny_runs.metrics(reference), strict=True)
            wrong += [f"metrics of step {a['step']}" for a, b in metrics if a["step"] < step and a != b]
            return step, wrong
        if mine[step].read_bytes() != theirs[step].read_bytes():
            wrong.append(f"rollouts of step {step}")
    return None, wrong


def _samples(path: Path) -> list:
    return [sample for group in read_rollouts(path) for sample in group.samples]


def last_checkpoint(run: Path) -> Path:
    return run / "checkpoints" / f"step_{STEPS:06d}"


def _weights(run: Path, reference: Path) -> list[str]:
    if not last_checkpoint(run).is_dir():
        return [f"there is no {last_checkpoint(run)}"]
    wrong = []
    for file in sorted(last_checkpoint(reference).glob("*.safetensors")):
        if not (last_checkpoint(run) / file.name).is_file():
            wrong.append(f"the last checkpoint has no {file.name}")
            continue
        want, got = load_file(file), load_file(last_checkpoint(run) / file.name)
        if want.keys() != got.keys():
            wrong.append(f"{file.name} has other tensors")
        wrong += [f"weights {n} differ" for n in want.keys() & got.keys() if not torch.equal(want[n], got[n])][:1]
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
    """Half-written files and folders in the folder of a run."""
    found = [path for path in run.rglob("*") if path.name.startswith(".") or path.name.endswith(".tmp")]
    mine = [path for path in found if path.name != ".metadata"]  # that is torch's, in every checkpoint
    return [f"left over: {path.relative_to(run)}" for path in mine]


def left_outside(temp: Path, shared: set[str]) -> list[str]:
    """Temporary folders of engines, and those of the named files in shared memory that are still there."""
    files = [Path("/dev/shm") / name for name in sorted(shared)]
    return [f"left over: {path}" for path in [*temp.glob("tte-*"), *(file for file in files if file.exists())]]


def digests(folder: Path) -> dict[str, str]:
    """Relative path -> SHA-256 of every file below a folder but the lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
