"""Unexpected answers of a server, and the errors that follow."""

import asyncio
import traceback
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
aiohttp = pytest.importorskip("aiohttp")

from torchtune_ext.sampling import server as server_module  # noqa: E402
from torchtune_ext.sampling.backend import BackendCrashed, EngineRequest  # noqa: E402
from torchtune_ext.sampling.server import ServerBackend  # noqa: E402
from torchtune_ext.sampling.server_command import KEY_VARIABLE  # noqa: E402
from torchtune_ext.sampling.types import EngineConfig, SamplingConfig  # noqa: E402
from torchtune_ext.sampling.weight_buffer import WeightBuffer  # noqa: E402

KEY = "0123456789abcdef-the-right-key"


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    backend = ServerBackend(EngineConfig(address="http://127.0.0.1:1", probe_deadline_s=1.0), lambda step: None)
    backend.configure()
    return backend


CLEAR = "/reset_prefix_cache?reset_running_requests=true"


def answers(monkeypatch, backend, replies):
    """Set the server's answer per path: a text, or an error to raise. Return the list of requested paths."""
    paths, replies = [], {CLEAR: {"success": True}} | replies

    async def request(method, path, body=None):
        paths.append(path)
        reply = replies.get(path, {})
        reply = reply.pop(0) if isinstance(reply, list) else reply
        if isinstance(reply, Exception):
            raise reply
        return reply

    monkeypatch.setattr(backend, "_request", request)
    return paths


@pytest.fixture
def weights():
    buffer = WeightBuffer()
    buffer.write([("a", torch.zeros(2))])
    buffer.version = 1
    yield buffer
    buffer.close()


def test_server_aborted_request_raises_without_completion(backend):
    async def scenario():
        async def parts(method, path, body):
            choice = {"token_ids": [5, 6], "logprobs": {"content": [{"logprob": -1.0}] * 2}, "weight_versions": None}
            yield {"choices": [choice | {"finish_reason": "abort"}]}

        backend._open = parts
        with pytest.raises(BackendCrashed, match="aborted an unfinished request"):
            await backend.generate(EngineRequest([1, 2], SamplingConfig(max_tokens=8), 3, id="a"))

    asyncio.run(scenario())


