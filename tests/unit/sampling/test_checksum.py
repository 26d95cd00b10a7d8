"""Tensor checksums: equal for equal bytes; missing, swapped, old or damaged tensors are detected."""

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune_ext.sampling import weight_buffer
from torchtune_ext.sampling.weight_buffer import LINE_WORDS, checksum

WORDS = 1 << 64
DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.float64)
SHAPES = [
    (1,),
    (3,),
    (7, 5),
    (LINE_WORDS,),
    (LINE_WORDS + 1,),
    (2 * LINE_WORDS,),
    (4 * LINE_WORDS,),
    (3, LINE_WORDS, 17),
    (257, 513),
]


def weights() -> list[int]:
    """An independent implementation of the multipliers: odd SplitMix64 of seed 0 (its first output for seed 0 is 0xE220A8397B1DCDAF)."""
    values, state = [], 0
    for _ in range(LINE_WORDS):
        state = (state + 0x9E3779B97F4A7C15) % WORDS
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % WORDS
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % WORDS
        values.append((z ^ (z >> 31)) | 1)
    assert values[0] == 0xE220A8397B1DCDAF
    return values


def reference(data: bytes, multipliers: list[int]) -> int:
    """The definition with Python integers, word by word."""
    size = len(data)
    while True:
        lines = len(data) // (4 * LINE_WORDS) + 1
        data = data.ljust(4 * LINE_WORDS * lines, b"\0")
        sums = []
        for i in range(lines):
            line = data[4 * LINE_WORDS * i : 4 * LINE_WORDS * (i + 1)]
            values = [int.from_bytes(line[j : j + 4], "little", signed=True) for j in range(0, len(line), 4)]
            sums.append(sum(m * v for m, v in zip(multipliers, values, strict=True)) % WORDS)
        data = b"".join(value.to_bytes(8, "little") for value in sums)
        if lines == 1:
            return sums[0] ^ size


def some(shape, dtype=torch.bfloat16, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("size", [0, 1, 4, 4 * LINE_WORDS - 1, 4 * LINE_WORDS, 4 * LINE_WORDS + 2, 24 * LINE_WORDS + 5])
def test_checksum_equals_reference_implementation(size):
    tensor = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(size), dtype=torch.uint8)
    assert checksum(tensor) % WORDS == reference(tensor.numpy().tobytes(), weights())


class Copies(TorchDispatchMode):
    """Records the size of every tensor that is copied to another device, and the devices of all products."""

    def __init__(self):
        super().__init__()
        self.sizes, self.products = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") not in (None, args[0].device):
            assert kwargs["non_blocking"]
            self.sizes.append(args[0].nbytes)
        if func is torch.ops.aten.mul.out:
            self.products.add(kwargs["out"].device.type)
        return func(*args, **kwargs)


@pytest.mark.parametrize("lines_per_batch", [1, 16, 1000])
def test_checksum_device_gets_one_batch_at_a_time(lines_per_batch, monkeypatch):
    """A tensor in main memory is summed by a GPU in batches, with the same result. "meta" stands for the GPU, without results."""
    tensor, line = some((41, LINE_WORDS), torch.float32), 4 * LINE_WORDS
    value = checksum(tensor)
    monkeypatch.setattr(weight_buffer, "LINES_PER_BATCH", {"cpu": lines_per_batch, "cuda": lines_per_batch})
    assert checksum(tensor, torch.device("cpu")) == checksum(tensor) == value
    weight_buffer._checksum_weights(torch.device("meta"))
    with Copies() as copies, pytest.raises(RuntimeError, match="meta"):
        checksum(tensor, torch.device("meta"))
    assert max(copies.sizes) == min(lines_per_batch, 41) * line and sum(copies.sizes) == 42 * line
    assert copies.products == {"meta"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_alone_count_wherever_they_lie(dtype):
    for shape in SHAPES:
        tensor = some(shape, dtype)
        size = tensor.numel()
        shifted = torch.zeros(size + 3, dtype=dtype)[3:]  # not at a multiple of four bytes
        shifted.copy_(tensor.flatten())
        transposed = torch.zeros(*reversed(shape), dtype=dtype).permute(*reversed(range(len(shape))))
        transposed.copy_(tensor)
        value = checksum(tensor)
        assert -(1 << 63) <= value < 1 << 63
        assert value == checksum(shifted) == checksum(transposed) == checksum(torch.nn.Parameter(tensor, False))
        assert value == checksum(tensor.contiguous().view(torch.uint8))


def test_every_flipped_bit_shows():
    rng, tensor = random.Random(0), some((5, LINE_WORDS))
    value, data = checksum(tensor), tensor.view(torch.uint8).flatten()
    places = [0, data.numel() - 1] + [rng.randrange(data.numel()) for _ in range(300)]
    for place in places:
        for bit in rng.sample(range(8), 2):
            data[place] ^= 1 << bit
            assert checksum(tensor) != value, (place, bit)
            data[place] ^= 1 << bit
    assert checksum(tensor) == value


def test_two_changes_do_not_cancel():
    """Signs above all: as the highest bits of 64 they would, whatever the odd multipliers are."""
    rng, tensor = random.Random(1), some((3, LINE_WORDS))
    value, flat = checksum(tensor), tensor.flatten()
    for _ in range(300):
        a, b = rng.sample(range(flat.numel()), 2)
        for change in (torch.neg, lambda x: x.flip(0), lambda x: x + 2**-6):
            other = flat.clone()
            other[[a, b]] = change(other[[a, b]])
            assert (checksum(other) != value) == (not torch.equal(other, flat))


def test_checksum_detects_permuted_parts():
    tensor = some((64, LINE_WORDS))
    value = checksum(tensor)
    rng = random.Random(2)
    for width in (1, 2, 16):  # rows, also whole lines of the sum, and columns
        for axis in (0, 1):
            for _ in range(20):
                a, b = (width * place for place in rng.sample(range(tensor.shape[axis] // width), 2))
                order = torch.arange(tensor.shape[axis])
                order[a : a + width], order[b : b + width] = (torch.arange(x, x + width) for x in (b, a))
                assert checksum(tensor.index_select(axis, order)) != value
    assert checksum(tensor.roll(1)) != value and checksum(tensor.T) != value


def test_checksum_detects_old_torn_truncated_and_swapped_tensors():
    """A model of many tensors: those of the last step, lr 1e-6, in bfloat16; torn at any place; cut; each other's."""
    new = [some((40, 70), seed=i) for i in range(50)]
    old = [(tensor.float() * (1 + 2**-8)).bfloat16() for tensor in new]
    sums = [checksum(tensor) for tensor in new]
    assert len({*sums, *map(checksum, old)}) == 100
    for i, tensor in enumerate(new):
        torn = tensor.clone().flatten()
        torn[: 50 * i + 3] = old[i].flatten()[: 50 * i + 3]
        cut = tensor.clone()
        cut[i % 40 :] = 0.0
        assert sums[i] not in (checksum(torn), checksum(cut), checksum(tensor[:-1]), checksum(torch.zeros_like(tensor)))
    assert len({checksum(torch.zeros(n)) for n in range(1, 100)}) == 99  # nothing but zeros, of different lengths
