"""Maps ranks to machines, selects a network interface, and checks that ranks share the run folder."""

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.output import print_text
from torchtune_ext.training.collectives import all_gather, call_on_main, rank

# Seconds within which a network file system must show a new file on other machines. NFS caches a
# folder's attributes for 30 s and more (acdirmin), but revalidates them when the folder is opened,
# as it is here.
VISIBILITY_TIMEOUT_S = 10.0
# Seconds after which rank 0, and each other rank, prints that it waits for the other ranks.
MAIN_NOTICE_S, OTHER_RANKS_NOTICE_S = 5.0, 60.0


@contextmanager
def rendezvous_progress(rank: int, world_size: int, deadline_s: float) -> Iterator[None]:
    """Prints a notice if the enclosed code waits long for the other ranks.

    Raises:
        UsageError: the environment variables of the rendezvous are missing or contradictory.
    """
    fix_single = "to train on one process, run `env -u WORLD_SIZE tune run ...`"
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise UsageError(
            f"WORLD_SIZE={world_size} in the environment without {missing[0]}. Fix: start {world_size} ranks with "
            f"tune run --nproc_per_node {world_size}; {fix_single}"
        )
    if rank >= world_size:
        raise UsageError(
            f"RANK={rank} in the environment: expected less than WORLD_SIZE={world_size}. Fix: {fix_single}"
        )
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    text = (
        f"ranks: this is rank {rank} of WORLD_SIZE={world_size} in the environment; it waits for the others at {where}, "
        f"up to {deadline_s:g} s; {fix_single}"
    )
    note = threading.Timer(MAIN_NOTICE_S if rank == 0 else OTHER_RANKS_NOTICE_S, print_text, [text])
    note.daemon = True
    # A job launcher may set these variables for a single process. torchrun does not.
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        note.start()
    try:
        yield
    finally:
        note.cancel()


def choose_interface() -> None:
    """Makes gloo listen on the loopback interface if all ranks are on one machine.

    It changes nothing if GLOO_SOCKET_IFNAME is set.
    """
    # By default gloo listens on the address of the host name, which other machines may reach.
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    first = os.environ.get("MASTER_ADDR", "localhost")
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"] or first in (
        "localhost",
        "127.0.0.1",
        "::1",
    )
    if is_one_machine and "lo" in [name for _, name in socket.if_nameindex()]:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def hosts_of_ranks() -> tuple[str, ...]:
    """The host name of every rank. A collective.

    If several torchruns have one host name, the name includes torchrun's group rank.
    """
    pairs = all_gather((socket.gethostname(), os.environ.get("GROUP_RANK", "")))
    shared = len(set(pairs)) > len({host for host, _ in pairs})
    return tuple(f"{host} (torchrun {group})" if shared else host for host, group in pairs)


def ranks_text(hosts: Sequence[str], ranks: Sequence[int]) -> str:
    """Formats ranks with their machines, for messages: "ranks 8 to 15 on b; rank 16 on c"."""
    texts = []
    for host in dict.fromkeys(hosts[r] for r in ranks):
        host_ranks = [r for r in ranks if hosts[r] == host]
        whole = len(host_ranks) > 2 and host_ranks == list(range(host_ranks[0], host_ranks[-1] + 1))
        numbers = f"{host_ranks[0]} to {host_ranks[-1]}" if whole else ", ".join(map(str, host_ranks))
        texts.append(f"{'ranks' if host_ranks[1:] else 'rank'} {numbers} on {host}")
    return "; ".join(texts)


def require_shared_folder(hosts: Sequence[str], output_dir: str | Path) -> None:
    """Checks that every rank sees the folder that rank 0 will write. A collective.

    Raises:
        UsageError: a rank does not see the folder, or rank 0 cannot write it. Raised on all ranks.
    """
    # Ranks of one machine see the same folders.
    if len(set(hosts)) == 1:
        return
    probe, resolved = call_on_main(lambda: _create_probe(Path(output_dir)))
    blind_ranks = [r for r, seen in enumerate(all_gather(_probe_is_visible(Path(probe)))) if not seen]
    if rank() == 0:
        Path(probe).unlink(missing_ok=True)
    if blind_ranks:
        raise UsageError(
            f"output_dir={output_dir}: {ranks_text(hosts, blind_ranks)} cannot see what {ranks_text(hosts, [0])} writes "
            f"there ({resolved}). Every rank writes its part of a checkpoint: name a folder that all machines share, "
            "under the same path (docs/how_to/multi_gpu.md)"
        )


def _create_probe(output_dir: Path) -> tuple[str, str]:
    """Creates a file in `output_dir`, or in its nearest existing parent.

    Returns:
        The file, and the resolved path of its folder on this machine.

    Raises:
        UsageError: the file cannot be created.
    """
    folder = output_dir
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    # If this process is killed here, the next run in the folder deletes all `.*.tmp` files.
    probe = folder / f".ranks_{secrets.token_hex(4)}.0.tmp"
    try:
        probe.touch()
    except OSError as error:
        raise UsageError(
            f"output_dir={output_dir} cannot be created or written: {error.strerror} ({folder}). Fix: set its permissions, or "
            "choose another output_dir"
        ) from error
    return str(probe), str(folder.resolve())


def _probe_is_visible(probe: Path) -> bool:
    """Whether this rank sees a file of rank 0 within `VISIBILITY_TIMEOUT_S` seconds."""
    deadline = time.monotonic() + VISIBILITY_TIMEOUT_S
    # Listing the folder opens it, so NFS revalidates its cache. A stat of the file may be stale.
    while not (probe.parent.is_dir() and probe.name in os.listdir(probe.parent)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True
