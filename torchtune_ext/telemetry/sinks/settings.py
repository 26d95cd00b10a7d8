"""The settings of the sinks, and the interface of a sink."""

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
from torchtune_ext.settings.sections import config_section

# Package -> class. A sink is imported only if it is configured. To add a sink, write a class
# with the methods of `Sink` in a file here, and add a line.
SINKS = {
    "mlflow": "torchtune_ext.telemetry.sinks.mlflow_sink.MLflow",
    "tensorboard": "torchtune_ext.telemetry.sinks.tensorboard_sink.TensorBoard",
    "trackio": "torchtune_ext.telemetry.sinks.trackio_sink.Trackio",
    "wandb": "torchtune_ext.telemetry.sinks.wandb_sink.WeightsAndBiases",
}
MAX_PROJECT_CHARS = 128
_PROJECT_FORBIDDEN = re.compile(r"[/\\#?%:]")  # W&B rejects these characters


@config_section("logging")
class LoggingConfig:
    """The keys of `logging:`. All but `to` configure trackers; a tracker's own environment variables take precedence."""

    to: tuple[str, ...] = Field(
        default=(),
        description="metric sinks: mlflow, tensorboard, trackio, wandb, or the dotted path of a class, e.g. my_module.MySink",
    )
    project: str = Field(
        default="torchtune-ext",
        description="project of W&B and trackio, experiment of MLflow, unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME is set",
    )
    samples: int = Field(
        default=3,
        ge=0,
        description="groups per table of samples, from the widest to the narrowest spread of rewards; 0: no tables",
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
        """Raises UsageError if `to` has W&B, and W&B has no valid login."""
        if "wandb" in self.to:
            ours: Any = sink_class("wandb")
            ours.require_login()

    def logs_samples_at(self, step: int) -> bool:
        """Returns whether samples of `step` are logged."""
        return self.samples > 0 and (step == 1 or step % self.samples_every == 0)


def check_sinks(names: Sequence[str]) -> None:
    """Raises UsageError for an unknown sink, and for a sink whose package is missing."""
    for name in names:
        if name not in SINKS:
            if "." not in name:
                raise UsageError(
                    f"logging.to={list(names)}: unknown sink {name!r}; expected one of {list(SINKS)}, or your own class "
                    "(my_module.MySink)"
                )
            # Only an import shows whether the user's class exists.
            sink_class(name)
            continue
        try:
            # W&B and TensorBoard create folders with their names. Python imports these folders as
            # namespace packages if the package itself is missing.
            if getattr(__import__(name), "__file__", None) is None:
                raise ImportError(f"{name} is only a folder in {Path.cwd()}")
        except ImportError as error:
            raise UsageError(
                f"logging.to={list(names)}: the package of {name!r} is missing ({error}). "
                f"Fix: run `pip install {name}`, or remove {name!r} from logging.to"
            ) from error


def sink_class(name: str) -> type["Sink"]:
    """Returns the class of a sink, given by the name of one of ours or by dotted path.

    Raises:
        UsageError: the class does not exist.
    """
    return import_object(SINKS.get(name, name), f"logging.to={name}")


@dataclass(frozen=True, slots=True)
class SinkContext:
    """The argument of a sink's constructor."""

    run_dir: Path  # existing folder of the run; your own sink writes into its subfolder `sinks`
    run: Run | None = None  # None: only the folder's name is known
    resume_step: int | None = None  # first step that is logged again; None: a fresh run
    settings: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def name(self) -> str:
        """The displayed name of the run."""
        return self.run.name if self.run else self.run_dir.resolve().name


class Sink(Protocol):
    """The interface that `MetricLogger` calls. A sink that raises is logged and dropped.

    Raises:
        ValueError: in the constructor: a setting or a login is invalid. This stops the run.
    """

    def __init__(self, context: SinkContext) -> None: ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs scalars of a step, NaN and infinity included.

        Steps never decrease; a step may have several calls.
        """

    def show(self, step: int, groups: Sequence[Group]) -> None:
        """Logs samples of a step, given all its groups, before the scalars of the step."""

    def close(self, status: int) -> None:
        """Closes the sink. `status` is the exit status that the process will have."""
