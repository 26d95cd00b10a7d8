"""Which sockets an engine opens, and who may reach them, on a machine whose name leads to its network address."""

import json
import os
import subprocess
import sys
from ipaddress import ip_address
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from helpers import elsewhere

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(*command: str) -> dict:
    """Runs a command of elsewhere.py there; returns what it found."""
    words = [sys.executable, "-m", "helpers.elsewhere", "enter", *command]
    environ = {**os.environ, "PYTHONPATH": str(Path(elsewhere.__file__).parents[1])}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=240)
    if done.returncode == elsewhere.NOT_PERMITTED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return run("engine", str(tmp_path_factory.mktemp("run")))


def test_host_sockets_are_on_network_address():
    """Else the next test would pass whatever we do."""
    assert run("group")["tcp"] == [elsewhere.ADDRESS]


def test_an_engine_listens_on_loopback_only(engine):
    assert engine["tcp"], "the engine is said to have process groups, and each of them listens"
    assert all(ip_address(address).is_loopback for address in engine["tcp"]), engine["tcp"]


def test_engine_unix_sockets_are_closed_to_other_users(engine):
    """All lie in one folder, which only its owner may enter, although the umask was 0."""
    assert len(engine["unix"]) >= 2 and len({folder for folder, _, _ in engine["unix"]}) == 1, engine["unix"]
    for folder, mode, owner in engine["unix"]:
        assert (mode, owner) == (0o700, os.getuid()), folder
