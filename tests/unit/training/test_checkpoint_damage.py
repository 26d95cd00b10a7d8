"""Damaged checkpoints and checkpoints of other runs are refused by name before loading."""

import json
import os
import random
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoint_runs import MINE, SHAPE, TrainedModel, checkpoints_in, make_model, make_source
from torchtune_ext.policy import from_config
from torchtune_ext.policy.builder import build_on_meta, build_policy
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.policy.lora import AdapterSpec, adapter_spec
from torchtune_ext.policy.scratch import ModelShape
from torchtune_ext.training import manifest
from torchtune_ext.training.export import export_adapter
from torchtune_ext.training.manifest import DamagedCheckpoint, Identity, Manifest, identify


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_source(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def two_saved(source, tmp_path_factory):
    """Checkpoints of steps 1 and 2, which tests copy."""
    folder, trained = tmp_path_factory.mktemp("two") / "c", TrainedModel(source)
    for step in (1, 2):
        trained.train(1, seed=step)
        trained.save(checkpoints_in(folder), step)
    return folder


@pytest.fixture
def folder(two_saved, tmp_path):
    return shutil.copytree(two_saved, tmp_path / "c")


def flipped(rng: random.Random):
    def flip(data: bytes) -> bytes:
        place = rng.randrange(len(data))
        return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]

    return flip


