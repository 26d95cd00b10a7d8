"""Settings of a recipe: references to the environment, paths, messages and snapshots."""

import ast
import json
import os
import re
import warnings
from dataclasses import asdict
from dataclasses import dataclass as stdlib_dataclass
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
from omegaconf import MISSING, OmegaConf
from pydantic.dataclasses import dataclass

from torchtune_ext.objective.loss import PolicyLoss, loss_requirements
from torchtune_ext.recipes import evaluate, grpo, warmup_sft
from torchtune_ext.settings.config import RENAMED_KEYS, load_config, named_paths, settings_snapshot
from torchtune_ext.settings.presets import find_preset
from torchtune_ext.settings.sections import FORBID_UNKNOWN_KEYS, nested_section, option_fields
from torchtune_ext.setup.config_checks import check_needs
from torchtune_ext.training.checkpoints import UNREPORTED_KEYS
from torchtune_ext.training.replay import IGNORED_KEYS

ROOT = Path(__file__).resolve().parents[3]

NEEDED = {"output_dir": "x", "model_dir": "x", "max_steps": 1, "sampling": {"max_tokens": 8}} | {
    key: {"_component_": "x"} for key in ("model", "tokenizer", "task", "optimizer")
}


def of_environment(monkeypatch, text, cli=()):
    """Return (settings of the recipe, stored snapshot) of a YAML text, with a token in the environment."""
    for name, value in {
        "TTE_TOKEN": "s3cret",
        "TTE_STEPS": "7",
        "TTE_LIST": "[a, {b: s3cret}]",
        "TTE_WHICH": "two",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TTE_NOTHING", raising=False)
    needed = {key: value for key, value in NEEDED.items() if f"\n{key}:" not in f"\n{text}"}
    cfg = load_config(grpo.Config, OmegaConf.merge(needed, OmegaConf.create(text), OmegaConf.from_dotlist(list(cli))))
    kept = settings_snapshot(cfg)
    assert "s3cret" not in json.dumps(kept) and "torchtune_ext.env" not in json.dumps(kept)
    return cfg, kept


@pytest.mark.parametrize(
    "written, value, kept",
    [
        ("${oc.env:TTE_TOKEN}", "s3cret", "${oc.env:TTE_TOKEN}"),
        ("hf_${oc.env:TTE_TOKEN}/${seed}", "hf_s3cret/0", "hf_${oc.env:TTE_TOKEN}/0"),
        ("${oc.decode:${oc.env:TTE_STEPS}}", 7, "${oc.env:TTE_STEPS}"),
        ("${oc.decode:${oc.env:TTE_LIST}}", ["a", {"b": "s3cret"}], "${oc.env:TTE_LIST}"),
        ("${oc.decode:${oc.env:TTE_TOKEN}}-${ oc.env : TTE_TOKEN }", "s3cret-s3cret", "${oc.env:TTE_TOKEN}-${oc.env:TTE_TOKEN}"),
        ("${oc.env:TTE_NOTHING,default}", "default", "${oc.env:TTE_NOTHING,default}"),
        ("${oc.env:TTE_NOTHING,null}", None, "${oc.env:TTE_NOTHING,null}"),
        ("${oc.env:TTE_NOTHING,'a, b'}", "a, b", '${oc.env:TTE_NOTHING,"a, b"}'),
        ("${oc.env:TTE_NOTHING,${oc.env:TTE_TOKEN}}", "s3cret", "${oc.env:TTE_NOTHING,${oc.env:TTE_TOKEN}}"),
        ("${task.deep.0.token}", "s3cret", "${oc.env:TTE_TOKEN}"),
        ("${task.deep}", [{"token": "s3cret", "plain": 1}], [{"token": "${oc.env:TTE_TOKEN}", "plain": 1}]),
        ("${task.${oc.env:TTE_WHICH}}", 2, "${task.${oc.env:TTE_WHICH}}"),
        ("${tte_shout:${oc.env:TTE_TOKEN}}", "S3CRET!", "${tte_shout:${oc.env:TTE_TOKEN}}"),
        ("${tte_count:${oc.env:TTE_TOKEN}}", 6, "${tte_count:${oc.env:TTE_TOKEN}}"),
        ("${output_dir}/x", "x/x", "x/x"),
    ],
)  # fmt: skip
def test_values_of_the_environment_are_kept_as_references(monkeypatch, written, value, kept):
    with warnings.catch_warnings(action="ignore"):  # OmegaConf deprecates this function name
        OmegaConf.register_new_resolver("tte_shout", lambda text: text.upper() + "!", replace=True)
        OmegaConf.register_new_resolver("tte_count", len, replace=True)
    deep = 'task: {_component_: x, deep: [{token: "${oc.env:TTE_TOKEN}", plain: 1}], two: 2}\n'
    cfg, values = of_environment(
        monkeypatch, f"{deep}model: {{_component_: x, a: {{b: [0, {json.dumps(written)}]}}}}\n"
    )
    assert cfg.model["a"]["b"][1] == value
    assert values["model"] == {"_component_": "x", "a": {"b": [0, kept]}}
    assert values["task"] == {"_component_": "x", "deep": [{"token": "${oc.env:TTE_TOKEN}", "plain": 1}], "two": 2}
    # Other values are resolved, and a section contains only the given keys.
    assert values["output_dir"] == "x" and values["sampling"] == {"max_tokens": 8} and values["engine"] == {}


def test_references_in_typed_keys_overrides_and_presets(monkeypatch, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "loss: {_component_: a.Loss, x: '${oc.env:TTE_TOKEN}', y: '${prompts_per_step}'}\n"
    )
    text = f'max_steps: "${{oc.env:TTE_STEPS}}"\nprompts_per_step: "${{max_steps}}"\npreset: {tmp_path}/mine.yaml\n'
    cfg, values = of_environment(
        monkeypatch, text, cli=["model_dir=${oc.env:TTE_TOKEN}", "tokenizer.path=${model_dir}/t"]
    )
    assert (cfg.max_steps, cfg.prompts_per_step, cfg.model_dir, cfg.tokenizer["path"]) == (7, 7, "s3cret", "s3cret/t")
    assert values["max_steps"] == values["prompts_per_step"] == "${oc.env:TTE_STEPS}"
    assert (values["model_dir"], values["tokenizer"]["path"]) == ("${oc.env:TTE_TOKEN}", "${oc.env:TTE_TOKEN}/t")
    assert cfg.loss == {"_component_": "a.Loss", "x": "s3cret", "y": 7}
    assert values["loss"] == {"_component_": "a.Loss", "x": "${oc.env:TTE_TOKEN}", "y": "${oc.env:TTE_STEPS}"}


def test_given_key_leaves_other_defaults_of_its_mapping():
    needed = {**NEEDED, "num_problems": 8}
    needed = {key: value for key, value in needed.items() if key not in ("max_steps", "sampling")}
    cfg = load_config(warmup_sft.Config, OmegaConf.create(needed | {"schedule": {"decay": "linear"}}))
    assert (cfg.schedule.decay, cfg.schedule.warmup) == ("linear", 20)  # the recipe's default, not the section's
    assert settings_snapshot(cfg)["schedule"] == {"decay": "linear"}


def test_reference_names_key_with_default_only():
    cfg = load_config(
        grpo.Config, OmegaConf.create({**NEEDED, "staleness": 2, "prefetch_steps": "${updates_per_step}"})
    )
    assert cfg.prefetch_steps == 1


def test_renamed_config_key_works_with_one_warning():
    with pytest.warns(FutureWarning, match="^depth: .*prefetch_steps$") as caught:
        cfg = load_config(grpo.Config, OmegaConf.create({**NEEDED, "staleness": 2, "depth": 2}))
    assert cfg.prefetch_steps == 2 and len(caught) == 1
    with pytest.raises(ValueError, match="unknown key 'depth'"):
        load_config(grpo.Config, OmegaConf.create({**NEEDED, "staleness": 2, "depth": 2, "prefetch_steps": 2}))


def test_renamed_config_key_works_in_preset(tmp_path):
    (tmp_path / "mine.yaml").write_text(find_preset("grpo").read_text() + "depth: 2\n")
    with pytest.warns(FutureWarning, match="^depth: .*prefetch_steps$"):
        cfg = load_config(
            grpo.Config, OmegaConf.create({**NEEDED, "staleness": 2, "preset": str(tmp_path / "mine.yaml")})
        )
    assert cfg.prefetch_steps == 2


def test_message_shows_reference_instead_of_secret(monkeypatch):
    monkeypatch.setenv("TTE_TOKEN", "s3cret")
    wrong = {"max_steps": "${oc.env:TTE_TOKEN}", "profile": ["${oc.env:TTE_TOKEN}"], "task": "${oc.env:TTE_TOKEN}"}
    with pytest.raises(ValueError) as raised:
        load_config(grpo.Config, OmegaConf.create({**NEEDED, **wrong, "engine": {"dtype": "${oc.env:TTE_TOKEN}"}}))
    assert str(raised.value).count("${oc.env:TTE_TOKEN}") == 4 and "s3cret" not in str(raised.value)


def test_component_with_secret_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("TTE_TOKEN", "s3cret")
    off = {"evaluation": {"task": {"_component_": None, "key": "${oc.env:TTE_TOKEN}"}}}
    cfg = load_config(grpo.Config, OmegaConf.create({**NEEDED, **off}))
    assert cfg.evaluation.task is None and "s3cret" not in json.dumps(settings_snapshot(cfg))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"optimizer.lr": 1e-5}, "optimizer.lr: dotted keys work .*`optimizer: {lr: ...}`"),
        ({"profile": [True]}, r"profile=\[True\] must be a list"),
        ({"updates_per_step": "${compile}", "compile": True}, "updates_per_step"),
        ({"output_dir": "???"}, "output_dir has no value"),
        ({"engine": {"extra_args": [1]}}, "engine.extra_args=.* must be a mapping"),
    ],
)
def test_value_of_another_kind_is_an_error(given, says, monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "a")
    monkeypatch.setenv("WANDB_RUN_ID", "b")
    with pytest.raises(ValueError, match=says):
        load_config(grpo.Config, OmegaConf.create({**NEEDED, **given}))


