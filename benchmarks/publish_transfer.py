"""Weight sync to servers, for publish.py."""

import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from transformers import Qwen2ForCausalLM  # noqa: E402

from helpers import second_machine  # noqa: E402
from helpers.servers import Server, free_port  # noqa: E402
from torchtune_ext.sampling.engine import Engine, EngineConfig, PublishReport  # noqa: E402
from torchtune_ext.sampling.server_command import KEY_VARIABLE  # noqa: E402
from torchtune_ext.sampling.weight_buffer import checksum  # noqa: E402

SINK = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    for _ in range(int(sys.argv[3])):
        end, _ = server.accept()
        with end:
            left, room = int(sys.argv[2]), bytearray(1 << 20)
            while left:
                left -= end.recv_into(room, min(left, len(room)))
            end.sendall(b"k")
"""


def link_speed(address: str, inside: list[str], size: int, repeats: int) -> float:
    """Return the median seconds for `size` bytes over one TCP connection to a process that only reads."""
    command = [*inside, sys.executable, "-c", SINK, address, str(size), str(repeats)]
    sink, seconds, data = subprocess.Popen(command, stdout=subprocess.PIPE), [], bytes(1 << 20)
    try:
        port = int(sink.stdout.readline())
        for _ in range(repeats):
            began = time.perf_counter()
            with socket.create_connection((address, port)) as end:
                for begin in range(0, size, len(data)):
                    end.sendall(data[: size - begin])
                assert end.recv(1) == b"k"
            seconds.append(time.perf_counter() - began)
    finally:
        sink.kill()
        sink.wait(10)
        sink.stdout.close()
    return statistics.median(seconds)


def compare(model: Qwen2ForCausalLM, size: str, transfers: list[str], repeats: int, folder: Path) -> None:
    """Publish a model to a server with each transfer, and print the latencies."""
    os.environ.setdefault(KEY_VARIABLE, "the-key-of-a-benchmark")
    model.save_pretrained(folder / size)
    number = sum(p.numel() for p in model.parameters())
    print(f"\n{size}: {number / 1e6:.1f}M parameters, {2 * number / 1e6:.0f} MB")
    for transfer in transfers:
        apart = transfer == "gloo" and second_machine.why_not() is None
        machine = second_machine.SecondMachine() if apart else None
        try:
            where = (machine.there, machine.inside) if machine is not None else ("127.0.0.1", [])
            _one(model, folder / size, transfer, where, repeats)
        finally:
            if machine is not None:
                machine.close()


def _one(model: Qwen2ForCausalLM, model_dir: Path, transfer: str, where: tuple[str, list[str]], repeats: int) -> None:
    host, inside = where
    config = EngineConfig(
        max_model_len=2048, kv_cache_bytes=256 << 20, address=f"http://{host}:{free_port()}", transfer=transfer
    )
    server = Server(str(model_dir), config, model_dir.parent / f"{transfer}.log", inside)
    try:
        server.wait()
        with Engine("", config, str(model_dir.parent)) as engine:
            engine.start()
            engine.wait_ready()
            reports = [engine.publish(model.named_parameters(), version) for version in range(1, repeats + 2)]
            assert engine.checksums() == [{name: checksum(tensor) for name, tensor in model.named_parameters()}]
    finally:
        server.kill()
    speed = link_speed(host, inside, reports[0].bytes, 5)
    _show(transfer, reports, speed, "a link between namespaces" if inside else "loopback")


def _show(transfer: str, reports: list[PublishReport], link_s: float, link: str) -> None:
    first, rest, size = reports[0], reports[1:], reports[0].bytes
    copy, pause, load = (
        statistics.median(getattr(report, name) for report in rest) for name in ("copy_s", "pause_s", "load_s")
    )
    print(
        f"  {transfer:5s} copy {1e3 * copy:7.1f} ms  pause {1e3 * pause:7.1f} ms (first {1e3 * first.pause_s:7.1f})  "
        f"load {1e3 * load:7.1f} ms = {size / load / 1e9:5.2f} GB/s; {link} alone {1e3 * link_s:7.1f} ms = "
        f"{size / link_s / 1e9:5.2f} GB/s",
        flush=True,
    )