def test_server_invalid_http_error_hides_key(backend):
    async def scenario():
        async def nonsense(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 nonsense\r\n\r\n")
            writer.close()

        listener = await asyncio.start_server(nonsense, "127.0.0.1", 0)
        backend.address = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        async with aiohttp.ClientSession() as session:
            backend._session = session
            for call in (backend._request("GET", "/metrics"), backend._require_key_guard()):
                with pytest.raises(BackendCrashed, match="no connection to .*: .*Error: ") as caught:
                    await call
                text = "".join(traceback.format_exception(caught.value)) + str(caught.value) + repr(caught.value)
                assert KEY not in text and "Authorization" not in text
        with pytest.raises(BackendCrashed, match="Session is closed"):
            await backend._require_key_guard()
        listener.close()

    asyncio.run(asyncio.wait_for(scenario(), 10))


@pytest.mark.parametrize("reply", ["vllm:num_requests_running{} many", {"not": "a text"}])
def test_server_unreadable_metrics_set_error(backend, monkeypatch, reply):
    monkeypatch.setattr(server_module, "METRICS_INTERVAL_S", 0.01)
    answers(monkeypatch, backend, {"/metrics": reply})
    asyncio.run(asyncio.wait_for(backend._poll_metrics(), 5))
    assert backend.stats_error is not None


def test_server_only_memory_error_requires_same_machine(backend, monkeypatch, weights):
    lost = BackendCrashed("/init_weight_transfer_engine failed (500): the engine is dead")
    answers(monkeypatch, backend, {"/init_weight_transfer_engine": lost})
    with pytest.raises(BackendCrashed, match="the engine is dead"):
        asyncio.run(backend.load([weights], 1))
    unread = BackendCrashed("failed (500): cannot read the trainer's weights at /proc/7/fd/8: run vLLM")
    answers(monkeypatch, backend, {"/init_weight_transfer_engine": unread})
    with pytest.raises(ValueError, match="run the server on this machine"):
        asyncio.run(backend.load([weights], 1))


def test_server_failed_cache_clear_ends_connection(backend, monkeypatch, weights):
    """The server reports the error in a body, with status 200."""
    paths = answers(monkeypatch, backend, {CLEAR: {"success": False}})
    with pytest.raises(BackendCrashed, match="refused to clear its KV cache"):
        asyncio.run(backend.load([weights], 1))
    assert "/update_weights" not in paths and "/resume" not in paths


def test_server_update_refused_midway_crashes_backend(backend, monkeypatch, weights):
    paths = answers(monkeypatch, backend, {"/update_weights": ValueError("no such route")})
    with pytest.raises(BackendCrashed, match="refused a weight update after its start: no such route"):
        asyncio.run(backend.load([weights], 1))
    assert "/resume" not in paths


def test_server_kept_cache_is_invisible_to_later_requests(backend, monkeypatch, weights):
    backend.config = replace(backend.config, kv_on_publish="keep")
    paths = answers(monkeypatch, backend, {})
    asyncio.run(backend.load([weights], 1))
    assert CLEAR not in paths and backend.cache_salt.endswith("-1") and backend.cache_salt != "-1"


def test_server_update_left_active_is_finished_first(backend, monkeypatch, weights):
    active = "failed (500): start_weight_update called while a weight update is already active. Call finish"
    paths = answers(monkeypatch, backend, {"/start_weight_update": [BackendCrashed(active), {}]})
    asyncio.run(backend.load([weights], 1))
    start, finish = "/start_weight_update", "/finish_weight_update"
    assert [path for path in paths if "weight" in path][1:] == [start, finish, start, "/update_weights", finish]
    stuck = {
        "/start_weight_update": [BackendCrashed(active)],
        "/finish_weight_update": BackendCrashed("failed (500): no"),
    }
    answers(monkeypatch, backend, stuck)
    with pytest.raises(BackendCrashed, match="cannot be finished; restart the server"):
        asyncio.run(backend.load([weights], 1))


def test_server_reports_weight_version_and_checksums(backend, monkeypatch):
    answers(monkeypatch, backend, {"/weight_info": {"weight_version": "7"}, "/collective_rpc": {"results": [{"a": 1}]}})
    assert asyncio.run(backend.weight_version()) == 7
    assert asyncio.run(backend.checksums()) == [{"a": 1}]


def test_server_adapter_over_replaced_model_is_refused(backend, monkeypatch, weights):
    paths = answers(monkeypatch, backend, {})
    weights.adapter, backend.model_replaced = {"r": 8}, True
    with pytest.raises(ValueError, match="model of its folder.*restart it: "):
        asyncio.run(backend.load([weights], 1))
    assert paths == []
    weights.adapter = None
    asyncio.run(backend.load([weights], 1))
    assert not backend.model_replaced and "/finish_weight_update" in paths


PAGE = """vllm:num_requests_running{engine="0"} 3.0
vllm:iteration_tokens_total_count{engine="0"} %d
vllm:prefix_cache_queries_total{engine="0"} %d
"""


def test_server_without_step_progress_has_no_heartbeat(backend):
    """The front-end process serves the page, even while the engine hangs."""
    assert backend._parse_step_stats(PAGE % (5, 0)).running == 3
    assert backend._parse_step_stats(PAGE % (5, 0)) is None
    assert backend._parse_step_stats(PAGE % (6, 40)).prefix_queries == 40
    # An idle engine makes no steps either.
    assert backend._parse_step_stats((PAGE % (6, 40)).replace("3.0", "0.0")).running == 0
