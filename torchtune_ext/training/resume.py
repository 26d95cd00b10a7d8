"""What a recipe has to remember, beside weights, optimizer and random states, to go on where it was."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

FORMAT = 1


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run is."""

    step: int  # that has ended
    version: int  # of the policy
    cursor: int  # problems taken so far
    updates: int  # that the learning rate has come
    throttle: dict[str, Any]  # state of the engine's throttle

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, saved: dict[str, Any], path: Path) -> Self:
        """Reads what `to_json` gave.

        Raises:
            ValueError: it was written by another version and lacks something, or has another format.
        """
        found = saved.get("format", FORMAT)  # the first versions wrote none
        missing = [field.name for field in fields(cls) if field.name not in saved]
        if found != FORMAT or missing:
            what = f"lacks {', '.join(missing)}" if missing else f"has format {found}, this version reads {FORMAT}"
            raise ValueError(
                f"{path} cannot be resumed: its recipe.json {what}; it was written by another version of torchtune-ext. Go on "
                "with that one, or begin a new run in another output_dir (model_dir may be a checkpoint that is a whole model)"
            )
        return cls(**{field.name: saved[field.name] for field in fields(cls)})
