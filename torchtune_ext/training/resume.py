"""Goes on after a checkpoint: which one that is, what has changed since, and the state that a recipe needs besides weights,
optimizer and random states."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from torchtune_ext.run.errors import Mistake
from torchtune_ext.run.folder import Run, RunFolder, changes, step_of
from torchtune_ext.run.output import labelled, say
from torchtune_ext.training.life import NothingToDo, standing
from torchtune_ext.training.state import Checkpoints

FORMAT = 1
NAMED = 20  # indices of problems that one line names
# Settings of a resumed run that say where it is and that it goes on. They are no news.
NO_NEWS = ("output_dir", "resume_from_checkpoint", "dry_run")


@dataclass(frozen=True, slots=True)
class RunState:
    """How far a run has come."""

    step: int  # the last step that has ended
    version: int  # version of the policy
    cursor: int  # places of the order of problems that were passed
    updates: int  # updates that the schedule of the learning rate has counted
    throttle: dict[str, Any]  # state of the engine's throttle
    source: dict[str, Any]  # groups between submission and training
    # What the task has learned from outcomes, and which of its problems are passed over.
    task: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the state as a JSON object, with the number of its format."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, saved: dict[str, Any], path: Path) -> Self:
        """Makes a state from what `to_json` returned.

        Args:
            saved: the JSON object.
            path: the checkpoint, for the message.

        Raises:
            ValueError: another version of torchtune-ext wrote it, in another format.
        """
        if saved["format"] != FORMAT:
            raise Mistake(
                f"{path} cannot be resumed: its recipe.json has format {saved['format']}, this version reads {FORMAT}; it was "
                "written by another version of torchtune-ext. Go on with that one, or begin a new run in another output_dir "
                "(model_dir may be a checkpoint that is a whole model)"
            )
        return cls(**{each.name: saved[each.name] for each in fields(cls)})


def checkpoint_to_go_on_from(
    checkpoints: Checkpoints, folder: RunFolder | None, resumes: bool, total: int
) -> Path | None:
    """Chooses the checkpoint from which a run goes on, and says on rank 0 which one that is. A collective.

    Args:
        checkpoints: those of the run.
        folder: of the run, on rank 0.
        resumes: whether the run shall go on (`resume_from_checkpoint`).
        total: the steps that the run shall have.

    Returns:
        The checkpoint, or None: the run begins at its first step. Where it was to go on, `RunFolder.resumes` has said so.

    Raises:
        NothingToDo: the run has all its steps.
        What `Checkpoints.choose` raises.
    """
    path = checkpoints.choose() if resumes else None
    if path is None:
        return None
    step = step_of(path)
    if step >= total:
        raise NothingToDo(f"step {step} >= max_steps={total}: nothing to do\n{standing(step, step, checkpoints)}")
    if folder is not None:
        task = json.loads((path / "recipe.json").read_text())["task"]
        say(resume_text(path, step, folder.run, folder.earlier, task.get("skipped", [])))
    return path


def resume_text(path: Path, step: int, run: Run, earlier: Mapping[str, Any], skipped: Sequence[int] = ()) -> str:
    """Returns what a run says when it goes on: from where, and which of its settings were others until then.

    Args:
        path, step: of the checkpoint.
        run: with the settings of now.
        earlier: its settings until now; empty where they are not known.
        skipped: indices of problems that the run passes over.
    """
    begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started))
    lines = [("resume", f"from step {step} of run {run.id}, begun {begun}: {path}")]
    # As run.json would hold the settings of now.
    now = json.loads(json.dumps(run.config, default=str))
    changed = [change for change in changes(earlier, now) if change.key not in NO_NEWS]
    if not earlier:
        lines.append(("changed", "not known: run.json does not say what was set until now"))
    elif changed:
        lines.append(("changed", ", ".join(map(str, changed))))
        decay = (now.get("schedule") or {}).get("decay", "constant")
        if decay != "constant" and any(change.key == "max_steps" for change in changed):
            lines.append(
                ("rate", f"schedule.decay={decay} now ends with the new max_steps, so the learning rate jumps here")
            )
    if skipped:
        named = ", ".join(map(str, skipped[:NAMED])) + (", ..." if len(skipped) > NAMED else "")
        lines.append(("skipped", f"{len(skipped)} problems stay passed over, by index: {named}"))
    return labelled(lines)
