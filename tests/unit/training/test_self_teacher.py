"""The policy as its own teacher with another prompt. Real engine: tests/integration/test_teacher.py."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from helpers.unpacked_reference import as_branched_conversations, make_groups, paths_of
from torchtune_ext.objective.loss import PolicyLoss, Tokens
from torchtune_ext.pipeline.groups import Group, Sample
from torchtune_ext.run.catalog import package_folder
from torchtune_ext.sampling.types import Completion, EngineConfig, SamplingConfig
from torchtune_ext.setup.run_components import check_self_teacher
from torchtune_ext.tasks.task import Problem, Score
from torchtune_ext.training.teacher import SelfTeacher, TeacherConfig

TOKENIZER = SimpleNamespace(prompt_ids=lambda messages, tools: [900 + len(message["content"]) for message in messages])


def with_feedback(group, sample):
    """A prompt of two tokens, of which the second depends on the sample."""
    assert any(sample is each for each in group.samples)
    return [{"content": "x"}, {"content": "y" * int(sample.score.reward)}]


def broken(group, sample):
    return [{"content": group.problem.answer["missing"]}]


def teacher(score, prompt="with_feedback", max_model_len=4096):
    engine = SimpleNamespace(score=score, config=EngineConfig(max_model_len=max_model_len))
    return SelfTeacher(engine, TOKENIZER, f"{__name__}.{prompt}")


def of_path(ids):
    """A fake log-prob that depends on token and context."""
    return np.float32(hash(tuple(map(int, ids))) % 9973)


def score_paths(texts):
    return [np.array([of_path(text[: n + 1]) for n in range(1, len(text))]) for text in texts]


def rewarded(groups):
    """The groups with another reward for each sample, and prompts of other tokens than the samples."""
    return [
        Group(
            group.problem,
            group.prompt_tokens + 1000,
            tuple(Sample(s.completion, outcome=Score(float(i))) for i, s in enumerate(group.samples)),
        )
        for group in groups
    ]


def test_self_teacher_scores_after_the_samples_prompt():
    rng = np.random.default_rng(2)
    groups = make_groups(rng, [(5, [30, 1, 12]), (3, [24])])
    groups = rewarded([*as_branched_conversations(rng, groups), *groups])
    for group in teacher(score_paths).score_groups(groups):
        for i, sample in enumerate(group.samples):
            expected = [
                of_path([901, 900 + i, *(token for token in ids[: place + 1] if token < 1000)])
                for ids, places in paths_of(group, sample)
                for place in places
            ]
            assert sample.teacher_logprobs[sample.completion.sampled_indices].tolist() == expected


def test_expected_gradient_is_that_of_reverse_kl():
    """A tabular policy of two prompts, three tokens and two steps, with every answer weighted by its probability.

    The expected gradient of the preset's loss equals the gradient of KL(pi(. | x) || sg pi(. | x, c)), summed over the
    states with a fixed state distribution. It reaches no entry of the teacher's prompt.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64).requires_grad_()  # [prompt, state, token]
    policy = logits.log_softmax(-1)

    def score(texts):
        # The teacher's prompt has two tokens. Token k leads from state 0 to state 1 + k.
        return [[0.0, *(policy[1, [0, 1 + first], [first, second]].tolist())] for _, _, first, second in texts]

    def sample(first, second):
        tokens = np.array([first, second], np.int32)
        return Sample(Completion(tokens, np.zeros(2, np.float32), np.zeros(2, np.int32), "stop"), outcome=Score(0.0))

    samples = tuple(sample(first, second) for first in range(3) for second in range(3))
    group = Group(Problem("p", (), None), np.array([7], np.int32), samples)
    preset = OmegaConf.to_container(OmegaConf.load(package_folder("configs") / "presets" / "self_distill.yaml").loss)
    loss, expected = PolicyLoss(**{key: value for key, value in preset.items() if key != "_component_"}), 0.0
    (scored,) = teacher(score).score_groups([group])
    for each in scored.samples:
        first, second = each.completion.tokens.tolist()
        logprobs = policy[0, [0, 1 + first], [first, second]]
        values_L, _ = loss(
            Tokens(
                logprobs_L=logprobs,
                entropy_L=torch.zeros(2, dtype=torch.float64),
                proximal_logprobs_L=logprobs.detach(),
                behavior_logprobs_L=logprobs.detach(),
                ref_logprobs_L=None,
                advantages_L=torch.zeros(2, dtype=torch.float64),
                versions_L=torch.zeros(2, dtype=torch.int32),
                completion_index_L=torch.zeros(2, dtype=torch.int64),
                teacher_logprobs_L=torch.tensor(each.teacher_logprobs, dtype=torch.float64),
            )
        )
        expected += logprobs.detach().sum().exp() * values_L.sum()
    visits = torch.cat([torch.ones(1, dtype=torch.float64), policy[0, 0].detach().exp()])
    divergence = (visits * (policy[0].exp() * (policy[0] - policy[1].detach())).sum(-1)).sum()
    (ours,), (exact,) = (torch.autograd.grad(each, logits, retain_graph=True) for each in (expected, divergence))
    # The teacher's log-probs are stored in float32.
    assert exact.abs().max() > 0.1 and (ours - exact).abs().max() < 1e-7
    assert not ours[1].any()


def test_text_beyond_the_context_is_not_trained_on(caplog):
    groups = rewarded(make_groups(np.random.default_rng(0), [(3, [8])]))
    assert all(s.score for group in teacher(score_paths, max_model_len=11).score_groups(groups) for s in group.samples)
    assert not caplog.text
    (group,) = teacher(score_paths, max_model_len=10).score_groups(groups)
    assert [sample.score for sample in group.samples] == [None]
    assert "teacher: 1 samples are not trained on" in caplog.text and "engine.max_model_len=10" in caplog.text


@pytest.mark.parametrize(
    "prompt, max_model_len, task, message",
    [
        (
            "with_feedback",
            10,
            SimpleNamespace(),
            "engine.max_model_len=10: .* has 2 tokens, .*set engine.max_model_len=11",
        ),
        ("with_solution", 11, SimpleNamespace(), r"teacher.prompt='test_self_teacher.with_solution': .*with_solution"),
        ("broken", 11, SimpleNamespace(), "teacher.prompt=test_self_teacher.broken, .* problem 'p', raised TypeError"),
        (
            "with_feedback",
            11,
            SimpleNamespace(run_agent=print),
            "teacher.self=true does not support a task with an agent",
        ),
    ],
)
def test_unusable_self_teacher_is_refused_before_start(prompt, max_model_len, task, message):
    group = Group(Problem("p", (), None), np.array([7], np.int32), ())
    settings = TeacherConfig(self=True, prompt=f"{__name__}.{prompt}")
    with pytest.raises(Exception, match=re.compile(message, re.DOTALL)):
        check_self_teacher(
            settings, task, TOKENIZER, group, SamplingConfig(max_tokens=8), EngineConfig(max_model_len=max_model_len)
        )


def test_usable_self_teacher_passes_the_check():
    group = Group(Problem("p", (), None), np.array([7], np.int32), ())
    settings = TeacherConfig(self=True, prompt=f"{__name__}.with_feedback")
    check_self_teacher(
        settings, SimpleNamespace(), TOKENIZER, group, SamplingConfig(max_tokens=8), EngineConfig(max_model_len=11)
    )


def test_self_teacher_leaves_the_runs_engine_alone():
    own = teacher(score_paths)
    own.start()
    assert own.wait_ready() == 0.0
    own.close()
