"""How tensors lie in a broadcast, and what a message has to hold."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from torchtune_ext.sampling.transfer.group import Update, check_layout, chunks, update_of  # noqa: E402
from torchtune_ext.sampling.transfer.sender_process import memory_of  # noqa: E402
from torchtune_ext.sampling.weight_buffer import WeightBuffer, checksum  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]
SHAPES = st.lists(st.integers(0, 9), max_size=3)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=12), st.integers(1, 2000))
def test_a_receiver_finds_every_tensor_where_the_sender_has_it(kinds, limit):
    """What the sender cuts out of its memory, span by span, is what the receiver takes apart, whatever lies in it."""
    named = [
        (f"layer.{i}", torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype))
        for i, (dtype, shape) in enumerate(kinds)
    ]
    buffer = WeightBuffer()
    try:
        buffer.write(named)
        memory, offsets = memory_of(buffer.address()["path"]), iter(buffer.manifest["offsets"])
        found = {}
        for places in chunks(update_of(buffer.manifest), limit):
            here = [next(offsets) for _ in places]
            check_layout(places, here)
            # Only the last tensor of a chunk reaches the limit.
            assert all(place.end < limit for place in places[:-1])
            chunk = memory[here[0] : here[0] + places[-1].end].clone()
            found |= {place.name: place.of(chunk) for place in places}
        assert [(name, t.dtype, t.shape) for name, t in found.items()] == [(n, t.dtype, t.shape) for n, t in named]
        assert all(checksum(found[name]) == checksum(tensor) for name, tensor in named)
    finally:
        buffer.close()


def test_memory_that_lies_otherwise_is_not_sent():
    (places,) = chunks(Update(names=["a", "b"], dtype_names=["int8", "int8"], shapes=[[3], [5]]), 1000)
    check_layout(places, [64, 128])
    with pytest.raises(ValueError, match="b lies at byte 192"):
        check_layout(places, [64, 192])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"names": []}, "no tensors"),
        ({"names": ["a", "a"]}, "two of one name"),
        ({"shapes": [[1]]}, "2 names, 2 dtypes and 1 shapes"),
        ({"dtype_names": ["float32", "load"]}, "b in 'load', which is no dtype"),
        ({"dtype_names": ["float32", "no such"]}, "b in 'no such', which is no dtype"),
        ({"shapes": [[1], [-1]]}, r"b in the shape \[-1\]"),
    ],
)
def test_a_message_that_cannot_be(fields, said):
    known = {"names": ["a", "b"], "dtype_names": ["float32", "float32"], "shapes": [[1], [2]]}
    if fields.get("names") == []:
        known = {"names": [], "dtype_names": [], "shapes": []}
    with pytest.raises(ValueError, match=said):
        Update(**(known | fields))
