"""trackio: scalars, config and tables of samples, in the store of TRACKIO_DIR or a server."""

from collections.abc import Mapping, Sequence

from torchtune_ext.pipeline.groups import Group
from torchtune_ext.run.errors import UsageError
from torchtune_ext.telemetry.sinks.settings import SinkContext
from torchtune_ext.telemetry.sinks.tables import COLUMNS, TABLE_KEY, sample_rows


class Trackio:
    """Logs to trackio."""

    def __init__(self, context: SinkContext):
        import trackio

        self._trackio, self._settings, run = trackio, context.settings, context.run
        try:
            self._run = trackio.init(
                project=context.settings.project,
                # trackio resumes by name, and several run folders may have the same name.
                name=f"{context.name}-{run.id}" if run else context.name,
                config=run and {**run.config, "process": dict(run.process)},
                resume="never" if context.resume_step is None else "allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except ValueError as error:
            raise UsageError(
                f"logging.to: 'trackio' cannot start: {error}. Fix: correct the variable TRACKIO_..., or remove 'trackio' "
                "from logging.to"
            ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step)

    def show(self, step: int, groups: Sequence[Group]) -> None:
        rows = sample_rows(step, groups, self._settings.samples)
        self._run.log({TABLE_KEY.format(step): self._trackio.Table(columns=COLUMNS, data=rows)}, step)

    def close(self, status: int) -> None:
        # After `finish` of the run itself, trackio finishes it again at exit.
        self._trackio.finish()
