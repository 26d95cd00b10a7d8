"""Checkpoints are atomic, and a resumed optimizer takes the same steps as an uninterrupted one."""

import errno
import json
import logging
import os
import resource
import shutil
import subprocess
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint.filesystem as dcp_files
from torchtune.models.qwen2 import qwen2

from helpers.checkpoint_runs import MINE, SHAPE, TrainedModel, build, checkpoints_in, fork, make_source
from torchtune_ext.policy import from_config
from torchtune_ext.policy.builder import build_policy
from torchtune_ext.policy.hf_model import HFModel, load_weights
from torchtune_ext.policy.lora import AdapterSpec
from torchtune_ext.policy.scratch import ModelShape, make_tokenizer, write_model
from torchtune_ext.run import files
from torchtune_ext.run.errors import RunFailure, UsageFileError
from torchtune_ext.run.files import remove_leftovers
from torchtune_ext.training import checkpoints as checkpointing
from torchtune_ext.training import collectives, export, manifest
from torchtune_ext.training.checkpoints import CheckpointConfig
from torchtune_ext.training.export import save_model
from torchtune_ext.training.learner import ScheduleConfig, make_schedule


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_source(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture
def trained(source):
    trained = TrainedModel(source)
    trained.train(1, seed=0)
    return trained


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_checkpoint_resume_equals_uninterrupted_training(tmp_path, source, trained):
    trained.train(3, seed=1)
    began = time.perf_counter()
    assert 0 < trained.save(checkpoints_in(tmp_path / "c"), 3) < time.perf_counter() - began
    torch.manual_seed(5)
    rng = torch.get_rng_state()
    trained.train(3, seed=2)

    other, checkpoints = TrainedModel(source), checkpoints_in(tmp_path / "c")
    recipe = other.load(checkpoints, checkpoints.verify_latest())
    assert recipe["step"] == 3 and recipe["cursor"] == 21
    other.train(3, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(trained.tensors(), other.tensors(), strict=True))
    assert not torch.equal(rng, torch.get_rng_state())


def test_checkpoint_files_are_synced_before_it_appears(tmp_path, trained, monkeypatch):
    synced, appeared, final = set(), [], tmp_path / "c" / "step_000001"
    monkeypatch.setattr(manifest, "fsync_path", lambda path: (appeared.append(final.exists()), synced.add(path.name)))
    trained.save(checkpoints_in(tmp_path / "c"), 1)
    written = {path.name for path in final.rglob("*") if path.is_file()} - {manifest.MANIFEST_NAME}
    assert synced == written and any(name.endswith(".distcp") for name in written) and not any(appeared)


def test_checkpoint_before_first_update_changes_nothing(tmp_path, source):
    plain, other = TrainedModel(source), TrainedModel(source)
    other.save(checkpoints_in(tmp_path / "c"), 1)
    assert not other.optimizer.state
    other.load(checkpoints_in(tmp_path / "c"), tmp_path / "c" / "step_000001")
    plain.train(2, seed=1)
    other.train(2, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(plain.tensors(), other.tensors(), strict=True))


def test_checkpoint_without_optimizer_state_restarts_optimizer(tmp_path, source, trained, capsys):
    """Weights equal the checkpoint, and later updates equal a new optimizer's, bit for bit."""
    trained.train(3, seed=1)
    checkpoints = checkpoints_in(tmp_path / "c", save_optimizer=False)
    trained.save(checkpoints, 3)
    other, fresh = TrainedModel(source), TrainedModel(source)
    # Moments of an earlier optimizer do not belong to the weights of the checkpoint.
    other.train(1, seed=9)
    recipe = other.load(checkpoints_in(tmp_path / "c"), checkpoints.verify_latest())
    assert recipe["step"] == 3 and not other.optimizer.state
    output = capsys.readouterr().out
    assert "step_000003 was saved without the optimizer state" in output and "moments start from zero" in output
    fresh.model.load_state_dict(trained.model.state_dict())
    for run in (other, fresh):
        run.train(2, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(other.tensors(), fresh.tensors(), strict=True))
    trained.save(checkpoints_in(tmp_path / "whole"), 3)
    states = [sum(f.stat().st_size for f in path.rglob("*.distcp")) for path in tmp_path.glob("*/step_000003/state")]
    # One third of the bytes is weights, two thirds are moments.
    assert min(states) < 0.5 * max(states)


def test_a_checkpoint_is_a_model_directory(tmp_path, source, trained):
    transformers = pytest.importorskip("transformers")
    checkpoints = checkpoints_in(tmp_path / "c")
    trained.save(checkpoints, 1)
    path = checkpoints.latest()
    ids = torch.arange(20)[None]
    hf = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    again = qwen2(vocab_size=hf.config.vocab_size, num_layers=2, num_heads=2, num_kv_heads=1, embed_dim=64, intermediate_dim=48,
                  max_seq_len=64, norm_eps=1e-6, rope_base=10000.0, tie_word_embeddings=True)  # fmt: skip
    load_weights(again, HFModel(path))
    with torch.no_grad():
        assert (hf(ids).logits - again(ids)).abs().max() < 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert tokenizer.decode(tokenizer.encode("Mrs. White, 11:30 PM ü")) == "Mrs. White, 11:30 PM ü"


def test_model_from_checkpoint_contains_no_run_state(tmp_path, source, trained):
    checkpoints = checkpoints_in(tmp_path / "c")
    trained.save(checkpoints, 1)
    from_checkpoint = HFModel(checkpoints.latest())
    folder = save_model(tmp_path / "again", trained.model, from_checkpoint, torch.float32)
    assert "config.json" in names(folder) and not {"manifest.json", "recipe.json", "state"} & set(names(folder))


def test_large_models_are_sharded(tmp_path, source, trained, monkeypatch):
    monkeypatch.setattr(export, "SHARD_BYTES", 20_000)
    checkpoints = checkpoints_in(tmp_path / "c")
    trained.save(checkpoints, 1)
    path = checkpoints.verify_latest()
    files = sorted(path.glob("*.safetensors"))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert len(files) > 2 and set(index["weight_map"].values()) == {f.name for f in files}
    again = build(HFModel(path))
    assert all(torch.equal(a, b) for a, b in zip(trained.model.parameters(), again.parameters(), strict=True))


def test_last_and_best_are_kept(tmp_path, trained):
    checkpoints = checkpoints_in(tmp_path / "c", keep_last=2)
    for step, eval_reward in ((1, 0.1), (2, 0.9), (3, 0.2), (4, None), (5, 0.3)):
        trained.save(checkpoints, step, eval_reward)
    assert names(tmp_path / "c") == ["step_000002", "step_000004", "step_000005"]


def test_checkpoint_lower_keep_last_prunes_before_writing(tmp_path, trained):
    """On a full disk the next checkpoint could otherwise not be written."""
    checkpoints = checkpoints_in(tmp_path / "c", keep_last=5)
    for step in (1, 2, 3):
        trained.save(checkpoints, step)

    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        checkpoints_in(tmp_path / "c", keep_last=1).save(4, trained.model, trained.optimizer, full, {})
    assert names(tmp_path / "c") == ["step_000003"]


def test_checkpoint_best_returns_folder_and_eval_reward(tmp_path, trained):
    checkpoints = checkpoints_in(tmp_path / "c", keep_last=5)
    assert checkpoints.best() is None
    for step, eval_reward in ((1, None), (2, 0.9), (3, 0.2)):
        trained.save(checkpoints, step, eval_reward)
    assert checkpoints.best() == (tmp_path / "c" / "step_000002", 0.9)


def test_checkpoint_pruning_ignores_other_runs_and_damaged(tmp_path, trained):
    """Later steps of an older run do not prune this run's checkpoints and are not pruned."""
    theirs = checkpoints_in(tmp_path / "c", replace(MINE, run="run-b"), keep_last=1)
    trained.save(theirs, 100, eval_reward=0.9)
    mine = checkpoints_in(tmp_path / "c", keep_last=1)
    trained.save(mine, 1)
    trained.save(mine, 2)
    (tmp_path / "c" / "step_000002" / "recipe.json").unlink()
    trained.save(mine, 3)
    assert names(tmp_path / "c") == ["step_000002", "step_000003", "step_000100"]


def test_saving_the_same_step_again_replaces_it(tmp_path, trained):
    checkpoints = checkpoints_in(tmp_path / "c", keep_last=1)
    trained.save(checkpoints, 1)
    trained.train(1, seed=1)
    trained.save(checkpoints, 1)
    assert names(tmp_path / "c") == ["step_000001"]
    other = TrainedModel(trained.source)
    other.load(checkpoints, checkpoints.verify_latest())
    assert all(torch.equal(a, b) for a, b in zip(trained.tensors(), other.tensors(), strict=True))


def test_checkpoint_failed_deletion_is_a_warning(tmp_path, trained, monkeypatch, caplog):
    checkpoints = checkpoints_in(tmp_path / "c", keep_last=1)
    trained.save(checkpoints, 1)

    def refuse(path, *args, **kwargs):
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(shutil, "rmtree", refuse)
        trained.save(checkpoints, 2)
    assert "Device or resource busy" in caplog.text
    assert names(tmp_path / "c") == [".pruned_step_000001", "step_000002"]
    assert remove_leftovers(tmp_path / "c") == [tmp_path / "c" / ".pruned_step_000001"] and names(tmp_path / "c") == [
        "step_000002"
    ]


def test_checkpoint_cleanup_removes_only_leftovers_of_killed_run(tmp_path, trained):
    checkpoints = checkpoints_in(tmp_path / "c")
    assert remove_leftovers(tmp_path / "c") == [] and checkpoints.verify_latest() is None
    trained.save(checkpoints, 1)
    for stray in (".partial_step_000002", ".pruned_step_000000"):
        shutil.copytree(tmp_path / "c" / "step_000001", tmp_path / "c" / stray)
    (tmp_path / "c" / ".notes.1.tmp").write_text("half")
    (tmp_path / "c" / "damaged_step_000000").mkdir()
    (tmp_path / "c" / "notes").write_text("mine")
    assert checkpoints.verify_latest() == tmp_path / "c" / "step_000001"
    assert len(remove_leftovers(tmp_path / "c")) == 3
    assert names(tmp_path / "c") == ["damaged_step_000000", "notes", "step_000001"]


def raise_disk_full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def raise_interrupt(*args, **kwargs):
    raise KeyboardInterrupt


PHASES = [  # the first function of each stage of a save, including DCP's
    (export, "_copy_files"),
    (export, "save_file"),
    (checkpointing, "get_state_dict"),
    (dcp_files, "_write_item"),
    (dcp_files.pickle, "dump"),
    (checkpointing, "flush_and_hash"),
    (files, "fsync_path"),
]


@pytest.mark.parametrize("where, name", PHASES, ids=[name for _, name in PHASES])
def test_a_full_disk_leaves_the_last_checkpoint_alone(tmp_path, trained, monkeypatch, where, name):
    checkpoints = checkpoints_in(tmp_path / "c")
    trained.save(checkpoints, 1)
    monkeypatch.setattr(where, name, raise_disk_full)
    with pytest.raises(OSError, match="step_000002 was not saved: .*No space left.*step_000001"):
        trained.save(checkpoints, 2)
    assert names(tmp_path / "c") == ["step_000001"]


@pytest.mark.parametrize("where, name", PHASES, ids=[name for _, name in PHASES])
def test_checkpoint_interrupted_save_leaves_nothing_and_reraises(tmp_path, trained, monkeypatch, where, name):
    checkpoints = checkpoints_in(tmp_path / "c")
    monkeypatch.setattr(where, name, raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        trained.save(checkpoints, 2)
    assert names(tmp_path / "c") == []


def test_checkpoint_lost_rank_is_not_full_disk_error(tmp_path, trained, monkeypatch):
    def reset(*_, **__):
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(checkpointing, "get_state_dict", reset)
    with pytest.raises(RunFailure, match="step_000001 was not saved: RuntimeError: Connection reset by peer$"):
        trained.save(checkpoints_in(tmp_path / "c"), 1)


def test_checkpoint_disk_error_ignores_exception_being_handled(tmp_path, trained, monkeypatch):
    monkeypatch.setattr(dcp_files, "_write_item", raise_disk_full)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(OSError, match="No space left on device"):
            trained.save(checkpoints_in(tmp_path / "c"), 2)


@pytest.mark.parametrize("room", [30_000, 150_000, 300_000, 500_000, 800_000, 1_000_000])
def test_checkpoint_full_disk_keeps_previous_checkpoint(tmp_path, trained, room):
    """On a small file system another stage of the save fails, depending on the free bytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root may mount a small file system; the test with file-size limits stands for it")
    try:
        checkpoints = checkpoints_in(disk / "c")
        trained.save(checkpoints, 1)
        free = shutil.disk_usage(disk).free
        (disk / "fill").write_bytes(bytes(free - room))
        with pytest.raises(OSError, match="step_000002 was not saved: .*No space left on device.*step_000001"):
            trained.save(checkpoints, 2)
        assert names(disk / "c") == ["step_000001"] and checkpoints.verify_latest() == disk / "c" / "step_000001"
        (disk / "fill").unlink()
        trained.save(checkpoints, 2)
        assert checkpoints.verify_latest() == disk / "c" / "step_000002"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_files_that_may_not_grow(tmp_path, trained):
    """With a limit on file sizes, which needs no privileges: once for each size of a checkpoint's files."""
    checkpoints = checkpoints_in(tmp_path / "c")
    trained.save(checkpoints, 1)
    sizes = sorted({path.stat().st_size for path in checkpoints.latest().rglob("*") if path.is_file()})
    assert len(sizes) >= 6

    def save_with_limits():
        for size in sizes:  # the first file of this size fails
            resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, resource.RLIM_INFINITY))
            with pytest.raises(OSError, match="step_000002 was not saved: .*File too large.*Free space"):
                trained.save(checkpoints, 2)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert names(tmp_path / "c") == ["step_000001"], size

    # In a separate process, because the limit applies to all its files.
    child = fork(save_with_limits, tmp_path / "errors")
    _, status = os.waitpid(child, 0)
    assert status == 0, (tmp_path / "errors").read_text()
    assert checkpoints.verify_latest() == tmp_path / "c" / "step_000001"


