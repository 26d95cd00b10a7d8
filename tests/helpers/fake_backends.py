"""Fake engine backends: one that records its requests, and one with a process to kill."""

import asyncio
import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from typing import NamedTuple

import torch

from torchtune_ext.sampling.backend import BackendCrashed
from torchtune_ext.sampling.pool import Pool
from torchtune_ext.sampling.replica import ReplicaLost
from torchtune_ext.sampling.types import EngineConfig
from torchtune_ext.sampling.weight_buffer import WeightBuffers

# The engine replica checks its backend ten times per `probe_interval_s`: here every 5 ms.
CONFIG = EngineConfig(probe_interval_s=0.05, probe_deadline_s=1.0, rpc_deadline_s=5.0, start_deadline_s=5.0)


class Load(NamedTuple):
    """One load: the byte of each buffer's first tensor, later the byte of its second tensor, and the version."""

    first_tensor: list[int]
    second_tensor: list[int]
    version: int


class FakeBackend:
    """A fake backend that records its loads. It reads each buffer's two tensors with a pause between them."""

    vocab_size, cache_tokens, block_size, process_group = 512, 4096, 32, 0

    def __init__(self, model_dir="", config=None, log_path=None, temp_dir="", on_step=None):
        self.on_step = on_step
        self.requests, self.last_heartbeat, self.sleep_level = {}, time.monotonic(), 0
        self.stats_error, self.killed, self.num_stops = None, False, 0
        self.loads, self.loaded_checksums = [], {}
        self.load_started = threading.Event()
        self.load_allowed = threading.Event()
        self.load_allowed.set()
        # The error that every call of this engine raises.
        self.error = None

    @property
    def is_dead(self):
        return self.killed

    def describe_exit(self):
        return "the fake ended"

    def configure(self):
        pass

    def kill(self):
        self.killed = True

    def log_tail(self):
        return "the fake's log"

    async def launch(self):
        if self.error is not None:
            raise self.error
        if self.killed:
            raise BackendCrashed("killed")

    async def load(self, buffers, version):
        first = [self.read_tensor(buffer, 0) for buffer in buffers]
        self.load_started.set()
        while not self.load_allowed.is_set():
            await asyncio.sleep(0.001)
        if self.error is not None:
            raise self.error
        if self.killed:
            raise BackendCrashed("killed in a load")
        second = [self.read_tensor(buffer, 1) for buffer in buffers]
        for buffer in buffers:
            self.loaded_checksums |= buffer.checksums
        if buffers:
            self.loads.append(Load(first, second, version))
        self.sleep_level, self.loaded_version = 0, version
        return 0.1, 0.05

    @staticmethod
    def read_tensor(buffer, index):
        with open(buffer.address()["path"], "rb") as file:
            file.seek(buffer.manifest["offsets"][index])
            return file.read(1)[0]

    async def checksums(self):
        return [self.loaded_checksums]

    async def weight_version(self):
        return self.loaded_version

    async def sleep(self, level):
        if self.error is not None:
            raise self.error
        self.sleep_level = level

    async def ping(self, deadline_s):
        if self.error is not None:
            raise self.error
        self.last_heartbeat = time.monotonic()

    async def stop(self):
        self.killed = True
        self.num_stops += 1


class SleepingBackend(FakeBackend):
    """A fake backend with a sleeping process and requests that never complete. Its launch blocks the thread, as in vLLM,
    until `launch_allowed` is set or the process is killed."""

    instances: list = []
    launch_allowed = threading.Event()

    def __init__(self, *args):
        super().__init__(*args)
        self.launched, self.busy = threading.Event(), threading.Event()
        self.process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.process_group = self.process.pid
        self.instances.append(self)

    @property
    def is_dead(self):
        return self.process.poll() is not None

    async def launch(self):
        self.launched.set()
        while not self.launch_allowed.is_set():
            time.sleep(0.002)
            if self.is_dead:
                raise BackendCrashed("killed while it came up")

    async def generate(self, request):
        with request.track_in(self.requests):
            await asyncio.sleep(60)

    def kill(self):
        try:
            os.killpg(self.process_group, signal.SIGKILL)
        except ProcessLookupError:
            pass

    async def stop(self):
        self.kill()
        self.process.wait(5)
        # vLLM's client notices the exit after a short delay.
        await asyncio.sleep(0.01)
        for request in list(self.requests.values()):
            request.fail()


class ReplicaHarness:
    """An engine replica, its weight buffers, and all backends that it has started."""

    def __init__(self, config=CONFIG, version=0):
        self.backends = []
        self.prepare_backend = lambda backend: None
        self.buffers = WeightBuffers(config.rpc_deadline_s)
        self.pool = Pool(config, self.make_backend, self.buffers, version)
        (self.replica,) = self.pool.replicas

    def make_backend(self, replica):
        backend = FakeBackend()
        self.prepare_backend(backend)
        self.backends.append(backend)
        return backend

    async def start(self):
        await self.pool.create_backends()
        await self.replica.start()

    async def awake_backend(self):
        """Return the backend once the replica serves and is awake, as a request does."""
        while True:
            await self.pool.wait_for(lambda: self.replica.serves)
            with suppress(ReplicaLost):
                async with self.replica.attempt() as backend:
                    return backend

    def write(self, value, adapter=None):
        self.buffers.write(weights(value), value, adapter, self.replica.version)

    def write_failing(self, version):
        """Start a weight sync whose generator fails after its first tensor."""

        def broken():
            yield weights(version)[0]
            raise ZeroDivisionError

        try:
            self.buffers.write(broken(), version, None, self.replica.version)
        except ZeroDivisionError:
            return
        raise AssertionError("the copy did not break off")


def run_scenario(scenario, *args, **kwargs):
    """Run `scenario(harness)` with a started engine replica. All other arguments go to `ReplicaHarness`."""

    async def main():
        harness = ReplicaHarness(*args, **kwargs)
        await harness.start()
        try:
            await asyncio.wait_for(scenario(harness), 20)
        finally:
            await harness.replica.close()

    asyncio.run(main())


async def poll_until(condition):
    give_up_at = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < give_up_at, "did not happen in time"
        await asyncio.sleep(0.001)


def weights(value):
    """Return two tensors of four bytes, filled with this value."""
    return [(name, torch.full((4,), value, dtype=torch.uint8)) for name in ("a", "b")]
