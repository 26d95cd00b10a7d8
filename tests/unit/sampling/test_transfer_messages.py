"""Layout of tensors in a broadcast."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from torchtune_ext.sampling.broadcast import iter_chunks  # noqa: E402
from torchtune_ext.sampling.weight_buffer import WeightBuffer, checksum, iter_views, map_memory  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]
SHAPES = st.lists(st.integers(0, 9), max_size=3)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=12), st.integers(1, 2000))
def test_transfer_receiver_finds_all_tensors_at_their_offsets(kinds, limit):
    """The receiver reads the same tensors from each chunk that the sender has cut from its memory."""
    named = [
        (f"layer.{i}", torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype))
        for i, (dtype, shape) in enumerate(kinds)
    ]
    buffer = WeightBuffer()
    try:
        buffer.write(named)
        memory, tensors = map_memory(buffer.address()["path"]), {}
        for begin, end, manifest in iter_chunks(buffer.manifest, limit):
            here = dict(iter_views(memory[begin:end].clone(), manifest))
            # Only the last tensor of a chunk reaches the limit.
            ends = [offset + t.nbytes for offset, t in zip(manifest["offsets"], here.values(), strict=True)]
            assert all(each < limit for each in ends[:-1]) and ends[-1] == end - begin
            tensors |= here
        assert [(name, t.dtype, t.shape) for name, t in tensors.items()] == [(n, t.dtype, t.shape) for n, t in named]
        assert all(checksum(tensors[name]) == checksum(tensor) for name, tensor in named)
    finally:
        buffer.close()
