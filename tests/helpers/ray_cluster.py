"""A Ray cluster on this machine for tests: several raylets, each of which stands for a machine.

It lives in a process of its own, which ends all of them when the tests end, however they end. So neither Ray's signal handlers
nor its changes of sys.path come into the process of the tests.
"""

import os
import shutil
import subprocess
import sys
import tempfile

import psutil

from torchtune_ext.cluster.guard import adopt_orphans


class RayCluster:
    """A cluster with a head that carries no resource. Addresses are those of this machine."""

    def __init__(self):
        # Not tmp_path: the names of Ray's sockets may have 107 characters.
        self.folder = tempfile.mkdtemp(prefix="ray-")
        quiet = {"RAY_USAGE_STATS_ENABLED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, self.folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | quiet,
            text=True,
        )
        self.address = self._answer()

    def _answer(self) -> str:
        for line in self._process.stdout:
            if line.startswith("answer: "):
                return line.removeprefix("answer: ").strip()
        raise RuntimeError("the process of the cluster has ended")

    def add(self, resource: str, count: int = 1) -> int:
        """Adds a machine that carries so much of the resource, "CPU" for instance. Returns the process id of its raylet."""
        print(resource, count, file=self._process.stdin, flush=True)
        return int(self._answer())

    def processes(self) -> list[psutil.Process]:
        """All processes that the cluster has started and that are alive, actors and what these started included."""
        return [each for each in self._all() if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]

    def _all(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def keep(folder: str) -> None:
    """Is the parent of what a run on the cluster leaves without one, as init is elsewhere, so that `processes` finds it."""
    adopt_orphans()
    cluster = subprocess.Popen([sys.executable, __file__, folder, "cluster"])
    while os.wait()[0] != cluster.pid:
        pass


def serve(folder: str) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "temp_dir": folder}
    )
    print("answer:", cluster.address, flush=True)
    for line in sys.stdin:
        resource, count = line.split()
        has = {"num_cpus": int(count)} if resource == "CPU" else {"num_cpus": 0, "resources": {resource: int(count)}}
        node = cluster.add_node(**has, temp_dir=folder)
        print("answer:", node.all_processes["raylet"][0].process.pid, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    (serve if "cluster" in sys.argv[2:] else keep)(sys.argv[1])
