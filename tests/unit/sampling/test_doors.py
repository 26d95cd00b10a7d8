"""Access to an engine: the API key of a server, and the addresses of listening sockets."""

import asyncio
import hmac
import os
import threading

import pytest

torch = pytest.importorskip("torch")

from torchtune_ext.sampling import child_process, vllm_backend  # noqa: E402
from torchtune_ext.sampling.engine_args import LOOPBACK_VARIABLES  # noqa: E402
from torchtune_ext.sampling.server import ServerBackend  # noqa: E402
from torchtune_ext.sampling.server_command import GUARD, KEY_VARIABLE, KeyGuard, server_command  # noqa: E402
from torchtune_ext.sampling.types import EngineConfig  # noqa: E402

KEY = "0123456789abcdef-the-right-key"


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    for name in (*LOOPBACK_VARIABLES, "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def ask(guard: KeyGuard, path: str, *authorization: str, kind: str = "http") -> list[dict]:
    """Return the messages that the guard, or the application after it, sends."""
    sent = []

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"x"), *((b"authorization", value.encode()) for value in authorization)]
    asyncio.run(guard({"type": kind, "path": path, "method": "POST", "headers": headers}, None, send))
    return sent


async def application(scope, receive, send):
    await send({"type": "reached"})


def reached(sent: list[dict]) -> bool:
    return sent == [{"type": "reached"}]


def test_key_guard_admits_only_the_key():
    guard = KeyGuard(application)
    for path in ("/update_weights", "/inference/v1/generate", "/health"):
        assert reached(ask(guard, path, f"Bearer {KEY}"))
    assert reached(ask(guard, "/v1/realtime", f"Bearer {KEY}", kind="websocket"))
    assert reached(ask(guard, "/health")) and reached(ask(guard, "", kind="lifespan"))


@pytest.mark.parametrize(
    "sent",
    [
        (),
        ("",),
        (KEY,),
        ("Bearer ",),
        (f"Bearer {KEY[:-1]}",),
        (f"Bearer {KEY}x",),
        (f"Bearer {KEY}", "Bearer x"),
        ("ä",),
    ],
)
def test_the_guard_keeps_all_others_out(sent):
    guard = KeyGuard(application)
    for path in ("/update_weights", "/metrics", "/", "", "/health/", "//health", "/healthz", "/health/../pause"):
        start, body = ask(guard, path, *sent)
        assert start["status"] == 401 and KEY_VARIABLE in body["body"].decode() and KEY not in body["body"].decode()
    (close,) = ask(guard, "/v1/realtime", *sent, kind="websocket")
    assert close["type"] == "websocket.close"


def test_key_guard_comparison_is_constant_time(monkeypatch):
    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)))
    ask(KeyGuard(application), "/pause", "Bearer wrong")
    assert compared == [(b"Bearer wrong", f"Bearer {KEY}".encode())]


@pytest.mark.parametrize("value", [None, ""])
def test_key_guard_without_configured_key_rejects_all(monkeypatch, value):
    monkeypatch.delenv(KEY_VARIABLE) if value is None else monkeypatch.setenv(KEY_VARIABLE, value)
    guard = KeyGuard(application)
    for sent in ((), ("",), ("Bearer ",), ("Bearer None",)):
        start, body = ask(guard, "/pause", *sent)
        assert start["status"] == 401 and f"started without {KEY_VARIABLE}" in body["body"].decode()


def test_server_command_hides_key_and_network_variables(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "of another server")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    command, environ = server_command("model", EngineConfig())
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--middleware") + 1] == f"{KeyGuard.__module__}.{KeyGuard.__name__}"
    assert environ[KEY_VARIABLE] == environ["VLLM_API_KEY"] == KEY and LOOPBACK_VARIABLES.items() <= environ.items()
    assert KEY not in " ".join(command)
    monkeypatch.delenv(KEY_VARIABLE)
    keys = {server_command("model", EngineConfig())[1][KEY_VARIABLE] for _ in range(3)}
    assert len(keys) == 3 and min(map(len, keys)) >= 32 and KEY_VARIABLE not in os.environ
    command, _ = server_command("model", EngineConfig(), "0.0.0.0", 1234)
    assert command[command.index("--host") + 1] == "0.0.0.0" and command[command.index("--port") + 1] == "1234"