@pytest.mark.parametrize("off", [0, False, None])
def test_dry_run_can_be_off(off):
    assert not load_config(grpo.Config, OmegaConf.create({**NEEDED, "dry_run": off})).dry_run


def test_config_of_an_older_recipe_is_an_error():
    @stdlib_dataclass
    class Plain:
        output_dir: str = "x"

    with pytest.raises(ValueError, match="Plain is not a pydantic dataclass"):
        load_config(Plain, OmegaConf.create({}))

    @dataclass(config=FORBID_UNKNOWN_KEYS, kw_only=True)
    class Marked:
        output_dir: str = MISSING

    with pytest.raises(ValueError, match="Marked.output_dir: remove `= MISSING`"):
        load_config(Marked, OmegaConf.create({}))


def test_a_missing_variable_is_still_named(monkeypatch):
    with pytest.raises(ValueError, match="TTE_NOTHING"):
        of_environment(monkeypatch, 'seed: "${oc.env:TTE_NOTHING}"\n')


@pytest.mark.parametrize(
    "key, written, read",
    [
        ("output_dir", "~", "HOME"),
        ("output_dir", "~/runs/x", "HOME/runs/x"),
        ("model_dir", "~root/x", "ROOT/x"),
        ("model_dir", "${oc.env:TTE_MODELS}/x", "HOME/models/x"),
        ("model_dir", "price$5", "price$5"),
        ("replay", "~/runs/x", "HOME/runs/x"),
        ("task.path", ["~/a", "b"], ["HOME/a", "b"]),
        ("evaluation.task.rows_file", "~root/a", "ROOT/a"),
        ("task.rows", "~/a", "HOME/a"),
        ("task.system", "~root about $PATH", "~root about $PATH"),
        ("task.path", "$x.jsonl", "$x.jsonl"),  # the file exists
        ("tokenizer.template", "{{ '$PATH' }}" * 400, "{{ '$PATH' }}" * 400),
    ],
)
def test_path_with_home_folder_is_expanded(tmp_path, monkeypatch, key, written, read):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "$x.jsonl").touch()
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("TTE_MODELS", "~/models")
    settings = OmegaConf.create({**NEEDED, "evaluation": {"task": {"_component_": "x"}}})
    OmegaConf.update(settings, key, written)
    found = reduce(getitem, key.split("."), asdict(load_config(grpo.Config, settings)))
    root = Path("~root").expanduser().as_posix()
    texts = [
        text.replace("ROOT/", f"{root}/").replace("HOME", "/home/me")
        for text in ([read] if isinstance(read, str) else read)
    ]
    assert ([found] if isinstance(found, str) else found) == texts


