"""The machine that a run is planned for: GPUs of some size, or the main memory of a machine that computes on its CPU."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torchtune_ext.policy.memory import GIB
from torchtune_ext.run.errors import Mistake

# What CUDA reports of a card, over what it is sold as: 39.5 of 40, 23.7 of 24 and 15.8 of 16 GiB are found in error messages of
# users of an A100, a 4090 and a V100. Other cards of these sizes differ by less than 1% of it.
SOLD = 0.985
ASKED = re.compile(r"(?:(\d+) ?(?:x|nodes? of) ?)?(\d+) ?x ?(\d+(?:\.\d+)?) ?(?:GB)?", re.IGNORECASE)
SERVE = re.compile(r" that serve$", re.IGNORECASE)
MOST_GPUS = 72  # of one node; more are a size that stands in the wrong place, as in 4x80x2
ON_CPU = re.compile(r"CPU,? (\d+(?:\.\d+)?) ?(?:GB)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a run may take: one machine, or several that are alike.

    Args:
        gpus: how many GPUs each node has; 0: the run computes on the CPU.
        gpu_bytes: memory of each of them, as CUDA reports it.
        host_bytes: main memory of a node that is free; None: not known.
        name: how the user calls it, "4 x 80 GB" for instance.
        here: whether it is this machine, so that its disk and main memory count, too.
        nodes: how many there are.
        serving: GPUs elsewhere, on which vLLM's servers sample; None: what samples is on `gpus`, too.
    """

    gpus: int
    gpu_bytes: int
    host_bytes: int | None
    name: str
    here: bool
    nodes: int = 1
    serving: "Machine | None" = None

    @property
    def all_gpus(self) -> int:
        """GPUs of all nodes, without those that serve elsewhere."""
        return self.nodes * self.gpus

    def __str__(self) -> str:
        if self.gpus:
            return f"{self.name} ({self.gpu_bytes / GIB:.1f} GiB each)"
        return self.name if self.host_bytes is None else f"{self.name} ({self.host_bytes / GIB:.1f} GiB)"


def asked_machine(text: Any, key: str = "dry_run") -> Machine:
    """Returns the machine that a user asks for.

    "4x80" has 4 GPUs that are sold as having 80 GB; "2x8x80", or "2 nodes of 8 x 80 GB", are two with 8 each; "8x80+4x80", or
    "8 x 80 GB + 4 x 80 GB that serve", has 4 more elsewhere, for vLLM's servers alone; "CPU 8" has none and 8 GB.

    Raises:
        ValueError: the text names no machine.
    """
    words, plus, others = str(text).strip().partition("+")
    if plus:
        machine, serving = asked_machine(words, key), asked_machine(SERVE.sub("", others), key)
        if machine.gpus and serving.gpus and serving.serving is None:
            return replace(machine, name=f"{machine.name} + {serving.name} that serve", serving=serving)
    elif found := ASKED.fullmatch(words):
        nodes, gpus, size = int(found[1] or 1), int(found[2]), float(found[3])
        if nodes > 0 and 0 < gpus <= MOST_GPUS and size > 0:
            name = f"{f'{nodes} nodes of ' if nodes > 1 else ''}{gpus} x {size:g} GB"
            return Machine(gpus, int(SOLD * size * GIB), None, name, here=False, nodes=nodes)
    if found := ON_CPU.fullmatch(str(text).strip()):
        size = float(found[1])
        return Machine(0, 0, int(size * GIB), f"a CPU with {size:g} GB", here=False)
    raise Mistake(
        f"{key}={text!r} is neither True nor a machine: 4x80 asks for 4 GPUs of 80 GB in all, for trainer and engine together; "
        "2x8x80 for two nodes of 8, and 8x80+4x80 for 4 more elsewhere, for vLLM's servers (engine.address)"
    )


def this_machine(device: str) -> Machine:
    """Returns this machine: its visible GPUs, or its main memory where there are none or `device` is "cpu"."""
    host = main_memory()
    if device != "cpu" and torch.cuda.is_available():
        sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
        name = f"the {len(sizes)} GPUs here" if len(sizes) > 1 else "the GPU here"
        return Machine(len(sizes), min(sizes), host, name, here=True)
    return Machine(0, 0, host, "the main memory that is free here", here=True)


def main_memory(root: Path = Path("/")) -> int | None:
    """Returns how many bytes of main memory this process may still take: what Linux calls available, and no more than the limit
    of any of its cgroups, of version 1 or 2. None where neither can be read.

    Args:
        root: where /proc and /sys are; another folder for tests.
    """
    found = []
    try:
        lines = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines() if ":" in line)
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    for file in _limit_files(root):
        try:
            found.append(int(file.read_text()))
        except (OSError, ValueError):
            # There is no such file, or it says "max".
            continue
    return min(found, default=None)


def _limit_files(root: Path) -> list[Path]:
    """Returns where limits of main memory may stand, of the cgroups of this process and of all above them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be that of the host, which is not there: the container sees its own cgroup at the top.
        folder = top / path.lstrip("/")
        for place in (folder, *folder.parents):
            found.append(place / name)
            if place == top:
                break
    return found
