"""Finds out which ranks are on which machine, how they reach each other, and whether all see the folder of the run."""

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

# Seconds within which a network file system must show a new file on other machines. NFS keeps what it knows of a folder
# for 30 s and more (acdirmin), but asks anew when the folder is opened, as it is here.
VISIBILITY_TIMEOUT_S = 10.0
# Seconds of waiting after which rank 0, and each other rank, prints for whom it waits.
MAIN_NOTICE_S, OTHER_RANKS_NOTICE_S = 5.0, 60.0


@contextmanager
def rendezvous(rank: int, world_size: int, deadline_s: float) -> Iterator[None]:
    """Surrounds the code in which this process waits for the other ranks, and prints that it waits if this takes long.

    Raises ValueError if the variables of the environment do not say where the ranks meet.
    """
    alone = "`env -u WORLD_SIZE tune run ...` starts a single process"
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise UsageError(
            f"WORLD_SIZE={world_size} in the environment without {missing[0]}: start {world_size} ranks by tune run --nproc_per_node "
            f"{world_size}; {alone}"
        )
    if rank >= world_size:
        raise UsageError(f"RANK={rank} in the environment must be less than WORLD_SIZE={world_size}; {alone}")
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    text = (
        f"ranks: this is rank {rank} of WORLD_SIZE={world_size} in the environment; it waits for the others at {where}, up to "
        f"{deadline_s:g} s; {alone}"
    )
    note = threading.Timer(MAIN_NOTICE_S if rank == 0 else OTHER_RANKS_NOTICE_S, print_text, [text])
    note.daemon = True
    # A job launcher may leave such variables to a single process. torchrun does not.
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        note.start()
    try:
        yield
    finally:
        note.cancel()


def choose_interface() -> None:
    """Makes gloo listen on the loopback interface if all ranks are on one machine, unless GLOO_SOCKET_IFNAME is set."""
    # By default gloo listens on the address of the host's name, which other machines may reach.
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    first = os.environ.get("MASTER_ADDR", "localhost")
    one = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"] or first in ("localhost", "127.0.0.1", "::1")
    if one and "lo" in [name for _, name in socket.if_nameindex()]:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def hosts_of_ranks() -> tuple[str, ...]:
    """The host of every rank, with the number of its torchrun where hosts share a name. A collective."""
    pairs = all_gather((socket.gethostname(), os.environ.get("GROUP_RANK", "")))
    shared = len(set(pairs)) > len({host for host, _ in pairs})
    return tuple(f"{host} (torchrun {group})" if shared else host for host, group in pairs)


def ranks_text(hosts: Sequence[str], ranks: Sequence[int]) -> str:
    """Ranks with their machines, for messages: "ranks 8 to 15 on b; rank 16 on c"."""
    texts = []
    for host in dict.fromkeys(hosts[each] for each in ranks):
        mine = [each for each in ranks if hosts[each] == host]
        whole = len(mine) > 2 and mine == list(range(mine[0], mine[-1] + 1))
        numbers = f"{mine[0]} to {mine[-1]}" if whole else ", ".join(map(str, mine))
        texts.append(f"{'ranks' if mine[1:] else 'rank'} {numbers} on {host}")
    return "; ".join(texts)


def require_shared_folder(hosts: Sequence[str], output_dir: str | Path) -> None:
    """Raises ValueError on all ranks if one does not see the folder that rank 0 will write. A collective."""
    # Ranks of one machine see the same.
    if len(set(hosts)) == 1:
        return
    place, resolved = call_on_main(lambda: _create_probe(Path(output_dir)))
    lacking = [each for each, seen in enumerate(all_gather(_probe_is_visible(Path(place)))) if not seen]
    if rank() == 0:
        Path(place).unlink(missing_ok=True)
    if lacking:
        raise UsageError(
            f"output_dir={output_dir}: {ranks_text(hosts, lacking)} cannot see what {ranks_text(hosts, [0])} writes there ({resolved}). "
            "Every rank writes its part of a checkpoint: name a folder that all machines share, by the same path "
            "(docs/several_machines.md)"
        )


def _create_probe(output_dir: Path) -> tuple[str, str]:
    """Puts a file into `output_dir`, or where that would be made. Returns the file, and its folder on this machine."""
    place = output_dir
    while not place.exists() and place != place.parent:
        place = place.parent
    # If this process is killed here, the next start in the folder deletes files with such names.
    mark = place / f".ranks_{secrets.token_hex(4)}.0.tmp"
    try:
        mark.touch()
    except OSError as error:
        raise UsageError(
            f"output_dir={output_dir} cannot be made or written: {error.strerror} ({place}). Set its rights, or choose another "
            "output_dir"
        ) from error
    return str(mark), str(place.resolve())


def _probe_is_visible(mark: Path) -> bool:
    """Whether this rank sees a file of rank 0 within `SEEN_S` seconds."""
    until = time.monotonic() + VISIBILITY_TIMEOUT_S
    # To list the folder is to open it, which makes NFS ask anew. To ask for the file may give an old answer.
    while not (mark.parent.is_dir() and mark.name in os.listdir(mark.parent)):
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True
