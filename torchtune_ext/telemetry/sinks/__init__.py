"""Where the scalars, the samples and the outcome of a run go beside its folder: Weights & Biases and TensorBoard.

A sink is a file here with a class that has the methods of `Sink`, and its line of `SINKS` in settings.py. Sinks are copies of
what the folder of the run holds: `telemetry.metrics.Metrics` calls them, and goes on without one that raises.
"""

from torchtune_ext.telemetry.sinks.settings import LoggingConfig as LoggingConfig
from torchtune_ext.telemetry.sinks.settings import Opening as Opening
from torchtune_ext.telemetry.sinks.settings import Sink as Sink
