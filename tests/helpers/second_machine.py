"""A simulated second machine: namespaces for network, processes, mounts and shared memory, and a virtual link to them."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2"}  # and their packages
# The machines share nothing in /dev/shm; loopback is up, as on any machine.
INIT = "mount -t tmpfs none /dev/shm && ip link set lo up && exec sleep infinity"


def why_not() -> str | None:
    """Return the reason why namespaces are not available, or None."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {TOOLS[missing[0]]}: no {missing[0]} here"
    trial = subprocess.run(
        ["unshare", "--net", "--pid", "--ipc", "--mount-proc", "--fork", "true"], capture_output=True, text=True
    )
    return f"namespaces are not allowed here: {trial.stderr.strip()}" if trial.returncode else None


class SecondMachine:
    """Processes started by `inside` share neither memory nor process ids with this machine, and reach it only over a link."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--pid", "--ipc", "--mount-proc", "--fork", "--kill-child", "bash", "-c", INIT]
        )
        number = os.getpid() % 10000
        self.link, self._end = f"tte{number}a", f"tte{number}b"
        net = f"10.231.{number // 64}.{4 * (number % 64)}".split(".")
        self.here, self.there = (".".join([*net[:3], str(int(net[3]) + i)]) for i in (1, 2))
        try:
            self._init = self._first_child()
            self._ip("link", "add", self.link, "type", "veth", "peer", "name", self._end, "netns", str(self._init))
            self._ip("addr", "add", f"{self.here}/30", "dev", self.link)
            self._ip("link", "set", self.link, "up")
            self._there("ip", "addr", "add", f"{self.there}/30", "dev", self._end)
            self._there("ip", "link", "set", self._end, "up")
            # As with a router between them: an unreachable host causes no error reply.
            words = self._there("ip", "-o", "link", "show", "dev", self._end).split()
            far = words[words.index("link/ether") + 1]
            self._ip("neigh", "replace", self.there, "lladdr", far, "dev", self.link, "nud", "permanent")
        except BaseException:
            self.close()
            raise

    def _first_child(self) -> int:
        """Return process 1 of the namespaces, once it sleeps."""
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        give_up_at = time.monotonic() + 10
        while time.monotonic() < give_up_at:
            pids = children.read_text().split()
            if pids and Path(f"/proc/{pids[0]}/comm").read_text().strip() == "sleep":
                return int(pids[0])
            time.sleep(0.02)
        raise AssertionError("the namespaces did not come up")

    @property
    def inside(self) -> list[str]:
        """Return the command prefix that runs a command on the second machine."""
        return ["nsenter", "--target", str(self._init), "--net", "--pid", "--mount", "--ipc", "--"]

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def _there(self, *words: str) -> str:
        return subprocess.run([*self.inside, *words], check=True, capture_output=True, text=True).stdout

    def sent(self) -> int:
        """Return the bytes that this machine has sent over the link."""
        return int(Path(f"/sys/class/net/{self.link}/statistics/tx_bytes").read_text())

    def slow_down(self, megabits: float) -> None:
        """Limit the bandwidth towards the other machine, in Mbit/s."""
        limit = ["tbf", "rate", f"{int(1000 * megabits)}kbit", "burst", "16kb", "latency", "2s"]
        subprocess.run(["tc", "qdisc", "replace", "dev", self.link, "root", *limit], check=True, capture_output=True)

    def speed_up(self) -> None:
        """Remove the bandwidth limit."""
        subprocess.run(["tc", "qdisc", "del", "dev", self.link, "root"], check=True, capture_output=True)

    def cut(self) -> None:
        """Cut the link at the far end: packets are dropped without an error."""
        self._there("ip", "link", "set", self._end, "down")

    def restore(self) -> None:
        """Restore the link."""
        self._there("ip", "link", "set", self._end, "up")

    def close(self) -> None:
        """Kill all processes of the second machine, which also removes the link."""
        self._holder.send_signal(signal.SIGKILL)
        self._holder.wait(10)
