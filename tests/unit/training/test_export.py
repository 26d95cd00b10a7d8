"""A saved model has the tokenizer and template of the training, and no other files of model_dir."""

import json
import shutil
from functools import partial

import pytest
import torch
from huggingface_hub import metadata_load

from helpers.checkpoint_runs import build, make_source
from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.policy.lora import AdapterSpec
from torchtune_ext.training.export import (
    CARD_MARK,
    describe_prompt_format,
    export_adapter,
    require_replaceable,
    save_model,
    write_card,
)

# Each template reads its options differently: at the top, in a loop, in a macro, as a list, after
# significant white space.
PLAIN = """
  {%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content | trim }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{% endif %}"""
SWITCH = PLAIN + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
MACRO = "{% macro head(m) %}{{ tone }}/{{ m.role }}{% endmacro %}" + PLAIN.replace("{{ m.role }}", "{{ head(m) }}")
LOOP = "\n  {% for name in names %}{{ name }}{{ deep.a | default('') }}é{% endfor %}" + PLAIN
ENDS = PLAIN.replace("<|im_end|>", "{{ eos_token }}")
TEMPLATES = {
    "its own": (None, {}),
    "another": (PLAIN, {}),
    "with white space first": (f"\n\n {PLAIN}", {"x": 1}),
    "chatml": ("chatml", {}),
    "an option of its own": (None, {"enable_thinking": False}),
    "switch off": (SWITCH, {"enable_thinking": False}),
    "switch on": (SWITCH, {"enable_thinking": True}),
    "switch null": (SWITCH, {"enable_thinking": None}),
    "text with quotes": (MACRO, {"tone": 'it\'s "so"\n{{ ü }} \\n %}'}),
    "lists": (LOOP, {"names": ["a", 2, 1.5e-7, None], "deep": {"a": [True]}}),
    "name that no template reads": (SWITCH, {"a-b": 1, "enable_thinking": False}),
    "special token": (ENDS, {"eos_token": "<|im_end|>!"}),
}
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "Lounge 1?\n"}]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    source = make_source(tmp_path_factory.mktemp("source") / "model")
    for name in ("dataset.tar.gz", "train.py", "pytorch_model.bin", "recipe.json", "tokenizer.json.bak", "LICENSE"):
        (source.path / name).write_text(name)
    settings = source.path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": "old"}))
    return source


@pytest.fixture(scope="module")
def model(source):
    return build(source)


@pytest.mark.parametrize("name", TEMPLATES)
def test_saved_model_makes_trained_prompts(tmp_path, source, model, name):
    template, options = TEMPLATES[name]
    tokenizer = ChatTokenizer(source.path, template, options)
    folder = save_model(tmp_path / "model", model, source, torch.float32, tokenizer)
    saved = ChatTokenizer(folder)
    assert saved.prompt_ids(MESSAGES) == tokenizer.prompt_ids(MESSAGES)
    assert set(saved.stop_token_ids) == set(tokenizer.stop_token_ids)
    assert bool(describe_prompt_format(source, tokenizer)) == (name != "its own")
    if name != "its own":
        assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] != "old"
    # Saving again with the same settings does not add the options twice.
    again = ChatTokenizer(folder, (folder / "chat_template.jinja").read_text(), options)
    second = save_model(tmp_path / "second", model, source, torch.float32, again)
    assert (second / "chat_template.jinja").read_text() == (folder / "chat_template.jinja").read_text()


def test_option_in_saved_template_can_be_changed(tmp_path, source, model):
    off, on = ({"enable_thinking": value} for value in (False, True))
    folder = save_model(tmp_path / "m", model, source, torch.float32, ChatTokenizer(source.path, SWITCH, off))
    changed = ChatTokenizer(folder, template_options=on).prompt_ids(MESSAGES)
    assert (
        changed
        == ChatTokenizer(source.path, SWITCH, on).prompt_ids(MESSAGES)
        != ChatTokenizer(folder).prompt_ids(MESSAGES)
    )


def test_saved_model_has_tokenizer_of_another_folder(tmp_path, source, model):
    other = tmp_path / "other"
    shutil.copytree(source.path, other)
    (other / "chat_template.jinja").write_text(PLAIN)
    (other / "special_tokens_map.json").write_text("{}")
    (source.path / "generation_config.json").write_text('{"eos_token_id": 7, "top_k": 3}')
    tokenizer = ChatTokenizer(other)
    folder = save_model(tmp_path / "model", model, source, torch.float32, tokenizer)
    (source.path / "generation_config.json").unlink()
    assert ChatTokenizer(folder).prompt_ids(MESSAGES) == tokenizer.prompt_ids(MESSAGES)
    # Servers stop at the same tokens as the training.
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"eos_token_id": tokenizer.eos_id, "top_k": 3} and tokenizer.stop_token_ids == (
        tokenizer.eos_id,
    )
    assert (folder / "special_tokens_map.json").is_file()
    assert describe_prompt_format(source, tokenizer) == f"the tokenizer of {other}"


