"""Valid components of a run pass the checks, and errors name the invalid component (see also tests/mistakes)."""

import json
from collections import namedtuple
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from helpers.tiny_runs import write_tiny_model
from torchtune_ext.chat import CHATML, ChatTokenizer
from torchtune_ext.policy import from_config
from torchtune_ext.policy.builder import build_on_meta
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.policy.lora import adapter_names
from torchtune_ext.recipes import grpo
from torchtune_ext.sampling.types import EngineConfig, SamplingConfig
from torchtune_ext.settings.components import Component
from torchtune_ext.settings.config import load_config
from torchtune_ext.settings.presets import preset_files
from torchtune_ext.setup import checks
from torchtune_ext.tasks.arithmetic import Arithmetic
from torchtune_ext.tasks.task import Problem

NEEDED = {"output_dir": "x", "model_dir": "x", "max_steps": 1, "sampling": {"max_tokens": 8}} | {
    key: {"_component_": "x"} for key in ("model", "tokenizer", "task", "optimizer")
}
Disk = namedtuple("Disk", "total used free")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return folder


@pytest.mark.parametrize("preset", [*preset_files(), None])
def test_the_loss_of_every_preset_passes(preset):
    loss = {} if preset else {"loss": {"_component_": "torchtune_ext.objective.loss.PolicyLoss", "kl_coef": 0.1}}
    cfg = load_config(grpo.Config, OmegaConf.create({**NEEDED, "preset": preset, **loss}))
    checks.check_loss(cfg.loss.instantiate())


def test_a_loss_may_learn_from_the_entropy_only():
    checks.check_loss(lambda t: (-t.entropy_L, {}))


def test_optimizers_pass():
    for name, settings in (
        ("AdamW", {"lr": 1e-3, "fused": True}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("Adafactor", {}),
    ):
        node = Component({"_component_": f"torch.optim.{name}", **settings}, "optimizer")
        checks.check_optimizer(node.instantiate)


def test_an_optimizer_of_matrices_may_train_matrices():
    muon = Component({"_component_": "torch.optim.Muon", "lr": 0.1}, "optimizer")
    checks.check_optimizer(muon.instantiate, {2})
    with pytest.raises(ValueError, match="2D parameters"):
        checks.check_optimizer(muon.instantiate, {1, 2})


@pytest.mark.parametrize(
    "optimizer, says",
    [
        ({"_component_": "torch.optim.LBFGS"}, "a step of LBFGS on dense gradients raised TypeError: .*'closure'. Fix: use torch.optim.AdamW"),
        ({"_component_": "torch.optim.SparseAdam"}, "a step of SparseAdam on dense gradients raised .*does not support dense"),
        ({"_component_": "torch.optim.AdamW", "capturable": True}, "a step of AdamW .*If capturable=True"),
        ({"_component_": "torch.optim.SGD", "maximize": True}, "a step of SGD raises the loss. Fix: leave out optimizer.maximize"),
    ],
)  # fmt: skip
def test_an_optimizer_that_cannot_step_is_refused(optimizer, says):
    make = Component({"lr": 0.1, **optimizer}, "optimizer").instantiate
    with pytest.raises(ValueError, match=f"optimizer: {says}"):
        checks.check_optimizer(make)
    if optimizer.get("capturable"):
        checks.check_optimizer(make, device="cuda")


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"_component_": "torch.optim.AdamW", "lr": 1e-5}, 8.0),
        ({"_component_": "torch.optim.AdamW", "lr": 1e-5, "fused": True, "amsgrad": True}, 12.0),
        ({"_component_": "torch.optim.SGD", "lr": 1e-5}, 0.0),
        ({"_component_": "torch.optim.SGD", "lr": 1e-5, "momentum": 0.9}, 4.0),
        # Two bytes, and for each moment a float32 scale per 256 values and one table of 256 values.
        ({"_component_": "torchao.optim.AdamW8bit", "lr": 1e-5}, 2 + 8 / 256 + 2 * 1024 / 2**18),
        # For GPUs only: AdamW's moments are assumed.
        ({"_component_": "torchao.optim.CPUOffloadOptimizer", "lr": 1e-5}, 8.0),
    ],
)
def test_optimizer_state_bytes_are_measured(settings, expected):
    assert checks.measure_optimizer_state(Component(settings, "optimizer").instantiate) == expected


def test_weights_fit_their_model_and_no_other(model_dir):
    source, model = HFModel(model_dir), build_on_meta(partial(from_config, str(model_dir)))
    source.require_fits(model)
    adapted = build_on_meta(partial(from_config, str(model_dir), lora_attn_modules=["q_proj"]))
    source.require_fits(adapted, new_params=adapter_names(adapted))
    shapes = {name: shape for name, shape, _ in source.shapes()}
    assert shapes == {name: tuple(param.shape) for name, param in model.named_parameters()}
    fewer = build_on_meta(partial(from_config, str(model_dir)))
    del fewer.layers[1]
    with pytest.raises(ValueError, match=r"model .*layers.1.* no weight of this name"):
        source.require_fits(fewer)


