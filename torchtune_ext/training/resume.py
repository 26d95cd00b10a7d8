"""The state that a recipe needs, besides weights, optimizer and random states, to go on after a checkpoint."""

from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

FORMAT = 1


@dataclass(frozen=True, slots=True)
class RunState:
    """How far a run has come."""

    step: int  # the last step that has ended
    version: int  # version of the policy
    cursor: int  # problems taken so far
    updates: int  # updates that the schedule of the learning rate has counted
    throttle: dict[str, Any]  # state of the engine's throttle
    source: dict[str, Any]  # groups between submission and training
    task: dict[str, Any] = field(default_factory=dict)  # what it has learned from outcomes; earlier versions wrote none

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
            ValueError: another version of torchtune-ext wrote it, and a field is missing or the format differs.
        """
        # The first versions wrote no format.
        found = saved.get("format", FORMAT)
        missing = [each.name for each in fields(cls) if each.name not in saved and each.default_factory is MISSING]
        if found != FORMAT or missing:
            what = f"lacks {', '.join(missing)}" if missing else f"has format {found}, this version reads {FORMAT}"
            raise ValueError(
                f"{path} cannot be resumed: its recipe.json {what}; it was written by another version of torchtune-ext. Go on "
                "with that one, or begin a new run in another output_dir (model_dir may be a checkpoint that is a whole model)"
            )
        return cls(**{each.name: saved[each.name] for each in fields(cls) if each.name in saved})
