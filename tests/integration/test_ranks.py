"""Ranks that are stopped, hang, raise, or lose their torchrun: it is said who and where, and nothing is left."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import recipe_runs as runs

from torchtune_ext.run.errors import LOST_RANK_STATUS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = """
import logging
import os
import sys
import time
from pathlib import Path

from torchtune_ext.training.distributed import RanksConfig, close_ranks, init_ranks

logging.basicConfig(level=logging.INFO)
what, deadline_s, done = sys.argv[1], float(sys.argv[2]), Path("done")
ranks = init_ranks("cpu", RanksConfig(deadline_s), beat_s=0.2, notice_s=1.0)
print(f"rank {ranks.rank} has pid {os.getpid()}, gloo on {os.environ.get('GLOO_SOCKET_IFNAME')}", flush=True)
with ranks.phase("train", 3):
    assert ranks.any(ranks.rank == 1) and not ranks.any(False)
    if what == "raise" and ranks.rank == 1:
        raise KeyError("a mistake on one rank")
    if what == "hang" and ranks.rank == 1:
        print("rank 1 hangs", flush=True)
        while not done.exists():
            pass
    while "rank 0: train, step 3" not in ranks.watch._judge.all_doing():
        time.sleep(0.01)
    print(f"rank {ranks.rank} knows rank 0", flush=True)
    while not ranks.any(done.exists()):
        time.sleep(0.01)
close_ranks()
print("a good end", flush=True)
"""


class Run:
    """Two ranks of the script, and what they have printed so far."""

    def __init__(self, folder: Path, what: str, deadline_s: float, torchrun: bool = True):
        self.folder = folder
        (folder / "ranks.py").write_text(SCRIPT)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if torchrun else []
        command = [sys.executable, *launch, "ranks.py", what, str(deadline_s)]
        environments = [{}] if torchrun else by_hand()
        self.file = folder / "output"
        with self.file.open("w") as output:
            self.processes = [
                subprocess.Popen(command, cwd=folder, env=runs.environment() | extra, stdout=output, stderr=output)
                for extra in environments
            ]

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
        for process in self.processes:
            for child in [*psutil.Process(process.pid).children(recursive=True), process] if alive(process.pid) else []:
                child.kill()
            process.wait(20)


def by_hand() -> list[dict[str, str]]:
    """The environment of two ranks that no torchrun starts, as under srun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [{"RANK": str(r), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} for r in (0, 1)]


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

    def go(*args, **options) -> Run:
        started.append(Run(tmp_path, *args, **options))
        return started[-1]

    yield go
    for run in started:
        run.end()


@pytest.mark.rest
def test_a_stopped_rank_is_named_and_welcomed_back_and_at_last_ends_the_run(start):
    run = start("train", 6)
    stopped, other = run.pid(1), run.pid(0)
    os.kill(stopped, signal.SIGSTOP)
    run.find(
        r"rank 1 \(host .*\) gives no sign of life for 1 s \(last: .*\); the others wait; the run ends after 6 s \(ranks.deadl"
    )
    os.kill(stopped, signal.SIGCONT)
    run.find("rank 1 is back after")
    assert "rank 0 (" not in run.text, "the one that was stopped does not blame those that were awake"
    os.kill(stopped, signal.SIGSTOP)
    text = run.find(r"error: rank 0 ends: rank 1 \(host .*, pid (\d+)\) gives no sign of life for 6 s \(last: (.*)\)")
    assert int(text[1]) == stopped and "train, step 3" in text[2]
    assert "ranks.deadline_s=6" in run.text and "resume_from_checkpoint=True" in run.text
    wait_until(lambda: not alive(other), 60)
    os.kill(stopped, signal.SIGKILL)  # torchrun does it, too, but only after 30 s
    assert run.processes[0].wait(30) == 1
    assert re.search(rf"exitcode *: {LOST_RANK_STATUS} \(pid: {other}\)", run.text)


def listening(pid: int) -> set[str]:
    """Addresses at which a process listens, as the kernel writes them."""
    inodes = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].split(":")[0])
    return found


def test_a_torchrun_that_is_stopped_costs_the_watch_alone_and_the_end_is_quiet(start):
    run = start("hang", 60)
    run.find("rank 1 hangs")
    for rank in (0, 1):
        assert listening(run.pid(rank)) == {"0100007F"}, "gloo listens on 127.0.0.1 alone"
    assert run.text.count("gloo on lo") == 2
    agent = run.processes[0]
    agent.send_signal(signal.SIGSTOP)  # what Ctrl-Z does to torchrun, but not to its ranks
    run.find(
        r"no answer from the rendezvous store at .* \(torchrun has it\) for [12] s; the ranks go on without their watch"
    )
    agent.send_signal(signal.SIGCONT)
    assert "sign of life" not in run.text, "no rank is blamed for what torchrun does"
    (run.folder / "done").touch()
    assert run.processes[0].wait(60) == 0
    assert run.text.count("a good end") == 2 and "terminate called" not in run.text and "Traceback" not in run.text


@pytest.mark.rest
def test_without_torchrun_rank_0_holds_the_store_and_is_named(start):
    run = start("train", 4, torchrun=False)
    run.find("rank 1 knows rank 0")
    os.kill(run.pid(0), signal.SIGSTOP)
    run.find(
        r"no answer from the rendezvous store at 127.0.0.1:\d+ \(rank 0 has it\) for [12] s; the run ends after 4 s"
    )
    assert run.processes[1].wait(30) == LOST_RANK_STATUS
    assert "rank 1 ends: no answer from the rendezvous store" in run.text and "rank 0: train, step 3" in run.text


def test_an_exception_on_one_rank_is_not_held_up_by_the_watch(start):
    run = start("raise", 60, torchrun=False)
    assert run.processes[1].wait(60) == 1
    assert "a mistake on one rank" in run.text and "terminate called" not in run.text
    assert run.processes[0].wait(60) == 1, "gloo tells it"
    assert "terminate called" not in run.text


def test_without_its_torchrun_nothing_of_a_run_is_left(tmp_path, monkeypatch):
    """kill -9 of `tune` while two ranks train: ranks, engine, graders, janitor and temporary folders are gone."""
    with tempfile.TemporaryDirectory(prefix="t") as short:  # paths of unix sockets are short
        monkeypatch.setenv("TMPDIR", short)
        runs.make_workplace(tmp_path)
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
            assert len(family) >= 5, f"two ranks, engine, grader, janitor: {family}"
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
