"""The weight sender with minimal servers: real processes and a real gloo group, without vLLM."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
aiohttp = pytest.importorskip("aiohttp")

from helpers import weight_server  # noqa: E402
from torchtune_ext.sampling.backend import BackendCrashed  # noqa: E402
from torchtune_ext.sampling.server import ServerBackend  # noqa: E402
from torchtune_ext.sampling.server_command import KEY_VARIABLE  # noqa: E402
from torchtune_ext.sampling.types import EngineConfig  # noqa: E402
from torchtune_ext.sampling.weight_buffer import WeightBuffer, checksum  # noqa: E402
from torchtune_ext.sampling.weight_sender import WeightSender  # noqa: E402

KEY = "the-key-of-these-servers"
SESSIONS = []
DEADLINE_S = 4.0
LONG_S = 200.0  # a scenario is over before, however busy the machine is, unless it waits for a deadline of this length


class WeightServer:
    def __init__(self):
        path = os.pathsep.join([str(Path(weight_server.__file__).parents[1]), *sys.path])
        environ = {**os.environ, KEY_VARIABLE: KEY, "PYTHONPATH": path}
        self.process = subprocess.Popen([sys.executable, weight_server.__file__], env=environ, stdout=subprocess.PIPE)
        self.connection_number = 0

    def wait(self) -> "WeightServer":
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"
        return self

    def ask(self, path: str, **body) -> dict:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(request, timeout=LONG_S) as answer:
            return json.loads(answer.read())

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self.process.stdout.close()

    def backend(self, **settings) -> ServerBackend:
        """A connection in the state after `ServerBackend.launch`."""
        settings = {"rpc_deadline_s": DEADLINE_S, "probe_deadline_s": 5.0} | settings
        backend = ServerBackend(EngineConfig(address=self.url, **settings), lambda step: None)
        backend.configure()
        backend._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        backend.transfer, backend.connection_id = "gloo", str(self.connection_number)
        SESSIONS.append(backend._session)
        return backend


@pytest.fixture(scope="module")
def servers():
    instances = [WeightServer() for _ in range(3)]
    try:
        yield [server.wait() for server in instances]
    finally:
        for server in instances:
            server.close()


@pytest.fixture
def pair(servers):
    for server in servers[:2]:
        server.ask("/fault", fault="")
        server.connection_number += 1
    return servers[:2]


@pytest.fixture
def weights():
    buffer = WeightBuffer()
    generator = torch.Generator().manual_seed(0)
    buffer.named = [(f"w{i}", torch.randn(1000, 37, generator=generator)) for i in range(20)]
    buffer.named += [
        ("f8", torch.randn(128, 128, generator=generator).to(torch.float8_e4m3fn)),
        ("s", torch.ones(1, 1)),
    ]
    buffer.write(buffer.named)
    buffer.checksums = {name: checksum(tensor) for name, tensor in buffer.named}
    buffer.version = 1
    yield buffer
    buffer.close()


def with_sender(tmp_path, monkeypatch, scenario):
    """Run a scenario with a weight sender, whose process has ended afterwards."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)

    async def run():
        sender = WeightSender(tmp_path / "sender.log")
        try:
            return await scenario(sender)
        finally:
            pid = sender_pid(sender)
            await sender.stop()
            assert not pid or not Path(f"/proc/{pid}").exists()
            while SESSIONS:
                await SESSIONS.pop().close()

    return asyncio.run(asyncio.wait_for(run(), LONG_S))


def sender_pid(sender):
    return sender._sender.process_group if sender._sender is not None else 0


async def both(sender, servers, weights, version, **settings):
    """Return the results of updates of two servers, in order."""

    async def update(server):
        async with sender.turn(LONG_S):
            await sender.update_server(server.backend(**settings), weights, version)

    return await asyncio.gather(*map(update, servers), return_exceptions=True)


def test_servers_pause_one_after_the_other(pair, weights, tmp_path, monkeypatch):
    """A server samples while another one is updated. A failed server does not keep its turn."""

    async def scenario(sender):
        calls = []

        def backend(server):
            backend = server.backend(kv_on_publish="keep", rpc_deadline_s=LONG_S, probe_deadline_s=LONG_S)
            backend.weight_sender, request = sender, backend._request

            async def recorded(method, path, body=None):
                calls.append((pair.index(server), path.split("?")[0]))
                return await request(method, path, body)

            backend._request = recorded
            return backend

        steps = ["/pause", "/update_weights", "/resume"]
        backends = [backend(server) for server in pair]
        pauses = await asyncio.gather(*(each.load([weights], 1) for each in backends))
        assert [call for call in calls if call[1] in steps] == [(i, step) for i in (0, 1) for step in steps]
        assert all(load_s <= pause_s for pause_s, load_s in pauses)
        pair[0].ask("/fault", fault="refuse")
        calls.clear()
        results = await asyncio.gather(*(each.load([weights], 2) for each in backends), return_exceptions=True)
        assert isinstance(results[0], BackendCrashed) and not isinstance(results[1], Exception)
        assert [call for call in calls if call[1] in steps] == [(0, step) for step in steps[:2]] + [
            (1, s) for s in steps
        ]
        async with sender.turn(LONG_S):
            with pytest.raises(BackendCrashed, match="weight syncs of other servers did not end within 0.1 s"):
                async with sender.turn(0.1):
                    pass

    with_sender(tmp_path, monkeypatch, scenario)


