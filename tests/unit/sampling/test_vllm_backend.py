"""The trainer's side of the client process: a failed start is reported and cleaned up."""

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("torch")

from torchtune_ext.sampling import prestart, vllm_backend
from torchtune_ext.sampling.backend import BackendCrashed
from torchtune_ext.sampling.types import EngineConfig

pytestmark = pytest.mark.timeout(60)

NOTE = "import os, pathlib, sys, time; pathlib.Path(__file__).with_suffix('.pid').write_text(str(os.getpid()))\n"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("sys.exit(3)", "the engine's client ended with exit code 3"),
        ("time.sleep(60)", "the engine did not answer configure within 5 s"),
    ],
    ids=["ends", "hangs"],
)
def test_a_client_that_does_not_start_is_reaped(program, message, tmp_path, monkeypatch):
    (tmp_path / "no_client.py").write_text(NOTE + program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(prestart, "CLIENT_MODULE", "no_client")
    # Long enough for Python to start on a busy machine and to write its process id.
    config = EngineConfig(start_deadline_s=5.0)

    async def launch() -> None:
        backend = vllm_backend.ProcessBackend(
            "model", config, tmp_path / "engine.log", str(tmp_path), lambda step: None
        )
        try:
            await backend.launch()
        finally:
            await backend.stop()

    with pytest.raises(BackendCrashed, match=message):
        asyncio.run(launch())
    # A zombie process is still listed there.
    assert not Path(f"/proc/{(tmp_path / 'no_client.pid').read_text()}").exists()
