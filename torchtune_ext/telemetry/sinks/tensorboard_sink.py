"""TensorBoard: scalars in `RUN/tensorboard`."""

from collections.abc import Mapping, Sequence

from torchtune_ext.pipeline.groups import Group
from torchtune_ext.telemetry.sinks.settings import SinkContext


class TensorBoard:
    """Writes TensorBoard event files."""

    def __init__(self, context: SinkContext):
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run repeats steps. TensorBoard hides earlier values from `purge_step` on.
        self._writer = SummaryWriter(str(context.run_dir / "tensorboard"), purge_step=context.resume_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        # The writer has its own thread. After a flush the step is on disk, or it raises.
        self._writer.flush()

    def show(self, step: int, groups: Sequence[Group]) -> None:
        """Does nothing: TensorBoard has no tables, and the report shows samples."""

    def close(self, status: int) -> None:
        self._writer.close()
