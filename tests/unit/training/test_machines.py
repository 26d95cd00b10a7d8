"""Ranks on several machines, simulated by processes.

Folders that not all ranks see, different weights, control messages without the GPU's backend, and
invalid settings of ranks.
"""

import ast
import json
import math
import os
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torchtune import training

from helpers.checkpoint_runs import fork
from torchtune_ext.policy.builder import _mesh
from torchtune_ext.run import process_env
from torchtune_ext.run.nvidia import driver_version
from torchtune_ext.training import distributed, machines
from torchtune_ext.training.buckets import Accumulator
from torchtune_ext.training.collectives import MainRankFailure, all_gather, announce_main_failure
from torchtune_ext.training.distributed import (
    Ranks,
    RanksConfig,
    close_ranks,
    init_ranks,
    local_device,
)

HOST = socket.gethostname()
FIRST, SECOND = f"rank 0 on {HOST} (torchrun 0)", f"ranks 1, 2 on {HOST} (torchrun 1)"


@pytest.fixture
def across(tmp_path, monkeypatch):
    """Runs an action on three ranks: one on the first machine, two on the second.

    Each machine has its own working directory. Returns the action's result on each rank.
    """
    monkeypatch.setattr(machines, "VISIBILITY_TIMEOUT_S", 0.5)
    for machine in (0, 1):
        (tmp_path / f"m{machine}").mkdir()

    def run(action):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]

        def child(rank, machine):
            os.chdir(tmp_path / f"m{machine}")
            os.environ.update(
                RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GROUP_RANK=str(machine)
            )
            os.environ.pop("TORCHELASTIC_RUN_ID", None)
            (tmp_path / f"returned{rank}").write_text(json.dumps(action()))
            close_ranks()

        children = [fork(lambda r=r, m=m: child(r, m), tmp_path / f"failed{r}") for r, m in enumerate((0, 1, 1))]
        ended = [os.waitpid(pid, 0)[1] for pid in children]
        failed = [path.read_text() for path in tmp_path.glob("failed*")]
        assert not any(ended), "\n".join(failed)
        return [json.loads((tmp_path / f"returned{rank}").read_text()) for rank in range(3)]

    return run


def test_init_ranks_shared_folder_is_left_unchanged(across, tmp_path):
    (tmp_path / "shared").mkdir()
    hosts = [f"{HOST} (torchrun 0)", f"{HOST} (torchrun 1)", f"{HOST} (torchrun 1)"]
    output_dir = str(tmp_path / "shared" / "runs" / "a")
    assert across(lambda: init_ranks("cpu", output_dir=output_dir).hosts) == [hosts] * 3
    assert not list((tmp_path / "shared").iterdir()), "no mark, and no folder of a run that has not begun"


def test_init_ranks_unshared_folder_named_on_every_rank(across, tmp_path):
    (tmp_path / "file").touch()

    def action():
        hosts, messages = init_ranks("cpu").hosts, []
        # The first path is relative, and each machine has its own working directory.
        for output_dir in ("runs/a", str(tmp_path / "file" / "a"), str(tmp_path / "run")):
            try:
                machines.require_shared_folder(hosts, output_dir)
            except ValueError as error:
                messages.append(str(error))
        return messages

    messages, *others = across(action)
    unseen, unmade = messages
    assert others == [messages] * 2
    there = (tmp_path / "m0").resolve()
    assert unseen.startswith(f"output_dir=runs/a: {SECOND} cannot see what {FIRST} writes there ({there})")
    assert "docs/how_to/multi_gpu.md" in unseen and "cannot be created or written: Not a directory" in unmade
    assert not any(list((tmp_path / machine).iterdir()) for machine in ("m0", "m1"))


