"""Checkpoints of two ranks: one verdict on both, whatever fails on one of them, and they load on one rank, too."""

import pytest

from helpers.checkpoint_runs import TrainedModel, checkpoints_in, make_source
from helpers.forked_runs import forked_ranks

SCRIPT = """
import resource
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint.filesystem as dcp_files
from helpers.checkpoint_runs import MINE, HFModel, TrainedModel, checkpoints_in, make_model
from torch.distributed.tensor import DTensor

from torchtune_ext.policy.builder import build_policy
from torchtune_ext.run import files
from torchtune_ext.training import checkpoints as checkpointing
from torchtune_ext.training import export
from torchtune_ext.training.distributed import close_ranks, init_ranks
from torchtune_ext.training.export import save_model
from torchtune_ext.training.manifest import DamagedCheckpoint

folder = Path("c")


class Shared(TrainedModel):
    def __init__(self, source, ranks):
        self.source = source
        self.model = build_policy(partial(make_model, source), source, ranks.device, torch.float32, ranks.world_size).model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def whole(self):
        return [t.full_tensor() if isinstance(t, DTensor) else t for t in self.tensors()]


def refused(kind, action, *parts):
    try:
        action()
    except BaseException as error:
        assert isinstance(error, kind), repr(error)
        for part in parts:
            assert part in str(error), (part, error)
    else:
        raise AssertionError("nothing was raised")
    if torch.distributed.get_rank() == 0:  # which removes what is left, before it raises
        assert not list(folder.glob(".*")), list(folder.glob(".*"))
    torch.distributed.barrier()


def fail(error):
    def raise_it(*args, **kwargs):
        raise error
    return raise_it


def on(rank, ranks, module, name, error):
    # Puts a function that fails into one rank; returns what puts the old one back.
    old = getattr(module, name)
    if ranks.rank == rank:
        setattr(module, name, fail(error))
    return lambda: setattr(module, name, old)


def main(ranks):
    trained = Shared(HFModel("model"), ranks)
    trained.train(2, seed=1)
    mine = MINE if ranks.is_main else None  # the run's id is known to rank 0 alone
    chosen = partial(checkpoints_in, folder, mine)
    for step in (1, 2):
        assert trained.save(chosen(), step) > 0
    assert chosen().verify_latest() == folder / "step_000002"
    assert chosen().latest() == folder / "step_000002"

    full = OSError(28, "No space left on device")
    for rank, module, name in (
        (0, export, "_copy_files"), (0, export, "save_file"), (0, checkpointing, "make_empty_folder"),
        (0, dcp_files, "_write_item"), (1, dcp_files, "_write_item"), (1, checkpointing, "get_state_dict"),
        (1, checkpointing, "flush_and_hash"), (0, files, "fsync_path"),
    ):  # fmt: skip
        back = on(rank, ranks, module, name, full)
        refused(OSError, lambda: trained.save(chosen(), 3), "step_000003 was not saved", "No space left on device", "step_000002")
        back()
    if ranks.rank == 1:  # the zip writer hides the error of the disk behind one of its own, which does not travel
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    refused(OSError, lambda: trained.save(chosen(), 3), "step_000003 was not saved", "File too large")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    back = on(0, ranks, export, "save_file", full)
    refused(OSError, lambda: save_model(Path("new"), trained.model, trained.source, torch.float32), "No space")
    assert not Path("new").exists()
    back()
    back = on(1, ranks, dcp_files, "_write_item", KeyboardInterrupt())
    refused(KeyboardInterrupt, lambda: trained.save(chosen(), 3))
    back()

    other = replace(MINE, run="run-b") if ranks.is_main else None
    refused(ValueError, checkpoints_in(folder, other).verify_latest, "another run (run-a; this run has run-b)")

    shard = folder / "step_000002" / "state" / "__1_0.distcp"
    if ranks.is_main:
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    torch.distributed.barrier()
    parts = "step_000002 is damaged: state/__1_0.distcp does not match its checksum", "move the whole folder away"
    refused(DamagedCheckpoint, chosen().verify_latest, *parts)
    refused(DamagedCheckpoint, lambda: trained.load(chosen(), folder / "step_000002"), *parts[:1])
    if ranks.is_main:
        (folder / "step_000002").rename(folder / "damaged")
    torch.distributed.barrier()
    checkpoints = chosen()
    path = checkpoints.verify_latest()
    assert path == folder / "step_000001", path
    before = trained.whole()
    trained.train(1, seed=2)
    assert trained.load(checkpoints, path)["step"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, trained.whole(), strict=True))
    if ranks.is_main:
        torch.save(before, "before.pt")
    print("both agree")


ranks = init_ranks("cpu")
main(ranks)
close_ranks()
"""


@pytest.mark.slow
def test_two_ranks_come_to_one_verdict(tmp_path):
    source = make_source(tmp_path / "model")
    (tmp_path / "ranks.py").write_text(SCRIPT)
    assert forked_ranks(tmp_path, "ranks.py", ranks=2).count("both agree") == 2

    import torch

    alone, checkpoints = TrainedModel(source), checkpoints_in(tmp_path / "c")
    assert alone.load(checkpoints, checkpoints.verify_latest())["step"] == 1
    want = torch.load(tmp_path / "before.pt")
    assert all(torch.equal(a, b) for a, b in zip(want, alone.tensors(), strict=True))
