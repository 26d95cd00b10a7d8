"""Ranks that are stopped, raise, come late or lose their torchrun: it is said what happened, and nothing is left."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from helpers import recipe_runs as runs
from helpers.forked_runs import forked_ranks
from torchtune_ext.training import collectives

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = """
import os
import sys
import time
from pathlib import Path

from torchtune_ext.run.stop import StopSignals
from torchtune_ext.training.collectives import all_gather
from torchtune_ext.training.distributed import RanksConfig, init_ranks
from torchtune_ext.training.recipe_runner import run_recipe

what, deadline_s = sys.argv[1], float(sys.argv[2])
if len(sys.argv) > 3:  # the port of a store that another process holds, as torchrun's agent does
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_PORT": sys.argv[3]}


def listening():
    # Addresses at which this process listens, as the kernel writes them.
    inodes = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                addresses.add(fields[1].split(":")[0])
    return addresses


class Recipe:
    def __init__(self):
        self.stop = StopSignals(grace_s=600.0 if what == "rank 0 raises" else 0.0, status_message=lambda: "a good end")

    def setup(self):
        self.ranks = init_ranks("cpu", RanksConfig(deadline_s))
        print(f"rank {self.ranks.rank} has pid {os.getpid()}, gloo on {os.environ.get('GLOO_SOCKET_IFNAME')}", flush=True)
        print(f"rank {self.ranks.rank} listens on {listening()}", flush=True)

    def train(self):
        assert self.ranks.any(self.ranks.rank == 1) and not self.ranks.any(False)
        if what == "rank 0 raises":
            self.stop.defer_sigterm()
        # Rank 0 samples for longer than ranks that compute wait.
        assert self.ranks.call_on_main(lambda: time.sleep(deadline_s + 1 if what == "sample" else 0) or 3) == 3
        if what == f"rank {self.ranks.rank} raises":
            raise KeyError("a mistake on one rank")
        if what == "rank 0 raises":
            self.ranks.any(False)
        print(f"rank {self.ranks.rank} computes", flush=True)
        while not all(all_gather(what == "sample")):
            time.sleep(0.01)

    def cleanup(self):
        pass


run_recipe(Recipe)
"""


class Run:
    """Two ranks of the script, and what they have printed so far."""

    def __init__(self, folder: Path, what: str, deadline_s: float):
        (folder / "ranks.py").write_text(SCRIPT)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        command = [sys.executable, *launch, "ranks.py", what, str(deadline_s)]
        self.file = folder / "output"
        with self.file.open("w") as output:
            self.process = subprocess.Popen(command, cwd=folder, env=runs.environment(), stdout=output, stderr=output)

    @property
    def text(self) -> str:
        return self.file.read_text()

    def find(self, pattern: str, seconds: float = 120) -> re.Match:
        """Waits until the pattern has been printed."""
        wait_until(lambda: re.search(pattern, self.text), seconds, lambda: f"{pattern!r} never came:\n{self.text}")
        return re.search(pattern, self.text)

    def pid(self, rank: int) -> int:
        return int(self.find(rf"rank {rank} has pid (\d+)")[1])

    def end(self) -> None:
        process = self.process
        for child in [*psutil.Process(process.pid).children(recursive=True), process] if alive(process.pid) else []:
            child.kill()
        process.wait(20)


def wait_until(condition, seconds, message=lambda: "") -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, message()
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def start(tmp_path):
    started = []

    def go(*args) -> Run:
        started.append(Run(tmp_path, *args))
        return started[-1]

    yield go
    for run in started:
        run.end()


@pytest.mark.rest
def test_stopped_rank_ends_the_run(start):
    run = start("train", 3.0)
    stopped, other = run.pid(1), run.pid(0)
    run.find("rank 0 computes")
    os.kill(stopped, signal.SIGSTOP)
    run.find("Timed out waiting 3000ms")
    run.find("Another rank did not reach this collective within ranks.deadline_s: it was stopped")
    wait_until(lambda: not alive(other), 60)
    os.kill(stopped, signal.SIGKILL)  # torchrun does it, too, but only after 30 s
    assert run.process.wait(30) == 1


def test_ranks_wait_longer_for_rank_zero_on_localhost(tmp_path):
    (tmp_path / "ranks.py").write_text(SCRIPT)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    text = forked_ranks(tmp_path, "ranks.py", "sample", "3.0", str(store.port), ranks=2)
    for rank in (0, 1):
        assert f"rank {rank} listens on {{'0100007F'}}" in text, "gloo listens on 127.0.0.1"
        assert f"rank {rank} computes" in text
    assert text.count("gloo on lo") == 2 and text.count("a good end") == 1
    assert "terminate called" not in text and "Traceback" not in text


def test_rank_exception_ends_other_rank_at_once(tmp_path):
    (tmp_path / "ranks.py").write_text(SCRIPT)
    # gloo ends the other rank, long before its deadline.
    text = forked_ranks(tmp_path, "ranks.py", "rank 1 raises", "600", ranks=2, timeout=60, status=1)
    assert "a mistake on one rank" in text and "terminate called" not in text


def test_ranks_waiting_for_failed_rank_zero_end(start):
    """torchrun's store answers them still, and its SIGTERM waits for the end of a step that never comes."""
    run = start("rank 0 raises", 60)
    run.find("a mistake on one rank")
    run.find("rank 0 failed while this rank waited for it", 15)
    assert run.process.wait(15) == 1


def test_closed_store_does_not_hide_rank_error(monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    monkeypatch.setattr(collectives, "_store", client)
    collectives.announce_main_failure()
    assert server.check([collectives.FAILURE_KEY])
    del server
    with pytest.raises(RuntimeError):
        for _ in range(100):  # the first one is still taken by the socket
            client.set("any", "")
            time.sleep(0.01)
    collectives.announce_main_failure()


def test_killed_torchrun_leaves_no_processes_or_folders(tmp_path, monkeypatch):
    """kill -9 of `tune` while two ranks train: ranks, engine, graders, reaper and temporary folders are gone."""
    with tempfile.TemporaryDirectory(prefix="t") as short:  # paths of unix sockets are short
        monkeypatch.setenv("TMPDIR", short)
        runs.make_workspace(tmp_path)
        with (tmp_path / "output").open("w") as output:
            command = runs.command("grpo_full", "output_dir=run", "max_steps=1000", ranks=2)
            agent = subprocess.Popen(command, cwd=tmp_path, env=runs.environment(), stdout=output, stderr=output)
        metrics = tmp_path / "run" / "metrics.jsonl"
        try:
            wait_until(
                lambda: metrics.is_file() and len(metrics.read_text().splitlines()) >= 2,
                200,
                lambda: (tmp_path / "output").read_text()[-6000:],
            )
            family = psutil.Process(agent.pid).children(recursive=True)
            assert len(family) >= 5, f"two ranks, engine, grader, reaper: {family}"
            assert list(Path(short).glob("tte-*")), "the engine's folder"
        finally:
            agent.kill()
            agent.wait()
        try:
            wait_until(
                lambda: not [p for p in family if alive(p.pid)] and not list(Path(short).glob("tte-*")),
                60,
                lambda: f"left: {[p for p in family if alive(p.pid)]}, {list(Path(short).glob('tte-*'))}",
            )
        finally:
            for process in family:
                if process.is_running():
                    process.kill()