def test_files_follow_the_umask(tmp_path, trained):
    adapter = AdapterSpec(4, 8.0, 0.0, ("q_proj",), dora=False, quantized=False)
    for umask in (0o022, 0o077, 0o007):
        before = os.umask(umask)
        try:
            checkpoints = checkpoints_in(tmp_path / f"{umask}")
            trained.save(checkpoints, 1)
            (tmp_path / f"{umask}" / "adapter").mkdir()
            export.export_adapter(tmp_path / f"{umask}" / "adapter", trained.model, trained.source, adapter)
            save_model(tmp_path / f"{umask}" / "model", trained.model, trained.source, torch.float32)
        finally:
            os.umask(before)
        paths = list((tmp_path / f"{umask}").rglob("*"))
        assert len(paths) > 20
        for path in paths:
            assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask, path


def test_saved_model_is_replaced_only_by_complete_one(tmp_path, source, trained, monkeypatch):
    folder = save_model(tmp_path / "out" / "model", trained.model, source, torch.float32)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    trained.train(1, seed=3)
    for raises, expected in ((raise_disk_full, OSError), (raise_interrupt, KeyboardInterrupt)):
        for where, name in ((export, "save_file"), (files, "fsync_path")):
            with monkeypatch.context() as patch:
                patch.setattr(where, name, raises)
                with pytest.raises(
                    expected, match=None if expected is KeyboardInterrupt else "not saved: .*No space left"
                ):
                    save_model(folder, trained.model, source, torch.float32)
            assert names(tmp_path / "out") == ["model"]
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    save_model(folder, trained.model, source, torch.float32)
    assert names(tmp_path / "out") == ["model"]
    assert all(
        torch.equal(a, b) for a, b in zip(trained.model.parameters(), build(HFModel(folder)).parameters(), strict=True)
    )