def test_checkpoint_damage_to_any_file_refused_by_name(folder):
    """Damage: emptied, halved, last byte removed, single bits flipped anywhere, deleted."""
    newest = folder / "step_000002"
    ways = {"empty": lambda data: b"", "half": lambda data: data[: len(data) // 2], "cut": lambda data: data[:-1]}
    ways |= {f"flip {seed}": flipped(random.Random(seed)) for seed in range(6)}
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    assert {"manifest.json", "recipe.json", ".metadata", "__0_0.distcp", "config.json"} <= {path.name for path in files}
    harmless = 0
    for path in files:
        name, before = str(path.relative_to(newest)), path.read_bytes()
        for way, damaged in (ways | {"remove": None}).items():
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged(before))
            try:
                checkpoints_in(folder).verify_latest()
            except DamagedCheckpoint as error:
                assert f"{newest} is damaged: {name} " in str(error), (name, way, error)
                assert "move the whole folder away: the run then resumes from the previous checkpoint" in str(error)
            else:  # white space in the manifest does not change its content
                assert name == "manifest.json" and way.startswith("flip"), (name, way)
                assert json.loads(path.read_bytes()) == json.loads(before), way
                harmless += 1
            path.write_bytes(before)
    assert harmless <= 6 and checkpoints_in(folder).verify_latest() == newest


def test_checkpoint_foreign_files_are_ignored(folder, source):
    """A file manager's file, a dangling link, tensors of an unknown rank. Listed files are still required."""
    trained, path = TrainedModel(source), folder / "step_000002"
    for name in (".DS_Store", "notes/of mine.txt", "state/__1_0.distcp", "state/._.metadata"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(b"x")
    (path / "elsewhere").symlink_to("nowhere")
    checkpoints = checkpoints_in(folder)
    assert checkpoints.verify_latest() == checkpoints.latest() == path
    assert trained.load(checkpoints, path)["step"] == 2
    (path / "state" / "__0_0.distcp").rename(path / "state" / "__2_0.distcp")
    assert checkpoints_in(folder).latest() == folder / "step_000001"
    with pytest.raises(DamagedCheckpoint, match="step_000002 is damaged: state/__0_0.distcp is missing"):
        checkpoints_in(folder).verify_latest()


def test_checkpoint_load_verifies_before_unpickling(folder, source):
    """Unpickling this metadata file would create another file."""
    trained, path = TrainedModel(source), folder / "step_000002"
    before = trained.tensors()
    (path / "state" / ".metadata").write_bytes(f"cos\nmkdir\n(V{folder}/unpickled\ntR.".encode())
    with pytest.raises(DamagedCheckpoint, match=r"state/.metadata has \d+ bytes instead of"):
        trained.load(checkpoints_in(folder), path)
    assert not (folder / "unpickled").exists()
    assert all(torch.equal(a, b) for a, b in zip(before, trained.tensors(), strict=True))


@pytest.mark.parametrize("name", ["manifest.json", "recipe.json"])
def test_checkpoint_missing_metadata_is_reported_as_damaged(folder, name):
    for step in (1, 2):
        (folder / f"step_{step:06d}" / name).unlink()
    with pytest.raises(DamagedCheckpoint, match=f"step_000002 is damaged: {name} is missing.*from a copy"):
        checkpoints_in(folder).verify_latest()
    assert sorted(path.name for path in folder.iterdir()) == ["step_000001", "step_000002"]
    (folder / "step_000003").mkdir()
    with pytest.raises(DamagedCheckpoint, match="step_000003 is damaged: manifest.json is missing"):
        checkpoints_in(folder).verify_latest()
    assert checkpoints_in(folder).latest() is None


def test_checkpoint_newest_moved_away_resumes_previous(folder, source):
    trained, newest = TrainedModel(source), folder / "step_000002"
    (newest / "recipe.json").write_text("{")
    newest.rename(folder / "damaged")
    path = checkpoints_in(folder).verify_latest()
    assert path == folder / "step_000001" and trained.load(checkpoints_in(folder), path)["step"] == 1
    trained.save(checkpoints_in(folder), 2)
    assert checkpoints_in(folder).verify_latest() == newest and (folder / "damaged").exists()


def test_checkpoint_of_other_format_is_not_called_damaged(folder, monkeypatch):
    monkeypatch.setattr(manifest, "FORMAT_VERSION", manifest.FORMAT_VERSION + 1)
    with pytest.raises(ValueError, match="step_000002 cannot be resumed: manifest.json has format") as e:
        checkpoints_in(folder).verify_latest()
    assert not isinstance(e.value, DamagedCheckpoint)
    assert sorted(path.name for path in folder.iterdir()) == ["step_000001", "step_000002"]
    assert checkpoints_in(folder).latest() is None


def test_a_renamed_checkpoint_is_refused(folder):
    (folder / "step_000002").rename(folder / "step_000007")
    with pytest.raises(DamagedCheckpoint, match="step_000007 is damaged: .*step 2"):
        checkpoints_in(folder).verify_latest()


def test_checkpoint_names_sort_numerically_and_ignore_copies(folder):
    shutil.copytree(folder / "step_000002", folder / "step_000002_copy")
    (folder / "step_1000000").mkdir()
    (folder / "step_999999").mkdir()
    assert [path.name for path in checkpoints_in(folder).paths()][-2:] == ["step_999999", "step_1000000"]
    assert len(checkpoints_in(folder).paths()) == 4


@pytest.mark.parametrize(
    ("field", "fix"), [("run", "its own output_dir"), ("model", "set `model:` and"), ("base", "set model_dir to")]
)
def test_checkpoint_of_other_run_model_base_is_refused(folder, source, field, fix):
    ours = replace(MINE, **{field: "something else"})
    theirs = getattr(MINE, field)
    message = (
        f"step_000002 cannot be resumed: it belongs to another {field} .{theirs}; this run has something else.: .*{fix}"
    )
    for choose in (
        checkpoints_in(folder, ours).verify_latest,
        lambda: TrainedModel(source).load(checkpoints_in(folder, ours), folder / "step_000002"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            choose()
        assert not isinstance(error.value, DamagedCheckpoint) and str(error.value).count(" to another ") == 1
    (folder / "step_000002" / "state" / ".metadata").write_bytes(b"")  # refused before its files are read
    with pytest.raises(ValueError, match=message):
        checkpoints_in(folder, ours).verify_latest()


def test_the_fingerprint_of_weights(source, tmp_path):
    """Independent of folder and sharding of files; differs for other weights, names, shapes or dtypes."""
    fingerprint = source.fingerprint()
    tensors = load_file(source.path / "model.safetensors")
    shutil.copyfile(source.path / "config.json", tmp_path / "config.json")

    def of(*parts):
        for file in tmp_path.glob("*.safetensors"):
            file.unlink()
        for i, part in enumerate(parts):
            save_file(part, tmp_path / f"model-{i}.safetensors", metadata={"format": "pt", "part": str(i)})
        return HFModel(tmp_path).fingerprint()

    names = sorted(tensors)
    assert of(tensors) == fingerprint
    assert of(*({name: tensors[name]} for name in reversed(names))) == fingerprint
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"]}  # tied weights: some writers save them twice
    assert of(tensors, head) == fingerprint
    assert make_source(tmp_path / "other", seed=2).fingerprint() != fingerprint
    bf16 = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert of(bf16) != fingerprint
    norm, wide = "model.norm.weight", "model.embed_tokens.weight"
    assert of({**tensors, norm: tensors[norm] * 1.001}) != fingerprint
    assert of({**tensors, wide: tensors[wide] + 1e-6}) != fingerprint
    ends = tensors[wide].clone()
    ends[-1, -1] += 1
    assert of({**tensors, wide: ends}) != fingerprint
    assert of({name: t for name, t in tensors.items() if name != norm}) != fingerprint
    assert of({name.replace("norm", "nrom"): t for name, t in tensors.items()}) != fingerprint
    assert of({**tensors, wide: tensors[wide].reshape(-1, 2)}) != fingerprint


def test_the_fingerprint_reads_little(source, tmp_path, monkeypatch):
    """Eight gigabytes in a sparse file."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [2 << 30], "data_offsets": [0, 8 << 30]}}).encode()
    shutil.copyfile(source.path / "config.json", tmp_path / "config.json")
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (8 << 30))
    read, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, place: read.append(size) or pread(fd, size, place))
    assert "1 tensors of 8,589,934,592 bytes" in HFModel(tmp_path).fingerprint()
    assert 0 < sum(read) < 1 << 20


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_base_model_is_named(source, tmp_path, keep):
    shutil.copyfile(source.path / "config.json", tmp_path / "config.json")
    (tmp_path / "model.safetensors").write_bytes((source.path / "model.safetensors").read_bytes()[:keep])
    with pytest.raises(ValueError, match="model.safetensors .*Fix: copy (it|the file) again from"):
        HFModel(tmp_path).fingerprint()


def test_checkpoint_identity_refusal_names_difference(source, tmp_path):
    mine = identify("r", source, make_model(source))
    assert mine == identify("r", source, make_model(source)) and mine.explain_difference(mine) is None
    assert mine.model.startswith("qwen2 of 2 layers, width 64, 26 tensors of ") and mine.base == source.fingerprint()

    wide = make_source(
        tmp_path / "wide",
        shape=ModelShape(**{**{f: getattr(SHAPE, f) for f in SHAPE.__slots__}, "intermediate_size": 64}),
    )
    refusal = mine.explain_difference(identify("r", wide, make_model(wide)))
    assert "another model (qwen2" in refusal and "another base (26 tensors" in refusal and "another run" not in refusal

    low = AdapterSpec(4, 8.0, 0.0, ("q_proj", "v_proj"), dora=False, quantized=False)
    texts = [manifest.model_signature(source, make_model(source), spec) for spec in (None, low, replace(low, rank=8))]
    assert len(set(texts)) == 3 and "adapter rank=4 alpha=8.0 dropout=0.0 targets=q_proj+v_proj" in texts[1]

    # Adapters of models without fused layers keep the signature that earlier versions wrote.
    assert "fused" not in texts[1] and "fused" in manifest.model_signature(
        source, make_model(source), replace(low, fused={"qkv_proj": 2})
    )

    config = json.loads((source.path / "config.json").read_text())
    texts = set()
    for change in ({}, {"transformers_version": "9", "_name_or_path": "x"}, {"rope_theta": 5.0}):
        shutil.copytree(source.path, tmp_path / "copy", dirs_exist_ok=True)
        (tmp_path / "copy" / "config.json").write_text(json.dumps(config | change))
        texts.add(manifest.model_signature(HFModel(tmp_path / "copy"), make_model(source)))
    assert len(texts) == 2, "who wrote config.json makes no difference, what it says of the model does"


def test_manifest_write_read_round_trips(tmp_path):
    manifest = Manifest(3, 0.25, Identity("a", "ü", "c"), {"state/x": (5, "ab"), "y": (0, "cd")})
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest


def test_manifest_of_earlier_commit_is_read(tmp_path):
    written = Manifest(3, 0.25, Identity("a", "b", "c"), {"y": (0, "cd")})
    written.write(tmp_path)
    content = json.loads((tmp_path / "manifest.json").read_text())["content"]
    content["accuracy"] = content.pop("eval_reward")
    document = {"content": content, "sha256": manifest._digest_of(content)}
    (tmp_path / "manifest.json").write_text(json.dumps(document))
    assert Manifest.read(tmp_path) == written


def test_adapters_with_their_merged_model(source, tmp_path):
    """The checkpoint holds the adapters. The merged model in its subfolder is verified, too."""
    adapter = {"lora_attn_modules": ["q_proj", "v_proj"], "lora_rank": 4, "lora_alpha": 8.0}
    make = partial(from_config, str(source.path), **adapter)
    spec = adapter_spec(build_on_meta(make), source, adapter)
    mine = identify("r", source, build_on_meta(make), spec)
    assert "adapter rank=4 alpha=8.0" in mine.model and " 8 tensors of " in mine.model
    assert mine.explain_difference(identify("r", source, make_model(source))).startswith(
        "it belongs to another model (qwen2"
    )

    model = build_policy(make, source, torch.device("cpu"), torch.float32).model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    export = partial(export_adapter, model=model, hf_model=source, adapter=spec, merged_dtype=torch.bfloat16)
    checkpoints = checkpoints_in(tmp_path / "c", mine)
    checkpoints.save(1, model, optimizer, export, {})
    path = checkpoints.verify_latest()
    assert checkpoints.load(path, model, optimizer)["step"] == 1
    assert "merged/model-00001-of-00001.safetensors" in Manifest.read(path).files
    (path / "merged" / "model-00001-of-00001.safetensors").write_bytes(b"")
    with pytest.raises(DamagedCheckpoint, match="merged/model-00001-of-00001.safetensors has 0 bytes"):
        checkpoints.verify_latest()
