"""The process of vLLM's client: `AsyncLLM`, with all that a request and a token cost outside of the engine's own process.

That is most of what sampling asks of Python (0.7 ms for a request of eleven tokens), and in the trainer's interpreter it
would take the lock from training, which then took twice as long (benchmarks/README.md). So the client lives here.
`remote_core.RemoteCore` is the trainer's end; what it asks for is done by a `LocalCore`.

    python -P -m torchtune_ext.sampling.client_process SOCKET PARENT

The first frame holds (environment of the engine's process, log, arguments of LocalCore). The engine's process is started
at once, so that both import vLLM at the same time; the answer is its process id. After that a message is (number,
method, arguments), and its answer (number, "value", value) or (number, "lost" | "refused", message). Three more come
unasked: (0, "step", Step), (0, "dead", how the engine ended), and (0, "beat", None).
"""

import asyncio
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from torchtune_ext.run.parent import die_with_parent
from torchtune_ext.sampling.calls import Call, CoreLost
from torchtune_ext.sampling.core_process import LOG_LEVEL, CoreProcess, Frames, pack, receive

LOG_FORMAT = "(client) %(asctime)s %(levelname)s %(name)s: %(message)s"
LOOK_S = 0.1  # seconds between two looks at the engine's process
BEAT_S = 1.0  # seconds between two messages which say that the client itself works


class Client:
    """Does what the trainer asks, and tells it what happens."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self._frames: Frames | None = None
        self._tasks: dict[int, asyncio.Task] = {}  # what is under way, by its number
        self._gone = asyncio.Event()  # the trainer's end is closed

    async def serve(self, end: socket.socket) -> None:
        """Works until the trainer closes its end."""
        self._frames = frames = Frames(self._receive, self._gone.set)
        self.core.on_step = lambda step: frames.say((0, "step", step))
        await asyncio.get_running_loop().create_connection(lambda: frames, sock=end)
        beat_at = 0.0
        while not self._gone.is_set() and not self.core.dead:
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT_S
                frames.say((0, "beat", None))
            try:
                await asyncio.wait_for(self._gone.wait(), LOOK_S)
            except TimeoutError:
                pass
        if not self._gone.is_set():
            frames.say((0, "dead", self.core.ending()))
            await self._gone.wait()  # requests that fail over it are answered; the trainer ends this process

    def _receive(self, messages: list[Any]) -> None:
        for number, method, arguments in messages:
            if method == "cancel":
                task = self._tasks.get(arguments[0])
                if task is not None:
                    task.cancel()
                continue
            task = self._tasks[number] = asyncio.ensure_future(self._do(number, method, arguments))
            task.add_done_callback(lambda _, number=number: self._tasks.pop(number))

    async def _do(self, number: int, method: str, arguments: tuple) -> None:
        try:
            answer = ("value", await getattr(self, method)(*arguments))
        except ValueError as error:
            answer = ("refused", str(error))
        except CoreLost as error:
            answer = ("lost", str(error))
        except asyncio.CancelledError:
            return  # the trainer does not wait for it any more
        except BaseException as error:
            # Nobody sees this process: the trainer has to hear of it, and the log keeps the traceback.
            logging.getLogger(__name__).exception("%s failed", method)
            answer = ("lost", f"the engine's client failed in {method}: {error!r}")
        self._frames.say((number, *answer))

    async def configure(self) -> None:
        self.core.configure()

    async def launch(self) -> tuple[int, int, int]:
        await self.core.launch()
        return self.core.cache_tokens, self.core.block, self.core.vocabulary

    async def generate(self, *call: Any) -> Any:
        return await self.core.generate(Call(*call))

    async def end(self, name: str, reason: str) -> None:
        call = self.core.calls.get(name)
        if call is not None:  # it may have ended meanwhile
            await self.core.end(call, reason)

    async def ping(self, deadline_s: float) -> None:
        await self.core.ping(deadline_s)

    async def load(self, buffers: list[Any], version: int) -> tuple[float, float]:
        return await self.core.load(buffers, version)

    async def checksums(self) -> list[dict[str, int | None]]:
        return await self.core.checksums()

    async def weight_version(self) -> int:
        return await self.core.weight_version()

    async def sleep(self, level: int) -> None:
        await self.core.sleep(level)

    async def wake(self) -> None:
        await self.core.wake()


def main(descriptor: int, parent: int) -> None:
    """Lives as the client of one engine. Args: descriptor: of the socket; parent: process id of the trainer."""
    die_with_parent(parent)
    logging.basicConfig(level=LOG_LEVEL, format=LOG_FORMAT)
    end = socket.socket(fileno=descriptor)
    ((environ, log, arguments),) = receive(end)
    process = CoreProcess(environ, Path(log))
    end.sendall(pack([process.pid]))
    # These imports take seconds, in which the engine's process imports the same.
    from torchtune_ext.sampling.core import LocalCore

    core = LocalCore(*arguments, on_step=lambda step: None, process=process)
    asyncio.run(Client(core).serve(end))
    # What is left of vLLM's threads and of the engine ends with this process.
    core.kill()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
