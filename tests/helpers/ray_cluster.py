"""A Ray cluster on this machine for tests: several raylets, each of which stands for a machine.

It lives in a process of its own, which ends all of them when the tests end, however they end. So neither Ray's signal handlers
nor its changes of sys.path come into the process of the tests.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from itertools import count

import psutil

from torchtune_ext.cluster.actor import adopt_orphans


class RayCluster:
    """A cluster with a head that carries no resource. Machines have addresses of their own, 127.0.0.2 and the following."""

    def __init__(self):
        # Not tmp_path: the names of Ray's sockets may have 107 characters.
        self.folder = tempfile.mkdtemp(prefix="ray-")
        # Ray notes the address of its latest cluster in RAY_TMPDIR: not in the place of a user's, which may not even be there.
        own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": self.folder}
        os.mkdir(os.path.join(self.folder, "ray"))
        self._log = open(os.path.join(self.folder, "cluster.log"), "w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, __file__, self.folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | own,
            text=True,
        )
        self.address = self._answer()

    def _answer(self) -> str:
        for line in self._process.stdout:
            if line.startswith("answer: "):
                return line.removeprefix("answer: ").strip()
        self._log.seek(0)
        raise RuntimeError(f"the process of the cluster has ended:\n{self._log.read()[-3000:]}")

    def add(self, resource: str, number: int = 1) -> int:
        """Adds a machine that carries so much of the resource, "CPU" for instance. Returns the process id of its raylet."""
        print(resource, number, file=self._process.stdin, flush=True)
        return int(self._answer())

    def lose(self, raylet: int) -> None:
        """Kills a machine, if it is not dead yet, and waits until the head has noticed."""
        print("lose", raylet, file=self._process.stdin, flush=True)
        self._answer()

    def processes(self) -> list[psutil.Process]:
        """All processes that the cluster has started and that are alive, actors and what these started included."""
        alive = []
        for each in self._all():
            with suppress(psutil.NoSuchProcess):
                if each.status() != psutil.STATUS_ZOMBIE:
                    alive.append(each)
        return alive

    def _all(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def keep(folder: str) -> None:
    """Is the parent of what a run on the cluster leaves without one, as init is elsewhere, so that `processes` finds it."""
    adopt_orphans()
    cluster = subprocess.Popen([sys.executable, __file__, folder, "cluster"])
    while os.wait()[0] != cluster.pid:
        pass


def serve(folder: str) -> None:
    from ray.cluster_utils import Cluster

    def begin() -> Cluster:
        head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": folder}
        return Cluster(initialize_head=True, head_node_args=head)

    try:
        cluster = begin()
    except Exception:
        traceback.print_exc()
        for each in psutil.Process().children(recursive=True):
            each.kill()
        cluster = begin()
    print("answer:", cluster.address, flush=True)
    raylets, addresses = {}, (f"127.0.0.{number}" for number in count(2))
    for line in sys.stdin:
        word, number = line.split()
        if word == "lose":
            node = raylets.pop(int(number))
            cluster.remove_node(node, allow_graceful=False)
            while node.node_id in cluster.global_state.total_resources_per_node():
                time.sleep(0.1)
            print("answer:", "lost", flush=True)
            continue
        has = {"num_cpus": int(number)} if word == "CPU" else {"num_cpus": 0, "resources": {word: int(number)}}
        node = cluster.add_node(**has, temp_dir=folder, node_ip_address=next(addresses))
        pid = node.all_processes["raylet"][0].process.pid
        raylets[pid] = node
        print("answer:", pid, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    (serve if "cluster" in sys.argv[2:] else keep)(sys.argv[1])
