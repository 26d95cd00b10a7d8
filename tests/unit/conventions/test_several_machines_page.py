"""The commands of docs/how_to/multi_gpu.md, examples/slurm.sh and examples/kubernetes.yaml start ranks that find each other."""

import re
import subprocess

import pytest
import yaml
from omegaconf import OmegaConf
from torch.distributed.run import get_args_parser

from helpers.page_commands import blocks
from torchtune_ext.recipes import grpo
from torchtune_ext.run.catalog import config_files, package_folder
from torchtune_ext.settings.command_line import require_rendezvous
from torchtune_ext.settings.config import load_config

CONFIGS = config_files(package_folder("configs"))
FAKES = {
    "tune": 'echo "$CUDA_VISIBLE_DEVICES|$*"',
    "scontrol": 'test "$*" = "show hostnames node-[a-b]" && printf "node-a\\nnode-b\\n"',
    # It starts the task of every node, as Slurm would.
    "srun": 'test "$1" = --kill-on-bad-exit=1 && shift; for i in 0 1; do SLURM_NODEID=$i "$@"; done',
}


@pytest.fixture
def page(repo_root):
    return repo_root / "docs" / "how_to" / "multi_gpu.md"


@pytest.fixture
def printed(tmp_path):
    """Runs a script of the page with commands that print their words. Returns the lines that `tune` was given."""
    for name, text in FAKES.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def run(script, **environ):
        path = {"PATH": f"{tmp_path}:/usr/bin:/bin", **environ}
        done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, timeout=60, env=path)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def require_a_run(lines, first):
    """Asserts that the lines are those of all machines of one run: as torchrun and the recipe take their words."""
    machines = []
    for line in lines:
        devices, _, words = line.partition("|")
        words = words.split()
        assert words.pop(0) == "run"
        args = get_args_parser().parse_args(words)
        require_rendezvous(args, words)
        # Without an endpoint torchtune starts a run of one machine.
        assert args.rdzv_endpoint == f"{first}:29500" and args.rdzv_backend == "static"
        assert int(args.nproc_per_node) == len(devices.split(","))
        option, config, *overrides = args.training_script_args
        assert args.training_script == "grpo_full" and option == "--config"
        cfg = OmegaConf.merge(OmegaConf.load(CONFIGS[config]), OmegaConf.from_dotlist(overrides))
        cfg = load_config(grpo.Config, cfg)
        cfg.ranks.require_divisible(int(args.nnodes) * int(args.nproc_per_node))
        assert cfg.ranks.shard_within == int(args.nproc_per_node), "a copy on each machine"
        assert cfg.output_dir.startswith("/shared/") and cfg.model_dir.startswith("/shared/")
        assert not set(str(cfg.engine.devices).split(",")) & set(devices.split(",")), "the engine has GPUs of its own"
        machines.append((args.node_rank, args.nnodes, args.nproc_per_node, args.rdzv_id, tuple(overrides)))
    assert [rank for rank, *_ in machines] == [0, 1] and len({tuple(rest) for _, *rest in machines}) == 1
    assert {nnodes for _, nnodes, *_ in machines} == {"2"}


def test_page_manual_and_slurm_lines_start_one_run(repo_root, page, printed):
    (by_hand,) = (text for language, text in blocks(page) if language == "bash" and "--nnodes" in text)
    require_a_run([line for rank in "01" for line in printed(by_hand, NODE_RANK=rank)], "node-a")
    slurm = (repo_root / "examples" / "slurm.sh").read_text()
    environ = {"SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    require_a_run(printed(slurm, **environ), "node-a")


def test_the_manifest_starts_one_run_on_two_pods(repo_root, printed):
    service, job = yaml.safe_load_all((repo_root / "examples" / "kubernetes.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    name = job["metadata"]["name"]
    # A pod of an indexed job has its number behind the job's name as its host name, below the service.
    assert spec["completions"] == spec["parallelism"] == 2 and spec["completionMode"] == "Indexed"
    assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    assert container["command"] == ["bash", "-c"]
    environ = {each["name"]: each["value"] for each in container["env"]}
    lines = [
        line
        for index in range(spec["completions"])
        for line in printed(container["args"][0], JOB_COMPLETION_INDEX=str(index), **environ)
    ]
    require_a_run(lines, f"{name}-0.{pod['subdomain']}")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "--nnodes 2 --nproc_per_node 8",
            "--nnodes 2 without --rdzv_endpoint: each machine would wait alone (torchtune adds --standalone). Fix: add",
        ),
        ("--nnodes 1:4 --rdzv_backend c10d", "--nnodes 1:4 without --rdzv_endpoint"),
        ("--nnodes 2 --master_addr a --node_rank 1", "--nnodes 2 without --rdzv_endpoint"),
        (
            "--nnodes 2 --rdzv_endpoint a:29500",
            "--nnodes 2 without --node_rank. Fix: set --node_rank on each machine: 0 on a, which",
        ),
        ("--nnodes 2 --rdzv_endpoint a:29500 --node_rank 1", None),
        ("--nnodes=2 --rdzv-endpoint=a:29500 --node-rank=1", None),
        ("--nnodes 2 --rdzv_endpoint a:29500 --rdzv_backend c10d", None),
        ("--nproc_per_node 2", None),
    ],
)
def test_rendezvous_incomplete_arguments_are_refused(words, message, monkeypatch):
    monkeypatch.delenv("PET_NODE_RANK", raising=False)
    given = [*words.split(), "grpo_full", "--config", "grpo/tiny"]
    args = get_args_parser().parse_args(given)
    if message is None:
        require_rendezvous(args, given)
    else:
        with pytest.raises(ValueError, match=re.escape(message)):
            require_rendezvous(args, given)
