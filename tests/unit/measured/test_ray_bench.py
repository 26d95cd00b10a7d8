"""What the service on Ray refuses before it has a cluster, each time with what helps."""

import asyncio
import os
import re
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from torchtune_ext.measured import ray_bench, ray_process
from torchtune_ext.measured.ray_bench import RayBench
from torchtune_ext.measured.results import BenchError
from torchtune_ext.run.errors import RunFailure
from torchtune_ext.sampling.child_process import pack_messages

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"address": "ray://10.0.0.1:10001"}, "no ray://"),
        ({"address": "10.0.0.1"}, "HOST:PORT"),
        ({"workers": 0}, "bench.workers=0 must be"),
        ({"wokers": 1}, "unknown key 'bench.wokers'"),
    ],
)
def test_settings_are_checked_before_anything_starts(arguments, message):
    with pytest.raises(ValueError, match=message):
        RayBench(**arguments)


def test_ray_bench_without_ray_reports_install_command(monkeypatch):
    monkeypatch.setattr(ray_bench, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'torchtune-ext\[ray\]'"):
        RayBench()


def test_ray_bench_unreachable_address_refused_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    began_at = time.monotonic()
    with pytest.raises(BenchError, match=f"{address} .*ray start --head --node-ip-address=127.0.0.1"):
        RayBench(address)
    assert time.monotonic() < began_at + 60, "Ray itself would try for minutes"


@needs_ray
def test_ray_bench_address_of_other_service_is_refused():
    code = "import sys; from torchtune_ext.cluster import connection; from torchtune_ext.measured import ray_process; connection.RAY_TIMEOUT_S = 1.0; "
    code += "ray_process.main(int(sys.argv[1]), int(sys.argv[2]))"
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, ours, theirs:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-c", code, str(theirs.fileno()), str(os.getpid())]
        ours.sendall(pack_messages([(1, "start", (address,))]))
        ended = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "does not answer" in ended.stdout and f"ray start --address={address}" in ended.stdout


class Lost(Exception):
    """What Ray raises of an actor that is gone."""


class FakeActor:
    """Answers with its name, or as `state` says."""

    def __init__(self, name, state="result"):
        self.name, self.state = name, state
        self.measure = SimpleNamespace(remote=self._measure)

    async def _measure(self, payload):
        if self.state == "lost":
            raise Lost("it has died")
        # Texts that come meanwhile find it busy.
        await asyncio.sleep(0.01)
        return self.state, self.name


def driver_of(*actors):
    ray = SimpleNamespace(exceptions=SimpleNamespace(RayError=Lost), kill=lambda actor: None)
    driver = ray_process.RayDriver()
    driver._ray, driver._frames = ray, SimpleNamespace(send=lambda message: None)
    driver._machines = [ray_process.BenchMachine(each.name, each) for each in actors]
    return driver


def test_ray_bench_cluster_without_bench_host_is_refused(monkeypatch):
    driver = driver_of()
    monkeypatch.setattr(ray_process, "connect", lambda address, refuse: driver._ray)
    driver._ray.nodes = lambda: [{"Alive": True, "NodeID": "a", "Resources": {"CPU": 4.0}, "NodeManagerHostname": "h", "NodeManagerAddress": "10.0.0.2"}]  # fmt: skip
    driver._ray.get_runtime_context = lambda: SimpleNamespace(gcs_address="10.0.0.1:6379")
    command = "RAY_worker_niceness=0 ray start --address=10.0.0.1:6379 --num-cpus=0 --disable-usage-stats --resources='{\"bench_host\": 1}'"
    with pytest.raises(RunFailure, match=f"at 10.0.0.1:6379 carries the resource 'bench_host'.*: {re.escape(command)}"):
        asyncio.run(driver.start("auto"))


def measured(driver, texts):
    async def all_texts():
        return await asyncio.gather(*[driver.measure(b"") for _ in range(texts)])

    return asyncio.run(asyncio.wait_for(all_texts(), 60))


def test_ray_bench_texts_go_to_least_loaded_machine():
    driver = driver_of(FakeActor("a"), FakeActor("b"), FakeActor("c"))
    assert sorted(name for _, name in measured(driver, 6)) == ["a", "a", "b", "b", "c", "c"]


def test_ray_bench_lost_machine_texts_go_to_others():
    driver = driver_of(FakeActor("a", "lost"), FakeActor("b"), FakeActor("c"))
    results = measured(driver, 3)
    assert {state for state, _ in results} == {"result"} and {name for _, name in results} == {"b", "c"}
    assert [each.label for each in driver._machines] == ["b", "c"]


def test_ray_bench_text_raises_after_three_lost_machines():
    driver = driver_of(*[FakeActor(name, "lost") for name in "abcd"])
    with pytest.raises(RunFailure, match="3 machines crashed .* last was c"):
        measured(driver, 1)
    with pytest.raises(RunFailure, match="no machine that measures is left"):
        measured(driver, 1)


def test_ray_bench_machine_failure_is_reported():
    assert measured(driver_of(FakeActor("a", "failed"), FakeActor("b")), 1) == [("failed", "a")]
