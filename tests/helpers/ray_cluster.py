"""A Ray cluster on this machine for tests: several raylets, each of which represents a machine.

The cluster runs in its own process, which ends all raylets when the tests end, even if they crash. So neither Ray's signal
handlers nor its changes of sys.path affect the test process.
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

from torchtune_ext.run.process_env import Prctl, prctl


class RayCluster:
    """A cluster whose head has no resources. Machines have the addresses 127.0.0.2 and following."""

    def __init__(self):
        # Not tmp_path: the names of Ray's sockets may have 107 characters.
        self.folder = tempfile.mkdtemp(prefix="ray-")
        # Ray writes the address of its latest cluster to RAY_TMPDIR, which must not overwrite a user's file.
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
        raise RuntimeError(f"the cluster process exited:\n{self._log.read()[-3000:]}")

    def add(self, resource: str, number: int = 1) -> int:
        """Add a machine with this amount of a resource, for instance "CPU". Return the process id of its raylet."""
        print(resource, number, file=self._process.stdin, flush=True)
        return int(self._answer())

    def lose(self, raylet: int) -> None:
        """Kill a machine, if it is still alive, and wait until the head detects it."""
        print("lose", raylet, file=self._process.stdin, flush=True)
        self._answer()

    def processes(self) -> list[psutil.Process]:
        """Return all live processes of the cluster, including actors and their children."""
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
    """Adopt the orphans of runs on the cluster, so that `processes` finds them."""
    prctl(Prctl.PR_SET_CHILD_SUBREAPER, 1)
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
