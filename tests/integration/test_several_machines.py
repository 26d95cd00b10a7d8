"""A run over two machines: two torchruns that find each other at a rendezvous, as on two hosts, but here both are on this one."""

import os
import re
import signal
import socket
import subprocess
from contextlib import contextmanager

import pytest

from helpers import recipe_runs as runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@contextmanager
def machines(folders, *words):
    """Starts `tune run --nnodes` in each folder with the same words. Gives the processes, and ends them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    started = []
    try:
        for number, folder in enumerate(folders):
            # The stock words of torchrun; the static rendezvous makes number 0 the machine of rank 0.
            launch = ["--nnodes", str(len(folders)), "--nproc_per_node", "1", "--node_rank", str(number)]
            launch += ["--rdzv_backend", "static", "--rdzv_endpoint", endpoint, "--rdzv_id", "two"]
            command = runs.command("grpo_full", *words)
            at = command.index("run") + 1
            with (folder / f"said{number}").open("w") as output:
                started.append(
                    subprocess.Popen(
                        [*command[:at], *launch, *command[at:]],
                        cwd=folder,
                        env=runs.environment(),
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                )
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def test_two_machines_train_as_one_with_one_engine(tmp_path, served):
    folder = runs.make_workspace(tmp_path)
    with machines([folder, folder], "output_dir=run", "max_steps=2", "ranks.shard_within=1", served) as both:
        assert [process.wait(240) for process in both] == [0, 0], (folder / "said0").read_text()[-6000:]
    first, second = ((folder / f"said{number}").read_text() for number in (0, 1))
    host = re.escape(socket.gethostname())
    assert re.search(
        rf"device: +2 processes on 2 machines \(1 on {host} \(torchrun 0\), 1 on {host} \(torchrun 1\)\), each on cpu; 2 copies of "
        "the weights, each on 1 rank",
        first,
    )
    assert "done" in first and "engine:" in first and "engine:" not in second
    assert [line["step"] for line in runs.metrics(folder / "run")][-1] == 2
    # Each of them has written a part of the checkpoint, and the first one the model.
    checkpoint = folder / "run" / "checkpoints" / "step_000002"
    assert {path.name for path in checkpoint.glob("state/*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    assert (checkpoint / "model.safetensors.index.json").is_file() and (checkpoint / "manifest.json").is_file()