@pytest.mark.parametrize(
    "error, kind, message",
    [
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            RunFailure,
            "step_000001 could not be loaded: OutOfMemoryError: CUDA out of",
        ),
        (
            RuntimeError("Timed out waiting 1ms for recv"),
            RunFailure,
            "could not be loaded: RuntimeError: Timed out waiting",
        ),
        (
            OSError(5, "Input/output error"),
            UsageFileError,
            "could not be loaded: .*Input/output error.* check the disk",
        ),
        (TypeError("a bug"), TypeError, "^a bug$"),
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
    ],
)
def test_loading_error_does_not_blame_the_settings(tmp_path, trained, monkeypatch, error, kind, message):
    checkpoints = checkpoints_in(tmp_path / "c")
    trained.save(checkpoints, 1)

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(checkpointing.dcp, "load", fail)
    with pytest.raises(kind, match=message) as caught:
        trained.load(checkpoints, checkpoints.verify_latest())
    assert "optimizer" not in str(caught.value)


@pytest.mark.parametrize(
    "error, kind", [(OSError("full"), UsageFileError), (torch.OutOfMemoryError("no memory"), RunFailure)]
)
def test_together_error_of_other_rank_keeps_its_type(error, kind, monkeypatch):
    def fail():
        raise error

    sent = []
    monkeypatch.setattr(collectives, "all_gather", lambda value: sent.append(value) or [value])
    with pytest.raises(type(error)):
        collectives.run_on_all_ranks(fail)
    monkeypatch.setattr(collectives, "all_gather", lambda value: [None, sent[0]])
    with pytest.raises(kind, match=f"^rank 1: .*{error}$"):
        collectives.run_on_all_ranks(lambda: None)