@pytest.mark.parametrize("value", ["two words", "line\nbreak", "schlüssel", " "])
def test_key_guard_invalid_header_key_refused_unprinted(monkeypatch, value):
    monkeypatch.setenv(KEY_VARIABLE, value)
    for use in (lambda: server_command("model", EngineConfig()), lambda: KeyGuard(application)):
        with pytest.raises(ValueError, match=f"{KEY_VARIABLE} contains a space.*openssl rand") as caught:
            use()
        assert value.strip() == "" or value not in str(caught.value)


def connection(address: str = "http://127.0.0.1:1", start_deadline_s: float = 600.0) -> ServerBackend:
    return ServerBackend(EngineConfig(address=address, start_deadline_s=start_deadline_s), lambda step: None)


def test_the_command_in_messages_holds_no_key():
    assert (
        KEY not in connection().start_command() and f'{KEY_VARIABLE}="${KEY_VARIABLE}"' in connection().start_command()
    )


class FakeServer:
    """Answers every request with one status, in a thread; or as a guarded server would, for `status=None`."""

    def __init__(self, status: int | None):
        self.status, self.requests, self.loop = status, [], asyncio.new_event_loop()

    def __enter__(self) -> str:
        web = pytest.importorskip("aiohttp.web")

        async def answer(request):
            self.requests.append((request.path, request.headers.get("Authorization")))
            known = request.headers.get("Authorization") == f"Bearer {KEY}"
            return web.json_response({"vllm_config": {}}, status=self.status or (200 if known else 401))

        async def serve():
            self.runner = web.ServerRunner(web.Server(answer))
            await self.runner.setup()
            await web.TCPSite(self.runner, "127.0.0.1", 0).start()
            return self.runner.addresses[0][1]

        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        return f"http://127.0.0.1:{asyncio.run_coroutine_threadsafe(serve(), self.loop).result(10)}"

    def __exit__(self, *exc):
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)


def launch(backend: ServerBackend) -> None:
    async def both():
        try:
            await backend.launch()
        finally:
            await backend.stop()

    asyncio.run(asyncio.wait_for(both(), 8.0))  # far less than start_deadline_s


@pytest.mark.parametrize("status", [200, 404])
def test_server_without_key_guard_is_refused_before_authentication(status):
    server = FakeServer(status)
    with server as address, pytest.raises(ValueError, match=f"requires no key.*--middleware {GUARD}"):
        launch(connection(address))
    assert server.requests == [("/is_paused", None)]


def test_server_not_ready_is_polled_until_deadline():
    from torchtune_ext.sampling.backend import BackendCrashed

    server = FakeServer(503)
    with server as address, pytest.raises(BackendCrashed, match="no answer.*within start_deadline_s.*not ready"):
        launch(connection(address, start_deadline_s=0.06))
    assert len(server.requests) >= 2


def test_engine_process_does_not_inherit_trainer_network_variables(monkeypatch, tmp_path):
    """Variables of a multi-machine run would open the engine's sockets to other machines."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    started = []
    monkeypatch.setattr(child_process.subprocess, "Popen", lambda words, env, **options: started.append(env))

    async def make():
        vllm_backend.ProcessBackend("model", EngineConfig(), tmp_path / "engine.log", str(tmp_path), lambda step: None)

    with pytest.raises(BrokenPipeError):  # the other end is closed
        asyncio.run(make())
    assert LOOPBACK_VARIABLES.items() <= started[0].items() and os.environ["NCCL_SOCKET_IFNAME"] == "eth7"