def test_the_paths_that_settings_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model", "out", "data.jsonl", "tensorboard"):
        (tmp_path / name).mkdir()
    given = {**NEEDED, "output_dir": "out", "model_dir": "model", "logging": {"to": ["tensorboard"]}}
    given |= {
        "task": {
            "_component_": "x",
            "path": "${oc.env:PWD,x}/../data.jsonl",
            "more": [str(tmp_path / "data.jsonl"), "\0", "", "x" * 5000],
        }
    }
    paths = named_paths(load_config(grpo.Config, OmegaConf.create(given)))
    assert sorted(map(str, paths)) == sorted(["model", str(tmp_path / "data.jsonl")])


def test_old_key_without_successor_is_unknown_key():
    with pytest.raises(ValueError, match="unknown key 'eval_every'.*(did you mean|known keys)"):
        load_config(evaluate.Config, OmegaConf.create({"eval_every": 1}))


def evaluated(task):
    return load_config(grpo.Config, OmegaConf.create({**NEEDED, "evaluation": {"task": task}})).evaluation.task


def test_a_held_out_task_is_a_mapping():
    with pytest.raises(ValueError, match=r"evaluation.task._component_=my_task.Sums, or evaluation.task=null"):
        evaluated("my_task.Sums")
    with pytest.raises(ValueError, match=r"`evaluation.task:` needs a `_component_`.*, or evaluation.task=null"):
        evaluated({"count": 4})
    assert evaluated(None) is None
    assert evaluated({"_component_": None}) is None  # null on the command line


