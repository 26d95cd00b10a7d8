"""What a process leaves behind that was killed."""

import os
import signal
from collections.abc import Callable
from pathlib import Path


def killed_while_it_has(make: Callable[[], tuple[object, Path]]) -> Path:
    """Returns the folder of a process that was killed by SIGKILL. `make` returns what owns the folder, and its path."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            _kept, path = make()
            os.write(writer, str(path).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader, "rb", buffering=0) as file:
        path = Path(os.fsdecode(file.read(4096)))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return path
