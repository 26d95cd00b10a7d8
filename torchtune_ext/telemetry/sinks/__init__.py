"""Sinks: destinations for copies of a run's scalars, samples and exit status."""

from torchtune_ext.telemetry.sinks.settings import LoggingConfig as LoggingConfig
from torchtune_ext.telemetry.sinks.settings import Sink as Sink
from torchtune_ext.telemetry.sinks.settings import SinkContext as SinkContext
