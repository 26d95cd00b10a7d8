"""The sections of the `Config` of a GRPO recipe, and the protocol that the setup of a run reads."""

from typing import Literal, Protocol

from torchtune_ext.grading import GraderConfig
from torchtune_ext.grading.agents import AgentConfig
from torchtune_ext.pipeline.advantages import AdvantageConfig
from torchtune_ext.pipeline.evaluation import EvaluationConfig
from torchtune_ext.pipeline.source import RolloutConfig as RolloutConfig
from torchtune_ext.sampling.types import EngineConfig, SamplingConfig
from torchtune_ext.settings.components import Component
from torchtune_ext.telemetry.metrics import LoggingConfig
from torchtune_ext.training.checkpoints import CheckpointConfig
from torchtune_ext.training.distributed import RanksConfig
from torchtune_ext.training.learner import ScheduleConfig
from torchtune_ext.training.precision import PrecisionConfig
from torchtune_ext.training.teacher import TeacherConfig
from torchtune_ext.training.trained_weights import AdapterConfig


class RunSettings(Protocol):
    """The config keys that the setup of a run reads. `Config` in recipes/grpo.py documents them."""

    output_dir: str
    model_dir: str
    model: Component
    adapters: AdapterConfig
    tokenizer: Component
    task: Component
    evaluation: EvaluationConfig
    grader: GraderConfig
    agent: AgentConfig
    preset: str | None
    loss: Component
    teacher: TeacherConfig
    optimizer: Component
    engine: EngineConfig
    sampling: SamplingConfig
    seed: int
    device: Literal["auto", "cpu", "cuda"]
    dtype: Literal["auto", "bfloat16", "float32"]
    precision: PrecisionConfig
    max_steps: int
    prompts_per_step: int
    samples_per_prompt: int
    staleness: int
    prefetch_steps: int | None
    replay: str | None
    refill_rounds: int
    updates_per_step: int
    iterations_per_step: int
    row_tokens: int
    advantage: AdvantageConfig
    aggregation: Literal["sequence", "token", "constant"]
    schedule: ScheduleConfig
    activation_checkpointing: bool
    max_mismatch: float | Literal["auto"]
    checkpoints: CheckpointConfig
    resume_from_checkpoint: bool
    ranks: RanksConfig
    logging: LoggingConfig
    profile: list[int]
    dry_run: bool | str | None