def test_header_shapes_equal_converted_weight_shapes(model_dir, tmp_path):
    """Llama permutes the heads of q and k; the model has as many heads as the tiny model."""
    config = json.loads((model_dir / "config.json").read_text()) | {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = HFModel(model_dir)
    tensors = load_file(model_dir / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "bias" not in name}, tmp_path / "model.safetensors")
    llama = HFModel(tmp_path)
    assert {name: shape for name, shape, _ in llama.shapes()} == {name: tuple(t.shape) for name, t in llama.tensors()}
    assert {name: shape for name, shape, _ in source.shapes()} == {name: tuple(t.shape) for name, t in source.tensors()}


class Slow:
    """A task whose prompts take a second each on a fake clock."""

    def __init__(self, clock):
        self.clock = clock

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        self.clock.now += 0.3
        if index == 15:
            raise KeyError(index)
        return Problem(str(index), ({"role": "user", "content": "x" * index},), index)


def test_prompts_are_measured_for_a_second_at_most(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(checks, "time", SimpleNamespace(monotonic=lambda: clock.now))
    tokenizer = SimpleNamespace(prompt_ids=lambda messages, tools: [0] * len(messages[0]["content"]))
    # Four prompts are made in 1.2 s; the invalid problem is skipped.
    assert checks.measure_prompts(Slow(clock), tokenizer, "task") == [0, 31, 46]


def test_prompt_lengths_broken_first_row_is_deferred():
    class Rows(list):
        def __getitem__(self, index):
            if index in self:
                raise KeyError("answer")
            return Problem(str(index), ({"role": "user", "content": "12"},), "")

    tokenizer = SimpleNamespace(prompt_ids=lambda messages, tools: [0] * len(messages[0]["content"]))
    assert checks.measure_prompts(Rows([0, 7]), tokenizer, "task") == [2]
    with pytest.raises(ValueError, match=r"the prompt of Rows\(...\)\[0\] raised KeyError"):
        checks.measure_prompts(Rows([0, 1]), tokenizer, "task")


class Rows:
    """A task with these questions; None is an invalid row."""

    def __init__(self, *questions):
        self.questions = questions

    def __len__(self):
        return len(self.questions)

    def __getitem__(self, index):
        return Problem(f"row-{index}", ({"role": "user", "content": self.questions[index] + "?"},), "4")


def test_prompt_lengths_samples_whole_long_task():
    task = Rows(*("x" * (i // 10) for i in range(100)))

    class Counting:
        def prompt_ids(self, messages, tools=()):
            return [0] * len(messages[0]["content"])

    lengths = checks.measure_prompts(task, Counting(), "task")
    assert len(lengths) == checks.MAX_PROBED_PROBLEMS and lengths[0] == 1 and lengths[-1] == 10


def test_prompt_lengths_tools_hidden_by_template_are_reported(model_dir):
    class Shop(Rows):
        def __getitem__(self, index):
            return replace(super().__getitem__(index), tools=({"type": "function", "function": {"name": "buy"}},))

    task, shows = Shop("a", "b"), CHATML + "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    with pytest.raises(ValueError, match=r"Shop\(...\)\[0\] has tools, .*'chatml'"):
        checks.measure_prompts(task, ChatTokenizer(model_dir, "chatml"), "task")
    assert len(checks.measure_prompts(task, ChatTokenizer(model_dir, shows), "task")) == 2


class Chats(list):
    """A task with these messages."""

    def __getitem__(self, index):
        return Problem(str(index), super().__getitem__(index), "4")


SYSTEM, USER = {"role": "system", "content": "Only digits.\n"}, {"role": "user", "content": " 1+1?\n"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
TURN = {"role": "assistant", "content": "<think>\nx\n</think>\n\n2"}


def loop(inside):
    return f"{{%- for m in messages -%}}{inside}{{%- endfor -%}}"


TRIMS, SHOUTS = loop("{{ m.role + (m.content | trim) }}"), loop("{{ m.role + (m.content | tojson | upper) }}")
SWITCH = "{{ '/no_think' in messages[0].content }}{{ messages[0].content.replace('/no_think', '') }}{{ messages[-1].content }}"
THOUGHTS = loop("{{ m.role + m.content.split('</think>')[-1] }}")
NO_SYSTEM = loop("{%- if m.role != 'system' -%}{{ m.content }}{%- endif -%}")
PARTS = loop("{{ m.role }}{%- for part in m.content -%}{{ part.text }}{%- endfor -%}")


@pytest.mark.parametrize(
    "template, messages, hidden",
    [
        ("chatml", [SYSTEM, USER], None), (TRIMS, [SYSTEM, USER], None), (SHOUTS, [SYSTEM, USER], None),
        (SWITCH, [{"role": "system", "content": "/no_think"}, USER], None), (THOUGHTS, [USER, TURN, USER], None),
        ("{{ messages[0].content + messages[1].content }}", [SYSTEM, USER], None),
        (NO_SYSTEM, [SYSTEM, USER], "system"), (NO_SYSTEM, [USER], None), (PARTS, [USER], "user"), ("{{ 'x' }}", [USER], "user"),
        ("{{ messages[-1].content }}", [USER, TURN, {"role": "user", "content": "So?"}], "user"),
        (loop("{{ m.role + (m.content or '') }}"), [USER, CALL, USER], None),
        (loop("{{ m.content.strip().split('\n')[0] }}"), [{"role": "user", "content": "a\nb"}], "user"),
    ],
)  # fmt: skip
def test_a_template_has_to_show_each_message(model_dir, template, messages, hidden):
    tokenizer = ChatTokenizer(model_dir, template)
    if hidden is None:
        assert len(checks.measure_prompts(Chats([messages]), tokenizer, "task")) == 1
    else:
        with pytest.raises(
            ValueError, match=rf"task: Chats\(...\)\[0\]: the chat template .* omits its message of role '{hidden}'"
        ):
            checks.measure_prompts(Chats([messages]), tokenizer, "task")


def test_different_problems_with_the_same_prompt_are_refused():
    def task(*questions):
        return Chats([[{"role": "user", "content": question}] for question in questions])

    # The tokenizer has no letters.
    tokenizer = SimpleNamespace(prompt_ids=lambda messages, tools: [len(messages[0]["content"].strip().upper())])
    with pytest.raises(ValueError, match="problems 0 and 2 of Chats .*same prompt"):
        checks.measure_prompts(task("ab", "a", "ac"), tokenizer, "task")
    assert len(checks.measure_prompts(task("ab", "AB ", "ab"), tokenizer, "task")) == 3


def test_train_eval_overlap_reports_shared_problems(monkeypatch):
    assert checks.find_eval_overlap(Rows("a", None, "b", "c"), Rows("d", "c", None, "a")) == ["row-1", "row-3"]
    # A partial overlap is allowed, because it measures memorization.
    assert checks.find_eval_overlap(Rows("a", "b"), Rows("b")) == ["row-0"]
    assert checks.find_eval_overlap(Rows("a"), None) == checks.find_eval_overlap(Rows("a"), Rows("b")) == []
    assert checks.find_eval_overlap(Arithmetic(seed=0), Arithmetic(seed=0)) == []  # endless
    with pytest.raises(ValueError, match="evaluation.task has the 2 problems of `task`"):
        checks.find_eval_overlap(Rows("a", "b"), Rows("b", "a"))


def test_a_task_of_which_some_prompts_fit_passes(model_dir):
    tokenizer, source, task = ChatTokenizer(model_dir), HFModel(model_dir), Arithmetic(level=[1, 10])
    lengths = checks.measure_prompts(task, tokenizer, "task")
    assert len(lengths) <= checks.MAX_PROBED_PROBLEMS and min(lengths) < max(lengths)
    for room, fits in ((min(lengths), True), (min(lengths) - 1, False)):
        engine = EngineConfig(max_model_len=room + 8)
        check = partial(checks.check_prompts, {"task": task}, tokenizer, SamplingConfig(max_tokens=8), engine, source)
        if fits:
            check()
        else:
            with pytest.raises(
                ValueError, match=rf"set engine.max_model_len={8 + max(lengths)}, or a lower max_tokens"
            ):
                check()


@pytest.mark.parametrize(
    "config, engine, message",
    [
        ({}, {"max_model_len": 256}, None),
        ({}, {"max_model_len": 257}, "more than the 256 positions"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {"max_model_len": 1024}, None),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, {"max_model_len": 1024}, None),
        ({"rope_parameters": {"rope_type": "default"}}, {"max_model_len": 257}, "more than the 256 positions"),
        ({}, {"max_model_len": 64, "tensor_parallel_size": 2, "devices": "4,5"}, None),
        ({}, {"max_model_len": 64, "tensor_parallel_size": 2, "devices": "4"}, "names 1 GPU, .* needs 2"),
        ({}, {"max_model_len": 64, "tensor_parallel_size": 4}, "does not divide the model's 6 attention heads. Fix: use one of 1, 2, 3, 6"),
    ],
)  # fmt: skip
def test_the_engine_and_the_model(config, engine, message):
    settings = {"num_attention_heads": 6, "max_position_embeddings": 256, **config}
    source = SimpleNamespace(config=settings, path=Path("model"))
    if message is None:
        checks.check_engine(source, EngineConfig(**engine))
    else:
        with pytest.raises(ValueError, match=message):
            checks.check_engine(source, EngineConfig(**engine))


def test_model_trained_on_fewer_positions_limits_context_length(model_dir):
    model = build_on_meta(partial(from_config, str(model_dir), max_seq_len=64))
    checks.check_engine(HFModel(model_dir), EngineConfig(max_model_len=64), model)
    with pytest.raises(ValueError, match="64 positions .*set model.max_seq_len=65"):
        checks.check_engine(HFModel(model_dir), EngineConfig(max_model_len=65), model)
