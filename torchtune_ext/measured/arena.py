"""Memory that is shared with the process of a candidate, and where the arrays lie in it."""

import fcntl
import math
import mmap
import os
import struct
from dataclasses import dataclass

import numpy as np

from torchtune_ext.measured.kernel import Kernel, Size
from torchtune_ext.run.errors import Mistake

PAGE = mmap.PAGESIZE
ALIGNMENT = 64  # bytes; every array starts at an address that this divides
# NaNs with a payload that no computation produces: one is the content of outputs before a call, one lies around arrays.
POISON = np.frombuffer(struct.pack("<Q", 0x7FF8_0BAD_0BAD_0BAD))
CANARY = np.frombuffer(struct.pack("<Q", 0x7FF8_CA4A_4CA4_A4CA))
_F_SEAL_FUTURE_WRITE = 0x10  # <linux/fcntl.h>; not in the module fcntl


class Shared:
    """Memory that a child can map. `writable`: the child may write it."""

    def __init__(self, name: str, nbytes: int, writable: bool) -> None:
        self.file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.file, nbytes)
            self.memory = mmap.mmap(self.file, nbytes)
        except BaseException:
            self.close()
            raise
        # A file that shrinks would kill this process when it looks. Seals are for ever.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, seals | (0 if writable else _F_SEAL_FUTURE_WRITE))
        self.bytes = np.frombuffer(self.memory, np.uint8)

    def close(self) -> None:
        os.close(self.file)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array lies in the arena. Around its pages is memory that cannot be touched."""

    name: str
    shape: tuple[int, ...]
    is_output: bool
    first_page: int  # offset of its pages in bytes
    pages_bytes: int
    start: int  # offset of the array

    @property
    def nbytes(self) -> int:
        return 8 * math.prod(self.shape)


def pages(nbytes: int) -> int:
    """Returns `nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def arena_size(kernel: Kernel, largest: Size) -> int:
    """Returns how many bytes of address space arrays of the largest size need, with room to lie elsewhere."""
    need = sum(pages(8 * math.prod(shape)) + PAGE for shape in kernel.shapes(largest).values())
    return 2 * need + 64 * PAGE


def lay_out(kernel: Kernel, size: Size, arena_bytes: int, at_end: bool, rng: np.random.Generator) -> tuple[Place, ...]:
    """Puts the arrays at random pages, in random order, with pages between them that cannot be touched.

    at_end: an array ends where its last page ends (as far as its alignment allows), so that a step too far is seen;
    otherwise it starts where its first page starts, so that a step before it is seen.
    """
    shapes = kernel.shapes(size)
    nbytes = {p.name: 8 * math.prod(shapes[p.name]) for p in kernel.parameters}
    free = arena_bytes // PAGE - sum(pages(n) // PAGE + 1 for n in nbytes.values()) - 1
    if free < 0:
        raise Mistake(f"arrays of size {dict(size)} do not fit into an arena of {arena_bytes} bytes")
    cuts = np.sort(rng.integers(0, free + 1, len(nbytes)))  # the free pages are dealt out before, between and after
    places, used = {}, 1
    for skipped, index in zip(cuts, rng.permutation(len(nbytes)), strict=True):
        parameter = kernel.parameters[index]
        first = (used + int(skipped)) * PAGE
        whole = pages(nbytes[parameter.name])
        inside = (whole - nbytes[parameter.name]) // ALIGNMENT * ALIGNMENT if at_end else 0
        places[parameter.name] = Place(
            parameter.name, shapes[parameter.name], parameter.is_output, first, whole, first + inside
        )
        used += whole // PAGE + 1
    return tuple(places[parameter.name] for parameter in kernel.parameters)