def test_another_optimizer_is_named(tmp_path, source, trained):
    checkpoints = checkpoints_in(tmp_path / "c")
    model = build(source)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints.save(
        1, model, plain, partial(export.export_model, model=model, hf_model=source, dtype=torch.float32), {}
    )
    with pytest.raises(OSError, match="step_000001 could not be loaded: .*`optimizer:`"):
        trained.load(checkpoints, checkpoints.verify_latest())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop_grace_s": -1.0}, "checkpoints.stop_grace_s=-1.0"),
        ({"stop_grace_s": float("nan")}, "checkpoints.stop_grace_s=nan"),
    ],
)
def test_settings_that_cannot_be_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        CheckpointConfig(**settings)


def test_wrong_models_are_named(tmp_path, source):
    with pytest.raises(ValueError, match="no config.json"):
        HFModel(tmp_path)
    wide = ModelShape(**{**{f: getattr(SHAPE, f) for f in SHAPE.__slots__}, "intermediate_size": 64})
    write_model(tmp_path / "wide", make_tokenizer(["x\n"] * 9, ["y"], [], 300), wide, seed=1)
    with pytest.raises(ValueError, match="compare `model:` in the YAML"):
        build_policy(
            lambda: from_config(str(source.path)), HFModel(tmp_path / "wide"), torch.device("cpu"), torch.float32
        )


def test_schedule():
    factor = make_schedule(ScheduleConfig("cosine", 2), 10)
    assert [factor(update) for update in range(3)] == [0.5, 1.0, 1.0]
    assert factor(6) == pytest.approx(0.5) and factor(10) == pytest.approx(0.0)
    with pytest.raises(ValueError, match="schedule.decay='step'"):
        ScheduleConfig("step", 0)
    with pytest.raises(ValueError, match="schedule.warmup=11"):
        ScheduleConfig("linear", 11).require_fits(10)
