"""Checkpoints are whole or absent, and a resumed optimizer takes the very steps of one that went on."""

import errno
import json
from functools import partial

import pytest
import torch
from torchtune.models.qwen2 import qwen2

from torchtune_ext.policy.scratch import Shape, make_tokenizer, qwen2_from_config, write_model
from torchtune_ext.policy.shard import build_policy
from torchtune_ext.policy.weights import HFModel, load_weights
from torchtune_ext.training import state as module
from torchtune_ext.training.schedule import make_schedule
from torchtune_ext.training.state import Checkpoints, export_model

SHAPE = Shape(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=48,
              max_position_embeddings=64, vocab_size=400)  # fmt: skip


@pytest.fixture
def source(tmp_path):
    texts = [f"- Mrs. White was in the Lounge {i}\n" for i in range(20)]
    write_model(tmp_path / "model", make_tokenizer(texts, ["A. Lounge"], ["Lounge"], 400), SHAPE, seed=1)
    return HFModel(tmp_path / "model")


def build(source):
    return build_policy(lambda: qwen2_from_config(str(source.path)), source, torch.device("cpu"), torch.float32).model


def train(model, optimizer, steps, seed):
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(1000 * seed + step)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()


def save(checkpoints, step, model, optimizer, source, score=None):
    export = partial(export_model, model=model, source=source, dtype=torch.float32)
    return checkpoints.save(step, model, optimizer, export, {"cursor": 7 * step}, score)


def test_resume_equals_going_on(tmp_path, source):
    model = build(source)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 3, seed=1)
    path = save(Checkpoints(tmp_path / "c"), 3, model, optimizer, source)
    torch.manual_seed(5)
    module_rng = torch.get_rng_state()
    train(model, optimizer, 3, seed=2)

    other = build(source)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    recipe = Checkpoints(tmp_path / "c").load(path, other, other_optimizer)
    assert recipe["step"] == 3 and recipe["cursor"] == 21
    train(other, other_optimizer, 3, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert not torch.equal(module_rng, torch.get_rng_state())


def test_a_checkpoint_is_a_model_directory(tmp_path, source):
    transformers = pytest.importorskip("transformers")
    model = build(source)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = save(Checkpoints(tmp_path / "c"), 1, model, optimizer, source)
    ids = torch.arange(20)[None]
    hf = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    again = qwen2(vocab_size=hf.config.vocab_size, num_layers=2, num_heads=2, num_kv_heads=1, embed_dim=64, intermediate_dim=48,
                  max_seq_len=64, norm_eps=1e-6, rope_base=10000.0, tie_word_embeddings=True)  # fmt: skip
    load_weights(again, HFModel(path))
    with torch.no_grad():
        assert (hf(ids).logits - again(ids)).abs().max() < 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert tokenizer.decode(tokenizer.encode("Mrs. White, 11:30 PM ü")) == "Mrs. White, 11:30 PM ü"


def test_large_models_are_sharded(tmp_path, source, monkeypatch):
    monkeypatch.setattr(module, "SHARD_BYTES", 20_000)
    model = build(source)
    path = save(Checkpoints(tmp_path / "c"), 1, model, torch.optim.SGD(model.parameters(), lr=0.1), source)
    files = sorted(path.glob("*.safetensors"))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert len(files) > 2 and set(index["weight_map"].values()) == {f.name for f in files}
    again = build(HFModel(path))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_last_and_best_are_kept(tmp_path, source):
    model = build(source)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints = Checkpoints(tmp_path / "c", keep_last=2)
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.2), (4, None), (5, 0.3)):
        save(checkpoints, step, model, optimizer, source, score)
    assert [p.name for p in checkpoints.all()] == ["step_000002", "step_000004", "step_000005"]


@pytest.mark.parametrize("where", ["save_file", "_save_state", "_fsync_tree"])
def test_a_full_disk_leaves_the_last_checkpoint_alone(tmp_path, source, monkeypatch, where):
    model = build(source)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints = Checkpoints(tmp_path / "c")
    save(checkpoints, 1, model, optimizer, source)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, where, full)
    with pytest.raises(OSError, match="step 2 was not saved.*No space left.*step_000001"):
        save(checkpoints, 2, model, optimizer, source)
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["step_000001"]


def test_what_a_killed_save_left_is_ignored_and_replaced(tmp_path, source):
    model = build(source)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (tmp_path / "c" / ".partial_000002").mkdir(parents=True)
    (tmp_path / "c" / ".partial_000002" / "model.safetensors").write_text("half")
    checkpoints = Checkpoints(tmp_path / "c")
    assert checkpoints.latest() is None
    assert save(checkpoints, 2, model, optimizer, source) == checkpoints.latest()
    build(HFModel(checkpoints.latest()))


def test_wrong_models_are_named(tmp_path, source):
    with pytest.raises(ValueError, match="no config.json"):
        HFModel(tmp_path)
    wide = Shape(**{**{f: getattr(SHAPE, f) for f in SHAPE.__slots__}, "intermediate_size": 64})
    write_model(tmp_path / "wide", make_tokenizer(["x\n"] * 9, ["y"], [], 300), wide, seed=1)
    with pytest.raises(ValueError, match="compare `model:` in the YAML"):
        build_policy(
            lambda: qwen2_from_config(str(source.path)), HFModel(tmp_path / "wide"), torch.device("cpu"), torch.float32
        )


def test_schedule():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = make_schedule(optimizer, "cosine", 2, 10)
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:3] == [1.0, 2.0, 2.0]
    assert rates[6] == pytest.approx(1.0) and optimizer.param_groups[0]["lr"] == pytest.approx(0.0)
    with pytest.raises(ValueError, match="lr_schedule='step'"):
        make_schedule(optimizer, "step", 0, 10)
    with pytest.raises(ValueError, match="lr_warmup=11"):
        make_schedule(optimizer, "linear", 11, 10)
