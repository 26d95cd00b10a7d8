"""A vLLM server as a process of a test, on this machine or in namespaces of a simulated second machine."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from torchtune_ext.sampling.server_command import server_command
from torchtune_ext.sampling.types import EngineConfig


def free_port() -> int:
    """Return a free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A server process with its process group."""

    def __init__(
        self, model_dir: str, config: EngineConfig, log: Path, inside: list[str] | None = None, forks: bool = False
    ):
        """Args: config: with the address; inside: command prefix that runs the server on another machine; forks: start
        faster than the command of a user (forking_server.py), for tests that are not about servers."""
        command, self.environ = server_command(model_dir, config)
        if forks:
            assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
            command[2] = "helpers.forking_server"
            self.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
        self.command = [*(inside or []), *command]
        self.address, self.log = config.address, log
        self.start()

    def start(self) -> None:
        # vLLM binds sockets there, whose paths are limited to 107 characters.
        self.environ["TMPDIR"] = tempfile.mkdtemp(prefix="sv", dir="/tmp")
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(
                self.command, env={**os.environ, **self.environ}, stdout=out, stderr=out, start_new_session=True
            )

    def wait(self) -> None:
        give_up_at = time.monotonic() + 240
        while time.monotonic() < give_up_at:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                urllib.request.urlopen(self.address + "/health", timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        raise AssertionError("the server did not start in 240 s")

    def ask(self, path: str, method: str = "GET", key: str | None = None, body: dict | None = None) -> tuple[int, str]:
        """Return status and text of the response to a request, with or without a key."""
        request = urllib.request.Request(
            self.address + path, json.dumps(body or {}).encode() if method == "POST" else None
        )
        request.method = method
        request.add_header("Content-Type", "application/json")
        if key is not None:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(10)
        shutil.rmtree(self.environ["TMPDIR"], ignore_errors=True)
