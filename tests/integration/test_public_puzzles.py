"""Public Temporal Clue puzzles with the real Qwen vocabulary, through every stage up to an optimizer step."""

import gzip
import json
from dataclasses import replace

import pytest
import torch
from learners import alone

from torchtune_ext.advantages import AdvantageConfig, with_advantages
from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading import Grader, Outcome
from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.packing import pack
from torchtune_ext.policy import from_config
from torchtune_ext.policy.builder import build_policy
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.rollout import in_order, sample_groups
from torchtune_ext.sampling.engine import Engine, EngineConfig, SamplingConfig
from torchtune_ext.tasks.task import Score
from torchtune_ext.tasks.temporal_clue import TemporalClue
from torchtune_ext.training.agreement import Agreement
from torchtune_ext.training.learner import ScheduleConfig, make_schedule

pytestmark = [pytest.mark.slow, pytest.mark.rest]
SAMPLES, TOKENS = 2, 12


@pytest.fixture(scope="module")
def model_dir(data_dir, tmp_path_factory):
    """A random Qwen2 with Qwen's 151,936 rows of embeddings, its vocabulary and its chat template."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151936, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=128,
        max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=151645, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    Qwen2ForCausalLM(config).float().save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "rope_theta": 1e6}))
    (folder / "tokenizer.json").write_bytes(
        gzip.decompress((data_dir / "tokenizer-qwen" / "tokenizer.json.gz").read_bytes())
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"})
    )
    (folder / "chat_template.jinja").write_text((data_dir / "chat-templates" / "qwen2_5.jinja").read_text())
    return folder


def test_public_puzzles_go_through(model_dir, data_dir, tmp_path):
    tokenizer = ChatTokenizer(model_dir)
    path = str(data_dir / "temporal-clue" / "val.json")
    task = TemporalClue(path=path)
    problems = [task[i] for i in range(64)]
    sampling = SamplingConfig(max_tokens=TOKENS, seed=0, stop_token_ids=tuple(tokenizer.stop_token_ids))
    config = EngineConfig(dtype="float32", max_model_len=4096, kv_cache_bytes=128 << 20)
    with Engine(str(model_dir), config, str(tmp_path)) as engine, Grader(task) as grader:
        engine.start()
        engine.wait_ready()
        groups = in_order(sample_groups(problems, SAMPLES, sampling, engine, tokenizer, grader))
        gold = [(p, task.solution(p)) for p in problems]
        exact = [outcome.score.reward for outcome in grader.grade(gold)]
    published_task = TemporalClue(path=path, grader="published")
    published = [published_task.grade(p, text).reward for p, text in gold]
    assert sum(exact) / 64 == 1.0
    assert sum(published) / 64 == pytest.approx(0.926, abs=5e-4)

    # a random model never answers right: give the samples of a group different rewards to have something to train on
    groups = [
        replace(
            g,
            samples=tuple(
                replace(s, outcome=Outcome("scored", Score(float(i), {}), "")) for i, s in enumerate(g.samples)
            ),
        )
        for g in groups
    ]
    groups, stats = with_advantages(groups, AdvantageConfig())
    assert stats.groups == 64
    rows, packed = pack(groups, 4096, pad_id=tokenizer.pad_id)
    assert packed.labels == sum(len(s.completion.tokens) for g in groups for s in g.samples)
    policy = build_policy(lambda: from_config(str(model_dir)), HFModel(model_dir), torch.device("cpu"), torch.float32)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-3)
    schedule = make_schedule(optimizer, ScheduleConfig("constant", 0), 1)
    learner = alone(policy, PolicyLoss(), optimizer=optimizer, schedule=schedule, max_grad_norm=1.0)
    gradient = learner.forward_backward(rows)
    Agreement(1e-4).require(rows, gradient.logprobs, "the trainer computes what vLLM reported")
    assert 0 < learner.step(gradient, advice=str)["optim/grad_norm"] < 1e3
