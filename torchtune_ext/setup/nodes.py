"""The records of the nodes of a GRPO recipe, for its `Config`: `engine: nodes.EngineConfig = nodes.EngineConfig()`."""

from torchtune_ext.grading import GraderConfig
from torchtune_ext.pipeline.advantages import AdvantageConfig
from torchtune_ext.pipeline.evaluation import EvaluationConfig
from torchtune_ext.pipeline.source import RolloutConfig
from torchtune_ext.sampling.records import EngineConfig, SamplingConfig
from torchtune_ext.telemetry.metrics import LoggingConfig
from torchtune_ext.training.checkpoints import CheckpointConfig
from torchtune_ext.training.distributed import RanksConfig
from torchtune_ext.training.learner import ScheduleConfig
from torchtune_ext.training.precision import PrecisionConfig
from torchtune_ext.training.teacher import TeacherConfig
from torchtune_ext.training.trained import AdapterConfig

__all__ = [
    "AdapterConfig",
    "AdvantageConfig",
    "CheckpointConfig",
    "EngineConfig",
    "EvaluationConfig",
    "GraderConfig",
    "LoggingConfig",
    "PrecisionConfig",
    "RanksConfig",
    "RolloutConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "TeacherConfig",
]