def test_saved_model_contains_only_known_files(tmp_path, source, model):
    folder = save_model(tmp_path / "model", model, source, torch.float32, ChatTokenizer(source.path))
    assert sorted(path.name for path in folder.iterdir()) == [
        "LICENSE", "chat_template.jinja", "config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


def test_copies_from_recorded_model_dir_are_replaceable(tmp_path, source):
    (folder := tmp_path / "model").mkdir()
    config = {"tokenizer_problems": 8, "model_dir": str(source.path)}
    (tmp_path / "run.json").write_text(json.dumps({"id": "a", "config": config}))
    shutil.copy(source.path / "train.py", folder)
    require_replaceable(folder, [source.path], "tokenizer_problems")
    (folder / "train.py").write_text("edited")
    with pytest.raises(ValueError, match="it holds files that were not written by a run: train.py"):
        require_replaceable(folder, [source.path], "tokenizer_problems")


def test_saved_adapter_names_base_and_includes_tokenizer(tmp_path, source, model, monkeypatch):
    monkeypatch.chdir(source.path.parent)
    relative = type(source)("model")
    tokenizer = ChatTokenizer("model", PLAIN)
    adapter = AdapterSpec(4, 8.0, 0.0, ("q_proj",), dora=False, quantized=False)
    export = partial(export_adapter, model=model, hf_model=relative, adapter=adapter, tokenizer=tokenizer)
    export(tmp_path, merged_dtype=torch.float32)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(source.path)
    assert not (tmp_path / "config.json").exists()
    for folder in (tmp_path, tmp_path / "merged"):
        assert ChatTokenizer(folder).prompt_ids(MESSAGES) == tokenizer.prompt_ids(MESSAGES)


def make_run(folder, preset="dr_grpo"):
    """The files of a run that its model cards need."""
    record = {
        "name": "letters",
        "config": {
            "preset": preset,
            "task": {"_component_": "torchtune_ext.tasks.math.Math", "dataset": "a|b", "split": None},
            "evaluation": {"task": {"_component_": "my.Held"}},
        },
        "process": {"command": "tune run grpo_full --config x", "versions": {"torch": "2.13.0", "vllm": None}},
    }
    (folder / "checkpoints" / "step_000040").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(record))
    lines = [{"step": 20, "eval/reward_sampled": 0.5}, {"step": 40, "eval/reward_sampled": 0.75}]
    lines[1] |= {"eval/low": 0.7, "eval/high": 0.8}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "checkpoints" / "step_000040"


def test_model_card_names_run_base_and_accuracy(tmp_path):
    folder, base = make_run(tmp_path / "run"), tmp_path / "models--org--small-1B" / "snapshots" / "abc"
    base.mkdir(parents=True)
    (base / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: other/one\ntags: [x]\n---\nTheir text\n")
    (folder / "recipe.json").write_text('{"step": 40}')
    write_card(folder, base)
    assert metadata_load(folder / "README.md") == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "org/small-1B",
        "license": "apache-2.0",
        "tags": ["torchtune-ext", "dr_grpo"],
    }
    text = (folder / "README.md").read_text()
    assert "| task | `Math(dataset=a&#124;b)` |\n| steps | 40 |\n| held-out task | `Held()` |" in text
    assert "| held-out reward | 0.750 (95% interval 0.700 to 0.800) at step 40 |" in text
    assert "| versions | torch 2.13.0 |" in text and "\ntune run grpo_full --config x\n" in text
    assert "Their text" not in text


@pytest.mark.parametrize("card", ["no front matter", "---\n[: broken\n---\n", "---\n- a list\n---\n", None])
def test_model_card_without_facts_omits_them(tmp_path, card):
    folder = make_run(tmp_path / "run", preset=None)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    if card:
        (tmp_path / "README.md").write_text(card)
    write_card(folder, tmp_path, adapter=True)
    assert metadata_load(folder / "README.md") == {
        "library_name": "peft", "pipeline_tag": "text-generation", "tags": ["torchtune-ext"],
    }  # fmt: skip
    assert "None" not in (folder / "README.md").read_text()


def test_model_card_needs_a_run(tmp_path, source, model):
    """Also, an edited card is not replaced, and a card of a run is."""
    folder = save_model(tmp_path / "model", model, source, torch.float32)
    assert not (folder / "README.md").exists()
    record = {"id": "a1", "name": "w", "started": 0.0, "config": {"tokenizer_problems": 1}, "process": {}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    save_model(folder, model, source, torch.float32)
    card = (folder / "README.md").read_text()
    assert "| recipe | warmup_sft |" in card
    require_replaceable(folder, [], "tokenizer_problems")
    (folder / "README.md").write_text(card.replace(CARD_MARK, ""))
    with pytest.raises(ValueError, match=r"it holds files that were not written by a run: README\.md"):
        require_replaceable(folder, [], "tokenizer_problems")
