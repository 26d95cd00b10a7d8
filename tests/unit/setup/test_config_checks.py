"""Settings that are inconsistent with off-policy samples are rejected by key; other settings pass."""

from types import SimpleNamespace

import pytest

from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.pipeline.advantages import AdvantageConfig
from torchtune_ext.sampling.types import EngineConfig, SamplingConfig
from torchtune_ext.setup.config_checks import check_settings
from torchtune_ext.training.learner import ScheduleConfig
from torchtune_ext.training.teacher import TeacherConfig


class Own:
    """A user's loss."""

    def __call__(self, t):
        return -t.advantages_L * t.logprobs_L, {}


def check(loss=None, **changed):
    """Check the settings of a GRPO run. `loss`: an object, or fields of `PolicyLoss` as in the YAML."""
    fields = {"importance": "tis"} if loss is None else loss if isinstance(loss, dict) else {}
    settings = {
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "updates_per_step": 1,
        "iterations_per_step": 1,
        "max_steps": 10,
        "staleness": 2,
        "prefetch_steps": None,
        "refill_rounds": 0,
        "aggregation": "token",
        "max_grad_norm": 1.0,
        "profile": [],
        "max_mismatch": 0.05,
        "engine": EngineConfig(),
        "sampling": SamplingConfig(max_tokens=8),
        "advantage": AdvantageConfig(),
        "schedule": ScheduleConfig(),
        "loss": fields,
        "teacher": TeacherConfig(),
        "replay": None,
        **changed,
    }
    policy_loss = PolicyLoss(**fields) if loss is None or isinstance(loss, dict) else loss
    check_settings(SimpleNamespace(**settings), policy_loss)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"staleness": -1}, "staleness=-1: expected a whole number of at least 0"),
        ({"prefetch_steps": -1}, "prefetch_steps=-1: expected a whole number of at least 0"),
        (
            {"prefetch_steps": 3},
            r"prefetch_steps=3: .*staleness=2\. Fix: set prefetch_steps=2 or staleness=3",
        ),
        ({"staleness": 0, "prefetch_steps": 1}, "prefetch_steps=1: .*staleness=0"),
        (
            {"advantage": AdvantageConfig(combine="normalize_then_sum")},
            r"advantage.parts is missing, but advantage.combine=normalize_then_sum \(preset: gdpo\) .*Fix: set advantage.parts",
        ),
        (
            {"engine": EngineConfig(sleep=True)},
            r"staleness=2 with engine.sleep=true: .*\(engine.devices\), or set staleness=0",
        ),
        (
            {"staleness": 0, "engine": EngineConfig(sleep=True, address="http://a:1")},
            r"engine.sleep=true with engine.address=http://a:1: .* Fix: set engine.sleep=false",
        ),
        ({"refill_rounds": 1}, "refill_rounds=1 with staleness=2: .* set refill_rounds=0 and raise prompts_per_step"),
    ],
)
def test_inconsistent_settings_are_named(changed, message):
    with pytest.raises(ValueError, match=message):
        check(**changed)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"prefetch_steps": 0},
        {"prefetch_steps": 2},
        {"engine": EngineConfig(sleep=False)},
        {"staleness": 0, "engine": EngineConfig(sleep=True), "refill_rounds": 1},
    ],
)
def test_consistent_settings_pass(changed):
    check(**changed)


@pytest.mark.parametrize("loss", [{}, {"level": "sequence"}])
def test_off_policy_loss_without_correction_is_refused(loss):
    with pytest.raises(ValueError, match="preset=decoupled_ppo .*loss.importance=none"):
        check(loss)
    check(loss, staleness=0)
    check({**loss, "importance": "none"})


@pytest.mark.parametrize("loss", [{"importance": "full"}, {"old": "sampler"}, Own()])
def test_off_policy_check_accepts_correcting_and_custom_losses(loss):
    check(loss)


SELF = {"loss": {"importance": "tis", "teacher_coef": 1.0}}
PROMPT = "my_task.with_solution"


@pytest.mark.parametrize(
    "teacher, changed, message",
    [
        ({"self": True}, SELF, r"teacher.prompt is missing: .*\(group, sample\) -> messages"),
        ({"self": True, "prompt": PROMPT}, {}, "teacher.self=true, but this objective does not use a teacher"),
        ({"self": True, "prompt": PROMPT, "model_dir": "m"}, SELF, "teacher.model_dir=m contradicts teacher.self=true"),
        ({"self": True, "prompt": PROMPT, "engine": {"count": 1}}, SELF, "teacher.engine={'count': 1} contradicts"),
        ({"model_dir": "m", "prompt": PROMPT}, SELF, "teacher.prompt=my_task.with_solution needs teacher.self=true"),
        (
            {"self": True, "prompt": PROMPT},
            {**SELF, "sampling": SamplingConfig(max_tokens=8, temperature=0.5)},
            "sampling.temperature=0.5 with a teacher",
        ),
    ],
)
def test_inconsistent_self_teacher_is_named(teacher, changed, message):
    with pytest.raises(ValueError, match=message):
        check(teacher=TeacherConfig(**teacher), **changed)


def test_consistent_self_teacher_passes():
    check(teacher=TeacherConfig(self=True, prompt=PROMPT), **SELF)
    check(teacher=TeacherConfig(self=True), replay="runs/x", **SELF)
