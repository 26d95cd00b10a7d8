"""The settings of the sinks, and the interface of one."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from torchtune_ext.pipeline.groups import Group
from torchtune_ext.run.catalog import import_object
from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.folder import Run
from torchtune_ext.settings.records import config_record

# Each has the name of the package that it needs, and is imported only when it is asked for. To add a sink, write a
# class with the methods of `Sink` in a file here, and give it a line.
SINKS = {
    "tensorboard": "torchtune_ext.telemetry.sinks.tensorboard_sink.TensorBoard",
    "wandb": "torchtune_ext.telemetry.sinks.wandb_sink.WeightsAndBiases",
}
MAX_PROJECT_CHARS = 128
_PROJECT_FORBIDDEN = re.compile(r"[/\\#?%:]")  # W&B refuses these characters


@config_record("logging")
class LoggingConfig:
    """The keys of `logging:`. All but `to` are for Weights & Biases, whose environment variables take precedence."""

    to: tuple[str, ...] = Field(
        default=(),
        description='metric sinks: "wandb", "tensorboard", or the dotted path of a class, e.g. my_module.MySink',
    )
    project: str = Field(
        default="torchtune-ext", description="W&B project; the variable WANDB_PROJECT takes precedence"
    )
    samples: int = Field(
        default=3, ge=0, description="groups per table of samples, widest spread of rewards first; 0: no tables"
    )
    samples_every: int = Field(
        default=10, ge=1, description="steps between tables, also one at the first step; no tables: logging.samples=0"
    )

    def __post_init__(self) -> None:
        check_sinks(self.to)
        if not 1 <= len(self.project) <= MAX_PROJECT_CHARS or _PROJECT_FORBIDDEN.search(self.project):
            raise UsageError(
                rf"logging.project={self.project!r}: W&B takes 1 to {MAX_PROJECT_CHARS} characters without any of / \ # ? % :"
            )

    def require_login(self) -> None:
        """Raises ValueError if metrics go to W&B, and nobody is logged in."""
        if "wandb" in self.to:
            ours: Any = sink_class("wandb")
            ours.require_login()

    def logs_samples_at(self, step: int) -> bool:
        """Tells whether samples of `step` are shown."""
        return self.samples > 0 and (step == 1 or step % self.samples_every == 0)


def check_sinks(names: Sequence[str]) -> None:
    """Raises ValueError for an unknown sink, and for one whose package is missing."""
    for name in names:
        if name not in SINKS:
            if "." not in name:
                raise UsageError(
                    f"logging.to={list(names)}: nothing is called {name!r}; choose from {list(SINKS)}, or name a class of your "
                    "own (my_module.MySink)"
                )
            # Only importing it shows whether the user's class is there.
            sink_class(name)
            continue
        try:
            # W&B and TensorBoard make folders of their names, which Python imports where the package is missing.
            if getattr(__import__(name), "__file__", None) is None:
                raise ImportError(f"{name} is only a folder in {Path.cwd()}")
        except ImportError as error:
            raise UsageError(
                f"logging.to names {name!r}, whose package is missing ({error}): "
                f"run `pip install {name}` or take {name!r} out of logging.to"
            ) from error


def sink_class(name: str) -> type["Sink"]:
    """Returns the class of a sink: ours by name, the user's by dotted path. Raises ValueError if there is none."""
    return import_object(SINKS.get(name, name), f"logging.to={name}")


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What a sink is opened with."""

    run_dir: Path  # the folder of the run, which exists; files of a sink of your own go into its folder `sinks`
    run: Run | None = None  # its identity; None: the name of the folder is all that is known
    resume_step: int | None = None  # the first step that is logged again; None: a fresh run
    settings: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def name(self) -> str:
        """The name under which the run is shown."""
        return self.run.name if self.run else self.run_dir.resolve().name


class Sink(Protocol):
    """What `Metrics` calls. A sink that raises is reported and dropped.

    Raises, in its constructor:
        ValueError: a setting or a login is wrong, which ends the run before anything is lost.
    """

    def __init__(self, context: SinkContext) -> None: ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes some scalars of a step, which may be NaN or infinite. Steps never go back, and one may come in parts."""

    def show(self, step: int, groups: Sequence[Group]) -> None:
        """Takes all groups of a step whose samples are to be shown, before the scalars of the step."""

    def close(self, status: int) -> None:
        """Finishes. `status` is the exit status that the process will have: 0, or how the run failed or was stopped."""