def test_ranks_control_messages_work_without_gpu_backend(across, monkeypatch, tmp_path):
    """torch's fake backend replaces NCCL and delivers nothing: all received data came over gloo."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    monkeypatch.setattr(training, "get_distributed_backend", lambda kind, offload_ops_to_cpu: "cuda:fake,cpu:gloo")

    def action():
        ranks = init_ranks("cpu", output_dir=str(tmp_path / "run"))
        # The rank assumes that it computes on a GPU.
        ranks = Ranks(ranks.rank, 3, torch.device("cuda", 0), ranks.hosts)
        results = [
            ranks.broadcast({"rank": ranks.rank}),
            ranks.any(ranks.rank == 2),
            ranks.any(False),
            all_gather(ranks.rank),
        ]
        accumulator = Accumulator(torch.device("cpu"))
        accumulator.add_max("largest", torch.tensor([float(ranks.rank)]))
        results.append(accumulator.reduce())
        results.append(ranks.scatter([[10, 11, 12, 13, 14, 15], []] if ranks.is_main else []))
        dist.barrier()
        return results

    shares = [[10, 13], []], [[11, 14], []], [[12, 15], []]
    assert across(action) == [[{"rank": 0}, True, False, [0, 1, 2], {"largest": 2.0}, share] for share in shares]


@pytest.mark.parametrize("rank_with_nan", [None, 0, 1, 2])
def test_accumulator_reduces_metrics_over_ranks(across, rank_with_nan):
    def action():
        ranks = init_ranks("cpu")
        accumulator = Accumulator(ranks.device)
        accumulator.add_sum("total", torch.tensor(1.0 + ranks.rank))
        # Rank 2 has only empty rows.
        values_L = torch.full((4 * (2 - ranks.rank),), float(-1 - ranks.rank))
        buckets_2L = torch.tensor([[0], [6 + ranks.rank]]).expand(2, len(values_L))
        accumulator.add_labels(buckets_2L)
        accumulator.add_mean("mean", values_L)
        accumulator.add_max("largest", values_L)
        accumulator.add_bucketed("bucketed", values_L, buckets_2L)
        # A metric of a user's loss may occur on one rank only.
        if ranks.rank == 1:
            accumulator.add_mean("some", 3 * values_L)
            accumulator.add_max("some_largest", values_L * torch.inf)
        if rank_with_nan is not None:
            accumulator.add_max("broken", torch.tensor([torch.nan if ranks.rank == rank_with_nan else ranks.rank]))
        return {name: str(value) for name, value in accumulator.reduce().items()}

    metrics = {
        "mean": -16 / 12,
        "some": -2.0,
        "largest": -1.0,
        "some_largest": -math.inf,
        "total": 6.0,
        "bucketed_at_0": -16 / 12,
        "bucketed_staleness_0": -1.0,
        "bucketed_staleness_1": -2.0,
    }
    if rank_with_nan is not None:
        metrics["broken"] = math.nan
    assert across(action) == [{name: str(float(value)) for name, value in metrics.items()}] * 3


class Parcel:
    """Counts the objects that this process has unpickled."""

    unpickled = 0

    def __setstate__(self, state):
        Parcel.unpickled += 1


def test_scatter_sends_only_own_share_to_rank(across):
    def action():
        ranks = init_ranks("cpu")
        parcels = [Parcel() for _ in range(6)]
        for parcel in parcels:
            parcel.content = 1  # without state, pickle would not call __setstate__
        (share,) = ranks.scatter([parcels])
        return [len(share), Parcel.unpickled]

    assert across(action) == [[2, 2]] * 3


def test_scatter_ends_when_rank_0_fails(across):
    def action():
        ranks = init_ranks("cpu")
        if ranks.is_main:
            announce_main_failure()  # as `run_recipe` does when packing raises
            return "failed"
        with pytest.raises(MainRankFailure):
            ranks.scatter([])
        return "ended"

    assert across(action) == ["failed", "ended", "ended"]


def test_mesh_groups_use_deadline_of_all_ranks(across):
    def action():
        ranks = init_ranks("cpu", RanksConfig(deadline_s=77.0, shard_within=1))
        mesh = _mesh(ranks.device, ranks.world_size, ranks.shards)
        assert mesh.mesh.tolist() == [[0], [1], [2]] and mesh.mesh_dim_names == ("replicate", "shard")
        groups = [dist.group.WORLD, mesh.get_group("replicate"), mesh.get_group("shard")]
        return [group._get_backend(ranks.device).options._timeout.total_seconds() for group in groups]

    assert across(action) == [[77.0] * 3] * 3, "also groups of a part of the ranks"


def test_ranks_sleep_while_rank_0_works(across, tmp_path):
    done = tmp_path / "done"

    def action():
        ranks = init_ranks("cpu")
        ranks.call_on_main(lambda: None)

        def make():
            time.sleep(1.0)
            done.touch()
            return 1.5

        busy = time.process_time()
        value = ranks.call_on_main(make)
        slept = time.process_time() - busy < 0.5

        def refuse():
            raise ValueError("the server holds another model")

        with pytest.raises(ValueError, match="the server holds another model"):
            ranks.call_on_main(refuse)
        return [value, done.exists(), slept]

    assert across(action) == [[1.5, True, True]] * 3, "what rank 0 says no to is said on every rank, too"


def test_ranks_wait_for_engine_together():
    """At the first weight sync the other ranks would wait in NCCL, which keeps GPU and core busy."""
    tree = ast.parse((Path(__file__).parents[3] / "recipes/grpo.py").read_text())

    def calls(root, name):
        named = [node for node in ast.walk(root) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        return [node for node in named if node.func.attr == name]

    together = [each for call in calls(tree, "call_on_main") for each in calls(call, "wait_ready")]
    assert together == calls(tree, "wait_ready") != []


@pytest.mark.parametrize(
    ("within", "ranks", "fix"),
    [
        (3, 4, "ranks.shard_within=3 does not divide the 4 ranks of this run: set it to 2 or 4, or start it on other"),
        (8, 12, "ranks.shard_within=8 does not divide the 12 ranks of this run: set it to 2 or 3 or 4 or 6 or 12"),
        (8, 1, "ranks.shard_within=8 does not divide the 1 rank of this run: leave it out"),
    ],
)
def test_init_ranks_indivisible_groups_refused_before_joining(within, ranks, fix, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("RANK", "0")
    # MASTER_ADDR is not set: the numbers are checked before any connection.
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match="does not divide") as error:
        init_ranks("cpu", RanksConfig(shard_within=within))
    assert str(error.value).startswith(fix)


def test_wrong_variables_of_a_launcher_are_named(monkeypatch, capsys):
    here = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    names = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *here)
    for values, says in (
        ({"RANK": "x"}, "RANK='x' in the environment must be a whole number, .*; `env -u RANK tune run"),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "http"}, "MASTER_PORT='http' in the environment must be a whole number"),
        (
            {"WORLD_SIZE": "2", "RANK": ""},
            "WORLD_SIZE=2 in the environment without RANK. .*`env -u WORLD_SIZE tune run",
        ),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE=2 in the environment without MASTER_ADDR"),
        ({"WORLD_SIZE": "2", "RANK": "2", **here}, "RANK=2 in the environment: expected less than WORLD_SIZE=2"),
    ):
        with monkeypatch.context() as patch:
            for name in names:
                patch.delenv(name, raising=False)
            for name, value in values.items():
                patch.setenv(name, value)
            with pytest.raises(ValueError, match=says):
                init_ranks("cpu")
    for values in (
        {"WORLD_SIZE": "", "RANK": ""},
        {"WORLD_SIZE": "1", "RANK": "3"},
        {"RANK": "3"},
        {"WORLD_SIZE": "0"},
    ):
        with monkeypatch.context() as patch:
            for name, value in values.items():
                patch.setenv(name, value)
            ranks = init_ranks("cpu")
            assert (ranks.rank, ranks.world_size, process_env.rank_and_world_size()) == (0, 1, (0, 1))
    assert not capsys.readouterr().out


def test_waiting_rank_without_torchrun_prints_where(monkeypatch, capsys):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(machines, "MAIN_NOTICE_S", 0.05)
    text = (
        "ranks: this is rank 0 of WORLD_SIZE=4 in the environment; it waits for the others at 10.0.0.1:29500, up to 600 s; "
        "to train on one process, run `env -u WORLD_SIZE tune run ...`\n"
    )
    for rank, wait, torchrun, says in (
        (0, 0.3, False, text),
        (0, 0, False, ""),
        (1, 0.3, False, ""),
        (0, 0.3, True, ""),
    ):
        if torchrun:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        with machines.rendezvous_progress(rank, 4, 600.0):
            time.sleep(wait)
        assert capsys.readouterr().out == says


def test_sharding_across_machines_warns_once(across, monkeypatch):
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    monkeypatch.setattr(training, "get_distributed_backend", lambda kind, offload_ops_to_cpu: "cuda:fake,cpu:gloo")
    monkeypatch.setattr(distributed, "local_device", torch.device)

    def action(device, shard_within):
        said = []
        monkeypatch.setattr(distributed, "print_text", said.append)
        init_ranks(device, RanksConfig(shard_within=shard_within))
        return said

    first, *others = across(lambda: action("cuda", None))
    assert (
        "3 ranks on 2 machines share one copy" in first[0] and "ranks.shard_within=1" in first[0] and others == [[], []]
    )
    assert across(lambda: action("cuda", 3)) == across(lambda: action("cpu", None)) == [[], [], []]


def test_ranks_shards_equal_shard_within():
    assert (
        Ranks(0, 16, torch.device("cpu"), shard_within=8).shards == 8 and Ranks(0, 16, torch.device("cpu")).shards == 16
    )


def test_local_device_too_many_ranks_reported_with_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    monkeypatch.setenv("RANK", "11")
    monkeypatch.setenv("WORLD_SIZE", "12")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_device("auto") == torch.device("cuda", 3) == taken[0]
    monkeypatch.setenv("LOCAL_RANK", "4")
    # A job launcher may set the variable for a single process.
    monkeypatch.delenv("WORLD_SIZE")
    assert local_device("auto") == torch.device("cuda", 0)
    monkeypatch.setenv("WORLD_SIZE", "12")
    with pytest.raises(ValueError, match=rf"rank 11 .*{HOST}, .*4 GPUs. Fix: start at most 4 ranks"):
        local_device("cuda")


def test_local_device_old_gpu_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    for device in ("auto", "cuda"):
        with pytest.raises(ValueError, match=r"^GPU 0 \(Tesla T4\) has compute capability 7.5; expected 8.0 .* Fix: "):
            local_device(device)
    assert local_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_local_device_unusable_driver_is_named(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(distributed, "gpu_count", lambda: 2)
    monkeypatch.setattr(distributed, "driver_fix", lambda: "install NVIDIA driver 580 or later")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(
        ValueError, match=rf"^device='{device}': torch .*CUDA 13.0\) cannot use the 2 GPUs .*driver 580"
    ):
        local_device(device)
    # The user hides the GPUs.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if device == "auto":
        assert local_device(device) == torch.device("cpu")


def test_local_device_cpu_build_beside_gpu_warns(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(distributed, "gpu_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert local_device("cpu").type == "cpu" and not capsys.readouterr().out
    assert local_device("auto").type == "cpu"
    assert "device: the CPU, although this machine has 1 NVIDIA GPU: torch " in capsys.readouterr().out
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        local_device("cuda")


def test_driver_version_is_read_from_its_file(tmp_path):
    file = tmp_path / "version"
    assert driver_version(file) == ""
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC version:  gcc 12.2.0\n")
    assert driver_version(file) == "550.54.15"


def test_ranks_are_named_by_machine():
    hosts = ["a", "a", "b", "b", "b", "c"]
    assert machines.ranks_text(hosts, [1, 2, 3, 4, 5]) == "rank 1 on a; ranks 2 to 4 on b; rank 5 on c"


@pytest.fixture
def environ(monkeypatch):
    def of(**values):
        for name in ("GLOO_SOCKET_IFNAME", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, "")  # restores the variables at the end
            monkeypatch.delenv(name)
        for name, value in {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", **values}.items():
            monkeypatch.setenv(name, value)
        machines.choose_interface()
        return os.environ.get("GLOO_SOCKET_IFNAME")

    return of


def test_gloo_of_one_machine_listens_on_the_loopback(environ):
    assert environ(LOCAL_WORLD_SIZE="4", MASTER_ADDR="10.0.0.1") == "lo", "all ranks are here"
    assert environ(GLOO_SOCKET_IFNAME="") == "lo", "it names none"
    assert environ() == "lo", "nobody said how many are here, but no other machine could find rank 0"
    assert environ(LOCAL_WORLD_SIZE="2", GLOO_SOCKET_IFNAME="ib0") == "ib0"
    assert environ(LOCAL_WORLD_SIZE="2", MASTER_ADDR="10.0.0.1") is None


def test_require_shared_on_one_machine_checks_nothing():
    machines.require_shared_folder(("a", "a"), "/no/such/folder")
