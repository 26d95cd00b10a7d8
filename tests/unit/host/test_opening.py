"""What a run says of its objective before it begins is what it runs."""

import pytest
from omegaconf import OmegaConf

from torchtune_ext.advantages import AdvantageConfig
from torchtune_ext.evaluation import EvaluationConfig
from torchtune_ext.host.catalog import config_files, folder
from torchtune_ext.host.config import build, instantiate, load_config
from torchtune_ext.host.opening import objective_line, opening
from torchtune_ext.host.presets import preset_files
from torchtune_ext.recipes import grpo
from torchtune_ext.training.state import CheckpointConfig
from torchtune_ext.training.trained import AllWeights

CONFIGS = config_files(folder("configs"))


class Mine:
    """A loss of the user's own, without a text of its own."""


def settings(config="grpo/tiny_arithmetic", **own):
    return load_config(grpo.Config, OmegaConf.merge(OmegaConf.load(CONFIGS[config]), OmegaConf.create(own)))


def line(cfg):
    return objective_line(cfg, instantiate(cfg.loss), build(AdvantageConfig, cfg.advantage, "advantage"))


@pytest.mark.parametrize("preset", preset_files())
def test_a_preset_alone_is_not_overridden(preset):
    assert line(settings(preset=preset)).endswith(f"; preset {preset}")


@pytest.mark.parametrize(
    ("text", "own", "end"),
    [
        ("loss: {_component_: torchtune_ext.objective.loss.PolicyLoss, constraint: kl}", {"top_k": 16}, "loss"),
        (
            "loss: {_component_: torchtune_ext.objective.loss.PolicyLoss, clip_low: '${output_dir}'}",
            {"clip_low": 0.2},
            "loss",
        ),
        ("loss: {_component_: nowhere.Loss}", {"_component_": f"{__name__}.Mine"}, "loss"),
    ],
)
def test_a_preset_that_the_settings_complete(tmp_path, text, own, end):
    (tmp_path / "half.yaml").write_text(text)
    assert line(settings(preset=f"{tmp_path}/half.yaml", loss=own)).endswith(f"half.yaml, overridden here: {end}")


def test_a_preset_changes_all_of_tinys_objective():
    said = line(settings("grpo/tiny", preset="atr_grpo"))
    assert said.startswith(
        "objective: KL3 <= 0.02 (clip 0.187/0.214) per token, TIS <= 2, advantage mean/group_std, seq"
    )
    assert said.endswith("; preset atr_grpo")


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({}, "clip 0.2/0.2 per token, TIS <= 2, advantage mean/group_std, sequence mean; preset grpo"),
        ({"loss": {"clip_high": 0.28}}, "clip 0.2/0.28 per token"),
        ({"loss": {"clip_high": 0.2}}, "; preset grpo"),  # the value that it has anyway
        ({"loss": {"kl_coef": 0.1}}, "0.1 KL to the reference (k3), advantage"),
        ({"loss": {"dual_clip": 3.0}}, "dual clip 3, TIS <= 2"),
        ({"loss": {"importance": "mis"}}, "MIS in [0, 3]"),
        ({"preset": "dppo"}, "TV <= 0.2 per token, ratio to the sampler, 0.002 KL to the old policy (k2)"),
        ({"preset": "gmpo"}, "clip 0.33/0.492 in the geometric mean, advantage"),
        ({"preset": "exact_kl"}, "KL <= 0.02 over the top 16 per token"),
        ({"preset": "sapo"}, "soft gate 1/1.05 per token"),
        ({"preset": "cispo"}, "CISPO weight in [0, 5] per token"),
        ({"preset": "rloo"}, "no constraint per token, TIS <= 2, advantage leave_one_out/none, sum over a constant"),
        ({"preset": "dapo"}, "cut samples: penalize by 0.5 over the last 20%, token mean, up to 3 refills"),
        ({"preset": "dapo", "refill_rounds": 0}, "token mean; preset dapo, overridden here: refill_rounds"),
        ({"preset": "pass_at_k", "advantage": {"pass_k": 2}}, "best of 2, sequence mean; preset pass_at_k, overridden "
         "here: advantage.pass_k"),
        ({"advantage": {"scale": "none"}}, "preset grpo, overridden here: advantage.scale"),
        ({"loss": {"_component_": f"{__name__}.Mine"}}, "objective: Mine, advantage mean/group_std, sequence mean; preset grpo, "
         "overridden here: loss"),
        ({"preset": None, "loss": {"_component_": "torchtune_ext.objective.loss.PolicyLoss"}},
         "clip 0.2/0.2 per token, advantage mean/group_std, sequence mean; no preset"),
    ],
)  # fmt: skip
def test_words(own, words):
    said = line(settings(**own))
    assert words in said
    assert said.endswith(words.partition("; ")[2])


def lines(cfg, every=40):
    evaluation = build(EvaluationConfig, cfg.evaluation, "evaluation")
    checkpoints = CheckpointConfig(every=every)
    return opening(
        cfg, instantiate(cfg.loss), AdvantageConfig(), checkpoints, evaluation, AllWeights(), "precision bf16"
    ).splitlines()


def test_checkpoints_without_a_score_are_said():
    cfg = settings("grpo/tiny")
    trains, objective = lines(cfg)
    assert trains == "trains: all weights; precision bf16" and objective.startswith("objective: ")
    assert "with checkpoints.every=50 and evaluation.every=40 that is each 200 steps" in lines(cfg, every=50)[2]
    assert lines(cfg, every=10_000) == [trains, objective]


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({}, ["samples ahead: staleness 1, depth 1"]),
        ({"staleness": 4}, ["samples ahead: staleness 4, depth 1"]),
        ({"staleness": 4, "depth": 2}, ["samples ahead: staleness 4, depth 2"]),
        ({"staleness": 0}, []),
    ],
)
def test_sampling_ahead_is_said(own, words):
    assert lines(settings("grpo/tiny_async", **own))[2:] == words
