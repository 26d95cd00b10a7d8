"""Which TCP sockets an engine opens where the machine's name leads to its network address, as on most servers."""

import json
import subprocess
import sys
from ipaddress import ip_address

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

import elsewhere  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(*command: str) -> list[str]:
    """Runs a command of elsewhere.py there; returns the addresses it prints."""
    words = [sys.executable, elsewhere.__file__, "enter", *command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    if done.returncode == elsewhere.NOT_PERMITTED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_machine_is_one_where_sockets_face_the_network():
    """Else the next test would pass whatever we do."""
    assert run("group") == [elsewhere.ADDRESS]


def test_an_engine_listens_on_loopback_only(tmp_path):
    addresses = run("engine", str(tmp_path))
    assert addresses, "the engine is said to have process groups, and each of them listens"
    assert all(ip_address(address).is_loopback for address in addresses), addresses
