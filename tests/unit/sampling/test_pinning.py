"""Main memory that is pinned for GPU copies, with a stand-in for the CUDA runtime (tests/gpu has the real one)."""

import logging
import os
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torchtune_ext.sampling import broadcast, weight_buffer  # noqa: E402
from torchtune_ext.sampling.weight_buffer import WeightBuffer, checksum, iter_views, map_memory, pin, unpin  # noqa: E402


@pytest.fixture
def runtime(monkeypatch):
    """Records calls of the CUDA runtime; `runtime.status` is the result of `cudaHostRegister`."""
    runtime = SimpleNamespace(status=0, pinned=[], unpinned=[], launches=[])
    runtime.cudaHostRegister = lambda address, size, flags: runtime.pinned.append((address, size)) or runtime.status
    runtime.cudaHostUnregister = runtime.unpinned.append

    def check(status):
        if status:
            raise RuntimeError(f"CUDA error {status}")

    def launch(*args, **kwargs):
        runtime.launches.append(kwargs)
        check(runtime.status)

    monkeypatch.setattr(weight_buffer, "_cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    monkeypatch.setattr(torch, "ones", launch)
    weight_buffer._warn_unpinned.cache_clear()
    return runtime


@pytest.fixture
def buffer():
    buffer = WeightBuffer()
    yield buffer
    buffer.close()


@pytest.mark.parametrize("status", [0, 801])
def test_gpu_weights_arrive_without_pinned_memory(status, runtime, buffer, monkeypatch, caplog):
    """If memory cannot be pinned, weights are copied all the same, with one warning."""
    runtime.status = status
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    with caplog.at_level(logging.WARNING):
        for version, size in enumerate((100, 100, 300)):
            named = [(name, torch.full((size, size), version + 0.5)) for name in "ab"]
            buffer.write(named)
            taken = dict(iter_views(map_memory(buffer.address()["path"]), buffer.manifest))
            assert all(torch.equal(taken[name], tensor) for name, tensor in named)
            assert buffer.checksums == {name: checksum(tensor) for name, tensor in named}
        buffer.close()
    # The second size needs another mapping.
    assert len(runtime.pinned) == 2
    assert runtime.unpinned == ([] if status else [address for address, _ in runtime.pinned])
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ([f"memory: this process cannot pin main memory (CUDA error {status}), so copies to and from the GPU "
                         "are slower"] if status else [])  # fmt: skip
    # The launch has cleared the error.
    assert runtime.launches == ([{"device": "cuda"}] * 2 if status else [])


def test_unpin_ignores_memory_that_is_not_pinned(runtime):
    memory = torch.zeros(8, dtype=torch.uint8)
    unpin(memory)
    assert pin(memory) is memory
    unpin(memory)
    unpin(memory)
    assert runtime.unpinned == [memory.data_ptr()]


def test_sender_pins_memory_once_per_size(runtime, buffer):
    path = buffer.address()["path"]
    for size in (100, 100, 300, 300):
        named = [("a", torch.randn(size, size))]
        buffer.write(named)
        memory = broadcast.pinned_memory(path)
        assert memory is broadcast.pinned_memory(path) and memory.numel() == os.stat(path).st_size
        assert torch.equal(dict(iter_views(memory, buffer.manifest))["a"], named[0][1])
    (first, _), (second, _) = runtime.pinned
    assert runtime.unpinned == [first]
    unpin(broadcast._MAPPED.pop(path))
    assert runtime.unpinned == [first, second]
