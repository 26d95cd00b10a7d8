"""What the service on Ray refuses before it has a cluster, each time with what helps."""

import asyncio
import logging
import os
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
from torchtune_ext.sampling.child_process import pack, receive

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"address": "ray://10.0.0.1:10001"}, ValueError, "no ray://"),
        ({"address": "10.0.0.1"}, ValueError, "HOST:PORT"),
        ({"resource": ""}, ValueError, "bench.resource is empty"),
        ({"workers": 0}, ValueError, "bench.workers=0 must be at least 1"),
        ({"wokers": 1}, TypeError, "wokers"),
    ],
)
def test_settings_are_checked_before_anything_starts(arguments, error, message):
    with pytest.raises(error, match=message):
        RayBench(**arguments)


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(ray_bench, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'torchtune-ext\[ray\]'"):
        RayBench()


def test_an_address_at_which_nobody_answers_is_refused_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    began_at = time.monotonic()
    with pytest.raises(BenchError, match=f"nobody answers at {address} .*ray start --head --node-ip-address=127.0.0.1"):
        RayBench(address)
    assert time.monotonic() < began_at + 60, "Ray itself would try for minutes"


@needs_ray
def test_an_address_at_which_somebody_answers_who_is_not_ray_is_refused():
    code = "import sys; from torchtune_ext.measured import ray_connect, ray_process; ray_connect.CONNECT_S = 1.0; "
    code += "ray_process.main(int(sys.argv[1]), int(sys.argv[2]))"
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, ours, theirs:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-c", code, str(theirs.fileno()), str(os.getpid())]
        with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL) as process:
            ours.settimeout(60)
            ours.sendall(pack([address, "bench_host"]))
            ((_, kind, why),) = receive(ours)
            process.wait(timeout=60)
    assert kind == "unreachable"
    assert "does not answer" in why and f"ray start --address={address}" in why


def test_lines_of_a_machines_log_are_kept_until_they_are_fetched():
    host = ray_process.Host()
    host.bench = SimpleNamespace(stats=lambda: {"done": 1.0})
    logger = logging.getLogger("torchtune_ext.of_this_test")
    try:
        logger.warning("core %d is busy", 3)
        logger.info("all is well")
        assert asyncio.run(host.look()) == ({"done": 1.0}, [(logging.WARNING, logger.name, "core 3 is busy")])
        assert asyncio.run(host.look()) == ({"done": 1.0}, [])
    finally:
        logging.getLogger("torchtune_ext").handlers.pop()
