"""What is run on a cluster: the plan, and each command of it on its machine."""

import codecs
import hashlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torchtune_ext
from torchtune_ext.cluster.placement import Layout, Machine, Request
from torchtune_ext.sampling.records import EngineConfig

LAST_LINES = 20  # lines of a server's output that are shown if it ends
APART = ("recipes", "configs", "kernels")  # these lie beside the package in a checkout, and in it once it is installed


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run."""

    recipe: str
    config: str  # as the user named it
    file: str  # the config's, if it is the user's own; "" for one of ours
    words: tuple[str, ...]  # settings, key=value
    engine: EngineConfig
    request: Request
    folder: str  # in which it is started, on each machine
    variables: Mapping[str, str]  # of the environment of trainer and servers
    key: str  # that the servers ask for
    patience_s: float  # seconds that the trainer has to end after a signal
    wait_s: float  # seconds to wait for GPUs that are in use
    waits_for_machines: bool  # whether it also waits for what the cluster does not have yet


@dataclass(eq=False, slots=True)
class Member:
    """A command of the run on a machine of the cluster."""

    title: str
    machine: Machine
    keeper: Any
    python_words: list[str] = field(default_factory=list)
    log: str = ""  # file on its machine that has what it prints
    status: int | None = None  # its exit status; None: it runs, or is lost
    lost: str = ""  # why nothing is known of it any more
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    begun: str = ""  # a line of its output that has no end yet
    announced: bool = False  # whether the user knows that it has ended
    decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    question: Any = None  # Ray's handle of an answer that is still to come
    answered_at: float = 0.0  # time.monotonic() of the last answer; 0: it was not started

    @property
    def runs(self) -> bool:
        return bool(self.answered_at) and self.status is None and not self.lost

    def end(self) -> str:
        """Returns how it ended."""
        if self.lost:
            return f"{self.title} is lost: {self.lost}"
        lines = [*self.tail, *filter(None, [self.begun])]
        text = "; the last that it said:\n" + "\n".join(f"    {line}" for line in lines) if lines else ""
        return f"{self.title} ended with status {self.status}{text}"


def host_title(member: Member) -> str:
    """Returns where a member is, and its log."""
    return f"{member.machine.address}, its log there: {member.log}"


def launch(bundles: Layout, number: int, meet: str) -> list[str]:
    """Returns the options of torchrun on the trainer's machine with this number, from 0.

    Args:
        meet: HOST:PORT on the first machine, where the ranks of several machines meet. It is given as the rendezvous,
            without which torchtune starts torchrun as for one machine.
    """
    if bundles.machines == 1:
        return ["--nproc_per_node", str(bundles.ranks)] if bundles.ranks > 1 else []
    options = ["--nnodes", str(bundles.machines), "--node_rank", str(number), "--nproc_per_node", str(bundles.ranks)]
    return [*options, "--rdzv_backend", "static", "--rdzv_endpoint", meet]


def version() -> str:
    """Returns the version of torchtune_ext on this machine, with a digest of its files: a run is of one version only."""
    digest = hashlib.sha256()
    for name in ("", *APART):
        (folder,) = import_module(".".join(filter(None, ["torchtune_ext", name]))).__path__
        for path in sorted(Path(folder).rglob("*")):
            inside = path.relative_to(folder)
            if path.is_file() and "__pycache__" not in inside.parts and (name or inside.parts[0] not in APART):
                digest.update(f"{name}/{inside}\0".encode() + path.read_bytes() + b"\0")
    return f"{torchtune_ext.__version__} ({digest.hexdigest()[:12]})"
