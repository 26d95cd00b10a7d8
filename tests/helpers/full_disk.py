"""A simulated full disk for this process."""

import resource
from contextlib import contextmanager


@contextmanager
def full_disk(size):
    """Inside, no file of this process may grow beyond `size`; the kernel then writes what fits, like a full disk.

    The limit ends with the block, since pytest may write its report to a file.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