def test_each_server_is_in_a_group_that_stays(pair, weights, tmp_path, monkeypatch):
    async def scenario(sender):
        begin = [len(server.ask("/state")["inits"]) for server in pair]
        for version in (3, 4):
            assert await both(sender, pair, weights, version) == [None, None]
            for server in pair:
                state = server.ask("/state")
                assert state["sums"] == weights.checksums and state["version"] == str(version)
        inits = [server.ask("/state")["inits"][n:] for server, n in zip(pair, begin, strict=True)]
        assert [len(each) for each in inits] == [1, 1]
        assert all(init["rank_offset"] == 1 and init["world_size"] == 2 for (init,) in inits)
        assert inits[0][0]["group"] != inits[1][0]["group"]
        pair[0].connection_number += 1  # one connection is new, so its group is new, too
        assert await both(sender, pair, weights, 5) == [None, None]
        assert [len(server.ask("/state")["inits"]) for server in pair] == [begin[0] + 2, begin[1] + 1]

    with_sender(tmp_path, monkeypatch, scenario)


def test_weight_sender_adapter_uses_its_own_messages(pair, weights, tmp_path, monkeypatch):
    weights.adapter = {"r": 4}

    async def scenario(sender):
        await sender.update_server(pair[0].backend(), weights, 7)
        state = pair[0].ask("/state")
        assert state["adapter"] == {"r": 4} and state["sums"] == weights.checksums and state["version"] == "7"
        assert state["calls"][-3:] == ["/collective_rpc", "/update_weight_version", "/v1/load_lora_adapter"]

    with_sender(tmp_path, monkeypatch, scenario)


def test_weight_sender_killed_at_deadline_others_get_weights(pair, weights, tmp_path, monkeypatch):
    good, stalled = pair

    async def scenario(sender):
        assert await both(sender, pair, weights, 1) == [None, None]
        pid = sender_pid(sender)
        stalled.ask("/fault", fault="stall")
        began = time.monotonic()
        lost, fine = await both(sender, [stalled, good], weights, 2)
        assert time.monotonic() - began >= DEADLINE_S
        assert (
            fine is None
            and isinstance(lost, BackendCrashed)
            and "did not transfer version 2 to the server" in str(lost)
        )
        assert sender_pid(sender) != pid and not Path(f"/proc/{pid}").exists()
        assert good.ask("/state")["version"] == "2" and stalled.ask("/state")["version"] == "1"

    with_sender(tmp_path, monkeypatch, scenario)


def test_weight_sender_refusing_server_fails_without_delaying_other(pair, weights, tmp_path, monkeypatch):
    good, picky = pair
    picky.ask("/fault", fault="refuse")

    async def scenario(sender):
        lost, fine = await both(sender, [picky, good], weights, 8, rpc_deadline_s=LONG_S)
        assert fine is None and "these weights are not wanted" in str(lost) and KEY not in str(lost)
        assert good.ask("/state")["version"] == "8"

    with_sender(tmp_path, monkeypatch, scenario)


def test_weight_sender_killed_in_transfer_is_replaced(pair, weights, tmp_path, monkeypatch):
    stalled = pair[1]

    async def scenario(sender):
        stalled.ask("/fault", fault="stall")
        begin = len(stalled.ask("/state")["calls"])
        work = asyncio.ensure_future(sender.update_server(stalled.backend(rpc_deadline_s=LONG_S), weights, 1))
        while (
            not work.done()
            and "/update_weights" not in (await asyncio.to_thread(stalled.ask, "/state"))["calls"][begin:]
        ):
            await asyncio.sleep(0.05)
        assert sender_pid(sender) > 1
        os.kill(sender_pid(sender), signal.SIGKILL)
        with pytest.raises(BackendCrashed, match="sender was killed by SIGKILL"):
            await work
        await sender.update_server(pair[0].backend(), weights, 6)
        assert pair[0].ask("/state")["version"] == "6"

    with_sender(tmp_path, monkeypatch, scenario)


def test_weight_sender_server_crash_affects_no_other(servers, pair, weights, tmp_path, monkeypatch):
    mortal = servers[2]
    mortal.ask("/fault", fault="die")

    async def scenario(sender):
        lost, fine = await both(sender, [mortal, pair[0]], weights, 11)
        assert fine is None and isinstance(lost, BackendCrashed)
        assert pair[0].ask("/state")["version"] == "11" and pair[0].ask("/state")["sums"] == weights.checksums

    with_sender(tmp_path, monkeypatch, scenario)


def test_weight_sender_close_cancels_running_transfer(pair, weights, tmp_path, monkeypatch):
    pair[0].ask("/fault", fault="stall")

    async def scenario(sender):
        under_way = asyncio.ensure_future(both(sender, pair, weights, 1, rpc_deadline_s=LONG_S))
        await asyncio.sleep(1.0)
        assert not under_way.done()
        await sender.stop()
        first, second = await under_way
        assert isinstance(first, BackendCrashed) and "the engine was closed" in str(second)

    with_sender(tmp_path, monkeypatch, scenario)