def test_custom_loss_must_declare_needs_of_configured_keys():
    class Mine:
        def __call__(self, t):
            return -t.logprobs_L, {}

    with pytest.raises(ValueError, match=r"loss.kl_coef=0.1, .*my.Mine .*needs_reference"):
        check_needs({"_component_": "my.Mine", "kl_coef": 0.1}, loss_requirements(Mine()))
    with pytest.raises(ValueError, match="loss.top_k=4"):
        check_needs({"top_k": 4}, loss_requirements(Mine()))
    check_needs({"kl_coef": 0.1, "top_k": 4}, loss_requirements(PolicyLoss(constraint="kl", top_k=4, kl_coef=0.1)))
    check_needs({"kl_coef": 0.0}, loss_requirements(Mine()))


NODES = {
    name: kind
    for recipe in (grpo, warmup_sft)
    for name, field in option_fields(recipe.Config).items()
    if (kind := nested_section(field))
}


def test_config_keys_named_in_messages_exist():
    """Messages name keys such as engine.dtype: a section and its field. File names such as engine.log do not count."""
    knob, wrong = re.compile(rf"(?<![\w./`-])({'|'.join(NODES)})\.([a-z]\w*)(?![\w(./])"), []
    sources = [*(ROOT / "torchtune_ext").rglob("*.py"), *(ROOT / "recipes").glob("*.py")]
    for path in (path for path in sources if path.name != "renames.py"):  # modules, not keys
        tree = ast.parse(path.read_text(encoding="utf-8"))
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in alone]
        names = {match.groups() for text in texts if isinstance(text, str) for match in knob.finditer(text)}
        known = {(node, name) for node, kind in NODES.items() for name in option_fields(kind)}
        wrong += [(path.name, *pair) for pair in names - known if pair[1] not in ("log", "json")]
    assert not wrong
    ignored = {key.partition(".")[0] for key in IGNORED_KEYS} - set(RENAMED_KEYS)
    assert ignored | set(UNREPORTED_KEYS) <= set(option_fields(grpo.Config))


@pytest.mark.parametrize(
    "key, value, says",
    [
        ("output_dir", "$HOME", r"output_dir=\$HOME: `\$` is shell syntax"),
        ("output_dir", "a/$(date)", "`\\$` is shell syntax"),
        ("output_dir", "${oc.env:TTE_EMPTY}", "output_dir='' is empty; expected a path. Fix: write `.` for"),
        (
            "tokenizer.template",
            "",
            "tokenizer.template='' is empty; expected a path. Fix: leave it out, or name a file",
        ),
        ("output_dir", "${oc.env:TTE_DOLLAR}", "`\\$` is shell syntax"),
        ("teacher.model_dir", "$MODELS/x", r"teacher.model_dir=\$MODELS/x: `\$` is shell"),
        ("task.path", ["a", "$MODELS/x"], r"task.path=\$MODELS/x: `\$` is shell"),
        ("replay", "~no-such-user/x", "unknown user 'no-such-user'"),
        ("preset", "$HOME/a.yaml", r"preset=\$HOME/a.yaml: `\$` is shell"),
        ("model_dir", "é" * 128, "model_dir=.* is too long; expected at most 255 bytes in a name"),
        ("tokenizer.template", "/a" * 2000, "tokenizer.template=.* is too long; .* 3,900 in a path"),
        ("task.path", "a\0b", r"task.path='a\\x00b' contains a character"),
        ("task.path", "\ud83d", r"task.path='\\ud83d' contains a character"),
        (
            "evaluation.task.path",
            "pipe",
            r"evaluation.task.path=pipe: not a regular file \(a pipe, device or socket\). Fix: write its content to a file",
        ),
    ],
)
def test_value_that_cannot_be_path_is_refused(tmp_path, monkeypatch, key, value, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TTE_DOLLAR", "x/$HOME")
    monkeypatch.setenv("TTE_EMPTY", "")
    os.mkfifo("pipe")
    settings = OmegaConf.create({**NEEDED, "evaluation": {"task": {"_component_": "x"}}})
    OmegaConf.update(settings, key, value)
    with pytest.raises(ValueError, match=says):
        load_config(grpo.Config, settings)
