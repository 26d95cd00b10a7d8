"""The state that a recipe needs, besides weights, optimizer and random states, to go on after a checkpoint."""

from dataclasses import asdict, dataclass, fields
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
        missing = [field.name for field in fields(cls) if field.name not in saved]
        if found != FORMAT or missing:
            what = f"lacks {', '.join(missing)}" if missing else f"has format {found}, this version reads {FORMAT}"
            raise ValueError(
                f"{path} cannot be resumed: its recipe.json {what}; it was written by another version of torchtune-ext. Go on "
                "with that one, or begin a new run in another output_dir (model_dir may be a checkpoint that is a whole model)"
            )
        return cls(**{field.name: saved[field.name] for field in fields(cls)})
